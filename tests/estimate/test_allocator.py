"""The allocator model: conserved bytes, glibc's rules one by one, and the real thing in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import advise, estimate
from ridgeline.estimate.allocator import LARGEST_THRESHOLD, Heap, faulted_bytes
from tests.estimate.support import pointwise, processor, workload

MB = 1 << 20


def test_a_request_over_32_mib_faults_every_time() -> None:
    heap = Heap()
    for _ in range(3):
        heap.free(heap.malloc(40 * MB))
    assert heap.mapped_bytes == 3 * 40 * MB and heap.threshold < LARGEST_THRESHOLD


def test_a_smaller_one_moves_into_the_heap_after_its_first_free() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MB))  # mmapped: raises the threshold to its size
    assert heap.threshold == 8 * MB and heap.trim == 16 * MB
    for _ in range(5):
        heap.free(heap.malloc(6 * MB))
    assert heap.mapped_bytes == 8 * MB and heap.heap_bytes == 6 * MB  # the heap keeps it from then on


def test_a_large_free_top_goes_back() -> None:
    heap = Heap()
    heap.free(heap.malloc(4 * MB))
    held = [heap.malloc(3 * MB) for _ in range(4)]
    for start in held:
        heap.free(start)  # 12 MB free at the top, over twice 4 MB
    before = heap.heap_bytes
    heap.malloc(3 * MB)
    assert heap.heap_bytes > before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60))
def test_chunks_never_overlap_and_no_byte_is_lost(steps: list[tuple[bool, int]]) -> None:
    heap, held = Heap(), []
    for take, size in steps:
        if take or not held:
            held.append(heap.malloc(size * MB // 4))
        else:
            heap.free(held.pop(size % len(held)))
        place = 0
        for start in heap.starts:  # the heap is tiled by its chunks up to the top
            assert start == place
            place += heap.chunks[start][0]
        assert place == heap.end
        assert sum(1 for s, (_, free) in heap.chunks.items() if not free) + len(heap.mapped) == len(held)


def test_faults_are_paid_as_overhead_and_advised_against() -> None:
    big = 12 * MB  # elements: 48 MiB results
    ops = (pointwise("a", big, "x", "y"), pointwise("b", big, "y", "z"))
    assert faulted_bytes(ops) == [4 * big, 4 * big]
    spec = processor(fault_s_per_byte=3e-10)
    profile = estimate(workload(*ops), spec)
    assert profile.rows[0].overhead_s == pytest.approx(4 * big * 3e-10) and "page faults" in profile.rows[0].cause
    kept = {a.change: a.predicted_speedup for a in advise(profile)}["keep memory"]
    assert kept == pytest.approx(profile.total.time_s / estimate(workload(*ops), processor()).total.time_s)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of Linux")
def test_the_real_allocator_does_what_the_model_says() -> None:
    code = (
        "import resource, torch\n"
        "x = torch.rand(12 << 20)\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(3): y = torch.relu(x); z = torch.relu(y); del y, z\n"
        "before = faults()\n"
        "for _ in range(5): y = torch.relu(x); z = torch.relu(y); del y, z\n"
        "print((faults() - before) * resource.getpagesize() / 5)\n"
    )
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=clean)
    if done.returncode:
        pytest.skip(f"torch does not start in a bare environment: {done.stderr[-200:]}")
    ops = (pointwise("a", 12 * MB, "x", "y"), pointwise("b", 12 * MB, "y", "z"))
    measured = float(done.stdout)
    assert measured == 0 or measured == pytest.approx(sum(faulted_bytes(ops)), rel=0.05)  # 0: another allocator or huge pages
