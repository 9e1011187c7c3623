"""Random search, without repeats while there is anything new."""

from __future__ import annotations

from .base import Ask, Base


class RandomSearch(Base):
    def propose(self) -> Ask:
        return Ask(self.chance())
