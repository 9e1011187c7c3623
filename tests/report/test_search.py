"""A search as text and as a page: every figure is there, unfinished runs too, nothing from a name can run."""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.report.search_html import render_search_html
from ridgeline.report.search_table import heading, live_table, render_search, trial_line
from ridgeline.search.study.objectives import parse_objectives
from ridgeline.search.study.result import Front, Shipped, Trial

HOSTILE = "</script><img src=x onerror=alert(1)>"
GENOTYPE = {"schema": 1, "space": "nb201", "settings": {}, "cells": {}}


def front(space: str = "nb201", objectives: str = "accuracy,latency", finished: bool = True) -> dict[str, Any]:
    request = {"space": space, "data": "digits", "target": "h200", "strategy": "model", "budget": "4trials", "seeds": [0, 1]}
    found = Front({**request, "limits": ["latency<=2ms"]}, parse_objectives(objectives))
    values = [(0.91, 1.5e-3), (0.95, 1.9e-3), (0.90, 1.6e-3), (0.97, 2.5e-3), (0.95, 1.9e-3)]
    for number, (accuracy, latency) in enumerate(values):
        known = {"latency": latency, **({"accuracy": accuracy} if latency <= 2e-3 else {})}
        why = "" if latency <= 2e-3 else f"latency {latency} breaks latency<=2ms {HOSTILE}"
        found.trials.append(Trial(number, number // 3, (number,), 1.0, known, not why, 2.0, why, 1 if number == 4 else None))
    if finished:
        found.winners, found.notes = {0: 1, 1: 4}, [f"note {HOSTILE}"]
        found.genotypes = {1: dict(GENOTYPE)}
        found.shipped = [Shipped(0, 1, (1,), {}, {"accuracy": 0.9}, 5.0), Shipped(1, 4, (4,), {}, {"accuracy": 0.94}, 5.0)]
        found.exported = {"weights": "winner/weights.safetensors"}
    return dict(found.to_json())


def test_text_has_the_front_the_winners_and_the_spread() -> None:
    data = front()
    text = render_search(data, width=140)
    assert data["front"] == [1, 0] and data["winner"] == 1
    assert "95.00 %" in text and "1.9 ms" in text and "* 1" in text and "90.00 %" not in text.split("winners")[0]
    assert "test accuracy: 92.00 % ± 2.83 % (2 seeds)" in text and "3 networks trained, 1 not feasible, 1 computed the same" in text
    assert "winner/weights.safetensors" in text and "and 1 more" in render_search(data, width=140, limit=1)
    assert "latency<=2ms" in trial_line(data, data["trials"][3]) and "on the front" in trial_line(data, data["trials"][0])
    shown = [str(part) for part in live_table(data, "trial 5: epoch 1").renderables]
    assert shown[0].startswith("nb201 on digits") and shown[-1] == "trial 5: epoch 1"


def test_page_is_safe_and_whole() -> None:
    page = render_search_html(front(space=f"nb201{HOSTILE}"))
    assert HOSTILE not in page and "<img src=x" not in page and page.count('<circle class="target') == 4
    assert "touched once" in page and "95.00 %" in page and "same as 1" in page
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded and json.loads(embedded.group(1))["winner"] == 1


def test_the_page_claims_no_training_that_was_not() -> None:
    whole = front()
    none, some = whole | {"shipped": []}, whole | {"shipped": whole["shipped"][:1]}
    assert "trained again from scratch" not in render_search_html(none) and "none has been trained again" in render_search_html(none)
    assert "1 of 2 trained again from scratch" in render_search_html(some)
    assert "would ship; trained again from scratch on the whole training split" in render_search_html(whole)


def test_budgets_are_words() -> None:
    data = front()
    for given, words in (
        ("3trials", "3 trials a seed"),
        ("1trials", "1 trial a seed"),
        ("40 trials", "40 trials a seed"),
        ("90s", "90s a seed"),
    ):
        data["request"]["budget"] = given
        assert f" · {words} · " in heading(data), given


def test_unfinished_and_single_objective_pages() -> None:
    assert "at best" in render_search_html(front(finished=False)) and "winners" not in render_search(front(finished=False))
    assert "trial" in render_search_html(front(objectives="accuracy"))
    empty = front(finished=False) | {"trials": [], "front": [], "winner": None}
    assert "no network within the limits yet" in render_search_html(empty) and "0 networks" in render_search(empty)


def test_the_winner_is_drawn_as_an_image_of_its_own() -> None:
    from ridgeline.search.spaces import load_space

    space, data = load_space("nb201", channels=4, cells=1), front()
    data["genotypes"]["1"] = space.genotype((0, 1, 2, 3, 4, 0))
    assert 'src="data:image/svg+xml;base64,' in render_search_html(data)
