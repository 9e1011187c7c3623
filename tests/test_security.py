"""SECURITY.md says what the code does: its figures are the code's, and every command that opens a port is in it."""

from __future__ import annotations

import re

from ridgeline.cli.main import app
from ridgeline.core.spec import MAX_SPEC_BYTES
from ridgeline.llm.load.render import MOST_CHARACTERS, MOST_MEMORY_BYTES, MOST_SECONDS
from ridgeline.llm.server.auth import SHORTEST_KEY, VARIABLE
from ridgeline.llm.server.limits import Limits
from ridgeline.search.latency.table import MOST_BYTES as MOST_TABLE_BYTES
from ridgeline.workload.huggingface_config import MOST_BYTES as MOST_CONFIG_BYTES
from tests.support import ROOT

PAGE = re.sub(r"\s+", " ", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


def test_the_servers_limits() -> None:
    limits = Limits()
    for words in (
        f"headers {limits.header_bytes >> 10} KiB and {limits.header_seconds:.0f} s",
        f"body {limits.body_bytes >> 20} MiB and {limits.body_seconds:.0f} s",
        f"JSON {limits.json_depth} levels deep",
        f"{limits.connections} connections",
        f"at most {limits.max_tokens:,} new tokens, {limits.choices} choices and {limits.request_seconds:.0f} s",
        f"{limits.waiting} wait",
        f"within {limits.drain_seconds:.0f} s",
        f"at least {SHORTEST_KEY} characters",
        VARIABLE,
    ):
        assert words in PAGE, words


def test_the_limits_of_files() -> None:
    for words in (
        f"{MOST_SECONDS} s, {MOST_MEMORY_BYTES >> 20} MiB and {MOST_CHARACTERS >> 20} Mi characters at most",
        f"at most {MAX_SPEC_BYTES >> 20} MiB; strict",
        f"at most {MOST_TABLE_BYTES >> 20} MiB; checked",
        f"`config.json` up to {MOST_CONFIG_BYTES >> 20} MiB",
    ):
        assert words in PAGE, words


def test_the_server_and_the_pickles_that_are_opened_are_not_denied() -> None:
    assert "serve" in {command.name for command in app.registered_commands}
    assert "`ridgeline serve` listens on `127.0.0.1`, port 8000" in PAGE and "listens on no port" not in PAGE and "is planned" not in PAGE
    assert "`compress --weights`" in PAGE and "weights_only=True" in PAGE
