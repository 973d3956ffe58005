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

/* y[n] = sum_k coefs[n, k] phi_{indices[n, k]}, then, if there is `like`, times |like[n]| / |y[n]|,
   where a |y[n]| of zero counts as one; to norms[n] go these two, |y[n]| first.
   Sign vectors are added first: small terms before large ones. */
void decode(const int64_t *indices, const float *coefs, const float *like, const uint32_t *packed,
            float *y, float *norms, int64_t N, int64_t K, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    int64_t tiles = BITS < 4 ? 4 : BITS;
    float scale = 1 / sqrtf(d);
    #pragma omp parallel num_threads(threads)
    {
        uint32_t *signs = room(K * W * 4);
        float *values = room(K * 4), *row = room(tiles * W * 4);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            const int64_t *index = indices + n * K;
            const float *coef = coefs + n * K;
            int64_t hashed = gather_signs(index, coef, packed, K, d, W, signs, values);
            for (int64_t w = 0; w < W; w += 16)
                for (int64_t b = 0; b < tiles; b += 4) {
                    vec sum[4] = {{0}};
                    for (int64_t k = 0; k < hashed; k++) {
                        bits word = *(bits *)(signs + k * W + w);
                        vec value = spread(values[k]);
                        for (int q = 0; q < 4; q++) sum[q] += flip(value, word, b + q);
                    }
                    for (int q = 0; q < 4; q++) *(vec *)(row + (b + q) * W + w) = sum[q] * scale;
                }
            for (int64_t k = 0; k < K; k++)
                if (index[k] < d) row[index[k]] += coef[k];
            if (like) {
                double of_y = sqrt(inner(row, row, d)), of_x = sqrt(inner(like + n * d, like + n * d, d));
                float factor = of_x / (of_y == 0 ? 1 : of_y);
                for (int64_t i = 0; i < d; i++) row[i] *= factor;
                norms[2 * n] = of_y, norms[2 * n + 1] = of_x;
            }
            memcpy(y + n * d, row, d * 4);
        }
        free(signs), free(values), free(row);
    }
}

/* out[n, k] = <phi_{indices[n, k]}, x[n]>. If there is `like`, x is the gradient of a decode scaled to it, y what that
   decode gave: then out is the gradient of its coefficients, and to_like that of `like`. With u = y / |like|, both come
   from <u, x>: that of the sum before it was scaled is |like| / |sum| (x - u <u, x>), that of `like` is
   <u, x> like / |like|. */
void dot(const int64_t *indices, const float *x, const float *y, const float *like, const float *norms,
         const uint32_t *packed, float *out, float *to_like,
         int64_t N, int64_t K, int64_t d, int64_t BITS, int64_t W, int64_t threads)
{
    int64_t tiles = BITS < 4 ? 4 : BITS;
    float scale = 1 / sqrtf(d);
    #pragma omp parallel num_threads(threads)
    {
        float *row = room(tiles * W * 4);
        memset(row, 0, tiles * W * 4);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            memcpy(row, x + n * d, d * 4);
            if (like) {
                double of_y = norms[2 * n], of_x = norms[2 * n + 1];
                double factor = of_x / (of_y == 0 ? 1 : of_y), inverse = of_x == 0 ? 0 : 1 / of_x;
                const float *u = y + n * d, *from = like + n * d;  /* u times |like| */
                double along = inner(u, row, d) * inverse;
                for (int64_t i = 0; i < d; i++) {
                    row[i] = factor * (row[i] - along * (u[i] * inverse));
                    to_like[n * d + i] = along * (from[i] * inverse);
                }
            }
            for (int64_t k = 0; k < K; k++) {
                int64_t i = indices[n * K + k];
                if (i < d) {
                    out[n * K + k] = row[i];
                    continue;
                }
                vec sum[4] = {{0}};
                for (int64_t w = 0; w < W; w += 16) {
                    bits word = *(bits *)(packed + i % d * W + w) ^ *(bits *)(packed + (d + i / d) * W + w);
                    for (int64_t b = 0; b < tiles; b += 4)
                        for (int q = 0; q < 4; q++) sum[q] += flip(*(vec *)(row + (b + q) * W + w), word, b + q);
                }
                vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
                double total = 0;
                for (int lane = 0; lane < 16; lane++) total += all[lane];
                out[n * K + k] = total * scale;
            }
        }
        free(row);
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
} Selection;

static Selection selection(int64_t C, int64_t k)
{
    Selection s = {.C = C, .k = k, .keep = k + k / 4 + 4, .height = 8};
    while (s.height > 1 && C < 4 * s.keep * s.height) s.height /= 2;
    s.groups = (C + 16 * s.height - 1) / (16 * s.height) * 16;
    s.z = room(s.groups * s.height * 4), s.top = room(s.groups * 4), s.keys = room(k * 8);
    memset(s.z + C, 0, (s.groups * s.height - C) * 4);
    return s;
}

static void release(Selection s)
{
    free(s.z), free(s.top), free(s.keys);
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

/* A |z| that the largest of `keep` groups reach, or of some more:
   hardly any candidate below it can be among the k best. */
static uint32_t estimate(Selection *s)
{
    int64_t groups = s->groups, keep = s->keep;
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

/* A candidate whose |z| reaches the bar takes its place among the best. Returns the new bar. */
static uint32_t offer(Selection *s, float z, uint32_t child, uint32_t bar)
{
    uint32_t size = word_of(z) & TOP;
    if (size > NAN_SIZE) size = NAN_SIZE;
    uint64_t key = (uint64_t)size << 32 | (uint64_t)(TOP - child) << 1 | word_of(z) >> 31, *keys = s->keys;
    int64_t same = -1, i;
    for (i = 0; i < s->found; i++) same = (keys[i] ^ key) & 0xFFFFFFFEu ? same : i;
    if (same >= 0) {  /* reached from another parent before: the larger copy stays */
        if (keys[same] >= key) return bar;
        memmove(keys + same, keys + same + 1, (--s->found - same) * 8);
    } else if (s->found == s->k) {
        if (keys[s->k - 1] >= key) return bar;
        s->found--;
    }
    for (i = s->found++; i > 0 && keys[i - 1] < key; i--) keys[i] = keys[i - 1];
    keys[i] = key;
    return s->found == s->k ? keys[s->k - 1] >> 32 : bar;
}

/* Of the children parents[p] ^ generators[j], with scores z[p * D + j], the k distinct ones with the largest |z|.
   If there are fewer, the last is repeated with coefficient zero. */
static void take(Selection *s, const int64_t *parents, const uint32_t *generators, int64_t D,
                 int64_t *indices, float *coefs)
{
    uint32_t start = estimate(s);
    for (;;) {
        uint32_t bar = start;
        s->found = 0;
        for (int64_t g = 0; g < s->groups; g++)
            if (s->top[g] >= bar)
                for (int64_t c = g / 16 * 16 * s->height + g % 16, end = c + 16 * s->height;
                     c < end && c < s->C; c += 16)
                    if ((word_of(s->z[c]) & TOP) >= bar)
                        bar = offer(s, s->z[c], parents[c / D] ^ generators[c % D], bar);
        if (s->found == s->k || start == 0) break;
        start = 0;  /* too many of the candidates were repeats */
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

/* Level 0, whose candidates are the basis vectors: of z = (x - mean) * rstd the k largest |z|. */
void basis(const float *x, const float *mean, const float *rstd, int64_t *indices, float *coefs,
           int64_t N, int64_t d, int64_t k, int64_t threads)
{
    uint32_t *all = room(d * 4);
    for (int64_t i = 0; i < d; i++) all[i] = i;
    #pragma omp parallel num_threads(threads)
    {
        const int64_t root = 0;
        Selection s = selection(d, k);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t i = 0; i < d; i++) s.z[i] = (x[n * d + i] - mean[i]) * rstd[i];
            take(&s, &root, all, d, indices + n * k, coefs + n * k);
        }
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

/* Second half, after the product: scores (N, P * D), still times sqrt(d), are standardised in place. */
void standardise(float *z, const int64_t *parents, const int64_t *generators, const float *mean, const float *rstd,
                 int64_t N, int64_t P, int64_t D, int64_t d, int64_t low, int64_t threads)
{
    uint32_t *words = narrow(generators, D);
    float scale = 1 / sqrtf(d);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < N * P; r++) {
        uint32_t parent = parents[r];
        for (int64_t j = 0; j < D; j++) {
            int64_t own = (parent ^ words[j]) - low;
            z[r * D + j] = (z[r * D + j] * scale - mean[own]) * rstd[own];
        }
    }
    free(words);
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

/* score_children by transform and select_distinct in one:
   z[n, p, j] = (<h_child, x[n]> - mean) * rstd of child = parents[n, p] ^ generators[j];
   mean and rstd are those of the features from `low` to low + features - 1.
   If keep[n] is not negative, all z of token n go to row keep[n] of `kept`.
   patterns: bit b of word (k, lane) is the sign at coordinate k of s[16 * b + lane]; then 512 more. */
void search(const float *x, const int64_t *parents, const int64_t *generators, const float *mean, const float *rstd,
            const uint32_t *patterns, const int64_t *keep, int64_t *indices, float *coefs, float *kept,
            int64_t N, int64_t d, int64_t P, int64_t D, int64_t low, int64_t features, int64_t k, int64_t threads)
{
    int t = __builtin_ctzll(d);
    int64_t first = low / d / 16, last = ((low + features) / d + 15) / 16;  /* blocks of 16 patterns */
    uint32_t *words = narrow(generators, D), *moved = room(D * 4), base = first * d * 16;
    float scale = 1 / sqrtf(d), *means = room((last - first) * d * 64), *rstds = room((last - first) * d * 64);
    for (int64_t j = 0; j < D; j++) moved[j] = place(words[j], t);
    for (int64_t i = 0; i < features; i++)
        means[place(low + i, t) - base] = mean[i], rstds[place(low + i, t) - base] = rstd[i];
    #pragma omp parallel num_threads(threads)
    {
        Selection s = selection(P * D, k);
        float *scores = room((last - first) * d * 64);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t block = first; block < last; block++) {
                int64_t at = (block - first) * d * 16;
                transform_signed((vec *)(scores + at), x + n * d, (const bits *)patterns + block / 32 * d, block % 32,
                                 (vec *)(means + at), (vec *)(rstds + at), scale, d);
            }
            for (int64_t p = 0; p < P; p++) {
                uint32_t from = place(parents[n * P + p], t);
                for (int64_t j = 0; j < D; j++) s.z[p * D + j] = scores[(from ^ moved[j]) - base];
            }
            if (keep[n] >= 0) memcpy(kept + keep[n] * P * D, s.z, P * D * 4);
            take(&s, parents + n * P, words, D, indices + n * k, coefs + n * k);
        }
        free(scores), release(s);
    }
    free(words), free(moved), free(means), free(rstds);
}

/* For every feature, the number of tokens r on which it is a child parents[r, p] ^ generators[j], and over these the
   sum of its z (R, P * D) and of its z squared are added to sums (m, 3). A child of two parents counts once. */
void collect(const float *z, const int64_t *parents, const int64_t *generators, float *sums,
             int64_t R, int64_t P, int64_t D, int64_t m)
{
    uint32_t *words = narrow(generators, D);
    uint64_t *seen = checked(calloc((m + 63) / 64, 8));
    for (int64_t r = 0; r < R; r++) {
        for (int64_t p = 0; p < P; p++)
            for (int64_t j = 0; j < D; j++) {
                uint32_t child = parents[r * P + p] ^ words[j];
                float value = z[(r * P + p) * D + j];
                if (seen[child >> 6] >> (child & 63) & 1) continue;
                seen[child >> 6] |= 1ull << (child & 63);
                sums[3 * (int64_t)child] += 1;
                sums[3 * (int64_t)child + 1] += value;
                sums[3 * (int64_t)child + 2] += value * value;
            }
        for (int64_t p = 0; p < P; p++)
            for (int64_t j = 0; j < D; j++) seen[((uint32_t)parents[r * P + p] ^ words[j]) >> 6] = 0;
    }
    free(seen), free(words);
}
