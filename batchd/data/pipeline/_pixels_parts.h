/* The files of the extension _pixels for one another. Worker process. */
#ifndef BATCHD_PIXELS_PARTS_H
#define BATCHD_PIXELS_PARTS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include "_pixels.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_VECTORS
#define WITH_AVX2 __attribute__((target("avx2,fma")))
#else
#define WITH_AVX2
#endif

/* For a function with arguments that are constants where it is called. */
#ifdef __GNUC__
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

enum { CHANNELS_MAX = 4 };

static inline uint8_t level(int32_t value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* Whether functions with vectors of AVX2 run, those that have no clone for each processor. */
extern int uses_avx2;

/* As in `struct scaling`. */
int take_image(PyObject *object, int flags, struct image *image);
void release_image(struct image *image);

/* What Python sees of _pixels_color.c, _pixels_outline.c, _pixels_tone.c and _pixels_warp.c. */
PyObject *count_levels(PyObject *self, PyObject *arguments);
PyObject *fill_polygon(PyObject *self, PyObject *arguments);
PyObject *fill_runs(PyObject *self, PyObject *arguments);
PyObject *sharpen(PyObject *self, PyObject *arguments);
PyObject *recolor(PyObject *self, PyObject *arguments);
PyObject *remap(PyObject *self, PyObject *arguments);
PyObject *warp(PyObject *self, PyObject *arguments);
PyObject *warp_parts(PyObject *self, PyObject *arguments);
extern const char count_levels_doc[], fill_polygon_doc[], fill_runs_doc[], recolor_doc[], remap_doc[], sharpen_doc[], warp_doc[],
    warp_parts_doc[];

#endif
