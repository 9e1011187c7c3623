"""How long the full mapping search takes, and what it finds: every layer of ResNet-18 and all of ResNet-50 on two arrays.

python benchmarks/npu_search.py            a few minutes; writes results/npu-search-cpu.json
python benchmarks/npu_search.py --quick    one layer on one array; prints, writes nothing

per layer, array and objective: CPU seconds of one cold search (all caches emptied), energy, cycles, lower bound, gap, and
ZigZag's best energy and cycles of the same layer where tests/estimate/npu_cases stores a run. One process, numpy on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_results

from ridgeline.estimate.spatial import mapper, tiles
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.network import map_layers
from ridgeline.measure.environment import machine_name
from ridgeline.target.array import SpatialArraySpec
from ridgeline.target.load import load_array
from ridgeline.workload.capture import capture

CASES = Path(__file__).parents[1] / "tests" / "estimate" / "npu_cases"
NAMES = {"B": "B", "K": "K", "C": "C", "P": "OY", "Q": "OX", "R": "FY", "S": "FX"}
ARRAYS = {"tpu-like": "tpu_like", "eyeriss-like": "eyeriss_like"}


def empty_caches() -> None:
    for cached in (mapper._search, tiles.extents, tiles.windows, tiles.lane_groups):
        cached.cache_clear()


def resnet18_layers() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((CASES / "layers.json").read_text())["resnet18_unique"]
    return rows


def stored_runs(architecture: str) -> dict[str, dict[str, Any]]:
    """ZigZag's run of least energy for each ResNet-18 layer, by name."""
    best: dict[str, dict[str, Any]] = {}
    for file in ("zigzag_results.json", "zigzag_more.json"):
        for key, rows in json.loads((CASES / file).read_text()).items():
            if key.startswith(f"{architecture}__") and "resnet18" in key:
                for row in rows if isinstance(rows, list) else [rows]:
                    if row["energy_pJ"] < best.get(row["layer"], {}).get("energy_pJ", float("inf")):
                        best[row["layer"]] = row
    return best


def as_layer(shape: dict[str, Any], array: SpatialArraySpec) -> Layer:
    dims = {ours: shape[theirs] for ours, theirs in NAMES.items()}
    size = (shape["IY"], shape["IX"]) if "IY" in shape else (0, 0)
    return Layer(shape.get("name", ""), dims, (shape["stride"],) * 2, (1, 1), (shape["pad"],) * 2, size, array.bits)


def search_row(name: str, layer: Layer, array: SpatialArraySpec, objective: str, stored: dict[str, Any] | None) -> dict[str, Any]:
    empty_caches()
    cpu, wall = process_time(), perf_counter()
    found = mapper.map_layer(layer, array, "any", objective)
    cpu, wall = process_time() - cpu, perf_counter() - wall
    return {
        "model": "resnet18", "layer": name, "target": array.name, "objective": objective, "cpu_s": cpu, "wall_s": wall,
        "energy_pj": found.cost.energy_pj, "cycles": found.cost.cycles, "lower_bound": found.lower_bound, "gap": found.gap,
        "optimal_within_space": found.optimal, "unrollings": found.unrollings, "utilisation": found.cost.utilisation,
        "zigzag_energy_pj": stored["energy_pJ"] if stored else None, "zigzag_cycles": stored["latency_cycles"] if stored else None,
        "zigzag_cpu_s": stored.get("cpu_s") if stored else None,
    }  # fmt: skip


def network_row(model: str, array: SpatialArraySpec, objective: str) -> dict[str, Any]:
    workload = capture(model)
    empty_caches()
    cpu, wall = process_time(), perf_counter()
    network = map_layers(workload, array, objective=objective)
    cpu, wall = process_time() - cpu, perf_counter() - wall
    return {
        "model": model, "layer": "all", "target": array.name, "objective": objective, "cpu_s": cpu, "wall_s": wall,
        "layers": len(network.layers), "energy_pj": network.energy_pj, "cycles": network.cycles, "utilisation": network.utilisation,
        "distinct_shapes": len({json.dumps({**layer.mapped.cost.layer.to_json(), "layer": ""}) for layer in network.layers}),
    }  # fmt: skip


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for target, architecture in list(ARRAYS.items())[: 1 if quick else 2]:
        array, stored = load_array(target), stored_runs(architecture)
        for objective in ("energy", "edp", "latency"):
            for shape in resnet18_layers()[: 1 if quick else None]:
                known = stored.get(shape["name"])
                layer = as_layer({**shape, **known["shape"]} if known else shape, array)
                rows.append(search_row(shape["name"], layer, array, objective, known))
                last = rows[-1]
                found = f"{last['energy_pj'] / 1e6:9.2f} uJ  {last['cycles']:9d} cycles"
                print(f"{target:13} {objective:8} {shape['name']:22} {last['cpu_s']:6.2f} s  {found}")
        if not quick:
            for objective in ("energy", "edp"):
                rows.append(network_row("resnet50", array, objective))
                print(f"{target:13} {objective:8} resnet50, all {rows[-1]['layers']} layers {rows[-1]['cpu_s']:6.2f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer; writes nothing")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    rows = run(options.quick)
    if not options.quick:
        print(write_results("npu", "search", "cpu", {"cpu": machine_name("cpu")}, rows, options.out))


if __name__ == "__main__":
    main()
