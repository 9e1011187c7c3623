"""What range of a layer's inputs to keep: watched in one pass, in bounded memory.

    batches ──add──> Histogram(counts of floor(x / width), width = 2^k) ──range_of(method)──> (low, high) ──grid_of──> (scale, zero)

    minmax      all of it                       percentile   all but a share at each end
    mse         least Σ count · (x − x')²       entropy      least KL(P ‖ Q) of the clipped against the quantised (Migacz 2017)

Bins lie at whole multiples of a power of two and two become one when the range outgrows them, so the result is the same whatever the
order of the batches and however they are cut. Zeros are counted apart: every grid holds them exactly. `mse` and `entropy` shrink both
ends by one factor; the candidates are compared as one matrix [candidates, bins].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import TransformError

Method = Literal["minmax", "percentile", "mse", "entropy"]
BINS = 4096  # of which at least half are in use once the range has grown
CANDIDATES = 100  # ranges that mse and entropy try: 1 %, 2 %, ... of the whole
LEAST_EXPONENT = -140  # 2^-140: float32 has nothing finer that survives a division


@dataclass(slots=True)
class Histogram:
    """Counts of the values seen. Bin i holds [(start + i) · 2^exponent, (start + i + 1) · 2^exponent)."""

    counts: Tensor | None = None  # int64 [BINS]
    start: int = 0
    exponent: int = LEAST_EXPONENT
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, x: Tensor, name: str = "the input") -> None:
        """Count a batch; NaN and infinity are refused."""
        x = x.detach().reshape(-1)
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if x.numel() == 0:
            return
        low, high = (float(end) for end in torch.aminmax(x))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise TransformError(f"calibrate {name}: it reads NaN or infinity", why="no range covers them", do="check the calibration data")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._grow()
        index = torch.floor(x.double() * 2.0**-self.exponent).long() - self.start  # [N]
        assert self.counts is not None
        counted = torch.bincount(index, minlength=BINS)
        zeros = int((x == 0).sum())
        if zeros:
            counted[-self.start] -= zeros
            self.zeros += zeros
        self.counts += counted.to(self.counts.device)

    def _grow(self) -> None:
        """Wider bins until they span everything seen, zero included."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        exponent = self.exponent
        if low < high:
            exponent = max(exponent, math.frexp((high - low) / BINS)[1] - 1)
        while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) >= BINS:
            exponent += 1
        start = math.floor(low / 2.0**exponent)
        if self.counts is None:
            self.counts = torch.zeros(BINS, dtype=torch.int64)
        elif exponent != self.exponent or start != self.start:
            used = self.counts.nonzero().squeeze(1)
            moved = ((used + self.start) >> (exponent - self.exponent)) - start
            self.counts = torch.zeros_like(self.counts).index_add_(0, moved, self.counts[used])
        self.exponent, self.start = exponent, start

    def centres(self) -> Tensor:
        """Middle of each bin, float64 [BINS]."""
        return (torch.arange(BINS, dtype=torch.float64) + self.start + 0.5) * 2.0**self.exponent


def range_of(histogram: Histogram, method: Method = "mse", *, percentile: float = 99.99, levels: int = 256) -> tuple[float, float]:
    """(low, high) to keep, low <= 0 <= high."""
    if histogram.counts is None:
        raise TransformError("no calibration data", why="the layer was never called", do="give data or inputs that reach every layer")
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if method == "minmax" or low == high or int(histogram.counts.sum()) == 0:
        return low, high
    if method == "percentile":
        return _percentile(histogram, percentile, low, high)
    errors = (_squared_errors if method == "mse" else _divergences)(histogram, low, high, levels)
    factor = _factors()[int(errors.argmin())].item()
    return low * factor, high * factor


def _factors() -> Tensor:
    return torch.arange(CANDIDATES, 0, -1, dtype=torch.float64) / CANDIDATES  # the widest first: ties keep the most


def _percentile(histogram: Histogram, percentile: float, low: float, high: float) -> tuple[float, float]:
    """Ends that leave (100 − percentile) % of all values beyond each; the far edge of the bin that holds it."""
    assert histogram.counts is not None
    counts = histogram.counts.double()
    counts[-histogram.start] += histogram.zeros
    below = counts.cumsum(0)
    beyond = below[-1] * (1 - percentile / 100)
    first = int((below > beyond).double().argmax())
    last = int((below >= below[-1] - beyond).double().argmax())
    width = 2.0**histogram.exponent
    return max(low, min((histogram.start + first) * width, 0.0)), min(high, max((histogram.start + last + 1) * width, 0.0))


def _squared_errors(histogram: Histogram, low: float, high: float, levels: int) -> Tensor:
    """Σ count · (x − x')² of each candidate, x at the middle of its bin; float64 [CANDIDATES]."""
    assert histogram.counts is not None
    used = histogram.counts.nonzero().squeeze(1)
    x, weight = histogram.centres()[used], histogram.counts[used].double()  # [U]
    factor = _factors()[:, None]
    step = (high - low) * factor / (levels - 1)  # [C,1]
    zero = torch.round(-low * factor / step)
    code = torch.clamp(torch.round(x / step) + zero, 0, levels - 1)  # [C,U]
    return ((code - zero) * step - x).square() @ weight


def _divergences(histogram: Histogram, low: float, high: float, levels: int) -> Tensor:
    """KL(P ‖ Q) of each candidate: P clipped into the range, Q its quantised form spread evenly over the bins P fills."""
    assert histogram.counts is not None
    used = histogram.counts.nonzero().squeeze(1)
    x, weight = histogram.centres()[used], histogram.counts[used].double()  # [U]
    factor = _factors()[:, None]
    step = (high - low) * factor / (levels - 1)
    zero = torch.round(-low * factor / step)
    code = torch.round(x / step) + zero  # [C,U]
    inside = (code >= 0) & (code <= levels - 1)
    at = code.clamp(0, levels - 1).long()
    # what was clipped lies, in P, on the outermost bin that is kept at its end
    first, last = inside.double().argmax(1, keepdim=True), len(x) - 1 - inside.flip(1).double().argmax(1, keepdim=True)
    p = torch.where(inside, weight, 0.0)
    p = p.scatter_add(1, first, torch.where(code < 0, weight, 0.0).sum(1, keepdim=True))
    p = p.scatter_add(1, last, torch.where(code > levels - 1, weight, 0.0).sum(1, keepdim=True))
    filled = torch.zeros(len(factor), levels, dtype=torch.float64).scatter_add_(1, at, inside.double())  # [C,L]
    mass = torch.zeros_like(filled).scatter_add_(1, at, torch.where(inside, weight, 0.0))
    q = torch.where(inside, (mass / filled.clamp_min(1)).gather(1, at), 0.0)
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True).clamp_min(1e-300)
    terms = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - q.clamp_min(1e-300).log()), 0.0)
    return torch.where(inside.any(1), terms.sum(1), math.inf)


def grid_of(low: float, high: float, levels: int = 256) -> tuple[float, int]:
    """(scale as a float32 value, zero) of the affine grid over low..high: x' = (code − zero) · scale, code 0 .. levels − 1, 0 exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(torch.tensor((high - low) / (levels - 1), dtype=torch.float64).float())
    scale = max(scale, torch.finfo(torch.float32).tiny) if high > low else 1.0
    return scale, min(max(round(-low / scale), 0), levels - 1)
