"""Fused layers: which may be, what is saved to the byte, what fits to the bit, and the best cut against all cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from ridgeline.estimate.spatial.codesign.chip import build
from ridgeline.estimate.spatial.codesign.fusion import Spent, Stage, buffer_of, fuse, links
from ridgeline.estimate.spatial.codesign.rules import Rules
from ridgeline.estimate.spatial.codesign.space import Choice
from ridgeline.estimate.spatial.network import NetworkMapping, map_layers
from ridgeline.target.array import Cores, OperandBits, SpatialArraySpec
from ridgeline.target.load import load_array
from ridgeline.workload.graph import LoopNest, Op, Workload
from tests.estimate.spatial.codesign.nets import BASE, conv, linear, operand, pebble_net, relu


def mapped(*ops: Op, array: SpatialArraySpec = BASE, batch: int = 1) -> NetworkMapping:
    return map_layers(Workload("net", batch, "float32", ops or pebble_net(batch).ops, "by hand"), array)


def with_buffer(array: SpatialArraySpec, bits: int) -> SpatialArraySpec:
    """The same array, energies and all, with another capacity."""
    memory = array.memories["buffer"]
    capacity = memory.capacity_bits.model_copy(update={"value": float(bits)})
    return array.model_copy(update={"memories": {**array.memories, "buffer": memory.model_copy(update={"capacity_bits": capacity})}})


def test_links_follow_the_values() -> None:
    first, after, second, last = pebble_net().ops
    assert links(mapped()) == [True, True, False]
    pooled = Op("pool", "pool", "pooling", "max_pool2d", "float32", (after.outputs[0],), (operand("pool.out", (1, 4, 4, 4)),), 64)
    assert links(mapped(first, after, pooled, replace(second, inputs=(pooled.outputs[0], second.inputs[1])), last)) == [False, True, False]
    again = Op("add", "add", "pointwise", "add", "float32", (after.outputs[0], last.outputs[0]), (operand("add.out", (1, 2)),), 2)
    assert links(mapped(first, after, second, last, again)) == [False, True, False]  # read twice: it must be kept anyway
    before = replace(again, inputs=(first.outputs[0], last.outputs[0]))
    assert links(mapped(first, after, second, last, before)) == [False, True, False]  # so must what the relu read
    in_place = replace(after, outputs=(operand("first.out", (1, 4, 4, 4)),))
    assert links(mapped(first, in_place, replace(second, inputs=(operand("first.out", (1, 4, 4, 4)), second.inputs[1])))) == [True, False]


def test_a_result_used_as_weights_is_no_link() -> None:
    first, _, second, _ = pebble_net().ops
    swapped = replace(second, inputs=(operand("image", (1, 4, 4, 4)), first.outputs[0]))
    both = replace(second, inputs=(first.outputs[0], first.outputs[0]))
    assert links(mapped(first, swapped)) == links(mapped(first, both)) == [False, False]
    assert links(mapped(first, replace(second, calls=2, inputs=(first.outputs[0], second.inputs[1])))) == [False, False]


@pytest.mark.parametrize(("shared", "place"), [(("a",), 1), (("b",), 0)])
def test_a_batched_product_takes_its_inputs_from_the_operand_that_varies(shared: tuple[str, ...], place: int) -> None:
    first = pebble_net().ops[0]
    loop = LoopNest("matmul", {"B": 4, "M": 4, "N": 4, "K": 4}, shared=shared)
    sides = (first.outputs[0], operand("other", (4, 4)))
    for inputs in (sides, sides[::-1]):
        product = Op("mix", "mix", "matmul", "matmul", "float32", inputs, (operand("mix.out", (4, 4, 4)),), 512, 512, (loop,))
        assert links(mapped(first, product)) == [inputs[place] is first.outputs[0], False]


def test_bases_without_a_common_buffer_are_not_fused() -> None:
    assert buffer_of(load_array("array-16")) == "global_buffer" and buffer_of(load_array("eyeriss-like")) == "sram_1M"
    bare = BASE.model_copy(update={"memories": {name: BASE.memories[name] for name in ("registers", "dram")}})
    assert buffer_of(bare) is None and links(mapped(array=bare)) == [False] * 3
    assert fuse(mapped(array=bare)).kept == (False,) * 3


def test_nothing_kept_is_the_network_itself() -> None:
    network = mapped()
    apart = fuse(network, allowed=False)
    assert [one.cycles for one in apart.spent] == [layer.cycles for layer in network.layers] and apart.groups(["a", "b", "c"]) == []
    leak = BASE.static_w / BASE.clock_hz.value * 1e12
    for one, layer in zip(apart.spent, network.layers, strict=True):
        assert one.dynamic_pj + leak * one.cycles == pytest.approx(layer.energy_pj) and one.saved_bits == 0
    for layer in network.layers:  # what `latency` says of all rows and ports is what the mapper said
        stage = Stage(layer, BASE)
        assert stage._cycles((), ()) == layer.mapped.cost.cycles


def test_kept_tensors_save_their_bytes_both_ways() -> None:
    network = mapped()
    together = fuse(network)
    assert together.kept == (True, True, False) and together.groups(["a", "b", "c"]) == [["a", "b", "c"]]
    # 64 words of the first and 32 of the second layer, 8 bits each, neither written nor read back
    assert [one.saved_bits for one in together.spent] == [8 * 64, 8 * (64 + 32), 8 * 32]
    for before, after, place in zip(fuse(network, allowed=False).spent, together.spent, range(3), strict=True):
        cost = network.layers[place].mapped.cost
        ways = {0: [("O", "wr_up", "rd_up")], 1: [("I", "rd_down", "wr_down"), ("O", "wr_up", "rd_up")], 2: [("I", "rd_down", "wr_down")]}
        gone = sum(100.0 * cost.words("dram", op, outer) + 1.0 * cost.words("buffer", op, inner) for op, outer, inner in ways[place])
        assert before.dynamic_pj - after.dynamic_pj == pytest.approx(gone) and gone >= 100 * 32
        assert after.cycles <= before.cycles
    assert sum(one.cycles for one in together.spent) < network.cycles


def room_by_hand(network: NetworkMapping, place: int, kept_in: int, kept_out: int) -> int:
    """Whole kept tensors; of the others the tile, twice where a refill hides behind a second copy."""
    room = kept_in + kept_out
    for row in network.layers[place].mapped.cost.refills:
        if row.memory == "buffer" and not (row.operand == "I" and kept_in) and not (row.operand == "O" and kept_out):
            room += row.tile_bits * (2 if row.hidden and row.events > 1 else 1)
    return room


def test_what_is_kept_fits_to_the_bit() -> None:
    network = mapped()
    kept_in, kept_out = 64 * 8, 32 * 8
    room = room_by_hand(network, 1, kept_in, kept_out)
    assert Stage(network.layers[1], with_buffer(BASE, room)).spent(kept_in, kept_out) is not None
    assert Stage(network.layers[1], with_buffer(BASE, room - 1)).spent(kept_in, kept_out) is None
    alone = room_by_hand(network, 1, kept_in, 0)
    assert Stage(network.layers[1], with_buffer(BASE, alone)).spent(kept_in, 0) is not None
    assert Stage(network.layers[1], with_buffer(BASE, alone - 1)).spent(kept_in, 0) is None


def test_results_that_leave_unfinished_are_not_kept() -> None:
    """With a buffer of a few words partial sums go out and come back: such a layer's output cannot stay."""
    deep = linear("deep", "image", 16, 16, 16)
    tight = build(BASE, Choice(buffer_bits=64), Rules())
    network = mapped(deep, linear("next", "deep.out", 16, 16, 2), array=tight)
    cost = network.layers[0].mapped.cost
    stage = Stage(network.layers[0], with_buffer(tight, 1 << 20))
    returns = cost.words("dram", "O", "rd_down") > 0
    assert (stage.spent(0, 1) is None) == returns
    forced = replace(cost, accesses=tuple(replace(a, elements=a.elements + 1) if (a.memory, a.direction) == ("dram", "rd_down") else a
                                          for a in cost.accesses))  # fmt: skip
    layer = replace(network.layers[0], mapped=replace(network.layers[0].mapped, cost=forced))
    assert Stage(layer, with_buffer(tight, 1 << 20)).spent(0, 1) is None


def all_cuts(network: NetworkMapping) -> tuple[float, tuple[bool, ...]]:
    """Least energy over every subset of the links, by trying them all."""
    array, stages = network.array, [Stage(layer, network.array) for layer in network.layers]
    leak = array.static_w / array.clock_hz.value * 1e12
    best = (float("inf"), ())
    for kept in product(*[(False, True) if open_to else (False,) for open_to in links(network)]):
        spent = [
            stage.spent(stages[place - 1].kept_bits if place and kept[place - 1] else 0, stage.kept_bits if kept[place] else 0)
            for place, stage in enumerate(stages)
        ]
        if all(one is not None for one in spent):
            best = min(best, (sum(one.dynamic_pj + leak * one.cycles for one in spent if one), kept))
    return best


@pytest.mark.parametrize("bits", [256, 512, 768, 1024, 1536, 2048, 16384])
def test_best_cut_of_all(bits: int) -> None:
    """Five layers whose outputs differ in size, in buffers that hold none, some and all of them."""
    shapes, ops, source = [(2, 4), (4, 2), (2, 6), (6, 2), (2, 2)], [], "image"
    for place, channels in enumerate(shapes):
        layer = conv(f"c{place}", source, 1, channels, 3)
        ops += [layer, relu(f"r{place}", layer.outputs[0])]
        source = f"r{place}.out"
    network = mapped(*ops, array=build(BASE, Choice(buffer_bits=bits), Rules()))
    found = fuse(network)
    leak = network.array.static_w / network.array.clock_hz.value * 1e12
    energy, _ = all_cuts(network)
    assert sum(one.dynamic_pj + leak * one.cycles for one in found.spent) == pytest.approx(energy, rel=1e-12)
    if bits >= 2048:
        assert found.kept == (True, True, True, True, False)
    if bits == 256:
        assert not all(found.kept[:-1])


@pytest.mark.parametrize("seed", range(40))
def test_best_cut_of_any_costs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs drawn at random, some cuts impossible, leakage as heavy as the rest: energy and cycles of the best of all cuts."""
    random = Random(seed)
    network = mapped(*[linear(f"l{place}", "image", 1, 4, 4) for place in range(5)])
    costs: dict[tuple[int, bool, bool], Spent | None] = {}
    for key in product(range(5), (False, True), (False, True)):
        possible = not any(key[1:]) or random.random() < 0.7
        costs[key] = Spent(random.randint(1, 9), float(random.randint(1, 9))) if possible else None
    order = {id(layer): place for place, layer in enumerate(network.layers)}
    module = "ridgeline.estimate.spatial.codesign.fusion"
    monkeypatch.setattr(f"{module}.links", lambda network: [True] * 4 + [False])
    monkeypatch.setattr(f"{module}.Stage.spent", lambda self, before, after: costs[order[id(self.layer)], before > 0, after > 0])
    leak = random.choice((0.0, 1.0, 3.0))
    monkeypatch.setattr(SpatialArraySpec, "static_w", property(lambda self: leak * 1e-12 * BASE.clock_hz.value))
    totals = []
    for kept in product((False, True), repeat=4):
        spent = [costs[place, (False, *kept)[place], (*kept, False)[place]] for place in range(5)]
        if all(spent):
            totals.append((sum(one.dynamic_pj + leak * one.cycles for one in spent if one), sum(one.cycles for one in spent if one)))
    found = fuse(network)
    energy, cycles = sum(one.dynamic_pj + leak * one.cycles for one in found.spent), sum(one.cycles for one in found.spent)
    assert (pytest.approx(energy), cycles) == min(totals)
    assert found.spent == tuple(costs[place, (False, *found.kept)[place], found.kept[place]] for place in range(5))


def test_partial_sums_in_the_buffer_stand_beside_the_kept_tensor() -> None:
    layer = mapped().layers[1]
    cost = layer.mapped.cost
    tile = sum(
        row.tile_bits * (2 if row.hidden and row.events > 1 else 1) for row in cost.refills if (row.memory, row.operand) == ("buffer", "O")
    )
    returning = tuple(
        replace(a, elements=1) if (a.memory, a.operand, a.direction) == ("buffer", "O", "rd_down") else a for a in cost.accesses
    )
    unfinished = replace(layer, mapped=replace(layer.mapped, cost=replace(cost, accesses=returning)))
    finished_room, room = (Stage(one, BASE)._room(0, 256) for one in (layer, unfinished))
    assert room == finished_room + tile and tile > 0


def test_a_kept_tensor_is_as_wide_as_it_is_read() -> None:
    layer = mapped().layers[0]
    cost = layer.mapped.cost
    wide = replace(cost.layer, bits=OperandBits(W=8, I=12, O=16, F=8))
    elements = cost.layer.elements("O")
    assert Stage(layer, BASE).kept_bits == 8 * elements
    assert Stage(replace(layer, mapped=replace(layer.mapped, cost=replace(cost, layer=wide))), BASE).kept_bits == 12 * elements


def test_cores_fuse_only_layers_split_by_images() -> None:
    both = BASE.model_copy(update={"cores": Cores(count=2)})
    network = mapped(array=both, batch=2)
    by_image = replace(network, layers=tuple(replace(layer, split="B", cores=2) for layer in network.layers))
    assert links(by_image) == [True, True, False]
    mixed = replace(network, layers=tuple(replace(layer, split=dim, cores=2) for layer, dim in zip(network.layers, "BKK", strict=True)))
    assert links(mixed) == [False, False, False]
    line = replace(by_image, array=BASE.model_copy(update={"cores": Cores(count=2, use="pipeline")}))
    assert links(line) == [False, False, False]


def test_cores_share_the_outermost_port() -> None:
    layer = mapped(array=BASE).layers[0]
    shared = replace(layer, cores=64, split="B")
    port = layer.mapped.cost.port_cycles["dram.channel"]
    assert Stage(shared, BASE).spent(0, 0) == Spent(shared.cycles, pytest.approx(
        64 * (layer.energy_pj - layer.mapped.cost.energy_by_pj["static"])), 0)  # fmt: skip
    assert shared.cycles == 64 * port
