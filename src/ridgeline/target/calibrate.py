"""Calibration of this machine: its roofs, its dispatch cost, and how near its roofs each family of op gets.

    bandwidth of each cache level and memory ─┐
    matmul peak per dtype ────────────────────┤
    dispatch cost of an op and of a view ─────┼──> ProcessorSpec ──TOML──> cache_dir()/targets/<machine>.toml
    ~150 single ops (probes.py) ──────────────┘

Takes a minute or two, once. Each result goes to a journal beside the file as soon as it is known, so that a killed calibration
goes on where it stopped. A changed machine, thread count or torch version is another file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import OptionError, RidgelineError
from ..core.files import cache_dir, write_json, write_text
from ..core.spec import parse_spec, read_toml
from ..core.toml_out import dump_toml
from .spec import ProcessorSpec

VERSION = 1
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
    say = progress or (lambda _message: None)
    path = calibration_path(device)
    journal = Journal(path.with_suffix(".journal.json"))
    from .machine import roofs, time_probes

    data = roofs(device, journal, say)
    data["probes"] = time_probes(device, data, journal, say, quick)
    spec = parse_spec(ProcessorSpec, data, path.name)
    write_text(path, dump_toml(spec.model_dump()))
    journal.close()
    return spec


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
