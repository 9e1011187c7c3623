"""A planted regression is found, noise is not; names cannot leave the folder; broken files are said to be broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import MeasureError, OptionError, RidgelineError
from ridgeline.core.profile import Profile, Roofs, Total
from ridgeline.measure.baseline import (
    Baseline,
    baseline_names,
    baseline_of,
    baseline_path,
    compare_baseline,
    load_baseline,
    save_baseline,
)
from ridgeline.measure.profiler import measure
from tests.measure.nets import Pointwise


def samples(median_s: float, seed: int, spread: float = 0.02, count: int = 30) -> tuple[float, ...]:
    return tuple((median_s * numpy.random.default_rng(seed).lognormal(0.0, spread, count)).tolist())


SAVED = Baseline(
    machine="some CPU, 2 threads",
    device="cpu",
    threads=2,
    model="resnet18",
    batch=1,
    dtype="float32",
    phase=None,
    context=None,
    channels_last=False,
    compiled=False,
    torch="2.13.0",
    saved="2025-01-01T00:00:00+00:00",
    samples_s=samples(0.01, 1),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return tmp_path


def now(median_s: float, **changes: Any) -> Baseline:
    return replace(SAVED, samples_s=samples(median_s, 2), **changes)


def test_saved_and_loaded_are_equal(cache: Path) -> None:
    path = save_baseline("main", SAVED)
    assert path == cache / "baselines" / "main.json"
    assert load_baseline("main") == SAVED
    assert baseline_names() == ["main"]
    assert [p.name for p in path.parent.iterdir()] == ["main.json"]


@pytest.mark.parametrize(
    ("median_s", "significant", "slower"), [(0.0100, False, False), (0.0103, True, False), (0.0115, True, True), (0.0080, True, False)]
)
def test_only_a_planted_regression_counts_as_one(median_s: float, significant: bool, slower: bool) -> None:
    save_baseline("main", SAVED)
    found = compare_baseline("main", now(median_s))
    assert found.ratio == pytest.approx(median_s / 0.01, rel=0.02)
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert (found.significant, found.slower) == (significant, slower)
    json.dumps(found.to_dict())


def test_a_large_but_unsure_difference_is_no_regression() -> None:
    save_baseline("main", replace(SAVED, samples_s=samples(0.01, 1, spread=0.6, count=6)))
    assert not compare_baseline("main", replace(SAVED, samples_s=samples(0.011, 2, spread=0.6, count=6))).slower


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"device": "cuda:0"},
        {"threads": 1},
        {"model": "vgg16"},
        {"batch": 8},
        {"dtype": "bfloat16"},
        {"phase": "decode"},
        {"context": 128},
        {"channels_last": True},
        {"compiled": True},
    ],
)
def test_unlike_things_are_not_compared(change: dict[str, Any]) -> None:
    save_baseline("main", SAVED)
    with pytest.raises(MeasureError, match="something else") as caught:
        compare_baseline("main", now(0.01, **change))
    assert next(iter(change)) in caught.value.why


def test_another_torch_is_compared_and_mentioned() -> None:
    save_baseline("main", SAVED)
    assert "2.14.0" in compare_baseline("main", now(0.01, torch="2.14.0")).detail


def test_a_missing_baseline_names_the_nearest() -> None:
    save_baseline("resnet-main", SAVED)
    with pytest.raises(MeasureError, match="resnet-main"):
        load_baseline("resnet-mian")


HOSTILE = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", ".hidden", "x" * 65, "a b", "a\n", "ü", "a\0", "~", "$HOME"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str, cache: Path) -> None:
    for attempt in (lambda: save_baseline(name, SAVED), lambda: load_baseline(name)):
        with pytest.raises(OptionError, match="baseline name"):
            attempt()
    assert list(cache.rglob("*")) == []


@given(st.text(max_size=70))
def test_a_name_that_is_accepted_stays_in_the_folder(name: str) -> None:
    try:
        path = baseline_path(name)
    except OptionError:
        return
    assert path.resolve().parent == baseline_path("x").resolve().parent


GOOD = {**{name: getattr(SAVED, name) for name in SAVED.__dataclass_fields__}, "schema": 1, "samples_s": [0.01, 0.02]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({**GOOD, "schema": 2}),
        json.dumps({**GOOD, "extra": 1}),
        json.dumps({key: value for key, value in GOOD.items() if key != "model"}),
        json.dumps({**GOOD, "samples_s": []}),
        json.dumps({**GOOD, "samples_s": [0.01, -1]}),
        json.dumps({**GOOD, "samples_s": [0.01, "2"]}),
        json.dumps({**GOOD, "samples_s": [float("nan")]}),
        json.dumps({**GOOD, "batch": "1"}),
        b"\xff\xfe\x00",
    ],
)
def test_broken_files_are_said_to_be_broken(text: str | bytes) -> None:
    path = save_baseline("main", SAVED)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(MeasureError, match="is not a baseline"):
        load_baseline("main")


def test_nothing_broken_is_saved() -> None:
    with pytest.raises(RidgelineError):
        save_baseline("main", replace(SAVED, samples_s=()))
    assert baseline_names() == []


def test_a_measured_profile_can_be_saved_and_compared() -> None:
    profile = measure(Pointwise(), torch.randn(64), repeats=5)
    save_baseline("tiny", baseline_of(profile))
    assert load_baseline("tiny").samples_s == profile.settings.samples_s
    assert compare_baseline("tiny", baseline_of(profile)).ratio == 1


def test_an_estimate_cannot_be_a_baseline() -> None:
    total = Total(1, 0, 8, {}, 0.5, 0.4, "memory", 4, 4, 1, {})
    with pytest.raises(MeasureError, match="no measurement"):
        baseline_of(Profile("net", "cpu", 1, "float32", "eager", (), total, Roofs({}, {})))
