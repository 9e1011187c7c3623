"""Named data sets: whole in memory, split, with what a model and a scorer need to know of them.

    load_data("digits" | "cifar10" | "wikitext2" | folder) ──> Data(train, test, prepare, augment)
      images: Split.inputs uint8 [N,C,H,W], targets int64 [N]      tokens: inputs int64 [N,T], targets int64 [N,T] (shifted by one)

    batch of inputs (on any device) ──data.augment (training only)──> ──data.prepare──> what the model takes

Data is found under RIDGELINE_DATA, a path list; digits comes with scikit-learn. Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checks import expect
from ...core.errors import DataError, unknown_name

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a data set; row i of `inputs` belongs to row i of `targets`."""

    inputs: Tensor
    targets: Tensor
    text_bytes: int | None = None  # of the text behind the targets, for perplexity per byte

    def __len__(self) -> int:
        return len(self.targets)


def unchanged(inputs: Tensor) -> Tensor:
    """For data a model takes as it is."""
    return inputs


@dataclass(frozen=True, slots=True)
class Data:
    """A data set ready to train on and to score with."""

    name: str
    kind: str  # image or tokens
    classes: int  # labels, or the vocabulary
    train: Split
    test: Split
    prepare: Callable[[Tensor], Tensor] = unchanged  # e.g. uint8 images to normalised float32, on the batch's device
    augment: Callable[[Tensor, Generator], Tensor] | None = None  # e.g. random crop and flip; the generator lives on the CPU


DATA: dict[str, str] = {
    "digits": ".digits:load",
    "cifar10": ".cifar:load",
    "wikitext2": ".text:load_wikitext2",
}
"""Name → ".module:function" in this package, called with load_data's options."""


def data_names() -> list[str]:
    """Every named data set."""
    return list(DATA)


def load_data(name: str | Path, **options: Any) -> Data:
    """A named data set, or a folder (see folder.py); options are the data set's own, e.g. tokenizer= and context= for text."""
    expect("data", name, str, Path, do=f"give one of {', '.join(DATA)}, or a folder")
    name = str(name)
    if name in DATA:
        home = DATA[name]
    elif Path(name).is_dir():
        home, options = ".folder:load", {"folder": Path(name), **options}
    elif "/" in name or "\\" in name:
        raise DataError(f"no folder {name}", why="it does not exist", do=f"give a folder, or one of {', '.join(DATA)}")
    else:
        raise unknown_name("data set", name, DATA, see="docs/train.md")
    module, _, function = home.partition(":")
    loaded: Data = getattr(importlib.import_module(module, __package__), function)(**options)
    return loaded
