"""How long a search may take, written `40trials` or `10m`.

parse_budget("100trials") ──> Budget(trials=100)      "90s", "10m", "2h" ──> Budget(seconds=…)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.errors import OptionError

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


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
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(trials?|s|m|h)\s*", text)
    value = float(found.group(1)) if found else 0.0
    if found is None or value <= 0 or (found.group(2).startswith("trial") and value != int(value)):
        raise OptionError(f"budget {text!r}", why="it is a number of trials or a time, above 0", do="write 40trials, 90s, 10m or 2h")
    if found.group(2).startswith("trial"):
        return Budget(trials=int(value))
    return Budget(seconds=value * SECONDS[found.group(2)])
