"""What comes out of speculation is distributed as the target's own text: stories260K, every kind of draft, 50,000 samples.

The chances of a fixed prompt do not change, so p and q are computed once by the models and the drafts themselves, and the acceptance
rule is sampled on these tables. One run a kind goes through the whole engine, on fewer samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from ridgeline.core.errors import RidgelineError
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.engine.request import Request
from ridgeline.llm.load import Loaded, load_model
from ridgeline.llm.sampling import Sampling, pick, probabilities
from ridgeline.llm.speculate import Draft, LayerSkipDraft, ModelDraft, NgramDraft, Proposal, accept_batch, speculator
from ridgeline.llm.speculate.draft import Ask
from tests.llm.speculate.support import SAMPLES, WRONG_RULES, Lane, chi_square, disturbed, joint, sampled
from tests.support import full_or_tenth

PROMPT = "Lily saw a big dog. She was happy. Then she saw a"  # the n-gram finds " big", which is likely but not certain
KINDS: dict[str, Callable[[Loaded], Draft]] = {
    "model": lambda loaded: ModelDraft(disturbed(loaded.model, 0.12)),
    "layers": lambda loaded: LayerSkipDraft(4),
    "ngram": lambda loaded: NgramDraft(3, 1),
}
SETTINGS = Sampling(temperature=1.2, top_k=6)
ENGINE_SAMPLES = 3_000


@cache
def stories() -> Loaded:
    try:
        return load_model("stories260k", dtype="float32", device="cpu")
    except RidgelineError:
        pytest.skip("no stories260K under RIDGELINE_DATA")


@cache
def tables(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p and q [1 + V, V] over the tokens that can come (others are dropped), and which rows have a draft. An n-gram's q is one-hot."""
    loaded = stories()
    lane, draft = Lane(loaded.model, requests=1), KINDS[kind](loaded)
    draft.attach(loaded.model, lane.cache)
    prompt = loaded.tokenizer.encode(PROMPT)
    request = lane.request(prompt, SETTINGS)
    vocab = loaded.config.vocab
    p, q, drafted = torch.zeros(1 + vocab, vocab), torch.zeros(1 + vocab, vocab), torch.zeros(1 + vocab, dtype=torch.bool)

    def fill(row: int) -> None:
        proposal = draft.propose([Ask(request, 1, [0.5], distributions=True)])[0]
        drafted[row] = bool(proposal.tokens)
        if proposal.tokens:
            q[row] = proposal.distributions[0] if proposal.distributions is not None else torch.eye(vocab)[proposal.tokens[0]]
        p[row] = probabilities(lane.logits([request], [Proposal()]), [SETTINGS])[0]

    fill(0)
    possible = ((p[0] > 0) | (q[0] > 0)).nonzero()[:, 0].tolist()
    request.computed = len(prompt)
    for token in possible:
        request.output = [token]
        fill(1 + token)
    rows = torch.tensor([0, *(1 + token for token in possible)])
    seen = sorted({*possible, *((p[rows] > 0) | (q[rows] > 0)).any(0).nonzero()[:, 0].tolist()})
    keep = torch.tensor([0, *(1 + token for token in seen)])
    return p[keep][:, seen].double(), q[keep][:, seen].double(), drafted[keep]


def complete(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Rows without a draft (never reached, or nothing found) as a draft that is the target, or anything where that is empty too."""
    q = torch.where(q.sum(1, keepdim=True) > 0, q, p)
    return torch.where(q.sum(1, keepdim=True) > 0, q, 1.0 / q.shape[1])


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_next_two_tokens_follow_the_target(kind: str, lookahead: int) -> None:
    p, q, _ = tables(kind)
    counts, kept = sampled("exact", SAMPLES, complete(p, torch.ones_like(p)), complete(q, p), lookahead)
    assert 0.05 < kept < 0.9
    assert chi_square(counts, joint(p)) > 1e-3


@pytest.mark.parametrize("rule", WRONG_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_rules_are_rejected(kind: str, rule: str) -> None:
    if (kind, rule) == ("ngram", "kept when p >= q"):
        pytest.skip("of a one-hot q this rule keeps nothing and draws from p: no use, but not wrong")
    p, q, _ = tables(kind)
    counts, _ = sampled(rule, full_or_tenth(SAMPLES), complete(p, torch.ones_like(p)), complete(q, p), 1)
    assert chi_square(counts, joint(p)) < 1e-3


def test_own_draws_follow_the_target_and_a_draft_taken_on_trust_does_not() -> None:
    """The rule for drafts without distributions, as n-grams are checked in the engine."""
    p, q, has_draft = tables("ngram")
    target = complete(p, torch.ones_like(p))
    guess = q.argmax(1)
    results = []
    for trusting in (False, True):
        first, kept = _given(target, guess, has_draft, torch.zeros(SAMPLES, dtype=torch.int64), trusting)
        second, _ = _given(target, guess, has_draft, 1 + first[:, 0], trusting)
        after = torch.where(kept > 1, first[:, 1], second[:, 0])
        results.append(chi_square(torch.bincount(first[:, 0] * p.shape[1] + after, minlength=p.shape[1] ** 2), joint(p)))
    assert results[0] > 1e-3 > results[1]


def _given(
    p: torch.Tensor, guess: torch.Tensor, has_draft: torch.Tensor, begin: torch.Tensor, trusting: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    drafted = guess[begin][:, None]
    counts = has_draft[begin].long()
    tokens, emitted = accept_batch(
        p[torch.stack([begin, 1 + drafted[:, 0]], 1)], drafted, counts, None, torch.rand(len(begin), 2, dtype=torch.float64), None
    )
    return (torch.where((counts > 0)[:, None] & (torch.rand(len(begin), 1) < 0.1), drafted, tokens) if trusting else tokens), emitted


class Fixed:
    """A draft of one token with the chances `q`, whatever the text."""

    name, relative_cost = "fixed", 0.1

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q

    def attach(self, target: object, cache: object) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        drawn = pick(self.q.expand(len(asks), -1), torch.tensor([ask.uniforms[0] for ask in asks])).tolist()
        return [Proposal([token], self.q[None]) for token in drawn]

    def forget(self, request: object) -> None: ...


@pytest.mark.parametrize("shared", [False, True])
def test_what_draws_a_draft_does_not_draw_its_replacement(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were draft and replacement drawn with one random number, the text would no longer follow the target."""
    if shared:
        monkeypatch.setattr(speculator, "DRAFT", speculator.SAMPLE)
    samples = 6_000
    first, after = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4], [0.7, 0.1, 0.2]])
    handle = speculator.Speculator(Fixed(torch.tensor([0.6, 0.2, 0.2])), 1, adaptive=False, seeded=lambda request: False)
    requests = [Request(str(seed), [0], Sampling(max_tokens=9, temperature=1.0, seed=seed)) for seed in range(samples)]
    proposals = handle.propose(requests, [1] * samples)
    logits = torch.stack([row for proposal in proposals for row in (first, after[proposal.tokens[0]])]).log()
    outputs = handle.accept(requests, proposals, logits)
    begins = torch.bincount(torch.tensor([tokens[0] for tokens in outputs]), minlength=3)
    assert (chi_square(begins, first.double()) < 1e-3) == shared
    for token in range(3):
        bonus = torch.bincount(torch.tensor([tokens[1] for tokens in outputs if len(tokens) == 2 and tokens[0] == token]), minlength=3)
        assert bonus.sum() > 100 and chi_square(bonus, after[token].double()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_engine_output_follows_the_target(kind: str) -> None:
    """Tokens two to four of a request are speculated; the first comes with the prompt. Chances of all three first tokens together."""
    counts, chances, stats = engine_counts(kind, full_or_tenth(ENGINE_SAMPLES))
    assert stats["drafted"] > 0 and 0.05 < stats["acceptance_rate"] < 0.9
    assert chi_square(counts, chances) > 1e-3


def test_a_wrong_rule_in_the_engine_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(target: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, emitted = accept_batch(target, drafted, counts, *rest)
        return torch.where(emitted[:, None] == 1, torch.cat([drafted, tokens[:, -1:]], 1), tokens), emitted  # the rejected draft stays

    monkeypatch.setattr(speculator, "accept_batch", wrong)
    counts, chances, _ = engine_counts("layers", full_or_tenth(ENGINE_SAMPLES))
    assert chi_square(counts, chances) < 1e-3


def engine_counts(kind: str, samples: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Counts and chances of every three tokens [k, k, k], k the tokens that can come."""
    loaded, settings = stories(), Sampling(max_tokens=4, temperature=1.5, top_k=4, ignore_eos=True)
    options = EngineOptions(max_batch=64, pages=400, draft=KINDS[kind](loaded), lookahead=2, adaptive=False, seed=5)
    engine = Engine(loaded, options)
    prompt = loaded.tokenizer.encode(PROMPT)
    outputs = [tuple(done.tokens[:3]) for done in engine.generate([prompt] * samples, settings)]
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    lane = Lane(loaded.model, requests=1)
    for _ in range(3):
        chances = {
            (*start, int(token)): chance * float(row[token])
            for start, chance in chances.items()
            for row in [_next(lane, [*prompt, *start], settings)]
            for token in row.nonzero()[:, 0]
        }
    cells = {tokens: index for index, tokens in enumerate(chances)}  # and one more for what cannot come
    counts = torch.bincount(torch.tensor([cells.get(output, len(cells)) for output in outputs]), minlength=len(cells) + 1)
    return counts, torch.tensor([*chances.values(), 0.0]), engine.stats()["speculation"]


def _next(lane: Lane, tokens: list[int], settings: Sampling) -> torch.Tensor:
    return probabilities(lane.logits([lane.request(tokens, settings)], [Proposal()]), [settings])[0]


def test_seeded_text_is_the_same_with_and_without_a_draft() -> None:
    loaded = stories()
    settings = [*(Sampling(max_tokens=24, temperature=0.9, seed=seed) for seed in range(3)), Sampling(max_tokens=24)]
    prompts = [PROMPT] * len(settings)
    plain = [done.text for done in Engine(loaded, EngineOptions(pages=200)).generate(prompts, settings)]
    assert len(set(plain)) == len(plain)
    for kind, make in KINDS.items():
        engine = Engine(loaded, EngineOptions(pages=200, draft=make(loaded), adaptive=False))
        assert [done.text for done in engine.generate(prompts, settings)] == plain, kind
