"""What speculation did: drafted, accepted, rejected, and the two rates users ask for.

one request of one step: `drafted` tokens checked, `emitted` tokens out (accepted + 1)  ──record──>  Counters.as_dict()
  acceptance_rate = accepted / drafted          tokens_per_step = emitted / verified steps of a request
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums over every request and step; steps in which nothing was drafted for a request count as plain."""

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    verified_steps: int = 0
    plain_steps: int = 0

    def record(self, drafted: int, emitted: int) -> None:
        if not drafted:
            self.plain_steps += 1
            return
        self.verified_steps += 1
        self.drafted += drafted
        self.accepted += emitted - 1
        self.emitted += emitted

    @property
    def rejected(self) -> int:
        """Drafted and thrown away: the first one refused and everything after it."""
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a request got for one target pass, over the passes that checked a draft (plain passes give 1)."""
        return self.emitted / self.verified_steps if self.verified_steps else 1.0

    def as_dict(self) -> dict[str, float]:
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
            "verified_steps": self.verified_steps,
            "plain_steps": self.plain_steps,
        }
