/* skimp's native CPU kernels: noise, bf16 stochastic rounding, block-wise dynamic 8-bit, and two AdamW steps.
 *
 * Rules of this file
 *  - Same float32 operations in the same order as the torch references (core/noise.py, core/codecs, optim/*_step.py);
 *    compiled with -ffp-contract=off, so that results are bit-equal to them. sqrtf and / round correctly by IEEE.
 *  - No heap. Buffers are one block (256 elements, 1 kB) each, on the stack of the thread that works on the block.
 *  - A block depends on nothing but its own elements and its own noise address: the result is the same for every
 *    number of threads. Threads are plain pthreads, made per call (about 20 us each): an OpenMP runtime beside
 *    torch's own would cost memory and spin.
 *  - Plain C11 loops of constant length, written so that the compiler vectorises them.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define MAX_THREADS 64
#define MIN_BLOCKS_PER_THREAD 128 /* 32,768 elements: below that a thread costs more than it saves */

#ifndef SKIMP_STAMP
#define SKIMP_STAMP "none"
#endif

/* Which source and flags made this object; the loader refuses another one. */
const char *skimp_stamp(void) { return SKIMP_STAMP; }

/* ---------------------------------------------------------------------------------------------- threads */

typedef void (*work_fn)(const void *job, int64_t first, int64_t last);

typedef struct {
    work_fn work;
    const void *job;
    int64_t first, last;
} piece_t;

static void *run_piece(void *raw)
{
    const piece_t *piece = raw;
    piece->work(piece->job, piece->first, piece->last);
    return 0;
}

/* Cut [0, blocks) into one range per thread. A thread that cannot be made has its range done here instead. */
static void fan_out(work_fn work, const void *job, int64_t blocks, int threads)
{
    int64_t most = blocks / MIN_BLOCKS_PER_THREAD;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > most) threads = (int)most;
    if (threads <= 1) {
        work(job, 0, blocks);
        return;
    }
    pthread_t ids[MAX_THREADS];
    piece_t pieces[MAX_THREADS];
    int made[MAX_THREADS];
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 256 * 1024);
    for (int t = 0; t < threads; t++) {
        pieces[t] = (piece_t){work, job, blocks * t / threads, blocks * (t + 1) / threads};
        made[t] = t > 0 && pthread_create(&ids[t], &attr, run_piece, &pieces[t]) == 0;
    }
    pthread_attr_destroy(&attr);
    for (int t = 0; t < threads; t++)
        if (!made[t]) run_piece(&pieces[t]);
    for (int t = 0; t < threads; t++)
        if (made[t]) pthread_join(ids[t], 0);
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
    int64_t n, key, step;
    int p_bf16, g_bf16, states_bf16;
} adamw_job;

/* Noise of a step: stream 2·step has the weight's 16 bits in its upper halves and the first moment's in its lower
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
            philox_256(job->key, 2 * job->step, at / 4, noise);
            for (int i = 0; i < BLOCK; i++) noise[i] >>= 16;
            store_rounded(p, noise, at, n, job->p);
        } else {
            memcpy((float *)job->p + at, p, (size_t)n * 4);
        }
    }
}

void skimp_adamw8bit(const map_t *signed_map, const map_t *unsigned_map, const adamw_t *scalars, void *p, int p_bf16,
                     const void *g, int g_bf16, uint8_t *m, float *m_absmax, uint8_t *v, float *v_absmax, int64_t n,
                     int64_t key, int64_t step, int threads)
{
    adamw_job job = {.scalars = *scalars, .signed_map = signed_map, .unsigned_map = unsigned_map, .p = p, .g = g,
                     .m = m, .v = v, .m_absmax = m_absmax, .v_absmax = v_absmax, .n = n, .key = key, .step = step,
                     .p_bf16 = p_bf16, .g_bf16 = g_bf16};
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
        philox_256(job->key, 2 * job->step, at / 4, noise);
        for (int i = 0; i < BLOCK; i++) half[i] = noise[i] >> 16;
        store_rounded(p, half, at, n, job->p);
        if (job->states_bf16) {
            for (int i = 0; i < BLOCK; i++) half[i] = noise[i] & 0xffffu;
            store_rounded(m, half, at, n, job->m);
            philox_256(job->key, 2 * job->step + 1, at / 4, noise);
            for (int i = 0; i < BLOCK; i++) half[i] = noise[i] >> 16;
            store_rounded(v, half, at, n, job->v);
        } else {
            memcpy((float *)job->m + at, m, (size_t)n * 4);
            memcpy((float *)job->v + at, v, (size_t)n * 4);
        }
    }
}

void skimp_adamw_bf16(const adamw_t *scalars, uint16_t *p, const void *g, int g_bf16, void *m, void *v,
                      int states_bf16, int64_t n, int64_t key, int64_t step, int threads)
{
    adamw_job job = {.scalars = *scalars, .p = p, .g = g, .m = m, .v = v, .n = n, .key = key, .step = step,
                     .p_bf16 = 1, .g_bf16 = g_bf16, .states_bf16 = states_bf16};
    fan_out(adamw_bf16_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}
