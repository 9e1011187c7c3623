"""The C of the native engine's inputs: from an image to the levels that drive the rows of one array. It goes between the parts of
native_source.py, whose types it uses.

    read_block ──values of 16 rows of x, one a lane──> scale_of, quantise ──q──> cut ──> levels[slice][word], which slices are not zero
      quantise   float32; a value near half a step is done again in float64
      cut        4 rows of an array in one word of bytes, or one in a float; noise of the DAC multiplies the float
"""

SOURCE = r"""
/* values[k][lane] of the block's k; returns the bits of the largest |value| in each lane, which order as the values do. */
static ints read_block(const Job *job, const float *x, const int64_t *base, int lanes, int64_t first_k, int64_t count, float *values) {
    int starts[LANES + 1], runs = 0; /* neighbours in memory are copied together */
    for (int lane = 0; lane < LANES; lane++)
        if (!lane || lane >= lanes || base[lane] != base[lane - 1] + 1) starts[runs++] = lane;
    ints largest = {};
    for (int64_t k = 0; k < count; k++) {
        const float *from = x + job->offset[first_k + k];
        float *to = values + k * LANES;
        int64_t left = job->x + job->x_length - from;
        if (runs <= 4 && left >= base[starts[runs - 1]] + LANES && left >= base[starts[0]] + LANES)
            for (int run = 0; run < runs; run++) *(loose_floats *)(to + starts[run]) = *(const loose_floats *)(from + base[starts[run]]);
        else
            for (int lane = 0; lane < LANES; lane++) to[lane] = from[base[lane]];
        ints bits = *(ints *)to & 0x7fffffff;
        largest = choose(bits > largest, bits, largest);
    }
    memset(values + count * LANES, 0, sizeof(float) * SPARE * LANES);
    return largest;
}

typedef struct { floats factor, doubt; doubles divisor; double largest; } Scale; /* of each lane; doubt: how near half a step is too near */

INLINE doubles power_of_two(longs exponent) { return (doubles)((exponent + 1023) << 52); }

static Scale scale_of(const Job *job, ints largest_bits, float *step) {
    Scale found;
    found.largest = (double)((1LL << (job->span - 1)) - 1);
    doubles maximum = __builtin_convertvector((floats)largest_bits, doubles), steps, factor;
    if (job->bfp) {
        longs exponent = ((longs)(maximum + 1e-10) >> 52) - 1023; /* floor(log2), from the bits */
        found.divisor = power_of_two(exponent);
        steps = power_of_two(exponent + 2 - job->span);
        factor = power_of_two(job->span - 2 - exponent);
        ints large = __builtin_convertvector(exponent, ints) > 90; /* a factor is exact while it is no subnormal */
        found.doubt = choose_float(large, splat_float(1.0f), splat_float(-1.0f));
    } else {
        found.divisor = maximum + __builtin_convertvector(-(maximum == 0), doubles); /* a block of zeros: 0 / 1 */
        steps = maximum / found.largest;
        factor = found.largest / found.divisor;
        ints small = (floats)largest_bits < 1e-30f;
        factor = (doubles)((longs)factor & ~__builtin_convertvector(small, longs));
        found.doubt = choose_float(small, splat_float(1.0f), splat_float((float)(found.largest * 0x1p-21)));
    }
    *(floats *)step = __builtin_convertvector(steps, floats);
    found.factor = __builtin_convertvector(factor, floats);
    return found;
}

INLINE ints quantise(const Job *job, const Scale *scale, floats value) {
    floats exact = value * scale->factor, q = nearest_even(exact);
    floats from_half = exact - q;
    from_half = (floats)((ints)from_half & 0x7fffffff) - 0.5f;
    ints near = from_half >= -scale->doubt;
    if (__builtin_expect(any(near), 0))
        for (int lane = 0; lane < LANES; lane++)
            if (near[lane]) {
                double largest = job->bfp ? (double)(1LL << (job->span - 2)) : scale->largest;
                q[lane] = (float)rint(value[lane] / scale->divisor[lane] * largest);
            }
    ints whole = to_ints(q);
    if (job->bfp) {
        int32_t most = (int32_t)scale->largest;
        whole = choose(whole > most, splat(most), whole);
        whole = choose(whole < -most - 1, splat(-most - 1), whole);
    }
    return whole;
}

/* The level that drives a row for slice i of q, with its sign; still without shift. */
INLINE ints level_of(const Job *job, ints pattern, ints negative, int i) {
    ints digit = pattern >> job->bits_below[i] & job->largest[i], level;
    if (job->factor[i]) level = digit * job->factor[i];
    else for (int lane = 0; lane < LANES; lane++) level[lane] = job->levels[job->level_start[i] + digit[lane]];
    return choose(negative, -level, level); /* negative is 0 everywhere unless levels are signed */
}

/* The bits slices are cut from, and where they stand for a negative number: nowhere unless levels are signed. */
INLINE ints pattern_of(const Job *job, const Scale *scale, const float *values, ints *negative) {
    ints q = quantise(job, scale, *(const floats *)values);
    *negative = (ints){};
    if (!job->is_signed) return q;
    *negative = q < 0;
    ints size = choose(*negative, -q, q), most = splat((int32_t)((1LL << job->magnitude_bits) - 1));
    return choose(size > most, most, size);
}

/* Rows of one word, slices of at most 8 bits in all: the bytes of four rows are cut together. */
INLINE void cut_bytes(const Job *job, const ints *pattern, const ints *negative, ints *x, ints *used) {
    ints bytes = {}, minus = {};
#pragma GCC unroll 4
    for (int row = 0; row < 4; row++) bytes |= (pattern[row] & 255) << 8 * row, minus |= (negative[row] & 255) << 8 * row;
    ints shift = splat((int32_t)job->shift * 0x01010101);
    for (int i = 0; i < job->x_slices; i++) {
        ints level = (bytes >> job->bits_below[i] & job->largest[i] * 0x01010101) * job->factor[i];
        used[i] |= level;
        if (job->is_signed) level = shift + (level & ~minus) - (level & minus);
        x[i * job->words] = level;
    }
}

/* Of 16 rows of one array, as lanes: normals times sigma [k][slice of x], in each lane from number `phase` on. */
typedef struct { const floats *normals; ints phase; } Voltages;

INLINE floats voltage_factor(const Voltages *voltages, int64_t number) {
    const floats *from = voltages->normals + number;
    floats low = choose_float(voltages->phase == 1, from[1], from[0]), high = choose_float(voltages->phase == 3, from[3], from[2]);
    return choose_float(voltages->phase >= 2, high, low) + 1.0f;
}

static Voltages draw_voltages(const Job *job, const Scratch *s, int64_t first_row, int64_t first_k, int64_t count) {
    Counters counters;
    Voltages found = {.normals = s->dac};
    int64_t slices = job->x_slices, all_k = job->groups * job->k;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t number = ((first_row + lane) * all_k + first_k) * slices;
        if (lane % 2) counters.odd[lane / 2] = (uint64_t)number / 4;
        else counters.even[lane / 2] = (uint64_t)number / 4;
        found.phase[lane] = (int32_t)(number % 4);
    }
    draw_normals(&s->dac_stream, counters, (count * slices + 3) / 4 + 1, job->dac_sigma, s->dac);
    return found;
}

INLINE void cut(const Job *job, const ints *pattern, const ints *negative, int rows, ints *x, ints *used, const Voltages *voltages,
                int64_t k) {
    for (int i = 0; i < job->x_slices; i++) {
        ints packed = {};
        for (int row = 0; row < rows; row++) {
            ints level = level_of(job, pattern[row], negative[row], i);
            used[i] |= level;
            if (voltages) packed = (ints)(to_floats(level) * voltage_factor(voltages, k * job->x_slices + i));
            else if (job->in_floats) packed = (ints)to_floats(level);
            else packed |= (level + (int32_t)job->shift) << 8 * row;
        }
        x[i * job->words] = packed;
    }
}

/* Levels of one array's rows: x[slice][word], and the list of slices that are not all zero. */
static void make_levels(const Job *job, const Scale *scale, const float *values, int64_t count, ints *x, uint8_t *active,
                        const Voltages *voltages) {
    int per_word = job->in_floats ? 1 : 4;
    ints used[32] = {};
    for (int64_t first = 0; first < count; first += per_word, x++, values += per_word * LANES) {
        ints pattern[4] = {}, negative[4] = {};
        if (job->narrow) { /* rows past the array's last meet cells of level 0 */
#pragma GCC unroll 4
            for (int row = 0; row < 4; row++) pattern[row] = pattern_of(job, scale, values + row * LANES, &negative[row]);
            cut_bytes(job, pattern, negative, x, used);
        } else {
            int rows = count - first < per_word ? (int)(count - first) : per_word;
            for (int row = 0; row < rows; row++) pattern[row] = pattern_of(job, scale, values + row * LANES, &negative[row]);
            cut(job, pattern, negative, rows, x, used, voltages, first);
        }
    }
    active[0] = 0;
    for (int i = 0; i < job->x_slices; i++) if (any(used[i])) active[++active[0]] = (uint8_t)i;
}
"""
