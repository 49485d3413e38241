/* Reads rows of a file into an array, and whole files, in one call of Python. Worker process.
 *
 *     file     .....[row]...........[row]...[row]....        from each start, the bytes of a row
 *     array    [row 0][row 1][row 2][row 3] ...              to the place that is named for it
 *
 * `reader.py` does the same without this extension, in more time.
 *
 * `copy_rows` takes rows from a file that is mapped, which saves a system call for each. Where
 * another process has cut the file, or its storage fails, the kernel sends SIGBUS to the thread
 * that touches the page. So the copying is guarded: the handler jumps back, and fewer rows were
 * copied. It is installed for one call, in which the GIL is held: no other thread of Python can
 * install another one meanwhile. A SIGBUS of any other thread still ends the process.
 *
 * Invariant: nothing is written outside of the array, whatever the arguments are. What another
 * process does to the file meanwhile shows as fewer rows, or as an error of the system.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#define _FILE_OFFSET_BITS 64
#define _GNU_SOURCE /* RUSAGE_THREAD */
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_rows.h"

PyDoc_STRVAR(read_rows_doc,
             "read_rows(descriptor, starts, places, rows, size) -> int\n\n"
             "Read `size` bytes from each of `starts` (int64) of the file into row places[i] (int64) of `rows`, a writable buffer\n"
             "of rows of `size` bytes. Returns how many rows were read whole: fewer than all where the file ends before one\n"
             "does, or where it was read in part. Raises OSError, and ValueError for arguments that do not fit.");

static int64_t read_all(int descriptor, const Py_buffer *starts, const Py_buffer *places, const Py_buffer *rows, int64_t size)
{
    const int64_t *start = starts->buf, *place = places->buf;
    int64_t count = starts->len / (int64_t)sizeof(int64_t), whole = 0;
    for (; whole < count; whole++) {
        ssize_t got = pread(descriptor, (char *)rows->buf + place[whole] * size, (size_t)size, (off_t)start[whole]);
        if (got < 0) return -1;
        if (got != size) break;
    }
    return whole;
}

static int fits(const Py_buffer *starts, const Py_buffer *places, const Py_buffer *rows, int64_t size)
{
    if (size <= 0 || starts->len != places->len || starts->len % (Py_ssize_t)sizeof(int64_t)) return 0;
    const int64_t *place = places->buf;
    int64_t rows_count = rows->len / size;
    for (int64_t i = 0; i < starts->len / (int64_t)sizeof(int64_t); i++)
        if (place[i] < 0 || place[i] >= rows_count) return 0;
    return 1;
}

static PyObject *read_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    int descriptor;
    long long size;
    Py_buffer starts, places, rows;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(arguments, "iy*y*w*L", &descriptor, &starts, &places, &rows, &size)) return NULL;
    if (!fits(&starts, &places, &rows, size)) {
        PyErr_SetString(PyExc_ValueError, "starts and places are as many, and each place is a row of the array");
    } else {
        int64_t whole;
        Py_BEGIN_ALLOW_THREADS
        whole = read_all(descriptor, &starts, &places, &rows, size);
        Py_END_ALLOW_THREADS
        result = whole < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(whole);
    }
    PyBuffer_Release(&starts);
    PyBuffer_Release(&places);
    PyBuffer_Release(&rows);
    return result;
}

PyDoc_STRVAR(copy_rows_doc,
             "copy_rows(mapped, starts, places, rows, size) -> (int, int)\n\n"
             "As read_rows, out of `mapped`, a buffer that maps a file. Returns how many rows were copied whole, and how many pages\n"
             "the storage had to be asked for. Raises ValueError for arguments that do not fit.");

static _Thread_local sigjmp_buf guard;
static _Thread_local volatile sig_atomic_t is_guarded;
static _Thread_local volatile int64_t copied;

static void jump_back(int number)
{
    if (is_guarded) siglongjmp(guard, 1);
    /* the instruction that failed is tried once more, and ends the process */
    signal(number, SIG_DFL);
}

static long major_faults(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_majflt;
}

enum { FETCHED_BYTES = 512, LINE_BYTES = 64, KEPT_IN_L2 = 2 };

/* Copies one row while the processor fetches the next one, which may lie anywhere in the file. */
static void copy_row(char *to, const char *from, const char *next, int64_t size)
{
    int64_t at = 0;
    for (; at + FETCHED_BYTES <= size; at += FETCHED_BYTES) {
        for (int line = 0; next && line < FETCHED_BYTES; line += LINE_BYTES) __builtin_prefetch(next + at + line, 0, KEPT_IN_L2);
        memcpy(to + at, from + at, FETCHED_BYTES);
    }
    for (int64_t line = at; next && line < size; line += LINE_BYTES) __builtin_prefetch(next + line, 0, KEPT_IN_L2);
    memcpy(to + at, from + at, (size_t)(size - at));
}

static int copy_guarded(const Py_buffer *mapped, const Py_buffer *starts, const Py_buffer *places, const Py_buffer *rows, int64_t size)
{
    const int64_t *start = starts->buf, *place = places->buf;
    const int64_t count = starts->len / (int64_t)sizeof(int64_t);
    struct sigaction mine = {.sa_handler = jump_back, .sa_flags = SA_NODEFER}, others;
    sigemptyset(&mine.sa_mask);
    if (sigaction(SIGBUS, &mine, &others)) return -1;
    copied = 0;
    /* the handler is not deferred, so the mask of signals stays as it is */
    if (!sigsetjmp(guard, 0)) {
        is_guarded = 1;
        for (int64_t i = 0; i < count; i++) {
            if (start[i] < 0 || start[i] > mapped->len - size) break;
            const int has_next = i + 1 < count && start[i + 1] >= 0 && start[i + 1] <= mapped->len - size;
            const char *from = mapped->buf, *next = has_next ? from + start[i + 1] : NULL;
            copy_row((char *)rows->buf + place[i] * size, from + start[i], next, size);
            copied = i + 1;
        }
    }
    is_guarded = 0;
    return sigaction(SIGBUS, &others, NULL);
}

static PyObject *copy_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    long long size;
    Py_buffer mapped, starts, places, rows;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*L", &mapped, &starts, &places, &rows, &size)) return NULL;
    if (!fits(&starts, &places, &rows, size)) {
        PyErr_SetString(PyExc_ValueError, "starts and places are as many, and each place is a row of the array");
    } else {
        const long before = major_faults();
        if (copy_guarded(&mapped, &starts, &places, &rows, size)) PyErr_SetFromErrno(PyExc_OSError);
        else result = Py_BuildValue("LL", (long long)copied, (long long)(major_faults() - before));
    }
    PyBuffer_Release(&mapped);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&places);
    PyBuffer_Release(&rows);
    return result;
}

PyDoc_STRVAR(read_file_doc,
             "read_file(folder, name, flags, memory, bytes_max, as_of_ns) -> int\n\n"
             "Read a regular file into `memory`, a writable buffer. `folder`: a descriptor that a relative `name` (bytes) starts from.\n"
             "Returns its length in bytes, or 0: Python has to read it, or to say what is wrong. It cannot be opened, is no regular file,\n"
             "is empty, has more than `bytes_max` bytes or as many as the buffer, or changed while it was read or, unless it is 0,\n"
             "after the time `as_of_ns`.");

/* Both times: mode or links may change later, or the file had a time in the future before. */
static int is_written_after(const struct stat *status, int64_t as_of_ns)
{
    const int64_t modified_ns = status->st_mtim.tv_sec * INT64_C(1000000000) + status->st_mtim.tv_nsec;
    const int64_t changed_ns = status->st_ctim.tv_sec * INT64_C(1000000000) + status->st_ctim.tv_nsec;
    return as_of_ns && modified_ns > as_of_ns && changed_ns > as_of_ns;
}

static int64_t read_opened(int descriptor, char *memory, int64_t room, int64_t bytes_max, int64_t as_of_ns)
{
    struct stat status;
    int64_t filled = 0;
    if (fstat(descriptor, &status) || !S_ISREG(status.st_mode) || status.st_size >= room || status.st_size > bytes_max) return 0;
    while (filled < status.st_size) { /* one byte more than the file has, to see whether it grew */
        const ssize_t got = read(descriptor, memory + filled, (size_t)(status.st_size + 1 - filled));
        if (got <= 0) return 0;
        filled += got;
    }
    if (as_of_ns && (fstat(descriptor, &status) || is_written_after(&status, as_of_ns))) return 0;
    return filled == status.st_size ? filled : 0;
}

static int64_t read_whole(int folder, const char *name, int flags, char *memory, int64_t room, int64_t bytes_max, int64_t as_of_ns)
{
    const int descriptor = openat(folder, name, flags);
    int64_t length;
    if (descriptor < 0) return 0;
    length = read_opened(descriptor, memory, room, bytes_max, as_of_ns);
    close(descriptor);
    return length;
}

static PyObject *read_file(PyObject *module, PyObject *arguments)
{
    int folder, flags;
    const char *name;
    Py_buffer memory;
    long long bytes_max, as_of_ns, length;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iyiw*LL:read_file", &folder, &name, &flags, &memory, &bytes_max, &as_of_ns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    length = read_whole(folder, name, flags, memory.buf, (int64_t)memory.len, bytes_max, as_of_ns);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    return PyLong_FromLongLong(length);
}

static PyMethodDef METHODS[] = {
    {"copy_rows", copy_rows, METH_VARARGS, copy_rows_doc},
    {"read_file", read_file, METH_VARARGS, read_file_doc},
    {"read_rows", read_rows, METH_VARARGS, read_rows_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_rows", "Rows of a file, read into an array, and whole files.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    static struct reading reading = {read_whole};
    PyObject *module = PyModule_Create(&MODULE), *capsule = PyCapsule_New(&reading, READING_NAME, NULL);
    if (!capsule || (module && PyModule_AddObjectRef(module, "READING", capsule) < 0)) Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}
