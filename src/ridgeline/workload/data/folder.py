"""Data of your own, from a folder.

    folder/train_x.npy, train_y.npy, test_x.npy, test_y.npy     images uint8 [N,C,H,W], labels [N] from 0
    folder/train.txt, test.txt                                  text, as bytes or through a tokenizer (see text.py)

Images are prepared as (x / 255 - mean) / std, mean and deviation of each channel over the training images. Array files are
mapped and checked, never unpickled. With `augment=True` images are shifted by up to an eighth of their side and mirrored.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...core.errors import DataError, OptionError
from . import Data, Split
from .augment import Normalise, RandomCropFlip
from .find import LABEL_DTYPES, check_labels, read_array
from .text import text_data

ARRAYS = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy")
TEXTS = ("train.txt", "test.txt")
MOST_CLASSES = 2**20


def load(folder: Path, *, augment: bool | None = None, tokenizer: str | Path | None = None, context: int | None = None) -> Data:
    """What the folder holds; `augment` is for images, `tokenizer` and `context` for text."""
    if any((folder / name).is_file() for name in ARRAYS):
        _refuse("text", tokenizer=tokenizer, context=context)
        return _images(folder, bool(augment))
    if any((folder / name).is_file() for name in TEXTS):
        _refuse("images", augment=augment)
        train, test = (_present(folder, name) for name in TEXTS)
        return text_data(folder.resolve().name, train, test, tokenizer=tokenizer or "bytes", context=512 if context is None else context)
    raise DataError(f"no data in {folder}", why=f"it holds neither {', '.join(ARRAYS)} nor {', '.join(TEXTS)}", do="name the files so")


def _refuse(what: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name}={value!r}", why=f"it is an option of {what}, and the folder holds other data", do="leave it out")


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise DataError(f"{name} is not in {folder}", why="a data set has a part to train on and one to test with", do=f"add {name}")
    return folder / name


def _images(folder: Path, augment: bool) -> Data:
    train_x, train_y, test_x, test_y = (_present(folder, name) for name in ARRAYS)
    pixels = read_array(train_x, dtypes=("uint8",), shape=(None, None, None, None))
    labels = read_array(train_y, dtypes=LABEL_DTYPES, shape=(None,))
    if pixels.shape[1] > 4 >= pixels.shape[3]:
        raise DataError(f"{train_x} holds {list(pixels.shape)}", why="channels come second: [N,C,H,W]", do="save x.transpose(0, 3, 1, 2)")
    classes = int(labels.max()) + 1
    check_labels(train_y, labels, len(pixels), min(max(classes, 1), MOST_CLASSES))
    test_pixels = read_array(test_x, dtypes=("uint8",), shape=(None, *pixels.shape[1:]))
    test_labels = read_array(test_y, dtypes=LABEL_DTYPES, shape=(None,))
    check_labels(test_y, test_labels, len(test_pixels), classes)
    parts = [
        Split(torch.from_numpy(x.copy()), torch.from_numpy(y.astype("int64"))) for x, y in ((pixels, labels), (test_pixels, test_labels))
    ]
    side = min(pixels.shape[2:])
    moved = RandomCropFlip(padding=max(1, side // 8)) if augment else None
    return Data(folder.resolve().name, "image", classes, parts[0], parts[1], _statistics(parts[0]), moved)


def _statistics(split: Split) -> Normalise:
    """Mean and deviation of each channel, from how often each of the 256 levels occurs: exact, without a float copy."""
    means, deviations = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(split.inputs.size(1)):
        share = torch.bincount(split.inputs[:, channel].flatten(), minlength=256).double()
        share /= share.sum()
        mean = float(share @ levels)
        means.append(mean)
        deviations.append(max(float((share @ (levels - mean) ** 2).sqrt()), 1 / 255))  # a constant channel stays finite
    return Normalise(tuple(means), tuple(deviations))
