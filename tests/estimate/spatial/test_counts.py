"""Every count of the engine against the walked loop nest, to the last word; and errors planted in the engine, which must be seen.

2,000 random cases, always the same, and generated ones ──differences──> []
an error planted in the engine ──differences──> something, within the first 200 cases
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ridgeline.estimate.spatial import cost, counts
from ridgeline.estimate.spatial.counts import Unrolled, boundary_flows
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.tiles import Sizes, Slide, extents, windows
from ridgeline.target.array import DIMENSIONS
from tests.estimate.spatial.cases import Case, cases, memory, random_case, small_array
from tests.estimate.spatial.npu_support import Walked, differences, walked

CASES, AT_ONCE = 2000, 100
CAUGHT_WITHIN = 200


def slides(case: Case) -> bool:
    """Whether a memory that streams inputs really keeps something from one tile to the next."""
    layer, array, plan = case
    unrolled = Unrolled(layer, array, plan.spatial)
    points = cost.boundary_points(unrolled, plan, "I")
    for place, blocks in enumerate(points):
        slide = cost.sliding(array, plan, "I", place)
        if slide:
            whole, moved = (boundary_flows(unrolled, "I", place, blocks, slide=way) for way in (None, slide))
            if any(cost.one(moved[key].elements) < cost.one(whole[key].elements) for key in whole):
                return True
    return False


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_counts_equal_the_walked_loop_nest(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        case, seen = walked(seed)
        assert differences(case, seen) == [], (seed, case)


def test_one_case_in_twenty_slides() -> None:
    assert sum(slides(random_case(Random(seed))) for seed in range(CASES)) >= CASES / 20


@given(cases(most_macs=150))
def test_generated_counts_equal_the_walked_loop_nest(case: Case) -> None:
    assert differences(case, Walked(case)) == []


def caught() -> int | None:
    """Seed of the first case that shows an error."""
    for seed in range(CAUGHT_WITHIN):
        try:
            if differences(*walked(seed)):
                return seed
        except (AssertionError, ValueError, ArithmeticError):
            return seed
    return None


def no_edges(size: int, block: int, pattern: Any) -> Sizes:
    """Every tile as large as the largest."""
    true = extents(size, block, pattern)
    full = (true.largest,)
    return Sizes(full, (true.active,), full, (true.steps,))


def padding_stored(outs: int, taps: int, geometry: tuple[int, int, int, int], *more: Any) -> Sizes:
    stride, dilation, _, _ = geometry
    return windows(outs, taps, (stride, dilation, 0, (outs - 1) * stride + (taps - 1) * dilation + 1), *more)


def one_read_each_pe(self: Unrolled, operand: str, blocks: Any, memory: str, direction: str, held_by: Any, *more: Any) -> Any:
    return TRUE_FLOW(self, operand, blocks, memory, direction, None if direction == "rd_down" else held_by, *more)


def all_instances_work(self: Unrolled, dims: Any, blocks: Any, shared: Any) -> Any:
    idle = np.prod([f for axis, loops in self.spatial.items() if axis not in shared for d, f in loops if d in dims], dtype=np.int64)
    return self.count(dims, blocks) * idle


def backwards(self: Unrolled, dim: str, shared: Any) -> Any:
    return TRUE_PATTERN(self, dim, shared)[::-1]


def one_step_more(self: Unrolled) -> int:
    return prod(1 + size // self.lanes(dim) for dim, size in self.layer.dims.items())


TRUE_FLOW, TRUE_PATTERN = Unrolled.flow, Unrolled.pattern
TRUE_RETURNED, TRUE_SLIDING, TRUE_LARGEST = counts.returned_partials, cost.sliding, Unrolled.largest


def slide_for_ever(*args: Any) -> Slide | None:
    slide = TRUE_SLIDING(*args)
    return Slide(slide.dim, 1 << 40) if slide else None


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "edges forgotten": (counts, "extents", no_edges),
    "padding stored": (counts, "windows", padding_stored),
    "multicast skipped": (Unrolled, "flow", one_read_each_pe),
    "one return too many": (cost, "returned_partials", lambda *a: [back + 1 for back in TRUE_RETURNED(*a)]),
    "one return too few": (cost, "returned_partials", lambda *a: [np.maximum(0, back - 1) for back in TRUE_RETURNED(*a)]),
    "words rounded down": (counts, "_ceil", lambda amount, by: amount // by),
    "refill in every loop": (MappingPlan, "refill_position", lambda self, operand, cut: cut),
    "nothing slides": (cost, "sliding", lambda *a: None),
    "slides past the end of its run": (cost, "sliding", slide_for_ever),
    "lanes numbered backwards": (Unrolled, "pattern", backwards),
    "idle instances served": (Unrolled, "active", all_instances_work),
    "steps past the edge walked": (Unrolled, "compute_cycles", one_step_more),
    "tiles of a PE, not of a memory": (Unrolled, "largest", lambda self, operand, blocks, shared: TRUE_LARGEST(self, operand, blocks, ())),
    "network free": (cost, "crosses_noc", lambda *a: False),
}  # fmt: skip


@pytest.mark.parametrize("error", PLANTED)
def test_planted_error_is_caught(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = PLANTED[error]
    monkeypatch.setattr(owner, name, wrong)
    assert caught() is not None


def test_nothing_planted_nothing_caught() -> None:
    assert caught() is None


def test_finished_outputs_are_narrow_unless_lanes_still_add_them_up() -> None:
    # C4 on 2 lanes, all inside the register: what leaves a lane is half a sum (16 bits), what arrives is finished (8 bits).
    array = small_array({"x": 2}, {"acc": memory("O"), "top": memory("WIO", "x")})
    layer = Layer("l", {"P": 3, "C": 4})
    plan = MappingPlan({"x": (("C", 2),)}, (("C", 2), ("P", 3)), {"W": (), "I": (), "O": (1,)})
    found = cost.evaluate(layer, array, plan)
    assert (found.words("acc", "O", "rd_up"), found.words("top", "O", "wr_up")) == (2 * 3 * 2, 3)
    # The same on one lane: both are finished.
    plan = MappingPlan({}, (("C", 4), ("P", 3)), {"W": (), "I": (), "O": (1,)})
    found = cost.evaluate(layer, array, plan)
    assert (found.words("acc", "O", "rd_up"), found.words("top", "O", "wr_up")) == (3, 3)


def test_a_lattice_of_tilings_counts_what_each_of_them_does() -> None:
    # The search asks for all block sizes at once; each point must be what the block alone gives.
    layer = Layer("l", {"K": 6, "C": 4, "P": 5, "R": 3}, padding=(1, 0))
    array = small_array({"x": 2}, {"reg": memory("WI", granule=24), "top": memory("WIO", "x", granule=16)})
    unrolled = Unrolled(layer, array, {"x": (("K", 2),)})
    lattice = {d: np.array({"K": [1, 3], "C": [1, 2, 4], "P": [1, 2, 5], "R": [1, 3]}.get(d, [1])) for d in DIMENSIONS}
    shape = tuple(len(lattice[d]) for d in DIMENSIONS)
    for operand in "WI":
        together = boundary_flows(unrolled, operand, 1, lattice)
        for point in np.ndindex(*shape):
            alone = boundary_flows(unrolled, operand, 1, {d: lattice[d][[i]] for d, i in zip(DIMENSIONS, point, strict=True)})
            for key, flow in together.items():
                for name in ("words", "elements", "transfers", "cycles"):
                    assert np.broadcast_to(getattr(flow, name), shape)[point] == cost.one(getattr(alone[key], name)), (operand, point, key)
