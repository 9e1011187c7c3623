"""Every error a user can meet: what happened (with the value), why, and what to do.

    raise TargetSpecError("memories.sram.bandwidth_bps = -8 in tpu.toml",
                          why="bandwidth must be > 0",
                          do="give bytes per second, e.g. 2048e9")

The CLI prints the three lines and exits with code 2; a traceback means a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6
"""Least likeness of a name that is suggested; at 0.4 "foo" brings "os" and "flops"."""
SHORTEST_PART = 3


class RidgelineError(Exception):
    """Base of all errors raised on purpose."""

    def __init__(self, what: str, *, why: str, do: str) -> None:
        self.what, self.why, self.do = what, why, do
        super().__init__(f"{what}\n  why: {why}\n  do:  {do}")


class UnknownNameError(RidgelineError):
    """A model, target or other registered name that does not exist."""


class TargetSpecError(RidgelineError):
    """A target file that is broken, incomplete or physically impossible."""


class ModelFileError(RidgelineError):
    """A model file that is missing, truncated, of the wrong kind or unsafe to open."""


class CaptureError(RidgelineError):
    """A model that could not be turned into a workload (wrong input shape, failing forward)."""


class NeedsWeightsError(CaptureError):
    """A model that must be run to be captured, but was built without weights."""


class OptionError(RidgelineError):
    """An option whose value makes no sense for this model or target."""


class MissingExtraError(RidgelineError):
    """An optional dependency is not installed."""


class MeasureError(RidgelineError):
    """A measurement that cannot be made on this machine, or a stored one that cannot be read."""


class DataError(RidgelineError):
    """A data set that is missing, broken or of the wrong kind for the model."""


class TrainError(RidgelineError):
    """A training run that cannot go on: a loss that is not a number, a checkpoint of another run."""


class TransformError(RidgelineError):
    """A weight, layer or setting a transform cannot work on."""


class NoGainError(TransformError):
    """A transform whose result is neither smaller on disk nor faster."""


class RegressionError(RidgelineError):
    """A measurement significantly slower than its saved baseline."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names close to `name`: alike in spelling, best first, then those it is a part of; none is better than a far one."""
    names = list(known)
    alike = difflib.get_close_matches(name, names, n=count, cutoff=ALIKE)
    around = [one for one in names if len(name) >= SHORTEST_PART and name in one and one not in alike]
    return [*alike, *around][:count]


def unknown_name(kind: str, name: str, known: Iterable[str], see: str) -> UnknownNameError:
    """The error for a registry miss: lists the nearest spellings, or everything when nothing is near."""
    names = sorted(known)
    close = nearest(name, names)
    hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"
    return UnknownNameError(f"unknown {kind} {name!r}", why=f"no {kind} of that name; {hint}", do=f"see {see}")
