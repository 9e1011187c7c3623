"""`ridgeline serve` as a user calls it: what it refuses before a model is loaded. Serving itself: tests/llm/server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_a_network_address_needs_keys(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_API_KEYS", raising=False)
    done = run("serve", "--host", "0.0.0.0")
    assert done.code == 2 and "without API keys" in done.err and "loading" not in done.err


def test_bad_options_are_refused_before_loading(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_API_KEYS", raising=False)
    for arguments in (["--weights", "int3"], ["--api-key-file", str(tmp_path / "absent")], ["--port", "70000"], ["--max-batch", "0"]):
        done = run("serve", *arguments)
        assert done.code == 2 and "loading" not in done.err, arguments
    monkeypatch.setenv("RIDGELINE_API_KEYS", "too-short")
    done = run("serve")
    assert done.code == 2 and "too-short" not in done.err


def test_a_port_in_use_is_named(run: Any) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "--on", "cpu", "--kv-memory-mib", "64", "--port", taken.getsockname()[1])
    assert done.code == 2 and "cannot listen" in done.err


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; sys.argv = ['ridgeline', 'serve']; from ridgeline.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "ridgeline[serve]" in done.stderr and "Traceback" not in done.stderr
