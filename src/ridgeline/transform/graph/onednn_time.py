"""Is one oneDNN call faster than torch's own calls for this layer, on this processor? Timed once for each shape, in this process.

    Layer(op, sizes, …) ──tensors of these sizes──> plain calls, and one call with a packed weight ──> Timing(plain_s, fused_s)

For most layers it is; torch's own code wins on some small ones (a convolution of a few thousand multiplications takes torch 7 µs and
oneDNN 30 µs), and its linears go to MKL, which is faster than oneDNN on some processors and slower on others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from . import onednn

_timed: dict[tuple[object, ...], Timing] = {}
ROUNDS = 7
MARGIN = 1.5
LONG_S = 0.05
"""A layer that takes longer is timed twice only."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one layer: by torch's own calls, and by one oneDNN call."""

    plain_s: float
    fused_s: float

    @property
    def pays(self) -> bool:
        """Not clearly slower: a layer keeps its neighbours' layout too, which a timing of its own does not show."""
        return self.fused_s <= MARGIN * self.plain_s

    def __str__(self) -> str:
        return f"oneDNN {self.fused_s * 1e6:.0f} µs, torch {self.plain_s * 1e6:.0f} µs"


@dataclass(frozen=True, slots=True)
class Layer:
    """What decides a layer's time: its operands' sizes and its settings (stride, padding, dilation, groups; none for a linear)."""

    sizes: tuple[int, ...]  # of x
    weight: tuple[int, ...]
    dtype: torch.dtype
    settings: tuple[object, ...] = ()
    bias: bool = True
    other: bool = False
    activation: str = "none"
    scalars: tuple[float, ...] = ()


def timing(layer: Layer) -> Timing:
    """Both times of a layer, least of a few interleaved runs."""
    key = (layer, torch.get_num_threads())
    if key not in _timed:
        first = _time(layer)
        _timed[key] = first if first.pays else _on_one_thread(layer)
    return _timed[key]


def _on_one_thread(layer: Layer) -> Timing:
    """The same on one thread: on a busy machine a call that waits for its second thread takes milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time(layer)
    finally:
        torch.set_num_threads(threads)


def _time(layer: Layer) -> Timing:
    convolution = bool(layer.settings)
    formula: Any = onednn.conv_formula if convolution else onednn.linear_formula
    fused: Any = onednn.conv if convolution else onednn.linear
    tail = (*layer.settings, layer.activation, list(layer.scalars))
    least = [float("inf"), float("inf")]
    with torch.no_grad():
        x, weight = (torch.full(sizes, 0.01, dtype=layer.dtype) for sizes in (layer.sizes, layer.weight))
        bias = torch.ones(layer.weight[0], dtype=layer.dtype) if layer.bias else None
        other = torch.ones_like(formula(x, weight, bias, None, *tail, False)) if layer.other else None
        near, beside = (_channels_last(one) if convolution else one for one in (x, other))
        for turn in range(ROUNDS):
            start = time.perf_counter()
            formula(x, weight, bias, other, *tail, False)
            middle = time.perf_counter()
            fused(near, weight, bias, beside, *tail, True)
            end = time.perf_counter()
            if turn:
                least = [min(least[0], middle - start), min(least[1], end - middle)]
            if turn > 1 and end - start > 2 * LONG_S:
                break
    return Timing(*least)


def _channels_last(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous(memory_format=torch.channels_last)
