/* Feed broken JPEGs to the extension, which decodes boxes of them and transcodes them, for so many
 * seconds. `make fuzz-jpeg` runs it.
 *
 *     jpeg SECONDS SEED FILE...     jpeg-last.bin has the last file, its box in the first 32 bytes
 *
 * A system's libjpeg is not compiled with AddressSanitizer (for one that is: make fuzz-jpeg
 * LIBJPEG=/path/to/libjpeg.a). So an unreadable page follows each file, and an unwritable page
 * follows the pixels: any code that reads or writes a byte too many fails at once. Cut and
 * transcoded data is in memory that AddressSanitizer guards: the code that fills it is compiled
 * with it. So is the code that resamples a box into a row. No function of Python is called: its
 * symbols stay unresolved.
 */
#define METHODS PIXELS_METHODS
#define MODULE PIXELS_MODULE
#include "../../batchd/data/pipeline/_pixels.c"
#undef METHODS
#undef MODULE
#include "../../batchd/data/pipeline/_jpeg.c"
#include "../../batchd/data/pipeline/_jpeg_scan.c"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define FILE_BYTES_MAX (1 << 17)
#define PIXELS_BYTES_MAX (1 << 22)
#define SIDE_MAX 2000
#define TARGET_SIDE_MAX 300
#define PAGE 4096

static const struct scaling SCALING = {.scale = scale};

static uint64_t state;

static uint32_t below(uint32_t end)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 16) % end);
}

/* Return `bytes` of memory that end at a page which no code may touch. */
static unsigned char *guarded(size_t bytes)
{
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    unsigned char *memory = mmap(NULL, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + whole, PAGE, PROT_NONE)) abort();
    return memory + whole - bytes;
}

static size_t read_file(const char *path, unsigned char *into)
{
    FILE *file = fopen(path, "rb");
    size_t length;
    if (!file) abort();
    length = fread(into, 1, FILE_BYTES_MAX, file);
    fclose(file);
    return length;
}

/* Break a file in 1 to 6 places: bits, bytes, lengths of segments, cuts, repetitions, markers. */
static size_t broken(unsigned char *file, size_t length)
{
    for (uint32_t times = below(6); times-- > 0 && length > 64;) {
        const size_t place = below(3) ? below((uint32_t)length) : below(length < 700 ? (uint32_t)length : 700);
        const size_t run = 1 + below(64);
        switch (below(8)) {
        case 0: file[place] ^= (unsigned char)(1 << below(8)); break;
        case 1: file[place] = (unsigned char)below(256); break;
        case 2: file[place] = (unsigned char)(below(2) ? 0xff : 0); break;
        case 3: length = 64 + below((uint32_t)length - 63); break;
        case 4:
            if (place + 2 * run < length && length + run <= FILE_BYTES_MAX) {
                memmove(file + place + run, file + place, length - place);
                length += run;
            }
            break;
        case 5:
            if (place + run < length) {
                memmove(file + place, file + place + run, length - place - run);
                length -= run;
            }
            break;
        case 6:
            if (place + 2 < length) {
                file[place] = 0xff;
                file[place + 1] = (unsigned char)(0xc0 + below(64));
            }
            break;
        default:
            for (size_t i = 0; i < run && place + i < length; i++) file[place + i] = (unsigned char)below(256);
        }
    }
    return length;
}

/* Read the size in its first frame, as `probe` does; sometimes store a wrong one. */
static void measure(struct job *job, const unsigned char *file, size_t length)
{
    for (size_t i = 2; i + 9 < length; i++)
        if (file[i] == 0xff && file[i + 1] >= 0xc0 && file[i + 1] <= 0xcf && file[i + 1] != 0xc4 && file[i + 1] != 0xc8
            && file[i + 1] != 0xcc) {
            job->height = file[i + 5] << 8 | file[i + 6];
            job->width = file[i + 7] << 8 | file[i + 8];
            return;
        }
}

static void choose(struct job *job)
{
    static const int scales[] = {1, 2, 4, 8, 8, 8};
    int height, width;
    job->eighths = scales[below(6)];
    job->color = &COLORS[below(3)];
    height = side(job->height, job->eighths);
    width = side(job->width, job->eighths);
    job->box.top = (int)below((uint32_t)height + 1);
    job->box.left = (int)below((uint32_t)width + 1);
    job->box.height = below(3) ? (int)below((uint32_t)(height - job->box.top) + 1) : height - job->box.top;
    job->box.width = below(3) ? (int)below((uint32_t)(width - job->box.left) + 1) : width - job->box.left;
    if (below(20) == 0) job->box.left += (int)below(70000) - 35000;
    if (below(20) == 0) job->box.height = (int)below(1u << 31);
}

/* Return the memory that the caller of the extension gives it, and rarely less. */
static size_t bytes_for(const struct job *job)
{
    const int whole = side(job->width, job->eighths), wanted = job->box.width + COLUMNS_BESIDE_MAX;
    size_t bytes;
    if (job->box.height <= 0 || job->box.width <= 0) return 16;
    bytes = (size_t)job->box.height * (size_t)(wanted < whole ? wanted : whole) * (size_t)job->color->channels;
    if (bytes > PIXELS_BYTES_MAX) bytes = PIXELS_BYTES_MAX;
    return below(16) ? bytes : 1 + below((uint32_t)bytes);
}

/* Let the box be resampled into a row that ends at a page which no code may touch. */
static void aim(struct job *job, unsigned char *row_end)
{
    struct image *const target = &job->target;
    target->height = 1 + (Py_ssize_t)below(TARGET_SIDE_MAX);
    target->width = 1 + (Py_ssize_t)below(TARGET_SIDE_MAX);
    target->channels = job->color->channels;
    target->stride = target->width * target->channels;
    target->pixels = row_end - target->height * target->stride;
    job->is_area = (int)below(2);
    job->is_upside_down = (int)below(2);
    job->is_mirrored = (int)below(2);
}

static void note(int descriptor, const struct job *job)
{
    const int facts[8] = {job->eighths,  (int)(job->color - COLORS), job->height,    job->width,
                          job->box.top, job->box.left,              job->box.height, job->box.width};
    if (pwrite(descriptor, facts, sizeof facts, 0) < 0 || ftruncate(descriptor, sizeof facts + job->data.len)
        || pwrite(descriptor, job->data.buf, (size_t)job->data.len, sizeof facts) < 0)
        abort();
}

/* Transcode a file, and then the result again, which has one scan. */
static enum verdict transcode_twice(const struct job *job, struct transcoding *made)
{
    enum verdict verdict;
    memset(made, 0, sizeof *made);
    made->data = job->data.buf;
    made->length = (size_t)job->data.len;
    made->height = job->height;
    made->width = job->width;
    verdict = transcode(made);
    if (verdict == DONE) {
        struct transcoding again = {.data = made->made, .length = made->made_length, .height = job->height, .width = job->width};
        if (transcode(&again) != NOT_MINE) abort();
        end_transcoding(&again);
    }
    end_transcoding(made);
    return verdict;
}

static int has_same_pixels(const struct job *one, const struct job *other)
{
    const int channels = one->color->channels;
    for (int row = 0; row < one->box.height; row++) {
        const unsigned char *const left = (unsigned char *)one->pixels.buf + (row * one->columns + one->before) * channels;
        const unsigned char *const right = (unsigned char *)other->pixels.buf + (row * other->columns + other->before) * channels;
        if (memcmp(left, right, (size_t)(one->box.width * channels))) return 0;
    }
    return 1;
}

/* Decode the same box of a file with noise in place of the parts that the box does not need.
 * Compare the pixels with those of the whole file if `whole` is not NULL. If the points served the
 * whole file (`is_spliced`), they serve the part. A cut at the right edge may have a column more
 * than the whole picture, so it fails in memory that is just enough for that one. */
static void decode_by_part(const struct job *with, const struct box *box, const struct job *whole, int is_spliced)
{
    struct splicing planned = {.record = with->record.buf, .record_length = (size_t)with->record.len, .height = with->height,
                               .width = with->width, .eighths = with->eighths, .box = *box};
    struct job part = *with;
    struct frame frame;
    const Py_ssize_t wide = box->width + COLUMNS_BESIDE_MAX;
    size_t first, part_end, length = (size_t)with->data.len;
    uint8_t *header, *file;
    if (!read_frame(with->data.buf, length, &frame)) return;
    if (!is_inside(box, (JDIMENSION)side(with->height, with->eighths), (JDIMENSION)side(with->width, with->eighths))) return;
    header = malloc(frame.scan);
    file = malloc(length);
    if (!header || !file) abort();
    memcpy(header, with->data.buf, frame.scan);
    planned.file = header;
    planned.length = frame.scan;
    if (part_of_crop(&planned, &first, &part_end) == DONE) {
        if (first > part_end || part_end > length) abort();
        for (size_t at = 0; at < length; at++) file[at] = (uint8_t)below(256);
        memcpy(file, header, frame.scan);
        memcpy(file + first, (uint8_t *)with->data.buf + first, part_end - first);
        memset(&part.jpeg, 0, sizeof part.jpeg);
        memset(&part.splicing, 0, sizeof part.splicing);
        part.data.buf = file;
        part.box = *box;
        part.is_part = 1;
        if (run(&part) == DONE && whole && !has_same_pixels(&part, whole)) abort();
        else if (whole && is_spliced && !part.splicing.made && part.pixels.len >= box->height * wide * part.color->channels) abort();
        end(&part);
    }
    free(header);
    free(file);
}

/* Walk a file for its access points. Decode a box of it with them, or with broken ones that have a
 * right checksum, and compare the pixels with those of the whole file if both exist. */
static enum verdict decode_by_points(const struct job *asked, unsigned char *memory)
{
    static unsigned char pixels[PIXELS_BYTES_MAX];
    struct finding finding = {.data = asked->data.buf, .length = (size_t)asked->data.len, .height = asked->height, .width = asked->width};
    struct job with = *asked, without = *asked;
    enum verdict found, plain;
    finding.step_pixels = 1 + (int)below(100);
    found = find_points(&finding);
    if (found == DONE) {
        const int is_broken = below(2) == 0;
        int is_spliced;
        const size_t length = finding.made_length - CHECKSUM_BYTES;
        uint8_t *const record = malloc(finding.made_length);
        if (!record) abort();
        memcpy(record, finding.made, finding.made_length);
        if (is_broken) {
            for (uint32_t times = 1 + below(6); times > 0; times--) record[below(3) ? below((uint32_t)length) : below(28)] = (uint8_t)below(256);
            write_number(record + length, checksum(record, length), CHECKSUM_BYTES);
        }
        with.record = (Py_buffer){.buf = record, .len = (Py_ssize_t)finding.made_length};
        with.pixels.buf = memory + PIXELS_BYTES_MAX - with.pixels.len;
        without.pixels.buf = pixels;
        plain = run(&without);
        /* fewer columns may be beside the box */
        if (run(&with) != plain && !is_broken && plain != BAD_BUFFER) abort();
        if (plain == DONE && !is_broken && !has_same_pixels(&with, &without)) abort();
        is_spliced = with.splicing.made != NULL;
        end(&with);
        with = *asked;
        with.record = (Py_buffer){.buf = record, .len = (Py_ssize_t)finding.made_length};
        with.pixels.buf = memory + PIXELS_BYTES_MAX - with.pixels.len;
        decode_by_part(&with, &asked->box, plain == DONE && !is_broken ? &without : NULL, is_spliced);
        end(&without);
        free(record);
    }
    free(finding.made);
    return found;
}

int main(int count, char **arguments)
{
    static unsigned char file[2 * FILE_BYTES_MAX];
    unsigned char *const files = guarded(2 * FILE_BYTES_MAX), *const memory = guarded(PIXELS_BYTES_MAX);
    const size_t row_bytes = TARGET_SIDE_MAX * TARGET_SIDE_MAX * 3;
    unsigned char *const row_end = guarded(row_bytes) + row_bytes;
    const int last = open("jpeg-last.bin", O_RDWR | O_CREAT | O_TRUNC, 0666);
    unsigned long verdicts[NO_MEMORY + 1] = {0}, written[NO_MEMORY + 1] = {0}, walked[NO_MEMORY + 1] = {0}, tries = 0, cuts = 0, probed = 0;
    time_t until;
    if (count < 4 || last < 0) return 2;
    scaling = &SCALING;
#ifdef HAS_VECTORS
    has_avx2 = __builtin_cpu_supports("avx2") != 0;
#endif
    until = time(NULL) + atoi(arguments[1]);
    state = 0x9e3779b97f4a7c15u + (uint64_t)atoi(arguments[2]);
    for (; tries % 256 || time(NULL) < until; tries++) {
        struct job job, asked;
        struct header header;
        size_t length = read_file(arguments[3 + below((uint32_t)count - 3)], file), bytes;
        if (below(4)) length = broken(file, length);
        memset(&job, 0, sizeof job);
        measure(&job, file, length);
        if (job.height > SIDE_MAX || job.width > SIDE_MAX) continue;
        if (below(50) == 0) job.height++;
        choose(&job);
        job.data.buf = memcpy(files + 2 * FILE_BYTES_MAX - length, file, length);
        job.data.len = (Py_ssize_t)length;
        bytes = bytes_for(&job);
        job.pixels.buf = memory + PIXELS_BYTES_MAX - bytes;
        job.pixels.len = (Py_ssize_t)bytes;
        note(last, &job);
        probed += (unsigned long)probe_jpeg(job.data.buf, length, &header);
        asked = job;
        uses_avx2 = has_avx2 && below(2);
        if (below(2)) aim(&job, row_end);
        verdicts[run(&job)]++;
        cuts += (unsigned long)job.is_cut;
        end(&job);
        if (below(2) == 0) walked[decode_by_points(&asked, memory)]++;
        if (below(8) == 0) {
            struct transcoding made;
            written[transcode_twice(&job, &made)]++;
        }
    }
    printf("%lu files: %lu decoded, %lu broken, %lu for others, %lu with a wrong box, %lu with too little memory\n", tries,
           verdicts[DONE], verdicts[BROKEN], verdicts[NOT_MINE], verdicts[BAD_BOX], verdicts[BAD_BUFFER]);
    printf("%lu with a usual header\n", probed);
    printf("%lu with a part cut out; %lu transcoded, %lu broken, %lu of another kind\n", cuts, written[DONE], written[BROKEN],
           written[NOT_MINE]);
    printf("with access points: %lu, %lu broken or of another kind\n", walked[DONE], walked[NOT_MINE]);
    return 0;
}
