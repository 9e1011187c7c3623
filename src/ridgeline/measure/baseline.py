"""Saved latencies, and whether today's are significantly slower.

    Profile ──baseline_of──> Baseline ──save_baseline(name)──> <cache>/baselines/NAME.json
    compare_baseline(name, baseline_of(profile)) ──> BaselineComparison(ratio, interval, slower)

ratio = median now / median then. A regression is a 95 % bootstrap interval of the ratio wholly above REGRESSION: smaller
differences come and go between processes. Latencies of different machines, models or settings are not compared: an error
says what differs. torch's version may differ, since an upgrade is a thing one compares; it is reported.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core.errors import MeasureError, OptionError, nearest
from ..core.files import cache_dir, write_json
from ..core.profile import Profile
from ..core.timing import median_ratio_interval, summarise

SCHEMA = 1
REGRESSION = 1.05
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
# What must be equal for two latencies to mean the same thing.
SAME = ("machine", "device", "threads", "model", "batch", "dtype", "phase", "context", "channels_last", "compiled")


@dataclass(frozen=True, slots=True)
class Baseline:
    """Whole-model latencies and everything they depend on."""

    machine: str
    device: str
    threads: int
    model: str
    batch: int
    dtype: str
    phase: str | None
    context: int | None
    channels_last: bool
    compiled: bool
    torch: str
    saved: str
    samples_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """`ratio` above 1 means slower now; `interval` is its 95 % bootstrap interval."""

    name: str
    ratio: float
    interval: tuple[float, float]
    significant: bool  # the interval leaves out 1
    slower: bool  # a regression: the interval lies wholly above 1.05
    before_s: float
    now_s: float
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval)}


def baseline_of(profile: Profile) -> Baseline:
    """What `save_baseline` stores, from a measured profile."""
    import torch

    settings = profile.settings
    if profile.total.measured is None or not hasattr(settings, "samples_s"):
        raise MeasureError("no measurement in this profile", why="it was estimated", do="pass the profile that measure() returned")
    return Baseline(
        settings.machine, settings.device, settings.threads, profile.model, profile.batch, profile.dtype, profile.phase, profile.context,
        settings.channels_last, settings.compiled, torch.__version__, datetime.now(UTC).isoformat(timespec="seconds"), settings.samples_s,
    )  # fmt: skip


def save_baseline(name: str, baseline: Baseline) -> Path:
    """Store under `name`, replacing what was there; the file is whole or absent."""
    path = baseline_path(name)
    _check(asdict(baseline), path)
    return write_json(path, {"schema": SCHEMA, **asdict(baseline), "samples_s": list(baseline.samples_s)})


def load_baseline(name: str) -> Baseline:
    """Read a saved baseline; anything that is not one is a MeasureError."""
    path = baseline_path(name)
    if not path.is_file():
        known = baseline_names()
        hint = f"; nearest: {', '.join(close)}" if (close := nearest(name, known)) else ""
        raise MeasureError(
            f"no baseline {name!r}", why=f"{len(known)} baselines are saved here{hint}", do="save one with --save-baseline NAME"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, str(error).splitlines()[0][:160]) from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise _broken(path, f"not an object of schema {SCHEMA}")
    _check(data, path)
    return Baseline(**{**data, "samples_s": tuple(map(float, data["samples_s"]))})


def baseline_names() -> list[str]:
    """The saved baselines."""
    return sorted(path.stem for path in (cache_dir() / "baselines").glob("*.json") if NAME.fullmatch(path.stem))


def baseline_path(name: str) -> Path:
    """Where `name` is kept; a name is a plain file stem, so that it cannot leave the folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise OptionError(
            f"baseline name {name!r}",
            why="a name is 1 to 64 letters, digits, dots, dashes and underscores, and does not start with a dot",
            do="choose a name like resnet18-main",
        )
    return cache_dir() / "baselines" / f"{name}.json"


def _check(data: dict[str, Any], path: Path) -> None:
    """The right fields with the right types, and latencies that can be compared."""
    wanted = {f.name for f in fields(Baseline)}
    if data.keys() != wanted:
        raise _broken(path, f"fields missing or unknown: {', '.join(sorted(map(str, data.keys() ^ wanted)))}")
    types: dict[str, tuple[type, ...]] = dict.fromkeys(("machine", "device", "model", "dtype", "torch", "saved"), (str,))
    types |= {"threads": (int,), "batch": (int,), "channels_last": (bool,), "compiled": (bool,)}
    types |= {"phase": (str, type(None)), "context": (int, type(None)), "samples_s": (list, tuple)}
    for name, allowed in types.items():
        if not isinstance(data[name], allowed):
            raise _broken(path, f"{name} is {type(data[name]).__name__}")
    samples = data["samples_s"]
    if not samples or not all(isinstance(s, int | float) and not isinstance(s, bool) and math.isfinite(s) and s > 0 for s in samples):
        raise _broken(path, "samples_s must hold finite numbers above zero")


def _broken(path: Path, why: str) -> MeasureError:
    return MeasureError(f"{path} is not a baseline", why=why, do="delete it and save the baseline again")


def compare_baseline(name: str, current: Baseline) -> BaselineComparison:
    """Today's latencies against the saved ones; MeasureError when they are not of the same thing."""
    saved = load_baseline(name)
    different = [
        (field, getattr(saved, field), getattr(current, field)) for field in SAME if getattr(saved, field) != getattr(current, field)
    ]
    if different:
        raise MeasureError(
            f"baseline {name!r} is of something else",
            why="; ".join(f"{field} was {then!r}, is {now!r}" for field, then, now in different),
            do="compare like with like, or save a baseline under another name",
        )
    ratio, low, high = median_ratio_interval(current.samples_s, saved.samples_s)
    before_s, now_s = summarise(saved.samples_s).median_s, summarise(current.samples_s).median_s
    detail = f"torch was {saved.torch}, is {current.torch}" if saved.torch != current.torch else ""
    return BaselineComparison(name, ratio, (low, high), not low <= 1 <= high, low > REGRESSION, before_s, now_s, detail)
