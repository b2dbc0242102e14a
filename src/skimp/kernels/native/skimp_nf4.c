/* NF4 weights: encoding, decoding, and products with a few rows straight from the codes. A library of its own beside
 * skimp_native.c, whose rules and threads it takes by including it. Encoding and decoding give the bits of the torch
 * reference (core/codecs/nf4_chunks.py).
 *
 * Two codes a byte, the first in the upper half. With AVX-512 the sixteen levels are one register, and a look-up of
 * sixteen codes is one permutation; elsewhere plain C does the same.
 */
#include "skimp_native.c"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef struct {
    float levels[16], borders[15];
    const float *dynamic; /* 256 entries of the signed dynamic map */
} nf4_t;

typedef struct {
    const nf4_t *map;
    const uint8_t *codes, *coded; /* coded: 8-bit maxima, or null */
    const float *absmax;          /* maxima, or with `coded` those of 256 maxima */
    float offset;
    int64_t block, first, last, numel;
    void *out;
    int bf16;
    const float *x, *bias; /* products: x is (rows, 2, inputs / 2), even columns then odd ones */
    int64_t rows, inputs, outputs;
} nf4_job;

static inline float scale_of(const nf4_job *job, int64_t block)
{
    if (!job->coded) return job->absmax[block];
    float product = job->map->dynamic[job->coded[block]] * job->absmax[block >> 8];
    return product + job->offset;
}

/* -------------------------------------------------------------------------------------------------- encoding */

typedef struct {
    const nf4_t *map;
    const float *x;
    uint8_t *codes;
    float *absmax;
    int64_t n, block;
} nf4_encode_job;

static void nf4_encode_work(const void *raw, int64_t first, int64_t last)
{
    const nf4_encode_job *job = raw;
    float u[4096];
    int32_t index[4096];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * job->block, left = job->n - at;
        int n = (int)(left < job->block ? left : job->block), even = n + (n & 1);
        const float *x = job->x + at;
        uint32_t most = 0;
        for (int i = 0; i < n; i++) {
            uint32_t a = bits_of(x[i]) & 0x7fffffffu;
            most = a > most ? a : most;
        }
        float absmax = float_of(most), floor = absmax < 1e-38f ? 1e-38f : absmax;
        job->absmax[b] = absmax;
        if (n == job->block) {
            float inverse = 1.0f / floor;
            for (int i = 0; i < n; i++) u[i] = x[i] * inverse;
        } else {
            for (int i = 0; i < n; i++) u[i] = x[i] / floor;
        }
        if (n & 1) u[n] = 0.0f; /* its partner decodes to 0 */
        for (int i = 0; i < even; i++) index[i] = 0;
        for (int k = 0; k < 15; k++) {
            float border = job->map->borders[k];
            for (int i = 0; i < even; i++) index[i] += u[i] > border;
        }
        uint8_t *codes = job->codes + at / 2;
        for (int i = 0; i < even / 2; i++) codes[i] = (uint8_t)(index[2 * i] * 16 + index[2 * i + 1]);
    }
}

void skimp_nf4_encode(const nf4_t *map, const float *x, uint8_t *codes, float *absmax, int64_t n, int64_t block,
                      int threads)
{
    nf4_encode_job job = {.map = map, .x = x, .codes = codes, .absmax = absmax, .n = n, .block = block};
    int64_t blocks = (n + block - 1) / block;
    spread(nf4_encode_work, &job, blocks, n / 32768, threads);
}

/* -------------------------------------------------------------------------------------------------- decoding */

static inline uint16_t half_of(float x)
{
    uint32_t u = bits_of(x);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* Elements at .. at + n of one block, whose scale is given; `to` counts from job->first. */
static void decode_some(const nf4_job *job, int64_t at, int64_t n, float scale)
{
    int64_t to = at - job->first, end = at + n;
    const float *levels = job->map->levels;
    float *wide = (float *)job->out + to;
    uint16_t *narrow = (uint16_t *)job->out + to;
    int64_t i = 0;
#ifdef __AVX512F__
    if ((at & 1) == 0) {
        const __m512 table = _mm512_loadu_ps(levels), scales = _mm512_set1_ps(scale);
        const __m512i low = _mm512_set1_epi32(15);
        const __m512i one = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i two = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        for (; i + 32 <= n; i += 32) {
            __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(job->codes + (at + i) / 2)));
            __m512 upper = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
            __m512 lower = _mm512_permutexvar_ps(_mm512_and_si512(bytes, low), table);
            __m512 a = _mm512_mul_ps(_mm512_permutex2var_ps(upper, one, lower), scales);
            __m512 b = _mm512_mul_ps(_mm512_permutex2var_ps(upper, two, lower), scales);
            if (!job->bf16) {
                _mm512_storeu_ps(wide + i, a);
                _mm512_storeu_ps(wide + i + 16, b);
                continue;
            }
            const __m512i round = _mm512_set1_epi32(0x7fff), bit = _mm512_set1_epi32(1);
            __m512i p = _mm512_castps_si512(a), q = _mm512_castps_si512(b);
            p = _mm512_add_epi32(p, _mm512_add_epi32(round, _mm512_and_si512(_mm512_srli_epi32(p, 16), bit)));
            q = _mm512_add_epi32(q, _mm512_add_epi32(round, _mm512_and_si512(_mm512_srli_epi32(q, 16), bit)));
            _mm256_storeu_si256((__m256i *)(narrow + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(p, 16)));
            _mm256_storeu_si256((__m256i *)(narrow + i + 16), _mm512_cvtepi32_epi16(_mm512_srli_epi32(q, 16)));
        }
    }
#endif
    for (; at + i < end; i++) {
        uint8_t byte = job->codes[(at + i) / 2];
        float value = levels[(at + i) & 1 ? byte & 15 : byte >> 4] * scale;
        if (job->bf16)
            narrow[i] = half_of(value);
        else
            wide[i] = value;
    }
}

static void nf4_decode_work(const void *raw, int64_t first, int64_t last)
{
    const nf4_job *job = raw;
    for (int64_t b = first; b < last; b++) {
        int64_t block = job->first / job->block + b, at = block * job->block, end = at + job->block;
        if (at < job->first) at = job->first;
        if (end > job->last) end = job->last;
        if (at < end) decode_some(job, at, end - at, scale_of(job, block));
    }
}

void skimp_nf4_decode(const nf4_t *map, const uint8_t *codes, const uint8_t *coded, const float *absmax, float offset,
                      int64_t block, int64_t first, int64_t last, void *out, int bf16, int threads)
{
    nf4_job job = {.map = map, .codes = codes, .coded = coded, .absmax = absmax, .offset = offset, .block = block,
                   .first = first, .last = last, .out = out, .bf16 = bf16};
    int64_t blocks = (last - 1) / block - first / block + 1;
    spread(nf4_decode_work, &job, blocks, (last - first) / 65536, threads);
}

/* -------------------------------------------------------------------------------------------------- products */

/* y[t][r] = sum over columns of x[t][c] level[r][c] scale + bias[r], for one row r of W and every t. A block is summed
 * unscaled, then once times its scale. */
#ifdef __AVX512F__
/* Rows from .. from + count of x; count is a constant where this is called, so that its sums are registers. */
static inline __attribute__((always_inline)) void few_of(const nf4_job *job, int64_t r, int64_t from, const int count)
{
    const int64_t inputs = job->inputs, half = inputs / 2, per_row = inputs / job->block, bytes = job->block / 2;
    const uint8_t *codes = job->codes + r * half;
    const float *x = job->x + from * inputs;
    const __m512 table = _mm512_loadu_ps(job->map->levels);
    const __m512i low = _mm512_set1_epi32(15);
    __m512 sums[4];
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) sums[t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < per_row; b++) {
        __m512 part[4], other[4];
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) part[t] = other[t] = _mm512_setzero_ps();
        for (int64_t i = b * bytes; i < (b + 1) * bytes; i += 16) {
            __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
            __m512 upper = _mm512_permutexvar_ps(_mm512_srli_epi32(pair, 4), table);
            __m512 lower = _mm512_permutexvar_ps(_mm512_and_si512(pair, low), table);
#pragma GCC unroll 4
            for (int t = 0; t < count; t++) {
                part[t] = _mm512_fmadd_ps(upper, _mm512_loadu_ps(x + t * inputs + i), part[t]);
                other[t] = _mm512_fmadd_ps(lower, _mm512_loadu_ps(x + t * inputs + half + i), other[t]);
            }
        }
        __m512 scale = _mm512_set1_ps(scale_of(job, r * per_row + b));
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) sums[t] = _mm512_fmadd_ps(_mm512_add_ps(part[t], other[t]), scale, sums[t]);
    }
    float *y = (float *)job->out + from * job->outputs + r, bias = job->bias ? job->bias[r] : 0.0f;
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) y[t * job->outputs] = _mm512_reduce_add_ps(sums[t]) + bias;
}

static void nf4_few_work(const void *raw, int64_t first, int64_t last)
{
    const nf4_job *job = raw;
    for (int64_t r = first; r < last; r++) {
        int64_t from = 0;
        for (; from + 4 <= job->rows; from += 4) few_of(job, r, from, 4);
        switch (job->rows - from) {
        case 1: few_of(job, r, from, 1); break;
        case 2: few_of(job, r, from, 2); break;
        case 3: few_of(job, r, from, 3); break;
        }
    }
}
#else
static void nf4_few_work(const void *raw, int64_t first, int64_t last)
{
    const nf4_job *job = raw;
    int64_t half = job->inputs / 2, per_row = job->inputs / job->block, bytes = job->block / 2;
    const float *levels = job->map->levels;
    float *y = job->out;
    for (int64_t r = first; r < last; r++) {
        const uint8_t *codes = job->codes + r * half;
        for (int64_t t = 0; t < job->rows; t++) {
            const float *x = job->x + t * job->inputs;
            float sum = 0.0f;
            for (int64_t b = 0; b < per_row; b++) {
                float part = 0.0f;
                for (int64_t i = b * bytes; i < (b + 1) * bytes; i++)
                    part += levels[codes[i] >> 4] * x[i] + levels[codes[i] & 15] * x[half + i];
                sum += part * scale_of(job, r * per_row + b);
            }
            y[t * job->outputs + r] = sum + (job->bias ? job->bias[r] : 0.0f);
        }
    }
}
#endif

void skimp_nf4_few(const nf4_t *map, const uint8_t *codes, const uint8_t *coded, const float *absmax, float offset,
                   int64_t block, const float *x, const float *bias, float *y, int64_t rows, int64_t inputs,
                   int64_t outputs, int threads)
{
    nf4_job job = {.map = map, .codes = codes, .coded = coded, .absmax = absmax, .offset = offset, .block = block,
                   .x = x, .bias = bias, .out = y, .rows = rows, .inputs = inputs, .outputs = outputs};
    spread(nf4_few_work, &job, outputs, outputs * inputs / 65536, threads);
}
