/* What backward needs of activations, gated products and norms, in 4 bits: a library of its own beside skimp_native.c,
 * whose threads, dot and exp it takes by including it.
 *
 * Numbers go in blocks of 64, 32 bytes each: byte j holds number j in its lower half and number j + 32 in its upper
 * half; a short last block is filled with zeros. A derivative's code is found from x itself: f' rises on one piece and
 * falls on those beside it, so its cells are intervals of x, and each edge below x moves the code one up or down. Blocks
 * of what has no bound have their largest magnitude beside them.
 */
#include "skimp_native.c"

#define BLOCK64 64
#define HALF64 32
#define MOST_EDGES 48

typedef struct {
    int32_t count, first;      /* edges in x, rising; the code below all of them */
    int32_t steps[MOST_EDGES]; /* what passing an edge adds to the code: 1 or -1 */
    float edges[MOST_EDGES];
    float levels[16]; /* value of each code */
} cells_t;

/* The 16 values of a block's code over its largest magnitude, and the 15 midpoints between them. */
typedef struct {
    float levels[16], edges[15];
} block_t;

static const int32_t ONES[15] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* A whole block as it is, a short one copied into `room` and filled up. */
static const float *whole_block(const float *x, int64_t n, float *room)
{
    if (n == BLOCK64) return x;
    for (int64_t i = 0; i < BLOCK64; i++) room[i] = i < n ? x[i] : 0.0f;
    return room;
}

static void pack64(const int32_t *restrict index, uint8_t *restrict codes)
{
    for (int i = 0; i < HALF64; i++) codes[i] = (uint8_t)(index[i] + 16 * index[i + HALF64]);
}

/* index += step of every edge below x. Kept apart: where the number of edges is known, the compiler unrolls the outer
 * loop and leaves numbers to be compared one by one. */
static __attribute__((noinline)) void pass_edges(const float *restrict x, const float *restrict edges,
                                                 const int32_t *restrict steps, int count, int32_t *restrict index)
{
    for (int k = 0; k < count; k++) {
        float edge = edges[k];
        int32_t step = steps[k];
        for (int i = 0; i < BLOCK64; i++) index[i] += x[i] > edge ? step : 0;
    }
}

static void code_derivative(const cells_t *t, const float *restrict x, uint8_t *restrict codes)
{
    int32_t index[BLOCK64];
    for (int i = 0; i < BLOCK64; i++) index[i] = t->first;
    pass_edges(x, t->edges, t->steps, t->count, index);
    pack64(index, codes);
}

static void value64(const float *restrict levels, const uint8_t *restrict codes, float most, float *restrict out)
{
    int32_t index[BLOCK64];
    for (int i = 0; i < HALF64; i++) index[i] = codes[i] & 15;
    for (int i = 0; i < HALF64; i++) index[i + HALF64] = codes[i] >> 4;
    for (int i = 0; i < BLOCK64; i++) out[i] = levels[index[i]] * most;
}

/* Codes of 64 numbers over their largest magnitude, which is returned; zeros are the code of 0. */
static float code_block64(const block_t *map, const float *restrict x, uint8_t *restrict codes)
{
    uint32_t bits = 0;
    for (int i = 0; i < BLOCK64; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        bits = u > bits ? u : bits;
    }
    float most = float_of(bits), scale = bits ? 1.0f / most : 0.0f, u[BLOCK64];
    int32_t index[BLOCK64] = {0};
    for (int i = 0; i < BLOCK64; i++) u[i] = x[i] * scale;
    pass_edges(u, map->edges, ONES, 15, index);
    pack64(index, codes);
    return most;
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

/* Blocks of 64 within the 256 that threads share out. */
#define EACH_BLOCK64(b, at, size, job)                                                             \
    for (int64_t b = first * (BLOCK / BLOCK64), at = b * BLOCK64, size = BLOCK64;                  \
         b < last * (BLOCK / BLOCK64) && at < (job)->n &&                                          \
         (size = (job)->n - at < BLOCK64 ? (job)->n - at : BLOCK64);                               \
         b++, at += BLOCK64)

static void point_code_work(const void *raw, int64_t first, int64_t last)
{
    const point_t *job = raw;
    float room[BLOCK64];
    EACH_BLOCK64(b, at, size, job)
        code_derivative(job->cells, whole_block(job->x + at, size, room), job->codes + b * HALF64);
}

static void point_back_work(const void *raw, int64_t first, int64_t last)
{
    const point_t *job = raw;
    float slope[BLOCK64];
    EACH_BLOCK64(b, at, size, job)
    {
        value64(job->cells->levels, job->kept + b * HALF64, 1.0f, slope);
        for (int64_t i = 0; i < size; i++) job->dx[at + i] = job->x[at + i] * slope[i];
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
    int64_t rows, width;
    int tanh_form;
} gated_t;

/* Blocks of a row are its own, so that codes do not depend on which rows go together. */
#define EACH_ROW_BLOCK64(b, at, size, job)                                                                     \
    for (int64_t row = first, blocks = ((job)->width + BLOCK64 - 1) / BLOCK64; row < last; row++)              \
        for (int64_t k = 0, b = row * blocks, at = row * (job)->width, size = BLOCK64;                         \
             k < blocks && (size = (job)->width - k * BLOCK64 < BLOCK64 ? (job)->width - k * BLOCK64 : BLOCK64); \
             k++, b++, at += BLOCK64)

/* silu(a) = a sigmoid(a); tanh's GELU is a sigmoid(2 sqrt(2/pi) (a + 0.044715 a^3)). */
static void gate_value(int tanh_form, const float *restrict a, float *restrict out)
{
    if (tanh_form)
        for (int i = 0; i < BLOCK64; i++) {
            float u = 1.5957691216f * (a[i] + 0.044715f * a[i] * a[i] * a[i]);
            out[i] = a[i] / (1.0f + exp_of(-u));
        }
    else
        for (int i = 0; i < BLOCK64; i++) out[i] = a[i] / (1.0f + exp_of(-a[i]));
}

static void gated_code_work(const void *raw, int64_t first, int64_t last)
{
    const gated_t *job = raw;
    float value[BLOCK64], room[BLOCK64];
    EACH_ROW_BLOCK64(b, at, size, job)
    {
        const float *a = whole_block(job->a + at, size, room);
        code_derivative(job->cells, a, job->slopes + b * HALF64);
        gate_value(job->tanh_form, a, value);
        job->f_most[b] = code_block64(job->map, value, job->f_codes + b * HALF64);
        job->c_most[b] = code_block64(job->map, whole_block(job->c + at, size, room), job->c_codes + b * HALF64);
    }
}

static void gated_back_work(const void *raw, int64_t first, int64_t last)
{
    const gated_t *job = raw;
    float slope[BLOCK64], value[BLOCK64], c[BLOCK64];
    EACH_ROW_BLOCK64(b, at, size, job)
    {
        value64(job->cells->levels, job->slopes + b * HALF64, 1.0f, slope);
        value64(job->map->levels, job->f_codes + b * HALF64, job->f_most[b], value);
        value64(job->map->levels, job->c_codes + b * HALF64, job->c_most[b], c);
        for (int64_t i = 0; i < size; i++) job->da[at + i] = job->dy[at + i] * c[i] * slope[i];
        for (int64_t i = 0; i < size; i++) job->dc[at + i] = job->dy[at + i] * value[i];
    }
}

void skimp_gated_code(const cells_t *cells, const block_t *map, const float *a, const float *c, uint8_t *slopes,
                      uint8_t *c_codes, float *c_most, uint8_t *f_codes, float *f_most, int64_t rows, int64_t width,
                      int tanh_form, int threads)
{
    gated_t job = {.cells = cells, .map = map, .a = a, .c = c, .slopes = slopes, .c_codes = c_codes, .c_most = c_most,
                   .f_codes = f_codes, .f_most = f_most, .rows = rows, .width = width, .tanh_form = tanh_form};
    fan_out_items(gated_code_work, &job, rows, width, threads);
}

void skimp_gated_back(const cells_t *cells, const block_t *map, const float *dy, const uint8_t *slopes,
                      const uint8_t *c_codes, const float *c_most, const uint8_t *f_codes, const float *f_most,
                      float *da, float *dc, int64_t rows, int64_t width, int threads)
{
    gated_t job = {.cells = cells, .map = map, .dy = dy, .slopes = (uint8_t *)slopes, .c_codes = (uint8_t *)c_codes,
                   .c_most = (float *)c_most, .f_codes = (uint8_t *)f_codes, .f_most = (float *)f_most, .da = da,
                   .dc = dc, .rows = rows, .width = width};
    fan_out_items(gated_back_work, &job, rows, width, threads);
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

static float sum_of(const float *restrict x, int64_t n)
{
    float sums[LANES] = {0}, total = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += x[i + l];
    for (; i < n; i++) sums[i % LANES] += x[i];
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

/* Sum of (x - mean)^2. */
static float spread_of(const float *restrict x, float mean, int64_t n)
{
    float sums[LANES] = {0}, total = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += (x[i + l] - mean) * (x[i + l] - mean);
    for (; i < n; i++) sums[i % LANES] += (x[i] - mean) * (x[i] - mean);
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

/* Blocks of a row are its own, ceil(width / 64) of them. */
static void norm_code_work(const void *raw, int64_t first, int64_t last)
{
    const coded_norm_t *job = raw;
    int64_t n = job->width, blocks = (n + BLOCK64 - 1) / BLOCK64;
    float part[BLOCK64];
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n;
        float mean = job->centred ? sum_of(x, n) / (float)n : 0.0f;
        float square = job->centred ? spread_of(x, mean, n) : dot(x, x, 0, n);
        float scale = 1.0f / sqrtf(square / (float)n + job->eps);
        job->scale[row] = scale;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * BLOCK64, size = n - at < BLOCK64 ? n - at : BLOCK64;
            if (size < BLOCK64) memset(part, 0, sizeof part);
            for (int64_t i = 0; i < size; i++) part[i] = (x[at + i] - mean) * scale;
            job->most[row * blocks + b] = code_block64(job->map, part, job->codes + (row * blocks + b) * HALF64);
        }
    }
}

/* dx = s (u - mean(u) where centred - xh mean(u xh)), u = dy w. */
static void norm_back_work(const void *raw, int64_t first, int64_t last)
{
    const coded_norm_t *job = raw;
    int64_t n = job->width, blocks = (n + BLOCK64 - 1) / BLOCK64;
    float part[BLOCK64];
    for (int64_t row = first; row < last; row++) {
        const float *restrict dy = job->dy + row * n, *restrict w = job->w;
        float *restrict dx = job->dx + row * n, s = job->scale[row];
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * BLOCK64, size = n - at < BLOCK64 ? n - at : BLOCK64;
            value64(job->map->levels, job->codes + (row * blocks + b) * HALF64, job->most[row * blocks + b], part);
            memcpy(dx + at, part, (size_t)size * 4);
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
