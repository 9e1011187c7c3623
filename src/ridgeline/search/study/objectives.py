"""What a search is after: objectives that know their direction, and hard limits on them.

parse_objectives("accuracy,latency") ──> (Objective, …)           parse_limit("latency<=2ms") ──> Limit(latency, 0.002, at most)
  signed(objective, value) ──> larger is better, as strategies take it

| accuracy           | share of held-out images answered rightly                      | trained |
| crossbar_accuracy  | the same on simulated crossbars with their noise               | trained |
| latency, energy    | of one pass on the target [s], [J]: a table, an estimate, or measured |  |
| memory             | weights and the most activations alive at once [B]             |         |
| parameters, flops  | of the network, and of one pass                                |         |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ...core.errors import OptionError, unknown_name

MOST = 4
"""Objectives of one search: with more, nearly every network lies on the front."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One figure of a network."""

    name: str
    larger: bool  # is better
    unit: str
    trained: bool = False  # known only after training


OBJECTIVES: dict[str, Objective] = {
    one.name: one
    for one in (
        Objective("accuracy", True, "", trained=True),
        Objective("crossbar_accuracy", True, "", trained=True),
        Objective("latency", False, "s"),
        Objective("energy", False, "J"),
        Objective("memory", False, "B"),
        Objective("parameters", False, ""),
        Objective("flops", False, "FLOP"),
    )
}
PREFIXES = {"": 0, "p": -12, "n": -9, "u": -6, "µ": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12}
BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
"""Of bytes."""


def find_objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise unknown_name("objective", name, OBJECTIVES, see="docs/search.md")
    return OBJECTIVES[name]


def parse_objectives(given: str | Sequence[str]) -> tuple[Objective, ...]:
    """Names, the first of which decides the winner; commas between them in a text."""
    names = [word.strip() for word in given.split(",")] if isinstance(given, str) else list(given)
    found = tuple(find_objective(name) for name in names)
    if not 1 <= len(found) <= MOST or len({one.name for one in found}) < len(found):
        raise OptionError(f"objectives {', '.join(names)}", why=f"one to {MOST}, each once", do="e.g. accuracy,latency")
    return found


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound no network of the result goes beyond."""

    objective: Objective
    bound: float
    at_most: bool
    text: str

    def met(self, values: Mapping[str, float]) -> bool:
        """Whether it holds; a figure not known yet does not break it."""
        value = values.get(self.objective.name)
        if value is None:
            return True
        return value <= self.bound if self.at_most else value >= self.bound


def parse_limit(text: str) -> Limit:
    """latency<=2ms, energy<=30uJ, memory<=4MB (or 4MiB), parameters<=1.5M, accuracy>=92%."""
    found = re.fullmatch(r"\s*([a-z_]+)\s*(<=|>=)\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([^\s\d]*)\s*", text)
    if found is None:
        raise OptionError(
            f"limit {text[:60]!r}", why="an objective, <= or >=, and a number are wanted", do="e.g. latency<=2ms or accuracy>=92%"
        )
    objective = find_objective(found.group(1))
    try:  # 80us is 8e-05 and not 80 · 1e-06, which is a little less: a network of exactly 80 µs is within it
        bound = float(Decimal(found.group(3)) * _scale(found.group(4), objective, text))
    except ArithmeticError:  # beyond what a Decimal holds
        bound = math.inf
    if not math.isfinite(bound):
        raise OptionError(f"limit {text[:60]!r}", why="it is beyond what a number can be", do="give a smaller one")
    if objective.trained and bound > 1:
        do = "give at most 100%" if found.group(4) or bound > 100 else f"write {objective.name}{found.group(2)}{found.group(3)}%"
        raise OptionError(f"limit {text[:60]!r}", why=f"{objective.name} is a share: 1, or 100%, is all there is", do=do)
    return Limit(objective, bound, found.group(2) == "<=", text.replace(" ", ""))


def _scale(unit: str, objective: Objective, text: str) -> Decimal:
    """What one of the unit is in base units."""
    if unit == "%" and objective.trained:
        return Decimal("0.01")
    prefix = unit.removesuffix(objective.unit) if objective.unit else unit
    if objective.unit == "B" and unit.endswith("B") and prefix in BINARY:
        return Decimal(BINARY[prefix])
    # a bare number is in the base unit; a prefix without its unit ("2m" of latency) could be minutes, so it is refused
    if prefix not in PREFIXES or (objective.unit and unit and not unit.endswith(objective.unit)) or (objective.trained and unit):
        raise OptionError(f"limit {text[:60]!r}", why=f"{unit[:20]!r} is no unit of {objective.name}", do=f"use {_units(objective)}")
    return Decimal(10) ** PREFIXES[prefix]


def _units(objective: Objective) -> str:
    """In words, the usual ones."""
    if not objective.unit:
        return "% or a share, e.g. 92% or 0.92" if objective.trained else "a plain number, k, M or G"
    prefixes = {"B": ("M", "G", "Mi"), "FLOP": ("M", "G")}.get(objective.unit, ("m", "u"))
    return " or ".join(prefix + objective.unit for prefix in prefixes)


def signed(objectives: Sequence[Objective], values: Mapping[str, float]) -> list[float]:
    """Larger is better in each; what is not known is as bad as can be."""
    worst = -math.inf
    return [(values[one.name] if one.larger else -values[one.name]) if one.name in values else worst for one in objectives]


def nondominated(rows: Sequence[Sequence[float]]) -> list[int]:
    """Places of the rows that no other is at least as good as in all and better in one; of equal rows the first."""
    kept = []
    for place, row in enumerate(rows):
        beaten = any(
            all(a >= b for a, b in zip(other, row, strict=True)) and (list(other) != list(row) or at < place)
            for at, other in enumerate(rows)
            if at != place
        )
        if not beaten:
            kept.append(place)
    return kept
