"""Exact words through every port, for one tiling or for thousands at once.

    blocks {dim: array of block sizes}   one lattice axis a dimension, so every result is an array over the lattice
        ▼ tiles                          distinct tile sizes of each dimension, edges and padding included
    Flow                                 words, elements, transfers and port cycles of one operand at one memory and direction
        words     = sum over transfers of ceil(elements * bits / port word)             [port words, whole]
        cycles    = sum over steps of ceil(words of the busiest instance * word / width)

A boundary lies between a memory and what it feeds: the memory below it on the operand's ladder, or the PEs. Its traffic
depends only on the blocks at its refill position: relevant dimensions give tile sizes, the others how often tiles come.

Partial sums. Let v be visits of a memory from below, r its own residencies, both counted over reduction tiles and lanes.
A residency starts from zero unless partial sums come down, so what a memory gives back is v - r + (what came down to it);
what comes down goes to one lane of those that are added up on the way, and the outermost memory starts empty (r = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count, product
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS, SpatialArraySpec
from .layer import REDUCTION, RELEVANT, Layer
from .mapping import Loop
from .tiles import Pattern, Sizes, Slide, extents, windows

Array = NDArray[np.int64]
Blocks = Mapping[str, Array]
AXIS = {d: i for i, d in enumerate(DIMENSIONS)}
RANK = len(DIMENSIONS)
NONE: Array = np.zeros((1,) * RANK, np.int64)
ONE: Array = np.ones((1,) * RANK, np.int64)
SINGLE: Array = np.ones((1,) * (RANK + 1), np.int64)
MOST_KEPT = 10_000_000
"""Numbers in arrays that are kept to be found again."""
NUMBERS = count()
Found = TypeVar("Found", "Array", "Flow", "Factor")
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Flow:
    """Traffic of one operand through one port, in one direction, over the whole layer, all instances together."""

    words: Array
    elements: Array
    transfers: Array
    cycles: Array
    bits: Array

    def times(self, events: Array, steps: Array) -> Flow:
        """The same tiles moved more often: `events` times in all, on `steps` steps of the busiest instance."""
        words, elements = self.words * events, self.elements * events
        if self.cycles is NONE:
            return Flow(words, elements, NONE, NONE, self.bits)
        return Flow(words, elements, self.transfers * events, self.cycles * steps, self.bits)

    def where(self, chosen: NDArray[np.bool_], other: Flow) -> Flow:
        """This one where chosen, else the other: the same tiles in words of another width."""
        words, bits = np.where(chosen, self.words, other.words), np.where(chosen, self.bits, other.bits)
        cycles = NONE if self.cycles is NONE else np.where(chosen, self.cycles, other.cycles)
        return Flow(words, self.elements, self.transfers, cycles, bits)


@dataclass(frozen=True, slots=True)
class Moved:
    """Only what is new in a tile is moved, to instances shared over `held_over`."""

    slide: Slide
    held_over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """Tile sizes of one dimension or window on its lattice axes; the last axis runs over distinct sizes."""

    values: Array
    counts: Array
    step_values: Array
    step_counts: Array
    total: Array
    """Elements of all tiles."""
    active: Array
    """Tiles that hold anything."""
    largest: Array
    number: int
    """No two have the same."""


class Known:
    """What was found for one layer on one array: its unrollings have most of it in common."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], Any] = {}
        self.room = MOST_KEPT

    def of(self, key: tuple[Any, ...], make: Callable[[], Found]) -> Found:
        """What was made for this key before."""
        found: Found | None = self.kept.get(key)
        if found is None:
            found = make()
            if self.room > 0:
                self.kept[key] = found
                arrays = [found] if isinstance(found, np.ndarray) else [getattr(found, each.name) for each in fields(found)]
                self.room -= sum(each.size for each in arrays if isinstance(each, np.ndarray))
        return found


@dataclass(slots=True)
class Unrolled:
    """A layer spread over an array: what every tiling of it shares."""

    layer: Layer
    array: SpatialArraySpec
    spatial: Mapping[str, tuple[Loop, ...]]
    with_cycles: bool = True
    """False: port cycles and transfers are not asked for, and left at zero."""
    known: Known = field(default_factory=Known)
    """Of this layer on this array, under any unrolling."""
    _lanes: dict[str, int] = field(default_factory=dict)
    _patterns: dict[tuple[str, tuple[str, ...]], Pattern] = field(default_factory=dict)
    _asked: dict[tuple[object, ...], tuple[Blocks, Any]] = field(default_factory=dict)
    """By the blocks' identity, which is theirs for as long as they are kept here."""

    def lanes(self, dim: str) -> int:
        if dim not in self._lanes:
            self._lanes[dim] = prod(f for loops in self.spatial.values() for d, f in loops if d == dim)
        return self._lanes[dim]

    def pattern(self, dim: str, shared: tuple[str, ...]) -> Pattern:
        """Unrollings of a dimension, innermost lane first, each with whether the memory serves its axis."""
        key = (dim, shared)
        if key not in self._patterns:
            loops = ((axis, d, f) for axis in self.array.axes for d, f in self.spatial.get(axis, ()))
            self._patterns[key] = tuple((f, axis in key[1]) for axis, d, f in loops if d == dim and f > 1)
        return self._patterns[key]

    def steps(self, dim: str, blocks: Blocks) -> Array:
        """Tiles of a dimension at each block size."""
        sizes, lanes = blocks[dim], self.lanes(dim)
        return self.known.of(("steps", dim, sizes.tobytes(), lanes), lambda: _place(-(-self.layer.dims[dim] // (sizes * lanes)), AXIS[dim]))

    def compute_cycles(self) -> int:
        return prod(-(-size // self.lanes(dim)) for dim, size in self.layer.dims.items())

    def count(self, dims: Iterable[str], blocks: Blocks) -> Array:
        """Steps over several dimensions."""
        dims = tuple(dims)
        return self._once(blocks, ("count", dims), lambda: _product(self.steps(d, blocks) for d in dims if self.layer.dims[d] > 1))

    def active(self, dims: Iterable[str], blocks: Blocks, shared: tuple[str, ...]) -> Array:
        """(Step, instance) pairs that do anything, over dimensions an operand does not depend on."""
        dims = tuple(dims)
        made = (self._plain(d, blocks, shared).active for d in dims if self.layer.dims[d] > 1)
        return self._once(blocks, ("active", dims, shared), lambda: _product(made))

    def factors(self, operand: str, blocks: Blocks, shared: tuple[str, ...], moved: Moved | None = None) -> list[Factor]:
        """Tile sizes of an operand in one instance of a memory shared over `shared`; with `moved`, of what is new in them."""

        def make() -> list[Factor]:
            plain = ("B", "G", "C") if operand == "I" else RELEVANT[operand]
            found = [self._plain(d, blocks, shared) for d in plain if self.layer.dims[d] > 1]
            return [*found, *(self._window(which, blocks, shared, moved) for which in (0, 1))] if operand == "I" else found

        return self._once(blocks, ("factors", operand, shared, moved), make)

    def largest(self, operand: str, blocks: Blocks, shared: tuple[str, ...]) -> Array:
        """Elements of the largest tile any instance holds."""
        return self._once(blocks, ("largest", operand, shared), lambda: _product(f.largest for f in self.factors(operand, blocks, shared)))

    def _once(self, blocks: Blocks, what: tuple[object, ...], make: Callable[[], Kept]) -> Kept:
        key = (id(blocks), *what)
        if key not in self._asked:
            self._asked[key] = blocks, make()
        found: Kept = self._asked[key][1]
        return found

    def _plain(self, dim: str, blocks: Blocks, shared: tuple[str, ...]) -> Factor:
        sizes, pattern = blocks[dim], self.pattern(dim, shared)

        def make() -> Factor:
            return _factor([extents(self.layer.dims[dim], b, pattern) for b in sizes.tolist()], (AXIS[dim],), (len(sizes),))

        return self.known.of((dim, sizes.tobytes(), pattern), make)

    def _window(self, which: int, blocks: Blocks, shared: tuple[str, ...], moved: Moved | None) -> Factor:
        layer, out_dim, tap_dim = self.layer, "PQ"[which], "RS"[which]
        patterns = self.pattern(out_dim, shared), self.pattern(tap_dim, shared)
        outs, taps = blocks[out_dim], blocks[tap_dim]
        slide, held = None, None
        if moved and moved.slide.dim in (out_dim, tap_dim):
            slide = (moved.slide.dim == tap_dim, moved.slide.run)
            held = self.pattern(out_dim, moved.held_over), self.pattern(tap_dim, moved.held_over)

        def make() -> Factor:
            geometry = (layer.stride[which], layer.dilation[which], layer.padding[which], layer.input_size[which])
            dims, pairs = (layer.dims[out_dim], layer.dims[tap_dim]), product(outs.tolist(), taps.tolist())
            sizes = [windows(*dims, geometry, pair, patterns, slide, held) for pair in pairs]
            return _factor(sizes, (AXIS[out_dim], AXIS[tap_dim]), (len(outs), len(taps)))

        return self.known.of((which, outs.tobytes(), taps.tobytes(), patterns, slide, held), make)

    def flow(
        self, operand: str, blocks: Blocks, memory: str, direction: str, held_by: str | None, bits: int, moved: Moved | None = None
    ) -> Flow:
        """Every tile moved once through the memory's port; tiles are those of instances of `held_by` (None: of the PEs)."""
        shared = () if held_by is None else self.array.memories[held_by].shared_over
        port = self.array.memories[memory].ports[self.array.memories[memory].port_of(operand, direction)]
        factors, granule, ratio = self.factors(operand, blocks, shared, moved), port.granule, port.bits_per_cycle // port.granule

        key = (*(f.number for f in factors), "flow", bits, granule)

        def words() -> Flow:
            moved = _sum_over(factors, False, lambda n: _ceil(n * bits, granule))
            return Flow(moved, _product(f.total for f in factors), NONE, NONE, np.asarray(bits))

        def timed() -> Flow:
            cycles = _sum_over(factors, True, lambda n: _ceil(_ceil(n * bits, granule), ratio))
            return replace(self.known.of(key, words), transfers=_product(f.active for f in factors), cycles=cycles)

        return self.known.of((*key, ratio), timed) if self.with_cycles else self.known.of(key, words)


def _ceil(amount: Array, by: int) -> Array:
    return -(-amount // by)


def _sum_over(factors: list[Factor], steps: bool, measure: Callable[[Array], Array]) -> Array:
    """Sum of `measure(product of sizes)` over all combinations of sizes, each as often as it occurs."""
    sizes = often = SINGLE
    for factor in factors:
        values, counts = (factor.step_values, factor.step_counts) if steps else (factor.values, factor.counts)
        sizes, often = (values, counts) if sizes is SINGLE else (_combine(sizes, values), _combine(often, counts))
    weighted = measure(sizes) * often
    return weighted[..., 0] if weighted.shape[-1] == 1 else weighted.sum(axis=-1)


def _combine(a: Array, b: Array) -> Array:
    if a.shape[-1] == 1 or b.shape[-1] == 1:
        return a * b
    product = a[..., :, None] * b[..., None, :]
    return product.reshape(*product.shape[:-2], -1)


def _product(arrays: Iterable[Array]) -> Array:
    product = ONE
    for array in arrays:
        product = array if product is ONE else product * array
    return product


def _place(values: Array, axis: int) -> Array:
    return values.reshape(tuple(len(values) if i == axis else 1 for i in range(RANK)))


def _factor(sizes: list[Sizes], axes: tuple[int, ...], shape: tuple[int, ...]) -> Factor:
    """Lay sizes (in C order over `shape`) on their lattice axes, padded with zero counts to one length."""

    def lay(rows: list[tuple[int, ...]]) -> Array:
        width = max(1, *(len(row) for row in rows)) if len(rows) > 1 else max(1, len(rows[0]))
        table = np.array([row + (0,) * (width - len(row)) for row in rows], np.int64).reshape(*shape, width)
        order = np.argsort(axes)
        spread = [1] * RANK + [width]
        for place, axis in enumerate(axes):
            spread[axis] = shape[place]
        return table.transpose(*order, len(axes)).reshape(spread)

    values, counts, step_values, step_counts = (
        lay([getattr(s, name) for s in sizes]) for name in ("values", "counts", "step_values", "step_counts")
    )
    total, active = (values * counts).sum(axis=-1), (counts * (values > 0)).sum(axis=-1)
    return Factor(values, counts, step_values, step_counts, total, active, step_values.max(axis=-1), next(NUMBERS))


def boundary_flows(
    unrolled: Unrolled, operand: str, place: int, blocks: Blocks, returned: Array | None = None, slide: Slide | None = None
) -> dict[tuple[str, str], Flow]:
    """Flows {(memory, direction): Flow} at the boundary below memory `place` of the operand's ladder.

    `blocks` are those at the boundary's refill position (all ones for O at the PEs). For O, `returned` says how often each
    tile comes back from the memory above; when not given, the least it can be. With `slide`, a memory that streams its input
    keeps what two neighbouring tiles share.
    """
    ladder = unrolled.array.ladder(operand)
    above, below = ladder[place], ladder[place - 1] if place else None
    if operand == "O":
        return _output_flows(unrolled, above, below, blocks, returned)
    shared_above = unrolled.array.memories[above].shared_over
    others = [d for d in DIMENSIONS if d not in RELEVANT[operand]]
    steps = unrolled.count(others, blocks)
    bits: int = getattr(unrolled.layer.bits, operand)
    moved = Moved(slide, unrolled.array.memories[below].shared_over) if slide and below else None
    read = unrolled.flow(operand, blocks, above, "rd_down", above, bits, moved).times(unrolled.active(others, blocks, shared_above), steps)
    flows = {(above, "rd_down"): read}
    if below:
        written = unrolled.flow(operand, blocks, below, "wr_down", below, bits, moved)
        flows[below, "wr_down"] = written.times(unrolled.active(others, blocks, unrolled.array.memories[below].shared_over), steps)
    return flows


def _output_flows(unrolled: Unrolled, above: str, below: str | None, blocks: Blocks, returned: Array | None) -> dict[tuple[str, str], Flow]:
    memories, widths = unrolled.array.memories, unrolled.layer.bits
    steps = unrolled.count(REDUCTION, blocks)
    back = steps - 1 if returned is None else returned
    visits = unrolled.active(REDUCTION, blocks, memories[above].shared_over)

    def flow(memory: str, direction: str, finished: bool = False) -> Flow:
        return unrolled.flow("O", blocks, memory, direction, memory, widths.F if finished else widths.O)

    def up(memory: str, direction: str) -> Flow:
        """What goes up is finished when no reduction is left outside; at the PEs it never counts as such."""
        partial = flow(memory, direction)
        return flow(memory, direction, True).where(steps == 1, partial) if below and widths.F != widths.O else partial

    flows = {
        (above, "wr_up"): up(above, "wr_up").times(visits, steps),
        (above, "rd_down"): flow(above, "rd_down").times(back, np.minimum(steps - 1, back)),
    }
    if below:
        leaving = unrolled.active(REDUCTION, blocks, memories[below].shared_over)
        # sums that are still to be added to those of other lanes on the way are not finished either
        between = set(memories[above].shared_over) - set(memories[below].shared_over)
        added = any(d in REDUCTION and f > 1 for axis in between for d, f in unrolled.spatial.get(axis, ()))
        flows[below, "rd_up"] = (flow if added else up)(below, "rd_up").times(leaving, steps)
        flows[below, "wr_down"] = flow(below, "wr_down").times(back, np.minimum(steps - 1, back))
    return flows


def returned_partials(unrolled: Unrolled, points: list[Blocks]) -> list[Array]:
    """How often each O tile comes back at every boundary, PEs first; `points` are the boundaries' blocks."""
    ladder, memories = unrolled.array.ladder("O"), unrolled.array.memories
    returned: list[Array] = [np.zeros(1, np.int64)] * len(points)
    came_down = np.zeros((1,) * RANK, np.int64)
    for place in reversed(range(len(points))):
        shared = memories[ladder[place]].shared_over
        visits = unrolled.active(REDUCTION, points[place], shared)
        outermost = place == len(points) - 1
        residencies = np.ones((1,) * RANK, np.int64) if outermost else unrolled.active(REDUCTION, points[place + 1], shared)
        came_down = returned[place] = visits - residencies + came_down
    return returned
