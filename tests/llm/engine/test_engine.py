"""The same text however it is batched, chunked, paged, preempted, shared or streamed; one request's trouble stays its own."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions, Event
from ridgeline.llm.engine.scheduler import Busy
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import NgramDraft
from tests.llm.engine.support import CONFIG, PROMPTS, engine, reference_greedy, reference_logits, tiny

COUNT = 24
GREEDY = Sampling(max_tokens=COUNT)


def named(options: dict[str, object]) -> str:
    return " ".join(f"{name}={'ngram' if name == 'draft' else value}" for name, value in options.items()) or "default"


def drained(worker: Engine) -> dict[str, list[Event]]:
    """All events by request until the engine is idle; every page is free then."""
    events: dict[str, list[Event]] = {}
    for _ in range(10_000):
        if worker.idle:
            break
        for event in worker.step():
            events.setdefault(event.request_id, []).append(event)
    worker.pool.check()
    assert worker.idle and worker.pool.free == worker.pool.pages
    assert not worker._texts and not worker._requests and not worker._seeded
    return events


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 1},
        {"max_batch": 3, "max_step_tokens": 3},
        {"max_step_tokens": 11, "max_batch": 8, "page_size": 1},
        {"page_size": 7, "sharing": False},
        {"page_size": 32},
        {"pages": 24, "page_size": 4, "max_batch": 6},  # one context: five of the six must give way at times
        {"pages": 6, "page_size": 16, "max_batch": 6, "max_step_tokens": 9},
        {"burst": 8},
        {"burst": 5, "pages": 24, "page_size": 4},
        {"draft": NgramDraft(), "adaptive": False},
        {"draft": NgramDraft(), "adaptive": False, "pages": 24, "page_size": 4, "max_step_tokens": 16, "max_batch": 5},
        {"draft": NgramDraft(), "burst": 4},  # drafts and bursts in turn, as measured
        {"max_wait_s": 0.01, "fair": False},
    ],
    ids=named,
)
def test_greedy_text_is_always_the_same(options: dict[str, object]) -> None:
    worker = engine(**options)
    for _ in range(2):  # the second round finds prefixes of the first
        for prompt, done in zip(PROMPTS, worker.generate(PROMPTS, GREEDY), strict=True):
            assert tuple(done.tokens) == reference_greedy(prompt, COUNT), prompt
            assert done.finish_reason == "length" and done.prompt_tokens == len(prompt)
            assert done.text == bytes(done.tokens).decode(errors="replace")
    stats = worker.stats()
    drained(worker)
    if options.get("pages"):
        assert stats["preemptions"] > 0
    if options.get("sharing", True) and worker.pool.page_size < 16:
        assert stats["prefix_hits"] > 0 and stats["prefix_tokens"] > 0
    if "draft" in options:
        assert (stats["accepted"] > 0 or "adaptive" not in options) and stats["drafted"] == stats["accepted"] + stats["rejected"]
    assert stats["output_tokens"] == 2 * COUNT * len(PROMPTS)


def test_a_wrong_cache_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine(page_size=4)
    plain = worker.runner._eager
    # not merely another order: keys carry their positions, and attention does not ask where they lie
    monkeypatch.setattr(worker.runner, "_eager", lambda pieces: plain([replace(piece, pages=piece.pages[:1] * 6) for piece in pieces]))
    assert tuple(worker.generate(PROMPTS[0], GREEDY)[0].tokens) != reference_greedy(PROMPTS[0], COUNT)


def test_chunks_of_every_size() -> None:
    prompt = PROMPTS[3]
    for size in range(1, len(prompt) + 2):
        done = engine(max_batch=1, max_step_tokens=size).generate(prompt, Sampling(max_tokens=4))[0]
        assert tuple(done.tokens) == reference_greedy(prompt, 4)


def mixed_settings(count: int) -> list[Sampling]:
    kinds = [
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_k=20),
        Sampling(temperature=1.2, top_p=0.9, min_p=0.01),
        Sampling(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
    ]
    return [replace(kinds[place % len(kinds)], seed=100 + place, max_tokens=14) for place in range(count)]


@functools.cache
def alone(prompt: str, setting: Sampling) -> list[int]:
    return engine(max_batch=1).generate(prompt, setting)[0].tokens


@pytest.mark.parametrize("options", [{}, {"burst": 6}, {"max_step_tokens": 16}, {"pages": 12, "page_size": 8}], ids=named)
def test_a_seed_gives_the_same_text_alone_and_in_a_batch_of_16(options: dict[str, object]) -> None:
    prompts, settings = [PROMPTS[place % len(PROMPTS)] for place in range(16)], mixed_settings(16)
    together = engine(max_batch=16, **options).generate(prompts, settings)
    for prompt, setting, one in zip(prompts, settings, together, strict=True):
        assert alone(prompt, setting) == one.tokens
        assert one.seed == setting.seed
    assert len({tuple(one.tokens) for one in together}) == 16


def test_a_request_without_seed_reports_one_that_repeats_it() -> None:
    worker = engine(seed=5)
    first, second = worker.generate([PROMPTS[0]] * 2, Sampling(temperature=1.0, max_tokens=20))
    assert first.seed != second.seed and first.tokens != second.tokens
    again = engine(seed=6).generate(PROMPTS[0], Sampling(temperature=1.0, max_tokens=20, seed=second.seed))[0]
    assert again.tokens == second.tokens
    assert engine(seed=5).generate(PROMPTS[0], Sampling(temperature=1.0, max_tokens=20))[0].tokens == first.tokens


def test_neighbours_that_are_cancelled_change_nothing() -> None:
    worker = engine(page_size=4, pages=48, max_step_tokens=64)
    ids = [worker.submit(prompt, GREEDY) for prompt in PROMPTS * 3]
    events: dict[str, list[Event]] = {name: [] for name in ids}
    step = 0
    while not worker.idle:
        if step < 10:
            assert worker.cancel(ids[step]) and not worker.cancel(ids[step])
        for event in worker.step():
            events[event.request_id].append(event)
        step += 1
    assert not drained(worker) and not worker.cancel("request-99")
    for place, name in enumerate(ids):
        tokens = tuple(token for event in events[name] for token in event.token_ids)
        expected = reference_greedy(PROMPTS[place % len(PROMPTS)], COUNT)
        assert tokens == expected[: len(tokens)]
        assert events[name][-1].finish_reason == ("cancelled" if place < 10 else "length")
        assert sum(event.finish_reason is not None for event in events[name]) == 1
        assert place < 10 or len(tokens) == COUNT


def test_streaming_is_generating() -> None:
    worker = engine(burst=3)
    other = worker.submit(PROMPTS[1], GREEDY)
    events = list(worker.stream(PROMPTS[0], replace(GREEDY, logprobs=2)))
    done = engine().generate(PROMPTS[0], replace(GREEDY, logprobs=2))[0]
    assert "".join(event.text for event in events) == done.text
    assert [token for event in events for token in event.token_ids] == done.tokens
    streamed = [entry for event in events for entry in event.logprobs or []]
    assert done.logprobs is not None and [entry.token for entry in streamed] == [entry.token for entry in done.logprobs]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in done.logprobs], abs=1e-5)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert worker.idle or other in drained(worker)


def test_streams_in_turn_lose_nothing() -> None:
    """Every step moves all requests on: whoever's loop made it, each event reaches the one it belongs to."""
    worker = engine(max_batch=4)
    alone = [engine().generate(prompt, GREEDY)[0].text for prompt in PROMPTS[:4]]
    other = worker.submit(PROMPTS[3], GREEDY)
    streams = [worker.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for turn in itertools.zip_longest(*streams):
        for place, event in enumerate(turn):
            texts[place] += "" if event is None else event.text
        if len(texts[0]) == 5:
            assert worker.generate(PROMPTS[2], GREEDY)[0].text == alone[2]  # meanwhile all others end
            assert not worker.scheduler.running
    assert texts == alone[:2] and not worker.idle  # what nobody has read yet is still to be had
    events = worker.step()
    assert {event.request_id for event in events} == {other} and "".join(event.text for event in events) == alone[3]
    assert worker.idle and not worker._boxes and not drained(worker)


def test_step_leaves_a_stream_its_events() -> None:
    worker = engine()
    stream = worker.stream(PROMPTS[0], GREEDY)
    text = next(stream).text
    for _ in range(6):
        assert not worker.step()
    assert text + "".join(event.text for event in stream) == engine().generate(PROMPTS[0], GREEDY)[0].text


def test_a_refused_prompt_leaves_none_of_its_batch_behind() -> None:
    worker = engine()
    with pytest.raises(OptionError, match="the context holds"):
        worker.generate([PROMPTS[0], "z" * 200], GREEDY)
    assert worker.idle and not worker._boxes and not drained(worker)
    assert worker.stats()["finished"] == 1 and worker.stats()["steps"] == 0


def test_a_cancelled_id_is_free_when_its_end_was_told() -> None:
    worker = engine()
    for _ in range(2):
        worker.submit("a", GREEDY, id="one")
        worker.step()
        worker.cancel("one")
        with pytest.raises(OptionError, match="not reported as ended yet"):
            worker.submit("b", GREEDY, id="one")
        assert [event.finish_reason for event in worker.step()] == ["cancelled"]
    assert not drained(worker)


def test_prefixes_of_other_weights_are_forgotten() -> None:
    loaded = replace(tiny(), model=copy.deepcopy(tiny().model))
    worker = engine(loaded, page_size=4)
    prompt = PROMPTS[0] * 3
    before = worker.generate(prompt, replace(GREEDY, logprobs=0))[0]
    name = worker.submit(PROMPTS[0], GREEDY)
    worker.step()
    with pytest.raises(OptionError, match="1 requests are running"):
        worker.forget_prefixes()
    worker.cancel(name)
    with torch.no_grad():
        loaded.model.layers[0].attention.qkv.weight.mul_(1.5)  # an adapter merged by hand, say
    worker.forget_prefixes()
    worker.pool.check()
    assert worker.pool.cached == 0 and worker.pool.free == worker.pool.pages
    after, fresh = (one.generate(prompt, replace(GREEDY, logprobs=0))[0] for one in (worker, engine(loaded, page_size=4)))
    assert after.logprobs is not None and before.logprobs is not None and fresh.logprobs is not None
    assert after.logprobs[0].logprob == pytest.approx(fresh.logprobs[0].logprob, abs=1e-6)
    assert after.logprobs[0].logprob != pytest.approx(before.logprobs[0].logprob, abs=1e-3)


def test_leaving_a_stream_frees_its_pages() -> None:
    worker = engine()
    for event in worker.stream(PROMPTS[0], GREEDY):
        assert event.text is not None
        break
    assert worker.idle and not drained(worker)


def test_stop_strings_over_token_borders() -> None:
    """The vocabulary is bytes: every stop string of several characters is split over tokens."""
    whole = engine().generate(PROMPTS[0], GREEDY)[0]
    for start in range(0, len(whole.text) - 4, 3):
        stop = whole.text[start : start + 4]
        settings = Sampling(max_tokens=COUNT, stop=("never there", stop))
        for options in ({}, {"burst": 8}, {"draft": NgramDraft(), "adaptive": False}):
            worker = engine(**options)
            pieces = [event.text for event in worker.stream(PROMPTS[0], settings)]
            assert "".join(pieces) == whole.text[: whole.text.index(stop)]
            assert worker.stats()["output_tokens"] <= COUNT
    done = engine().generate(PROMPTS[0], Sampling(max_tokens=COUNT, stop=(whole.text[5:8],)))[0]
    assert done.finish_reason == "stop"


def test_text_held_back_comes_out_when_the_request_is_cancelled() -> None:
    whole = engine().generate(PROMPTS[0], GREEDY)[0].text
    worker = engine()
    name = worker.submit(PROMPTS[0], Sampling(max_tokens=COUNT, stop=(whole[:6] + "never",)))
    events = [event for _ in range(4) for event in worker.step()]
    said = bytes(token for event in events for token in event.token_ids).decode(errors="replace")
    assert said and not any(event.text for event in events)  # all of it may still become the stop string
    worker.cancel(name)
    assert [(event.text, event.finish_reason) for event in worker.step()] == [(said, "cancelled")]


def test_end_of_text_stops_and_is_no_text() -> None:
    tokens = reference_greedy(PROMPTS[0], COUNT)
    eos = tokens[9]
    first = tokens.index(eos)
    done = engine(tiny((eos,))).generate(PROMPTS[0], GREEDY)[0]
    assert tuple(done.tokens) == tokens[: first + 1] and done.finish_reason == "stop"
    assert done.text == bytes(tokens[:first]).decode(errors="replace")
    ignored = engine(tiny((eos,))).generate(PROMPTS[0], replace(GREEDY, ignore_eos=True))[0]
    assert tuple(ignored.tokens) == tokens and ignored.finish_reason == "length"
    by_id = engine().generate(PROMPTS[0], replace(GREEDY, stop_ids=(eos,)))[0]
    assert (by_id.tokens, by_id.text) == (done.tokens, done.text)


@pytest.mark.parametrize("options", [{}, {"burst": 8}, {"draft": NgramDraft(), "adaptive": False}], ids=named)
def test_the_context_is_the_end(options: dict[str, object]) -> None:
    prompt = "z" * (CONFIG.context - 7)
    done = engine(**options).generate(prompt, Sampling(max_tokens=1000))[0]
    assert len(done.tokens) == 7 and done.finish_reason == "length"
    assert tuple(done.tokens) == reference_greedy(prompt, 7)
    with pytest.raises(OptionError, match="the context holds 96"):
        engine().submit("z" * CONFIG.context, GREEDY)


def test_logprobs_equal_those_of_the_reference() -> None:
    for options in ({}, {"draft": NgramDraft(), "adaptive": False}):
        for prompt, done in zip(PROMPTS, engine(**options).generate(PROMPTS, Sampling(max_tokens=COUNT, logprobs=3)), strict=True):
            assert done.logprobs is not None and [entry.token for entry in done.logprobs] == done.tokens
            tokens = list(prompt.encode())
            for entry in done.logprobs:
                expected = reference_logits(tiny(), tokens).log_softmax(0)
                assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-4)
                assert [value for _, value in entry.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
                tokens.append(entry.token)


@pytest.mark.parametrize("options", [{"burst": 1}, {"burst": 4}, {"draft": NgramDraft(), "adaptive": False}], ids=named)
def test_logits_without_distribution_end_one_request_only(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine(**options)
    logits_of, poisoned = type(worker.loaded.model).narrow_logits, 5

    def broken(self: torch.nn.Module, batch: object, cache: object, layers: range | None = None) -> torch.Tensor:
        logits = logits_of(self, batch, cache, layers)  # type: ignore[arg-type]
        wanted = batch.wanted  # type: ignore[attr-defined]
        positions = batch.positions if wanted is None else batch.positions[wanted]  # type: ignore[attr-defined]
        # only the second prompt, of one token, is at this position before all others have ended
        logits[positions == poisoned] = math.nan
        return logits

    monkeypatch.setattr(type(worker.loaded.model), "narrow_logits", broken)
    long, short = worker.generate([PROMPTS[0], PROMPTS[1]], GREEDY)
    assert tuple(long.tokens) == reference_greedy(PROMPTS[0], COUNT) and long.error is None
    assert short.finish_reason == "error" and "NaN" in (short.error or "")
    assert tuple(short.tokens) == reference_greedy(PROMPTS[1], COUNT)[:poisoned]
    assert worker.stats()["errors"] == 1
    drained(worker)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine()
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner, "run", lambda pieces: (_ for _ in ()).throw(RuntimeError("out of memory\nat 0x1234")))
        done = worker.generate(PROMPTS[:2], GREEDY)
        assert [one.finish_reason for one in done] == ["error"] * 2
        assert done[0].error == "the step failed: RuntimeError: out of memory"
        patch.setattr(worker.runner, "run", lambda pieces: [][1])
        with pytest.raises(IndexError):
            worker.generate(PROMPTS[:2], GREEDY)
    drained(worker)
    assert tuple(worker.generate(PROMPTS[0], GREEDY)[0].tokens) == reference_greedy(PROMPTS[0], COUNT)


def test_times_are_in_order() -> None:
    done = engine(burst=4).generate(PROMPTS, GREEDY)
    for one in done:
        times = one.timings
        assert times.first_token_s is not None and 0 <= times.queued_s <= times.first_token_s <= times.total_s
        assert len(times.token_gaps_s) == COUNT - 1 and all(gap > 0 for gap in times.token_gaps_s)
        assert times.first_token_s + sum(times.token_gaps_s) == pytest.approx(times.total_s, abs=1e-6)


def test_what_cannot_work_is_refused() -> None:
    worker = engine(max_waiting=2)
    for prompt in ([256], [-1], [True], []):
        with pytest.raises(OptionError):
            worker.submit(prompt, GREEDY)
    worker.submit("a", GREEDY, id="one")
    with pytest.raises(OptionError, match="'one'"):
        worker.submit("a", GREEDY, id="one")
    worker.submit("a", GREEDY)
    with pytest.raises(Busy):
        worker.submit("a", GREEDY)
    drained(worker)
    assert len(worker.generate(["a"] * 7, Sampling(max_tokens=2))) == 7  # more than may wait
    with pytest.raises(OptionError, match="one full context of 96 tokens takes"):
        engine(pages=5)
    with pytest.raises(OptionError, match="1,000 bytes"):
        engine(kv_memory_bytes=1000)
    with pytest.raises(OptionError, match="graphs"):
        EngineOptions(graphs="maybe")
    with pytest.raises(OptionError, match="'pagesize'"):
        Engine.from_pretrained("builtin", pagesize=3)
