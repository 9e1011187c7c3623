"""The smallest engine there can be, and the test of a distribution.

requests ──Lane.generate(speculator)──> every request decoded in one batch, its pages its own, no scheduler      (the engine is tested too)
tables of p and q, known for a fixed prompt ──sampled(rule)──> counts of the next two tokens ──chi_square──> chance of being this far off
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.engine.request import Request
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Batch, Decoder
from ridgeline.llm.model.weights import random_decoder
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import Proposal, Speculator, accept_batch

SAMPLES = 50_000
WRONG_RULES = ("kept when p >= q", "residual not subtracted", "bonus from the draft")


def tiny_config(layers: int = 4, hidden: int = 32, vocab: int = 40, context: int = 128) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab=vocab, hidden=hidden, layers=layers, heads=4, kv_heads=2, head_dim=hidden // 4, intermediate=2 * hidden,
        context=context,
    )  # fmt: skip


def tiny(seed: int = 0, layers: int = 4, vocab: int = 40) -> Decoder:
    return random_decoder(tiny_config(layers=layers, vocab=vocab), seed=seed)


def disturbed(model: Decoder, noise: float, seed: int = 1) -> Decoder:
    """The model with every weight off by `noise` of its size: a draft that agrees often but not always."""
    copy = Decoder(model.config)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in {id(parameter): parameter for parameter in copy.parameters()}.values():
        parameter.data = parameter.data * (1 + noise * torch.randn(parameter.shape, generator=generator))
    return copy.eval()


class Lane:
    """A target, its cache, and requests that each own enough pages for the longest text."""

    def __init__(self, target: Decoder, tokens: int = 96, requests: int = 8, page_size: int = 4) -> None:
        self.target, self.tokens = target, tokens
        each = -(-tokens // page_size)
        self.cache = KVCache(target.config, each * requests, page_size, dtype=torch.float32)
        order = torch.randperm(each * requests, generator=torch.Generator().manual_seed(7)).tolist()  # pages are scattered
        self._pages = [order[start : start + each] for start in range(0, len(order), each)]
        self._names = count()

    def request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Admitted, all of its prompt but the last token computed."""
        number = next(self._names)
        request = Request(f"request-{number}", list(prompt), sampling, pages=self._pages[number % len(self._pages)])
        if len(prompt) > 1:
            self.logits([request], [Proposal()], upto=len(prompt) - 1)
            request.computed = len(prompt) - 1
        return request

    @torch.inference_mode()
    def logits(self, requests: Sequence[Request], proposals: Sequence[Proposal], upto: int | None = None) -> torch.Tensor:
        """The target's rows for the last known token and every drafted one, of all requests."""
        tokens, positions, slots, starts, wanted = [], [], [], [0], []
        for request, proposal in zip(requests, proposals, strict=True):
            text = [*request.prompt, *request.output, *proposal.tokens][:upto]
            places = range(request.computed, len(text))
            tokens += text[request.computed :]
            positions += places
            slots += [request.pages[at // self.cache.page_size] * self.cache.page_size + at % self.cache.page_size for at in places]
            starts.append(len(tokens))
            wanted += range(starts[-1] - len(proposal.tokens) - 1, starts[-1])
        lengths = [positions[end - 1] + 1 for end in starts[1:]]
        batch = Batch(
            torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), torch.tensor([request.pages for request in requests]).int(),
            torch.tensor(lengths).int(), tuple(starts), torch.tensor(wanted), tuple(lengths),
        )  # fmt: skip
        out: torch.Tensor = self.target(batch, self.cache)
        return out

    def generate(self, requests: Sequence[Request], tokens: int, speculator: Speculator) -> list[list[int]]:
        """`tokens` tokens of each request."""
        while running := [request for request in requests if len(request.output) < tokens]:
            room = [min(tokens - len(request.output), self.tokens - request.length) - 1 for request in running]
            proposals = speculator.propose(running, speculator.lookaheads(running, room))
            outputs = speculator.accept(running, proposals, self.logits(running, proposals))
            for request, output in zip(running, outputs, strict=True):
                request.output += output
                request.computed = request.length - 1
            speculator.step_done(1e-3)
        for request in requests:
            speculator.forget(request)
        return [request.output[:tokens] for request in requests]


class NoDraft:
    """Plain decoding through the same loop."""

    name, relative_cost = "none", 0.0

    def attach(self, target: Decoder, cache: KVCache) -> None: ...

    def propose(self, asks: Sequence[object]) -> list[Proposal]:
        return [Proposal() for _ in asks]

    def forget(self, request: Request) -> None: ...


def chi_square(counts: torch.Tensor, chances: torch.Tensor, least: float = 5.0) -> float:
    """Chance of counts at least this far from `chances`; cells expected fewer than `least` times are one cell together."""
    counts, expected = counts.double().flatten(), chances.double().flatten() * counts.sum()
    if bool((counts[chances.flatten() == 0] > 0).any()):
        return 0.0  # something impossible happened
    rare = expected < least
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2))


def joint(target: torch.Tensor) -> torch.Tensor:
    """Chances [V, V] of the next two tokens from a table [1 + V, V]: row 0 at the start, row 1 + t after token t."""
    return target[0][:, None] * target[1:]


def sampled(rule: str, samples: int, target: torch.Tensor, draft: torch.Tensor, lookahead: int) -> tuple[torch.Tensor, float]:
    """Counts [V, V] of the first two tokens, and the share of first drafts kept. Tables as for `joint`.

    `rule`: "exact", or one of three wrong ones.
    """
    vocab = target.shape[1]
    first = torch.multinomial(draft[0], samples, replacement=True)
    drafted = torch.stack([first, torch.multinomial(draft[1 + first], 1)[:, 0]], 1)[:, :lookahead]
    tokens, emitted = one_step(rule, target, draft, drafted, torch.zeros_like(first))
    second, _ = one_step(  # where one token came out, a second step follows: a draft of one token after it
        rule, target, draft, torch.multinomial(draft[1 + tokens[:, 0]], 1), 1 + tokens[:, 0]
    )
    pair = torch.stack([tokens[:, 0], torch.where(emitted > 1, tokens[:, 1], second[:, 0])], 1)
    return torch.bincount(pair[:, 0] * vocab + pair[:, 1], minlength=vocab * vocab), float((emitted > 1).double().mean())


def one_step(rule: str, target: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor, begin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(tokens, emitted) of a step from table rows `begin` [N]."""
    samples, width = drafted.shape
    after = torch.cat([begin[:, None], 1 + drafted], 1)
    p, q = target[after], draft[after[:, :width]]
    draws, tests = torch.rand(2, samples, width + 1, dtype=torch.float64)
    tests = tests[:, :width]
    counts = torch.full((samples,), width)
    if rule == "exact":
        return accept_batch(p, drafted, counts, q, draws, tests)
    if rule == "bonus from the draft":
        return accept_batch(torch.cat([p[:, :width], draft[after[:, width:]]], 1), drafted, counts, q, draws, tests)
    p_drafted, q_drafted = (table[:, :width].gather(2, drafted[..., None])[..., 0] for table in (p, q))
    kept = p_drafted >= q_drafted if rule == "kept when p >= q" else tests * q_drafted < p_drafted
    accepted = kept.long().cumprod(1).sum(1)
    every = torch.multinomial(p.flatten(0, 1), 1).view(samples, width + 1)  # from p itself: the residual is not subtracted
    tokens = torch.cat([drafted, every[:, -1:]], 1)
    index = torch.arange(samples)
    tokens[index, accepted] = every[index, accepted]
    return tokens, accepted + 1
