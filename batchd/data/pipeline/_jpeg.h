/* What the parts of the extension share. Worker process, and the writers of `batchd prepare`.
 *
 *     _jpeg.c             decodes a box; what Python sees
 *     _jpeg_probe.c       size, orientation and believable pixels of a usual JPEG, without libjpeg
 *     _jpeg_cut.c         a smaller JPEG out of one with restart markers, without libjpeg
 *     _jpeg_walk.c        finds the access points of a JPEG (_jpeg_scan.h), without libjpeg
 *     _jpeg_splice.c      a smaller JPEG out of one with known access points, without libjpeg
 *     _jpeg_transcode.c   one scan for a JPEG of several, such as a progressive one
 *
 * Invariant: Python is known to _jpeg.c alone.
 */
#ifndef BATCHD_JPEG_H
#define BATCHD_JPEG_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

enum verdict { DONE, BROKEN, NOT_MINE, BAD_BOX, BAD_BUFFER, BAD_SCALE, NO_MEMORY };

/* --- how libjpeg fails --- */

/* The target of a client_data of libjpeg. `failed` is set before each call of libjpeg. */
struct failure {
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    char message[JMSG_LENGTH_MAX];
    int is_end_ours; /* the file was cut out of another one, above its end */
};

/* The error manager that leaves by longjmp: at an error, and at a warning that may cost a pixel. */
struct jpeg_error_mgr *failing(struct failure *failure);

/* Ends a file of too many scans. */
void limit_scans(struct jpeg_decompress_struct *jpeg);

/* One or three components, whose chroma is not larger than their luma, in Huffman codes: libjpeg
 * does not say where arithmetic ones end too early. */
int is_usual(const struct jpeg_decompress_struct *jpeg);

/* Is there every bit of every coefficient? Otherwise libjpeg guesses, from blocks around. */
int is_refined(const struct jpeg_decompress_struct *jpeg);

struct span {
    int first, end;
};

/* In pixels of the scaled picture. */
struct box {
    int top, left, height, width;
};

/* The MCUs under `length` of `whole` pixels of the scaled picture; each makes `pixels` of them. */
struct span mcus_under(int first, int length, int whole, int pixels, int sampling);

/* --- _jpeg_probe.c --- */

/* Of a file, as `ImageHeader` of `probe.py` has it. */
struct header {
    int height, width, orientation, channels;
    uint64_t blocks; /* of all components */
    uint64_t pixels_max;
    size_t scan; /* the first byte of its start of scan */
};

/* Returns 0 where `probe.py` has to look at the file. */
int probe_jpeg(const unsigned char *data, size_t length, struct header *header);

/* --- _jpeg_cut.c --- */

/* A picture and its wanted part: `rows` and `columns` are of MCUs, and grow to those of the cut. */
struct cutting {
    const unsigned char *file;
    size_t length, scan; /* bytes; where the image data begin */
    int height, width, mcu_height, mcu_width; /* pixels */
    int interval; /* MCUs between two restart markers, or 0 */
    struct span rows, columns;
    int taken, all; /* result: restart intervals */
    int reaches_end; /* result: the last of them is the last of the file */
};

/* Widens the wanted part to whole intervals. Returns whether that leaves out anything in front of
 * its last row. */
int plan_cut(struct cutting *cutting);

/* Bytes that `cut` writes at most. */
size_t cut_bytes_max(const struct cutting *cutting);

/* Writes the smaller file, of cut_bytes_max() at most. Returns its bytes, or 0 where the file is
 * not as its header says. */
size_t cut(struct cutting *cutting, unsigned char *into);

/* --- _jpeg_walk.c --- */

struct finding {
    const unsigned char *data;
    size_t length;
    int height, width; /* pixels, as the caller knows them */
    int step_pixels; /* about so many between two points */
    unsigned char *made; /* result: the record, from malloc */
    size_t made_length;
};

/* Finds the access points of a file. DONE, NO_MEMORY, or NOT_MINE: of another kind, or broken. */
enum verdict find_points(struct finding *finding);

/* --- _jpeg_splice.c --- */

struct splicing {
    const unsigned char *file, *record;
    size_t length, record_length;
    int height, width; /* pixels, as the caller knows them */
    int eighths;
    struct box box;
    struct span rows, columns; /* of MCUs, which are taken */
    int is_part; /* of the file, its header is there, and what `part_of_crop` says */
    int fits; /* result: the record is one of this file, as far as it was looked at */
    unsigned char *memory; /* result, from malloc, also where it fails */
    unsigned char *made; /* result: the cut, in there */
    size_t made_length;
    int top, left; /* result: of the cut in the picture, in pixels of the scaled one */
};

/* Writes the smaller file. DONE, NO_MEMORY, or NOT_MINE where the record is not of this file, or
 * too little is left out. */
enum verdict splice_crop(struct splicing *splicing);

/* The bytes of the file that are needed, beside its header, which ``file`` is. DONE or NOT_MINE. */
enum verdict part_of_crop(struct splicing *splicing, size_t *first, size_t *end);

/* --- _jpeg_transcode.c --- */

struct transcoding {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    struct jpeg_destination_mgr destination;
    struct failure failure;
    const unsigned char *data;
    size_t length;
    int height, width; /* pixels, as the caller knows them */
    unsigned char *made; /* result, from malloc, also where it fails */
    size_t made_length, made_room;
};

/* Writes the coefficients of a file of several scans as a baseline file of one. Returns DONE,
 * BROKEN, NOT_MINE or NO_MEMORY. */
enum verdict transcode(struct transcoding *transcoding);
void end_transcoding(struct transcoding *transcoding);

#endif
