"""The training split in two parts: one trains the weights, the other decides the architecture. The test split is not touched.

data.train ──permutation of the seed──> first (1 - share) of the rows: weights        the rest: architecture
feed(…) ──> batches of one part, by train/feed: order from (seed, epoch), augmentation from (seed, step)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.errors import DataError, OptionError
from ...train.feed import Batch, Mode, batches, choose_mode
from ...train.seeds import epoch_order, mix
from ...workload.data import Data, Split

CUT, WEIGHTS, ARCHITECTURE, BUILD = 101, 102, 103, 104  # streams of random numbers


def place_of(device: torch.device | str) -> torch.device:
    """With its number, so that tensors on it compare equal."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def passes_in(precision: str | None, device: torch.device) -> str:
    """The precision of forward and backward passes: as told, else bfloat16 on CUDA and float32 elsewhere."""
    chosen = precision or ("bfloat16" if device.type == "cuda" else "float32")
    if chosen not in ("float32", "bfloat16"):
        raise OptionError(f"precision = {chosen!r}", why="a search runs in float32 or bfloat16", do="choose one of them")
    return chosen


def cut(data: Data, share: float, seed: int, device: torch.device) -> tuple[Data, Data]:
    """(for weights, for the architecture): both splits of each Data are that part, on the device where it fits there."""
    rows = len(data.train)
    count = round(rows * share)
    if not 1 <= count < rows:
        raise DataError(f"{rows} training rows cut at {share}", why="both parts need rows", do="give more data or another share")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(mix(seed, CUT)))
    parts = []
    for index in (order[:-count], order[-count:]):
        here = index.sort().values
        split = Split(data.train.inputs[here], data.train.targets[here])
        if device.type != "cpu" and choose_mode(split, device) == "resident":
            split = Split(split.inputs.to(device), split.targets.to(device))
        parts.append(replace(data, train=split, test=split))
    return parts[0], parts[1]


def feed(data: Data, *, batch: int, steps: int, start_step: int, seed: int, device: torch.device, augment: bool = True) -> Iterator[Batch]:
    """Batches `start_step` to `steps` - 1 of a part."""
    split = data.train
    mode: Mode = "resident" if split.inputs.device.type != "cpu" else "auto"
    return batches(
        split,
        lambda epoch: epoch_order(len(split), seed, epoch),
        batch=batch,
        steps=steps,
        start_step=start_step,
        device=device,
        mode=mode,
        augment=data.augment if augment else None,
        prepare=data.prepare,
        seed=seed,
    )
