"""A worker that sleeps instead of decoding: real messages, no pixels.

Started by ``scaling_daemon.py`` in place of real ones.

Each is a fork of this program. Its rows stay as the slot had them, which is zeros. It sleeps until
the moment when its order would have been done, counted from when the order before it was, so that
what a busy machine adds to one sleep is taken off the next.
"""

import os
import signal
import socket
import sys
import time
from contextlib import suppress

from batchd.core.rows import rows_of
from batchd.core.work import NO_WORK
from batchd.worker.fork_server import serve_forks
from batchd.worker.messages import TO_WORKER, Chunk, ChunksFilled, FillChunks, Ready, ServeStream, StreamMeasured
from batchd_wire.channel import ChannelClosed, receive_message, send_message

IMAGE_US = float(os.environ["SCALING_IMAGE_US"])
BEHIND_MAX_S = 0.1


def main(channel: socket.socket) -> None:
    """Answer orders until the daemon is gone."""
    send_message(channel, Ready("none"))
    done_s = 0.0
    while True:
        message, descriptors = receive_message(channel, TO_WORKER)
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(message, ServeStream):
            send_message(channel, StreamMeasured(message.stream, ["decode"]))
        elif isinstance(message, FillChunks):
            chunks = [Chunk(*one) for one in message.chunks]
            busy_s = sum(len(rows_of(chunk.runs)) for chunk in chunks) * IMAGE_US / 1e6
            now_s = time.monotonic()
            done_s = max(done_s, now_s - BEHIND_MAX_S) + busy_s
            time.sleep(max(0.0, done_s - now_s))
            busy_us = round(busy_s * 1e6)
            work = NO_WORK._replace(busy_us=busy_us, cpu_us=busy_us, parts_us=[busy_us], usual_us=round(IMAGE_US))
            send_message(channel, ChunksFilled([chunk.order for chunk in chunks], work, [], ""))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        ours.setblocking(True)
        born = serve_forks(ours)
    if born is not None:
        born.channel.setblocking(True)
        with suppress(ChannelClosed):
            main(born.channel)
