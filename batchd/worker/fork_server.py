"""Forks workers with all imports done. FORK SERVER process, and each WORKER at its beginning.

    daemon, worker host --fork, before their own imports--> fork server --fork--> worker, ...
                        --start_linked, if that one died--> fork server

A worker's imports take half a second of a CPU; a fork takes some milliseconds. And imported objects
are in memory once: forked processes share all pages that none of them writes to. So the first fork
server is a fork of the process that wants it. A later one is a process of its own, because the
daemon has keys and other descriptors by then.

Invariant: the early fork happens before the configuration is read. Invariant: a worker begins with
one thread, its standard streams, and the two descriptors of its order. Invariant: no worker is
reaped before the daemon asks for it, after it has read the status.
"""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from batchd.errors import why_no_process
from batchd.runtime import children, failpoints, sandbox
from batchd.runtime.children import Linked, fork_linked, start_linked
from batchd.runtime.mapped_files import unmap_loaded_pages
from batchd.worker import messages
from batchd.worker.process import NoteMemory, limit_threads, settle_in, thread_count
from batchd_wire.channel import ChannelClosed, receive_message, send_message


class ForkedWorker(NamedTuple):
    """Descriptors of a new worker: its channel to the daemon, and its note."""

    channel: socket.socket
    note: int


def start_early() -> Linked | None:
    """Start the fork server at the beginning of a daemon or worker host, with ``gc`` disabled.

    None without resources: the first worker tries it again. In the fork server it does not return.
    """
    environment = dict(os.environ)
    limit_threads()
    # What the daemon and its workers import. NumPy gets one thread, so that this process may fork:
    # others have no work here, and take 10 ms to start.
    import batchd.core.epochs  # noqa: PLC0415  after the environment is set, as are the others
    import batchd.data.functions.load  # noqa: PLC0415
    import batchd.data.pipeline.augment.options  # noqa: PLC0415
    import batchd.data.pipeline.cache_split  # noqa: PLC0415
    import batchd.data.pipeline.call.effects  # noqa: PLC0415
    import batchd.data.pipeline.sample_fields  # noqa: PLC0415
    import batchd.data.sources.cache.disk  # noqa: PLC0415
    import batchd.data.sources.interface  # noqa: PLC0415
    import batchd.data.sources.options  # noqa: PLC0415
    import batchd.data.sources.push.options  # noqa: F401, PLC0415
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
    from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  the same

    with channel:
        channel.setblocking(True)
        forked = serve_forks(channel)
    if forked is not None:
        with forked.channel:
            forked.channel.setblocking(True)
            try:
                note = NoteMemory(forked.note)
                LibraryOutput.use(note.descriptor, messages.NOTE_TEXT_AT)
                WorkerLoop(forked.channel, note).run()
            except Exception as error:  # noqa: BLE001  the end of the process, which says why by its status
                is_short = isinstance(error, MemoryError)
                sys.stderr.write("a worker found no memory for a sample\n" if is_short else traceback.format_exc())
                sys.stderr.flush()
                # at once: the daemon kills a worker whose channel has ended, and then the status is
                # not the worker's
                os._exit(messages.OUT_OF_MEMORY_STATUS if is_short else 1)
    return 0


def serve_forks(channel: socket.socket) -> ForkedWorker | None:
    """Fork workers until the daemon is gone. Returns None then, and a value in each worker."""
    threads = thread_count()
    if threads > 1:  # of a sitecustomize, for example
        sys.stderr.write(
            f"the fork server of the workers has {threads} threads; a worker may hang on a lock of one of them\n"
        )
    gc.collect()
    gc.enable()
    gc.freeze()  # the collector would write to the shared pages of imported objects
    unmap_loaded_pages()
    sandbox.prepare()
    try:
        while True:
            message, descriptors = receive_message(channel, messages.TO_FORKSERVER)
            if isinstance(message, messages.Reap):
                os.waitpid(message.pid, 0)
                continue
            assert isinstance(message, messages.Fork)
            failpoints.passing("forks.order.received")
            if _fork(channel, message.worker, descriptors) == 0:
                channel.close()
                return _begin(message.worker, descriptors)
    except ChannelClosed:
        return None


def _fork(channel: socket.socket, worker: int, descriptors: Sequence[int]) -> int:
    """Fork; 0 in the worker. Else report to the daemon, and close the descriptors here."""
    try:
        pid = children.fork()
    except OSError as error:
        send_message(channel, messages.NotForked(worker, why_no_process(error)))
        pid = -1
    if pid == 0:
        return 0
    for descriptor in descriptors:
        os.close(descriptor)
    if pid > 0:
        pidfd = os.pidfd_open(pid)
        try:
            send_message(channel, messages.Forked(worker, pid), [pidfd])
        finally:
            os.close(pidfd)
    return pid


def _begin(worker: int, descriptors: Sequence[int]) -> ForkedWorker:
    """Begin as a worker: with its number, and random numbers that differ from other workers'."""
    from batchd.data.functions.load import Here  # noqa: PLC0415  after the environment is set

    Here.worker = worker
    channel, note = descriptors
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    return ForkedWorker(socket.socket(fileno=channel), note)
