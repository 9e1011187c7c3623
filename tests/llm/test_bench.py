"""Measuring an engine: every request gets its tokens, times add up, the counters are those of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.bench import Job, Served, bench_decode, bench_serving, jobs, percentile, serve, speculation
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.load import load_model
from ridgeline.llm.predict import predict, stored_dtype
from ridgeline.llm.speculate import NgramDraft
from ridgeline.target.load import load_target


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_model("builtin"), EngineOptions(max_batch=8, seed=0))


def test_a_load_has_its_lengths_from_the_seed_and_its_tokens_from_texts() -> None:
    one, again, other = (jobs(5, (3, 9), 4, 100, rate=2.0, seed=1, texts=texts) for texts in (0, 0, 1))
    assert one == again and [len(job.prompt) for job in one] == [len(job.prompt) for job in other]
    assert [job.after_s for job in one] == [job.after_s for job in other] == sorted(job.after_s for job in one)
    assert one[0].after_s == 0 and all(a.prompt != b.prompt for a, b in zip(one, other, strict=True))
    assert {job.after_s for job in jobs(5, (3, 9), 4, 100)} == {0.0}


def test_every_request_of_a_load_gets_its_tokens(engine: Engine) -> None:
    load = [*jobs(3, (4, 12), 6, engine.config.vocab), Job((1, 2, 3), 5, after_s=0.05)]
    records, seconds = serve(engine, load)
    assert [record.tokens for record in records] == [6, 6, 6, 5] and engine.idle
    assert all(record.finish_reason == "length" for record in records)
    late = records[-1]
    assert late.arrived_s == 0.05 and late.deliveries[0][0] > 0.05 and late.deliveries[-1][0] <= seconds
    assert engine.stats()["free_pages"] == engine.stats()["total_pages"]


def test_gaps_and_percentiles() -> None:
    record = Served(Job((1,), 4), 1.0, [(2.0, 1), (2.5, 2), (3.5, 1)])
    assert record.tokens == 4 and record.first_s == 1.0 and record.gaps() == [(0.5, 2), (1.0, 1)]
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0 and percentile(range(100), 0.99) == 98 and percentile([7.0], 0.99) == 7.0
    for count in range(1, 120):
        for per_cent in range(101):
            least = next(value for value in range(count) if 100 * (value + 1) >= per_cent * count)
            assert percentile(range(count), per_cent / 100) == least


def test_decode_row(engine: Engine) -> None:
    row = bench_decode(engine, prompt=8, new=6, batch=2, repeats=2, target=load_target("h200"))
    assert len(row["runs_tokens_per_s"]) == 2 and row["tokens_per_s"] > 0
    assert row["percent_of_limit"] == pytest.approx(100 * row["tokens_per_s"] / row["limit_tokens_per_s"])
    assert row["ms_per_token"] == pytest.approx(2e3 / row["tokens_per_s"])
    assert row["first_token_ms"] <= row["prefill_ms"] and row["gap_ms"]["p50"] <= row["gap_ms"]["p99"]
    for phase in ("prefill", "decode"):
        part = row["predicted"][phase]
        assert 0 < part["limit_ms"] <= part["ms"] and part["measured_over_predicted"] == pytest.approx(part["measured_ms"] / part["ms"])
    assert "draft" not in row


def test_serving_row(engine: Engine) -> None:
    row = bench_serving(engine, requests=6, prompt=(4, 16), new=5, alone=2)
    assert row["output_tokens"] == 30 and row["unfinished"] == 0 and row["alone"]["requests"] == 2
    assert row["times_faster"] == pytest.approx(row["output_tokens_per_s"] / row["alone"]["output_tokens_per_s"])
    assert row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"] <= 1e3 * row["seconds"]
    assert "alone" not in bench_serving(engine, requests=2, prompt=(4, 4), new=3, alone=0)


def test_drafts_are_counted_over_the_run_only() -> None:
    engine = Engine(load_model("builtin"), EngineOptions(max_batch=2, draft=NgramDraft(), adaptive=False))
    load = [Job(tuple(engine.tokenizer.encode("KING HENRY:\nAnd I am, and I am, and I am, and")), 40)]
    serve(engine, load)
    before = engine.stats()
    serve(engine, load)
    found = speculation(before, engine.stats())
    assert found["drafted"] > 0 and found["accepted"] + found["rejected"] == found["drafted"]
    assert found["drafted"] == engine.stats()["drafted"] - before["drafted"]
    assert speculation({}, {}) == {}


@pytest.mark.parametrize(("prompt", "new", "batch"), [(0, 4, 1), (4, 1, 1), (4, 4, 0), (4, 10_000, 1)])
def test_what_cannot_be_measured_is_refused(engine: Engine, prompt: int, new: int, batch: int) -> None:
    with pytest.raises(OptionError):
        bench_decode(engine, prompt=prompt, new=new, batch=batch)


def test_prediction_knows_how_weights_are_stored() -> None:
    target = load_target("h200")
    found = {}
    for weights in ("bfloat16", "int8", "int4"):
        loaded = load_model("builtin", dtype="bfloat16", weights=None if weights == "bfloat16" else weights)
        assert stored_dtype(loaded.model) == weights
        found[weights] = predict(replace(loaded, config=replace(loaded.config, layers=1)), target, prompt=4, new=4, batch=1)
    limits = [found[weights]["decode"]["limit_ms"] for weights in ("bfloat16", "int8", "int4")]
    assert limits[0] > limits[1] > limits[2]
