/* Levels of pixels: counted, and changed by those around. Worker process.
 *
 *     count_levels  how many pixels of each channel have each level
 *     sharpen       each pixel is moved away from the mean of its neighbours, or towards it
 *
 * `augment/tone.py` does the same without this extension, in more time.
 *
 * Invariant: nothing is read or written outside of the buffers, whatever the arguments are.
 */
#include "_pixels_parts.h"

#include <string.h>

enum { LEVELS = 256, FACTOR_BITS = 14, FACTOR_MAX = 10 << FACTOR_BITS, SMOOTH_SUM = 13, SMOOTH_CENTRE = 5 };

/* --- count_levels --- */

/* Two counts of each level, for every other pixel: a run of one level need not wait for itself. */
static void count(const struct image *image, uint32_t *counts)
{
    uint32_t found[2][CHANNELS_MAX][LEVELS] = {{{0}}};
    for (Py_ssize_t row = 0; row < image->height; row++) {
        const uint8_t *pixel = image->pixels + row * image->stride;
        for (Py_ssize_t column = 0; column < image->width; column++)
            for (Py_ssize_t channel = 0; channel < image->channels; channel++) found[column & 1][channel][*pixel++]++;
    }
    for (Py_ssize_t channel = 0; channel < image->channels; channel++)
        for (int i = 0; i < LEVELS; i++) counts[channel * LEVELS + i] = found[0][channel][i] + found[1][channel][i];
}

const char count_levels_doc[] =
"count_levels(pixels, counts)\n\n"
"Write into ``counts``, uint32 [channels, 256], how many pixels of each channel have each level.";

PyObject *count_levels(PyObject *self, PyObject *arguments)
{
    struct image image;
    Py_buffer counts;
    PyObject *pixels, *into;
    int is_made = 0;
    (void)self;
    memset(&image, 0, sizeof image), memset(&counts, 0, sizeof counts);
    if (!PyArg_ParseTuple(arguments, "OO:count_levels", &pixels, &into)) return NULL;
    if (take_image(pixels, 0, &image) && PyObject_GetBuffer(into, &counts, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0) {
        if (counts.ndim != 2 || counts.itemsize != 4 || counts.shape[0] != image.channels || counts.shape[1] != LEVELS)
            PyErr_SetString(PyExc_ValueError, "counts are uint32 [channels, 256]");
        else {
            Py_BEGIN_ALLOW_THREADS
            count(&image, counts.buf);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    PyBuffer_Release(&counts), release_image(&image);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

/* --- sharpen --- */

/* The sum of the nine pixels, the middle one five times, is 13 times their mean. A quotient by 13
 * is a product, which is exact up to 13 * 255 + 12. */
static inline uint8_t sharpened(int32_t middle, int32_t sum, int32_t factor)
{
    const int32_t rest = (1 << FACTOR_BITS) - factor, half = SMOOTH_SUM << (FACTOR_BITS - 1);
    int32_t value = (factor * SMOOTH_SUM * middle + rest * sum + half) >> FACTOR_BITS;
    const int32_t most = SMOOTH_SUM * 255;
    value = value < 0 ? 0 : value > most ? most : value;
    return (uint8_t)(value * 5042 >> 16);
}

FOR_EACH_PROCESSOR
static void sharpen_row(const uint8_t *above, const uint8_t *row, const uint8_t *below, uint8_t *into, Py_ssize_t length,
                        Py_ssize_t channels, int32_t factor)
{
    for (Py_ssize_t i = channels; i < length - channels; i++) {
        int32_t sum = above[i - channels] + above[i] + above[i + channels];
        sum += row[i - channels] + SMOOTH_CENTRE * row[i] + row[i + channels];
        sum += below[i - channels] + below[i] + below[i + channels];
        into[i] = sharpened(row[i], sum, factor);
    }
}

static void sharpen_rows(const struct image *from, const struct image *into, int32_t factor)
{
    const Py_ssize_t length = from->width * from->channels;
    for (Py_ssize_t y = 0; y < from->height; y++) {
        const uint8_t *row = from->pixels + y * from->stride;
        uint8_t *made = into->pixels + y * into->stride;
        memcpy(made, row, (size_t)length); /* the edges stay */
        if (y > 0 && y < from->height - 1)
            sharpen_row(row - from->stride, row, row + from->stride, made, length, from->channels, factor);
    }
}

const char sharpen_doc[] =
"sharpen(source, target, factor)\n\n"
"Write ``factor`` of each pixel and the rest of 1 of the mean of the nine around it (its own counts five times) into ``target``, which\n"
"has the same shape and other memory. ``factor``: 0 to 10, in 1/2**14. Pixels at the edge stay.";

PyObject *sharpen(PyObject *self, PyObject *arguments)
{
    struct image from, into;
    PyObject *source, *target;
    int factor, is_made = 0;
    (void)self;
    memset(&from, 0, sizeof from), memset(&into, 0, sizeof into);
    if (!PyArg_ParseTuple(arguments, "OOi:sharpen", &source, &target, &factor)) return NULL;
    if (take_image(source, 0, &from) && take_image(target, PyBUF_WRITABLE, &into)) {
        if (from.channels != into.channels || from.height != into.height || from.width != into.width || factor < 0
            || factor > FACTOR_MAX)
            PyErr_SetString(PyExc_ValueError, "images of other shapes, or a factor beyond 10");
        else {
            Py_BEGIN_ALLOW_THREADS
            sharpen_rows(&from, &into, factor);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    release_image(&into), release_image(&from);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}
