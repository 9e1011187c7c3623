"""The closed form of a mapping's cycles against its schedule, tile by tile: ResNet-18's layers on every catalog array.

python benchmarks/npu_schedule.py    two minutes; writes results/npu-schedule-model.json

per layer, array and objective: cycles by `latency.py` and by the list scheduler, their difference, whether every refill from the
outermost memory hides, and how many steps the schedule walks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import write_results
from npu_search import as_layer, resnet18_layers

from ridgeline.estimate.spatial.mapper import map_layer
from ridgeline.estimate.spatial.schedule.stream import schedule_layer
from ridgeline.target.array import SpatialArraySpec
from ridgeline.target.load import catalog_names, load_array


def row(shape: dict[str, Any], array: SpatialArraySpec, objective: str) -> dict[str, Any]:
    layer = as_layer(shape, array)
    cost = map_layer(layer, array, "any", objective).cost
    outside = [refill for refill in cost.refills if refill.port.startswith(f"{list(array.memories)[-1]}.")]
    scheduled = schedule_layer(layer, array, cost.plan).cycles
    return {
        "layer": shape["name"], "target": array.name, "objective": objective, "cycles": cost.cycles, "scheduled_cycles": scheduled,
        "difference": scheduled / cost.cycles - 1, "refills_hide": all(refill.hidden for refill in outside),
        "steps": max((refill.events for refill in outside), default=1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    rows = []
    for array in map(load_array, catalog_names("array")):
        for objective in ("edp", "latency"):
            rows += [row(shape, array, objective) for shape in resnet18_layers()]
            print(f"{array.name:13} {objective:8} largest difference {max(abs(r['difference']) for r in rows[-12:]):.1%}", flush=True)
    print(write_results("npu", "schedule", "model", {"kind": "modelled: the same on every machine"}, rows, options.out))


if __name__ == "__main__":
    main()
