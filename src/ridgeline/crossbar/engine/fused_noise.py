"""Counter noise inside Triton kernels: the numbers of noise.py, to rounding.

counter ──Philox4x32-10──> four words ──Box and Muller──> four normals (float32, within 1e-6 of the exact ones)
draw_words   words of any counters in one launch, where noise.py would need a hundred
read_cells   programmed levels ──> levels of this call, once for all of the batch
"""

from __future__ import annotations

from ...kernel.jit import jit, tl


@jit
def _philox(index, layer_kind, call, seed, chip):  # type: ignore[no-untyped-def]
    """Four words of counter `index` (int64), Philox4x32-10; see noise.py."""
    c0 = (index & 0xFFFFFFFF).to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = (index * 0 + layer_kind).to(tl.uint32)
    c3 = (index * 0 + call).to(tl.uint32)
    k0 = (index * 0 + seed).to(tl.uint32)
    k1 = (index * 0 + chip).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32))
        low0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        low1 = c2 * tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@jit
def draw_words(index, out, count, layer_kind, call, seed, chip, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 (count,) → int64 (4, count): the words of each counter."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    w0, w1, w2, w3 = _philox(tl.load(index + at, mask=inside, other=0), layer_kind, call, seed, chip)
    tl.store(out + at, w0.to(tl.int64), mask=inside)
    tl.store(out + count + at, w1.to(tl.int64), mask=inside)
    tl.store(out + 2 * count + at, w2.to(tl.int64), mask=inside)
    tl.store(out + 3 * count + at, w3.to(tl.int64), mask=inside)


@jit
def _radius(word):  # type: ignore[no-untyped-def]
    """sqrt(-2 ln u), u = ((word >> 8) + 1) * 2^-24; the logarithm by its series, as the GPU's own loses digits near u = 1."""
    u = ((word >> 8).to(tl.int32) + 1).to(tl.float32) * 5.9604644775390625e-08
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    z = s * s
    series = 1.0 + z * (0.33333333333 + z * (0.2 + z * (0.14285714286 + z * (0.11111111111 + z * 0.0909090909))))
    return tl.sqrt_rn(-2.0 * (2.0 * s * series + exponent.to(tl.float32) * 0.6931471805599453))


@jit
def _cosine_sine(word):  # type: ignore[no-untyped-def]
    """cos and sin of 2 pi u, u = (word >> 8) * 2^-24: the quadrant exactly, the rest by series."""
    quarter = (word >> 8).to(tl.int32).to(tl.float32) * 2.384185791015625e-07
    place = (quarter + 0.5).to(tl.int32)
    a = (quarter - place.to(tl.float32)) * 1.5707963267948966
    b = a * a
    sine = a * (1.0 + b * (-0.16666666667 + b * (8.3333333333e-3 + b * (-1.9841269841e-4 + b * 2.7557319224e-6))))
    cosine = 1.0 + b * (-0.5 + b * (4.1666666667e-2 + b * (-1.3888888889e-3 + b * (2.4801587302e-5 - b * 2.7557319224e-7))))
    odd = (place & 1) == 1
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    first = tl.where((place & 3) == 1, -first, tl.where((place & 3) == 2, -first, first))
    second = tl.where((place & 3) >= 2, -second, second)
    return first, second


@jit
def normal(index, layer_kind, call, seed, chip):  # type: ignore[no-untyped-def]
    """The standard normal of each index (int64), float32."""
    w0, w1, w2, w3 = _philox(index >> 2, layer_kind, call, seed, chip)
    upper = (index & 2) != 0
    first = tl.where(upper, w2, w0)
    second = tl.where(upper, w3, w1)
    cosine, sine = _cosine_sine(second)
    return _radius(first) * tl.where((index & 1) != 0, sine, cosine)


@jit
def four_normals(counter, layer_kind, call, seed, chip):  # type: ignore[no-untyped-def]
    """All four of a counter (int64): those of indices 4 * counter … 4 * counter + 3."""
    w0, w1, w2, w3 = _philox(counter, layer_kind, call, seed, chip)
    cosine, sine = _cosine_sine(w1)
    other_cosine, other_sine = _cosine_sine(w3)
    radius, other = _radius(w0), _radius(w2)
    return radius * cosine, radius * sine, other * other_cosine, other * other_sine


@jit
def draw_normals(out, count, layer_kind, call, seed, chip, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """For tests: the normals of 0, 1, …"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, normal(at.to(tl.int64), layer_kind, call, seed, chip), mask=at < count)


@jit
def _normals_of_tile(first, row, n, layer_kind, call, seed, chip, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, columns]: those of indices first + row * n + column; ALIGNED: four columns share a counter, which is drawn from once."""
    start = tl.program_id(1) * BLOCK_N
    if ALIGNED:
        counter = (first + start) // 4 + (row * (n // 4))[:, None] + tl.arange(0, BLOCK_N // 4)[None, :]
        z0, z1, z2, z3 = four_normals(counter, layer_kind, call, seed, chip)
        z = tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))
    else:
        z = normal(first + start + (row * n)[:, None] + tl.arange(0, BLOCK_N)[None, :], layer_kind, call, seed, chip)
    return z


@jit
def read_cells(  # type: ignore[no-untyped-def]
    planes, sigmas, out, count, plane, k, n, low, top, layer_kind, call, seed, chip, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr, ARRAYS: tl.constexpr, N_PADDED: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """planes (1 or 2, groups * slices, K', N) → out (groups * slices, arrays, N', R); grid (groups * slices, N / BLOCK_N, rows of arrays).

    Cells lie along columns and are stored along rows: a tile is read and written in whole lines. count: cells of one plane;
    plane: the same with the rows that pad K. ALIGNED: n is a multiple of four.
    """
    blocks: tl.constexpr = (ROWS + BLOCK_K - 1) // BLOCK_K  # of an array's rows
    part, array = tl.program_id(0).to(tl.int64), tl.program_id(2) // blocks
    row = tl.program_id(2) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = ((row < ROWS) & (array * ROWS + row < k))[:, None] & (column < n)[None, :]
    first = (part * k + array * ROWS) * n  # cell of this array's first row
    at = (part * (ARRAYS * ROWS) + array * ROWS) * n
    cell = row[:, None] * n + column[None, :]
    z = _normals_of_tile(first, row, n, layer_kind, call, seed, chip, ALIGNED, BLOCK_N)
    read = _read_one(planes + at + cell, sigmas, z, inside, low, top)
    if PAIR:
        z = _normals_of_tile(first + count, row, n, layer_kind, call, seed, chip, ALIGNED, BLOCK_N)
        read -= _read_one(planes + plane + at + cell, sigmas, z, inside, low, top)
    to = (part * ARRAYS + array) * (N_PADDED * R)
    tl.store(out + to + column[None, :] * R + row[:, None], read.to(out.dtype.element_ty), mask=inside)


@jit
def _read_one(pointer, sigmas, z, inside, low, top):  # type: ignore[no-untyped-def]
    level = tl.load(pointer, mask=inside, other=0).to(tl.float32)
    nearest = tl.minimum(tl.maximum(level + 0.5, 0.0), top).to(tl.int32)
    sigma = tl.load(sigmas + nearest, mask=inside, other=0.0)
    return (level + low) * tl.exp(sigma * z) - low
