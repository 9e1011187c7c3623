"""Triton kernels of gemv.py and how one is chosen and launched.

    x [M, K] half; weight half | int8 | int4 words [N, BW] ──programs resident at once, BN rows of weights in turn──> sums [BN]
      ──epilogue: scale, bias, silu(gate) * up, residual, in float32──> out [M, N]

A program holds whole rows: words of its next rows are on the way, 128 bits a load, while it multiplies those it has. Few warps a row
mean few additions across threads (one warp: no barrier); `loads` sets that. With one row of x a thread keeps its share in registers.
HALF: integers become float16 by one logic operation a pair and are multiplied and summed two at a time in float16, over at most 32
products a thread, then in float32: for bfloat16 x only, whose own rounding is 8 times as coarse. x is brought to a largest value below
2 by a power of two, so nothing overflows. Otherwise sums are float32 from the first product on.
The first weights are read before the kernels before have ended where they are known to be still (overlap.py).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .jit import INTERPRETED, cdiv, jit, launch, tl
from .matmul_kernels import STORED, processors
from .overlap import begin, early, wait
from .tuning import Config, bucketed, config, space
from .weight_only_kernels import WIDEST, apart, beside_bytes, beside_nibbles, four, fours, keep, pair, rows_dot

Optional = torch.Tensor | None
MOST_ROWS = {16: 2, 8: 1, 4: 1}
"""Rows of x by bits of a weight: with more, instructions take longer than bytes (two rows of halves: 3.8 a byte of 7)."""


@jit
def fma2(a, b, c, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """a * b + c of both float16 halves of int32, rounded once."""
    if EMULATED:  # the interpreter runs no assembly; float32 holds the product exactly
        low_a, high_a = pair(a, True)
        low_b, high_b = pair(b, True)
        low_c, high_c = pair(c, True)
        out = packed(low_a * low_b + low_c, high_a * high_b + high_c)
    else:
        out = tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
    return out


@jit
def add2(a, b, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """a + b of both float16 halves of int32."""
    if EMULATED:
        low_a, high_a = pair(a, True)
        low_b, high_b = pair(b, True)
        out = packed(low_a + low_b, high_a + high_b)
    else:
        out = tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    return out


@jit
def packed(low, high):  # type: ignore[no-untyped-def]
    """Two float32 as the float16 halves of an int32."""
    below = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return below | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@jit
def rotated(words, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words rotated right, one funnel shift."""
    return ((words >> BY) & ((1 << (32 - BY)) - 1)) | (words << (32 - BY))


@jit
def rows_at(tile, n, BN: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows of the weight, which of them exist); GATED: gate and up, row by row, of BN / 2 outputs."""
    lane = tl.arange(0, BN)
    if GATED:
        inside = tile * (BN // 2) + lane // 2
        rows = inside + (lane % 2) * n
    else:
        inside = tile * BN + lane
        rows = inside
    return rows.to(tl.int64), inside < n


@jit
def words_of(w_ptr, tile, n, words, BN: tl.constexpr, BW: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, CACHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 [BN, BW], zeros past the end; EVEN: a row has BW words."""
    rows, exist = rows_at(tile, n, BN, GATED)
    lanes = tl.arange(0, BW)
    at = w_ptr + rows[:, None] * words + lanes[None, :]
    known = exist[:, None] & ((lanes < BW) if EVEN else (lanes < words))[None, :]
    if CACHED:
        found = tl.load(at, mask=known, other=0, eviction_policy="evict_first")
    else:
        found = tl.load(at, mask=known, other=0, cache_modifier=".cg")
    return found


@jit
def scales_of(scale_ptr, tile, n, groups, GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: of the group each thread's 128 bits of int4 lie in."""
    rows, exist = rows_at(tile, n, BN, GATED)
    column = (tl.arange(0, BW // 4) // 4) * 128 // GROUP
    return tl.load(scale_ptr + rows[:, None] * groups + column[None, :], mask=exist[:, None] & (column < groups)[None, :], other=0)


@jit
def halves_dot(words, x, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 8 weights a thread and row in half precision times x, in float32."""
    a, b, c, d = apart(words)
    x0, x1, x2, x3 = four(x[0], FP16)
    x4, x5, x6, x7 = four(x[1], FP16)
    w0, w1 = pair(a, FP16)
    w2, w3 = pair(b, FP16)
    w4, w5 = pair(c, FP16)
    w6, w7 = pair(d, FP16)
    acc = w0 * x0
    acc += w1 * x1
    acc += w2 * x2
    acc += w3 * x3
    acc += w4 * x4
    acc += w5 * x5
    acc += w6 * x6
    return acc + w7 * x7


@jit
def power_of(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 / p, p): the power of two p at or below the largest |x|, of all of x's tensors of four."""
    most = tl.zeros(x[0].shape, dtype=tl.float32)[None, :]
    for j in tl.static_range(COUNT):
        x0, x1, x2, x3 = four(x[j], False)
        most = tl.maximum(most, tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))))
    exponent = tl.max(tl.max(most, 1), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), (exponent << 23).to(tl.float32, bitcast=True)


@jit
def narrow_bytes(x, less):  # type: ignore[no-untyped-def]
    """x times `less` as float16 pairs (0, 2) and (1, 3) of each four: 8 tensors for the 16 bytes of a thread."""
    a0, a1, a2, a3 = four(x[0], False)
    b0, b1, b2, b3 = four(x[1], False)
    c0, c1, c2, c3 = four(x[2], False)
    d0, d1, d2, d3 = four(x[3], False)
    first = packed(a0 * less, a2 * less), packed(a1 * less, a3 * less), packed(b0 * less, b2 * less), packed(b1 * less, b3 * less)
    return first + (packed(c0 * less, c2 * less), packed(c1 * less, c3 * less), packed(d0 * less, d2 * less), packed(d1 * less, d3 * less))  # noqa: RUF005


@jit
def narrow_planes(low, high, less):  # type: ignore[no-untyped-def]
    """x beside nibbles J and J + 4 of a thread's 4 words, as float16 pairs."""
    a0, a1, a2, a3 = four(low, False)
    b0, b1, b2, b3 = four(high, False)
    return packed(a0 * less, b0 * less), packed(a1 * less, b1 * less), packed(a2 * less, b2 * less), packed(a3 * less, b3 * less)


@jit
def narrow_nibbles(x, less):  # type: ignore[no-untyped-def]
    first = narrow_planes(x[0], x[4], less) + narrow_planes(x[1], x[5], less)
    return first + narrow_planes(x[2], x[6], less) + narrow_planes(x[3], x[7], less)


@jit
def bytes_dot2(words, x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 16 int8 weights a thread and row times x, summed in float16, then float32."""
    parts = apart(words)
    acc = tl.zeros(parts[0].shape, dtype=tl.int32)
    offset = tl.full(parts[0].shape, -461314944, tl.int32)  # -(1024 + 128) twice
    for i in tl.static_range(4):
        # the mask leaves a byte; the exclusive or flips its sign bit, which adds 128, and gives it the exponent of 1024
        even = (parts[i] & 0x00FF00FF) ^ 0x64806480
        odd = ((parts[i] >> 8) & 0x00FF00FF) ^ 0x64806480
        acc = fma2(add2(even, offset, EMULATED), x[2 * i], acc, EMULATED)
        acc = fma2(add2(odd, offset, EMULATED), x[2 * i + 1], acc, EMULATED)
    low, high = pair(acc, True)
    return low + high


@jit
def nibble2(words, J: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nibbles J and J + 4, - 8, as float16; bits 6-9 of a float from 16 on count in ones, bits 2-5 of one from 256 on.

    Words are packed rotated left by 3, so two rotations serve all four pairs.
    """
    if J % 2 == 0:
        bits = (rotated(words, 1 + 4 * J) & 0x003C003C) | 0x5C005C00
        offset = tl.full(words.shape, -601826272, tl.int32)  # -264 twice
    else:
        bits = (rotated(words, 4 * J - 3) & 0x03C003C0) | 0x4C004C00
        offset = tl.full(words.shape, -838808064, tl.int32)  # -24 twice
    return add2(bits, offset, EMULATED)


@jit
def nibbles_dot2(words, x, CHAIN: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 32 int4 weights a thread and row times x, CHAIN of 4 words summed in float16, then float32."""
    parts = apart(words)
    total = tl.zeros(parts[0].shape, dtype=tl.float32)
    for start in tl.static_range(0, 4, CHAIN):
        acc = tl.zeros(parts[0].shape, dtype=tl.int32)
        for i in tl.static_range(start, start + CHAIN):
            for j in tl.static_range(4):
                acc = fma2(nibble2(parts[i], j, EMULATED), x[4 * j + i], acc, EMULATED)
        low, high = pair(acc, True)
        total += low + high
    return total


@jit
def read_x(x_ptr, row, k, quads, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x of one row beside each thread's 128 bits of weights."""
    x_ptr += row * k
    if BITS == 16:
        x = fours(x_ptr, quads * 2, k), fours(x_ptr, quads * 2 + 1, k)
    elif BITS == 8:
        x = beside_bytes(x_ptr, quads, k)
    else:
        x = beside_nibbles(x_ptr, quads, k)
    return x


@jit
def finish(total, row, tile, n, scale_ptr, bias_ptr, residual_ptr, out_ptr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Epilogue of sums [BN] of row `row` of x."""
    BN: tl.constexpr = total.shape[0]
    rows, exist = rows_at(tile, n, BN, GATED)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + rows, mask=exist, other=0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=exist, other=0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BN // 2, 2)))
        total = gate / (1.0 + tl.exp(-gate)) * up
        rows = tile * (BN // 2) + tl.arange(0, BN // 2)
        exist = rows < n
    place = row * n + rows
    if residual_ptr is not None:
        total += tl.load(residual_ptr + place, mask=exist, other=0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=exist)


@jit
def gemv_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, n, k, words,  # type: ignore[no-untyped-def]
                M: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, FP16: tl.constexpr,
                HALF: tl.constexpr, EVEN: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
                EMULATED: tl.constexpr):  # fmt: skip
    """out [M, n] of weights of 16 or 8 bits, read as int32 [n or 2n, words]."""
    begin(EARLY)
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN // 2 if GATED else BN)
    quads = tl.arange(0, BW // 4)
    following = words_of(w_ptr, start, n, words, BN, BW, GATED, EVEN, CACHED)
    wait(EARLY)
    more = 1.0
    if M == 1:
        x = read_x(x_ptr, 0, k, quads, BITS)
        if HALF:
            less, more = power_of(x, 4)
            x = narrow_bytes(x, less)
    for tile in range(start, tiles, tl.num_programs(0)):
        current = following
        if AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
        for m in tl.static_range(M):
            if M > 1:
                x = read_x(x_ptr, m, k, quads, BITS)
            if BITS == 16:
                acc = halves_dot(current, x, FP16)
            elif HALF:
                acc = bytes_dot2(current, x, EMULATED)
            else:
                acc = rows_dot(tl.zeros((BN, BW // 4), dtype=tl.float32), current, keep(quads, k), x, FP16)
            if not AHEAD and m == M - 1:
                following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            finish(tl.sum(acc, 1) * more, m, tile, n, scale_ptr, bias_ptr, residual_ptr, out_ptr, GATED)


@jit
def gemv_nibbles_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, n, k, words, groups,  # type: ignore[no-untyped-def]
                        GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, GATED: tl.constexpr,
                        CHAIN: tl.constexpr, EVEN: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
                        EMULATED: tl.constexpr):  # fmt: skip
    """out [n] of int4 weights, words of 8 as weight_only.py packs them; groups of 128 and more, zero points of 8."""
    begin(EARLY)
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN // 2 if GATED else BN)
    quads = tl.arange(0, BW // 4)
    following = words_of(w_ptr, start, n, words, BN, BW, GATED, EVEN, CACHED)
    following_scale = scales_of(scale_ptr, start, n, groups, GROUP, BN, BW, GATED)
    wait(EARLY)
    wide = read_x(x_ptr, 0, k, quads, 4)
    less, more = power_of(wide, 8)
    x = narrow_nibbles(wide, less)
    for tile in range(start, tiles, tl.num_programs(0)):
        current, current_scale = following, following_scale
        if AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            following_scale = scales_of(scale_ptr, tile + tl.num_programs(0), n, groups, GROUP, BN, BW, GATED)
        acc = nibbles_dot2(current, x, CHAIN, EMULATED) * current_scale.to(tl.float32)
        if not AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            following_scale = scales_of(scale_ptr, tile + tl.num_programs(0), n, groups, GROUP, BN, BW, GATED)
        finish(tl.sum(acc, 1) * more, 0, tile, n, None, bias_ptr, residual_ptr, out_ptr, GATED)


_HALVES: Config = {"bn": 2, "loads": 4, "threads": 512, "cached": 0, "ahead": 1, "half": 0, "early": 1}
_BYTES: Config = {**_HALVES, "bn": 2, "loads": 4, "half": 1}
_NIBBLES: Config = {**_HALVES, "bn": 4, "loads": 2, "ahead": 0, "half": 1, "chain": 4}
ALL = 1 << 20
"""Threads an SM is to hold where every tile has a program of its own."""
CANDIDATES: dict[int, list[Config]] = {
    16: [
        _HALVES, {**_HALVES, "cached": 1}, {**_HALVES, "ahead": 0, "threads": 768}, {**_HALVES, "bn": 4}, {**_HALVES, "bn": 1, "loads": 8},
        {**_HALVES, "loads": 8, "threads": 320}, {**_HALVES, "loads": 8, "ahead": 0, "threads": 512}, {**_HALVES, "bn": 4, "loads": 2},
        {**_HALVES, "threads": ALL}, {**_HALVES, "bn": 1, "loads": 8, "threads": ALL}, {**_HALVES, "early": 0},
    ],
    8: [
        _BYTES, {**_BYTES, "cached": 1}, {**_BYTES, "half": 0}, {**_BYTES, "ahead": 0, "threads": 768}, {**_BYTES, "bn": 4, "loads": 2},
        {**_BYTES, "loads": 8, "threads": 256}, {**_BYTES, "bn": 1, "loads": 8, "threads": 320},
        {**_BYTES, "bn": 4, "ahead": 0},
        {**_BYTES, "threads": ALL}, {**_BYTES, "early": 0},
    ],
    4: [
        _NIBBLES, {**_NIBBLES, "cached": 1}, {**_NIBBLES, "ahead": 1, "threads": 384}, {**_NIBBLES, "bn": 8, "threads": 384},
        {**_NIBBLES, "loads": 4, "threads": 256}, {**_NIBBLES, "bn": 8, "loads": 1, "threads": 640}, {**_NIBBLES, "chain": 2},
        {**_NIBBLES, "threads": ALL}, {**_NIBBLES, "half": 0}, {**_NIBBLES, "early": 0},
    ],
}  # fmt: skip
"""Rows at a time, 128-bit loads a thread and row, threads an SM is to hold, through the first-level cache or past it, the next rows
before or after the products of these, products in float16, words of int4 to one float16 sum, start before the kernel before ended."""
for _bits, _candidates in CANDIDATES.items():
    space(f"gemv_{_bits}", __file__, _candidates)


@lru_cache(maxsize=64)
def default_config(bits: int, m: int) -> Config:
    """64 KB of weights on the way an SM."""
    chosen = {16: _HALVES, 8: _BYTES, 4: _NIBBLES}[bits]
    return {**chosen, "bn": 4, "loads": 2} if m > 1 else chosen


def gemv_shape(bits: int, n: int, k: int, chosen: Config, sms: int, gated: bool) -> tuple[int, int, int, int]:
    """(rows, words of a row, warps, programs) of a launch; gate and up make a row of the result."""
    bn = max(2, chosen["bn"]) if gated else chosen["bn"]
    wide = max(bucketed(cdiv(k * bits, 32)), 16)
    warps = min(max(wide // (128 * chosen["loads"]), 1), 16)
    return bn, wide, warps, min(sms * max(1, chosen["threads"] // (32 * warps)), cdiv(n, bn // 2 if gated else bn))


def takes(bits: int, x: torch.Tensor, weight: torch.Tensor, m: int, k: int) -> bool:
    """Whether these kernels do it: few rows of halves, whole rows of weights a program, addresses that wide loads can have."""
    if x.dtype not in (torch.float16, torch.bfloat16) or not 1 <= m <= MOST_ROWS[bits] or k % 4 or not 0 < k <= WIDEST:
        return False
    return x.data_ptr() % 8 == 0 and weight.data_ptr() % 4 == 0


def run_gemv(x: torch.Tensor, weight: torch.Tensor, scale: Optional, bias: Optional, residual: Optional, gated: bool) -> torch.Tensor:
    """x [M, K] @ weight^T, halves or int8 with a scale a row; all contiguous, `takes` said yes."""
    (m, k), rows = x.shape, weight.shape[0]
    bits, n = 8 * weight.element_size(), rows // 2 if gated else rows
    device = x.get_device()
    sms = processors(device)
    chosen = config(f"gemv_{bits}", (m, n, k, gated), default_config(bits, m))
    bn, wide, warps, programs = gemv_shape(bits, n, k, chosen, sms, gated)
    out = torch.empty((m, n), dtype=STORED.get(x.dtype, x.dtype), device=x.device)
    words = k * bits // 32
    launch(
        gemv_kernel, (programs,), x, weight.view(torch.int32), scale, bias, residual, out, n, k, words, M=m, BN=bn, BW=wide, BITS=bits,
        GATED=gated, FP16=x.dtype is torch.float16, HALF=bits == 8 and x.dtype is torch.bfloat16 and bool(chosen["half"]),
        EVEN=words == wide, CACHED=bool(chosen["cached"]), AHEAD=bool(chosen["ahead"]), EMULATED=INTERPRETED, num_warps=warps,
        **early(device, bool(chosen["early"])),
    )  # fmt: skip
    return out


def nibbles_config(n: int, k: int, group: int, gated: bool) -> Config:
    """Of an int4 gemv of one row; "half" 0: it is left to weight_only_kernels.py."""
    return config("gemv_4", (1, n, k, gated, group), _NIBBLES)


def run_nibbles(x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, residual: Optional,
                gated: bool) -> torch.Tensor:  # fmt: skip
    """x [1, K] bfloat16 @ weight^T of int4 words in groups of 128 or more."""
    k, rows = x.shape[1], words.shape[0]
    n = rows // 2 if gated else rows
    device = x.get_device()
    chosen = nibbles_config(n, k, group, gated)
    bn, wide, warps, programs = gemv_shape(4, n, words.shape[1] * 8, chosen, processors(device), gated)
    out = torch.empty((1, n), dtype=STORED.get(x.dtype, x.dtype), device=x.device)
    launch(
        gemv_nibbles_kernel, (programs,), x, words, scale, bias, residual, out, n, k, words.shape[1], scale.shape[1], GROUP=group, BN=bn,
        BW=wide, GATED=gated, CHAIN=chosen["chain"], EVEN=words.shape[1] == wide,
        CACHED=bool(chosen["cached"]), AHEAD=bool(chosen["ahead"]), EMULATED=INTERPRETED, num_warps=warps,
        **early(device, bool(chosen["early"])),
    )  # fmt: skip
    return out
