"""Which chip to build: hardware and schedule chosen together, for given models, within an area and a power.

base array + design space ──choice──> chip (areas and energies by stated rules) ──exact mapper──> every layer
    ──fuse──> latency, energy, area, power ──grid | evolution, journalled──> Pareto front ──knee──> the chip to build

rules.py     how area, leakage and energy follow sizes      fusion.py    activations kept on chip, cuts by dynamic programming
space.py     lists of values, one pick from each            front.py     dominance, ranks, knee
chip.py      base + choice -> target                        search.py    which chips to look at
evaluate.py  what a chip is worth, and its lower bound      journal.py   every chip on disk at once
workers.py   several processes                              result.py    codesign(): the answer
"""

from __future__ import annotations

from .evaluate import Evaluated, Problem, evaluate_chip
from .journal import Journal, header_of, open_journal
from .result import Codesign, codesign
from .search import Limits
from .space import Choice, DesignSpace, default_space, load_space

__all__ = [
    "Choice",
    "Codesign",
    "DesignSpace",
    "Evaluated",
    "Journal",
    "Limits",
    "Problem",
    "codesign",
    "default_space",
    "evaluate_chip",
    "header_of",
    "load_space",
    "open_journal",
]
