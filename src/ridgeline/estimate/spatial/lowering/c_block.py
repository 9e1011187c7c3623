"""The innermost part of the C: accumulators in registers, operands loaded once for all that use them.

    unrolled loops ku, pu around vector loop q:

      vec acc0 = {0}, acc1 = {0}, …                  one for every turn of the unrolled loops
      for c, r, s:                                   the reduction, innermost of the loops outside
        const vec i0 = I[…], w0 = W[…] …             each distinct operand once
        acc0 += w0 * i0; …
      O[…] = acc0; …                                 += where the reduction goes on outside

Tails. Turns and lanes of B, G, K, P, Q past the edge are computed from clamped or padded operands and not stored. Turns and
lanes of C, R, S past the edge are left out of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from ..layer import REDUCTION, RELEVANT, Layer
from .c_input import InputAccess, input_access
from .c_terms import Sum, offset_of, turns
from .nest import Guard, Loop, Nest

Point = Mapping[str, int]
"""A turn of every unrolled loop of the block."""


@dataclass(frozen=True, slots=True)
class Block:
    """The trailing unrolled loops, and the vector loop where there is one."""

    layer: Layer
    outside: tuple[Loop, ...]
    unrolled: tuple[Loop, ...]
    vector: Loop | None
    guards: tuple[Guard, ...]
    """Those that a loop of the block takes part in; what the loops outside hold already is not repeated."""
    access: InputAccess
    overrun: Mapping[str, int]

    @property
    def width(self) -> int:
        return self.vector.extent if self.vector else 1

    @property
    def type(self) -> str:
        return "vec" if self.vector else "T"

    @property
    def sums_lanes(self) -> bool:
        return self.vector is not None and self.vector.dim in REDUCTION

    def points(self) -> list[Point]:
        names = [loop.index for loop in self.unrolled]
        return [dict(zip(names, turn, strict=True)) for turn in product(*(range(loop.extent) for loop in self.unrolled))]

    def index(self, point: Point, lane: str = "") -> dict[str, Sum]:
        """The index of every dimension at a point, kept inside the layer; with `lane`, of that lane of the vector."""
        found = {}
        for dim, size in self.layer.dims.items():
            terms = [(loop.index, loop.step) for loop in self.outside if loop.dim == dim]
            if lane and self.vector and self.vector.dim == dim:
                terms.append((lane, self.vector.step))
            index = Sum(tuple(terms), sum(point[loop.index] * loop.step for loop in self.unrolled if loop.dim == dim))
            # P and Q need no clamp: the padded copy is large enough
            found[dim] = Sum(((f"least({index}, {size - 1})", 1),)) if self.overrun[dim] and dim not in "PQ" else index
        return found

    def offset(self, operand: str, point: Point, lane: str = "") -> Sum:
        index = self.index(point, lane)
        return self.access.offset(index) if operand == "I" else offset_of(index, strides_of(self.layer, operand))

    def lane_stride(self, operand: str) -> int | None:
        """Elements between neighbouring lanes; 0: all lanes use the same one; None: not a fixed number."""
        if self.vector is None or self.vector.dim not in RELEVANT[operand]:
            return 0
        strides = self.access.strides() if operand == "I" else strides_of(self.layer, operand)
        stride = strides.get(self.vector.dim)
        return None if stride is None else stride * self.vector.step

    def done(self, guard: Guard, point: Point) -> Sum:
        """How much of a guard's limit lane 0 of a point has used up."""
        factors = dict(guard.terms)
        outside = {loop.index for loop in self.outside}
        return Sum(tuple(t for t in guard.terms if t[0] in outside), sum(factors.get(name, 0) * turn for name, turn in point.items()))

    def condition(self, point: Point, *, reduction: bool) -> str:
        """Whether lane 0 of a point exists, as far as the loops outside do not see to that already; 1: always, 0: never."""
        tests = []
        for guard in self.guards:
            if (guard.dim in REDUCTION) != reduction or not guard.names() & set(point):
                continue
            done = self.done(guard, point)
            if done.terms:
                tests.append(f"{done} < {guard.limit}")
            elif done.constant >= guard.limit:
                return "0"
        return " && ".join(tests) or "1"

    def lanes(self, point: Point) -> str:
        """How many lanes exist at a point."""
        found = str(self.width)
        for guard in self._lane_guards():
            found = turns(found, guard.limit, self.done(guard, point), dict(guard.terms)[self.vector.index if self.vector else ""])
        return found

    def _lane_guards(self) -> list[Guard]:
        return [guard for guard in self.guards if self.vector and self.vector.index in guard.names()]

    def zero_lines(self) -> Iterator[str]:
        zero = "{0}" if self.vector else "0"
        names = [f"acc{number} = {zero}" for number in range(len(self.points()))]
        for start in range(0, len(names), 8):
            yield f"{self.type} {', '.join(names[start : start + 8])};"

    def multiply_lines(self) -> Iterator[str]:
        """Load and multiply-add, one scope for each turn of the unrolled reduction loops."""
        groups: dict[str, list[tuple[int, Point]]] = {}
        for number, point in enumerate(self.points()):
            reduced = [f"{loop.index}={point[loop.index]}" for loop in self.unrolled if loop.dim in REDUCTION]
            groups.setdefault(" ".join(reduced), []).append((number, point))
        for points in groups.values():
            yield from _scope(self.condition(points[0][1], reduction=True), self._group_lines(points), alone=len(groups) == 1)

    def _group_lines(self, points: list[tuple[int, Point]]) -> Iterator[str]:
        named: dict[tuple[str, str], str] = {}
        for number, point in points:
            used = []
            for operand in ("W", "I"):
                key = (operand, str(self.offset(operand, point)))
                if key not in named:
                    named[key] = operand.lower() + str(sum(known == operand for known, _ in named))
                    yield from self._load_lines(named[key], operand, point, key[1])
                used.append(named[key])
            yield f"acc{number} += {used[0]} * {used[1]};"

    def _load_lines(self, name: str, operand: str, point: Point, offset: str) -> Iterator[str]:
        source, stride = self.access.name if operand == "I" else "W", self.lane_stride(operand)
        masked = self.sums_lanes and bool(self._lane_guards())
        if stride == 0:
            yield f"const T {name} = {source}[{offset}];"
        elif stride == 1 and not masked and not self._clamped(operand):
            yield f"const vec {name} = *(const vec *)({source} + {offset});"
        else:
            element = f"{source}[{self.offset(operand, point, 'v')}]"
            chosen = f"v < {self.lanes(point)} ? {element} : 0" if masked else element
            yield f"T {name}_[{self.width}];"
            yield f"for (long v = 0; v < {self.width}; ++v) {name}_[v] = {chosen};"
            yield f"const vec {name} = *(const vec *){name}_;"

    def _clamped(self, operand: str) -> bool:
        """Whether lanes past the edge would read outside the operand."""
        return self.vector is not None and bool(self.overrun[self.vector.dim]) and not (operand == "I" and self.vector.dim in "PQ")

    def store_lines(self, assign: str) -> Iterator[str]:
        """Each output once, from the accumulators that share it; `assign` is = or +=."""
        sums: dict[str, list[int]] = {}
        first: dict[str, Point] = {}
        for number, point in enumerate(self.points()):
            key = " ".join(f"{loop.index}={point[loop.index]}" for loop in self.unrolled if loop.dim not in REDUCTION)
            sums.setdefault(key, []).append(number)
            first.setdefault(key, point)
        for key, numbers in sums.items():
            added = " + ".join(f"acc{number}" for number in numbers)
            condition = self.condition(first[key], reduction=False)
            if condition != "0":
                yield ("" if condition == "1" else f"if ({condition}) ") + self._store_one(first[key], added, assign)

    def _store_one(self, point: Point, added: str, assign: str) -> str:
        output = f"O[{self.offset('O', point)}]"
        if self.vector is None:
            return f"{output} {assign} {added};"
        # through memory: indexing a vector by a variable would keep the accumulator out of registers
        each = f"T each[{self.width}]; *(vec *)each = {added};"
        if self.sums_lanes:
            return f"{{ {each} T sum = 0; for (long v = 0; v < {self.width}; ++v) sum += each[v]; {output} {assign} sum; }}"
        lanes = self.lanes(point)
        some = f"{{ {each} for (long v = 0; v < {lanes}; ++v) O[{self.offset('O', point, 'v')}] {assign} each[v]; }}"
        if self.lane_stride("O") != 1 or (lanes.isdigit() and int(lanes) < self.width):
            return some
        whole = f"*(vec *)(O + {self.offset('O', point)}) {assign} {added};"
        return whole if lanes.isdigit() else f"{{ if ({lanes} == {self.width}) {whole} else {some} }}"


def _scope(condition: str, lines: Iterator[str], *, alone: bool) -> Iterator[str]:
    """Lines under a condition; plain where it always holds and their names meet no others, nothing where it never does."""
    if condition == "1" and alone:
        yield from lines
    elif condition != "0":
        yield "{" if condition == "1" else f"if ({condition}) {{"
        yield from ("  " + line for line in lines)
        yield "}"


def block_of(nest: Nest) -> Block:
    """The block of a nest without loops of one turn."""
    loops, start = nest.loops, len(nest.loops)
    while start and loops[start - 1].kind in ("unrolled", "vector"):
        start -= 1
    inner = loops[start:]
    vector = inner[-1] if inner and inner[-1].kind == "vector" else None
    names = {loop.index for loop in inner}
    guards = tuple(guard for guard in nest.guards if guard.names() & names)
    overrun = dict.fromkeys(nest.layer.dims, 0)
    for dim in {guard.dim for guard in guards} - set(REDUCTION):
        last = nest.layer.dims[dim] - 1
        overrun[dim] = max(0, min(last, _farthest(loops[:start], dim)) + _farthest(inner, dim) - last)
    access = input_access(nest.layer, overrun, vector.dim if vector else "")
    return Block(nest.layer, loops[:start], inner[:-1] if vector else inner, vector, guards, access, overrun)


def _farthest(loops: tuple[Loop, ...], dim: str) -> int:
    return sum((loop.extent - 1) * loop.step for loop in loops if loop.dim == dim)


def strides_of(layer: Layer, operand: str) -> dict[str, int]:
    """Elements between neighbours in a contiguous W [G*K, C, R, S] or O [B, G*K, P, Q]."""
    strides: dict[str, int] = {}
    reach = 1
    for dim in reversed("GKCRS" if operand == "W" else "BGKPQ"):
        strides[dim] = reach
        reach *= layer.dims[dim]
    return dict(reversed(strides.items()))
