"""Calibration of this machine: its roofs, its dispatch cost, and how near its roofs each family of op gets.

    bandwidth of each cache level and memory ─┐
    matmul peak per dtype ────────────────────┤
    dispatch cost, cost of a page fault ──────┼──> ProcessorSpec ──TOML──> cache_dir()/targets/<machine>.toml
    ~200 single ops (probes.py) ──────────────┘

Runs in a process of its own, whose allocator keeps its memory: ops are timed without page faults, which the estimate adds where
a model causes them, and nothing the caller did disturbs the numbers. Takes two or three minutes, once. Each result goes to a journal
beside the file as soon as it is known, so that a killed calibration goes on where it stopped. A changed machine, thread count or
torch version is another file.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import MeasureError, OptionError, RidgelineError
from ..core.files import cache_dir, write_json, write_text
from ..core.spec import parse_spec, read_toml
from ..core.toml_out import dump_toml
from .spec import ProcessorSpec

VERSION = 2
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
Progress = Callable[[str], None]


def calibrated(device: str, progress: Progress | None = None) -> ProcessorSpec:
    """The cached calibration of this machine, made now if there is none."""
    path = calibration_path(device)
    if path.exists():
        try:
            return parse_spec(ProcessorSpec, read_toml(path), path.name)
        except RidgelineError:
            if progress:
                progress(f"{path.name} cannot be read; calibrating again")
    return calibrate(device, progress=progress)


def calibrate(device: str = "cpu", *, progress: Progress | None = None, quick: bool = False) -> ProcessorSpec:
    """Measure this machine and remember the result."""
    if device not in ("cpu", "cuda"):
        raise OptionError(f"device {device!r}", why="only this machine can be calibrated", do="use cpu or cuda")
    path = calibration_path(device)
    _run_worker([device, *(["quick"] if quick else [])], progress or (lambda _message: None))
    return parse_spec(ProcessorSpec, read_toml(path), path.name)


def _run_worker(args: list[str], say: Progress) -> None:
    """The measurement in a fresh process with as many threads as this one; its lines are progress."""
    import torch

    command = [sys.executable, "-m", "ridgeline.target.calibrate", *args]
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
            try:
                for line in worker.stdout or ():
                    say(line.rstrip())
            except BaseException:
                worker.kill()
                raise
        if worker.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            why = lines[-1] if lines else f"it ended with exit code {worker.returncode}"
            raise MeasureError("calibration failed", why=why, do="run `ridgeline calibrate` again: it goes on where it stopped")


def measure_machine(device: str, quick: bool, say: Progress) -> None:
    """What the fresh process does: measure, and write the file whole."""
    from .machine import roofs, time_probes

    path = calibration_path(device)
    journal = Journal(path.with_suffix(".journal.json"))
    data = roofs(device, journal, say)
    data["probes"] = time_probes(device, data, journal, say, quick)
    spec = parse_spec(ProcessorSpec, data, path.name)
    write_text(path, dump_toml(spec.model_dump()))
    journal.close()


def calibration_path(device: str) -> Path:
    """Where this machine's calibration lives; the name changes with whatever would change the numbers."""
    from .machine import identity

    facts = identity(device)
    digest = hashlib.sha256(json.dumps([VERSION, facts], sort_keys=True).encode()).hexdigest()[:12]
    return cache_dir() / "targets" / f"{device}-{digest}.toml"


class Journal:
    """Results so far, by name; survives a kill at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.results: dict[str, Any] = found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            self.results = {}

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The remembered result of `name`, or measure it now and remember it."""
        if name not in self.results:
            self.results[name] = measure()
            write_json(self.path, self.results)
        return self.results[name]

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


if __name__ == "__main__":
    measure_machine(sys.argv[1], "quick" in sys.argv[2:], lambda message: print(message, flush=True))
