"""Changes as text and as a page: every number is there, nothing from a name can run."""

from __future__ import annotations

import json
import re

import pytest

from ridgeline.core.change import Change, State
from ridgeline.core.profile import Timing
from ridgeline.report.change_table import rows, score, step_rows, summary


def timing(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 9)


def change(name: str = "small", steps: bool = True) -> Change:
    before = State(1000, 250, 250, timing(2e-3), 4000, {"accuracy": 0.9339, "perplexity": 20.0})
    middle = State(600, 250, 50, timing(1.9e-3), 4000, {"accuracy": 0.93, "perplexity": 21.0})
    after = State(250, 250, 50, timing(1e-3), 2000, {"accuracy": 0.9312, "perplexity": 22.0})
    rows = [{"name": "conv1", "bits": 4, "sqnr_db": 20.25, "ok": True}, {"name": "fc", "bits": 8, "sqnr_db": None}]
    first = Change("prune 80 %", "resnet", "cpu", before, middle, target_sparsity=0.8, notes=("fc was left",))
    second = Change("quantize int4", "resnet", "cpu", middle, after, storage_only=("int4",), details={"layers": rows, "curve": [1, 2]})
    parts = (first, second) if steps else ()
    return Change(name, "resnet", "cpu", before, after, {"bits": 4}, 0.8, 1.5, (1.9, 2.1), ("int4",), ("a note",), {}, parts)


def test_table_has_every_number() -> None:
    text = change().table(width=140)
    numbers = (
        "4.00x smaller",
        "2.00x as fast (1.90 to 2.10)",
        "93.39 %",
        "93.12 %",
        "-0.27 points",
        "+10 %",
        "80.0 %",
        "target 80.0 %",
        "1.50x",
        "4 kB",
    )
    for said in (*numbers, "prune 80 %", "quantize int4", "storage only on cpu: int4", "a note", "prune 80 %: fc was left"):
        assert said in text, said
    assert "steps" not in change(steps=False).table()


def test_lines_of_steps_follow_the_states() -> None:
    lines = step_rows(change())
    assert [line[0] for line in lines] == ["resnet", "prune 80 %", "quantize int4"]
    assert [line[1] for line in lines] == ["1,000", "600", "250"]
    assert lines[2][2] == "2.40x" and lines[2][6] == "1.90x"


def test_what_was_not_measured_reads_as_missing() -> None:
    bare = Change("x", "m", "cpu", State(10, 0, 0), State(10, 0, 0, quality={"accuracy": 0.5}))
    found = {row[0]: row for row in rows(bare)}
    assert found["latency"][1:] == ("–", "–", "–")
    assert found["accuracy"] == ("accuracy", "–", "50.00 %", "–")
    assert "as fast" not in summary(bare)
    assert "–" in bare.table() and "<html" in bare.to_html()


@pytest.mark.parametrize(("name", "value", "text"), [("accuracy", 0.99444, "99.44 %"), ("loss", 0.013751, "0.01375"), ("loss", None, "–")])
def test_scores_read_as_people_write_them(name: str, value: float | None, text: str) -> None:
    assert score(name, value) == text


def test_page_is_whole_and_fetches_nothing() -> None:
    page = change().to_html()
    for said in ("4.00x smaller", "quantize int4: layers", "conv1", "20.25", "prune 80 %", "Bytes on disk"):
        assert said in page, said
    assert page.count("<rect") >= 6  # bytes and latency of three states
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert data == change().to_json()


def test_hostile_names_stay_text() -> None:
    page = change('<script>alert(1)</script>"&').to_html()
    assert "<script>alert" not in page
    assert "\x1b" not in change("a\x1b[31m").table()
