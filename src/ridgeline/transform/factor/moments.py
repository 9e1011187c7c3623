"""Second moments of what each layer meets, for activation-aware factors, and the positions it runs at, for FLOPs.

    inputs ──model──> hook on each layer: X [rows, n] (patches of a convolution) ──> XᵀX summed ──> / rows ──> [groups, n, n]

Sums are kept in float64; each product is taken in float32 at least, without TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import TransformError
from .layers import Factorable, shape_of


def patches(layer: Factorable, x: Tensor) -> Tensor:
    """What the layer multiplies its weight with: [groups, rows, n]."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    columns = functional.unfold(x, layer.kernel_size, layer.dilation, 0, layer.stride)  # [B, in·kh·kw, L]
    return columns.reshape(len(x), layer.groups, -1, columns.shape[2]).permute(1, 0, 3, 2).flatten(1, 2)


def second_moments(run: Callable[[], None], layers: Mapping[str, Factorable]) -> dict[str, Tensor]:
    """XᵀX / rows of each layer over the passes `run` makes."""
    sums: dict[str, Tensor] = {}
    rows = dict.fromkeys(layers, 0)

    def hook(name: str, layer: Factorable) -> Callable[[Any, Any], None]:
        def note(_: Any, inputs: tuple[Any, ...]) -> None:
            with torch.autocast(inputs[0].device.type, enabled=False):
                x = patches(layer, inputs[0])
                gram = (x.mT @ x).double()
            sums[name] = sums[name] + gram if name in sums else gram
            rows[name] += x.shape[1]

        return note

    precise = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, precise)
        torch.set_float32_matmul_precision("highest")
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(hook(name, layer)).remove)
        run()
    _all_met(sums, layers)
    return {name: total / rows[name] for name, total in sums.items()}


def positions(run: Callable[[], None], layers: Mapping[str, Factorable]) -> dict[str, tuple[int, int, int]]:
    """Where the pieces of each layer run in the pass `run` makes: input, after the vertical kernel, output; batch included."""
    found: dict[str, tuple[int, int, int]] = {}

    def hook(name: str, layer: Factorable) -> Callable[[Any, Any, Any], None]:
        def note(_: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            x, before = inputs[0], found.get(name, (0, 0, 0))
            if isinstance(layer, nn.Linear):
                here = (x.numel() // x.shape[-1],) * 3
            else:
                batch = x.numel() // (layer.in_channels * x.shape[-2] * x.shape[-1])
                sizes = (x.shape[-2] * x.shape[-1], output.shape[-2] * x.shape[-1], output.shape[-2] * output.shape[-1])
                here = (batch * sizes[0], batch * sizes[1], batch * sizes[2])
            found[name] = (before[0] + here[0], before[1] + here[1], before[2] + here[2])

        return note

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(hook(name, layer)).remove)
        run()
    _all_met(found, layers)
    return found


def _all_met(found: Iterable[str], layers: Mapping[str, Factorable]) -> None:
    missing = sorted(set(layers) - set(found))
    if missing:
        size = shape_of(layers[missing[0]])
        raise TransformError(
            f"layer {missing[0]} ({size.rows} x {size.columns}) was never run", why="the inputs do not reach it", do=f"skip={missing}"
        )
