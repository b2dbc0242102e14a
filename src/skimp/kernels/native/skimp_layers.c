/* LayerNorm, GELU and GeGLU, softmax, cross-entropy and block-sparse attention, float32: a library of its own beside
 * skimp_native.c, whose threads and exp it takes by including it. Products and sums may be fused here (-ffp-contract
 * =fast): the forms agree with their references to a few ulp, and are the same for every number of threads.
 */
#include "skimp_native.c"

/* ---------------------------------------------------------------------------------------------- LayerNorm */

typedef struct {
    const float *x, *w, *b, *dy;
    float *y, *mean, *scale, *dx, *dw, *db;
    int64_t rows, width;
    float eps;
} layer_norm_t;

static float sum_of(const float *a, int64_t n)
{
    float sums[LANES] = {0}, total = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += a[i + l];
    for (; i < n; i++) sums[i % LANES] += a[i];
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

static void layer_norm_forward(const void *raw, int64_t first, int64_t last)
{
    const layer_norm_t *job = raw;
    int64_t n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n, *restrict w = job->w, *restrict b = job->b;
        float *restrict y = job->y + row * n;
        float mean = sum_of(x, n) / (float)n;
        for (int64_t i = 0; i < n; i++) y[i] = x[i] - mean;
        mean += sum_of(y, n) / (float)n; /* what rounding left of a large common offset */
        for (int64_t i = 0; i < n; i++) y[i] = x[i] - mean; /* the square is taken about the mean: nothing cancels */
        float scale = 1.0f / sqrtf(dot(y, y, 0, n) / (float)n + job->eps);
        job->mean[row] = mean;
        job->scale[row] = scale;
        for (int64_t i = 0; i < n; i++) y[i] = y[i] * scale * w[i] + b[i];
    }
}

/* dx = s (g - x' mean(g x') - mean g), g = dy w, x' = (x - mean) s. */
static void layer_norm_backward_rows(const void *raw, int64_t first, int64_t last)
{
    const layer_norm_t *job = raw;
    int64_t n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *restrict x = job->x + row * n, *restrict w = job->w, *restrict dy = job->dy + row * n;
        float *restrict dx = job->dx + row * n;
        float s = job->scale[row], mean = job->mean[row], along[LANES] = {0}, level[LANES] = {0}, a = 0.0f, c = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int l = 0; l < LANES; l++) {
                float g = dy[i + l] * w[i + l];
                level[l] += g;
                along[l] += g * (x[i + l] - mean);
            }
        for (; i < n; i++) {
            float g = dy[i] * w[i];
            level[i % LANES] += g;
            along[i % LANES] += g * (x[i] - mean);
        }
        for (int l = 0; l < LANES; l++) a += along[l], c += level[l];
        a *= s * s / (float)n, c /= (float)n;
        for (i = 0; i < n; i++) dx[i] = s * (dy[i] * w[i] - (x[i] - mean) * a - c);
    }
}

/* dw = sum over rows of dy x', db = sum of dy; a thread owns LANES-wide columns. */
static void layer_norm_backward_columns(const void *raw, int64_t first, int64_t last)
{
    const layer_norm_t *job = raw;
    int64_t n = job->width, from = first * LANES, to = last * LANES < n ? last * LANES : n;
    float *restrict dw = job->dw, *restrict db = job->db;
    for (int64_t i = from; i < to; i++) dw[i] = db[i] = 0.0f;
    for (int64_t row = 0; row < job->rows; row++) {
        const float *restrict x = job->x + row * n, *restrict dy = job->dy + row * n;
        float s = job->scale[row], mean = job->mean[row];
        for (int64_t i = from; i < to; i++) {
            dw[i] += dy[i] * ((x[i] - mean) * s);
            db[i] += dy[i];
        }
    }
}

void skimp_layer_norm(const float *x, const float *w, const float *b, float *y, float *mean, float *scale, int64_t rows,
                      int64_t width, float eps, int threads)
{
    layer_norm_t job = {.x = x, .w = w, .b = b, .y = y, .mean = mean, .scale = scale, .rows = rows, .width = width,
                        .eps = eps};
    fan_out_items(layer_norm_forward, &job, rows, width, threads);
}

void skimp_layer_norm_backward(const float *dy, const float *x, const float *w, const float *mean, const float *scale,
                               float *dx, float *dw, float *db, int64_t rows, int64_t width, int threads)
{
    layer_norm_t job = {.x = x, .w = w, .dy = dy, .mean = (float *)mean, .scale = (float *)scale, .dx = dx, .dw = dw,
                        .db = db, .rows = rows, .width = width};
    fan_out_items(layer_norm_backward_rows, &job, rows, width, threads);
    if (dw) fan_out_items(layer_norm_backward_columns, &job, (width + LANES - 1) / LANES, rows * LANES, threads);
}

/* ------------------------------------------------------------------------------------------- GELU, GeGLU
 *
 * gelu(x) = x P(x). Exact: P the normal distribution; by tanh: (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)), which loses
 * nothing far below zero. P and its slope come first, in a loop of their own, as in swiglu_backward.
 */

#define ROOT_HALF 0.70710678f
#define ROOT_2_OVER_PI 0.79788456f
#define CUBIC 0.044715f

/* erfc(z) = t exp(Q(t) - z^2), t = 1 / (1 + z / 2), for z >= 0: Q fitted to log(erfcx(z) / t), off by 2e-7 at most. */
static inline float normal_of(float x)
{
    float z = fabsf(x) * ROOT_HALF, t = 1.0f / (1.0f + 0.5f * z), q = 0.182200867f;
    q = q * t - 0.875105417f;
    q = q * t + 1.59281143f;
    q = q * t - 1.24767516f;
    q = q * t + 0.351089314f;
    q = q * t - 0.214409844f;
    q = q * t + 0.103254071f;
    q = q * t + 0.373276359f;
    q = q * t + 1.00007175f;
    q = q * t - 1.26551315f;
    float tail = 0.5f * t * exp_of(q - z * z);
    return x > 0.0f ? 1.0f - tail : tail;
}

static inline float logistic_of(float x)
{
    return 1.0f / (1.0f + exp_of(-2.0f * ROOT_2_OVER_PI * (x + CUBIC * x * x * x)));
}

static void weigh(const float *restrict x, float *restrict p, int n, int by_tanh)
{
    if (by_tanh)
        for (int i = 0; i < n; i++) p[i] = logistic_of(x[i]);
    else
        for (int i = 0; i < n; i++) p[i] = normal_of(x[i]);
}

/* d gelu / dx = P + x P'. */
static void slopes(const float *restrict x, const float *restrict p, float *restrict slope, int n, int by_tanh)
{
    if (by_tanh)
        for (int i = 0; i < n; i++) {
            float c = x[i] > 64.0f ? 64.0f : x[i] < -64.0f ? -64.0f : x[i]; /* beyond, P' is 0 and x^3 may not be */
            slope[i] = p[i] + c * p[i] * (1.0f - p[i]) * 2.0f * ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * c * c);
        }
    else
        for (int i = 0; i < n; i++) {
            float c = x[i] > 64.0f ? 64.0f : x[i] < -64.0f ? -64.0f : x[i];
            slope[i] = p[i] + c * 0.39894228f * exp_of(-0.5f * c * c);
        }
}

typedef struct {
    const float *gate, *up, *dy;
    float *y, *dgate, *dup;
    int64_t n;
    int by_tanh;
} gelu_t;

static void gelu_forward(const void *raw, int64_t first, int64_t last)
{
    const gelu_t *job = raw;
    int64_t to = last * BLOCK < job->n ? last * BLOCK : job->n;
    float p[BLOCK];
    for (int64_t at = first * BLOCK; at < to; at += BLOCK) {
        int n = to - at < BLOCK ? (int)(to - at) : BLOCK;
        const float *restrict g = job->gate + at;
        float *restrict y = job->y + at;
        weigh(g, p, n, job->by_tanh);
        if (job->up) {
            const float *restrict u = job->up + at;
            for (int i = 0; i < n; i++) y[i] = g[i] * p[i] * u[i];
        } else {
            for (int i = 0; i < n; i++) y[i] = g[i] * p[i];
        }
    }
}

static void gelu_backward(const void *raw, int64_t first, int64_t last)
{
    const gelu_t *job = raw;
    int64_t to = last * BLOCK < job->n ? last * BLOCK : job->n;
    float p[BLOCK], slope[BLOCK];
    for (int64_t at = first * BLOCK; at < to; at += BLOCK) {
        int n = to - at < BLOCK ? (int)(to - at) : BLOCK;
        const float *restrict g = job->gate + at, *restrict dy = job->dy + at;
        float *restrict dg = job->dgate + at;
        weigh(g, p, n, job->by_tanh);
        slopes(g, p, slope, n, job->by_tanh);
        if (job->up) {
            const float *restrict u = job->up + at;
            float *restrict du = job->dup + at;
            for (int i = 0; i < n; i++) dg[i] = dy[i] * u[i] * slope[i];
            for (int i = 0; i < n; i++) du[i] = dy[i] * g[i] * p[i];
        } else {
            for (int i = 0; i < n; i++) dg[i] = dy[i] * slope[i];
        }
    }
}

void skimp_gelu(const float *gate, const float *up, float *y, int64_t n, int by_tanh, int threads)
{
    gelu_t job = {.gate = gate, .up = up, .y = y, .n = n, .by_tanh = by_tanh};
    fan_out(gelu_forward, &job, (n + BLOCK - 1) / BLOCK, threads);
}

void skimp_gelu_backward(const float *dy, const float *gate, const float *up, float *dgate, float *dup, int64_t n,
                         int by_tanh, int threads)
{
    gelu_t job = {.gate = gate, .up = up, .dy = dy, .dgate = dgate, .dup = dup, .n = n, .by_tanh = by_tanh};
    fan_out(gelu_backward, &job, (n + BLOCK - 1) / BLOCK, threads);
}

/* -------------------------------------------------------------------------------- softmax, cross-entropy */

/* tanh to about 1e-7: by exp, and near zero, where that cancels, by its series. */
static inline float tanh_of(float x)
{
    float s = x * x, far = 1.0f - 2.0f / (1.0f + exp_of(2.0f * x));
    float near = x * (1.0f + s * (-0.333333333f + s * (0.133333333f - s * 0.053968254f)));
    return s < 0.01f ? near : far;
}

typedef struct {
    const float *x, *dy, *a, *b;
    const int64_t *labels;
    float *y, *lse, *loss;
    int32_t *wrong; /* set when a label is none of the row's columns */
    int64_t rows, width;
    float cap, smoothing, z;
} rows_t;

/* Of a row of capped numbers: the largest, the sum of exp about it, the sum. */
typedef struct {
    float top, sum, total;
} level_t;

static level_t level_of(const float *restrict x, int64_t n, float cap)
{
    float most[LANES], sums[LANES] = {0}, plain[LANES] = {0}, top = -INFINITY, sum = 0.0f, total = 0.0f;
    for (int l = 0; l < LANES; l++) most[l] = -INFINITY;
    int64_t i = 0, whole = n - n % LANES;
    for (; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
    for (; i < n; i++) most[i % LANES] = x[i] > most[i % LANES] ? x[i] : most[i % LANES];
    for (int l = 0; l < LANES; l++) top = most[l] > top ? most[l] : top;
    if (cap > 0.0f) top = cap * tanh_of(top / cap);
    for (i = 0; i < n; i += LANES) {
        int m = n - i < LANES ? (int)(n - i) : LANES;
        float t[LANES];
        for (int l = 0; l < m; l++) t[l] = x[i + l];
        for (int l = m; l < LANES; l++) t[l] = 0.0f;
        if (cap > 0.0f)
            for (int l = 0; l < LANES; l++) t[l] = cap * tanh_of(t[l] / cap);
        for (int l = 0; l < LANES; l++) plain[l] += t[l];
        for (int l = 0; l < LANES; l++) t[l] = exp_of(t[l] - top);
        for (int l = m; l < LANES; l++) t[l] = 0.0f;
        for (int l = 0; l < LANES; l++) sums[l] += t[l];
    }
    for (int l = 0; l < LANES; l++) sum += sums[l], total += plain[l];
    return (level_t){top, sum, total};
}

static void cross_entropy_rows(const void *raw, int64_t first, int64_t last)
{
    const rows_t *job = raw;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * job->width;
        if (job->labels[row] < 0 || job->labels[row] >= job->width) {
            *job->wrong = 1;
            continue;
        }
        level_t level = level_of(x, job->width, job->cap);
        float lse = level.top + logf(level.sum), target = x[job->labels[row]];
        if (job->cap > 0.0f) target = job->cap * tanh_of(target / job->cap);
        job->lse[row] = lse;
        job->loss[row] = lse - (1.0f - job->smoothing) * target - job->smoothing / (float)job->width * level.total +
                         job->z * lse * lse;
    }
}

/* dx = a_row (p (1 + 2 z lse) - e / V - (1 - e) 1[target]), times 1 - tanh^2 under a cap; y may be x. */
static void cross_entropy_backward_rows(const void *raw, int64_t first, int64_t last)
{
    const rows_t *job = raw;
    int64_t n = job->width;
    float cap = job->cap;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * n;
        float *y = job->y + row * n, up = job->a[row], lse = job->lse[row];
        float by = up * (1.0f + 2.0f * job->z * lse), less = up * job->smoothing / (float)n;
        int64_t label = job->labels[row];
        float t = x[label], slope = 1.0f;
        if (cap > 0.0f) {
            float bent = tanh_of(t / cap);
            t = cap * bent, slope = 1.0f - bent * bent;
        }
        /* p - 1 of a sure target would cancel: it is formed before the row is overwritten, and rounded once. */
        float target = (by * exp_of(t - lse) - less - up * (1.0f - job->smoothing)) * slope;
        if (cap > 0.0f)
            for (int64_t i = 0; i < n; i++) {
                float bent = tanh_of(x[i] / cap);
                y[i] = (by * exp_of(cap * bent - lse) - less) * (1.0f - bent * bent);
            }
        else
            for (int64_t i = 0; i < n; i++) y[i] = by * exp_of(x[i] - lse) - less;
        y[label] = target;
    }
}

static void softmax_rows(const void *raw, int64_t first, int64_t last)
{
    const rows_t *job = raw;
    int64_t n = job->width;
    float cap = job->cap;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * n;
        float *y = job->y + row * n;
        level_t level = level_of(x, n, cap);
        float by = 1.0f / level.sum;
        if (cap > 0.0f)
            for (int64_t i = 0; i < n; i++) y[i] = by * exp_of(cap * tanh_of(x[i] / cap) - level.top);
        else
            for (int64_t i = 0; i < n; i++) y[i] = by * exp_of(x[i] - level.top);
    }
}

/* dx = p (dy - sum p dy), times 1 - tanh^2 under a cap, for which the input itself (b) is read. */
static void softmax_backward_rows(const void *raw, int64_t first, int64_t last)
{
    const rows_t *job = raw;
    int64_t n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *restrict p = job->x + row * n, *restrict dy = job->dy + row * n;
        float *restrict y = job->y + row * n, inner = dot(p, dy, 0, n);
        for (int64_t i = 0; i < n; i++) y[i] = p[i] * (dy[i] - inner);
        if (job->cap > 0.0f)
            for (int64_t i = 0; i < n; i++) {
                float bent = tanh_of(job->b[row * n + i] / job->cap);
                y[i] *= 1.0f - bent * bent;
            }
    }
}

/* The gradient may only be asked for after this has found every label within its row. */
void skimp_cross_entropy(const float *x, const int64_t *labels, float *loss, float *lse, int32_t *wrong, int64_t rows,
                         int64_t width, float cap, float smoothing, float z, int threads)
{
    rows_t job = {.x = x, .labels = labels, .loss = loss, .lse = lse, .wrong = wrong, .rows = rows, .width = width, .cap = cap,
                  .smoothing = smoothing, .z = z};
    fan_out_items(cross_entropy_rows, &job, rows, width, threads);
}

void skimp_cross_entropy_backward(const float *x, const int64_t *labels, const float *lse, const float *upstream,
                                  float *dx, int64_t rows, int64_t width, float cap, float smoothing, float z,
                                  int threads)
{
    rows_t job = {.x = x, .labels = labels, .lse = (float *)lse, .a = upstream, .y = dx, .rows = rows, .width = width,
                  .cap = cap, .smoothing = smoothing, .z = z};
    fan_out_items(cross_entropy_backward_rows, &job, rows, width, threads);
}

void skimp_softmax(const float *x, float *y, int64_t rows, int64_t width, float cap, int threads)
{
    rows_t job = {.x = x, .y = y, .rows = rows, .width = width, .cap = cap};
    fan_out_items(softmax_rows, &job, rows, width, threads);
}

void skimp_softmax_backward(const float *dy, const float *p, const float *x, float *dx, int64_t rows, int64_t width,
                            float cap, int threads)
{
    rows_t job = {.x = p, .b = x, .dy = dy, .y = dx, .rows = rows, .width = width, .cap = cap};
    fan_out_items(softmax_backward_rows, &job, rows, width, threads);
}
