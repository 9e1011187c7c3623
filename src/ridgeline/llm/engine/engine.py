"""The engine: requests come in, every step moves all of them on, text comes out.

    submit ──> Scheduler.plan ──> Runner (one pass for all) ──> Sampler, or Speculator.accept ──> settle ──> commit ──> Event a request
                  parts: next tokens of each request              new tokens of each             text, stops, reasons

A step is one of three: plain (prompt chunks and decodes, one token each at most), a burst (decodes only: several steps on the
device before the host looks), or speculative (decodes check a draft's tokens). All give the same greedy text.
One request's error (logits without a distribution) ends that request. Not thread safe: one thread calls everything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checks import expect
from ...core.errors import OptionError
from ..cache.kv import KVCache
from ..cache.pages import PagePool
from ..load.tokens import StreamDecoder
from ..sampling import BAD_ROW, Sampler, Sampling, TokenLogprob, uniforms
from ..speculate.speculator import Speculator
from .compute import Computer, NewTokens
from .memory import page_count
from .options import Completion, EngineOptions, Event, Timings
from .request import FinishReason, Request
from .runner import Runner
from .scheduler import Policy, Scheduler, StepPlan
from .text import TextOutput

if TYPE_CHECKING:
    from ..load.loaded import Loaded

MOST_BURST = 16
LOAD_OPTIONS = ("dtype", "device", "weights")


class Engine:
    """One model, one cache, any number of requests."""

    def __init__(self, loaded: Loaded, options: EngineOptions | None = None) -> None:
        self.loaded, self.options = loaded, options or EngineOptions()
        self.config, self.tokenizer = loaded.config, loaded.tokenizer
        self.device, dtype = loaded.model.device, loaded.model.dtype
        on_gpu = self.device.type == "cuda"
        self.context = min(self.options.context or self.config.context, self.config.context)
        pages = page_count(self.config, self.options, self.context, dtype, self.device)
        self.cache = KVCache(self.config, pages, self.options.page_size, dtype, self.device, self.options.kv_int8)
        self.pool = PagePool(pages, self.options.page_size, self.options.sharing)
        step_tokens = self.options.max_step_tokens or max(2048 if on_gpu else 512, self.options.max_batch)
        policy = Policy(self.options.max_batch, step_tokens, self.options.max_wait_s, self.options.max_waiting, self.options.fair)
        self.scheduler = Scheduler(self.pool, policy)
        self._seed = self.options.seed if self.options.seed is not None else secrets.randbits(64)
        self.speculator = self._speculator()
        self.runner = Runner(
            loaded.model,
            self.cache,
            max_batch=self.options.max_batch,
            context=self.context,
            device=self.device,
            graphs=self.options.graphs,
        )
        most_burst = self.options.burst or (MOST_BURST if on_gpu else 1)
        self.computer = Computer(self.runner, Sampler(), self.speculator, most_burst, self.options.burst is not None)
        self._seeded: set[str] = set()  # whose seed the user gave
        self._texts: dict[str, TextOutput] = {}
        self._requests: dict[str, Request] = {}
        self._cancelled: list[Request] = []
        self._boxes: dict[str, list[Event]] = {}  # where the stream() or generate() of a request looks for its events
        self._unread: list[Event] = []  # of requests without such a loop, met in another's: for the next step()
        self._numbered = 0
        self.hold_s = 0.0
        """After a step without events: how long it holds back for more requests (max_wait_s)."""
        self.counts = dict.fromkeys(("requests", "finished", "steps", "prompt_tokens", "prefix_tokens", "output_tokens", "errors"), 0)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> Engine:
        """A model by name or path: options of load_model (dtype, device, weights) and of EngineOptions."""
        from ..load import load_model

        known = {*LOAD_OPTIONS, *EngineOptions.__dataclass_fields__}
        for name in options:
            if name not in known:
                raise OptionError(f"option {name!r}", why="an engine has none of that name", do=f"one of {', '.join(sorted(known))}")
        loading = {name: options.pop(name) for name in LOAD_OPTIONS if name in options}
        return cls(load_model(name_or_path, context=options.get("context"), **loading), EngineOptions(**options))

    def _speculator(self) -> Speculator | None:
        if self.options.draft is None:
            return None
        self.options.draft.attach(self.loaded.model, self.cache)
        return Speculator(self.options.draft, self.options.lookahead, self.options.adaptive, lambda request: request.id in self._seeded)

    def warm_up(self, most: int | None = None) -> list[int]:
        """Capture the CUDA graphs of batches up to `most` requests now rather than when they are first met; gives their sizes."""
        return self.runner.warm_up(most) if self.runner.graphs != "off" else []

    def forget_prefixes(self) -> None:
        """After a change of weights by hand: cached keys and values are of the old ones, and pages are found by their tokens only."""
        if self.scheduler.running:
            raise OptionError(
                f"{len(self.scheduler.running)} requests are running", why="their keys are of the old weights", do="let them end first"
            )
        self.pool.forget()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._cancelled and not self._unread

    def submit(self, prompt: str | Sequence[int], sampling: Sampling | None = None, *, client: str = "", id: str | None = None) -> str:
        """Put a request in line and give its id; Busy when the line is full. What can't work is refused here, not later."""
        sampling = Sampling() if sampling is None else sampling
        expect("sampling", sampling, Sampling, do="give a Sampling, e.g. Sampling(max_tokens=64)")
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens and self.loaded.bos is not None:
            tokens = [self.loaded.bos]
        if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.config.vocab for token in tokens):
            raise OptionError("a prompt token", why=f"tokens of this model are 0 to {self.config.vocab - 1}", do="use its own tokenizer")
        room = self.context - len(tokens)
        if room < 1:
            raise OptionError(f"a prompt of {len(tokens)} tokens", why=f"the context holds {self.context}", do="shorten it")
        self._numbered += 1
        # max_tokens within the context from here on, so that nobody plans beyond it
        seed = int(uniforms([self._seed], [self._numbered])[0] * 2**52) if sampling.seed is None else sampling.seed
        settings = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed)
        request = Request(id if id is not None else f"request-{self._numbered}", tokens, settings, client)
        if request.id in self._requests:  # the scheduler has forgotten a cancelled one, whose last event is still to come
            raise OptionError(f"request id {request.id!r}", why="a request of that id is not reported as ended yet", do="give another id")
        self.scheduler.add(request)
        if sampling.seed is not None:
            self._seeded.add(request.id)
        self._texts[request.id] = TextOutput(StreamDecoder(self.tokenizer), sampling.stop)
        self._requests[request.id] = request
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(tokens)
        return request.id

    def request(self, id: str) -> Request | None:
        """A request that has not ended; its sampling holds the seed it runs with."""
        return self._requests.get(id)

    def cancel(self, id: str) -> bool:
        """End a request: its pages are free at once, and the next step reports it; False when it is not there any more."""
        if not self.scheduler.cancel(id):
            return False
        self._cancelled.append(self._requests[id])
        return True

    def step(self) -> list[Event]:
        """Move every running request on; the events of those that got tokens or ended. [] may mean: waiting for more requests.

        Events of a stream() or generate() under way are not among them: those get their own.
        """
        fresh = self._hand_out(self._move())
        events, self._unread = [*self._unread, *fresh], []
        return events

    def _move(self) -> list[Event]:
        """One step, and everybody's events."""
        events = [self._end(request, [], "", None) for request in self._cancelled]
        self._cancelled.clear()
        self.hold_s = 0.0
        if self.scheduler.idle:
            return events
        began = time.monotonic()
        plan = self.scheduler.plan(self.computer.extra(self.scheduler))
        self.hold_s = plan.wait_s
        if self.speculator is not None:
            for request in plan.preempted:
                self.speculator.forget(request)
        events += self._settle(plan, self._computed(plan))
        if plan.parts:
            self.counts["steps"] += 1
            self.computer.done(plan, time.monotonic() - began)
        return events

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """All prompts to their end, batched; completions in the order of the prompts. A text alone is one prompt."""
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        settings = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(listed)
        if len(settings) != len(listed):
            raise OptionError(f"{len(settings)} settings", why=f"there are {len(listed)} prompts", do="give one Sampling, or one a prompt")
        pending = list(zip(listed, settings, strict=True))[::-1]
        mine: dict[str, tuple[Request, list[str]]] = {}  # in the order of the prompts
        left, box = len(listed), list[Event]()
        try:
            while left:
                while pending and self.scheduler.waiting < self.options.max_waiting:
                    name = self.submit(*pending.pop())
                    mine[name], self._boxes[name] = (self._requests[name], []), box
                self._loop_step()
                for event in box:
                    mine[event.request_id][1].append(event.text)
                    left -= event.finish_reason is not None
                box.clear()
        finally:
            for name, (request, _) in mine.items():
                self._leave(name, request)
        return [completion(request, "".join(texts)) for request, texts in mine.values()]

    def stream(self, prompt: str | Sequence[int], sampling: Sampling | None = None) -> Iterator[Event]:
        """The events of one request as they come; leaving the loop early cancels it."""
        name = self.submit(prompt, sampling)
        request = self._requests[name]
        box = self._boxes[name] = []
        try:
            while box or self._requests.get(name) is request:
                if box:
                    yield box.pop(0)
                else:
                    self._loop_step()
        finally:
            self._leave(name, request)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is going on now."""
        speculation = {} if self.speculator is None else {"speculation": self.speculator.stats()}
        counters = None if self.speculator is None else self.speculator.counters
        return {
            **self.counts,
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.waiting,
            "preemptions": self.scheduler.preemptions,
            "free_pages": self.pool.free,
            "total_pages": self.pool.pages,
            "page_size": self.pool.page_size,
            "kv_bytes": self.cache.bytes,
            "prefix_hits": self.pool.hit_pages,
            "drafted": counters.drafted if counters else 0,
            "accepted": counters.accepted if counters else 0,
            "rejected": counters.rejected if counters else 0,
            "graphs": self.runner.captured(),
            "why_no_graphs": self.runner.why_no_graphs,
            **speculation,
        }

    def _loop_step(self) -> None:
        """A step of a stream() or generate(): events to the loops they belong to; the others are kept for step()."""
        events = self._move()
        if not events and self.hold_s:
            time.sleep(self.hold_s)
        self._unread += self._hand_out(events)

    def _hand_out(self, events: Sequence[Event]) -> list[Event]:
        """Put events where their loops look for them; those of requests without a loop are left."""
        left: list[Event] = []
        for event in events:
            self._boxes.get(event.request_id, left).append(event)
        return left

    def _leave(self, name: str, request: Request) -> None:
        """The end of a loop: what of its request still runs is cancelled, and nobody is told."""
        self._boxes.pop(name, None)
        if self._requests.get(name) is request:
            self.cancel(name)
            self._cancelled.remove(request)
            self._end(request, [], "", None)

    def _computed(self, plan: StepPlan) -> NewTokens:
        """What the device gave. A failing step (memory, a kernel) ends the requests that were in it and no others."""
        if not plan.parts:
            return NewTokens()
        try:
            return self.computer.compute(plan)
        except RuntimeError as error:  # torch's: out of memory, a failed launch
            for request, _ in plan.parts:
                request.error = f"the step failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            return NewTokens({request.id: [BAD_ROW] for request, _ in plan.parts})
        except BaseException:
            for request, _ in plan.parts:  # a bug of ours, or Ctrl-C: leave no page behind
                self.cancel(request.id)
            raise

    def _settle(self, plan: StepPlan, new: NewTokens) -> list[Event]:
        """Tokens to text, decide who ends, tell the scheduler, report."""
        taken: dict[str, tuple[list[int], str]] = {}
        reasons: dict[str, FinishReason] = {}
        for request, _ in plan.parts:
            if request.id in new.tokens:
                kept, text, reason = self._take(request, new.tokens[request.id])
                taken[request.id] = (kept, text)
                if reason is not None:
                    reasons[request.id] = reason
        finished = self.scheduler.commit(plan, {name: kept for name, (kept, _) in taken.items()}, reasons)
        ended = {request.id for request in finished}
        events = []
        for request in [request for request, _ in plan.parts if request.id in taken] + plan.failed:
            kept, text = taken.get(request.id, ([], ""))
            logprobs = new.logprobs.get(request.id, [])[: len(kept)] if request.sampling.logprobs is not None else None
            request.logprobs += logprobs or []
            self.counts["output_tokens"] += len(kept)
            if request.id in ended:
                events.append(self._end(request, kept, text, logprobs))
            elif kept:
                events.append(Event(request.id, kept, text, logprobs))
        return events

    def _take(self, request: Request, tokens: Sequence[int]) -> tuple[list[int], str, FinishReason | None]:
        """The tokens up to the one that ends the request, their text, and why it ends."""
        sampling, output = request.sampling, self._texts[request.id]
        enders = (*sampling.stop_ids, *(() if sampling.ignore_eos else self.loaded.eos))
        kept: list[int] = []
        text: list[str] = []
        reason: FinishReason | None = None
        for token in tokens:
            if token == BAD_ROW:
                reason = "error"
                request.error = request.error or "the model gave no distribution: NaN, infinity or nothing possible among the logits"
                break
            kept.append(token)
            if token in enders:  # it is a token of the output, and no text
                reason = "stop"
                break
            text.append(output.push(token))
            if output.stopped:
                reason = "stop"
                break
            if len(request.output) + len(kept) >= sampling.max_tokens:
                reason = "length"
                break
        if reason is not None:
            text.append(output.finish())
        return kept, "".join(text), reason

    def _end(self, request: Request, kept: list[int], text: str, logprobs: list[TokenLogprob] | None) -> Event:
        """Forget a finished request; its last event. What was held back of a cancelled one's text comes out here."""
        output = self._texts.pop(request.id)
        del self._requests[request.id]
        self._seeded.discard(request.id)
        if self.speculator is not None:
            self.speculator.forget(request)
        self.counts["finished"] += 1
        self.counts["errors"] += request.finish_reason == "error"
        self.counts["prefix_tokens"] += request.cached_tokens
        return Event(request.id, kept, text + output.finish(), logprobs, request.finish_reason, request.error)


def completion(request: Request, text: str) -> Completion:
    """Everything about a finished request."""
    logprobs = request.logprobs if request.sampling.logprobs is not None else None
    reason, seed = request.finish_reason or "error", request.sampling.seed or 0
    return Completion(text, request.output, reason, logprobs, timings(request), seed, len(request.prompt), request.error, request.id)


def timings(request: Request) -> Timings:
    """Of a finished request [s]."""
    since = request.arrived
    gaps: list[float] = []
    times = request.token_times
    first = 0
    while first < len(times):
        last = first
        while last < len(times) and times[last] == times[first]:
            last += 1
        if first:
            gaps += [(times[first] - times[first - 1]) / (last - first)] * (last - first)
        first = last
    return Timings(
        queued_s=(request.admitted_at or request.finished_at or since) - since,
        first_token_s=None if request.first_token_at is None else request.first_token_at - since,
        total_s=(request.finished_at or since) - since,
        token_gaps_s=gaps,
    )
