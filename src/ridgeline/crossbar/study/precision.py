"""What the dot products of a simulation run in, and how far from the exact codes that leaves it.

    use_precision(model, "float16")             every product by the blocked engine, its dot products in that format
    error_against_reference(model, images)      of sampled rows of every product: ADC codes that differ from the reference engine's, and
                                                the largest relative error of a product's result (root of summed squares)

Column sums are whole numbers: a format is exact up to its largest run of them (float16 to 2,048, bfloat16 to 256, float32 to 2^24), and
on a chip with disturbed cells none is. tf32 differs from float32 on GPUs that have it only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cells import program
from ..engine.choose import choose, load
from ..layer.layers import products
from ..layer.observe import Seen, observed
from ..layer.product import CrossbarProduct
from ..layer.straight_through import weight_as_matrices
from ..plan import Draw, Plan, Window

DEFAULT = "default"
PRECISIONS = (DEFAULT, "float32", "tf32", "float16", "bfloat16", "integer")


def use_precision(model: nn.Module, precision: str) -> None:
    """In place; "default" leaves the engines as they are."""
    if precision == DEFAULT:
        return
    from ..engine.blocked import BlockedEngine

    engine = BlockedEngine(compute=precision)
    for product in products(model).values():
        product.watch = _Computed(engine, product)


class _Computed:
    """Computes a product by an engine of its own, in the place of the one that would be chosen."""

    def __init__(self, engine: Any, product: CrossbarProduct) -> None:
        self.engine, self.product = engine, product
        self.made: tuple[Any, Plan, Any] | None = None

    def __call__(self, product: CrossbarProduct, x: Tensor, weight: Tensor, bare: Plan, window: Window | None) -> Tensor:
        draw = product.draw
        key = (weight.data_ptr(), draw.seed, draw.chip, draw.layer, product.ranges)
        if self.made is None or self.made[0] != key:
            plan = Plan(product.chip, bare.k, bare.n, bare.groups, product.ranges)
            cells = program(weight_as_matrices(weight.detach(), plan.groups), plan, draw)
            self.made = (key, plan, self.engine.prepare(plan, cells))
        _, plan, prepared = self.made
        found: Tensor
        if window is None:
            found = self.engine.product(x.detach(), plan, prepared, draw)
        else:
            found = self.engine.convolution(x.detach(), window, plan, prepared, draw)
        return found


def error_against_reference(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """{"error": largest relative error of a product, "codes_differ": share of all sampled codes}."""
    errors: list[float] = []
    differing, codes = 0, 0

    def look(seen: Seen) -> None:
        nonlocal differing, codes
        plan = Plan(seen.plan.chip, seen.plan.k, seen.plan.n, 1, seen.plan.ranges)
        rows, draw = seen.sampled_rows(), seen.product.draw
        cells = program(seen.first_group, plan, draw)
        ours, exact = (_result(engine, rows, plan, cells, draw) for engine in (_engine_of(seen, plan), load("reference")[0]))
        scale = float(exact[0].square().sum())
        errors.append((float((ours[0] - exact[0]).square().sum()) / scale) ** 0.5 if scale else 0.0)
        differing += int((ours[1] != exact[1]).sum())
        codes += exact[1].numel()

    with torch.no_grad(), observed(model, look):
        model(inputs)
    return {"error": max(errors, default=0.0), "codes_differ": differing / max(codes, 1)}


def _engine_of(seen: Seen, plan: Plan) -> Any:
    """What computed the product, or would compute its first group."""
    if isinstance(seen.computed_by, _Computed):
        return seen.computed_by.engine
    return choose(plan, str(seen.x.device), str(seen.product.report()["engine"]))[0]


def _result(engine: Any, rows: Tensor, plan: Plan, cells: Any, draw: Draw) -> tuple[Tensor, Tensor]:
    prepared = engine.prepare(plan, cells)
    wide = rows.double() if engine.name == "reference" else rows
    return engine.product(wide, plan, prepared, draw).double(), engine.codes(wide, plan, prepared, draw).long()
