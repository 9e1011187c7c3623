"""The real engine behind the server: the shipped model, in a thread and as `ridgeline serve`, also killed and started again."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import openai
import pytest

from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.load import chat_ids
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.server.limits import Limits
from tests.llm.server.live import Live, Process, live, until

KEY = "a-key-of-the-test-0001"
GREEDY: dict = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPT = "First Citizen:\nBefore we proceed"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("builtin", dtype="float32", device="cpu", max_batch=16, max_waiting=300, kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine, slots=16, limits=Limits(waiting=250)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> str:
    """The greedy text without a server."""
    again = Engine.from_pretrained("builtin", dtype="float32", device="cpu", kv_memory_bytes=64 << 20)
    return again.generate([PROMPT], Sampling(max_tokens=24, ignore_eos=True))[0].text


def test_the_server_says_what_the_engine_says(client: openai.OpenAI, alone: str) -> None:
    whole = client.completions.create(model="builtin", prompt=PROMPT, **GREEDY, logprobs=3)
    choice = whole.choices[0]
    assert choice.text == alone and choice.finish_reason == "length" and whole.usage is not None and whole.usage.completion_tokens == 24
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None and "".join(choice.logprobs.tokens or []) == alone
    assert all(max(top.values()) <= 0 and len(top) == 3 for top in choice.logprobs.top_logprobs)
    chunks = list(client.completions.create(model="builtin", prompt=PROMPT, **GREEDY, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone
    stop = alone[8:11]
    ended = client.completions.create(model="builtin", prompt=PROMPT, **GREEDY, stop=stop).choices[0]
    assert ended.text == alone[: alone.index(stop)] and ended.finish_reason == "stop"


def test_seeds_and_choices_are_reproducible(client: openai.OpenAI) -> None:
    def texts(n: int, seed: int) -> list[str]:
        return [choice.text for choice in client.completions.create(model="builtin", prompt=PROMPT, max_tokens=12, n=n, seed=seed).choices]

    first = texts(4, 5)
    assert texts(4, 5) == first and len(set(first)) == 4 and texts(1, 7) == first[2:3]


def test_settings_near_zero_are_answered(client: openai.OpenAI, server: Live, alone: str) -> None:
    """Were each of them an error of the engine, ten would make it count as dead."""
    for _ in range(11):
        more = {**GREEDY, "temperature": 1e-46, "max_tokens": 2}
        assert alone.startswith(client.completions.create(model="builtin", prompt=PROMPT, **more).choices[0].text)
        more["extra_body"] = {"repetition_penalty": 1e-300}
        assert client.completions.create(model="builtin", prompt=PROMPT, **more).choices[0].finish_reason == "length"
    assert server.worker.state == "ok"


def test_chat(client: openai.OpenAI, engine: Engine) -> None:
    messages: list = [{"role": "user", "content": "Who goes there?"}]
    whole = client.chat.completions.create(model="builtin", messages=messages, max_tokens=10, temperature=0)
    chunks = client.chat.completions.create(model="builtin", messages=messages, max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens == len(chat_ids(engine.loaded, messages))


def test_200_hang_ups_leave_no_page_behind(server: Live, engine: Engine) -> None:
    until(lambda: engine.idle)
    baseline = engine.pool.free
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for number, client in enumerate(clients):
        data = json.dumps({"prompt": f"{number} {PROMPT}", "max_tokens": 200, "stream": number % 4 != 0, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    until(lambda: len(engine.scheduler.running) == 16 and engine.pool.free < baseline)
    for client in clients:
        client.close()
    until(lambda: engine.idle and not server.worker.busy)
    assert engine.pool.free == baseline and not engine._requests
    engine.pool.check()
    assert server.metric("kv_pages_free") == baseline


def background(server: Process, count: int) -> list[threading.Thread]:
    """Streams that run while something happens to the server."""

    def stream() -> None:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with suppress(httpx.TransportError):
            httpx.post(f"{server.base}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_killed_under_load_it_serves_again(alone: str) -> None:
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    arguments = [
        "ridgeline.cli.main",
        "serve",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--on",
        "cpu",
        "--kv-memory-mib",
        "64",
        "--json-log",
    ]
    with Process(arguments, RIDGELINE_API_KEYS=KEY) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.post(f"{server.base}/v1/completions", json={"prompt": "x"}).status_code == 401
        threads = background(server, 8)
        running = httpx.Client(base_url=server.base, headers=headers)
        until(lambda: "ridgeline_requests_running 8" in running.get("/metrics").text)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        for thread in threads:
            thread.join(10)
        server.start()
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        assert running.post("/v1/completions", json=body).json()["choices"][0]["text"] == alone
        # and a polite end: what runs is finished, the exit code is 0
        threads = background(server, 2)
        until(lambda: "ridgeline_requests_running 2" in running.get("/metrics").text)
        assert server.stop(signal.SIGTERM) == 0
        entries = [json.loads(line) for line in server.said if line.startswith("{")]
        finished = [entry for entry in entries if entry.get("completion_tokens", 0) == 200]
        assert len(finished) == 2 and finished[0]["code"] == 200 and KEY not in "".join(server.said)
