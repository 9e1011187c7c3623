"""Steps that change no structure: another dtype, another layout, one compiled graph.

cast     weights and activations in bfloat16 or float16         half the bytes of a float32 model
layout   images as NHWC (channels-last)                         the same bytes
compile  torch.compile, in place                                the same bytes; not stored: compile again after loading
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..core.errors import TransformError
from ..core.spec import Spec
from .step import Context, Done, step


class CastSettings(Spec):
    """To what."""

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Of every floating-point weight; the model then takes inputs of that dtype."""


class LayoutSettings(Spec):
    """To what."""

    layout: Literal["channels-last"] = "channels-last"
    """NHWC, for convolutions."""


class CompileSettings(Spec):
    """How."""

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode."""


@step("cast", CastSettings)
def cast(model: nn.Module, settings: CastSettings, context: Context) -> Done:
    """Every floating-point weight rounded to the narrower type; one that overflows is an error."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    before = {name: tensor.isfinite().all() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    model = model.to(dtype)
    for name, tensor in model.state_dict().items():
        if name in before and bool(before[name]) and not bool(tensor.isfinite().all()):
            raise TransformError(f"{name} overflows {settings.dtype}", why="it holds values beyond its range", do="use bfloat16")
    return Done(model, f"cast {settings.dtype}")


@step("layout", LayoutSettings)
def layout(model: nn.Module, settings: LayoutSettings, context: Context) -> Done:
    """Weights of convolutions laid out by pixel, so that activations follow."""
    if not any(parameter.dim() == 4 for parameter in model.parameters()):
        raise TransformError("channels-last without a convolution", why="only 4-dimensional weights have that layout", do="leave it out")
    return Done(model.to(memory_format=torch.channels_last), "layout channels-last")  # type: ignore[call-overload]


@step("compile", CompileSettings)
def compile_(model: nn.Module, settings: CompileSettings, context: Context) -> Done:
    """torch.compile in place; the first pass afterwards compiles."""
    model.compile(mode=None if settings.mode == "default" else settings.mode)
    return Done(model, "compile", notes=("a saved model is not compiled: call model.compile() after loading",))
