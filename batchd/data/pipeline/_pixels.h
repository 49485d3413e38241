/* _pixels.c for _jpeg.c, in the capsule `batchd.data.pipeline._pixels.SCALING`. Worker process. */
#ifndef BATCHD_PIXELS_H
#define BATCHD_PIXELS_H

#include <Python.h>

#include <stdint.h>

#define SCALING_NAME "batchd.data.pipeline._pixels.SCALING"

struct image {
    Py_buffer buffer;
    uint8_t *pixels;
    Py_ssize_t height, width, channels, stride; /* stride: bytes between two rows */
};

enum method { LINEAR, AREA };

struct scaling {
    /* [height, width, channels] of bytes, rows at any distance, the pixels of a row side by side.
     * Returns 0 with an exception. The caller releases the buffer, in either case. */
    int (*take_image)(PyObject *object, int flags, struct image *image);
    /* Resamples, and flips; the channels are the same. Needs no GIL. Returns 0: no memory. */
    int (*scale)(const struct image *from, const struct image *into, enum method method, int is_upside_down, int is_mirrored);
};

#endif
