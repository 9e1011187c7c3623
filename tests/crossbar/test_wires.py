"""The solver against hand-worked circuits, a node-by-node solution and Kirchhoff; the approximation against the solver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeline.crossbar import wires

RRAM_S, PCM_S = (9.8e-6, 166.7e-6), (0.1e-6, 25e-6)


def node_voltages(g: Tensor, ohm: float) -> tuple[Tensor, Tensor]:
    """Every node of one array by Kirchhoff's current law, written out: u, v (R, C, driven row) for 1 V on each row in turn."""
    rows, columns = g.shape
    count, wire = rows * columns, 1.0 / ohm
    matrix = torch.zeros(2 * count, 2 * count, dtype=torch.float64)
    driven = torch.zeros(2 * count, rows, dtype=torch.float64)

    def join(a: int, b: int, siemens: float) -> None:
        matrix[a, a] += siemens
        matrix[b, b] += siemens
        matrix[a, b] -= siemens
        matrix[b, a] -= siemens

    for i in range(rows):
        for j in range(columns):
            u, v = i * columns + j, count + i * columns + j
            join(u, v, float(g[i, j]))
            if j + 1 < columns:
                join(u, u + 1, wire)
            if i + 1 < rows:
                join(v, v + columns, wire)
        matrix[i * columns, i * columns] += wire
        driven[i * columns, i] = wire
    for j in range(columns):
        matrix[count + j, count + j] += wire
    found = torch.linalg.solve(matrix, driven)
    return found[:count].reshape(rows, columns, rows), found[count:].reshape(rows, columns, rows)


def cells(rows: int, columns: int, bounds_s: tuple[float, float] = RRAM_S) -> Tensor:
    """Two arrays: cells evenly spread over four levels, and 30 % of them high."""
    levels = torch.randint(0, 4, (2, rows, columns)).double()
    levels[1] = 3.0 * (torch.rand(rows, columns) < 0.3)
    return bounds_s[0] + levels * (bounds_s[1] - bounds_s[0]) / 3


def test_one_cell_is_three_resistors_in_series() -> None:
    torch.testing.assert_close(wires.solve(torch.tensor([[0.25]]), 3.0).item(), 1 / (4 + 2 * 3))


def test_two_cells_on_a_row_by_hand() -> None:
    # From the far end: branch 2 = wire + cell 2 + wire to ground; it stands beside branch 1 = cell 1 + wire.
    a, b, r = 5.0, 7.0, 1.0
    second, first = r + b + r, a + r
    both = 1 / (1 / second + 1 / first)
    at_first_node = both / (r + both)
    torch.testing.assert_close(
        wires.solve(torch.tensor([[1 / a, 1 / b]]), r).flatten().tolist(), [at_first_node / first, at_first_node / second]
    )


def test_two_by_two_of_equal_cells_by_hand() -> None:
    # All wires and cells 1 ohm. The law at each of the 8 nodes is checked by hand, then the solver against them.
    u, v = node_voltages(torch.ones(2, 2), 1.0)
    for i in range(2):  # the current law at each node, by hand and without a matrix
        drive = torch.zeros(2)
        drive[i] = 1.0
        for r in range(2):
            assert abs(float(drive[r] - u[r, 0, i] + u[r, 1, i] - u[r, 0, i] + v[r, 0, i] - u[r, 0, i])) < 1e-12
            assert abs(float(u[r, 0, i] - u[r, 1, i] + v[r, 1, i] - u[r, 1, i])) < 1e-12
        for c in range(2):
            assert abs(float(v[1, c, i] - v[0, c, i] - v[0, c, i] + u[0, c, i] - v[0, c, i])) < 1e-12
            assert abs(float(v[0, c, i] - v[1, c, i] + u[1, c, i] - v[1, c, i])) < 1e-12
    torch.testing.assert_close(wires.solve(torch.ones(2, 2), 1.0), v[0].T)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (5, 1), (3, 4), (6, 5)])
@pytest.mark.parametrize("ohm", [0.5, 100.0])
def test_the_solver_is_kirchhoffs(rows: int, columns: int, ohm: float) -> None:
    g = cells(rows, columns)[0] * 100
    u, v = node_voltages(g, ohm)
    effective = wires.solve(g, ohm)
    torch.testing.assert_close(effective, (v[0] / ohm).T)
    through_cells = (g[..., None] * (u - v)).sum(0).T  # (driven row, column): what enters a column leaves at its end
    torch.testing.assert_close(effective, through_cells)
    drivers = ((torch.eye(rows) - u[:, 0]) / ohm).sum(0)  # what all drivers give: nothing is lost
    torch.testing.assert_close(effective.sum(1), drivers)
    assert (effective < g).all()


def test_no_resistance_is_no_change() -> None:
    g = cells(4, 4)
    assert torch.equal(wires.solve(g, 0.0), g) and torch.equal(wires.approximate(g, 0.0), g)
    torch.testing.assert_close(wires.solve(g, 1e-9), g)
    torch.testing.assert_close(wires.approximate(g, 1e-9), g)
    assert wires.approximate(g[:0], 1.0).shape == (0, 4, 4)


@pytest.mark.parametrize(
    ("bounds_s", "rows", "ohm", "most"),
    [(RRAM_S, 32, 1, 5e-4), (RRAM_S, 32, 5, 5e-3), (RRAM_S, 64, 1, 3e-3), (RRAM_S, 64, 5, 0.012), (PCM_S, 64, 5, 1.5e-3)],
)
def test_the_approximation_is_near_the_solver(bounds_s: tuple[float, float], rows: int, ohm: float, most: float) -> None:
    g = cells(rows, rows, bounds_s)
    half = 3 * (torch.arange(rows) < rows // 2)[None]
    volts = torch.cat([torch.randint(0, 4, (32, rows)), torch.randint(-3, 4, (32, rows)), half]).double() / 3
    full = rows * (bounds_s[1] - bounds_s[0])
    exact, near = volts @ wires.solve(g, ohm), volts @ wires.approximate(g.float(), ohm).double()
    assert (near - exact).abs().max() / full < most
    assert (volts @ g - exact).abs().max() / full > 5 * most  # there was something to find
    planted = volts @ (1.05 * wires.approximate(g.float(), ohm).double())
    assert (planted - exact).abs().max() / full > most


def test_equal_inputs_are_exact() -> None:
    g = cells(64, 48)
    torch.testing.assert_close(wires.approximate(g, 5.0).sum(-2), wires.solve(g, 5.0).sum(-2), rtol=2e-3, atol=0)


def test_pieces_and_shapes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cells(9, 17)
    whole = wires.approximate(g, 20.0)
    monkeypatch.setattr(wires, "PIECE_CELLS", 1)
    torch.testing.assert_close(wires.approximate(g, 20.0), whole, rtol=1e-3, atol=0)


@pytest.mark.parametrize("of_array", [wires.solve, wires.approximate])
def test_cells_not_in_use_may_be_left_out(of_array: Callable[[Tensor, float], Tensor]) -> None:
    g = cells(9, 7)
    unused = torch.nn.functional.pad(g, (0, 4, 0, 3))
    torch.testing.assert_close(of_array(unused, 30.0)[:, :9, :7], of_array(g, 30.0))
