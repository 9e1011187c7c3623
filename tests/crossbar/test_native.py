"""The compiled engine against the oracle: the same codes, the same convolutions, and a refusal for all it cannot do."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.core.errors import MeasureError, OptionError
from ridgeline.crossbar.cells import Cells, program
from ridgeline.crossbar.engine import native, native_build
from ridgeline.crossbar.engine.native import NativeEngine
from ridgeline.crossbar.engine.reference import ReferenceEngine, encode_input
from ridgeline.crossbar.plan import Draw, Plan, Window

from .support import chip

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

ENGINE, ORACLE = NativeEngine(), ReferenceEngine()
WINDOW = Window((3, 3), (1, 1), (1, 1), (1, 1))


def drawn_chip(pick: random.Random) -> dict[str, Any]:
    """A chip the engine can run, of any of the kinds it treats differently."""
    sign = pick.choice(["slice", "slice", "differential"])
    first = [1] if sign == "slice" else []
    x_slices, w_slices = (
        [*first, pick.choice([1, 2, 3]), *(pick.choice([1, 1, 2, 2, 3, 4]) for _ in range(pick.randint(1, 4)))] for _ in "xw"
    )
    dac_levels = pick.choice([2, 4, 5, 16, 128, 300])
    rows = pick.choice([4, 8, 13, 24, 32, 64] if dac_levels < 128 else [4, 13])  # every possible sum is tried: few of them, for time
    w_levels = 2 ** max(w_slices)
    return {
        "operands_sign": sign,
        "operands_x_slices": x_slices,
        "operands_w_slices": w_slices,
        "operands_format": pick.choice(["int", "bfp"]),
        "operands_x_granularity": pick.choice(["per-row", [1, 1], [1, 64], [1, 40]]),
        "operands_w_granularity": pick.choice(["per-col", "per-matrix", [32, 32]]),
        "array_rows": rows,
        "array_columns": pick.choice([8, 16, 32]),
        "dac_levels": dac_levels,
        "cell_levels": pick.choice([w_levels, w_levels, w_levels + 3, 200]),
        "adc_levels": pick.choice([2, 7, 64, 100, 256, 257, 4096, [256 + j for j in range(len(w_slices))]]),
        "adc_clip": pick.choice([False, True]),
    }


def drawn_plan(pick: random.Random, k: int, n: int, groups: int = 1) -> Plan:
    on = chip(**drawn_chip(pick))
    plan = Plan(on, k, n, groups)
    if pick.random() < 0.5:
        return plan
    return Plan(on, k, n, groups, tuple(max(1, plan.full // pick.choice([1, 2, 3, 7])) for _ in plan.w.widths))


def drawn_values(generator: torch.Generator, *shape: int) -> Tensor:
    """With exact zeros, many values exactly half a step from a whole one, and blocks of very different size."""
    values = torch.randn(*shape, generator=generator)
    halves = torch.randint(-62, 63, shape, generator=generator) / 62  # of 5 to 7 bits, many ties
    kind = torch.randint(0, 4, shape, generator=generator)
    mixed = torch.where(kind == 0, torch.zeros(()), torch.where(kind == 1, halves, values))
    return mixed * 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)


def both(plan: Plan, generator: torch.Generator, draw: Draw | None = None) -> tuple[Any, Any, Cells]:
    cells = program(torch.randn(plan.groups, plan.k, plan.n, generator=generator), plan, draw or Draw())
    assert ENGINE.unable(plan, "cpu") is None
    return ENGINE.prepare(plan, cells), ORACLE.prepare(plan, cells), cells


def size_of_terms(codes: Tensor, x: Tensor, plan: Plan, cells: Cells) -> Tensor:
    """(B, M, N): the sum of |code * worth * steps|, which float32 adds up; signs are slices, so the sum itself may be far smaller."""
    worth = torch.tensor([[abs(float(plan.worth(i, j))) for j in range(len(plan.w.widths))] for i in range(len(plan.x.widths))])
    x_step = encode_input(x, plan.chip).step[..., : plan.arrays]  # (B, M, arrays)
    return torch.einsum("baijmn,ij,bma,an->bmn", codes.abs().double(), worth.double(), x_step, cells.step[0])


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours.double() - theirs.double()).norm() <= 2e-6 * theirs.double().norm())


@pytest.mark.parametrize("number", range(100))
def test_codes_are_the_oracles_on_any_chip(number: int) -> None:
    pick, generator = random.Random(number), torch.Generator().manual_seed(number)
    plan = drawn_plan(pick, pick.choice([1, 9, 33, 70, 130]), pick.choice([1, 5, 17, 40]))
    x = drawn_values(generator, pick.choice([1, 2]), pick.choice([1, 7, 16, 35]), plan.k)
    x = x.abs() if pick.random() < 0.3 else x
    ours, theirs, cells = both(plan, generator)
    expected = ORACLE.codes(x, plan, theirs, Draw())
    assert torch.equal(ENGINE.codes(x, plan, ours, Draw()).long(), expected.long())
    off = (ENGINE.product(x, plan, ours, Draw()) - ORACLE.product(x.double(), plan, theirs, Draw())).abs()
    assert bool((off <= 1e-6 * size_of_terms(expected, x, plan, cells)).all())


@pytest.mark.parametrize("number", range(30))
def test_convolutions_of_any_window(number: int) -> None:
    pick, generator = random.Random(1000 + number), torch.Generator().manual_seed(number)
    axes, groups, channels = pick.choice([1, 2, 2, 2, 3]), pick.choice([1, 1, 2, 5]), pick.choice([1, 3])
    kernel, stride, padding, dilation = (
        tuple(pick.choice(of) for _ in range(axes)) for of in ([1, 2, 3], [1, 1, 2, 3], [0, 1, 2], [1, 1, 2])
    )
    window, size = Window(kernel, stride, padding, dilation), tuple(pick.choice([5, 7, 9]) for _ in range(axes))
    plan = drawn_plan(pick, channels * int(torch.Size(kernel).numel()), pick.choice([1, 4, 18]), groups)
    x = drawn_values(generator, 2, groups * channels, *size)
    ours, theirs, _ = both(plan, generator)
    found, expected = ENGINE.convolution(x, window, plan, ours, Draw()), ORACLE.convolution(x.double(), window, plan, theirs, Draw())
    assert found.shape == expected.shape and close(found, expected)


def test_planted_errors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One digit's rounding, one slice left out, one correction: each must change a code, or the tests above prove nothing."""
    generator = torch.Generator().manual_seed(5)
    x = drawn_values(generator, 1, 40, 70)
    for right, wrong, changes in (
        ("* 0x1p-21", "* 0.0", {"operands_x_slices": [1, 3, 4]}),
        ("active[++active[0]] = (uint8_t)i;", "if (i) active[++active[0]] = (uint8_t)i;", {}),
        ("splat(correction[pair % nj])", "splat(0)", {"operands_sign": "differential"}),
    ):
        assert native.SOURCE.count(right) == 1, right
        plan = Plan(chip(**changes), 70, 40)
        ours, theirs, _ = both(plan, generator)
        values = x if "0x1p" not in right else near_half_steps(generator)
        expected = ORACLE.codes(values, plan, theirs, Draw()).long()
        assert torch.equal(ENGINE.codes(values, plan, ours, Draw()).long(), expected)
        with monkeypatch.context() as patch:
            patch.setattr(native_build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native_build.FLAGS))
            patch.setattr(native, "SOURCE", native.SOURCE.replace(right, wrong))
            native._library.cache_clear()
            assert not torch.equal(ENGINE.codes(values, plan, ours, Draw()).long(), expected), wrong
        native._library.cache_clear()


def near_half_steps(generator: torch.Generator) -> Tensor:
    """Values whose quotient float32 rounds to exactly half a step, or to the other side of it."""
    maximum = torch.rand(1, 40, 1, generator=generator) + 1
    steps = (torch.randint(-126, 126, (1, 40, 70), generator=generator) + 0.5) / 127
    values = (steps.double() * maximum).float()
    values[..., ::35] = maximum
    return values


def test_noisy_cells_and_reads_differ_only_next_to_a_tie() -> None:
    generator = torch.Generator().manual_seed(3)
    for changes in ({"cell_write_sigma": 0.05}, {"cell_read_sigma": 0.05}, {"cell_stuck_high": 0.02}):
        plan = Plan(chip(**changes), 70, 40)
        ours, theirs, cells = both(plan, generator)
        whole = "cell_stuck_high" in changes
        x = drawn_values(generator, 1, 40, 70)
        for call in (0, 1):
            codes, expected = ENGINE.codes(x, plan, ours, Draw(call=call)).long(), ORACLE.codes(x, plan, theirs, Draw(call=call)).long()
            assert int((codes - expected).abs().max()) <= (not whole) and float((codes != expected).float().mean()) < 1e-4
    reads = [ENGINE.product(x, plan, ENGINE.prepare(plan, cells), Draw(call=call)) for call in (0, 0)]
    assert torch.equal(*reads)


def test_every_call_reads_anew() -> None:
    generator = torch.Generator().manual_seed(3)
    plan = Plan(chip(cell_read_sigma=0.05), 70, 40)
    ours, _, _ = both(plan, generator)
    x = drawn_values(generator, 1, 40, 70)
    assert not torch.equal(ENGINE.codes(x, plan, ours, Draw(call=0)), ENGINE.codes(x, plan, ours, Draw(call=1)))


def test_threads_change_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    plan, before = Plan(chip(), 36 * 9, 50), torch.get_num_threads()
    ours, _, _ = both(plan, generator)
    x = torch.randn(3, 36, 13, 13, generator=generator)
    outs = []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            outs.append(ENGINE.convolution(x, WINDOW, plan, ours, Draw()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_extreme_and_empty_inputs() -> None:
    generator = torch.Generator().manual_seed(6)
    for number_format in ("int", "bfp"):
        plan = Plan(chip(operands_format=number_format), 70, 40)
        ours, theirs, _ = both(plan, generator)
        x = torch.randn(1, 20, 70, generator=generator) * 10.0 ** torch.linspace(-44, 37, 20)[None, :, None]
        assert torch.equal(ENGINE.codes(x, plan, ours, Draw()).long(), ORACLE.codes(x, plan, theirs, Draw()).long())
        assert ENGINE.product(torch.zeros(2, 3, 70), plan, ours, Draw()).count_nonzero() == 0
        assert ENGINE.product(torch.zeros(0, 3, 70), plan, ours, Draw()).shape == (0, 3, 40)
        half = ENGINE.product(x[:, 10:12].half(), plan, ours, Draw())
        assert half.dtype == torch.float16
        for bad in (float("nan"), float("inf")):
            x[0, 3, 5] = bad
            with pytest.raises(OptionError, match="not finite"):
                ENGINE.product(x, plan, ours, Draw())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"operands_sign": "offset"}, "offset"),
        ({"operands_x_granularity": "per-matrix"}, "row by row"),
        ({"operands_x_granularity": [2, 64]}, "row by row"),
        ({"operands_x_tile_rows": 4}, "row by row"),
        ({"adc_noise_lsb": 4e5}, "below"),
        ({"dac_noise_sigma": 10.0, "adc_levels": 1 << 16}, "below"),
        ({"adc_levels": 1 << 24}, "below"),
        ({"operands_x_slices": [1, *[8] * 3]}, "bits"),
    ],
)
def test_refusals_say_why(changes: dict[str, Any], says: str) -> None:
    assert says in str(ENGINE.unable(Plan(chip(**changes), 70, 40), "cpu"))
    assert "cuda" in str(ENGINE.unable(Plan(chip(), 70, 40), "cuda:0"))


def test_without_a_compiler_it_is_unable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared, _, _ = both(Plan(chip(), 70, 40), torch.Generator())
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    try:
        for source, path, says in (("int broken(", None, "refused"), ("int unseen;", "", "not installed")):
            native._library.cache_clear()
            monkeypatch.setattr(native, "SOURCE", source)
            if path is not None:
                monkeypatch.setenv("PATH", path)
            plan = Plan(chip(), 70, 40)
            assert says in str(ENGINE.unable(plan, "cpu"))
            with pytest.raises(MeasureError, match=says):
                ENGINE.product(torch.ones(1, 1, 70), plan, prepared, Draw())
    finally:
        monkeypatch.undo()
        native._library.cache_clear()
    assert ENGINE.unable(Plan(chip(), 70, 40), "cpu") is None


def test_a_library_is_kept_and_a_broken_one_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert native_build.build("int seven(void) { return 7; }").seven() == 7
    (kept,) = (tmp_path / "native").glob("*.so")
    native_build._build.cache_clear()
    kept.write_bytes(b"half a file")
    assert native_build.build("int seven(void) { return 7; }").seven() == 7
    assert kept.stat().st_size > 1000


def test_a_convolution_is_no_more_than_some_times_the_digital_one() -> None:
    """Loosely: the figure itself is the benchmark's. Both on one thread, the best of several."""
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(7)
    plan = Plan(chip(), 64 * 9, 64)
    weight, x = torch.randn(64, 64, 3, 3, generator=generator), torch.randn(1, 64, 56, 56, generator=generator).relu()
    prepared = ENGINE.prepare(plan, program(weight.flatten(1).T[None], plan, Draw()))
    torch.set_num_threads(1)
    try:
        analog = best_s(lambda: ENGINE.convolution(x, WINDOW, plan, prepared, Draw()))
        digital = best_s(lambda: functional.conv2d(x, weight, padding=1))
    finally:
        torch.set_num_threads(before)
    assert analog < 30 * digital


def best_s(call: Any) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
