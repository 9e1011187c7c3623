"""An optimised graph as text and as a page: every pass, every reason, the pictures, the memory map; nothing a model names can run."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from ridgeline.core.change import Change, State
from ridgeline.core.profile import Timing
from ridgeline.report.graph_html import render_optimized_html
from ridgeline.report.graph_picture import MOST_NODES, draw_memory, draw_region
from ridgeline.report.graph_table import memory_lines, opportunity_rows, pass_rows, refusal_rows, render_optimized

HOSTILE = '"><script>alert(1)</script>'


def region(*ops: str, marked: int = 1) -> dict[str, Any]:
    nodes = [{"name": f"{op}_{place}", "op": op, "marked": place < marked} for place, op in enumerate(ops)]
    return {"nodes": nodes, "edges": [[a["name"], b["name"]] for a, b in pairwise(nodes)]}


def place(what: str, layer: str = "conv1", saved: int = 0, picture: Any = None) -> dict[str, Any]:
    return {"nodes": ["conv2d"], "layer": layer, "what": what, "saved_bytes": saved, "picture": picture}


def run(name: str, changed: list[Any], refused: list[Any], **given: Any) -> dict[str, Any]:
    base = {
        "name": name, "round": 1, "nodes_before": 1200, "nodes_after": 1100, "changed_sites": len(changed), "refused_sites": len(refused),
        "saved_bytes": sum(one["saved_bytes"] for one in changed), "seconds": 0.1, "check_error": 2e-7, "predicted_gain": None,
        "measured_gain": None, "changed": changed, "refused": refused,
    }  # fmt: skip
    return base | given


@pytest.fixture
def change() -> Change:
    picture = {"before": region("conv2d", "batch_norm", "relu", marked=2), "after": region("conv2d", "relu")}
    timing = Timing(0.2, 0.19, 0.21, 9), Timing(0.1, 0.09, 0.11, 9)
    states = [State(bytes_on_disk=1000 - 100 * at, parameters=10, nonzero=10, latency=one) for at, one in enumerate(timing)]
    details = {
        "nodes": {"before": 1200, "after": 1100},
        "passes": [
            run("dead", [], []),
            run("fold_norm", [place("conv2d + batch_norm -> conv2d", saved=5_000_000, picture=picture)],
                [place("its output has 2 consumers", "layer1"), place("its output has 3 consumers", "layer2")],
                predicted_gain=1.62, measured_gain=1.21),
        ],
        "opportunities": [
            {"pattern": "conv + norm", "by": "fold_norm", "fusable": 19, "total": 20, "saved_bytes": 19_900_000, "examples": ["bn1"]},
            {"pattern": "rope", "by": "", "fusable": 0, "total": 0, "saved_bytes": 0, "examples": []},
        ],
        "memory": {
            "arena_bytes": 1030, "lower_bound_bytes": 1000, "workspace_bytes": 77, "method": "greedy", "used": True, "recomputed": None,
            "intervals": [{"node": "relu", "bytes": 515, "offset": 515, "first": 3, "last": 5, "aliases": []}],
        },
    }  # fmt: skip
    return Change("optimize", "resnet18", "cpu", *states, details=details, notes=("a note",))


def test_every_pass_and_reason_is_in_the_text(change: Change) -> None:
    text = render_optimized(change, width=160)
    assert "1,200 nodes to 1,100" in text and "2.00x as fast" in text and "a note" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("fold_norm"))
    assert re.search(r"fold_norm\s+1\s+1,200\s+1,100\s+1\s+2\s+5 MB\s+1\.62x\s+1\.21x\s+2\.0e-07", line)
    assert "nothing to do for: dead" in text and "its output has 2 consumers" in text
    assert "arena 1,030 B, +3.0 % against the lower bound 1,000 B" in text and "workspace 77 B" in text
    assert "conv + norm" in text and "rope" not in text


def test_reasons_that_differ_in_a_number_are_one(change: Change) -> None:
    assert refusal_rows(change) == [["fold_norm", "2", "its output has 2 consumers", "layer1"]]
    assert opportunity_rows(change) == [["conv + norm", "fold_norm", "19", "20", "19.9 MB", "bn1"]]
    assert [row[0] for row in pass_rows(change)] == ["fold_norm"]


def test_a_change_without_passes_or_plan_is_drawn(change: Change) -> None:
    bare = dataclasses.replace(change, details={})
    assert memory_lines(bare) == [] and "optimize · resnet18" in render_optimized(bare)
    assert "What each pass changed" not in render_optimized_html(bare)


class Tags(HTMLParser):
    """Counts elements and keeps scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1


def test_the_page_has_pictures_and_a_memory_map(change: Change) -> None:
    page = render_optimized_html(change)
    assert page.count('class="chart region-picture"') == 2 and "Memory map: 1 tensors" in page
    assert 'id="pictures"' in page and 'id="memory"' in page and 'id="opportunities"' in page
    assert "http:" not in page.replace("http://www.w3.org", "") and "https:" not in page


def test_a_hostile_name_stays_text(change: Change) -> None:
    plain = Tags(render_optimized_html(change)).counts
    details = dict(change.details)
    details["passes"] = [
        run(HOSTILE, [place(HOSTILE, HOSTILE, 9, {"before": region(HOSTILE), "after": region(HOSTILE)})], [place(HOSTILE)])
    ]
    page = render_optimized_html(dataclasses.replace(change, model=HOSTILE, details=details, notes=(HOSTILE,)))
    assert Tags(page).counts["script"] == plain["script"] and "<script>alert" not in page


def test_weights_are_left_out_and_large_regions_are_cut() -> None:
    many = region(*["relu"] * (MOST_NODES + 5))
    assert "5 more nodes" in draw_region(many, "large", new=True)
    drawn = draw_region(region("get_attr", "conv2d"), "small", new=False)
    assert drawn.count("<rect") == 1 and "get_attr" not in drawn


def test_rectangles_of_the_memory_map_lie_where_the_plan_says(change: Change) -> None:
    drawn = str(draw_memory(change.details["memory"]))
    found = re.search(r'class="mapped k0" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
    assert found is not None
    x, y, width, height = map(float, found.groups())
    assert x == pytest.approx(80) and width == pytest.approx(1100)  # steps 3 to 5 of 3 to 5
    assert y == pytest.approx(28, abs=0.1) and height == pytest.approx((420 - 46 - 28) / 2, rel=0.01)  # the upper half
    assert draw_memory({**change.details["memory"], "intervals": []}) is None
