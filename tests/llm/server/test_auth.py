"""Who comes in: every route there is needs a key but /health; keys are read, compared and shown nowhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.server.app import ServerOptions, create_app
from ridgeline.llm.server.auth import ApiKeys, check_binding, is_loopback, load_keys
from tests.llm.server.fake import FakeEngine
from tests.llm.server.live import Live, live, until

KEYS = ["first-key-0123456789", "second-key-0123456789"]
SEEN: list[dict] = []


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(), slots=4, keys=ApiKeys(KEYS), log=SEEN.append) as running:
        yield running


def walked() -> list[tuple[str, str]]:
    """(method, path) of every route the app has, also those FastAPI adds itself."""
    app = create_app(FakeEngine(), ServerOptions()).app
    return [(method, route.path.replace("{model:path}", "fake")) for route in app.routes for method in sorted(route.methods)]  # type: ignore[attr-defined]


def test_the_walk_sees_the_routes() -> None:
    paths = {path for _, path in walked()}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/fake", "/health", "/metrics", "/openapi.json"} <= paths


@pytest.mark.parametrize(("method", "path"), walked())
def test_every_route_needs_a_key_but_health(server: Live, method: str, path: str) -> None:
    key = KEYS[0]
    for header in (None, "Bearer wrong-key-0123456789", f"Basic {key}", key, "Bearer", f"Bearer {key}x", f"Bearer {key[:-1]}"):
        answer = server.http.request(method, path, headers={"authorization": header} if header else None)
        assert answer.status_code == (200 if path == "/health" else 401), (path, header)
    for key in KEYS:
        answer = server.http.request(method, path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == (400 if method == "POST" else 200)


def test_unknown_paths_need_a_key_too(server: Live) -> None:
    for path in ("/", "/docs", "/redoc", "/v1", "/v1/completions/", "//health", "/health/", "/%68ealth/x"):
        answer = server.http.get(path)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error", path


def test_an_unauthenticated_body_is_not_read(server: Live) -> None:
    """The answer comes while the body is still on its way."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert b" 401 " in connection.recv(1000)


def test_clients_are_told_apart_and_keys_never_logged(server: Live) -> None:
    SEEN.clear()
    for key in KEYS:
        server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"authorization": f"Bearer {key}"})
    # an earlier test's refusal may be logged this late
    until(lambda: sum(entry["code"] == 200 for entry in SEEN) == 2)
    answered = [entry for entry in SEEN if entry["code"] == 200]
    assert len({entry["client"] for entry in answered}) == 2 and len(server.worker._engine.clients) >= 2
    assert not any(key in str(SEEN) for key in KEYS) and answered[0]["prompt_tokens"] == 1


def test_without_keys_only_the_names_of_this_machine_are_answered() -> None:
    with live(FakeEngine(), slots=4) as open_server:
        hosts = {"localhost": 200, "127.0.0.1:80": 200, "[::1]:80": 200, "evil.example": 403, "localhost.evil.example": 403}
        for host, code in hosts.items():
            assert open_server.http.get("/v1/models", headers={"host": host}).status_code == code, host


def test_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEYS[0]}\n\n  {KEYS[1]}  \n")
    keys = load_keys(file, {"RIDGELINE_API_KEYS": "third-key-0123456789, ,"})
    assert keys.count == 3 and all(keys.client(f"bearer {key}") for key in [*KEYS, "third-key-0123456789"])
    assert not load_keys(None, {}) and load_keys(None, {}).client("Bearer ") is None
    file.write_text("# nothing\n")
    for path in (file, tmp_path / "absent"):
        with pytest.raises(OptionError):
            load_keys(path, {})
    with pytest.raises(OptionError) as short:
        ApiKeys(["secret"])
    assert "secret" not in str(short.value).replace("secrets", "")


def test_binding_a_network_needs_keys() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    check_binding("127.0.0.1", ApiKeys(), False)
    check_binding("0.0.0.0", ApiKeys(KEYS), False)
    check_binding("0.0.0.0", ApiKeys(), True)
    with pytest.raises(OptionError, match="without API keys"):
        check_binding("0.0.0.0", ApiKeys(), False)
