"""SCALE-Sim's runs on a systolic array, to the cycle.

    scalesim_results.json   {"measured": [{array, dataflow, layer, total_cycles}, …]}     one test a run
    layers.json             shapes; the packaged file where the folder has none

A run is a matmul of P = output positions, C = taps * channels, K = filters on array x array PEs, its operands in memories that
never wait; SCALE-Sim numbers cycles from 0 and states the last. ws keeps C x K in the PEs, is C x P, os P x K.
"""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.estimate.spatial.cost import LayerCost, evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.target.array import DIRECTIONS, OperandBits, SpatialArraySpec
from tests.estimate.spatial.cases import memory, small_array
from tests.estimate.spatial.npu_support import reference, references

ACROSS = {"ws": ("C", "K", "P"), "is": ("C", "P", "K"), "os": ("P", "K", "C")}
"""Dimension along the rows, along the columns, and in time."""
KEPT = {"ws": "W", "is": "I", "os": "O"}
BITS = OperandBits(W=8, I=8, O=8, F=8)
WIDE = 1 << 20


def runs() -> list[Any]:
    data = reference("scalesim_results.json")
    if data is None:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no scalesim_results.json"))]
    return [pytest.param(row, id=f"{row['array']}-{row['dataflow']}-{row['layer']}") for row in data["measured"]]


def systolic(size: int, dataflow: str) -> SpatialArraySpec:
    """One register in a PE for what stays; a memory that gives and takes all a cycle asks."""

    def ports(operands: str) -> dict[str, Any]:
        streams = [f"{operand} {direction}" for operand in operands for direction in DIRECTIONS]
        return {s: {"direction": "read_write", "bits_per_cycle": WIDE, "word_bits": 8, "carries": (s,)} for s in streams}

    # results of os leave with the skew of the grid, while the next tile is at work
    refill = "double" if dataflow == "os" else "single"
    register = memory(KEPT[dataflow], ports=ports(KEPT[dataflow]), capacity_bits=64, refill=refill)
    axes = {"rows": size, "columns": size}
    return small_array(
        axes, {"register": register, "buffer": memory("WIO", axes, ports=ports("WIO"), capacity_bits=1e15)}, BITS, systolic=True
    )


def run(size: int, dataflow: str, layer: Layer) -> LayerCost:
    rows, columns, inside = ACROSS[dataflow]
    lanes = {dim: min(size, layer.dims[dim]) for dim in (rows, columns)}
    folds = tuple((dim, -(-layer.dims[dim] // lanes[dim])) for dim in (rows, columns))
    cuts = {operand: (1,) if operand == KEPT[dataflow] else () for operand in "WIO"}
    spatial = {"rows": ((rows, lanes[rows]),), "columns": ((columns, lanes[columns]),)}
    return evaluate(layer, systolic(size, dataflow), MappingPlan(spatial, ((inside, layer.dims[inside]), *folds), cuts))


def shape_of(name: str) -> dict[str, int] | None:
    """The first shape of that name: networks in the order of the file, the chosen folder's file first."""
    lists = [shapes for data in references("layers.json") for shapes in data.values() if isinstance(shapes, list)]
    return next((shape for shapes in lists for shape in shapes if isinstance(shape, dict) and shape.get("name") == name), None)


def as_matmul(shape: dict[str, int]) -> Layer:
    return Layer("l", {"P": shape["OY"] * shape["OX"], "C": shape["FY"] * shape["FX"] * shape["C"], "K": shape["K"]}, bits=BITS)


@pytest.mark.parametrize("row", runs())
def test_scalesim_cycles_of_every_stored_run(row: dict[str, Any]) -> None:
    shape = shape_of(row["layer"])
    if shape is None:
        pytest.skip(f"layers.json has no {row['layer']}")
    assert run(row["array"], row["dataflow"], as_matmul(shape)).cycles - 1 == row["total_cycles"]


@pytest.mark.parametrize("dataflow", ACROSS)
@pytest.mark.parametrize("folds", [2, 5])
def test_scalesim_formula_of_a_fold(dataflow: str, folds: int) -> None:
    # A fold on n x n PEs: what stays is shifted in (n cycles; not for os), T steps run, the skew is 2n - 2.
    size, steps = 8, 20
    rows, columns, inside = ACROSS[dataflow]
    found = run(size, dataflow, Layer("l", {rows: size, columns: folds * size, inside: steps}, bits=BITS))
    assert found.cycles == folds * ((0 if dataflow == "os" else size) + steps + 2 * size - 2)


def test_scalesim_skew_is_what_makes_the_difference() -> None:
    layer = Layer("l", {"P": 20, "C": 8, "K": 8}, bits=BITS)
    still = SpatialArraySpec.model_validate(systolic(8, "ws").model_dump() | {"systolic": False})
    plan = run(8, "ws", layer).plan
    assert evaluate(layer, still, plan).cycles < run(8, "ws", layer).cycles - 13
