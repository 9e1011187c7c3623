"""Every engine against the oracle: on random chips and products the ADC codes are the same, digit for digit, and outputs to float32.

seed ──configuration──> chip, ranges, x (B, M, K), w (K, N) ──program──> cells ──each engine──> codes == reference.codes;  out close
What must be able to fail: one code one too high, ties rounded up, a sign slice skipped where it is not zero.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.crossbar.cells import Cells, program
from ridgeline.crossbar.engine.blocked import BlockedEngine
from ridgeline.crossbar.engine.native import NativeEngine
from ridgeline.crossbar.engine.reference import ReferenceEngine
from ridgeline.crossbar.plan import Draw, Engine, Plan
from tests.crossbar.support import chip

CONFIGURATIONS, AT_ONCE = 500, 50
ORACLE, DRAW = ReferenceEngine(), Draw()


def engines() -> list[Any]:
    """All that run on a CPU; of those, `unable` says which run on this one."""
    return [BlockedEngine(), NativeEngine()]


@dataclass(frozen=True)
class Case:
    """One product on one chip."""

    plan: Plan
    x: Tensor
    cells: Cells
    codes: Tensor


def widths(of: random.Random, first_is_sign: bool, widest: int) -> list[int]:
    rest = [of.randint(1, widest) for _ in range(of.randint(1, 3))]
    return [1, *rest] if first_is_sign or sum(rest) < 2 else rest


def configuration(seed: int) -> Case:
    of = random.Random(seed)
    sign = of.choice(["slice", "differential", "offset"])
    x_slices, w_slices = widths(of, sign != "differential", 4), widths(of, sign == "slice", 3)
    rows, m, k, n = of.choice([1, 3, 4, 8, 16]), of.randint(1, 6), of.randint(1, 40), of.randint(1, 9)
    cell_levels, dac_levels = of.choice([2 ** max(w_slices), 2 ** max(w_slices) + of.randint(0, 5)]), of.choice([2, 3, 4, 6, 16])
    full = rows * (dac_levels - 1) * (cell_levels - 1)
    levels = [2, 3, of.randint(4, 40), 16, 256, 257, 4096, full + 1, 2 * full + 1, 4 * full + 1]
    adc_levels: Any = of.choice(levels)
    if of.random() < 0.2:
        adc_levels = [of.choice(levels) for _ in w_slices]

    def granularity() -> Any:
        return of.choice(["per-matrix", "per-row", "per-col", [1, rows * 2], [of.randint(1, 5), of.randint(1, 50)]])

    on = chip(
        array_rows=rows, array_columns=of.choice([1, 4, 32]), operands_format=of.choice(["int", "bfp"]), operands_sign=sign,
        operands_x_slices=x_slices, operands_w_slices=w_slices, operands_x_granularity=granularity(),
        operands_w_granularity=granularity(), operands_x_tile_rows=of.choice([1, 1, 2, 3]), dac_levels=dac_levels,
        cell_levels=cell_levels, adc_levels=adc_levels, adc_clip=of.random() < 0.5, adc_kind="ramp" if seed % 4 == 0 else "sar",
    )  # fmt: skip
    ranges = tuple(of.randint(1, full) for _ in w_slices) if of.random() < 0.4 else ()
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(2, m, k, generator=generator), torch.randn(1, k, n, generator=generator)
    if of.random() < 0.4:
        x = x.relu()  # the sign slice is all zero
    if of.random() < 0.3:
        x, w = x.mul(4).round(), w.mul(4).round()  # many ties and zero blocks
    plan = Plan(on, k, n, 1, ranges)
    cells = program(w, plan, DRAW)
    return Case(plan, x, cells, ORACLE.codes(x, plan, cells, DRAW))


def difference(engine: Any, case: Case) -> tuple[int, float]:
    """How many codes differ, and the largest error of an output in units of what float32 allows."""
    prepared = engine.prepare(case.plan, case.cells)
    wrong = int((engine.codes(case.x, case.plan, prepared, DRAW) != case.codes).sum())
    out = engine.product(case.x, case.plan, prepared, DRAW)
    expected = ORACLE.product(case.x.double(), case.plan, case.cells, DRAW)
    # sums of slices may cancel: what float32 loses is measured against the largest of them
    worth = max(abs(float(case.plan.worth(i, j))) for i in range(len(case.plan.x.widths)) for j in range(len(case.plan.w.widths)))
    step = float(case.cells.step.max()) * float(case.x.abs().max()) / (2 ** (case.plan.x.span - 2))
    terms = max(float(case.codes.abs().max()) * worth * step * case.plan.arrays * 2, float(expected.abs().max()), 1e-12)
    return wrong, float((out - expected).abs().max()) / (terms * 4e-6)


@pytest.mark.parametrize("part", range(CONFIGURATIONS // AT_ONCE))
def test_all_engines_give_the_oracles_codes(part: int) -> None:
    compared = 0
    for seed in range(part * AT_ONCE, (part + 1) * AT_ONCE):
        case = configuration(seed)
        for engine in engines():
            if engine.unable(case.plan, "cpu") is not None:
                continue
            wrong, excess = difference(engine, case)
            assert wrong == 0, (seed, engine.name, wrong, case.plan)
            assert excess <= 1, (seed, engine.name, excess, case.plan)
            compared += 1
    assert compared >= AT_ONCE


class OneTooHigh(BlockedEngine):
    """A planted error: the first code is one too high."""

    def codes(self, x: Tensor, plan: Plan, prepared: Any, draw: Draw) -> Tensor:
        found = super().codes(x, plan, prepared, draw)
        found.view(-1)[0] += 1
        return found


def test_planted_code_is_caught() -> None:
    assert all(difference(OneTooHigh(), configuration(seed))[0] == 1 for seed in range(5))


def test_planted_rounding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "round_", lambda self: self.add_(0.5).floor_())  # halves go up
    assert sum(difference(BlockedEngine(), configuration(seed))[0] > 0 for seed in range(30)) >= 5


def test_planted_skip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in map(configuration, range(20)) if case.plan.x.kind == "twos" and bool((case.x < 0).any())]
    plain = BlockedEngine._call

    def never_negative(*given: Any) -> Any:
        call = plain(*given)
        call.negative = False
        return call

    monkeypatch.setattr(BlockedEngine, "_call", never_negative)
    assert all(difference(BlockedEngine(), case)[0] > 0 for case in cases) and cases


def test_configurations_are_of_every_kind() -> None:
    plans = [configuration(seed).plan for seed in range(100)]
    assert {plan.chip.operands.sign for plan in plans} == {"slice", "differential", "offset"}
    assert {plan.chip.operands.format for plan in plans} == {"int", "bfp"}
    assert len({str(plan.chip.operands.x_granularity) for plan in plans}) > 4
    assert any(plan.ranges and plan.chip.adc.clip for plan in plans)
    assert {plan.chip.adc.kind for plan in plans} == {"sar", "ramp"}
    assert any(plan.scale(0).denominator == 1 for plan in plans) and any(plan.scale(0).denominator > 1 for plan in plans)


def test_the_engines_keep_the_protocol() -> None:
    checked: list[Engine] = [ORACLE, *engines()]
    assert {engine.name for engine in checked} >= {"reference", "blocked"}
