/* The files of the extension _sound for one another. Worker process.
 *
 * Invariant: a float64 is a sum or a product of two, rounded once, in an order that the source code
 * fixes: `-ffp-contract=off`, no fused multiply-add, no function of a C library. Vectors have more
 * of these side by side; so the bytes are the same with every compiler and processor.
 */
#ifndef BATCHD_SOUND_PARTS_H
#define BATCHD_SOUND_PARTS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2
#define WITH_AVX2 __attribute__((target("avx2")))
#define WITH_AVX512 __attribute__((target("avx512f")))
#else
#define WITH_AVX2
#endif

#ifdef __GNUC__
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

enum { SIDE_BY_SIDE = 4 };

/* Numbers side by side. Functions get them by address: as arguments, they would be passed otherwise
 * with AVX2 than without. */
typedef double four __attribute__((vector_size(SIDE_BY_SIDE * sizeof(double))));
typedef int64_t four_bits __attribute__((vector_size(SIDE_BY_SIDE * sizeof(int64_t))));
typedef four four_loose __attribute__((aligned(8), may_alias)); /* anywhere in an array */
/* of AVX-512 */
typedef double eight __attribute__((vector_size(2 * SIDE_BY_SIDE * sizeof(double))));
typedef eight eight_loose __attribute__((aligned(8), may_alias));

/* Whether functions compiled for AVX2 run. */
extern int sound_uses_avx2;

/* An array, contiguous, of `dimensions` and of elements of `type` ('f' float32, 'd' float64, 'i'
 * int32). Returns 0 with an exception. The caller releases the buffer, in either case. */
int take_array(PyObject *object, char type, int dimensions, int is_writable, Py_buffer *buffer);

/* What Python sees of _sound_spectra.c. */
PyObject *combine(PyObject *self, PyObject *arguments);
PyObject *convolve(PyObject *self, PyObject *arguments);
PyObject *logarithms(PyObject *self, PyObject *arguments);
PyObject *spectra(PyObject *self, PyObject *arguments);
extern const char combine_doc[], convolve_doc[], logarithms_doc[], spectra_doc[];

#endif
