/* The operations of the bottleneck on a CPU, in float32: decode, dot, score, select. kernels.py has what each computes
   in plain torch; kernels_cpu.py compiles this file when it is first needed, and calls it.

   A sign vector h_i is the product of a Hadamard row H[u1] and a pattern s[u2], with i = u1 + (u2 << t), d = 1 << t.
   Signs are bits, 1 for minus, and a product is an XOR. They are laid out so that a shift brings 16 neighbouring signs
   into the sign bits of a vector, whatever the processor: vectors are GNU C's, which gcc and clang turn into the
   instructions that there are.

   Tokens are independent: each is computed by one thread, the same way on any number of threads. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));  /* 16 floats, anywhere in memory */
typedef uint32_t bits __attribute__((vector_size(64), aligned(4), may_alias));
typedef float half __attribute__((vector_size(32), aligned(4)));
typedef double wide __attribute__((vector_size(64), aligned(8)));

#define INLINE static inline __attribute__((always_inline))
#define AHEAD 24  /* so many turns of a loop before it reads at random, memory is asked for it */
#define TOGETHER 32  /* generators whose children are standardised before the next ones' */
#define FEW 256  /* candidates that are compared each with each */
#define TOP 0x7FFFFFFFu
#define NAN_SIZE 0x7FC00000u  /* the |z| of every NaN from here up: above infinity */

static void *checked(void *memory)
{
    if (memory) return memory;
    fputs("kernels.c: out of memory\n", stderr);
    abort();
}

static void *room(size_t bytes)
{
    return checked(aligned_alloc(64, (bytes + 127) / 64 * 64));
}

/* v with the signs flipped that bit b of `signs` says. */
INLINE vec flip(vec v, bits signs, int b)
{
    return (vec)((bits)v ^ ((signs << (31 - b)) & 0x80000000u));
}

INLINE vec spread(float value)
{
    return value - (vec){0};
}

/* <x, y>, in double, where no float overflows or vanishes. */
INLINE double inner(const float *x, const float *y, int64_t d)
{
    wide sum = {0};
    for (int64_t i = 0; i < d; i += 8)
        sum += __builtin_convertvector(*(const half *)(x + i), wide)
             * __builtin_convertvector(*(const half *)(y + i), wide);
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* Decode and dot. A row of signs is W words, bit b of word w for coordinate b * W + w:
   packed_signs in kloosterman.py. */

/* The signs of the features of a token that are not basis vectors, W words each, and their coefficients:
   returns how many. */
INLINE int64_t gather_signs(const int64_t *indices, const float *coefs, const uint32_t *packed,
                            int64_t K, int64_t d, int64_t W, uint32_t *signs, float *values)
{
    int64_t hashed = 0;
    for (int64_t k = 0; k < K; k++) {
        if (indices[k] < d) continue;
        const uint32_t *row = packed + indices[k] % d * W, *pattern = packed + (d + indices[k] / d) * W;
        for (int64_t w = 0; w < W; w += 16)
            *(bits *)(signs + hashed * W + w) = *(bits *)(row + w) ^ *(bits *)(pattern + w);
        values[hashed++] = coefs[k];
    }
    return hashed;
}

/* What a thread needs to decode and to take inner products. */
typedef struct {
    const uint32_t *packed;
    int64_t K, d, W, tiles;  /* tiles: of W coordinates */
    float scale;
    uint32_t *signs;         /* (K, W) */
    float *values, *row;     /* (K); (tiles, W): coordinates, then zeros */
} Rows;

static Rows rows_of(const uint32_t *packed, int64_t K, int64_t d, int64_t BITS, int64_t W)
{
    Rows r = {.packed = packed, .K = K, .d = d, .W = W, .tiles = BITS < 4 ? 4 : BITS, .scale = 1 / sqrtf(d)};
    r.signs = room(K * W * 4), r.values = room(K * 4), r.row = room(r.tiles * W * 4);
    memset(r.row, 0, r.tiles * W * 4);
    return r;
}

static void free_rows(Rows r)
{
    free(r.signs), free(r.values), free(r.row);
}

/* r.row = sum_k coefs[k] phi_{indices[k]}. Sign vectors are added first: small terms before large ones. */
static void decode_row(Rows *r, const int64_t *indices, const float *coefs)
{
    int64_t W = r->W, hashed = gather_signs(indices, coefs, r->packed, r->K, r->d, W, r->signs, r->values);
    for (int64_t w = 0; w < W; w += 16)
        for (int64_t b = 0; b < r->tiles; b += 4) {
            vec sum[4] = {{0}};
            for (int64_t k = 0; k < hashed; k++) {
                bits word = *(bits *)(r->signs + k * W + w);
                vec value = spread(r->values[k]);
                for (int q = 0; q < 4; q++) sum[q] += flip(value, word, b + q);
            }
            for (int q = 0; q < 4; q++) *(vec *)(r->row + (b + q) * W + w) = sum[q] * r->scale;
        }
    for (int64_t k = 0; k < r->K; k++)
        if (indices[k] < r->d) r->row[indices[k]] += coefs[k];
}

/* y = r.row |like| / |r.row|, where a |r.row| of zero counts as one; to norms go these two, |r.row| first. */
INLINE void rescale_row(Rows *r, const float *like, float *y, float *norms)
{
    double of_y = sqrt(inner(r->row, r->row, r->d)), of_x = sqrt(inner(like, like, r->d));
    float factor = of_x / (of_y == 0 ? 1 : of_y);
    for (int64_t i = 0; i < r->d; i++) y[i] = r->row[i] * factor;
    norms[0] = of_y, norms[1] = of_x;
}

/* out[k] = <phi_{indices[k]}, r.row>. */
static void dot_row(Rows *r, const int64_t *indices, float *out)
{
    int64_t d = r->d, W = r->W;
    for (int64_t k = 0; k < r->K; k++) {
        int64_t i = indices[k];
        if (i < d) {
            out[k] = r->row[i];
            continue;
        }
        vec sum[4] = {{0}};
        for (int64_t w = 0; w < W; w += 16) {
            bits word = *(bits *)(r->packed + i % d * W + w) ^ *(bits *)(r->packed + (d + i / d) * W + w);
            for (int64_t b = 0; b < r->tiles; b += 4)
                for (int q = 0; q < 4; q++) sum[q] += flip(*(vec *)(r->row + (b + q) * W + w), word, b + q);
        }
        vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        double total = 0;
        for (int lane = 0; lane < 16; lane++) total += all[lane];
        out[k] = total * r->scale;
    }
}

/* r.row is the gradient of y, which rescale_row gave for `like`; it becomes that of what was scaled, and to_like that
   of `like`. With u = y / |like|, both come from <u, row>: |like| / |sum| (row - u <u, row>) and
   <u, row> like / |like|. */
INLINE void rescale_back(Rows *r, const float *y, const float *like, const float *norms, float *to_like)
{
    double of_y = norms[0], of_x = norms[1];
    double factor = of_x / (of_y == 0 ? 1 : of_y), inverse = of_x == 0 ? 0 : 1 / of_x;
    double along = inner(y, r->row, r->d) * inverse;
    for (int64_t i = 0; i < r->d; i++) {
        r->row[i] = factor * (r->row[i] - along * (y[i] * inverse));
        to_like[i] = along * (like[i] * inverse);
    }
}

/* y[n] = sum_k coefs[n, k] phi_{indices[n, k]}; with the norm of like[n], if there is `like`. */
void decode(const int64_t *indices, const float *coefs, const float *like, const uint32_t *packed,
            float *y, float *norms, int64_t N, int64_t K, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    #pragma omp parallel num_threads(threads)
    {
        Rows r = rows_of(packed, K, d, BITS, W);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            decode_row(&r, indices + n * K, coefs + n * K);
            if (like) rescale_row(&r, like + n * d, y + n * d, norms + 2 * n);
            else memcpy(y + n * d, r.row, d * 4);
        }
        free_rows(r);
    }
}

/* out[n, k] = <phi_{indices[n, k]}, x[n]>. If there is `like`, x is the gradient of y, a decode scaled to `like`:
   then out is the gradient of its coefficients, and to_like that of `like`. */
void dot(const int64_t *indices, const float *x, const float *y, const float *like, const float *norms,
         const uint32_t *packed, float *out, float *to_like,
         int64_t N, int64_t K, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    #pragma omp parallel num_threads(threads)
    {
        Rows r = rows_of(packed, K, d, BITS, W);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            memcpy(r.row, x + n * d, d * 4);
            if (like) rescale_back(&r, y + n * d, like + n * d, norms + 2 * n, to_like + n * d);
            dot_row(&r, indices + n * K, out + n * K);
        }
        free_rows(r);
    }
}

/* The gradient of the whole bottleneck to its input x, from that of y, what it gave; from those of the coefficients, if
   the loss reads them (of_coefs); and from `others`, to x by other ways, if there are any. A coefficient is a score
   times `scales`, plus a constant. */
void narrow_backward(const int64_t *indices, const float *grad, const float *of_coefs, const float *others,
                     const float *y, const float *x, const float *norms, const float *scales, const uint32_t *packed,
                     float *to_x, int64_t N, int64_t K, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    #pragma omp parallel num_threads(threads)
    {
        Rows r = rows_of(packed, K, d, BITS, W);
        float *coefs = room(K * 4);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            float *to = to_x + n * d;
            memcpy(r.row, grad + n * d, d * 4);
            memset(r.row + d, 0, (r.tiles * W - d) * 4);
            rescale_back(&r, y + n * d, x + n * d, norms + 2 * n, to);
            dot_row(&r, indices + n * K, coefs);
            for (int64_t k = 0; k < K; k++)
                coefs[k] = (of_coefs ? of_coefs[n * K + k] + coefs[k] : coefs[k]) * scales[n * K + k];
            decode_row(&r, indices + n * K, coefs);
            if (others) for (int64_t i = 0; i < d; i++) to[i] += others[n * d + i];
            for (int64_t i = 0; i < d; i++) to[i] += r.row[i];
        }
        free(coefs), free_rows(r);
    }
}

/* Selection. A key has |z|, then the lower index first, then the sign of z,
   so that comparing keys is all there is to do. */

typedef struct {
    int64_t C, k;
    int64_t keep;     /* somewhat more than k: of so many best candidates, k are sure to be distinct, nearly */
    int64_t height;   /* candidates of a group: 1, 2, 4 or 8 that lie 16 apart */
    int64_t groups;
    float *z;         /* (C) scores of a token's candidates, then zeros to the end of the last group */
    uint32_t *top;    /* the largest |z| of every group */
    uint64_t *keys;   /* the best so far, in order */
    int64_t found;
    uint32_t *listed; /* (groups * height) groups, then candidates, that reach the bar */
    uint64_t *among, *order;  /* (FEW) the keys of candidates, and these in order */
} Selection;

static Selection selection(int64_t C, int64_t k)
{
    Selection s = {.C = C, .k = k, .keep = k + k / 4 + 4, .height = 8};
    while (s.height > 1 && C < 4 * s.keep * s.height) s.height /= 2;
    s.groups = (C + 16 * s.height - 1) / (16 * s.height) * 16;
    s.z = room(s.groups * s.height * 4), s.top = room(s.groups * 4), s.keys = room((k + 1) * 8);
    s.listed = room(s.groups * (s.height + 1) * 4), s.among = room(FEW * 8), s.order = room(FEW * 8);
    memset(s.z + C, 0, (s.groups * s.height - C) * 4);
    return s;
}

static void release(Selection s)
{
    free(s.z), free(s.top), free(s.keys), free(s.listed), free(s.among), free(s.order);
}

INLINE uint32_t word_of(float z)
{
    uint32_t word;
    memcpy(&word, &z, 4);
    return word;
}

INLINE bits larger(bits a, bits b)
{
    bits which = (bits)(a > b);
    return (a & which) | (b & ~which);
}

/* A |z| that the largest of `keep` groups reach, or of some more. */
static uint32_t estimate(Selection *s, int64_t keep)
{
    int64_t groups = s->groups;
    bits most = {0};
    for (int64_t g = 0; g < groups; g += 16) {
        bits top = {0};
        for (int64_t i = 0; i < s->height; i++) top = larger(*(const bits *)(s->z + g * s->height + i * 16) & TOP, top);
        *(bits *)(s->top + g) = top;
        most = larger(top, most);
    }
    uint32_t bar = 0, above = 0, stride = 1u << 23;  /* half of the largest is seldom too high: look there first */
    for (int lane = 0; lane < 16; lane++) above = most[lane] > above ? most[lane] : above;
    above++;
    for (int64_t reached = groups; above - bar > 1 && reached > keep + keep / 8;) {
        uint32_t middle = above - bar > 2 * stride ? above - stride : bar + (above - bar) / 2;
        bits counts = {0};
        int64_t count = 0;
        for (int64_t g = 0; g < groups; g += 16) counts -= (bits)(*(bits *)(s->top + g) >= middle);
        for (int lane = 0; lane < 16; lane++) count += counts[lane];
        if (count >= keep) bar = middle, reached = count;
        else above = middle, stride = stride < 1u << 29 ? 2 * stride : stride;
    }
    return bar < NAN_SIZE ? bar : NAN_SIZE;
}

/* Sorts as |z| does, of equals the lower child first; the sign is in the last bit. */
INLINE uint64_t key_of(float z, uint32_t child)
{
    uint32_t size = word_of(z) & TOP;
    if (size > NAN_SIZE) size = NAN_SIZE;
    return (uint64_t)size << 32 | (uint64_t)(TOP - child) << 1 | word_of(z) >> 31;
}

/* Where among the best a key of the same child is, or -1. */
INLINE int64_t place_of(const Selection *s, uint64_t key)
{
    int64_t same = -1;
    for (int64_t i = 0; i < s->found; i++) same = (s->keys[i] ^ key) & 0xFFFFFFFEu ? same : i;
    return same;
}

/* A candidate takes its place among the best, unless it is below all of them. */
static void offer(Selection *s, uint64_t key)
{
    uint64_t *keys = s->keys;
    int64_t same = place_of(s, key), i;
    if (same >= 0) {  /* reached from another parent before: the larger copy stays */
        if (keys[same] >= key) return;
        memmove(keys + same, keys + same + 1, (--s->found - same) * 8);
    } else if (s->found == s->k) {
        if (keys[s->k - 1] >= key) return;
        s->found--;
    }
    for (i = s->found++; i > 0 && keys[i - 1] < key; i--) keys[i] = keys[i - 1];
    keys[i] = key;
}

/* The best of a few keys: each goes to the place that says how many are above it, and repeats are left out. */
static void rank(Selection *s, int64_t count)
{
    const uint64_t *among = s->among;
    uint64_t *order = s->order;
    int64_t padded = (count + 7) / 8 * 8;
    for (int64_t i = count; i < padded; i++) s->among[i] = 0;
    memset(order, 0, count * 8);
    for (int64_t i = 0; i < count; i++) {
        uint64_t above = 0, key = among[i];
        for (int64_t j = 0; j < padded; j++) above += among[j] > key;
        order[above] = key;
    }
    for (int64_t i = 0; i < count && s->found < s->k; i++) {
        s->keys[s->found] = order[i];
        s->found += order[i] && place_of(s, order[i]) < 0;  /* behind a copy of equal size nothing stands */
    }
}

/* Of the children parents[p] ^ generators[j], with scores z[p * D + j], the k distinct ones with the largest |z|.
   If there are fewer, the last is repeated with coefficient zero. Lists grow without branches, whose outcome no
   processor could tell ahead. */
static void take(Selection *s, const int64_t *parents, const uint32_t *generators, int64_t D,
                 int64_t *indices, float *coefs)
{
    uint32_t *hits = s->listed, *listed = hits + s->groups;
    for (int64_t keep = s->keep;; keep *= 4) {  /* more, if too many of the candidates were repeats */
        uint32_t bar = estimate(s, keep);
        int64_t groups = 0, count = 0;
        for (int64_t g = 0; g < s->groups; g++) hits[groups] = g, groups += s->top[g] >= bar;
        for (int64_t h = 0; h < groups; h++) {
            int64_t c = hits[h] / 16 * 16 * s->height + hits[h] % 16;
            for (int64_t i = 0; i < s->height; i++, c += 16)
                listed[count] = c, count += ((word_of(s->z[c]) & TOP) >= bar) & (c < s->C);
        }
        s->found = 0;
        for (int64_t i = 0; i < count; i++) {
            uint32_t c = listed[i], p = c / (uint32_t)D;
            uint64_t key = key_of(s->z[c], (uint32_t)parents[p] ^ generators[c - p * D]);
            if (count > FEW) offer(s, key);
            else s->among[i] = key;
        }
        if (count <= FEW) rank(s, count);
        if (s->found == s->k || bar == 0) break;
    }
    for (int64_t i = 0; i < s->k; i++) {
        uint64_t key = s->keys[i < s->found ? i : s->found - 1];
        uint32_t word = i < s->found ? (uint32_t)(key >> 32) | (uint32_t)key << 31 : 0;
        indices[i] = TOP - ((uint32_t)key >> 1);
        memcpy(coefs + i, &word, 4);
    }
}

static uint32_t *narrow(const int64_t *indices, int64_t count)
{
    uint32_t *words = room(count * 4);
    for (int64_t i = 0; i < count; i++) words[i] = indices[i];
    return words;
}

/* Of z = (x - mean) * rstd, for the basis vectors `all`, the k largest |z|. */
INLINE void take_basis(Selection *s, const float *x, const float *mean, const float *rstd, const uint32_t *all,
                       int64_t *indices, float *coefs)
{
    const int64_t root = 0;
    for (int64_t i = 0; i < s->C; i++) s->z[i] = (x[i] - mean[i]) * rstd[i];
    take(s, &root, all, s->C, indices, coefs);
}

static uint32_t *counted(int64_t count)
{
    uint32_t *all = room(count * 4);
    for (int64_t i = 0; i < count; i++) all[i] = i;
    return all;
}

/* Level 0, whose candidates are the basis vectors. */
void basis(const float *x, const float *mean, const float *rstd, int64_t *indices, float *coefs,
           int64_t N, int64_t d, int64_t k, int64_t threads)
{
    uint32_t *all = counted(d);
    #pragma omp parallel num_threads(threads)
    {
        Selection s = selection(d, k);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) take_basis(&s, x + n * d, mean, rstd, all, indices + n * k, coefs + n * k);
        release(s);
    }
    free(all);
}

/* Scores by matrix product, first half: out[n, p] = h_i * x[n] sqrt(d) with i = parents[n, p],
   the left side of the product. */
void sign_flips(const float *x, const int64_t *parents, const uint32_t *packed, float *out,
                int64_t N, int64_t P, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < N * P; r++) {
        const uint32_t *row = packed + parents[r] % d * W, *pattern = packed + (d + parents[r] / d) * W;
        const float *from = x + r / P * d;
        float *to = out + r * d;
        if (d < 16)
            for (int64_t i = 0; i < d; i++) to[i] = (row[i] ^ pattern[i]) & 1 ? -from[i] : from[i];
        else
            for (int64_t w = 0; w < W; w += 16) {
                bits word = *(bits *)(row + w) ^ *(bits *)(pattern + w);
                for (int64_t b = 0; b < BITS; b++) *(vec *)(to + b * W + w) = flip(*(vec *)(from + b * W + w), word, b);
            }
    }
}

/* Second half, after the product: scores (N, P * D), still times sqrt(d), are standardised in place. The moments of a
   million features do not fit into a near cache, those of a few generators' children do: parents differ in their low
   bits only. So all parents come before the next few generators. */
void standardise(float *z, const int64_t *parents, const int64_t *generators, const float *mean, const float *rstd,
                 int64_t N, int64_t P, int64_t D, int64_t d, int64_t low, int64_t threads)
{
    uint32_t *words = narrow(generators, D), *from = narrow(parents, N * P);
    float scale = 1 / sqrtf(d);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < D; first += TOGETHER) {
        int64_t last = first + TOGETHER < D ? first + TOGETHER : D;
        for (int64_t r = 0; r < N * P; r++) {
            float *row = z + r * D;
            for (int64_t j = first; j < last; j += 16) __builtin_prefetch(row + 8 * D + j, 1);
            for (int64_t j = first; j < last; j++) {
                int32_t own = (int32_t)(from[r] ^ words[j]) - (int32_t)low;
                row[j] = (row[j] * scale - mean[own]) * rstd[own];
            }
        }
    }
    free(words), free(from);
}

/* The selection alone, for scores z (N, P * D). */
void choose(const float *z, const int64_t *parents, const int64_t *generators, int64_t *indices, float *coefs,
            int64_t N, int64_t P, int64_t D, int64_t k, int64_t threads)
{
    uint32_t *words = narrow(generators, D);
    #pragma omp parallel num_threads(threads)
    {
        Selection s = selection(P * D, k);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            memcpy(s.z, z + n * P * D, P * D * 4);
            take(&s, parents + n * P, words, D, indices + n * k, coefs + n * k);
        }
        release(s);
    }
    free(words);
}

/* Scores by transform. 16 patterns u2 at a time lie in the lanes of a vector: then a Walsh-Hadamard transform
   over the d coordinates is additions of whole vectors, and element u1 of the result has the scores of
   u1 + (u2 << t) for the 16. */

INLINE void butterflies(vec *a, int n)  /* n is known to the compiler: unrolled, `a` stays in registers */
{
    #pragma GCC unroll 4
    for (int h = 1; h < n; h *= 2)
        #pragma GCC unroll 8
        for (int j = 0; j < n / 2; j++) {
            int i = j + (j & -h);  /* bit h is zero */
            vec sum = a[i] + a[i + h];
            a[i + h] = a[i] - a[i + h];
            a[i] = sum;
        }
}

/* The last n vectors' worth of a transform, then (score - mean) * rstd. */
INLINE void finish(vec *a, const vec *mean, const vec *rstd, float scale, int n)
{
    vec r[16];
    #pragma GCC unroll 16
    for (int i = 0; i < n; i++) r[i] = a[i];
    butterflies(r, n);
    #pragma GCC unroll 16
    for (int i = 0; i < n; i++) a[i] = (r[i] * scale - mean[i]) * rstd[i];
}

/* The transform of n vectors, in place, standardised.
   Depth first, so that all but the largest strides stay in the nearest cache. */
static void transform(vec *a, const vec *mean, const vec *rstd, float scale, int64_t n)
{
    switch (n) {
    case 1: return finish(a, mean, rstd, scale, 1);
    case 2: return finish(a, mean, rstd, scale, 2);
    case 4: return finish(a, mean, rstd, scale, 4);
    case 8: return finish(a, mean, rstd, scale, 8);
    case 16: return finish(a, mean, rstd, scale, 16);
    }
    int64_t q = n / 8;
    for (int64_t i = 0; i < q; i++) {
        vec r[8];
        for (int j = 0; j < 8; j++) r[j] = a[i + j * q];
        butterflies(r, 8);
        for (int j = 0; j < 8; j++) a[i + j * q] = r[j];
    }
    for (int64_t i = 0; i < n; i += q) transform(a + i, mean + i, rstd + i, scale, q);
}

/* The same of x times 16 patterns, whose signs are bit b of `signs`. */
INLINE void transform_signed(vec *a, const float *x, const bits *signs, int b,
                             const vec *mean, const vec *rstd, float scale, int64_t d)
{
    int64_t q = d / 8;
    for (int64_t i = 0; i < q; i++) {
        vec r[8];
        for (int j = 0; j < 8; j++) r[j] = flip(spread(x[i + j * q]), signs[i + j * q], b);
        butterflies(r, 8);
        for (int j = 0; j < 8; j++) a[i + j * q] = r[j];
    }
    for (int64_t i = 0; i < d; i += q) transform(a + i, mean + i, rstd + i, scale, q);
}

/* Where the score of feature i lies: 16 patterns side by side.
   Bits only change places, so that this goes through an XOR. */
INLINE uint32_t place(uint32_t i, int t)
{
    return i >> (t + 4) << (t + 4) | (i & ((1u << t) - 1)) << 4 | (i >> t & 15);
}

/* What a search by transform reads of a level: made by level_tables, and good as long as the moments are the same. */
typedef struct {
    int64_t P, D, k, low, features;  /* parents and generators; how many to take; the first feature, and how many */
    uint32_t *words, *moved;         /* (D) generators, and where they move a score */
    float *means, *rstds;            /* moments, as scores lie */
} Level;

/* Blocks of 16 patterns that the features of a level lie in: of `first` and on, how many. */
INLINE int64_t blocks_of(int64_t low, int64_t features, int64_t d, int64_t *first)
{
    *first = low / d / 16;
    return ((low + features) / d + 15) / 16 - *first;
}

void level_tables(const int64_t *generators, const float *mean, const float *rstd, uint32_t *words, uint32_t *moved,
                  float *means, float *rstds, int64_t D, int64_t low, int64_t features, int64_t d)
{
    int t = __builtin_ctzll(d);
    int64_t first;
    blocks_of(low, features, d, &first);
    for (int64_t j = 0; j < D; j++) words[j] = generators[j], moved[j] = place(words[j], t);
    for (int64_t i = 0; i < features; i++) {
        uint32_t at = place(low + i, t) - first * d * 16;
        means[at] = mean[i], rstds[at] = rstd[i];
    }
}

/* score_children by transform and select_distinct in one, for a token:
   z[p, j] = (<h_child, x> - mean) * rstd of child = parents[p] ^ generators[j], left in s.z.
   patterns: bit b of word (k, lane) is the sign at coordinate k of s[16 * b + lane]; then 512 more. */
static void take_children(Selection *s, const Level *level, const float *x, const int64_t *parents,
                          const uint32_t *patterns, float *scores, int64_t d, int64_t *indices, float *coefs)
{
    int t = __builtin_ctzll(d);
    float scale = 1 / sqrtf(d);
    int64_t first, blocks = blocks_of(level->low, level->features, d, &first);
    uint32_t base = first * d * 16;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t at = block * d * 16, pattern = first + block;
        transform_signed((vec *)(scores + at), x, (const bits *)patterns + pattern / 32 * d, pattern % 32,
                         (vec *)(level->means + at), (vec *)(level->rstds + at), scale, d);
    }
    for (int64_t p = 0; p < level->P; p++) {
        uint32_t from = place(parents[p], t);
        for (int64_t j = 0; j < level->D; j++) s->z[p * level->D + j] = scores[(from ^ level->moved[j]) - base];
    }
    take(s, parents, level->words, level->D, indices, coefs);
}

/* The same for N tokens. If keep[n] is not negative, all z of token n go to row keep[n] of `kept`. */
void search(const float *x, const int64_t *parents, const Level *level, const uint32_t *patterns, const int64_t *keep,
            int64_t *indices, float *coefs, float *kept, int64_t N, int64_t d, int64_t threads)
{
    int64_t first, blocks = blocks_of(level->low, level->features, d, &first), P = level->P, k = level->k;
    #pragma omp parallel num_threads(threads)
    {
        Selection s = selection(P * level->D, k);
        float *scores = room(blocks * d * 64);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            take_children(&s, level, x + n * d, parents + n * P, patterns, scores, d, indices + n * k, coefs + n * k);
            if (keep[n] >= 0) memcpy(kept + keep[n] * s.C, s.z, s.C * 4);
        }
        free(scores), release(s);
    }
}

typedef struct {
    const Level *levels;  /* that of level 0 has words, means, rstds and k */
    const uint32_t *patterns, *packed;
    const float *mean, *var;  /* (m) what the levels were made of */
    int64_t count, K, d, m, BITS, W;
} Bottleneck;

/* The whole bottleneck: the code of every token, levels in order; the parents of a level are what the one before took.
   If there is y, also what the code decodes to, with the norms of x; of these, `norms`, if they are wanted.
   If there is keep, and keep[n] is not negative, all z of levels >= 1 of token n go to row keep[n] of `kept`.
   Returns whether it was done: not if the levels were made of other moments than these. */
int64_t narrow_tokens(const Bottleneck *all, const float *mean, const float *var, const float *x, const int64_t *keep,
                      int64_t *indices, float *coefs, float *kept, float *y, float *norms, int64_t N, int64_t threads)
{
    if (memcmp(mean, all->mean, all->m * 4) || memcmp(var, all->var, all->m * 4)) return 0;
    const Level *levels = all->levels;
    int64_t most = 0, width = 0, count = all->count, K = all->K, d = all->d;
    for (int64_t l = 1; l < count; l++) {
        int64_t first, blocks = blocks_of(levels[l].low, levels[l].features, d, &first);
        most = blocks > most ? blocks : most, width += levels[l].P * levels[l].D;
    }
    #pragma omp parallel num_threads(threads)
    {
        Selection *s = room(count * sizeof *s);
        Rows r = rows_of(all->packed, K, d, all->BITS, all->W);
        float *scores = room(most * d * 64), unwanted[2];
        for (int64_t l = 0; l < count; l++) s[l] = selection(l ? levels[l].P * levels[l].D : d, levels[l].k);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            int64_t *index = indices + n * K, done = levels[0].k;
            float *coef = coefs + n * K, *row = keep && keep[n] >= 0 ? kept + keep[n] * width : NULL;
            take_basis(s, x + n * d, levels[0].means, levels[0].rstds, levels[0].words, index, coef);
            for (int64_t l = 1; l < count; done += levels[l++].k) {
                take_children(s + l, levels + l, x + n * d, index + done - levels[l].P, all->patterns, scores, d,
                              index + done, coef + done);
                if (row) memcpy(row, s[l].z, s[l].C * 4), row += s[l].C;
            }
            if (!y) continue;
            decode_row(&r, index, coef);
            rescale_row(&r, x + n * d, y + n * d, norms ? norms + 2 * n : unwanted);
        }
        for (int64_t l = 0; l < count; l++) release(s[l]);
        free(s), free(scores), free_rows(r);
    }
    return 1;
}

/* 512 features belong to one thread: their sums, and their bits of `seen`, are whole cache lines. */
INLINE int64_t owner(uint32_t feature, int64_t threads)
{
    uint32_t spread = (feature >> 9) * 0x9E3779B1u;
    return (uint64_t)spread * threads >> 32;
}

/* For every feature, the number of tokens r on which it is a child parents[r, p] ^ generators[j], and over these the
   sum of its z (R, P * D) and of its z squared are added to sums (m, 3). A child of two parents counts once. Each
   thread lists the children that are its own, so that every sum is made in one order. */
void collect(const float *z, const int64_t *parents, const int64_t *generators, float *sums,
             int64_t R, int64_t P, int64_t D, int64_t m, int64_t threads)
{
    uint32_t *words = narrow(generators, D);
    uint64_t *seen = room((m + 63) / 64 * 8);
    memset(seen, 0, (m + 63) / 64 * 8);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t own = 0; own < threads; own++) {
        uint32_t *child = room((P * D + AHEAD) * 4);
        float *value = room((P * D + 1) * 4);
        for (int64_t r = 0; r < R; r++) {
            int64_t count = 0;
            for (int64_t p = 0; p < P; p++)
                for (int64_t j = 0; j < D; j++) {
                    uint32_t feature = (uint32_t)parents[r * P + p] ^ words[j];
                    child[count] = feature, value[count] = z[(r * P + p) * D + j];
                    count += owner(feature, threads) == own;
                }
            for (int64_t i = 0; i < AHEAD; i++) child[count + i] = 0;
            for (int64_t i = 0; i < count; i++) {
                __builtin_prefetch(sums + 3 * (int64_t)child[i + AHEAD]);
                uint64_t *word = seen + (child[i] >> 6), bit = 1ull << (child[i] & 63);
                if (*word & bit) continue;
                *word |= bit;
                float *sum = sums + 3 * (int64_t)child[i];
                sum[0] += 1, sum[1] += value[i], sum[2] += value[i] * value[i];
            }
            for (int64_t i = 0; i < count; i++) seen[child[i] >> 6] = 0;
        }
        free(child), free(value);
    }
    free(seen), free(words);
}
