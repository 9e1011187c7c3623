"""Against collapse: a search that ends in skip connections is seen, stopped and answered with the architecture from before.

    each epoch ──> skips of the plain derivation, dominant eigenvalue λ of ∇²aa of the validation loss
    stop, skips       more than `stop_skips` in the normal cell (Liang 2019, DARTS+)          ──> the last epoch that had not
    stop, eigenvalue  mean |λ| of the last `window` epochs > `rise` · that of the `window` before (Zela 2020) ──> the epoch before them
    derive            at most `skips` in the normal cell, the best such architecture (derive.py)

A large eigenvalue means a sharp minimum: the derived network, a large step away from the mixture, then loses what the mixture had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.errors import OptionError


@dataclass(frozen=True, slots=True)
class Guard:
    """What is watched; None switches a rule off."""

    skips: int | None = 2
    stop_skips: int | None = 3
    rise: float | None = 1.3
    window: int = 3
    iterations: int = 8  # of the power method, an epoch
    skip_dropout: float = 0.0

    def __post_init__(self) -> None:
        counts = [value for value in (self.skips, self.stop_skips) if value is not None]
        if any(value < 0 for value in counts) or self.window < 1 or self.iterations < 1 or not 0 <= self.skip_dropout < 1:
            raise OptionError(f"{self}", why="counts are 0 or more, window and iterations 1 or more, a dropout below 1", do="change it")
        if self.rise is not None and not self.rise > 1:
            raise OptionError(f"rise = {self.rise}", why="a stop needs a rise above 1", do="give e.g. 1.3, or None for no such stop")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the search should end, and the epoch (from 0) whose architecture to answer with."""

    reason: str
    epoch: int


def check(guard: Guard, skips: Sequence[int], eigenvalues: Sequence[float]) -> Stop | None:
    """After each epoch, from the values of all epochs so far; eigenvalues may be empty where they are not watched."""
    last = len(skips) - 1
    if guard.stop_skips is not None and skips and skips[last] > guard.stop_skips:
        good = [epoch for epoch, count in enumerate(skips) if count <= guard.stop_skips]
        return Stop(f"skips: {skips[last]} in the normal cell, more than {guard.stop_skips}", good[-1] if good else last)
    ratio = smoothed_rise(eigenvalues, guard.window)
    if guard.rise is not None and ratio is not None and ratio > guard.rise:
        told = f"eigenvalue: its mean over {guard.window} epochs rose {ratio:.2f} times, more than {guard.rise:g}"
        return Stop(told, len(eigenvalues) - 1 - guard.window)
    return None


def smoothed_rise(values: Sequence[float], window: int) -> float | None:
    """Mean magnitude of the last `window` values over that of the `window` before; None while there are too few."""
    if len(values) < 2 * window:
        return None
    after, before = (sum(abs(value) for value in part) / window for part in (values[-window:], values[-2 * window : -window]))
    return after / before if before > 0 else (float("inf") if after > 0 else 1.0)
