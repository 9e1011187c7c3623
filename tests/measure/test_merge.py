"""Prediction and measurement meet by name; fused rows need all their parts; nothing measured is lost."""

from __future__ import annotations

from typing import Any

from ridgeline.core.profile import OpRow, Profile, Roofs, Timing, Total
from ridgeline.measure.merge import merge


def row(name: str, **values: Any) -> OpRow:
    plain: dict[str, Any] = {
        "layer": "", "kind": "pointwise", "operator": "relu", "dtype": "float32", "input_shapes": (), "output_shapes": (), "flops": 1,
        "matmul_flops": 0, "bytes": 8, "bytes_by": {}, "intensity": 0.125,
    }  # fmt: skip
    return OpRow(name, **{**plain, **values})


def timing(milliseconds: float, repeats: int = 10) -> Timing:
    return Timing(milliseconds / 1e3, 0.9 * milliseconds / 1e3, 1.1 * milliseconds / 1e3, repeats)


def profile(*rows: OpRow, measured: Timing | None = None, notes: tuple[str, ...] = ()) -> Profile:
    total = Total(1, 0, 8, {}, 0.5, 0.4, "memory", 4, 4, 1, {}, measured=measured, measured_peak_bytes=77 if measured else None)
    return Profile("net", "cpu", 1, "float32", "eager", rows, total, Roofs({}, {}), notes=notes)


def test_rows_meet_by_name_and_estimates_stay() -> None:
    estimated = profile(row("conv", time_s=0.2, bottleneck="compute"), row("relu", time_s=0.1), notes=("same", "estimate"))
    found = merge(estimated, profile(row("relu", measured=timing(1)), row("conv", measured=timing(3)), measured=timing(5), notes=("same",)))
    assert [(r.name, r.time_s, r.measured) for r in found.rows] == [("conv", 0.2, timing(3)), ("relu", 0.1, timing(1))]
    assert (found.total.time_s, found.total.measured, found.total.measured_peak_bytes) == (0.5, timing(5), 77)
    assert found.notes == ("same", "estimate")


def test_fused_rows_take_the_sum_of_their_parts() -> None:
    fused = row("conv+relu", parts=("conv", "relu"))
    found = merge(profile(fused), profile(row("conv", measured=timing(3, 10)), row("relu", measured=timing(1, 8)), measured=timing(5)))
    measured = found.rows[0].measured
    assert measured is not None
    assert (round(measured.median_s, 9), round(measured.p20_s, 9), measured.repeats) == (0.004, 0.0036, 8)
    assert found.notes == ()


def test_a_missing_part_leaves_the_row_unmeasured_and_the_rest_noted() -> None:
    fused = row("conv+relu", parts=("conv", "relu"))
    for relu in ([], [row("relu")]):
        found = merge(profile(fused), profile(row("conv", measured=timing(3)), *relu, measured=timing(5)))
        assert found.rows[0].measured is None
        assert found.notes == ("measured but not estimated: conv (3.000 ms)",)


def test_repeated_names_meet_in_order() -> None:
    estimated = profile(row("add"), row("add"))
    found = merge(estimated, profile(row("add", measured=timing(1)), row("add", measured=timing(2)), measured=timing(5)))
    assert [r.measured for r in found.rows] == [timing(1), timing(2)]


def test_what_no_estimate_has_is_named_with_its_time() -> None:
    extra = [row(f"extra{i}", measured=timing(1)) for i in range(10)]
    found = merge(profile(row("conv")), profile(row("conv", measured=timing(3)), *extra, measured=timing(5)))
    assert len(found.notes) == 1
    assert "extra0, extra1" in found.notes[0] and "…" in found.notes[0] and "(10.000 ms)" in found.notes[0]
