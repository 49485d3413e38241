/* Cuts a crop out of a JPEG by its access points: a smaller JPEG, of the file's own bits.
 *
 *     file    |header |......R0......|......R1......|......R2......|......R3......|
 *     crop                           |   '###'###'  |   '###'###'  |
 *     cut     |header'|DC DC DC|### shifted ####|DC DC DC|### shifted ####|ones|EOI|
 *                      the first MCU              the first MCU of the next row
 *
 * What lies between the first and the last column of the crop in a row of MCUs is one run of bits.
 * Rows follow each other without restart markers, beside which libjpeg leaves its fast decoder.
 * Only the first DC difference of each component of a row is coded again, from the predictor where
 * the row before ended: the access point there has it. Other blocks follow from these.
 *
 * Where the file's table has no code for a difference, its categories are added behind the last
 * code: no table has a code of all ones, so there is room for it (ITU T.81, C), and all codes that
 * were there keep their meaning.
 *
 * Invariant: nothing outside of the file is read, and nothing behind the memory for the cut is
 * written, whatever points and file say.
 */
#include <stdlib.h>
#include <string.h>

#include "_jpeg.h"
#include "_jpeg_scan.h"

/* what the first MCU of a row may grow by: each code and difference, stuffed */
#define ROW_BYTES_MAX (2 * 4 * 2 * COMPONENTS_MAX)
#define TABLE_BYTES_MAX (2 * MARKER_BYTES + 1 + CODE_BITS_MAX + 256)
/* what is copied of a broken one before that shows: 64 codes of 31 bits a block, stuffed */
#define CUT_MCU_BYTES_MAX (2 * BLOCKS_MAX * 256)
/* a crop is not cut out if it leaves out less than one of so many parts in front of its end */
#define PARTS 16
#define SYMBOL_BITS_MAX 32 /* a code and what follows it, at most 31 */

/* --- the codes of DC differences, with those that the file lacks --- */

struct dc_codes {
    struct lookup lookup;
    struct huffman table; /* with those that were added */
    uint16_t code[CATEGORIES];
    uint8_t length[CATEGORIES];
    unsigned added; /* a bit for each category */
    int is_added_used;
};

/* Returns 0 where there is no room for what is lacking, or the table is broken. */
static int complete(const struct huffman *table, struct dc_codes *codes)
{
    unsigned code = 0, next = 0;
    int place = 0, longest = 0, lacking = 0, length;
    if (!make_lookup(table, &codes->lookup)) return 0;
    codes->table = *table;
    for (int bits = 1; bits <= CODE_BITS_MAX; bits++, code <<= 1)
        for (int left = table->bits[bits]; left > 0; left--, code++, place++) {
            const int category = table->symbols[place];
            longest = bits;
            next = code + 1;
            if (category >= CATEGORIES) continue;
            codes->code[category] = (uint16_t)code;
            codes->length[category] = (uint8_t)bits;
        }
    for (int category = 0; category < CATEGORIES; category++)
        if (!codes->length[category]) {
            codes->added |= 1u << category;
            lacking++;
        }
    if (!lacking) return 1;
    for (length = longest; length <= CODE_BITS_MAX && (1u << length) - 1 - next < (unsigned)lacking; length++) next <<= 1;
    /* repeated codes can make many of one length, and the segment counts them in a byte */
    if (length > CODE_BITS_MAX || codes->table.count + lacking > 256 || codes->table.bits[length] + lacking > 255) return 0;
    for (int category = 0; category < CATEGORIES; category++)
        if (codes->added >> category & 1) {
            codes->code[category] = (uint16_t)next++;
            codes->length[category] = (uint8_t)length;
            codes->table.bits[length]++;
            codes->table.symbols[codes->table.count++] = (uint8_t)category;
        }
    return 1;
}

/* --- bits out of the file --- */

struct source {
    const uint8_t *file;
    size_t at, end; /* bytes: what is read next; where the image data end */
    uint64_t held; /* the first bits */
    int count;
};

static int is_stuffed(const struct source *from, size_t at) { return from->file[at] == 0 && from->file[at - 1] == MARKER; }

/* Zeros are behind the end. */
static void refill(struct source *from)
{
    while (from->count <= 56) {
        const uint8_t byte = from->at < from->end ? from->file[from->at] : 0;
        from->at += byte == MARKER ? MARKER_BYTES : 1;
        from->held |= (uint64_t)byte << (56 - from->count);
        from->count += 8;
    }
}

static void seek(struct source *from, uint32_t bit)
{
    from->at = bit >> 3;
    from->held = 0;
    from->count = 0;
    refill(from);
    from->held <<= bit & 7;
    from->count -= (int)(bit & 7);
}

static void skip(struct source *from, int count)
{
    from->held <<= count;
    from->count -= count;
}

/* --- bits into the cut --- */

struct sink {
    uint8_t *at;
    uint64_t held; /* the last `count` bits */
    int count; /* less than 8 */
};

static void write_byte(struct sink *to, uint8_t byte)
{
    *to->at++ = byte;
    if (byte == MARKER) *to->at++ = 0;
}

/* At most 32 bits, the last ones of `bits`. */
static void write_bits(struct sink *to, uint64_t bits, int count)
{
    to->held = to->held << count | (bits & (((uint64_t)1 << count) - 1));
    to->count += count;
    while (to->count >= 8) {
        to->count -= 8;
        write_byte(to, (uint8_t)(to->held >> to->count));
    }
}

static void write_bytes(uint8_t *at, uint64_t bytes)
{
    at[0] = (uint8_t)(bytes >> 56);
    at[1] = (uint8_t)(bytes >> 48);
    at[2] = (uint8_t)(bytes >> 40);
    at[3] = (uint8_t)(bytes >> 32);
    at[4] = (uint8_t)(bytes >> 24);
    at[5] = (uint8_t)(bytes >> 16);
    at[6] = (uint8_t)(bytes >> 8);
    at[7] = (uint8_t)bytes;
}

static int has_ones(uint64_t bytes)
{
    return ((~bytes - 0x0101010101010101u) & bytes & 0x8080808080808080u) != 0;
}

/* Copies what is up to the bit `end` of the file. Returns 0 where that is passed already. */
static int copy_bits(struct source *from, uint32_t end, struct sink *to)
{
    const uint8_t *const file = from->file;
    const size_t last = end >> 3;
    size_t at = from->at;
    uint64_t held;
    int count;
    /* Give back whole bytes that were read ahead. */
    for (; from->count >= 8; from->count -= 8) at -= at <= from->end && is_stuffed(from, at - 1) ? MARKER_BYTES : 1;
    if (from->count && at > last) { /* the end is within the byte that is held */
        const int wanted = from->count - (8 - (int)(end & 7));
        /* 2, where that byte is all ones, and has its zero */
        if (wanted < 0 || at - last > MARKER_BYTES) return 0;
        if (wanted) write_bits(to, from->held >> (64 - wanted), wanted);
        return 1;
    }
    if (at > last) return 0;
    if (from->count) write_bits(to, from->held >> (64 - from->count), from->count);
    count = to->count;
    held = to->held & ((1u << count) - 1);
    while (at < last) {
        const uint8_t byte = file[at];
        if (last - at >= 8) {
            const uint64_t bytes = bytes_at(file + at), made = bytes >> count | (count ? held << (64 - count) : 0);
            if (!has_ones(bytes) && !has_ones(made)) {
                write_bytes(to->at, made);
                to->at += 8;
                at += 8;
                held = bytes & ((1u << count) - 1);
                continue;
            }
        }
        write_byte(to, (uint8_t)(held << (8 - count) | byte >> count));
        held = byte & ((1u << count) - 1);
        at += byte == MARKER ? MARKER_BYTES : 1;
    }
    to->held = held;
    if (end & 7) write_bits(to, (uint64_t)file[last] >> (8 - (end & 7)), (int)(end & 7));
    return at == last;
}

/* --- the first MCU of a row --- */

struct splice {
    const struct frame *frame;
    struct dc_codes dc[TABLES];
    struct lookup ac[TABLES];
    struct points points;
    struct source from;
    struct sink to;
};

/* Copies the AC coefficients of a block. Returns 0 where there is no code. */
static int copy_block(struct splice *splice, const struct lookup *codes)
{
    for (int k = 1; k < COEFFICIENTS;) {
        unsigned found;
        int bits;
        if (splice->from.count < SYMBOL_BITS_MAX) refill(&splice->from);
        found = symbol_at(codes, splice->from.held);
        bits = (int)(found >> 8) + (int)(found & SIZE_MASK);
        if (!found) return 0;
        write_bits(&splice->to, splice->from.held >> (64 - bits), bits);
        skip(&splice->from, bits);
        if (!(found & SIZE_MASK) && (found >> 4 & 15) < ALL_ZEROS) return 1;
        k += (int)(found >> 4 & 15) + 1;
    }
    return 1;
}

/* Recodes the difference: from the value `before`, with which the row before ends in the cut,
 * instead of that in the file. */
static int recode(struct splice *splice, struct dc_codes *codes, int in_file, int before)
{
    const unsigned found = symbol_at(&codes->lookup, splice->from.held);
    const int size = (int)(found & 255);
    int difference, magnitude, category;
    if (!found || size >= CATEGORIES) return 0;
    skip(&splice->from, (int)(found >> 8));
    difference = difference_at(splice->from.held, size) + in_file - before;
    skip(&splice->from, size);
    magnitude = difference < 0 ? -difference : difference;
    category = magnitude ? 32 - __builtin_clz((unsigned)magnitude) : 0;
    if (category >= CATEGORIES) return 0;
    codes->is_added_used |= (int)(codes->added >> category & 1);
    write_bits(&splice->to, codes->code[category], codes->length[category]);
    write_bits(&splice->to, (uint64_t)(difference < 0 ? difference - 1 : difference), category);
    return 1;
}

/* Copies the first MCU of a row up to the first DC difference of its last component. */
static int begin_row(struct splice *splice, const int16_t *in_file, const int16_t *before)
{
    const struct frame *const frame = splice->frame;
    for (int block = 0, seen = -1; block < frame->blocks; block++) {
        const int c = frame->component[block];
        struct dc_codes *const codes = &splice->dc[frame->dc[c]];
        if (splice->from.count < SYMBOL_BITS_MAX) refill(&splice->from);
        if (c != seen) {
            if (!recode(splice, codes, in_file[c], before[c])) return 0;
            seen = c;
            if (c == frame->components - 1) return 1;
        } else {
            const unsigned found = symbol_at(&codes->lookup, splice->from.held);
            const int bits = (int)(found >> 8) + (int)(found & SIZE_MASK);
            if (!found) return 0;
            write_bits(&splice->to, splice->from.held >> (64 - bits), bits);
            skip(&splice->from, bits);
        }
        if (!copy_block(splice, &splice->ac[frame->ac[c]])) return 0;
    }
    return 1;
}

/* --- the header --- */

static uint8_t *write_u16(uint8_t *at, int number)
{
    *at++ = (uint8_t)(number >> 8);
    *at++ = (uint8_t)number;
    return at;
}

static uint8_t *write_table(uint8_t *at, int place, const struct huffman *table)
{
    *at++ = MARKER;
    *at++ = DHT;
    at = write_u16(at, MARKER_BYTES + 1 + CODE_BITS_MAX + table->count);
    *at++ = (uint8_t)place;
    memcpy(at, table->bits + 1, CODE_BITS_MAX);
    memcpy(at + CODE_BITS_MAX, table->symbols, (size_t)table->count);
    return at + CODE_BITS_MAX + table->count;
}

/* A segment that decoding needs. Of those of applications, JFIF and Adobe tell the colors; EXIF,
 * profiles and comments are many bytes. */
static int is_kept(int kind) { return (kind < 0xe0 && kind != 0xdd) || kind == 0xe0 || kind == 0xee; }

/* The header of a picture of this size, into frame->scan bytes, and TABLES tables. Returns the end
 * of the header. */
static uint8_t *write_header(const struct splice *splice, int height, int width, uint8_t *at)
{
    const struct frame *const frame = splice->frame;
    const uint8_t *segment = frame->file + MARKER_BYTES;
    *at++ = MARKER;
    *at++ = SOI;
    while (segment < frame->file + frame->scan) {
        const size_t bytes = MARKER_BYTES + (size_t)(segment[2] << 8 | segment[3]);
        if (segment[1] == SOS)
            for (int place = 0; place < TABLES; place++)
                if (splice->dc[place].is_added_used) at = write_table(at, place, &splice->dc[place].table);
        if (is_kept(segment[1])) {
            memcpy(at, segment, bytes);
            if (segment == frame->file + frame->frame) write_u16(write_u16(at + 5, height), width);
            at += bytes;
        }
        segment += bytes;
    }
    return at;
}

/* --- the cut --- */

static int smaller(int whole, int part, struct span taken)
{
    const int end = taken.end * part;
    return (end < whole ? end : whole) - taken.first * part;
}

/* Plans a cut in whole steps. Returns whether it leaves out enough to be worth it. */
static int choose_spans(struct splicing *splicing, const struct frame *frame, int step)
{
    const int across = frame->mcu_width / 8, down = frame->mcu_height / 8, eighths = splicing->eighths;
    const struct box *const box = &splicing->box;
    struct span *const rows = &splicing->rows, *const columns = &splicing->columns;
    const int height = (frame->height * eighths + 7) / 8, width = (frame->width * eighths + 7) / 8;
    *rows = mcus_under(box->top, box->height, height, down * eighths, down);
    *columns = mcus_under(box->left, box->width, width, across * eighths, across);
    columns->first -= columns->first % step;
    columns->end = (columns->end + step - 1) / step * step;
    if (columns->end > frame->across) columns->end = frame->across;
    return PARTS * (long long)(rows->end - rows->first) * (columns->end - columns->first)
        <= (PARTS - 1) * (long long)rows->end * frame->across;
}

static int make_codes(struct splice *splice)
{
    const struct frame *const frame = splice->frame;
    for (int c = 0; c < frame->components; c++) {
        struct dc_codes *const codes = &splice->dc[frame->dc[c]];
        if (!codes->table.count && !complete(&frame->dc_tables[frame->dc[c]], codes)) return 0;
        /* of the last component, nothing is read behind the first difference */
        if (c < frame->components - 1 && !make_lookup(&frame->ac_tables[frame->ac[c]], &splice->ac[frame->ac[c]])) return 0;
    }
    return 1;
}

/* The points around a row's run of bits. The last column ends at the next row's first point. */
static void run_of(const struct splicing *splicing, const struct splice *splice, int row, const struct point **begin,
                   const struct point **end)
{
    const struct points *const points = &splice->points;
    const struct point *const first = points->at + (size_t)(row - points->first_row) * (size_t)points->across;
    const int is_to_end = splicing->columns.end == splice->frame->across;
    *begin = first + splicing->columns.first / points->step;
    *end = first + (is_to_end ? points->across : splicing->columns.end / points->step);
}

/* Bytes that the rows take at most; 0 where their runs are none. */
static size_t rows_bytes_max(const struct splicing *splicing, const struct splice *splice)
{
    size_t bytes = CUT_MCU_BYTES_MAX;
    for (int row = splicing->rows.first; row < splicing->rows.end; row++) {
        const struct point *begin, *end;
        run_of(splicing, splice, row, &begin, &end);
        if (end->bit < begin->bit) return 0;
        /* all may have to be stuffed */
        bytes += 2 * ((end->bit - begin->bit) / 8 + 2) + ROW_BYTES_MAX;
    }
    return bytes;
}

/* Returns 0 where the file is not as its points say. */
static int write_rows(const struct splicing *splicing, struct splice *splice)
{
    static const int16_t NONE[COMPONENTS_MAX] = {0};
    const int is_whole = splicing->columns.first == 0 && splicing->columns.end == splice->frame->across;
    const int16_t *before = NONE;
    for (int row = splicing->rows.first; row < splicing->rows.end; row++) {
        const struct point *begin, *end, *last;
        run_of(splicing, splice, row, &begin, &end);
        if (is_whole) run_of(splicing, splice, splicing->rows.end - 1, &last, &end);
        seek(&splice->from, begin->bit);
        if (!begin_row(splice, begin->dc, before) || !copy_bits(&splice->from, end->bit, &splice->to)) return 0;
        if (is_whole) break; /* whole rows follow each other in the file, too */
        before = end->dc;
    }
    if (splice->to.count) write_bits(&splice->to, 0xff, 8 - splice->to.count);
    *splice->to.at++ = MARKER;
    *splice->to.at++ = EOI;
    return 1;
}

/* Cuts with the points of the rows. The header is written last: it has the added codes. */
static enum verdict write_cut(struct splicing *splicing, struct splice *splice)
{
    const struct frame *const frame = splice->frame;
    const size_t header_max = frame->scan + TABLES * TABLE_BYTES_MAX, rows_max = rows_bytes_max(splicing, splice);
    uint8_t *begin, *header_end;
    if (!rows_max) return NOT_MINE;
    splicing->memory = malloc(header_max + rows_max + 1 + MARKER_BYTES);
    if (!splicing->memory) return NO_MEMORY;
    begin = splicing->memory + header_max;
    splice->to.at = begin;
    if (!write_rows(splicing, splice)) return NOT_MINE;
    header_end = write_header(splice, smaller(frame->height, frame->mcu_height, splicing->rows),
                              smaller(frame->width, frame->mcu_width, splicing->columns), splicing->memory);
    splicing->made = begin - (header_end - splicing->memory);
    splicing->made_length = (size_t)(splice->to.at - splicing->made);
    memmove(splicing->made, splicing->memory, (size_t)(header_end - splicing->memory));
    splicing->top = splicing->rows.first * frame->mcu_height * splicing->eighths / 8;
    splicing->left = splicing->columns.first * frame->mcu_width * splicing->eighths / 8;
    return DONE;
}

enum verdict splice_crop(struct splicing *splicing)
{
    struct frame frame;
    struct record record;
    struct splice *splice;
    enum verdict verdict;
    if (!read_frame(splicing->file, splicing->length, &frame) || frame.height != splicing->height || frame.width != splicing->width)
        return NOT_MINE;
    if (!read_record(&frame, splicing->record, splicing->record_length, &record)) return NOT_MINE;
    splicing->fits = 1;
    record.is_part = splicing->is_part;
    if (!choose_spans(splicing, &frame, record.step)) return NOT_MINE;
    splice = calloc(1, sizeof *splice);
    if (!splice) return NO_MEMORY;
    splice->frame = &frame;
    splice->from.file = frame.file;
    splice->from.end = record.end;
    verdict = unpack_points(&frame, &record, splicing->rows, &splice->points);
    if (verdict == DONE) verdict = make_codes(splice) ? write_cut(splicing, splice) : NOT_MINE;
    else if (verdict == NOT_MINE) splicing->fits = 0;
    free(splice->points.at);
    free(splice);
    return verdict;
}

enum verdict part_of_crop(struct splicing *splicing, size_t *first, size_t *end)
{
    struct frame frame;
    struct record record;
    /* Of the file, its header is there. */
    if (!read_frame(splicing->file, splicing->length, &frame) || frame.height != splicing->height || frame.width != splicing->width)
        return NOT_MINE;
    frame.length = file_bytes_of(splicing->record, splicing->record_length);
    if (!read_record(&frame, splicing->record, splicing->record_length, &record)) return NOT_MINE;
    if (!choose_spans(splicing, &frame, record.step)) return NOT_MINE;
    return bytes_of_rows(&frame, &record, splicing->rows, first, end) ? DONE : NOT_MINE;
}
