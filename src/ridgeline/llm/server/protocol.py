"""uvicorn's HTTP/1.1 with two bounds it lacks: how long headers may take, and how many connections there may be.

    connected ──first byte … end of headers within header_seconds, else closed──> request ──> answer ──> kept alive, again

Without them a client that opens sockets and says nothing, or a letter a minute, holds them for ever.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits


def timed_protocol(limits: Limits) -> type[H11Protocol]:
    """A protocol class with `limits` in it, for uvicorn's `http` option."""

    class TimedProtocol(H11Protocol):
        header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # h11 leaves IDLE when the headers are whole, and comes back to it after the answer
            if self.conn.their_state is not h11.IDLE:
                self._headers_came()
            elif self.header_timer is None and self.timeout_keep_alive_task is None:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            self.header_timer = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _headers_came(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

    return TimedProtocol
