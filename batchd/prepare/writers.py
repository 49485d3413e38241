"""The writing processes: what each has in hand, and how it ends. The process of ``batchd prepare``.

Invariant: a writer that is gone is gone for the kernel (its pidfd is readable), so nobody writes to
its shard any more when the next one begins it anew.
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
    """One writing process."""

    child: Child
    channel: socket.socket
    note: mmap.mmap
    order: WriteShard | None = None
    left_out: list[SampleLeftOut] = field(default_factory=list)
    stands_since: tuple[tuple[int, int, int], float] = ((0, 0, 0), 0.0)
    """The note as it was seen last, and when it became so."""

    @classmethod
    def start(cls, told: PrepareStream, index_descriptor: int) -> Self:
        """Start a process and tell it what to prepare. Raises ``OSError``."""
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
        """Order a shard. A writer that is gone by now is noticed by its pidfd."""
        self.order, self.left_out = order, []
        self.stands_since = (self.in_hand, monotonic())
        try:
            send_message(self.channel, order)
        except ChannelClosed:
            return

    @property
    def in_hand(self) -> tuple[int, int, int]:
        """The note: first sample of the shard, row + 1 (0 between samples), sample."""
        first, row_after, sample = NOTE.unpack_from(self.note)
        return first, row_after, sample

    @property
    def samples_done(self) -> int:
        """Of the shard in hand."""
        first, row_after, _ = self.in_hand
        return max(0, row_after - 1) if self.order is not None and first == self.order.first else 0

    def stands_for_s(self, now: float) -> float:
        """How long it has had the same sample in hand, in seconds."""
        seen, since = self.stands_since
        if self.in_hand != seen:
            self.stands_since = (self.in_hand, now)
            return 0.0
        return now - since if self.order is not None and seen[1] else 0.0

    def receive(self) -> Message | None:
        """What it reports; None where there is nothing any more. What it left out is kept here."""
        try:
            message, _ = receive_message(self.channel, TO_PREPARE_FROM_WRITER)
        except ChannelClosed:
            return None
        if isinstance(message, SampleLeftOut):
            self.left_out.append(message)
        return message

    def bury(self) -> tuple[int | None, str]:
        """It has ended: the sample that it had in hand, if any, and how it ended."""
        how = describe(self.child.reap())
        _, row_after, sample = self.in_hand
        self._close()
        return (sample if row_after else None), how

    def end(self) -> None:
        """End it now; its unfinished shard is nobody's."""
        self.child.end(kill_timeout_s=END_S)
        self._close()

    def _close(self) -> None:
        self.channel.close()
        self.note.close()


class Writers:
    """All writing processes of a command. Use as a context manager: at its end none is left."""

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
        """One more."""
        writer = Writer.start(told, index_descriptor)
        self.alive.append(writer)
        self._selector.register(writer.channel, selectors.EVENT_READ, writer)
        self._selector.register(writer.child.pidfd, selectors.EVENT_READ, writer)
        return writer

    def wait(self, seconds: float) -> tuple[list[Writer], list[Writer]]:
        """Those that have something to say, and those that have ended; what the latter said comes first."""
        talking: list[Writer] = []
        gone: list[Writer] = []
        for key, _ in self._selector.select(seconds):
            (gone if key.fileobj == key.data.child.pidfd else talking).append(key.data)
        return [writer for writer in talking if writer not in gone], gone

    def remove(self, writer: Writer) -> None:
        """It has ended."""
        self._selector.unregister(writer.channel)
        self._selector.unregister(writer.child.pidfd)
        self.alive.remove(writer)
