/* Spectra of short frames of sound. Worker process.
 *
 *     spectra     the power or the magnitude of each frequency, or bands of several
 *     logarithms  of numbers, in place
 *     combine     weighted sums of the numbers of each row
 *     convolve    of sound and a response, as products of their spectra
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

enum { RADIX_MAX = 31, STAGES_MAX = 20, LENGTH_MAX = 1 << 16, LOG_BLOCK = 4, LOG_TERMS = 12, TAPS_MAX = 1 << 26 };

static const int64_t COUNT_MAX = (int64_t)1 << 40;

/* A complex number of each of four frames. */
struct number {
    four re, im;
};

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

/* A stage makes, of a signal of `radix` * m numbers at `apart`, `radix` of m, each turned by
 * roots. */
struct stage {
    const double *roots;
    int64_t m, apart, step; /* step: between the roots of the stage's length */
    const struct number *from;
    struct number *into;
};

/* A number times a root of 1; `is_turned`: whether the root is another one than 1. */
ALWAYS_INLINE void put(struct number *into, const four *re, const four *im, const double *root, int is_turned)
{
    if (is_turned)
        into->re = *re * root[0] - *im * root[1], into->im = *re * root[1] + *im * root[0];
    else
        into->re = *re, into->im = *im;
}

ALWAYS_INLINE void by_two(const struct stage *stage, int64_t p, int is_turned)
{
    const int64_t apart = stage->apart, far = stage->m * apart;
    const double *root = stage->roots + 2 * p * stage->step;
    const struct number *x = stage->from + p * apart;
    struct number *into = stage->into + 2 * p * apart;
    for (int64_t i = 0; i < apart; i++) {
        const four re = x[i].re - x[far + i].re, im = x[i].im - x[far + i].im;
        into[i].re = x[i].re + x[far + i].re, into[i].im = x[i].im + x[far + i].im;
        put(into + apart + i, &re, &im, root, is_turned);
    }
}

ALWAYS_INLINE void by_four(const struct stage *stage, int64_t p, int is_turned)
{
    const int64_t apart = stage->apart, far = stage->m * apart, turn = 2 * p * stage->step;
    const double *roots = stage->roots;
    const struct number *x = stage->from + p * apart;
    struct number *into = stage->into + 4 * p * apart;
    for (int64_t i = 0; i < apart; i++) {
        const struct number *a = x + i, *b = a + far, *c = b + far, *d = c + far;
        const four sum_re = a->re + c->re, sum_im = a->im + c->im, less_re = a->re - c->re, less_im = a->im - c->im;
        const four odd_re = b->re + d->re, odd_im = b->im + d->im, turn_re = d->im - b->im, turn_im = b->re - d->re;
        const four re1 = less_re - turn_re, im1 = less_im - turn_im, re2 = sum_re - odd_re, im2 = sum_im - odd_im;
        const four re3 = less_re + turn_re, im3 = less_im + turn_im;
        into[i].re = sum_re + odd_re, into[i].im = sum_im + odd_im;
        put(into + apart + i, &re1, &im1, roots + turn, is_turned);
        put(into + 2 * apart + i, &re2, &im2, roots + 2 * turn, is_turned);
        put(into + 3 * apart + i, &re3, &im3, roots + 3 * turn, is_turned);
    }
}

/* An odd radix: the numbers k and radix - k together. `each`: between the roots of the radix. */
ALWAYS_INLINE void by_odd(const struct stage *stage, int64_t p, int64_t each, int radix, int is_turned)
{
    const int64_t apart = stage->apart, far = stage->m * apart, turn = 2 * p * stage->step;
    const double *roots = stage->roots;
    const struct number *x = stage->from + p * apart;
    struct number *into = stage->into + radix * p * apart;
    const int half = radix / 2;
    for (int64_t i = 0; i < apart; i++) {
        struct number sums[RADIX_MAX / 2 + 1], less[RADIX_MAX / 2 + 1], all = x[i];
        for (int j = 1; j <= half; j++) {
            const struct number *one = x + j * far + i, *other = x + (radix - j) * far + i;
            sums[j].re = one->re + other->re, sums[j].im = one->im + other->im;
            less[j].re = one->re - other->re, less[j].im = one->im - other->im;
            all.re += sums[j].re, all.im += sums[j].im;
        }
        into[i] = all;
        for (int k = 1; k <= half; k++) {
            struct number even = x[i], odd = {{0}, {0}};
            for (int j = 1; j <= half; j++) {
                const double *root = roots + 2 * each * (j * k % radix);
                even.re += root[0] * sums[j].re, even.im += root[0] * sums[j].im;
                odd.re += root[1] * less[j].re, odd.im += root[1] * less[j].im;
            }
            const four re = even.re - odd.im, im = even.im + odd.re, other_re = even.re + odd.im, other_im = even.im - odd.re;
            put(into + k * apart + i, &re, &im, roots + k * turn, is_turned);
            put(into + (radix - k) * apart + i, &other_re, &other_im, roots + (radix - k) * turn, is_turned);
        }
    }
}

ALWAYS_INLINE void make_stage(const struct stage *stage, const struct plan *plan, int radix)
{
#define EACH(butterflies, ...)                                                                          \
    do {                                                                                                \
        butterflies(stage, 0, ##__VA_ARGS__, 0);                                                        \
        for (int64_t p = 1; p < stage->m; p++) butterflies(stage, p, ##__VA_ARGS__, 1);                 \
    } while (0)
    if (radix == 4)
        EACH(by_four);
    else if (radix == 2)
        EACH(by_two);
    else if (radix == 3)
        EACH(by_odd, plan->length / 3, 3);
    else if (radix == 5)
        EACH(by_odd, plan->length / 5, 5);
    else
        EACH(by_odd, plan->length / radix, radix);
#undef EACH
}

/* Returns which of both has the result. */
ALWAYS_INLINE const struct number *transformed(const struct plan *plan, struct number *from, struct number *into)
{
    const int64_t every = plan->length / plan->points;
    int64_t apart = 1, length = plan->points;
    for (int i = 0; i < plan->stages; i++) {
        const int radix = plan->radices[i];
        const struct stage stage = {plan->roots, length / radix, apart, apart * every, from, into};
        make_stage(&stage, plan, radix);
        struct number *made = into;
        into = from, from = made;
        apart *= radix, length /= radix;
    }
    return from;
}

/* The frames from `frame` on, side by side, each freed of its mean, emphasised, and in the
 * window. */
ALWAYS_INLINE void take_frames(const struct plan *plan, int64_t frame, int64_t count, four *line)
{
    const int64_t length = plan->window_length;
    const float *from[SIDE_BY_SIDE]; /* without another frame, the last one again */
    for (int64_t lane = 0; lane < SIDE_BY_SIDE; lane++)
        from[lane] = plan->samples + (frame + (lane < count ? lane : count - 1)) * plan->hop;
    if (!plan->is_centered && plan->emphasis == 0)
        for (int64_t i = 0; i < length; i++) line[i] = (four){from[0][i], from[1][i], from[2][i], from[3][i]} * plan->window[i];
    else {
        four sum = {0};
        for (int64_t i = 0; i < length; i++) line[i] = (four){from[0][i], from[1][i], from[2][i], from[3][i]};
        for (int64_t i = 0; i < length; i++) sum += line[i];
        sum /= (double)length;
        for (int64_t i = 0; plan->is_centered && i < length; i++) line[i] -= sum;
        if (plan->emphasis != 0) {
            for (int64_t i = length - 1; i > 0; i--) line[i] -= plan->emphasis * line[i - 1];
            line[0] -= plan->emphasis * line[0];
        }
        for (int64_t i = 0; i < length; i++) line[i] *= plan->window[i];
    }
    memset(line + length, 0, (size_t)(plan->length - length) * sizeof *line);
}

/* The power of each frequency from 0 to length / 2: of an odd length, of the numbers as they
 * are. */
ALWAYS_INLINE void take_powers(const struct plan *plan, const struct number *found, four *powers)
{
    const int64_t points = plan->points;
    if (points == plan->length)
        for (int64_t k = 0; k <= points / 2; k++) powers[k] = found[k].re * found[k].re + found[k].im * found[k].im;
    else
        /* the halves of both are made twice as large, exactly */
        for (int64_t k = 0; k <= points / 2; k++) {
            const struct number *a = found + k, *b = found + (k ? points - k : 0);
            const double *w = plan->roots + 2 * k, *v = plan->roots + 2 * (points - k);
            const four even_re = a->re + b->re, even_im = a->im - b->im, odd_re = a->im + b->im, odd_im = b->re - a->re;
            const four x = even_re + (odd_re * w[0] - odd_im * w[1]), y = even_im + (odd_re * w[1] + odd_im * w[0]);
            const four s = even_re + (odd_re * v[0] + odd_im * v[1]), t = even_im - (odd_re * v[1] - odd_im * v[0]);
            powers[points - k] = (s * s + t * t) * 0.25;
            powers[k] = (x * x + y * y) * 0.25;
        }
    if (plan->is_magnitude)
        for (int64_t k = 0; k <= plan->length / 2; k++)
            for (int lane = 0; lane < SIDE_BY_SIDE; lane++) powers[k][lane] = sqrt(powers[k][lane]);
}

ALWAYS_INLINE void spectra_of(const struct plan *plan, int64_t frame, int64_t count, four *memory)
{
    four *const line = memory, *const powers = line + 4 * plan->points;
    struct number *const numbers = (struct number *)memory;
    take_frames(plan, frame, count, line);
    /* each is the real part of a number; of an even length, every other one is */
    if (plan->points == plan->length)
        for (int64_t i = plan->length; i--;) numbers[i] = (struct number){line[i], {0}};
    take_powers(plan, transformed(plan, numbers, numbers + plan->points), powers);
    int64_t weight = 0;
    for (int64_t bin = 0; bin < plan->bins; bin++) {
        const four *power = powers + (plan->firsts ? plan->firsts[bin] : bin);
        four sum = plan->firsts ? (four){0} : *power;
        if (plan->firsts)
            for (; weight < plan->ends[bin]; weight++) sum += plan->weights[weight] * *power++;
        for (int64_t i = 0; i < count; i++) plan->levels[(frame + i) * plan->bins + bin] = sum[i];
    }
}

static void spectra_plain(const struct plan *plan, int64_t frame, int64_t count, four *memory)
{
    spectra_of(plan, frame, count, memory);
}

WITH_AVX2 static void spectra_avx2(const struct plan *plan, int64_t frame, int64_t count, four *memory)
{
    spectra_of(plan, frame, count, memory);
}

/* Returns 0: no memory. */
static int all_spectra(const struct plan *plan)
{
    /* two signals, and the powers */
    const int64_t numbers = 4 * plan->points + plan->length / 2 + 1;
    four *memory = aligned_alloc(sizeof *memory, (size_t)numbers * sizeof *memory);
    if (!memory) return 0;
    for (int64_t frame = 0; frame < plan->frames; frame += SIDE_BY_SIDE) {
        const int64_t left = plan->frames - frame, count = left < SIDE_BY_SIDE ? left : SIDE_BY_SIDE;
        (sound_uses_avx2 ? spectra_avx2 : spectra_plain)(plan, frame, count, memory);
    }
    free(memory);
    return 1;
}

static int find_radices(struct plan *plan, int64_t points)
{
    int64_t left = plan->points = points;
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
        if (!fits || !find_radices(&plan, plan.length % 2 ? plan.length : plan.length / 2))
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

/* A number is m * 2**e; the logarithm of m, from the root of 1/2 to that of 2, is a series of
 * (m - 1) / (m + 1). */
ALWAYS_INLINE void logarithms_of(double *numbers, int64_t count, double floor, double factor)
{
    four parts[LOG_BLOCK], exponents[LOG_BLOCK], ratios[LOG_BLOCK], squares[LOG_BLOCK], totals[LOG_BLOCK];
    for (int i = 0; i < LOG_BLOCK; i++) parts[i] = (four){floor, floor, floor, floor};
    memcpy(parts, numbers, (size_t)count * sizeof *numbers);
    for (int i = 0; i < LOG_BLOCK; i++) {
        const four_bits is_more = parts[i] > floor, least = (four_bits)(four){floor, floor, floor, floor};
        const four_bits bits = ((four_bits)parts[i] & is_more) | (least & ~is_more);
        const four part = (four)((bits & 0x000fffffffffffff) | 0x3ff0000000000000);
        const four above = (four)((part > 1.4142135623730951) & (four_bits)(four){1, 1, 1, 1});
        const four scaled = part * (1 - 0.5 * above);
        /* 2**52 and it */
        exponents[i] = (four)(bits >> 52 | 0x4330000000000000) - (4503599627370496.0 + 1023) + above;
        ratios[i] = (scaled - 1) / (scaled + 1), squares[i] = ratios[i] * ratios[i], totals[i] = (four){0};
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
            for (int64_t i = 0; i < count; i += SIDE_BY_SIDE * LOG_BLOCK)
                (sound_uses_avx2 ? logarithms_avx2 : logarithms_plain)(
                    (double *)numbers.buf + i, count - i < SIDE_BY_SIDE * LOG_BLOCK ? count - i : SIDE_BY_SIDE * LOG_BLOCK, floor,
                    factor);
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

/* --- convolve --- */

struct convolution {
    struct plan plan;        /* of the transform: length, points, roots */
    const float *samples, *response;
    double *target;          /* [count]: from number `first` of the convolution on */
    int64_t count, taps, part, first;
};

/* The samples that are the real or the imaginary part of each lane, `size` of them, with zeros
 * behind. */
ALWAYS_INLINE void lay(const struct convolution *task, const float *line, int64_t count, int64_t from, int64_t size, four *into)
{
    for (int64_t i = 0; i < task->plan.length; i++, into += 2) {
        *into = (four){0};
        for (int lane = 0; i < size && lane < SIDE_BY_SIDE; lane++) {
            const int64_t place = from + lane * size + i;
            if (place < count) (*into)[lane] = line[place];
        }
    }
}

/* `at`: the number of a lane's first result in the target. */
ALWAYS_INLINE void add_lane(const struct convolution *task, const four *results, int lane, int64_t at)
{
    const int64_t length = task->plan.length, low = at < 0 ? -at : 0;
    const int64_t high = task->count - at < length ? task->count - at : length;
    const double share = 1.0 / (double)length;
    for (int64_t i = low; i < high; i++) task->target[at + i] += results[2 * i][lane] * share;
}

/* The blocks of the sound from `begin` on, four as real parts and four as imaginary ones, by each
 * part of the response. */
ALWAYS_INLINE void add_blocks(const struct convolution *task, int64_t begin, const struct number *responses, struct number *memory)
{
    const int64_t length = task->plan.length, block = length - task->part + 1;
    struct number *one = memory, *other = memory + length, *kept = memory + 2 * length;
    lay(task, task->samples, task->count, begin, block, &one->re);
    lay(task, task->samples, task->count, begin + SIDE_BY_SIDE * block, block, &one->im);
    memcpy(kept, transformed(&task->plan, one, other), (size_t)length * sizeof *kept);
    for (int64_t number = 0; number * task->part < task->taps; number++) {
        const struct number *response = responses + number / SIDE_BY_SIDE * length;
        const int64_t of_four = number % SIDE_BY_SIDE;
        /* real and imaginary exchanged: the transform back */
        for (int64_t k = 0; k < length; k++) {
            const double re = response[k].re[of_four], im = response[k].im[of_four];
            one[k].re = kept[k].re * im + kept[k].im * re, one[k].im = kept[k].re * re - kept[k].im * im;
        }
        const struct number *made = transformed(&task->plan, one, other);
        for (int lane = 0; lane < 2 * SIDE_BY_SIDE; lane++) {
            const int64_t from = begin + lane * block;
            if (from < task->count)
                add_lane(task, lane < SIDE_BY_SIDE ? &made->im : &made->re, lane % SIDE_BY_SIDE, from + number * task->part - task->first);
        }
    }
}

ALWAYS_INLINE void convolve_all(const struct convolution *task, struct number *memory)
{
    const int64_t length = task->plan.length, block = length - task->part + 1;
    struct number *into = memory + 3 * length;
    for (int64_t begin = 0; begin < task->taps; begin += SIDE_BY_SIDE * task->part, into += length) {
        lay(task, task->response, task->taps, begin, task->part, &memory->re);
        for (int64_t i = 0; i < length; i++) memory[i].im = (four){0};
        memcpy(into, transformed(&task->plan, memory, memory + length), (size_t)length * sizeof *into);
    }
    for (int64_t begin = 0; begin < task->count; begin += 2 * SIDE_BY_SIDE * block)
        add_blocks(task, begin, memory + 3 * length, memory);
}

static void convolve_plain(const struct convolution *task, struct number *memory)
{
    convolve_all(task, memory);
}

WITH_AVX2 static void convolve_avx2(const struct convolution *task, struct number *memory)
{
    convolve_all(task, memory);
}

const char convolve_doc[] =
"convolve(samples, response, target, roots, part, first)\n\n"
"Add the convolution of ``samples`` and ``response``, both float32, to ``target``, float64, from number ``first`` on: as many numbers as\n"
"there are samples. ``roots``: float64 [n, 2], the roots of 1; the response is taken in parts of ``part`` numbers, at most n.";

PyObject *convolve(PyObject *self, PyObject *arguments)
{
    struct convolution task;
    Py_buffer buffers[4];
    PyObject *samples, *response, *target, *roots;
    long long part, first;
    int is_made = 0;
    (void)self;
    memset(&task, 0, sizeof task), memset(buffers, 0, sizeof buffers);
    if (!PyArg_ParseTuple(arguments, "OOOOLL:convolve", &samples, &response, &target, &roots, &part, &first)) return NULL;
    if (take_array(samples, 'f', 1, 0, buffers) && take_array(response, 'f', 1, 0, buffers + 1)
        && take_array(target, 'd', 1, 1, buffers + 2) && take_array(roots, 'd', 2, 0, buffers + 3)) {
        task.samples = buffers[0].buf, task.response = buffers[1].buf, task.target = buffers[2].buf, task.plan.roots = buffers[3].buf;
        task.count = buffers[0].shape[0], task.taps = buffers[1].shape[0], task.part = part, task.first = first;
        const int64_t length = task.plan.length = buffers[3].shape[0];
        const int fits = length > 0 && length <= LENGTH_MAX && buffers[3].shape[1] == 2 && part > 0 && part <= length && first >= 0
            && first <= INT32_MAX && buffers[2].shape[0] == task.count && task.count <= COUNT_MAX && task.taps <= TAPS_MAX;
        if (!fits || !find_radices(&task.plan, length))
            PyErr_SetString(PyExc_ValueError, "samples, a response or parts that do not fit, or a prime factor above 31");
        else {
            const int64_t fours = (task.taps + SIDE_BY_SIDE * part - 1) / (SIDE_BY_SIDE * part);
            struct number *memory = aligned_alloc(sizeof(four), (size_t)(3 + fours) * (size_t)length * sizeof *memory);
            if (memory) {
                Py_BEGIN_ALLOW_THREADS
                (sound_uses_avx2 ? convolve_avx2 : convolve_plain)(&task, memory);
                Py_END_ALLOW_THREADS
                is_made = 1;
            } else
                PyErr_NoMemory();
            free(memory);
        }
    }
    for (int i = 4; i--;) PyBuffer_Release(buffers + i);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}
