"""What a gemv program does with the x and the weights of a thread: read, norm, narrow, multiply.

    x ──read_x──> int32 words of two halves, beside each thread's 128 bits of weights ──gained (rms norm)──> x * gain
      ──narrow_bytes, beside_nibbles──> pairs as tensor cores take them          weights ──*_dot, *_mma──> [BN, BW / 4], sums

Words are loaded in the shape in which weights are taken apart, so that a thread finds its x in its own registers: through shared memory
they cost more than a small product. int8 becomes float16 and int4 bfloat16 by one logic operation a pair, plus a constant that the sum
starts without (*_zero), and goes to tensor cores as it lies: of a tensor-core product one row of x uses an eighth, but no instruction is
spent on multiplying, adding and subtracting. Sums are float32. int8 needs x in float16: a quad of lanes brings its own to a largest value
below 2 by a power of two, so that nothing overflows; for bfloat16 x only, whose digits float16 has room for. int4 takes x as it is.
EMULATED: the interpreter runs no assembly.
"""

from __future__ import annotations

from .jit import jit, tl
from .weight_only_kernels import apart, byte, pair


@jit
def mma(c, a0, a1, a2, a3, b0, b1, FP16: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tensor-core product of a warp, m16n8k16: each lane's own weights (pairs a0, a2 of one row, a1, a3 of another) times its own x.

    A quad of lanes is a row of A and, with its own x, a column of B: its products are on the diagonal of C, which `diagonal` finds;
    off it stands what other quads' x would give. So the layouts of neither weights nor x need to be those of a product.
    """
    if EMULATED:  # the quads' sums where their lanes are
        out = (c[0] + pair_dot(a0, b0, FP16) + pair_dot(a2, b1, FP16), c[1], c[2] + pair_dot(a1, b0, FP16) + pair_dot(a3, b1, FP16), c[3])
    else:
        out = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
            if FP16
            else "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return out


@jit
def pair_dot(a, b, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of the products of two pairs of halves, in float32."""
    low_a, high_a = pair(a, FP16)
    low_b, high_b = pair(b, FP16)
    return low_a * low_b + high_a * high_b


@jit
def diagonal(like, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(even, odd): 1 where a lane's first or second column of C is its own quad's, else 0. Quad q's is column q: lane q / 2 has it."""
    if EMULATED:
        even, odd = tl.full(like.shape, 1.0, tl.float32), tl.zeros(like.shape, tl.float32)
    else:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid; // $1", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1)
        quad = lane >> 2
        here = (lane & 3) == (quad >> 1)
        even = tl.where(here & (quad % 2 == 0), 1.0, 0.0)
        odd = tl.where(here & (quad % 2 == 1), 1.0, 0.0)
    return even, odd


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
def picked(c, even, odd):  # type: ignore[no-untyped-def]
    """[BN, Q] of what mma() summed for two rows each: `even` and `odd` are diagonal()'s, times what the sums are to be multiplied by."""
    both = tl.join(c[0] * even[None, :] + c[1] * odd[None, :], c[2] * even[None, :] + c[3] * odd[None, :])
    HALF: tl.constexpr = c[0].shape[0]
    Q: tl.constexpr = c[0].shape[1]
    return tl.reshape(tl.permute(both, (0, 2, 1)), (2 * HALF, Q))


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
def power_of(x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 / p, p): the power of two p at or below a quad's largest |x|, bfloat16."""
    most = tl.zeros(x[0].shape, dtype=tl.int32)
    for j in tl.static_range(len(x)):
        most = tl.maximum(most, tl.maximum((x[j] << 16) & 0x7FFFFFFF, x[j] & 0x7FFF0000))
    exponent = tl.minimum(tl.maximum(most_of_quad(most, EMULATED) >> 23, 1), 253)
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
def beside_nibbles(x):  # type: ignore[no-untyped-def]
    """x beside nibbles j and j + 4 of a thread's 4 words, as pairs: 16 words, 4 a pair of nibbles."""
    out = ()
    for j in tl.static_range(8):
        low = (x[j] & 0xFFFF) | (x[j + 8] << 16)
        high = ((x[j] >> 16) & 0xFFFF) | (x[j + 8] & -65536)
        out = out + (low, high)  # type: ignore[assignment]  # noqa: RUF005
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
def bytes_zero(x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What bytes_mma adds up for weights of 0, negative: where its sums start."""
    flat = tl.full(x[0].shape, 0x64806480, tl.int32)
    nothing = tl.zeros(x[0].shape, tl.float32)
    c = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(4):
        c = mma(c, flat, flat, flat, flat, x[2 * j], x[2 * j + 1], True, EMULATED)
    return -c[0], -c[1], -c[2], -c[3]


@jit
def bytes_mma(words, x, zero, even, odd, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 16 int8 weights a thread and row times x, summed in float32 by quads."""
    parts = apart(words)
    c = (zero[0][None, :], zero[1][None, :], zero[2][None, :], zero[3][None, :])
    for j in tl.static_range(4):
        # the mask leaves a byte; the exclusive or flips its sign bit, which adds 128, and gives it the exponent of 1024
        a0, a1 = two_rows((parts[j] & 0x00FF00FF) ^ 0x64806480)
        a2, a3 = two_rows(((parts[j] >> 8) & 0x00FF00FF) ^ 0x64806480)
        c = mma(c, a0, a1, a2, a3, x[2 * j][None, :], x[2 * j + 1][None, :], True, EMULATED)
    return picked(c, even, odd)


@jit
def rotated(words, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words rotated right, one funnel shift."""
    return ((words >> BY) & ((1 << (32 - BY)) - 1)) | (words << (32 - BY))


@jit
def nibble2(words, mask, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nibbles J and J + 4, + 16, as bfloat16: bits 3-6 of one from 16 on count in ones. Words are packed rotated left by 3."""
    if J > 0:
        words = rotated(words, 4 * J)
    return (words & mask) | 0x41804180


NIBBLES = 0x00780078
"""Bits 3-6 of both halves. An argument of a launch: a logic operation has room for one constant, and one the compiler does not know stays
in a register, where of one it knows it makes a copy for every few words: a tenth of all instructions."""


@jit
def nibbles_zero(x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What nibbles_mma adds up for weights of 0, which are 24 there, negative: where its sums start."""
    flat = tl.full(x[0].shape, 0x41C041C0, tl.int32)
    nothing = tl.zeros(x[0].shape, tl.float32)
    c = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(8):
        c = mma(c, flat, flat, flat, flat, x[2 * j], x[2 * j + 1], False, EMULATED)
    return -c[0], -c[1], -c[2], -c[3]


@jit
def nibbles_mma(words, x, zero, even, odd, mask, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BN, BW / 4]: 32 int4 weights a thread and row times x, summed in float32 by quads, which have the 128 weights of a block."""
    parts = apart(words)
    c = (zero[0][None, :], zero[1][None, :], zero[2][None, :], zero[3][None, :])
    for i in tl.static_range(4):
        first, second = two_rows(parts[i])
        for j in tl.static_range(0, 4, 2):
            a0, a1 = nibble2(first, mask, j), nibble2(second, mask, j)
            a2, a3 = nibble2(first, mask, j + 1), nibble2(second, mask, j + 1)
            c = mma(c, a0, a1, a2, a3, x[4 * j + i][None, :], x[4 * j + 4 + i][None, :], False, EMULATED)
    return picked(c, even, odd)
