"""Triton kernels of weight_only.py and how one is chosen and launched.

    x [M, K] half, q int8 [N, K] or packed int32 [N, K'/8] ──config──> gemv (one row of x, CUDA cores) | dot (tensor cores) | dot + reduce

gemv: as many programs as are resident at once, each taking BN rows of weights in turn. A thread keeps its share of x in registers and reads
the next rows, 128 bits a load, before it multiplies the ones it has: loads stay in flight, and there is no last, half empty wave.
A row longer than a program's span takes several steps, which read x anew and run on from one tile into the next.
Instructions are the limit there, so integers become floats without conversion: a mask and an or put them in the mantissa of a power of
two. int8 subtracts that power (exact). int4 lets it into the product, (16 + n) x or (256 + n) x, and starts the sum at what that adds:
two instructions and 3/8 of a shift a weight, for about 6 of the float32 sum's 24 bits.
dot: out^T = weight @ x^T; weights become small integers in x's dtype, exactly; each group's sums are scaled in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .jit import INTERPRETED, cdiv, empty, jit, launch, tl
from .matmul_kernels import STORED, processors, run_reduce, shared_bytes
from .plan import Plan, planned, start
from .tuning import Config, bucketed, config, space

Optional = torch.Tensor | None
BLOCK = 128
"""Weights of a row that are packed together."""
WIDEST = 16384
"""Weights of a row a gemv program holds at once: longer rows take several steps."""


@jit
def pair(words, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two 16-bit floats of each int32, as float32."""
    if FP16:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = ((words >> 16) << 16).to(tl.float32, bitcast=True)
    return low, high


@jit
def four(both, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four 16-bit floats of each int64, as float32 [1, ..]."""
    a, b = pair(both.to(tl.int32), FP16)
    c, d = pair((both >> 32).to(tl.int32), FP16)
    return a[None, :], b[None, :], c[None, :], d[None, :]


@jit
def fours(x_ptr, index, k):  # type: ignore[no-untyped-def]
    """x at 4 * index and the three after it, in one int64; zeros from k on."""
    return tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + index, mask=index * 4 < k, other=0)


@jit
def apart(words):  # type: ignore[no-untyped-def]
    """[BN, BW] -> four of [BN, BW / 4]: words 0, 1, 2, 3 of each thread's 128 bits."""
    BN: tl.constexpr = words.shape[0]
    BW: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.reshape(words, (BN, BW // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def rows_of(q_ptr, tile, at, n, words, BN: tl.constexpr, BW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of BN rows from `at` on; past the end anything: x is 0 there."""
    rows = tile * BN + tl.arange(0, BN)
    lanes = at + tl.arange(0, BW)
    known = (rows < n)[:, None] & (lanes < words)[None, :]
    return tl.load(q_ptr + rows.to(tl.int64)[:, None] * words + lanes[None, :], mask=known, cache_modifier=".cg")


@jit
def after(tile, step, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile, step) that a program turns to next: past a tile's last step, the next tile's first, so that loads never pause."""
    last = step == STEPS - 1
    return tl.where(last, tile + tl.num_programs(0), tile), tl.where(last, 0, step + 1)


@jit
def keep(quads, k):  # type: ignore[no-untyped-def]
    """0 where there is x, which the compiler cannot know: masks made of it stay in registers, literals are moved there each time."""
    return tl.maximum(quads * 4 - k, 0)


@jit
def byte(words, kept, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """Byte J, signed, times 2^(8 (J % 2)), as float32: exact, by one three-way logic operation and one subtraction."""
    if J >= 2:
        words = words >> 16
    # flipping the sign bit adds 128; the exponent of 2^23 comes in by the same exclusive or
    bits = (words & (kept + (255 << (8 * (J % 2))))[None, :]) ^ (0x4B000000 + (128 << (8 * (J % 2))))
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + (128 << (8 * (J % 2))))


@jit
def bytes_dot(acc, words, kept, both, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + each word's 4 weights times the 4 elements of x beside them."""
    x0, x1, x2, x3 = four(both, FP16)
    acc += byte(words, kept, 0) * x0
    acc += byte(words, kept, 1) * (x1 * 0.00390625)
    acc += byte(words, kept, 2) * x2
    return acc + byte(words, kept, 3) * (x3 * 0.00390625)


@jit
def rows_dot(acc, words, kept, x, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + 16 weights a thread and row."""
    a, b, c, d = apart(words)
    acc = bytes_dot(acc, a, kept, x[0], FP16)
    acc = bytes_dot(acc, b, kept, x[1], FP16)
    acc = bytes_dot(acc, c, kept, x[2], FP16)
    return bytes_dot(acc, d, kept, x[3], FP16)


@jit
def write(acc, tile, n, scale_ptr, bias_ptr, out_ptr):  # type: ignore[no-untyped-def]
    """Sums of acc's rows, scaled, + bias, to out."""
    BN: tl.constexpr = acc.shape[0]
    rows = tile * BN + tl.arange(0, BN)
    total = tl.sum(acc, 1)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + rows, mask=rows < n, other=0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=rows < n, other=0).to(tl.float32)
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), mask=rows < n)


@jit
def beside_bytes(x_ptr, quads, k):  # type: ignore[no-untyped-def]
    """x beside the 16 bytes of each thread."""
    return fours(x_ptr, quads * 4, k), fours(x_ptr, quads * 4 + 1, k), fours(x_ptr, quads * 4 + 2, k), fours(x_ptr, quads * 4 + 3, k)


@jit
def gemv_int8_kernel(x_ptr, q_ptr, scale_ptr, bias_ptr, out_ptr, n, k,  # type: ignore[no-untyped-def]
                     BN: tl.constexpr, BW: tl.constexpr, STEPS: tl.constexpr, FP16: tl.constexpr):  # fmt: skip
    """out [N] = x [K] . q, read as words [N, K / 4], BW of them at a time."""
    quads = tl.arange(0, BW // 4)
    words = k // 4
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN)
    zeros = tl.zeros((BN, BW // 4), dtype=tl.float32)
    if STEPS == 1:
        following = rows_of(q_ptr, start, 0, n, words, BN, BW)  # before x: weights come from further away
        x = beside_bytes(x_ptr, quads, k)
        for tile in range(start, tiles, tl.num_programs(0)):
            current = following
            following = rows_of(q_ptr, tile + tl.num_programs(0), 0, n, words, BN, BW)
            write(rows_dot(zeros, current, keep(quads, k), x, FP16), tile, n, scale_ptr, bias_ptr, out_ptr)
    else:
        tile, step, acc = start, start * 0, zeros
        following = rows_of(q_ptr, start, 0, n, words, BN, BW)
        while tile < tiles:
            current = following
            ahead, at = after(tile, step, STEPS)
            following = rows_of(q_ptr, ahead, at * BW, n, words, BN, BW)
            acc = rows_dot(acc, current, keep(quads, k), beside_bytes(x_ptr, quads + step * (BW // 4), k), FP16)
            if step == STEPS - 1:
                write(acc, tile, n, scale_ptr, bias_ptr, out_ptr)
                acc = zeros
            tile, step = ahead, at


@jit
def turned(words, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words rotated left."""
    return (words << BY) | ((words >> (32 - BY)) & ((1 << BY) - 1))


@jit
def offset_of(J: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `raised` adds to nibble J."""
    return 16.0 if J % 2 == 0 else 256.0


@jit
def raised(words, kept, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """offset_of(J) + nibble J as float32: bits 19-22 of a float from 16 on count in ones, bits 15-18 of one from 256 on."""
    if J == 1 or J == 2:
        words = words << 8
    elif J == 5 or J == 6:
        words = words >> 8
    elif J == 0 or J == 7:
        words = turned(words, 16)
    mask = (kept + (0x00780000 if J % 2 == 0 else 0x00078000))[None, :]
    return ((words & mask) | (0x41800000 if J % 2 == 0 else 0x43800000)).to(tl.float32, bitcast=True)


@jit
def beside_nibbles(x_ptr, quad, k):  # type: ignore[no-untyped-def]
    """x beside the 8 planes of each thread's 4 words."""
    at = (quad // 4) * 32 + quad % 4
    first = fours(x_ptr, at, k), fours(x_ptr, at + 4, k), fours(x_ptr, at + 8, k), fours(x_ptr, at + 12, k)
    return first + (fours(x_ptr, at + 16, k), fours(x_ptr, at + 20, k), fours(x_ptr, at + 24, k), fours(x_ptr, at + 28, k))  # noqa: RUF005


@jit
def nibbles_dot(words, kept, x, shift, FIRST: tl.constexpr, PLANES: tl.constexpr, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: of the 4 words, (nibbles FIRST to FIRST + PLANES, - 8 + shift) times the elements of x beside them."""
    a, b, c, d = words
    acc = tl.zeros(x[0].shape, dtype=tl.float32)[None, :]
    plain = acc
    for j in tl.static_range(FIRST, FIRST + PLANES):
        x0, x1, x2, x3 = four(x[j], FP16)
        total = (x0 + x1) + (x2 + x3)
        acc -= (offset_of(j) + 8.0) * total
        plain += total
    if shift is not None:
        acc += shift * plain
    for j in tl.static_range(FIRST, FIRST + PLANES):
        x0, x1, x2, x3 = four(x[j], FP16)
        acc = raised(a, kept, j) * x0 + acc
        acc = raised(b, kept, j) * x1 + acc
        acc = raised(c, kept, j) * x2 + acc
        acc = raised(d, kept, j) * x3 + acc
    return acc


@jit
def groups_dot(acc, words, kept, x, quad, tile, n, groups, scale_ptr, zero_ptr, GROUP: tl.constexpr, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + 32 weights a thread and row, scaled."""
    BN: tl.constexpr = acc.shape[0]
    SCALES: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP  # per block of 128 weights
    PLANES: tl.constexpr = 8 // SCALES
    parts = apart(words)
    rows = tile * BN + tl.arange(0, BN)
    for s in tl.static_range(SCALES):
        column = ((quad // 4) * 128 + s * PLANES * 16) // GROUP
        place = rows.to(tl.int64)[:, None] * groups + column[None, :]
        known = (rows < n)[:, None] & (column < groups)[None, :]
        scale = tl.load(scale_ptr + place, mask=known, other=0).to(tl.float32)
        shift = None
        if zero_ptr is not None:
            shift = 8.0 - tl.load(zero_ptr + place, mask=known, other=8).to(tl.float32)
        acc += nibbles_dot(parts, kept, x, shift, s * PLANES, PLANES, FP16) * scale
    return acc


@jit
def gemv_int4_kernel(x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, n, k, words, groups,  # type: ignore[no-untyped-def]
                     GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, STEPS: tl.constexpr, FP16: tl.constexpr):  # fmt: skip
    """out [N] = x [K] . weight; a thread's 4 words of a row, 128 bits, lie in one block of 128."""
    quads = tl.arange(0, BW // 4)
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN)
    zeros = tl.zeros((BN, BW // 4), dtype=tl.float32)
    if STEPS == 1:
        following = rows_of(packed_ptr, start, 0, n, words, BN, BW)
        x = beside_nibbles(x_ptr, quads, k)
        for tile in range(start, tiles, tl.num_programs(0)):
            current = following
            following = rows_of(packed_ptr, tile + tl.num_programs(0), 0, n, words, BN, BW)
            acc = groups_dot(zeros, current, keep(quads, k), x, quads, tile, n, groups, scale_ptr, zero_ptr, GROUP, FP16)
            write(acc, tile, n, None, bias_ptr, out_ptr)
    else:
        tile, step, acc = start, start * 0, zeros
        following = rows_of(packed_ptr, start, 0, n, words, BN, BW)
        while tile < tiles:
            current = following
            ahead, at = after(tile, step, STEPS)
            following = rows_of(packed_ptr, ahead, at * BW, n, words, BN, BW)
            quad = quads + step * (BW // 4)
            x = beside_nibbles(x_ptr, quad, k)
            acc = groups_dot(acc, current, keep(quads, k), x, quad, tile, n, groups, scale_ptr, zero_ptr, GROUP, FP16)
            if step == STEPS - 1:
                write(acc, tile, n, None, bias_ptr, out_ptr)
                acc = zeros
            tile, step = ahead, at


@jit
def store_transposed(acc, rows, tokens, m, n, bias_ptr, out_ptr, partial_ptr):  # type: ignore[no-untyped-def]
    """acc [rows of weight, tokens] to out [M, N], or to this program's partial."""
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    mask = (rows < n)[:, None] & (tokens < m)[None, :]
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(2).to(tl.int64) * m * n + place, acc, mask=mask)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + rows, mask=rows < n, other=0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def dot_int8_kernel(x_ptr, q_ptr, scale_ptr, bias_ptr, out_ptr, partial_ptr, m, n, k, chunk,  # type: ignore[no-untyped-def]
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc [BN, BM] = q @ x^T over one chunk of K; int8 is exact in float16 and bfloat16, so only the sums round."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    depth = tl.arange(0, BK)
    begin = tl.program_id(2) * chunk
    q_ptrs = q_ptr + rows.to(tl.int64)[:, None] * k + depth[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * k + depth[:, None]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for at in range(begin, tl.minimum(begin + chunk, k), BK):
        if EVEN:
            q = tl.load(q_ptrs + at, mask=(rows < n)[:, None], other=0)
            x = tl.load(x_ptrs + at, mask=(tokens < m)[None, :], other=0)
        else:
            q = tl.load(q_ptrs + at, mask=(rows < n)[:, None] & (depth < k - at)[None, :], other=0)
            x = tl.load(x_ptrs + at, mask=(tokens < m)[None, :] & (depth < k - at)[:, None], other=0)
        if UPCAST:
            x = x.to(tl.float32)
        acc = tl.dot(q.to(x.dtype), x, acc)
    acc *= tl.load(scale_ptr + rows, mask=rows < n, other=0).to(tl.float32)[:, None]
    store_transposed(acc, rows, tokens, m, n, bias_ptr, out_ptr, partial_ptr)


@jit
def nibble(words, J: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 + nibble J in bfloat16, 128 + nibble J in float16, exactly; J and J + 4 share their instructions."""
    if J % 4 != 0:
        words = turned(words, 32 - 4 * (J % 4))
    pairs = (words & 0x00780078) | (0x58005800 if tl.float16 == HALF else 0x41804180)
    if J >= 4:
        pairs = pairs >> 16
    return pairs.to(tl.int16).to(HALF, bitcast=True)


@jit
def dot_int4_kernel(x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, partial_ptr, m, n, k, words, groups, chunk,  # type: ignore[no-untyped-def]
                    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc [BN, BM] = weight @ x^T over one chunk of words, a block of 128 weights at a time, one product for each of the 8 nibbles."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = 128.0 if tl.float16 == HALF else 16.0
    SCALES: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP
    PLANES: tl.constexpr = 8 // SCALES
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    lanes = tl.arange(0, 16)
    begin = tl.program_id(2) * chunk
    packed_ptrs = packed_ptr + rows.to(tl.int64)[:, None] * words + lanes[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * k + lanes[:, None]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for at in range(begin, tl.minimum(begin + chunk, words), 16):
        packed = tl.load(packed_ptrs + at, mask=(rows < n)[:, None], other=0)
        for s in tl.static_range(SCALES):
            place = rows.to(tl.int64) * groups + tl.minimum((at * 8 + s * PLANES * 16) // GROUP, groups - 1)
            scale = tl.load(scale_ptr + place, mask=rows < n, other=0).to(tl.float32)
            less = OFFSET + 8.0
            if zero_ptr is not None:
                less = (OFFSET + tl.load(zero_ptr + place, mask=rows < n, other=8).to(tl.float32)).to(HALF)[:, None]
            part = tl.zeros((BN, BM), dtype=tl.float32)
            for j in tl.static_range(s * PLANES, s * PLANES + PLANES):
                weight = nibble(packed, j, HALF)
                known = (tokens < m)[None, :]
                if not EVEN:
                    known = known & (lanes < k - at * 8 - j * 16)[:, None]
                x = tl.load(x_ptrs + (at * 8 + j * 16), mask=known, other=0)
                if UPCAST:
                    x = x.to(tl.float32)
                    weight = weight.to(tl.float32)
                    if zero_ptr is not None:
                        less = less.to(tl.float32)
                part = tl.dot((weight - less).to(x.dtype), x, part)
            acc += part * scale[:, None]
    store_transposed(acc, rows, tokens, m, n, bias_ptr, out_ptr, partial_ptr)


_GEMV8: Config = {"dot": 0, "bn": 4, "loads": 2, "threads": 512}
_GEMV4: Config = {"dot": 0, "bn": 8, "loads": 1, "threads": 512}
_SHORT: Config = {"dot": 0, "bn": 8, "loads": 1, "threads": 512, "span": 2048}
_FEW: Config = {**_SHORT, "threads": 384}  # 8 rows of int4 and x read anew take up to 168 registers
_DOT: Config = {"dot": 1, "bn": 64, "bk": 128, "warps": 4, "stages": 4, "split": 1}
CANDIDATES: dict[int, list[Config]] = {
    8: [
        _GEMV8, {**_GEMV8, "bn": 2, "loads": 4}, {**_GEMV8, "loads": 1, "threads": 768}, _SHORT, {**_SHORT, "threads": 768},
        {**_SHORT, "bn": 4, "threads": 1024}, {**_SHORT, "bn": 4, "loads": 2, "threads": 640},
        _DOT, {**_DOT, "split": 4}, {**_DOT, "bn": 128, "bk": 64, "warps": 8},
    ],
    4: [
        _GEMV4, {**_GEMV4, "bn": 4}, {**_GEMV4, "bn": 2, "threads": 768}, {**_GEMV4, "bn": 4, "loads": 2, "threads": 256},
        _FEW, {**_SHORT, "bn": 4}, {**_FEW, "span": 4096},
        {**_DOT, "stages": 6}, {**_DOT, "stages": 6, "split": 4}, {**_DOT, "bn": 128, "warps": 8},
    ],
}  # fmt: skip
"""Of a gemv: rows and weights of a row (span) at a time, 128-bit loads a thread and row, threads an SM is to hold; of a dot: tiles,
parts of K."""
for _bits, _candidates in CANDIDATES.items():
    space(f"int{_bits}_linear", __file__, _candidates)


@lru_cache(maxsize=1024)
def default_config(bits: int, m: int, n: int, k: int, sms: int) -> Config:
    """By bytes in flight: 128 for each of 512 threads an SM, twice what hides the memory's latency."""
    if m == 1 and k % 4 == 0:
        if bits == 8 and k <= WIDEST and k % 2048 == 0 and 16 * k < 15 * bucketed(k):
            return _SHORT  # 14336 fill 7/8 of a power of two but 7 short steps whole; int4 pays as much to read x anew
        return _GEMV8 if bits == 8 else _GEMV4 if k <= WIDEST else {**_GEMV4, "bn": 4}  # 8 rows spill where x is read anew each step
    if m > 64:
        return {**_DOT, "bn": 128, "bk": 64, "warps": 8}
    split = max(1, min(2 * sms // cdiv(n, 64), k // 512, 16))
    return {**_DOT, "bk": 128 if m <= 16 else 64, "split": split}  # 128 spills at 64 rows


def gemv_shape(bits: int, n: int, k: int, chosen: Config, sms: int) -> tuple[int, int, int, int]:
    """(words at a time, steps, warps, programs) of a gemv."""
    words = cdiv(k * bits, 32)
    wide = max(min(bucketed(words), min(chosen.get("span", WIDEST), WIDEST) * bits // 32), 16)
    warps = min(max(wide // (128 * chosen["loads"]), 1), 16)
    return wide, cdiv(words, wide), warps, min(sms * max(1, chosen["threads"] // (32 * warps)), cdiv(n, chosen["bn"]))


@lru_cache(maxsize=1024)
def dot_shape(bits: int, m: int, k: int, bn: int, bk: int, split: int, stages: int, shared: int) -> tuple[int, int, int, int, int]:
    """(BM, BK, splits, depth of a split, stages): what the tensor cores take and shared memory holds; depth in words for int4."""
    bm = min(max(16, bucketed(m)), 64 if bn <= 64 else 128)
    depth, bd = (k, bk) if bits == 8 else (cdiv(k, BLOCK) * 16, 16)
    chunk = max(cdiv(cdiv(depth, split), bd), 1) * bd
    stage = bd * bn + 2 * bd * bm if bits == 8 else 4 * bd * bn + 2 * BLOCK * bm
    # dequantised weights may pass through shared memory once more, and the scales of a block do
    return bm, bd, max(1, cdiv(depth, chunk)), chunk, max(1, min(stages, (shared - 4 * bd * bn - 4096) // stage))


_plans: dict[Any, Plan] = {}


def _ready(x: torch.Tensor, n: int, bias: Optional) -> tuple[torch.Tensor, torch.Tensor, Optional, int]:
    x = x.contiguous()
    out = empty((*x.shape[:-1], n), STORED.get(x.dtype, x.dtype), x.device)
    if bias is not None:
        bias = bias.contiguous()
    return x, out, bias, out.numel() // n if n else 0


def _gemv_int8_plan(n: int, k: int, dtype: torch.dtype, default: Config, chosen: Config, sms: int) -> Plan:
    wide, steps, warps, programs = gemv_shape(8, n, k, chosen, sms)
    constants = {"BN": chosen["bn"], "BW": wide, "STEPS": steps, "FP16": dtype is torch.float16, "num_warps": warps}
    return Plan("int8_linear", (1, n, k), default, chosen, gemv_int8_kernel, (programs,), (n, k), constants)


def run_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional) -> torch.Tensor:
    """x [.., K] half @ (q * scale)^T + bias."""
    n, k = q.shape
    x, out, bias, m = _ready(x, n, bias)
    if out.numel() == 0:
        return out
    q, scale = q.contiguous(), scale.contiguous()
    device = x.get_device()
    sms = processors(device)
    default = default_config(8, m, n, k, sms)
    chosen = config("int8_linear", (m if m == 1 else bucketed(m), n, k), default)
    if m == 1 and not chosen["dot"] and k % 4 == 0 and q.data_ptr() % 4 == 0 and x.data_ptr() % 8 == 0:
        plan = planned(_plans, (n, k, x.dtype, device), _gemv_int8_plan, n, k, x.dtype, default, chosen, sms)
        start(plan, (x, q.view(torch.int32), scale, bias, out))
        return out
    if not chosen["dot"]:
        chosen = default if default["dot"] else _DOT
    bn, warps = chosen["bn"], chosen["warps"]
    bm, bk, split, chunk, stages = dot_shape(8, m, k, bn, chosen["bk"], chosen["split"], chosen["stages"], shared_bytes(device))
    partial = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    launch(
        dot_int8_kernel, (cdiv(n, bn), cdiv(m, bm), split), x, q, scale, bias, out, partial, m, n, k, chunk, BM=bm, BN=bn, BK=bk,
        EVEN=k % bk == 0, UPCAST=INTERPRETED, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if partial is not None:
        run_reduce(partial, out, m, n, bias)
    return out


def run_int4(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, zero: Optional) -> torch.Tensor:
    """x [.., K] half @ ((nibbles - zero) * scale)^T + bias."""
    (n, words), k, groups = packed.shape, x.shape[-1], scale.shape[1]
    x, out, bias, m = _ready(x, n, bias)
    if out.numel() == 0:
        return out
    packed, scale = packed.contiguous(), scale.contiguous()
    zero = None if zero is None else zero.contiguous()
    device = x.get_device()
    sms = processors(device)
    default = default_config(4, m, n, k, sms)
    chosen = config("int4_linear", (m if m == 1 else bucketed(m), n, k, group), default)
    if m == 1 and not chosen["dot"] and k % 4 == 0 and x.data_ptr() % 8 == 0:
        wide, steps, warps, programs = gemv_shape(4, n, words * 8, chosen, sms)
        launch(
            gemv_int4_kernel, (programs,), x, packed, scale, zero, bias, out, n, k, words, groups, GROUP=group, BN=chosen["bn"], BW=wide,
            STEPS=steps, FP16=x.dtype is torch.float16, num_warps=warps,
        )  # fmt: skip
        return out
    if not chosen["dot"]:
        chosen = default if default["dot"] else _DOT
    bn, warps = chosen["bn"], chosen["warps"]
    bm, _, split, chunk, stages = dot_shape(4, m, k, bn, chosen["bk"], chosen["split"], chosen["stages"], shared_bytes(device))
    partial = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    launch(
        dot_int4_kernel, (cdiv(n, bn), cdiv(m, bm), split), x, packed, scale, zero, bias, out, partial, m, n, k, words, groups, chunk,
        GROUP=group, BM=bm, BN=bn, EVEN=k % BLOCK == 0, UPCAST=INTERPRETED, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if partial is not None:
        run_reduce(partial, out, m, n, bias)
    return out
