"""How long a search may take, written `40trials` or `10m`.

parse_budget("100trials") ──> Budget(trials=100)      "90s", "10m", "2h" ──> Budget(seconds=…)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.errors import OptionError

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MOST = 1_000_000_000
"""Trials or seconds: more is a slip of the hand."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One of the two is set."""

    trials: int | None = None
    seconds: float | None = None

    def spent(self, trials: int, seconds: float) -> bool:
        """Whether another trial would be one too many."""
        return (self.trials is not None and trials >= self.trials) or (self.seconds is not None and seconds >= self.seconds)


def parse_budget(text: str) -> Budget:
    """A whole number of trials, or a time."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(trials?|s|m|h)\s*", text)
    unit = found.group(2) if found else ""
    value = float(found.group(1)) * SECONDS.get(unit, 1.0) if found else 0.0
    if not 0 < value <= MOST or (unit not in SECONDS and not value.is_integer()):
        why = f"it is a whole number of trials or a time, above 0, of at most {MOST:,} trials or seconds"
        raise OptionError(f"budget {text[:60]!r}", why=why, do="write 40trials, 90s, 10m or 2h")
    return Budget(seconds=value) if unit in SECONDS else Budget(trials=int(value))
