"""Which tokens of which requests are computed in the next step.

    add ──> a line per client ──admit, clients in turn──> running (by arrival) ──plan──> parts [(request, count)] ──Engine──> commit
                 ^────────────── preempted: the latest arrived, when an earlier one needs its pages ──────────┘

    A step has room for max_step_tokens: one for every decoding request, then chunks of prompts being read (earliest first), then chunks
    of newly admitted prompts, then lookahead of speculation. Pages for all of it are allocated before the plan is given out.
Admission wants the pages of the first chunk, and one left for every running request: who comes in is not thrown out at once.
No starvation: running requests are served in the order of arrival and only a later one gives way, so the earliest always moves; nobody
passes the next in turn when that one does not fit. Preempted output is kept: keys and values are recomputed, mostly from shared pages.
Deterministic; O(batch) a step, and O(tokens) once for each admission.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import OptionError
from ..cache.pages import PagePool
from .request import FinishReason, Request


class Busy(OptionError):
    """The waiting line is full: try again later."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many at once, how much a step, and who waits how long."""

    max_batch: int = 64
    """Requests running at once; never more than max_step_tokens."""
    max_step_tokens: int = 2048
    """Tokens computed in one step: the chunk a long prompt is read in, less the decoding requests."""
    max_wait_s: float = 0.0
    """With nothing running, how long the first to come may be held back until max_batch are there."""
    max_waiting: int = 1024
    """Requests in line, over all clients; one more is Busy."""
    fair: bool = True
    """Clients in turn; else first come, first served."""

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_step_tokens", 1), ("max_wait_s", 0), ("max_waiting", 1)):
            if not getattr(self, name) >= least:
                raise OptionError(f"{name} = {getattr(self, name)}", why=f"it is at least {least}", do=f"give {name} >= {least}")

    @property
    def places(self) -> int:
        """Requests that may run at once: each gets a token a step."""
        return min(self.max_batch, self.max_step_tokens)


@dataclass(slots=True)
class StepPlan:
    """What one step computes. Every plan is given to commit, also one without parts."""

    parts: list[tuple[Request, int]] = field(default_factory=list)
    """The next `count` tokens of each request's prompt + output; decoding requests (one token) first."""
    extra: dict[str, int] = field(default_factory=dict)
    """Request id → further tokens there is room for, in the step and in its pages: the most that may be drafted. Decoding requests only."""
    preempted: list[Request] = field(default_factory=list)
    """Back in line, their pages gone."""
    failed: list[Request] = field(default_factory=list)
    """Ended with an error, as they do not fit the cache alone; commit gives them back as finished."""
    wait_s: float = 0.0
    """Nothing to compute yet: plan again after so long, or when a request comes."""


class Scheduler:
    """Continuous batching over one PagePool. Not thread safe."""

    def __init__(self, pool: PagePool, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool, self.policy = pool, policy or Policy()
        self.running: list[Request] = []  # in the order of arrival
        self.waiting = 0
        self.preemptions = 0
        self._lines: OrderedDict[str, deque[Request]] = OrderedDict()  # no empty line; the first client is next in turn
        self._requests: dict[str, Request] = {}  # those not finished
        self._arrivals = 0
        self._clock = clock

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._requests

    def add(self, request: Request) -> None:
        """Put a request in line; Busy where the line is full, OptionError where it can never run."""
        self._validate(request)
        if self.waiting >= self.policy.max_waiting:
            raise Busy(
                f"{self.waiting} requests are waiting",
                why=f"the line holds {self.policy.max_waiting}",
                do="try again later, or raise max_waiting",
            )
        request.order, request.state = self._arrivals, "waiting"
        self._arrivals += 1
        self._requests[request.id] = request
        self._lines.setdefault(self._line_of(request), deque()).append(request)
        self.waiting += 1

    def cancel(self, id: str) -> bool:
        """End a request whatever its state, its pages given back; False where it has ended already or never was."""
        request = self._requests.get(id)
        if request is None:
            return False
        if request.state == "waiting":
            self._leave_line(request)
        else:
            self.running.remove(request)
        self._finish(request, "cancelled", self._clock())
        return True

    def plan(self, extra: int | Mapping[str, int] = 0) -> StepPlan:
        """The next step; `extra` asks for lookahead: so many tokens for every decoding request, or for each by id."""
        plan = StepPlan(wait_s=self._hold_back_s())
        if plan.wait_s > 0:
            return plan
        budget = self.policy.max_step_tokens - sum(request.remaining == 1 for request in self.running)
        budget = self._plan_running(plan, budget)
        if not plan.preempted:
            budget = self._admit(plan, budget)
        plan.parts.sort(key=lambda part: not part[0].decoding)
        if extra:
            self._reserve(plan, budget, extra)
        return plan

    def commit(
        self, plan: StepPlan, new_tokens: Mapping[str, Sequence[int]], reasons: Mapping[str, FinishReason] | None = None
    ) -> list[Request]:
        """Take over what a step gave: tokens by request id, and why a request ends with them; gives back those finished.

        With drafted tokens, `new_tokens` are the accepted ones and the one after them; pages of the rejected are given back. Output is
        cut at max_tokens ("length"). A request cancelled since the plan is passed over.
        """
        now = self._clock()
        finished = list(plan.failed)
        for request, count in plan.parts:
            if request.state != "running":
                continue
            reason = self._advance(request, count, new_tokens.get(request.id, ()), (reasons or {}).get(request.id), now)
            if reason != "error":
                self._publish(request)
            if reason is not None:
                self._finish(request, reason, now)
                finished.append(request)
        self.running = [request for request in self.running if request.state == "running"]
        return finished

    # ── lines

    def _validate(self, request: Request) -> None:
        if request.id in self._requests:
            raise OptionError(f"request id {request.id!r}", why="a request of that id is not finished yet", do="give another id")
        if not request.prompt:
            raise OptionError(
                "an empty prompt", why="at least one token must be read to get the next", do="give a prompt, or a start token"
            )
        room = self.pool.pages * self.pool.page_size
        if request.length > room:
            raise OptionError(
                f"a prompt of {request.length} tokens",
                why=f"the key-value cache holds {room}",
                do="shorten it, or give the cache more pages",
            )

    def _line_of(self, request: Request) -> str:
        return request.client if self.policy.fair else ""

    def _leave_line(self, request: Request) -> None:
        name = self._line_of(request)
        self._lines[name].remove(request)
        if not self._lines[name]:
            del self._lines[name]
        self.waiting -= 1

    def _hold_back_s(self) -> float:
        if not self.policy.max_wait_s or self.running or not self._lines or self.waiting >= self.policy.places:
            return 0.0
        first = min(line[0].arrived for line in self._lines.values())
        return max(0.0, first + self.policy.max_wait_s - self._clock())

    # ── planning

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """A token for every decoding request and chunks for the others, earliest first; gives the budget left."""
        index = 0
        while index < len(self.running):  # requests preempted meanwhile are the last ones: not yet planned
            request = self.running[index]
            alone = request.remaining == 1
            count = self._make_room(request, 1 if alone else min(request.remaining, budget), plan)
            if count:
                plan.parts.append((request, count))
                budget -= 0 if alone else count
            index += request.state == "running"
        return budget

    def _make_room(self, request: Request, count: int, plan: StepPlan) -> int:
        """Pages for the next `count` tokens, or for as many as there are; the latest arrived give theirs before that is none."""
        while count:
            granted = self._grow(request, count)
            if granted:
                return granted
            if len(self.running) == 1:
                self._fail(request, plan)
                return 0
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return 0
        return 0

    def _grow(self, request: Request, count: int) -> int:
        """Allocate for up to `count` tokens more than are computed; gives how many of them have room now."""
        room = (len(request.pages) + self.pool.free) * self.pool.page_size - request.computed
        granted = min(count, room)
        missing = self.pool.pages_of(request.computed + granted) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.allocate(missing) or []
        return granted

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Let clients' first in line come in, in turn, while there is a place, budget and pages; gives the budget left."""
        while self._lines and budget > 0 and len(self.running) < self.policy.places:
            name, line = next(iter(self._lines.items()))
            request = line[0]
            count = self._enter(request, budget)
            if not count:
                break
            self._leave_line(request)
            if name in self._lines:
                self._lines.move_to_end(name)
            insort(self.running, request, key=lambda other: other.order)
            plan.parts.append((request, count))
            budget -= count
        return budget

    def _enter(self, request: Request, budget: int) -> int:
        """Find its prefix and allocate its first chunk; gives the chunk's tokens, 0 and nothing changed where pages are short."""
        if self.pool.free <= len(self.running):
            return 0
        # All but the last token: one at least must be computed, or there are no logits to sample from.
        pages = self.pool.match(request.span(0, request.length - 1))
        cached = len(pages) * self.pool.page_size
        count = min(request.length - cached, budget)
        missing = self.pool.pages_of(cached + count) - len(pages)
        if self.running and missing + len(self.running) > self.pool.free:
            self.pool.unmatch(pages)
            return 0
        request.pages, request.computed, request.published = pages, cached, len(pages)
        request.state = "running"
        if request.admitted_at is None:
            request.admitted_at, request.cached_tokens = self._clock(), cached
        return self._grow(request, count)  # alone, a prompt larger than what is free is read in smaller chunks

    def _reserve(self, plan: StepPlan, budget: int, extra: int | Mapping[str, int]) -> None:
        """Lookahead from what is left of budget, in equal shares, and of pages; it never costs another request its own."""
        decoding = [request for request, _ in plan.parts if request.decoding]
        for index, request in enumerate(decoding):
            asked = extra if isinstance(extra, int) else extra.get(request.id, 0)
            useful = request.sampling.max_tokens - len(request.output) - 1  # the step gives one token anyway
            granted = min(asked, useful, budget // (len(decoding) - index))
            if granted > 0:
                granted = self._grow(request, 1 + granted) - 1
            if granted > 0:
                plan.extra[request.id] = granted
                budget -= granted

    # ── what becomes of a request

    def _advance(self, request: Request, count: int, tokens: Sequence[int], reason: FinishReason | None, now: float) -> FinishReason | None:
        room = request.sampling.max_tokens - len(request.output)
        kept = list(tokens[:room])
        request.output += kept
        request.token_times += [now] * len(kept)
        if kept and request.first_token_at is None:
            request.first_token_at = now
        # Of a speculated step the accepted tokens, all new ones but the last, are in the cache as well.
        request.computed += count + max(0, len(kept) - 1)
        self.pool.release(request.pages[self.pool.pages_of(request.computed) :])
        del request.pages[self.pool.pages_of(request.computed) :]
        if len(tokens) > room or (reason is None and kept and len(kept) == room):
            return "length"
        assert reason is not None or request.remaining > 0, f"request {request.id} was computed to its end and got no token"
        return reason

    def _publish(self, request: Request) -> None:
        first, full = request.published, request.computed // self.pool.page_size
        if full > first:
            tokens = request.span(first * self.pool.page_size, (full - first) * self.pool.page_size)
            before = request.pages[first - 1] if first else None
            request.pages[first:full] = self.pool.share(tokens, request.pages[first:full], before)
            request.published = full

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Back to the front of its client's line, and its client next in turn; only the pages are lost."""
        self.running.remove(request)
        self._give_back(request)
        request.state = "waiting"
        request.preemptions += 1
        self.preemptions += 1
        name = self._line_of(request)
        self._lines.setdefault(name, deque()).appendleft(request)
        self._lines.move_to_end(name, last=False)
        self.waiting += 1
        plan.preempted.append(request)

    def _fail(self, request: Request, plan: StepPlan) -> None:
        room = self.pool.pages * self.pool.page_size
        request.error = f"the key-value cache holds {room} tokens and the request needs more: give it more pages or a smaller max_tokens"
        self.running.remove(request)
        self._finish(request, "error", self._clock())
        plan.failed.append(request)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        self._give_back(request)
        request.state, request.finish_reason, request.finished_at = "finished", reason, now
        del self._requests[request.id]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.computed, request.published = [], 0, 0
