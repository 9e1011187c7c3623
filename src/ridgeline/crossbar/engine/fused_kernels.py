"""Triton kernels of the fused engine: x to integers, integers times cells with the ADC in between.

    quantise_patches   image ──implicit im2col──> block maxima, q (groups, M, arrays, R), step (groups, M, arrays); was any q < 0?
    multiply_arrays    a tile of out: for every array, q ──digits in registers──> one tensor-core dot for each slice pair
                       ──* scale, + 1.5 * 2^23──> the code in the low bits of a float ──integer shift-add──> * steps, added to out

q is the only thing between them: one small integer for each element of a patch. Digits, sums, codes and products of slices never
leave the registers. R is an array's rows, filled up to a power of two.

Adding 1.5 * 2^23 rounds a float32 to an integer, half to even, and leaves it in the low bits: acc * (p / 2^k) is exact, so ties are
decided rightly; of other scales acc * p / q is divided correctly rounded, which is exact at ties too.
"""

# ruff: noqa: SIM102, SIM108
# A compile-time `if` must stand alone: joined with a run-time one by `and`, or made an expression, Triton compiles both sides.
from __future__ import annotations

from ...kernel.jit import jit, tl
from .fused_noise import four_normals, normal

MAGIC_BITS = 0x4B400000  # of the float 1.5 * 2^23


@jit
def _patch(x, at_m, mask, from_table):  # type: ignore[no-untyped-def]
    """(rows, tile) float32: what these rows of an array see of the patches."""
    entry = tl.load(from_table)
    tap = (entry >> 32).to(tl.int32)
    if mask.dtype == tl.int32:
        inside = (mask[None, :] & tap[:, None]) != 0
    else:
        inside = ((mask[None, :] >> tap[:, None]) & 1) != 0
    return tl.load(x + (at_m[None, :] + entry.to(tl.int32)[:, None]), mask=inside, other=0.0).to(tl.float32)


@jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    """floor(log2(largest + 1e-10)), int32."""
    return ((largest.to(tl.float64) + 1e-10).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023


@jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    """float32, exponents from -127 on; of -127 it is a subnormal."""
    return tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _step(largest, LARGEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value of q = 1; nan where the block held one."""
    if BFP:
        step = tl.where(largest == largest, _power_of_two(_exponent(largest) + 2 - SPAN), largest)
    else:
        step = (largest.to(tl.float64) / LARGEST).to(tl.float32)
    return step


@jit
def _factor(largest, LARGEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a value is multiplied by to get q, near enough: see _rounded."""
    if BFP:
        factor = _power_of_two(SPAN - 2 - _exponent(largest))
    else:
        factor = LARGEST / tl.where(largest > 0.0, largest, 1.0)
    return factor


@jit
def _rounded(v, factor, LARGEST: tl.constexpr, LOWEST: tl.constexpr, BFP: tl.constexpr):  # type: ignore[no-untyped-def]
    """1.5 * 2^23 + q, and by how much it would differ for a factor a few parts in 10^7 off: 0 where q is certain."""
    if BFP:
        t = v * factor[None, :] + 12582912.0  # a power of two: exact
        return tl.minimum(tl.maximum(t, 12582912.0 + LOWEST), 12582912.0 + LARGEST), v * 0.0
    else:
        t = v * (factor * 0.9999996)[None, :] + 12582912.0
        return t, tl.abs(v * (factor * 1.0000004)[None, :] + 12582912.0 - t)


@jit
def _exactly(v, largest, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """1.5 * 2^23 + q as float64 decides it. Nothing is added to the product: the compiler would fuse the two and skip its rounding."""
    divisor = tl.where(largest > 0.0, largest, 1.0).to(tl.float64)
    wide = v.to(tl.float64) / divisor[None, :] * LARGEST
    below = tl.floor(wide)
    half = below + 0.5
    up = (wide > half) | ((wide == half) & ((below.to(tl.int32) & 1) == 1))
    return below.to(tl.float32) + tl.where(up, 12582913.0, 12582912.0)


@jit
def _joined(t0, t1, t2, t3, PACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low bits of each, side by side in an int32."""
    if PACK == 4:
        low = (t0.to(tl.int32, bitcast=True) & 255) | ((t1.to(tl.int32, bitcast=True) & 255) << 8)
        return low | ((t2.to(tl.int32, bitcast=True) & 255) << 16) | (t3.to(tl.int32, bitcast=True) << 24)
    else:
        return (t0.to(tl.int32, bitcast=True) & 65535) | (t1.to(tl.int32, bitcast=True) << 16)


@jit
def quantise_patches(  # type: ignore[no-untyped-def]
    x, table, q_out, step_out, negative, m_all, channels, height, width, out_height, out_width, sb, sc, sh, sw, arrays,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, R: tl.constexpr, A_BLOCK: tl.constexpr, EACH: tl.constexpr, PACK: tl.constexpr,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, BFP: tl.constexpr, SPAN: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of M, EACH blocks of A_BLOCK arrays that share a scale, groups); a row of x has scales of its own.

    M runs over image, y, x. A patch's mask has a bit for each tap that lies inside the image. table (arrays, R), int64, says of each row
    of an array where it lies from the first element of its patch (low half) and which bit it needs (high half: the bit, or of 32 taps
    and more its number); rows without a weight need one that is never set.
    SHARED, where rows share a scale: 1 writes a row's maximum in place of its step and nothing else; 2 reads what maxima became of them.
    Lanes run along M, where the image is contiguous; PACK neighbouring rows of an array, one integer each, are written as one int32.
    """
    group = tl.program_id(2)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = m % (out_height * out_width)
    y, across = place // out_width * SH - PH, place % out_width * SW - PW
    at_m = m // (out_height * out_width) * sb + y * sh + across * sw + group * channels * sc
    across_mask = tl.zeros((TILE,), tl.int32 if KH * KW < 32 else tl.int64)
    for kx in tl.static_range(KW):
        inside = (across + kx * DW >= 0) & (across + kx * DW < width) & (m < m_all)
        across_mask = across_mask | (inside.to(across_mask.dtype) << kx)
    mask = across_mask * 0
    for ky in tl.static_range(KH):
        mask = mask | tl.where((y + ky * DH >= 0) & (y + ky * DH < height), across_mask << (ky * KW), 0)
    row = tl.arange(0, R // PACK)
    least = tl.zeros((TILE,), tl.float32)
    for block in range(EACH):
        first = (tl.program_id(1) * EACH + block) * A_BLOCK
        if first < arrays:
            most = tl.zeros((TILE,), tl.int32)
            v0 = tl.zeros((R // PACK, TILE), tl.float32)
            v1, v2, v3 = v0, v0, v0
            for a in range(A_BLOCK):
                at = table + tl.minimum(first + a, arrays - 1) * R + row * PACK
                v0 = _patch(x, at_m, mask, at)
                v1 = _patch(x, at_m, mask, at + 1)
                v2 = _patch(x, at_m, mask, at + 2) if PACK == 4 else v0
                v3 = _patch(x, at_m, mask, at + 3) if PACK == 4 else v1
                bits = tl.maximum(v0.to(tl.int32, bitcast=True) & 0x7FFFFFFF, v1.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
                if PACK == 4:  # as integers: nan is above all others
                    bits = tl.maximum(bits, v2.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
                    bits = tl.maximum(bits, v3.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
                most = tl.maximum(most, tl.max(bits, 0))
                least = tl.minimum(least, tl.min(tl.minimum(tl.minimum(v0, v1), tl.minimum(v2, v3)), 0))
            largest = most.to(tl.float32, bitcast=True)
            if SHARED == 2:
                largest = tl.load(step_out + (group.to(tl.int64) * m_all + m) * arrays + first, mask=m < m_all, other=0.0)
            factor = _factor(largest, LARGEST, BFP, SPAN)
            step = largest if SHARED == 1 else _step(largest, LARGEST, BFP, SPAN)
            for a in range(A_BLOCK):
                if A_BLOCK > 1:
                    at = table + tl.minimum(first + a, arrays - 1) * R + row * PACK
                    v0 = _patch(x, at_m, mask, at)
                    v1 = _patch(x, at_m, mask, at + 1)
                    v2 = _patch(x, at_m, mask, at + 2) if PACK == 4 else v0
                    v3 = _patch(x, at_m, mask, at + 3) if PACK == 4 else v1
                t0, off0 = _rounded(v0, factor, LARGEST, LOWEST, BFP)
                t1, off1 = _rounded(v1, factor, LARGEST, LOWEST, BFP)
                t2, off2 = _rounded(v2, factor, LARGEST, LOWEST, BFP)
                t3, off3 = _rounded(v3, factor, LARGEST, LOWEST, BFP)
                q = _joined(t0, t1, t2, t3, PACK)
                off = tl.max(tl.max(tl.maximum(tl.maximum(off0, off1), tl.maximum(off2, off3)), 0), 0)
                if off + tl.max((factor > 1e37).to(tl.float32), 0) > 0.0:  # float32 cannot tell on which side of a half some value lies
                    if not BFP:
                        q = _joined(
                            _exactly(v0, largest, LARGEST), _exactly(v1, largest, LARGEST), _exactly(v2, largest, LARGEST),
                            _exactly(v3, largest, LARGEST), PACK,
                        )  # fmt: skip
                if first + a < arrays:
                    to = (group.to(tl.int64) * m_all + m) * arrays + first + a
                    if SHARED != 1:
                        tl.store(q_out + to[:, None] * (R // PACK) + row[None, :], tl.trans(q), mask=(m < m_all)[:, None])
                    tl.store(step_out + to, step, mask=m < m_all)
    tl.store(negative + m * 0, 1, mask=least < 0.0)


@jit
def _digits(q, SHIFT: tl.constexpr, MOST: tl.constexpr, PACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(q >> SHIFT) & MOST of the PACK integers in a register; what crosses from one to the next is masked out.

    Assembly must be a literal (no string can be built here, and older Tritons take none as a constant), so there is a line for each shift.
    """
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
        digit = (tl.abs(q.to(tl.int32)) >> SHIFT) & MOST
    else:
        digit = (q >> SHIFT) & MOST
    if TOP > 0:
        digit = (2 * digit.to(tl.int32) * TOP + MOST) // (2 * MOST)
    if MAGNITUDE:
        digit = tl.where(q < 0, -digit, digit)
    return digit


@jit
def _code(  # type: ignore[no-untyped-def]
    total, extra, MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, CLIP: tl.constexpr,
    SHIFT: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Column sums (float32) → the bits of 1.5 * 2^23 + code."""
    if DIVIDE > 1.0:
        exact = tl.div_rn(total * MULTIPLY, DIVIDE)
        if NOISY:
            exact += extra
        t = (exact + SHIFT) + 12582912.0
    elif NOISY:
        t = (total * MULTIPLY + (extra + SHIFT)) + 12582912.0
    elif SHIFT != 0.0:
        t = (total * MULTIPLY + SHIFT) + 12582912.0
    else:
        # a plain sum would become the start of the dot before it, and tensor cores lose small products beside 1.5 * 2^23
        t = tl.fma(total, tl.full(total.shape, MULTIPLY, tl.float32), tl.full(total.shape, 12582912.0, tl.float32))
    if CLIP:
        t = tl.minimum(tl.maximum(t, 12582912.0 + LOWEST), 12582912.0 + HIGHEST)
    return t.to(tl.int32, bitcast=True)


@jit
def _signal(  # type: ignore[no-untyped-def]
    q, w, SHIFT: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr, PACKED: tl.constexpr, MAGNITUDE: tl.constexpr,
    COLLAPSED: tl.constexpr,
):  # fmt: skip
    """What drives the rows: levels of one slice of q in the type of the cells; of a collapsed product q itself."""
    if COLLAPSED:
        x = q.to(w.dtype)
    elif PACKED:  # whole numbers are subnormals of a float: n * 2^-9 of float8, n * 2^-24 of float16
        x = _digits(q, SHIFT, MOST, 2 if w.dtype == tl.float16 else 4)
        if w.dtype != tl.int8:
            x = x.to(w.dtype, bitcast=True)
    else:
        x = _level(q, SHIFT, MOST, TOP, MAGNITUDE).to(w.dtype)
    return x


@jit
def _dot(x, w):  # type: ignore[no-untyped-def]
    """Column sums of an array: exact for whole numbers in every type."""
    if w.dtype == tl.int8:
        total = tl.dot(x, w, out_dtype=tl.int32)
    elif w.dtype == tl.float8e4nv:
        total = tl.dot(x, w, out_dtype=tl.float32)
    else:
        total = tl.dot(x, w, out_dtype=tl.float32, input_precision="ieee")
    return total


@jit
def _reference_column(  # type: ignore[no-untyped-def]
    q, FIRST: tl.constexpr, SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOPS: tl.constexpr, REFERENCE: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, CLIP: tl.constexpr, SX: tl.constexpr, DOWN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """(BM,): what the column of highest cells says is to be taken off, in units of worth.

    The ADC of slice 0 reads it, without noise. REFERENCE: of each slice of x multiplier and divisor of a sum, and what a code is worth.
    """
    found = tl.zeros((BM,), tl.float32)
    for i in tl.static_range(FIRST, SX):
        level = _level(q, SHIFTS[i], MOSTS[i], TOPS[i], False).to(tl.int32)
        total = tl.sum(level, 1).to(tl.float32)
        bits = _code(total, 0.0, REFERENCE[3 * i], REFERENCE[3 * i + 1], LOWEST[0], HIGHEST[0], CLIP, DOWN[0], False)
        found += (bits - 0x4B400000).to(tl.float32) * REFERENCE[3 * i + 2]
    return found


@jit
def _arrays(  # type: ignore[no-untyped-def]
    q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma,
    k_all, k_first, n_first, arrays, n_padded,
    FIRST: tl.constexpr, SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOPS: tl.constexpr, PACKED: tl.constexpr, MAGNITUDE: tl.constexpr,
    MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, WORTH: tl.constexpr, WORTH_SUM: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CLIP: tl.constexpr, COLLAPSED: tl.constexpr, WHOLE: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr,
    REFERENCE: tl.constexpr, OFFSET: tl.constexpr, DOWN: tl.constexpr, SX: tl.constexpr, SW: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr,
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
                x = _signal(q, w, SHIFTS[i], MOSTS[i], TOPS[i], PACKED, MAGNITUDE, COLLAPSED)
                if NOISE & 2:
                    index = (safe.to(tl.int64)[:, None] * k_all + k_first + a * ROWS + row[None, :]) * SX + i
                    x = (x.to(tl.float32) * (1.0 + dac_sigma * normal(index, layer * 16 + 2, call, seed, chip))).to(w.dtype)
                total = _dot(x, w)
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
                        total.to(tl.float32),
                        extra,
                        MULTIPLY[i * SW + j],
                        DIVIDE[i * SW + j],
                        LOWEST[j],
                        HIGHEST[j],
                        CLIP,
                        DOWN[j],
                        NOISE != 0,
                    )
                    if WHOLE:
                        added += bits * WORTH[i * SW + j]
                    else:
                        added += (bits - 0x4B400000).to(tl.float32) * WORTH[i * SW + j]
                    if KEEP:
                        to = (((a * SX + i) * SW + j) * m_all.to(tl.int64) + m[:, None]) * n_all + n[None, :]
                        tl.store(codes + to, bits - 0x4B400000, mask=(m < m_all)[:, None] & (n < n_all)[None, :])
        summed = added.to(tl.float32)
        if OFFSET:
            summed -= _reference_column(q, FIRST, SHIFTS, MOSTS, TOPS, REFERENCE, LOWEST, HIGHEST, CLIP, SX, DOWN, BM)[:, None]
        out += summed * x_scale[:, None] * w_scale[None, :]
    return out


@jit
def multiply_arrays(  # type: ignore[no-untyped-def]
    q_in, x_step, w_in, w_step, bias, negative, offsets, codes, out, m_all, n_all, length, so_image, so_channel, so_place,
    channels, layer, call, seed, chip, adc_sigma, dac_sigma, k_group, arrays, n_padded,
    SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOPS: tl.constexpr, PACKED: tl.constexpr, MAGNITUDE: tl.constexpr,
    MULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, WORTH: tl.constexpr, SUM_ALL: tl.constexpr, SUM_SKIPPED: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CLIP: tl.constexpr, COLLAPSED: tl.constexpr, WHOLE: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr, SKIP: tl.constexpr,
    REFERENCE: tl.constexpr, OFFSET: tl.constexpr, DOWN: tl.constexpr, SX: tl.constexpr, SW: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr,
    BIAS: tl.constexpr, FLIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of M x N, groups). q (groups, M, arrays, R), w (groups, slices, arrays, N', R). Tiles of N, neighbours, share q."""
    group = tl.program_id(1).to(tl.int64)
    tiles = n_padded // BN
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    q_in += group * m_all * arrays * R
    x_step += group * m_all * arrays
    w_in += group * SW * arrays * n_padded * R
    w_step += group * arrays * n_padded
    offsets += group * arrays * SW * n_padded
    n_first = group * n_all
    k_first = group * k_group
    k_all = k_group * tl.num_programs(1)
    if SKIP:
        if tl.load(negative) != 0:
            found = _arrays(
                q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma,
                k_all, k_first, n_first, arrays, n_padded, 0, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH,
                SUM_ALL, LOWEST, HIGHEST, CLIP, COLLAPSED, WHOLE, NOISE, KEEP, REFERENCE, OFFSET, DOWN, SX, SW, PAIRS, ROWS, R, BM, BN,
            )  # fmt: skip
        else:
            found = _arrays(
                q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma,
                k_all, k_first, n_first, arrays, n_padded, 1, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH,
                SUM_SKIPPED, LOWEST, HIGHEST, CLIP, COLLAPSED, WHOLE, NOISE, KEEP, REFERENCE, OFFSET, DOWN, SX, SW, PAIRS, ROWS, R, BM, BN,
            )  # fmt: skip
    else:
        found = _arrays(
            q_in, x_step, w_in, w_step, offsets, codes, m, n, m_all, n_all, channels, layer, call, seed, chip, adc_sigma, dac_sigma,
            k_all, k_first, n_first, arrays, n_padded, 0, SHIFTS, MOSTS, TOPS, PACKED, MAGNITUDE, MULTIPLY, DIVIDE, WORTH,
            SUM_ALL, LOWEST, HIGHEST, CLIP, COLLAPSED, WHOLE, NOISE, KEEP, REFERENCE, OFFSET, DOWN, SX, SW, PAIRS, ROWS, R, BM, BN,
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
