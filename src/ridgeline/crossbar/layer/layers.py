"""Linear layers and convolutions on a chip, with the parameters of the digital layers they stand for.

    x (…, K) ──CrossbarLinear──> (…, N)                                  weight (N, K), bias
    x (B, C, *size) ──CrossbarConv, 1 to 3 axes──> (B, N, *output)       weight (N, C / groups, *kernel), bias
      products on the arrays, quantised after im2col; bias added digitally, in float32

`from_digital` takes over the parameters themselves, not copies, so that shared weights stay shared. A linear layer's last two axes are
one matrix for "per-matrix" scales. Padding other than zeros, and padding that is not the same on both sides, is done before the arrays.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ...target.crossbar import CrossbarSpec
from ..engine.choose import check_wanted
from ..plan import Plan, Window
from .product import CrossbarProduct, result_dtype

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class CrossbarLayer(CrossbarProduct):
    """A product with its own weight and bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    groups = 1

    def hold(self, digital: Any) -> None:
        """Take over the parameters and the mode of a digital layer."""
        self.weight = digital.weight
        self.register_parameter("bias", digital.bias)
        self.train(digital.training)

    @property
    def plan(self) -> Plan:
        return self.plan_of(self.weight, self.groups)


class CrossbarLinear(CrossbarLayer):
    """In the place of nn.Linear."""

    def __init__(self, digital: nn.Linear, chip: CrossbarSpec, **options: Any) -> None:
        super().__init__(chip, **options)
        self.in_features, self.out_features = digital.in_features, digital.out_features
        self.hold(digital)

    def forward(self, x: Tensor) -> Tensor:
        out = multiply_rows(self, x, self.weight, self.bias)
        self.advance()
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, chip={self.chip.name!r}"


def multiply_rows(
    product: CrossbarProduct, x: Tensor, weight: Tensor, bias: Tensor | None, *, later: int = 0, owner: Tensor | None = None
) -> Tensor:
    """x (…, K) times weight (N, K) plus bias, on the arrays: (…, N)."""
    matrices = x.reshape(math.prod(x.shape[:-2]), x.shape[-2] if x.dim() > 1 else 1, x.shape[-1])
    out = product.multiply(matrices, weight, bias=bias, later=later, owner=owner)
    return out.reshape(*x.shape[:-1], weight.shape[0]).to(result_dtype(x))


class CrossbarConv(CrossbarLayer):
    """In the place of nn.Conv1d, nn.Conv2d and nn.Conv3d."""

    def __init__(self, digital: nn.Conv1d | nn.Conv2d | nn.Conv3d, chip: CrossbarSpec, **options: Any) -> None:
        super().__init__(chip, **options)
        self.in_channels, self.out_channels, self.groups = digital.in_channels, digital.out_channels, digital.groups
        self.padding_mode = digital.padding_mode
        kernel, dilation = tuple(digital.kernel_size), tuple(digital.dilation)
        before, after = both_sides(digital.padding, kernel, dilation)
        inside = tuple(before) if digital.padding_mode == "zeros" and before == after else (0,) * len(kernel)
        self.window = Window(kernel, tuple(digital.stride), inside, dilation)
        sides = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
        self.outside: list[int] = sides if any(sides) and not any(inside) else []
        self.hold(digital)

    def forward(self, x: Tensor) -> Tensor:
        batch = x if x.dim() == len(self.window.kernel) + 2 else x.unsqueeze(0)
        if self.outside:
            batch = functional.pad(batch, self.outside, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        out = self.multiply(batch, self.weight, self.window, self.groups, bias=self.bias)
        self.advance()
        return (out if x.dim() == batch.dim() else out.squeeze(0)).to(result_dtype(x))

    def extra_repr(self) -> str:
        window = self.window
        shape = f"{self.in_channels}, {self.out_channels}, kernel={window.kernel}, stride={window.stride}, padding={window.padding}"
        return f"{shape}, dilation={window.dilation}, groups={self.groups}, bias={self.bias is not None}, chip={self.chip.name!r}"


def both_sides(padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Zeros before and after each axis; "same" puts the odd one after, as torch does."""
    if padding == "same":
        whole = [reach * (taps - 1) for reach, taps in zip(dilation, kernel, strict=True)]
        return [both // 2 for both in whole], [both - both // 2 for both in whole]
    each = [0] * len(kernel) if isinstance(padding, str) else list(padding)
    return each, each


def products(model: nn.Module) -> dict[str, CrossbarProduct]:
    """Every product on arrays by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CrossbarProduct)}


def set_chip(model: nn.Module, chip_number: int) -> None:
    """Which of the chips that (seed) names the model is on in eval mode."""
    for product in products(model).values():
        product.chip_number = chip_number


def set_engine(model: nn.Module, name: str) -> None:
    """For every layer; see engines.choose."""
    for product in products(model).values():
        product.engine = check_wanted(name)


def set_call(model: nn.Module, call: int | None) -> None:
    """Hold the noise of reads at one call, so that passes repeat; None: every pass draws its own again."""
    for product in products(model).values():
        product.call, product.call_held = (product.call, False) if call is None else (call, True)


def make(digital: nn.Module, chip: CrossbarSpec, **options: Any) -> CrossbarLayer | None:
    """The layer on the chip; None where there is none for it. Subclasses may compute something else and are left alone."""
    if type(digital) is nn.Linear:
        return CrossbarLinear(digital, chip, **options)
    if type(digital) in CONVOLUTIONS:
        return CrossbarConv(digital, chip, **options)  # type: ignore[arg-type]
    return None
