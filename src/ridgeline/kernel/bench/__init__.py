"""Measuring the kernels: rows of every operator at any size, against eager torch, torch.compile and other libraries.

    load_cases() ──> CASES ──planned──> [Wanted] ──run(measure_ceilings(device), Settings(…))──> BenchRow, …

A new kernel is one file in this package with `BENCH = benchmark(Case(…))`; nothing else has to know of it.
"""

from __future__ import annotations

from ..case import CASES, Case
from ..use import load_operators
from .ceilings import Ceilings, measure_ceilings
from .rows import SIZE_CLASSES, BenchRow, Wanted, planned
from .run import Settings, check_device, machine, run
from .wins import wins_table

__all__ = [
    "SIZE_CLASSES",
    "BenchRow",
    "Ceilings",
    "Settings",
    "Wanted",
    "check_device",
    "load_cases",
    "machine",
    "measure_ceilings",
    "planned",
    "run",
    "wins_table",
]


def load_cases() -> dict[str, Case]:
    """Every operator's case, by name; imports all kernel files."""
    load_operators()
    return dict(sorted(CASES.items()))
