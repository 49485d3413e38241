/* Masks of outlines: those of fill_polygon and fill_runs. Worker process.
 *
 *     fill_polygon   corners in pixels: the pixels inside, by the rule of pycocotools
 *     fill_runs      places down the columns at which runs of zeros and of ones end, in turn
 *
 * `sources/coco/outlines.py` says the rule, and does the same without this extension, in more time.
 *
 * Invariant: nothing is written outside of the mask, whatever the numbers are.
 */
#include "_pixels_parts.h"

#include <math.h>
#include <stdlib.h>

enum { STEPS = 5, MIDDLE = 2 };
static const double CORNER_MAX = 1 << 20;
/* Of all lines of a polygon. */
static const int64_t STEPS_MAX = 1 << 22;

struct mask {
    Py_buffer buffer;
    int64_t height, width;
};

/* The mask and its size, uint8 [height, width], C-contiguous; 0 after an error. */
static int take_mask(PyObject *object, Py_ssize_t height, Py_ssize_t width, struct mask *mask)
{
    if (PyObject_GetBuffer(object, &mask->buffer, PyBUF_WRITABLE) < 0) return 0;
    mask->height = height;
    mask->width = width;
    if (height > 0 && width > 0 && height <= INT32_MAX && width <= INT32_MAX && mask->buffer.len / height == width &&
        mask->buffer.len % height == 0)
        return 1;
    PyBuffer_Release(&mask->buffer);
    PyErr_SetString(PyExc_ValueError, "a mask is uint8 of height x width pixels");
    return 0;
}

/* Set the pixels from places[0] to places[1], from places[2] to places[3], and so on. */
static void fill(const struct mask *mask, const int64_t *places, Py_ssize_t count)
{
    const int64_t size = mask->height * mask->width;
    uint8_t *pixels = mask->buffer.buf;
    for (Py_ssize_t number = 0; number < count; number += 2) {
        const int64_t end = number + 1 < count ? places[number + 1] : size;
        int64_t place = places[number], column = place / mask->height, row = place % mask->height;
        for (; place < end; place++) {
            pixels[row * mask->width + column] = 1;
            if (++row == mask->height) {
                row = 0;
                column++;
            }
        }
    }
}

static int ascending(const void *one, const void *other)
{
    const int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

static inline int64_t floor_divided(int64_t value, int64_t by)
{
    const int64_t quotient = value / by;
    return quotient - (value % by < 0);
}

struct point {
    int64_t x, y;
};

static struct point corner_at(const double *corners, Py_ssize_t number)
{
    struct point point;
    int64_t *into[] = {&point.x, &point.y};
    for (int axis = 0; axis < 2; axis++) {
        const double value = corners[2 * number + axis];
        const double inside = value > CORNER_MAX ? CORNER_MAX : value > -CORNER_MAX ? value : -CORNER_MAX;
        *into[axis] = (int64_t)(inside * STEPS + 0.5);
    }
    return point;
}

/* Note where a line crosses middles of columns; `last` is the point before it, and then its end. */
static Py_ssize_t cross(const struct mask *mask, struct point begin, struct point end, struct point *last,
                        int64_t *places, Py_ssize_t count)
{
    const int64_t across = llabs(end.x - begin.x), down = llabs(end.y - begin.y);
    const int is_flat = across >= down;
    const int64_t length = is_flat ? across : down;
    const int is_back = is_flat ? begin.x > end.x : begin.y > end.y;
    const struct point first = is_back ? end : begin, final = is_back ? begin : end;
    const double slope = (double)(is_flat ? final.y - first.y : final.x - first.x) / (double)(length ? length : 1);
    for (int64_t number = 0; number <= length; number++) {
        const int64_t step = is_back ? length - number : number;
        const int64_t along = (is_flat ? first.x : first.y) + step;
        const int64_t beside = (int64_t)((double)(is_flat ? first.y : first.x) + slope * (double)step + 0.5);
        const struct point point = {is_flat ? along : beside, is_flat ? beside : along};
        if (point.x != last->x) {
            const int64_t left = point.x < last->x ? point.x : last->x, upper = point.y < last->y ? point.y : last->y;
            const int64_t column = floor_divided(left - MIDDLE, STEPS);
            if (left - MIDDLE == column * STEPS && column >= 0 && column < mask->width) {
                const int64_t row = -floor_divided(MIDDLE - upper, STEPS);
                places[count++] = column * mask->height + (row < 0 ? 0 : row > mask->height ? mask->height : row);
            }
        }
        *last = point;
    }
    return count;
}

const char fill_polygon_doc[] =
    "fill_polygon(corners, mask, height, width): set the pixels inside of a polygon to 1.\n\n"
    "corners: float64 [corners, 2], x and y in pixels; mask: uint8 [height, width], contiguous.";

PyObject *fill_polygon(PyObject *self, PyObject *arguments)
{
    Py_buffer corners;
    PyObject *object;
    Py_ssize_t height, width;
    struct mask mask;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*Onn:fill_polygon", &corners, &object, &height, &width)) return NULL;
    const Py_ssize_t count = corners.len / (Py_ssize_t)(2 * sizeof(double));
    int64_t *places = NULL;
    PyObject *result = NULL;
    if (!take_mask(object, height, width, &mask)) {
        PyBuffer_Release(&corners);
        return NULL;
    }
    if (count < 1 || corners.len % (Py_ssize_t)(2 * sizeof(double)) || (uintptr_t)corners.buf % sizeof(double)) {
        PyErr_SetString(PyExc_ValueError, "corners are float64, two numbers each");
        goto end;
    }
    const double *numbers = corners.buf;
    for (Py_ssize_t number = 0; number < 2 * count; number++)
        if (!isfinite(numbers[number])) {
            PyErr_SetString(PyExc_ValueError, "a corner is not finite");
            goto end;
        }
    int64_t room = 0, steps = 0;
    for (Py_ssize_t number = 0; number < count && steps <= STEPS_MAX; number++) {
        const struct point begin = corner_at(numbers, number), end = corner_at(numbers, (number + 1) % count);
        const int64_t across = llabs(end.x - begin.x), down = llabs(end.y - begin.y);
        room += across / STEPS + 2;
        steps += across > down ? across : down;
    }
    if (steps > STEPS_MAX) {
        PyErr_SetString(PyExc_ValueError, "the lines of a polygon are too long");
        goto end;
    }
    places = malloc((size_t)room * sizeof *places);
    if (!places) {
        PyErr_NoMemory();
        goto end;
    }
    struct point last = corner_at(numbers, 0);
    Py_ssize_t found = 0;
    for (Py_ssize_t number = 0; number < count; number++)
        found = cross(&mask, corner_at(numbers, number), corner_at(numbers, (number + 1) % count), &last, places, found);
    qsort(places, (size_t)found, sizeof *places, ascending);
    fill(&mask, places, found);
    result = Py_NewRef(Py_None);
end:
    free(places);
    PyBuffer_Release(&mask.buffer);
    PyBuffer_Release(&corners);
    return result;
}

const char fill_runs_doc[] =
    "fill_runs(ends, mask, height, width): set the pixels of every second run to 1.\n\n"
    "ends: int64, ascending, of runs of zeros and of ones in turn, down the columns, without the last;\n"
    "mask: uint8 [height, width], contiguous.";

PyObject *fill_runs(PyObject *self, PyObject *arguments)
{
    Py_buffer ends;
    PyObject *object, *result = NULL;
    Py_ssize_t height, width;
    struct mask mask;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*Onn:fill_runs", &ends, &object, &height, &width)) return NULL;
    if (!take_mask(object, height, width, &mask)) {
        PyBuffer_Release(&ends);
        return NULL;
    }
    const int64_t *places = ends.buf;
    const Py_ssize_t count = ends.len / (Py_ssize_t)sizeof *places;
    int is_right = ends.len % (Py_ssize_t)sizeof *places == 0 && (uintptr_t)ends.buf % sizeof *places == 0;
    for (Py_ssize_t number = 0; is_right && number < count; number++)
        is_right = places[number] >= (number ? places[number - 1] : 0) && places[number] <= mask.height * mask.width;
    if (is_right) {
        fill(&mask, places, count);
        result = Py_NewRef(Py_None);
    } else
        PyErr_SetString(PyExc_ValueError, "ends are int64, ascending, and within the mask");
    PyBuffer_Release(&mask.buffer);
    PyBuffer_Release(&ends);
    return result;
}
