/* Pixels computed from pixels in integers: the same with every compiler and processor. Worker
 * process.
 *
 *     resample    each new pixel is a weighted sum of pixels, along the columns, then the rows
 *     scale       the same, with the weights of "linear" or "area"; also what _jpeg.c calls
 *
 * `_pixels_color.c` has what changes colours, `_pixels_tone.c` what counts and sharpens,
 * `_pixels_warp.c` what moves pixels anywhere.
 *
 * `resample.py` says which weights; it does the same without this extension, in more time.
 *
 * Invariant: nothing is read outside of the buffers, whatever the arguments are. Each sum fits into
 * 32 bits: see `resample.py`.
 */
#include "_pixels_parts.h"

#include <stdlib.h>
#include <string.h>

#ifdef HAS_VECTORS
#include <immintrin.h>
#endif

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define PREFETCH(address) (void)(address)
#endif

/* --- resample --- */

struct taps {
    Py_buffer first_buffer, weights_buffer;
    const int32_t *first;
    const int16_t *weights;
    Py_ssize_t targets, count;
    int shift;
    void *memory; /* of `first` and `weights`, where they are not in the buffers */
};

/* The columns for vectors of eight new pixels, the same for all rows: the place of each pixel's
 * first tap, and the weights of its taps, two by two, as often as a pixel has channels. Without
 * memory: there are no vectors for such columns. */
struct lanes {
    Py_ssize_t groups, pairs, row_bytes;
    const int16_t *weights;
    const int32_t *places;
    void *memory;
};

enum { EIGHT = 8, HIGH_BITS = 16, KEPT_BEYOND = 16, KEPT_BITS_MAX = 7, WHOLE_BITS = 14, ROWS_AHEAD = 8, LINE_BYTES = 64 };

int uses_avx2;
static int has_avx2;

FOR_EACH_PROCESSOR
static void add_weighted(int32_t *sums, const uint8_t *row, int16_t weight, Py_ssize_t length)
{
    for (Py_ssize_t i = 0; i < length; i++) sums[i] += weight * (int16_t)row[i];
}

FOR_EACH_PROCESSOR
static void weigh(int32_t *sums, const uint8_t *row, int16_t weight, int32_t half, Py_ssize_t length)
{
    for (Py_ssize_t i = 0; i < length; i++) sums[i] = weight * (int16_t)row[i] + half;
}

FOR_EACH_PROCESSOR
static void round_off(const int32_t *sums, int16_t *kept, int shift, Py_ssize_t length)
{
    for (Py_ssize_t i = 0; i < length; i++) kept[i] = (int16_t)(sums[i] >> shift);
}

static inline void across_each(const int16_t *kept, uint8_t *into, const struct taps *taps, int shift, Py_ssize_t channels,
                               Py_ssize_t count)
{
    const int16_t *weights = taps->weights;
    for (Py_ssize_t x = 0; x < taps->targets; x++, weights += count) {
        for (Py_ssize_t channel = 0; channel < channels; channel++) {
            const int16_t *from = kept + taps->first[x] * channels + channel;
            int32_t sum = 1 << (shift - 1);
            for (Py_ssize_t tap = 0; tap < count; tap++) sum += weights[tap] * from[tap * channels];
            *into++ = level(sum >> shift);
        }
    }
}

#ifdef __SSE2__
/* The same for 3 or 4 channels: each pixel is one vector, two taps take one instruction. */
static inline __m128i two_weighted(const int16_t *one, const int16_t *other, uint32_t weights)
{
    const __m128i first = _mm_loadl_epi64((const __m128i *)one);
    const __m128i second = other ? _mm_loadl_epi64((const __m128i *)other) : _mm_setzero_si128();
    return _mm_madd_epi16(_mm_unpacklo_epi16(first, second), _mm_set1_epi32((int)weights));
}

static inline void across_wide(const int16_t *kept, uint8_t *into, const struct taps *taps, int shift, Py_ssize_t channels,
                               Py_ssize_t count)
{
    const __m128i half = _mm_set1_epi32(1 << (shift - 1)), bits = _mm_cvtsi32_si128(shift);
    const int16_t *weights = taps->weights;
    for (Py_ssize_t x = 0; x < taps->targets; x++, weights += count, into += channels) {
        const int16_t *from = kept + taps->first[x] * channels;
        __m128i sum = half;
        uint32_t pair;
        Py_ssize_t tap = 0;
        for (; tap + 1 < count; tap += 2) {
            memcpy(&pair, weights + tap, sizeof pair);
            sum = _mm_add_epi32(sum, two_weighted(from + tap * channels, from + (tap + 1) * channels, pair));
        }
        if (tap < count) sum = _mm_add_epi32(sum, two_weighted(from + tap * channels, NULL, (uint16_t)weights[tap]));
        sum = _mm_packs_epi32(_mm_sra_epi32(sum, bits), sum);
        pair = (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
        if (x + 1 < taps->targets)
            memcpy(into, &pair, sizeof pair); /* what is too much, the next pixel writes over */
        else
            memcpy(into, &pair, (size_t)channels);
    }
}
#endif

static void across(const int16_t *kept, uint8_t *into, const struct taps *taps, int shift, Py_ssize_t channels)
{
#ifdef __SSE2__
    if (channels == 3 && taps->count == 1)
        across_wide(kept, into, taps, shift, 3, 1); /* constants, so that the loop is unrolled */
    else if (channels == 3 && taps->count == 2)
        across_wide(kept, into, taps, shift, 3, 2);
    else if (channels == 3 && taps->count == 3)
        across_wide(kept, into, taps, shift, 3, 3);
    else if (channels == 3 && taps->count == 4)
        across_wide(kept, into, taps, shift, 3, 4);
    else if (channels >= 3)
        across_wide(kept, into, taps, shift, channels, taps->count);
    else
#endif
    if (channels == 1 && taps->count == 2)
        across_each(kept, into, taps, shift, 1, 2);
    else
        across_each(kept, into, taps, shift, channels, taps->count);
}

static void down(const uint8_t *row, Py_ssize_t stride, Py_ssize_t count, const int16_t *weights, int shift, int32_t *sums, int16_t *kept,
                 Py_ssize_t length)
{
    weigh(sums, row, weights[0], 1 << (shift - 1), length);
    for (Py_ssize_t tap = 1; tap < count; tap++)
        if (weights[tap]) add_weighted(sums, row + tap * stride, weights[tap], length);
    round_off(sums, kept, shift, length);
}

#ifdef HAS_VECTORS
/* Two rows whose weights add up to 2**14, with 7 bits behind the pixel: a + (b - a) * weight, all
 * in 16 bits, because (128 * d * 2 * w + 2**14) >> 15 is (d * w + 2**6) >> 7, and that is what one
 * instruction does. */
__attribute__((target("avx2")))
static inline void two_rows_16(const uint8_t *one, const uint8_t *other, __m256i weight, int16_t *kept)
{
    const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)one));
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)other));
    const __m256i part = _mm256_mulhrs_epi16(_mm256_slli_epi16(_mm256_sub_epi16(b, a), 7), weight);
    _mm256_storeu_si256((__m256i *)kept, _mm256_add_epi16(_mm256_slli_epi16(a, 7), part));
}

__attribute__((target("avx2")))
static void two_rows(const uint8_t *one, const uint8_t *other, int16_t weight, int16_t *kept, Py_ssize_t length)
{
    const __m256i each = _mm256_set1_epi16((int16_t)(2 * weight));
    Py_ssize_t i = 0;
    for (; i + 16 <= length; i += 16) two_rows_16(one + i, other + i, each, kept + i);
    if (i < length) two_rows_16(one + length - 16, other + length - 16, each, kept + length - 16);
}

__attribute__((target("avx2")))
static inline void rows_16(const uint8_t *row, Py_ssize_t stride, const int16_t *weights, Py_ssize_t count, int shift, int16_t *kept)
{
    const __m128i bits = _mm_cvtsi32_si128(shift);
    __m256i low = _mm256_set1_epi32(1 << (shift - 1)), high = low;
    for (Py_ssize_t tap = 0; tap < count; tap += 2, row += 2 * stride) {
        const int is_pair = tap + 1 < count;
        const uint32_t both = (uint16_t)weights[tap] | (is_pair ? (uint32_t)(uint16_t)weights[tap + 1] << 16 : 0);
        const __m256i each = _mm256_set1_epi32((int32_t)both);
        const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)row));
        const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(is_pair ? row + stride : row)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), each));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), each));
    }
    low = _mm256_sra_epi32(low, bits), high = _mm256_sra_epi32(high, bits);
    _mm256_storeu_si256((__m256i *)kept, _mm256_packs_epi32(low, high));
}

__attribute__((target("avx2")))
static void down_vectors(const uint8_t *row, Py_ssize_t stride, Py_ssize_t count, const int16_t *weights, int shift, int16_t *kept,
                         Py_ssize_t length)
{
    const int whole = 1 << WHOLE_BITS;
    Py_ssize_t i = 0;
    if (count == 2 && shift == WHOLE_BITS - KEPT_BITS_MAX && weights[0] > 0 && weights[1] >= 0 && weights[0] + weights[1] == whole)
        two_rows(row, row + stride, weights[1], kept, length);
    else if (count == 2 && shift == WHOLE_BITS - KEPT_BITS_MAX && weights[0] == 0 && weights[1] == whole)
        /* as twice that weight has no place in 16 bits */
        two_rows(row + stride, row + stride, 0, kept, length);
    else {
        for (; i + 16 <= length; i += 16) rows_16(row + i, stride, weights, count, shift, kept + i);
        if (i < length) rows_16(row + length - 16, stride, weights, count, shift, kept + length - 16);
    }
}

/* Eight new pixels of 3 or 4 channels. Two taps of one channel lie side by side and are multiplied
 * and added up in one instruction. Of the sums of two vectors the upper halves are put into one,
 * which takes less than to pack them. */
__attribute__((target("avx2")))
static inline void across_eight(const int16_t *kept, uint8_t *into, const struct lanes *lanes, int shift, Py_ssize_t channels,
                                Py_ssize_t pairs)
{
    const __m256i by_channel = _mm256_broadcastsi128_si256(
        channels == 3 ? _mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1)
                      : _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m256i by_pixel = _mm256_broadcastsi128_si256(
        channels == 3 ? _mm_setr_epi8(0, 2, 4, 1, 3, 5, 8, 10, 12, 9, 11, 13, -1, -1, -1, -1)
                      : _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    const __m128i bits = _mm_cvtsi32_si128(shift - HIGH_BITS);
    const __m256i *weights = (const __m256i *)lanes->weights;
    const int32_t *places = lanes->places;
    for (Py_ssize_t group = 0; group < lanes->groups; group++, places += EIGHT) {
        const Py_ssize_t made = group * EIGHT * channels, bytes = EIGHT * channels, left = lanes->row_bytes - made;
        uint8_t last[2 * sizeof(__m256i)], *const target = left < 4 * channels + 16 ? last : into + made;
        __m256i sums[4] = {half, half, half, half}, pixels;
        for (Py_ssize_t pair = 0; pair < pairs; pair++)
            for (int i = 0; i < 4; i++, weights++) {
                const int16_t *from = kept + 2 * channels * pair;
                const __m128i one = _mm_loadu_si128((const __m128i *)(from + places[i]));
                const __m128i other = _mm_loadu_si128((const __m128i *)(from + places[4 + i]));
                const __m256i taps = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1), by_channel);
                sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(taps, _mm256_load_si256(weights)));
            }
        sums[0] = _mm256_sra_epi16(_mm256_blend_epi16(_mm256_srli_epi32(sums[0], HIGH_BITS), sums[1], 0xaa), bits);
        sums[2] = _mm256_sra_epi16(_mm256_blend_epi16(_mm256_srli_epi32(sums[2], HIGH_BITS), sums[3], 0xaa), bits);
        pixels = _mm256_shuffle_epi8(_mm256_packus_epi16(sums[0], sums[2]), by_pixel);
        /* what is too much, the next one writes over */
        _mm_storeu_si128((__m128i *)target, _mm256_castsi256_si128(pixels));
        _mm_storeu_si128((__m128i *)(target + 4 * channels), _mm256_extracti128_si256(pixels, 1));
        if (target == last) memcpy(into + made, last, (size_t)(left < bytes ? left : bytes));
    }
}

__attribute__((target("avx2")))
static void across_vectors(const int16_t *kept, uint8_t *into, const struct lanes *lanes, int shift, Py_ssize_t channels)
{
    /* constants, so that the loops are unrolled */
    if (channels == 3 && lanes->pairs == 1)
        across_eight(kept, into, lanes, shift, 3, 1);
    else if (channels == 3 && lanes->pairs == 2)
        across_eight(kept, into, lanes, shift, 3, 2);
    else
        across_eight(kept, into, lanes, shift, channels, lanes->pairs);
}

static int plan_lanes(struct lanes *lanes, const struct taps *taps, Py_ssize_t channels)
{
    const Py_ssize_t groups = (taps->targets + EIGHT - 1) / EIGHT, pairs = (taps->count + 1) / 2;
    const size_t vector_bytes = sizeof(__m256i), numbers = vector_bytes / sizeof(int16_t), place_bytes = EIGHT * sizeof(int32_t);
    const size_t weights_bytes = (size_t)groups * pairs * 4 * vector_bytes, bytes = weights_bytes + (size_t)groups * place_bytes;
    int16_t *weights = lanes->memory = aligned_alloc(vector_bytes, (bytes + vector_bytes - 1) / vector_bytes * vector_bytes);
    int32_t *places = (int32_t *)((char *)weights + weights_bytes);
    if (!weights) return 0;
    memset(weights, 0, bytes);
    *lanes = (struct lanes){groups, pairs, taps->targets * channels, weights, places, weights};
    for (Py_ssize_t x = 0; x < taps->targets; x++) {
        const Py_ssize_t group = x / EIGHT, place = x % EIGHT;
        int16_t *to = weights + (group * pairs * 4 + place % 4) * numbers + place / 4 * numbers / 2;
        places[x] = (int32_t)(taps->first[x] * channels);
        for (Py_ssize_t tap = 0; tap < taps->count; tap++)
            for (int channel = 0; channel < CHANNELS_MAX; channel++)
                to[tap / 2 * 4 * numbers + 2 * channel + tap % 2] = taps->weights[x * taps->count + tap];
    }
    return 1;
}
#endif

/* Prefetch the rows of a later new row: pixels of a cache are seldom in the processor's caches. */
static inline void fetch(const struct image *from, const struct taps *rows, Py_ssize_t y, int32_t fetched[2])
{
    const Py_ssize_t length = from->width * from->channels;
    if (y >= rows->targets) return;
    for (int32_t row = rows->first[y]; row < rows->first[y] + rows->count; row++) {
        if (row >= fetched[0] && row < fetched[1]) continue;
        for (Py_ssize_t i = 0; i < length; i += LINE_BYTES) PREFETCH(from->pixels + row * from->stride + i);
        if (row < fetched[0]) fetched[0] = row;
        if (row >= fetched[1]) fetched[1] = row + 1;
    }
}

/* One tap each way is one pixel, whose weight is all there is. */
static inline void copy_rows(const struct image *from, const struct image *into, const struct taps *rows,
                             const struct taps *columns, Py_ssize_t channels)
{
    for (Py_ssize_t y = 0; y < rows->targets; y++) {
        const uint8_t *row = from->pixels + rows->first[y] * from->stride;
        uint8_t *made = into->pixels + y * into->stride;
        for (Py_ssize_t x = 0; x < columns->targets; x++, made += channels)
            for (Py_ssize_t channel = 0; channel < channels; channel++)
                made[channel] = row[columns->first[x] * channels + channel];
    }
}

static inline void down_to(const struct image *from, const struct taps *rows, Py_ssize_t y, int shift, int32_t *sums, int16_t *kept)
{
    const Py_ssize_t length = from->width * from->channels;
    const uint8_t *row = from->pixels + rows->first[y] * from->stride;
    const int16_t *weights = rows->weights + y * rows->count;
#ifdef HAS_VECTORS
    if (uses_avx2 && length >= 16) {
        down_vectors(row, from->stride, rows->count, weights, shift, kept, length);
        return;
    }
#endif
    down(row, from->stride, rows->count, weights, shift, sums, kept, length);
}

/* Returns whether there was memory. A row is read only after the next one was written: by then its
 * sums have left the queue in which a processor holds what it has written, where wider reads than
 * the writes have to wait. */
static int resample_rows(const struct image *from, const struct image *into, const struct taps *rows,
                         const struct taps *columns, int kept_bits)
{
    const Py_ssize_t length = from->width * from->channels;
    const int down_shift = rows->shift - kept_bits, across_shift = columns->shift + kept_bits;
    int32_t *sums = malloc((size_t)length * sizeof *sums), fetched[2] = {INT32_MAX, 0};
    int16_t *memory = calloc(2 * (size_t)(length + KEPT_BEYOND), sizeof *memory), *kept = memory, *next;
    struct lanes lanes = {0};
    int is_made = sums && memory;
#ifdef HAS_VECTORS
    if (is_made && uses_avx2 && from->channels >= 3 && across_shift >= HIGH_BITS && length <= INT32_MAX)
        is_made = plan_lanes(&lanes, columns, from->channels);
#endif
    if (is_made) down_to(from, rows, 0, down_shift, sums, kept);
    for (Py_ssize_t y = 0; is_made && y < rows->targets; y++, kept = next) {
        uint8_t *made = into->pixels + y * into->stride;
        next = kept == memory ? memory + length + KEPT_BEYOND : memory;
        fetch(from, rows, y + ROWS_AHEAD, fetched);
        if (y + 1 < rows->targets) down_to(from, rows, y + 1, down_shift, sums, next);
#ifdef HAS_VECTORS
        if (lanes.memory)
            across_vectors(kept, made, &lanes, across_shift, from->channels);
        else
#endif
            across(kept, made, columns, across_shift, from->channels);
    }
    free(lanes.memory);
    free(memory);
    free(sums);
    return is_made;
}

/* --- scale --- */

enum { SHIFT_MAX = 22, BITS_BEHIND_THE_PIXEL = 23 };

/* As `_linear_taps` of `resample.py`. */
static void weigh_linear(const struct taps *taps, int64_t source, int64_t place, int32_t *first, int16_t *weights)
{
    const int64_t twice = 2 * (int64_t)taps->targets, last = (source - 1) * twice;
    int64_t centre = (2 * place + 1) * source - (int64_t)taps->targets;
    centre = centre < 0 ? 0 : centre > last ? last : centre;
    *first = (int32_t)(centre / twice);
    if (*first > source - taps->count) *first = (int32_t)(source - taps->count);
    if (taps->count == 1) {
        weights[0] = 1 << WHOLE_BITS;
        return;
    }
    weights[1] = (int16_t)((((centre - *first * twice) << WHOLE_BITS) + (int64_t)taps->targets) / twice);
    weights[0] = (int16_t)((1 << WHOLE_BITS) - weights[1]);
}

/* As `_area_taps` of `resample.py`. */
static void weigh_area(const struct taps *taps, int64_t source, int64_t place, int32_t *first, int16_t *weights)
{
    const int64_t targets = (int64_t)taps->targets, begin = place * source, end = begin + source;
    int64_t sum = 0, before = 0;
    *first = (int32_t)(begin / targets);
    if (*first > source - taps->count) *first = (int32_t)(source - taps->count);
    for (Py_ssize_t tap = 0; tap < taps->count; tap++) {
        const int64_t left = (*first + tap) * targets, right = left + targets;
        const int64_t share = (end < right ? end : right) - (begin > left ? begin : left);
        int64_t rounded;
        if (share > 0) sum += share;
        rounded = ((sum << taps->shift) + source / 2) / source;
        weights[tap] = (int16_t)(rounded - before);
        before = rounded;
    }
}

/* Returns whether there was memory, which the caller frees. */
static int make_taps(struct taps *taps, enum method method, Py_ssize_t source, Py_ssize_t targets, int is_reversed)
{
    int32_t *first;
    int16_t *weights;
    taps->targets = targets;
    taps->shift = WHOLE_BITS;
    taps->count = method == LINEAR ? 2 : (source + targets - 1) / targets + (source % targets > 0);
    if (taps->count > source) taps->count = source;
    for (Py_ssize_t left = source / targets; method == AREA && left > 1 && taps->shift < SHIFT_MAX; left /= 2) taps->shift++;
    taps->memory = first = malloc((size_t)targets * (sizeof *first + (size_t)taps->count * sizeof *weights));
    if (!first) return 0;
    taps->first = first;
    taps->weights = weights = (int16_t *)(first + targets);
    for (Py_ssize_t place = 0; place < targets; place++, first++, weights += taps->count)
        (method == LINEAR ? weigh_linear : weigh_area)(taps, source, is_reversed ? targets - 1 - place : place, first, weights);
    return 1;
}

/* Of the same size: nothing is weighed. */
static void copy_flipped(const struct image *from, const struct image *into, int is_upside_down, int is_mirrored)
{
    const size_t row_bytes = (size_t)(from->width * from->channels), pixel = (size_t)from->channels;
    for (Py_ssize_t y = 0; y < into->height; y++) {
        const uint8_t *row = from->pixels + (is_upside_down ? from->height - 1 - y : y) * from->stride;
        uint8_t *made = into->pixels + y * into->stride;
        if (!is_mirrored) memcpy(made, row, row_bytes);
        for (Py_ssize_t x = from->width; is_mirrored && x > 0; made += pixel) memcpy(made, row + (size_t)--x * pixel, pixel);
    }
}

static int scale(const struct image *from, const struct image *into, enum method method, int is_upside_down, int is_mirrored)
{
    struct taps rows, columns;
    int is_made;
    if (from->height == into->height && from->width == into->width) {
        copy_flipped(from, into, is_upside_down, is_mirrored);
        return 1;
    }
    memset(&rows, 0, sizeof rows), memset(&columns, 0, sizeof columns);
    is_made = make_taps(&rows, method, from->height, into->height, is_upside_down)
        && make_taps(&columns, method, from->width, into->width, is_mirrored);
    if (is_made) {
        const int room = BITS_BEHIND_THE_PIXEL - columns.shift;
        is_made = resample_rows(from, into, &rows, &columns, room < KEPT_BITS_MAX ? room : KEPT_BITS_MAX);
    }
    free(rows.memory), free(columns.memory);
    return is_made;
}

/* --- what Python sees --- */

int take_image(PyObject *object, int flags, struct image *image)
{
    Py_buffer *buffer = &image->buffer;
    if (PyObject_GetBuffer(object, buffer, PyBUF_STRIDES | flags) < 0) return 0;
    if (buffer->ndim == 3 && buffer->itemsize == 1 && buffer->shape[0] > 0 && buffer->shape[1] > 0 && buffer->shape[2] > 0
        && buffer->shape[2] <= CHANNELS_MAX && buffer->shape[0] <= INT32_MAX && buffer->shape[1] <= INT32_MAX
        && buffer->strides[2] == 1 && buffer->strides[1] == buffer->shape[2]) {
        image->pixels = buffer->buf;
        image->height = buffer->shape[0];
        image->width = buffer->shape[1];
        image->channels = buffer->shape[2];
        image->stride = buffer->strides[0];
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "an image is bytes [height, width, 1 to 4], and the pixels of a row lie side by side");
    return 0;
}

/* Mirrored new pixels: the taps of the last one are the first. */
static int reverse_taps(struct taps *taps)
{
    const size_t weights_bytes = (size_t)taps->count * sizeof *taps->weights;
    int32_t *first = malloc((size_t)taps->targets * (sizeof *first + weights_bytes));
    int16_t *weights = (int16_t *)(first + taps->targets);
    if (!first) return 0;
    for (Py_ssize_t place = 0, from = taps->targets - 1; place < taps->targets; place++, from--) {
        first[place] = taps->first[from];
        memcpy(weights + place * taps->count, taps->weights + from * taps->count, weights_bytes);
    }
    taps->first = taps->memory = first;
    taps->weights = weights;
    return 1;
}

static int take_taps(PyObject *object, Py_ssize_t source, Py_ssize_t targets, int is_reversed, struct taps *taps)
{
    PyObject *first, *weights;
    if (!PyArg_ParseTuple(object, "OOi", &first, &weights, &taps->shift)) return 0;
    if (PyObject_GetBuffer(first, &taps->first_buffer, PyBUF_C_CONTIGUOUS) < 0) return 0;
    if (PyObject_GetBuffer(weights, &taps->weights_buffer, PyBUF_C_CONTIGUOUS) < 0) return 0;
    if (taps->first_buffer.ndim == 1 && taps->first_buffer.itemsize == 4 && taps->first_buffer.shape[0] == targets
        && taps->weights_buffer.ndim == 2 && taps->weights_buffer.itemsize == 2
        && taps->weights_buffer.shape[0] == targets && taps->weights_buffer.shape[1] > 0 && taps->shift >= 14
        && taps->shift <= 22) {
        taps->targets = targets;
        taps->count = taps->weights_buffer.shape[1];
        taps->first = taps->first_buffer.buf;
        taps->weights = taps->weights_buffer.buf;
        Py_ssize_t place = 0;
        while (place < targets && taps->first[place] >= 0 && taps->first[place] + taps->count <= source) place++;
        if (place == targets) {
            if (!is_reversed || reverse_taps(taps)) return 1;
            PyErr_NoMemory();
            return 0;
        }
    }
    PyErr_SetString(PyExc_ValueError, "taps are (int32 [targets], int16 [targets, count], 14 to 22) within the source");
    return 0;
}

void release_image(struct image *image)
{
    PyBuffer_Release(&image->buffer);
}

static void release_taps(struct taps *taps)
{
    PyBuffer_Release(&taps->first_buffer);
    PyBuffer_Release(&taps->weights_buffer);
    free(taps->memory);
}

PyDoc_STRVAR(resample_doc,
"resample(source, target, rows, columns, kept_bits, is_upside_down=False, is_mirrored=False)\n\n"
"Write into ``target`` what ``rows`` and ``columns`` say: (first source pixel, weights of it and of those behind it, shift) of each new\n"
"pixel along that side. The weights of a pixel add up to 2**shift; ``kept_bits`` are left between the two sides. The last two: the new\n"
"rows, and columns, are written in the opposite order.");

static PyObject *resample(PyObject *self, PyObject *arguments)
{
    struct image from, into;
    struct taps rows, columns;
    PyObject *source, *target, *down_taps, *across_taps;
    int kept_bits, is_upside_down = 0, is_mirrored = 0, is_made = 0;
    (void)self;
    memset(&from, 0, sizeof from), memset(&into, 0, sizeof into);
    memset(&rows, 0, sizeof rows), memset(&columns, 0, sizeof columns);
    if (!PyArg_ParseTuple(arguments, "OOOOi|pp:resample", &source, &target, &down_taps, &across_taps, &kept_bits, &is_upside_down,
                          &is_mirrored))
        return NULL;
    if (take_image(source, 0, &from) && take_image(target, PyBUF_WRITABLE, &into)
        && take_taps(down_taps, from.height, into.height, is_upside_down, &rows)
        && take_taps(across_taps, from.width, into.width, is_mirrored, &columns)) {
        if (from.channels != into.channels || kept_bits < 0 || kept_bits > KEPT_BITS_MAX || kept_bits + columns.shift > 23)
            PyErr_SetString(PyExc_ValueError, "other channels, or more bits than fit");
        else {
            Py_BEGIN_ALLOW_THREADS
            is_made = 1;
            if (rows.count > 1 || columns.count > 1)
                is_made = resample_rows(&from, &into, &rows, &columns, kept_bits);
            else if (from.channels == 3)
                /* constants, so that a pixel is copied without a loop */
                copy_rows(&from, &into, &rows, &columns, 3);
            else if (from.channels == 1)
                copy_rows(&from, &into, &rows, &columns, 1);
            else
                copy_rows(&from, &into, &rows, &columns, from.channels);
            Py_END_ALLOW_THREADS
            if (!is_made) PyErr_NoMemory();
        }
    }
    release_taps(&columns), release_taps(&rows), release_image(&into), release_image(&from);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(scale_doc,
"scale(source, target, is_area, is_upside_down=False, is_mirrored=False)\n\n"
"As ``resample``, with the weights of \"area\", or else of \"linear\".");

static PyObject *scale_images(PyObject *self, PyObject *arguments)
{
    struct image from, into;
    PyObject *source, *target;
    int is_area, is_upside_down = 0, is_mirrored = 0, is_made = 0;
    (void)self;
    memset(&from, 0, sizeof from), memset(&into, 0, sizeof into);
    if (!PyArg_ParseTuple(arguments, "OOp|pp:scale", &source, &target, &is_area, &is_upside_down, &is_mirrored)) return NULL;
    if (take_image(source, 0, &from) && take_image(target, PyBUF_WRITABLE, &into)) {
        if (from.channels != into.channels)
            PyErr_SetString(PyExc_ValueError, "other channels");
        else {
            Py_BEGIN_ALLOW_THREADS
            is_made = scale(&from, &into, is_area ? AREA : LINEAR, is_upside_down, is_mirrored);
            Py_END_ALLOW_THREADS
            if (!is_made) PyErr_NoMemory();
        }
    }
    release_image(&into), release_image(&from);
    if (!is_made) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_avx2_doc,
"use_avx2(is_used) -> bool\n\n"
"Resample and recolor with AVX2, which is the default where the processor has it, or without. Returns which it is from now on. The bytes are the same.");

static PyObject *use_avx2(PyObject *self, PyObject *is_used)
{
    (void)self;
    uses_avx2 = has_avx2 && PyObject_IsTrue(is_used);
    return PyBool_FromLong(uses_avx2);
}

static PyMethodDef METHODS[] = {
    {"count_levels", count_levels, METH_VARARGS, count_levels_doc},
    {"fill_polygon", fill_polygon, METH_VARARGS, fill_polygon_doc},
    {"fill_runs", fill_runs, METH_VARARGS, fill_runs_doc},
    {"recolor", recolor, METH_VARARGS, recolor_doc},
    {"remap", remap, METH_VARARGS, remap_doc},
    {"resample", resample, METH_VARARGS, resample_doc},
    {"scale", scale_images, METH_VARARGS, scale_doc},
    {"sharpen", sharpen, METH_VARARGS, sharpen_doc},
    {"use_avx2", use_avx2, METH_O, use_avx2_doc},
    {"warp", warp, METH_VARARGS, warp_doc},
    {"warp_parts", warp_parts, METH_VARARGS, warp_parts_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_pixels", "Pixels made of pixels, in whole numbers.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pixels(void)
{
    static struct scaling scaling = {take_image, scale};
    PyObject *module = PyModule_Create(&MODULE), *capsule = PyCapsule_New(&scaling, SCALING_NAME, NULL);
#ifdef HAS_VECTORS
    uses_avx2 = has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    if (!capsule || (module && PyModule_AddObjectRef(module, "SCALING", capsule) < 0)) Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}
