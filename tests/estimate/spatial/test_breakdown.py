"""Parts add up to their wholes, no part is negative, and no port stands above its roof: by hand and on random mappings."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from ridgeline.estimate.spatial.breakdown import (
    bottleneck_of,
    bottlenecks,
    cycle_parts,
    energy_by_part,
    energy_terms,
    level_roofs,
    peak_ops,
    port_roofs,
    term_text,
    total_of,
)
from ridgeline.estimate.spatial.cost import evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapper import Mapped
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.network import MappedOp
from ridgeline.target.array import Cores, SpatialArraySpec
from ridgeline.workload.graph import Op
from tests.estimate.spatial.cases import memory, random_case, small_array
from tests.estimate.spatial.nets import mapped
from tests.support import full_or_tenth


def on(array: SpatialArraySpec, layer: Layer, plan: MappingPlan, calls: int = 1, cores: int = 1) -> MappedOp:
    op = Op("op", layer.name, "conv", "conv2d", "float32", (), (), 0, calls=calls)
    cost = evaluate(layer, array, plan)
    return MappedOp(op, Mapped(cost, "edp", "any", 0.0, 0, 0), layer.macs * calls * cores, cores, "K" if cores > 1 else "")


def by_hand() -> tuple[MappedOp, SpatialArraySpec]:
    """K2 C4 on one PE: weights straight from the top, sums in a register, both 8 bits wide but sums of 16."""
    array = small_array({"x": 1}, {"reg": memory("O", read_pj=0.5), "top": memory("WIO", ("x",), granule=8, read_pj=10.0, write_pj=20.0)})
    plan = MappingPlan({}, (("C", 4), ("K", 2)), {"W": (), "I": (), "O": (1,)})
    return on(array, Layer("hand", {"K": 2, "C": 4}), plan), array


def test_energy_by_hand() -> None:
    layer, _ = by_hand()
    # 8 weights, 8 inputs (C runs inside K) of one 8-bit word; 2 finished outputs of one word; a word costs access_bits = 8 bits
    terms = energy_terms(layer)
    assert terms["top", "W", "rd_down"] == 80 and terms["top", "I", "rd_down"] == 80 and terms["top", "O", "wr_up"] == 40
    # each of the 8 products is written into the register, 2 words of 8 bits; 3 of 4 find a sum there; 2 leave, finished
    assert terms["reg", "O", "wr_up"] == 16 and terms["reg", "O", "rd_down"] == 6 and terms["reg", "O", "rd_up"] == 1
    assert terms["mac", "", ""] == 8 and terms["noc", "", ""] == terms["static", "", ""] == 0
    assert energy_by_part(layer) == pytest.approx({"mac": 8, "reg": 23, "top": 200, "noc": 0, "static": 0})
    assert term_text(("top", "W", "rd_down")) == "top reading W" and term_text(("mac", "", "")) == "mac"


def test_roofs_by_hand() -> None:
    layer, array = by_hand()
    # 8 + 8 + 2 words of 8 bits pass the top's only port, 16 operations in all; it moves 8 bits a cycle at 1 GHz
    top = next(roof for roof in port_roofs([layer], array) if roof.memory == "top")
    assert (top.bytes, top.operations, top.bandwidth_bps) == (18, 16, 1e9)
    assert top.intensity == pytest.approx(16 / 18) and top.attainable == pytest.approx(16 / 18 * 1e9)
    assert top.busy == 18 / layer.cycles and top.achieved == pytest.approx(16 / layer.cycles * 1e9)
    assert peak_ops(array) == 2e9
    twice = port_roofs([layer, layer], array)
    assert twice[-1].bytes == 36 and twice[-1].intensity == top.intensity and twice[-1].busy == top.busy


@pytest.mark.parametrize("seed", range(full_or_tenth(400)))
def test_parts_of_random_mappings_add_up(seed: int) -> None:
    case = random_case(Random(seed))
    calls = 1 + seed % 3
    layer = on(case.array, case.layer, case.plan, calls)
    parts = cycle_parts(layer, case.array)
    assert min(parts.values()) >= 0 and sum(parts.values()) == layer.cycles == layer.mapped.cost.cycles * calls
    assert sum(energy_terms(layer).values()) == pytest.approx(layer.energy_pj, rel=1e-12)
    assert sum(energy_by_part(layer).values()) == pytest.approx(layer.energy_pj, rel=1e-12)
    for roof in port_roofs([layer], case.array):
        assert 0 < roof.busy <= 1
        # all instances together move no more than each could in the cycles of the busiest
        assert roof.bytes <= roof.busy * roof.seconds * roof.bandwidth_bps * (1 + 1e-9)
        assert roof.achieved <= roof.attainable * (1 + 1e-9)


def test_a_level_is_its_busiest_port() -> None:
    network = mapped()
    ports = port_roofs(network.layers, network.array)
    for level in level_roofs(network.layers, network.array):
        assert level.busy == max(port.busy for port in ports if port.memory == level.memory)
    assert [level.memory for level in level_roofs(network.layers, network.array)] == list(network.array.memories)


def test_cores_that_wait_for_each_other_are_limited_by_what_they_share() -> None:
    layer, array = by_hand()
    shared = replace(layer, cores=8)
    assert layer.cycles == layer.mapped.cost.cycles and bottleneck_of(layer, array) == layer.mapped.cost.bottleneck
    assert shared.cycles == 8 * 18 and bottleneck_of(shared, array) == "top.all"
    parts = cycle_parts(shared, array)
    assert sum(parts.values()) == shared.cycles and parts["waiting for top"] > 0
    assert energy_terms(shared)["top", "W", "rd_down"] == 8 * 80
    top = port_roofs([shared], array)[-1]
    assert (top.bytes, top.busy, top.bandwidth_bps) == (8 * 18, 1.0, 1e9), "its port is one, and never rests"
    reg, top = port_roofs([shared], array.model_copy(update={"cores": Cores(count=8)}))[-2:]
    width = array.memories["reg"].ports[reg.port].bits_per_cycle
    assert (reg.bandwidth_bps, top.bandwidth_bps) == (8 * width / 8 * 1e9, 1e9), "each core has its own registers, all have one top"
    assert sum(bottlenecks([layer, shared], array).values()) == layer.cycles + shared.cycles


def test_totals_keep_every_name() -> None:
    assert total_of([{"a": 1, "b": 2}, {"b": 3, "c": 4}]) == {"a": 1, "b": 5, "c": 4}
