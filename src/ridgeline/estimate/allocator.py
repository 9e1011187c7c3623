"""Page faults of a CPU run: which bytes the C allocator gives back to the system and must fault in again.

    ops in order ──malloc outputs and workspace, free what is dead──> Heap (glibc's rules) ──> bytes faulted in, by op
      a request: best-fitting free chunk, else the top of the heap, else mmap (at or over the threshold), else a longer heap
      a free:    an mmapped chunk goes back at once, and raises the threshold to its size (to 32 MiB at most);
                 a heap chunk joins its neighbours; a free top over twice the threshold goes back

The pass is repeated until it settles; bytes of the last pass count, those of a trimmed heap by half. Every byte faulted in costs
`fault_s_per_byte`, measured by calibration. Ref: glibc malloc.c (dynamic mmap threshold). Not modelled: small requests, other
arenas, other allocators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..workload.graph import Op

SMALLEST = 64 * 1024
LARGEST_THRESHOLD = 32 << 20
FIRST_THRESHOLD = 128 * 1024
PAD = 128 * 1024
PASSES = 4
# A free top goes back only if nothing small lies above it, which differs between two starts of the same program
# (benchmarks/page_faults.py shows it). Half is what to expect.
TRIMMED = 0.5


class Heap:
    """glibc's main arena, as far as large requests see it."""

    def __init__(self) -> None:
        self.threshold = self.trim = FIRST_THRESHOLD
        self.starts: list[int] = []  # chunks by address, used and free, without the top
        self.chunks: dict[int, tuple[int, bool]] = {}  # start → (size, free)
        self.end = 0  # where the top begins
        self.top = 0  # bytes of the top that are there
        self.touched = 0  # heap addresses below this have been faulted in
        self.mapped: dict[int, int] = {}
        self.mapped_bytes = 0  # faulted in because they were mmapped
        self.heap_bytes = 0  # faulted in because the heap had been trimmed
        self._next_map = -1

    def malloc(self, size: int) -> int:
        """The address of a new chunk; a negative one is mmapped."""
        fits = [(s, start) for start, (s, free) in self.chunks.items() if free and s >= size]
        if fits:
            found, start = min(fits)
            self._split(start, found, size)
            return start
        if self.top < size:
            if size >= self.threshold:
                self._next_map -= 1
                self.mapped[self._next_map] = size
                self.mapped_bytes += size
                return self._next_map
            self.top = size + PAD
        start = self.end
        self._insert(start, size, False)
        self.end += size
        self.top -= size
        self._touch(self.end)
        return start

    def _touch(self, until: int) -> None:
        if until > self.touched:
            self.heap_bytes += until - self.touched
            self.touched = until

    def _insert(self, start: int, size: int, free: bool) -> None:
        if start not in self.chunks:
            self.starts.insert(bisect_left(self.starts, start), start)
        self.chunks[start] = (size, free)

    def _remove(self, start: int) -> None:
        del self.starts[bisect_left(self.starts, start)]
        del self.chunks[start]

    def _split(self, start: int, found: int, size: int) -> None:
        self.chunks[start] = (size, False)
        if found - size >= 4096:
            self._insert(start + size, found - size, True)
        else:
            self.chunks[start] = (found, False)

    def free(self, start: int) -> None:
        if start < 0:
            size = self.mapped.pop(start)
            if self.threshold < size <= LARGEST_THRESHOLD:
                self.threshold, self.trim = size, 2 * size
            return
        size, _ = self.chunks[start]
        index = bisect_left(self.starts, start)
        if index + 1 < len(self.starts) and self.chunks[after := self.starts[index + 1]][1]:
            size += self.chunks[after][0]
            self._remove(after)
        if index > 0 and self.chunks[before := self.starts[index - 1]][1]:
            self._remove(start)
            start, size = before, self.chunks[before][0] + size
        self.chunks[start] = (size, True)
        if start + size == self.end:
            self._remove(start)
            self.end, self.top = start, self.top + size
            if self.top > self.trim:
                self.top = PAD
                self.touched = min(self.touched, self.end + PAD)


def faulted_bytes(ops: Sequence[Op]) -> list[int]:
    """Bytes faulted in while each op runs, once passes repeat alike."""
    sizes, last = _lifetimes(ops)
    heap = Heap()
    found: list[int] = []
    for _ in range(PASSES):
        found = _one_pass(ops, heap, sizes, last)
    return found


def _lifetimes(ops: Sequence[Op]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each activation an op makes, and the last op that touches it."""
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    seen: set[str] = set()
    for index, op in enumerate(ops):
        for operand in op.inputs:
            seen.add(operand.value)
        for operand in op.outputs:
            if operand.role == "activations" and operand.value not in seen:
                sizes[operand.value] = max(sizes.get(operand.value, 0), operand.bytes)
        for operand in op.operands:
            last[operand.value] = index
            seen.add(operand.value)
    for start, end in _calls(ops):  # Python holds what a module was called with until the call returns
        made_inside = {o.value for op in ops[start : end + 1] for o in op.outputs}
        for op in ops[start : end + 1]:
            for operand in op.inputs:
                if operand.value in sizes and operand.value not in made_inside:
                    last[operand.value] = max(last[operand.value], end)
    return sizes, last


def _calls(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """(first, last) op of every module call, from the runs of ops that share a layer prefix."""
    found = []
    open_at: dict[str, int] = {}
    for index, op in enumerate([*ops, None]):
        parts = op.layer.split(".") if op and op.layer else []
        here = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        for prefix in [p for p in open_at if p not in here]:
            found.append((open_at.pop(prefix), index - 1))
        for prefix in here - open_at.keys():
            open_at[prefix] = index
    return found


def _one_pass(ops: Sequence[Op], heap: Heap, sizes: dict[str, int], last: dict[str, int]) -> list[int]:
    held: dict[str, int] = {}
    found = []
    for index, op in enumerate(ops):
        mapped, trimmed = heap.mapped_bytes, heap.heap_bytes
        for operand in op.outputs:
            size = sizes.get(operand.value, 0)
            if operand.value not in held and size >= SMALLEST:
                held[operand.value] = heap.malloc(size)
        scratch = [heap.malloc(size) for size in workspace(op) if size >= SMALLEST]
        for start in reversed(scratch):
            heap.free(start)
        for operand in op.operands:
            if last[operand.value] == index and operand.value in held:
                heap.free(held.pop(operand.value))
        found.append(heap.mapped_bytes - mapped + int(TRIMMED * (heap.heap_bytes - trimmed)))
    for start in held.values():
        heap.free(start)
    return found


def workspace(op: Op) -> tuple[int, ...]:
    """Temporary buffers of an op: a convolution of plain layout is reordered into blocks and back."""
    return tuple(o.bytes for o in (*op.inputs[:1], *op.outputs[:1])) if op.kind == "conv" else ()
