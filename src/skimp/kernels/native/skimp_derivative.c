/* What backward needs of activations, gated products and norms, in 4 bits: a library of its own beside skimp_native.c,
 * whose threads and exp it takes by including it.
 *
 * Two codes a byte: byte j holds number 2 j in its lower half and number 2 j + 1 in its upper half. A derivative's code
 * is found from x itself: f' is piecewise monotone, so its cells are intervals of x, and counting the edges below x
 * names the interval. Blocks of 64 with their largest magnitude hold what has no bound.
 */
#include "skimp_native.c"

#define BLOCK64 64
#define MOST_EDGES 48

typedef struct {
    int32_t count;             /* edges in x, rising */
    int32_t cells[MOST_EDGES + 1]; /* code of each interval */
    float edges[MOST_EDGES];
    float levels[16]; /* value of each code */
} cells_t;

/* The 16 values of a block's code over its largest magnitude, and the 15 midpoints between them. */
typedef struct {
    float levels[16], edges[15];
} block_t;

static void pack_pairs(const int32_t *index, int64_t n, uint8_t *codes)
{
    for (int64_t j = 0; j < n / 2; j++) codes[j] = (uint8_t)(index[2 * j] | index[2 * j + 1] << 4);
    if (n & 1) codes[n / 2] = (uint8_t)index[n - 1];
}

static void code_derivative(const cells_t *t, const float *restrict x, int64_t n, uint8_t *codes)
{
    int32_t index[BLOCK] = {0};
    for (int k = 0; k < t->count; k++) {
        float edge = t->edges[k];
        for (int64_t i = 0; i < n; i++) index[i] += x[i] > edge;
    }
    for (int64_t i = 0; i < n; i++) index[i] = t->cells[index[i]];
    pack_pairs(index, n, codes);
}

static void value_of(const float *levels, const uint8_t *codes, int64_t n, float *restrict out)
{
    for (int64_t j = 0; j < n / 2; j++) {
        out[2 * j] = levels[codes[j] & 15];
        out[2 * j + 1] = levels[codes[j] >> 4];
    }
    if (n & 1) out[n - 1] = levels[codes[n / 2] & 15];
}

/* Codes of n <= 64 numbers over their largest magnitude, which is returned; zeros are the code of 0. */
static float code_block64(const block_t *map, const float *restrict x, int64_t n, uint8_t *codes)
{
    float most = 0.0f, u[BLOCK64];
    int32_t index[BLOCK64] = {0};
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    float scale = most > 0.0f ? 1.0f / most : 0.0f;
    for (int64_t i = 0; i < n; i++) u[i] = x[i] * scale;
    for (int k = 0; k < 15; k++) {
        float edge = map->edges[k];
        for (int64_t i = 0; i < n; i++) index[i] += u[i] > edge;
    }
    pack_pairs(index, n, codes);
    return most;
}

static void value_block64(const block_t *map, const uint8_t *codes, float most, int64_t n, float *restrict out)
{
    value_of(map->levels, codes, n, out);
    for (int64_t i = 0; i < n; i++) out[i] *= most;
}

/* ---------------------------------------------------------------------------------------- y = f(x), of x alone */

typedef struct {
    const cells_t *cells;
    const float *x;
    const uint8_t *kept;
    uint8_t *codes;
    float *dx;
    int64_t n;
} point_t;

static void point_code_work(const void *raw, int64_t first, int64_t last)
{
    const point_t *job = raw;
    for (int64_t at = first * BLOCK; at < last * BLOCK && at < job->n; at += BLOCK) {
        int64_t n = job->n - at < BLOCK ? job->n - at : BLOCK;
        code_derivative(job->cells, job->x + at, n, job->codes + at / 2);
    }
}

static void point_back_work(const void *raw, int64_t first, int64_t last)
{
    const point_t *job = raw;
    float slope[BLOCK];
    for (int64_t at = first * BLOCK; at < last * BLOCK && at < job->n; at += BLOCK) {
        int64_t n = job->n - at < BLOCK ? job->n - at : BLOCK;
        value_of(job->cells->levels, job->kept + at / 2, n, slope);
        for (int64_t i = 0; i < n; i++) job->dx[at + i] = job->x[at + i] * slope[i];
    }
}

void skimp_derivative_code(const cells_t *cells, const float *x, uint8_t *codes, int64_t n, int threads)
{
    point_t job = {.cells = cells, .x = x, .codes = codes, .n = n};
    fan_out(point_code_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

void skimp_derivative_back(const cells_t *cells, const float *dy, const uint8_t *codes, float *dx, int64_t n,
                           int threads)
{
    point_t job = {.cells = cells, .x = dy, .kept = codes, .dx = dx, .n = n};
    fan_out(point_back_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* ---------------------------------------------------------------------------------------- y = f(a) c */

typedef struct {
    const cells_t *cells;
    const block_t *map;
    const float *a, *c, *dy;
    uint8_t *slopes, *c_codes, *f_codes;
    float *c_most, *f_most, *da, *dc;
    int64_t n;
    int tanh_form;
} gated_t;

/* silu(a) = a sigmoid(a); tanh's GELU is a sigmoid(2 sqrt(2/pi) (a + 0.044715 a^3)). */
static void gate_value(const gated_t *job, const float *restrict a, int64_t n, float *restrict out)
{
    if (job->tanh_form)
        for (int64_t i = 0; i < n; i++) {
            float u = 1.5957691216f * (a[i] + 0.044715f * a[i] * a[i] * a[i]);
            out[i] = a[i] / (1.0f + exp_of(-u));
        }
    else
        for (int64_t i = 0; i < n; i++) out[i] = a[i] / (1.0f + exp_of(-a[i]));
}

static void gated_code_work(const void *raw, int64_t first, int64_t last)
{
    const gated_t *job = raw;
    float value[BLOCK64];
    for (int64_t b = first * (BLOCK / BLOCK64); b < last * (BLOCK / BLOCK64) && b * BLOCK64 < job->n; b++) {
        int64_t at = b * BLOCK64, n = job->n - at < BLOCK64 ? job->n - at : BLOCK64;
        code_derivative(job->cells, job->a + at, n, job->slopes + at / 2);
        gate_value(job, job->a + at, n, value);
        job->f_most[b] = code_block64(job->map, value, n, job->f_codes + at / 2);
        job->c_most[b] = code_block64(job->map, job->c + at, n, job->c_codes + at / 2);
    }
}

static void gated_back_work(const void *raw, int64_t first, int64_t last)
{
    const gated_t *job = raw;
    float slope[BLOCK64], value[BLOCK64], c[BLOCK64];
    for (int64_t b = first * (BLOCK / BLOCK64); b < last * (BLOCK / BLOCK64) && b * BLOCK64 < job->n; b++) {
        int64_t at = b * BLOCK64, n = job->n - at < BLOCK64 ? job->n - at : BLOCK64;
        value_of(job->cells->levels, job->slopes + at / 2, n, slope);
        value_block64(job->map, job->f_codes + at / 2, job->f_most[b], n, value);
        value_block64(job->map, job->c_codes + at / 2, job->c_most[b], n, c);
        for (int64_t i = 0; i < n; i++) job->da[at + i] = job->dy[at + i] * c[i] * slope[i];
        for (int64_t i = 0; i < n; i++) job->dc[at + i] = job->dy[at + i] * value[i];
    }
}

void skimp_gated_code(const cells_t *cells, const block_t *map, const float *a, const float *c, uint8_t *slopes,
                      uint8_t *c_codes, float *c_most, uint8_t *f_codes, float *f_most, int64_t n, int tanh_form,
                      int threads)
{
    gated_t job = {.cells = cells, .map = map, .a = a, .c = c, .slopes = slopes, .c_codes = c_codes, .c_most = c_most,
                   .f_codes = f_codes, .f_most = f_most, .n = n, .tanh_form = tanh_form};
    fan_out(gated_code_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

void skimp_gated_back(const cells_t *cells, const block_t *map, const float *dy, const uint8_t *slopes,
                      const uint8_t *c_codes, const float *c_most, const uint8_t *f_codes, const float *f_most,
                      float *da, float *dc, int64_t n, int threads)
{
    gated_t job = {.cells = cells, .map = map, .dy = dy, .slopes = (uint8_t *)slopes, .c_codes = (uint8_t *)c_codes,
                   .c_most = (float *)c_most, .f_codes = (uint8_t *)f_codes, .f_most = (float *)f_most, .da = da,
                   .dc = dc, .n = n};
    fan_out(gated_back_work, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* ---------------------------------------------------------------------------------------- norms, gain frozen */

typedef struct {
    const block_t *map;
    const float *x, *w, *dy;
    uint8_t *codes;
    float *most, *scale, *dx;
    int64_t rows, width;
    float eps;
    int centred;
} coded_norm_t;

/* Blocks and bytes of a row are its own: ceil(width / 64) and ceil(width / 2). */
static void norm_code_work(const void *raw, int64_t first, int64_t last)
{
    const coded_norm_t *job = raw;
    int64_t n = job->width, blocks = (n + BLOCK64 - 1) / BLOCK64, bytes = (n + 1) / 2;
    float part[BLOCK64];
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n;
        float mean = 0.0f, square = 0.0f;
        if (job->centred) {
            float sums[LANES] = {0};
            for (int64_t i = 0; i < n; i++) sums[i % LANES] += x[i];
            for (int l = 0; l < LANES; l++) mean += sums[l];
            mean /= (float)n;
            float squares[LANES] = {0};
            for (int64_t i = 0; i < n; i++) squares[i % LANES] += (x[i] - mean) * (x[i] - mean);
            for (int l = 0; l < LANES; l++) square += squares[l];
        } else {
            square = dot(x, x, 0, n);
        }
        float scale = 1.0f / sqrtf(square / (float)n + job->eps);
        job->scale[row] = scale;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * BLOCK64, size = n - at < BLOCK64 ? n - at : BLOCK64;
            for (int64_t i = 0; i < size; i++) part[i] = (x[at + i] - mean) * scale;
            job->most[row * blocks + b] = code_block64(job->map, part, size, job->codes + row * bytes + at / 2);
        }
    }
}

/* dx = s (u - mean(u) where centred - xh mean(u xh)), u = dy w; xh is decoded into dx first. */
static void norm_back_work(const void *raw, int64_t first, int64_t last)
{
    const coded_norm_t *job = raw;
    int64_t n = job->width, blocks = (n + BLOCK64 - 1) / BLOCK64, bytes = (n + 1) / 2;
    for (int64_t row = first; row < last; row++) {
        const float *restrict dy = job->dy + row * n, *restrict w = job->w;
        float *restrict dx = job->dx + row * n, s = job->scale[row];
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * BLOCK64, size = n - at < BLOCK64 ? n - at : BLOCK64;
            value_block64(job->map, job->codes + row * bytes + at / 2, job->most[row * blocks + b], size, dx + at);
        }
        float inner = dot(dy, w, dx, n) / (float)n, mean = job->centred ? dot(dy, w, 0, n) / (float)n : 0.0f;
        for (int64_t i = 0; i < n; i++) dx[i] = s * (dy[i] * w[i] - mean - dx[i] * inner);
    }
}

void skimp_norm_code(const block_t *map, const float *x, uint8_t *codes, float *most, float *scale, int64_t rows,
                     int64_t width, float eps, int centred, int threads)
{
    coded_norm_t job = {.map = map, .x = x, .codes = codes, .most = most, .scale = scale, .rows = rows, .width = width,
                        .eps = eps, .centred = centred};
    fan_out_items(norm_code_work, &job, rows, width, threads);
}

void skimp_norm_back(const block_t *map, const float *dy, const float *w, const uint8_t *codes, const float *most,
                     const float *scale, float *dx, int64_t rows, int64_t width, int centred, int threads)
{
    coded_norm_t job = {.map = map, .dy = dy, .w = w, .codes = (uint8_t *)codes, .most = (float *)most,
                        .scale = (float *)scale, .dx = dx, .rows = rows, .width = width, .centred = centred};
    fan_out_items(norm_back_work, &job, rows, width, threads);
}
