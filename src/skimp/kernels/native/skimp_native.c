/* skimp's native CPU kernels: noise, bf16 stochastic rounding, block-wise dynamic 8-bit, and two AdamW steps.
 *
 * Rules of this file
 *  - Same float32 operations in the same order as the torch references (core/noise.py, core/codecs, optim/*_step.py);
 *    compiled with -ffp-contract=off, so that results are bit-equal to them. sqrtf and / round correctly by IEEE.
 *  - No heap. Buffers are one block (256 elements, 1 kB) each, on the stack of the thread that works on the block.
 *  - A block depends on nothing but its own elements and its own noise address: the result is the same for every
 *    number of threads. Threads are torch's own: compiled with -fopenmp and linked without a runtime, so that the
 *    calls land in the one torch has loaded. A second pool would fight with the first, whose idle threads spin: on
 *    two cores one pass of SwiGLU took twice as long that way.
 *  - Plain C11 loops of constant length, written so that the compiler vectorises them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define MIN_BLOCKS_PER_THREAD 128 /* 32,768 elements: below that a thread costs more than it saves */

#ifndef SKIMP_STAMP
#define SKIMP_STAMP "none"
#endif

/* Which source and flags made this object; the loader refuses another one. */
const char *skimp_stamp(void) { return SKIMP_STAMP; }

/* ---------------------------------------------------------------------------------------------- threads */

typedef void (*work_fn)(const void *job, int64_t first, int64_t last);

/* Cut [0, blocks) into one range per thread, `most` at most. */
static void spread(work_fn work, const void *job, int64_t blocks, int64_t most, int threads)
{
    if (threads > most) threads = (int)most;
    if (threads <= 1) {
        work(job, 0, blocks);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) work(job, blocks * t / threads, blocks * (t + 1) / threads);
}

static void fan_out(work_fn work, const void *job, int64_t blocks, int threads)
{
    spread(work, job, blocks, blocks / MIN_BLOCKS_PER_THREAD, threads);
}

/* --------------------------------------------------------------------------------------- bits and floats */

static inline uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* bf16 (is_bf16) or float32 to a float32 buffer; the tail of a short block becomes zero. */
static void load(const void *from, int is_bf16, int64_t at, int n, float *to)
{
    if (is_bf16) {
        const uint16_t *source = (const uint16_t *)from + at;
        for (int i = 0; i < n; i++) to[i] = float_of((uint32_t)source[i] << 16);
    } else {
        memcpy(to, (const float *)from + at, (size_t)n * 4);
    }
    for (int i = n; i < BLOCK; i++) to[i] = 0.0f;
}

/* Stochastic rounding to bf16: add 16 random bits below the bf16, cut. A NaN becomes the quiet one. */
static void store_rounded(const float *from, const uint32_t *noise16, int64_t at, int n, uint16_t *to)
{
    for (int i = 0; i < n; i++) {
        uint32_t u = bits_of(from[i]);
        uint32_t rounded = (u + noise16[i]) >> 16;
        to[at + i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

/* ------------------------------------------------------------------------------------------------ Philox */

/* Words 4 * first .. 4 * first + 255 of a stream: 64 counters through ten rounds, side by side. */
static void philox_256(int64_t key, int64_t stream, int64_t first, uint32_t *out)
{
    uint32_t c0[64], c1[64], c2[64], c3[64];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)((uint64_t)key >> 32);
    for (int j = 0; j < 64; j++) {
        uint64_t counter = (uint64_t)first + (uint64_t)j;
        c0[j] = (uint32_t)counter;
        c1[j] = (uint32_t)(counter >> 32);
        c2[j] = (uint32_t)stream;
        c3[j] = (uint32_t)((uint64_t)stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int j = 0; j < 64; j++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[j], p1 = (uint64_t)0xCD9E8D57u * c2[j];
            c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0;
            c1[j] = (uint32_t)p1;
            c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
            c3[j] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < 64; j++) {
        out[4 * j] = c0[j];
        out[4 * j + 1] = c1[j];
        out[4 * j + 2] = c2[j];
        out[4 * j + 3] = c3[j];
    }
}

/* Numbers at .. at + 255 for any at: the two aligned groups that hold them when at is not a multiple of 4. */
static void numbers_256(int64_t key, int64_t stream, int64_t at, uint32_t *out)
{
    int head = (int)(at % 4);
    if (head == 0) {
        philox_256(key, stream, at / 4, out);
        return;
    }
    uint32_t two[2 * BLOCK];
    philox_256(key, stream, at / 4, two);
    philox_256(key, stream, at / 4 + 64, two + BLOCK);
    memcpy(out, two + head, BLOCK * 4);
}

typedef struct {
    int64_t *out;
    const float *x;
    uint16_t *rounded;
    int64_t key, stream, offset, n;
} noise_job;

static void philox_work(const void *raw, int64_t first, int64_t last)
{
    const noise_job *job = raw;
    uint32_t noise[BLOCK];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        numbers_256(job->key, job->stream, job->offset + at, noise);
        for (int i = 0; i < n; i++) job->out[at + i] = (int64_t)noise[i];
    }
}

void skimp_philox(int64_t *out, int64_t key, int64_t stream, int64_t offset, int64_t n, int threads)
{
    noise_job job = {.out = out, .key = key, .stream = stream, .offset = offset, .n = n};
    fan_out(philox_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

static void round_work(const void *raw, int64_t first, int64_t last)
{
    const noise_job *job = raw;
    uint32_t noise[BLOCK];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        numbers_256(job->key, job->stream, job->offset + at, noise);
        for (int i = 0; i < BLOCK; i++) noise[i] >>= 16;
        store_rounded(job->x + at, noise, at, n, job->rounded);
    }
}

void skimp_bf16_round(const float *x, uint16_t *out, int64_t key, int64_t stream, int64_t offset, int64_t n,
                      int threads)
{
    noise_job job = {.x = x, .rounded = out, .key = key, .stream = stream, .offset = offset, .n = n};
    fan_out(round_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* -------------------------------------------------------------------------------------- dynamic 8-bit */

/* A code is the number of midpoints below u. The upper half of u's bits (sign, exponent, 7 bits of significand)
 * picks a bin so narrow that at most one midpoint lies inside: `start` has the number of midpoints below the whole
 * bin, and one comparison settles the rest. The tables are made, and this property checked, in
 * core/codecs/dynamic8_lookup.py. */
typedef struct {
    const float *decode;   /* 256 entries */
    const float *middle;   /* 255 midpoints, then +infinity */
    const int32_t *start;  /* 2 * bins: positive u, then negative u */
    int32_t first_bin;     /* upper half of the bits of the magnitude where bin 0 begins */
    int32_t bins;
    int32_t zero;          /* the code of 0 */
} map_t;

/* x holds a whole block, zero beyond its end. Maxima are taken on the bits: for magnitudes the order of the bits is
 * the order of the floats, and a NaN, being the largest, is not lost. */
static float encode_block(const map_t *map, const float *x, int keep_sign, uint8_t *codes, int n)
{
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        most = u > most ? u : most;
    }
    float absmax = float_of(most), scale = most == 0 ? 1.0f : absmax;
    int32_t index[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float u = x[i] / scale;
        int32_t bin = (int32_t)((bits_of(u) & 0x7fffffffu) >> 16) - map->first_bin;
        bin = bin < 0 ? 0 : bin;
        bin = bin > map->bins - 1 ? map->bins - 1 : bin;
        int32_t code = map->start[bin + (int32_t)(bits_of(u) >> 31) * map->bins];
        index[i] = code + (u > map->middle[code]);
    }
    if (keep_sign)
        for (int i = 0; i < BLOCK; i++)
            index[i] += index[i] == map->zero ? (x[i] > 0.0f) - (x[i] < 0.0f) : 0;
    if (n == BLOCK)
        for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)index[i];
    else
        for (int i = 0; i < n; i++) codes[i] = (uint8_t)index[i];
    return absmax;
}

static void decode_block(const map_t *map, const uint8_t *codes, float absmax, int n, float *out)
{
    if (n == BLOCK)
        for (int i = 0; i < BLOCK; i++) out[i] = map->decode[codes[i]] * absmax;
    else {
        for (int i = 0; i < n; i++) out[i] = map->decode[codes[i]] * absmax;
        for (int i = n; i < BLOCK; i++) out[i] = 0.0f;
    }
}

typedef struct {
    const map_t *map;
    const float *x;
    float *out;
    uint8_t *codes;
    float *absmax;
    int64_t n;
    int keep_sign;
} code_job;

static void encode_work(const void *raw, int64_t first, int64_t last)
{
    const code_job *job = raw;
    float x[BLOCK];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        load(job->x, 0, at, n, x);
        job->absmax[b] = encode_block(job->map, x, job->keep_sign, job->codes + at, n);
    }
}

void skimp_dynamic8_encode(const map_t *map, const float *x, uint8_t *codes, float *absmax, int64_t n, int keep_sign,
                           int threads)
{
    code_job job = {.map = map, .x = x, .codes = codes, .absmax = absmax, .n = n, .keep_sign = keep_sign};
    fan_out(encode_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

static void decode_work(const void *raw, int64_t first, int64_t last)
{
    const code_job *job = raw;
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        for (int i = 0; i < n; i++) job->out[at + i] = job->map->decode[job->codes[at + i]] * job->absmax[b];
    }
}

void skimp_dynamic8_decode(const map_t *map, uint8_t *codes, float *absmax, float *out, int64_t n, int threads)
{
    code_job job = {.map = map, .out = out, .codes = codes, .absmax = absmax, .n = n};
    fan_out(decode_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* ------------------------------------------------------------------------------------------------- AdamW */

/* Scalars of one step, computed in float64 by the caller and rounded to float32 once. */
typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root_bias2, eps, step_size, decay;
} adamw_t;

/* One block in float32. An element whose squared gradient is not finite leaves the weight alone and clears both
 * moments. */
static void adamw_block(const adamw_t *scalars, float *restrict p, const float *restrict g, float *restrict m,
                        float *restrict v)
{
    const adamw_t a = *scalars;
    for (int i = 0; i < BLOCK; i++) {
        float square = g[i] * g[i];
        int bad = (bits_of(square) & 0x7f800000u) == 0x7f800000u;
        float grad = bad ? 0.0f : g[i];
        float first = m[i] * a.beta1 + grad * a.one_minus_beta1;
        float second = v[i] * a.beta2 + grad * a.one_minus_beta2 * grad;
        first = bad ? 0.0f : first;
        second = bad ? 0.0f : second;
        float step = first / (sqrtf(second) / a.root_bias2 + a.eps) * a.step_size;
        float moved = p[i] * a.decay - step;
        p[i] = bad ? p[i] : moved;
        m[i] = first;
        v[i] = second;
    }
}

typedef struct {
    adamw_t scalars;
    const map_t *signed_map, *unsigned_map;
    void *p;
    const void *g;
    void *m, *v;
    float *m_absmax, *v_absmax;
    int64_t n, key, step, offset;
    int p_bf16, g_bf16, states_bf16;
} adamw_job;

/* `offset` is where the first number stands in the whole parameter, of which this may be a shard. Noise of a step: stream 2·step has the weight's 16 bits in its upper halves and the first moment's in its lower
 * halves; stream 2·step + 1 has the second moment's in its upper halves. */
static void adamw8bit_work(const void *raw, int64_t first, int64_t last)
{
    const adamw_job *job = raw;
    float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    uint32_t noise[BLOCK];
    uint8_t *m_codes = job->m, *v_codes = job->v;
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        load(job->p, job->p_bf16, at, n, p);
        load(job->g, job->g_bf16, at, n, g);
        decode_block(job->signed_map, m_codes + at, job->m_absmax[b], n, m);
        decode_block(job->unsigned_map, v_codes + at, job->v_absmax[b], n, v);
        adamw_block(&job->scalars, p, g, m, v);
        job->m_absmax[b] = encode_block(job->signed_map, m, 1, m_codes + at, n);
        job->v_absmax[b] = encode_block(job->unsigned_map, v, 1, v_codes + at, n);
        if (job->p_bf16) {
            numbers_256(job->key, 2 * job->step, job->offset + at, noise);
            for (int i = 0; i < BLOCK; i++) noise[i] >>= 16;
            store_rounded(p, noise, at, n, job->p);
        } else {
            memcpy((float *)job->p + at, p, (size_t)n * 4);
        }
    }
}

void skimp_adamw8bit(const map_t *signed_map, const map_t *unsigned_map, const adamw_t *scalars, void *p, int p_bf16,
                     const void *g, int g_bf16, uint8_t *m, float *m_absmax, uint8_t *v, float *v_absmax, int64_t n,
                     int64_t key, int64_t step, int64_t offset, int threads)
{
    adamw_job job = {.scalars = *scalars, .signed_map = signed_map, .unsigned_map = unsigned_map, .p = p, .g = g,
                     .m = m, .v = v, .m_absmax = m_absmax, .v_absmax = v_absmax, .n = n, .key = key, .step = step,
                     .offset = offset, .p_bf16 = p_bf16, .g_bf16 = g_bf16};
    fan_out(adamw8bit_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

static void adamw_bf16_work(const void *raw, int64_t first, int64_t last)
{
    const adamw_job *job = raw;
    float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    uint32_t noise[BLOCK], half[BLOCK];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK);
        load(job->p, 1, at, n, p);
        load(job->g, job->g_bf16, at, n, g);
        load(job->m, job->states_bf16, at, n, m);
        load(job->v, job->states_bf16, at, n, v);
        adamw_block(&job->scalars, p, g, m, v);
        numbers_256(job->key, 2 * job->step, job->offset + at, noise);
        for (int i = 0; i < BLOCK; i++) half[i] = noise[i] >> 16;
        store_rounded(p, half, at, n, job->p);
        if (job->states_bf16) {
            for (int i = 0; i < BLOCK; i++) half[i] = noise[i] & 0xffffu;
            store_rounded(m, half, at, n, job->m);
            numbers_256(job->key, 2 * job->step + 1, job->offset + at, noise);
            for (int i = 0; i < BLOCK; i++) half[i] = noise[i] >> 16;
            store_rounded(v, half, at, n, job->v);
        } else {
            memcpy((float *)job->m + at, m, (size_t)n * 4);
            memcpy((float *)job->v + at, v, (size_t)n * 4);
        }
    }
}

void skimp_adamw_bf16(const adamw_t *scalars, uint16_t *p, const void *g, int g_bf16, void *m, void *v,
                      int states_bf16, int64_t n, int64_t key, int64_t step, int64_t offset, int threads)
{
    adamw_job job = {.scalars = *scalars, .p = p, .g = g, .m = m, .v = v, .n = n, .key = key, .step = step,
                     .offset = offset, .p_bf16 = 1, .g_bf16 = g_bf16, .states_bf16 = states_bf16};
    fan_out(adamw_bf16_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* ------------------------------------------------------------------------------------------ fused layers
 *
 * RMSNorm and SwiGLU in one pass each, float32. Unlike the kernels above they are not bit-equal to a torch
 * reference (sums run in 16 lanes, exp is a polynomial); they agree with it to a few ulp and are the same for every
 * number of threads: rows do not mix, and the weight's gradient is summed by columns, rows in order.
 */

#define LANES 16

/* As fan_out, for items of `size` numbers each. */
static void fan_out_items(work_fn work, const void *job, int64_t items, int64_t size, int threads)
{
    int64_t most = items * size / (BLOCK * MIN_BLOCKS_PER_THREAD);
    spread(work, job, items, most < items ? most : items, threads);
}

/* Sum of a[i] * b[i] (times c[i] when given), in LANES partial sums added in order. */
static float dot(const float *a, const float *b, const float *c, int64_t n)
{
    float sums[LANES] = {0};
    int64_t i = 0;
    if (c) {
        for (; i + LANES <= n; i += LANES)
            for (int l = 0; l < LANES; l++) sums[l] += a[i + l] * b[i + l] * c[i + l];
        for (; i < n; i++) sums[i % LANES] += a[i] * b[i] * c[i];
    } else {
        for (; i + LANES <= n; i += LANES)
            for (int l = 0; l < LANES; l++) sums[l] += a[i + l] * b[i + l];
        for (; i < n; i++) sums[i % LANES] += a[i] * b[i];
    }
    float total = 0.0f;
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

typedef struct {
    const float *x, *w, *dy;
    float *y, *scale, *dx, *dw;
    int64_t rows, width;
    float eps;
} norm_t;

static void rms_forward(const void *raw, int64_t first, int64_t last)
{
    const norm_t *job = raw;
    int64_t n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n, *restrict w = job->w;
        float *restrict y = job->y + row * n;
        float scale = 1.0f / sqrtf(dot(x, x, 0, n) / (float)n + job->eps);
        job->scale[row] = scale;
        for (int64_t i = 0; i < n; i++) y[i] = w[i] * (x[i] * scale);
    }
}

/* dx = s (m - x s^2 mean(m x)), m = dy w. */
static void rms_backward_rows(const void *raw, int64_t first, int64_t last)
{
    const norm_t *job = raw;
    int64_t n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n, *restrict w = job->w, *restrict dy = job->dy + row * n;
        float *restrict dx = job->dx + row * n;
        float s = job->scale[row], inner = dot(dy, w, x, n) / (float)n * s * s;
        for (int64_t i = 0; i < n; i++) dx[i] = s * (dy[i] * w[i] - x[i] * inner);
    }
}

/* dw[i] = sum over rows of dy x s; a thread owns LANES-wide columns. */
static void rms_backward_columns(const void *raw, int64_t first, int64_t last)
{
    const norm_t *job = raw;
    int64_t n = job->width, from = first * LANES, to = last * LANES < n ? last * LANES : n;
    for (int64_t i = from; i < to; i++) job->dw[i] = 0.0f;
    for (int64_t row = 0; row < job->rows; row++) {
        const float *restrict x = job->x + row * n, *restrict dy = job->dy + row * n;
        float *restrict dw = job->dw, s = job->scale[row];
        for (int64_t i = from; i < to; i++) dw[i] += dy[i] * (x[i] * s);
    }
}

void skimp_rms_norm(const float *x, const float *w, float *y, float *scale, int64_t rows, int64_t width, float eps,
                    int threads)
{
    norm_t job = {.x = x, .w = w, .y = y, .scale = scale, .rows = rows, .width = width, .eps = eps};
    fan_out_items(rms_forward, &job, rows, width, threads);
}

void skimp_rms_norm_backward(const float *dy, const float *x, const float *w, const float *scale, float *dx, float *dw,
                             int64_t rows, int64_t width, int threads)
{
    norm_t job = {.x = x, .w = w, .dy = dy, .scale = (float *)scale, .dx = dx, .dw = dw, .rows = rows, .width = width};
    if (dx) fan_out_items(rms_backward_rows, &job, rows, width, threads);
    if (dw) fan_out_items(rms_backward_columns, &job, (width + LANES - 1) / LANES, rows * LANES, threads);
}

/* exp(x) to about 1 ulp in float32: 2^n times a polynomial in the remainder, |r| <= ln 2 / 2. */
static inline float exp_of(float x)
{
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

typedef struct {
    const float *gate, *up, *dy;
    float *y, *dgate, *dup;
    int64_t n;
} glu_t;

static void swiglu_forward(const void *raw, int64_t first, int64_t last)
{
    const glu_t *job = raw;
    int64_t to = last * BLOCK < job->n ? last * BLOCK : job->n;
    const float *restrict g = job->gate, *restrict u = job->up;
    float *restrict y = job->y;
    for (int64_t i = first * BLOCK; i < to; i++) y[i] = g[i] / (1.0f + exp_of(-g[i])) * u[i];
}

static void swiglu_backward(const void *raw, int64_t first, int64_t last)
{
    const glu_t *job = raw;
    int64_t to = last * BLOCK < job->n ? last * BLOCK : job->n;
    const float *restrict g = job->gate, *restrict u = job->up, *restrict dy = job->dy;
    float *restrict dg = job->dgate, *restrict du = job->dup;
    float s[BLOCK]; /* sigmoids first, in a loop of their own: the compiler vectorises the two, not the one */
    for (int64_t at = first * BLOCK; at < to; at += BLOCK) {
        int n = to - at < BLOCK ? (int)(to - at) : BLOCK;
        for (int i = 0; i < n; i++) s[i] = 1.0f / (1.0f + exp_of(-g[at + i]));
        for (int i = 0; i < n; i++) dg[at + i] = dy[at + i] * u[at + i] * (s[i] + g[at + i] * s[i] * (1.0f - s[i]));
        for (int i = 0; i < n; i++) du[at + i] = dy[at + i] * g[at + i] * s[i];
    }
}

void skimp_swiglu(const float *gate, const float *up, float *y, int64_t n, int threads)
{
    glu_t job = {.gate = gate, .up = up, .y = y, .n = n};
    fan_out(swiglu_forward, &job, (n + BLOCK - 1) / BLOCK, threads);
}

void skimp_swiglu_backward(const float *dy, const float *gate, const float *up, float *dgate, float *dup, int64_t n,
                           int threads)
{
    glu_t job = {.gate = gate, .up = up, .dy = dy, .dgate = dgate, .dup = dup, .n = n};
    fan_out(swiglu_backward, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* Rotation of halves by position: y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2; `inverse` is its transpose, the gradient.
 * Two roundings a product and sum, as the plain form makes them: bit-equal to it. */
typedef struct {
    const float *x, *cos, *sin;
    float *y;
    int64_t seq, heads, dim, angles, x_row, x_head, x_pos, y_row, y_head, y_pos;
    int inverse;
} rotary_t;

static void rotary_work(const void *raw, int64_t first, int64_t last)
{
    const rotary_t *job = raw;
    int64_t half = job->dim / 2;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / job->seq, pos = item % job->seq;
        const float *restrict c = job->cos + row * job->angles + pos * job->dim;
        const float *restrict s = job->sin + row * job->angles + pos * job->dim;
        for (int64_t head = 0; head < job->heads; head++) {
            const float *restrict x = job->x + row * job->x_row + head * job->x_head + pos * job->x_pos;
            float *restrict y = job->y + row * job->y_row + head * job->y_head + pos * job->y_pos;
            if (job->inverse) {
                for (int64_t i = 0; i < half; i++) {
                    float a = x[i], b = x[half + i];
                    y[i] = a * c[i] + b * s[half + i];
                    y[half + i] = b * c[half + i] - a * s[i];
                }
            } else {
                for (int64_t i = 0; i < half; i++) {
                    float a = x[i], b = x[half + i];
                    y[i] = a * c[i] - b * s[i];
                    y[half + i] = b * c[half + i] + a * s[half + i];
                }
            }
        }
    }
}

/* strides: of x then of y, each over rows, heads, positions; `angles`: of cos and sin over rows, 0 when all share. */
void skimp_rotary(const float *x, float *y, const float *cos, const float *sin, int64_t rows, int64_t heads,
                  int64_t seq, int64_t dim, int64_t angles, const int64_t *strides, int inverse, int threads)
{
    rotary_t job = {.x = x, .cos = cos, .sin = sin, .y = y, .seq = seq, .heads = heads, .dim = dim, .angles = angles,
                    .x_row = strides[0], .x_head = strides[1], .x_pos = strides[2], .y_row = strides[3],
                    .y_head = strides[4], .y_pos = strides[5], .inverse = inverse};
    fan_out_items(rotary_work, &job, rows * seq, heads * dim, threads);
}
