"""A comparison says which of its figures are limits that nobody timed, and which runs the memory does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline import capture, estimate
from ridgeline.core.profile import Profile
from ridgeline.report.basis import basis_lines, fastest_s, headline, ranked, with_basis
from ridgeline.report.html import render_comparison_html
from ridgeline.report.table import render_comparison

LIMITS = "each op at its limit, plus launches and page faults as its file states them: no op was timed on it"


@pytest.fixture(scope="module")
def three() -> list[Profile]:
    work = capture("digits-cnn")
    return [with_basis(estimate(work, target)) for target in ("h200", "l4", "rram-64")]


def test_a_limit_is_no_plain_winner_over_what_was_timed(three: list[Profile]) -> None:
    quick = replace(three[1], total=replace(three[1].total, time_s=1e-9, limit_s=1e-9))
    assert headline([three[0], quick]).startswith("l4 is the fastest if its ops reach their limits, which nobody measured: 1 ns a pass")
    assert headline([quick]).startswith("l4 is the fastest: 1 ns") and headline([three[0]]).startswith("h200 is the fastest: ")
    page = render_comparison_html([three[0], quick])
    assert "l4 is the fastest if its ops reach their limits" in page
    assert page.count("because no op was timed on them: l4.") == 1 and LIMITS in page


def test_what_each_stands_on_is_in_its_notes(three: list[Profile]) -> None:
    measured, ideal, chip = three
    assert LIMITS not in measured.notes and LIMITS in ideal.notes
    assert any("operands of its own width (int8)" in note for note in chip.notes)
    assert [line.rpartition(": ")[2] for line in basis_lines(three)] == ["l4", "rram-64 int8"]


def test_a_run_that_does_not_fit_wins_nothing(three: list[Profile]) -> None:
    slow, quick = three[0], replace(three[1], notes=("does not fit: 9 B",), total=replace(three[1].total, time_s=1e-9))
    assert ranked([quick, slow]) == [slow, quick] and fastest_s([quick, slow]) == slow.total.time_s
    assert headline([quick, slow]).startswith("h200 is the fastest: ") and headline([quick]).startswith("None of these targets holds")
    assert basis_lines([quick, slow])[0] == "cannot run, because the memory does not hold it: l4"
    starred = next(line for line in render_comparison([quick, slow]).splitlines() if line.startswith("*"))
    assert "h200" in starred and fastest_s([quick]) == 0 and "l4" in render_comparison([quick])
    assert "cannot run" in render_comparison_html([quick]).lower()


def test_one_target_is_not_several(three: list[Profile]) -> None:
    assert "digits-cnn on 1 target ·" in render_comparison(three[:1])
    page = render_comparison_html(three[:1])
    assert "<title>digits-cnn on 1 target" in page and "1 targets" not in page and "2 targets" in render_comparison_html(three[:2])
