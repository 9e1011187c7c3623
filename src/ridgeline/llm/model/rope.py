"""Angles of the rotary positions, plain and stretched.

    positions int64 [T] ──Rope──> cos, sin float32 [T, head_dim], both halves alike;  angle = position · theta^(-2i / head_dim) · stretch
      linear   all waves slower by `factor`                                    (Chen 2023)
      llama3   waves that turn less than low_turns times in the original context by `factor`, more than high_turns not, a ramp between
      yarn     the same by feature: the ramp lies between the features that turn beta_fast and beta_slow times; cos, sin grow (Peng 2023)

Angles are float32 whatever the model's dtype, as those of the models' makers. Three small kernels a step, shared by all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from .config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of features: float32 [head_dim / 2], on the CPU."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    kept = _kept_llama3(frequency, scaling) if scaling.kind == "llama3" else _kept_yarn(config, scaling)
    return frequency * kept + frequency / scaling.factor * (1.0 - kept)


def _kept_llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """The share of each wave that is not stretched."""
    turns = frequency * scaling.original_context / (2 * math.pi)
    return ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0.0, 1.0)


def _kept_yarn(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """As _kept_llama3, with a ramp over features."""

    def feature(turns: float) -> float:
        """Which pair of features turns so often in the original context."""
        return config.head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low if high != low else 0.001
    return 1.0 - ((torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)


class Rope(nn.Module):
    """cos and sin of positions. The frequencies stay float32 through every cast, and are never stored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = frequencies(config)
        self.frequency = torch.cat((half, half))
        self.growth = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.frequency = self.frequency.to(fn(torch.empty(0, device=self.frequency.device)).device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None] * self.frequency
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.growth == 1.0 else (cos * self.growth, sin * self.growth)
