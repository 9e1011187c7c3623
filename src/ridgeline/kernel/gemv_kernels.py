"""Triton kernels of gemv.py and how one is chosen and launched.

    x [M, K] half; weight half | int8 | int4 words [N, BW] ──programs resident at once, BN rows of weights in turn──> sums [BN]
      ──epilogue: scale, bias, silu(gate) * up, residual, in float32──> out [M, N]

A program holds whole rows: words of its next rows are on the way, 128 bits a load, while it multiplies those it has. With one row of x a
thread keeps its share in registers (gemv_parts.py); with a gain that is the norm of x, which every program computes for itself.
The first weights are read before the kernel before has ended where they are known to be still (overlap.py). Programs that take less than
half of an SM's registers let two kernels wait beside a third, and then no longer spread evenly over the SMs: it costs more than it brings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .gemv_parts import (
    beside_bytes,
    beside_nibbles,
    bytes_dot,
    bytes_mma,
    diagonal,
    gained,
    halves_dot,
    nibbles_mma,
    nibbles_zero,
    power_of,
    read_x,
)
from .jit import INTERPRETED, cdiv, empty, jit, tl
from .matmul_kernels import STORED, processors
from .overlap import are_still, begin, promptness, wait
from .plan import Plan, planned, start
from .tuning import Config, bucketed, config, space
from .weight_only_kernels import WIDEST, keep

Optional = torch.Tensor | None
MOST_ROWS = {16: 2, 8: 1, 4: 1}
"""Rows of x by bits of a weight: with more, instructions take longer than bytes (two rows of halves: 3.8 a byte of 7)."""


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
    at = w_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * words + lanes[None, :]
    known = exist[:, None] & ((lanes < BW) if EVEN else (lanes < words))[None, :]
    if CACHED:
        found = tl.load(at, mask=known, other=0, eviction_policy="evict_first")
    else:
        found = tl.load(at, mask=known, other=0, cache_modifier=".cg")
    return found


@jit
def scales_of(scale_ptr, tile, n, groups, GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: of the group each thread's 128 bits of int4 lie in; read the other way round, so that each thread reads its own."""
    rows, exist = rows_at(tile, n, BN, GATED)
    column = (tl.arange(0, BW // 4) // 4) * 128 // GROUP
    known = exist[None, :] & (column < groups)[:, None]
    return tl.trans(tl.load(scale_ptr + rows[None, :] * groups + column[:, None], mask=known, other=0))


@jit
def beside(row, tile, n, scale_ptr, bias_ptr, residual_ptr, BN: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scale [BN], bias [BN], residual) of a tile's sums in row `row` of x: read a tile ahead, for a read after the sums is waited for."""
    rows, exist = rows_at(tile, n, BN, GATED)
    scale = tl.full((BN,), 1.0, tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    residual = tl.zeros((BN // 2 if GATED else BN,), tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + rows, mask=exist, other=0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=exist, other=0).to(tl.float32)
    if residual_ptr is not None:
        places, known = outputs_at(tile, n, BN, GATED)
        residual = tl.load(residual_ptr + row * n + places, mask=known, other=0).to(tl.float32)
    return scale, bias, residual


@jit
def outputs_at(tile, n, BN: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(columns of the result, which of them exist)."""
    HERE: tl.constexpr = BN // 2 if GATED else BN
    places = tile * HERE + tl.arange(0, HERE)
    return places, places < n


@jit
def finish(total, row, tile, n, held, out_ptr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Epilogue of sums [BN] of row `row` of x; `held`: of beside()."""
    BN: tl.constexpr = total.shape[0]
    total = total * held[0] + held[1]
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BN // 2, 2)))
        total = gate / (1.0 + tl.exp(-gate)) * up
    places, exist = outputs_at(tile, n, BN, GATED)
    tl.store(out_ptr + row * n + places, (total + held[2]).to(out_ptr.dtype.element_ty), mask=exist)


@jit
def gemv_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr, n, k, words, eps,  # type: ignore[no-untyped-def]
                M: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, FP16: tl.constexpr,
                HALF: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr,
                EARLY: tl.constexpr, EMULATED: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """out [M, n] of weights of 16 or 8 bits, read as int32 [n or 2n, words]; gain: of rms_norm(x), one row."""
    begin(PROMPT)
    if not EARLY:
        wait(PROMPT)
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN // 2 if GATED else BN)
    quads = tl.arange(0, BW // 4)
    if M == 1 and not EARLY:  # x first: there is work to do on it while the weights come
        x = read_x(x_ptr, 0, k, quads, BITS, WHOLE)
    following = words_of(w_ptr, start, n, words, BN, BW, GATED, EVEN, CACHED)
    if gain_ptr is not None:
        gain = read_x(gain_ptr, 0, k, quads, BITS, WHOLE)
    if EARLY:
        wait(PROMPT)
    following_held = beside(0, start, n, scale_ptr, bias_ptr, residual_ptr, BN, GATED)
    factor = 1.0
    if M == 1:
        if EARLY:
            x = read_x(x_ptr, 0, k, quads, BITS, WHOLE)
        if gain_ptr is not None:
            x, square = gained(x, gain, EMULATED)
            factor = 1.0 / tl.sqrt(tl.sum(square, 0) / k + eps)
        if HALF:
            less, more = power_of(x, EMULATED)
            x = beside_bytes(x, less, EMULATED)
            here, second = diagonal(quads, EMULATED)
            more *= here
    for tile in range(start, tiles, tl.num_programs(0)):
        current, held = following, following_held
        following_held = beside(0, tile + tl.num_programs(0), n, scale_ptr, bias_ptr, residual_ptr, BN, GATED)
        if AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
        for m in tl.static_range(M):
            if M > 1:
                x = read_x(x_ptr, m, k, quads, BITS, WHOLE)
                held = beside(m, tile, n, scale_ptr, bias_ptr, residual_ptr, BN, GATED)
            if BITS == 16:
                acc = halves_dot(current, x, FP16)
            elif HALF:
                acc = bytes_mma(current, x, second, more, EMULATED)
            else:
                acc = bytes_dot(current, x, keep(quads, k), FP16)
            if not AHEAD and m == M - 1:
                following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            finish(tl.sum(acc, 1) * factor, m, tile, n, held, out_ptr, GATED)


@jit
def gemv_nibbles_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr, n, k, words, groups, eps,  # type: ignore[no-untyped-def]
                        GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, GATED: tl.constexpr,
                        EVEN: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
                        EMULATED: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """out [n] of int4 weights, words of 8 as weight_only.py packs them; groups of 128 and more, zero points of 8."""
    begin(PROMPT)
    if not EARLY:
        wait(PROMPT)
    start = tl.program_id(0)
    tiles = tl.cdiv(n, BN // 2 if GATED else BN)
    quads = tl.arange(0, BW // 4)
    if not EARLY:  # x first: there is work to do on it while the weights come
        x = read_x(x_ptr, 0, k, quads, 4, True)
    following = words_of(w_ptr, start, n, words, BN, BW, GATED, EVEN, CACHED)
    following_scale = scales_of(scale_ptr, start, n, groups, GROUP, BN, BW, GATED)
    if gain_ptr is not None:
        gain = read_x(gain_ptr, 0, k, quads, 4, True)
    if EARLY:
        wait(PROMPT)
    following_held = beside(0, start, n, None, bias_ptr, residual_ptr, BN, GATED)
    if EARLY:
        x = read_x(x_ptr, 0, k, quads, 4, True)
    factor = 1.0
    if gain_ptr is not None:
        x, square = gained(x, gain, EMULATED)
        factor = 1.0 / tl.sqrt(tl.sum(square, 0) / k + eps)
    less, more = power_of(x, EMULATED)
    x = beside_nibbles(x, less, EMULATED)
    here, second = diagonal(quads, EMULATED)
    zero = nibbles_zero(x, second, EMULATED)
    more *= here * 0.125
    for tile in range(start, tiles, tl.num_programs(0)):
        current, current_scale, held = following, following_scale, following_held
        following_held = beside(0, tile + tl.num_programs(0), n, None, bias_ptr, residual_ptr, BN, GATED)
        if AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            following_scale = scales_of(scale_ptr, tile + tl.num_programs(0), n, groups, GROUP, BN, BW, GATED)
        acc = nibbles_mma(current, x, zero, second, more, EMULATED) * current_scale.to(tl.float32)
        if not AHEAD:
            following = words_of(w_ptr, tile + tl.num_programs(0), n, words, BN, BW, GATED, EVEN, CACHED)
            following_scale = scales_of(scale_ptr, tile + tl.num_programs(0), n, groups, GROUP, BN, BW, GATED)
        finish(tl.sum(acc, 1) * factor, 0, tile, n, held, out_ptr, GATED)


_PLAIN: Config = {"bn": 1, "loads": 2, "threads": 1024, "cached": 0, "ahead": 1, "half": 0, "early": 0}
_TENSOR: Config = {**_PLAIN, "bn": 4, "threads": 512, "ahead": 0, "half": 1, "early": 1}
CANDIDATES: dict[int, list[Config]] = {
    16: [_PLAIN, {**_PLAIN, "bn": 2}, {**_PLAIN, "bn": 2, "loads": 4}, {**_PLAIN, "loads": 4},
         {**_PLAIN, "bn": 4, "loads": 4, "threads": 768, "early": 1}, {**_PLAIN, "loads": 4, "threads": 768, "early": 1},
         {**_PLAIN, "bn": 2, "loads": 4, "threads": 512, "early": 1}, {**_PLAIN, "bn": 4, "loads": 4, "early": 1}],
    8: [{**_TENSOR, "bn": 8, "threads": 384}, {**_TENSOR, "loads": 1, "ahead": 1}, _TENSOR, {**_TENSOR, "bn": 8, "threads": 1280},
        {**_TENSOR, "bn": 8, "threads": 384, "ahead": 1}, {**_TENSOR, "bn": 8, "loads": 1, "threads": 768, "ahead": 1},
        {**_TENSOR, "threads": 640, "ahead": 1}, {**_TENSOR, "threads": 768}, {**_TENSOR, "early": 0}, {**_TENSOR, "half": 0}],
    4: [{**_TENSOR, "bn": 8, "loads": 1}, {**_TENSOR, "loads": 1, "threads": 768, "ahead": 1}, _TENSOR, {**_TENSOR, "early": 0},
        {**_TENSOR, "bn": 8, "threads": 256, "ahead": 1}, {**_TENSOR, "bn": 2, "loads": 1, "threads": 256, "ahead": 1},
        {**_TENSOR, "bn": 8, "loads": 1, "threads": 256, "ahead": 1}, {**_TENSOR, "loads": 4, "threads": 256},
        {**_TENSOR, "threads": 256}, {**_TENSOR, "half": 0}],
}  # fmt: skip
"""Rows at a time, 128-bit loads a thread and row, threads an SM is to hold, through the first-level cache or past it, the next rows
before or after the products of these, products by tensor cores, start before the kernel before ended."""
NARROW = 4096
"""Rows or columns below which a product is so short that it should start before the kernel before it has ended."""
DEFAULTS: dict[int, tuple[int, int]] = {16: (4, 0), 8: (1, 0), 4: (1, 0)}
"""Candidate of narrow and of other products, as measured over the products of TinyLlama 1.1B and Llama 3 8B on an H200; the best of each
of those is in tables/."""
for _bits, _candidates in CANDIDATES.items():
    space(f"gemv_{_bits}", __file__, _candidates)


_plans: dict[Any, Plan] = {}


@lru_cache(maxsize=64)
def default_config(bits: int, m: int, n: int, k: int) -> Config:
    """Of one row of x; several rows want few programs, for each reads all of them."""
    if m > 1:
        return {**_PLAIN, "bn": 4, "threads": 512, "early": 1}
    return CANDIDATES[bits][DEFAULTS[bits][min(n, k) >= NARROW]]


def gemv_shape(bits: int, n: int, k: int, chosen: Config, sms: int, gated: bool) -> tuple[int, int, int, int]:
    """(rows, words of a row, warps, programs) of a launch; gate and up make a row of the result."""
    bn = max(2, chosen["bn"]) if gated or bits < 16 else chosen["bn"]  # mma takes two rows
    wide = max(bucketed(cdiv(k * bits, 32)), 16)
    warps = min(max(wide // (128 * chosen["loads"]), 1), 16)
    return bn, wide, warps, min(sms * max(1, chosen["threads"] // (32 * warps)), cdiv(n, bn // 2 if gated else bn))


@lru_cache(maxsize=16)
def _multiplies_bytes(device: int) -> bool:
    """Whether the tensor cores have the product of bytes_mma and nibbles_mma: from Ampere on."""
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (8, 0)


def takes(bits: int, x: torch.Tensor, weight: torch.Tensor, m: int, k: int, gain: Optional) -> bool:
    """Whether these kernels do it: few rows of halves, whole rows of weights a program, addresses that wide loads can have."""
    if gain is not None and (m > 1 or x.dtype is not torch.bfloat16 or not gain.is_contiguous() or gain.data_ptr() % 4):
        return False  # x * gain of float16 may overflow
    if x.dtype not in (torch.float16, torch.bfloat16) or not 1 <= m <= MOST_ROWS[bits] or k % 4 or not 0 < k <= WIDEST:
        return False
    if bits < 16 and x.dtype is torch.bfloat16 and not _multiplies_bytes(x.get_device()):
        return False
    return x.data_ptr() % 8 == 0 and weight.data_ptr() % 4 == 0


def _gapless(x: Optional) -> Optional:
    """Scales and biases of any stride, as kernels read them."""
    return None if x is None else x.contiguous()


def run_gemv(x: torch.Tensor, weight: torch.Tensor, scale: Optional, bias: Optional, residual: Optional, gated: bool,
             gain: Optional, eps: float, m: int) -> torch.Tensor:  # fmt: skip
    """x [.., K], m rows, @ weight^T, halves or int8 with a scale a row; x, weight, residual and gain contiguous, `takes` said yes."""
    scale, bias = _gapless(scale), _gapless(bias)
    rows, k = weight.shape
    bits, n, device = 8 * weight.element_size(), rows // 2 if gated else rows, x.get_device()
    key = (bits, m, n, k, gated, x.dtype, eps, are_still(), device)
    plan = planned(_plans, key, _plan, bits, m, n, k, gated, x.dtype, eps, device)
    out = empty((*x.shape[:-1], n), STORED.get(x.dtype, x.dtype), x.device)
    start(plan, (x, weight, scale, bias, residual, gain, out))
    return out


def _starts(chosen: Config) -> dict[str, bool]:
    """Where weights are still, a product is started before the one before it has ended only if that was measured to pay."""
    early = are_still() and bool(chosen["early"])
    return {"EARLY": early, **promptness(early or not are_still())}


def _plan(bits: int, m: int, n: int, k: int, gated: bool, dtype: torch.dtype, eps: float, device: int) -> Plan:
    bucket, default = (m, n, k, gated), default_config(bits, m, n, k)
    chosen = config(f"gemv_{bits}", bucket, default)
    bn, wide, warps, programs = gemv_shape(bits, n, k, chosen, processors(device), gated)
    words = k * bits // 32
    constants = {
        "M": m, "BN": bn, "BW": wide, "BITS": bits, "GATED": gated, "FP16": dtype is torch.float16,
        "HALF": bits == 8 and dtype is torch.bfloat16 and bool(chosen["half"]), "EVEN": words == wide, "WHOLE": k % 16 == 0,
        "CACHED": bool(chosen["cached"]), "AHEAD": bool(chosen["ahead"]), "EMULATED": INTERPRETED, "num_warps": warps,
        **_starts(chosen),
    }  # fmt: skip
    return Plan(f"gemv_{bits}", bucket, default, chosen, gemv_kernel, (programs,), (n, k, words, eps), constants)


def nibbles_config(n: int, k: int, group: int, gated: bool) -> Config:
    """Of an int4 gemv of one row; "half" 0: it is left to weight_only_kernels.py."""
    return config("gemv_4", (1, n, k, gated, group), default_config(4, 1, n, k))


def _nibbles_plan(n: int, k: int, words: int, groups: int, group: int, gated: bool, eps: float, device: int) -> Plan:
    bucket, default, chosen = (1, n, k, gated, group), default_config(4, 1, n, k), nibbles_config(n, k, group, gated)
    bn, wide, warps, programs = gemv_shape(4, n, words * 8, chosen, processors(device), gated)
    constants = {
        "GROUP": group, "BN": bn, "BW": wide, "GATED": gated, "EVEN": words == wide,
        "CACHED": bool(chosen["cached"]), "AHEAD": bool(chosen["ahead"]), "EMULATED": INTERPRETED, "num_warps": warps,
        **_starts(chosen),
    }  # fmt: skip
    sizes = (n, k, words, groups, eps)
    return Plan("gemv_4", bucket, default, chosen, gemv_nibbles_kernel, (programs,), sizes, constants)


def run_nibbles(x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, residual: Optional,
                gated: bool, gain: Optional, eps: float) -> torch.Tensor:  # fmt: skip
    """x [.., K] bfloat16, one row, @ weight^T of int4 words in groups of 128 or more; contiguous but for the bias."""
    bias = _gapless(bias)
    shape, (rows, width), groups, device = x.shape, words.shape, scale.shape[1], x.get_device()
    k, n = shape[-1], rows // 2 if gated else rows
    key = (4, n, k, width, groups, group, gated, eps, are_still(), device)
    plan = planned(_plans, key, _nibbles_plan, n, k, width, groups, group, gated, eps, device)
    out = empty((*shape[:-1], n), STORED.get(x.dtype, x.dtype), x.device)
    start(plan, (x, words, scale, bias, residual, gain, out))
    return out
