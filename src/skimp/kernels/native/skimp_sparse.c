/* Block-sparse attention, float32: for each query block only the key blocks that the pattern lists, forward and
 * backward; the others cost nothing. A library of its own beside skimp_native.c, compiled with fused products.
 *
 * Scores lie transposed, keys x queries, so that every product is C[m][n] += sum_k a(m, k) B[k][n] with dense rows of
 * B and C: keys, values, queries and upstream gradients are read where they lie, only a query block (and its upstream
 * gradient) is turned once, for all key blocks that it visits.
 *
 * Shapes: heads share key heads in groups; every size of a block and of a head is a multiple of 16. No heap: a thread's
 * buffers are on its stack, at most 5 x 128 x 256 floats (0.7 MB).
 */
#include "skimp_native.c"

#define MOST_BLOCK 128
#define MOST_DIM 256

#if defined(__AVX512F__)
#define WIDE 16
#define MROWS 8
#else
#define WIDE 8
#define MROWS 4
#endif
typedef float wide __attribute__((vector_size(WIDE * 4), aligned(4)));

/* C[m][n] += (or =) sum over k of a[m * am + k * ak] * b[k * bk + n], for `rows` x (2 x WIDE or WIDE) of C. */
#define TILE(NAME, ROWS, VECS)                                                                                         \
    static inline void NAME(float *c, int64_t cm, const float *a, int64_t am, int64_t ak, const float *b, int64_t bk,   \
                            int depth, int fresh)                                                                      \
    {                                                                                                                  \
        wide sum[ROWS][VECS];                                                                                          \
        for (int m = 0; m < ROWS; m++)                                                                                 \
            for (int v = 0; v < VECS; v++) sum[m][v] = fresh ? (wide){0} : *(wide *)(c + m * cm + v * WIDE);           \
        for (int k = 0; k < depth; k++) {                                                                              \
            wide row[VECS];                                                                                            \
            for (int v = 0; v < VECS; v++) row[v] = *(const wide *)(b + k * bk + v * WIDE);                            \
            for (int m = 0; m < ROWS; m++)                                                                             \
                for (int v = 0; v < VECS; v++) sum[m][v] += a[m * am + k * ak] * row[v];                               \
        }                                                                                                              \
        for (int m = 0; m < ROWS; m++)                                                                                 \
            for (int v = 0; v < VECS; v++) *(wide *)(c + m * cm + v * WIDE) = sum[m][v];                               \
    }
TILE(tile_full, MROWS, 2)
TILE(tile_narrow, MROWS, 1)
TILE(tile_row, 1, 2)
TILE(tile_row_narrow, 1, 1)

/* The whole product; columns a multiple of WIDE. */
static void product(float *c, int64_t cm, const float *a, int64_t am, int64_t ak, const float *b, int64_t bk, int rows,
                    int columns, int depth, int fresh)
{
    int n = 0;
    for (; n + 2 * WIDE <= columns; n += 2 * WIDE) {
        int m = 0;
        for (; m + MROWS <= rows; m += MROWS) tile_full(c + m * cm + n, cm, a + m * am, am, ak, b + n, bk, depth, fresh);
        for (; m < rows; m++) tile_row(c + m * cm + n, cm, a + m * am, am, ak, b + n, bk, depth, fresh);
    }
    for (; n < columns; n += WIDE) {
        int m = 0;
        for (; m + MROWS <= rows; m += MROWS)
            tile_narrow(c + m * cm + n, cm, a + m * am, am, ak, b + n, bk, depth, fresh);
        for (; m < rows; m++) tile_row_narrow(c + m * cm + n, cm, a + m * am, am, ak, b + n, bk, depth, fresh);
    }
}

typedef struct {
    int64_t row, head, pos;
} place_t;

/* `starts` (key heads x (blocks + 1)) and `columns`: the key blocks of each query block, in rising order. */
typedef struct {
    const float *q, *k, *v, *out, *lse, *dout;
    float *to, *to_lse, *dq, *dk, *dv;
    const int32_t *starts, *columns;
    place_t at_q, at_k, at_v, at_out, at_dout, at_dq, at_dk, at_dv;
    int64_t heads, key_heads, seq, blocks;
    int dim, block;
    float scale;
} sparse_t;

static const float *place(const float *base, place_t at, int64_t row, int64_t head, int64_t pos)
{
    return base + row * at.row + head * at.head + pos * at.pos;
}

/* A block of rows to columns: turned[d][i] = scale * x[i][d]; columns past `count` are zero. */
static void turn(const float *x, int64_t stride, int count, int block, int dim, float scale, float *turned)
{
    for (int i = 0; i < count; i++)
        for (int d = 0; d < dim; d++) turned[d * block + i] = scale * x[i * stride + d];
    for (int d = 0; d < dim; d++)
        for (int i = count; i < block; i++) turned[d * block + i] = 0.0f;
}

static int short_of(const sparse_t *job, int64_t block)
{
    int64_t left = job->seq - block * job->block;
    return left < job->block ? (int)left : job->block;
}

static void forward_block(const sparse_t *job, int64_t row, int64_t head, int64_t i)
{
    int B = job->block, D = job->dim, queries = short_of(job, i);
    int64_t group = head / (job->heads / job->key_heads);
    float turned[MOST_DIM * MOST_BLOCK], s[MOST_BLOCK * MOST_BLOCK], o[MOST_BLOCK * MOST_DIM];
    float most[MOST_BLOCK], sums[MOST_BLOCK], fade[MOST_BLOCK];
    for (int q = 0; q < B; q++) most[q] = -INFINITY, sums[q] = 0.0f;
    memset(o, 0, sizeof(float) * (size_t)(B * D));
    turn(place(job->q, job->at_q, row, head, i * B), job->at_q.pos, queries, B, D, job->scale, turned);
    const int32_t *starts = job->starts + group * (job->blocks + 1);
    for (int32_t at = starts[i]; at < starts[i + 1]; at++) {
        int64_t j = job->columns[at];
        int keys = short_of(job, j);
        product(s, B, place(job->k, job->at_k, row, group, j * B), job->at_k.pos, 1, turned, B, keys, B, D, 1);
        if (i == j)
            for (int k = 1; k < keys; k++)
                for (int q = 0; q < k; q++) s[k * B + q] = -INFINITY;
        for (int q = 0; q < B; q++) fade[q] = most[q];
        for (int k = 0; k < keys; k++)
            for (int q = 0; q < B; q++) most[q] = s[k * B + q] > most[q] ? s[k * B + q] : most[q];
        for (int q = 0; q < B; q++) fade[q] = exp_of(fade[q] - most[q]);
        for (int q = 0; q < B; q++) sums[q] *= fade[q];
        for (int k = 0; k < keys; k++)
            for (int q = 0; q < B; q++) s[k * B + q] = s[k * B + q] == -INFINITY ? 0.0f : exp_of(s[k * B + q] - most[q]);
        for (int k = 0; k < keys; k++)
            for (int q = 0; q < B; q++) sums[q] += s[k * B + q];
        for (int q = 0; q < queries; q++)
            for (int d = 0; d < D; d++) o[q * D + d] *= fade[q];
        product(o, D, s, 1, B, place(job->v, job->at_v, row, group, j * B), job->at_v.pos, queries, D, keys, 0);
    }
    float *lse = job->to_lse + (row * job->heads + head) * job->seq + i * B;
    for (int q = 0; q < queries; q++) {
        float *to = (float *)place(job->to, job->at_out, row, head, i * B + q);
        float by = sums[q] > 0.0f ? 1.0f / sums[q] : 0.0f; /* a row that sees nothing gives zeros */
        for (int d = 0; d < D; d++) to[d] = o[q * D + d] * by;
        lse[q] = sums[q] > 0.0f ? most[q] + logf(sums[q]) : INFINITY;
    }
}

/* One head of one row: its dq, and its own part of dk and dv (summed over a group by the caller). */
static void backward_head(const sparse_t *job, int64_t row, int64_t head)
{
    int B = job->block, D = job->dim;
    int64_t group = head / (job->heads / job->key_heads);
    float turned[MOST_DIM * MOST_BLOCK], dturned[MOST_DIM * MOST_BLOCK], p[MOST_BLOCK * MOST_BLOCK];
    float ds[MOST_BLOCK * MOST_BLOCK], level[MOST_BLOCK], delta[MOST_BLOCK];
    for (int64_t at = 0; at < job->seq; at++) {
        memset((float *)place(job->dk, job->at_dk, row, head, at), 0, sizeof(float) * (size_t)D);
        memset((float *)place(job->dv, job->at_dv, row, head, at), 0, sizeof(float) * (size_t)D);
        memset((float *)place(job->dq, job->at_dq, row, head, at), 0, sizeof(float) * (size_t)D);
    }
    const int32_t *starts = job->starts + group * (job->blocks + 1);
    for (int64_t i = 0; i < job->blocks; i++) {
        int queries = short_of(job, i);
        const float *q = place(job->q, job->at_q, row, head, i * B);
        const float *dout = place(job->dout, job->at_dout, row, head, i * B);
        float *dq = (float *)place(job->dq, job->at_dq, row, head, i * B);
        turn(q, job->at_q.pos, queries, B, D, job->scale, turned);
        turn(dout, job->at_dout.pos, queries, B, D, 1.0f, dturned);
        for (int n = 0; n < B; n++) level[n] = INFINITY, delta[n] = 0.0f;
        for (int n = 0; n < queries; n++) {
            level[n] = job->lse[(row * job->heads + head) * job->seq + i * B + n];
            delta[n] = dot(dout + n * job->at_dout.pos, place(job->out, job->at_out, row, head, i * B + n), 0, D);
        }
        for (int32_t at = starts[i]; at < starts[i + 1]; at++) {
            int64_t j = job->columns[at];
            int keys = short_of(job, j);
            const float *k = place(job->k, job->at_k, row, group, j * B);
            const float *v = place(job->v, job->at_v, row, group, j * B);
            float *dk = (float *)place(job->dk, job->at_dk, row, head, j * B);
            float *dv = (float *)place(job->dv, job->at_dv, row, head, j * B);
            product(p, B, k, job->at_k.pos, 1, turned, B, keys, B, D, 1);
            for (int n = 0; n < keys; n++)
                for (int m = 0; m < B; m++) {
                    float e = exp_of(p[n * B + m] - level[m]);
                    p[n * B + m] = level[m] == INFINITY ? 0.0f : e;
                }
            if (i == j)
                for (int n = 1; n < keys; n++)
                    for (int m = 0; m < n; m++) p[n * B + m] = 0.0f;
            product(dv, job->at_dv.pos, p, B, 1, dout, job->at_dout.pos, keys, D, queries, 0);
            product(ds, B, v, job->at_v.pos, 1, dturned, B, keys, B, D, 1);
            for (int n = 0; n < keys; n++)
                for (int m = 0; m < B; m++)
                    ds[n * B + m] = p[n * B + m] * (ds[n * B + m] - delta[m]) * job->scale;
            product(dk, job->at_dk.pos, ds, B, 1, q, job->at_q.pos, keys, D, queries, 0);
            product(dq, job->at_dq.pos, ds, 1, B, k, job->at_k.pos, queries, D, keys, 0);
        }
    }
}

static place_t read_place(const int64_t *strides, int index)
{
    return (place_t){strides[3 * index], strides[3 * index + 1], strides[3 * index + 2]};
}

/* strides: rows, heads, positions of q, k, v, out. sizes: rows, heads, key heads, seq, dim, block. lse: (rows, heads,
 * seq). A thread takes the next query block that nobody has: none depends on another. */
void skimp_sparse(const float *q, const float *k, const float *v, float *out, float *lse, const int32_t *starts,
                  const int32_t *columns, const int64_t *strides, const int64_t *sizes, float scale, int threads)
{
    sparse_t job = {.q = q, .k = k, .v = v, .to = out, .to_lse = lse, .starts = starts, .columns = columns,
                    .at_q = read_place(strides, 0), .at_k = read_place(strides, 1), .at_v = read_place(strides, 2),
                    .at_out = read_place(strides, 3), .heads = sizes[1], .key_heads = sizes[2], .seq = sizes[3],
                    .dim = (int)sizes[4], .block = (int)sizes[5], .scale = scale};
    job.blocks = (job.seq + job.block - 1) / job.block;
    int64_t items = sizes[0] * job.heads * job.blocks;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t item = 0; item < items; item++)
        forward_block(&job, item / job.blocks / job.heads, item / job.blocks % job.heads, item % job.blocks);
}

/* strides: of q, k, v, out, dout, dq, dk, dv; dk and dv have a part for every query head. */
void skimp_sparse_backward(const float *dout, const float *q, const float *k, const float *v, const float *out,
                           const float *lse, float *dq, float *dk, float *dv, const int32_t *starts,
                           const int32_t *columns, const int64_t *strides, const int64_t *sizes, float scale,
                           int threads)
{
    sparse_t job = {.q = q, .k = k, .v = v, .out = out, .lse = lse, .dout = dout, .dq = dq, .dk = dk, .dv = dv,
                    .starts = starts, .columns = columns, .at_q = read_place(strides, 0),
                    .at_k = read_place(strides, 1), .at_v = read_place(strides, 2), .at_out = read_place(strides, 3),
                    .at_dout = read_place(strides, 4), .at_dq = read_place(strides, 5),
                    .at_dk = read_place(strides, 6), .at_dv = read_place(strides, 7), .heads = sizes[1],
                    .key_heads = sizes[2], .seq = sizes[3], .dim = (int)sizes[4], .block = (int)sizes[5],
                    .scale = scale};
    job.blocks = (job.seq + job.block - 1) / job.block;
    int64_t items = sizes[0] * job.heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) backward_head(&job, item / job.heads, item % job.heads);
}
