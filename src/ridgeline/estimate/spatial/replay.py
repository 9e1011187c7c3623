"""Mappings to a file and back: what was searched once is evaluated again without a search, or a mapping of your own is.

    NetworkMapping ──mappings_to_json──> {"schema", "model", "target", "layers": [{"layer", "op", "cores", "split", "mapping"}]}
    that, or one mapping alone ──replay(workload, array, layer)──> NetworkMapping      the same figures, no lower bound

A mapping alone is {"spatial": {axis: [[dim, factor], …]}, "temporal": {operand: [[[dim, factor], …] a memory, nearest first]}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import OptionError, nearest, unknown_name
from ...target.array import Cores, SpatialArraySpec
from ...workload.graph import Op, Workload
from .cost import evaluate
from .layer import Layer, layers_of
from .mapper import Mapped
from .mapping import MappingPlan, mapping_from_json
from .network import MappedOp, NetworkMapping, with_leakage

SCHEMA = "ridgeline/mappings/1"
GIVEN = "given"
MOST_BYTES = 64 << 20
MOST_TURNS = 1 << 40
"""Of one dimension's loops: far beyond any layer, and within 64-bit counts."""


def mappings_to_json(network: NetworkMapping) -> dict[str, Any]:
    """Every layer's mapping, enough to evaluate it again."""
    layers = [
        {
            "layer": one.mapped.cost.layer.name,
            "op": one.op.name,
            "cores": one.cores,
            "split": one.split,
            "mapping": one.mapped.cost.plan.to_json(),
        }
        for one in network.layers
    ]
    return {"schema": SCHEMA, "model": network.workload.model, "target": network.array.name, "layers": layers}


def read_mappings(path: Path) -> dict[str, Any]:
    """The JSON object in a file of mappings."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise OptionError(f"cannot read {path}", why=f"it is larger than {MOST_BYTES >> 20} MiB", do="give a file of mappings")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}", why=error.strerror or str(error), do="give a file of `--save-mappings`") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON", why=str(error), do="give a file of `--save-mappings`, or one mapping") from error
    if not isinstance(data, dict) or not {"layers", "temporal"} & set(data):
        raise OptionError(
            f"{path} holds no mapping",
            why='it has neither "layers", as a file of `--save-mappings` has, nor "spatial" and "temporal", as a mapping has',
            do="see docs/cli.md for both",
        )
    return data


def replay(workload: Workload, array: SpatialArraySpec, layer: str, data: Mapping[str, Any], objective: str = "edp") -> NetworkMapping:
    """Evaluate the given mapping of one layer."""
    ops = [op for op in workload.ops if layer in (op.layer, op.name) and op.loops]
    if not ops:
        known = [op.layer or op.name for op in workload.ops if op.loops]
        raise unknown_name("layer", layer, known, f"the layers of {workload.model} with multiplications to map")
    nests = [(op, nest) for op in ops for nest in layers_of(op, array.bits)]
    if "layers" not in data and len(nests) > 1:
        raise OptionError(
            f"one mapping for {len(nests)} loop nests",
            why=f"{layer} consists of {', '.join(nest.name for _, nest in nests)}",
            do="give a file of `--save-mappings`, which names them",
        )
    found = with_leakage([_evaluated(op, nest, array, _entry(data, op, nest), objective) for op, nest in nests], array)
    seconds = sum(one.cycles for one in found) / array.clock_hz.value
    return NetworkMapping(workload, array, GIVEN, objective, found, (), seconds)


def _entry(data: Mapping[str, Any], op: Op, nest: Layer) -> Mapping[str, Any]:
    """The mapping of one loop nest, and how it is split."""
    if "layers" not in data:
        return {"mapping": data}
    entries = data["layers"]
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) and "mapping" in entry for entry in entries):
        raise OptionError('"layers" is not a list of mappings', why="each entry needs a layer and its mapping", do="see docs/cli.md")
    named: list[Mapping[str, Any]] = [entry for entry in entries if entry.get("layer") == nest.name]
    own = [entry for entry in named if entry.get("op", op.name) == op.name]
    if not named:
        known = list(dict.fromkeys(str(entry.get("layer")) for entry in entries))
        close = nearest(nest.name, known) or known[:3]
        raise OptionError(
            f"no mapping of layer {nest.name!r} in the file",
            why=f"it holds {len(known)} layers, e.g. {', '.join(close)}" if known else "it holds no layer at all",
            do="give a file that was saved for this model, or name another layer",
        )
    return (own or named)[0]


def _evaluated(op: Op, nest: Layer, array: SpatialArraySpec, entry: Mapping[str, Any], objective: str) -> MappedOp:
    cores, split = entry.get("cores", 1), entry.get("split", "")
    part = nest
    if cores != 1:
        if isinstance(cores, bool) or not isinstance(cores, int) or not 1 < cores <= array.cores.count or split not in nest.dims:
            raise OptionError(
                f"cores {cores!r}, split {split!r} for layer {nest.name}",
                why=f"{array.name} has {array.cores.count}, and a layer is cut along one of {' '.join(nest.dims)}",
                do="correct the entry",
            )
        part = nest.with_dims(**{split: -(-nest.dims[split] // cores)})
    plan = mapping_from_json(entry["mapping"])
    _check_turns(part, plan)
    cost = evaluate(part, array.model_copy(update={"cores": Cores()}), plan)
    mapped = Mapped(cost, objective, plan.dataflow or GIVEN, 0.0, 0, 0)
    return MappedOp(op, mapped, nest.macs * op.calls, cores, split)


def _check_turns(layer: Layer, plan: MappingPlan) -> None:
    for dim in layer.dims:
        if plan.unrolled(dim) * plan.block(dim, len(plan.loops)) > MOST_TURNS:
            raise OptionError(
                f"loops over {dim} take more than {MOST_TURNS:,} turns in the mapping of {layer.name}",
                why=f"the layer has {layer.dims[dim]}",
                do="give factors whose product just reaches it",
            )
