"""Quantisers whose codes index a table of values.

    weight ──rows or blocks / largest──> nearest value of the table ──> Quantised(codes, scale, codebook)      w' = codebook[code] * scale

    log    0 and ±2^-e, e = 0 .. 2^(b-1)-2; scale a power of two, so that products are shifts; nearest in value: error at most |w| / 3
    lloyd  learned for the tensor or for each channel: k-means in one dimension, from the quantiles of density^(1/3), until no code
           moves (Lloyd 1982, Max 1960); deterministic; exact sums over the sorted weights, so a pass costs no more than the table
    nf4    16 quantiles of a normal distribution, scale = largest of each block of 64 (Dettmers 2023, QLoRA)

Half-way between two values the lower one is taken. Nothing but a table look-up runs them: they are storage-only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import TransformError
from .grid import Granularity, Grid, Quantised, _grouped, _stored, as_rows, check_weight, quantise, spread

FORMATS = ("uniform", "log", "codebook", "nf4")
PASSES = 300


def quantise_as(weight: Tensor, form: str, grid: Grid, name: str = "the weight") -> Quantised:
    """The quantiser of a format by name; `grid` gives bits, granularity, group and scale type."""
    if form == "uniform":
        return quantise(weight, grid, name)
    if form == "log":
        return quantise_log(weight, grid.bits, grid.granularity, grid.group, name)
    if form == "codebook":
        return quantise_lloyd(weight, grid.bits, grid.granularity, name)
    if form == "nf4":
        if grid.bits != 4:
            raise TransformError(f"nf4 with {grid.bits} bits", why="its table has 16 values", do="give bits = 4")
        return quantise_nf4(weight, grid.group if grid.granularity == "group" else 64, grid.scale_type, name)
    raise TransformError(f"format = {form!r}", why=f"formats are {', '.join(FORMATS)}", do="use uniform")


def log_table(bits: int) -> Tensor:
    """[1, 2**bits] ascending: powers of two down to 2^-(2^(b-1)-2), 0 twice (the spare code)."""
    powers = torch.pow(2.0, -torch.arange((1 << (bits - 1)) - 1, dtype=torch.float64))
    return torch.cat((-powers, torch.zeros(2, dtype=torch.float64), powers.flip(0)))[None]


def quantise_log(weight: Tensor, bits: int, granularity: Granularity = "channel", group: int = 64, name: str = "the weight") -> Quantised:
    """Signed powers of two."""
    check_weight(weight, name)
    grid = Grid(bits, False, granularity, group, "codebook")
    rows = as_rows(weight.detach())
    largest = _largest(rows, grid)
    # the top level is the power of two nearest to the largest: up to 1.5 times it
    top = torch.pow(2.0, torch.ceil(torch.log2(largest / 1.5))).clamp(2.0**-126, 2.0**127)
    scale = torch.where(largest == 0, 1.0, top)
    return _coded(rows, weight, scale, log_table(bits).to(rows.device), grid)


def quantise_lloyd(weight: Tensor, bits: int, granularity: Granularity = "tensor", name: str = "the weight") -> Quantised:
    """A table learned from the tensor or from each channel; its scale is the largest weight."""
    check_weight(weight, name)
    if granularity == "group":
        raise TransformError(
            f"a learned codebook a group for {name}", why="the tables would outweigh the codes", do="use tensor or channel"
        )
    grid = Grid(bits, False, granularity, 64, "codebook")
    rows = as_rows(weight.detach())
    scale = _stored(_largest(rows, grid), grid, name)
    unit = (rows.double() / scale.double()).reshape(scale.shape[0], -1)
    return _coded(rows, weight, scale, learn_table(unit, bits), grid)


def quantise_nf4(weight: Tensor, block: int = 64, scale_type: str = "float32", name: str = "the weight") -> Quantised:
    """The normal-float table with a scale a block."""
    check_weight(weight, name)
    grid = Grid(4, False, "group", block, "codebook", scale_type)
    rows = as_rows(weight.detach())
    scale = _stored(_largest(rows, grid), grid, name)
    return _coded(rows, weight, scale, nf4_table().to(rows.device), grid)


def nf4_table() -> Tensor:
    """[1, 16] float64: 8 negative and 7 positive quantiles of the normal distribution around 0, over the largest."""
    # probability of the outermost quantile: half-way between the ends of 16 and of 15 equal parts
    outer = 1 - 0.5 * (1 / 32 + 1 / 30)
    positive = torch.special.ndtri(torch.linspace(outer, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(outer, 0.5, 8, dtype=torch.float64)[:-1])
    table = torch.cat((negative, torch.zeros(1, dtype=torch.float64), positive.flip(0)))
    return (table / table.abs().max())[None]


def learn_table(rows: Tensor, bits: int) -> Tensor:
    """[R, K] float64 → [R, 2**bits] ascending: the centres of one-dimensional k-means, row by row."""
    ordered = rows.sort(1).values.contiguous()
    sums = torch.nn.functional.pad(ordered.cumsum(1), (1, 0))  # [R, K + 1]
    table = _first_table(ordered, 1 << bits)
    ends = torch.zeros(rows.shape[0], 1, dtype=torch.long, device=rows.device)
    previous: Tensor | None = None
    for _ in range(PASSES):
        middle = ((table[:, 1:] + table[:, :-1]) / 2).contiguous()
        cut = torch.cat((ends, torch.searchsorted(ordered, middle, right=True), ends + ordered.shape[1]), 1)
        if previous is not None and torch.equal(cut, previous):
            break
        previous = cut
        count, total = cut.diff(dim=1), sums.gather(1, cut).diff(dim=1)
        table = torch.where(count > 0, total / count.clamp_min(1), table).sort(1).values
    return table


def _first_table(ordered: Tensor, size: int) -> Tensor:
    """Where density^(1/3) puts the centres (Panter and Dite 1951): for a normal density, quantiles of one √3 times as wide."""
    part = (torch.arange(size, dtype=torch.float64, device=ordered.device) + 0.5) / size
    place = torch.special.ndtr(torch.special.ndtri(part) * 3**0.5)
    return ordered[:, (place * (ordered.shape[1] - 1)).round().long()].clone()


def _largest(rows: Tensor, grid: Grid) -> Tensor:
    """Largest absolute weight of each group, float64."""
    if grid.granularity == "tensor":
        rows = rows.reshape(1, -1)
    return _grouped(rows, grid).abs().amax(2).double()


def _coded(rows: Tensor, weight: Tensor, scale: Tensor, table: Tensor, grid: Grid) -> Quantised:
    """Nearest entries of an ascending table, after the scale."""
    stored = scale.to(grid.dtype)
    book = table.float()
    unit = rows.double() / spread(stored, grid, rows.shape[1]).double()
    middle = ((book[:, 1:].double() + book[:, :-1].double()) / 2).contiguous()
    codes = torch.searchsorted(middle[0] if len(book) == 1 else middle, unit.contiguous())
    return Quantised(codes.to(torch.uint8), stored, None, weight.shape, grid, book)
