"""Every kind of draft: the text is the target's own whatever it proposes, its state follows the request, and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.engine.request import Request
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import Draft, LayerSkipDraft, ModelDraft, NgramDraft, Proposal, Speculator
from ridgeline.llm.speculate.draft import Ask
from tests.llm.speculate.support import Lane, NoDraft, disturbed, tiny, tiny_config

TARGET = tiny()
KINDS: dict[str, Callable[[], Draft]] = {
    "ngram": lambda: NgramDraft(3, 1),
    "model": lambda: ModelDraft(disturbed(TARGET, 0.05), page_size=8),
    "other model": lambda: ModelDraft(tiny(seed=5, layers=1)),
    "larger vocabulary": lambda: ModelDraft(tiny(seed=5, layers=1, vocab=48)),
    "smaller vocabulary": lambda: ModelDraft(tiny(seed=5, layers=1, vocab=32)),
    "few pages": lambda: ModelDraft(disturbed(TARGET, 0.05), pages=14, page_size=4),
    "first layers": lambda: LayerSkipDraft(2),
    "every other layer": lambda: LayerSkipDraft(range(0, 4, 2)),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [3, 1, 4, 1, 5, 9, 2, 7]]
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.9, top_k=12, seed=11),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, seed=12),
    Sampling(repetition_penalty=1.5, presence_penalty=0.3),
    Sampling(temperature=1.0, top_p=0.9),  # without a seed: its text may differ, its neighbours' may not
]
TOKENS = 32


def text(draft: Draft, samplings: Sequence[Sampling] = SETTINGS, tokens: int = TOKENS) -> tuple[list[list[int]], Speculator]:
    """The prompts, with the settings in turn, in one batch."""
    lane = Lane(TARGET, requests=len(PROMPTS))
    draft.attach(TARGET, lane.cache)
    speculator = Speculator(draft, 4, adaptive=False)
    requests = [lane.request(prompt, samplings[index % len(samplings)]) for index, prompt in enumerate(PROMPTS)]
    return lane.generate(requests, tokens, speculator), speculator


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    output, speculator = text(NoDraft())
    assert speculator.counters.drafted == 0 and speculator.counters.plain_steps == TOKENS * len(output)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind: str, plain: list[list[int]]) -> None:
    draft = KINDS[kind]()
    output, speculator = text(draft)
    differ = [index for index, (ours, theirs) in enumerate(zip(output, plain, strict=True)) if ours != theirs]
    assert differ in ([], [4])
    counters = speculator.counters
    assert counters.drafted > 50 and counters.accepted + counters.rejected == counters.drafted
    assert counters.emitted + counters.plain_steps == TOKENS * len(output)
    assert counters.tokens_per_step == pytest.approx(1 + counters.accepted / counters.verified_steps)
    if isinstance(draft, ModelDraft):
        draft.pool.check()
        assert draft.pool.free == draft.pool.pages, "pages are kept for requests that ended"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_draft_equal_to_the_target_is_kept(sampling: Sampling) -> None:
    """The cache of the draft follows the request exactly, through bonus tokens too: any slip would show as a rejection."""
    _, speculator = text(ModelDraft(TARGET), [sampling], tokens=61)
    assert speculator.counters.acceptance_rate > 0.99  # the last bits depend on the batch, a tie may fall the other way
    assert speculator.counters.tokens_per_step > 4.5


def test_rejected_drafts_are_rolled_back() -> None:
    """After every rejection the draft's cache equals one that never saw the rejected tokens."""
    draft, lane = ModelDraft(tiny(seed=9, layers=2)), Lane(TARGET)
    draft.attach(TARGET, lane.cache)
    request = Request("one", [1, 2, 3, 4, 5], Sampling())
    for accepted in ([], [8], [6, 7], [9, 9, 9, 9, 9]):
        request.output += accepted
        got = draft.propose([Ask(request, 3, [0.5] * 3, distributions=True)])[0]
        fresh = ModelDraft(draft.model)
        fresh.attach(TARGET, lane.cache)
        again = fresh.propose([Ask(Request("two", request.prompt, Sampling(), output=request.output), 3, [0.5] * 3, distributions=True)])[0]
        assert got.tokens == again.tokens
        assert got.distributions is not None and again.distributions is not None
        torch.testing.assert_close(got.distributions, again.distributions)


def test_prefixes_are_shared_between_requests() -> None:
    draft, lane = ModelDraft(tiny(seed=9, layers=2), page_size=4), Lane(TARGET)
    draft.attach(TARGET, lane.cache)
    prompt = list(range(20))
    asks = [Ask(Request(f"r{index}", [*prompt, index], Sampling()), 2, [0.5, 0.5], distributions=False) for index in range(3)]
    first = [draft.propose([ask])[0].tokens for ask in asks]
    assert draft.pool.hit_pages == 10 and draft.pool.pages - draft.pool.free < 2 * 6 + 1
    draft.pool.check()
    assert [proposal.tokens for proposal in draft.propose(asks)] == first  # asked again without a new token: the same answer


def test_no_room_means_no_proposal() -> None:
    lane = Lane(TARGET)
    small = ModelDraft(tiny(seed=9, layers=1), pages=2, page_size=4)
    small.attach(TARGET, lane.cache)
    ask = Ask(Request("long", list(range(12)), Sampling()), 4, [0.5] * 4, distributions=False)
    assert small.propose([ask]) == [Proposal()]
    assert small.pool.free == 2
    at_the_end = LayerSkipDraft(2)
    at_the_end.attach(TARGET, lane.cache)
    request = lane.request(list(range(10)), Sampling())
    request.pages = request.pages[:3]  # 12 tokens: room for two drafts
    assert len(at_the_end.propose([Ask(request, 4, [0.5] * 4, distributions=False)])[0].tokens) == 2


def test_a_draft_of_shorter_context_stops_in_time() -> None:
    from ridgeline.llm.model.weights import random_decoder

    lane = Lane(TARGET)
    draft = ModelDraft(random_decoder(tiny_config(layers=1, context=16)))
    draft.attach(TARGET, lane.cache)
    lengths = [
        len(draft.propose([Ask(Request(f"r{size}", [1] * size, Sampling()), 4, [0.5] * 4, distributions=False)])[0].tokens)
        for size in (10, 13, 15, 16, 30)
    ]
    assert lengths == [4, 3, 1, 0, 0]


def test_costs_are_predicted_from_bytes() -> None:
    lane = Lane(TARGET)
    half, small = LayerSkipDraft(2), ModelDraft(tiny(seed=1, layers=1))
    half.attach(TARGET, lane.cache)
    small.attach(TARGET, lane.cache)
    assert 0.5 < half.relative_cost < 0.6 and 0.2 < small.relative_cost < 0.4
    assert NgramDraft().relative_cost == 0


@pytest.mark.parametrize(
    "draft", [LayerSkipDraft(4), LayerSkipDraft(0), LayerSkipDraft(range(2, 9)), ModelDraft(tiny(vocab=1000))], ids=lambda draft: draft.name
)
def test_impossible_drafts_are_refused(draft: Draft) -> None:
    with pytest.raises(OptionError):
        draft.attach(TARGET, KVCache(TARGET.config, 4))
