/* Finds the access points of a JPEG: reads all of its codes, decodes only DC differences.
 *
 * The stuffed zeros are taken out of the image data first, so that a position is one number of a
 * bit. Codes of AC coefficients need only be passed: a table of 2^WINDOW_BITS windows says for each
 * how many bits of whole codes it begins with, how many coefficients these are, and whether they
 * end the block.
 *
 * Invariant: a file that has access points is intact to its end, as strictly as libjpeg takes it
 * where all of its warnings are errors. So a cut by access points decodes as the whole file does.
 */
#include <stdlib.h>
#include <string.h>

#include "_jpeg.h"
#include "_jpeg_scan.h"

#define WINDOW_BITS 11
#define BLOCK_BYTES_MAX 256 /* 64 codes of 31 bits */
#define MCU_BYTES_MAX (BLOCKS_MAX * BLOCK_BYTES_MAX)
#define DC_MAX 32767

/* What a window begins with. `advance` is COEFFICIENTS where it has no whole code, so that one
 * comparison finds both that and the end of a block. */
struct jump {
    uint8_t bits, advance, is_end;
};

struct jumps {
    struct lookup lookup;
    struct jump jumps[1 << WINDOW_BITS];
};

/* The image data without stuffed zeros. */
struct plain {
    uint8_t *data;
    size_t length; /* bytes; zeros for an MCU follow */
    uint32_t *stuffed; /* bytes whose zero in front was removed */
    size_t stuffed_count;
};

/* --- tables --- */

static int make_jumps(const struct huffman *table, struct jumps *jumps)
{
    struct jump one[1 << WINDOW_BITS];
    uint8_t code_bits[1 << WINDOW_BITS];
    unsigned code = 0;
    int place = 0;
    if (!make_lookup(table, &jumps->lookup)) return 0;
    memset(code_bits, 0, sizeof code_bits);
    for (int length = 1; length <= WINDOW_BITS; length++, code <<= 1)
        for (int left = table->bits[length]; left > 0; left--, code++, place++) {
            const int size = table->symbols[place] & SIZE_MASK, run = table->symbols[place] >> 4;
            const int is_end = !size && run < ALL_ZEROS;
            const struct jump jump = {(uint8_t)(length + size), (uint8_t)(is_end ? 0 : run + 1), (uint8_t)is_end};
            for (unsigned window = code << (WINDOW_BITS - length); window < (code + 1) << (WINDOW_BITS - length); window++) {
                one[window] = jump;
                code_bits[window] = (uint8_t)length;
            }
        }
    for (unsigned window = 0; window < 1 << WINDOW_BITS; window++) {
        struct jump jump = {0, 0, 0};
        unsigned rest = window;
        int is_any = 0;
        while (!jump.is_end && jump.bits < WINDOW_BITS) {
            const int known = WINDOW_BITS - jump.bits;
            if (!code_bits[rest] || code_bits[rest] > known || jump.advance + one[rest].advance >= COEFFICIENTS) break;
            jump.bits = (uint8_t)(jump.bits + one[rest].bits);
            jump.advance = (uint8_t)(jump.advance + one[rest].advance);
            jump.is_end = one[rest].is_end;
            is_any = 1;
            if (jump.bits < WINDOW_BITS) rest = window << jump.bits & ((1 << WINDOW_BITS) - 1);
        }
        if (!is_any) jump.advance = COEFFICIENTS;
        jumps->jumps[window] = jump;
    }
    return 1;
}

/* --- the image data --- */

static void end_plain(struct plain *plain)
{
    free(plain->data);
    free(plain->stuffed);
}

/* Up to the end of the image. NOT_MINE where another marker, or none, is there. */
static enum verdict unstuff(const struct frame *frame, struct plain *plain)
{
    const uint8_t *at = frame->file + frame->scan, *const end = frame->file + frame->length;
    uint8_t *into;
    plain->data = malloc((size_t)(end - at) + MCU_BYTES_MAX);
    plain->stuffed = malloc(((size_t)(end - at) / MARKER_BYTES + 1) * sizeof *plain->stuffed);
    if (!plain->data || !plain->stuffed) return NO_MEMORY;
    into = plain->data;
    for (;;) {
        const uint8_t *const found = memchr(at, MARKER, (size_t)(end - at));
        if (!found || found + 1 == end) return NOT_MINE;
        memcpy(into, at, (size_t)(found - at));
        into += found - at;
        at = found + MARKER_BYTES;
        if (found[1]) {
            plain->length = (size_t)(into - plain->data);
            memset(into, 0, MCU_BYTES_MAX);
            return found[1] == EOI ? DONE : NOT_MINE;
        }
        *into++ = MARKER;
        plain->stuffed[plain->stuffed_count++] = (uint32_t)(into - plain->data);
    }
}

/* --- the walk --- */

static uint64_t bits_from(const uint8_t *data, size_t place) { return bytes_at(data + (place >> 3)) << (place & 7); }

/* Passes the AC coefficients of a block. Returns the bit behind it, or 0 where there is no code. */
static size_t pass_block(const struct jumps *jumps, const uint8_t *data, size_t place)
{
    uint64_t window = bits_from(data, place);
    for (int k = 1; k < COEFFICIENTS;) {
        struct jump jump = jumps->jumps[window >> (64 - WINDOW_BITS)];
        unsigned found;
        if (k + jump.advance < COEFFICIENTS) {
            k += jump.advance;
            place += jump.bits;
            if (jump.is_end) return place;
            window <<= jump.bits;
            jump = jumps->jumps[window >> (64 - WINDOW_BITS)];
            if (k + jump.advance < COEFFICIENTS) {
                k += jump.advance;
                place += jump.bits;
                if (jump.is_end) return place;
                window = bits_from(data, place);
                continue;
            }
        }
        found = symbol_at(&jumps->lookup, window);
        if (!found) return 0;
        place += (found >> 8) + (found & SIZE_MASK);
        if (!(found & SIZE_MASK) && (found >> 4 & 15) < ALL_ZEROS) return place;
        k += (int)(found >> 4 & 15) + 1;
        window = bits_from(data, place);
    }
    return place;
}

struct walk {
    const struct frame *frame;
    struct plain plain;
    struct lookup dc[TABLES];
    struct jumps ac[TABLES];
    struct points points;
};

static enum verdict prepare(struct walk *walk, int step_pixels)
{
    const struct frame *const frame = walk->frame;
    enum verdict verdict;
    for (int c = 0; c < frame->components; c++)
        if (!make_lookup(&frame->dc_tables[frame->dc[c]], &walk->dc[frame->dc[c]])
            || !make_jumps(&frame->ac_tables[frame->ac[c]], &walk->ac[frame->ac[c]]))
            return NOT_MINE;
    verdict = unstuff(frame, &walk->plain);
    if (verdict != DONE) return verdict;
    /* A block takes two bits or more, which limits the memory for points by the file's bytes. */
    if ((uint64_t)frame->across * (uint64_t)frame->down * (uint64_t)frame->blocks * 2 > 8 * (uint64_t)walk->plain.length) return NOT_MINE;
    walk->points.step = step_of(frame, step_pixels);
    walk->points.across = (frame->across + walk->points.step - 1) / walk->points.step;
    walk->points.at = malloc(((size_t)walk->points.across * (size_t)frame->down + 1) * sizeof *walk->points.at);
    return walk->points.at ? DONE : NO_MEMORY;
}

static enum verdict pass_all(struct walk *walk)
{
    const struct frame *const frame = walk->frame;
    const uint8_t *const data = walk->plain.data;
    const size_t end = 8 * walk->plain.length;
    size_t place = 0, zeros = 0;
    int dc[COMPONENTS_MAX] = {0};
    for (int row = 0; row < frame->down; row++)
        for (int column = 0; column < frame->across || row == frame->down - 1; column++) {
            if (column % walk->points.step == 0 || column == frame->across) {
                struct point *const point = &walk->points.at[walk->points.count++];
                while (zeros < walk->plain.stuffed_count && walk->plain.stuffed[zeros] <= place >> 3) zeros++;
                point->bit = (uint32_t)(8 * (frame->scan + zeros) + place);
                for (int c = 0; c < COMPONENTS_MAX; c++) point->dc[c] = (int16_t)dc[c];
                if (column == frame->across) break;
            }
            for (int block = 0; block < frame->blocks; block++) {
                const int c = frame->component[block];
                const uint64_t window = bits_from(data, place);
                const unsigned found = symbol_at(&walk->dc[frame->dc[c]], window);
                const int bits = (int)(found >> 8), size = (int)(found & 255);
                if (!found || size >= CATEGORIES) return NOT_MINE;
                dc[c] += difference_at(window << bits, size);
                if (dc[c] < -DC_MAX || dc[c] > DC_MAX) return NOT_MINE;
                place = pass_block(&walk->ac[frame->ac[c]], data, place + (size_t)(bits + size));
                if (!place) return NOT_MINE;
            }
            if (place > end) return NOT_MINE;
        }
    return end - place < 8 ? DONE : NOT_MINE;
}

enum verdict find_points(struct finding *finding)
{
    struct frame frame;
    struct walk *walk;
    enum verdict verdict;
    if (!read_frame(finding->data, finding->length, &frame)) return NOT_MINE;
    if (frame.height != finding->height || frame.width != finding->width) return NOT_MINE;
    walk = calloc(1, sizeof *walk);
    if (!walk) return NO_MEMORY;
    walk->frame = &frame;
    verdict = prepare(walk, finding->step_pixels);
    if (verdict == DONE) verdict = pass_all(walk);
    if (verdict == DONE) {
        finding->made = malloc(packed_bytes_max(&frame, &walk->points));
        if (finding->made) {
            const size_t end = frame.scan + walk->plain.length + walk->plain.stuffed_count;
            finding->made_length = pack_points(&frame, &walk->points, end, finding->made);
        } else {
            verdict = NO_MEMORY;
        }
    }
    end_plain(&walk->plain);
    free(walk->points.at);
    free(walk);
    return verdict;
}
