/* Decodes a box of a JPEG, and no more of the file than that takes. Worker process.
 *
 *     file    |header|########rows above##########|#####rows of the box#####|....rows below....|
 *              read    entropy decoding alone       columns of the box: all   never looked at
 *                                                   others: entropy decoding
 *
 * libjpeg-turbo does all of it; this file decides where to start and to stop, so that the pixels of
 * the box are those that the whole picture would have there. Upsampling makes a pixel from the
 * samples of chroma beside it, and takes the edge of what is decoded for the edge of the picture,
 * so MARGIN columns more are decoded on either side. Rows need no margin: libjpeg keeps neighbours.
 *
 * Of a file with restart markers a smaller one is cut out first (_jpeg_cut.c), with a margin of
 * rows too, and takes the file's place. So nothing is read of what lies above and beside the box.
 * Where that cannot be, all of the file is read as above.
 *
 * For an unusual file, and for one whose header libjpeg refuses, decode() returns None: other
 * decoders read it.
 *
 * The box may be resampled and flipped into a row of a batch in the same call (_pixels.c), and the
 * files of several rows may be read (_rows.c), checked and decoded in one: a worker's Python code
 * between two photographs finds the processor's caches full of one, and takes twice as long as it
 * would alone.
 *
 * Invariants: no Python object is touched without the GIL; libjpeg leaves run() only through its
 * end or by longjmp to its begin; nothing is written behind the end of the buffer, whatever the
 * file says. What was cut has the pixels of the whole.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../storage/_rows.h"
#include "_jpeg.h"
#include "_pixels.h"

#include <jerror.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed: older ones have no jpeg_crop_scanline, or upsample 4:4:0 in another way"
#endif

#define EIGHTHS 8
#define MARKER 0xff
/* libjpeg reads 7 bytes ahead and forgets them, and an intact scan may end in 2 */
#define ZEROS_MAX 9
#define SCANS_MAX 200
#define H_SAMPLING_MAX 4
#define V_SAMPLING_MAX 4
/* pixels: the neighbour of a sample of chroma, and never so few samples that libjpeg upsamples in
 * another way */
#define MARGIN 4
#define COLUMNS_BESIDE_MAX (2 * MARGIN + H_SAMPLING_MAX * DCTSIZE - 1)
#define STRING(number) #number
#define STRING_OF(macro) STRING(macro)

struct color {
    const char *name;
    J_COLOR_SPACE space;
    int channels;
};

static const struct color COLORS[] = {{"rgb", JCS_EXT_RGB, 3}, {"bgr", JCS_EXT_BGR, 3}, {"gray", JCS_GRAYSCALE, 1}};

struct job {
    struct jpeg_decompress_struct jpeg;
    struct failure failure;
    Py_buffer data, pixels;
    Py_buffer record; /* of access points; NULL: there are none */
    const struct color *color;
    int eighths;
    int height, width; /* of the whole picture, as the caller knows it */
    struct box box; /* of the picture, and of what is cut out of it from then on */
    struct cutting cutting;
    unsigned char *cut; /* memory of the smaller file, or NULL */
    int is_cut, is_planned_only;
    int is_part; /* only a part of the file is there */
    struct splicing splicing; /* by access points; its `made` is NULL where that is not done */
    int is_known; /* the header is read */
    /* result: how long a row of what was decoded is, and what of it is in front of the box */
    int columns, before;
    struct image target; /* what the box is resampled into; without pixels: it is not */
    int is_area, is_upside_down, is_mirrored;
    /* result: the time between the two, on the clock of time.perf_counter_ns() */
    int64_t decoded_ns;
};

static const struct scaling *scaling; /* NULL where _pixels was not built */
static const struct reading *reading; /* NULL where _rows was not built */

/* --- what libjpeg calls --- */

static struct failure *failure_of(j_common_ptr jpeg) { return (struct failure *)jpeg->client_data; }

static void fail(j_common_ptr jpeg)
{
    struct failure *failure = failure_of(jpeg);
    (*jpeg->err->format_message)(jpeg, failure->message);
    longjmp(failure->failed, 1);
}

/* Tells whether the bytes that were discarded in front of the end are zeros and fill bytes, with
 * which some cameras pad a file. More than ZEROS_MAX zeros in front of these mean that blocks were
 * decoded from zeros, which stand for what is lost. libjpeg counts fill bytes only in front of a
 * zero, and then one of them; its place is behind the last byte that it discarded. The 0xd8 at the
 * start of the file ends every walk. */
static int is_padding(j_decompress_ptr jpeg)
{
    const JOCTET *place = jpeg->src->next_input_byte;
    if (jpeg->err->msg_parm.i[1] != JPEG_EOI || failure_of((j_common_ptr)jpeg)->is_end_ours) return 0;
    for (int left = jpeg->err->msg_parm.i[0]; left > 0;) {
        place--;
        if (*place == 0)
            left -= place[-1] == MARKER ? 2 : 1;
        else if (*place != MARKER)
            return 0;
    }
    for (int zeros = 0; zeros <= ZEROS_MAX; zeros++)
        if (*--place != 0) return 1;
    return 0;
}

/* These lose no pixel. All other warnings do. Bytes between two segments of the header belong to
 * nothing; bytes of a scan that are left when all blocks are decoded say that some of these were
 * decoded from the wrong ones, unless they are padding of the whole. */
static int is_harmless(j_common_ptr jpeg)
{
    switch (jpeg->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:
        return jpeg->is_decompressor && (((j_decompress_ptr)jpeg)->input_scan_number == 0 || is_padding((j_decompress_ptr)jpeg));
    case JWRN_NOT_SEQUENTIAL:
    case JWRN_ADOBE_XFORM:
        return 1;
    default:
        return 0;
    }
}

static void warned(j_common_ptr jpeg, int level)
{
    if (level < 0 && !is_harmless(jpeg)) fail(jpeg);
}

static void print_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void scan_passed(j_common_ptr jpeg)
{
    if (((j_decompress_ptr)jpeg)->input_scan_number > SCANS_MAX) {
        struct failure *failure = failure_of(jpeg);
        snprintf(failure->message, sizeof failure->message, "more than %d scans", SCANS_MAX);
        longjmp(failure->failed, 1);
    }
}

struct jpeg_error_mgr *failing(struct failure *failure)
{
    jpeg_std_error(&failure->errors);
    failure->errors.error_exit = fail;
    failure->errors.emit_message = warned;
    failure->errors.output_message = print_nothing;
    return &failure->errors;
}

void limit_scans(struct jpeg_decompress_struct *jpeg)
{
    struct failure *failure = failure_of((j_common_ptr)jpeg);
    failure->progress.progress_monitor = scan_passed;
    jpeg->progress = &failure->progress;
}

/* --- which files are ours --- */

int is_usual(const struct jpeg_decompress_struct *jpeg)
{
    const jpeg_component_info *luma = &jpeg->comp_info[0];
    if (jpeg->arith_code) return 0;
    if (jpeg->num_components == 1) return jpeg->jpeg_color_space == JCS_GRAYSCALE;
    if (jpeg->num_components != 3) return 0;
    if (jpeg->jpeg_color_space != JCS_YCbCr && jpeg->jpeg_color_space != JCS_RGB) return 0;
    for (int place = 1; place < 3; place++)
        if (jpeg->comp_info[place].h_samp_factor != 1 || jpeg->comp_info[place].v_samp_factor != 1) return 0;
    switch (luma->h_samp_factor * 10 + luma->v_samp_factor) {
    case 11: /* 4:4:4 */
    case 21: /* 4:2:2 */
    case 12: /* 4:4:0 */
    case 22: /* 4:2:0 */
    case 41: /* 4:1:1 */
        return 1;
    default:
        return 0;
    }
}

int is_refined(const struct jpeg_decompress_struct *jpeg)
{
    if (!jpeg->progressive_mode) return 1;
    for (int component = 0; component < jpeg->num_components; component++)
        for (int place = 0; place < DCTSIZE2; place++)
            if (jpeg->coef_bits[component][place] != 0) return 0;
    return 1;
}

/* --- one picture --- */

static int is_inside(const struct box *box, JDIMENSION height, JDIMENSION width)
{
    return box->top >= 0 && box->left >= 0 && box->height > 0 && box->width > 0
        && (JDIMENSION)box->top <= height && (JDIMENSION)box->height <= height - (JDIMENSION)box->top
        && (JDIMENSION)box->left <= width && (JDIMENSION)box->width <= width - (JDIMENSION)box->left;
}

static void set_up(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    jpeg->out_color_space = job->color->space;
    jpeg->scale_num = (unsigned)job->eighths;
    jpeg->scale_denom = EIGHTHS;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg->do_fancy_upsampling = TRUE;
    limit_scans(jpeg);
}

/* The columns to decode. libjpeg moves `first` to the left, where a row of blocks can begin. */
static void choose_columns(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    const JDIMENSION left = (JDIMENSION)job->box.left, right = left + (JDIMENSION)job->box.width;
    JDIMENSION first = left > MARGIN ? left - MARGIN : 0;
    const JDIMENSION end = jpeg->output_width - right > MARGIN ? right + MARGIN : jpeg->output_width;
    JDIMENSION columns = end - first;
    jpeg_crop_scanline(jpeg, &first, &columns);
    job->before = (int)(left - first);
    job->columns = (int)columns;
}

static int fits(const struct job *job)
{
    const size_t row = (size_t)job->columns * (size_t)job->jpeg.output_components;
    return job->jpeg.output_components == job->color->channels && (JDIMENSION)job->columns == job->jpeg.output_width
        && row <= (size_t)job->pixels.len / (size_t)job->box.height;
}

static void read_rows(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    const size_t row_bytes = (size_t)job->columns * (size_t)job->color->channels;
    unsigned char *pixels = job->pixels.buf;
    int done = 0;
    while (done < job->box.height) {
        JSAMPROW rows[V_SAMPLING_MAX];
        int wanted = 0;
        for (; wanted < V_SAMPLING_MAX && done + wanted < job->box.height; wanted++)
            rows[wanted] = pixels + (size_t)(done + wanted) * row_bytes;
        done += (int)jpeg_read_scanlines(jpeg, rows, (JDIMENSION)wanted);
    }
}

static void read_header(struct job *job, const unsigned char *file, size_t length)
{
    jpeg_mem_src(&job->jpeg, file, (unsigned long)length);
    jpeg_read_header(&job->jpeg, TRUE);
}

struct span mcus_under(int first, int length, int whole, int pixels, int sampling)
{
    const int margin = sampling > 1 ? MARGIN : 0;
    const int begin = first > margin ? first - margin : 0, room = whole - first - length;
    const int end = first + length + (room > margin ? margin : room);
    const struct span span = {begin / pixels, (end + pixels - 1) / pixels};
    return span;
}

/* Plans a cut of the file. Returns whether the file can be cut, and the cut leaves bytes out. */
static int choose_tiles(struct job *job)
{
    const struct jpeg_decompress_struct *jpeg = &job->jpeg;
    const int across = jpeg->max_h_samp_factor, down = jpeg->max_v_samp_factor;
    struct cutting *cutting = &job->cutting;
    if (!jpeg->restart_interval || jpeg->progressive_mode || jpeg->comps_in_scan != jpeg->num_components) return 0;
    if (jpeg->num_components == 1 && across * down != 1) return 0;
    cutting->file = job->data.buf;
    cutting->length = (size_t)job->data.len;
    cutting->scan = (size_t)(jpeg->src->next_input_byte - cutting->file);
    cutting->height = job->height;
    cutting->width = job->width;
    cutting->mcu_height = down * DCTSIZE;
    cutting->mcu_width = across * DCTSIZE;
    cutting->interval = (int)jpeg->restart_interval;
    cutting->rows = mcus_under(job->box.top, job->box.height, (int)jpeg->output_height, down * job->eighths, down);
    cutting->columns = mcus_under(job->box.left, job->box.width, (int)jpeg->output_width, across * job->eighths, across);
    return plan_cut(cutting);
}

/* Puts a smaller file into the place of the whole, where there is one. */
static enum verdict read_tiles(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    size_t length;
    if (!choose_tiles(job)) return DONE;
    job->cut = malloc(cut_bytes_max(&job->cutting));
    if (!job->cut) return NO_MEMORY;
    length = cut(&job->cutting, job->cut);
    if (!length) return DONE;
    job->is_cut = 1;
    job->failure.is_end_ours = !job->cutting.reaches_end;
    job->box.top -= job->cutting.rows.first * jpeg->max_v_samp_factor * job->eighths;
    job->box.left -= job->cutting.columns.first * jpeg->max_h_samp_factor * job->eighths;
    jpeg_abort_decompress(jpeg);
    read_header(job, job->cut, length);
    set_up(job);
    jpeg_calc_output_dimensions(jpeg);
    return DONE;
}

/* Up to the choice of what is read of the file. */
static enum verdict begin(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    const unsigned char *const spliced = job->splicing.made;
    jpeg_create_decompress(jpeg);
    read_header(job, spliced ? spliced : job->data.buf, spliced ? job->splicing.made_length : (size_t)job->data.len);
    job->is_known = 1;
    if (!is_usual(jpeg)) return NOT_MINE;
    if (!spliced && ((int)jpeg->image_height != job->height || (int)jpeg->image_width != job->width)) return NOT_MINE;
    set_up(job);
    jpeg_calc_output_dimensions(jpeg);
    if (!is_inside(&job->box, jpeg->output_height, jpeg->output_width)) return BAD_BOX;
    return spliced ? DONE : read_tiles(job);
}

static enum verdict decode_box(struct job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->jpeg;
    enum verdict verdict;
    jpeg->err = failing(&job->failure);
    jpeg->client_data = &job->failure;
    if (setjmp(job->failure.failed)) return job->is_known ? BROKEN : NOT_MINE;
    verdict = begin(job);
    if (verdict != DONE || job->is_planned_only) return verdict;
    jpeg_start_decompress(jpeg);
    if (!is_refined(jpeg)) return NOT_MINE;
    choose_columns(job);
    if (!fits(job)) return BAD_BUFFER;
    if (job->box.top > 0) jpeg_skip_scanlines(jpeg, (JDIMENSION)job->box.top);
    read_rows(job);
    /* is anything left of the scan? */
    if (jpeg->output_scanline == jpeg->output_height) jpeg_finish_decompress(jpeg);
    return DONE;
}

static void end(struct job *job)
{
    jpeg_destroy_decompress(&job->jpeg);
    free(job->cut);
    free(job->splicing.memory);
}

static int side(int whole, int eighths) { return (whole * eighths + EIGHTHS - 1) / EIGHTHS; }

/* Decodes what the access points cut out. Where that cannot be, `job` is as before. */
static enum verdict decode_spliced(struct job *job)
{
    const struct box box = job->box;
    struct splicing *const splicing = &job->splicing;
    enum verdict verdict;
    if (!is_inside(&box, (JDIMENSION)side(job->height, job->eighths), (JDIMENSION)side(job->width, job->eighths))) return BAD_BOX;
    *splicing = (struct splicing){.file = job->data.buf, .length = (size_t)job->data.len, .record = job->record.buf,
                                  .record_length = (size_t)job->record.len, .height = job->height, .width = job->width,
                                  .eighths = job->eighths, .box = box, .is_part = job->is_part};
    verdict = splice_crop(splicing);
    if (verdict == DONE) {
        job->box.top -= splicing->top;
        job->box.left -= splicing->left;
        job->failure.is_end_ours = 1;
        verdict = decode_box(job);
    }
    if (verdict != DONE) {
        if (splicing->made) jpeg_destroy_decompress(&job->jpeg);
        memset(&job->jpeg, 0, sizeof job->jpeg);
        job->failure.is_end_ours = 0;
        job->is_known = 0;
        job->box = box;
        splicing->made = NULL;
    }
    return verdict;
}

/* If a cut fails, the whole file is decoded, and its verdict counts. A part of a file has none. */
static enum verdict decode_any(struct job *job)
{
    if (job->record.buf && decode_spliced(job) == DONE) return DONE;
    return job->is_part ? NOT_MINE : decode_box(job);
}

static int64_t ns_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static enum verdict resample_box(struct job *job)
{
    const Py_ssize_t channels = job->color->channels, row_bytes = job->columns * channels;
    uint8_t *const box = (uint8_t *)job->pixels.buf + job->before * channels;
    const struct image from = {.pixels = box, .height = job->box.height, .width = job->box.width, .channels = channels, .stride = row_bytes};
    job->decoded_ns = ns_of(CLOCK_MONOTONIC);
    return scaling->scale(&from, &job->target, job->is_area ? AREA : LINEAR, job->is_upside_down, job->is_mirrored) ? DONE : NO_MEMORY;
}

static enum verdict run(struct job *job)
{
    const enum verdict verdict = decode_any(job);
    return verdict == DONE && job->target.pixels ? resample_box(job) : verdict;
}

/* --- the files of several rows --- */

/* One row, whose box was planned by what is known of its file. */
struct task {
    const char *name; /* of the file, below `folder`, a descriptor */
    int folder, flags;
    long long bytes_max, as_of_ns;
    struct header header; /* what is known: the file must have this one */
    int eighths;
    struct box box;
    Py_buffer record;
    struct image target;
    int is_area, is_upside_down, is_mirrored;
    unsigned long long order, row, sample;
};

/* The result of a row, int64 each, in this order: whether it is made, bytes of the file, ns of
 * reading it, the same of CPU time, ns of decoding, ns of resampling, ns of CPU time for both. */
enum { MADE, FILE_BYTES, READ_NS, READ_CPU_NS, DECODED_NS, RESAMPLED_NS, CPU_NS, RESULTS };

/* Memory that all rows share: for a file, for the pixels of a box, and the worker's note (order,
 * row + 1, sample). */
struct shared {
    Py_buffer file, pixels, note;
    const struct color *color;
};

static int is_same(const struct header *one, const struct header *other)
{
    return one->height == other->height && one->width == other->width && one->orientation == other->orientation
        && one->channels == other->channels && one->pixels_max == other->pixels_max && one->scan == other->scan;
}

static void write_note(const struct shared *shared, const struct task *task)
{
    volatile uint64_t *const note = shared->note.buf;
    note[0] = task->order;
    note[1] = task->row + 1;
    note[2] = task->sample;
}

/* Whatever is unusual leaves the row unmade, and the worker makes it by itself. */
static void make_row(const struct task *task, const struct shared *shared, int64_t *results)
{
    const int64_t begun = ns_of(CLOCK_MONOTONIC), begun_cpu = ns_of(CLOCK_THREAD_CPUTIME_ID);
    int64_t is_read, is_read_cpu, end_ns;
    struct header header;
    struct job job;
    memset(results, 0, RESULTS * sizeof *results);
    write_note(shared, task);
    results[FILE_BYTES] = reading->read_file(task->folder, task->name, task->flags, shared->file.buf, shared->file.len, task->bytes_max,
                                            task->as_of_ns);
    is_read = ns_of(CLOCK_MONOTONIC);
    is_read_cpu = ns_of(CLOCK_THREAD_CPUTIME_ID);
    results[READ_NS] = is_read - begun;
    results[READ_CPU_NS] = is_read_cpu - begun_cpu;
    if (!results[FILE_BYTES] || !probe_jpeg(shared->file.buf, (size_t)results[FILE_BYTES], &header)) return;
    if (!is_same(&header, &task->header)) return;
    memset(&job, 0, sizeof job);
    job.data.buf = shared->file.buf;
    job.data.len = (Py_ssize_t)results[FILE_BYTES];
    job.pixels = shared->pixels;
    job.color = shared->color;
    job.record = task->record;
    job.height = header.height;
    job.width = header.width;
    job.eighths = task->eighths;
    job.box = task->box;
    job.target = task->target;
    job.is_area = task->is_area;
    job.is_upside_down = task->is_upside_down;
    job.is_mirrored = task->is_mirrored;
    results[MADE] = run(&job) == DONE && (!job.record.buf || job.splicing.fits);
    end(&job);
    end_ns = ns_of(CLOCK_MONOTONIC);
    results[DECODED_NS] = (job.decoded_ns ? job.decoded_ns : end_ns) - is_read;
    results[RESAMPLED_NS] = job.decoded_ns ? end_ns - job.decoded_ns : 0;
    results[CPU_NS] = ns_of(CLOCK_THREAD_CPUTIME_ID) - is_read_cpu;
}

/* --- Python --- */

static PyObject *JpegError;

static const struct color *color_named(const char *name)
{
    for (size_t place = 0; place < sizeof COLORS / sizeof *COLORS; place++)
        if (strcmp(COLORS[place].name, name) == 0) return &COLORS[place];
    return NULL;
}

/* For all verdicts but DONE. */
static PyObject *told(const struct failure *failure, enum verdict verdict)
{
    switch (verdict) {
    case BROKEN:
        PyErr_SetString(JpegError, failure->message);
        return NULL;
    case BAD_BOX:
        PyErr_SetString(PyExc_ValueError, "the box is empty, or reaches out of the picture");
        return NULL;
    case NO_MEMORY:
        return PyErr_NoMemory();
    case DONE:
    case NOT_MINE:
    case BAD_BUFFER:
    case BAD_SCALE:
        break;
    }
    Py_RETURN_NONE;
}

static int is_scale(int eighths)
{
    if (eighths == 1 || eighths == 2 || eighths == 4 || eighths == 8) return 1;
    PyErr_Format(PyExc_ValueError, "the scale is 1, 2, 4 or 8 eighths, not %d", eighths);
    return 0;
}

static enum verdict checked_run(struct job *job)
{
    enum verdict verdict;
    if (!is_scale(job->eighths)) return BAD_SCALE;
    Py_BEGIN_ALLOW_THREADS
    verdict = run(job);
    end(job);
    Py_END_ALLOW_THREADS
    return verdict;
}

static PyObject *decoded(struct job *job, const char *color)
{
    enum verdict verdict;
    job->color = color_named(color);
    if (!job->color) return PyErr_Format(PyExc_ValueError, "the color is rgb, bgr or gray, not %s", color);
    verdict = checked_run(job);
    if (verdict == BAD_SCALE) return NULL;
    if (verdict == DONE)
        return Py_BuildValue("(iiNL)", job->columns, job->before, PyBool_FromLong(!job->record.buf || job->splicing.fits),
                             (long long)job->decoded_ns);
    if (verdict != BAD_BUFFER) return told(&job->failure, verdict);
    return PyErr_Format(PyExc_ValueError, "%d rows of %d columns need more than the buffer's %zd bytes", job->box.height, job->columns,
                        job->pixels.len);
}

PyDoc_STRVAR(decode_doc,
"decode(data, pixels, color, eighths, size, box, points=None, is_part=False, target=None, is_area=False, is_upside_down=False,\n"
"       is_mirrored=False) -> (columns, before, fits, decoded_ns) | None\n\n"
"Decode a box (top, left, height, width), in pixels of the scaled picture, into the writable buffer ``pixels``.\n\n"
"``size`` is (height, width) of the whole picture, unscaled, as its header says. It writes ``height`` rows of ``columns`` pixels:\n"
"``before`` pixels in front of the box; at most COLUMNS_BESIDE_MAX are beside it. None: a file for another decoder.\n"
"``points``: what ``access_points`` returned for the file, which takes less time; ``fits`` is False if it is not of the bytes down to\n"
"the last row of the box, and then it was not used. The pixels are the same.\n"
"``is_part``: of the file, its header is there, and what ``part`` returned; other bytes are not read. None also where more is needed.\n"
"``target``: an image that the box is resampled into, as ``_pixels.scale`` does with the arguments behind. That began at\n"
"``decoded_ns`` on the clock of ``time.perf_counter_ns``, which is 0 without a target.\n"
"Raises JpegError where the file is broken down to the last row of the box, ValueError for a wrong box, color, buffer or target.");

static const void *offered(const char *module_name, const char *name, const char *capsule_name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *capsule = module ? PyObject_GetAttrString(module, name) : NULL;
    const void *found = capsule ? PyCapsule_GetPointer(capsule, capsule_name) : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF(module); /* sys.modules has it */
    PyErr_Clear();
    return found;
}

/* Look for the other extensions once, at their first use: a worker host decodes nothing. Without
 * them, boxes are decoded all the same. */
static void find_others(void)
{
    static int was_sought;
    if (was_sought) return;
    was_sought = 1;
    scaling = offered("batchd.data.pipeline._pixels", "SCALING", SCALING_NAME);
    reading = offered("batchd.data.storage._rows", "READING", READING_NAME);
}

static int take_target(PyObject *object, const char *color, struct image *target)
{
    const struct color *known = color_named(color);
    if (object == Py_None) return 1;
    find_others();
    if (!scaling) {
        PyErr_SetString(PyExc_ValueError, "there is no _pixels to resample into a target");
        return 0;
    }
    if (!scaling->take_image(object, PyBUF_WRITABLE, target)) return 0;
    if (!known || target->channels == known->channels) return 1;
    PyErr_SetString(PyExc_ValueError, "a target of other channels");
    return 0;
}

static PyObject *decode(PyObject *self, PyObject *arguments)
{
    struct job job;
    const char *color;
    PyObject *result, *target = Py_None;
    (void)self;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(arguments, "y*w*si(ii)(iiii)|z*pOppp:decode", &job.data, &job.pixels, &color, &job.eighths, &job.height,
                          &job.width, &job.box.top, &job.box.left, &job.box.height, &job.box.width, &job.record, &job.is_part, &target,
                          &job.is_area, &job.is_upside_down, &job.is_mirrored))
        return NULL;
    result = take_target(target, color, &job.target) ? decoded(&job, color) : NULL;
    PyBuffer_Release(&job.target.buffer);
    PyBuffer_Release(&job.data);
    PyBuffer_Release(&job.pixels);
    if (job.record.obj) PyBuffer_Release(&job.record);
    return result;
}

PyDoc_STRVAR(make_rows_doc,
"make_rows(tasks, color, file, pixels, note, results) -> None\n\n"
"Read, decode and resample the files of several rows, without the GIL. Needs _pixels and _rows.\n\n"
"A task: ((folder, name, flags, bytes_max, as_of_ns), header, eighths, box, points, target, is_area, is_upside_down, is_mirrored, order, row,\n"
"sample), as the arguments of ``_rows.read_file`` and ``decode``. A row whose file has not this ``header``, as ``probe`` has it, is not made, nor one\n"
"that ``decode`` would refuse, or make without the points.\n"
"``file``, ``pixels``: writable buffers for a file, and for the pixels of a box. ``note``: the worker's, which names the row at work.\n"
"``results``: writable int64 [tasks, 7]: 1 or 0 for made, bytes of the file, ns of reading it, the same of CPU time, ns of decoding, ns of\n"
"resampling, ns of CPU time for both.\n"
"Raises ValueError for arguments that do not fit.");

static int take_task(PyObject *object, const char *color, struct task *task)
{
    PyObject *target;
    const char *format;
    int held_bytes;
    Py_ssize_t scan;
    if (!PyArg_ParseTuple(object, "(iyiLL)(siiiiKin)i(iiii)z*OpppKKK:make_rows", &task->folder, &task->name, &task->flags, &task->bytes_max, &task->as_of_ns,
                          &format, &task->header.height, &task->header.width, &task->header.orientation, &task->header.channels,
                          &task->header.pixels_max, &held_bytes, &scan, &task->eighths, &task->box.top, &task->box.left,
                          &task->box.height, &task->box.width, &task->record, &target, &task->is_area, &task->is_upside_down,
                          &task->is_mirrored, &task->order, &task->row, &task->sample))
        return 0;
    task->header.scan = (size_t)scan;
    if (target == Py_None) {
        PyErr_SetString(PyExc_ValueError, "a row without a target");
        return 0;
    }
    return is_scale(task->eighths) && take_target(target, color, &task->target);
}

static int take_shared(struct shared *shared, const char *color, const Py_buffer *results, Py_ssize_t count)
{
    shared->color = color_named(color);
    if (reading && shared->color && shared->note.len >= 3 * (Py_ssize_t)sizeof(uint64_t)
        && results->len == count * RESULTS * (Py_ssize_t)sizeof(int64_t))
        return 1;
    PyErr_SetString(PyExc_ValueError, "no _rows to read files, another color than rgb, bgr and gray, or a note or results of another size");
    return 0;
}

static PyObject *make_rows(PyObject *self, PyObject *arguments)
{
    struct shared shared = {0};
    Py_buffer results;
    const char *color;
    PyObject *list, *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "O!sw*w*w*w*:make_rows", &PyList_Type, &list, &color, &shared.file, &shared.pixels, &shared.note, &results))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    struct task *const tasks = PyMem_Calloc((size_t)count, sizeof *tasks);
    Py_ssize_t taken = 0;
    find_others();
    if (!tasks) PyErr_NoMemory();
    else if (take_shared(&shared, color, &results, count))
        while (taken < count && take_task(PyList_GetItem(list, taken), color, &tasks[taken])) taken++;
    if (tasks && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t place = 0; place < count; place++) make_row(&tasks[place], &shared, (int64_t *)results.buf + place * RESULTS);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t place = 0; tasks && place < count; place++) {
        PyBuffer_Release(&tasks[place].target.buffer);
        if (tasks[place].record.obj) PyBuffer_Release(&tasks[place].record);
    }
    PyMem_Free(tasks);
    PyBuffer_Release(&shared.file);
    PyBuffer_Release(&shared.pixels);
    PyBuffer_Release(&shared.note);
    PyBuffer_Release(&results);
    return result;
}

PyDoc_STRVAR(probe_doc,
"probe(data) -> (format, height, width, orientation, channels, pixels_max, held_bytes, scan) | None\n\n"
"The header of a usual JPEG, as ``probe_image`` has it. None: ``probe_image`` has to look at the file.");

static PyObject *probe(PyObject *self, PyObject *data)
{
    Py_buffer file;
    struct header header;
    int is_usual_file;
    (void)self;
    if (PyObject_GetBuffer(data, &file, PyBUF_SIMPLE) < 0) return NULL;
    is_usual_file = probe_jpeg(file.buf, (size_t)file.len, &header);
    PyBuffer_Release(&file);
    if (!is_usual_file) Py_RETURN_NONE;
    return Py_BuildValue("(siiiiKin)", "JPEG", header.height, header.width, header.orientation, header.channels,
                         (unsigned long long)header.pixels_max, 0, (Py_ssize_t)header.scan);
}

PyDoc_STRVAR(part_doc,
"part(header, eighths, size, box, points) -> (first, end) | None\n\n"
"The bytes of a file that ``decode`` reads for a box if it has the file's ``points``, beside its header: all in front of its image data.\n\n"
"None: all of the file, or the points are those of another one. Raises ValueError for a wrong box.");

static PyObject *part(PyObject *self, PyObject *arguments)
{
    struct splicing job;
    Py_buffer header, record;
    size_t first = 0, end = 0;
    PyObject *result = NULL;
    (void)self;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(arguments, "y*i(ii)(iiii)y*:part", &header, &job.eighths, &job.height, &job.width, &job.box.top,
                          &job.box.left, &job.box.height, &job.box.width, &record))
        return NULL;
    job.file = header.buf;
    job.length = (size_t)header.len;
    job.record = record.buf;
    job.record_length = (size_t)record.len;
    if ((job.eighths != 1 && job.eighths != 2 && job.eighths != 4 && job.eighths != 8) || job.height <= 0 || job.width <= 0
        || job.height > JPEG_MAX_DIMENSION || job.width > JPEG_MAX_DIMENSION
        || !is_inside(&job.box, (JDIMENSION)side(job.height, job.eighths), (JDIMENSION)side(job.width, job.eighths)))
        PyErr_SetString(PyExc_ValueError, "the box is empty, or reaches out of the picture, or the scale is none");
    else if (part_of_crop(&job, &first, &end) == DONE)
        result = Py_BuildValue("(nn)", (Py_ssize_t)first, (Py_ssize_t)end);
    else
        result = Py_NewRef(Py_None);
    PyBuffer_Release(&header);
    PyBuffer_Release(&record);
    return result;
}

PyDoc_STRVAR(tiles_doc,
"tiles(data, eighths, size, box) -> (taken, all) | None\n\n"
"How many of the parts between restart markers ``decode`` would read for this box, and how many there are.\n\n"
"None: the file is not cut for it. Nothing is decoded. Raises JpegError where the header is broken, ValueError for a wrong box.");

static PyObject *tiles(PyObject *self, PyObject *arguments)
{
    struct job job;
    enum verdict verdict;
    (void)self;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(arguments, "y*i(ii)(iiii):tiles", &job.data, &job.eighths, &job.height, &job.width, &job.box.top,
                          &job.box.left, &job.box.height, &job.box.width))
        return NULL;
    job.color = COLORS;
    job.is_planned_only = 1;
    verdict = checked_run(&job);
    PyBuffer_Release(&job.data);
    if (verdict == BAD_SCALE) return NULL;
    if (verdict == DONE && job.is_cut) return Py_BuildValue("(ii)", job.cutting.taken, job.cutting.all);
    return told(&job.failure, verdict);
}

PyDoc_STRVAR(transcode_doc,
"transcode(data, size) -> bytes | None\n\n"
"A JPEG of several scans, such as a progressive one, as a baseline JPEG of one: the same picture, coefficient by coefficient.\n\n"
"``size`` is (height, width) as its header says. None: a file of one scan, of a kind without access points (inks, unusual\n"
"subsampling, arithmetic codes, missing scans), or that cannot be a baseline file. Raises JpegError where it is broken anywhere.");

static PyObject *transcoded(PyObject *self, PyObject *arguments)
{
    struct transcoding job;
    Py_buffer data;
    PyObject *result;
    enum verdict verdict;
    (void)self;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(arguments, "y*(ii):transcode", &data, &job.height, &job.width)) return NULL;
    job.data = data.buf;
    job.length = (size_t)data.len;
    Py_BEGIN_ALLOW_THREADS
    verdict = transcode(&job);
    Py_END_ALLOW_THREADS
    result = verdict == DONE ? PyBytes_FromStringAndSize((const char *)job.made, (Py_ssize_t)job.made_length)
                             : told(&job.failure, verdict);
    end_transcoding(&job);
    PyBuffer_Release(&data);
    return result;
}

PyDoc_STRVAR(points_doc,
"access_points(data, size, step_pixels) -> bytes | None\n\n"
"Places in a JPEG from which it can be decoded, about every ``step_pixels`` pixels of each row of blocks, for ``decode``.\n\n"
"``size`` is (height, width) as its header says. None: a file of another kind (progressive, with restart markers, inks), or one that is\n"
"broken anywhere. Raises ValueError where ``step_pixels`` is not positive.");

static PyObject *access_points(PyObject *self, PyObject *arguments)
{
    struct finding job;
    Py_buffer data;
    PyObject *result = NULL;
    enum verdict verdict;
    (void)self;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(arguments, "y*(ii)i:access_points", &data, &job.height, &job.width, &job.step_pixels)) return NULL;
    if (job.step_pixels <= 0) {
        PyBuffer_Release(&data);
        return PyErr_Format(PyExc_ValueError, "points are 1 pixel apart or more, not %d", job.step_pixels);
    }
    job.data = data.buf;
    job.length = (size_t)data.len;
    Py_BEGIN_ALLOW_THREADS
    verdict = find_points(&job);
    Py_END_ALLOW_THREADS
    result = verdict == DONE ? PyBytes_FromStringAndSize((const char *)job.made, (Py_ssize_t)job.made_length) : told(NULL, verdict);
    free(job.made);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef METHODS[] = {
    {"decode", decode, METH_VARARGS, decode_doc},
    {"make_rows", make_rows, METH_VARARGS, make_rows_doc},
    {"part", part, METH_VARARGS, part_doc},
    {"probe", probe, METH_O, probe_doc},
    {"access_points", access_points, METH_VARARGS, points_doc},
    {"tiles", tiles, METH_VARARGS, tiles_doc},
    {"transcode", transcoded, METH_VARARGS, transcode_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_jpeg", "Boxes of JPEGs, by libjpeg-turbo.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (!module) return NULL;
    JpegError = PyErr_NewExceptionWithDoc("batchd.data.pipeline._jpeg.JpegError", "A broken JPEG, in libjpeg's words.",
                                          PyExc_ValueError, NULL);
    if (!JpegError || PyModule_AddObjectRef(module, "JpegError", JpegError) < 0
        || PyModule_AddIntConstant(module, "COLUMNS_BESIDE_MAX", COLUMNS_BESIDE_MAX) < 0
        || PyModule_AddStringConstant(module, "LIBJPEG_TURBO_VERSION", STRING_OF(LIBJPEG_TURBO_VERSION)) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
