"""How the FORK SERVER begins, early or later, and each WORKER that it forks.

    daemon, worker host --fork, before their own imports--> fork server --fork--> worker, ...
                        --start_linked, if that one died--> fork server

The first fork server is a fork of the process that wants it: modules that both use are imported
once, and are in memory once. A later one is a process of its own, because the daemon has keys and
other descriptors by then.

Invariant: the early fork happens before the configuration is read.
"""

import gc
import os
import socket
import sys
import traceback

from batchd.runtime.children import Linked, fork_linked, start_linked
from batchd.worker.messages import NOTE_TEXT_AT, OUT_OF_MEMORY_STATUS
from batchd.worker.process import limit_threads, settle_in, thread_count


def start_early() -> Linked | None:
    """Start the fork server at the beginning of a daemon or worker host, with ``gc`` disabled.

    None without resources: the first worker tries it again. In the fork server it does not return.
    """
    environment = dict(os.environ)
    limit_threads()
    # What the daemon and its workers import. NumPy gets one thread, so that this process may fork:
    # others have no work here, and take 10 ms to start.
    import batchd.core.epochs  # noqa: PLC0415  after the environment is set, as are the others
    import batchd.data.pipeline.cache_split  # noqa: PLC0415
    import batchd.data.pipeline.call.effects  # noqa: PLC0415
    import batchd.data.pipeline.sample_fields  # noqa: PLC0415
    import batchd.data.sources.cache.disk  # noqa: PLC0415
    import batchd.data.sources.interface  # noqa: PLC0415
    import batchd.data.sources.options  # noqa: PLC0415
    import batchd.data.sources.push.options  # noqa: PLC0415
    import batchd.worker.fork_server  # noqa: F401, PLC0415
    import batchd_wire.slot  # noqa: F401, PLC0415

    gc.freeze()  # neither process shall write to what they share
    try:
        # a fork may hang on a lock of another thread: of a sitecustomize, for example
        started = fork_linked("batchd.worker") if thread_count() == 1 else start_linked("batchd.worker")
    except OSError:
        return None
    if isinstance(started, socket.socket):
        sys.exit(work(started))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    return started


def work(channel: socket.socket) -> int:
    """Fork workers until the daemon is gone; in each of them: work until the daemon is gone."""
    settle_in()
    import batchd.data.sources.files.reader  # noqa: F401, PLC0415  the usual one, so that no worker has to
    from batchd.data.pipeline.image.opencv import LibraryOutput  # noqa: PLC0415  after the environment is set
    from batchd.worker.fork_server import serve_forks  # noqa: PLC0415  after the environment is set
    from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  the same
    from batchd.worker.process import NoteMemory  # noqa: PLC0415  the same

    with channel:
        channel.setblocking(True)
        forked = serve_forks(channel)
    if forked is not None:
        with forked.channel:
            forked.channel.setblocking(True)
            try:
                note = NoteMemory(forked.note)
                LibraryOutput.use(note.descriptor, NOTE_TEXT_AT)
                WorkerLoop(forked.channel, note).run()
            except Exception as error:  # noqa: BLE001  the end of the process, which says why by its status
                is_short = isinstance(error, MemoryError)
                sys.stderr.write("a worker found no memory for a sample\n" if is_short else traceback.format_exc())
                sys.stderr.flush()
                # at once: the daemon kills a worker whose channel has ended, and then the status is
                # not the worker's
                os._exit(OUT_OF_MEMORY_STATUS if is_short else 1)
    return 0
