"""What a gemv program does with the x and the weights of a thread: read, norm, cut into bytes, multiply.

    x ──read_x──> int32 words of two halves, beside each thread's 128 bits of weights ──gained (rms norm)──> x * gain
      ──beside_bytes, beside_nibbles──> two int8 an element, a power of two a quad of lanes      weights ──*_dot, *_mma──> [BN, BW / 4]

Words are loaded in the shape in which weights are taken apart, so that a thread finds its x in its own registers: through shared memory
they cost more than a small product. int8 goes to tensor cores as it lies, int4 after one logic operation a four: multiplying, adding and
converting would take more instructions than the SMs have time for. One row of x uses an eighth of a tensor-core product, which is enough.
x becomes whole numbers of 15 bits, two signed bytes, in steps of 2^-14 of a quad's largest |x| at most (bfloat16 has 8 bits, so all that
is not 64 times smaller stays what it is). Sums of whole numbers are exact. Not finite x: everything becomes nan. EMULATED: the interpreter
runs no assembly.
"""

from __future__ import annotations

from .jit import jit, tl
from .weight_only_kernels import apart, byte, pair


@jit
def mma(c, a0, a1, a2, a3, b0, b1, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tensor-core product of a warp, m16n8k32 of int8: each lane's own weights (a0, a2 of one row, a1, a3 of another) by its own x.

    A quad of lanes is a row of A and, with its own x, a column of B: its products are on the diagonal of C, which `diagonal` finds;
    off it stands what other quads' x would give. So the layouts of neither weights nor x need to be those of a product.
    """
    if EMULATED:  # the quads' sums where their lanes are
        out = (c[0] + bytes_sum(a0, b0) + bytes_sum(a2, b1), c[1], c[2] + bytes_sum(a1, b0) + bytes_sum(a3, b1), c[3])
    else:
        out = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return out


@jit
def bytes_sum(a, b):  # type: ignore[no-untyped-def]
    """Sum of the products of four signed bytes each."""
    total = (a >> 24) * (b >> 24)
    for j in tl.static_range(3):
        total += ((a << (24 - 8 * j)) >> 24) * ((b << (24 - 8 * j)) >> 24)
    return total


@jit
def diagonal(like, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 where a lane has its own quad's column of C, else 0; whether it is the second). Quad q's is column q: lane q / 2 has it."""
    if EMULATED:
        here, second = tl.full(like.shape, 1.0, tl.float32), like != like
    else:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid; // $1", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1)
        quad = lane >> 2
        here = tl.where((lane & 3) == (quad >> 1), 1.0, 0.0)
        second = quad % 2 == 1
    return here, second


@jit
def most_of_quad(value, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of the four lanes of a quad; emulated, each lane's own."""
    if not EMULATED:
        for by in tl.static_range(1, 3):
            other = tl.inline_asm_elementwise(
                "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;" if by == 1 else "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;",
                "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            value = tl.maximum(value, other)
    return value


@jit
def two_rows(words):  # type: ignore[no-untyped-def]
    """[BN, Q] -> rows 0, 2, … and rows 1, 3, …"""
    BN: tl.constexpr = words.shape[0]
    Q: tl.constexpr = words.shape[1]
    return tl.split(tl.permute(tl.reshape(words, (BN // 2, 2, Q)), (0, 2, 1)))


@jit
def own_sum(high, low, second, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of mma() with the high and with the low bytes of x: the quad's own sum of its first or second row; `second`: of diagonal()."""
    return tl.where(second, high[2 * ROW + 1] * 256 + low[2 * ROW + 1], high[2 * ROW] * 256 + low[2 * ROW])


@jit
def picked(high, low, zero, second, factor):  # type: ignore[no-untyped-def]
    """[BN, Q], float32: own sums of two rows each, less `zero`, times `factor`."""
    both = tl.join(own_sum(high, low, second[None, :], 0), own_sum(high, low, second[None, :], 1))
    HALF: tl.constexpr = both.shape[0]
    Q: tl.constexpr = both.shape[1]
    rows = tl.reshape(tl.permute(both, (0, 2, 1)), (2 * HALF, Q))
    return (rows - zero[None, :]).to(tl.float32) * factor[None, :]


@jit
def joined(low, high, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two float32 as the bfloat16 halves of an int32, one instruction; emulated by integers, to nearest even: the interpreter truncates."""
    if EMULATED:
        low = low.to(tl.int32, bitcast=True)
        high = high.to(tl.int32, bitcast=True)
        low = low + 0x7FFF + ((low >> 16) & 1)
        high = high + 0x7FFF + ((high >> 16) & 1)
        out = ((low >> 16) & 0xFFFF) | ((high >> 16) << 16)
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
        out = out + (joined(low * gain_low, high * gain_high, EMULATED),)  # type: ignore[assignment]  # noqa: RUF005
    return out, square


@jit
def power_of(x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(2^13 / p, p / 2^13): the power of two p at or below a quad's largest |x|, bfloat16; (., nan) where one is not finite."""
    most = tl.zeros(x[0].shape, dtype=tl.int32)
    for j in tl.static_range(len(x)):
        most = tl.maximum(most, tl.maximum((x[j] << 16) & 0x7FFFFFFF, x[j] & 0x7FFF0000))
    exponent = tl.maximum(most_of_quad(most, EMULATED) >> 23, 14)
    less = ((254 + 13 - tl.minimum(exponent, 254)) << 23).to(tl.float32, bitcast=True)
    return less, tl.where(exponent < 255, (exponent - 13) << 23, 0x7FC00000).to(tl.float32, bitcast=True)


@jit
def whole(x, less):  # type: ignore[no-untyped-def]
    """x * less, below 2^14, to the nearest whole number, + 128, in the low 16 bits of int32: its high byte is v >> 8, to nearest."""
    return (x * less + 12583040.0).to(tl.int32, bitcast=True)


@jit
def four_bytes(a, b, c, d, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(second bytes of whole() of four x, the first bytes less 128): v = 256 high + low."""
    if EMULATED:
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | ((d >> 8) << 24)
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    else:
        high, low = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x0051; prmt.b32 $1, $4, $5, 0x0051; prmt.b32 $0, $0, $1, 0x5410;",
            "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )[0], tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x0040; prmt.b32 $1, $4, $5, 0x0040; prmt.b32 $0, $0, $1, 0x5410;",
            "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )[0]  # fmt: skip
    return high, low ^ -2139062144  # 0x80 in every byte


@jit
def beside_bytes(x, less, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(high, low) bytes of x in the places of the weights of a thread's 4 words of int8: 4 words each."""
    high = ()
    low = ()
    for j in tl.static_range(0, 8, 2):
        a, b = pair(x[j], False)
        c, d = pair(x[j + 1], False)
        both = four_bytes(whole(a, less), whole(b, less), whole(c, less), whole(d, less), EMULATED)
        high = high + (both[0],)  # type: ignore[assignment]  # noqa: RUF005
        low = low + (both[1],)  # type: ignore[assignment]  # noqa: RUF005
    return high, low


@jit
def beside_nibbles(x, less, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(high, low) bytes of x in the places of nibbles 0, 2, 4, 6 and of 1, 3, 5, 7 of a thread's 4 words of int4: 8 words each."""
    high = ()
    low = ()
    for i in tl.static_range(4):
        for j in tl.static_range(2):
            a = whole(half(x[2 * j + i // 2], i % 2), less)
            b = whole(half(x[2 * j + 4 + i // 2], i % 2), less)
            c = whole(half(x[2 * j + 8 + i // 2], i % 2), less)
            d = whole(half(x[2 * j + 12 + i // 2], i % 2), less)
            both = four_bytes(a, b, c, d, EMULATED)
            high = high + (both[0],)  # type: ignore[assignment]  # noqa: RUF005
            low = low + (both[1],)  # type: ignore[assignment]  # noqa: RUF005
    return high, low


@jit
def half(word, WHICH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the bfloat16 halves, as float32."""
    return (word << 16 if WHICH == 0 else word & -65536).to(tl.float32, bitcast=True)


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
def bytes_mma(words, x, second, factor, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 16 int8 weights a thread and row times x of beside_bytes, exact sums of a quad, times `factor`."""
    parts = apart(words)
    nothing = tl.zeros((words.shape[0] // 2, words.shape[1] // 4), tl.int32)
    high = (nothing, nothing, nothing, nothing)
    low = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(0, 4, 2):
        a0, a1 = two_rows(parts[j])
        a2, a3 = two_rows(parts[j + 1])
        high = mma(high, a0, a1, a2, a3, x[0][j][None, :], x[0][j + 1][None, :], EMULATED)
        low = mma(low, a0, a1, a2, a3, x[1][j][None, :], x[1][j + 1][None, :], EMULATED)
    return picked(high, low, tl.zeros(second.shape, tl.int32), second, factor)


@jit
def rotated(words, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words rotated right, one funnel shift."""
    return ((words >> BY) & ((1 << (32 - BY)) - 1)) | (words << (32 - BY))


@jit
def nibbles_zero(x, second, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What nibbles_mma adds up for weights of 0, which are nibbles of 8."""
    flat = tl.full(second.shape, 0x40404040, tl.int32)
    nothing = tl.zeros(second.shape, tl.int32)
    high = (nothing, nothing, nothing, nothing)
    low = (nothing, nothing, nothing, nothing)
    for i in tl.static_range(4):
        high = mma(high, flat, flat, flat, flat, x[0][2 * i], x[0][2 * i + 1], EMULATED)
        low = mma(low, flat, flat, flat, flat, x[1][2 * i], x[1][2 * i + 1], EMULATED)
    return own_sum(high, low, second, 0)


@jit
def nibbles_mma(words, x, zero, second, factor, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 32 int4 weights a thread and row times x of beside_nibbles, exact sums of a quad, which has the 128 of a block.

    Words are packed rotated left by 3: every other nibble lies in bits 3-6 of a byte, which makes 8 times it; one rotation for the rest.
    """
    parts = apart(words)
    nothing = tl.zeros((words.shape[0] // 2, words.shape[1] // 4), tl.int32)
    high = (nothing, nothing, nothing, nothing)
    low = (nothing, nothing, nothing, nothing)
    for i in tl.static_range(4):
        a0, a1 = two_rows(parts[i] & 0x78787878)
        a2, a3 = two_rows(rotated(parts[i], 4) & 0x78787878)
        high = mma(high, a0, a1, a2, a3, x[0][2 * i][None, :], x[0][2 * i + 1][None, :], EMULATED)
        low = mma(low, a0, a1, a2, a3, x[1][2 * i][None, :], x[1][2 * i + 1][None, :], EMULATED)
    return picked(high, low, zero, second, factor)
