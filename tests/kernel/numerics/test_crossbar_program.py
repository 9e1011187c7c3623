"""Programming by kernels against programming by plain torch: digits, stuck cells, values and steps equal, varied levels to 1e-6.

weight, chip ──program(by_kernel=True)──> Cells == program(by_kernel=False), and what FusedEngine packs of them
What must be able to fail: a level one too high, cells of another chip, ties rounded up, a weight that is not finite.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import cells as cells_module
from ridgeline.crossbar import finite
from ridgeline.crossbar.cells import Cells, low_level, program
from ridgeline.crossbar.engine import fused_program
from ridgeline.crossbar.engine.fused import FusedEngine
from ridgeline.crossbar.engine.fused_settings import columns_padded, rows_padded
from ridgeline.crossbar.finite import WeightCheck
from ridgeline.crossbar.layer.layers import CrossbarLinear
from ridgeline.crossbar.numbers import block_scale, step_of
from ridgeline.crossbar.plan import Draw, Plan
from tests.crossbar.support import chip

DRAW = Draw(seed=(1 << 32) - 3, chip=(1 << 30) + 7, layer=2, call=9)
WRITE = {"cell_write_sigma": 0.1}
OWN_WRITE = {"cell_write_sigma": [0.0, 0.02, 0.05, 0.1]}
STUCK = {"cell_stuck_high": 0.1, "cell_stuck_low": 0.2}
DRIFT = {"cell_drift_nu": 0.05, "cell_drift_time_s": 3600, "cell_drift_from_s": 20, "cell_retention_s": 1e5}
SLICES: dict[str, list[int]] = {"slice": [1, 1, 2], "differential": [2, 1], "offset": [2, 2]}
WIDE: dict[str, list[int]] = {"slice": [1, 3, 4], "differential": [4, 3], "offset": [4, 4]}


def plan_of(k: int = 20, n: int = 11, groups: int = 1, sign: str = "slice", slices: list[int] | None = None, **changes: Any) -> Plan:
    settings = {"array_rows": 16, "array_columns": 8, "operands_w_granularity": [16, 8], "cell_low_s": 1e-6, **changes}
    x_slices = [2, 2] if sign == "differential" else [1, 1, 2]
    return Plan(chip(operands_sign=sign, operands_w_slices=slices or SLICES[sign], operands_x_slices=x_slices, **settings), k, n, groups)


def weights(plan: Plan, device: str) -> Tensor:
    """(groups, K, N) as a view of (groups, N, K), which is how layers hold them."""
    generator = torch.Generator().manual_seed(plan.k + plan.n)
    return torch.randn(plan.groups, plan.n, plan.k, generator=generator).to(device).transpose(1, 2)


def by_kernel(weight: Tensor, plan: Plan, draw: Draw = DRAW, check: WeightCheck | None = None) -> Cells:
    assert fused_program.takes(weight, plan)
    return program(weight, plan, draw, check, by_kernel=True)


def same(found: Cells, wanted: Cells, plan: Plan) -> bool:
    """Whole levels, values and steps equal; other levels to 1e-6 of their conductance."""
    if found.planes.dtype != wanted.planes.dtype or found.planes.shape != wanted.planes.shape or found.exact != wanted.exact:
        return False
    if found.exact:
        near = torch.equal(found.planes, wanted.planes)
    else:
        room = 1e-6 * (wanted.planes.double().abs() + low_level(plan)).clamp(min=1)
        near = bool(((found.planes.double() - wanted.planes.double()).abs() <= room).all())
    return near and torch.equal(found.values, wanted.values) and torch.equal(found.step, wanted.step)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"groups": 2}, {}),
    ({"sign": "differential", "k": 16, "n": 8}, WRITE | STUCK),
    ({"sign": "offset", "groups": 2, "k": 5, "n": 3}, OWN_WRITE | STUCK),
    ({}, OWN_WRITE | DRIFT | {"cell_drift_nu_sigma": 0.01, "cell_drift_compensated": True}),
    ({"sign": "differential", "operands_w_granularity": "per-matrix"}, {}),
    ({"sign": "offset", "operands_w_granularity": [16, 16]}, STUCK),
    ({"sign": "offset", "k": 16, "n": 8}, DRIFT),
    ({"sign": "slice", "operands_w_granularity": "per-row"}, STUCK),
    ({"sign": "differential", "operands_w_granularity": "per-col", "groups": 2, "k": 9, "n": 1}, WRITE),
    ({"slices": WIDE["slice"], "cell_levels": 16, "k": 16, "n": 8}, WRITE | STUCK),
    ({"sign": "differential", "slices": WIDE["differential"], "cell_levels": 200}, {}),
    ({"sign": "offset", "slices": WIDE["offset"], "cell_levels": 21, "k": 16, "n": 9}, WRITE),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_cells_are_those_of_plain_torch(case: int, device: str) -> None:
    """Formats take turns, so that each is on half of the chips."""
    layout, faults = CASES[case]
    plan = plan_of(**layout, **faults, operands_format=("int", "bfp")[case // 2 % 2])
    weight = weights(plan, device)
    wanted = program(weight, plan, DRAW, by_kernel=False)
    found = by_kernel(weight, plan)
    assert same(found, wanted, plan)
    assert found.read_sigmas == wanted.read_sigmas
    if {"cell_write_sigma", "cell_stuck_low"} & {*faults}:
        assert not same(program(weight, plan, replace(DRAW, chip=8), by_kernel=False), wanted, plan)
    planted = found.planes.clone()
    planted[-1, -1, -1, 1, 0] += 1
    assert not same(replace(found, planes=planted), wanted, plan)
    assert not same(replace(found, values=found.values * 1.01), wanted, plan)


@pytest.mark.parametrize("number_format", ["int", "bfp"])
@pytest.mark.parametrize("sign", SLICES)
def test_ties_fall_as_in_float64(number_format: str, sign: str, device: str) -> None:
    """Halves of a step and their neighbours, the largest magnitudes, blocks of zeros, tiny and huge ones."""
    plan = plan_of(31, 6, sign=sign, slices=WIDE[sign], array_rows=32, operands_w_granularity=[32, 1], array_columns=1, cell_levels=16,
                   operands_format=number_format)  # fmt: skip
    most = (1 << (plan.w.span - 1)) - 1
    maximum = torch.tensor([1.0, float(most), 0.7, 1e20, 1e-38, 0.0])
    step = step_of(block_scale(maximum.double(), number_format), plan.w.span, number_format)
    at_half = ((torch.arange(-most, most, 2 * most // 10)[:10] + 0.5)[:, None] * step).float()
    near = torch.cat([at_half, at_half.nextafter(at_half + 1), at_half.nextafter(at_half - 1), maximum[None]])
    weight = near.clamp(-maximum, maximum)[None].to(device)  # (1, 31, 6)
    found, wanted = by_kernel(weight, plan), program(weight, plan, DRAW, by_kernel=False)
    assert same(found, wanted, plan)
    assert bool(torch.isfinite(found.values).all()) and (found.planes != 0).any()


@pytest.mark.parametrize(("layout", "faults"), [
    ({"groups": 2, "sign": "differential", "k": 40, "n": 20, "array_rows": 32, "array_columns": 32}, WRITE),
    ({"k": 5, "n": 3}, STUCK),
    ({"k": 20, "n": 11, "sign": "offset"}, {}),
    ({"k": 20, "n": 11, "adc_levels": 16 * 9 + 1}, {}),  # its ADC loses nothing: slices are collapsed
])  # fmt: skip
@pytest.mark.parametrize("dot", [None, "float32"])
def test_engines_get_them_in_their_layout(layout: dict[str, Any], faults: dict[str, Any], dot: str | None, device: str) -> None:
    plan = plan_of(**layout, **faults)
    cells = program(weights(plan, device), plan, DRAW, by_kernel=False)
    made = FusedEngine(dot).prepare(plan, cells)
    read = cells.as_read(plan, DRAW).double()  # (groups, slices, K', N)
    if made.settings.collapsed:
        read = -8 * read[:, 0] + 4 * read[:, 1] + 3 * read[:, 2]  # largest digit of a slice times its weight
    assert made.settings.collapsed == ("adc_levels" in layout)
    wanted = torch.zeros(made.levels.shape, dtype=torch.float64, device=device)
    held = min(plan.rows, rows_padded(plan))
    shaped = read.reshape(-1, plan.arrays, plan.rows, plan.n).transpose(2, 3)
    wanted[:, :, : plan.n, :held] = shaped[..., :held]
    levels = made.levels
    if levels.dtype is torch.float8_e4m3fn:  # whole numbers are its subnormals: their bits count
        levels = levels.view(torch.int8)
    assert torch.equal(levels.double(), wanted.to(levels.dtype).double())
    assert made.step.shape == (plan.groups, plan.arrays, columns_padded(plan)) and not made.step[..., plan.n :].any()
    assert torch.equal(made.step[..., : plan.n], (cells.step * made.settings.unit).float())


def test_what_kernels_leave_to_torch(device: str) -> None:
    plan = plan_of()
    weight = weights(plan, device)
    assert fused_program.takes(weight, plan) and not fused_program.takes(weight.double(), plan)
    for changes in ({"cell_line_resistance_ohm": 1.0}, {"cell_levels": 5000}, {"slices": [1] * 25}):
        other = plan_of(**changes)
        assert not fused_program.takes(weight, other)
    wired = plan_of(cell_line_resistance_ohm=1.0)
    assert same(program(weight, wired, DRAW, by_kernel=True), program(weight, wired, DRAW, by_kernel=False), wired)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_weights_that_are_not_finite(wrong: float, device: str) -> None:
    """At once without a check; with one, nan in its block and an error at the next pass that may look."""
    plan = plan_of(sign="offset", **STUCK)
    weight = weights(plan, device).clone()
    sound = by_kernel(weight, plan)
    weight[0, 3, 9] = wrong
    with pytest.raises(OptionError, match="not finite"):
        by_kernel(weight, plan)
    check = WeightCheck()
    found = by_kernel(weight, plan, check=check)
    assert bool(found.values[0, :16, 8:].isnan().all()) and bool(found.step[0, 0, 8:].isnan().all())
    assert torch.equal(found.values[:, :, :8], sound.values[:, :, :8]) and torch.equal(found.step[:, 1], sound.step[:, 1])
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(OptionError, match="not finite"):
        by_kernel(weight, plan, check=check)
    assert same(by_kernel(weights(plan, device), plan, check=check), sound, plan)  # repaired, it goes on


def test_layers_train_as_they_did(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are only stuck are whole numbers, so a pass and its gradients are equal; two passes are two chips."""
    on = chip(cell_stuck_low=0.1, cell_stuck_high=0.1, adc_levels=256)
    layer = CrossbarLinear(nn.Linear(5, 3), on, engine="fused").to(device).train()
    x = torch.randn(2, 5, device=device)
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(cells_module, "on_gpu", lambda _, answer=by_kernels: answer)
        twin = copy.deepcopy(layer)
        outputs = [twin(x) for _ in range(2)]
        (outputs[0] * outputs[1]).sum().backward()
        found.append((*outputs, twin.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(found[1][0], found[1][1])


def test_a_layer_that_trains_says_so_later(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training its outputs are nan at once and the error follows; in eval there is no output at all."""
    monkeypatch.setattr(cells_module, "on_gpu", lambda _: True)
    monkeypatch.setattr(finite, "EVERY", 3)
    layer = CrossbarLinear(nn.Linear(5, 3), chip(cell_stuck_low=0.1, adc_levels=256), engine="fused").to(device).train()
    x = torch.randn(2, 5, device=device)
    assert bool(torch.isfinite(layer(x)).all())
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    assert not bool(torch.isfinite(layer(x)).any())
    with pytest.raises(OptionError, match="not finite"):
        for _ in range(5):
            if device == "cuda":
                torch.cuda.synchronize()
            layer(x)
    with pytest.raises(OptionError, match="not finite"), torch.no_grad():
        layer.eval()(x)


def test_training_is_not_captured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay one chip for ever."""
    plan = plan_of(5, 3)
    monkeypatch.setattr(finite, "captured", lambda _: True)
    with pytest.raises(OptionError, match="CUDA graph"):
        by_kernel(weights(plan, device), plan, check=WeightCheck())
