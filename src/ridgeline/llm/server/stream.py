"""Answers as they are written: server-sent events in OpenAI's form, or one JSON object at the end.

    Group ──(choice, event)──> data: {chunk}\\n\\n … data: {usage}\\n\\n data: [DONE]\\n\\n
                          └──> outcomes, unless the client hangs up first

However it ends (all said, hung up, too late, failed, drained), the group is closed and its pages go back.
An error after the first byte can't change the status any more: it goes out as a chunk with "error", which clients raise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Outcome, Style, usage_of
from .errors import ApiError
from .prepare import Prepared
from .worker import Group

DONE = b"data: [DONE]\n\n"
GRACE_S = 5.0
"""Past the deadline, to send what is left to a client that reads slowly."""


class HungUp(Exception):
    """The client has gone; nobody reads the answer."""


class EventStream(StreamingResponse):
    """A stream that always calls `close` at its end, and ends at its deadline even when the client stops reading."""

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None], deadline: float) -> None:
        super().__init__(pieces, media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._close, self._deadline = close, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline + GRACE_S):
                    await super().__call__(scope, receive, send)
        finally:
            self._close()


async def pieces(group: Group, style: Style, prepared: Prepared, include_usage: bool, state: dict[str, Any]) -> AsyncIterator[bytes]:
    """Every chunk of the answer; `state` gets the usage for the log."""
    outcomes = [Outcome("") for _ in prepared.choices]
    for choice in style.opening(prepared.echoes):
        yield _data(style.chunk([choice], with_usage=include_usage))
    try:
        async for index, event in group:
            # a token whose text is still held back says nothing yet
            if event.text or event.logprobs or event.finish_reason:
                yield _data(style.chunk([style.piece(index, event)], with_usage=include_usage))
            outcomes[index].take(event)
    except ApiError as error:
        state["status"] = error.status
        yield _data(error.content()) + DONE
        return
    usage = state["usage"] = usage_of(prepared.prompt_tokens, outcomes)
    if include_usage:
        yield _data(style.chunk([], usage, with_usage=True))
    yield DONE


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def collect(group: Group, prepared: Prepared, request: Request) -> list[Outcome]:
    """The whole outcomes; raises HungUp as soon as the client has gone."""
    outcomes = [Outcome(echo) for echo in prepared.echoes]

    async def gather() -> None:
        async for index, event in group:
            outcomes[index].take(event)

    gathering, listening = asyncio.ensure_future(gather()), asyncio.ensure_future(hang_up(request))
    try:
        await asyncio.wait({gathering, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            raise HungUp
        gathering.result()
        return outcomes
    finally:
        for task in (gathering, listening):
            task.cancel()


async def hang_up(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
