"""Changes to a loop nest, one at a time, each checked before it is made.

    Nest ──tile(k, 4)──> ko, ki ──reorder("ko p q ki …")──> ──unroll(ki, 4)──> ──vectorise(q, 16)──> Nest

    tile        one loop becomes two; a size that does not divide leaves a tail, which a guard cuts short
    reorder     any order is legal: the body is one `O += W * I`, additions commute, and no turn reads what another turn wrote
                but the sum itself. Floats then round in another order; integers do not change
    vectorise   the innermost loop runs `width` indices at a time, in the lanes of one register
    unroll      `factor` turns are written out; innermost, between the reduction and the vector, they share loaded operands
                and each has an accumulator of its own (register tiling)

The lanes of a reduction are summed apart and added up at the end. For floats that is another order of summing than the
loops say, so vectorising or unrolling C, R or S must be asked for with reassociate=True.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ....core.errors import OptionError, nearest
from ..layer import REDUCTION
from .nest import Guard, Kind, Loop, Nest, names_in

MAX_WIDTH = 64
MAX_BLOCK = 256
"""Multiply-adds written out for one turn: beyond it compile time grows and no register file holds the accumulators."""


def tile(nest: Nest, loop: str, size: int) -> Nest:
    """Split a loop into an outer one and an inner one of `size` turns: k becomes ko and ki."""
    found = _free(nest, loop, "tiled")
    return _split(nest, found, _whole(size, f"tile size for {found.index}"), "o", "i", found.kind)


def reorder(nest: Nest, order: str | Sequence[str]) -> Nest:
    """Put all loops into the given order, outermost first."""
    names = names_in(order)
    if unknown := [name for name in names if name not in nest.order]:
        close = nearest(unknown[0], nest.order)
        raise _refused(nest, f"reorder names loop {unknown[0]!r}", f"the loops are {', '.join(nest.order)}",
                       f"did you mean {close[0]}?" if close else "use their names")  # fmt: skip
    if len(names) != len(nest.loops) or len(set(names)) != len(names):
        missing = [name for name in nest.order if name not in names]
        why = f"{', '.join(missing)} left out" if missing else "a loop is there twice"
        raise _refused(nest, f"reorder to {' '.join(names)}", why, "name every loop exactly once")
    loops = tuple(nest.loop(name) for name in names)
    if wrong := [loop.index for loop in loops[:-1] if loop.kind == "vector"]:
        raise _refused(
            nest, f"reorder moves vector loop {wrong[0]} outwards", "the lanes of a register are the innermost loop", "leave it last"
        )
    return replace(nest, loops=loops, transfers=tuple(replace(t, inside=_new_place(nest, t.inside, names)) for t in nest.transfers))


def vectorise(nest: Nest, loop: str, width: int, *, reassociate: bool = False) -> Nest:
    """Run the innermost loop `width` indices at a time: q becomes qo and qv, or stays q where it has exactly `width` turns."""
    found = _free(nest, loop, "vectorised")
    _whole(width, f"vector width for {found.index}")
    if width & (width - 1) or width > MAX_WIDTH:
        raise _refused(nest, f"vector width {width}", f"a width must be a power of two up to {MAX_WIDTH}", "give 4, 8 or 16, for example")
    if nest.loops[-1] != found:
        raise _refused(
            nest, f"vectorising {found.index}", f"it is not the innermost loop, {nest.loops[-1].index} is", "reorder it innermost first"
        )
    _may_sum_apart(nest, found, reassociate, "vectorising")
    return _divide(nest, found, width, "v", "vector")


def unroll(nest: Nest, loop: str, factor: int, *, reassociate: bool = False) -> Nest:
    """Write out `factor` turns of a loop: k becomes ko and ku, or stays k where it has exactly `factor` turns."""
    found = _free(nest, loop, "unrolled")
    _whole(factor, f"unroll factor for {found.index}")
    written = factor * prod(other.extent for other in nest.loops if other.kind == "unrolled")
    if written > MAX_BLOCK:
        raise _refused(nest, f"unrolling {found.index} by {factor}", f"{written} multiply-adds would be written out, more than {MAX_BLOCK}",
                       "unroll by less")  # fmt: skip
    _may_sum_apart(nest, found, reassociate, "unrolling")
    return _divide(nest, found, factor, "u", "unrolled")


def _divide(nest: Nest, loop: Loop, size: int, suffix: str, kind: Kind) -> Nest:
    if loop.extent != size:
        return _split(nest, loop, size, "o", suffix, kind)
    return replace(nest, loops=tuple(replace(one, kind=kind) if one == loop else one for one in nest.loops))


def _split(nest: Nest, loop: Loop, size: int, outer_suffix: str, inner_suffix: str, kind: Kind) -> Nest:
    """index = outer * size + inner, everywhere the loop's index stood: in its dimension, in guards, around transfers."""
    outer_name, inner_name = loop.index + outer_suffix, loop.index + inner_suffix
    if clash := {outer_name, inner_name} & set(nest.order):
        raise _refused(
            nest, f"splitting {loop.index}", f"there is a loop {min(clash)} already", "tile that one, or start from another nest"
        )
    outer = replace(loop, index=outer_name, extent=-(-loop.extent // size), step=loop.step * size)
    inner = replace(loop, index=inner_name, extent=size, kind=kind)
    position = nest.loops.index(loop)
    guards = [_in_terms_of(guard, loop.index, outer_name, inner_name, size) for guard in nest.guards]
    if loop.extent % size:
        guards.append(Guard(loop.dim, ((outer_name, size), (inner_name, 1)), loop.extent))
    transfers = tuple(replace(t, inside=inner_name) if t.inside == loop.index else t for t in nest.transfers)
    return replace(
        nest, loops=(*nest.loops[:position], outer, inner, *nest.loops[position + 1 :]), guards=tuple(guards), transfers=transfers
    )


def _in_terms_of(guard: Guard, name: str, outer: str, inner: str, size: int) -> Guard:
    terms = [((outer, factor * size), (inner, factor)) if term == name else ((term, factor),) for term, factor in guard.terms]
    return replace(guard, terms=tuple(pair for pairs in terms for pair in pairs))


def _new_place(nest: Nest, inside: str | None, names: tuple[str, ...]) -> str | None:
    """Where a transfer goes: around it must be the same loops as before, or another tile would move at another time."""
    if inside is None:
        return None
    depth = nest.order.index(inside) + 1
    if set(names[:depth]) == set(nest.order[:depth]):
        return names[depth - 1]
    moved = sorted(set(names[:depth]) - set(nest.order[:depth]))
    raise _refused(
        nest,
        f"reorder moves {', '.join(moved)} across the transfers in loop {inside}",
        "other tiles would be used than those moved there",
        "lower a plan with that order, or drop the transfers: dataclasses.replace(nest, transfers=())",
    )


def _free(nest: Nest, name: str, verb: str) -> Loop:
    loop = nest.loop(name)
    if loop.kind in ("vector", "unrolled"):
        raise _refused(nest, f"loop {loop.index} cannot be {verb}", f"it is {loop.kind} already", "transform the serial loop before that")
    return loop


def _whole(size: int, what: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"{what} = {size!r}", why="it must be a whole number, 1 or more", do="give the number of turns of the inner loop")
    return size


def _may_sum_apart(nest: Nest, loop: Loop, reassociate: bool, verb: str) -> None:
    if loop.dim in REDUCTION and not reassociate:
        raise _refused(nest, f"{verb} {loop.index} over {loop.dim}", "the sum is then taken in another order, and floats round differently",
                       "pass reassociate=True (integer sums do not change), or choose a loop over B, G, K, P or Q")  # fmt: skip


def _refused(nest: Nest, what: str, why: str, do: str) -> OptionError:
    return OptionError(f"{what} in the nest of {nest.layer.name}", why=why, do=do)
