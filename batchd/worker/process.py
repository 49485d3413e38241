"""What every process that decodes does first. Worker processes, and those of ``batchd prepare``; standard library only."""

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper

from batchd.children import die_with_parent

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
)


def limit_threads() -> None:
    """Hold the thread pools of numerical libraries to one thread, before they are imported: there is a process for each core."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def settle_in() -> None:
    """Become a process that belongs to its parent.

    The end of its channel says that whoever started us is gone, unless a sample holds us: then the
    kernel kills us. SIGINT is the other side's business.
    """
    die_with_parent()
    print_to_the_log()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def print_to_the_log() -> None:
    """Standard output is the daemon's, for its address; what people's functions print goes where the log goes, at once."""
    with suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
