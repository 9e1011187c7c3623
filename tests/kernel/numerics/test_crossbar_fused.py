"""The fused crossbar engine against the oracle: ADC codes digit for digit, outputs to float32, noise by the same counters.

seed ──tests/crossbar/test_engines.configuration──> chip, x, cells ──FusedEngine──> codes == reference.codes
What must be able to fail: one code one too high, a word of the counter swapped, ties rounded up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import noise
from ridgeline.crossbar.cells import program
from ridgeline.crossbar.engine.blocked import BlockedEngine
from ridgeline.crossbar.engine.fused import FusedEngine, quantised
from ridgeline.crossbar.engine.fused_noise import draw_normals
from ridgeline.crossbar.engine.fused_settings import PatchTile
from ridgeline.crossbar.layer.straight_through import dequantised, weight_gradient
from ridgeline.crossbar.numbers import block_scale, quantise
from ridgeline.crossbar.plan import Draw, Plan, Window
from ridgeline.kernel.jit import cdiv, launch
from tests.crossbar.support import chip
from tests.crossbar.test_engines import CONFIGURATIONS, DRAW, Case, configuration, difference
from tests.support import full_or_tenth

CALL = Draw(seed=5, chip=3, layer=2, call=7)


def moved(case: Case, device: str) -> Case:
    cells = replace(case.cells, planes=case.cells.planes.to(device), step=case.cells.step.to(device), values=case.cells.values.to(device))
    return Case(case.plan, case.x.to(device), cells, case.codes.to(device))


MOST_DOTS = 24  # of a program: the interpreter takes a millisecond for each


@cache
def configurations() -> list[Case]:
    """The first CONFIGURATIONS that are quick and that the engine takes; most of those left out have arrays of very few rows."""
    found: list[Case] = []
    for seed in count():
        case = configuration(seed)
        dots = case.plan.arrays * len(case.plan.x.widths) * len(case.plan.w.widths)
        if dots <= MOST_DOTS and FusedEngine().unable(case.plan, "cuda" if torch.cuda.is_available() else "cpu") is None:
            found.append(case)
        if len(found) == CONFIGURATIONS:
            return found
    raise AssertionError


@pytest.mark.parametrize("part", range(10))
def test_codes_are_the_oracles(part: int, device: str) -> None:
    """All 500 on a GPU and with RIDGELINE_FULL=1; interpreted, a tenth."""
    each = (CONFIGURATIONS if device == "cuda" else full_or_tenth(CONFIGURATIONS)) // 10
    for number, case in enumerate(configurations()[part * each : (part + 1) * each]):
        wrong, excess = difference(Both(), moved(case, device))
        assert wrong == 0, (number, wrong, case.plan)
        assert excess <= 1, (number, excess, case.plan)


def test_configurations_are_of_every_kind(device: str) -> None:
    plans = [case.plan for case in configurations()]
    assert {plan.chip.operands.sign for plan in plans} == {"slice", "differential", "offset"}
    assert {plan.chip.operands.format for plan in plans} == {"int", "bfp"}
    assert any(plan.ranges and plan.chip.adc.clip for plan in plans) and any(plan.arrays > 2 for plan in plans)
    assert sum(plan.chip.operands.x_granularity == "per-matrix" for plan in plans) > 20


class Both(FusedEngine):
    """Products as they are prepared, and codes of the same with its slices apart: a collapsed product has none."""

    def prepare(self, plan: Plan, cells: Any, collapse: bool = True) -> Any:
        return super().prepare(plan, cells), super().prepare(plan, cells, collapse=False)

    def product(self, x: Tensor, plan: Plan, prepared: Any, draw: Draw, bias: Tensor | None = None) -> Tensor:
        return super().product(x, plan, prepared[0], draw, bias)

    def codes(self, x: Tensor, plan: Plan, prepared: Any, draw: Draw) -> Tensor:
        return super().codes(x, plan, prepared[1], draw)


def random_product(on: Any, device: str, k: int = 70, n: int = 20) -> tuple[Plan, Tensor, Any]:
    generator = torch.Generator().manual_seed(1)
    plan = Plan(on, k, n)
    weight = torch.randn(1, k, n, generator=generator).to(device)
    return plan, torch.randn(2, 9, k, generator=generator).to(device), program(weight, plan, CALL)


@pytest.mark.parametrize("dot", ["int8", "float16", "float32"])
def test_every_dot_gives_the_same_codes(dot: str, device: str) -> None:
    plan, x, cells = random_product(chip(), device)
    engine, blocked = FusedEngine(dot), BlockedEngine()
    expected = blocked.codes(x, plan, blocked.prepare(plan, cells), CALL)
    assert torch.equal(engine.codes(x, plan, engine.prepare(plan, cells), CALL), expected.int())


def test_normals_are_those_of_the_counters(device: str) -> None:
    count = 5000
    out = torch.empty(count, dtype=torch.float32, device=device)
    kind = CALL.layer * noise.KINDS_A_LAYER + noise.Kind.READ.value
    launch(draw_normals, (cdiv(count, 1024),), out, count, kind, CALL.call, CALL.seed, CALL.chip, BLOCK=1024)
    expected = noise.normals(CALL, noise.Kind.READ, 0, count, torch.device(device), torch.float64)
    assert float(((out - expected).abs() / expected.abs().clamp(min=1)).max()) < 1e-6
    other = noise.normals(replace(CALL, call=8), noise.Kind.READ, 0, count, torch.device(device))
    assert float((out - other).abs().max()) > 1  # another call is another draw


def test_words_are_those_of_the_counters(device: str) -> None:
    index = torch.cat([torch.arange(700), torch.tensor([(1 << 32) - 1, 1 << 32, (1 << 40) + 3])]).to(device)
    draw = replace(CALL, seed=(1 << 32) - 1, chip=1 << 31)
    expected = torch.stack(noise._philox(index.cpu(), draw, noise.Kind.READ))
    assert torch.equal(torch.stack(noise._philox_on_gpu(index, *noise.stream_of(draw, noise.Kind.READ), draw)).cpu(), expected)


@pytest.mark.parametrize("sign", ["slice", "differential"])
@pytest.mark.parametrize("k, n", [(70, 20), (70, 21), (5, 1), (33, 68)])
def test_reads_vary_as_the_cells_say(k: int, n: int, sign: str, device: str) -> None:
    slices = [2, 2, 2] if sign == "differential" else [1, 1, 2, 2]
    on = chip(
        cell_read_sigma=[0.0, 0.02, 0.05, 0.1], cell_low_s=1e-6, operands_sign=sign, operands_x_slices=slices, operands_w_slices=slices
    )
    plan, x, cells = random_product(on, device, k, n)
    engine = FusedEngine("float32")
    prepared = engine.prepare(plan, cells)
    engine.product(x, plan, prepared, CALL)
    expected = cells.as_read(plan, CALL).reshape(len(slices), plan.arrays, plan.rows, plan.n).transpose(2, 3)
    held = min(plan.rows, prepared.levels.shape[-1])
    assert float((prepared.levels[:, :, : plan.n, :held] - expected[..., :held]).abs().max()) < 1e-5


@pytest.mark.parametrize("field", [{"adc_noise_lsb": 0.7}, {"adc_offset_lsb": 2.0}, {"dac_noise_sigma": 0.05}])
def test_converters_noise_is_the_blocked_engines(field: dict[str, float], device: str) -> None:
    """Codes may differ where a value lies next to a half; on most of them the same number must have been added."""
    plan, x, cells = random_product(chip(adc_levels=256, **field), device)
    engine, blocked = FusedEngine("float32"), BlockedEngine()
    found = engine.codes(x, plan, engine.prepare(plan, cells), CALL)
    expected = blocked.codes(x, plan, blocked.prepare(plan, cells), CALL)
    plain = blocked.codes(x, plan, blocked.prepare(plan, cells), replace(CALL, call=8, chip=4))
    assert float((found != expected).double().mean()) < 1e-3
    assert float((found != plain).double().mean()) > 0.05


@pytest.mark.parametrize("window", [
    Window((3, 3), (1, 1), (1, 1), (1, 1)), Window((3, 2), (2, 1), (1, 0), (2, 1)), Window((1, 1), (2, 2), (0, 0), (1, 1)),
    Window((7, 7), (2, 2), (3, 3), (1, 1)), Window((3,), (2,), (1,), (1,)), Window((2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
])  # fmt: skip
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(window: Window, groups: int, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    channels, columns = 4, 6
    taps = torch.Size(window.kernel).numel()
    plan = Plan(chip(), channels // groups * taps, columns // groups, groups)
    x = torch.randn(2, channels, *[9, 8, 7][: len(window.kernel)], generator=generator).to(device)
    bias = torch.randn(columns, generator=generator).to(device)
    cells = program(torch.randn(groups, plan.k, plan.n, generator=generator).to(device), plan, DRAW)
    engine, blocked = FusedEngine(), BlockedEngine()
    found = engine.convolution(x, window, plan, engine.prepare(plan, cells), DRAW, bias)
    expected = blocked.convolution(x, window, plan, blocked.prepare(plan, cells), DRAW) + bias.view(-1, *[1] * len(window.kernel))
    assert float((found - expected).abs().max() / expected.abs().max()) < 3e-6


@pytest.mark.parametrize("fields", [{}, {"operands_format": "bfp"}, {"operands_x_granularity": "per-matrix"}, {"array_rows": 16}])
@pytest.mark.parametrize("window", [Window((3, 3), (1, 1), (1, 1), (1, 1)), Window((3, 2), (2, 1), (1, 0), (2, 1))])
def test_gradients_of_weights_see_the_digits(window: Window, fields: dict[str, Any], device: str) -> None:
    """The engine's own patches against those quantised by torch; a layer that is given them twice as large is caught."""
    generator = torch.Generator().manual_seed(3)
    plan = Plan(chip(**fields), 2 * torch.Size(window.kernel).numel(), 3, 2)
    x = torch.randn(5, 4, 9, 8, generator=generator).to(device)
    gradient = torch.randn(5, 6, *window.output_size((9, 8)), generator=generator).to(device)
    engine = FusedEngine()
    prepared = engine.prepare(plan, program(torch.randn(2, plan.k, plan.n, generator=generator).to(device), plan, DRAW))
    expected = weight_gradient(gradient.double(), x.double(), plan, window)

    def off(factor: float) -> float:
        def inputs(part: Tensor) -> Tensor | None:
            found = engine.inputs(part, window, plan, prepared)
            return None if found is None else factor * found

        return float((weight_gradient(gradient, x, plan, window, inputs) - expected).abs().max() / expected.abs().max())

    assert off(1.0) < 3e-6 < off(1.01)


@pytest.mark.parametrize("fields", [{}, {"operands_x_granularity": "per-matrix", "operands_format": "bfp"}])
def test_gradients_of_linear_weights_see_the_digits(fields: dict[str, Any], device: str) -> None:
    plan, x, cells = random_product(chip(**fields), device)
    gradient = torch.randn(2, 9, plan.n, generator=torch.Generator().manual_seed(4)).to(device)
    engine = FusedEngine()
    prepared = engine.prepare(plan, cells)
    wanted = weight_gradient(gradient, x, plan, None)
    found = weight_gradient(gradient, x, plan, None, lambda part: engine.inputs(part, None, plan, prepared))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert torch.equal(engine.inputs(x, None, plan, prepared), dequantised(x, plan).flatten(0, 1).T[None])


@pytest.mark.parametrize("number_format", ["int", "bfp"])
def test_values_next_to_half_a_step(number_format: str, device: str) -> None:
    """Quantised in float32, decided in float64 where float32 cannot tell: all integers are the oracle's."""
    plan = Plan(chip(operands_format=number_format, operands_x_granularity=[1, 32], array_rows=32), 32, 4)
    maximum = torch.tensor([1.0, 0.7, 3.3e-5, 1e20, 1e-38, 31.0])
    halves = (torch.arange(-31, 31)[:, None] + 0.5) / 31 * maximum  # (62, 6)
    near = torch.stack([halves, halves.nextafter(halves + 1), halves.nextafter(halves - 1)]).permute(2, 1, 0).reshape(6, -1)
    x = torch.cat([maximum[:, None].expand(-1, 6)[..., None], near.reshape(6, 6, 31)], -1).reshape(1, 36, 32).to(device)
    prepared = FusedEngine().prepare(plan, program(torch.ones(1, 32, 4, device=device), plan, DRAW))
    window = Window((1, 1), (1, 1), (0, 0), (1, 1))
    q, step = quantised(x.transpose(1, 2).unsqueeze(2), window, (1, 36), 36, plan, prepared, PatchTile())
    scale = block_scale(x.double().abs().amax(-1, keepdim=True), number_format)
    assert torch.equal(q.view(36, 32).long(), quantise(x.double(), scale, plan.x.span, number_format)[0])
    assert bool(torch.isfinite(step).all())


def test_an_input_too_large_to_count_is_refused(device: str) -> None:
    plan, x, cells = random_product(chip(), device)
    far, engine = torch.empty_strided((2, 70, 1, 9), (1 << 31, 1, 1, 1), device="meta"), FusedEngine()
    with pytest.raises(OptionError, match="32 bits"):
        engine._run(far, Window((1, 1), (1, 1), (0, 0), (1, 1)), plan, engine.prepare(plan, cells), DRAW, x, (1, 1, 1))


def test_what_is_not_finite_gives_nan(device: str) -> None:
    plan, x, cells = random_product(chip(), device)
    x[0, 3, 5] = float("nan")
    engine = FusedEngine()
    out = engine.product(x, plan, engine.prepare(plan, cells), DRAW)
    assert bool(out[0, 3].isnan().all()) and not bool(out[1].isnan().any())


class OneTooHigh(Both):
    """A planted error."""

    def codes(self, x: Tensor, plan: Plan, prepared: Any, draw: Draw) -> Tensor:
        found = super().codes(x, plan, prepared, draw).clone()
        found[0, 0, 0, 0, 0, 0] += 1
        return found


def test_planted_code_is_caught(device: str) -> None:
    assert all(difference(OneTooHigh(), moved(case, device))[0] == 1 for case in configurations()[:3])
