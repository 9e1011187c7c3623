"""The engine's one handle on speculation: how far to look ahead, the proposals, their acceptance, and the counters.

decoding requests ──lookaheads──> counts ──(the scheduler reserves pages)──propose──> proposals
   ──(one target pass, len(tokens) + 1 rows a request)──accept(logits)──> tokens out a request ──step_done(seconds)──> adaptive rule

Random numbers are uniform(seed, position of the token in the output, stream): 0 samples tokens, as plain decoding does; 1 draws drafts;
2 decides whether they are kept. Two rules, both exact (accept.py):
  greedy requests, and those the user gave a seed, are checked against their own plain draws, and their drafts are drawn with the same
  numbers: the text is the one they have without speculation, whatever the lookahead was;
  others use min(1, p/q), which keeps more drafts; the text then depends on the lookahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..sampling import History, Rules, Sampling, draw, probabilities, uniforms
from .accept import accept_batch
from .adaptive import Adaptive
from .counters import Counters
from .draft import Ask, Draft, Proposal

if TYPE_CHECKING:
    from ..engine.request import Request

SAMPLE, DRAFT, KEEP = 0, 1, 2  # streams of random numbers


class Speculator:
    """Holds a draft, the adaptive rule (None: the lookahead is fixed) and what happened so far.

    `seeded`: whether the user gave the request its seed; by default whether it has one (an engine that gives seeds itself must say).
    """

    def __init__(self, draft: Draft, lookahead: int = 4, adaptive: bool = True, seeded: Callable[[Request], bool] | None = None) -> None:
        self.draft, self.lookahead = draft, lookahead
        self.adaptive = Adaptive(lookahead, draft.relative_cost) if adaptive else None
        self.counters = Counters()
        self._seeded = seeded or (lambda request: request.sampling.seed is not None)
        self._draft_s = 0.0
        self._step: tuple[list[int], list[int]] | None = None  # drafted and emitted tokens of the step under way

    def lookaheads(self, requests: Sequence[Request], room: Sequence[int]) -> list[int]:
        """Tokens to draft for each request, at most room[i]; call it before the scheduler plans, which needs the largest."""
        wished = self.adaptive.choose([request.id for request in requests]) if self.adaptive else [self.lookahead] * len(requests)
        return [max(0, min(count, most)) for count, most in zip(wished, room, strict=True)]

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """A proposal for every request, empty where none was asked for or found."""
        self._draft_s = 0.0
        if not any(counts):
            return [Proposal() for _ in requests]
        began = time.perf_counter()
        asked = [index for index, count in enumerate(counts) if count]
        proposals = [Proposal() for _ in requests]
        for index, proposal in zip(asked, self.draft.propose([self._ask(requests[index], counts[index]) for index in asked]), strict=True):
            proposals[index] = proposal
        self._draft_s = time.perf_counter() - began
        return proposals

    def accept(self, requests: Sequence[Request], proposals: Sequence[Proposal], logits: torch.Tensor) -> list[list[int]]:
        """Tokens out of each request. logits: float32, the len(tokens) + 1 rows of each request one after another."""
        sizes = [len(proposal.tokens) + 1 for proposal in proposals]
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        result: list[list[int]] = [[] for _ in requests]
        for wants_chances, rule in ((False, self._accept_own_draws), (True, self._accept_by_chance)):
            group = [index for index, proposal in enumerate(proposals) if (proposal.distributions is not None) == wants_chances]
            if group:
                rows = [row for index in group for row in range(begins[index], begins[index] + sizes[index])]
                chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
                outputs = rule([requests[index] for index in group], [proposals[index] for index in group], chosen)
                for index, tokens in zip(group, outputs, strict=True):
                    result[index] = tokens
        self._count(requests, proposals, result)
        return result

    def step_done(self, seconds: float, decode_only: bool = True) -> None:
        """How long the whole engine step took, drafting included; steps with prefill in them teach the rule nothing."""
        if self._step is not None and self.adaptive is not None and decode_only:
            drafted, emitted = self._step
            self.adaptive.time(len(drafted), drafted, emitted, self._draft_s, max(seconds - self._draft_s, 1e-9))
        self._step = None

    def forget(self, request: Request) -> None:
        """The request ended, or lost its place: nothing is kept for it."""
        self.draft.forget(request)
        if self.adaptive is not None:
            self.adaptive.forget(request.id)

    def stats(self) -> dict[str, float | str | bool]:
        """Counters, and whether and why the adaptive rule is on or off."""
        rule = self.adaptive
        state: dict[str, float | str | bool] = {"draft": self.draft.name, **self.counters.as_dict()}
        state["speculating"] = rule.on if rule else True
        state["reason"] = rule.reason if rule else f"on: fixed lookahead of {self.lookahead}"
        if rule is not None and rule.measured_gain is not None:
            state["measured_gain"] = rule.measured_gain
        return state

    def _accept_own_draws(self, requests: Sequence[Request], proposals: Sequence[Proposal], logits: torch.Tensor) -> list[list[int]]:
        """Plain sampling of every row; what follows the first token that is not the draft's is dropped. One wait for the device."""
        tokens = self._own_draws(requests, proposals, logits).tolist()
        result: list[list[int]] = []
        for proposal in proposals:
            own, tokens = tokens[: len(proposal.tokens) + 1], tokens[len(proposal.tokens) + 1 :]
            kept = 0
            while kept < len(proposal.tokens) and own[kept] == proposal.tokens[kept]:
                kept += 1
            result.append(own[: kept + 1])
        return result

    def _own_draws(self, requests: Sequence[Request], proposals: Sequence[Proposal], logits: torch.Tensor) -> torch.Tensor:
        """int64 [R]: what plain decoding would choose in every row."""
        sizes = [len(proposal.tokens) + 1 for proposal in proposals]
        numbers = [number for request, size in zip(requests, sizes, strict=True) for number in self._uniforms(request, size, SAMPLE)]
        rules = Rules(_repeated(requests, sizes), logits.shape[1], logits.device)
        random = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        return draw(logits, rules, random, _histories(requests, proposals))

    def _accept_by_chance(self, requests: Sequence[Request], proposals: Sequence[Proposal], logits: torch.Tensor) -> list[list[int]]:
        """min(1, p/q) over a padded batch. One wait for the device."""
        device, width = logits.device, max(len(proposal.tokens) for proposal in proposals)
        sizes = [len(proposal.tokens) for proposal in proposals]
        target = probabilities(logits, _repeated(requests, [size + 1 for size in sizes]), _histories(requests, proposals))
        targets = torch.nn.utils.rnn.pad_sequence(list(target.split([size + 1 for size in sizes])), batch_first=True)
        drafts = torch.nn.utils.rnn.pad_sequence([_distributions(proposal) for proposal in proposals], batch_first=True)
        drafted = torch.tensor([proposal.tokens + [0] * (width - len(proposal.tokens)) for proposal in proposals], device=device)
        draws, tests = (
            torch.tensor([self._uniforms(request, width + 1, stream) for request in requests], dtype=torch.float64, device=device)
            for stream in (SAMPLE, KEEP)
        )
        tokens, emitted = accept_batch(targets, drafted, torch.tensor(sizes, device=device), drafts, draws, tests[:, :width])
        together = torch.cat([tokens, emitted[:, None]], 1).tolist()
        return [line[: line[-1]] for line in together]

    def _ask(self, request: Request, count: int) -> Ask:
        replays = request.sampling.greedy or self._seeded(request)
        return Ask(request, count, self._uniforms(request, count, SAMPLE if replays else DRAFT), distributions=not replays)

    def _uniforms(self, request: Request, count: int, stream: int) -> list[float]:
        if request.sampling.greedy:
            return [0.5] * count  # never looked at
        begin = len(request.output)
        numbers: list[float] = uniforms([request.sampling.seed or 0] * count, range(begin, begin + count), stream).tolist()
        return numbers

    def _count(self, requests: Sequence[Request], proposals: Sequence[Proposal], outputs: Sequence[Sequence[int]]) -> None:
        drafted, emitted = [len(proposal.tokens) for proposal in proposals], [len(tokens) for tokens in outputs]
        for asked, out in zip(drafted, emitted, strict=True):
            self.counters.record(asked, out)
        if self.adaptive is not None:
            self.adaptive.learn([request.id for request in requests], drafted, emitted)
        self._step = (drafted, emitted)


def _repeated(requests: Sequence[Request], sizes: Sequence[int]) -> list[Sampling]:
    """The settings of every row."""
    return [request.sampling for request, size in zip(requests, sizes, strict=True) for _ in range(size)]


def _histories(requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[History | None]:
    """What stands before each row: the output and the drafts before it (only penalties look at it)."""
    return [
        History(request.prompt, [*request.output, *proposal.tokens[:row]]) if request.sampling.penalised else None
        for request, proposal in zip(requests, proposals, strict=True)
        for row in range(len(proposal.tokens) + 1)
    ]


def _distributions(proposal: Proposal) -> torch.Tensor:
    assert proposal.distributions is not None
    return proposal.distributions
