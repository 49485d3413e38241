/* Sound at another rate: each new sample is a weighted sum of samples. Worker process.
 *
 * `_sound_spectra.c` has spectra. `sound/resample.py` says which weights; it does the same without
 * this extension, in more time.
 *
 * Invariant: nothing is read or written outside of the buffers, whatever the arguments are.
 */
#include "_sound_parts.h"

#include <stdlib.h>
#include <string.h>

enum { LANES = 16, RATE_BITS = 24, PLACE_BITS = 38, RATIO_MAX = 256, TAPS_MAX = 1 << 16 };
/* At once: new samples at most, and about so many of the file, which with their weights fit into 48
 * KiB, a level-1 cache. */
enum { BLOCK = 2048, LINE = 3600 };

int sound_uses_avx2;
static int has_avx2, has_avx512;

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

/* Write sums of `taps` products with the same weights, of the samples from 0, `apart`, 2 * `apart`,
 * ... on. */
typedef void make_sums(const double *samples, int64_t apart, const double *weights, int64_t taps, int64_t count, double *sums);

static const struct maker {
    make_sums *make;
    int64_t at_once; /* sums that share what is read of the weights */
} *maker;

/* Of sixteen sums of every sixteenth product: in one order, whatever the width of vectors. */
ALWAYS_INLINE double total_four(const four *sums)
{
    const four all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

ALWAYS_INLINE double total_eight(const eight *sums)
{
    const eight both = sums[0] + sums[1];
    const four low = {both[0], both[1], both[2], both[3]}, high = {both[4], both[5], both[6], both[7]}, all = low + high;
    return (all[0] + all[2]) + (all[1] + all[3]);
}

#define MAKE_SUMS(name, target, vector, at_once)                                                                              \
    ALWAYS_INLINE void name##_of(const double *samples, int64_t apart, const double *weights, int64_t taps, int count, double *sums) \
    {                                                                                                                         \
        enum { WIDTH = sizeof(vector) / sizeof(double), PARTS = LANES / WIDTH };                                              \
        vector parts[at_once][PARTS];                                                                                         \
        memset(parts, 0, sizeof parts);                                                                                       \
        for (int64_t i = 0; i < taps; i += LANES)                                                                             \
            for (int part = 0; part < PARTS; part++) {                                                                        \
                const vector weight = *(const vector##_loose *)(weights + i + part * WIDTH);                                  \
                for (int n = 0; n < count; n++)                                                                               \
                    parts[n][part] += *(const vector##_loose *)(samples + n * apart + i + part * WIDTH) * weight;             \
            }                                                                                                                 \
        for (int n = 0; n < count; n++) sums[n] = total_##vector(parts[n]);                                                   \
    }                                                                                                                         \
    target static void name(                                                                                                  \
        const double *samples, int64_t apart, const double *weights, int64_t taps, int64_t count, double *sums                \
    )                                                                                                                         \
    {                                                                                                                         \
        for (; count >= at_once; count -= at_once, samples += at_once * apart, sums += at_once)                               \
            name##_of(samples, apart, weights, taps, at_once, sums);                                                          \
        for (; count; count--, samples += apart, sums++) name##_of(samples, apart, weights, taps, 1, sums);                   \
    }                                                                                                                         \
    static const struct maker by_##name = {name, at_once};

MAKE_SUMS(plain, , four, 2)
#ifdef HAS_AVX2
MAKE_SUMS(avx2, WITH_AVX2, four, 3)
MAKE_SUMS(avx512, WITH_AVX512, eight, 4)
#else
#define by_avx2 by_plain
#define by_avx512 by_plain
#endif

/* Copy samples of one channel, from number `from` on, as float64; zeros where there are none. */
static void fill(const struct resampling *task, double *line, int64_t from, int64_t length, int64_t channel)
{
    const int64_t next = task->channels, left = task->count_in - from;
    const int64_t begin = from >= 0 ? 0 : -from < length ? -from : length, end = left < begin ? begin : left < length ? left : length;
    memset(line, 0, (size_t)length * sizeof *line);
    for (int64_t i = begin; i < end; i++) line[i] = task->samples[(from + i) * next + channel];
}

static void block(const struct resampling *task, double *line, int64_t begin, int64_t end, int64_t channel)
{
    const int64_t half = task->taps / 2, lowest = begin * task->down / task->up - half + 1, is_every = task->phases == task->up;
    const int64_t step = task->down / task->up, rest_of_step = task->down - step * task->up;
    /* `more` phases have one more */
    const int64_t each = (end - begin) / task->up, more = (end - begin) - each * task->up;
    const int64_t calls = !is_every ? end - begin : each ? task->up : more;
    int64_t whole = begin * task->down / task->up, part = begin * task->down - whole * task->up;
    double sums[BLOCK];
    fill(task, line, lowest - task->first, (end - 1) * task->down / task->up + half + 1 - lowest, channel);
    for (int64_t n = 0; n < calls; n++) {
        const int64_t phase = is_every ? part : part * task->phases / task->up, rest = part * task->phases - phase * task->up;
        const int64_t count = is_every ? each + (n < more) : 1;
        const double *samples = line + (whole - half + 1 - lowest), *weights = task->kernel + phase * task->taps;
        float *into = task->target + (begin + n - task->start) * task->channels + channel;
        maker->make(samples, task->down, weights, task->taps, count, sums);
        if (rest) {
            maker->make(samples, 0, weights + task->taps, task->taps, 1, sums + 1);
            sums[0] += (sums[1] - sums[0]) * ((double)rest / (double)task->up);
        }
        for (int64_t i = 0; i < count; i++) into[i * task->up * task->channels] = (float)sums[i];
        whole += step, part += rest_of_step;
        if (part >= task->up) part -= task->up, whole++;
    }
}

/* How many new samples are made at once: whole groups of those that share weights, if so many have
 * room. */
static int64_t block_length(const struct resampling *task)
{
    const int64_t fitting = LINE * task->up / task->down, room = fitting > BLOCK ? BLOCK : fitting > 1 ? fitting : 1;
    const int64_t group = maker->at_once * task->up;
    return room > group ? room - room % group : room;
}

/* Returns 0: no memory. */
static int resample_blocks(const struct resampling *task)
{
    const int64_t length = block_length(task), end = task->start + task->count;
    double *line = malloc((size_t)((length * task->down / task->up + 2 + task->taps) * (int64_t)sizeof *line));
    if (!line) return 0;
    for (int64_t channel = 0; channel < task->channels; channel++)
        for (int64_t begin = task->start; begin < end; begin += length)
            block(task, line, begin, begin + length < end ? begin + length : end, channel);
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

PyDoc_STRVAR(use_vectors_doc,
"use_vectors(bits) -> int\n\n"
"Compute with vectors of at most so many bits: 512 (AVX-512), 256 (AVX2) or 128. The default is what the processor has. Returns which it\n"
"is from now on. The bytes are the same.");

static PyObject *use_vectors(PyObject *self, PyObject *bits)
{
    (void)self;
    const long most = PyLong_AsLong(bits);
    if (most == -1 && PyErr_Occurred()) return NULL;
    const int has_512 = has_avx512 && most >= 512;
    sound_uses_avx2 = has_avx2 && most >= 256;
    maker = has_512 ? &by_avx512 : sound_uses_avx2 ? &by_avx2 : &by_plain;
    return PyLong_FromLong(has_512 ? 512 : sound_uses_avx2 ? 256 : 128);
}

static PyMethodDef METHODS[] = {
    {"combine", combine, METH_VARARGS, combine_doc},
    {"convolve", convolve, METH_VARARGS, convolve_doc},
    {"logarithms", logarithms, METH_VARARGS, logarithms_doc},
    {"resample", resample, METH_VARARGS, resample_doc},
    {"spectra", spectra, METH_VARARGS, spectra_doc},
    {"use_vectors", use_vectors, METH_O, use_vectors_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_sound", "Sound made of sound, in float64.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sound(void)
{
#ifdef HAS_AVX2
    sound_uses_avx2 = has_avx2 = __builtin_cpu_supports("avx2") != 0;
    has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") != 0;
#endif
    maker = has_avx512 ? &by_avx512 : has_avx2 ? &by_avx2 : &by_plain;
    return PyModule_Create(&MODULE);
}
