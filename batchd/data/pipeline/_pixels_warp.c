/* Places of pixels anywhere: those of warp and remap. Worker process.
 *
 *     warp    each new pixel is that at its centre's source, in steps of 1/2^32 of a pixel; rows
 *             that are only shifted, many at once
 *     remap   the same, with a place for each new pixel, in 1/2^11 of a pixel
 *     warp_parts  as warp, of a canvas that has several images in it, and is never made itself
 *
 * `image/resample.py` and `augment/warp.py` say which places; the former does the same without this
 * extension, in more time.
 *
 * Invariant: nothing is read outside of the buffers, whatever the places are.
 */
#include "_pixels_parts.h"

#include <stdlib.h>

#include <string.h>

enum { FRACTION_BITS = 11, PLACE_BITS = 32, WEIGHT_BITS = 2 * FRACTION_BITS };

/* --- warp --- */

struct warp {
    /* factors of x, y and 1, in 1/2^PLACE_BITS of a pixel: where a new pixel comes from */
    int64_t across[3], down[3];
    uint8_t fill[CHANNELS_MAX];
};

ALWAYS_INLINE const uint8_t *pixel_at(const struct image *from, const struct warp *warp, int64_t x, int64_t y)
{
    const int is_inside = x >= 0 && x < from->width && y >= 0 && y < from->height;
    return is_inside ? from->pixels + y * from->stride + x * from->channels : warp->fill;
}

static inline int32_t fraction(int64_t place)
{
    return (int32_t)(place >> (PLACE_BITS - FRACTION_BITS)) & ((1 << FRACTION_BITS) - 1);
}

/* `right` and `lower`: the parts of the pixels there, in 1/2^FRACTION_BITS. */
ALWAYS_INLINE uint8_t blended(int32_t upper_left, int32_t upper_right, int32_t lower_left, int32_t lower_right, int32_t right,
                              int32_t lower)
{
    const int32_t upper = (upper_left << FRACTION_BITS) + right * (upper_right - upper_left);
    const int32_t under = (lower_left << FRACTION_BITS) + right * (lower_right - lower_left);
    return (uint8_t)(((upper << FRACTION_BITS) + lower * (under - upper) + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS);
}

ALWAYS_INLINE void between(const struct image *from, const struct warp *warp, int64_t x, int64_t y, uint8_t *into,
                           Py_ssize_t channels)
{
    const int64_t left = x >> PLACE_BITS, top = y >> PLACE_BITS;
    const int32_t right = fraction(x), lower = fraction(y);
    const uint8_t *upper_left, *upper_right, *lower_left, *lower_right;
    if (left >= 0 && left < from->width - 1 && top >= 0 && top < from->height - 1) {
        upper_left = from->pixels + top * from->stride + left * channels;
        upper_right = upper_left + channels;
        lower_left = upper_left + from->stride;
        lower_right = lower_left + channels;
    } else if (left < -1 || left >= from->width || top < -1 || top >= from->height) {
        for (Py_ssize_t channel = 0; channel < channels; channel++) into[channel] = warp->fill[channel];
        return;
    } else {
        upper_left = pixel_at(from, warp, left, top);
        upper_right = pixel_at(from, warp, left + 1, top);
        lower_left = pixel_at(from, warp, left, top + 1);
        lower_right = pixel_at(from, warp, left + 1, top + 1);
    }
    for (Py_ssize_t channel = 0; channel < channels; channel++)
        into[channel] = blended(upper_left[channel], upper_right[channel], lower_left[channel], lower_right[channel], right, lower);
}

/* Whatever the factors are: what does not fit into 64 bits, wraps. */
static inline int64_t place(int64_t factor, Py_ssize_t times, int64_t begin)
{
    return (int64_t)((uint64_t)factor * (uint64_t)times + (uint64_t)begin);
}

/* Where a row is shifted, as by a translation and by a shear along the rows, its pixels come from
 * neighbours, by one fraction. */
FOR_EACH_PROCESSOR
static void blend_row(const uint8_t *upper, const uint8_t *under, uint8_t *into, int64_t length, Py_ssize_t channels, int32_t right,
                      int32_t lower)
{
    for (int64_t i = 0; i < length; i++)
        into[i] = blended(upper[i], upper[i + channels], under[i], under[i + channels], right, lower);
}

/* Make those pixels of a shifted row that lie between four of the image: from `first` to `end`.
 * (x, y): where the row begins. */
static void shift_row(const struct image *from, int64_t x, int64_t y, const struct image *into, uint8_t *made, int64_t *first,
                      int64_t *end)
{
    const int64_t left = x >> PLACE_BITS, top = y >> PLACE_BITS;
    *first = left < 0 ? -left : 0;
    *end = from->width - 1 - left < into->width ? from->width - 1 - left : into->width;
    if (top < 0 || top >= from->height - 1 || *first >= *end) {
        *end = *first;
        return;
    }
    const Py_ssize_t channels = from->channels;
    const uint8_t *upper = from->pixels + top * from->stride + (left + *first) * channels;
    blend_row(upper, upper + from->stride, made + *first * channels, (*end - *first) * channels, channels, fraction(x), fraction(y));
}

/* Where rows are scaled, and neither turned nor slanted, all pixels of a row lie between the same
 * two rows, and those of a column between the same two columns: rows are blended first, then
 * columns, which makes the same numbers. */
struct columns {
    Py_ssize_t first, end;    /* the new columns that lie between two of the image */
    Py_ssize_t left, right;   /* the columns of the image that they need */
    /* of each: where its left pixel is in the blended row, and the part of the right one */
    int32_t *places, *parts;
    int32_t *blended, *made;
};

/* A pixel: as many of the numbers as it has channels. */
typedef int32_t four __attribute__((vector_size(CHANNELS_MAX * sizeof(int32_t))));
/* anywhere in an array */
typedef four four_loose __attribute__((aligned(sizeof(int32_t)), may_alias));

FOR_EACH_PROCESSOR
static void blend_rows(const uint8_t *upper, const uint8_t *under, int32_t *restrict into, int64_t length, int32_t lower)
{
    for (int64_t i = 0; i < length; i++) into[i] = (upper[i] << FRACTION_BITS) + lower * (under[i] - upper[i]);
}

/* What is too much in a pixel, the next one writes over. */
FOR_EACH_PROCESSOR
static void blend_columns(const struct columns columns, uint8_t *restrict into, Py_ssize_t channels)
{
    const Py_ssize_t count = columns.end - columns.first;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int32_t *at = columns.blended + columns.places[i];
        const four left = *(const four_loose *)at, right = *(const four_loose *)(at + channels);
        const four sum = (left << FRACTION_BITS) + columns.parts[i] * (right - left) + (1 << (WEIGHT_BITS - 1));
        *(four_loose *)(columns.made + i * channels) = sum >> WEIGHT_BITS;
    }
    for (Py_ssize_t i = 0; i < count * channels; i++) into[i] = (uint8_t)columns.made[i];
}

/* Find the columns; false where memory is short, or there are none: then each pixel is made by
 * itself. */
static int plan_columns(const struct image *from, const struct image *into, const struct warp *warp, struct columns *columns)
{
    const Py_ssize_t channels = from->channels;
    int64_t x = warp->across[2];
    for (Py_ssize_t column = 0; column < into->width; column++, x = place(warp->across[0], 1, x)) {
        const int64_t left = x >> PLACE_BITS;
        if (left < 0 || left >= from->width - 1) continue;
        if (columns->first == columns->end) {
            columns->first = column;
            columns->left = (Py_ssize_t)left;
        } else if (column != columns->end || left + 2 < columns->right)
            return 0; /* a place has wrapped */
        columns->end = column + 1;
        columns->right = (Py_ssize_t)left + 2;
    }
    const Py_ssize_t count = columns->end - columns->first, needed = (columns->right - columns->left) * channels;
    if (count <= 0 || needed <= 0) return 0;
    const size_t numbers = (size_t)(2 * count + needed + count * channels + 2 * CHANNELS_MAX);
    columns->places = calloc(numbers, sizeof(int32_t));
    if (columns->places == NULL) return 0;
    columns->parts = columns->places + count;
    columns->blended = columns->parts + count;
    columns->made = columns->blended + needed + CHANNELS_MAX;
    x = place(warp->across[0], columns->first, warp->across[2]);
    for (Py_ssize_t i = 0; i < count; i++, x = place(warp->across[0], 1, x)) {
        columns->places[i] = (int32_t)(((x >> PLACE_BITS) - columns->left) * channels);
        columns->parts[i] = fraction(x);
    }
    return 1;
}

/* Make the columns of a row that lie between four pixels; false if none do. */
static int scale_row(const struct image *from, const struct columns *columns, int64_t y, uint8_t *made)
{
    const int64_t top = y >> PLACE_BITS;
    if (top < 0 || top >= from->height - 1) return 0;
    const Py_ssize_t channels = from->channels;
    const uint8_t *upper = from->pixels + top * from->stride + columns->left * channels;
    blend_rows(upper, upper + from->stride, columns->blended, (columns->right - columns->left) * channels, fraction(y));
    blend_columns(*columns, made + columns->first * channels, channels);
    return 1;
}

ALWAYS_INLINE void warp_rows(const struct image *from, const struct image *into, const struct warp *warp, int is_linear,
                             Py_ssize_t channels)
{
    const int is_upright = is_linear && warp->down[0] == 0, is_shifted = is_upright && warp->across[0] == (int64_t)1 << PLACE_BITS;
    struct columns columns = {0};
    const int is_scaled = is_upright && !is_shifted && warp->across[0] > 0 && warp->across[1] == 0 &&
                          plan_columns(from, into, warp, &columns);
    for (Py_ssize_t row = 0; row < into->height; row++) {
        int64_t x = place(warp->across[1], row, warp->across[2]), y = place(warp->down[1], row, warp->down[2]);
        uint8_t *made = into->pixels + row * into->stride;
        int64_t first = 0, end = 0;
        if (is_shifted) shift_row(from, x, y, into, made, &first, &end);
        if (is_scaled && scale_row(from, &columns, y, made)) first = columns.first, end = columns.end;
        for (Py_ssize_t column = 0; column < into->width; column++, made += channels) {
            if (column == first && first < end) { /* these are made */
                x = place(warp->across[0], (Py_ssize_t)(end - first), x);
                made += (end - first) * channels;
                column = (Py_ssize_t)end;
                if (end == into->width) break;
            }
            if (is_linear)
                between(from, warp, x, y, made, channels);
            else {
                const uint8_t *pixel = pixel_at(from, warp, x >> PLACE_BITS, y >> PLACE_BITS);
                for (Py_ssize_t channel = 0; channel < channels; channel++) made[channel] = pixel[channel];
            }
            x = place(warp->across[0], 1, x);
            y = place(warp->down[0], 1, y);
        }
    }
    if (is_scaled) free(columns.places);
}

/* --- remap --- */

ALWAYS_INLINE void remap_rows(const struct image *from, const struct image *into, const int32_t *places, const struct warp *warp,
                              int is_linear, Py_ssize_t channels)
{
    const int64_t unit = (int64_t)1 << (PLACE_BITS - FRACTION_BITS);
    for (Py_ssize_t row = 0; row < into->height; row++) {
        uint8_t *made = into->pixels + row * into->stride;
        for (Py_ssize_t column = 0; column < into->width; column++, made += channels, places += 2) {
            const int64_t x = places[0] * unit, y = places[1] * unit;
            if (is_linear)
                between(from, warp, x, y, made, channels);
            else {
                const uint8_t *pixel = pixel_at(from, warp, x >> PLACE_BITS, y >> PLACE_BITS);
                for (Py_ssize_t channel = 0; channel < channels; channel++) made[channel] = pixel[channel];
            }
        }
    }
}

/* --- warp_parts --- */

enum { PARTS_MAX = 64 };

/* The images in a canvas of `size`, which has `ground` elsewhere. A row is made when a pixel of it
 * is needed, in `rows`: two of them, of the columns `first` to `end`. */
struct canvas {
    struct image images[PARTS_MAX], size;
    Py_ssize_t tops[PARTS_MAX], lefts[PARTS_MAX], count, first, end;
    int64_t made[2];
    uint8_t *rows[3], ground[CHANNELS_MAX]; /* the last row is one without an image */
};

static const uint8_t *canvas_row(struct canvas *canvas, int64_t y, Py_ssize_t channels)
{
    uint8_t *row = canvas->rows[y & 1];
    if (canvas->made[y & 1] == y) return row;
    canvas->made[y & 1] = y;
    memcpy(row, canvas->rows[2], (size_t)((canvas->end - canvas->first) * channels));
    for (Py_ssize_t i = 0; i < canvas->count; i++) {
        const struct image *image = &canvas->images[i];
        const int64_t line = y - canvas->tops[i];
        if (line < 0 || line >= image->height) continue;
        const Py_ssize_t left = canvas->lefts[i], right = left + image->width;
        const Py_ssize_t begin = left > canvas->first ? left : canvas->first, end = right < canvas->end ? right : canvas->end;
        if (begin < end)
            memcpy(row + (begin - canvas->first) * channels, image->pixels + line * image->stride + (begin - left) * channels,
                   (size_t)((end - begin) * channels));
    }
    return row;
}

static const uint8_t *canvas_pixel(const struct canvas *canvas, const struct warp *warp, int64_t x, int64_t y)
{
    if (x < 0 || x >= canvas->size.width || y < 0 || y >= canvas->size.height) return warp->fill;
    for (Py_ssize_t i = canvas->count; i-- > 0;) { /* the last one is on top */
        const struct image *image = &canvas->images[i];
        const int64_t column = x - canvas->lefts[i], line = y - canvas->tops[i];
        if (column >= 0 && column < image->width && line >= 0 && line < image->height)
            return image->pixels + line * image->stride + column * image->channels;
    }
    return canvas->ground;
}

/* The edges of the canvas, and what is outside. */
static void canvas_between(const struct canvas *canvas, const struct warp *warp, int64_t x, int64_t y, uint8_t *into,
                           Py_ssize_t channels)
{
    const int64_t left = x >> PLACE_BITS, top = y >> PLACE_BITS;
    if (left < -1 || left >= canvas->size.width || top < -1 || top >= canvas->size.height) {
        for (Py_ssize_t channel = 0; channel < channels; channel++) into[channel] = warp->fill[channel];
        return;
    }
    const uint8_t *upper_left = canvas_pixel(canvas, warp, left, top), *upper_right = canvas_pixel(canvas, warp, left + 1, top);
    const uint8_t *lower_left = canvas_pixel(canvas, warp, left, top + 1), *lower_right = canvas_pixel(canvas, warp, left + 1, top + 1);
    for (Py_ssize_t channel = 0; channel < channels; channel++)
        into[channel] = blended(upper_left[channel], upper_right[channel], lower_left[channel], lower_right[channel], fraction(x),
                                fraction(y));
}

/* Only of a warp that neither turns nor slants. Returns 0 where memory is short, or a place
 * wraps. */
static int warp_canvas(struct canvas *canvas, const struct image *into, const struct warp *warp)
{
    struct columns columns = {0};
    const Py_ssize_t channels = into->channels;
    if (!plan_columns(&canvas->size, into, warp, &columns)) return 0;
    canvas->first = columns.left, canvas->end = columns.right;
    const Py_ssize_t length = (canvas->end - canvas->first) * channels;
    canvas->rows[0] = malloc((size_t)(3 * length));
    if (canvas->rows[0] == NULL) {
        free(columns.places);
        return 0;
    }
    canvas->rows[1] = canvas->rows[0] + length, canvas->rows[2] = canvas->rows[1] + length;
    for (Py_ssize_t i = 0; i < length; i++) canvas->rows[2][i] = canvas->ground[i % channels];
    canvas->made[0] = canvas->made[1] = -1;
    for (Py_ssize_t row = 0; row < into->height; row++) {
        const int64_t y = place(warp->down[1], row, warp->down[2]), top = y >> PLACE_BITS;
        int64_t x = warp->across[2];
        uint8_t *made = into->pixels + row * into->stride;
        Py_ssize_t first = 0, end = 0;
        if (top >= 0 && top < canvas->size.height - 1) {
            const uint8_t *upper = canvas_row(canvas, top, channels), *under = canvas_row(canvas, top + 1, channels);
            first = columns.first, end = columns.end;
            blend_rows(upper, under, columns.blended, (columns.right - columns.left) * channels, fraction(y));
            blend_columns(columns, made + first * channels, channels);
        }
        for (Py_ssize_t column = 0; column < into->width; column++, x = place(warp->across[0], 1, x)) {
            if (column == first && first < end) { /* these are made */
                x = place(warp->across[0], end - first, x);
                column = end;
                if (end == into->width) break;
            }
            canvas_between(canvas, warp, x, y, made + column * channels, channels);
        }
    }
    free(canvas->rows[0]);
    free(columns.places);
    return 1;
}

/* --- what Python sees --- */

const char warp_parts_doc[] =
"warp_parts(parts, size, ground, target, across, down, fill) -> bool\n\n"
"As ``warp`` between four pixels, of a canvas of ``size`` (height, width) with ``ground`` where none of ``parts`` is: (image, top,\n"
"left) each, later ones on top. False, and nothing is said of ``target``, for a warp that turns or slants, and where memory is short.";

static int take_parts(PyObject *parts, struct canvas *canvas, Py_ssize_t channels)
{
    const Py_ssize_t count = PyTuple_Size(parts);
    if (count < 0) return 0;
    if (count > PARTS_MAX) return PyErr_SetString(PyExc_ValueError, "more images than a canvas may have"), 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pixels;
        if (!PyArg_ParseTuple(PyTuple_GetItem(parts, i), "Onn:warp_parts", &pixels, &canvas->tops[i], &canvas->lefts[i])) return 0;
        canvas->count = i + 1;
        if (!take_image(pixels, 0, &canvas->images[i])) return 0;
        if (canvas->images[i].channels != channels || canvas->tops[i] < -INT32_MAX || canvas->tops[i] > INT32_MAX
            || canvas->lefts[i] < -INT32_MAX || canvas->lefts[i] > INT32_MAX)
            return PyErr_SetString(PyExc_ValueError, "a part of other channels, or too far away"), 0;
    }
    return 1;
}

PyObject *warp_parts(PyObject *self, PyObject *arguments)
{
    struct image into;
    struct warp warp;
    struct canvas *canvas = calloc(1, sizeof *canvas);
    PyObject *parts, *target, *made = NULL;
    const char *ground, *fill;
    Py_ssize_t height, width, ground_length, fill_length;
    long long across[3], down[3];
    (void)self;
    memset(&into, 0, sizeof into);
    if (canvas == NULL) return PyErr_NoMemory();
    if (PyArg_ParseTuple(arguments, "O(nn)y#O(LLL)(LLL)y#:warp_parts", &parts, &height, &width, &ground, &ground_length, &target,
                         &across[0], &across[1], &across[2], &down[0], &down[1], &down[2], &fill, &fill_length)
        && take_image(target, PyBUF_WRITABLE, &into) && take_parts(parts, canvas, into.channels)) {
        if (fill_length != CHANNELS_MAX || ground_length != CHANNELS_MAX || height < 1 || width < 1 || height > INT32_MAX
            || width > INT32_MAX / CHANNELS_MAX)
            PyErr_SetString(PyExc_ValueError, "a canvas without pixels or with too many, or a fill that is not four bytes");
        else {
            int is_made = 0;
            for (int i = 0; i < 3; i++) warp.across[i] = across[i], warp.down[i] = down[i];
            memcpy(warp.fill, fill, CHANNELS_MAX), memcpy(canvas->ground, ground, CHANNELS_MAX);
            canvas->size.height = height, canvas->size.width = width, canvas->size.channels = into.channels;
            Py_BEGIN_ALLOW_THREADS
            if (down[0] == 0 && across[1] == 0 && across[0] > 0) is_made = warp_canvas(canvas, &into, &warp);
            Py_END_ALLOW_THREADS
            made = PyBool_FromLong(is_made);
        }
    }
    for (Py_ssize_t i = 0; i < canvas->count; i++) release_image(&canvas->images[i]);
    release_image(&into);
    free(canvas);
    return made;
}

const char warp_doc[] =
"warp(source, target, across, down, is_linear, fill)\n\n"
"Write into ``target`` what lies where ``across`` and ``down`` (factors of x, y and 1, in 1/2**32 of a pixel) say that its pixels come\n"
"from: the pixel there, or between the four around. ``fill``: four bytes, for what lies outside.";

PyObject *warp(PyObject *self, PyObject *arguments)
{
    struct image from, into;
    struct warp warp;
    PyObject *source, *target;
    const char *fill;
    Py_ssize_t fill_length;
    int is_linear, is_made = 0;
    long long across[3], down[3];
    (void)self;
    memset(&from, 0, sizeof from), memset(&into, 0, sizeof into);
    if (!PyArg_ParseTuple(arguments, "OO(LLL)(LLL)py#:warp", &source, &target, &across[0], &across[1], &across[2], &down[0],
                          &down[1], &down[2], &is_linear, &fill, &fill_length))
        return NULL;
    for (int i = 0; i < 3; i++) warp.across[i] = across[i], warp.down[i] = down[i];
    if (take_image(source, 0, &from) && take_image(target, PyBUF_WRITABLE, &into)) {
        if (from.channels != into.channels || fill_length != CHANNELS_MAX)
            PyErr_SetString(PyExc_ValueError, "other channels, or a fill that is not four bytes");
        else {
            memcpy(warp.fill, fill, CHANNELS_MAX);
            Py_BEGIN_ALLOW_THREADS
            if (from.channels == 3 && is_linear)
                warp_rows(&from, &into, &warp, 1, 3);
            else if (from.channels == 3)
                warp_rows(&from, &into, &warp, 0, 3);
            else if (from.channels == 1 && !is_linear)
                warp_rows(&from, &into, &warp, 0, 1);
            else
                warp_rows(&from, &into, &warp, is_linear, from.channels);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    release_image(&into), release_image(&from);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

const char remap_doc[] =
"remap(source, target, places, is_linear, fill)\n\n"
"Write into ``target`` what lies at ``places``, int32 [height, width, 2]: x and y of each of its pixels, in 1/2**11 of a pixel. Else as\n"
"``warp``.";

PyObject *remap(PyObject *self, PyObject *arguments)
{
    struct image from, into;
    struct warp warp;
    Py_buffer places;
    PyObject *source, *target, *at;
    const char *fill;
    Py_ssize_t fill_length;
    int is_linear, is_made = 0;
    (void)self;
    memset(&from, 0, sizeof from), memset(&into, 0, sizeof into), memset(&places, 0, sizeof places);
    if (!PyArg_ParseTuple(arguments, "OOOpy#:remap", &source, &target, &at, &is_linear, &fill, &fill_length)) return NULL;
    if (take_image(source, 0, &from) && take_image(target, PyBUF_WRITABLE, &into)
        && PyObject_GetBuffer(at, &places, PyBUF_C_CONTIGUOUS) == 0) {
        if (from.channels != into.channels || fill_length != CHANNELS_MAX || places.ndim != 3 || places.itemsize != 4
            || places.shape[0] != into.height || places.shape[1] != into.width || places.shape[2] != 2)
            PyErr_SetString(PyExc_ValueError, "other channels, a fill that is not four bytes, or places that are not int32 [height, width, 2]");
        else {
            memcpy(warp.fill, fill, CHANNELS_MAX);
            Py_BEGIN_ALLOW_THREADS
            if (from.channels == 3 && is_linear)
                remap_rows(&from, &into, places.buf, &warp, 1, 3);
            else
                remap_rows(&from, &into, places.buf, &warp, is_linear, from.channels);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    PyBuffer_Release(&places), release_image(&into), release_image(&from);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}
