"""Nests read as they should, and a nest that misses or repeats an index is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import Guard, Loop, Nest, check_nest, naive, tile
from ridgeline.estimate.spatial.lowering.nest import MAX_TURNS

SMALL = Layer("small", {"K": 8, "P": 4, "C": 3, "R": 3})


def test_a_plain_nest_reads_like_the_docstring() -> None:
    text = naive(SMALL, "k p c r").text()
    assert text == str(naive(SMALL, "k p c r"))
    assert [line.strip() for line in text.splitlines()] == [
        "# small: K 8, C 3, P 4, R 3",
        "for k in 0..8:  # K",
        "for p in 0..4:  # P",
        "for c in 0..3:  # C",
        "for r in 0..3:  # R",
        "O[0, 0, k, p, 0] += W[0, k, c, r, 0] * I[0, 0, c, p + r, 0]",
    ]
    documented = [line.strip() for line in (naive.__doc__ or "").splitlines()]
    assert set(line.strip() for line in text.splitlines()) <= set(documented)


def test_strides_dilation_padding_and_tails_are_shown() -> None:
    layer = Layer("conv", {"K": 7, "P": 5, "R": 3}, stride=(2, 1), dilation=(3, 1), padding=(1, 0))
    text = tile(naive(layer, "k p r"), "k", 3).text()
    assert "for ko in 0..3:  # K by 3\n  for ki in 0..3:  # K, while 3*ko + ki < 7" in text
    assert text.endswith("O[0, 0, 3*ko + ki, p, 0] += W[0, 3*ko + ki, 0, r, 0] * I[0, 0, 0, 2*p + 3*r - 1, 0]")


def test_dimensions_not_named_run_outermost() -> None:
    layer = Layer("conv", {"B": 2, "G": 3, "K": 4, "C": 5})
    assert naive(layer).order == ("b", "g", "k", "p", "q", "c", "r", "s")
    assert naive(layer, "c").order == ("b", "g", "k", "c")
    assert naive(layer, ["c", "b"]).order == ("g", "k", "c", "b")


@pytest.mark.parametrize("order", ["k x", "k p k", "kp"])
def test_a_wrong_order_is_an_error(order: str) -> None:
    with pytest.raises(OptionError, match="loop order"):
        naive(SMALL, order)


def test_a_loop_is_found_by_name_or_by_its_dimension() -> None:
    nest = tile(naive(SMALL), "k", 2)
    assert nest.loop("P").index == "p"
    assert nest.loop("ko").extent == 4
    with pytest.raises(OptionError, match="'K'") as error:
        nest.loop("K")
    assert "its loops are ko, ki" in error.value.why
    with pytest.raises(OptionError, match="'kx'") as error:
        nest.loop("kx")
    assert "ko, ki, p" in error.value.why and "by its index" in error.value.do


def loops(*given: tuple[str, int, int]) -> tuple[Loop, ...]:
    return tuple(Loop(index, index[0].upper(), extent, step) for index, extent, step in given)


TWELVE = Layer("twelve", {"K": 12})
SOUND = [
    loops(("k", 12, 1)),
    loops(("ko", 3, 4), ("ki", 4, 1)),
    loops(("ki", 4, 1), ("ko", 3, 4)),
    loops(("k", 12, 1), ("ki", 1, 7)),
    loops(("k0", 2, 2), ("k1", 2, 1), ("k2", 3, 4)),
]
UNSOUND = {
    "too short": loops(("ko", 2, 4), ("ki", 4, 1)),
    "too long": loops(("ko", 4, 4), ("ki", 4, 1)),
    "twice": loops(("ko", 3, 4), ("ki", 5, 1)),
    "gaps": loops(("ko", 3, 5), ("ki", 4, 1)),
    "none": (),
}


@pytest.mark.parametrize("given", SOUND)
def test_sound_loops_pass(given: tuple[Loop, ...]) -> None:
    check_nest(Nest(TWELVE, given))


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_loops_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="loops over K do not reach each of"):
        check_nest(Nest(TWELVE, UNSOUND[name]))


def test_guards_make_long_loops_sound() -> None:
    long = UNSOUND["too long"]
    check_nest(Nest(TWELVE, long, (Guard("K", (("ko", 4), ("ki", 1)), 12),)))
    for wrong in (Guard("K", (("ko", 4), ("ki", 1)), 11), Guard("K", (("ko", 4),), 12), Guard("K", (("ko", 4), ("ki", 1)), 13)):
        if wrong.limit == 12:
            check_nest(Nest(TWELVE, long, (wrong,)))  # ko < 3 says as much
        else:
            with pytest.raises(OptionError, match="do not reach"):
                check_nest(Nest(TWELVE, long, (wrong,)))


def test_shapes_no_transform_makes_are_refused() -> None:
    good = naive(TWELVE, "k")
    planted = [
        replace(good, loops=(*good.loops, Loop("k", "C", 1))),
        replace(good, loops=(replace(good.loops[0], index="k; evil()"),)),
        replace(good, loops=(replace(good.loops[0], index="x"),)),
        replace(good, loops=(*good.loops, Loop("c", "Z", 1))),
        replace(good, loops=(replace(good.loops[0], kind="vector"), Loop("c", "C", 1))),
        replace(good, guards=(Guard("K", (("p", 1),), 5),)),
        replace(good, guards=(Guard("K", (("k", -1),), 5),)),
        replace(good, loops=(replace(good.loops[0], extent=MAX_TURNS + 1),)),
    ]
    check_nest(good)
    for nest in planted:
        with pytest.raises(OptionError):
            check_nest(nest)
