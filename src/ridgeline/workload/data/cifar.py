"""CIFAR-10 from four array files: 50,000 images to train on and 10,000 to test with, 32x32, 10 classes.

    cifar10_{train,test}_x.npy uint8 [N,32,32,3], _y.npy [N] ──> uint8 [N,3,32,32], int64 [N]
    augment: crop of 32 after 4 pixels of zeros on each side, flip      prepare: (x / 255 - mean) / std

Mean and deviation are those the published ResNet-20 and ResNet-56 weights were trained with. Ref: Krizhevsky 2009.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import DataError
from . import Data, Split
from .augment import Normalise, RandomCropFlip
from .find import LABEL_DTYPES, check_labels, find_file, read_array

CLASSES = 10
PREPARE = Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
GET = "download CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html and save its images as uint8 [N,32,32,3] with numpy.save"


def load(*, folder: str | Path | None = None) -> Data:
    """CIFAR-10 from `folder`, or from the folders of RIDGELINE_DATA."""
    parts = {}
    for part in ("train", "test"):
        images, labels = (_file(f"cifar10_{part}_{letter}.npy", folder) for letter in "xy")
        parts[part] = _read(images, labels)
    return Data("cifar10", "image", CLASSES, parts["train"], parts["test"], PREPARE, RandomCropFlip(padding=4))


def _file(name: str, folder: str | Path | None) -> Path:
    if folder is None:
        return find_file(name, f"cifar10/{name}", get=GET)
    path = Path(folder) / name
    if not path.is_file():
        raise DataError(f"{name} was not found", why=f"it is not in {folder}", do=GET)
    return path


def _read(images: Path, labels: Path) -> Split:
    pixels = read_array(images, dtypes=("uint8",), shape=(None, 32, 32, 3))
    numbers = read_array(labels, dtypes=LABEL_DTYPES, shape=(None,))
    check_labels(labels, numbers, len(pixels), CLASSES)
    inputs: Tensor = torch.empty(len(pixels), 3, 32, 32, dtype=torch.uint8)
    inputs.numpy()[:] = pixels.transpose(0, 3, 1, 2)  # one copy, straight from the map
    return Split(inputs, torch.from_numpy(numbers.astype("int64")))
