/* Sound at another rate: each new sample is a weighted sum of samples. Worker process.
 *
 * `_sound_spectra.c` has spectra. `sound/resample.py` says which weights; it does the same without this extension, in more time.
 *
 * Invariant: nothing is read or written outside of the buffers, whatever the arguments are.
 */
#include "_sound_parts.h"

#include <stdlib.h>
#include <string.h>

enum { LANES = 16, RATE_BITS = 24, PLACE_BITS = 38, RATIO_MAX = 256, BLOCK = 2048, TAPS_MAX = 1 << 16 };

int sound_uses_avx2;
static int has_avx2;

int take_array(PyObject *object, char type, int dimensions, int is_writable, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_writable ? PyBUF_WRITABLE : 0)) < 0) return 0;
    const char *format = buffer->format ? buffer->format : "B";
    if (buffer->ndim == dimensions && format[0] == type && !format[1]) return 1;
    PyErr_Format(PyExc_ValueError, "an array has %d dimensions of type %c, not %d of %s", dimensions, type, buffer->ndim, format);
    return 0;
}

/* --- resample --- */

struct resampling {
    const float *samples;    /* [count_in, channels] */
    float *target;           /* [count, channels] */
    const double *kernel;    /* [phases + 1, taps] */
    int64_t count_in, count, channels, phases, taps;
    int64_t up, down;        /* sample n of the result is at the place n * down / up of the file */
    int64_t first, start;    /* the places in the file, and in the result, of the first of each */
};

/* Sixteen sums of every sixteenth product. */
struct sums {
    four a, b, c, d;
};

ALWAYS_INLINE void add_products(struct sums *sums, const double *samples, const double *weights)
{
    const four_loose *x = (const four_loose *)samples, *w = (const four_loose *)weights;
    sums->a += x[0] * w[0], sums->b += x[1] * w[1], sums->c += x[2] * w[2], sums->d += x[3] * w[3];
}

ALWAYS_INLINE double total(const struct sums *sums)
{
    const four all = (sums->a + sums->c) + (sums->b + sums->d);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

/* The sum of the products. */
ALWAYS_INLINE double dot(const double *samples, const double *weights, int64_t taps)
{
    struct sums sums = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < taps; i += LANES) add_products(&sums, samples + i, weights + i);
    return total(&sums);
}

/* The samples begin, begin + up, ...: they have the same weights. */
ALWAYS_INLINE void one_phase(const struct resampling *task, const double *samples, const double *weights, float *into, int64_t count)
{
    const int64_t next = task->up * task->channels;
    for (; count > 1; count -= 2, samples += 2 * task->down, into += 2 * next) {
        struct sums one = {{0}, {0}, {0}, {0}}, other = one;
        for (int64_t i = 0; i < task->taps; i += LANES) {
            add_products(&one, samples + i, weights + i);
            add_products(&other, samples + task->down + i, weights + i);
        }
        into[0] = (float)total(&one), into[next] = (float)total(&other);
    }
    if (count) into[0] = (float)dot(samples, weights, task->taps);
}

ALWAYS_INLINE void block(const struct resampling *task, double *line, int64_t begin, int64_t end, int64_t channel)
{
    const int64_t half = task->taps / 2, lowest = begin * task->down / task->up - half + 1, is_every = task->phases == task->up;
    const int64_t length = (end - 1) * task->down / task->up + half + 1 - lowest;
    const int64_t before = task->first - lowest, behind = before + task->count_in; /* of these, samples are there */
    for (int64_t i = 0; i < before && i < length; i++) line[i] = 0;
    for (int64_t i = before > 0 ? before : 0; i < behind && i < length; i++)
        line[i] = task->samples[(i - before) * task->channels + channel];
    for (int64_t i = behind > 0 ? behind : 0; i < length; i++) line[i] = 0;
    for (int64_t n = begin; n < end && (!is_every || n < begin + task->up); n++) {
        const int64_t place = n * task->down, whole = place / task->up, part = (place - whole * task->up) * task->phases;
        const int64_t phase = part / task->up, rest = part - phase * task->up;
        const double *samples = line + (whole - half + 1 - lowest), *weights = task->kernel + phase * task->taps;
        float *into = task->target + (n - task->start) * task->channels + channel;
        if (is_every)
            one_phase(task, samples, weights, into, (end - 1 - n) / task->up + 1);
        else {
            double sum = dot(samples, weights, task->taps);
            if (rest) sum += (dot(samples, weights + task->taps, task->taps) - sum) * ((double)rest / (double)task->up);
            *into = (float)sum;
        }
    }
}

static void block_plain(const struct resampling *task, double *line, int64_t begin, int64_t end, int64_t channel)
{
    block(task, line, begin, end, channel);
}

WITH_AVX2 static void block_avx2(const struct resampling *task, double *line, int64_t begin, int64_t end, int64_t channel)
{
    block(task, line, begin, end, channel);
}

/* Returns 0: no memory. */
static int resample_blocks(const struct resampling *task)
{
    double *line = malloc((size_t)((BLOCK * task->down / task->up + 2 + task->taps) * (int64_t)sizeof *line));
    if (!line) return 0;
    const int64_t end = task->start + task->count;
    for (int64_t channel = 0; channel < task->channels; channel++)
        for (int64_t begin = task->start; begin < end; begin += BLOCK)
            (sound_uses_avx2 ? block_avx2 : block_plain)(task, line, begin, begin + BLOCK < end ? begin + BLOCK : end, channel);
    free(line);
    return 1;
}

static int is_possible(const struct resampling *task)
{
    const int64_t rate_max = 1 << RATE_BITS, place_max = (int64_t)1 << PLACE_BITS;
    return task->up > 0 && task->up <= rate_max && task->down > 0 && task->down <= rate_max && task->down <= RATIO_MAX * task->up
        && task->phases > 0 && task->phases <= rate_max && task->taps > 0 && task->taps <= TAPS_MAX && task->taps % LANES == 0
        && task->start >= 0 && task->start <= place_max && task->count <= place_max && task->first >= -place_max
        && task->first <= place_max;
}

PyDoc_STRVAR(resample_doc,
"resample(samples, target, kernel, up, down, first, start)\n\n"
"Write the samples from ``start`` on of a file at another rate into ``target``, float32 [count, channels]: number n is at the place\n"
"n * down / up of the file. ``samples``: float32 [some, channels], from place ``first`` of the file on, with zeros around; ``kernel``:\n"
"float64 [phases + 1, taps], the weights of a place between two samples, for each phase.");

static PyObject *resample(PyObject *self, PyObject *arguments)
{
    struct resampling task;
    Py_buffer samples, target, kernel;
    PyObject *from, *into, *weights;
    long long up, down, first, start;
    int is_made = 0;
    (void)self;
    memset(&samples, 0, sizeof samples), memset(&target, 0, sizeof target), memset(&kernel, 0, sizeof kernel);
    if (!PyArg_ParseTuple(arguments, "OOOLLLL:resample", &from, &into, &weights, &up, &down, &first, &start)) return NULL;
    if (take_array(from, 'f', 2, 0, &samples) && take_array(into, 'f', 2, 1, &target) && take_array(weights, 'd', 2, 0, &kernel)) {
        task = (struct resampling){
            samples.buf, target.buf, kernel.buf, samples.shape[0], target.shape[0], target.shape[1], kernel.shape[0] - 1,
            kernel.shape[1], up, down, first, start,
        };
        if (samples.shape[1] != target.shape[1] || !is_possible(&task))
            PyErr_SetString(PyExc_ValueError, "other channels, or rates, places or weights that do not fit");
        else {
            Py_BEGIN_ALLOW_THREADS
            is_made = resample_blocks(&task);
            Py_END_ALLOW_THREADS
            if (!is_made) PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&kernel), PyBuffer_Release(&target), PyBuffer_Release(&samples);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_avx2_doc,
"use_avx2(is_used) -> bool\n\n"
"Compute with AVX2, which is the default where the processor has it, or without. Returns which it is from now on. The bytes are the same.");

static PyObject *use_avx2(PyObject *self, PyObject *is_used)
{
    (void)self;
    sound_uses_avx2 = has_avx2 && PyObject_IsTrue(is_used);
    return PyBool_FromLong(sound_uses_avx2);
}

static PyMethodDef METHODS[] = {
    {"combine", combine, METH_VARARGS, combine_doc},
    {"convolve", convolve, METH_VARARGS, convolve_doc},
    {"logarithms", logarithms, METH_VARARGS, logarithms_doc},
    {"resample", resample, METH_VARARGS, resample_doc},
    {"spectra", spectra, METH_VARARGS, spectra_doc},
    {"use_avx2", use_avx2, METH_O, use_avx2_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_sound", "Sound made of sound, in float64.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sound(void)
{
#ifdef HAS_AVX2
    sound_uses_avx2 = has_avx2 = __builtin_cpu_supports("avx2") != 0;
#endif
    return PyModule_Create(&MODULE);
}
