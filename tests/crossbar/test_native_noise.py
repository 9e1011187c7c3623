"""The compiled engine's random numbers, its conversions with them, and slices collapsed where nothing is lost.

same draw ──native, oracle──> codes: equal, but where the oracle's value lies so near a half that float32 may decide otherwise
Planted errors: a wrong kind, a wrong index of conversion, voltage and offset, noise left out where inputs are zero, a wrong weight of a
slice.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.crossbar import noise
from ridgeline.crossbar.cells import Cells
from ridgeline.crossbar.engine import native, native_build, reference
from ridgeline.crossbar.noise import Kind
from ridgeline.crossbar.plan import Draw, Plan, Window

from .support import chip
from .test_native import ENGINE, ORACLE, both, close, drawn_chip, drawn_values

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

DRAW = Draw(seed=7, chip=3, layer=5, call=2)
LOUD = {"adc_noise_lsb": 0.7, "adc_offset_lsb": 1.5, "dac_noise_sigma": 0.05}
SMALL = {"adc_levels": 64, "operands_x_slices": [1, 2, 2], "operands_w_slices": [1, 1, 1, 1, 2]}


def compiled_normals(draw: Draw, kind: Kind, count: int, sigma: float = 1.0, first: int = 0) -> Tensor:
    out = torch.empty(count)
    native._compiled().normals(draw.seed, draw.chip, *noise.stream_of(draw, kind), first, count, sigma, out.data_ptr())
    return out


def oracles(x: Tensor, plan: Plan, cells: Cells, draw: Draw) -> tuple[Tensor, Tensor]:
    """Codes (B, arrays, Sx, Sw, M, N), and what was rounded to them."""
    values: list[Tensor] = []

    def noting(total: Tensor, plan: Plan, j: int, added: Tensor | None = None) -> Tensor:
        exact = total.double() * float(plan.scale(j))
        values.append(exact if added is None else exact + added)
        return plain(total, plan, j, added)

    plain = reference.to_codes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "to_codes", noting)
        codes = ORACLE.codes(x, plan, cells, draw)
    slices = len(plan.w.widths)
    by_slice = [torch.stack(values[first : first + slices], -3) for first in range(0, len(values), slices)]
    return codes.long(), torch.stack(by_slice, -4)


def unexplained(found: Tensor, codes: Tensor, values: Tensor, plan: Plan) -> int:
    """Codes that differ though the value was not within 1e-4 of a half; in proportion to the sums where codes exceed 256."""
    most = torch.tensor([float(plan.full * plan.scale(j)) for j in range(len(plan.w.widths))])[:, None, None]
    near = ((values - values.floor() - 0.5).abs() <= 1e-4 * (most / 256).clamp(min=1)) & ((found.long() - codes).abs() <= 1)
    return int(((found.long() != codes) & ~near).sum())


def noisy_chip(pick: random.Random) -> dict[str, Any]:
    changes = {name: sigma for name, sigma in LOUD.items() if pick.random() < 0.6}
    if pick.random() < 0.4:
        changes |= {"cell_write_sigma": 0.05}
    if pick.random() < 0.2:
        changes |= {"cell_read_sigma": 0.02}
    return drawn_chip(pick) | (changes or {"adc_noise_lsb": 0.3})


@pytest.mark.parametrize("draw", [DRAW, Draw(), Draw(2**32 - 1, 2**32 - 1, 2**28 - 1, 2**32 - 1)])
def test_normals_are_those_of_noise_py(draw: Draw) -> None:
    count = 100_003  # ends within a counter
    for kind in (Kind.ADC, Kind.OFFSET):
        expected = noise.normals(draw, kind, 0, count, torch.device("cpu"))
        assert (compiled_normals(draw, kind, count) - expected).abs().max() < 1e-6
        assert (compiled_normals(draw, kind, count, 0.3) - 0.3 * expected).abs().max() < 1e-6
    beyond = noise.normals(draw, Kind.ADC, 4 * (2**32 - 3), 64, torch.device("cpu"))  # counters of more than 32 bits
    assert (compiled_normals(draw, Kind.ADC, 64, first=2**32 - 3) - beyond).abs().max() < 1e-6
    assert (compiled_normals(draw, Kind.ADC, count) - noise.normals(draw, Kind.READ, 0, count, torch.device("cpu"))).abs().max() > 1


@pytest.mark.parametrize("number", range(40))
def test_noisy_codes_are_the_oracles_but_next_to_a_half(number: int) -> None:
    pick, generator = random.Random(2000 + number), torch.Generator().manual_seed(number)
    plan = Plan(chip(**noisy_chip(pick)), pick.choice([1, 9, 33, 70, 130]), pick.choice([1, 5, 17, 40]))
    x = drawn_values(generator, pick.choice([1, 2]), pick.choice([1, 7, 16, 35]), plan.k)
    x = x.abs() if pick.random() < 0.5 else x
    ours, _, cells = both(plan, generator, DRAW)
    codes, values = oracles(x, plan, cells, DRAW)
    found = ENGINE.codes(x, plan, ours, DRAW)
    assert unexplained(found, codes, values, plan) == 0
    assert (found.long() != codes).double().mean() < 2e-3
    assert (ENGINE.product(x, plan, ours, DRAW) - from_codes(found, x, plan, cells)).abs().max() <= 1e-5 * float(
        size(found, x, plan, cells)
    )


def from_codes(codes: Tensor, x: Tensor, plan: Plan, cells: Cells) -> Tensor:
    return reference._shift_add(codes.long(), None, _step(x, plan), cells.step[0], plan)


def size(codes: Tensor, x: Tensor, plan: Plan, cells: Cells) -> Tensor:
    """The largest sum of code * worth in a row, without signs: what float32 adds up."""
    worth = torch.tensor([[abs(float(plan.worth(i, j))) for j in range(len(plan.w.widths))] for i in range(len(plan.x.widths))])
    return torch.einsum("baijmn,ij,bam,an->bmn", codes.abs().double(), worth.double(), _step(x, plan), cells.step[0]).max()


def _step(x: Tensor, plan: Plan) -> Tensor:
    return reference._input_step(reference.encode_input(x, plan.chip), plan, x.shape[-2])


@pytest.mark.parametrize("changes", [LOUD, {"adc_noise_lsb": 1.0}, {"adc_offset_lsb": 2.0}, {"dac_noise_sigma": 0.2}])
def test_noisy_convolutions_number_images_places_and_groups_as_the_oracle_does(changes: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(4)
    plan, quiet = (Plan(chip(**SMALL, array_rows=8, **more), 2 * 9, 5, 3) for more in (changes, {}))
    window, x = Window((3, 3), (2, 1), (1, 1), (1, 1)), torch.randn(3, 6, 9, 7, generator=generator)
    ours, theirs, _ = both(plan, generator, DRAW)
    found, expected = ENGINE.convolution(x, window, plan, ours, DRAW), ORACLE.convolution(x.double(), window, plan, theirs, DRAW)
    noise_norm = (expected - ORACLE.convolution(x.double(), window, quiet, theirs, DRAW)).norm()
    assert (found - expected).norm() < 0.02 * noise_norm


def test_results_do_not_depend_on_threads_or_on_the_rest_of_a_batch() -> None:
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(5)
    plan = Plan(chip(**LOUD, cell_read_sigma=0.02), 70, 40)
    x = torch.randn(3, 50, 70, generator=generator)
    ours, _, _ = both(plan, generator, DRAW)
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(ENGINE.product(x, plan, ours, DRAW))
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert torch.equal(ENGINE.product(x[:1], plan, ours, DRAW), outs[0][:1])
        assert not torch.equal(ENGINE.product(x, plan, ours, replace(DRAW, call=3)), outs[0])
    finally:
        torch.set_num_threads(before)


def test_zeros_are_converted_with_their_noise() -> None:
    plan = Plan(chip(**SMALL, adc_noise_lsb=1.0, adc_offset_lsb=1.0), 70, 40)
    ours, _, cells = both(plan, torch.Generator().manual_seed(6), DRAW)
    x = torch.rand(1, 20, 70).mul(torch.tensor([0.0, 1.0])[torch.arange(20) % 2][None, :, None])  # no negative number, many rows of zeros
    codes, values = oracles(x, plan, cells, DRAW)
    found = ENGINE.codes(x, plan, ours, DRAW)
    assert unexplained(found, codes, values, plan) == 0 and int(found[:, :, 0].count_nonzero()) > 1000
    assert "converted, not multiplied" in str(ENGINE.shortcuts(plan, ours))


def wrong_codes() -> int:
    """On one small noisy case; what a planted error must make large."""
    plan, generator = Plan(chip(**SMALL, **LOUD), 70, 6), torch.Generator().manual_seed(9)
    ours, _, cells = both(plan, generator, DRAW)
    x = torch.randn(2, 20, 70, generator=generator)
    codes, values = oracles(x, plan, cells, DRAW)
    return unexplained(ENGINE.codes(x, plan, ours, DRAW), codes, values, plan)


@pytest.mark.parametrize("kind", [Kind.ADC, Kind.DAC, Kind.OFFSET])
def test_planted_kinds_are_caught(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    plain = noise.stream_of

    class Wrong:
        """noise.py, but that one kind is another."""

        Kind = noise.Kind

        @staticmethod
        def stream_of(draw: Draw, wanted: noise.Kind) -> tuple[int, int]:
            stream, call = plain(draw, wanted)
            return (stream + 8 if wanted == kind else stream), call

    assert wrong_codes() == 0
    monkeypatch.setattr(native, "noise", Wrong)
    assert wrong_codes() > 100


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(column * job->arrays + array) * quads", "(array * columns + column) * quads"),
        ("found.phase[lane] = (int32_t)(number % 4);", "found.phase[lane] = 0;"),
        ("i <= silent[0]; i++", "i < silent[0]; i++"),
    ],
)
def test_planted_indices_are_caught(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    plan = Plan(chip(**SMALL, **LOUD), 71, 6)
    ours, _, cells = both(plan, torch.Generator().manual_seed(9), DRAW)
    x = torch.rand(2, 20, 71, generator=torch.Generator().manual_seed(9))
    codes, values = oracles(x, plan, cells, DRAW)
    assert unexplained(ENGINE.codes(x, plan, ours, DRAW), codes, values, plan) == 0
    assert native.SOURCE.count(right) == 1, right
    monkeypatch.setattr(native_build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native_build.FLAGS))
    monkeypatch.setattr(native, "SOURCE", native.SOURCE.replace(right, wrong))
    native._library.cache_clear()
    try:
        assert unexplained(ENGINE.codes(x, plan, ours, DRAW), codes, values, plan) > 100
    finally:
        native._library.cache_clear()


def test_the_portable_loops_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for no processor in particular."""
    generator, cases = torch.Generator().manual_seed(8), []
    for changes in (
        {},
        {"operands_sign": "differential", "adc_clip": True},
        {"operands_format": "bfp", "dac_levels": 300},
        {"adc_levels": 100},
        {**SMALL, **LOUD},
    ):
        plan = Plan(chip(**changes), 70, 40)
        x = drawn_values(generator, 1, 40, 70)
        ours, _, cells = both(plan, generator, DRAW)
        cases.append((x, plan, ours, *oracles(x, plan, cells, DRAW)))
    flags = [flag for flag in native_build.FLAGS if flag not in ("-march=native", "-O3")]
    monkeypatch.setattr(native_build, "FLAGS", (*flags, "-O0"))
    monkeypatch.setattr(native, "SOURCE", native.SOURCE + "/* another text, another library */")
    native._library.cache_clear()
    try:
        for x, plan, ours, codes, values in cases:
            found = ENGINE.codes(x, plan, ours, DRAW).long()
            assert torch.equal(found, codes) if plan.chip.ideal else unexplained(found, codes, values, plan) == 0
    finally:
        native._library.cache_clear()


def lossless(number: int) -> tuple[Plan, Tensor, Any, Any]:
    """A chip whose codes are whole multiples of its sums."""
    pick, generator = random.Random(number), torch.Generator().manual_seed(number)
    drawn = drawn_chip(pick)
    widths = max(*drawn["operands_x_slices"], *drawn["operands_w_slices"])
    drawn |= {
        "dac_levels": 2**widths if pick.random() < 0.7 else 7 * 15 + 1,
        "cell_levels": 2**widths,
        "array_rows": pick.choice([4, 8, 13]),
    }
    drawn |= {"cell_stuck_high": pick.choice([0.0, 0.05]), "adc_levels": 2}
    full = Plan(chip(**drawn), 1, 1).full
    signed = drawn["operands_sign"] == "differential"
    plan = Plan(chip(**drawn | {"adc_levels": full * pick.choice([1, 3]) * (1 + signed) + 1}), pick.choice([5, 40, 70]), 9)
    ours, theirs, _ = both(plan, generator, DRAW)
    return plan, drawn_values(generator, 2, 17, plan.k), ours, theirs


def test_slices_are_collapsed_where_nothing_is_lost() -> None:
    forms = set()
    for number in range(60):
        plan, x, ours, theirs = lossless(number)
        out = ENGINE.product(x, plan, ours, DRAW)
        assert close(out, ORACLE.product(x.double(), plan, theirs, DRAW)), number
        if ours.collapsed is not None:
            forms.add((plan.signed, ours.collapsed.packed.levels.dtype))
            assert "collapsed" in str(ENGINE.shortcuts(plan, ours))
            assert torch.equal(ENGINE.codes(x, plan, ours, DRAW).long(), ORACLE.codes(x, plan, theirs, DRAW))
    assert forms == {(signed, dtype) for signed in (False, True) for dtype in (torch.int8, torch.float32)}


def test_a_wrong_weight_of_a_slice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = native.collapsed_weights
    monkeypatch.setattr(native, "collapsed_weights", lambda *given: (plain(*given)[0], [1] * len(plain(*given)[1]), *plain(*given)[2:]))
    wrong = 0
    for number in range(10):
        plan, x, ours, theirs = lossless(number)
        wrong += not close(ENGINE.product(x, plan, ours, DRAW), ORACLE.product(x.double(), plan, theirs, DRAW))
    assert wrong > 3


@pytest.mark.parametrize(
    "changes", [{"adc_noise_lsb": 0.1}, {"dac_noise_sigma": 0.1}, {"adc_levels": 290}, {"adc_levels": 65, "adc_clip": True}]
)
def test_slices_stay_apart_where_something_is_lost(changes: dict[str, Any]) -> None:
    plan, clipped = Plan(chip(**{"adc_levels": 289} | changes), 32, 5), "adc_clip" in changes
    plan = replace(plan, ranges=(64,) * 4) if clipped else plan
    ours, _, _ = both(plan, torch.Generator().manual_seed(1))
    assert ours.collapsed is None and "collapsed" not in str(ENGINE.shortcuts(plan, ours))
    ideal = Plan(chip(adc_levels=289), 32, 5)
    assert both(ideal, torch.Generator().manual_seed(1))[0].collapsed is not None
