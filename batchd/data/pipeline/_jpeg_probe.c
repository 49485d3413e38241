/* The header of a usual JPEG, without libjpeg: `probe.py` in one call. Worker process.
 *
 * Invariant: an answer is always that of `probe.py`. It has to look at files that it refuses, and
 * at unusual ones: several scans, bytes between segments, no end mark at the very end.
 */
#include "_jpeg.h"

#include <string.h>

#define MARKER 0xff
#define MARKER_BYTES 2
#define SEGMENTS_MAX 100
#define LENGTH_MAX ((size_t)1 << 28) /* so that pixels times bits are a number of 64 bits */
#define COMPONENTS_MAX 4
#define BLOCK_SIDE 8
#define EXIF_BYTES 6
#define ENTRIES_MAX 512
#define ENTRY_BYTES 12
#define ENTRY_BYTES_READ 10
#define TAG_ORIENTATION 0x0112
#define KIND_SHORT 3

enum { SOF0 = 0xc0, SOF1 = 0xc1, DHT = 0xc4, SOS = 0xda, DQT = 0xdb, DRI = 0xdd, APP0 = 0xe0, APP1 = 0xe1, APP15 = 0xef, COM = 0xfe };

static unsigned number_at(const unsigned char *at, int is_little)
{
    return is_little ? at[0] | (unsigned)at[1] << 8 : (unsigned)at[0] << 8 | at[1];
}

static size_t long_at(const unsigned char *at, int is_little)
{
    const size_t first = number_at(at, is_little), second = number_at(at + 2, is_little);
    return is_little ? second << 16 | first : first << 16 | second;
}

/* Of a block of EXIF, as `exif_orientation`: 1 where there is none. */
static int orientation_of(const unsigned char *block, size_t length)
{
    size_t place;
    unsigned entries;
    int is_little;
    if (length < 8 || (memcmp(block, "II", 2) && memcmp(block, "MM", 2))) return 1;
    is_little = block[0] == 'I';
    place = long_at(block + 4, is_little);
    if (place > length || length - place < 2) return 1;
    entries = number_at(block + place, is_little);
    place += 2;
    for (unsigned entry = 0; entry < entries && entry < ENTRIES_MAX; entry++, place += ENTRY_BYTES) {
        const unsigned char *const at = block + place;
        unsigned value;
        if (place > length || length - place < ENTRY_BYTES_READ) return 1;
        if (number_at(at, is_little) != TAG_ORIENTATION) continue;
        value = number_at(at + 8, is_little);
        return number_at(at + 2, is_little) == KIND_SHORT && value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static uint64_t blocks_along(int side, int sampling, int largest)
{
    const int unit = largest * BLOCK_SIDE;
    return (uint64_t)((side * sampling + unit - 1) / unit);
}

static int read_size(const unsigned char *content, size_t length, struct header *header)
{
    const int channels = length > 5 ? content[5] : 0;
    int across = 0, down = 0;
    if (header->channels || channels < 1 || channels > COMPONENTS_MAX || length < 6u + 3u * (size_t)channels || content[0] != 8) return 0;
    header->height = (int)number_at(content + 1, 0);
    header->width = (int)number_at(content + 3, 0);
    header->channels = channels;
    if (!header->height || !header->width) return 0;
    for (int c = 0; c < channels; c++) {
        const int sampling = content[7 + 3 * c];
        if (!(sampling >> 4) || !(sampling & 15)) return 0;
        if (sampling >> 4 > across) across = sampling >> 4;
        if ((sampling & 15) > down) down = sampling & 15;
    }
    for (int c = 0; c < channels; c++) {
        const int sampling = content[7 + 3 * c];
        header->blocks += blocks_along(header->height, sampling & 15, down) * blocks_along(header->width, sampling >> 4, across);
    }
    return 1;
}

static int finish(const unsigned char *data, size_t length, struct header *header)
{
    const uint64_t bits = 8 * (uint64_t)(length - header->scan);
    if (!header->channels || data[header->scan + 2 * MARKER_BYTES] < header->channels) return 0;
    header->pixels_max = (uint64_t)header->height * (uint64_t)header->width * (bits / 2) / header->blocks;
    if (!header->orientation) header->orientation = 1;
    return 1;
}

int probe_jpeg(const unsigned char *data, size_t length, struct header *header)
{
    size_t place = MARKER_BYTES;
    memset(header, 0, sizeof *header);
    if (length < 6 || length > LENGTH_MAX || memcmp(data, "\xff\xd8\xff", 3) || memcmp(data + length - 2, "\xff\xd9", 2)) return 0;
    for (int segments = 0; segments < SEGMENTS_MAX; segments++) {
        const unsigned char *const content = data + place + 2 * MARKER_BYTES;
        int kind;
        size_t bytes;
        if (length - place <= 2 * MARKER_BYTES || data[place] != MARKER) return 0;
        kind = data[place + 1];
        bytes = number_at(data + place + MARKER_BYTES, 0);
        if (bytes <= MARKER_BYTES || bytes >= length - place - MARKER_BYTES) return 0;
        bytes -= MARKER_BYTES;
        switch (kind) {
        case SOF0:
        case SOF1:
            if (!read_size(content, bytes, header)) return 0;
            break;
        case SOS:
            header->scan = place;
            return finish(data, length, header);
        case APP1:
            if (!header->orientation && bytes >= EXIF_BYTES && !memcmp(content, "Exif\0", EXIF_BYTES))
                header->orientation = orientation_of(content + EXIF_BYTES, bytes - EXIF_BYTES);
            break;
        default:
            if (kind != DHT && kind != DQT && kind != DRI && kind != COM && (kind < APP0 || kind > APP15)) return 0;
        }
        place += 2 * MARKER_BYTES + bytes;
    }
    return 0;
}
