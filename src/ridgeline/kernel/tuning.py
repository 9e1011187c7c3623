"""Launch configurations: block sizes, warps, stages, by operator and shape.

    config(op, bucket, default) ──> what `forced` says, or was tuned here, or ships for this device, or `default`
    tune(op, bucket, run)       ──> times every candidate of `space(op)`, keeps the fastest on disk

Looking up never measures: tuning happens when `tune` is called (`ridgeline bench --tune`), not in a hot path. The file
`kernels/<device>-triton<version>.json` under the cache folder is keyed by operator, hash of the kernel's source and bucket;
processes that tune at the same time lock it, read it again and add their own lines, so none is lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..core.errors import MeasureError
from ..core.files import cache_dir, write_json
from .jit import triton

Config = Mapping[str, int]
TABLES = Path(__file__).parent / "tables"

_spaces: dict[str, tuple[str, tuple[Config, ...]]] = {}
_forced: dict[str, Config] = {}
_known: dict[tuple[str, tuple[Any, ...]], Config] = {}


def space(op: str, source: str, candidates: Sequence[Config]) -> None:
    """Declare what `tune` may try for an operator; `source` is the file of its kernels (`__file__`)."""
    _spaces[op] = (source, tuple(candidates))


def spaces() -> dict[str, tuple[Config, ...]]:
    """Operators that can be tuned, and their candidates."""
    return {op: candidates for op, (_, candidates) in _spaces.items()}


def config(op: str, bucket: tuple[Any, ...], default: Config) -> Config:
    """The configuration to launch with; a dictionary look-up after the first call for a bucket."""
    if _forced and op in _forced:
        return _forced[op]
    key = (op, bucket)
    found = _known.get(key)
    if found is None:
        found = _known[key] = _stored(op, bucket, default) or default
    return found


def bucketed(size: int) -> int:
    """Sizes that share a configuration: the power of two at or above."""
    return 1 << max(0, size - 1).bit_length()


@contextmanager
def forced(op: str, chosen: Config) -> Iterator[None]:
    """Launch `op` with this configuration inside."""
    before = _forced.get(op)
    _forced[op] = chosen
    try:
        yield
    finally:
        if before is None:
            del _forced[op]
        else:
            _forced[op] = before


@contextmanager
def placed(op: str, bucket: tuple[Any, ...], chosen: Config) -> Iterator[None]:
    """Launch `op` with this configuration inside, for this bucket only."""
    key = (op, bucket)
    before = _known.get(key)
    _known[key] = chosen
    try:
        yield
    finally:
        if before is None:
            del _known[key]
        else:
            _known[key] = before


def tune(op: str, bucket: tuple[Any, ...], seconds: Callable[[], float]) -> tuple[Config, float]:
    """Time every candidate with `seconds`, which runs and times the operator once set; keep the fastest on disk."""
    timed: list[tuple[float, int, Config]] = []
    last: Exception | None = None
    for number, candidate in enumerate(_spaces[op][1]):
        with forced(op, candidate):
            try:
                timed.append((seconds(), number, candidate))
            except Exception as error:
                if "resource" not in str(error).lower():  # a candidate may need more shared memory or registers than there are
                    raise
                last = error
    if not timed:
        raise MeasureError(
            f"no configuration of {op} runs for {bucket}",
            why=f"none of {len(_spaces[op][1])} fits this GPU: {last}" if last else "its space is empty",
            do="give space() a candidate with smaller blocks or fewer stages",
        )
    best_s, _, best = min(timed, key=lambda item: item[:2])
    _remember(op, bucket, best)
    _known[op, bucket] = best
    return best, best_s


def _remember(op: str, bucket: tuple[Any, ...], best: Config) -> None:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = read(path)
        stored[_line(op, bucket)] = dict(best)
        write_json(path, stored)


def _stored(op: str, bucket: tuple[Any, ...], default: Config) -> Config | None:
    if op not in _spaces or not torch.cuda.is_available():
        return None
    line = _line(op, bucket)
    tuned: Config | None = read(cache_file()).get(line)
    shipped: Config | None = _shipped().get(line.partition("@")[0] + line[line.index("|") :])
    known = (default, *_spaces[op][1])
    return next((found for found in (tuned, shipped) if found is not None and _usable(found, known)), None)


def _usable(found: Config, known: Sequence[Config]) -> bool:
    """Whether a stored line has the names of a configuration we know, and whole numbers: positive, or 0 where one we know has 0."""
    if not any(found.keys() == one.keys() for one in known):
        return False
    allowed = {name for one in known for name, value in one.items() if value == 0}
    return all(type(value) is int and (value > 0 or (value == 0 and name in allowed)) for name, value in found.items())


def _line(op: str, bucket: tuple[Any, ...]) -> str:
    return f"{op}@{source_hash(_spaces[op][0])}|{','.join(map(str, bucket))}"


@lru_cache(maxsize=64)
def source_hash(source: str) -> str:
    """Of the file a kernel lives in: a changed kernel is tuned anew."""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]


def cache_file() -> Path:
    return cache_dir() / "kernels" / f"{device_slug()}-triton{triton.__version__ if triton else 'none'}.json"


def device_slug(index: int | None = None) -> str:
    """`nvidia-h200`; `cpu` without a GPU."""
    return torch.cuda.get_device_name(index).lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"


def read(path: Path) -> dict[str, Any]:
    """A stored table; a missing, broken or foreign file is an empty one: it is a cache."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Any]:
    """Defaults for this device that come with the package."""
    return read(TABLES / f"{device_slug()}-configs.json")
