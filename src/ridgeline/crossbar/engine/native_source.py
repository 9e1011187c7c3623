"""The C of the native engine, one text for every chip and layer.

    work item = 16 to 64 rows of x (tiles of 16, one lane a row) times some columns of w, one group of one image
      for each block of arrays that shares a scale:
        read        values of the block, straight from the image: no patch matrix is ever written
        quantise    float32; a value near half a step is done again in float64, so every digit is the reference's
        levels      4 rows of an array in one 32-bit word, slice by slice; a slice that is all zero is left out
        dot         up to 4 x 4 slice pairs at once in registers: bytes (VNNI where there is one) or float32
        convert     round half to even by adding 1.5 * 2^23, where Python proved that right for every possible sum; else a table;
                    with noise or offsets of the ADC column by column, and a slice of zeros is converted too, though not multiplied
        add         code * worth over the pairs, times both steps, into float32 sums of the tile

Signed levels (differential pairs) are driven as level + shift, since the byte product wants one operand without sign; `correction`
takes shift * (sum of the column's cells) off again. Threads share a counter of work items, and as random numbers go by counter too, no
result depends on who does what.
"""

from .native_inputs import SOURCE as INPUTS
from .native_noise import SOURCE as NOISE

_PRODUCT = r"""
#define SPARE 3 /* rows of zeros after a block, so that its last word of four can be read whole */
#define MOST_THREADS 256
typedef int64_t longs __attribute__((vector_size(128)));
typedef double doubles __attribute__((vector_size(128)));

typedef struct {
    const float *x;
    const int64_t *base;        /* of each row: its first value in an image */
    const int64_t *offset;      /* of each k, from there */
    const void *cells;          /* [group][array][n][word][slice]: 4 bytes of 4 rows, or one float a row */
    const int32_t *correction;  /* [group][array][n][slice] */
    const float *step;          /* [group][array][n] */
    const int32_t *levels;      /* [slice of x][digit], at level_start */
    const float *table;         /* [slice of w][sum + full], or none */
    const float *adc_offset;    /* [array][n of all groups][slice of w], or none */
    float *out;
    int32_t *codes;             /* [image][array][slice of x][slice of w][m][n], or none */
    int64_t x_length, x_image, x_group, out_image, out_m, out_n;
    int64_t images, groups, m, k, n, rows, arrays, block_arrays, words;
    int64_t x_slices, w_slices, in_floats, narrow, bfp, is_signed, clip, span, magnitude_bits, full, shift;
    int64_t tiles, columns, threads, next, failed;
    int64_t seed, chip, call, adc_stream, dac_stream, numbers; /* numbers: set aside for all slice pairs of a conversion */
    int32_t bits_below[32], largest[32], factor[32], level_start[32];
    float scale[32], lowest[32], highest[32], worth[32 * 32], adc_sigma, dac_sigma;
} Job;

typedef struct {
    float *values;   /* [k of the block][lane], and SPARE more k */
    ints *levels;    /* [array of the block][tile][slice][word][lane] */
    float *step;     /* [tile][lane] */
    float *sums;     /* [n][tile][lane] */
    uint8_t *active; /* [array of the block][tile][1 + slice]: how many slices are not zero, and which */
    floats *added;   /* [slice of w][slice of x]: noise and offsets of one column and array */
    floats *dac;     /* [k of an array][slice of x], a counter more: noise of voltages */
    Stream adc_stream, dac_stream;
} Scratch;

INLINE int any(ints mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= mask[lane];
    return found != 0;
#endif
}

#ifdef __AVX512F__
#define KEEP(value) __asm__("" : "+v"(value)) /* in a register: else it is loaded anew for every product */
#else
#define KEEP(value)
#endif

INLINE ints dot(ints sum, ints x, ints w) { /* 4 products of an unsigned and a signed byte in every lane */
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (x >> byte & 255) * (w << (24 - byte) >> 24);
    return sum;
#endif
}

INLINE floats nearest_even(floats value) { return value + splat_float(0x1.8p23f) - splat_float(0x1.8p23f); }

INLINE floats convert(floats sum, float scale) { /* |sum * scale| < 2^22 */
#ifdef __AVX512F__
    __m512 magic = _mm512_set1_ps(0x1.8p23f);
    return (floats)_mm512_sub_ps(_mm512_fmadd_ps((__m512)sum, _mm512_set1_ps(scale), magic), magic);
#else
    return nearest_even(sum * scale);
#endif
}

/* How many sums of -full ... full are converted to another code than `expected`. */
int64_t wrong_conversions(const int32_t *expected, int64_t full, float scale) {
    int64_t wrong = 0;
    for (int64_t first = -full; first <= full; first += LANES) {
        floats sum;
        for (int lane = 0; lane < LANES; lane++) sum[lane] = (float)(first + lane);
        ints codes = to_ints(convert(sum, scale));
        for (int lane = 0; lane < LANES && first + lane <= full; lane++) wrong += codes[lane] != expected[first + lane + full];
    }
    return wrong;
}

typedef struct { int64_t image, array, first_m, first_n; } Where;

OUTLINE void keep_codes(const Job *job, floats code, int64_t place, int64_t first_m, int64_t n) {
    for (int lane = 0; lane < LANES && first_m + lane < job->m; lane++)
        job->codes[(place * job->m + first_m + lane) * job->n + n] = (int32_t)code[lane];
}

INLINE floats clipped(floats code, float lowest, float highest) {
    floats low = splat_float(lowest), high = splat_float(highest);
#ifdef __AVX512F__
    return (floats)_mm512_min_ps(_mm512_max_ps((__m512)code, (__m512)low), (__m512)high);
#else
    code = choose_float(code < low, low, code);
    return choose_float(code > high, high, code);
#endif
}

/* Sums to code * worth the long way: from a table, or with the codes kept. */
OUTLINE floats convert_slowly(const Job *job, int ni, int nj, const floats *sums, const uint8_t *which, int j, Where where,
                              int64_t n, const floats *added) {
    floats total = {};
    for (int i = 0; i < ni; i++) for (int p = j; p < j + nj; p++) {
        floats sum = sums[i * nj + p - j], code;
        if (job->table) {
            const float *table = job->table + p * (2 * job->full + 1) + job->full;
            for (int lane = 0; lane < LANES; lane++) code[lane] = table[(int32_t)sum[lane]];
        } else {
            code = added ? nearest_even(sum * job->scale[p] + added[p * job->x_slices + which[i]]) : convert(sum, job->scale[p]);
            if (job->clip) code = clipped(code, job->lowest[p], job->highest[p]);
        }
        total += code * job->worth[which[i] * 32 + p];
        int64_t array = where.image * job->arrays + where.array;
        if (job->codes) keep_codes(job, code, (array * job->x_slices + which[i]) * job->w_slices + p, where.first_m, where.first_n + n);
    }
    return total;
}

typedef struct {
    const ints *x;             /* [slice][word] of one tile and array */
    const int32_t *cells;      /* of one array, from its first column on */
    const int32_t *correction;
    const float *step;
    floats step_x;
    float *sums;
    int64_t columns, words;
    Where where;
    const floats *added;       /* of the one column there is, or none */
} Sweep;

/* Adds ni x nj slice pairs to every column's sum: x slices `which`, w slices from `j`; the first four are constants once inlined. */
INLINE void sweep(const int ni, const int nj, const int in_floats, const int slow, const Job *job, const Sweep *s, const uint8_t *which,
                  int j) {
    const ints *slices[4];
    const float *scale = job->scale + j, *lowest = job->lowest + j, *highest = job->highest + j, *worth[4];
    for (int i = 0; i < ni; i++) slices[i] = s->x + which[i] * job->words, worth[i] = job->worth + which[i] * 32 + j;
    const int64_t stride = job->w_slices, sums_stride = job->tiles * LANES, clip = job->clip, words = s->words;
    for (int64_t n = 0; n < s->columns; n++) {
        const int32_t *cells = s->cells + n * job->words * stride + j, *correction = s->correction + n * stride + j;
        ints sums[16];
        floats found[16], total = {};
#pragma GCC unroll 16
        for (int pair = 0; pair < ni * nj; pair++)
            if (in_floats) found[pair] = (floats){};
            else sums[pair] = splat(correction[pair % nj]);
        for (int64_t word = 0; word < words; word++, cells += stride) {
            ints inputs[4];
#pragma GCC unroll 4
            for (int i = 0; i < ni; i++) {
                inputs[i] = slices[i][word];
                if (in_floats) KEEP(inputs[i]);
            }
#pragma GCC unroll 4
            for (int p = 0; p < nj; p++) {
                ints w = splat(cells[p]);
#pragma GCC unroll 4
                for (int i = 0; i < ni; i++)
                    if (in_floats) found[i * nj + p] += (floats)inputs[i] * (floats)w;
                    else sums[i * nj + p] = dot(sums[i * nj + p], inputs[i], w);
            }
        }
        if (!in_floats)
#pragma GCC unroll 16
            for (int pair = 0; pair < ni * nj; pair++) found[pair] = to_floats(sums[pair]);
        if (slow) total = convert_slowly(job, ni, nj, found, which, j, s->where, n, s->added);
        else {
#pragma GCC unroll 16
            for (int pair = 0; pair < ni * nj; pair++)
                if (s->added) {
                    floats added = s->added[(j + pair % nj) * job->x_slices + which[pair / nj]];
                    found[pair] = nearest_even(found[pair] * scale[pair % nj] + added);
                } else found[pair] = convert(found[pair], scale[pair % nj]);
            if (clip)
#pragma GCC unroll 16
                for (int pair = 0; pair < ni * nj; pair++) found[pair] = clipped(found[pair], lowest[pair % nj], highest[pair % nj]);
#pragma GCC unroll 4
            for (int i = 0; i < ni; i++) {
                floats of_slice = found[i * nj] * worth[i][0];
#pragma GCC unroll 4
                for (int p = 1; p < nj; p++) of_slice += found[i * nj + p] * worth[i][p];
                total += of_slice;
            }
        }
        *(floats *)(s->sums + n * sums_stride) += total * (s->step_x * s->step[n]);
    }
}

#define CASE(ni, nj) case (ni - 1) * 4 + nj - 1: return sweep(ni, nj, FLOATS, SLOW, job, s, which, j);
#define ROW(ni) CASE(ni, 1) CASE(ni, 2) CASE(ni, 3) CASE(ni, 4)
#define CHOOSER(name) \
    OUTLINE void name(int ni, int nj, const Job *job, const Sweep *s, const uint8_t *which, int j) { \
        switch ((ni - 1) * 4 + nj - 1) { ROW(1) ROW(2) ROW(3) ROW(4) } \
    }
#define FLOATS 0
#define SLOW 0
CHOOSER(sweep_bytes)
#undef SLOW
#define SLOW 1
CHOOSER(sweep_bytes_slowly)
#undef FLOATS
#define FLOATS 1
CHOOSER(sweep_floats_slowly)
#undef SLOW
#define SLOW 0
CHOOSER(sweep_floats)

/* One tile times all columns of one array, four slices of x by four of w at a time. */
static void multiply(const Job *job, const Sweep *s, const uint8_t *active) {
    int slow = job->table != NULL || job->codes != NULL;
    for (int i = 0; i < active[0]; i += 4)
        for (int j = 0; j < job->w_slices; j += 4) {
            int ni = active[0] - i < 4 ? active[0] - i : 4, nj = job->w_slices - j < 4 ? (int)job->w_slices - j : 4;
            if (job->in_floats) (slow ? sweep_floats_slowly : sweep_floats)(ni, nj, job, s, active + 1 + i, j);
            else (slow ? sweep_bytes_slowly : sweep_bytes)(ni, nj, job, s, active + 1 + i, j);
        }
}

/* What is added to the conversions of one column, for every slice pair. */
static void draw_added(const Job *job, const Scratch *scratch, Counters rows, int64_t array, int64_t column) {
    int64_t slices = job->x_slices, quads = job->numbers / 4, columns = job->groups * job->n;
    floats *added = scratch->added;
    Counters counters = later(rows, (uint64_t)((column * job->arrays + array) * quads));
    if (job->adc_sigma > 0) draw_normals(&scratch->adc_stream, counters, quads, job->adc_sigma, added);
    else memset(added, 0, sizeof(floats) * job->numbers);
    if (!job->adc_offset) return;
    const float *offset = job->adc_offset + (array * columns + column) * job->w_slices;
    for (int64_t j = 0; j < job->w_slices; j++)
        for (int64_t i = 0; i < slices; i++) added[j * slices + i] += offset[j];
}

/* multiply, where something is added to each conversion; slices of zeros are converted as well. */
static void multiply_disturbed(const Job *job, const Scratch *scratch, const Sweep *s, const uint8_t *active, int64_t group) {
    static const floats zeros[32];
    uint8_t silent[33] = {};
    for (int i = 0, next = 1; i < job->x_slices; i++)
        if (next <= active[0] && active[next] == i) next++;
        else silent[++silent[0]] = (uint8_t)i;
    int64_t quads = job->numbers / 4, apart = job->groups * job->n * job->arrays * quads;
    Counters rows = counters_from((uint64_t)((s->where.image * job->m + s->where.first_m) * apart), (uint64_t)apart);
    for (int64_t n = 0; n < s->columns; n++) {
        draw_added(job, scratch, rows, s->where.array, group * job->n + s->where.first_n + n);
        Sweep one = *s;
        one.columns = 1, one.cells += n * job->words * job->w_slices, one.correction += n * job->w_slices, one.step += n;
        one.sums += n * job->tiles * LANES, one.where.first_n += n, one.added = scratch->added;
        multiply(job, &one, active);
        floats total = {};
        for (int i = 1; i <= silent[0]; i++)
            total += convert_slowly(job, 1, (int)job->w_slices, zeros, silent + i, 0, one.where, 0, one.added);
        *(floats *)one.sums += total * (one.step_x * *one.step);
    }
}

"""

_RUN = r"""
typedef struct { int64_t image, group, first_tile, tiles, first_n, count_n; } Item;

/* Block of arrays from `first`: read and cut for every tile, then multiplied array by array. */
static void run_block(Job *job, const Item *item, int64_t first, Scratch *s) {
    int64_t last = first + job->block_arrays < job->arrays ? first + job->block_arrays : job->arrays;
    int64_t first_k = first * job->rows, end_k = last * job->rows < job->k ? last * job->rows : job->k;
    int64_t per_tile = job->x_slices * job->words, per_active = 1 + job->x_slices;
    const float *x = job->x + item->image * job->x_image + item->group * job->x_group;
    for (int64_t tile = 0; tile < item->tiles; tile++) {
        int64_t row = (item->first_tile + tile) * LANES;
        int64_t base[LANES];
        int lanes = job->m - row < LANES ? (int)(job->m - row) : LANES; /* lanes past the end repeat the last row */
        for (int lane = 0; lane < LANES; lane++) base[lane] = job->base[row + (lane < lanes ? lane : lanes - 1)];
        ints largest = read_block(job, x, base, lanes, first_k, end_k - first_k, s->values);
        if (any(largest >= 0x7f800000)) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        Scale scale = scale_of(job, largest, s->step + tile * LANES);
        for (int64_t array = first; array < last; array++) {
            int64_t from = array * job->rows, count = (from + job->rows < job->k ? from + job->rows : job->k) - from;
            int64_t place = (array - first) * job->tiles + tile;
            const float *values = s->values + (from - first_k) * LANES;
            Voltages drawn;
            if (job->dac_sigma > 0) drawn = draw_voltages(job, s, item->image * job->m + row, item->group * job->k + from, count);
            make_levels(job, &scale, values, count, s->levels + place * per_tile, s->active + place * per_active,
                        job->dac_sigma > 0 ? &drawn : NULL);
        }
    }
    int per_word = job->in_floats ? 1 : 4;
    for (int64_t array = first; array < last; array++) {
        int64_t from = array * job->rows, count = (from + job->rows < job->k ? from + job->rows : job->k) - from;
        int64_t words = (count + per_word - 1) / per_word;
        int64_t at = (item->group * job->arrays + array) * job->n + item->first_n;
        for (int64_t tile = 0; tile < item->tiles; tile++) {
            int64_t place = (array - first) * job->tiles + tile;
            Sweep sweep = {
                s->levels + place * per_tile, (const int32_t *)job->cells + at * job->words * job->w_slices,
                job->correction + at * job->w_slices, job->step + at, *(floats *)(s->step + tile * LANES), s->sums + tile * LANES,
                item->count_n, words, {item->image, array, (item->first_tile + tile) * LANES, item->first_n}, NULL,
            };
            if (job->adc_sigma > 0 || job->adc_offset) multiply_disturbed(job, s, &sweep, s->active + place * per_active, item->group);
            else multiply(job, &sweep, s->active + place * per_active);
        }
    }
}

static void run_item(Job *job, const Item *item, Scratch *s) {
    memset(s->sums, 0, sizeof(float) * item->count_n * job->tiles * LANES);
    for (int64_t first = 0; first < job->arrays; first += job->block_arrays) run_block(job, item, first, s);
    for (int64_t n = 0; n < item->count_n; n++)
        for (int64_t tile = 0; tile < item->tiles; tile++) {
            int64_t row = (item->first_tile + tile) * LANES, lanes = job->m - row < LANES ? job->m - row : LANES;
            const float *sum = s->sums + (n * job->tiles + tile) * LANES;
            int64_t column = item->group * job->n + item->first_n + n;
            float *out = job->out + item->image * job->out_image + column * job->out_n + row * job->out_m;
            for (int64_t lane = 0; lane < lanes; lane++) out[lane * job->out_m] = sum[lane];
        }
}

static void *aligned(size_t bytes) { return aligned_alloc(64, (bytes + 127) / 64 * 64); }

static void *work(void *given) {
    Job *job = given;
    int64_t all_tiles = (job->m + LANES - 1) / LANES, parts = (all_tiles + job->tiles - 1) / job->tiles;
    int64_t chunks = (job->n + job->columns - 1) / job->columns, places = job->block_arrays * job->tiles;
    Scratch s = {
        aligned(sizeof(float) * (job->block_arrays * job->rows + SPARE) * LANES),
        aligned(sizeof(ints) * places * job->x_slices * job->words),
        aligned(sizeof(float) * job->tiles * LANES), aligned(sizeof(float) * job->columns * job->tiles * LANES),
        aligned(places * (1 + job->x_slices)), aligned(sizeof(floats) * job->numbers),
        job->dac_sigma > 0 ? aligned(sizeof(floats) * (job->rows * job->x_slices + 11)) : aligned(0),
        stream_of(job->seed, job->chip, job->adc_stream, job->call), stream_of(job->seed, job->chip, job->dac_stream, job->call),
    };
    int none = !s.values || !s.levels || !s.step || !s.sums || !s.active || !s.added || !s.dac;
    if (none) __atomic_store_n(&job->failed, 2, __ATOMIC_RELAXED);
    else for (;;) {
        int64_t number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (number >= job->images * job->groups * parts * chunks) break;
        int64_t chunk = number % chunks, part = number / chunks % parts, group = number / chunks / parts % job->groups;
        Item item = {number / chunks / parts / job->groups, group, part * job->tiles, job->tiles, chunk * job->columns, job->columns};
        if (item.tiles > all_tiles - item.first_tile) item.tiles = all_tiles - item.first_tile;
        if (item.count_n > job->n - item.first_n) item.count_n = job->n - item.first_n;
        run_item(job, &item, &s);
    }
    free(s.values), free(s.levels), free(s.step), free(s.sums), free(s.active), free(s.added), free(s.dac);
    return NULL;
}

int64_t job_bytes(void) { return sizeof(Job); }

/* 0: done; 1: a value that is not finite; 2: no memory. */
int64_t run(Job *job) {
    pthread_t threads[MOST_THREADS];
    int started = 0;
    while (started < job->threads - 1 && started < MOST_THREADS && !pthread_create(&threads[started], NULL, work, job)) started++;
    work(job);
    for (int thread = 0; thread < started; thread++) pthread_join(threads[thread], NULL);
    return job->failed;
}
"""

SOURCE = NOISE + _PRODUCT + INPUTS + _RUN
