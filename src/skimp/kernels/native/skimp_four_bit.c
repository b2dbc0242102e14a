/* AdamW with block-wise 4-bit moments: a library of its own beside skimp_native.c, whose rules, threads, noise and AdamW
 * step it takes by including it. A library that exists stays valid while this one changes.
 */
#include "skimp_native.c"

/* Two codes a byte: in a block of 128, byte j holds number j in its lower half and number j + 64 in its upper half. A
 * signed code counts entries below u; an unsigned one is arithmetic, k / 16 for k of 1 to 16. */
#define BLOCK4 128
#define HALF4 (BLOCK4 / 2)

typedef struct {
    float entries[16], rise[16]; /* rise: 65,536 / (entry i + 1 - entry i) */
} map4_t;

/* Signed codes are rounded at random: the entry below u, and one up where noise (16 bits) is below the way to it. */
static float encode4(const map4_t *map, const float *x, const uint32_t *noise, uint8_t *codes)
{
    uint32_t most = 0;
    for (int i = 0; i < BLOCK4; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        most = u > most ? u : most;
    }
    float absmax = float_of(most), scale = most == 0 ? 1.0f : absmax, u[BLOCK4];
    int32_t index[BLOCK4];
    for (int i = 0; i < BLOCK4; i++) u[i] = x[i] / scale;
    if (map) {
        for (int i = 0; i < BLOCK4; i++) index[i] = 0;
        for (int k = 1; k < 16; k++) {
            float edge = map->entries[k];
            for (int i = 0; i < BLOCK4; i++) index[i] += u[i] > edge;
        }
        float way[BLOCK4];
        for (int i = 0; i < BLOCK4; i++) way[i] = (u[i] - map->entries[index[i]]) * map->rise[index[i]];
        for (int i = 0; i < BLOCK4; i++) index[i] += way[i] > (float)(int32_t)(noise[i] & 0xffffu);
    } else {
        for (int i = 0; i < BLOCK4; i++) {
            float k = ceilf(u[i] * 16.0f - 0.5f) - 1.0f;
            k = k < 0.0f ? 0.0f : k;
            index[i] = (int32_t)(k > 15.0f ? 15.0f : k);
        }
    }
    for (int i = 0; i < HALF4; i++) codes[i] = (uint8_t)(index[i] + 16 * index[i + HALF4]);
    return absmax;
}

static void decode4(const map4_t *map, const uint8_t *codes, float absmax, float *out)
{
    if (map) {
        for (int i = 0; i < HALF4; i++) out[i] = map->entries[codes[i] & 15] * absmax;
        for (int i = 0; i < HALF4; i++) out[i + HALF4] = map->entries[codes[i] >> 4] * absmax;
    } else {
        for (int i = 0; i < HALF4; i++) out[i] = (float)((codes[i] & 15) + 1) * 0.0625f * absmax;
        for (int i = 0; i < HALF4; i++) out[i + HALF4] = (float)((codes[i] >> 4) + 1) * 0.0625f * absmax;
    }
}

/* A block of 256 numbers is two blocks of 4-bit codes, the second of which may not exist at the end. */
static void adamw4bit_work(const void *raw, int64_t first, int64_t last)
{
    const adamw_job *job = raw;
    const map4_t *map = (const map4_t *)job->signed_map;
    float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    uint32_t noise[BLOCK];
    uint8_t *m_codes = job->m, *v_codes = job->v;
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * BLOCK;
        int n = (int)(job->n - at < BLOCK ? job->n - at : BLOCK), parts = n > BLOCK4 ? 2 : 1;
        load(job->p, job->p_bf16, at, n, p);
        load(job->g, job->g_bf16, at, n, g);
        for (int h = 0; h < parts; h++) {
            decode4(map, m_codes + (2 * b + h) * HALF4, job->m_absmax[2 * b + h], m + h * BLOCK4);
            decode4(0, v_codes + (2 * b + h) * HALF4, job->v_absmax[2 * b + h], v + h * BLOCK4);
        }
        for (int i = n; i < BLOCK; i++) m[i] = v[i] = 0.0f;
        adamw_block(&job->scalars, p, g, m, v);
        numbers_256(job->key, 2 * job->step, job->offset + at, noise);
        for (int h = 0; h < parts; h++) {
            job->m_absmax[2 * b + h] = encode4(map, m + h * BLOCK4, noise + h * BLOCK4, m_codes + (2 * b + h) * HALF4);
            job->v_absmax[2 * b + h] = encode4(0, v + h * BLOCK4, 0, v_codes + (2 * b + h) * HALF4);
        }
        if (job->p_bf16) {
            for (int i = 0; i < BLOCK; i++) noise[i] >>= 16;
            store_rounded(p, noise, at, n, job->p);
        } else {
            memcpy((float *)job->p + at, p, (size_t)n * 4);
        }
    }
}

void skimp_adamw4bit(const map4_t *map, const adamw_t *scalars, void *p, int p_bf16, const void *g, int g_bf16,
                     uint8_t *m, float *m_absmax, uint8_t *v, float *v_absmax, int64_t n, int64_t key, int64_t step,
                     int64_t offset, int threads)
{
    adamw_job job = {.scalars = *scalars, .signed_map = (const map_t *)map, .p = p, .g = g, .m = m, .v = v,
                     .m_absmax = m_absmax, .v_absmax = v_absmax, .n = n, .key = key, .step = step, .offset = offset,
                     .p_bf16 = p_bf16, .g_bf16 = g_bf16};
    fan_out(adamw4bit_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}
