"""A space small enough to be measured in a test, and a table of it whose numbers are chosen, not measured."""

from __future__ import annotations

import numpy as np

from ridgeline.search.latency import Entry, LatencyTable
from ridgeline.search.spaces.space import Space, load_space


def tiny_space() -> Space:
    return load_space("nb201", channels=2, cells=1, image=8, ops=("skip", "none", "conv3x3"))


def made_table(space: Space, **changes: object) -> LatencyTable:
    """Block number n takes n microseconds and n picojoules; the net itself 5 µs."""
    entries = {
        block.key: Entry(seconds=place * 1e-6, energy_j=place * 1e-12, flops=place) for place, block in enumerate(space.all_blocks())
    }
    settings = space.genotype(space.random(np.random.default_rng(0)))["settings"]
    given: dict[str, object] = {
        "space": space.name, "settings": settings, "target": "made", "method": "estimated", "machine": "made", "versions": {"torch": "0"},
        "overhead_s": 5e-6, "entries": entries,
    }  # fmt: skip
    return LatencyTable.model_validate({**given, **changes})
