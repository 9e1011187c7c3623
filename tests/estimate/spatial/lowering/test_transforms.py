"""Each transform makes the nest it says, keeps it sound, and refuses what would change results."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import Guard, Nest, check_nest, lower, naive, reorder, tile, unroll, vectorise
from tests.estimate.spatial.lowering.cases import ARRAY, random_layer, random_order, random_plan, random_transforms
from tests.support import full_or_tenth

LAYER = Layer("conv", {"K": 13, "C": 6, "P": 5, "Q": 16, "R": 3, "S": 3})
NEST = naive(LAYER)


def test_tile_splits_a_loop() -> None:
    tiled = tile(NEST, "c", 3)
    assert tiled.order == ("k", "p", "q", "co", "ci", "r", "s")
    assert [(tiled.loop(name).extent, tiled.loop(name).step) for name in ("co", "ci")] == [(2, 3), (3, 1)]
    assert tiled.guards == ()
    assert tile(tiled, "ci", 3).loop("cio").extent == 1


def test_a_tail_is_guarded_and_guards_follow_further_splits() -> None:
    tiled = tile(NEST, "K", 5)
    assert tiled.guards == (Guard("K", (("ko", 5), ("ki", 1)), 13),)
    again = tile(tiled, "ki", 2)
    assert again.guards == (Guard("K", (("ko", 5), ("kio", 2), ("kii", 1)), 13), Guard("K", (("kio", 2), ("kii", 1)), 5))
    check_nest(again)
    assert tile(NEST, "k", 20).guards == (Guard("K", (("ko", 20), ("ki", 1)), 13),)


def test_reorder_moves_loops_only() -> None:
    moved = reorder(NEST, "s r c q p k")
    assert moved.order == ("s", "r", "c", "q", "p", "k")
    assert set(moved.loops) == set(NEST.loops)
    assert reorder(moved, NEST.order) == NEST


def test_vectorise_and_unroll_mark_or_split() -> None:
    columns = reorder(NEST, "k p c r s q")
    assert [(loop.index, loop.kind) for loop in vectorise(columns, "q", 16).loops[-1:]] == [("q", "vector")]
    split = vectorise(columns, "q", 8)
    assert [(loop.index, loop.kind, loop.extent) for loop in split.loops[-2:]] == [("qo", "serial", 2), ("qv", "vector", 8)]
    assert unroll(NEST, "p", 5).loop("p").kind == "unrolled"
    assert [(loop.index, loop.kind, loop.extent) for loop in unroll(NEST, "k", 4).loops[:2]] == [("ko", "serial", 4), ("ku", "unrolled", 4)]


def test_random_sequences_stay_sound() -> None:
    random = Random(11)
    for number in range(full_or_tenth(1000)):
        layer = random_layer(random, number)
        check_nest(random_transforms(random, random_order(random, layer), 8))
        check_nest(random_transforms(random, lower(layer, ARRAY, random_plan(random, layer)), 8))


Q_LAST = reorder(NEST, "k p c r s q")
REFUSED: dict[str, tuple[Callable[[], Nest], str]] = {
    "unknown loop": (lambda: tile(NEST, "kk", 2), "no single loop 'kk'"),
    "size zero": (lambda: tile(NEST, "k", 0), "tile size for k = 0"),
    "size not whole": (lambda: tile(NEST, "k", 2.0), "tile size for k = 2.0"),  # type: ignore[arg-type]
    "size true": (lambda: tile(NEST, "k", True), "tile size for k = True"),
    "factor negative": (lambda: unroll(NEST, "k", -1), "unroll factor for k = -1"),
    "reduction unrolled": (lambda: unroll(NEST, "c", 2), "unrolling c over C"),
    "reduction vectorised": (lambda: vectorise(NEST, "s", 4), "vectorising s over S"),
    "width not a power of two": (lambda: vectorise(Q_LAST, "q", 12), "vector width 12"),
    "width too large": (lambda: vectorise(Q_LAST, "q", 128), "vector width 128"),
    "width zero": (lambda: vectorise(Q_LAST, "q", 0), "vector width for q = 0"),
    "not innermost": (lambda: vectorise(NEST, "q", 4), "vectorising q"),
    "vector twice": (lambda: vectorise(vectorise(Q_LAST, "q", 8), "qv", 2), "cannot be vectorised"),
    "vector tiled": (lambda: tile(vectorise(Q_LAST, "q", 16), "q", 2), "cannot be tiled"),
    "unrolled unrolled": (lambda: unroll(unroll(NEST, "k", 4), "ku", 2), "cannot be unrolled"),
    "block too large": (lambda: unroll(unroll(NEST, "k", 13), "q", 20), "unrolling q by 20"),
    "order unknown": (lambda: reorder(NEST, "k p q c r x"), "reorder names loop 'x'"),
    "order short": (lambda: reorder(NEST, "k p q c r"), "reorder to k p q c r"),
    "order twice": (lambda: reorder(NEST, "k p q c r s s"), "reorder to k p q c r s s"),
    "vector outwards": (lambda: reorder(vectorise(Q_LAST, "q", 16), "q k p c r s"), "reorder moves vector loop q"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_legal_is_refused(name: str) -> None:
    attempt, what = REFUSED[name]
    with pytest.raises(OptionError) as error:
        attempt()
    assert what in error.value.what
    assert error.value.why and error.value.do


def test_reductions_go_when_asked_for() -> None:
    assert unroll(NEST, "c", 2, reassociate=True).loop("cu").kind == "unrolled"
    assert vectorise(NEST, "s", 4, reassociate=True).loop("sv").kind == "vector"
