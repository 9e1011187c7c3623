"""The recommended nest is what its docstring says, fits the registers, and is many times faster than the plain one."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy
import pytest
import torch

from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import CompiledLayer, compile_layers, naive, recommended
from ridgeline.estimate.spatial.lowering.recommend import MOST_STEPS, block_size, channel_tile
from tests.estimate.spatial.lowering.cases import convolve, operands

LEAST_SPEEDUP = 5.0
CONV = Layer("conv", {"K": 256, "C": 256, "P": 14, "Q": 14, "R": 3, "S": 3}, padding=(1, 1))


def test_a_convolution_is_blocked_in_registers() -> None:
    nest = recommended(CONV, 16, 32)
    assert nest.order == ("b", "g", "co", "ko", "po", "qo", "ci", "r", "s", "ku", "pu", "qi")
    assert [(loop.index, loop.kind, loop.extent) for loop in nest.loops[-3:]] == [
        ("ku", "unrolled", 8),
        ("pu", "unrolled", 2),
        ("qi", "vector", 16),
    ]
    assert nest.loop("ci").extent * 9 <= MOST_STEPS


def test_a_matmul_is_vectorised_along_its_rows() -> None:
    last = recommended(Layer("matmul", {"P": 100, "K": 64, "C": 64}), 8, 16).loops[-1]
    assert (last.dim, last.kind, last.extent) == ("P", "vector", 8)


def test_a_dot_product_is_vectorised_only_if_its_sum_may_be_reordered() -> None:
    layer = Layer("linear", {"K": 64, "C": 64})
    assert all(loop.kind != "vector" for loop in recommended(layer, 8, 16).loops)
    assert recommended(layer, 8, 16, reassociate=True).loops[-1].dim == "C"


@pytest.mark.parametrize("vector_registers", [16, 32])
def test_the_block_fits_the_registers_and_wastes_little(vector_registers: int) -> None:
    for outputs in (1, 3, 8, 17, 256):
        for rows in (1, 2, 7, 14, 28):
            ku, pu = block_size(outputs, rows, vector_registers)
            assert ku * pu + pu + 1 <= vector_registers
            assert -(-outputs // ku) * ku * -(-rows // pu) * pu <= 1.25 * outputs * rows


def test_a_channel_tile_is_never_more_than_there_are() -> None:
    assert channel_tile(Layer("one", {"C": 2, "P": 500, "Q": 500})) == 2
    assert channel_tile(Layer("large", {"C": 512, "P": 500, "Q": 500})) == 128


def speedup(slow: CompiledLayer, fast: CompiledLayer, rounds: int) -> float:
    """Median time of one over the other, runs interleaved; the best of three such measurements, as other load only hides a speedup."""
    weights, inputs = operands(slow.layer, 1)
    out = numpy.empty_like(slow(weights, inputs))
    fast(weights, inputs)
    found = []
    for _ in range(3):
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(rounds):
            for which, compiled in enumerate((slow, fast)):
                start = perf_counter()
                compiled.run_into(weights, inputs, out)
                times[which].append(perf_counter() - start)
        found.append(median(times[0]) / median(times[1]))
        if found[-1] >= LEAST_SPEEDUP:
            break
    return max(found)


def test_it_is_at_least_five_times_faster_than_the_plain_loops() -> None:
    slow, fast = compile_layers([naive(CONV, "k p q c r s"), recommended(CONV)])
    weights, inputs = operands(CONV, 1)
    expected = convolve(CONV, weights, inputs, torch.float64)
    assert numpy.array_equal(slow(weights, inputs), expected)
    assert numpy.array_equal(fast(weights, inputs), expected)
    assert speedup(slow, fast, rounds=3) >= LEAST_SPEEDUP
    assert speedup(slow, slow, rounds=1) < 2  # and the stopwatch sees when there is none
