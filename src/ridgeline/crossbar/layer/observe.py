"""Looking into a converted network while it runs: every product with its input and output, or digital instead of analog.

    with observed(model, look):  model(x)        look(Seen(name, x, weight, window, plan, out)) after every product on arrays
    with digital([product, …]):  model(x)        these products as torch computes them, the others on the chip

A product is what lies on arrays: of a linear layer or convolution without its bias, of an LSTM each of its matrices. While watched,
reads do not move on to the next call, so that two passes draw the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..plan import Plan, Window
from .layers import products
from .product import CrossbarProduct, Watch
from .straight_through import patches_of, weight_as_matrices

SAMPLE_BYTES = 4 * 2**20
SAMPLE_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """One product as it was computed."""

    name: str
    product: CrossbarProduct
    x: Tensor
    """(B, M, K), or (B, groups * C, *size) with a window."""
    weight: Tensor
    window: Window | None
    plan: Plan
    out: Tensor
    computed_by: Watch | None
    """None: the product's own engine."""

    @property
    def digital(self) -> Tensor:
        return digital_product(self.x, self.weight, self.window, self.plan.groups)

    @property
    def first_group(self) -> Tensor:
        """(1, K, N): its weights."""
        return weight_as_matrices(self.weight.detach(), self.plan.groups)[:1]

    def sampled_rows(self, budget_bytes: int = SAMPLE_BYTES) -> Tensor:
        """(b, rows, K): rows of a few inputs (patches of the first group), evenly spread, as many as have codes within the budget."""
        few, plan = self.x[:SAMPLE_INPUTS], self.plan
        rows = few if self.window is None else patches_of(few[:, : few.shape[1] // plan.groups], self.window, 1)[:, 0]
        each = 8 * plan.arrays * len(plan.x.widths) * len(plan.w.widths) * plan.n * len(rows)
        wanted = max(1, min(rows.shape[1], budget_bytes // each))
        return rows[:, torch.linspace(0, rows.shape[1] - 1, wanted, device=rows.device).round().long()]


def digital_product(x: Tensor, weight: Tensor, window: Window | None, groups: int) -> Tensor:
    """What torch computes for it."""
    held = weight.detach().to(x.dtype)
    if window is None:
        return x @ held.T
    none = [0] * len(window.kernel)
    return torch.convolution(x, held, None, window.stride, window.padding, window.dilation, False, none, groups)


@contextmanager
def observed(model: nn.Module, look: Callable[[Seen], None]) -> Iterator[None]:
    """Inside, `look` is shown every product of the model; what watched a product before still computes it."""
    before = {product: product.watch for product in products(model).values()}
    for name, product in products(model).items():
        product.watch = _shown(name, product, look)
    try:
        yield
    finally:
        for product, watch in before.items():
            product.watch = watch


def _shown(name: str, product: CrossbarProduct, look: Callable[[Seen], None]) -> Watch:
    inner = product.watch

    def watch(_: CrossbarProduct, x: Tensor, weight: Tensor, bare: Plan, window: Window | None) -> Tensor:
        own, product.watch = product.watch, inner
        try:
            out: Tensor = product.multiply(x, weight, window, bare.groups)
            product.watch = None  # a plan with the ADC's ranges is given to those that nobody watches
            plan = product.plan_of(weight, bare.groups)
        finally:
            product.watch = own
        look(Seen(name, product, x, weight, window, plan, out, inner))
        return out

    return watch


@contextmanager
def digital(chosen: Iterable[CrossbarProduct]) -> Iterator[None]:
    """Inside, these products are torch's."""
    before = {product: product.watch for product in chosen}
    for product in before:
        product.watch = lambda _, x, weight, plan, window: digital_product(x, weight, window, plan.groups)
    try:
        yield
    finally:
        for product, watch in before.items():
            product.watch = watch
