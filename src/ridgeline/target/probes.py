"""The single ops that calibration times: small, of every family, and none taken from a named model.

    probe_cases(device) ──> ProbeCase(family, dtype, build) ──build()──> module, input
      sizes are odd ones out (48, 160, 384 channels; 10 to 104 pixels), so that no named model's layer is among them

A case's module is called as eager PyTorch calls it, allocation included. Modules with weights come as several copies used
in turn, so that weights arrive from memory as they do in a network larger than the caches, while data stays warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Build = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One op to time."""

    name: str
    family: str
    dtype: str
    build: Build


class Function(nn.Module):
    """A functional op as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


# (batch, channels in, channels out, pixels, kernel, stride)
CONVOLUTIONS = (
    (1, 28, 100, 80, 1, 1), (1, 100, 28, 80, 1, 1), (1, 40, 240, 48, 1, 1), (1, 240, 40, 48, 1, 1), (1, 80, 480, 20, 1, 1),
    (1, 480, 80, 20, 1, 1), (1, 176, 960, 10, 1, 1), (1, 1056, 176, 10, 1, 1), (1, 400, 1200, 10, 1, 1),
    (1, 48, 112, 40, 1, 2), (1, 20, 40, 104, 1, 1), (1, 48, 48, 48, 3, 1), (1, 112, 112, 24, 3, 1), (1, 224, 224, 13, 3, 1),
    (1, 448, 448, 8, 3, 1), (1, 48, 112, 48, 3, 2), (1, 112, 224, 24, 3, 2), (1, 224, 448, 13, 3, 2), (1, 80, 80, 80, 3, 1),
    (1, 3, 48, 200, 7, 2), (1, 3, 24, 200, 3, 2), (1, 3, 640, 192, 16, 16), (8, 28, 100, 80, 1, 1), (8, 100, 28, 80, 1, 1),
    (8, 40, 240, 48, 1, 1), (8, 80, 480, 20, 1, 1), (8, 480, 80, 20, 1, 1), (8, 176, 960, 10, 1, 1),
    (8, 400, 1200, 10, 1, 1), (8, 20, 40, 104, 1, 1), (8, 48, 48, 48, 3, 1), (8, 112, 112, 24, 3, 1),
    (8, 224, 224, 13, 3, 1), (8, 448, 448, 8, 3, 1), (8, 48, 112, 48, 3, 2), (8, 112, 224, 24, 3, 2),
    (8, 224, 448, 13, 3, 2), (8, 3, 48, 200, 7, 2), (8, 3, 24, 200, 3, 2), (8, 3, 640, 192, 16, 16), (8, 18, 108, 104, 1, 1),
)  # fmt: skip
# (batch, channels, pixels, stride)
DEPTHWISE = (
    (1, 40, 104, 1), (1, 88, 104, 2), (1, 136, 52, 1), (1, 136, 52, 2), (1, 240, 26, 1), (1, 480, 13, 1), (1, 560, 13, 2),
    (1, 880, 8, 1), (8, 40, 104, 1), (8, 88, 104, 2), (8, 136, 52, 1), (8, 240, 26, 1), (8, 480, 13, 1), (8, 880, 8, 1),
    (8, 108, 104, 1), (8, 108, 104, 2),
)  # fmt: skip
# (rows, in, out)
LINEARS = (
    (1, 480, 1100), (1, 1200, 1100), (1, 3000, 3000), (8, 480, 1100), (8, 1200, 1100), (100, 640, 640), (100, 640, 2560),
    (100, 2560, 640), (180, 640, 1920), (180, 896, 896), (180, 896, 3584), (180, 3584, 896), (900, 640, 640),
    (900, 640, 2560), (900, 2560, 640), (900, 896, 2688), (1700, 640, 640), (1700, 896, 3584), (1700, 3584, 896),
)  # fmt: skip
# (batch, heads, queries, keys, width)
ATTENTIONS = (
    (1, 10, 100, 100, 64),
    (1, 10, 180, 180, 64),
    (1, 10, 320, 320, 64),
    (8, 10, 100, 100, 64),
    (8, 10, 180, 180, 64),
    (1, 16, 1, 500, 128),
)
# (elements, pixels a side of the image that holds them)
ELEMENTS = ((3_000, 10), (12_000, 10), (50_000, 20), (200_000, 20), (800_000, 40), (3_200_000, 80), (12_800_000, 80))


def channels_last(build: Build) -> Build:
    """The same probe with images and kernels stored as NHWC."""

    def converted() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        module, inputs = build()
        return module.to(memory_format=torch.channels_last), tuple(t.contiguous(memory_format=torch.channels_last) for t in inputs)  # type: ignore[call-overload]

    return converted


def _vector_functions() -> Iterator[tuple[str, str, int, Callable[..., torch.Tensor]]]:
    """(family, name, number of inputs, function) of the ops that work element by element or row by row."""
    yield "pointwise", "add", 2, torch.add
    yield "pointwise", "relu", 1, torch.relu
    yield "pointwise_heavy", "gelu", 1, F.gelu
    yield "softmax", "softmax", 1, lambda x: torch.softmax(x, -1)
    yield "layer_norm", "layer_norm", 1, lambda x: F.layer_norm(x, x.shape[-1:])
    yield "reduction", "mean", 1, lambda x: x.mean(-1)
    yield "copy", "transpose", 1, lambda x: x.t().contiguous()


def probe_cases(device: str, dtypes: tuple[str, ...]) -> list[ProbeCase]:
    """Every probe of a calibration, in order."""
    cases: list[ProbeCase] = []
    for position, dtype in enumerate(dtypes):
        thin = 3 if position and device == "cpu" else 1  # on a CPU further types take every third size
        cases += list(_matrix_cases(device, dtype, thin))
        cases += list(_vector_cases(device, dtype, thin))
        if device == "cuda":
            cases += list(_large_cases(device, dtype))
    return cases


def quick_cases(cases: list[ProbeCase]) -> list[ProbeCase]:
    """A tenth of the probes, two of every family at least, float32 alone."""
    chosen = []
    for family in dict.fromkeys(case.family for case in cases):
        own = [case for case in cases if case.family == family and case.dtype == "float32"]
        chosen += own[:: max(min(len(own) // 2, 10), 1)]
    return chosen


@dataclass(frozen=True, slots=True)
class Maker:
    """Builds probes of one device and dtype."""

    device: str
    dtype: str

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=getattr(torch, self.dtype))

    def module(self, kind: type[nn.Module], *args: int, **more: Any) -> nn.Module:
        return kind(*args, **more, device=self.device, dtype=getattr(torch, self.dtype)).eval()

    def convolution(self, n: int, c: int, k: int, s: int, r: int, stride: int, groups: int = 1) -> Build:
        padding = r // 2 if stride < r else 0
        return lambda: (self.module(nn.Conv2d, c, k, r, stride, padding, groups=groups, bias=False), (self.random(n, c, s, s),))

    def linear(self, rows: int, wide: int, out: int) -> Build:
        return lambda: (self.module(nn.Linear, wide, out), (self.random(rows, wide),))

    def attention(self, b: int, h: int, q: int, k: int, w: int) -> Build:
        return lambda: (Function(F.scaled_dot_product_attention), tuple(self.random(b, h, length, w) for length in (q, k, k)))

    def vector(self, function: Callable[..., torch.Tensor], count: int, elements: int) -> Build:
        shape = max(elements // 500, 1), 500
        return lambda: (Function(function), tuple(self.random(*shape) for _ in range(count)))

    def batch_norm(self, channels: int, side: int) -> Build:
        return lambda: (self.module(nn.BatchNorm2d, channels), (self.random(1, channels, side, side),))

    def pool(self, channels: int, side: int) -> Build:
        return lambda: (nn.MaxPool2d(3, 2, 1), (self.random(1, channels, side, side),))

    def embedding(self, rows: int, table: int = 20_000) -> Build:
        return lambda: (self.module(nn.Embedding, table, 500), (torch.randint(0, table, (rows,), device=self.device),))


def _matrix_cases(device: str, dtype: str, thin: int) -> Iterator[ProbeCase]:
    make = Maker(device, dtype)
    for shape in CONVOLUTIONS[::thin]:
        yield ProbeCase(f"conv {shape}", "conv", dtype, make.convolution(*shape))
    for n, c, s, stride in DEPTHWISE[::thin]:
        yield ProbeCase(f"depthwise {(n, c, s, stride)}", "conv_depthwise", dtype, make.convolution(n, c, c, s, 3, stride, c))
    for shape in CONVOLUTIONS[:: 3 * thin]:
        yield ProbeCase(f"nhwc conv {shape}", "conv_nhwc", dtype, channels_last(make.convolution(*shape)))
    for n, c, s, stride in DEPTHWISE[:: 3 * thin]:
        build = channels_last(make.convolution(n, c, c, s, 3, stride, c))
        yield ProbeCase(f"nhwc depthwise {(n, c, s, stride)}", "conv_depthwise_nhwc", dtype, build)
    for rows in LINEARS[::thin]:
        yield ProbeCase(f"linear {rows}", "matmul", dtype, make.linear(*rows))
    for heads in ATTENTIONS:
        yield ProbeCase(f"attention {heads}", "attention", dtype, make.attention(*heads))


def _vector_cases(device: str, dtype: str, thin: int) -> Iterator[ProbeCase]:
    make = Maker(device, dtype)
    for elements, side in ELEMENTS[::thin]:
        for family, name, count, function in _vector_functions():
            yield ProbeCase(f"{name} {elements}", family, dtype, make.vector(function, count, elements))
        channels = elements // (side * side)
        yield ProbeCase(f"batch_norm {elements}", "batch_norm", dtype, make.batch_norm(channels, side))
        yield ProbeCase(f"max_pool {elements}", "pool", dtype, make.pool(channels, side))
        yield ProbeCase(f"embedding {elements}", "embedding", dtype, make.embedding(max(elements // 500, 1)))


def _large_cases(device: str, dtype: str) -> Iterator[ProbeCase]:
    """Sizes that fill a GPU."""
    make = Maker(device, dtype)
    for n, *shape in (c for c in CONVOLUTIONS if c[0] == 8):
        yield ProbeCase(f"conv {(8 * n, *shape)}", "conv", dtype, make.convolution(8 * n, *shape))
        yield ProbeCase(f"nhwc conv {(8 * n, *shape)}", "conv_nhwc", dtype, channels_last(make.convolution(8 * n, *shape)))
    for n, c, s, stride in (d for d in DEPTHWISE if d[0] == 8):
        yield ProbeCase(f"depthwise {(8 * n, c, s, stride)}", "conv_depthwise", dtype, make.convolution(8 * n, c, c, s, 3, stride, c))
    for rows, wide, out in (
        (7000, 640, 640),
        (7000, 896, 3584),
        (7000, 3584, 896),
        (7000, 5000, 5000),
        (16, 5000, 14000),
        (1, 5000, 14000),
    ):
        yield ProbeCase(f"linear {(rows, wide, out)}", "matmul", dtype, make.linear(rows, wide, out))
    for heads in ((32, 10, 180, 180, 64), (64, 10, 100, 100, 64), (4, 16, 2000, 2000, 128), (16, 16, 1, 2000, 128)):
        yield ProbeCase(f"attention {heads}", "attention", dtype, make.attention(*heads))
    for elements, side in ((51_200_000, 80), (102_400_000, 80)):
        for family, name, count, function in _vector_functions():
            yield ProbeCase(f"{name} {elements}", family, dtype, make.vector(function, count, elements))
        yield ProbeCase(f"batch_norm {elements}", "batch_norm", dtype, make.batch_norm(elements // (side * side), side))
        yield ProbeCase(f"max_pool {elements}", "pool", dtype, make.pool(elements // (side * side), side))
