"""GPTQ: weights rounded one column at a time, the error of each pushed onto the columns still to come.

    weight [N, K], gram = sum x xᵀ [K, K] ──damped, inverted, Cholesky──> U upper, U ᵀU = gram⁻¹
    for column j:  q = round(w_j) on its group's grid;  e = (w_j - q) / U_jj;  w_k -= e U_jk for k > j        (Frantar 2022, eq. 2, 3)

Columns are taken in blocks: within a block at once, beyond it by one matrix product. Without `act_order` a group's scale is taken
when its first column is reached, from the weights as they then are; with it, columns go by falling gram_jj and every group keeps the
scale of the weights as given, so that the stored form is the same. Columns no input ever reached are rounded to nearest.
Damping: a share of the mean diagonal, raised tenfold while the matrix is not positive definite. Minimises tr(Δ gram Δᵀ).
`clip` lets a group's range shrink to the share (1 .. 0.6) that costs sum gram_jj (w_j - q_j)² least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import TransformError
from .grid import Grid, Quantised, as_rows, check_weight, codes_of, dequantise, ranges, scales

COLUMNS = 128
SHARES = tuple(1 - 0.05 * step for step in range(1, 9))


def gptq(
    weight: Tensor, gram: Tensor, grid: Grid, *, damping: float = 0.01, act_order: bool = False, clip: bool = False,
    columns: int = COLUMNS, name: str = "the weight",
) -> Quantised:  # fmt: skip
    """The weight's codes on the grid, chosen for the inputs behind `gram`."""
    check_weight(weight, name)
    rows = as_rows(weight.detach()).float().clone()  # [N, K]
    if gram.shape != (rows.shape[1],) * 2 or not bool(torch.isfinite(gram).all()):
        raise TransformError(
            f"gptq of {name}: inputs {tuple(gram.shape)} for a weight {tuple(weight.shape)}", why="it takes a finite [K, K] sum of x xᵀ",
            do="calibrate with finite inputs of that layer",
        )  # fmt: skip
    gram = gram.to(rows.device, torch.float64)
    by_group = grid.granularity == "group" and not act_order
    importance = gram.diagonal() if clip else None
    scale, zero = clipped_scales(rows, importance, grid, name)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True) if act_order else torch.arange(len(gram), device=rows.device)
    upper = _inverse_factor(gram[order][:, order], damping, name).float()
    per_block = -(-max(columns, grid.group) // grid.group) * grid.group if by_group else columns
    codes = torch.empty_like(rows, dtype=torch.int8 if grid.symmetric else torch.uint8)
    work = rows[:, order]
    places = order.tolist()
    for start in range(0, len(gram), per_block):
        end = min(start + per_block, len(gram))
        errors = _block(work, codes, upper, places, (start, end), grid, scale, zero, by_group, importance, name)
        work[:, end:] -= errors @ upper[start:end, end:]
    return Quantised(codes, scale, zero, weight.shape, grid)


def _block(
    work: Tensor, codes: Tensor, upper: Tensor, places: list[int], span: tuple[int, int], grid: Grid, scale: Tensor, zero: Tensor | None,
    by_group: bool, importance: Tensor | None, name: str,
) -> Tensor:  # fmt: skip
    """Codes of the columns of a block, written in; their errors [N, columns] for the columns after it. Scales too, where by group."""
    start, end = span
    part = work[:, start:end].clone()
    errors = torch.zeros_like(part)
    single = Grid(grid.bits, grid.symmetric, "channel", 1, grid.form, grid.scale_type)
    for at in range(end - start):
        place = places[start + at]
        group = place // grid.group if grid.granularity == "group" else 0
        if by_group and place % grid.group == 0:
            here = None if importance is None else importance[place : place + grid.group]
            fresh = clipped_scales(part[:, at : at + grid.group], here, single, name)
            scale[:, group : group + 1] = fresh[0]
            if zero is not None and fresh[1] is not None:
                zero[:, group : group + 1] = fresh[1]
        step, shift = scale[:, group : group + 1], None if zero is None else zero[:, group : group + 1]
        column = part[:, at : at + 1]
        code = codes_of(column, step, shift, single)
        codes[:, place : place + 1] = code
        value = dequantise(Quantised(code, step, shift, column.shape, single))
        error = (column - value) / upper[start + at, start + at]  # [N, 1]
        errors[:, at : at + 1] = error
        part[:, at + 1 :] -= error * upper[start + at, start + at + 1 : end]
    return errors


def clipped_scales(rows: Tensor, importance: Tensor | None, grid: Grid, name: str) -> tuple[Tensor, Tensor | None]:
    """(scale, zero) of the groups' ranges, or of the share of them that loses least by `importance` [K], if that is given."""
    low, high = ranges(rows, grid)
    best = scales(low, high, grid, name)
    if importance is None:
        return best
    least = _group_loss(rows, best, importance, grid)
    for share in SHARES:
        tried = scales(low * share, high * share, grid, name)
        loss = _group_loss(rows, tried, importance, grid)
        better = loss < least
        least = torch.where(better, loss, least)
        zero = None if best[1] is None or tried[1] is None else torch.where(better, tried[1], best[1])
        best = torch.where(better, tried[0], best[0]), zero
    return best


def _group_loss(rows: Tensor, tried: tuple[Tensor, Tensor | None], importance: Tensor, grid: Grid) -> Tensor:
    """sum of importance (w - q)² over each group: [rows or 1, groups]."""
    back = dequantise(Quantised(codes_of(rows, *tried, grid), *tried, rows.shape, grid))
    loss = (rows - back).square() * importance.float()
    if grid.granularity == "group" and grid.group < rows.shape[1]:
        padded = torch.nn.functional.pad(loss, (0, -rows.shape[1] % grid.group))
        return padded.reshape(len(rows), -1, grid.group).sum(2)
    return loss.sum().reshape(1, 1) if grid.granularity == "tensor" else loss.sum(1, keepdim=True)


def _inverse_factor(gram: Tensor, damping: float, name: str) -> Tensor:
    """Upper triangular U with UᵀU = (gram + damping)⁻¹, float64."""
    if not 0 < damping <= 1:
        raise TransformError(f"damping = {damping}", why="it is a share of the mean diagonal, above 0 and at most 1", do="use 0.01")
    diagonal = gram.diagonal()
    unseen = diagonal <= 0
    mean = float(diagonal[~unseen].mean()) if bool((~unseen).any()) else 1.0
    gram = gram / mean  # so that tiny or huge inputs do not leave the range
    fixed = torch.where(unseen, 1.0, 0.0)
    while damping <= 1:
        damped = gram + torch.diag(fixed + damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise TransformError(f"gptq of {name}", why="the sum of x xᵀ is not positive definite, even damped", do="give more calibration inputs")


def output_error(weight: Tensor, approximation: Tensor, gram: Tensor) -> float:
    """Relative squared error of the layer's outputs on the calibration inputs: tr(Δ gram Δᵀ) / tr(w gram wᵀ)."""
    rows, gram = as_rows(weight.detach()).double(), gram.to(weight.device).double()
    delta = rows - as_rows(approximation.detach()).double()
    whole = float(((rows @ gram) * rows).sum())
    return float(((delta @ gram) * delta).sum()) / whole if whole > 0 else 0.0
