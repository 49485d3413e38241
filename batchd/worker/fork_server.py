"""Forks workers with all imports done. FORK SERVER process, and each WORKER at its beginning.

A worker's imports take half a second of a CPU; a fork takes some milliseconds. And imported objects
are in memory once: forked processes share all pages that none of them writes to.

Invariant: a worker begins with one thread, its standard streams, and the two descriptors of its
order. Invariant: no worker is reaped before the daemon asks for it, after it has read the status.
"""

import gc
import os
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

from batchd.data.functions.load import Here
from batchd.errors import why_no_process
from batchd.runtime import children, failpoints
from batchd.runtime.mapped_files import unmap_loaded_pages
from batchd.worker.messages import TO_FORKSERVER, Fork, Forked, NotForked, Reap
from batchd.worker.process import thread_count
from batchd_wire.channel import ChannelClosed, receive_message, send_message


class ForkedWorker(NamedTuple):
    """Descriptors of a new worker: its channel to the daemon, and its note."""

    channel: socket.socket
    note: int


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
    try:
        while True:
            message, descriptors = receive_message(channel, TO_FORKSERVER)
            if isinstance(message, Reap):
                os.waitpid(message.pid, 0)
                continue
            assert isinstance(message, Fork)
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
        send_message(channel, NotForked(worker, why_no_process(error)))
        pid = -1
    if pid == 0:
        return 0
    for descriptor in descriptors:
        os.close(descriptor)
    if pid > 0:
        pidfd = os.pidfd_open(pid)
        try:
            send_message(channel, Forked(worker, pid), [pidfd])
        finally:
            os.close(pidfd)
    return pid


def _begin(worker: int, descriptors: Sequence[int]) -> ForkedWorker:
    """Begin as a worker: with its number, and random numbers that differ from other workers'."""
    Here.worker = worker
    channel, note = descriptors
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    return ForkedWorker(socket.socket(fileno=channel), note)
