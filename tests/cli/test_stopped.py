"""Ctrl-C: one line, exit code 130, at once; what is finished is kept where a command keeps it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import goes_on

KEPT = "stopped; what is finished is kept, and the same command goes on from there"


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "said"),
    [(["analyze", "alexnet", "--on", "h200"], "stopped"), (["map", "alexnet"], "stopped"), (["codesign", "alexnet"], KEPT)],
)
def test_one_line_and_130(run: Any, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.workload.capture.capture", interrupt)
    done = run(*words)
    assert (done.code, done.out) == (130, "") and done.err.splitlines()[1:] == [said]


def test_commands_within_commands(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ridgeline.crossbar.study.subject.load_subject", interrupt)
    assert run("crossbar", "sweep").err.splitlines()[-1] == "stopped"
    done = run("crossbar", "resnet20", "--run", tmp_path / "run")
    assert done.code == 130 and done.err.splitlines()[-1] == KEPT


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("codesign resnet18", True),
        ("lut build --space nb201 --out t.json", True),
        ("lut check t.json", False),
        ("search", True),
        ("search --resume folder", True),
        ("search --table=nb201", False),
        ("crossbar", False),
        ("crossbar sweep --run=folder", True),
        ("compress --out folder", True),
        ("compress --out folder --apply channels-last", False),
        ("profile resnet18", False),
        ("", False),
    ],
)
def test_which_commands_go_on(command: str, kept: bool) -> None:
    assert goes_on(command.split()) is kept


def test_codesign_stops_at_once_and_its_workers_with_it(tmp_path: Path) -> None:
    """As the terminal does it: SIGINT to every process of the group, while each maps a chip that takes half a minute."""
    command = [
        sys.executable,
        "-m",
        "ridgeline.cli.main",
        "codesign",
        "resnet18",
        "--budget",
        "4",
        "--workers",
        "2",
        "--run",
        str(tmp_path),
    ]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a job a shell has put into the background ignores it, and passes that on
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True, preexec_fn=heard) as process:
        assert process.stderr is not None
        begun = [process.stderr.readline(), process.stderr.readline()]
        time.sleep(1.0)  # until the workers are starting
        os.killpg(process.pid, signal.SIGINT)
        stopped = time.monotonic()
        out, err = process.communicate(timeout=60)
        seconds = time.monotonic() - stopped
    assert begun[1] == f"run folder: {tmp_path}\n" and process.returncode == 130
    assert (out, err) == ("", f"{KEPT}\n") and seconds < 10.0  # 1.5 s on a machine with nothing else to do
