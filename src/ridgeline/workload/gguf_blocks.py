"""The tensor formats of GGUF files: how many bytes a block takes, and what numbers it stands for.

    uint8 [blocks, bytes] ──DEQUANTISE[kind]──> float32 [blocks, values]
      Q4_0  d · (q - 8)      Q4_1  d · q + m      Q5_0  d · (q - 16)      Q5_1  d · q + m      Q8_0  d · q      blocks of 32
      Q4_K, Q5_K  (d · s_j) · q - dmin · m_j, j = 8 groups of 32      Q6_K  d · s_j · (q - 32), j = 16 groups of 16      blocks of 256

d, m and dmin are fp16, s and m_j 6-bit (Q6_K: int8). In blocks of 32 the low halves of the 16 code bytes are values 0..15, the
high halves values 16..31. Sums and products are float32, in the order the formulas show.
Ref: the ggml block layouts (block_q4_0, …) and the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

Bytes = NDArray[numpy.uint8]
Floats = NDArray[numpy.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """One tensor format: its number in a file, and values and bytes of a block."""

    name: str
    values: int
    bytes: int


KINDS = {
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24), 8: Kind("Q8_0", 32, 34), 9: Kind("Q8_1", 32, 36), 10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144), 13: Kind("Q5_K", 256, 176), 14: Kind("Q6_K", 256, 210), 15: Kind("Q8_K", 256, 292),
    24: Kind("I8", 1, 1), 25: Kind("I16", 1, 2), 26: Kind("I32", 1, 4), 27: Kind("I64", 1, 8), 28: Kind("F64", 1, 8),
    30: Kind("BF16", 1, 2),
}  # fmt: skip
"""Formats whose size is known, so that a file holding them can be opened; DEQUANTISE lists those that can be read."""


def half(data: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each block: float32 [blocks, 1]."""
    return data[:, at : at + 2].copy().view("<f2").astype(numpy.float32)


def nibbles(data: Bytes) -> Bytes:
    """uint8 [blocks, n] to codes [blocks, 2n]: all low halves, then all high halves."""
    return numpy.concatenate((data & 15, data >> 4), axis=1)


def fifth_bits(data: Bytes) -> Bytes:
    """Four bytes a block to the fifth bit of its 32 codes, already shifted to its place."""
    return numpy.unpackbits(data, axis=1, bitorder="little") << numpy.uint8(4)


def _q4_0(data: Bytes) -> Floats:
    return half(data, 0) * (nibbles(data[:, 2:]).astype(numpy.float32) - 8)


def _q4_1(data: Bytes) -> Floats:
    return half(data, 0) * nibbles(data[:, 4:]) + half(data, 2)


def _q5_0(data: Bytes) -> Floats:
    return half(data, 0) * ((nibbles(data[:, 6:]) | fifth_bits(data[:, 2:6])).astype(numpy.float32) - 16)


def _q5_1(data: Bytes) -> Floats:
    return half(data, 0) * (nibbles(data[:, 8:]) | fifth_bits(data[:, 4:8])) + half(data, 2)


def _q8_0(data: Bytes) -> Floats:
    return half(data, 0) * data[:, 2:].copy().view(numpy.int8)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes to 8 scales and 8 minimums of 6 bits, [blocks, 8, 1] each.

    Bytes 0..3 and 4..7 hold the first four of each in their low 6 bits; bytes 8..11 hold the low 4 bits of the last four (scale in
    the low half, minimum in the high half), whose top 2 bits fill the upper ends of bytes 0..7.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = numpy.concatenate((first & 63, (last & 15) | (first >> 6 << 4)), axis=1)
    minimums = numpy.concatenate((second & 63, (last >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(numpy.float32)[:, :, None], minimums.astype(numpy.float32)[:, :, None]


def _scaled_groups(data: Bytes, codes: Bytes) -> Floats:
    """What Q4_K and Q5_K share: 8 groups of 32 codes with 6-bit scales and minimums. codes [blocks, 8, 32]."""
    scales, minimums = _six_bits(data[:, 4:16])
    steps, floors = half(data, 0)[:, :, None] * scales, half(data, 2)[:, :, None] * minimums
    return (steps * codes - floors).reshape(len(data), 256)


def _pairs(data: Bytes) -> Bytes:
    """128 bytes to 8 groups of 32 codes: each 32 bytes hold one group in their low halves and the next in their high halves."""
    quarters = data.reshape(len(data), 4, 32)
    return numpy.stack((quarters & 15, quarters >> 4), axis=2).reshape(len(data), 8, 32)


def _q4_k(data: Bytes) -> Floats:
    return _scaled_groups(data, _pairs(data[:, 16:]))


def _q5_k(data: Bytes) -> Floats:
    # Bit j of byte l is the fifth bit of value l in group j.
    high = numpy.unpackbits(data[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)  # [blocks, 8, 32]
    return _scaled_groups(data, _pairs(data[:, 48:]) | (high << numpy.uint8(4)))


def _q6_k(data: Bytes) -> Floats:
    low = data[:, :128].reshape(-1, 2, 2, 32)  # [blocks, half of 128 values, byte row, 32]
    high = data[:, 128:192].reshape(-1, 2, 1, 32)
    low4 = numpy.concatenate((low & 15, low >> 4), axis=2)  # [blocks, 2, 4, 32]
    high2 = numpy.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low4 | high2 << 4).astype(numpy.float32) - 32  # [blocks, 2, 4, 32]
    scales = data[:, 192:208].copy().view(numpy.int8).astype(numpy.float32)
    steps = half(data, 208) * scales  # [blocks, 16]
    values: Floats = (steps[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)
    return values


def _bf16(data: Bytes) -> Floats:
    widened: Floats = (data.copy().view("<u2").astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)
    return widened


def _plain(dtype: str) -> Callable[[Bytes], Floats]:
    return lambda data: data.copy().view(dtype).astype(numpy.float32)


DEQUANTISE: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _plain("<f4"), "F16": _plain("<f2"), "F64": _plain("<f8"), "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Kind → uint8 [blocks, bytes of a block] to float32 [blocks, values of a block]."""


def split_blocks(kind: str, data: Bytes) -> tuple[Bytes, Any, Any]:
    """Codes uint8 [blocks, 32], scale fp16 [blocks], minimum fp16 [blocks] or None, of the formats that are one line a block.

    Q4_0 codes 0..15 stand for scale · (code - 8); Q4_1 codes 0..15 for scale · code + minimum; Q8_0 codes are int8 seen as uint8.
    """
    scale = data[:, 0:2].copy().view("<f2")[:, 0]
    if kind == "Q4_0":
        return nibbles(data[:, 2:]), scale, None
    if kind == "Q4_1":
        return nibbles(data[:, 4:]), scale, data[:, 2:4].copy().view("<f2")[:, 0]
    if kind == "Q8_0":
        return data[:, 2:].copy(), scale, None
    raise KeyError(kind)
