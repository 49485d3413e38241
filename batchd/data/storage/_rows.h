/* What _rows.c offers to _jpeg.c, in the capsule `batchd.data.storage._rows.READING`. Worker. */
#ifndef BATCHD_ROWS_H
#define BATCHD_ROWS_H

#include <stdint.h>

#define READING_NAME "batchd.data.storage._rows.READING"

struct reading {
    /* As `_rows.read_file`, into `room` bytes. Needs no GIL. */
    int64_t (*read_file)(int folder, const char *name, int flags, char *memory, int64_t room, int64_t bytes_max, int64_t as_of_ns);
};

#endif
