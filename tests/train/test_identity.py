"""What tells two runs apart: data beyond the first bytes, functions by code and options, the same text in every process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import TrainError
from ridgeline.train import identity
from ridgeline.train.augment import Augmentation
from ridgeline.train.fit import fit
from ridgeline.train.identity import fingerprint, rest_fingerprint, told
from ridgeline.workload.data import Data, Split
from tests.support import ROOT


def scaled(outputs: Tensor, targets: Tensor, by: float = 1.0) -> Tensor:
    return by * nn.functional.cross_entropy(outputs, targets)


def closed(by: float) -> Any:
    return lambda outputs, targets: by * nn.functional.cross_entropy(outputs, targets)


def halves(images: Tensor) -> Tensor:
    return images.float() / 128


def bytes_(images: Tensor) -> Tensor:
    return images.float() / 255


def net(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    model[1].bias.requires_grad_(bias)
    return model


def images(**options: Any) -> Data:
    made = torch.Generator().manual_seed(0)
    split = Split(torch.randint(0, 256, (32, 3, 4, 4), generator=made).byte(), torch.randint(0, 3, (32,), generator=made))
    return Data("images", "image", 3, split, split, **{"prepare": bytes_, **options})


def sgd(rate: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def run(folder: Path, *, data: Data | None = None, model: nn.Module | None = None, **options: Any) -> None:
    fit(model or net(), data or images(), steps=2, batch=16, progress=False, checkpoint=folder, **options)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"data": images(augment=Augmentation(shift=1))}, {"data": images(augment=Augmentation(shift=2))}, "functions.augment"),
        ({}, {"data": images(augment=Augmentation(shift=1))}, "functions.augment"),
        ({}, {"data": images(prepare=halves)}, "functions.prepare"),
        ({"loss": functools.partial(scaled, by=1.0)}, {"loss": functools.partial(scaled, by=2.0)}, "functions.loss"),
        ({"loss": closed(1.0)}, {"loss": closed(2.0)}, "functions.loss"),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "functions.loss"),
        ({"optimiser": sgd(0.1)}, {"optimiser": sgd(0.2)}, "optimiser_groups"),
        ({}, {"model": net(bias=False)}, "trained.model.1.bias was True, is 'absent'"),
        ({"model": net(bias=False)}, {}, "trained.model.1.bias was 'absent', is True"),
    ],
)
def test_what_decides_the_weights_must_agree(before: dict[str, Any], after: dict[str, Any], says: str, tmp_path: Path) -> None:
    run(tmp_path, **before)
    run(tmp_path, **before)
    with pytest.raises(TrainError) as caught:
        run(tmp_path, **after)
    assert says in str(caught.value)


def test_every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "FIRST_BYTES", 64)
    monkeypatch.setattr(identity, "CHUNK_BYTES", 16)
    given = torch.arange(50, dtype=torch.float32)
    for place in (0, 15, 16, 30, 49):
        other = given.clone()
        other[place] += 1
        seen = fingerprint(other) != fingerprint(given), rest_fingerprint(other) != rest_fingerprint(given)
        assert seen == (place < 16, place >= 16)
    assert rest_fingerprint(given[:16]) == 0


def test_told_is_the_same_in_every_process() -> None:
    """Sets, addresses and hashes of text differ from process to process."""
    line = "from tests.train.test_identity import *; print(told([closed(1.5), scaled, colours, Augmentation(shift=2), nn.GELU()]))"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    texts = {
        subprocess.run(
            [sys.executable, "-c", line], env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(texts) == 1 and "1.5" in texts.pop()


def colours(name: str) -> bool:
    return name in {"red", "green", "blue", "yellow"}


def test_told_of_long_and_cyclic_things_is_short() -> None:
    class Node:
        def __init__(self) -> None:
            self.next = self

    assert len(told(Node())) < 500 and told(list(range(1000))) == "list of 1000"
