"""What the renderers ask of a profile."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.profile import Timing
from ridgeline.report import summary
from ridgeline.report.table import STYLES


def test_shares_from_rows_equal_those_the_profile_brings(estimate_profile):
    brought = {share.kind: share for share in summary.shares(estimate_profile) if share.time_s}
    summed = {share.kind: share for share in summary.shares(replace(estimate_profile, shares=()))}
    assert set(brought) == set(summed)
    for kind, share in summed.items():
        assert share.fraction == pytest.approx(brought[kind].fraction)
        assert share.speedup_if_free == pytest.approx(1 / (1 - share.fraction))


def test_slices_are_fractions_of_the_whole_largest_first(measured_profile):
    layers = summary.by_layer(measured_profile)
    assert sum(part.fraction for part in layers) == pytest.approx(1)
    assert [part.time_s for part in layers] == sorted((part.time_s for part in layers), reverse=True)
    assert sum(part.time_s for part in layers) == pytest.approx(summary.pass_s(measured_profile))


def test_measured_times_win_over_expected(measured_profile):
    row = measured_profile.rows[0]
    assert summary.spent_s(row) == row.measured.median_s != row.time_s
    assert summary.shares_basis(measured_profile) == "by expected time"
    by_measurement = replace(measured_profile, shares=())
    assert summary.shares_basis(by_measurement) == "by measured time"


def test_views_are_hidden_and_rows_ordered(estimate_profile):
    rows = summary.shown_rows(estimate_profile)
    assert len(rows) == len(estimate_profile.rows) - 1
    assert all(row.kind != "view" for row in rows)
    assert [row.time_s for row in rows] == sorted((row.time_s for row in rows), reverse=True)


def test_throughput_counts_samples_or_tokens(estimate_profile):
    time_s = estimate_profile.total.time_s
    assert summary.throughput(estimate_profile) == (pytest.approx(1 / time_s), "samples/s")
    decode = replace(estimate_profile, phase="decode", context=192, batch=4)
    assert summary.throughput(decode) == (pytest.approx(4 / time_s), "tokens/s")
    prefill = replace(decode, phase="prefill")
    assert summary.throughput(prefill) == (pytest.approx(4 * 192 / time_s), "tokens/s")


def test_prediction_error_and_agreement(estimate_profile):
    assert summary.prediction_error(1.3, 1.0) == pytest.approx(0.3)
    assert summary.prediction_error(0.0, 1.0) is None
    row = replace(estimate_profile.rows[0], time_s=1.0)
    rows = [replace(row, measured=Timing(median, median, median, 1)) for median in (1.0, 1.1, 4.0)]
    within, of_time, median_error = summary.agreement(rows)
    assert within == 2
    assert of_time == pytest.approx(2.1 / 6.1)
    assert median_error == pytest.approx(1 - 1 / 1.1)
    assert summary.largest_misses(rows, 1) == [rows[2]]


def test_outer_intensity_is_that_of_the_last_level(estimate_profile):
    row = estimate_profile.rows[0]
    assert summary.outer_intensity(row) == row.level_intensity["HBM"]
    assert summary.outer_intensity(replace(row, level_intensity={})) == row.intensity
    assert summary.outer_intensity(replace(row, level_intensity={"HBM": math.inf})) == row.intensity


@pytest.mark.parametrize(("name", "slug"), [
    ("memory", "memory"), ("compute+memory", "mixed"), ("", "other"), ("unknown", "other"), ("adc", "adc"), ("array", "array"),
    ("exposed refills", "waiting"), ("fill and drain", "waiting"), ("noc", "communication"), ("host", "host"), ("global_buffer", "memory"),
])  # fmt: skip
def test_slug(name, slug):
    assert summary.slug(name) == slug
    css = (Path(summary.__file__).parent / "templates" / "report.css").read_text()
    assert f".b-{slug} {{ --c:" in css and slug in STYLES


def test_a_legend_names_what_its_colours_stand_for():
    named = ["adc", "dram", "host", "global_buffer", "compute+memory", "", "dram"]
    assert summary.limiters_named(named) == [
        ("memory", "dram, global_buffer"), ("adc", "adc"), ("host", "host"), ("mixed", "two at once"), ("other", "not known"),
    ]  # fmt: skip


def test_verdict_names_time_limit_bottleneck_and_best_change(estimate_profile, empty_profile):
    text = " ".join(summary.verdict(estimate_profile))
    for part in ("1.07 ms", "21 %", "223 µs", "82 %", "overhead", "batch 1 to 32", "2.64x"):
        assert part in text
    assert "no time" in " ".join(summary.verdict(empty_profile))
