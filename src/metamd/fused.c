/* Passes over memory for the maximum of N diagonal quadratic forms: F_k = 1/2 sum D_k (theta - c)^2 + b_k.

   Every pass walks the same list of chunks, a few thousand bytes of one tensor each. What a chunk adds up stays in the
   element type over its at most CHUNK elements and goes on in double; chunks are added in one order, so that the result
   does not depend on the number of threads. A chunk splits into segments: one where every element has a metric of its
   own, one per row where a row shares one.

   The file includes itself twice, for float and for double. */

#ifndef REAL

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { CHUNK = 1024, GROUP = 8, SERIAL = 32768 };

typedef struct {
    void *theta;
    const void *grad, *centre, *metric; /* grad: 0 for a tensor that stays; centre: 0 at the origin */
    int64_t stride;                     /* from D_k to D_(k+1) */
    int64_t period;                     /* the metric of element i is that of element i mod period */
    int64_t cols;                       /* elements that share a metric in a row; 1 where each has its own */
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
    const double *before, *after; /* w, w+ */
    int64_t piece;                /* j where w is a vertex, else -1 */
    const double *kappa, *rho;    /* max D_k/D_j and |D_k/D_j|_2 by chunk and piece */
    int64_t full;                 /* whether `advance` adds up the forms too */
    int64_t width;                /* numbers that a chunk yields */
} Job;

#define REAL float
#define NAME(x) x##_float
#define TINY FLT_MIN
#define SLACK 1.0001 /* covers the rounding of sums over a chunk */
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

/* Runs a pass over all chunks and adds up what they yield, `width` numbers each. `partial` holds a row per group. */
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

/* theta <- keep theta - lr g / D(w). Yields sum D_k d^2 for the move d (an upper bound for k != j, none off a vertex) and,
   if asked for, sum D_k x^2 at x = theta - c after the step, with sum D_k D_l x^2 / D(w) off a vertex. */
void advance(const Job *job, double *partial, double *out) { run(job, advance_float, advance_double, partial, out); }

/* Yields sum D_k x^2 and sum D_k D_l x^2 / D(w+) at x = D(w)/D(w+) (theta - c). */
void evaluate(const Job *job, double *partial, double *out) { run(job, evaluate_float, evaluate_double, partial, out); }

/* Yields sum D_k x^2 at x = theta - c. */
void forms(const Job *job, double *partial, double *out) { run(job, forms_float, forms_double, partial, out); }

/* theta <- D(w)/D(w+) (theta - c) + c. */
void rescale(const Job *job, double *partial, double *out) { run(job, rescale_float, rescale_double, partial, out); }

/* Fills kappa and rho of piece j; nothing is added up. */
void ratios(const Job *job, double *partial, double *out) { run(job, ratios_float, ratios_double, partial, out); }

#else

typedef struct {
    REAL *theta;
    const REAL *grad, *centre, *metric;
    int64_t length, stride;
    int shared; /* whether the whole segment has one metric */
} NAME(Segment);

/* The segment that begins at an element of a chunk and ends with it, or with its row. */
static NAME(Segment) NAME(segment)(const Tensor *t, int64_t start, int64_t end) {
    NAME(Segment) s = {(REAL *)t->theta + start, 0, 0, 0, end - start, t->stride, t->cols > 1};
    if (t->grad) s.grad = (const REAL *)t->grad + start;
    if (t->centre) s.centre = (const REAL *)t->centre + start;
    s.metric = (const REAL *)t->metric + (s.shared ? start / t->cols : start % t->period);
    if (s.shared && t->cols - start % t->cols < s.length) s.length = t->cols - start % t->cols;
    return s;
}

static void NAME(fill)(REAL *restrict to, REAL value, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = value;
}

/* D(w) over a segment: D_j in place at a vertex, else in the buffer. */
static const REAL *NAME(combine)(const NAME(Segment) * s, const double *w, int64_t pieces, REAL *restrict buffer) {
    int64_t support = 0, last = 0;
    for (int64_t k = 0; k < pieces; k++)
        if (w[k] != 0) support++, last = k;
    if (support == 1 && !s->shared) return s->metric + last * s->stride;
    if (s->shared) {
        REAL sum = 0;
        for (int64_t k = 0; k < pieces; k++) sum += support == 1 ? (k == last ? s->metric[k * s->stride] : 0)
                                                                 : (REAL)w[k] * s->metric[k * s->stride];
        NAME(fill)(buffer, sum, s->length);
        return buffer;
    }
    NAME(fill)(buffer, 0, s->length);
    for (int64_t k = 0; k < pieces; k++) {
        const REAL *restrict d = s->metric + k * s->stride;
        REAL weight = (REAL)w[k];
        if (weight == 0) continue;
        for (int64_t i = 0; i < s->length; i++) buffer[i] += weight * d[i];
    }
    return buffer;
}

static double NAME(sum)(const REAL *restrict x, int64_t n) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}

static double NAME(dot)(const REAL *restrict x, const REAL *restrict y, int64_t n) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += x[i] * y[i];
    return total;
}

/* Adds sum D_k x^2 for every k, given x^2. */
static void NAME(add_forms)(const NAME(Segment) * s, const REAL *squares, int64_t pieces, double *out) {
    double total = s->shared ? NAME(sum)(squares, s->length) : 0;
    for (int64_t k = 0; k < pieces; k++) {
        const REAL *d = s->metric + k * s->stride;
        out[k] += s->shared ? *d * total : NAME(dot)(d, squares, s->length);
    }
}

/* Adds sum D_k D_l x^2 / D(w) for every k and l, given x^2, which it overwrites, and D(w). */
static void NAME(add_hessian)(const NAME(Segment) * s, REAL *restrict squares, const REAL *restrict dw, int64_t pieces,
                              double *out) {
    REAL product[CHUNK];
    for (int64_t i = 0; i < s->length; i++) squares[i] /= dw[i];
    double total = s->shared ? NAME(sum)(squares, s->length) : 0;
    for (int64_t k = 0; k < pieces; k++) {
        const REAL *restrict dk = s->metric + k * s->stride;
        if (!s->shared)
            for (int64_t i = 0; i < s->length; i++) product[i] = squares[i] * dk[i];
        for (int64_t l = 0; l <= k; l++) {
            const REAL *dl = s->metric + l * s->stride;
            double value = s->shared ? total * *dk * *dl : NAME(dot)(product, dl, s->length);
            out[k * pieces + l] += value;
            if (l < k) out[l * pieces + k] += value;
        }
    }
}

static void NAME(add_squares)(const NAME(Segment) * s, REAL *restrict squares) {
    const REAL *restrict theta = s->theta, *restrict centre = s->centre;
    if (centre)
        for (int64_t i = 0; i < s->length; i++) squares[i] = (theta[i] - centre[i]) * (theta[i] - centre[i]);
    else
        for (int64_t i = 0; i < s->length; i++) squares[i] = theta[i] * theta[i];
}

/* Takes the step over a segment; a = sum D(w) d^2 and b = sum (D(w) d^2)^2 for the move d as it was rounded. */
static void NAME(move)(const NAME(Segment) * s, const REAL *restrict dw, REAL keep, REAL lr, double *a, double *b) {
    REAL *restrict theta = s->theta;
    const REAL *restrict grad = s->grad;
    REAL first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = 0; i < s->length; i++) {
        REAL old = theta[i], new = keep * old - lr * grad[i] / dw[i];
        REAL d = new - old, energy = dw[i] * d * d;
        theta[i] = new;
        first += energy;
        second += energy * energy;
    }
    /* What underflow can have swallowed is put back. */
    *a = SLACK * (first + 4 * (double)TINY * (double)s->length);
    *b = SLACK * (second + 4 * (double)TINY * (double)s->length);
}

static void NAME(advance)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    REAL buffer[CHUNK], squares[CHUNK];
    int64_t n = job->pieces, end = job->chunks[chunk].start + job->chunks[chunk].length;
    const double *kappa = job->kappa ? job->kappa + chunk * n : 0, *rho = job->rho ? job->rho + chunk * n : 0;
    for (int64_t at = job->chunks[chunk].start; at < end;) {
        NAME(Segment) s = NAME(segment)(t, at, end);
        at += s.length;
        const REAL *dw = NAME(combine)(&s, job->before, n, buffer);
        if (s.grad) {
            double a, b;
            NAME(move)(&s, dw, (REAL)t->keep, (REAL)t->lr, &a, &b);
            for (int64_t k = 0; k < n && job->piece >= 0; k++) {
                double most = kappa[k] * a, other = rho[k] * sqrt(b);
                if (k == job->piece) out[k] += a;
                else out[k] += s.shared ? (double)s.metric[k * s.stride] / dw[0] * a : most < other ? most : other;
            }
        }
        if (!job->full) continue;
        NAME(add_squares)(&s, squares);
        NAME(add_forms)(&s, squares, n, out + n);
        if (job->piece < 0 && s.grad) NAME(add_hessian)(&s, squares, dw, n, out + 2 * n);
    }
}

static void NAME(evaluate)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    REAL buffers[2][CHUNK], squares[CHUNK];
    int64_t n = job->pieces, end = job->chunks[chunk].start + job->chunks[chunk].length;
    for (int64_t at = job->chunks[chunk].start; at < end;) {
        NAME(Segment) s = NAME(segment)(t, at, end);
        at += s.length;
        const REAL *restrict before = NAME(combine)(&s, job->before, n, buffers[0]);
        const REAL *restrict after = NAME(combine)(&s, job->after, n, buffers[1]);
        NAME(add_squares)(&s, squares);
        for (int64_t i = 0; i < s.length; i++) squares[i] *= (before[i] / after[i]) * (before[i] / after[i]);
        NAME(add_forms)(&s, squares, n, out);
        NAME(add_hessian)(&s, squares, after, n, out + n);
    }
}

static void NAME(forms)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    REAL squares[CHUNK];
    int64_t end = job->chunks[chunk].start + job->chunks[chunk].length;
    for (int64_t at = job->chunks[chunk].start; at < end;) {
        NAME(Segment) s = NAME(segment)(t, at, end);
        at += s.length;
        NAME(add_squares)(&s, squares);
        NAME(add_forms)(&s, squares, job->pieces, out);
    }
}

static void NAME(rescale)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    REAL buffers[2][CHUNK];
    int64_t n = job->pieces, end = job->chunks[chunk].start + job->chunks[chunk].length;
    (void)out;
    for (int64_t at = job->chunks[chunk].start; at < end;) {
        NAME(Segment) s = NAME(segment)(t, at, end);
        at += s.length;
        const REAL *restrict before = NAME(combine)(&s, job->before, n, buffers[0]);
        const REAL *restrict after = NAME(combine)(&s, job->after, n, buffers[1]);
        REAL *restrict theta = s.theta;
        const REAL *restrict centre = s.centre;
        if (centre)
            for (int64_t i = 0; i < s.length; i++) theta[i] = before[i] / after[i] * (theta[i] - centre[i]) + centre[i];
        else
            for (int64_t i = 0; i < s.length; i++) theta[i] *= before[i] / after[i];
    }
}

static void NAME(ratios)(const Job *job, const Tensor *t, int64_t chunk, double *out) {
    int64_t n = job->pieces, start = job->chunks[chunk].start;
    double *kappa = (double *)job->kappa + chunk * n, *rho = (double *)job->rho + chunk * n;
    NAME(Segment) s = NAME(segment)(t, start, start + job->chunks[chunk].length);
    const REAL *restrict dj = s.metric + job->piece * s.stride;
    (void)out;
    for (int64_t k = 0; k < n && !s.shared; k++) {
        const REAL *restrict dk = s.metric + k * s.stride;
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

#endif
