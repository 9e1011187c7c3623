"""One planned step on the device: pieces in, new tokens of each request out.

plan ──┬── burst        all decode and have room for more: several steps before the host looks
       ├── speculative  a draft proposes, one pass checks len(proposal) + 1 rows a request, the rest of the plan goes along
       └── plain        prompt chunks and decodes in one pass; a token for each request computed to its end
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..sampling import Sampler, TokenLogprob, logprobs_of
from .request import Request
from .runner import MOST_STEPS, Piece, Runner

if TYPE_CHECKING:
    from ..speculate.draft import Proposal
    from ..speculate.speculator import Speculator
    from .scheduler import Scheduler, StepPlan

BURST_S = 0.025
"""A burst takes at most about this long: streamed text still looks even, and who arrives does not wait long."""


@dataclass(slots=True)
class NewTokens:
    """By request id; a request in the middle of its prompt has none."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)


class Computer:
    """Chooses the kind of step and runs it."""

    def __init__(self, runner: Runner, sampler: Sampler, speculator: Speculator | None, most_burst: int, fixed_burst: bool) -> None:
        self.runner, self.sampler, self.speculator = runner, sampler, speculator
        self.most_burst, self.fixed_burst = most_burst, fixed_burst
        self.decode_s = 0.0  # measured, of one decode step
        self.drafting = False  # in the step under way
        self.burst_steps = 0  # of the step under way

    def extra(self, scheduler: Scheduler) -> int | dict[str, int]:
        """How many tokens more than one the scheduler should make room for, for each decoding request."""
        decoding = [request for request in scheduler.running if request.decoding]
        self.drafting, self.burst_steps = False, 0
        if self.speculator is not None:
            room = [request.sampling.max_tokens - len(request.output) - 1 for request in decoding]
            counts = self.speculator.lookaheads(decoding, room)
            self.drafting = any(counts)
            if self.drafting:
                return {request.id: count for request, count in zip(decoding, counts, strict=True) if count}
        if len(decoding) < len(scheduler.running) or any(_looks_back(request) for request in decoding):
            return 0
        if scheduler.waiting and len(decoding) < scheduler.policy.max_batch:
            return 0  # someone may come in: look again after one step
        return self._burst_steps() - 1

    def _burst_steps(self) -> int:
        if self.fixed_burst or self.most_burst == 1:
            return self.most_burst
        return max(1, min(self.most_burst, int(BURST_S / self.decode_s))) if self.decode_s else 1

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> NewTokens:
        """The new tokens of a plan with parts."""
        requests = [request for request, _ in plan.parts]
        bursts = bool(plan.extra) and not self.drafting
        if self.speculator is not None and not bursts and any(request.decoding for request in requests):
            return self._speculative(plan, self.speculator)
        if bursts and all(request.decoding for request in requests):
            return self._burst(plan, requests)
        return self._plain(plan)

    def done(self, plan: StepPlan, seconds: float) -> None:
        """How long the whole step took, host included."""
        if self.speculator is None:
            return
        if self.burst_steps and self.speculator.adaptive is not None:
            # drafts are switched off or paused: what they are compared with is a step of a burst
            ones = [1] * len(plan.parts)
            self.speculator.adaptive.time(len(ones), [0] * len(ones), ones, 0.0, seconds / self.burst_steps)
            self.speculator.counters.plain_steps += len(ones) * self.burst_steps
        self.speculator.step_done(seconds, all(request.output and count == 1 for request, count in plan.parts))

    def _plain(self, plan: StepPlan) -> NewTokens:
        began = time.monotonic()
        pieces, ending = _pieces(plan.parts)
        if not ending:
            pieces[0].wanted = 1  # one row that nobody looks at: kernels need not know of empty batches
        logits = self.runner.run(pieces)
        new = NewTokens()
        if ending:
            self._sample(new, logits, ending)
        if all(piece.decodes for piece in pieces):
            self._measured(time.monotonic() - began)
        return new

    def _burst(self, plan: StepPlan, requests: Sequence[Request]) -> NewTokens:
        began = time.monotonic()
        pieces, _ = _pieces(plan.parts)
        granted = [1 + plan.extra.get(request.id, 0) for request in requests]
        # Most rows decide: a few that end or lack pages compute what is dropped, rather than stop all others. Nobody leaves the context.
        steps = min(sorted(granted)[len(granted) // 4], MOST_STEPS)
        steps = self.burst_steps = min(steps, self.runner.context - max(piece.position for piece in pieces))
        rules = self.sampler.rules_of(requests, self.runner.model.config.vocab, self.runner.device)
        random = self.sampler.randoms(requests, steps, self.runner.device)
        if random is None:
            lines = self.runner.burst(pieces, steps, None)
        else:
            lines = self.runner.burst(pieces, steps, lambda logits, step: rules.draw(logits, random[step]))
        self._measured((time.monotonic() - began) / steps)
        rows = zip(requests, zip(*lines, strict=True), granted, strict=True)
        return NewTokens({request.id: list(tokens[:most]) for request, tokens, most in rows})

    def _speculative(self, plan: StepPlan, speculator: Speculator) -> NewTokens:
        decoding = [request for request, _ in plan.parts if request.decoding]
        proposals = speculator.propose(decoding, [plan.extra.get(request.id, 0) for request in decoding])
        rest, ending = _pieces([(request, count) for request, count in plan.parts if not request.decoding])
        checked = [
            Piece([request.output[-1], *proposal.tokens], request.computed, request.pages, len(proposal.tokens) + 1)
            for request, proposal in zip(decoding, proposals, strict=True)
        ]
        logits = self.runner.run(checked + rest)
        rows = sum(piece.wanted for piece in checked)
        outputs = speculator.accept(decoding, proposals, logits[:rows])
        new = NewTokens({request.id: tokens for request, tokens in zip(decoding, outputs, strict=True)})
        self._speculated_logprobs(new, logits[:rows], decoding, proposals)
        if ending:
            self._sample(new, logits[rows:], ending)
        return new

    def _speculated_logprobs(
        self, new: NewTokens, logits: torch.Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> None:
        """Row i of a request gave its token i."""
        if all(request.sampling.logprobs is None for request in requests):
            return
        at = 0
        for request, proposal in zip(requests, proposals, strict=True):
            tokens = new.tokens[request.id]
            found = logprobs_of(logits[at : at + len(tokens)], tokens, [request.sampling.logprobs] * len(tokens))
            new.logprobs[request.id] = [entry for entry in found if entry is not None]
            at += len(proposal.tokens) + 1

    def _sample(self, new: NewTokens, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        sampled = self.sampler.sample(logits, requests)
        for request, token, logprob in zip(requests, sampled.tokens, sampled.logprobs, strict=True):
            new.tokens[request.id] = [token]
            if logprob is not None:
                new.logprobs[request.id] = [logprob]

    def _measured(self, seconds: float) -> None:
        # the half of the past: a step that captured a graph is forgotten within a few
        self.decode_s = seconds if not self.decode_s else (self.decode_s + seconds) / 2


def _looks_back(request: Request) -> bool:
    """Whether a token depends on more of the host than a random number."""
    return request.sampling.penalised or request.sampling.logprobs is not None


def _pieces(parts: Sequence[tuple[Request, int]]) -> tuple[list[Piece], list[Request]]:
    """The pieces of a plan, and the requests that get a token: those computed to their end."""
    pieces, ending = [], []
    for request, count in parts:
        ends = count == request.remaining
        pieces.append(Piece(request.span(request.computed, count), request.computed, request.pages, int(ends)))
        if ends:
            ending.append(request)
    return pieces, ending
