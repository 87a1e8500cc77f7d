/* Passes over memory for the maximum of N diagonal quadratic forms, F_k = 1/2 sum D_k x^2 + b_k with x = theta - c.

   Every pass walks the same list of chunks, a few thousand bytes of one tensor each. A chunk splits into segments: a single
   one where every element has a metric of its own, one per row where the elements of a row share theirs. Sums over a
   segment stay in the element type and go on in double; chunks are added up in one order, so that the result does not
   depend on the number of threads.

   The file includes itself twice, for float and for double. */

#ifndef REAL

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { CHUNK = 1024, GROUP = 8, SERIAL = 32768, MOST = 8 };

#if defined(__AVX512F__)
#define BYTES 64 /* of a vector register */
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef struct {
    void *theta;
    const void *grad, *centre, *metric; /* grad: 0 for a tensor that stays; centre: 0 at the origin */
    int64_t stride;                     /* from D_k to D_(k+1) */
    int64_t period;                     /* the metric of element i is that of element i mod period */
    int64_t cols;                       /* consecutive elements that share a metric */
    int64_t wide;                       /* whether elements are doubles */
    int64_t skip;                       /* whether this pass leaves the tensor out */
    double keep, lr;                    /* 1 - decay, eta */
} Tensor;

typedef struct {
    int64_t tensor, start, length;
} Chunk;

typedef struct {
    const Tensor *tensors;
    const Chunk *chunks;
    int64_t count, pieces, threads;
    const double *before, *after; /* w, w+; equal for a pass that needs one */
    int64_t piece;                /* j where w is a vertex, else -1 */
    double *kappa, *rho;          /* max D_k/D_j and |D_k/D_j|_2, by chunk and piece */
    int64_t width;                /* how many numbers the pass adds up */
} Job;

/* What a pass writes and adds up: the step and the forms; the step, the forms and the Hessian; the point of other weights,
   its forms and its Hessian; nothing, and those; nothing, and the forms where theta is. */
typedef enum { CHECK, ADVANCE, RESCALE, EVALUATE, FORMS } Kind;

#define HAS_HESSIAN(kind) ((kind) != CHECK && (kind) != FORMS)
#define INLINE static inline __attribute__((always_inline))
static const double zeros[CHUNK]; /* the origin, in either type */

#define REAL float
#define NAME(x) x##_float
#define TINY FLT_MIN
#define SLACK 1.0001 /* covers the rounding of sums over a segment */
#include "fused.c"
#undef REAL
#undef NAME
#undef TINY
#undef SLACK
#define REAL double
#define NAME(x) x##_double
#define TINY DBL_MIN
#define SLACK 1.00000000001
#include "fused.c"

typedef void Pass(const Job *, const Tensor *, int64_t, double *);

/* Runs a pass over all chunks and adds up what they yield; `partial` has room for a row of numbers per group. */
static void run(const Job *job, Pass *narrow, Pass *wide, double *partial, double *out) {
    int64_t groups = (job->count + GROUP - 1) / GROUP;
    int threads = job->count * CHUNK > SERIAL ? (int)job->threads : 1;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        double *row = partial + group * job->width;
        int64_t end = (group + 1) * GROUP < job->count ? (group + 1) * GROUP : job->count;
        memset(row, 0, sizeof(double) * (size_t)job->width);
        for (int64_t i = group * GROUP; i < end; i++) {
            const Tensor *tensor = job->tensors + job->chunks[i].tensor;
            if (!tensor->skip) (tensor->wide ? wide : narrow)(job, tensor, i, row);
        }
    }
    memset(out, 0, sizeof(double) * (size_t)job->width);
    for (int64_t group = 0; group < groups; group++)
        for (int64_t k = 0; k < job->width; k++) out[k] += partial[group * job->width + k];
}

/* theta <- keep theta - lr g / D_j. Yields sum D_k d^2 for the move d: for k = j, and upper bounds for the others. */
void follow(const Job *job, double *partial, double *out) { run(job, follow_float, follow_double, partial, out); }

/* theta <- keep theta - lr g / D(w). Yields sum D_k x^2 after the step, then sum D_k D_l x^2 / D(w) over what moved, and, if
   w is a vertex, what `follow` does instead. */
void advance(const Job *job, double *partial, double *out) { run(job, advance_float, advance_double, partial, out); }

/* Yields sum D_k x^2, then sum D_k D_l x^2 / D(w+), at x = D(w)/D(w+) (theta - c). */
void evaluate(const Job *job, double *partial, double *out) { run(job, evaluate_float, evaluate_double, partial, out); }

/* theta <- D(w)/D(w+) (theta - c) + c. Yields what `evaluate` does, of theta as it was rounded. */
void rescale(const Job *job, double *partial, double *out) { run(job, rescale_float, rescale_double, partial, out); }

/* Yields sum D_k x^2 where theta is. */
void forms(const Job *job, double *partial, double *out) { run(job, forms_float, forms_double, partial, out); }

/* Fills kappa and rho for piece j. */
void ratios(const Job *job, double *partial, double *out) { run(job, ratios_float, ratios_double, partial, out); }

#else

enum { NAME(LANES) = BYTES / sizeof(REAL) };
typedef REAL NAME(V) __attribute__((vector_size(BYTES)));
typedef REAL NAME(U) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias)); /* as it lies in memory */
#define V NAME(V)
#define U NAME(U)
#define LANES NAME(LANES)

typedef struct {
    REAL *theta;
    const REAL *grad, *centre, *metric;
    int64_t length, stride;
    int shared; /* whether the whole segment has one metric */
    REAL keep, lr;
} NAME(Segment);

typedef struct {
    V first, second; /* of e and of e^2 */
} NAME(Energy);

#define Segment NAME(Segment)
#define Energy NAME(Energy)

/* The segment that begins at an element of a chunk and ends with the chunk or with the element's row. */
static Segment NAME(segment)(const Tensor *t, int64_t start, int64_t end) {
    Segment s = {.theta = (REAL *)t->theta + start, .length = end - start, .stride = t->stride, .shared = t->cols > 1};
    s.keep = (REAL)t->keep, s.lr = (REAL)t->lr;
    s.grad = t->grad ? (const REAL *)t->grad + start : (const REAL *)zeros;
    s.centre = t->centre ? (const REAL *)t->centre + start : (const REAL *)zeros;
    s.metric = (const REAL *)t->metric + (s.shared ? start / t->cols : start % t->period);
    if (s.shared && t->cols - start % t->cols < s.length) s.length = t->cols - start % t->cols;
    return s;
}

/* A vector of up to LANES elements; the lanes beyond are filled. */
INLINE V NAME(load)(const REAL *from, int64_t count, REAL fill) {
    if (count >= LANES) return *(const U *)from;
    V v;
    for (int l = 0; l < LANES; l++) v[l] = l < count ? from[l] : fill;
    return v;
}

INLINE void NAME(store)(REAL *to, V v, int64_t count) {
    if (count >= LANES) *(U *)to = v;
    else
        for (int l = 0; l < LANES; l++)
            if (l < count) to[l] = v[l];
}

/* The sum of the lanes, in double; by halves, which the compiler keeps in registers. */
static double NAME(total)(V v) {
    double sum[LANES];
    for (int l = 0; l < LANES; l++) sum[l] = (double)v[l];
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

/* The step over one vector, and the energy e = D(w) d^2 of the move d as it was rounded. */
INLINE V NAME(move)(const Segment *s, int64_t i, int64_t count, V dw, Energy *energy) {
    V old = NAME(load)(s->theta + i, count, 0), grad = NAME(load)(s->grad + i, count, 0);
    V new = s->keep * old - s->lr * grad / dw;
    V d = new - old, e = dw * d * d;
    energy->first += e;
    energy->second += e * e;
    NAME(store)(s->theta + i, new, count);
    return new;
}

/* One vector of a pass over elements with metrics of their own. */
INLINE void NAME(each)(Kind kind, const Segment *s, int64_t i, int64_t count, const REAL *w, const REAL *after, int n,
                       Energy *energy, V *forms, V *hessian) {
    V d[MOST], x, c = NAME(load)(s->centre + i, count, 0), dw = {0}, dv = {0};
    for (int k = 0; k < n; k++) {
        d[k] = NAME(load)(s->metric + k * s->stride + i, count, 1);
        dw += w[k] * d[k];
        dv += after[k] * d[k];
    }
    if (kind <= ADVANCE) x = NAME(move)(s, i, count, dw, energy) - c;
    else x = NAME(load)(s->theta + i, count, 0) - c;
    if (kind == RESCALE || kind == EVALUATE) {
        x *= dw / dv;
        dw = dv;
    }
    if (kind == RESCALE) {
        NAME(store)(s->theta + i, x + c, count);
        x = x + c - c;
    }
    V square = x * x, over = square / dw;
    for (int k = 0, at = 0; k < n; k++) {
        V product = d[k] * over;
        forms[k] += d[k] * square;
        for (int l = 0; l <= k && HAS_HESSIAN(kind); l++, at++) hessian[at] += product * d[l];
    }
}

/* A segment of elements with metrics of their own. */
INLINE void NAME(own)(Kind kind, const Segment *s, const double *before, const double *to, int n, Energy *energy, double *out) {
    V forms[MOST] = {{0}}, hessian[MOST * (MOST + 1) / 2] = {{0}};
    Energy sums = {0};
    REAL w[MOST], after[MOST];
    int64_t i = 0;
    for (int k = 0; k < n; k++) w[k] = (REAL)before[k], after[k] = (REAL)to[k];
    for (; i + LANES <= s->length; i += LANES) NAME(each)(kind, s, i, LANES, w, after, n, &sums, forms, hessian);
    if (i < s->length) NAME(each)(kind, s, i, s->length - i, w, after, n, &sums, forms, hessian);
    *energy = sums;
    for (int k = 0, at = 0; k < n; k++) {
        out[k] += NAME(total)(forms[k]);
        for (int l = 0; l <= k && HAS_HESSIAN(kind); l++, at++) {
            double value = NAME(total)(hessian[at]);
            out[n + k * n + l] += value;
            if (l < k) out[n + l * n + k] += value;
        }
    }
}

/* A segment whose elements share a metric: the sum of the squares is enough. */
INLINE void NAME(row)(Kind kind, const Segment *s, const double *before, const double *to, int n, Energy *energy, double *out) {
    REAL dw = 0, dv = 0;
    for (int k = 0; k < n; k++) dw += (REAL)before[k] * s->metric[k * s->stride], dv += (REAL)to[k] * s->metric[k * s->stride];
    V squares = {0};
    Energy sums = {0};
    for (int64_t i = 0; i < s->length; i += LANES) {
        int64_t count = s->length - i;
        V x, c = NAME(load)(s->centre + i, count, 0);
        if (kind <= ADVANCE) x = NAME(move)(s, i, count, dw - (V){0}, &sums) - c;
        else x = NAME(load)(s->theta + i, count, 0) - c;
        if (kind == RESCALE || kind == EVALUATE) x *= dw / dv;
        if (kind == RESCALE) {
            NAME(store)(s->theta + i, x + c, count);
            x = x + c - c;
        }
        squares += x * x;
    }
    *energy = sums;
    double total = NAME(total)(squares);
    for (int k = 0; k < n; k++) {
        double dk = (double)s->metric[k * s->stride] * total;
        out[k] += dk;
        for (int l = 0; l < n && HAS_HESSIAN(kind); l++)
            out[n + k * n + l] += dk * (double)s->metric[l * s->stride] / (kind <= ADVANCE ? dw : dv);
    }
}

/* What a move adds to the bounds, from a = sum e and b = sum e^2. What underflow may have taken is put back. */
static void NAME(bound)(const Job *job, int64_t chunk, const Segment *s, const Energy *energy, double *out) {
    double lost = 4 * (double)TINY * (double)s->length;
    double a = SLACK * (NAME(total)(energy->first) + lost), b = SLACK * (NAME(total)(energy->second) + lost);
    for (int64_t k = 0; k < job->pieces; k++) {
        double most = job->kappa[chunk * job->pieces + k] * a, norm = job->rho[chunk * job->pieces + k] * sqrt(b);
        if (s->shared) out[k] += a * (double)s->metric[k * s->stride] / (double)s->metric[job->piece * s->stride];
        else out[k] += k == job->piece ? a : most < norm ? most : norm;
    }
}

INLINE void NAME(pass)(Kind kind, const Job *job, const Tensor *t, int64_t chunk, double *out) {
    int64_t start = job->chunks[chunk].start, end = start + job->chunks[chunk].length, n = job->pieces;
    while (start < end) {
        Segment s = NAME(segment)(t, start, end);
        Energy energy;
        /* The usual numbers of pieces are known to the compiler: their sums stay in registers. */
        if (s.shared) NAME(row)(kind, &s, job->before, job->after, (int)n, &energy, out);
        else if (n == 2) NAME(own)(kind, &s, job->before, job->after, 2, &energy, out);
        else if (n == 3) NAME(own)(kind, &s, job->before, job->after, 3, &energy, out);
        else NAME(own)(kind, &s, job->before, job->after, (int)n, &energy, out);
        if (kind == CHECK) NAME(bound)(job, chunk, &s, &energy, out + n + n * n);
        start += s.length;
    }
}

static void NAME(forms)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    NAME(pass)(FORMS, job, t, chunk, out);
}

static void NAME(advance)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    if (t->grad && job->piece >= 0) NAME(pass)(CHECK, job, t, chunk, out);
    else if (t->grad) NAME(pass)(ADVANCE, job, t, chunk, out);
    else NAME(forms)(job, t, chunk, out); /* what stays */
}

static void NAME(evaluate)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    NAME(pass)(EVALUATE, job, t, chunk, out);
}

static void NAME(rescale)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    NAME(pass)(RESCALE, job, t, chunk, out);
}

static void NAME(follow)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    int64_t start = job->chunks[chunk].start, end = start + job->chunks[chunk].length;
    while (start < end) {
        Segment s = NAME(segment)(t, start, end);
        const REAL *dj = s.metric + job->piece * s.stride;
        Energy energy = {0};
        int64_t i = 0;
        if (s.shared)
            for (; i < s.length; i += LANES) NAME(move)(&s, i, s.length - i, *dj - (V){0}, &energy);
        for (; i + LANES <= s.length; i += LANES) NAME(move)(&s, i, LANES, *(const U *)(dj + i), &energy);
        if (i < s.length) NAME(move)(&s, i, s.length - i, NAME(load)(dj + i, s.length - i, 1), &energy);
        NAME(bound)(job, chunk, &s, &energy, out);
        start += s.length;
    }
}

static void NAME(ratios)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    int64_t n = job->pieces, start = job->chunks[chunk].start;
    double *kappa = job->kappa + chunk * n, *rho = job->rho + chunk * n;
    Segment s = NAME(segment)(t, start, start + job->chunks[chunk].length);
    const REAL *dj = s.metric + job->piece * s.stride;
    (void)out;
    for (int64_t k = 0; k < n && !s.shared; k++) {
        const REAL *dk = s.metric + k * s.stride;
        double most = 0, total = 0;
        for (int64_t i = 0; i < s.length; i++) {
            double ratio = (double)dk[i] / (double)dj[i];
            if (!(ratio <= most)) most = ratio;
            total += ratio * ratio;
        }
        kappa[k] = SLACK * most;
        rho[k] = SLACK * sqrt(total);
    }
}

#undef V
#undef U
#undef LANES
#undef Segment
#undef Energy

#endif
