"""Triton kernels of attention.py: softmax(scale · Q Kᵀ) V and its gradients, one tile of scores at a time.

    forward   a program a tile of queries:  for tiles of keys: S = Q Kᵀ, P = exp2(S - max), O = O · shrink + P V     -> O, lse
    delta     a program a tile of rows:     delta = rowsum(dO · O)
    dkv       a program a tile of keys:     for heads of the group, tiles of queries: dV += Pᵀ dO, dK += dSᵀ Q
    dq        a program a tile of queries:  for tiles of keys: dQ += dS K                dS = P · (dO Vᵀ - delta)

lse = log2 of the sum of exponentials: exp2 is what the hardware has, and a change of base would cost digits in the backward.
Scores never reach memory (Dao 2022, Milakov 2018 for the running maximum). P is made again in the backward from lse; dkv and dq each
make it, 7 products where 5 would do with atomic adds, and in return every sum has a fixed order.
Loops run twice: over tiles that need no mask, and over those on the diagonal or the ragged edge. Offsets inside a tile are 32-bit
(the launcher sees to it), those of a tile 64-bit. UPCAST is for the interpreter, whose bfloat16 products are wrong.
"""

from __future__ import annotations

from .jit import jit, tl


@jit
def _tile(ptr, rows, stride, limit, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, BLOCK_D] from ptr; zeros beyond `limit` rows (MASKED) and beyond D columns."""
    columns = tl.arange(0, BLOCK_D)
    pointers = ptr + rows[:, None] * stride + columns[None, :]
    if MASKED and D == BLOCK_D:
        return tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    elif D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@jit
def narrowed(x, dtype: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 rounded to `dtype`; the interpreter cuts off where a GPU rounds to the nearest bfloat16, so there it is done by hand."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@jit
def _store(ptr, rows, stride, limit, tile, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK_D)
    kept = (rows[:, None] < limit) & (columns[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + columns[None, :], narrowed(tile, ptr.dtype.element_ty, UPCAST), mask=kept)


@jit
def _dot(a, b, acc, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def _product(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _forward_tiles(  # type: ignore[no-untyped-def]
    out, total, top, q, k_ptr, v_ptr, k_s, v_s, first, start, stop, S, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys start..stop into the running output, sum and maximum (in units of log2)."""
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    k_ptr += tl.cast(start, tl.int64) * k_s
    v_ptr += tl.cast(start, tl.int64) * v_s
    for at in range(start, stop, BLOCK_N):
        k = _tile(k_ptr, keys, k_s, S - at, MASKED, D, BLOCK_D)
        scores = _product(q, tl.trans(k), UPCAST)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            seen = (at + keys)[None, :] < S
            if CAUSAL:
                seen = seen & ((at + keys)[None, :] <= (first + rows)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        v = _tile(v_ptr, keys, v_s, S - at, MASKED, D, BLOCK_D)
        out = _dot(narrowed(p, v.dtype, UPCAST), v, out * shrink[:, None], UPCAST)
        top = higher
        k_ptr += BLOCK_N * k_s
        v_ptr += BLOCK_N * v_s
    return out, total, top


@jit
def attention_forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t,
    heads, group, T, S, scale,
    CAUSAL: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of queries against all the keys it sees; `scale` includes log2(e)."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    # The last queries see the most keys: first come the long programs, the short ones fill the gaps at the end.
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    batch = (pair // heads).to(tl.int64)
    head = pair % heads
    shared = (head // group).to(tl.int64)
    k_ptr += batch * k_b + shared * k_h
    v_ptr += batch * v_b + shared * v_h
    rows = tl.arange(0, BLOCK_M)
    q = _tile(q_ptr + batch * q_b + head.to(tl.int64) * q_h + first.to(tl.int64) * q_t, rows, q_t, T - first, True, D, BLOCK_D)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    plain = S // BLOCK_N * BLOCK_N
    stop = S
    if CAUSAL:
        plain = tl.minimum(first, S) // BLOCK_N * BLOCK_N
        stop = tl.minimum(first + BLOCK_M, S)
    out, total, top = _forward_tiles(
        out, total, top, q, k_ptr, v_ptr, k_s, v_s, first, 0, plain, S, scale, CAUSAL, False, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N
    )
    out, total, top = _forward_tiles(
        out, total, top, q, k_ptr, v_ptr, k_s, v_s, first, plain, stop, S, scale, CAUSAL, True, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N
    )
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]  # no keys at all: zeros
    _store(
        out_ptr + batch * out_b + head.to(tl.int64) * out_h + first.to(tl.int64) * out_t, rows, out_t, T - first, out, UPCAST, D, BLOCK_D
    )
    tl.store(lse_ptr + pair.to(tl.int64) * T + first + rows, top + tl.log2(total), mask=rows < T - first)


@jit
def attention_delta(  # type: ignore[no-untyped-def]
    out_ptr, grad_ptr, delta_ptr, out_b, out_h, out_t, grad_b, grad_h, grad_t, heads, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO · O): what every score of a row loses in the softmax's gradient."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_M
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    out = _tile(out_ptr + batch * out_b + head * out_h + first.to(tl.int64) * out_t, rows, out_t, T - first, True, D, BLOCK_D)
    grad = _tile(grad_ptr + batch * grad_b + head * grad_h + first.to(tl.int64) * grad_t, rows, grad_t, T - first, True, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + pair.to(tl.int64) * T + first + rows, delta, mask=rows < T - first)


@jit
def _dkv_tiles(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, q_t, grad_t, first, start, stop, T, scale,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries start..stop into dK and dV; scores are transposed, [BLOCK_N, BLOCK_M], so that P and dS are left operands as they are."""
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    q_ptr += tl.cast(start, tl.int64) * q_t
    grad_ptr += tl.cast(start, tl.int64) * grad_t
    for at in range(start, stop, BLOCK_M):
        q = _tile(q_ptr, rows, q_t, T - at, RAGGED, D, BLOCK_D)
        if RAGGED:  # an infinite lse makes P zero
            lse = tl.load(lse_ptr + at + rows, mask=rows < T - at, other=float("inf"))
            delta = tl.load(delta_ptr + at + rows, mask=rows < T - at, other=0.0)
        else:
            lse = tl.load(lse_ptr + at + rows)
            delta = tl.load(delta_ptr + at + rows)
        p = tl.exp2(_product(k, tl.trans(q), UPCAST) * scale - lse[None, :])
        if CAUSAL:
            p = tl.where((first + keys)[:, None] <= (at + rows)[None, :], p, 0.0)
        grad = _tile(grad_ptr, rows, grad_t, T - at, RAGGED, D, BLOCK_D)
        dv = _dot(narrowed(p, grad.dtype, UPCAST), grad, dv, UPCAST)
        ds = p * (_product(v, tl.trans(grad), UPCAST) - delta[None, :])
        dk = _dot(narrowed(ds, q.dtype, UPCAST), q, dk, UPCAST)
        q_ptr += BLOCK_M * q_t
        grad_ptr += BLOCK_M * grad_t
    return dk, dv


@jit
def attention_dkv(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    grad_b, grad_h, grad_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, heads, group, T, S, scale, scale_log2,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, summed over the query heads that share them."""
    tiles = tl.cdiv(S, BLOCK_N)
    pair = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_N
    shared = heads // group
    batch = (pair // shared).to(tl.int64)
    head = (pair % shared).to(tl.int64)
    keys = tl.arange(0, BLOCK_N)
    k = _tile(k_ptr + batch * k_b + head * k_h + first.to(tl.int64) * k_s, keys, k_s, S - first, True, D, BLOCK_D)
    v = _tile(v_ptr + batch * v_b + head * v_h + first.to(tl.int64) * v_s, keys, v_s, S - first, True, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(0, group):
        mine = head * group + member
        q_mine = q_ptr + batch * q_b + mine * q_h
        grad_mine = grad_ptr + batch * grad_b + mine * grad_h
        lse_mine = lse_ptr + (batch * heads + mine) * T
        delta_mine = delta_ptr + (batch * heads + mine) * T
        plain = 0
        if CAUSAL:  # queries before the tile see none of it, those beyond its end all
            start = first // BLOCK_M * BLOCK_M
            plain = tl.minimum(tl.cdiv(first + BLOCK_N - 1, BLOCK_M), tl.cdiv(T, BLOCK_M)) * BLOCK_M
            dk, dv = _dkv_tiles(
                dk, dv, k, v, q_mine, grad_mine, lse_mine, delta_mine, q_t, grad_t, first, start, plain, T, scale_log2,
                True, RAGGED, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        dk, dv = _dkv_tiles(
            dk, dv, k, v, q_mine, grad_mine, lse_mine, delta_mine, q_t, grad_t, first, plain, T, T, scale_log2,
            False, RAGGED, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    _store(dk_ptr + batch * dk_b + head * dk_h + first.to(tl.int64) * dk_s, keys, dk_s, S - first, dk * scale, UPCAST, D, BLOCK_D)
    _store(dv_ptr + batch * dv_b + head * dv_h + first.to(tl.int64) * dv_s, keys, dv_s, S - first, dv, UPCAST, D, BLOCK_D)


@jit
def _dq_tiles(  # type: ignore[no-untyped-def]
    dq, q, grad, lse, delta, k_ptr, v_ptr, k_s, v_s, first, start, stop, S, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys start..stop into dQ."""
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    k_ptr += tl.cast(start, tl.int64) * k_s
    v_ptr += tl.cast(start, tl.int64) * v_s
    for at in range(start, stop, BLOCK_N):
        k = _tile(k_ptr, keys, k_s, S - at, MASKED, D, BLOCK_D)
        v = _tile(v_ptr, keys, v_s, S - at, MASKED, D, BLOCK_D)
        p = tl.exp2(_product(q, tl.trans(k), UPCAST) * scale - lse[:, None])
        if MASKED:
            seen = (at + keys)[None, :] < S
            if CAUSAL:
                seen = seen & ((at + keys)[None, :] <= (first + rows)[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (_product(grad, tl.trans(v), UPCAST) - delta[:, None])
        dq = _dot(narrowed(ds, k.dtype, UPCAST), k, dq, UPCAST)
        k_ptr += BLOCK_N * k_s
        v_ptr += BLOCK_N * v_s
    return dq


@jit
def attention_dq(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    grad_b, grad_h, grad_t, dq_b, dq_h, dq_t, heads, group, T, S, scale, scale_log2,
    CAUSAL: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    rows = tl.arange(0, BLOCK_M)
    q = _tile(q_ptr + batch * q_b + head * q_h + first.to(tl.int64) * q_t, rows, q_t, T - first, True, D, BLOCK_D)
    grad = _tile(grad_ptr + batch * grad_b + head * grad_h + first.to(tl.int64) * grad_t, rows, grad_t, T - first, True, D, BLOCK_D)
    lse = tl.load(lse_ptr + pair.to(tl.int64) * T + first + rows, mask=rows < T - first, other=float("inf"))
    delta = tl.load(delta_ptr + pair.to(tl.int64) * T + first + rows, mask=rows < T - first, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    plain = S // BLOCK_N * BLOCK_N
    stop = S
    if CAUSAL:
        plain = tl.minimum(first, S) // BLOCK_N * BLOCK_N
        stop = tl.minimum(first + BLOCK_M, S)
    dq = _dq_tiles(
        dq, q, grad, lse, delta, k_ptr, v_ptr, k_s, v_s, first, 0, plain, S, scale_log2,
        CAUSAL, False, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dq = _dq_tiles(
        dq, q, grad, lse, delta, k_ptr, v_ptr, k_s, v_s, first, plain, stop, S, scale_log2,
        CAUSAL, True, UPCAST, D, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    _store(dq_ptr + batch * dq_b + head * dq_h + first.to(tl.int64) * dq_t, rows, dq_t, T - first, dq * scale, UPCAST, D, BLOCK_D)
