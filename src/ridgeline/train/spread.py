"""Values against the range of float16, counted exactly.

    tensors ──Tally(scale).add──> counts [int64], sums of squares [float64], exponent bins ──read──> Spread
      |x|·scale:  0 … 2⁻²⁴ underflow … 2⁻¹⁴ subnormal … 65504 … overflow
      exponents: how many elements lie in [2^e, 2^(e+1))
      error = ‖x − x₁₆‖₂, x₁₆ = float16(x · scale) / scale; the same for bfloat16, which needs no scale

Values from 2⁻²⁵ to 2⁻²⁴ round up to 2⁻²⁴ and those from 65504 to 65520 down to 65504: `flushed` counts what the cast really makes
zero. Everything stays on the tensors' device until it is read. Ref: IEEE 754-2008 (binary16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST, NORMAL, LARGEST = 2.0**-24, 2.0**-14, 65504.0  # float16: least subnormal, least normal, greatest
LOWEST, HIGHEST = -149, 127  # exponents float32 can have
CHUNK = {"cpu": 2**18, "cuda": 2**22}  # elements at a time: on a CPU float64 copies stay in the cache (31 ns an element, not 147)


@dataclass(frozen=True, slots=True)
class Spread:
    """One layer's values against float16, summed over all batches."""

    layer: str
    kind: str
    scale: float
    elements: int
    zeros: int
    nonfinite: int  # already in float32
    underflow: int  # 0 < |x|·scale < 2⁻²⁴
    subnormal: int  # 2⁻²⁴ <= |x|·scale < 2⁻¹⁴
    overflow: int  # |x|·scale > 65504
    flushed: int  # not zero, and zero as float16
    smallest: float  # of |x|, zeros left out; inf where there is none
    largest: float
    norm: float  # ‖x‖₂
    error: float  # ‖x − x₁₆‖₂; inf where something overflows
    bfloat16_error: float
    exponents: Mapping[int, int]  # e → elements in [2^e, 2^(e+1))

    @property
    def nonzero(self) -> int:
        return self.elements - self.zeros - self.nonfinite

    def share(self, count: int) -> float:
        """`count` of the non-zero elements."""
        return count / self.nonzero if self.nonzero else 0.0

    @property
    def relative_error(self) -> float:
        return self.error / self.norm if self.norm else 0.0

    @property
    def bfloat16_relative_error(self) -> float:
        return self.bfloat16_error / self.norm if self.norm else 0.0

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self) | {"exponents": {str(e): n for e, n in self.exponents.items()}}
        shares = {f"{name}_share": self.share(getattr(self, name)) for name in ("underflow", "subnormal", "overflow", "flushed")}
        errors = {"relative_error": self.relative_error, "bfloat16_relative_error": self.bfloat16_relative_error}
        return {key: _json(value) for key, value in (plain | shares | errors).items()}


class Tally:
    """Exact counts (int64) and sums (float64), on the device until they are read."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self.scale, self.elements = scale, 0
        self.counts = torch.zeros(6, dtype=torch.int64, device=device)  # zeros, nonfinite, underflow, subnormal, overflow, flushed
        self.squares = torch.zeros(3, dtype=torch.float64, device=device)  # of x, of x − float16, of x − bfloat16
        self.ends = torch.tensor([math.inf, 0.0], dtype=torch.float64, device=device)
        self.bins = torch.zeros(HIGHEST - LOWEST + 2, dtype=torch.int64, device=device)  # the last: zeros and what is not finite

    def add(self, values: Tensor) -> None:
        self.elements += values.numel()
        for part in values.reshape(-1).split(CHUNK.get(values.device.type, 2**18)):
            self._add(part)

    def _add(self, values: Tensor) -> None:
        wide = values.double()
        finite, zero = wide.isfinite(), wide == 0
        there = finite & ~zero
        size = torch.where(finite, wide, 0.0).abs()
        scaled = size * self.scale  # exact in float64 for a float32 value and a scale of up to 29 bits
        half = scaled.float().half()
        limits = (scaled < SMALLEST, (scaled >= SMALLEST) & (scaled < NORMAL), scaled > LARGEST, half == 0)
        self.counts += torch.stack([zero.sum(), (~finite).sum(), *((limit & there).sum() for limit in limits)])
        errors = (size, size - half.double() / self.scale, size - size.to(torch.bfloat16).double())
        self.squares += torch.stack([error.square().sum() for error in errors])
        smallest, largest = torch.where(there, size, math.inf).amin(), size.amax()
        self.ends = torch.stack([torch.minimum(self.ends[0], smallest), torch.maximum(self.ends[1], largest)])
        exponent = (torch.frexp(size).exponent - 1).clamp(LOWEST, HIGHEST)  # frexp's mantissa lies in [0.5, 1)
        places = torch.where(there, exponent - LOWEST, len(self.bins) - 1)
        self.bins += torch.bincount(places, minlength=len(self.bins))

    def read(self, layer: str, kind: str) -> Spread:
        zeros, nonfinite, underflow, subnormal, overflow, flushed = self.counts.tolist()
        norm, error, bfloat16_error = self.squares.sqrt().tolist()
        smallest, largest = self.ends.tolist()
        exponents = {place + LOWEST: count for place, count in enumerate(self.bins[:-1].tolist()) if count}
        return Spread(
            layer, kind, self.scale, self.elements, zeros, nonfinite, underflow, subnormal, overflow, flushed,
            smallest, largest, norm, error, bfloat16_error, exponents,
        )  # fmt: skip


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
