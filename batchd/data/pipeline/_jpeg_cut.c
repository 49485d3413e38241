/* A smaller JPEG out of the bytes of a larger one, without decoding anything.
 *
 *     file   |header| RST0 | RST1 | RST2 | RST3 |
 *                   | RST4 |[RST5]|[RST6]| RST7 |
 *                   | RST0 |[RST1]|[RST2]| RST3 |     cut   |header'|5 RST0|6 RST1|1 RST2|2 EOI|
 *
 * Between two restart markers (an interval) nothing depends on earlier bytes. So some intervals of
 * each row, behind a header with their size, are a JPEG of their own.
 *
 * Where intervals do not divide the rows, whole rows are cut out, from the start of an interval on.
 *
 * libjpeg's fast decoder reads ahead, and at a marker has the slow one do the MCU again. Zeros in
 * front of the markers, which spare it that, were tried: nothing is gained, and parts that are too
 * short are no longer found.
 *
 * Invariant: nothing behind the file is read, and no more than cut_bytes_max() is written, whatever
 * the file says. Every marker in front of what is taken is the one that has to be there.
 */
#include <string.h>

#include "_jpeg.h"

#define MARKER 0xff
#define RST0 0xd0
#define EOI 0xd9
#define RESTARTS 8
#define MARKER_BYTES 2
#define FRAME_BYTES_MIN 9

static int parts_of(int whole, int part) { return (whole + part - 1) / part; }

static int common_divisor(int one, int other)
{
    while (other) {
        const int rest = one % other;
        one = other;
        other = rest;
    }
    return one;
}

static int is_tiled(const struct cutting *cutting)
{
    return parts_of(cutting->width, cutting->mcu_width) % cutting->interval == 0;
}

/* The interval at the first row of the cut or, where there are tiles, at its first column. */
static int first_interval(const struct cutting *cutting)
{
    const int across = parts_of(cutting->width, cutting->mcu_width);
    return (int)(((long long)cutting->rows.first * across + cutting->columns.first) / cutting->interval);
}

static int intervals_end(const struct cutting *cutting)
{
    const int across = parts_of(cutting->width, cutting->mcu_width);
    const long long mcus = (long long)(cutting->rows.end - 1) * across + cutting->columns.end;
    return (int)((mcus + cutting->interval - 1) / cutting->interval);
}

static int is_taken(const struct cutting *cutting, int interval)
{
    const int across = parts_of(cutting->width, cutting->mcu_width);
    int column;
    if (interval < first_interval(cutting)) return 0;
    if (!is_tiled(cutting)) return 1;
    column = interval % (across / cutting->interval) * cutting->interval;
    return column >= cutting->columns.first && column < cutting->columns.end;
}

int plan_cut(struct cutting *cutting)
{
    const int across = parts_of(cutting->width, cutting->mcu_width), down = parts_of(cutting->height, cutting->mcu_height);
    struct span *const rows = &cutting->rows, *const columns = &cutting->columns;
    long long mcus;
    if (cutting->interval <= 0) return 0;
    if (is_tiled(cutting)) {
        columns->first -= columns->first % cutting->interval;
        columns->end = parts_of(columns->end, cutting->interval) * cutting->interval;
    } else {
        columns->first = 0;
        columns->end = across;
        rows->first -= rows->first % (cutting->interval / common_divisor(cutting->interval, across));
    }
    mcus = (long long)across * down;
    if (mcus > JPEG_MAX_DIMENSION * (long long)JPEG_MAX_DIMENSION / DCTSIZE2) return 0;
    cutting->all = (int)((mcus + cutting->interval - 1) / cutting->interval);
    cutting->taken = is_tiled(cutting)
        ? (rows->end - rows->first) * ((columns->end - columns->first) / cutting->interval)
        : intervals_end(cutting) - first_interval(cutting);
    return rows->first > 0 || columns->first > 0 || columns->end < across;
}

/* Each restart marker that is written replaces one that was read: only the marker of the end is
 * new. */
size_t cut_bytes_max(const struct cutting *cutting) { return cutting->length + MARKER_BYTES; }

/* Where the header tells the size; 0 where it tells another, or is not a plain row of segments. */
static size_t frame_at(const struct cutting *cutting)
{
    const unsigned char *const file = cutting->file;
    size_t place = MARKER_BYTES;
    while (place + FRAME_BYTES_MIN <= cutting->scan && file[place] == MARKER) {
        const unsigned char *const frame = file + place;
        if (frame[1] == 0xc0 || frame[1] == 0xc1) {
            const int height = frame[5] << 8 | frame[6], width = frame[7] << 8 | frame[8];
            return height == cutting->height && width == cutting->width ? place : 0;
        }
        place += MARKER_BYTES + (size_t)(frame[2] << 8 | frame[3]);
    }
    return 0;
}

static int smaller(int whole, int part, struct span taken)
{
    const int end = taken.end * part;
    return (end < whole ? end : whole) - taken.first * part;
}

static void write_number(unsigned char *into, int number)
{
    into[0] = (unsigned char)(number >> 8);
    into[1] = (unsigned char)number;
}

static unsigned char *write_header(const struct cutting *cutting, size_t frame, unsigned char *into)
{
    memcpy(into, cutting->file, cutting->scan);
    write_number(into + frame + 5, smaller(cutting->height, cutting->mcu_height, cutting->rows));
    write_number(into + frame + 7, smaller(cutting->width, cutting->mcu_width, cutting->columns));
    return into + cutting->scan;
}

static unsigned char *write_marker(unsigned char *into, int marker)
{
    *into++ = MARKER;
    *into++ = (unsigned char)marker;
    return into;
}

/* The end of an interval, its marker, and the place behind it. NULL where the file ends before. */
static const unsigned char *end_of_interval(const unsigned char *place, const unsigned char *end, int *marker, const unsigned char **next)
{
    while ((place = memchr(place, MARKER, (size_t)(end - place)))) {
        const unsigned char *const found = place;
        while (place < end && *place == MARKER) place++;
        if (place == end) return NULL;
        if (*place++ != 0) {
            *marker = place[-1];
            *next = place;
            return found;
        }
    }
    return NULL;
}

size_t cut(struct cutting *cutting, unsigned char *into)
{
    const unsigned char *const file_end = cutting->file + cutting->length, *place = cutting->file + cutting->scan;
    const size_t frame = frame_at(cutting);
    const int last = intervals_end(cutting) - 1;
    unsigned char *written = into;
    int taken = 0;
    if (!frame) return 0;
    written = write_header(cutting, frame, written);
    for (int interval = 0; interval <= last; interval++) {
        const unsigned char *next;
        int marker;
        const unsigned char *const end = end_of_interval(place, file_end, &marker, &next);
        if (!end || (interval < last && marker != RST0 + interval % RESTARTS)) return 0;
        if (is_taken(cutting, interval)) {
            if (taken > 0) written = write_marker(written, RST0 + (taken - 1) % RESTARTS);
            memcpy(written, place, (size_t)(end - place));
            written += end - place;
            taken++;
        }
        place = next;
        cutting->reaches_end = marker == EOI;
    }
    written = write_marker(written, EOI);
    return (size_t)(written - into);
}
