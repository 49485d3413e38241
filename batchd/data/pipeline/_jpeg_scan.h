/* Reads parts of a baseline JPEG without libjpeg: header, Huffman codes, access points.
 *
 *     _jpeg_scan.c        the header, the codes, and the record in which access points are kept
 *     _jpeg_walk.c        finds the access points of a file: once for each file
 *     _jpeg_splice.c      cuts a crop out of a file by its access points, as a smaller JPEG
 *
 * An access point is a bit of the file and the DC predictors there: enough to begin decoding in the
 * middle. (The word is that of zran.c, which is zlib's example of random access into gzip files.)
 *
 *     file     |header|......row 0......|......row 1......|......row 2......|    one stream of bits
 *     points          '    '    '    '  '    '    '    '  '    '    '    '  '    every STEP_PIXELS
 *
 * Invariant: nothing outside of the file and the record is read, whatever these say.
 */
#ifndef BATCHD_JPEG_SCAN_H
#define BATCHD_JPEG_SCAN_H

#include <stddef.h>
#include <stdint.h>

#include "_jpeg.h"

#define COMPONENTS_MAX 3
#define BLOCKS_MAX 6 /* of an MCU */
#define TABLES 4
#define LOOKUP_BITS 9
#define CODE_BITS_MAX 16
#define COEFFICIENTS 64
#define CATEGORIES 12 /* of DC differences, with 8 bits a sample: ITU T.81, table F.1 */
#define SIZE_MASK 15 /* of a symbol of AC coefficients; the run is above it */
#define ALL_ZEROS 15 /* the run of ZRL: 16 zeros, and no coefficient */
#define MARKER 0xff
#define SOF0 0xc0
#define SOF1 0xc1
#define DHT 0xc4
#define SOI 0xd8
#define EOI 0xd9
#define SOS 0xda
#define MARKER_BYTES 2

/* A Huffman table as a DHT segment has it: `bits[n]` codes of n bits. */
struct huffman {
    int count; /* of symbols; 0: there is no such table */
    uint8_t bits[CODE_BITS_MAX + 1];
    uint8_t symbols[256];
};

/* The same, to find a symbol by the bits that begin with its code. */
struct lookup {
    uint16_t fast[1 << LOOKUP_BITS]; /* length << 8 | symbol, or 0 where the code is longer */
    int32_t end[CODE_BITS_MAX + 1]; /* behind the last code of this length */
    int32_t offset[CODE_BITS_MAX + 1]; /* from a code of this length to the place of its symbol */
    uint8_t symbols[256];
};

/* The header of a baseline file with one scan, without restart markers, of a usual sampling. */
struct frame {
    const uint8_t *file;
    size_t length, scan, frame; /* bytes; where the image data begin, and the SOF segment */
    int height, width, mcu_height, mcu_width; /* pixels */
    int across, down; /* MCUs */
    int components, blocks; /* blocks of an MCU */
    int component[BLOCKS_MAX]; /* of each block */
    int dc[COMPONENTS_MAX], ac[COMPONENTS_MAX]; /* the tables of each component */
    struct huffman dc_tables[TABLES], ac_tables[TABLES];
};

/* Reads a header. Returns 0 for files of another kind, and broken ones: libjpeg says which. */
int read_frame(const uint8_t *file, size_t length, struct frame *frame);

/* Returns 0 where the codes of a table do not fit into their bits. */
int make_lookup(const struct huffman *table, struct lookup *lookup);

/* The symbol whose code these bits begin with, as length << 8 | symbol; 0 where there is none. */
static inline unsigned symbol_at(const struct lookup *lookup, uint64_t window)
{
    const unsigned found = lookup->fast[window >> (64 - LOOKUP_BITS)];
    if (found) return found;
    for (int length = LOOKUP_BITS + 1; length <= CODE_BITS_MAX; length++) {
        const int32_t code = (int32_t)(window >> (64 - length));
        if (code < lookup->end[length]) return (unsigned)length << 8 | lookup->symbols[code + lookup->offset[length]];
    }
    return 0;
}

/* The difference that `size` bits, the first ones of the window, stand for: ITU T.81, F.2.2.1. */
static inline int difference_at(uint64_t window, int size)
{
    const int value = size ? (int)(window >> (64 - size)) : 0;
    return size && value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

/* Eight bytes, as one number whose first bit is the first one of the file. */
static inline uint64_t bytes_at(const uint8_t *at)
{
    return (uint64_t)at[0] << 56 | (uint64_t)at[1] << 48 | (uint64_t)at[2] << 40 | (uint64_t)at[3] << 32 | (uint64_t)at[4] << 24
        | (uint64_t)at[5] << 16 | (uint64_t)at[6] << 8 | (uint64_t)at[7];
}

/* --- access points --- */

struct point {
    uint32_t bit; /* of the file; behind a stuffed zero, where a byte of ones is in front of it */
    int16_t dc[COMPONENTS_MAX]; /* predictors */
};

/* The points of a file: in each row those in front of MCU 0, step, 2 step ...; one behind all. */
struct points {
    int step; /* MCUs */
    int across; /* of each row */
    int first_row; /* of MCUs */
    size_t count;
    struct point *at;
};

/* MCUs between two points, about so many pixels. */
int step_of(const struct frame *frame, int pixels);

/* Bytes that `pack_points` writes at most. */
size_t packed_bytes_max(const struct frame *frame, const struct points *points);

/* Writes the record of a file, whose image data end at `end`. Returns its bytes. */
size_t pack_points(const struct frame *frame, const struct points *points, size_t end, uint8_t *into);

/* The record of a file, checked against its header. */
struct record {
    const uint8_t *bytes;
    size_t length, end; /* bytes; of the file: where the image data end */
    int step, across;
    int is_part; /* of the file, only the bytes of some groups are there */
};

/* The length of the file that a record is about, in bytes; 0 where it does not say. */
size_t file_bytes_of(const uint8_t *record, size_t length);

/* Returns 0 where the record is not one of this file, as far as its header tells. */
int read_record(const struct frame *frame, const uint8_t *bytes, size_t length, struct record *record);

/* The bytes of the file that hold the groups with these MCU rows. Returns 0: a broken record. */
int bytes_of_rows(const struct frame *frame, const struct record *record, struct span rows, size_t *first, size_t *end);

/* Reads the points of all groups with these MCU rows, and the first one behind, into memory that
 * the caller frees. NOT_MINE where the record is broken, or the bytes of the file up to there (of a
 * part: the bytes of these groups) are others than those that it was made of; NO_MEMORY. */
enum verdict unpack_points(const struct frame *frame, const struct record *record, struct span rows, struct points *points);

#endif
