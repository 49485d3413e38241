/* Spectra of short frames of sound. Worker process.
 *
 *     spectra     the power or the magnitude of each frequency, or bands of several
 *     logarithms  of numbers, in place
 *     combine     weighted sums of the numbers of each row
 *
 * Four frames are transformed side by side, each by itself: a real signal of n numbers as n / 2
 * complex ones (of odd n: as n), by Stockham's mixed-radix FFT. `sound/spectra.py` makes the tables
 * and does the same without this extension, in more time.
 *
 * Invariant: nothing is read or written outside of the buffers, whatever the arguments are.
 */
#include "_sound_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE_BY_SIDE = 4, RADIX_MAX = 31, STAGES_MAX = 20, LENGTH_MAX = 1 << 16, LOG_BLOCK = 64, LOG_TERMS = 12 };

/* Before a loop over numbers side by side: what it reads is not what it writes. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#else
#define INDEPENDENT
#endif

struct plan {
    const float *samples;
    double *levels;          /* [frames, bins] */
    const double *window;    /* [window_length] */
    const double *roots;     /* [length, 2]: of 1, as cosine and minus sine */
    int64_t frames, bins, window_length, length, hop;
    int is_magnitude, is_centered;
    double emphasis;
    const int32_t *firsts;   /* [bins]: the first frequency of each band; NULL: no bands */
    const int32_t *ends;     /* [bins]: the end of its weights */
    const double *weights;
    int64_t points;          /* of the complex transform */
    int radices[STAGES_MAX], stages;
};

/* Two planes of [points, SIDE_BY_SIDE]. */
struct planes {
    double *real, *imaginary;
};

/* A stage makes, of a signal of `radix` * m numbers at `apart` (in numbers side by side), `radix` of m. */
struct stage {
    const double *roots;
    int64_t m, apart, step; /* step: between the roots of the stage's length */
};

ALWAYS_INLINE void by_two(struct planes from, struct planes into, struct stage stage)
{
    const int64_t apart = stage.apart, far = stage.m * apart;
    for (int64_t p = 0; p < stage.m; p++) {
        const double *w = stage.roots + 2 * p * stage.step;
        const double w_re = w[0], w_im = w[1];
        const double *restrict x = from.real + p * apart, *restrict y = from.imaginary + p * apart;
        double *restrict re = into.real + 2 * p * apart, *restrict im = into.imaginary + 2 * p * apart;
        INDEPENDENT
        for (int64_t i = 0; i < apart; i++) {
            const double d_re = x[i] - x[far + i], d_im = y[i] - y[far + i];
            re[i] = x[i] + x[far + i], im[i] = y[i] + y[far + i];
            re[apart + i] = d_re * w_re - d_im * w_im, im[apart + i] = d_re * w_im + d_im * w_re;
        }
    }
}

ALWAYS_INLINE void by_four(struct planes from, struct planes into, struct stage stage)
{
    const int64_t apart = stage.apart, far = stage.m * apart;
    for (int64_t p = 0; p < stage.m; p++) {
        const double *w1 = stage.roots + 2 * p * stage.step, *w2 = w1 + 2 * p * stage.step, *w3 = w2 + 2 * p * stage.step;
        const double re1 = w1[0], im1 = w1[1], re2 = w2[0], im2 = w2[1], re3 = w3[0], im3 = w3[1];
        const double *restrict x = from.real + p * apart, *restrict y = from.imaginary + p * apart;
        double *restrict re = into.real + 4 * p * apart, *restrict im = into.imaginary + 4 * p * apart;
        INDEPENDENT
        for (int64_t i = 0; i < apart; i++) {
            const double sum_re = x[i] + x[2 * far + i], sum_im = y[i] + y[2 * far + i];
            const double less_re = x[i] - x[2 * far + i], less_im = y[i] - y[2 * far + i];
            const double odd_re = x[far + i] + x[3 * far + i], odd_im = y[far + i] + y[3 * far + i];
            const double turn_re = y[3 * far + i] - y[far + i], turn_im = x[far + i] - x[3 * far + i];
            const double t1_re = less_re - turn_re, t1_im = less_im - turn_im;
            const double t2_re = sum_re - odd_re, t2_im = sum_im - odd_im;
            const double t3_re = less_re + turn_re, t3_im = less_im + turn_im;
            re[i] = sum_re + odd_re, im[i] = sum_im + odd_im;
            re[apart + i] = t1_re * re1 - t1_im * im1, im[apart + i] = t1_re * im1 + t1_im * re1;
            re[2 * apart + i] = t2_re * re2 - t2_im * im2, im[2 * apart + i] = t2_re * im2 + t2_im * re2;
            re[3 * apart + i] = t3_re * re3 - t3_im * im3, im[3 * apart + i] = t3_re * im3 + t3_im * re3;
        }
    }
}

/* An odd radix: the numbers k and radix - k together. `each`: between the roots of the radix. */
ALWAYS_INLINE void by_odd(struct planes from, struct planes into, struct stage stage, const double *roots, int64_t each, int radix)
{
    const int64_t apart = stage.apart, far = stage.m * apart;
    const int half = radix / 2;
    for (int64_t p = 0; p < stage.m; p++) {
        const double *restrict x = from.real + p * apart, *restrict y = from.imaginary + p * apart;
        double *restrict re = into.real + radix * p * apart, *restrict im = into.imaginary + radix * p * apart;
        INDEPENDENT
        for (int64_t i = 0; i < apart; i++) {
            double sum_re[RADIX_MAX / 2 + 1], sum_im[RADIX_MAX / 2 + 1], less_re[RADIX_MAX / 2 + 1], less_im[RADIX_MAX / 2 + 1];
            double all_re = x[i], all_im = y[i];
            for (int j = 1; j <= half; j++) {
                const int64_t one = j * far + i, other = (radix - j) * far + i;
                sum_re[j] = x[one] + x[other], sum_im[j] = y[one] + y[other];
                less_re[j] = x[one] - x[other], less_im[j] = y[one] - y[other];
                all_re += sum_re[j], all_im += sum_im[j];
            }
            re[i] = all_re, im[i] = all_im;
            for (int k = 1; k <= half; k++) {
                double even_re = x[i], even_im = y[i], odd_re = 0, odd_im = 0;
                for (int j = 1; j <= half; j++) {
                    const double *root = roots + 2 * each * (j * k % radix);
                    even_re += root[0] * sum_re[j], even_im += root[0] * sum_im[j];
                    odd_re += root[1] * less_re[j], odd_im += root[1] * less_im[j];
                }
                const double *w = stage.roots + 2 * p * k * stage.step, *v = stage.roots + 2 * p * (radix - k) * stage.step;
                const double w_re = w[0], w_im = w[1], v_re = v[0], v_im = v[1];
                const double t_re = even_re - odd_im, t_im = even_im + odd_re, u_re = even_re + odd_im, u_im = even_im - odd_re;
                re[k * apart + i] = t_re * w_re - t_im * w_im, im[k * apart + i] = t_re * w_im + t_im * w_re;
                re[(radix - k) * apart + i] = u_re * v_re - u_im * v_im, im[(radix - k) * apart + i] = u_re * v_im + u_im * v_re;
            }
        }
    }
}

/* Returns the planes that have the result. */
ALWAYS_INLINE struct planes transformed(const struct plan *plan, struct planes from, struct planes into)
{
    const int64_t every = plan->length / plan->points;
    int64_t apart = 1, length = plan->points;
    for (int i = 0; i < plan->stages; i++) {
        const int radix = plan->radices[i];
        const struct stage stage = {plan->roots, length / radix, apart * SIDE_BY_SIDE, apart * every};
        if (radix == 4)
            by_four(from, into, stage);
        else if (radix == 2)
            by_two(from, into, stage);
        else if (radix == 3)
            by_odd(from, into, stage, plan->roots, plan->length / 3, 3);
        else if (radix == 5)
            by_odd(from, into, stage, plan->roots, plan->length / 5, 5);
        else
            by_odd(from, into, stage, plan->roots, plan->length / radix, radix);
        const struct planes made = into;
        into = from, from = made;
        apart *= radix, length /= radix;
    }
    return from;
}

/* The frames from `frame` on, side by side, each freed of its mean and emphasised. */
ALWAYS_INLINE void take_frames(const struct plan *plan, int64_t frame, int64_t count, double *line)
{
    const int64_t length = plan->window_length;
    const float *from[SIDE_BY_SIDE]; /* without another frame, the last one again */
    for (int64_t lane = 0; lane < SIDE_BY_SIDE; lane++)
        from[lane] = plan->samples + (frame + (lane < count ? lane : count - 1)) * plan->hop;
    for (int64_t i = 0; i < length; i++)
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) line[i * SIDE_BY_SIDE + lane] = from[lane][i];
    if (plan->is_centered)
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
            double sum = 0;
            for (int64_t i = 0; i < length; i++) sum += line[i * SIDE_BY_SIDE + lane];
            sum /= (double)length;
            for (int64_t i = 0; i < length; i++) line[i * SIDE_BY_SIDE + lane] -= sum;
        }
    if (plan->emphasis != 0) {
        for (int64_t i = (length - 1) * SIDE_BY_SIDE; i--;) line[SIDE_BY_SIDE + i] -= plan->emphasis * line[i];
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) line[lane] -= plan->emphasis * line[lane];
    }
}

/* Even samples as real numbers, odd ones as imaginary ones, or all as real ones; each in the window. */
ALWAYS_INLINE void into_planes(const struct plan *plan, const double *line, struct planes into)
{
    const int64_t length = plan->window_length, every = plan->length / plan->points;
    for (int64_t i = 0; i < plan->points; i++)
        for (int64_t part = 0; part < 2; part++) {
            const double *restrict from = line + (every * i + part) * SIDE_BY_SIDE;
            double *restrict to = (part ? into.imaginary : into.real) + i * SIDE_BY_SIDE;
            if (part >= every || every * i + part >= length)
                memset(to, 0, SIDE_BY_SIDE * sizeof *to);
            else {
                const double weight = plan->window[every * i + part];
                INDEPENDENT
                for (int lane = 0; lane < SIDE_BY_SIDE; lane++) to[lane] = from[lane] * weight;
            }
        }
}

/* The power of each frequency from 0 to length / 2, [frequencies, SIDE_BY_SIDE]. */
ALWAYS_INLINE void take_powers(const struct plan *plan, struct planes found, double *powers)
{
    const int64_t points = plan->points;
    for (int64_t k = 0; k <= plan->length / 2; k++) {
        double *restrict power = powers + k * SIDE_BY_SIDE;
        const int64_t at = k % points * SIDE_BY_SIDE, mirrored = (points - k) % points * SIDE_BY_SIDE;
        const double *re = found.real + at, *im = found.imaginary + at;
        if (points == plan->length)
            INDEPENDENT
            for (int i = 0; i < SIDE_BY_SIDE; i++) power[i] = re[i] * re[i] + im[i] * im[i];
        else {
            const double *re_m = found.real + mirrored, *im_m = found.imaginary + mirrored;
            const double w_re = plan->roots[2 * k], w_im = plan->roots[2 * k + 1];
            INDEPENDENT
            for (int i = 0; i < SIDE_BY_SIDE; i++) {
                const double even_re = (re[i] + re_m[i]) * 0.5, even_im = (im[i] - im_m[i]) * 0.5;
                const double odd_re = (im[i] + im_m[i]) * 0.5, odd_im = (re_m[i] - re[i]) * 0.5;
                const double x = even_re + (odd_re * w_re - odd_im * w_im), y = even_im + (odd_re * w_im + odd_im * w_re);
                power[i] = x * x + y * y;
            }
        }
        if (plan->is_magnitude)
            for (int i = 0; i < SIDE_BY_SIDE; i++) power[i] = sqrt(power[i]);
    }
}

ALWAYS_INLINE void spectra_of(const struct plan *plan, int64_t frame, int64_t count, double *memory)
{
    double *const line = memory, *const powers = line + plan->length * SIDE_BY_SIDE;
    const int64_t plane = plan->points * SIDE_BY_SIDE;
    double *const first = powers + (plan->length / 2 + 1) * SIDE_BY_SIDE;
    const struct planes one = {first, first + plane}, other = {first + 2 * plane, first + 3 * plane};
    take_frames(plan, frame, count, line);
    into_planes(plan, line, one);
    take_powers(plan, transformed(plan, one, other), powers);
    int64_t weight = 0;
    for (int64_t bin = 0; bin < plan->bins; bin++) {
        double sums[SIDE_BY_SIDE] = {0};
        const double *power = powers + (plan->firsts ? plan->firsts[bin] : bin) * SIDE_BY_SIDE;
        if (!plan->firsts)
            memcpy(sums, power, sizeof sums);
        else
            for (; weight < plan->ends[bin]; weight++, power += SIDE_BY_SIDE)
                INDEPENDENT
                for (int i = 0; i < SIDE_BY_SIDE; i++) sums[i] += plan->weights[weight] * power[i];
        for (int64_t i = 0; i < count; i++) plan->levels[(frame + i) * plan->bins + bin] = sums[i];
    }
}

static void spectra_plain(const struct plan *plan, int64_t frame, int64_t count, double *memory)
{
    spectra_of(plan, frame, count, memory);
}

WITH_AVX2 static void spectra_avx2(const struct plan *plan, int64_t frame, int64_t count, double *memory)
{
    spectra_of(plan, frame, count, memory);
}

/* Returns 0: no memory. */
static int all_spectra(const struct plan *plan)
{
    const int64_t numbers = (plan->length + plan->length / 2 + 1 + 4 * plan->points) * SIDE_BY_SIDE;
    double *memory = calloc((size_t)numbers, sizeof *memory);
    if (!memory) return 0;
    for (int64_t frame = 0; frame < plan->frames; frame += SIDE_BY_SIDE) {
        const int64_t left = plan->frames - frame, count = left < SIDE_BY_SIDE ? left : SIDE_BY_SIDE;
        (sound_uses_avx2 ? spectra_avx2 : spectra_plain)(plan, frame, count, memory);
    }
    free(memory);
    return 1;
}

static int find_radices(struct plan *plan)
{
    int64_t left = plan->points = plan->length % 2 ? plan->length : plan->length / 2;
    plan->stages = 0;
    for (int radix = 4; left > 1; radix = radix == 4 ? 2 : radix == 2 ? 3 : radix + 2) {
        if (radix > RADIX_MAX) return 0;
        for (; left % radix == 0; left /= radix) plan->radices[plan->stages++] = radix;
    }
    return 1;
}

/* Whether each band is within the frequencies, and its weights within the weights. */
static int bands_fit(const struct plan *plan, int64_t weights)
{
    int64_t begin = 0;
    for (int64_t bin = 0; bin < plan->bins; bin++) {
        const int64_t end = plan->ends[bin], first = plan->firsts[bin];
        if (end < begin || end > weights || first < 0 || first + (end - begin) > plan->length / 2 + 1) return 0;
        if (first > plan->length / 2) return 0;
        begin = end;
    }
    return 1;
}

const char spectra_doc[] =
"spectra(samples, levels, window, roots, hop, is_magnitude, is_centered, emphasis, bands)\n\n"
"Write the powers of the frequencies of each frame into ``levels``, float64 [frames, n / 2 + 1]. ``samples``: float32; a frame begins\n"
"every ``hop`` of them. ``window``: float64, as long as a frame, at most n; ``roots``: float64 [n, 2], the roots of 1. ``bands``: None, or\n"
"int32 [bands], the first frequency of each, int32 [bands], where its weights end, and all weights, float64; levels are [frames, bands].";

PyObject *spectra(PyObject *self, PyObject *arguments)
{
    struct plan plan;
    Py_buffer buffers[7];
    PyObject *samples, *levels, *window, *roots, *bands, *firsts = NULL, *ends = NULL, *weights = NULL;
    long long hop;
    int is_made = 0;
    (void)self;
    memset(&plan, 0, sizeof plan), memset(buffers, 0, sizeof buffers);
    if (!PyArg_ParseTuple(arguments, "OOOOLppdO:spectra", &samples, &levels, &window, &roots, &hop, &plan.is_magnitude,
                          &plan.is_centered, &plan.emphasis, &bands))
        return NULL;
    if (bands != Py_None && !PyArg_ParseTuple(bands, "OOO:bands", &firsts, &ends, &weights)) return NULL;
    if (take_array(samples, 'f', 1, 0, buffers) && take_array(levels, 'd', 2, 1, buffers + 1)
        && take_array(window, 'd', 1, 0, buffers + 2) && take_array(roots, 'd', 2, 0, buffers + 3)
        && (!firsts
            || (take_array(firsts, 'i', 1, 0, buffers + 4) && take_array(ends, 'i', 1, 0, buffers + 5)
                && take_array(weights, 'd', 1, 0, buffers + 6)))) {
        plan.samples = buffers[0].buf, plan.levels = buffers[1].buf, plan.window = buffers[2].buf, plan.roots = buffers[3].buf;
        plan.frames = buffers[1].shape[0], plan.bins = buffers[1].shape[1], plan.window_length = buffers[2].shape[0];
        plan.length = buffers[3].shape[0], plan.hop = hop;
        if (firsts) plan.firsts = buffers[4].buf, plan.ends = buffers[5].buf, plan.weights = buffers[6].buf;
        const int64_t count = buffers[0].shape[0];
        int fits = plan.length > 0 && plan.length <= LENGTH_MAX && buffers[3].shape[1] == 2 && plan.window_length > 0
            && plan.window_length <= plan.length && hop > 0 && hop <= INT32_MAX && plan.window_length <= count
            && plan.frames <= (count - plan.window_length) / hop + 1;
        fits = fits && (firsts ? buffers[4].shape[0] == plan.bins && buffers[5].shape[0] == plan.bins
                                     && bands_fit(&plan, buffers[6].shape[0])
                               : plan.bins == plan.length / 2 + 1);
        if (!fits || !find_radices(&plan))
            PyErr_SetString(PyExc_ValueError, "frames, frequencies or bands that do not fit, or a prime factor above 31");
        else {
            Py_BEGIN_ALLOW_THREADS
            is_made = all_spectra(&plan);
            Py_END_ALLOW_THREADS
            if (!is_made) PyErr_NoMemory();
        }
    }
    for (int i = 7; i--;) PyBuffer_Release(buffers + i);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

/* --- logarithms --- */

/* A number is m * 2**e; the logarithm of m, from the root of 1/2 to that of 2, is a series of (m - 1) / (m + 1). */
ALWAYS_INLINE void logarithms_of(double *numbers, int64_t count, double floor, double factor)
{
    double parts[LOG_BLOCK], exponents[LOG_BLOCK], ratios[LOG_BLOCK], squares[LOG_BLOCK], totals[LOG_BLOCK];
    uint64_t bits[LOG_BLOCK], high[LOG_BLOCK];
    memcpy(parts, numbers, (size_t)count * sizeof *numbers);
    for (int64_t i = count; i < LOG_BLOCK; i++) parts[i] = floor;
    for (int i = 0; i < LOG_BLOCK; i++) parts[i] = parts[i] > floor ? parts[i] : floor;
    memcpy(bits, parts, sizeof bits);
    for (int i = 0; i < LOG_BLOCK; i++) {
        high[i] = bits[i] >> 52 | 0x4330000000000000; /* 2**52 and the exponent */
        bits[i] = (bits[i] & 0x000fffffffffffff) | 0x3ff0000000000000;
    }
    memcpy(parts, bits, sizeof bits), memcpy(exponents, high, sizeof high);
    for (int i = 0; i < LOG_BLOCK; i++) {
        const double above = parts[i] > 1.4142135623730951 ? 1.0 : 0.0, part = parts[i] * (1 - 0.5 * above);
        exponents[i] = exponents[i] - (4503599627370496.0 + 1023) + above;
        ratios[i] = (part - 1) / (part + 1), squares[i] = ratios[i] * ratios[i], totals[i] = 0;
    }
    for (int term = 2 * LOG_TERMS + 1; term > 0; term -= 2) {
        const double share = 1.0 / term;
        for (int i = 0; i < LOG_BLOCK; i++) totals[i] = totals[i] * squares[i] + share;
    }
    for (int i = 0; i < LOG_BLOCK; i++) parts[i] = (exponents[i] * 0.6931471805599453 + 2 * ratios[i] * totals[i]) * factor;
    memcpy(numbers, parts, (size_t)count * sizeof *numbers);
}

static void logarithms_plain(double *numbers, int64_t count, double floor, double factor)
{
    logarithms_of(numbers, count, floor, factor);
}

WITH_AVX2 static void logarithms_avx2(double *numbers, int64_t count, double floor, double factor)
{
    logarithms_of(numbers, count, floor, factor);
}

const char logarithms_doc[] =
"logarithms(numbers, floor, factor)\n\n"
"Replace each of ``numbers``, float64 [some, some], or ``floor`` where that is more, by ``factor`` times its natural logarithm. ``floor``\n"
"is at least 2**-1022.";

PyObject *logarithms(PyObject *self, PyObject *arguments)
{
    Py_buffer numbers;
    PyObject *object;
    double floor, factor;
    int is_made = 0;
    (void)self;
    memset(&numbers, 0, sizeof numbers);
    if (!PyArg_ParseTuple(arguments, "Odd:logarithms", &object, &floor, &factor)) return NULL;
    if (take_array(object, 'd', 2, 1, &numbers)) {
        if (!(floor >= 0x1p-1022 && floor <= 0x1p1023))
            PyErr_SetString(PyExc_ValueError, "a floor is 2**-1022 to 2**1023");
        else {
            const int64_t count = numbers.len / (int64_t)sizeof(double);
            Py_BEGIN_ALLOW_THREADS
            for (int64_t i = 0; i < count; i += LOG_BLOCK)
                (sound_uses_avx2 ? logarithms_avx2 : logarithms_plain)(
                    (double *)numbers.buf + i, count - i < LOG_BLOCK ? count - i : LOG_BLOCK, floor, factor);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    PyBuffer_Release(&numbers);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

/* --- combine --- */

ALWAYS_INLINE void combine_row(const double *row, const double *weights, double *restrict into, int64_t numbers, int64_t sums)
{
    for (int64_t k = 0; k < sums; k++) into[k] = 0;
    for (int64_t i = 0; i < numbers; i++)
        for (int64_t k = 0; k < sums; k++) into[k] += row[i] * weights[i * sums + k];
}

static void combine_plain(const double *row, const double *weights, double *into, int64_t numbers, int64_t sums)
{
    combine_row(row, weights, into, numbers, sums);
}

WITH_AVX2 static void combine_avx2(const double *row, const double *weights, double *into, int64_t numbers, int64_t sums)
{
    combine_row(row, weights, into, numbers, sums);
}

const char combine_doc[] =
"combine(numbers, weights, sums)\n\n"
"Write into ``sums``, float64 [rows, sums], the sums of ``numbers``, float64 [rows, some], times ``weights``, float64 [some, sums].";

PyObject *combine(PyObject *self, PyObject *arguments)
{
    Py_buffer numbers, weights, sums;
    PyObject *from, *by, *into;
    int is_made = 0;
    (void)self;
    memset(&numbers, 0, sizeof numbers), memset(&weights, 0, sizeof weights), memset(&sums, 0, sizeof sums);
    if (!PyArg_ParseTuple(arguments, "OOO:combine", &from, &by, &into)) return NULL;
    if (take_array(from, 'd', 2, 0, &numbers) && take_array(by, 'd', 2, 0, &weights) && take_array(into, 'd', 2, 1, &sums)) {
        if (numbers.shape[0] != sums.shape[0] || numbers.shape[1] != weights.shape[0] || weights.shape[1] != sums.shape[1])
            PyErr_SetString(PyExc_ValueError, "other rows, numbers or sums");
        else {
            Py_BEGIN_ALLOW_THREADS
            for (int64_t row = 0; row < sums.shape[0]; row++)
                (sound_uses_avx2 ? combine_avx2 : combine_plain)(
                    (double *)numbers.buf + row * numbers.shape[1], weights.buf, (double *)sums.buf + row * sums.shape[1],
                    numbers.shape[1], sums.shape[1]);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    PyBuffer_Release(&sums), PyBuffer_Release(&weights), PyBuffer_Release(&numbers);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}
