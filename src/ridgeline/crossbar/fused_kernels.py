"""Triton kernels of the fused engine: x to integers, integers times cells with the ADC in between, cells as a call reads them.

    quantise_patches   image ──implicit im2col──> block maxima, q (groups, M, arrays, R), step (groups, M, arrays); was any q < 0?
    multiply_arrays    a tile of out: for every array, q ──digits in registers──> one tensor-core dot for each slice pair
                       ──* scale, + 1.5 * 2^23──> the code in the low bits of a float ──integer shift-add──> * steps, added to out
    read_cells         programmed levels ──counter noise──> levels of this call, once for all of the batch

q is the only thing between them: one small integer for each element of a patch. Digits, sums, codes and products of slices never
leave the registers. R is an array's rows, filled up to a power of two.

Adding 1.5 * 2^23 rounds a float32 to an integer, half to even, and leaves it in the low bits: acc * (p / 2^k) is exact, so ties are
decided rightly; of other scales acc * p / q is divided correctly rounded, which is exact at ties too.
"""

from __future__ import annotations

from ..kernel.jit import jit, tl

MAGIC_BITS = 0x4B400000  # of the float 1.5 * 2^23


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
def read_cells(  # type: ignore[no-untyped-def]
    planes, sigmas, out, count, k, n, low, top, layer_kind, call, seed, chip,
    ROWS: tl.constexpr, R: tl.constexpr, ARRAYS: tl.constexpr, N_PADDED: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """planes (1 or 2, groups * slices, K', N) → out (groups * slices, arrays, N', R); grid over cells (groups * slices, K, N)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    column = index % n
    row = (index // n) % k
    part = index // n // k
    at = (part * (ARRAYS * ROWS) + row) * n + column
    read = _read_one(planes + at, sigmas, index, inside, low, top, layer_kind, call, seed, chip)
    if PAIR:
        plane = count // n // k * (ARRAYS * ROWS) * n
        read -= _read_one(planes + plane + at, sigmas, index + count, inside, low, top, layer_kind, call, seed, chip)
    to = ((part * ARRAYS + row // ROWS) * N_PADDED + column) * R + row % ROWS
    tl.store(out + to, read.to(out.dtype.element_ty), mask=inside)


@jit
def _read_one(pointer, sigmas, index, inside, low, top, layer_kind, call, seed, chip):  # type: ignore[no-untyped-def]
    level = tl.load(pointer, mask=inside, other=0).to(tl.float32)
    nearest = tl.minimum(tl.maximum(level + 0.5, 0.0), top).to(tl.int32)
    sigma = tl.load(sigmas + nearest, mask=inside, other=0.0)
    return (level + low) * tl.exp(sigma * normal(index, layer_kind, call, seed, chip)) - low


@jit
def _integers(v, largest, LARGEST: tl.constexpr, LOWEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """v (rows, tile) and the maximum of each column's block → the bits of 1.5 * 2^23 + q, to the bit what float64 gives."""
    if BFP:
        exponent = ((largest.to(tl.float64) + 1e-10).to(tl.int64, bitcast=True) >> 52) - 1023
        factor = ((SPAN - 2 + 1023 - exponent) << 52).to(tl.float64, bitcast=True).to(tl.float32)
        t = v * factor[None, :] + 12582912.0  # a power of two: exact
        t = tl.minimum(tl.maximum(t, 12582912.0 + LOWEST), 12582912.0 + LARGEST)
        return t.to(tl.int32, bitcast=True)
    divisor = tl.where(largest > 0.0, largest, 1.0)
    inverse = LARGEST / divisor
    t = v * (inverse * 0.9999996)[None, :] + 12582912.0
    above = v * (inverse * 1.0000004)[None, :] + 12582912.0
    unsure = tl.max(tl.max(tl.abs(above - t), 0), 0) + tl.max((inverse > 1e37).to(tl.float32), 0)
    if unsure > 0.0:  # float32 cannot tell on which side of a half some value lies
        wide = v.to(tl.float64) / divisor.to(tl.float64)[None, :] * LARGEST
        t = ((wide + 6755399441055744.0) - 6755399441055744.0).to(tl.float32) + 12582912.0
    return t.to(tl.int32, bitcast=True)


@jit
def _patch(x, table, at_m, mask, array, arrays, row, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """(R, tile) float32: what one array sees of the patches; an array that does not exist sees what the last one does."""
    from_table = table + tl.minimum(array, arrays - 1) * (2 * R) + row
    inside = ((mask[None, :] >> tl.load(from_table + R)[:, None]) & 1) != 0
    return tl.load(x + (at_m[None, :] + tl.load(from_table)[:, None]), mask=inside, other=0.0).to(tl.float32)


@jit
def _step(largest, LARGEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value of q = 1; nan where the block held one."""
    if BFP:
        exponent = ((largest.to(tl.float64) + 1e-10).to(tl.int64, bitcast=True) >> 52) - 1023
        step = ((exponent + (2 - SPAN + 1023)) << 52).to(tl.float64, bitcast=True).to(tl.float32)
        return tl.where(largest == largest, step, largest)
    return (largest.to(tl.float64) / LARGEST).to(tl.float32)


@jit
def quantise_patches(  # type: ignore[no-untyped-def]
    x, table, q_out, step_out, negative, m_all, channels, height, width, out_height, out_width, sb, sc, sh, sw, arrays,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, R: tl.constexpr, A_BLOCK: tl.constexpr, EACH: tl.constexpr,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of M, EACH blocks of A_BLOCK arrays that share a scale, groups); a row of x has scales of its own.

    M runs over image, y, x. table (arrays, 2, R) says of each row of an array where it lies from the first element of its patch, and
    which bit of a patch's mask it needs: one for each tap that lies inside the image; rows without a weight need one that is never set.
    """
    group = tl.program_id(2)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, R)
    place = m % (out_height * out_width)
    y, across = place // out_width * SH - PH, place % out_width * SW - PW
    at_m = m // (out_height * out_width) * sb + y * sh + across * sw + group * channels * sc
    mask = tl.zeros((TILE,), tl.int32 if KH * KW < 32 else tl.int64)
    for kx in tl.static_range(KW):
        inside = (across + kx * DW >= 0) & (across + kx * DW < width) & (m < m_all)
        mask = mask | (inside.to(mask.dtype) << kx)
    across_mask = mask
    mask = across_mask * 0
    for ky in tl.static_range(KH):
        mask = mask | tl.where((y + ky * DH >= 0) & (y + ky * DH < height), across_mask << (ky * KW), 0)
    least = 0.0
    for block in range(EACH):
        first = (tl.program_id(1) * EACH + block) * A_BLOCK
        if first < arrays:
            most = tl.zeros((TILE,), tl.int32)
            v = tl.zeros((R, TILE), tl.float32)
            for a in range(A_BLOCK):
                v = _patch(x, table, at_m, mask, first + a, arrays, row, R)
                most = tl.maximum(most, tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))  # as integers: nan is above all others
                least = tl.minimum(least, tl.min(tl.min(v, 0), 0))
            largest = most.to(tl.float32, bitcast=True)
            step = _step(largest, LARGEST, BFP, SPAN)
            for a in range(A_BLOCK):
                if A_BLOCK > 1:
                    v = _patch(x, table, at_m, mask, first + a, arrays, row, R)
                q = _integers(v, largest, LARGEST, LOWEST, BFP, SPAN).to(q_out.dtype.element_ty)  # the low bits are q
                if first + a < arrays:
                    to = (group.to(tl.int64) * m_all + m) * arrays + first + a
                    tl.store(q_out + to[:, None] * R + row[None, :], tl.trans(q), mask=(m < m_all)[:, None])
                    tl.store(step_out + to, step, mask=m < m_all)
    if least < 0.0:
        tl.store(negative, 1)


@jit
def _digits(q, SHIFT: tl.constexpr, MOST: tl.constexpr, PACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(q >> SHIFT) & MOST of the PACK integers in a register; what crosses from one to the next is masked out."""
    most = tl.full(q.shape, MOST, q.dtype)
    if SHIFT == 0:
        digits = tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK)
    elif SHIFT == 1:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 1; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    elif SHIFT == 2:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 2; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    elif SHIFT == 3:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 3; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    elif SHIFT == 4:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 4; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    elif SHIFT == 5:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 5; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    elif SHIFT == 6:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 6; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    else:
        digits = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 7; and.b32 $0, $0, $2;", "=&r,r,r", [q, most], dtype=q.dtype, is_pure=True, pack=PACK
        )
    return digits


@jit
def _level(q, SHIFT: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr, MAGNITUDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The digit of one slice; TOP > 0: the DAC's level for it, of TOP + 1."""
    if MAGNITUDE:
        wide = tl.abs(q.to(tl.int32))
        digit = (wide >> SHIFT) & MOST
        if TOP > 0:
            digit = (2 * digit * TOP + MOST) // (2 * MOST)
        return tl.where(q < 0, -digit, digit)
    digit = (q >> SHIFT) & MOST
    if TOP > 0:
        digit = (2 * digit.to(tl.int32) * TOP + MOST) // (2 * MOST)
    return digit


@jit
def _code(total, extra, MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, CLIP: tl.constexpr,  # type: ignore[no-untyped-def]
          NOISY: tl.constexpr):  # fmt: skip
    """Column sums (float32) → the bits of 1.5 * 2^23 + code."""
    if DIVIDE > 1.0:
        exact = tl.div_rn(total * MULTIPLY, DIVIDE)
        if NOISY:
            exact += extra
        t = exact + 12582912.0
    elif NOISY:
        t = (total * MULTIPLY + extra) + 12582912.0
    else:
        t = total * MULTIPLY + 12582912.0
    if CLIP:
        t = tl.minimum(tl.maximum(t, 12582912.0 + LOWEST), 12582912.0 + HIGHEST)
    return t.to(tl.int32, bitcast=True)


@jit
def _arrays(  # type: ignore[no-untyped-def]
    q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_all, k_first, n_first, arrays, n_padded,
    FIRST: tl.constexpr, SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOPS: tl.constexpr, PACKED: tl.constexpr, MAGNITUDE: tl.constexpr,
    MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, WORTH: tl.constexpr, WORTH_SUM: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CLIP: tl.constexpr, COLLAPSED: tl.constexpr, WHOLE: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr,
    SX: tl.constexpr, SW: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(BM, BN) of the product, with slices FIRST … SX - 1 of x. NOISE: 1 of the ADC, 2 of the DAC, 4 offsets of converters."""
    row = tl.arange(0, R)
    out = tl.zeros((BM, BN), tl.float32)
    safe = tl.where(m < m_all, m, 0)
    q_at = q_in + safe.to(tl.int64)[:, None] * (arrays * R) + row[None, :]
    x_at = x_step + safe.to(tl.int64) * arrays
    w_at = w_in + n[None, :] * R + row[:, None]
    for a in range(arrays):
        q = tl.load(q_at + a * R)
        if PACKED and w_in.dtype.element_ty == tl.float16:
            q = q.to(tl.uint8, bitcast=True).to(tl.int16)
        x_scale = tl.load(x_at + a)
        w_scale = tl.load(w_step + a * n_padded + n)
        if WHOLE:
            added = tl.full((BM, BN), WORTH_SUM, tl.int32)
        else:
            added = tl.zeros((BM, BN), tl.float32)
        for j in tl.static_range(SW):
            w = tl.load(w_at + (j * arrays + a) * (n_padded * R))
            for i in tl.static_range(FIRST, SX):
                if COLLAPSED:
                    x = q.to(w.dtype)
                elif PACKED:  # whole numbers are subnormals of a float: n * 2^-9 of float8, n * 2^-24 of float16
                    x = _digits(q, SHIFTS[i], MOSTS[i], 2 if w.dtype == tl.float16 else 4)
                    if w.dtype != tl.int8:
                        x = x.to(w.dtype, bitcast=True)
                else:
                    x = _level(q, SHIFTS[i], MOSTS[i], TOPS[i], MAGNITUDE).to(w.dtype)
                if NOISE & 2:
                    index = (safe.to(tl.int64)[:, None] * k_all + k_first + a * ROWS + row[None, :]) * SX + i
                    x = (x.to(tl.float32) * (1.0 + dac_sigma * normal(index, layer * 16 + 2, call, seed, chip))).to(w.dtype)
                if w.dtype == tl.int8:
                    total = tl.dot(x, w, out_dtype=tl.int32)
                elif w.dtype == tl.float8e4nv:
                    total = tl.dot(x, w, out_dtype=tl.float32)
                else:
                    total = tl.dot(x, w, out_dtype=tl.float32, input_precision="ieee")
                if COLLAPSED:
                    added += total.to(tl.int32)
                else:
                    extra = 0.0
                    if NOISE & 4:
                        extra += tl.load(offsets + (a * SW + j) * n_padded + n)[None, :]
                    if NOISE & 1:
                        if (j * SX + i) % 4 == 0:  # one counter serves four slice pairs
                            at = ((m.to(tl.int64)[:, None] * channels + n_first + n[None, :]) * arrays + a) * PAIRS + (j * SX + i) // 4
                            z0, z1, z2, z3 = four_normals(at, layer * 16 + 3, call, seed, chip)
                        if (j * SX + i) % 4 == 0:
                            extra += adc_sigma * z0
                        elif (j * SX + i) % 4 == 1:
                            extra += adc_sigma * z1
                        elif (j * SX + i) % 4 == 2:
                            extra += adc_sigma * z2
                        else:
                            extra += adc_sigma * z3
                    bits = _code(
                        total.to(tl.float32), extra, MULTIPLY[i * SW + j], DIVIDE[i * SW + j], LOWEST[j], HIGHEST[j], CLIP, NOISE != 0
                    )
                    if WHOLE:
                        added += bits * WORTH[i * SW + j]
                    else:
                        added += (bits - 0x4B400000).to(tl.float32) * WORTH[i * SW + j]
                    if KEEP:
                        to = (((a * SX + i) * SW + j) * m_all.to(tl.int64) + m[:, None]) * n_all + n[None, :]
                        tl.store(codes + to, bits - 0x4B400000, mask=(m < m_all)[:, None] & (n < n_all)[None, :])
        out += added.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    return out


@jit
def multiply_arrays(  # type: ignore[no-untyped-def]
    q_in, x_step, w_in, w_step, bias, negative, offsets, codes, out, m_all, n_all, length, so_image, so_channel, so_place,
    channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_group, arrays, n_padded,
    SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOPS: tl.constexpr, PACKED: tl.constexpr, MAGNITUDE: tl.constexpr, MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr,
    WORTH: tl.constexpr, SUM_ALL: tl.constexpr, SUM_SKIPPED: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CLIP: tl.constexpr, COLLAPSED: tl.constexpr, WHOLE: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr, SKIP: tl.constexpr,
    SX: tl.constexpr, SW: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    BIAS: tl.constexpr, FLIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of M x N, groups). q (groups, M, arrays, R), w (groups, slices, arrays, N', R); tiles of N are neighbours: they share q."""
    group = tl.program_id(1).to(tl.int64)
    tiles = n_padded // BN
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    q_in += group * m_all * arrays * R
    x_step += group * m_all * arrays
    w_in += group * SW * arrays * n_padded * R
    w_step += group * arrays * n_padded
    n_first = group * n_all
    k_first = group * k_group
    k_all = k_group * tl.num_programs(1)
    if SKIP:
        if tl.load(negative) != 0:
            found = _arrays(
                q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_all,
                k_first, n_first, arrays, n_padded, 0, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH, SUM_ALL, LOWEST, HIGHEST,
                CLIP, COLLAPSED, WHOLE, NOISE, KEEP, SX, SW, PAIRS, ROWS, R, BM, BN,
            )  # fmt: skip
        else:
            found = _arrays(
                q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_all,
                k_first, n_first, arrays, n_padded, 1, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH, SUM_SKIPPED, LOWEST, HIGHEST,
                CLIP, COLLAPSED, WHOLE, NOISE, KEEP, SX, SW, PAIRS, ROWS, R, BM, BN,
            )  # fmt: skip
    else:
        found = _arrays(
            q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_all,
            k_first, n_first, arrays, n_padded, 0, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH, SUM_ALL, LOWEST, HIGHEST,
            CLIP, COLLAPSED, WHOLE, NOISE, KEEP, SX, SW, PAIRS, ROWS, R, BM, BN,
        )  # fmt: skip
    channel = group * n_all + n
    if BIAS:
        found += tl.load(bias + channel, mask=n < n_all, other=0.0)[None, :]
    place = (m // length).to(tl.int64) * so_image + (m % length) * so_place
    if FLIP:
        at = place[None, :] + (channel * so_channel)[:, None]
        tl.store(out + at, tl.trans(found), mask=(m < m_all)[None, :] & (n < n_all)[:, None])
    else:
        at = place[:, None] + (channel * so_channel)[None, :]
        tl.store(out + at, found, mask=(m < m_all)[:, None] & (n < n_all)[None, :])
