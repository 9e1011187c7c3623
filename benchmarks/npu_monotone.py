"""Does the best cost ever rise with a better array? Every memory and every port doubled, for every layer of ResNet-18 on two arrays.

python benchmarks/npu_monotone.py [--target tpu-like]    some minutes an array; writes results/npu-monotone-model.json

per layer, array, objective and change: the best objective before and after, the rise, and whether both answers are optimal within
the space (then none is possible). Words of a port stay as wide as they are: a wider word would round traffic anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import write_results
from npu_search import ARRAYS, as_layer, empty_caches, resnet18_layers

from ridgeline.estimate.spatial.mapper import OBJECTIVES, map_layer
from ridgeline.target.array import SpatialArraySpec
from ridgeline.target.load import load_array

ROUNDING = 1e-9


def doubled(array: SpatialArraySpec) -> Iterator[tuple[str, SpatialArraySpec]]:
    """The array with one memory twice as large, or one port twice as wide; the outermost memory has room enough."""
    for name, memory in array.memories.items():
        data = array.model_dump()
        if name != list(array.memories)[-1]:
            data["memories"][name]["capacity_bits"]["value"] *= 2
            yield f"room of {name}", SpatialArraySpec.model_validate(data)
        for port in memory.ports:
            data = array.model_dump()
            fields = data["memories"][name]["ports"][port]
            fields["word_bits"] = fields["word_bits"] or fields["bits_per_cycle"]
            fields["bits_per_cycle"] *= 2
            yield f"port {name}.{port}", SpatialArraySpec.model_validate(data)


def layer_rows(shape: dict[str, Any], array: SpatialArraySpec, objective: str) -> list[dict[str, Any]]:
    empty_caches()
    layer = as_layer(shape, array)
    before, rows = map_layer(layer, array, "any", objective), []
    for what, better in doubled(array):
        after = map_layer(layer, better, "any", objective)
        first, second = (found.cost.objective(objective) for found in (before, after))
        rows.append({
            "layer": shape["name"], "target": array.name, "objective": objective, "change": what, "before": first, "after": second,
            "rise": second / first - 1 if second > first * (1 + ROUNDING) else 0.0, "both_optimal": before.optimal and after.optimal,
            "gap": after.gap,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=list(ARRAYS), help="one array only; prints, writes nothing")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for target in [options.target] if options.target else ARRAYS:
        array = load_array(target)
        for objective in OBJECTIVES:
            found = [row for shape in resnet18_layers() for row in layer_rows(shape, array, objective)]
            rows += found
            optimal, rises = sum(row["both_optimal"] for row in found), [row["rise"] for row in found if row["rise"]]
            largest = f", the largest {max(rises):.3%}" if rises else ""
            print(f"{target:13} {objective:8} {len(found)} changes, both optimal in {optimal}, rises {len(rises)}{largest}", flush=True)
            for row in found:
                if row["rise"]:
                    print(f"    {row['layer']} {row['change']}: {row['rise']:.4%}", flush=True)
    if not options.target:
        print(write_results("npu", "monotone", "model", {"kind": "modelled: the same on every machine"}, rows, options.out))


if __name__ == "__main__":
    main()
