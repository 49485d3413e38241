"""Entry of the FORK SERVER and its WORKERS: ``python -m batchd.worker CHANNEL_FD``."""

import os
import socket
import sys
import traceback

from batchd.orders.worker import OUT_OF_MEMORY_STATUS
from batchd.worker.process import limit_threads, settle_in

limit_threads()


def main() -> int:
    """Fork workers until the daemon is gone; in each of them: work until the daemon is gone."""
    settle_in()
    import batchd.sources.files.reader  # noqa: F401, PLC0415  the usual one, so that no worker has to
    from batchd.worker.fork_server import serve_forks  # noqa: PLC0415  after the environment is set
    from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  the same
    from batchd.worker.process import NoteMemory  # noqa: PLC0415  the same

    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.setblocking(True)
        forked = serve_forks(channel)
    if forked is not None:
        with forked.channel:
            forked.channel.setblocking(True)
            try:
                WorkerLoop(forked.channel, NoteMemory(forked.note)).run()
            except Exception as error:  # noqa: BLE001  the end of the process, which says why by its status
                is_short = isinstance(error, MemoryError)
                sys.stderr.write("a worker found no memory for a sample\n" if is_short else traceback.format_exc())
                sys.stderr.flush()
                # at once: the daemon kills a worker whose channel has ended, and then the status is
                # not the worker's
                os._exit(OUT_OF_MEMORY_STATUS if is_short else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
