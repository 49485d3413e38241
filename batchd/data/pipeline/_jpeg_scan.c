/* The header of a baseline JPEG, its Huffman codes, and the record of its access points.
 *
 *     record    |version|components|step|rows of a group|file bytes|height|width|scan|end|
 *               |checksum of the header|checksum, place| of each group |points of group 0|
 *               |points of group 1| ... |the last point|checksum of the record|
 *     point     |varint: bits since the point before|
 *               |zigzag varint: DC - that of the point before| of each component
 *
 * A group is some rows of MCUs. It begins with absolute values, so that a crop skips the points
 * above it, and its checksum is of the bytes of the file between its first point and that of the
 * next group. So a crop is only cut out of a file that is the one that was walked, down to the last
 * row of the crop: old points would decode to wrong pixels without an error, and damage above the
 * crop concerns it without points, too.
 *
 * The checksum is XXH64 of https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: it takes
 * some 5 us for an image of 100 kB, and the CRC-32 of zlib takes 20.
 *
 * All numbers are little-endian.
 */
#include "_jpeg_scan.h"

#include <stdlib.h>
#include <string.h>

#define VERSION 1
#define GROUP_ROWS 8
#define HEAD_BYTES 28
#define CHECKSUM_BYTES 8
#define GROUP_BYTES 12
#define POINT_BYTES_MAX (5 + 3 * COMPONENTS_MAX)
#define LENGTH_MAX ((size_t)1 << 28) /* so that a bit of it is a number of 32 bits */

/* --- the header --- */

static int number_at(const uint8_t *at) { return at[0] << 8 | at[1]; }

/* The tables of a DHT segment. */
static int read_tables(const uint8_t *at, const uint8_t *end, struct frame *frame)
{
    while (at < end) {
        const int kind = *at >> 4, place = *at & 15;
        struct huffman *table;
        int count = 0;
        if (kind > 1 || place >= TABLES || end - at < 1 + CODE_BITS_MAX) return 0;
        table = kind ? &frame->ac_tables[place] : &frame->dc_tables[place];
        for (int length = 1; length <= CODE_BITS_MAX; length++) count += table->bits[length] = at[length];
        at += 1 + CODE_BITS_MAX;
        if (count > 256 || end - at < count) return 0;
        memcpy(table->symbols, at, (size_t)count);
        table->count = count;
        at += count;
    }
    return 1;
}

/* The sampling factors that the decoder of crops takes: chroma is never finer than luma. */
static int is_usual_sampling(int components, const uint8_t *sampling)
{
    const int luma = sampling[0];
    if (components == 1) return luma == 0x11;
    return sampling[1] == 0x11 && sampling[2] == 0x11
        && (luma == 0x11 || luma == 0x21 || luma == 0x12 || luma == 0x22 || luma == 0x41);
}

static int read_size(const uint8_t *at, size_t length, struct frame *frame, uint8_t *ids)
{
    uint8_t sampling[COMPONENTS_MAX] = {0};
    if (length < 6 || at[0] != 8 || (at[5] != 1 && at[5] != 3) || length != 6u + 3u * at[5]) return 0;
    frame->height = number_at(at + 1);
    frame->width = number_at(at + 3);
    frame->components = at[5];
    for (int c = 0; c < frame->components; c++) {
        ids[c] = at[6 + 3 * c];
        sampling[c] = at[7 + 3 * c];
        for (int other = 0; other < c; other++)
            if (ids[other] == ids[c]) return 0;
    }
    /* libjpeg takes no more */
    if (frame->height > JPEG_MAX_DIMENSION || frame->width > JPEG_MAX_DIMENSION) return 0;
    if (!frame->height || !frame->width || !is_usual_sampling(frame->components, sampling)) return 0;
    frame->mcu_width = 8 * (sampling[0] >> 4);
    frame->mcu_height = 8 * (sampling[0] & 15);
    frame->across = (frame->width + frame->mcu_width - 1) / frame->mcu_width;
    frame->down = (frame->height + frame->mcu_height - 1) / frame->mcu_height;
    for (int c = 0; c < frame->components; c++)
        for (int block = (sampling[c] >> 4) * (sampling[c] & 15); block > 0; block--)
            frame->component[frame->blocks++] = c;
    return 1;
}

/* All components in one scan, in their order, with tables that are there. */
static int read_scan(const uint8_t *at, size_t length, struct frame *frame, const uint8_t *ids)
{
    const int components = frame->components;
    if (!components || length != 4u + 2u * (size_t)components || at[0] != components) return 0;
    for (int c = 0; c < components; c++) {
        frame->dc[c] = at[2 + 2 * c] >> 4;
        frame->ac[c] = at[2 + 2 * c] & 15;
        if (at[1 + 2 * c] != ids[c] || frame->dc[c] >= TABLES || frame->ac[c] >= TABLES) return 0;
        if (!frame->dc_tables[frame->dc[c]].count || !frame->ac_tables[frame->ac[c]].count) return 0;
    }
    at += 1 + 2 * components;
    return at[0] == 0 && at[1] == COEFFICIENTS - 1 && at[2] == 0;
}

int read_frame(const uint8_t *file, size_t length, struct frame *frame)
{
    uint8_t ids[COMPONENTS_MAX];
    size_t place = MARKER_BYTES;
    memset(frame, 0, sizeof *frame);
    frame->file = file;
    frame->length = length;
    if (length < MARKER_BYTES || length > LENGTH_MAX || file[0] != MARKER || file[1] != SOI) return 0;
    while (place + 2 * MARKER_BYTES <= length && file[place] == MARKER) {
        const int kind = file[place + 1];
        const uint8_t *const at = file + place + 2 * MARKER_BYTES;
        const size_t bytes = (size_t)number_at(at - MARKER_BYTES);
        size_t content;
        if (bytes < MARKER_BYTES || bytes > length - place - MARKER_BYTES) return 0;
        content = bytes - MARKER_BYTES;
        if (kind == SOF0 || kind == SOF1) {
            if (frame->frame || !read_size(at, content, frame, ids)) return 0;
            frame->frame = place;
        } else if (kind == DHT) {
            if (!read_tables(at, at + content, frame)) return 0;
        } else if (kind == SOS) {
            frame->scan = place + MARKER_BYTES + bytes;
            return read_scan(at, content, frame, ids);
        } else if (kind == 0xdd) { /* DRI: restart markers, unless it is 0 */
            if (content != 2 || number_at(at)) return 0;
        } else if (kind != 0xdb && kind != 0xfe && (kind < 0xe0 || kind > 0xef)) {
            /* DQT, COM, APPn */
            return 0;
        }
        place += MARKER_BYTES + bytes;
    }
    return 0;
}

/* --- codes --- */

int make_lookup(const struct huffman *table, struct lookup *lookup)
{
    int32_t code = 0;
    int place = 0;
    memset(lookup->fast, 0, sizeof lookup->fast);
    memcpy(lookup->symbols, table->symbols, sizeof lookup->symbols);
    for (int length = 1; length <= CODE_BITS_MAX; length++, code <<= 1) {
        lookup->offset[length] = place - code;
        for (int left = table->bits[length]; left > 0; left--, code++, place++) {
            if (length > LOOKUP_BITS) continue;
            for (int32_t window = code << (LOOKUP_BITS - length); window < (code + 1) << (LOOKUP_BITS - length); window++)
                if (window < 1 << LOOKUP_BITS)
                    lookup->fast[window] = (uint16_t)(length << 8 | table->symbols[place]);
        }
        lookup->end[length] = code;
        if (code >= 1 << length) return 0; /* no code may be all ones: ITU T.81, C */
    }
    return 1;
}

/* --- the checksum --- */

#define PRIME1 0x9e3779b185ebca87u
#define PRIME2 0xc2b2ae3d27d4eb4fu
#define PRIME3 0x165667b19e3779f9u
#define PRIME4 0x85ebca77c2b2ae63u
#define PRIME5 0x27d4eb2f165667c5u

static inline uint64_t rotated(uint64_t number, int bits) { return number << bits | number >> (64 - bits); }

static inline uint64_t round_of(uint64_t lane, uint64_t input) { return rotated(lane + input * PRIME2, 31) * PRIME1; }

static inline uint64_t read_u64(const uint8_t *at)
{
    return (uint64_t)at[7] << 56 | (uint64_t)at[6] << 48 | (uint64_t)at[5] << 40 | (uint64_t)at[4] << 32 | (uint64_t)at[3] << 24
        | (uint64_t)at[2] << 16 | (uint64_t)at[1] << 8 | (uint64_t)at[0];
}

static uint32_t read_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t checksum(const uint8_t *at, size_t length)
{
    const uint8_t *const end = at + length;
    uint64_t sum = PRIME5;
    if (length >= 32) {
        uint64_t one = PRIME1 + PRIME2, two = PRIME2, three = 0, four = 0 - PRIME1;
        for (; end - at >= 32; at += 32) {
            one = round_of(one, read_u64(at));
            two = round_of(two, read_u64(at + 8));
            three = round_of(three, read_u64(at + 16));
            four = round_of(four, read_u64(at + 24));
        }
        sum = rotated(one, 1) + rotated(two, 7) + rotated(three, 12) + rotated(four, 18);
        sum = (sum ^ round_of(0, one)) * PRIME1 + PRIME4;
        sum = (sum ^ round_of(0, two)) * PRIME1 + PRIME4;
        sum = (sum ^ round_of(0, three)) * PRIME1 + PRIME4;
        sum = (sum ^ round_of(0, four)) * PRIME1 + PRIME4;
    }
    sum += length;
    for (; end - at >= 8; at += 8) sum = rotated(sum ^ round_of(0, read_u64(at)), 27) * PRIME1 + PRIME4;
    if (end - at >= 4) {
        sum = rotated(sum ^ read_u32(at) * PRIME1, 23) * PRIME2 + PRIME3;
        at += 4;
    }
    for (; at < end; at++) sum = rotated(sum ^ *at * PRIME5, 11) * PRIME1;
    sum = (sum ^ sum >> 33) * PRIME2;
    sum = (sum ^ sum >> 29) * PRIME3;
    return sum ^ sum >> 32;
}

/* --- the record --- */

int step_of(const struct frame *frame, int pixels)
{
    const int step = pixels / frame->mcu_width;
    return step > 255 ? 255 : step > 1 ? step : 1;
}

static int points_across(const struct frame *frame, int step) { return (frame->across + step - 1) / step; }

/* The last group is the point behind the last MCU. */
static int groups_of(const struct frame *frame) { return (frame->down + GROUP_ROWS - 1) / GROUP_ROWS + 1; }

static int rows_in_group(const struct frame *frame, int group)
{
    const int left = frame->down - group * GROUP_ROWS;
    return left < GROUP_ROWS ? left : GROUP_ROWS;
}

/* Of the bytes of a file with the bits from `first` to `end`. */
static uint64_t group_checksum(const struct frame *frame, uint32_t first, uint32_t end)
{
    return checksum(frame->file + (first >> 3), ((size_t)end + 7) / 8 - (first >> 3));
}

size_t packed_bytes_max(const struct frame *frame, const struct points *points)
{
    return HEAD_BYTES + GROUP_BYTES * (size_t)groups_of(frame) + POINT_BYTES_MAX * points->count + CHECKSUM_BYTES;
}

static uint8_t *write_number(uint8_t *at, uint64_t number, int bytes)
{
    for (; bytes > 0; bytes--, number >>= 8) *at++ = (uint8_t)number;
    return at;
}

static uint8_t *write_varint(uint8_t *at, uint32_t number)
{
    for (; number > 127; number >>= 7) *at++ = (uint8_t)(number | 128);
    *at++ = (uint8_t)number;
    return at;
}

/* NULL where the record ends before, or the number is longer than 32 bits. */
static const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint32_t *number)
{
    *number = 0;
    for (int shift = 0; shift < 35 && at < end; shift += 7) {
        const uint8_t byte = *at++;
        if (shift == 28 && byte > 15) return NULL;
        *number |= (uint32_t)(byte & 127) << shift;
        if (byte < 128) return at;
    }
    return NULL;
}

static uint8_t *pack_point(uint8_t *at, const struct point *point, const struct point *before, int components)
{
    at = write_varint(at, point->bit - before->bit);
    for (int c = 0; c < components; c++) {
        const int32_t difference = point->dc[c] - before->dc[c];
        at = write_varint(at, difference < 0 ? (uint32_t)(-2 * difference - 1) : (uint32_t)(2 * difference));
    }
    return at;
}

static const uint8_t *unpack_point(const uint8_t *at, const uint8_t *end, const struct point *before, int components,
                                   struct point *point)
{
    uint32_t number;
    at = read_varint(at, end, &number);
    if (!at || number > UINT32_MAX - before->bit) return NULL;
    point->bit = before->bit + number;
    for (int c = 0; c < components; c++) {
        at = read_varint(at, end, &number);
        if (!at) return NULL;
        point->dc[c] = (int16_t)(uint16_t)((uint32_t)before->dc[c] + (number >> 1 ^ (0 - (number & 1))));
    }
    return at;
}

size_t pack_points(const struct frame *frame, const struct points *points, size_t end, uint8_t *into)
{
    static const struct point NONE = {0, {0}};
    const int groups = groups_of(frame) - 1; /* the last one is the point behind the last MCU */
    uint8_t *directory, *at = into;
    *at++ = VERSION;
    *at++ = (uint8_t)frame->components;
    *at++ = (uint8_t)points->step;
    *at++ = GROUP_ROWS;
    at = write_number(at, frame->length, 4);
    at = write_number(at, (uint64_t)frame->height, 2);
    at = write_number(at, (uint64_t)frame->width, 2);
    at = write_number(at, frame->scan, 4);
    at = write_number(at, end, 4);
    at = write_number(at, checksum(frame->file, frame->scan), 8);
    directory = at;
    at += GROUP_BYTES * (groups + 1);
    for (int group = 0; group < groups; group++) {
        const struct point *const first = points->at + (size_t)group * GROUP_ROWS * (size_t)points->across;
        const struct point *const end_of_group = first + (size_t)rows_in_group(frame, group) * (size_t)points->across;
        const struct point *before = &NONE;
        directory = write_number(directory, group_checksum(frame, first->bit, end_of_group->bit), 8);
        directory = write_number(directory, (uint64_t)(at - into), 4);
        for (const struct point *point = first; point < end_of_group; before = point++) at = pack_point(at, point, before, frame->components);
    }
    /* behind the last point, there is nothing of the picture */
    directory = write_number(directory, 0, 8);
    write_number(directory, (uint64_t)(at - into), 4);
    at = pack_point(at, points->at + points->count - 1, &NONE, frame->components);
    at = write_number(at, checksum(into, (size_t)(at - into)), CHECKSUM_BYTES);
    return (size_t)(at - into);
}

size_t file_bytes_of(const uint8_t *record, size_t length) { return length < HEAD_BYTES ? 0 : read_u32(record + 4); }

int read_record(const struct frame *frame, const uint8_t *bytes, size_t length, struct record *record)
{
    if (length < HEAD_BYTES + CHECKSUM_BYTES) return 0;
    length -= CHECKSUM_BYTES;
    if (read_u64(bytes + length) != checksum(bytes, length)) return 0;
    record->bytes = bytes;
    record->length = length;
    record->is_part = 0;
    if (bytes[0] != VERSION || bytes[1] != frame->components || !bytes[2]) return 0;
    if (bytes[3] != GROUP_ROWS || read_u32(bytes + 4) != frame->length) return 0;
    if ((bytes[8] | bytes[9] << 8) != frame->height || (bytes[10] | bytes[11] << 8) != frame->width) return 0;
    record->step = bytes[2];
    record->across = points_across(frame, record->step);
    record->end = read_u32(bytes + 16);
    if (read_u32(bytes + 12) != frame->scan || record->end < frame->scan || record->end > frame->length) return 0;
    if (length - HEAD_BYTES < GROUP_BYTES * (size_t)groups_of(frame)) return 0;
    return read_u64(bytes + 20) == checksum(frame->file, frame->scan);
}

static const uint8_t *directory_of(const struct record *record, int group)
{
    return record->bytes + HEAD_BYTES + GROUP_BYTES * (size_t)group;
}

/* Reads the points of a group, or its first ones. Returns 0 if they are not the file's. */
static int unpack_group(const struct frame *frame, const struct record *record, int group, size_t count, struct point *into)
{
    static const struct point NONE = {0, {0}};
    const size_t start = read_u32(directory_of(record, group) + 8);
    const uint8_t *const end = record->bytes + record->length, *at;
    const struct point *before = &NONE;
    if (start > record->length) return 0;
    at = record->bytes + start;
    for (; count > 0; count--, before = into++) {
        at = unpack_point(at, end, before, frame->components, into);
        if (!at || into->bit < 8 * frame->scan || into->bit > 8 * record->end) return 0;
    }
    return 1;
}

/* Are the bytes of some groups those of the record? */
static int is_unchanged(const struct frame *frame, const struct record *record, int first, int groups_end)
{
    struct point begin, end;
    if (!unpack_group(frame, record, first, 1, &begin)) return 0;
    for (int group = first; group < groups_end; group++, begin = end) {
        if (!unpack_group(frame, record, group + 1, 1, &end) || end.bit < begin.bit) return 0;
        if (read_u64(directory_of(record, group)) != group_checksum(frame, begin.bit, end.bit)) return 0;
    }
    return 1;
}

enum verdict unpack_points(const struct frame *frame, const struct record *record, struct span rows, struct points *points)
{
    const int first = rows.first / GROUP_ROWS, end = (rows.end + GROUP_ROWS - 1) / GROUP_ROWS;
    const int rows_end = end * GROUP_ROWS < frame->down ? end * GROUP_ROWS : frame->down;
    struct point *at;
    points->step = record->step;
    points->across = record->across;
    points->first_row = first * GROUP_ROWS;
    points->count = (size_t)(rows_end - points->first_row) * (size_t)points->across + 1;
    if (points->count > record->length) return NOT_MINE; /* each takes a byte or more */
    points->at = malloc(points->count * sizeof *points->at);
    if (!points->at) return NO_MEMORY;
    at = points->at;
    for (int group = first; group < end; group++) {
        const size_t count = (size_t)rows_in_group(frame, group) * (size_t)points->across;
        if (!unpack_group(frame, record, group, count, at)) return NOT_MINE;
        at += count;
    }
    if (!unpack_group(frame, record, end, 1, at)) return NOT_MINE;
    return is_unchanged(frame, record, record->is_part ? first : 0, end) ? DONE : NOT_MINE;
}

int bytes_of_rows(const struct frame *frame, const struct record *record, struct span rows, size_t *first, size_t *end)
{
    struct point begin, behind;
    if (!unpack_group(frame, record, rows.first / GROUP_ROWS, 1, &begin)) return 0;
    if (!unpack_group(frame, record, (rows.end + GROUP_ROWS - 1) / GROUP_ROWS, 1, &behind) || behind.bit < begin.bit) return 0;
    *first = begin.bit >> 3;
    *end = ((size_t)behind.bit + 7) / 8;
    return 1;
}
