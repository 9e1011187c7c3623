"""What a gemv program does with the x and the weights of a thread: read, norm, narrow, multiply.

    x ──read_x──> int32 words of two halves, beside each thread's 128 bits of weights ──gained (rms norm)──> x * gain
      ──narrow_*──> float16 pairs and a power of two a thread          weights ──*_dot──> [BN, BW / 4], a sum a thread and row

Words are loaded in the shape in which weights are taken apart, so that a thread finds its x in its own registers: through shared memory
they cost more than a small product. int8 and int4 become float16 by one logic operation a pair and are multiplied and summed two at a
time, over at most 32 products a thread, then in float32; a thread's x is brought to a largest value below 2 by a power of two of its own,
so nothing overflows. For bfloat16 x only, whose own rounding is 8 times as coarse. EMULATED: the interpreter runs no assembly.
"""

from __future__ import annotations

from .jit import jit, tl
from .weight_only_kernels import apart, byte, pair


@jit
def fma2(a, b, c, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """a * b + c of both float16 halves of int32, rounded once."""
    if EMULATED:  # float32 holds the product exactly
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
def packed_wide(low, high):  # type: ignore[no-untyped-def]
    """Two float32 as the bfloat16 halves of an int32, to nearest even, by integers: the interpreter truncates."""
    low = low.to(tl.int32, bitcast=True)
    high = high.to(tl.int32, bitcast=True)
    low = low + 0x7FFF + ((low >> 16) & 1)
    high = high + 0x7FFF + ((high >> 16) & 1)
    return ((low >> 16) & 0xFFFF) | ((high >> 16) << 16)


@jit
def joined(low, high, FP16: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two float32 as the halves of an int32, one instruction."""
    if EMULATED:
        out = packed(low, high) if FP16 else packed_wide(low, high)
    elif FP16:
        out = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.int32, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.int32, is_pure=True, pack=1)
    return out


@jit
def words4(x_ptr, first, k, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four words of x from word `first` [Q] on, zeros from element k on; WHOLE: k ends no four, which makes it one load."""
    Q: tl.constexpr = first.shape[0]
    lanes = tl.arange(0, 4)
    at = first[:, None] + lanes[None, :]
    known = ((first * 2 < k)[:, None] & (lanes < 4)[None, :]) if WHOLE else at * 2 < k
    found = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=known, other=0)
    even, odd = tl.split(tl.reshape(found, (Q, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def words2(x_ptr, first, k):  # type: ignore[no-untyped-def]
    """Two words of x from word `first` [Q] on; k is a multiple of 4."""
    lanes = tl.arange(0, 2)
    known = (first * 2 < k)[:, None] & (lanes < 2)[None, :]
    return tl.split(tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + first[:, None] + lanes[None, :], mask=known, other=0))


@jit
def read_x(x_ptr, row, k, quads, BITS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x of one row beside each thread's 128 bits of weights: 4, 8 or 16 words of two halves."""
    x_ptr += row * k
    if BITS == 16:
        x = words4(x_ptr, quads * 4, k, WHOLE)
    elif BITS == 8:
        x = words4(x_ptr, quads * 8, k, WHOLE) + words4(x_ptr, quads * 8 + 4, k, WHOLE)
    else:  # plane j of a block of 128: the weights that are nibble j of its 16 words
        at = (quads // 4) * 64 + (quads % 4) * 2
        x = words2(x_ptr, at, k) + words2(x_ptr, at + 8, k) + words2(x_ptr, at + 16, k) + words2(x_ptr, at + 24, k)
        x = x + words2(x_ptr, at + 32, k) + words2(x_ptr, at + 40, k) + words2(x_ptr, at + 48, k) + words2(x_ptr, at + 56, k)
    return x


@jit
def gained(x, gain, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x * gain rounded to bfloat16, sum of x² a thread): the norm's factor is the same for all of a row, and waits for the epilogue."""
    square = tl.zeros(x[0].shape, dtype=tl.float32)
    out = ()
    for j in tl.static_range(len(x)):
        low, high = pair(x[j], False)
        gain_low, gain_high = pair(gain[j], False)
        square = low * low + square
        square = high * high + square
        out = out + (joined(low * gain_low, high * gain_high, False, EMULATED),)  # type: ignore[assignment]  # noqa: RUF005
    return out, square


@jit
def power_of(x):  # type: ignore[no-untyped-def]
    """(1 / p, p): the power of two p at or below a thread's largest |x|, bfloat16."""
    most = tl.zeros(x[0].shape, dtype=tl.int32)
    for j in tl.static_range(len(x)):
        most = tl.maximum(most, tl.maximum((x[j] << 16) & 0x7FFFFFFF, x[j] & 0x7FFF0000))
    exponent = tl.minimum(tl.maximum(most >> 23, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), (exponent << 23).to(tl.float32, bitcast=True)


@jit
def narrow_bytes(x, less, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x times `less` as float16 pairs (0, 2) and (1, 3) of each four: 8 words for the 16 bytes of a thread."""
    out = ()
    for j in tl.static_range(0, 8, 2):
        x0, x1 = pair(x[j], False)
        x2, x3 = pair(x[j + 1], False)
        out = out + (joined(x0 * less, x2 * less, True, EMULATED), joined(x1 * less, x3 * less, True, EMULATED))  # type: ignore[assignment]  # noqa: RUF005
    return out


@jit
def narrow_nibbles(x, less, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x times `less` beside nibbles j and j + 4 of a thread's 4 words, as float16 pairs: 16 words."""
    out = ()
    for j in tl.static_range(8):
        a0, a1 = pair(x[j], False)
        b0, b1 = pair(x[j + 8], False)
        out = out + (joined(a0 * less, b0 * less, True, EMULATED), joined(a1 * less, b1 * less, True, EMULATED))  # type: ignore[assignment]  # noqa: RUF005
    return out


@jit
def halves_dot(words, x, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 8 weights a thread and row in half precision times x, in float32."""
    parts = apart(words)
    acc = tl.zeros(parts[0].shape, dtype=tl.float32)
    for j in tl.static_range(4):
        w0, w1 = pair(parts[j], FP16)
        x0, x1 = pair(x[j], FP16)
        acc = w0 * x0[None, :] + acc
        acc = w1 * x1[None, :] + acc
    return acc


@jit
def bytes_dot(words, x, kept, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 16 int8 weights a thread and row times x, in float32."""
    parts = apart(words)
    acc = tl.zeros(parts[0].shape, dtype=tl.float32)
    for j in tl.static_range(4):
        x0, x1 = pair(x[2 * j], FP16)
        x2, x3 = pair(x[2 * j + 1], FP16)
        acc += byte(parts[j], kept, 0) * x0[None, :]
        acc += byte(parts[j], kept, 1) * (x1 * 0.00390625)[None, :]
        acc += byte(parts[j], kept, 2) * x2[None, :]
        acc += byte(parts[j], kept, 3) * (x3 * 0.00390625)[None, :]
    return acc


@jit
def bytes_dot2(words, x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 16 int8 weights a thread and row times x, summed in float16, then float32."""
    parts = apart(words)
    acc = tl.zeros(parts[0].shape, dtype=tl.int32)
    offset = tl.full(parts[0].shape, -461314944, tl.int32)  # -(1024 + 128) twice
    for j in tl.static_range(4):
        # the mask leaves a byte; the exclusive or flips its sign bit, which adds 128, and gives it the exponent of 1024
        even = (parts[j] & 0x00FF00FF) ^ 0x64806480
        odd = ((parts[j] >> 8) & 0x00FF00FF) ^ 0x64806480
        acc = fma2(add2(even, offset, EMULATED), x[2 * j][None, :], acc, EMULATED)
        acc = fma2(add2(odd, offset, EMULATED), x[2 * j + 1][None, :], acc, EMULATED)
    low, high = pair(acc, True)
    return low + high


NIBBLE_MASKS = (0x003C003C, 0x03C003C0)
"""Bits 2-5 and 6-9 of both halves. Arguments of a launch: a logic operation has room for one constant, and one the compiler does not know
stays in a register, where of one it knows it makes a copy for every few words: a tenth of all instructions."""


@jit
def rotated(words, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words rotated right, one funnel shift."""
    return ((words >> BY) & ((1 << (32 - BY)) - 1)) | (words << (32 - BY))


@jit
def nibble2(words, low, high, J: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nibbles J and J + 4, - 8, as float16; bits 6-9 of a float from 16 on count in ones, bits 2-5 of one from 256 on.

    Words are packed rotated left by 3, so two rotations serve all four pairs. low and high are NIBBLE_MASKS.
    """
    if J % 2 == 0:
        bits = (rotated(words, 1 + 4 * J) & low) | 0x5C005C00
        offset = tl.full(words.shape, -601826272, tl.int32)  # -264 twice
    else:
        bits = (rotated(words, 4 * J - 3) & high) | 0x4C004C00
        offset = tl.full(words.shape, -838808064, tl.int32)  # -24 twice
    return add2(bits, offset, EMULATED)


@jit
def nibbles_dot2(words, x, low, high, CHAIN: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 32 int4 weights a thread and row times x, CHAIN of 4 words summed in float16, then float32."""
    parts = apart(words)
    total = tl.zeros(parts[0].shape, dtype=tl.float32)
    for start in tl.static_range(0, 4, CHAIN):
        acc = tl.zeros(parts[0].shape, dtype=tl.int32)
        for i in tl.static_range(start, start + CHAIN):
            for j in tl.static_range(4):
                acc = fma2(nibble2(parts[i], low, high, j, EMULATED), x[4 * j + i][None, :], acc, EMULATED)
        low, high = pair(acc, True)
        total += low + high
    return total
