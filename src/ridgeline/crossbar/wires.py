"""What resistive wires make of an array: currents = V @ G_eff, since the circuit is linear.

               0 V        0 V               columns at virtual ground before the first row, r ohm away; open beyond the last row
                r          r                rows driven before the first column, r ohm away; open beyond the last column
    V_0 ──r── u_00 ──r── u_01 ── …          a cell G_ij joins its row's node u_ij to its column's node v_ij below it,
              v_00       v_01               and wires of r ohm join neighbours: so rows and columns not in use change nothing if they
                r          r                come last and are not connected

    solve        exact: rows eliminated, then a block-tridiagonal elimination down the columns, float64; R * C^3 steps an array
    approximate  G_eff = G * (u - v), the cells' currents when every row is driven at 1 V: exact for equal inputs, since a column's current
                 is the sum of its cells'; found by solving all rows for the last v, then all columns for that u, until nothing moves

Largest error of a column's current, in per cent of the full scale rows * V * (high - low), for inputs >= 0 / of both signs; the loss
itself in brackets. RRAM of 9.8 … 166.7 uS, then phase change of 0.1 … 25 uS; cells evenly spread, or 30 % of them high:
    1 ohm   32 rows  0.02 / 0.03 [6],  0.01 / 0.01 [1]    64  0.11 / 0.16 [17], 0.01 / 0.01 [3]     128  0.32 / 0.58 [37], 0.04 / 0.05 [9]
    5 ohm   32 rows  0.17 / 0.33 [22], 0.01 / 0.02 [4]    64  0.56 / 0.97 [42], 0.07 / 0.10 [12]    128  0.59 / 0.99 [56], 0.25 / 0.44 [28]
"""

from __future__ import annotations

import torch
from torch import Tensor

MOVED = 2e-5  # of the driving voltage: a sweep that moves no node further is the last
MOST_SWEEPS = 200  # 128 rows of 167 uS at 5 ohm take 16
PIECE_CELLS = 1 << 20


def solve(conductance_s: Tensor, ohm: float) -> Tensor:
    """(…, R, C) siemens → float64 (…, R, C): the current of column j for 1 V on row i alone.

    Found the other way round, as reciprocity allows: 1 V on the end of column j, all rows grounded, the current out of row i.
    """
    g = conductance_s.to(torch.float64)
    if ohm == 0.0:
        return g
    rows, columns, wire = g.shape[-2], g.shape[-1], 1.0 / ohm
    eye = torch.eye(columns, dtype=torch.float64, device=g.device)
    of_rows = torch.linalg.inv(_ladder(columns, wire, g.device) + torch.diag_embed(g))  # (…, R, C, C): node voltages of a row, per ampere
    within = torch.diag_embed(g) - g[..., :, None] * of_rows * g[..., None, :] + 2 * wire * eye
    within[..., -1, :, :] -= wire * eye  # the last row has no neighbour beyond
    eliminated: list[Tensor] = []  # from the last row to the first
    for row in reversed(range(rows)):
        beyond = wire * wire * eliminated[-1] if eliminated else 0.0
        eliminated.append(torch.linalg.inv(within[..., row, :, :] - beyond))
    out = torch.empty_like(g)
    node = eye.expand(*g.shape[:-2], columns, columns)  # (…, node, driven column): volts of v, first of the driven ends
    for row in range(rows):
        node = wire * eliminated[rows - 1 - row] @ node
        into_row = (of_rows[..., row, 0, :] * g[..., row, :])[..., None, :]
        out[..., row, :] = wire * (into_row @ node)[..., 0, :]
    return out


def approximate(conductance_s: Tensor, ohm: float) -> Tensor:
    """(arrays, R, C) siemens → the same shape and dtype; many arrays at once, in pieces."""
    if ohm == 0.0 or conductance_s.numel() == 0:
        return conductance_s
    each = max(1, PIECE_CELLS // (conductance_s.shape[1] * conductance_s.shape[2]))
    return torch.cat([_cell_currents(piece, ohm) for piece in conductance_s.split(each)])


def _cell_currents(g: Tensor, ohm: float) -> Tensor:
    """(A, R, C) → G * (u - v) with 1 V on every row. Scaled by the wire: G * ohm is a pure number."""
    by_column = (g * ohm).permute(2, 0, 1).contiguous()  # (C, A, R): along a row from its driver
    by_row = (g * ohm).permute(1, 0, 2).contiguous()  # (R, A, C): along a column from its ground
    row_pivots, column_pivots = _pivots(by_column), _pivots(by_row)
    v = torch.zeros_like(by_column)
    for _ in range(MOST_SWEEPS):
        source = by_column * v
        source[0] += 1.0  # the driver, through one piece of wire
        u = _solve_ladder(row_pivots, source)  # (C, A, R)
        source = by_row * u.permute(2, 1, 0)
        last, v = v, _solve_ladder(column_pivots, source).permute(2, 1, 0).contiguous()
        if bool((v - last).abs().amax() < MOVED):
            break
    return g * (u - v).permute(1, 2, 0)


def _ladder(nodes: int, wire: float, device: torch.device) -> Tensor:
    """The wire alone: a resistor to its fixed end and between neighbours, open at the far end."""
    ladder = torch.full((nodes,), 2.0 * wire, dtype=torch.float64, device=device).diag()
    ladder[-1, -1] = wire
    between = torch.full((nodes - 1,), -wire, dtype=torch.float64, device=device)
    return ladder + between.diag(1) + between.diag(-1)


def _pivots(g: Tensor) -> Tensor:
    """(n, …): one over the pivots of the tridiagonal system diag(g) + ladder."""
    diagonal = g + 2.0
    diagonal[-1] -= 1.0
    pivots = torch.empty_like(g)
    pivots[0] = 1.0 / diagonal[0]
    for place in range(1, len(g)):
        torch.reciprocal(diagonal[place] - pivots[place - 1], out=pivots[place])
    return pivots


def _solve_ladder(pivots: Tensor, source: Tensor) -> Tensor:
    """The tridiagonal system for `source` (n, …), which is overwritten; Thomas's algorithm, a whole slice a step."""
    source[0] *= pivots[0]
    for place in range(1, len(source)):
        source[place].add_(source[place - 1]).mul_(pivots[place])
    for place in range(len(source) - 2, -1, -1):
        source[place].addcmul_(pivots[place], source[place + 1])
    return source
