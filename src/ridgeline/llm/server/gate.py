"""What every request passes before any route sees it: host, key, body; and what every answer passes on its way out.

    scope ──Host──403──> ──key──401──> ──body: bytes 413, seconds 408, depth 400──> app ──> status ──> metrics, log
       /health needs neither key nor host                                            └─ anything raised: 500 without details

A plain ASGI wrapper around the whole app: a route added later is behind it without anyone remembering to put it there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from .auth import ApiKeys, is_loopback
from .errors import ApiError, internal
from .limits import Limits
from .metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATH = "/health"
HUNG_UP = 499
STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
BRACKET = re.compile(rb"[\[\]{}]")
logger = logging.getLogger("ridgeline.server")


class Gate:
    """The app with its guards around it."""

    def __init__(
        self,
        app: App,
        keys: ApiKeys,
        limits: Limits,
        metrics: Metrics,
        *,
        paths: frozenset[str] = frozenset(),
        local_only: bool = True,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._app, self._keys, self._limits, self._metrics, self._paths, self._log = app, keys, limits, metrics, paths, log
        # without keys and on loopback, a web page the user visits must not reach us under a name of its own (DNS rebinding)
        self._check_host = local_only and not keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, code = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        state = scope["state"] = dict(scope.get("state") or {})
        try:
            try:
                headers = _headers(scope)
                state["client"] = self._client(scope, headers)
                body = await self._body(scope, headers, receive)
                await self._app(scope, _replay(body, receive), sending)
            except ApiError as error:
                # the rest of the body stays unread, so the connection can't be used again
                await _send_error(error, sending)
            except _HungUp:
                code = HUNG_UP
            except Exception:
                logger.exception("a request failed")
                if not code:
                    await _send_error(internal(), sending)
        finally:
            self._count(scope, state.get("status") or code or HUNG_UP, time.monotonic() - began)

    def _count(self, scope: Scope, code: int, seconds: float) -> None:
        # what was refused here never met a route; other paths are not labels, there are too many of them
        route = getattr(scope.get("route"), "path", None) or (scope["path"] if scope["path"] in self._paths else "other")
        self._metrics.observe(route, code)
        if self._log is not None:
            entry = {"time": round(time.time(), 3), "method": scope["method"], "route": route, "code": code, "seconds": round(seconds, 4)}
            self._log(entry | {"client": scope["state"].get("client")} | scope["state"].get("usage", {}))

    def _client(self, scope: Scope, headers: dict[str, str]) -> str:
        """Who is asking, for fair queueing: the key's hash or the address. Raises 401 or 403."""
        address = scope["client"][0] if scope.get("client") else "local"
        if scope["path"] == OPEN_PATH:
            return str(address)
        if self._check_host and not is_loopback(_host_name(headers.get("host", ""))):
            raise ApiError(403, "this server answers to the name localhost only", code="wrong_host")
        if not self._keys:
            return str(address)
        client = self._keys.client(headers.get("authorization"))
        if client is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return client

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        """The whole body within its limits; a length announced too large is refused before a byte is read."""
        if scope["method"] in ("GET", "HEAD"):
            return b""
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._limits.body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _HungUp
                    body += message.get("body", b"")
                    if len(body) > self._limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None
        check_depth(bytes(body), self._limits.json_depth, self._limits.json_brackets)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes", code="body_too_large")


class _HungUp(Exception):
    """The client has gone before its body was whole."""


def check_depth(body: bytes, depth: int, brackets: int) -> None:
    """Raise 400 when the JSON in `body` is nested too deep; linear in its length, and no parser has seen it yet."""
    bare = STRING.sub(b"", body)
    if bare.count(b"[") + bare.count(b"{") > brackets:
        raise ApiError(400, f"the body has more than {brackets} arrays and objects", code="invalid_json")
    level = 0
    for match in BRACKET.finditer(bare):
        level += 1 if match[0] in b"[{" else -1
        if level > depth:
            raise ApiError(400, f"the body is nested deeper than {depth} levels", code="invalid_json")


def _headers(scope: Scope) -> dict[str, str]:
    """The first header of each name, lower case."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _host_name(header: str) -> str:
    return header[: header.find("]") + 1] if header.startswith("[") else header.partition(":")[0]


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what really comes: the hang-up."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(messages, None) or await receive()

    return replayed


async def _send_error(error: ApiError, send: Send) -> None:
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | error.headers()
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
