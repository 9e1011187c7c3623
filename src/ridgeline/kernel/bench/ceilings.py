"""What the device reaches at best, measured in the same run as the rows: the roof a kernel is held against.

    copy  1 GiB to 1 GiB          bytes read and written a second
    read  1 GiB of float32 summed, by torch or by ours, whichever is faster
    flops matmul 8192 (bfloat16), 4096 (float32 with torch's settings as they are), on a rested GPU        [FLOP/s]

On the CPU everything is 1/16 of that size or less: there the numbers only try the command out.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..case import CASES
from .timing import RestedTimer, gpu_seconds, on

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating-point operations a second."""

    copy_bps: float
    read_bps: float
    flops: dict[str, float]
    """By dtype; one that is missing is as fast as bfloat16."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def limit(self, moved: int, flops: int, dtype: str, *, writes: bool) -> tuple[float, str]:
        """(least time [ms], what sets it: copy, read or compute) of a row."""
        name, bandwidth = ("copy", self.copy_bps) if writes else ("read", self.read_bps)
        memory_s, compute_s = moved / bandwidth, flops / self.flops.get(dtype, self.flops["bfloat16"])
        return (compute_s * 1e3, "compute") if compute_s > memory_s else (memory_s * 1e3, name)


def measure_ceilings(device: str) -> Ceilings:
    """A second or two on a GPU."""
    with torch.no_grad(), on(device):
        copy_bps, read_bps = _bandwidths(device)
        cuda = device.startswith("cuda")
        sizes = {"bfloat16": 8192, "float32": 4096} if cuda else {"bfloat16": 256, "float32": 256}
        return Ceilings(copy_bps, read_bps, {name: _matmul(size, getattr(torch, name), device) for name, size in sizes.items()})


def _bandwidths(device: str) -> tuple[float, float]:
    count = (GIB if device.startswith("cuda") else GIB // 64) // 4
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    size = 4 * count
    copy_bps = 2 * size / gpu_seconds(lambda _: target.copy_(source), 1, device)
    reads = [gpu_seconds(lambda _: source.sum(), 1, device)]
    ours = CASES.get("sum_all")
    if ours is not None:
        with suppress(Exception):  # its own row says what is wrong with it
            reads.append(gpu_seconds(lambda _: ours.ours(source), 1, device))
    return copy_bps, size / min(reads)


def _matmul(size: int, dtype: torch.dtype, device: str) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / gpu_seconds(lambda _: a @ b, 1, device, 5, RestedTimer)
