"""One thread owns the Engine; the event loop talks to it through a queue.

    open(asked) ──places left?──> Submit ──queue──> thread: take commands, engine.step(), events of all requests
         │ no: 429, Retry-After                        │ call_soon_threadsafe, once a step
         ▼                                             ▼
       Group  <── (choice, Event | ApiError) ── dispatch on the event loop
    close(group) ──> Cancel: pages go back at once, whatever the reason (answered, hung up, too late, drained)

A step that fails answers its requests with 500 and the thread goes on; after ten failures in a row the engine counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...core.errors import OptionError
from .errors import ApiError, busy, internal, refused, unavailable
from .metrics import Metrics

if TYPE_CHECKING:
    from ..engine.options import Event
    from ..load import Loaded
    from ..sampling import Sampling

logger = logging.getLogger("ridgeline.server")
FAILURES_IN_A_ROW = 10
STALLED_S = 120.0
RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 60
STATS_EVERY_S = 0.05


class ServedEngine(Protocol):
    """What the server asks of an Engine."""

    @property
    def loaded(self) -> Loaded: ...
    @property
    def context(self) -> int: ...
    @property
    def hold_s(self) -> float: ...
    def submit(self, prompt: list[int], sampling: Sampling, /, *, client: str, id: str) -> str: ...
    def step(self) -> list[Event]: ...
    def cancel(self, id: str, /) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def idle(self) -> bool: ...


class Submit(NamedTuple):
    id: str
    prompt: list[int]
    sampling: Sampling
    client: str
    group: Group


class Cancel(NamedTuple):
    id: str


class Timing:
    """When a request came and when its last token did; the thread's side."""

    __slots__ = ("arrived", "last")

    def __init__(self) -> None:
        self.arrived, self.last = time.monotonic(), 0.0


class Group:
    """The choices of one HTTP request, on the event loop's side: iterate for (choice, event)."""

    def __init__(self, choices: int, client: str, deadline: float) -> None:
        self.client, self.deadline = client, deadline
        self.ids = [uuid.uuid4().hex for _ in range(choices)]
        self.events: asyncio.Queue[tuple[int, Event] | ApiError] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left = choices
        self.unsubmitted = choices
        self.closed = False

    def fail(self, error: ApiError) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error)
        self.events.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self.left or not self.events.empty():
            try:
                async with asyncio.timeout_at(self.deadline):
                    item = await self.events.get()
            except TimeoutError:
                raise ApiError(408, "the request took longer than this server allows", code="deadline") from None
            if isinstance(item, ApiError):
                raise item
            yield item


class Worker:
    """Admission, the thread, and what it reports. All methods but the thread's own are called on the event loop."""

    def __init__(
        self, engine: ServedEngine, *, slots: int, waiting: int, metrics: Metrics, request_s: float = 300.0, client_share: float = 1.0
    ) -> None:
        self._engine, self._metrics, self._request_s = engine, metrics, request_s
        self.slots, self.capacity = slots, slots + waiting
        self._client_capacity = max(1, math.ceil(self.capacity * client_share))
        self._commands: queue.SimpleQueue[Submit | Cancel | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[Group, int]] = {}
        self._held: Counter[str] = Counter()
        self._ended: deque[float] = deque(maxlen=512)
        self._timings: dict[str, Timing] = {}
        self._failures, self._step_began, self._stats_at = 0, math.inf, 0.0
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stats: Mapping[str, Any] = engine.stats()
        self.draining = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, wait_s: float = 10.0) -> None:
        self._commands.put(None)
        self._thread.join(wait_s)

    @property
    def state(self) -> str:
        """ok, draining, or dead: the thread has ended, steps keep failing, or one does not come back."""
        if not self._thread.is_alive() or self._failures >= FAILURES_IN_A_ROW or time.monotonic() - self._step_began > STALLED_S:
            return "dead"
        return "draining" if self.draining else "ok"

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def retry_after_s(self) -> int:
        """Seconds until the line has gone, at the rate at which choices ended lately."""
        now = time.monotonic()
        recent = [at for at in list(self._ended) if now - at <= RATE_WINDOW_S]
        if not recent:
            return 5
        rate = len(recent) / max(now - recent[0], 1.0)
        return min(LONGEST_RETRY_S, max(1, math.ceil(max(1, len(self._open) - self.slots) / rate)))

    def check_open(self) -> None:
        """Raise 503 when nothing new is taken in."""
        if self.state == "dead":
            raise unavailable(LONGEST_RETRY_S, "the engine is not running")
        if self.draining:
            raise unavailable(self.retry_after_s(), "the server is shutting down")

    async def open(self, asked: Sequence[tuple[list[int], Sampling]], client: str) -> Group:
        """Put every (prompt, sampling) in line, or none: 429 when there is no room, 400 when the engine refuses one."""
        self.check_open()
        count = len(asked)
        if count > self._client_capacity:
            raise ApiError(400, f"this server takes at most {self._client_capacity} choices at once", code="too_many_choices", param="n")
        if len(self._open) + count > self.capacity or self._held[client] + count > self._client_capacity:
            raise busy(self.retry_after_s())
        assert self._loop is not None
        group = Group(count, client, self._loop.time() + self._request_s)
        for index, (id, (prompt, sampling)) in enumerate(zip(group.ids, asked, strict=True)):
            self._open[id] = group, index
            self._held[client] += 1
            self._commands.put(Submit(id, prompt, sampling, client, group))
        try:
            async with asyncio.timeout_at(group.deadline):
                await group.admitted
        except TimeoutError:
            self.close(group)
            raise ApiError(408, "the request took longer than this server allows", code="deadline") from None
        except BaseException:
            self.close(group)
            raise
        return group

    def close(self, group: Group) -> None:
        """Whatever of `group` still runs is cancelled. Safe to call twice."""
        group.closed = True
        for id in group.ids:
            if self._forget(id):
                self._metrics.add("cancelled_total")
                self._commands.put(Cancel(id))

    def cancel_all(self) -> None:
        """The end of a drain: every request that still runs is answered 503."""
        for group in {id(group): group for group, _ in self._open.values()}.values():
            group.fail(unavailable(self.retry_after_s(), "the server is shutting down"))
            self.close(group)

    def _forget(self, id: str) -> bool:
        found = self._open.pop(id, None)
        if found is None:
            return False
        self._ended.append(time.monotonic())
        client = found[0].client
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        return True

    def _dispatch(self, items: Sequence[tuple[str, Event | ApiError | None]]) -> None:
        """On the event loop: hand out what the thread found; None says the engine took the request."""
        for id, item in items:
            found = self._open.get(id)
            if found is None:
                continue
            group, index = found
            if item is None:
                group.unsubmitted -= 1
                if not group.unsubmitted and not group.admitted.done():
                    group.admitted.set_result(None)
            elif isinstance(item, ApiError):
                group.fail(item)
                self._forget(id)
            else:
                if item.finish_reason is not None:
                    group.left -= 1
                    self._forget(id)
                group.events.put_nowait((index, item))

    # From here on: the thread.

    def _run(self) -> None:
        while self._take():
            if not self._engine.idle:
                self._step()
            self._publish()

    def _take(self) -> bool:
        """Carry out what is in the queue, waiting for it only when there is nothing to generate. False: stop."""
        wait = self._engine.idle
        if wait:
            self._stats_at = 0.0
            self._publish()
        # an engine that holds a step back for more requests is woken by the next one, or when its time is over
        wait_s = None if wait else self._engine.hold_s
        while True:
            try:
                command = self._commands.get(block=wait or bool(wait_s), timeout=wait_s or None)
            except queue.Empty:
                return True
            wait, wait_s = False, None
            if command is None:
                return False
            if isinstance(command, Cancel):
                self._timings.pop(command.id, None)
                self._cancel(command.id)
            else:
                self._submit(command)

    def _submit(self, command: Submit) -> None:
        if command.group.closed:
            return
        answer: ApiError | None = None
        try:
            self._engine.submit(command.prompt, command.sampling, client=command.client, id=command.id)
            self._timings[command.id] = Timing()
        except OptionError as error:
            full = type(error).__name__ == "Busy"
            answer = busy(self.retry_after_s()) if full else refused(error)
        except Exception:
            logger.exception("a request could not be submitted")
            answer = internal()
        self._send([(command.id, answer)])

    def _cancel(self, id: str) -> None:
        try:
            self._engine.cancel(id)
        except Exception:
            logger.exception("a request could not be cancelled")
            self._failures = FAILURES_IN_A_ROW

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            events = self._engine.step()
            # a broken device fails every request of a step; one request's own error leaves the others
            self._failures = self._failures + 1 if events and all(event.finish_reason == "error" for event in events) else 0
        except Exception:
            logger.exception("a step failed; its requests are answered with an error")
            self._metrics.add("step_failures_total")
            self._failures += 1
            ids = list(self._timings)
            self._timings.clear()
            for id in ids:
                self._cancel(id)
            self._send([(id, internal()) for id in ids])
            return
        finally:
            self._step_began = math.inf
        self._send([(event.request_id, self._seen(event)) for event in events])

    def _seen(self, event: Event) -> Event | ApiError:
        """Count the event's tokens and times; an engine's error becomes ours, without its details."""
        timing, now = self._timings.get(event.request_id), time.monotonic()
        count = len(event.token_ids)
        if timing is not None and count:
            self._metrics.add("generated_tokens_total", count)
            if not timing.last:
                self._metrics.first_token(now - timing.arrived)
            else:
                self._metrics.between_tokens((now - timing.last) / count, count)
            timing.last = now
        if event.finish_reason is not None:
            self._timings.pop(event.request_id, None)
        if event.error is not None or event.finish_reason == "error":
            logger.error("a request failed in the engine: %s", event.error)
            return internal()
        return event

    def _send(self, items: list[tuple[str, Event | ApiError | None]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, items)

    def _publish(self) -> None:
        """The engine's account, a snapshot that the event loop may read; at most twenty a second."""
        now = time.monotonic()
        if now - self._stats_at >= STATS_EVERY_S:
            self._stats_at, self.stats = now, self._engine.stats()
