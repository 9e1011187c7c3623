"""`ridgeline compare` says in every form what its figures stand on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LIMITS = "each op at its limit, plus launches and page faults as its file states them: no op was timed on it"


def test_limits_are_told_from_what_was_timed(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    done = run("compare", "digits-cnn", "--on", "h200,l4", "--html", page, "--json")
    notes = {one["target"]: one["notes"] for one in json.loads(done.out)["targets"]}
    assert LIMITS in notes["l4"] and LIMITS not in notes["h200"] and LIMITS in page.read_text()
    assert "no op was timed on them: l4" in run("compare", "digits-cnn", "--on", "h200,l4").out
    assert run("compare", "digits-cnn", "--on", "h200").out.startswith("digits-cnn on 1 target ·")


def test_a_huge_batch_is_three_lines(run: Any) -> None:
    for command in ("analyze", "compare", "map"):
        done = run(command, "digits-cnn", "--batch", 10**20)
        assert done.code == 2 and "OptionError: batch = 100000000000000000000" in done.err and "Traceback" not in done.err
