"""How a model is called and scored when the user gives no loss of their own.

    call_model(model, inputs) ──> outputs       adds positions = 0 … T-1 where the model's forward asks for them
    cross_entropy(outputs, targets) ──> mean over the targets that count, in float32 or wider
      [B,C] with [B] · [B,T,V] with [B,T] · any [...,C] with class shares of the same shape

Targets of -100 do not count, as in torch; a batch without any that counts has loss 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.errors import DataError

IGNORE = -100


@lru_cache(maxsize=64)
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "positions" in inspect.signature(forward).parameters


def call_model(model: nn.Module, inputs: Tensor) -> Any:
    """One forward pass."""
    plain = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if _takes_positions(type(plain).forward):
        return model(inputs, torch.arange(inputs.shape[1], device=inputs.device))
    return model(inputs)


def cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean negative log likelihood over the last dimension of `outputs`, of the targets that count.

    `smoothing` s: each label is 1 - s of itself and s / classes of every class. Ref: Szegedy 2016.
    """
    classes = outputs.shape[-1]
    wide = outputs.reshape(-1, classes)
    wide = wide if wide.dtype == torch.float64 else wide.float()  # 8 bits of bfloat16 are too few for a sum of exponentials
    if targets.is_floating_point():
        if targets.shape != outputs.shape:
            raise _mismatch(outputs, targets)
        return functional.cross_entropy(wide, targets.reshape(-1, classes).to(wide.dtype), label_smoothing=smoothing)
    if targets.shape != outputs.shape[:-1]:
        raise _mismatch(outputs, targets)
    flat = targets.reshape(-1)
    total = functional.cross_entropy(wide, flat, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    return total / counted(flat).clamp(min=1)


def counted(targets: Tensor) -> Tensor:
    """How many targets count, as a number on their device."""
    return (targets != IGNORE).sum()


def _mismatch(outputs: Tensor, targets: Tensor) -> DataError:
    return DataError(
        f"outputs {list(outputs.shape)} with targets {list(targets.shape)}",
        why="cross entropy needs targets of the outputs' shape without its last dimension, or class shares of the same shape",
        do="give loss=, a function of outputs and targets, or data whose targets fit the model",
    )
