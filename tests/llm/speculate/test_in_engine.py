"""Drafts inside the whole engine: preemption, chunked prompts, stops, cancels and the adaptive rule change nothing of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.model.weights import random_decoder
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import Draft, LayerSkipDraft, ModelDraft, NgramDraft, make_draft
from tests.llm.engine.support import CONFIG, PROMPTS, engine, tiny
from tests.llm.speculate.support import disturbed

KINDS: dict[str, Callable[[], Draft]] = {
    "ngram": lambda: NgramDraft(3, 1),
    "model": lambda: ModelDraft(disturbed(tiny().model, 0.05)),
    "few pages": lambda: ModelDraft(disturbed(tiny().model, 0.05), pages=12, page_size=8),
    "layers": lambda: LayerSkipDraft(1),
}
SETTINGS = [
    Sampling(max_tokens=24),
    Sampling(max_tokens=24, temperature=0.8, seed=4, logprobs=2),
    Sampling(max_tokens=25, temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.2),
    Sampling(max_tokens=24, temperature=1.0, seed=6, stop_ids=tuple(range(0, 256, 16))),
    Sampling(max_tokens=1),
    Sampling(max_tokens=200),  # to the end of the context
]


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], str, str]]:
    return [(done.tokens, done.text, done.finish_reason) for done in engine().generate(PROMPTS, SETTINGS)]


@pytest.mark.parametrize(
    "options",
    [{"pages": 24, "page_size": 4, "max_step_tokens": 16, "max_batch": 5, "adaptive": False, "lookahead": 7}, {}],
    ids=["tight", "adaptive"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_the_plain_engine(kind: str, options: dict[str, object], plain: list[tuple[list[int], str, str]]) -> None:
    draft = KINDS[kind]()
    worker = engine(draft=draft, **options)
    done = worker.generate(PROMPTS, SETTINGS)
    assert [(completion.tokens, completion.text, completion.finish_reason) for completion in done] == plain
    assert {completion.finish_reason for completion in done} == {"length", "stop"}
    logprobs = done[1].logprobs
    assert logprobs is not None and [entry.token for entry in logprobs] == done[1].tokens
    stats = worker.stats()
    assert stats["accepted"] + stats["rejected"] == stats["drafted"]
    assert stats["speculation"]["reason"].startswith(("on: ", "off: "))
    if "adaptive" in options:
        assert stats["drafted"] > 0 and stats["preemptions"] > 0
    worker.pool.check()
    assert worker.pool.free == worker.pool.pages
    if isinstance(draft, ModelDraft):
        draft.pool.check()
        assert draft.pool.free == draft.pool.pages
    if isinstance(draft, NgramDraft):
        assert not draft._indexes


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_request_leaves_nothing(kind: str) -> None:
    draft = KINDS[kind]()
    worker = engine(draft=draft, adaptive=False)
    names = [worker.submit(prompt, Sampling(max_tokens=30, temperature=1.0)) for prompt in PROMPTS]
    for name in names:
        worker.step()
        worker.step()
        worker.cancel(name)
    while not worker.idle:
        worker.step()
    assert worker.pool.free == worker.pool.pages
    if isinstance(draft, ModelDraft):
        assert draft.pool.free == draft.pool.pages and not draft._kept
    assert worker.speculator is not None and worker.speculator._step is None


def test_int8_cache_is_drafted_for_too() -> None:
    plain = [done.tokens for done in engine(kv_int8=True).generate(PROMPTS, Sampling(max_tokens=12))]
    for kind in KINDS:
        assert [
            done.tokens for done in engine(kv_int8=True, draft=KINDS[kind](), adaptive=False).generate(PROMPTS, Sampling(max_tokens=12))
        ] == plain


def test_drafts_by_name() -> None:
    loaded = tiny()
    ngram, layers, every = make_draft("ngram:5", loaded), make_draft("layers:1", loaded), make_draft("layers:0:6:2", loaded)
    assert isinstance(ngram, NgramDraft) and (ngram.most, ngram.least) == (5, 2)
    assert isinstance(layers, LayerSkipDraft) and layers.layers == range(1)
    assert isinstance(every, LayerSkipDraft) and every.layers == range(0, 6, 2)
    assert isinstance(make_draft("ngram", loaded), NgramDraft) and isinstance(make_draft("layers", loaded), LayerSkipDraft)
    for wrong in ("ngram:x", "ngram:1:2", "layers:1:2:0", "layers:-1", "layers:1:2:3:4"):
        with pytest.raises(OptionError, match="draft"):
            make_draft(wrong, loaded)


def test_a_draft_of_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ridgeline.llm.load as load

    class Shifted:
        size, eos, bos = 256, None, None

        def decode_bytes(self, ids: list[int]) -> bytes:
            return bytes([(ids[0] + 1) % 256])

    other = replace(tiny(), model=random_decoder(replace(CONFIG, layers=1)).eval(), name="other")
    monkeypatch.setattr(load, "load_model", lambda name, **settings: other)
    draft = make_draft("other", tiny())
    assert isinstance(draft, ModelDraft) and draft.model is other.model
    monkeypatch.setattr(load, "load_model", lambda name, **settings: replace(other, tokenizer=Shifted()))
    with pytest.raises(OptionError, match="different text"):
        make_draft("other", tiny())
