"""One message after the other, until the channel ends. WORKER process.

Invariant: an order is answered with exactly one ``ChunkFilled``, or the process ends; it never
waits for anything but its channel and its files.
"""

import os
import socket

from batchd import failpoints
from batchd.orders.worker import (
    TO_WORKER,
    FillChunk,
    ForgetSlots,
    ForgetStream,
    Quarantine,
    Ready,
    ServeStream,
    StreamMeasured,
    UseSlot,
    UseStorage,
)
from batchd.pipeline.image.decode import decoder_versions
from batchd.storage.access import Storage
from batchd.storage.values import StorageLimits
from batchd.worker.chunk import WorkerStream
from batchd.worker.note import NoteMemory
from batchd.worker.slots import WritableSlots
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message


class WorkerLoop:
    """Owns the channel to the daemon."""

    def __init__(self, channel: socket.socket, note: NoteMemory) -> None:
        self._channel = channel
        self._note = note
        self._slots = WritableSlots()
        self._storage = Storage()
        self._streams: dict[int, WorkerStream] = {}

    def run(self) -> None:
        """Work until the daemon closes the channel or is gone."""
        try:
            failpoints.passing("worker.starting")
            send_message(self._channel, Ready(decoder_versions()))
            while True:
                failpoints.passing("worker.idle")
                message, descriptors = receive_message(self._channel, TO_WORKER)
                self._handle(message, descriptors)
        except ChannelClosed:
            return

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        match message, descriptors:
            case FillChunk(), []:
                failpoints.passing("worker.order.received")
                stream = self._streams[message.stream]
                filled = stream.fill(
                    message, self._slots.arrays(message.slot, stream.layout), self._slots.page(message.slot)
                )
                send_message(self._channel, filled)
                failpoints.passing("worker.done.sent")
            case UseSlot(), [descriptor]:
                self._slots.add(message.slot, message.slot_bytes, descriptor)
            case ServeStream(), [index, *others]:
                stream = self._streams[message.stream] = WorkerStream(message, index, others, self._note, self._storage)
                for descriptor in [index, *(others if message.cache != "off" else [])]:
                    os.close(descriptor)
                send_message(self._channel, StreamMeasured(message.stream, stream.parts))
            case ForgetSlots(), []:
                self._slots.forget(message.slots)
            case ForgetStream(), []:
                self._streams.pop(message.stream).close()
            case UseStorage(), []:
                self._storage.limits = StorageLimits.from_wire(message.storage)
            case Quarantine(), []:
                self._streams[message.stream].quarantined.update(message.samples)
            case _:
                raise AssertionError(f"{type(message).__name__} came with {len(descriptors)} descriptors")
