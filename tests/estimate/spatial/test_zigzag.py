"""ZigZag's own results, replayed: every word and picojoule; and where the exact engine may differ from them.

    <folder>/zigzag_results.json, zigzag_more.json   {"<arch>__<workload>": [row, …]}   one test a row
    <folder>/arch_zigzag.json                        architectures; the packaged file where the folder has none

The folder is npu_cases, or $RIDGELINE_NPU_CASES with any of these files.
"""

from __future__ import annotations

import json
import os
import re
from copy import deepcopy
from functools import cache
from math import ceil, isclose, prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.cost import LayerCost, evaluate
from ridgeline.estimate.spatial.layer import REDUCTION, Layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.zigzag import Spatial, Stream, Temporal, ZigzagCounts, levels_of, plan_of, read_result, replay
from ridgeline.target.array import DIRECTIONS, OPERANDS, OperandBits, SpatialArraySpec
from ridgeline.target.zigzag import array_from_zigzag
from tests.support import ROOT

PACKAGED = ROOT / "tests" / "estimate" / "npu_cases"
FOLDER = Path(os.environ.get("RIDGELINE_NPU_CASES") or PACKAGED)
ARCHITECTURES = "arch_zigzag.json"


class Result(NamedTuple):
    name: str
    row: dict[str, Any]
    array: SpatialArraySpec


def here_or_packaged(name: str) -> Path:
    return FOLDER / name if (FOLDER / name).exists() else PACKAGED / name


@cache
def architecture(name: str, precision: str) -> SpatialArraySpec | None:
    """The array, with room for any tile: what fits is not the question here."""
    for path in (here_or_packaged(ARCHITECTURES), PACKAGED / ARCHITECTURES):
        if data := json.loads(path.read_text())["archs"].get(name):
            memories = {label: memory | {"size": memory["size"] * 1000} for label, memory in data["memories"].items()}
            widths = {"F" if key == "O_final" else key: int(bits) for key, bits in re.findall(r"\b(W|I|O_final|O)(\d+)\b", precision)}
            return array_from_zigzag(name, data | {"memories": memories}, bits=OperandBits(**widths) if widths else None)
    return None


def results(path: Path) -> list[Any]:
    """The rows of a file as parameters; a file that is not there, or an architecture, is one that skips."""
    if not path.exists():
        return [pytest.param(None, id=path.name, marks=pytest.mark.skip(reason=f"no {path.name} in {path.parent}"))]
    data, found = json.loads(path.read_text()), []
    for key, value in data.items():
        rows = [row for row in (value if isinstance(value, list) else [value]) if isinstance(row, dict) and "temporal_mapping" in row]
        if "__" not in key:
            continue
        name = key.split("__")[0]
        for row in rows:
            label = f"{key}-{row.get('layer')}"
            array = architecture(name, str(data.get("operand_precision", {}).get(name, "")))
            if array:
                found.append(pytest.param(Result(label, row, array), id=label))
            else:
                found.append(pytest.param(None, id=label, marks=pytest.mark.skip(reason=f"no architecture {name} in {ARCHITECTURES}")))
    return found


def packaged(key: str, layer: str) -> Result:
    """One row of the packaged files, whatever the folder."""
    paths = [PACKAGED / "zigzag_results.json", PACKAGED / "zigzag_more.json"]
    found = [p.values[0] for path in paths for p in results(path) if p.values[0] and p.values[0].name == f"{key}-{layer}"]
    return found[0]


every_result = pytest.mark.parametrize("result", [*results(FOLDER / "zigzag_results.json"), *results(here_or_packaged("zigzag_more.json"))])


def stored_words(result: Result) -> dict[Stream, int]:
    return {
        (memory, operand, direction): level[direction]
        for operand, levels in result.row["word_access"].items()
        for memory, level in zip(result.array.ladder(operand), levels, strict=True)
        for direction in DIRECTIONS
    }


def replayed(result: Result) -> ZigzagCounts:
    return replay(read_result(result.row, result.array)[0], result.array, *read_result(result.row, result.array)[1:])


@every_result
def test_zigzag_words_of_every_stored_mapping(result: Result) -> None:
    assert dict(replayed(result).words) == stored_words(result)


@every_result
def test_zigzag_energy_of_every_stored_mapping(result: Result) -> None:
    row, counts = result.row, replayed(result)
    for operand, levels in row["mem_energy_breakdown"].items():
        for memory, energy_pj in zip(result.array.ladder(operand), levels, strict=True):
            assert isclose(counts.energy_by[operand, memory], energy_pj, rel_tol=1e-12), (operand, memory)
    assert isclose(counts.mac_energy_pj, row["mac_energy_pJ"], rel_tol=1e-12)
    assert isclose(sum(counts.energy_by.values()), row["mem_energy_pJ"], rel_tol=1e-12)
    assert isclose(counts.energy_pj, row["energy_pJ"], rel_tol=1e-12)


@every_result
def test_zigzag_words_are_pieces_rounded_down_once(result: Result) -> None:
    counts = replayed(result)
    for (name, operand, direction), words in counts.words.items():
        port = result.array.memories[name].ports.get(result.array.memories[name].port_of(operand, direction))
        pieces = counts.pieces[name, operand, direction]
        assert words == (pieces * port.granule // port.bits_per_cycle if port else 0)


class Both(NamedTuple):
    """One mapping counted by both. `grown` is the layer with its dimensions rounded up to what the mapping covers."""

    layer: Layer
    grown: Layer
    array: SpatialArraySpec
    plan: MappingPlan
    zigzag_grown: ZigzagCounts

    def exact(self, layer: Layer) -> LayerCost:
        return evaluate(layer, self.array, self.plan)


def both(result: Result, refill: str) -> Both:
    """`refill` of all memories: a `stream` keeps the rows that its next tile has in common with this one."""
    memories = {name: memory.model_copy(update={"refill": refill}) for name, memory in result.array.memories.items()}
    array = result.array.model_copy(update={"memories": memories})
    layer, spatial, temporal = read_result(result.row, array)
    plan = plan_of(layer, array, spatial, temporal)
    dims = {dim: plan.unrolled(dim) * plan.block(dim, len(plan.loops)) for dim in layer.dims}
    needs = Layer("grown", dims, layer.stride, layer.dilation, layer.padding).input_size
    rows = max(layer.input_size[0], needs[0]), max(layer.input_size[1], needs[1])
    grown = Layer("grown", dims, layer.stride, layer.dilation, layer.padding, rows, layer.bits, layer.kind)
    whole = {op: [[(dim, ceil(lanes)) for dim, lanes in level] for level in levels] for op, levels in spatial.items()}
    return Both(layer, grown, array, plan, replay(grown, array, whole, temporal))


def steps(case: Both, dim: str) -> int:
    return case.plan.block(dim, len(case.plan.loops))


def wider_sums(case: Both, stream: Stream) -> bool:
    """Sums that one of the two moves with O bits, the other with F: lanes above add them up, or they come straight from the PEs."""
    name, operand, direction = stream
    if operand != "O" or direction not in ("rd_up", "wr_up"):
        return False
    adding = {axis for axis, loops in case.plan.spatial.items() if any(dim in REDUCTION and lanes > 1 for dim, lanes in loops)}
    from_pes = direction == "wr_up" and name == case.array.ladder("O")[0] and all(steps(case, dim) == 1 for dim in REDUCTION)
    return from_pes or not adding <= set(case.array.memories[name].shared_over)


def scattered_rows(case: Both, operand: str) -> bool:
    """Inputs of a lane whose outputs and taps both go on in time: neighbours to ZigZag, a lane's width apart to us."""
    pairs = [pair for pair in ("PR", "QS") if any(case.plan.unrolled(dim) > 1 for dim in pair)]
    return operand == "I" and any(all(steps(case, dim) > 1 for dim in pair) for pair in pairs)


@every_result
@pytest.mark.parametrize("refill", ["double", "stream"])
def test_zigzag_never_counts_less_than_the_exact_engine_up_to_edges(result: Result, refill: str) -> None:
    case = both(result, refill)
    exact = case.exact(case.layer)
    for stream, pieces in case.zigzag_grown.pieces.items():
        if not wider_sums(case, stream) and not scattered_rows(case, stream[1]):
            assert exact.words(*stream) <= pieces, stream


@every_result
def test_zigzag_equals_the_exact_engine_where_no_stated_difference_applies(result: Result) -> None:
    case = both(result, "double")
    exact = case.exact(case.grown)
    overlapping = any(case.grown.dims[pair[1]] > 1 and any(case.plan.unrolled(dim) > 1 for dim in pair) for pair in ("PR", "QS"))
    windows = any(case.grown.padding) or any(gap > 1 for gap in case.grown.dilation) or overlapping
    compared = 0
    for stream, pieces in case.zigzag_grown.pieces.items():
        _, operand, direction = stream
        if operand == "O" and direction in ("rd_down", "wr_down") and pieces:  # the first time from zero to us, so less
            assert exact.words(*stream) < pieces, stream
        elif not wider_sums(case, stream) and not (operand == "I" and windows):
            compared += pieces > 0
            assert exact.words(*stream) == pieces, stream
    assert compared >= len(case.array.ladder("W")) * 2 - 1


@every_result
def test_zigzag_lanes_asked_for_along_the_axes_are_those_of_the_result(result: Result) -> None:
    layer, spatial, temporal = read_result(result.row, result.array)
    asked = levels_of(layer, result.array, plan_of(layer, result.array, spatial, temporal).spatial)
    assert asked == {op: [*levels, *[[]] * (len(asked[op]) - len(levels))] for op, levels in spatial.items()}


def test_zigzag_fraction_of_lanes_comes_from_the_steps() -> None:
    """27 rows over 14 lanes take 2 steps: 13.5 lanes at work, stated as 13."""
    result = packaged("eyeriss_like__alexnet", "conv2")
    assert "(OY, 13)" in result.row["spatial_mapping"]
    _, spatial, _ = read_result(result.row, result.array)
    assert spatial["W"][1] == [("P", 13.5), ("R", 5.0), ("K", 2.0)]


@pytest.mark.parametrize(("size", "stated", "steps", "needed"), [(68, 9, 8, 7), (44, 2, 16, 15)])
def test_zigzag_one_step_more_than_lanes_need(size: int, stated: int, steps: int, needed: int) -> None:
    """68 over 10 lanes take 7 steps, 9.71… lanes at work; 68 / 9.71… is just above 7 in floats, and ZigZag makes 8 steps."""
    assert needed < size / (size / needed) < steps
    result = packaged("tpu_like__resnet18", "layer3.0.downsample")
    row = deepcopy(result.row)
    row["shape"]["C"] = size
    row["spatial_mapping"] = row["spatial_mapping"].replace("(C, 32)", f"(C, {stated})")
    for levels in row["temporal_mapping"].values():
        levels[0][0] = ["C", steps]
    assert dict(read_result(row, result.array)[1]["I"][0])["C"] == size / needed


def test_zigzag_a_step_more_without_that_reason_is_refused() -> None:
    result = packaged("eyeriss_like__alexnet", "conv2")
    text = json.dumps(result.row["temporal_mapping"]).replace('["OY", 2]', '["OY", 3]')
    with pytest.raises(OptionError, match="P = 27 over 13 lanes"):
        replayed(result._replace(row=result.row | {"temporal_mapping": json.loads(text)}))


def test_zigzag_loops_that_leave_a_tile_in_place_count_with_either_memory() -> None:
    result = packaged("tpu_like__resnet18", "layer3.0.conv2")
    layer, spatial, temporal = read_result(result.row, result.array)
    weights = temporal["W"]
    assert [dim for dim, _ in weights[0][-2:]] == ["P", "Q"]
    listed = {**temporal, "W": [weights[0][:-2], [*weights[0][-2:], *weights[1]]]}
    assert dict(replay(layer, result.array, spatial, listed).words) == stored_words(result)


def test_zigzag_a_loop_over_nothing_still_replaces_the_tile() -> None:
    """Dimensions of size 1 belong to no operand: a loop over one, outside the loops weights do not depend on or inside."""
    array = packaged("tpu_like__resnet18", "fc").array
    layer = Layer("narrow", {"Q": 5, "K": 2}, bits=array.bits)
    reads = []
    for loops in ([("P", 1), ("Q", 5), ("K", 2)], [("Q", 5), ("P", 1), ("K", 2)]):
        temporal = {op: [*[[] for _ in array.ladder(op)[1:]], loops] for op in OPERANDS}
        reads.append(replay(layer, array, {op: [[]] * len(array.ladder(op)) for op in OPERANDS}, temporal).words["rf_128B", "W", "rd_down"])
    assert reads == [10, 2]


def test_zigzag_cuts_off_what_the_exact_engine_keeps() -> None:
    """fc: 1000 finished outputs of 8 bits are 3.9 words of 2048 bits, and 125 pieces of 64."""
    result = packaged("tpu_like__resnet18", "fc")
    counts = replayed(result)
    assert counts.words["sram_2MB", "O", "rd_up"] == 3
    assert counts.pieces["sram_2MB", "O", "rd_up"] == 125


def test_zigzag_matmul_rows_are_not_a_window() -> None:
    """27 rows over 13.5 lanes of 28 bits: 14 rows are two words of 384 bits, but half an output counts as none, and 13 are one."""
    array = packaged("eyeriss_like__gemm", "gemm_7x100x75").array
    lanes = {op: [[], [("P", 13.5)], *[[] for _ in array.ladder(op)[1:]]] for op in OPERANDS}
    temporal = {op: [*[[] for _ in array.ladder(op)[1:]], [("P", 2), ("C", 3)]] for op in OPERANDS}
    bits = OperandBits(W=8, I=28, O=24, F=8)
    for kind, words in (("matmul", 2), ("conv", 1)):
        layer = Layer("rows", {"P": 27, "C": 3}, bits=bits, kind=kind)
        assert replay(layer, array, lanes, temporal).words["sram_1M", "I", "rd_down"] == words * 2 * 3


def test_zigzag_lanes_of_one_dimension_along_two_axes() -> None:
    """100 over 8 x 4: the 8 become 100 / 13 = 7.69…, the 4 stay; in one list they are multiplied."""
    array = packaged("eyeriss_like__gemm", "gemm_7x100x75").array
    spatial = levels_of(Layer("k", {"K": 100}), array, {"D1": (("K", 8),), "D2": (("K", 4),)})
    assert spatial["W"] == [[], [("K", 100 / 13 * 4)], [], []]
    with pytest.raises(OptionError, match="axis 'D3'"):
        levels_of(Layer("k", {"K": 100}), array, {"D3": (("K", 8),)})


EDITS: dict[str, Any] = {
    "a time loop is larger": lambda row: [levels[0][0].__setitem__(1, levels[0][0][1] * 2) for levels in row["temporal_mapping"].values()],
    "a time loop is missing": lambda row: [levels[0].pop(0) for levels in row["temporal_mapping"].values()],
    "one operand has another order": lambda row: row["temporal_mapping"]["I"][0].reverse(),
    "a memory is missing": lambda row: row["temporal_mapping"]["W"].pop(0),
    "more lanes than the array has": lambda row: row.update(spatial_mapping=row["spatial_mapping"].replace("(K, 32)", "(K, 64)")),
    "no lane at all": lambda row: row.update(spatial_mapping=row["spatial_mapping"].replace("(K, 32)", "(K, 0)")),
    "lanes of two operands differ": lambda row: row.update(spatial_mapping=row["spatial_mapping"].replace("(K, 32)", "(K, 16)", 1)),
    "lanes above the last memory": lambda row: row.update(spatial_mapping=row["spatial_mapping"].replace("[]]", "[(C, 2)]]", 1)),
    "no lanes for W": lambda row: row.update(spatial_mapping=re.sub(r"W: \[.*\], I", "I", row["spatial_mapping"])),
    "code for lanes": lambda row: row.update(spatial_mapping="__import__('os')"),
    "lanes not closed": lambda row: row.update(spatial_mapping=row["spatial_mapping"][:-1]),
    "an unknown dimension": lambda row: row.update(spatial_mapping=row["spatial_mapping"].replace("(K,", "(Z,")),
    "an unknown time loop": lambda row: row["temporal_mapping"]["O"][0].append(["Z", 2]),
    "half a time loop": lambda row: row["temporal_mapping"]["O"][0].append(["K", 1.5]),
    "no shape": lambda row: row.pop("shape"),
    "a size in words": lambda row: row["shape"].update(K="many"),
    "a size of nothing": lambda row: row["shape"].update(K=0),
    "a step of nothing": lambda row: row["shape"].update(stride=0),
    "rows twice": lambda row: row["shape"].update(D=14),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_zigzag_malformed_rows_are_refused(edit: Any) -> None:
    result = packaged("tpu_like__fixed_order__layer3.0.conv2", "layer3.0.conv2")
    row = deepcopy(result.row)
    edit(row)
    with pytest.raises(OptionError):
        replayed(result._replace(row=row))


def test_zigzag_fewer_lanes_than_one_are_refused() -> None:
    result = packaged("tpu_like__resnet18", "layer3.0.conv2")
    layer, spatial, temporal = read_result(result.row, result.array)
    for lanes in (0.0, 0.5, float("nan")):
        none = {op: [[(dim, lanes) for dim, _ in level] for level in levels] for op, levels in spatial.items()}
        with pytest.raises(OptionError, match="lanes"):
            replay(layer, result.array, none, temporal)


@given(st.data())
def test_zigzag_any_damage_to_a_row_is_refused_or_counted(data: st.DataObject) -> None:
    """Whatever stands in its place, never another kind of error."""
    result = packaged("eyeriss_like__odd_shapes", "odd")
    row = {key: deepcopy(result.row[key]) for key in ("shape", "spatial_mapping", "temporal_mapping")}
    place: Any = row
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        inside = place[key]
        if not isinstance(inside, dict | list) or not inside or data.draw(st.integers(0, 4)) == 0:
            break
        place = inside
    place[key] = data.draw(
        st.one_of(
            st.none(), st.booleans(), st.integers(-2, 99), st.floats(), st.text("KCP(),[]{}0123:WIO .", max_size=9), st.lists(st.integers())
        )
    )
    try:
        replayed(result._replace(row=row))
    except OptionError as error:
        assert error.why and error.do


def with_lanes_halved(spatial: Spatial, temporal: Temporal, dim: str) -> tuple[Any, Any]:
    """Half the lanes and twice the steps: the same multiplications, mapped otherwise."""
    lanes = {op: [[(d, f / 2 if d == dim else f) for d, f in level] for level in levels] for op, levels in spatial.items()}
    at = next(i for i, (d, _) in enumerate(loop for level in temporal["W"] for loop in level) if d == dim)
    slower: dict[str, list[list[Any]]] = {}
    for op, levels in temporal.items():
        numbers = iter(range(1000))
        slower[op] = [[(d, f * 2 if next(numbers) == at else f) for d, f in level] for level in levels]
    return lanes, slower


@pytest.mark.parametrize("dim", ["K", "C"])
def test_zigzag_planted_a_factor_moved_from_lanes_to_time_is_seen(dim: str) -> None:
    result = packaged("tpu_like__resnet18", "layer3.0.conv2")
    layer, spatial, temporal = read_result(result.row, result.array)
    changed = replay(layer, result.array, *with_lanes_halved(spatial, temporal, dim))
    assert dict(changed.words) != stored_words(result)
    assert not isclose(changed.energy_pj, result.row["energy_pJ"], rel_tol=1e-6)


def test_zigzag_planted_loops_moved_to_the_next_memory_are_seen() -> None:
    result = packaged("tpu_like__resnet18", "layer3.0.conv2")
    layer, spatial, temporal = read_result(result.row, result.array)
    weights, outputs = ([list(level) for level in temporal[operand]] for operand in ("W", "O"))
    # a single loop can move for nothing: one the operand does not depend on, or a tile 14 times as large fetched 14 times less
    weights[:2] = [[], weights[0] + weights[1]]
    outputs[:2] = [outputs[0] + outputs[1], []]
    for moved in ({"W": weights}, {"O": outputs}):
        assert dict(replay(layer, result.array, spatial, {**temporal, **moved}).words) != stored_words(result), moved


def test_zigzag_planted_widths_are_seen() -> None:
    result = packaged("eyeriss_like__alexnet", "conv3")
    stored = stored_words(result)
    layer, spatial, temporal = read_result(result.row, result.array)
    for operand, width in (("W", 48), ("I", 48), ("O", 48), ("F", layer.bits.O)):
        bits = OperandBits.model_validate(layer.bits.model_dump() | {operand: width})
        wide = Layer(layer.name, layer.dims, layer.stride, layer.dilation, layer.padding, layer.input_size, bits)
        assert dict(replay(wide, result.array, spatial, temporal).words) != stored, operand
    assert prod(layer.dims.values()) == result.row["macs"]
