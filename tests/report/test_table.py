"""The terminal's view: what it says, how wide it is, and what it survives."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from ridgeline.core.profile import Advice
from ridgeline.report import table


def lines_of(text):
    return text.splitlines()


def test_totals_and_heading_of_an_estimate(estimate_profile):
    text = table.render_profile(estimate_profile, width=160)
    assert lines_of(text)[0] == "resnet50 on npu-256 · batch 1 · float16 · eager"
    for part in (
        "8.22 GFLOP", "219 MB (weights 51.2 MB, activations 168 MB", "limit       223 µs", "expected    1.07 ms, 21 % of the limit",
        "overhead 82 %, memory 18 %", "4.82 MB peak activations", "933 samples/s", "21.4 mJ",
    ):  # fmt: skip
        assert part in text
    assert "measured" not in text


def test_language_model_heading(large_profile):
    assert (
        lines_of(table.render_profile(large_profile, width=120))[0]
        == "llama-3-8b on h200 · batch 1 · bfloat16 · decode, context 192 · eager"
    )


def test_measured_profile_shows_spread_and_error(measured_profile):
    text = table.render_profile(measured_profile, width=160)
    timing = measured_profile.total.measured
    assert f"{timing.median_s * 1e3:.2f} ms (p20 {timing.p20_s * 1e3:.2f} ms, p80 {timing.p80_s * 1e3:.2f} ms, 30 repeats)" in text
    error = measured_profile.total.time_s / timing.median_s - 1
    assert f"prediction  {100 * error:+.1f} % against the measurement" in text
    assert re.search(r"expected +measured +share", text)


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_nothing_is_wider_than_asked(measured_profile, large_profile, comparison, sweep_points, width):
    texts = [table.render_profile(profile, width=width) for profile in (measured_profile, large_profile)]
    texts += [table.render_comparison(comparison, width=width), table.render_sweep(sweep_points, "batch", width=width)]
    for text in texts:
        assert max(map(len, lines_of(text))) <= width


def test_wide_table_has_every_column_and_narrow_says_which_it_lacks(measured_profile):
    wide = table.render_profile(measured_profile, width=160)
    header = next(line for line in lines_of(wide) if line.startswith("layer "))
    names = ["layer", "kind", "shape", "GFLOP", "MB", "FLOP/B", "limit", "expected", "measured", "share", "bottleneck", "cause"]
    assert header.split() == names
    assert "not at this width" not in wide
    narrow = table.render_profile(measured_profile, width=80)
    kept = next(line for line in lines_of(narrow) if line.startswith("layer ")).split()
    missing = re.search(r"not at this width: (.*)", narrow).group(1).split(", ")
    assert sorted(kept + missing) == sorted(names)
    assert {"layer", "expected", "measured", "share", "bottleneck"} <= set(kept)


def test_rows_are_the_heaviest_and_the_rest_is_summed(estimate_profile):
    text = table.render_profile(estimate_profile, limit=5, width=160)
    rows = sorted((row for row in estimate_profile.rows if row.kind != "view"), key=lambda row: -row.time_s)
    start = next(index for index, line in enumerate(lines_of(text)) if line.startswith("layer "))
    shown = [line.split()[0] for line in lines_of(text)[start + 2 : start + 7]]
    assert shown == [row.layer for row in rows[:5]]
    rest_us = 1e6 * sum(row.time_s for row in rows[5:])
    assert f"… {len(rows) - 5} more ops, " in text
    assert float(re.search(r"more ops, ([\d.]+) (µs|ms) in all", text).group(1)) * (1e3 if " ms in all" in text else 1) == pytest.approx(
        rest_us, rel=0.006
    )
    assert "1 view not shown" in text
    assert "more op" not in table.render_profile(estimate_profile, limit=None, width=160)


def test_shares_advice_uncounted_and_notes(estimate_profile):
    text = table.render_profile(estimate_profile, width=160)
    for share in estimate_profile.shares:
        if share.time_s:
            assert re.search(rf"^{share.kind} +.*{share.speedup_if_free:.3g}x$", text, re.MULTILINE)
    gains = re.findall(r"^ +([\d.]+)x  ", text, re.MULTILINE)
    assert gains == ["2.64", "1.82", "1.21", "1.04"]
    for part in (
        "next limit: compute",
        "107 launches",
        "torchvision.roi_align at head.roi: no formula",
        "layout conversions are not modelled",
    ):
        assert part in text


def test_user_text_is_neither_markup_nor_control(hostile_profile):
    text = table.render_profile(hostile_profile, width=160)
    assert "<script>alert('x')</script>[bold] on npu-256" in text
    assert "<!-- [/]" in text
    assert "\x1b" not in text
    assert "�[31m" in table.render_profile(replace(hostile_profile, rows=hostile_profile.rows[:1]), width=200)


def test_colour_only_when_asked(estimate_profile):
    assert "\x1b[" not in table.render_profile(estimate_profile, width=100)
    assert "\x1b[" in table.render_profile(estimate_profile, width=100, color=True)


def test_empty_and_odd_profiles_render(empty_profile, odd_profile):
    assert "no ops to show" in table.render_profile(empty_profile, width=80)
    text = table.render_profile(odd_profile, width=160)
    assert "∞" in text and "n/a" in text
    assert table.render_profile(odd_profile, limit=0, width=80)
    assert table.render_comparison([odd_profile, empty_profile], width=80)


def test_comparison_marks_the_fastest_and_gives_ratios(comparison):
    text = table.render_comparison(comparison, width=160)
    rows = [line for line in lines_of(text) if re.search(r" (h200|npu-256|cpu) ", f" {line} ")]
    assert [re.search(r"h200|npu-256|cpu", row).group() for row in rows] == ["h200", "npu-256", "cpu"]
    assert rows[0].startswith("*") and not rows[1].startswith("*")
    npu, fastest = (profile.total.time_s for profile in comparison[1:])
    assert f" {npu / fastest:.3g}x " in rows[1]
    assert "2,150 samples/s" in rows[0] and "launch" in rows[0]
    assert table.render_comparison([]) == "nothing to compare\n"


def test_sweep_marks_where_the_bottleneck_changes(sweep_points):
    text = table.render_sweep(sweep_points, "batch", width=120)
    changes = [line for line in lines_of(text) if "< was" in line]
    assert len(changes) == 1
    assert re.match(r" +8 .*memory +< was overhead", changes[0])
    first, last = (next(line for line in lines_of(text) if re.match(rf" *{value} ", line)) for value in (1, 256))
    assert last.count("█") == 20 and first.count("█") < 4
    assert "▁" in text


def test_sweep_survives_missing_and_odd_points():
    points = [
        {"value": 1},
        {"value": "big", "time_s": math.inf, "throughput_per_s": 0.0, "bottleneck": "memory", "roof_fraction": math.nan},
    ]
    assert "big" in table.render_sweep(points, "[b]x", width=80)
    assert table.render_sweep([], "batch", width=80)


def test_advice_order_puts_what_is_no_number_last(estimate_profile):
    profile = replace(estimate_profile, advice=(Advice("odd", math.nan, "memory"), Advice("good", 1.5, "memory")))
    text = table.render_profile(profile, width=100)
    assert text.index("good") < text.index("odd")


def test_the_profile_finds_its_renderer(estimate_profile):
    assert estimate_profile.table(width=100, limit=3) == table.render_profile(estimate_profile, width=100, limit=3)
