"""How each process that decodes begins, and its note. Fork servers, workers.

The note is the current row, in shared memory, drawn in ``worker.messages``; the daemon reads it
after the worker's death.

Invariant: the note is written before a sample is touched and cleared when the chunk is done, so a
dead worker's note names the sample that it died with. The worker is the only writer. A torn read is
harmless, since the daemon trusts the note only of dead workers.
"""

import mmap
import os
import signal

from batchd.runtime.children import die_with_parent, keep_freed_memory, print_to_the_log
from batchd.worker.messages import MANY_ROWS, NOTE, NOTE_BYTES

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
)


def limit_threads() -> None:
    """Limit numerical libraries, before their import, to one thread: each core has a process."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def thread_count() -> int:
    """Number of this process's threads, also of those that Python does not know."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  no paths are wanted


def settle_in() -> None:
    """Tie the process to its parent, which handles SIGINT."""
    keep_freed_memory()
    die_with_parent()  # the channel's end may not be seen while a sample blocks the process
    print_to_the_log()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class NoteMemory:
    """Maps the note behind ``descriptor``, which belongs to it from now on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, NOTE_BYTES)
        self._order = 0

    def begin(self, order: int) -> None:
        """An order is in progress."""
        self._order = order

    def take(self, row: int, sample: int) -> None:
        """``sample`` is decoded for ``row``."""
        NOTE.pack_into(self._memory, 0, self._order, row + 1, sample)

    @property
    def memory(self) -> memoryview:
        """The note itself, for code that writes the row and the sample by itself."""
        return memoryview(self._memory)

    def take_many(self, row: int) -> None:
        """Many rows, from ``row`` on, are made at once."""
        self.take(MANY_ROWS + row, 0)

    def clear(self) -> None:
        """Between samples."""
        NOTE.pack_into(self._memory, 0, self._order, 0, 0)

    def close(self) -> None:
        """End the mapping; the descriptor stays."""
        self._memory.close()
