/* Writes a JPEG of several scans, such as a progressive one, as one of one scan: access points are
 * of such files alone.
 *
 * Nothing is decoded and nothing is rounded. All markers that applications wrote (EXIF, ICC, Adobe,
 * JFIF, comments) are copied as they are, so that every program shows the same picture; bytes
 * behind the end of the image are not copied. The file gets its own Huffman tables.
 *
 * Invariant: DONE only where every decoder gives the pixels of the file that was read.
 */
#include <stdlib.h>
#include <string.h>

#include "_jpeg.h"

#include <jerror.h>

#define MARKER_BYTES_MAX 0xffff
#define ROOM_BYTES_MIN (1 << 16)

/* --- where libjpeg writes to: memory that grows, and is known where it fails --- */

static struct transcoding *transcoding_of(j_compress_ptr to)
{
    return (struct transcoding *)((char *)to - offsetof(struct transcoding, to));
}

static void grow(struct transcoding *transcoding)
{
    const size_t room = transcoding->made_room ? 2 * transcoding->made_room : transcoding->length + ROOM_BYTES_MIN;
    unsigned char *const made = realloc(transcoding->made, room);
    if (!made) ERREXIT1(&transcoding->to, JERR_OUT_OF_MEMORY, 0);
    transcoding->destination.next_output_byte = made + transcoding->made_room;
    transcoding->destination.free_in_buffer = room - transcoding->made_room;
    transcoding->made = made;
    transcoding->made_room = room;
}

static void begin_output(j_compress_ptr to) { grow(transcoding_of(to)); }

static boolean output_is_full(j_compress_ptr to)
{
    grow(transcoding_of(to));
    return TRUE;
}

static void end_output(j_compress_ptr to)
{
    transcoding_of(to)->made_length = transcoding_of(to)->made_room - to->dest->free_in_buffer;
}

/* --- one file --- */

static void read_header(struct transcoding *transcoding)
{
    struct jpeg_decompress_struct *const from = &transcoding->from;
    jpeg_mem_src(from, transcoding->data, (unsigned long)transcoding->length);
    jpeg_save_markers(from, JPEG_COM, MARKER_BYTES_MAX);
    for (int number = 0; number < 16; number++) jpeg_save_markers(from, JPEG_APP0 + number, MARKER_BYTES_MAX);
    jpeg_read_header(from, TRUE);
}

static void copy_markers(struct jpeg_decompress_struct *from, struct jpeg_compress_struct *to)
{
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker; marker = marker->next)
        jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
}

static void write_file(struct transcoding *transcoding, jvirt_barray_ptr *coefficients)
{
    struct jpeg_decompress_struct *const from = &transcoding->from;
    struct jpeg_compress_struct *const to = &transcoding->to;
    to->dest = &transcoding->destination;
    to->dest->init_destination = begin_output;
    to->dest->empty_output_buffer = output_is_full;
    to->dest->term_destination = end_output;
    jpeg_copy_critical_parameters(from, to);
    to->write_JFIF_header = FALSE;
    to->write_Adobe_marker = FALSE;
    to->optimize_coding = TRUE;
    jpeg_write_coefficients(to, coefficients);
    copy_markers(from, to);
    jpeg_finish_compress(to);
}

/* What cannot be written as a baseline file (quantisation tables that change, coefficients of too
 * many bits) is not broken. */
static enum verdict why_not(int code, int is_known, int is_read)
{
    if (code == JERR_OUT_OF_MEMORY) return NO_MEMORY;
    return is_known && !is_read ? BROKEN : NOT_MINE;
}

enum verdict transcode(struct transcoding *transcoding)
{
    struct jpeg_decompress_struct *const from = &transcoding->from;
    volatile int is_known = 0, is_read = 0;
    jvirt_barray_ptr *coefficients;
    from->err = transcoding->to.err = failing(&transcoding->failure);
    from->client_data = transcoding->to.client_data = &transcoding->failure;
    if (setjmp(transcoding->failure.failed)) return why_not(transcoding->failure.errors.msg_code, is_known, is_read);
    jpeg_create_decompress(from);
    jpeg_create_compress(&transcoding->to);
    read_header(transcoding);
    is_known = 1;
    if (!jpeg_has_multiple_scans(from)) return NOT_MINE;
    if (!is_usual(from) || (from->num_components == 1 && from->max_h_samp_factor * from->max_v_samp_factor != 1)) return NOT_MINE;
    if ((int)from->image_height != transcoding->height || (int)from->image_width != transcoding->width) return NOT_MINE;
    limit_scans(from);
    coefficients = jpeg_read_coefficients(from);
    if (!is_refined(from)) return NOT_MINE;
    is_read = 1;
    write_file(transcoding, coefficients);
    return DONE;
}

void end_transcoding(struct transcoding *transcoding)
{
    jpeg_destroy_compress(&transcoding->to);
    jpeg_destroy_decompress(&transcoding->from);
    free(transcoding->made);
}
