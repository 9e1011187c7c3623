"""What every command's tests share: calling the program as a user does."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest

from ridgeline.cli.main import main


class Run(NamedTuple):
    """What a call left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """run("map", MODEL, "--on", target) -> Run."""

    def call(*args: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "160")
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call
