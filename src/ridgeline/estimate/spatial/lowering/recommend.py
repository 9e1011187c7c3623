"""A loop nest that suits this machine's CPU, built from the transforms alone.

    Layer ──recommended──> b g co ko po qo | ci r s | ku pu qi        outside | summed in registers | written out and vectorised

    vector      Q, whose neighbours lie next to each other in I and O; P where Q has one index (matmul). One output a channel
                (batch-1 linear): C if the sum may be taken in another order, else scalar code
    block       ku outputs times pu vectors in accumulators. A step of the reduction costs the larger of its multiply-adds
                (ku * pu), its loads (ku + pu) and the latency the accumulators must cover; of the blocks the registers hold,
                the one with the fewest steps * cost over the layer, then the least data loaded
    tile of C   as many input channels as stay in the second-level cache while all outputs are computed from them

The order of the sums is the channel tiles', then c, r, s within one: see transforms on what that means for floats.
"""

from __future__ import annotations

from ..layer import Layer
from .nest import Nest, naive
from .run_c import registers
from .transforms import reorder, tile, unroll, vectorise

LATENCY = 8
"""Accumulators needed to keep two multiply-add units with a latency of four cycles busy."""
CACHE_ELEMENTS = 128 * 1024
"""Elements of 4 bytes one channel tile may take: half of a second-level cache of 1 MiB."""
LEAST_STEPS, MOST_STEPS = 128, 256
"""Steps of the reduction between emptying and storing the accumulators: fewer would cost time. More would cost accuracy, as the
rounding error of a sum taken in one go grows with its length; in blocks of 256 it stays within twice that of torch."""
VECTOR_LOAD = 3
"""Weight of a vector of inputs against one weight, which is one of 16 in its cache line: measured on 1 x 1 convolutions."""


def recommended(layer: Layer, lanes: int | None = None, vector_registers: int | None = None, *, reassociate: bool = False) -> Nest:
    """A register- and cache-tiled, unrolled, vectorised nest; lanes and registers of this machine unless given."""
    if lanes is None or vector_registers is None:
        found = registers()
        lanes, vector_registers = lanes or found[0], vector_registers or found[1]
    if layer.dims["P"] * layer.dims["Q"] == 1:
        return _one_output_a_channel(layer, lanes, vector_registers, reassociate)
    along = "q" if layer.dims["Q"] > 1 else "p"
    width = _width(layer.dims[along.upper()], lanes)
    nest = tile(naive(layer, "b g c k p q r s"), along, width)
    rows = nest.loop("p" if along == "q" else "po")
    outputs, vectors = block_size(layer.dims["K"], rows.extent, vector_registers)
    nest = unroll(unroll(nest, "k", outputs), rows.index, vectors)
    nest = tile(nest, "c", channel_tile(layer))
    return vectorise(_blocked(nest, ["ci", "r", "s"], [f"{along}i"]), f"{along}i", width)


def _one_output_a_channel(layer: Layer, lanes: int, vector_registers: int, reassociate: bool) -> Nest:
    """Dot products: nothing to vectorise but the sum itself."""
    nest = unroll(naive(layer, "b g k c r s"), "k", min(layer.dims["K"], LATENCY, vector_registers // 2))
    if not reassociate or layer.dims["C"] == 1:
        return _blocked(nest, ["c", "r", "s"], [])
    width = _width(layer.dims["C"], lanes)
    return vectorise(_blocked(tile(nest, "c", width), ["co", "r", "s"], ["ci"]), "ci", width, reassociate=True)


def _blocked(nest: Nest, summed: list[str], vector: list[str]) -> Nest:
    """Everything else outside, then the sum, then what is written out, then the vector."""
    written = [loop.index for loop in nest.loops if loop.kind == "unrolled"]
    outside = [name for name in nest.order if name not in (*written, *vector, *summed)]
    return reorder(nest, [*outside, *summed, *written, *vector])


def block_size(outputs: int, rows: int, vector_registers: int) -> tuple[int, int]:
    """(turns of K, vectors of P) to keep in accumulators."""
    best = (float("inf"), 0, 1, 1)
    for ku in range(1, min(outputs, 16) + 1):
        for pu in range(1, min(rows, 8) + 1):
            steps = -(-outputs // ku) * -(-rows // pu)
            if ku * pu + pu + 1 <= vector_registers:
                best = min(best, (steps * max(ku * pu, ku + pu, LATENCY), steps * (ku + VECTOR_LOAD * pu), ku, pu))
    return best[2], best[3]


def channel_tile(layer: Layer) -> int:
    """Input channels whose planes fit the cache, but enough of them to sum for a while."""
    plane, taps = layer.window(0)[0] * layer.window(1)[0], layer.dims["R"] * layer.dims["S"]
    fits = min(CACHE_ELEMENTS // plane, MOST_STEPS // taps)
    return min(layer.dims["C"], max(fits, -(-LEAST_STEPS // taps)))


def _width(indices: int, lanes: int) -> int:
    """Lanes of a register, or the power of two that holds a shorter row."""
    return min(lanes, 1 << (indices - 1).bit_length())
