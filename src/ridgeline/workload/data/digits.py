"""The digits of scikit-learn: 1,797 images of 8x8, 17 levels of grey, 10 classes.

    load_digits ──> uint8 [1797,1,8,8] (0..16) ──split, a fifth of each class──> train 1,438 / test 359

The images are part of the scikit-learn package: nothing is fetched. The same rows are in `test` on every machine. Ref: Alpaydin
and Kaynak 1998, UCI optical recognition of handwritten digits (test part).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import MissingExtraError, OptionError
from . import Data, Split
from .augment import Normalise

CLASSES = 10
# Of all pixels, on the scale 0..1.
PREPARE = Normalise(mean=(0.3053,), std=(0.3760,), top=16.0)


def load(*, test_share: float = 0.2, seed: int = 0) -> Data:
    """The digits, split the same way each time for one seed."""
    if not 0.0 < test_share < 1.0:
        raise OptionError(f"test_share {test_share} for digits", why="it is a share of the images", do="give a number between 0 and 1")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("no data set digits", why="scikit-learn is not installed", do="pip install 'ridgeline[train]'") from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.uint8).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).to(torch.int64)
    train, test = split_rows(targets, test_share, seed)
    return Data("digits", "image", CLASSES, Split(images[train], targets[train]), Split(images[test], targets[test]), PREPARE)


def split_rows(targets: Tensor, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of the two parts, in their order in the set; each class gives the same share of its rows, drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique().tolist():
        rows = (targets == label).nonzero().flatten()
        count = min(max(round(test_share * len(rows)), 1), len(rows) - 1)  # both parts hold every class
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
