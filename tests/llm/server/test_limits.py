"""Every bound, from outside: bodies, depth, time, choices, tokens; and that the server goes on afterwards."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.server.errors import ApiError
from ridgeline.llm.server.gate import check_depth
from ridgeline.llm.server.limits import Limits
from tests.llm.server.fake import CONTEXT, FakeEngine
from tests.llm.server.live import Live, live, until

LIMITS = Limits(
    body_bytes=20_000, body_seconds=0.6, header_seconds=0.5, prompt_tokens=100, max_tokens=400, request_seconds=1.0, connections=20
)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(delay_s=0.005), slots=4, limits=LIMITS) as running:
        yield running
        assert running.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def raw(server: Live, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back for bytes sent as they are; b"" when the server just closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
        except OSError:
            pass
        return received(connection)


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as closing, a silence does not."""
    found = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionError:
            return found
        if not more:
            return found
        found += more


def refused(server: Live, body: dict, code: str, status: int = 400) -> None:
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_body_announced_too_large_is_refused_unread(server: Live) -> None:
    began = time.monotonic()
    answer = raw(server, POST + b"Content-Length: 99999999999\r\n\r\n{")
    assert b" 413 " in answer and b"body_too_large" in answer and time.monotonic() - began < 0.5


def test_body_in_endless_chunks_is_cut_off(server: Live) -> None:
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    assert b" 413 " in raw(server, POST + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 4)


def test_slow_body_and_slow_headers_are_cut_off(server: Live) -> None:
    began = time.monotonic()
    answer = raw(server, POST + b"Content-Length: 1000\r\n\r\n", *[b"{"] * 10, pause_s=0.09)
    assert b" 408 " in answer and b"body_timeout" in answer
    assert raw(server, *[b"P", b"O", b"S", b"T", b" ", b"/"] * 2, pause_s=0.06) == b""
    assert raw(server) == b""
    assert time.monotonic() - began < 3.5
    # a second request on a kept-alive connection may not crawl either
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert raw(server, first, *[b"G"] * 10, pause_s=0.07).count(b" 200 OK") == 1


def test_headers_too_large(server: Live) -> None:
    assert b" 400 " in raw(server, POST + b"X: " + b"a" * 40_000)


def test_more_connections_than_allowed_are_closed(server: Live) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(LIMITS.connections + 5)]
    try:
        held[-1].settimeout(3)
        assert received(held[-1]) == b""
    finally:
        for connection in held:
            connection.close()
    until(lambda: server.http.get("/health").status_code == 200)


def test_depth_is_counted_outside_of_strings() -> None:
    check_depth(json.dumps({"prompt": "[" * 1000 + '\\"{'}).encode(), 3, 100)
    check_depth(b"[[[]],[[]]]", 3, 100)
    for body in (b"[" * 5, b'{"a":' * 5, b'[[[["\\""]]]]', b'"[" [[[['):
        with pytest.raises(ApiError):
            check_depth(body, 3, 100)
    with pytest.raises(ApiError):
        check_depth(b"[]" * 101, 3, 100)
    began = time.monotonic()
    for hostile in (b'"' + b'\\"' * 500_000, b'"\\' * 500_000, b'"' * 1_000_001, b"[" * 1_000_000):
        try:
            check_depth(hostile, 3, 100)
        except ApiError:
            continue
    assert time.monotonic() - began < 1.0


def test_deep_json_is_refused(server: Live) -> None:
    for depth in (17, 400, 9000):
        answer = server.http.post("/v1/completions", content=b'{"prompt":' + b"[" * depth + b"]" * depth + b"}")
        assert answer.status_code == 400 and "nested" in answer.text


def test_tokens_choices_and_stops(server: Live) -> None:
    refused(server, {"prompt": "x" * 101}, "context_length_exceeded")
    refused(server, {"prompt": [65] * 101}, "context_length_exceeded")
    refused(server, {"prompt": "x", "max_tokens": 401}, "invalid_value")
    refused(server, {"prompt": ["x"] * 5, "n": 2}, "too_many_choices")
    refused(server, {"prompt": "x", "n": 9}, "invalid_value")
    refused(server, {"prompt": "x", "stop": ["a"] * 17}, "invalid_value")
    refused(server, {"prompt": "x", "stop": ""}, "invalid_value")
    refused(server, {"prompt": "x", "stop": "a" * 257}, "invalid_value")
    refused(server, {"prompt": [256]}, "invalid_value")
    refused(server, {"prompt": ""}, "invalid_value")
    refused(server, {"prompt": "x", "stream_options": {"include_usage": True}}, "invalid_value")


def test_a_deadline_ends_the_request_and_frees_its_pages(server: Live) -> None:
    refused(server, {"prompt": "x", "max_tokens": 400}, "deadline", 408)
    text = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 400, "stream": True}).text
    assert '"deadline"' in text and text.endswith("data: [DONE]\n\n") and text.count("data:") > 10
    until(lambda: server.metric("kv_pages_free") == server.metric("kv_pages"))
    assert re.search(r'route="/v1/completions",code="408"} [23]\n', server.http.get("/metrics").text)


def test_a_client_that_stops_reading_is_cut_off() -> None:
    slow = Limits(request_seconds=0.3)
    with live(FakeEngine(), slots=4, limits=slow) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True}).encode()
        connection.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.metric("kv_pages_free") == server.metric("kv_pages") and not server.worker.busy)


@pytest.mark.parametrize("wrong", [{"body_bytes": 0}, {"waiting": -1}, {"request_seconds": float("nan")}, {"choices": 0}])
def test_limits_must_make_sense(wrong: dict) -> None:
    with pytest.raises(OptionError):
        Limits(**wrong)


def test_prompt_and_output_fill_the_context_to_its_last_token() -> None:
    with live(FakeEngine()) as server:

        def answer(prompt: int, new: int | None) -> tuple[int, int]:
            given = server.http.post("/v1/completions", json={"prompt": [97] * prompt, **({} if new is None else {"max_tokens": new})})
            return given.status_code, given.json()["usage"]["completion_tokens"] if given.status_code == 200 else 0

        assert answer(CONTEXT - 1, 1) == answer(CONTEXT - 1, None) == (200, 1)
        assert answer(CONTEXT - 12, 12) == (200, 12) and answer(CONTEXT - 3, None) == (200, 3)
        assert answer(CONTEXT - 12, 13) == answer(CONTEXT, 1) == answer(CONTEXT, None) == (400, 0)
