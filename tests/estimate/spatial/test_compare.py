"""Dataflows side by side: each as if it were mapped alone, the best one the least, and reasons that are true of the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.estimate.spatial import compare as module
from ridgeline.estimate.spatial.breakdown import cycle_parts, energy_terms, term_text, total_of
from ridgeline.estimate.spatial.compare import SCHEMA, Candidate, compare_dataflows, joules_text, reason
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapper import Mapped
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.network import MappedOp, NetworkMapping, map_layers
from ridgeline.target.array import DATAFLOWS, SpatialArraySpec
from ridgeline.workload.graph import Op
from tests.estimate.spatial.cases import memory, small_array
from tests.estimate.spatial.nets import array, mapped, workload


def candidate(name: str, spec: SpatialArraySpec, plan: MappingPlan, dims: dict[str, int]) -> Candidate:
    layer = Layer("hand", dims)
    cost = evaluate(layer, spec, plan)
    op = Op("op", "hand", "conv", "conv2d", "float32", (), (), 0)
    one = MappedOp(op, Mapped(cost, "edp", name, 0.0, 0, 0), layer.macs)
    return Candidate(name, NetworkMapping(workload(), spec, name, "edp", (one,), (), 0.0))


def two_orders(read_pj: float = 10.0) -> tuple[Candidate, Candidate]:
    """K2 C2 P4 with a weight in the PE: P inside leaves each of the 4 weights in place, P outside reads them all 4 times."""
    spec = small_array({"x": 1}, {"top": memory("WIO", ("x",), read_pj=read_pj)})
    dims, cuts = {"K": 2, "C": 2, "P": 4}, {"W": (), "I": (), "O": ()}
    inside = MappingPlan({}, (("P", 4), ("C", 2), ("K", 2)), cuts)
    outside = MappingPlan({}, (("C", 2), ("K", 2), ("P", 4)), cuts)
    return candidate("ws", spec, inside, dims), candidate("os", spec, outside, dims)


def test_figures_by_hand() -> None:
    ws, os_ = two_orders()
    # 16 multiplications: 4 weight reads of ws, 16 of os; inputs change with C and P in both: 16 reads against 4 * 2 * 2
    assert ws.reuse()["W"] == {"top": 4.0} and os_.reuse()["W"] == {"top": 1.0}
    assert ws.reuse()["I"] == {"top": 1.0} and ws.reuse()["O"] == {"top": 1.0}
    # the outermost memory holds 4 weights, 8 inputs and 8 finished outputs of 8 bits
    assert ws.footprints() == {"top": {"W": 32, "I": 64, "O": 64}}
    words = {(row["operand"], row["direction"]): row["words"] for row in ws.accesses()}
    # sums are 2 words wide and always go up to the top; in the second C step those of the first come back
    assert words == {("W", "rd_down"): 4, ("I", "rd_down"): 16, ("O", "wr_up"): 32, ("O", "rd_down"): 16}
    assert ws.bandwidth_efficiency == pytest.approx((4 + 16 + 32 + 16) * 8 / (ws.cycles * 8))


def test_traffic_is_that_of_all_calls_and_cores() -> None:
    ws, _ = two_orders()
    assert ws.network
    (one,) = ws.network.layers
    busy = replace(one, cores=2, op=replace(one.op, calls=3))
    both = replace(ws, network=replace(ws.network, layers=(busy,)))
    assert [row["words"] for row in both.accesses()] == [6 * row["words"] for row in ws.accesses()]
    assert busy.cycles == 2 * 3 * one.mapped.cost.port_cycles["top.all"] and both.bandwidth_efficiency == 1.0


def test_the_reason_is_the_largest_difference() -> None:
    ws, os_ = two_orders()
    # 16 - 4 = 12 more words of W at 10 pJ: 160 against 40 pJ; nothing else differs in energy
    said = reason(os_, ws, "energy")
    assert "4.00x as much in top reading W (160 pJ against 40 pJ)" in said and said.endswith("against 40 pJ)")
    ratio = os_.energy_pj / ws.energy_pj
    assert said.startswith(f"{ratio:.2f}x the energy of ws")
    assert "cycles" in reason(os_, ws, "latency") and "energy" not in reason(os_, ws, "latency")


def test_the_product_is_explained_by_the_factor_that_grew_more() -> None:
    ws, os_ = two_orders(read_pj=1000.0)  # reads are all of the energy, writes share the port's cycles with them
    assert os_.energy_pj / ws.energy_pj > os_.cycles / ws.cycles > 1 and "as much in top reading W" in reason(os_, ws, "edp")
    ws, os_ = two_orders(read_pj=0.0)  # reads cost cycles only
    assert os_.energy_pj == ws.energy_pj and "cycles of waiting for top against" in reason(os_, ws, "edp")


def test_a_reason_that_is_none_says_so() -> None:
    ws, _ = two_orders()
    assert reason(replace(ws, dataflow="is"), ws, "edp") == "as good as ws: 1.000x its energy-delay product"


def test_a_term_the_best_one_does_not_have() -> None:
    spec = small_array({"x": 1}, {"reg": memory("O"), "top": memory("WIO", ("x",))})
    dims = {"C": 2, "P": 2}
    kept = candidate("os", spec, MappingPlan({}, (("C", 2), ("P", 2)), {"W": (), "I": (), "O": (1,)}), dims)
    back = candidate("ws", spec, MappingPlan({}, (("P", 2), ("C", 2)), {"W": (), "I": (), "O": (0,)}), dims)
    # of all terms the sums coming back from the top, 2 * 2 words, and going down into reg exist only here
    said = reason(back, kept, "energy")
    term = max(energy_terms(back.layers[0]), key=lambda t: energy_terms(back.layers[0])[t] - energy_terms(kept.layers[0])[t])
    assert term_text(term) in said
    if energy_terms(kept.layers[0])[term] == 0:
        assert said.endswith("os none")


@pytest.fixture(scope="module")
def compared() -> module.DataflowComparison:
    return compare_dataflows(workload(), array(), objective="edp")


def test_every_dataflow_is_mapped_as_if_alone(compared: module.DataflowComparison) -> None:
    assert [one.dataflow for one in compared.candidates] == list(DATAFLOWS)
    for one in compared.feasible:
        alone = map_layers(workload(), array(), dataflow=one.dataflow)
        assert (one.cycles, one.energy_pj) == (alone.cycles, sum(layer.energy_pj for layer in alone.layers))
    values = {one.dataflow: one.energy_pj * one.cycles for one in compared.feasible}
    assert compared.best.dataflow == min(values, key=lambda flow: values[flow])
    assert set(compared.reasons) == {one.dataflow for one in compared.feasible} - {compared.best.dataflow}
    # what is free to take any unrolling is no worse, layer by layer
    for layer, free in zip(compared.best.layers, mapped().layers, strict=True):
        assert free.mapped.lower_bound <= layer.mapped.cost.edp * (1 + 1e-9)


def test_reasons_quote_numbers_of_the_mappings(compared: module.DataflowComparison) -> None:
    for one in compared.feasible:
        if one is compared.best or one.dataflow not in compared.reasons:
            continue
        said = compared.reasons[one.dataflow]
        ratio = one.value("edp") / compared.best.value("edp")
        if ratio - 1 < 0.005:
            continue
        assert said.startswith(f"{ratio:.2f}x the energy-delay product of {compared.best.dataflow} ")
        energy, cycles = re.search(r"\(([\d.]+)x the energy, ([\d.]+)x the cycles\)", said).groups()  # type: ignore[union-attr]
        assert float(energy) == pytest.approx(one.energy_pj / compared.best.energy_pj, abs=0.005)
        assert float(cycles) == pytest.approx(one.cycles / compared.best.cycles, abs=0.005)
        parts = total_of(cycle_parts(layer, array()) for layer in one.layers)
        named = re.search(r"([\d,]+) cycles of ([a-z -]+) against", said)
        if named:
            assert int(named[1].replace(",", "")) == parts["compute" if named[2] == "computing" else named[2]]


def test_best_layers_are_counted_once(compared: module.DataflowComparison) -> None:
    assert sum(compared.wins().values()) == len(compared.best.layers)


def test_json_says_it_all(compared: module.DataflowComparison) -> None:
    data = json.loads(json.dumps(compared.to_json(), allow_nan=False))
    assert data["schema"] == SCHEMA and data["recommended"] == compared.best.dataflow and data["objective"] == "edp"
    for row in data["dataflows"]:
        assert row["feasible"]
        assert {"energy_pj", "cycles", "utilisation", "bandwidth_efficiency", "bottleneck", "footprint_bits", "reuse", "accesses"} <= set(
            row
        )
        assert sum(row["energy_by_pj"].values()) == pytest.approx(row["energy_pj"])
        assert sum(row["cycles_by"].values()) == row["cycles"]
        assert 0 < row["bandwidth_efficiency"] <= 1 and 0 < row["utilisation"] <= 1


def test_what_the_control_cannot_run_is_listed_with_why() -> None:
    only = array(dataflows=["ws", "os"])
    found = compare_dataflows(workload(), only, layer="0")
    assert {one.dataflow: one.why_not for one in found.candidates if one.network is None} == dict.fromkeys(
        ("is", "rs"), "the control of two-by-two runs ws, os"
    )
    assert [row["feasible"] for row in found.to_json()["dataflows"]] == [True, False, True, False]
    assert len(found.best.layers) == 1 and found.to_json()["layer"] == "0"


def test_what_does_not_fit_is_listed_with_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(*args: object, dataflow: str, **more: object) -> NetworkMapping:
        if dataflow != "os":
            raise InfeasibleMappingError("layer 0 needs 7 B more", why="its tiles take 12 B", do="give more room")
        return mapped()

    monkeypatch.setattr(module, "map_layers", some)
    found = compare_dataflows(workload(), array())
    assert found.best.dataflow == "os" and found.reasons == {}
    assert [one.why_not for one in found.candidates if not one.network] == ["layer 0 needs 7 B more: its tiles take 12 B"] * 3


def test_none_that_fits_is_an_error_that_names_memory_and_bytes() -> None:
    small = array()
    dram = small.memories["dram"].model_dump() | {"capacity_bits": 256.0}
    tiny = array(memories={**{n: m.model_dump() for n, m in small.memories.items()}, "dram": dram})
    with pytest.raises(InfeasibleMappingError, match=r"needs \d+ B more than memory dram of two-by-two"):
        compare_dataflows(workload(), tiny, layer="0")


def test_wrong_names_are_errors() -> None:
    with pytest.raises(UnknownNameError, match="unknown layer 'conv'"):
        compare_dataflows(workload(), array(), layer="conv")
    with pytest.raises(OptionError, match="objective 'speed'"):
        compare_dataflows(workload(), array(), objective="speed")


@pytest.mark.parametrize(("energy_pj", "text"), [(0.5, "0.5 pJ"), (999, "999 pJ"), (1200, "1.2 nJ"), (3.4e6, "3.4 µJ"), (5e12, "5 J")])
def test_energies_read_well(energy_pj: float, text: str) -> None:
    assert joules_text(energy_pj) == text
