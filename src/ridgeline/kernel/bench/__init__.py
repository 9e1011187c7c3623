"""Measuring the kernels: rows of every operator at any size, against eager torch, torch.compile and other libraries.

    load_cases() ──> CASES ──planned──> [Wanted] ──run(measure_ceilings(device), Settings(…))──> BenchRow, …

A new kernel is one file in this package with `BENCH = benchmark(Case(…))`; nothing else has to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..case import CASES, Case
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
    package = importlib.import_module(__name__.rpartition(".")[0])
    for name in sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.ispkg):
        importlib.import_module(f"{package.__name__}.{name}")
    return dict(sorted(CASES.items()))
