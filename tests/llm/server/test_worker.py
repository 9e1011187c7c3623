"""The engine's thread: failures, hang-ups, overload, draining; pages come back whatever happens."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from ridgeline.llm.server.auth import ApiKeys
from ridgeline.llm.server.limits import Limits
from ridgeline.llm.server.worker import FAILURES_IN_A_ROW
from tests.llm.server.fake import FakeEngine
from tests.llm.server.live import Live, Process, live, until
from tests.support import FULL

SECRETS = ("secret", "0x7f", "engine.py", "Traceback", "RuntimeError", "planted")


def ask(server: Live, **body: object) -> httpx.Response:
    return server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, **body})


def test_a_failed_step_answers_its_requests_and_the_server_goes_on() -> None:
    engine = FakeEngine(delay_s=0.001)
    with live(engine, slots=4) as server:
        engine.fail_steps = 1
        answer = ask(server)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert not any(word in answer.text for word in SECRETS)
        assert ask(server).status_code == 200 and server.http.get("/health").status_code == 200
        engine.fail_steps = 1
        streamed = ask(server, stream=True)
        assert streamed.status_code == 200 and '"error"' in streamed.text and not any(word in streamed.text for word in SECRETS)
        assert server.metric("step_failures_total") == 2 and server.metric("kv_pages_free") == engine.total_pages


def test_an_engine_that_only_fails_is_dead() -> None:
    engine = FakeEngine(fail_steps=1000)
    with live(engine, slots=4) as server:
        codes = [ask(server).status_code for _ in range(FAILURES_IN_A_ROW + 1)]
        assert codes == [500] * FAILURES_IN_A_ROW + [503]
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "dead"}
        assert server.http.get("/v1/models").status_code == 200


def test_a_submit_that_breaks_is_an_error_of_one_request() -> None:
    engine = FakeEngine()
    with live(engine, slots=4) as server:
        submit, engine.submit = engine.submit, None  # type: ignore[method-assign, assignment]
        assert ask(server).status_code == 500
        engine.submit = submit  # type: ignore[method-assign]
        assert ask(server).status_code == 200


def request_bytes(**body: object) -> bytes:
    data = json.dumps({"prompt": "hello", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("stream", [True, False])
def test_200_clients_hang_up_and_every_page_comes_back(stream: bool) -> None:
    engine = FakeEngine(slots=64, delay_s=0.002)
    with live(engine, slots=64, limits=Limits(waiting=200)) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        for client in clients:
            client.sendall(request_bytes(max_tokens=500, stream=stream))
        for client in clients[:32] if stream else []:
            assert b"data:" in client.recv(4096) + client.recv(4096)
        until(lambda: engine.stats()["free_pages"] < engine.total_pages - 32)
        for client in clients:
            client.close()
        until(lambda: engine.idle and not server.worker.busy, 5)
        assert engine.stats()["free_pages"] == engine.total_pages and engine.steps < 450
        assert server.metric("cancelled_total") == 200 and not server.worker._held and not server.worker._timings


def test_prompts_that_are_refused_are_not_counted_as_taken_in() -> None:
    with live(FakeEngine(slots=1), slots=1, limits=Limits(waiting=0)) as server:
        for choices, code in ((2, 400), (1, 200)):
            body = {"prompt": "four", "max_tokens": 1, "n": choices}
            assert server.http.post("/v1/completions", json=body).status_code == code
            assert server.metric("prompt_tokens_total") == (4 if code == 200 else 0)


def test_ten_times_more_clients_than_places() -> None:
    """No 5xx, the excess gets 429 with Retry-After, /health stays quick, memory flat."""
    seconds = 120.0 if FULL else 3.0
    with Process(["tests.llm.server.fake", "4", "4", "0.004"]) as server, watching(server.port) as watch:
        codes, sizes = asyncio.run(overload(server, 80, seconds))
        after = httpx.get(f"{server.base}/metrics").text
        health_s, late_s = watch()
    assert set(codes) == {200, 429} and codes[200] > 5 * seconds and codes[429] > 0, codes
    assert p99(health_s) < 0.25 + p99(late_s), (p99(health_s), p99(late_s))
    assert sizes[-1] - sizes[len(sizes) // 4] < 8, sizes
    assert "ridgeline_requests_running 0" in after and "ridgeline_kv_pages_free 4096" in after


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def overload(server: Process, clients: int, seconds: float) -> tuple[dict[int, int], list[float]]:
    """(answers by code, resident MiB over time)."""
    codes: dict[int, int] = {}
    sizes: list[float] = []
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=server.base, timeout=60, limits=httpx.Limits(max_connections=clients)) as http:

        async def client(number: int) -> None:
            while time.monotonic() < end:
                answer = await http.post("/v1/completions", json={"prompt": "x" * number, "max_tokens": 8, "stream": number % 2 == 0})
                codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1 and answer.json()["error"]["type"] == "rate_limit_error"
                    await asyncio.sleep(0.4)
                elif answer.status_code == 200 and number % 2 == 0:
                    assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
                sizes.append(server.resident_mib())

        await asyncio.gather(*(client(number + 1) for number in range(clients)))
    return codes, sizes


WATCH = """
import http.client, json, sys, time
late, health = [], []
while True:
    began = time.monotonic()
    time.sleep(0.02)
    late.append(time.monotonic() - began - 0.02)
    began = time.monotonic()
    link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    link.request("GET", "/health")
    if link.getresponse().status != 200:
        break
    link.close()
    health.append(time.monotonic() - began)
    print(json.dumps([health[-1], late[-1]]), flush=True)
"""


@contextmanager
def watching(port: int) -> Iterator[Callable[[], tuple[list[float], list[float]]]]:
    """Ask /health from a process of its own until called; (seconds it took, seconds this machine woke it up too late)."""
    process = subprocess.Popen([sys.executable, "-c", WATCH, str(port)], stdout=subprocess.PIPE, text=True)

    def stop() -> tuple[list[float], list[float]]:
        assert process.poll() is None, "/health failed"
        process.terminate()
        rows = [json.loads(line) for line in process.communicate()[0].splitlines() if line.endswith("]")]
        return [row[0] for row in rows], [row[1] for row in rows]

    try:
        yield stop
    finally:
        process.kill()
        process.wait()


def test_one_key_cannot_fill_the_whole_line() -> None:
    keys = ["first-key-0123456789", "second-key-0123456789"]
    engine = FakeEngine(slots=2, delay_s=0.02)
    with live(engine, slots=2, limits=Limits(waiting=6), keys=ApiKeys(keys)) as server:
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 4, "max_tokens": 50, "stream": True}, headers=first):
            for headers, code in ((first, 429), (second, 200)):
                assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers).status_code == code
            refused = server.http.post("/v1/completions", json={"prompt": "x", "n": 5}, headers=second)
            assert refused.status_code == 400 and "at most 4" in refused.text
        until(lambda: engine.idle)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = FakeEngine(delay_s=0.01)
    with live(engine, slots=4, limits=Limits(drain_seconds=10)) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 60, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.server.handle_exit(15, None)
            refused, health = httpx.post(f"{server.base}/v1/completions", json={"prompt": "x"}), httpx.get(f"{server.base}/health")
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert health.status_code == 503 and health.json() == {"status": "draining"}
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2] and len(rest) == 60
        until(lambda: not server.worker._thread.is_alive())


def test_a_drain_that_takes_too_long_cancels() -> None:
    engine = FakeEngine(delay_s=0.05)
    with live(engine, slots=4, limits=Limits(drain_seconds=0.2)) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 400, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.server.handle_exit(15, None)
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]" and len(rest) < 50
        until(lambda: not server.worker._thread.is_alive())
    assert engine.idle
