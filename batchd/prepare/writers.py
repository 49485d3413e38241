"""The WRITER processes, the sample that each works on, and their ends.

Runs in the process of ``batchd prepare``.

Invariant: a writer counts as ended when its pidfd is readable, so a shard that another writer
starts again has no second writer.
"""

import mmap
import os
import selectors
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

from batchd.children import Child, describe, start_linked
from batchd.orders.prepare import TO_PREPARE_FROM_WRITER, PrepareStream, SampleLeftOut, WriteShard
from batchd.orders.worker import NOTE, NOTE_BYTES
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message

END_S = 2.0


@dataclass(slots=True, eq=False)
class Writer:
    """One process that writes shards."""

    child: Child
    channel: socket.socket
    note: mmap.mmap
    order: WriteShard | None = None
    left_out: list[SampleLeftOut] = field(default_factory=list)
    note_since: tuple[tuple[int, int, int], float] = ((0, 0, 0), 0.0)
    """The last value of the note, and when it changed, by the monotonic clock in seconds."""

    @classmethod
    def start(cls, told: PrepareStream, index_descriptor: int) -> Self:
        """Start a process and send it the recipe. Raises ``OSError``."""
        with ExitStack() as until_done, ExitStack() as where_it_fails:
            note = os.memfd_create("batchd-note", os.MFD_CLOEXEC)
            until_done.callback(os.close, note)
            os.posix_fallocate(note, 0, NOTE_BYTES)
            memory = mmap.mmap(note, NOTE_BYTES)
            child, channel = start_linked("batchd.prepare", str(note), descriptors=[note])
            where_it_fails.enter_context(channel)
            where_it_fails.enter_context(child)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            send_message(channel, told, [index_descriptor])
            where_it_fails.pop_all()
        return cls(child, channel, memory)

    def write(self, order: WriteShard) -> None:
        """Order a shard. If the writer has ended, its pidfd reports that."""
        self.order, self.left_out = order, []
        self.note_since = (self.note_values, monotonic())
        try:
            send_message(self.channel, order)
        except ChannelClosed:
            return

    @property
    def note_values(self) -> tuple[int, int, int]:
        """The note: first sample of the shard, row + 1 (0 between samples), sample."""
        first, row_after, sample = NOTE.unpack_from(self.note)
        return first, row_after, sample

    @property
    def samples_done(self) -> int:
        """Samples of the present shard that are done."""
        first, row_after, _ = self.note_values
        return max(0, row_after - 1) if self.order is not None and first == self.order.first else 0

    def busy_for_s(self, now: float) -> float:
        """Seconds since it began its present sample."""
        seen, since = self.note_since
        if self.note_values != seen:
            self.note_since = (self.note_values, now)
            return 0.0
        return now - since if self.order is not None and seen[1] else 0.0

    def receive(self) -> Message | None:
        """Its next message; None at the end of the channel.

        Bad samples are added to ``left_out``.
        """
        try:
            message, _ = receive_message(self.channel, TO_PREPARE_FROM_WRITER)
        except ChannelClosed:
            return None
        if isinstance(message, SampleLeftOut):
            self.left_out.append(message)
        return message

    def reap(self) -> tuple[int | None, str]:
        """Reap the ended process: its sample, if it worked on one, and how it ended."""
        how = describe(self.child.reap())
        _, row_after, sample = self.note_values
        self._close()
        return (sample if row_after else None), how

    def end(self) -> None:
        """Kill it."""
        self.child.end(kill_timeout_s=END_S)
        self._close()

    def _close(self) -> None:
        self.channel.close()
        self.note.close()


class Writers:
    """All writers of a command. A context manager, which ends them."""

    def __init__(self) -> None:
        self.alive: list[Writer] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.alive:
            writer.end()
        self._selector.close()

    def start(self, told: PrepareStream, index_descriptor: int) -> Writer:
        """Start one more writer process and watch it."""
        writer = Writer.start(told, index_descriptor)
        self.alive.append(writer)
        self._selector.register(writer.channel, selectors.EVENT_READ, writer)
        self._selector.register(writer.child.pidfd, selectors.EVENT_READ, writer)
        return writer

    def wait(self, seconds: float) -> tuple[list[Writer], list[Writer]]:
        """Wait for ``seconds`` at most.

        Writers with messages, and ended writers, which may have messages, too.
        """
        talking: list[Writer] = []
        gone: list[Writer] = []
        for key, _ in self._selector.select(seconds):
            (gone if key.fileobj == key.data.child.pidfd else talking).append(key.data)
        return [writer for writer in talking if writer not in gone], gone

    def remove(self, writer: Writer) -> None:
        """Stop watching a writer that has ended."""
        self._selector.unregister(writer.channel)
        self._selector.unregister(writer.child.pidfd)
        self.alive.remove(writer)
