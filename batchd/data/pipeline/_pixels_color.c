/* Colours of pixels, changed in place, as `image/recolor.py` says. Worker process.
 *
 *     pixels -> planes of a block -> each change, one after the other -> pixels
 *
 * In a plane, a channel's levels lie side by side, as vectors need them; those of a block stay in
 * the processor's nearest cache. `image/recolor.py` does the same without this extension, in more
 * time.
 *
 * Invariant: the bytes are the same with every compiler and processor. Hue and grey are whole
 * numbers. A float32 is rounded where the code says so: `-ffp-contract=off`, no function of a C
 * library.
 */
#include "_pixels_parts.h"

#include <string.h>

enum { TOGETHER = 512, LEVELS = 256, CHANGES_MAX = 8, HUE_BITS = 16, FACTOR_BITS = 14, FACTOR_MAX = 11 };
/* OpenCV's */
enum { GREY_BITS = 15, RED = 9798, GREEN = 19235, BLUE = 3735 };
/* Pillow's */
enum { COLOR_GREY_BITS = 16, COLOR_RED = 19595, COLOR_GREEN = 38470, COLOR_BLUE = 7471 };

/* As in `image/recolor.py`. */
enum kind { BRIGHTNESS, CONTRAST, SATURATION, HUE, COLOR, KINDS };

struct change {
    int kind;
    double number;
    /* of brightness and contrast: the new level for each, and what makes the same levels by sums */
    uint8_t levels[LEVELS];
    float offset;
    int can_sum;
};

ALWAYS_INLINE void split(const uint8_t *pixels, int32_t count, uint8_t *restrict first, uint8_t *restrict second,
                         uint8_t *restrict third)
{
    for (int32_t i = 0; i < count; i++) first[i] = pixels[3 * i], second[i] = pixels[3 * i + 1], third[i] = pixels[3 * i + 2];
}

ALWAYS_INLINE void join(uint8_t *restrict pixels, int32_t count, const uint8_t *first, const uint8_t *second, const uint8_t *third)
{
    for (int32_t i = 0; i < count; i++) pixels[3 * i] = first[i], pixels[3 * i + 1] = second[i], pixels[3 * i + 2] = third[i];
}

ALWAYS_INLINE int32_t grey_level(uint8_t red, uint8_t green, uint8_t blue)
{
    return (RED * red + GREEN * green + BLUE * blue + (1 << (GREY_BITS - 1))) >> GREY_BITS;
}

ALWAYS_INLINE uint32_t grey_sum(int32_t count, const uint8_t *red, const uint8_t *green, const uint8_t *blue)
{
    uint32_t sum = 0;
    for (int32_t i = 0; i < count; i++) sum += (uint32_t)grey_level(red[i], green[i], blue[i]);
    return sum;
}

/* From 0 to `most`, in two steps, as vectors take them. */
ALWAYS_INLINE int16_t within(int16_t number, int16_t most)
{
    number = number > 0 ? number : 0;
    return number < most ? number : most;
}

#ifdef __FP_FAST_FMAF
enum { ALL_HAVE_FMA = 1 }; /* all processors that this is compiled for, such as aarch64 */
#else
enum { ALL_HAVE_FMA = 0 };
#endif

/* Rounded once to float32, as by a fused multiply-add, then to a whole number, halves to even. A
 * product of a level and a float32 is exact in float64. The sum is, too, where it is not within
 * 2**-13 of a whole number, so float64 rounds to the same one. */
ALWAYS_INLINE int16_t mixed(float level, float factor, float rest, int has_fma)
{
    const float sum = has_fma ? __builtin_fmaf(level, factor, rest) : (float)((double)level * factor + rest);
    return (int16_t)((sum + 0x1.8p23f) - 0x1.8p23f);
}

ALWAYS_INLINE void mix(uint8_t *restrict plane, int32_t count, float factor, const float *restrict rest, int rests, int has_fma)
{
    /* between two loops: compilers make better vectors of each than of one for both */
    int16_t made[TOGETHER];
    for (int32_t i = 0; i < count; i++) made[i] = mixed(plane[i], factor, rest[i * rests], has_fma);
    for (int32_t i = 0; i < count; i++) plane[i] = (uint8_t)within(made[i], 255);
}

ALWAYS_INLINE void saturate(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue, int32_t count, double factor,
                            int has_fma)
{
    float grey[TOGETHER];
    for (int32_t i = 0; i < count; i++) grey[i] = (float)(1 - factor) * (float)grey_level(red[i], green[i], blue[i]);
    mix(red, count, (float)factor, grey, 1, has_fma);
    mix(green, count, (float)factor, grey, 1, has_fma);
    mix(blue, count, (float)factor, grey, 1, has_fma);
}

/* The new levels of brightness and contrast, by the table or by sums, which take half the time in
 * vectors. */
ALWAYS_INLINE void change_levels(uint8_t *restrict plane, int32_t count, const struct change *change, int has_fma)
{
    if (has_fma && change->can_sum)
        mix(plane, count, (float)change->number, &change->offset, 0, has_fma);
    else
        for (int32_t i = 0; i < count; i++) plane[i] = change->levels[plane[i]];
}

/* As `saturate`, in whole numbers with Pillow's grey; the factor in 1/2**FACTOR_BITS. */
ALWAYS_INLINE void saturate_as_pillow(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue, int32_t count,
                                      int32_t factor)
{
    for (int32_t i = 0; i < count; i++) {
        const int32_t sum = COLOR_RED * red[i] + COLOR_GREEN * green[i] + COLOR_BLUE * blue[i];
        const int32_t grey = (sum + (1 << (COLOR_GREY_BITS - 1))) >> COLOR_GREY_BITS;
        const int32_t rest = ((1 << FACTOR_BITS) - factor) * grey + (1 << (FACTOR_BITS - 1));
        red[i] = level((factor * red[i] + rest) >> FACTOR_BITS);
        green[i] = level((factor * green[i] + rest) >> FACTOR_BITS);
        blue[i] = level((factor * blue[i] + rest) >> FACTOR_BITS);
    }
}

ALWAYS_INLINE uint16_t lesser(uint16_t one, uint16_t other)
{
    return one < other ? one : other;
}

ALWAYS_INLINE uint16_t greater(uint16_t one, uint16_t other)
{
    return one > other ? one : other;
}

/* Hue is in sixths of the circle, times the chroma of the pixel, so that it is a whole number. A
 * place below 0, or beyond the circle, is brought back by the lesser of two unsigned numbers. */
ALWAYS_INLINE uint8_t hue_level(uint16_t most, uint16_t chroma, uint16_t place, uint16_t rounds_up, uint16_t rounds_down)
{
    const uint16_t at = lesser(place, (uint16_t)(place - 6 * chroma));
    const int16_t rising = (int16_t)(at + rounds_up), falling = (int16_t)(4 * chroma - at - rounds_down);
    const int16_t off = rising < falling ? rising : falling;
    return (uint8_t)(most - within(off, (int16_t)chroma));
}

/* By `sixths` and `part` of one, in 1/2**HUE_BITS. What is behind the point of a hue is the same
 * for the three channels, so it is enough to know how it rounds: a level off is halves down. */
ALWAYS_INLINE void shift_hue(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue, int32_t count, uint16_t sixths,
                             uint16_t part)
{
    for (int32_t i = 0; i < count; i++) {
        const uint16_t r = red[i], g = green[i], b = blue[i];
        const uint16_t most = greater(greater(r, g), b), chroma = most - lesser(lesser(r, g), b);
        const uint16_t moved = (uint32_t)part * chroma >> HUE_BITS, behind = (uint32_t)part * chroma;
        const uint16_t rounds_up = behind > 0x8000, rounds_down = behind >= 0x8000;
        uint16_t hue = most == r ? (uint16_t)(g - b) : most == g ? (uint16_t)(2 * chroma + b - r) : (uint16_t)(4 * chroma + r - g);
        hue = lesser(hue, (uint16_t)(hue + 6 * chroma)) + sixths * chroma + moved;
        hue = lesser(hue, (uint16_t)(hue - 6 * chroma));
        red[i] = hue_level(most, chroma, hue + 5 * chroma, rounds_up, rounds_down);
        green[i] = hue_level(most, chroma, hue + 3 * chroma, rounds_up, rounds_down);
        blue[i] = hue_level(most, chroma, hue + chroma, rounds_up, rounds_down);
    }
}

/* Makes the changes from `first` on. Returns the sum of the grey levels that are left, if it is
 * asked for. */
ALWAYS_INLINE uint64_t recolor_row(uint8_t *pixels, Py_ssize_t length, const struct change *first, const struct change *end, int is_bgr,
                                   int is_summed, int has_fma)
{
    uint8_t planes[3][TOGETHER];
    uint8_t *const red = planes[is_bgr ? 2 : 0], *const green = planes[1], *const blue = planes[is_bgr ? 0 : 2];
    uint64_t sum = 0;
    for (; length > 0; length -= TOGETHER, pixels += 3 * TOGETHER) {
        const int32_t count = length < TOGETHER ? (int32_t)length : TOGETHER;
        split(pixels, count, planes[0], planes[1], planes[2]);
        for (const struct change *change = first; change < end; change++) {
            const int32_t number = (int32_t)change->number;
            if (change->kind == SATURATION)
                saturate(red, green, blue, count, change->number, has_fma);
            else if (change->kind == HUE)
                shift_hue(red, green, blue, count, (uint16_t)(number >> HUE_BITS), (uint16_t)number);
            else if (change->kind == COLOR)
                saturate_as_pillow(red, green, blue, count, number);
            else
                for (int channel = 0; channel < 3; channel++) change_levels(planes[channel], count, change, has_fma);
        }
        if (first < end) join(pixels, count, planes[0], planes[1], planes[2]);
        if (is_summed) sum += grey_sum(count, red, green, blue);
    }
    return sum;
}

static uint64_t recolor_plain(uint8_t *pixels, Py_ssize_t length, const struct change *first, const struct change *end, int is_bgr,
                              int is_summed)
{
    return recolor_row(pixels, length, first, end, is_bgr, is_summed, ALL_HAVE_FMA);
}

WITH_AVX2 static uint64_t recolor_avx2(uint8_t *pixels, Py_ssize_t length, const struct change *first, const struct change *end,
                                       int is_bgr, int is_summed)
{
    return recolor_row(pixels, length, first, end, is_bgr, is_summed, 1);
}

/* Levels are rounded from float64, halves to even. Those of float32 are the same if none is so near
 * to a half: with a factor up to FACTOR_MAX, a sum is less than 2**-12 off. */
static void set_levels(struct change *change, double offset)
{
    change->offset = (float)offset, change->can_sum = 1;
    for (int i = 0; i < LEVELS; i++) {
        const double made = change->number * i + offset, rounded = (made + 0x1.8p52) - 0x1.8p52, off = made - rounded;
        change->levels[i] = level((int32_t)rounded);
        change->can_sum &= off < 0.5 - 0x1p-12 && off > 0x1p-12 - 0.5;
    }
}

static void recolor_image(const struct image *image, struct change *changes, Py_ssize_t count, int is_bgr)
{
    const int is_one_row = image->stride == 3 * image->width;
    const Py_ssize_t rows = is_one_row ? 1 : image->height, length = image->height / rows * image->width;
    const double pixels = (double)image->height * (double)image->width;
    for (struct change *first = changes, *next = changes; next <= changes + count; next++) {
        const int is_end = next == changes + count, is_contrast = !is_end && next->kind == CONTRAST;
        if (!is_end && !is_contrast) continue;
        uint64_t sum = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            uint8_t *begin = image->pixels + row * image->stride;
            sum += (uses_avx2 ? recolor_avx2 : recolor_plain)(begin, length, first, next, is_bgr, is_contrast);
        }
        /* the mean of what is made so far */
        if (is_contrast) set_levels(next, (1 - next->number) * ((double)sum / pixels));
        first = next;
    }
}

/* --- what Python sees --- */

static Py_ssize_t take_changes(PyObject *object, struct change *changes)
{
    static const int most[KINDS] = {FACTOR_MAX, FACTOR_MAX, FACTOR_MAX, 6 << HUE_BITS, FACTOR_MAX << FACTOR_BITS};
    const Py_ssize_t count = PyTuple_Size(object);
    if (count < 0) return -1;
    if (count > CHANGES_MAX) return PyErr_SetString(PyExc_ValueError, "more than eight changes of an image"), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        struct change *change = &changes[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(object, i), "id:recolor", &change->kind, &change->number)) return -1;
        if (change->kind < 0 || change->kind >= KINDS || !(change->number >= 0 && change->number <= most[change->kind]))
            return PyErr_SetString(PyExc_ValueError, "a change of an image that there is not, or its number is too large"), -1;
        if (change->kind == BRIGHTNESS) set_levels(change, 0);
    }
    return count;
}

const char recolor_doc[] =
"recolor(pixels, changes, is_bgr)\n\n"
"Change an image of three channels by (kind, number) each. 0 brightness, 1 contrast, 2 saturation: a factor from 0 to 11. 3 hue: a shift\n"
"from 0 to 6 * 2**16, which is once round the circle. 4 saturation as Pillow makes it: a factor from 0 to 11, in 1/2**14.";

PyObject *recolor(PyObject *self, PyObject *arguments)
{
    struct change changes[CHANGES_MAX];
    struct image image;
    PyObject *pixels, *given;
    int is_bgr, is_made = 0;
    (void)self;
    memset(&image, 0, sizeof image);
    if (!PyArg_ParseTuple(arguments, "OO!p:recolor", &pixels, &PyTuple_Type, &given, &is_bgr)) return NULL;
    const Py_ssize_t count = take_changes(given, changes);
    if (count >= 0 && take_image(pixels, PyBUF_WRITABLE, &image)) {
        if (image.channels != 3)
            PyErr_SetString(PyExc_ValueError, "an image has three channels");
        else {
            Py_BEGIN_ALLOW_THREADS
            recolor_image(&image, changes, count, is_bgr);
            Py_END_ALLOW_THREADS
            is_made = 1;
        }
    }
    release_image(&image);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}
