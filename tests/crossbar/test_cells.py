"""Cells against digits of the reference, and every disturbance against its formula, cell by cell in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import cells as cells_module
from ridgeline.crossbar import noise, wires
from ridgeline.crossbar.cells import Cells, low_level, program
from ridgeline.crossbar.noise import Kind
from ridgeline.crossbar.numbers import encode
from ridgeline.crossbar.plan import Draw, Plan
from ridgeline.target.load import load_target

from .support import chip

DRAW = Draw(seed=11, chip=2, layer=3, call=4)
SLICES = {"slice": [1, 1, 2, 2], "differential": [1, 2, 2], "offset": [2, 2, 2]}


def plan_of(k: int = 40, n: int = 9, groups: int = 1, sign: str = "slice", **changes: Any) -> Plan:
    settings = {"array_rows": 16, "array_columns": 8, "operands_w_granularity": [16, 16], "cell_low_s": 1e-6, **changes}
    return Plan(chip(operands_sign=sign, operands_w_slices=SLICES[sign], **settings), k, n, groups)


def weights(plan: Plan) -> Tensor:
    return torch.randn(plan.groups, plan.k, plan.n)


def ideal(plan: Plan, weight: Tensor) -> Cells:
    undisturbed = {name: field.get_default() for name, field in type(plan.chip.cell).model_fields.items() if not field.is_required()}
    perfect = plan.chip.model_copy(update={"cell": plan.chip.cell.model_copy(update=undisturbed)})
    return program(weight, replace(plan, chip=perfect), DRAW)


@pytest.mark.parametrize("sign", SLICES)
@pytest.mark.parametrize("number_format", ["int", "bfp"])
@pytest.mark.parametrize(("k", "n", "groups"), [(40, 9, 1), (16, 8, 2), (3, 1, 5)])
@pytest.mark.parametrize("levels", [4, 7])
def test_ideal_cells_hold_the_digits(sign: str, number_format: str, k: int, n: int, groups: int, levels: int) -> None:
    plan = plan_of(k, n, groups, sign, operands_format=number_format, cell_levels=levels)
    weight = weights(plan)
    made = program(weight, plan, DRAW)
    assert made.exact and made.planes.dtype == torch.int8 and made.planes.min() >= 0
    coded = encode(weight, plan.w, number_format, (16, 8), (16, 16))
    read = made.as_read(plan, DRAW)
    assert read.dtype == torch.int8 and read.shape == (groups, len(plan.w.widths), plan.arrays * 16, n)
    digits = coded.digits[:, : plan.arrays].permute(0, 3, 1, 4, 2, 5).flatten(-2).flatten(2, 3)[:, :, :k, :n]  # (groups, S, K, N)
    for j, largest in enumerate(plan.w.largest):
        wanted = [int(math.copysign(round(abs(digit) / largest * (levels - 1)), digit)) for digit in digits[:, j].flatten().tolist()]
        assert read[:, j, :k].flatten().tolist() == wanted
    assert not read[:, :, k:].any()
    assert torch.equal(made.values, coded.values.float())
    assert torch.equal(made.step, coded.step[:, : plan.arrays].repeat_interleave(8, -1)[..., :n])


ALL = {
    "cell_write_sigma": [0.02, 0.05, 0.1, 0.03], "cell_read_sigma": [0.0, 0.04, 0.02, 0.01], "cell_stuck_high": 0.05, "cell_stuck_low": 0.1,
    "cell_drift_nu": 0.05, "cell_drift_nu_sigma": 0.01, "cell_drift_time_s": 3600, "cell_drift_from_s": 20, "cell_retention_s": 1e5,
}  # fmt: skip


def programmed(plan: Plan, level: int, words: list[int]) -> float:
    """One cell in siemens, by the formulas of the module."""
    cell = plan.chip.cell
    low, high = cell.low_s.value, cell.high_s.value
    radius = math.sqrt(-2 * math.log(((words[0] >> 8) + 1) / 2**24))
    angle = 2 * math.pi * (words[1] >> 8) / 2**24
    g = low + level * (high - low) / (cell.levels - 1)
    g *= 1 + cell.write_sigmas[level] * radius * math.cos(angle)
    u = (words[2] >> 8) / 2**24
    if u < cell.stuck_high.value:
        g = high
    elif u < cell.stuck_high.value + cell.stuck_low.value:
        g = low
    time = cell.drift_time_s.value
    if time > cell.drift_from_s.value:
        g *= (time / cell.drift_from_s.value) ** -(cell.drift_nu.value + cell.drift_nu_sigma.value * radius * math.sin(angle))
    return low + (g - low) * math.exp(-time / cell.retention_s.value) if cell.retention_s else g


def as_level(plan: Plan, siemens: float) -> float:
    cell = plan.chip.cell
    return (siemens - cell.low_s.value) / (cell.high_s.value - cell.low_s.value) * (cell.levels - 1)


@pytest.mark.parametrize("sign", ["slice", "differential"])
@pytest.mark.parametrize(
    "without", [None, "cell_write_sigma", "cell_drift_nu_sigma", "cell_retention_s", "cell_drift_time_s", "cell_stuck_high"]
)
def test_every_cell_follows_the_formulas(sign: str, without: str | None) -> None:
    plan = plan_of(18, 9, 2, sign, **{name: value for name, value in ALL.items() if name != without})
    weight = weights(plan)
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    assert made.planes.dtype == torch.float32 and not made.exact
    in_order = before.planes[..., :18, :].flatten().tolist()  # planes, groups, slices, K, N: the order of their numbers
    words = noise.words(DRAW, Kind.PROGRAM, torch.arange(len(in_order))).tolist()
    wanted = [as_level(plan, programmed(plan, level, four)) for level, four in zip(in_order, words, strict=True)]
    found = made.planes[..., :18, :].flatten().double()
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert not made.planes[..., 18:, :].any()  # rows not in use
    assert torch.equal(made.values, before.values) and torch.equal(made.step, before.step)


@pytest.mark.parametrize("sign", ["slice", "differential"])
def test_reads_follow_the_formula(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "PIECE_CPU", 50)  # less than a row, a matrix, all of them
    plan = plan_of(18, 9, 2, sign, **ALL)
    made = program(weights(plan), plan, DRAW)
    read, cell = made.as_read(plan, DRAW), plan.chip.cell
    in_order = made.planes[..., :18, :].flatten().tolist()
    normals = noise.normal(DRAW, Kind.READ, torch.arange(len(in_order))).tolist()
    low, once = low_level(plan), []
    for level, z in zip(in_order, normals, strict=True):
        sigma = cell.read_sigmas[min(max(round(level), 0), cell.levels - 1)]
        once.append((level + low) * math.exp(sigma * z) - low)
    planes = torch.tensor(once, dtype=torch.float64).reshape(made.planes[..., :18, :].shape)
    wanted = planes[0] - planes[1] if sign == "differential" else planes[0]
    torch.testing.assert_close(read[..., :18, :].double(), wanted, rtol=2e-6, atol=2e-6)
    assert torch.equal(read, made.as_read(plan, DRAW))
    assert not torch.equal(read, made.as_read(plan, replace(DRAW, call=5)))


@pytest.mark.parametrize("sign", SLICES)
def test_pieces_change_nothing(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(40, 21, 3, sign, **ALL, cell_line_resistance_ohm=50)
    weight = weights(plan)
    whole = program(weight, plan, DRAW)
    monkeypatch.setattr(cells_module, "PIECE_WEIGHTS", 1)
    monkeypatch.setattr(noise, "PIECE_CPU", 100)
    cut = program(weight, plan, DRAW)
    torch.testing.assert_close(cut.planes, whole.planes, rtol=0, atol=1e-4)
    torch.testing.assert_close(cut.as_read(plan, DRAW), whole.as_read(plan, DRAW), rtol=0, atol=2e-4)
    assert torch.equal(cut.values, whole.values) and torch.equal(cut.step, whole.step)


@pytest.mark.parametrize("sign", SLICES)
def test_stuck_cells_alone_stay_whole_numbers(sign: str) -> None:
    plan = plan_of(160, 80, 1, sign, cell_stuck_high=0.02, cell_stuck_low=0.05)
    weight = weights(plan)
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    assert made.exact and made.planes.dtype == torch.int8
    changed = made.planes != before.planes
    assert set(made.planes[changed].tolist()) == {0, 3}
    count = before.planes[..., :160, :].numel()
    high = float((changed & (made.planes == 3)).sum()) / float((before.planes < 3).sum())
    low = float((changed & (made.planes == 0)).sum()) / float((before.planes > 0).sum())
    assert abs(high - 0.02) < 4 * (0.02 / count) ** 0.5 * 1.5 and abs(low - 0.05) < 4 * (0.05 / float((before.planes > 0).sum())) ** 0.5


def test_spread_of_each_level_is_the_chips() -> None:
    sigmas = [0.2, 0.05, 0.1, 0.03]
    plan = plan_of(320, 160, cell_write_sigma=sigmas, cell_read_sigma=[0.01, 0.02, 0.03, 0.04])
    weight = weights(plan)
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    low = low_level(plan)
    read = made.as_read(plan, DRAW)
    for level, sigma in enumerate(sigmas):
        at = before.planes[0] == level
        relative = (made.planes[0][at].double() + low) / (level + low) - 1
        assert (
            abs(relative.std() / sigma - 1) < 5 * (2 * len(relative)) ** -0.5 and abs(relative.mean()) < 5 * sigma * len(relative) ** -0.5
        )
        near = at & (made.planes[0].round() == level)
        logs = ((read[near].double() + low) / (made.planes[0][near].double() + low)).log()
        wanted = 0.01 * (level + 1)
        assert abs(logs.std() / wanted - 1) < 5 * (2 * len(logs)) ** -0.5


def test_drift_compensation_multiplies_the_step() -> None:
    drift = {"cell_drift_nu": 0.05, "cell_drift_time_s": 3600, "cell_drift_from_s": 20, "cell_low_s": 0.0}
    plan, kept = plan_of(**drift), plan_of(**drift, cell_drift_compensated=True)
    weight = weights(plan)
    plain, compensated, before = program(weight, plan, DRAW), program(weight, kept, DRAW), ideal(plan, weight)
    lost = 180.0**-0.05
    torch.testing.assert_close(plain.planes, before.planes * lost)
    assert torch.equal(plain.planes, compensated.planes) and torch.equal(plain.step, before.step)
    torch.testing.assert_close(compensated.step * lost, before.step)
    early = plan_of(**{**drift, "cell_drift_time_s": 20}, cell_drift_compensated=True)
    assert program(weight, early, DRAW).exact and torch.equal(program(weight, early, DRAW).step, before.step)


@pytest.mark.parametrize("compensated", [False, True])
def test_the_reference_column_drifts_with_the_others(compensated: bool) -> None:
    # With low_s = 0 and no spread all cells keep one share of their level: the result shrinks by it, and its zero stays where it was.
    plan = plan_of(sign="offset", cell_low_s=0.0, cell_drift_nu=0.05, cell_drift_time_s=3600, cell_drift_from_s=20, cell_retention_s=5000,
                   cell_drift_compensated=compensated)  # fmt: skip
    weight = weights(plan)
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    torch.testing.assert_close(made.planes, before.planes.float())
    torch.testing.assert_close(made.step, before.step * math.exp(-3600 / 5000) * (1.0 if compensated else 180.0**-0.05))


@pytest.mark.parametrize(("k", "n"), [(48, 32), (20, 5), (37, 21)])
def test_wires_take_what_the_solver_says(k: int, n: int) -> None:
    plan = plan_of(k, n, 2, cell_low_s=1e-6, cell_high_s=1e-4, cell_line_resistance_ohm=20)
    weight = weights(plan)
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    g = 1e-6 + before.planes[0].double() * 99e-6 / 3
    for row, column in product(range(0, k, 16), range(0, n, 8)):
        part = (..., slice(row, min(row + 16, k)), slice(column, min(column + 8, n)))
        currents = (wires.solve(g[part], 20.0) - 1e-6).sum(-2) / 33e-6
        torch.testing.assert_close(made.planes[0][part].double().sum(-2), currents, rtol=1e-3, atol=1e-3)
    assert (made.planes[0][..., :k, :] < before.planes[0][..., :k, :]).all()


def test_nothing_is_drawn_for_what_does_not_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(*_: Any) -> Any:
        raise AssertionError("a random number was drawn")

    monkeypatch.setattr(noise, "_philox", draws)
    for changes in ({}, {"cell_drift_nu": 0.05, "cell_drift_time_s": 100, "cell_retention_s": 1e5, "cell_line_resistance_ohm": 1.0}):
        plan = plan_of(**changes)
        program(weights(plan), plan, DRAW).as_read(plan, DRAW)
    for changes in ({"cell_write_sigma": 0.01}, {"cell_stuck_low": 0.01}, {"cell_drift_nu_sigma": 0.1, "cell_drift_time_s": 9}):
        with pytest.raises(AssertionError, match="was drawn"):
            program(weights(plan_of()), plan_of(**changes), DRAW)


def test_chips_and_layers_differ_and_calls_do_not() -> None:
    plan = plan_of(cell_write_sigma=0.1)
    weight = weights(plan)
    first = program(weight, plan, DRAW).planes
    assert torch.equal(first, program(weight, plan, replace(DRAW, call=77)).planes)
    for other in (replace(DRAW, seed=12), replace(DRAW, chip=3), replace(DRAW, layer=4)):
        assert not torch.equal(first, program(weight, plan, other).planes)


@pytest.mark.parametrize(("levels", "dtype"), [(4, torch.int8), (128, torch.int8), (129, torch.int16), (40000, torch.int32)])
def test_levels_take_the_smallest_integer(levels: int, dtype: torch.dtype) -> None:
    plan = plan_of(cell_levels=levels, sign="differential")
    made = program(weights(plan), plan, DRAW)
    assert made.planes.dtype == dtype and made.planes.max() == levels - 1
    assert made.as_read(plan, DRAW).abs().max() <= levels - 1


def test_weights_that_are_not_finite_are_an_error() -> None:
    plan = plan_of()
    with pytest.raises(OptionError, match="not finite"):
        program(torch.full((1, 40, 9), math.nan), plan, DRAW)


# Of a read: root mean square of (level read - level meant), in levels, all non-idealities together, without the wires' mean loss.
@pytest.mark.parametrize(("name", "spread", "loss"), [("rram-64", 0.167, 0.12), ("rram-128", 0.163, 0.1), ("pcm-128", 0.098, 0.26)])
def test_presets_program_sensibly(name: str, spread: float, loss: float) -> None:
    loaded = load_target(name)
    plan = Plan(loaded, 256, 128)  # type: ignore[arg-type]
    weight = weights(plan) * 0.05
    made, before = program(weight, plan, DRAW), ideal(plan, weight)
    meant, read = before.as_read(plan, DRAW).double(), made.as_read(plan, DRAW).double()
    kept = float((read * meant).sum() / (meant * meant).sum())
    left = float((read - kept * meant).square().mean().sqrt())
    assert bool(torch.isfinite(read).all()) and abs(1 - kept - loss) < 0.02 and abs(left / spread - 1) < 0.1
