"""What every benchmark shares: where results go and what they say about the machine they came from.

rows ──write_results("analyze", "latency", "h200", rows)──> benchmarks/results/analyze-latency-h200.json
  schema, machine, versions, commit (RIDGELINE_COMMIT where there is no git), command, rows
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ridgeline.core.files import write_json

RESULTS = Path(__file__).parent / "results"
AREAS = ("kernel", "crossbar", "llm", "search", "compress", "tune", "npu", "analyze", "graph")


def commit() -> str:
    if given := os.environ.get("RIDGELINE_COMMIT"):
        return given
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return asked.stdout.strip()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "numpy", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """How to run it again, without where this run put its files; the script by its place here, files from elsewhere by their names."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *map(_portable, sys.argv[1:])]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", *words])


def _portable(word: str) -> str:
    """`--table=/somewhere/t.npz` as `--table=t.npz`."""
    option, equals, value = word.rpartition("=")
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() or ".." in path.parts else word


def write_results(
    area: str, what: str, machine_label: str, machine: dict[str, Any], rows: list[dict[str, Any]], folder: Path | None = None
) -> Path:
    """One JSON file a benchmark and machine; run again, it is replaced."""
    if area not in AREAS:
        raise ValueError(f"area {area!r} is not one of {AREAS}")
    data = {
        "schema": 1,
        "machine": machine,
        "versions": versions(),
        "commit": commit(),
        "command": command(),
        "rows": rows,
    }
    return write_json((folder or RESULTS) / f"{area}-{what}-{machine_label}.json", data)
