"""The C of the native engine's random numbers: those of noise.py, sixteen lanes at once.

counters of 16 lanes ──Philox4x32-10──> four words a lane ──Box and Muller, float32──> four normals a lane, within 1e-6 of noise.py's
  Philox   even and odd lanes apart, a word in each 64-bit lane: one instruction gives all 64 bits of a product
  log      n = 2^e * m, sqrt(1/2) <= m < sqrt(2); s = (m - 1) / (m + 1), log m = 2 (s + s^3/3 + … + s^9/9): next term 2e-9
  cos, sin of 2 pi k / 2^24: quarter turns are taken off the integer k, then Taylor up to x^8 and x^9: next terms 3e-8 and 2e-9
"""

SOURCE = r"""
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline)) /* what is rare, kept out of 32 copies of the inner loop */
typedef int32_t ints __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));
typedef uint64_t words __attribute__((vector_size(64)));
typedef float loose_floats __attribute__((vector_size(64), aligned(4)));

INLINE ints splat(int32_t value) { return value - (ints){}; }
INLINE floats splat_float(float value) { return value - (floats){}; }
INLINE floats to_floats(ints value) { return __builtin_convertvector(value, floats); }
INLINE ints to_ints(floats value) { return __builtin_convertvector(value, ints); }
INLINE ints choose(ints mask, ints yes, ints no) { return (mask & yes) | (~mask & no); } /* a mask is all ones or all zeros */
INLINE floats choose_float(ints mask, floats yes, floats no) { return (floats)choose(mask, (ints)yes, (ints)no); }

typedef struct { uint64_t keys[20], stream, call; } Stream; /* keys of every round, two each; words 2 and 3 of the counter */
typedef struct { words even, odd; } Counters;               /* of 16 lanes */

static Stream stream_of(int64_t seed, int64_t chip, int64_t stream, int64_t call) {
    Stream found = {.stream = (uint32_t)stream, .call = (uint32_t)call};
    for (uint32_t round = 0; round < 10; round++) {
        found.keys[2 * round] = (uint32_t)((uint32_t)seed + round * 0x9E3779B9u);
        found.keys[2 * round + 1] = (uint32_t)((uint32_t)chip + round * 0xBB67AE85u);
    }
    return found;
}

/* Counters of lanes 0, 1, ...: first, first + step, ... */
INLINE Counters counters_from(uint64_t first, uint64_t step) {
    Counters found;
    for (int pair = 0; pair < LANES / 2; pair++, first += 2 * step) found.even[pair] = first, found.odd[pair] = first + step;
    return found;
}

INLINE Counters later(Counters counters, uint64_t by) { return (Counters){counters.even + by, counters.odd + by}; }

INLINE words product(words x, uint64_t multiplier) { /* of the low halves; what stands in the high ones is no matter */
#ifdef __AVX512F__
    return (words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64((int64_t)multiplier));
#else
    return (x & 0xFFFFFFFF) * multiplier;
#endif
}

INLINE void philox(const Stream *stream, words counter, words *c) {
    c[0] = counter, c[1] = counter >> 32, c[2] = stream->stream - (words){}, c[3] = stream->call - (words){};
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        words left = product(c[0], 0xD2511F53), right = product(c[2], 0xCD9E8D57);
        c[0] = right >> 32 ^ c[1] ^ stream->keys[2 * round], c[1] = right;
        c[2] = left >> 32 ^ c[3] ^ stream->keys[2 * round + 1], c[3] = left;
    }
}

INLINE ints merged(words even, words odd) { return (ints)((even & 0xFFFFFFFF) | odd << 32); }

INLINE floats square_root(floats value) {
#ifdef __AVX512F__
    return (floats)_mm512_sqrt_ps((__m512)value);
#else
    floats root;
    for (int lane = 0; lane < LANES; lane++) root[lane] = sqrtf(value[lane]);
    return root;
#endif
}

/* Two words to two normals times sigma; factor = -2 sigma^2. */
INLINE void box_muller(ints first, ints second, float factor, floats *cosine, floats *sine) {
    ints bits = (ints)to_floats((first >> 8 & 0xFFFFFF) + 1);
    ints exponent = (bits - 0x3F3504F3) >> 23; /* sqrt(1/2) */
    floats m = (floats)(bits - (exponent << 23)), s = (m - 1.0f) / (m + 1.0f), t = s * s;
    floats series = ((t * (1 / 9.0f) + 1 / 7.0f) * t + 0.2f) * t + 1 / 3.0f;
    floats half_log = s * t * series + s;
    floats radius = square_root(to_floats(exponent - 24) * (factor * 0x1.62E43p-1f) + half_log * (2 * factor));
    ints angle = second >> 8 & 0xFFFFFF, quarter = (angle + (1 << 21)) >> 22;
    floats x = to_floats(angle - (quarter << 22)) * 0x1.921FB6p-22f, y = x * x; /* pi / 2 for each 2^22 */
    floats up = (((y * (1 / 362880.0f) - 1 / 5040.0f) * y + 1 / 120.0f) * y - 1 / 6.0f) * y * x + x;
    floats along = (((y * (1 / 40320.0f) - 1 / 720.0f) * y + 1 / 24.0f) * y - 0.5f) * y + 1.0f;
    ints odd = (quarter & 1) != 0, minus = (int32_t)0x80000000 - (ints){};
    *cosine = (floats)((ints)choose_float(odd, up, along) ^ ((quarter + 1) << 30 & minus)) * radius;
    *sine = (floats)((ints)choose_float(odd, along, up) ^ (quarter << 30 & minus)) * radius;
}

/* out[4 * c + number] of the counters, the next ones, ... */
OUTLINE void draw_normals(const Stream *stream, Counters counters, int64_t count, float sigma, floats *out) {
    float factor = -2 * sigma * sigma;
    for (int64_t c = 0; c < count; c++, out += 4) {
        words even[4], odd[4];
        Counters now = later(counters, (uint64_t)c);
        philox(stream, now.even, even), philox(stream, now.odd, odd);
        box_muller(merged(even[0], odd[0]), merged(even[1], odd[1]), factor, &out[0], &out[1]);
        box_muller(merged(even[2], odd[2]), merged(even[3], odd[3]), factor, &out[2], &out[3]);
    }
}

/* All numbers of the counters from `first` on, `count` of them, times sigma. */
void normals(int64_t seed, int64_t chip, int64_t stream, int64_t call, int64_t first, int64_t count, float sigma, float *out) {
    Stream from = stream_of(seed, chip, stream, call);
    for (int64_t done = 0; done < count; done += 4 * LANES) {
        floats drawn[4];
        draw_normals(&from, counters_from((uint64_t)(first + done / 4), 1), 1, sigma, drawn);
        for (int64_t place = 0; place < 4 * LANES && done + place < count; place++) out[done + place] = drawn[place % 4][place / 4];
    }
}
"""
