"""A layer as a loop nest one can read: loops outermost first, transfers between memories, guards at the edges.

    naive(layer, "k p q c r s") ──> Nest ──text()──>  for k in 0..8:  # K
    lower(layer, array, plan) ────>                     …

    index of a dimension = Σ loop index * loop step, over its loops in the nest        4*k1 + k0
    guards               = Σ loop index * coefficient < limit, one dimension each      4*k1 + k0 < 30

Guards have positive coefficients, so a loop may stop as soon as the loops around it and itself reach the limit: tails are
cut short at whichever loop of the guard is innermost, in any loop order. `check_nest` proves that the loops and guards of
each dimension reach every index exactly once; every output sums over all its terms, in an order the nest is free to choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ....core.errors import OptionError, nearest
from ....target.array import DIMENSIONS
from ..layer import Layer

Kind = Literal["serial", "parallel", "vector", "unrolled"]
TransferKind = Literal["load", "clear", "store"]
WORDS: dict[str, str] = {"serial": "for", "parallel": "parallel", "vector": "vector", "unrolled": "unrolled"}
MAX_TURNS = 1 << 22
"""Turns of one dimension's loops that `check_nest` is willing to walk."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop: `extent` turns, each moving the index of `dim` on by `step`."""

    index: str
    dim: str
    extent: int
    step: int = 1
    kind: Kind = "serial"
    """parallel: lanes of the array; vector: lanes of a CPU register; unrolled: written out."""
    above: tuple[str, ...] = ()
    """Memories whose tiles change when this loop turns, e.g. "rf_w"."""
    axis: str = ""
    """Axis of the array a parallel loop runs along."""

    def text(self, note: str = "") -> str:
        parts = [self.dim + (f" by {self.step}" if self.step > 1 else "")]
        parts += [f"along {self.axis}"] if self.axis else []
        parts += [f"above {', '.join(self.above)}"] if self.above else []
        parts += [note] if note else []
        return f"{WORDS[self.kind]} {self.index} in 0..{self.extent}:  # {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Guard:
    """Only points with Σ index * coefficient < limit exist; the loops named all run over `dim`."""

    dim: str
    terms: tuple[tuple[str, int], ...]
    limit: int

    def names(self) -> set[str]:
        return {name for name, _ in self.terms}

    def text(self) -> str:
        return f"{affine(self.terms)} < {self.limit}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tile moving between two memories, at the start (load, clear) or the end (store) of the body of loop `inside`."""

    kind: TransferKind
    operand: str
    memory: str
    """The one nearer to the multipliers."""
    other: str
    inside: str | None
    """None: before or after all loops."""
    tile: tuple[tuple[str, int], ...]
    """Elements of one instance along each dimension, ones left out."""
    each_along: tuple[str, ...] = ()
    """Axes along which every place has an instance, and a tile, of its own."""

    def text(self) -> str:
        size = " x ".join(f"{dim} {count}" for dim, count in self.tile) or "1"
        where = {
            "load": f"{self.other} -> {self.memory}",
            "clear": f"in {self.memory}",
            "store": f"{self.memory} -> {self.other}",
        }[self.kind]
        return f"{self.kind} {self.operand} tile ({size}): {where}" + (
            f", at each place along {', '.join(self.each_along)}" if self.each_along else ""
        )


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops outermost first around one multiply-add, with transfers and guards."""

    layer: Layer
    loops: tuple[Loop, ...]
    guards: tuple[Guard, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(loop.index for loop in self.loops)

    def loop(self, name: str) -> Loop:
        """The loop with this index, or the only loop over this dimension."""
        for loop in self.loops:
            if loop.index == name:
                return loop
        over = [loop for loop in self.loops if loop.dim == name]
        if len(over) == 1:
            return over[0]
        known = ", ".join(loop.index for loop in over or self.loops) or "none at all"
        close = nearest(name, self.order)
        raise OptionError(
            f"no single loop {name!r} in the nest of {self.layer.name}",
            why=f"{'its' if over else 'the'} loops are {known}",
            do=f"name one of them by its index{f', e.g. {close[0]}' if close else ''}",
        )

    def index_terms(self, dim: str) -> tuple[tuple[str, int], ...]:
        return tuple((loop.index, loop.step) for loop in self.loops if loop.dim == dim)

    def ends_at(self, position: int) -> Iterator[Guard]:
        """Guards whose innermost loop is the one at `position`."""
        last = {guard: max((i for i, loop in enumerate(self.loops) if loop.index in guard.names()), default=-1) for guard in self.guards}
        return (guard for guard, place in last.items() if place == position)

    def transfers_in(self, inside: str | None, *, at_end: bool) -> list[Transfer]:
        return [t for t in self.transfers if t.inside == inside and (t.kind == "store") == at_end]

    def text(self) -> str:
        """The nest as indented lines."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return self.text()

    def _lines(self) -> Iterator[str]:
        yield f"# {self.layer.name}: " + ", ".join(f"{dim} {size}" for dim, size in self.layer.dims.items() if size > 1)
        yield from (t.text() for t in self.transfers_in(None, at_end=False))
        for depth, loop in enumerate(self.loops):
            yield "  " * depth + loop.text(", ".join(f"while {guard.text()}" for guard in self.ends_at(depth)))
            yield from ("  " * (depth + 1) + t.text() for t in self.transfers_in(loop.index, at_end=False))
        yield "  " * len(self.loops) + self._compute()
        for depth, loop in reversed(list(enumerate(self.loops))):
            yield from ("  " * (depth + 1) + t.text() for t in self.transfers_in(loop.index, at_end=True))
        yield from (t.text() for t in self.transfers_in(None, at_end=True))

    def _compute(self) -> str:
        def element(dims: Iterable[str]) -> str:
            return ", ".join(affine(self.index_terms(d)) for d in dims)

        rows = [self._input_index(axis) for axis in (0, 1)]
        return f"O[{element('BGKPQ')}] += W[{element('GKCRS')}] * I[{element('BGC')}, {rows[0]}, {rows[1]}]"

    def _input_index(self, axis: int) -> str:
        layer = self.layer
        out = [(name, step * layer.stride[axis]) for name, step in self.index_terms("PQ"[axis])]
        tap = [(name, step * layer.dilation[axis]) for name, step in self.index_terms("RS"[axis])]
        return affine([*out, *tap], -layer.padding[axis])


def affine(terms: Iterable[tuple[str, int]], constant: int = 0) -> str:
    """4*k1 + k0 - 1, the same in text and in C."""
    parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in terms]
    if constant < 0 and parts:
        return f"{' + '.join(parts)} - {-constant}"
    return " + ".join([*parts, *([str(constant)] if constant or not parts else [])])


def names_in(order: str | Sequence[str]) -> tuple[str, ...]:
    """Loop names given as one string or several."""
    return tuple(order.split()) if isinstance(order, str) else tuple(order)


def naive(layer: Layer, order: str | Sequence[str] = "k p q c r s") -> Nest:
    """One loop a dimension in the given order, outermost first; dimensions not named run outermost where they have more than one index.

    naive(Layer("small", {"K": 8, "P": 4, "C": 3, "R": 3}), "k p c r") reads

        # small: K 8, C 3, P 4, R 3
        for k in 0..8:  # K
          for p in 0..4:  # P
            for c in 0..3:  # C
              for r in 0..3:  # R
                O[0, 0, k, p, 0] += W[0, k, c, r, 0] * I[0, 0, c, p + r, 0]
    """
    named = [name.upper() for name in names_in(order)]
    if wrong := [name for name in named if name not in DIMENSIONS or named.count(name) > 1]:
        raise OptionError(
            f"loop order {' '.join(names_in(order))!r}",
            why=f"{wrong[0].lower()!r} is no dimension, or is there twice",
            do=f"name each of {' '.join(DIMENSIONS).lower()} at most once",
        )
    outer = [dim for dim in DIMENSIONS if dim not in named and layer.dims[dim] > 1]
    return Nest(layer, tuple(Loop(dim.lower(), dim, layer.dims[dim]) for dim in [*outer, *named]))


def check_nest(nest: Nest) -> None:
    """Raise an OptionError unless the loops reach every index of every dimension exactly once."""
    if len(set(nest.order)) != len(nest.loops):
        raise _broken(nest, f"loop indices {' '.join(nest.order)}", "two loops share a name")
    for loop in nest.loops:
        if not re.fullmatch(r"[bgkcpqrs][a-z0-9]*", loop.index) or loop.dim not in DIMENSIONS or min(loop.extent, loop.step) < 1:
            raise _broken(nest, f"loop {loop.index!r}", "its name, dimension, extent or step is not one a nest can have")
    if wrong := [loop for loop in nest.loops[:-1] if loop.kind == "vector"]:
        raise _broken(nest, f"vector loop {wrong[0].index}", "it is not the innermost one")
    for dim, size in nest.layer.dims.items():
        _check_dimension(nest, dim, size)


def _check_dimension(nest: Nest, dim: str, size: int) -> None:
    import numpy

    loops = [loop for loop in nest.loops if loop.dim == dim]
    guards = [guard for guard in nest.guards if guard.dim == dim]
    if any(not guard.names() <= {loop.index for loop in loops} or min(c for _, c in guard.terms) < 1 for guard in guards):
        raise _broken(nest, f"a guard over {dim}", "it names another dimension's loop, or counts one backwards")
    shape = tuple(loop.extent for loop in loops)
    if prod(shape) == size and not guards and _counts_in_digits(loops):
        return
    if prod(shape) > max(MAX_TURNS, 2 * size):
        raise _broken(nest, f"loops over {dim} take {prod(shape)} turns", f"the layer has {size}")
    steps = dict(zip((loop.index for loop in loops), numpy.indices(shape).reshape(len(loops), prod(shape)), strict=True))
    reached = sum((steps[loop.index] * loop.step for loop in loops), numpy.zeros(prod(shape), numpy.int64))
    inside = numpy.ones(prod(shape), bool)
    for guard in guards:
        inside &= sum(steps[name] * factor for name, factor in guard.terms) < guard.limit
    if not numpy.array_equal(numpy.sort(reached[inside]), numpy.arange(size)):
        raise _broken(nest, f"loops over {dim} do not reach each of 0..{size} once", "a step, an extent or a guard is wrong")


def _counts_in_digits(loops: Sequence[Loop]) -> bool:
    """Whether each step is the product of the extents of the loops with smaller steps, as the places of a number are."""
    reach = 1
    for loop in sorted(loops, key=lambda one: (one.step, one.extent)):
        if loop.extent > 1 and loop.step != reach:
            return False
        reach *= loop.extent
    return True


def _broken(nest: Nest, what: str, why: str) -> OptionError:
    return OptionError(f"{what} in the nest of {nest.layer.name}", why=why, do="build nests with naive, lower and the transforms only")
