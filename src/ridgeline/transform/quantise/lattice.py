"""Groups of weights that lie on a grid already: which one, so that quantising them again changes nothing.

    values [.., group], scale and minimum [..] of the range ──reproduced bit by bit?──> kept
      no: smallest gap between two values ──> n steps from least to greatest ──> scale = (greatest - least) / (n j), j = 1, 2, …
          ──> minimum = least - k scale, k = 0, 1, … ──reproduced?──> that scale and minimum, else the range's own

A grid whose codes reach both ends is the range's own; others are found from the gap, which random weights fail at once: their
smallest gap is far below a step. Two codes next to each other give the step itself (j = 1). A constant group becomes
minimum + 1 * scale, which holds twice the digits of the minimum alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEEPEST = 15
"""Tries for j and for k: all there are at 4 bits; wider codes give up there."""


def keep_grids(grouped: Tensor, scale: Tensor, minimum: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """(scale, minimum) with those groups changed that another grid of codes 0..high reproduces exactly."""
    values = grouped.float().reshape(-1, grouped.shape[-1])  # [B, group]
    step, least = scale.reshape(-1).clone(), minimum.reshape(-1).clone()
    lost = (~_reproduces(values, step, least, high)).nonzero()[:, 0]
    if lost.numel():
        step[lost], least[lost] = _search(values[lost], step[lost], least[lost], high)
    return step.reshape(scale.shape), least.reshape(minimum.shape)


def _reproduces(values: Tensor, step: Tensor, least: Tensor, high: int) -> Tensor:
    """[B] bool: whether codes on this grid give the float32 values back, bit by bit."""
    wide, start = step.double()[:, None], least.double()[:, None]
    codes = torch.where(wide == 0, 0.0, torch.round((values.double() - start) / wide)).nan_to_num(0.0).clamp(0, high)
    return ((codes.float() * step.float()[:, None] + least.float()[:, None]) == values).all(1)


def _search(values: Tensor, step: Tensor, least: Tensor, high: int) -> tuple[Tensor, Tensor]:
    low, span = values.amin(1).double(), (values.amax(1).double() - values.amin(1).double())
    gaps = values.sort(1).values.double().diff(dim=1)
    gap = torch.where(gaps > 0, gaps, torch.inf).amin(1) if gaps.shape[1] else torch.full_like(low, torch.inf)
    flat = (span == 0).nonzero()[:, 0]
    if flat.numel():
        step[flat], least[flat] = _constant(low[flat], step.dtype)
    count = torch.round(span / gap)  # steps from least to greatest, if the gap is one
    active = ((span > 0) & (count <= high)).nonzero()[:, 0]
    for finer in range(1, DEEPEST + 1):
        active = active[count[active] * finer <= high]
        for below in range(DEEPEST + 1):
            tried = active[count[active] * finer + below <= high]
            if not tried.numel():
                break
            new_step = (span[tried] / (count[tried] * finer)).to(step.dtype)
            new_least = (low[tried] - below * new_step.double()).to(step.dtype)
            kept = _reproduces(values[tried], new_step, new_least, high)
            step[tried[kept]], least[tried[kept]] = new_step[kept], new_least[kept]
            active = active[~torch.isin(active, tried[kept])]
    return step, least


def _constant(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """value = 1 * step + least, least rounded down."""
    nearest = value.to(dtype)
    down = torch.where(nearest.double() > value, torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest)
    return (value - down.double()).to(dtype), down
