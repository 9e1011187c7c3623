"""The search against ZigZag's best mappings: never more energy, never fewer cycles than the traffic it causes.

    <folder>/zigzag_results.json, zigzag_more.json   {"<arch>__<workload>": [row, …]}   one test a layer, its cheapest row
    <folder>/arch_zigzag.json                        architectures; the packaged file where the folder has none

The folder is npu_cases, or $RIDGELINE_NPU_CASES. Where ZigZag counts fewer inputs than a layer has (its windows leave rows out),
its energy is not one that can be reached: such rows are compared by what their mapping really costs.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, NamedTuple

import pytest

from ridgeline.estimate.spatial.cost import InfeasibleMappingError, evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapper import map_layer
from ridgeline.estimate.spatial.zigzag import plan_of, read_result
from ridgeline.target.array import OperandBits, SpatialArraySpec
from ridgeline.target.zigzag import array_from_zigzag
from tests.estimate.spatial.npu_support import reference, references
from tests.support import FULL

EVERY = 1 if FULL else 6
"""Layers of zigzag_more.json searched in a run; those of zigzag_results.json always are."""


class Best(NamedTuple):
    """A layer and the cheapest row stored for it."""

    layer: Layer
    array: SpatialArraySpec
    row: dict[str, Any]


@cache
def architecture(name: str, precision: str) -> SpatialArraySpec | None:
    found = [file["archs"][name] for file in references("arch_zigzag.json") if name in file["archs"]]
    widths = {"F" if key == "O_final" else key: int(bits) for key, bits in re.findall(r"\b(W|I|O_final|O)(\d+)\b", precision)}
    return array_from_zigzag(name, found[0], bits=OperandBits(**widths) if widths else None) if found else None


def stored(file: str, every: int) -> list[Any]:
    data = reference(file)
    if data is None:
        return [pytest.param(None, id=file, marks=pytest.mark.skip(reason=f"no {file}"))]
    best: dict[tuple[str, str], tuple[str, Best]] = {}
    for key, rows in data.items():
        name, _, workload = key.partition("__")
        array = architecture(name, str(data.get("operand_precision", {}).get(name, ""))) if workload else None
        for row in rows if isinstance(rows, list) else [rows]:
            if array and isinstance(row, dict) and "temporal_mapping" in row:
                shape = name, json.dumps(row["shape"], sort_keys=True)
                if shape not in best or row["energy_pJ"] < best[shape][1].row["energy_pJ"]:
                    best[shape] = f"{key}-{row['layer']}", Best(read_result(row, array)[0], array, row)
    return [pytest.param(found, id=label) for label, found in list(best.values())[::every]]


RESULTS, MORE = stored("zigzag_results.json", 1), stored("zigzag_more.json", EVERY)
every_layer = pytest.mark.parametrize("best", [*RESULTS, *MORE])


def missing_inputs(best: Best) -> bool:
    """Whether ZigZag moves fewer inputs from the outermost memory than the layer touches."""
    memory = list(best.array.memories.values())[-1]
    width = memory.ports[memory.port_of("I", "rd_down")].bits_per_cycle
    return best.row["word_access"]["I"][-1]["rd_down"] * width < best.layer.elements("I") * best.layer.bits.I - width


def exact_energy_pj(best: Best) -> float | None:
    """What ZigZag's mapping costs word by word; None if it does not fit when lanes and tiles are whole."""
    try:
        return evaluate(best.layer, best.array, plan_of(best.layer, best.array, *read_result(best.row, best.array)[1:])).energy_pj
    except InfeasibleMappingError:
        return None


@every_layer
def test_zigzag_search_energy_is_never_more(best: Best) -> None:
    found = map_layer(best.layer, best.array, objective="energy")
    assert found.optimal
    if not missing_inputs(best):
        assert found.cost.energy_pj <= best.row["energy_pJ"]
    exact = exact_energy_pj(best)
    assert exact is None or found.cost.energy_pj <= exact * (1 + 1e-9)


def test_zigzag_search_rows_with_missing_inputs_are_few() -> None:
    rows = [param.values[0] for param in [*RESULTS, *stored("zigzag_more.json", 1)] if param.values[0]]
    if not rows:
        pytest.skip("no rows stored")
    assert sum(map(missing_inputs, rows)) <= len(rows) / 4
    assert not any(missing_inputs(param.values[0]) for param in RESULTS if param.values[0])


def below_its_traffic() -> list[Any]:
    """Layers for which ZigZag states fewer cycles than its own words need at the outermost port."""
    chosen = [param for param in [*RESULTS, *MORE] if param.values[0] and param.values[0].row.get("latency_below_dram_bound")]
    return chosen or [pytest.param(None, marks=pytest.mark.skip(reason="no such rows"))]


@pytest.mark.parametrize("best", below_its_traffic())
def test_zigzag_search_cycles_are_never_below_the_traffic(best: Best) -> None:
    layer, array, row = best
    assert row["latency_cycles"] < row["dram_words_total"]
    cost = map_layer(layer, array, objective="edp").cost
    name, outermost = list(array.memories.items())[-1]
    words = {port: sum(a.cycles for a in cost.accesses if a.memory == name and a.port == port) for port in outermost.ports}
    assert cost.cycles >= max(words.values())
    assert all(cost.port_cycles[f"{name}.{port}"] == cycles for port, cycles in words.items())
    (port,) = outermost.ports.values()
    compulsory = sum(layer.elements(op) * getattr(layer.bits, "F" if op == "O" else op) for op in "WIO")
    assert cost.cycles >= compulsory / port.bits_per_cycle
