"""A mapping lowered: the loops it says, in its order, and transfers of exactly the tiles that the loops inside them touch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from random import Random

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import RELEVANT, Layer
from ridgeline.estimate.spatial.lowering import Loop, Nest, Transfer, check_nest, lower, reorder, tile
from ridgeline.estimate.spatial.mapping import MappingPlan
from tests.estimate.spatial.lowering.cases import ARRAY, random_layer, random_plan
from tests.support import full_or_tenth

CONV = Layer("conv", {"K": 6, "C": 4, "P": 5, "Q": 5, "R": 3}, padding=(1, 0))
PLAN = MappingPlan(
    {"D1": (("K", 4),), "D2": (("C", 2),)},
    (("P", 5), ("R", 3), ("Q", 5), ("C", 2), ("K", 2)),
    {"W": (2,), "I": (3,), "O": (1, 3)},
)
TEXT = """
# conv: K 6, C 4, P 5, Q 5, R 3
for k1 in 0..2:  # K by 4, above rf_w, glb (O)
  clear O tile (K 4 x P 5 x Q 5): in glb
  for c1 in 0..2:  # C by 2, above rf_w, glb (I)
    load I tile (C 2 x P 5 x Q 5 x R 3): dram -> glb
    load W tile (R 3): dram -> rf_w, at each place along D1, D2
    for q0 in 0..5:  # Q, above rf_o
      load O tile (P 5): glb -> rf_o, at each place along D1
      for r0 in 0..3:  # R
        for p0 in 0..5:  # P
          parallel c0 in 0..2:  # C, along D2
            parallel k0 in 0..4:  # K, along D1, while 4*k1 + k0 < 6
              O[0, 0, 4*k1 + k0, p0, q0] += W[0, 4*k1 + k0, 2*c1 + c0, r0, 0] * I[0, 0, 2*c1 + c0, p0 + r0 - 1, q0]
      store O tile (P 5): rf_o -> glb, at each place along D1
  store O tile (K 4 x P 5 x Q 5): glb -> dram
""".strip()


def test_a_lowered_mapping_reads_like_this() -> None:
    assert lower(CONV, ARRAY, PLAN).text() == TEXT
    documented = [line.strip() for line in (lower.__doc__ or "").splitlines()]
    assert {line.strip() for line in TEXT.splitlines()} <= set(documented)


def touched(nest: Nest, transfer: Transfer) -> int:
    """Distinct indices of the operand that one instance meets between two turns of the loop the transfer is in, edges ignored."""
    inside = nest.order.index(transfer.inside) + 1 if transfer.inside else 0
    own = [loop for loop in nest.loops[inside:] if loop.axis not in transfer.each_along]
    return prod(distinct([loop for loop in own if loop.dim == dim]) for dim in RELEVANT[transfer.operand])


def distinct(loops: list[Loop]) -> int:
    return len({sum(t * one.step for t, one in zip(turn, loops, strict=True)) for turn in product(*(range(one.extent) for one in loops))})


def wrong_transfers(nest: Nest) -> list[str]:
    """Transfers that bring another number of elements than are used, or sit in a loop that does not change them."""
    found = []
    for transfer in nest.transfers:
        idle = transfer.inside is not None and nest.loop(transfer.inside).dim not in RELEVANT[transfer.operand]
        if idle or touched(nest, transfer) != prod(size for _, size in transfer.tile):
            found.append(transfer.text())
    return found


def test_every_transfer_moves_what_is_used() -> None:
    random = Random(5)
    for number in range(full_or_tenth(1000)):
        layer = random_layer(random, number)
        plan = random_plan(random, layer)
        nest = lower(layer, ARRAY, plan)
        check_nest(nest)
        assert wrong_transfers(nest) == [], nest.text()
        loads = [(t.operand, t.memory) for t in nest.transfers if t.kind != "store"]
        assert sorted(loads) == sorted((op, memory) for op in "WIO" for memory in ARRAY.ladder(op)[:-1])


def test_a_transfer_one_loop_off_is_seen() -> None:
    nest = lower(CONV, ARRAY, PLAN)
    assert wrong_transfers(nest) == []
    for number, transfer in enumerate(nest.transfers):
        depth = nest.order.index(str(transfer.inside))
        for off in (depth - 1, depth + 1):
            moved = replace(transfer, inside=nest.order[off] if off >= 0 else None)
            planted = replace(nest, transfers=(*nest.transfers[:number], moved, *nest.transfers[number + 1 :]))
            assert wrong_transfers(planted) == [moved.text()]


def test_partial_sums_come_back_only_if_the_reduction_goes_on_outside() -> None:
    kinds = {(t.memory, t.kind) for t in lower(CONV, ARRAY, PLAN).transfers if t.operand == "O"}
    assert kinds == {("rf_o", "load"), ("rf_o", "store"), ("glb", "clear"), ("glb", "store")}
    inner = MappingPlan(PLAN.spatial, (("C", 2), ("R", 3), ("P", 5), ("Q", 5), ("K", 2)), {"W": (2,), "I": (3,), "O": (2, 3)})
    assert {t.kind for t in lower(CONV, ARRAY, inner).transfers if t.operand == "O"} == {"clear", "store"}


def test_lanes_of_one_dimension_on_two_axes_are_neighbours_on_the_first() -> None:
    layer = Layer("wide", {"K": 24})
    plan = MappingPlan({"D2": (("K", 3),), "D1": (("K", 4),)}, (("K", 2),), {"W": (1,), "I": (1,), "O": (1, 1)})
    nest = lower(layer, ARRAY, plan)
    assert [(loop.index, loop.extent, loop.step, loop.axis) for loop in nest.loops] == [
        ("k2", 2, 12, ""),
        ("k1", 3, 4, "D2"),
        ("k0", 4, 1, "D1"),
    ]
    assert nest.guards == ()


def test_transforms_keep_transfers_where_they_belong() -> None:
    nest = lower(CONV, ARRAY, PLAN)
    assert wrong_transfers(tile(tile(nest, "r0", 3), "q0", 5)) == []
    swapped = reorder(nest, "k1 c1 q0 p0 r0 k0 c0")
    assert wrong_transfers(swapped) == [] and swapped.order[3] == "p0"
    with pytest.raises(OptionError, match="reorder moves q0 across the transfers in loop c1"):
        reorder(nest, "k1 q0 c1 r0 p0 c0 k0")
    assert reorder(replace(nest, transfers=()), "k1 q0 c1 r0 p0 c0 k0").order[1] == "q0"


def test_a_mapping_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="loops over K reach 4"):
        lower(CONV, ARRAY, replace(PLAN, loops=PLAN.loops[:-1]))
