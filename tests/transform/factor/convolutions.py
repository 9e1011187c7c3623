"""Convolutions of every shape for the factor tests, and the dense weight a chain of pieces stands for.

CONVOLUTIONS ──> constructor arguments        dense(chain) ──> [out, in/groups, kh, kw], term by term
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CONVOLUTIONS = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([1, 2]),
        "kernel_size": st.sampled_from([(3, 3), (3, 2), (1, 3), (2, 1), (1, 1)]),
        "stride": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "padding": st.tuples(st.integers(0, 2), st.integers(0, 2)) | st.just("same"),
        "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
        "bias": st.booleans(),
    }
)


def convolution(config: dict[str, Any], channels: int = 4, width: int = 6, seed: int = 0) -> nn.Conv2d:
    """In float64; "same" padding takes no stride."""
    torch.manual_seed(seed)
    if config["padding"] == "same":
        config = {**config, "stride": (1, 1)}
    return nn.Conv2d(channels, width, **config, dtype=torch.float64)


def with_weight(layer: nn.Conv2d, weight: Tensor) -> nn.Conv2d:
    """The same convolution with another weight."""
    config = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")}
    other = nn.Conv2d(layer.in_channels, layer.out_channels, **config, bias=layer.bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        other.weight.copy_(weight)
        if layer.bias is not None:
            other.bias.copy_(layer.bias)
    return other


def dense(chain: nn.Sequential, layer: nn.Conv2d) -> Tensor:
    """What the chain answers to one impulse at a time: its weight as one convolution, without padding, stride or bias."""
    height, width = layer.kernel_size
    weight = torch.zeros_like(layer.weight)
    each = layer.in_channels // layer.groups
    for channel in range(layer.in_channels):
        x = torch.zeros(1, layer.in_channels, 2 * height - 1, 2 * width - 1, dtype=weight.dtype)
        x[0, channel, height - 1, width - 1] = 1.0
        for piece in chain:
            assert isinstance(piece, nn.Conv2d)
            x = nn.functional.conv2d(x, piece.weight, groups=piece.groups)
        group = channel // each
        rows = slice(group * layer.out_channels // layer.groups, (group + 1) * layer.out_channels // layer.groups)
        weight[rows, channel % each] = x[0, rows].flip(1, 2)  # a correlation meets the kernel backwards
        rest = torch.cat((x[0, : rows.start], x[0, rows.stop :]))
        assert not rest.any(), "a channel reached another group"
    return weight.detach()
