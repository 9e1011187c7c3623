"""Earlier runs of the same rows, and whether today's is slower.

    BenchRow ──record──> one line appended to <cache>/bench/<device>.jsonl        [op, shape, dtype, backward] -> ours_ms, …
    regression(row, history) ──> times the median of its last five runs, where that is more than 1.10

A line is one write to a file opened for appending, so processes do not cut into each other's. Lines that cannot be read, of a
killed process or another version, are passed over.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from ...core.files import cache_dir
from ..tuning import device_slug

REGRESSION = 1.10
RUNS = 5
Key = tuple[str, tuple[int, ...], str, bool]


def history_file(device: str) -> Path:
    """Where this device's rows are kept."""
    return cache_dir() / "bench" / f"{device_slug() if device.startswith('cuda') else 'cpu'}.jsonl"


def read_history(path: Path) -> dict[Key, list[float]]:
    """Our GPU times [ms] by row, oldest first."""
    found: dict[Key, list[float]] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            data = json.loads(line)
            key = (str(data["op"]), tuple(int(size) for size in data["shape"]), str(data["dtype"]), bool(data["backward"]))
            time_ms = float(data["ours_ms"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if 0 < time_ms < float("inf"):
            found.setdefault(key, []).append(time_ms)
    return found


def regression(time_ms: float | None, earlier: Iterable[float]) -> float | None:
    """Times the median of the last runs, or None where that is no regression (or nothing to compare)."""
    last = list(earlier)[-RUNS:]
    if time_ms is None or not last:
        return None
    ratio = time_ms / median(last)
    return ratio if ratio > REGRESSION else None


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """One line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # a process died within its line
        os.write(handle, (b"\n" if cut else b"") + json.dumps(dict(entry), allow_nan=False).encode() + b"\n")
    finally:
        os.close(handle)


def entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's key figures, when and of what."""
    import torch

    from ... import __version__
    from ...measure.environment import package_version

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "ridgeline": __version__,
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        **{name: row[name] for name in ("op", "shape", "dtype", "backward", "size", "fraction")},
        "ours_ms": row["ours"]["gpu_ms"],
        "host_us": row["ours"]["host_us"],
        **{f"{name}_ms": row[name]["gpu_ms"] if row[name] else None for name in ("eager", "compile")},
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Of the checkout this file lies in; RIDGELINE_COMMIT where there is no git; None for an installed package."""
    if given := os.environ.get("RIDGELINE_COMMIT"):
        return given
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
