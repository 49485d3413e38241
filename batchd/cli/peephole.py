"""One batch of a running daemon, for the commands that look at one. Runs in the user's shell.

Invariant: leaving the context ends the lifeline, which gives back whatever was held.
"""

import mmap
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from batchd.attach.session import ANSWER_TIMEOUT_S, Attachment
from batchd.errors import BatchdError
from batchd_wire.channel import receive_message
from batchd_wire.fields import PlacedField, layout_from_wire, length_texts, sizes_field
from batchd_wire.messages import (
    TO_TRAINER_LIFELINE,
    AskStatus,
    Handle,
    Pull,
    SlotShared,
    Status,
    Subscribe,
    Subscribed,
)
from batchd_wire.slot import holds_generation
from batchd_wire.status import read_status
from batchd_wire.views import checked_sizes, row_views, slot_arrays
from batchd_wire.waiting import SILENCE_MAX_S, missing_samples

BATCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PeekedBatch:
    """A copy of one batch: ``arrays`` by field, each ``[samples, ...]``; ``classes`` may be empty.

    ``varying``: the fields of which samples differ in shape, by name. Their arrays have room for the largest there may be.
    ``bgr_fields``: images that the pipeline makes with their colours blue first.
    """

    epoch: int
    step: int
    classes: list[str]
    arrays: dict[str, np.ndarray]
    varying: dict[str, PlacedField] = field(default_factory=dict)
    bgr_fields: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """How many samples it has."""
        return len(next(iter(self.arrays.values())))

    def samples(self, name: str) -> list[np.ndarray]:
        """The values of a field, one array for each sample, in its own shape. Raises ``BatchdError`` where sizes cannot be."""
        array, placed = self.arrays[name], self.varying.get(name)
        sizes = sizes_field(placed) if placed else None
        if placed is None or placed.varying is None or sizes is None:
            return [array[row, ...] for row in range(len(array))]
        try:
            known = checked_sizes(self.arrays[sizes.name], placed.shape, placed.varying)
        except ValueError as error:
            raise BatchdError(f"the batch cannot be read: field {name!r}: {error}") from None
        return row_views(array, known, placed.varying)

    def type_text(self, name: str) -> str:
        """Type and shape of one sample, for people."""
        array, placed = self.arrays[name], self.varying.get(name)
        lengths = length_texts(array.shape[1:], placed.varying if placed else None)
        return f"{array.dtype}[{', '.join(lengths)}]" if lengths else str(array.dtype)


class Peephole(Attachment):
    """A session that can look at one batch. Use as a context manager."""

    def peek(self, stream: str, say: Callable[[str], None], epoch: int = 0, step: int = 0) -> PeekedBatch:
        """Wait for a batch of the stream and copy it, as a trainer that begins there would get it.

        Where it does not come soon, and it is known why, ``say`` is called with that, once.
        """
        subscribe = Subscribe(
            request=1,
            stream=stream,
            rank=0,
            world_size=1,
            window=1,
            epoch=epoch,
            step=step,
            end_epoch=None,
            fingerprint=None,
            is_spectator=True,
        )
        bgr_fields = next((one.bgr_fields for one in self.status().streams if one.name == stream), ())
        told = self.ask(subscribe, Subscribed)
        self.dealer.send(Pull(told.subscription, 0, True, 0, []).encode())
        handle = self._first_handle(stream, say)
        memory = self._map(handle.slot)
        if not holds_generation(memory[:4096], handle.generation):
            raise BatchdError(f"slot {handle.slot} does not hold the batch that its handle names")
        rows = slice(handle.first, handle.first + handle.count)
        layout = layout_from_wire(told.layout)
        arrays = {name: array[rows].copy() for name, array in slot_arrays(memory, layout).items()}
        varying = {placed.name: placed for placed in layout.sample_fields if placed.varying}
        return PeekedBatch(handle.epoch, handle.step, told.classes, arrays, varying, bgr_fields)

    def _first_handle(self, stream: str, say: Callable[[str], None]) -> Handle:
        """Wait for what a pull brings. Whoever waits for long is told why, if it is for samples; that is asked for once."""
        deadline = monotonic() + BATCH_TIMEOUT_S
        missing = None
        reply = self.reply(SILENCE_MAX_S)
        if reply is None:
            self.dealer.send(AskStatus(2).encode())
            reply = self.reply(deadline - monotonic())
        if isinstance(reply, Status):
            missing = missing_samples(read_status(reply.status), stream)
            if missing is not None:
                say(f"waiting for samples: {missing}")
            reply = self.reply(deadline - monotonic())
        if isinstance(reply, Handle):
            return reply
        if reply is not None:
            raise BatchdError(f"the daemon answered Pull with {type(reply).__name__}")
        if missing is not None:
            raise BatchdError(f"no batch came within {BATCH_TIMEOUT_S:g} s: {missing}")
        raise self.silent("Pull", BATCH_TIMEOUT_S)

    def _map(self, slot: int) -> mmap.mmap:
        """Take slots from the lifeline until the one that is wanted is there."""
        deadline = monotonic() + ANSWER_TIMEOUT_S
        while monotonic() < deadline and select.select([self.lifeline], [], [], ANSWER_TIMEOUT_S)[0]:
            message, descriptors = receive_message(self.lifeline, TO_TRAINER_LIFELINE)
            maps = []
            for descriptor in descriptors:
                maps.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, mmap.PROT_READ))
                os.close(descriptor)
            if isinstance(message, SlotShared) and message.slot == slot and maps:
                return maps[0]
        raise BatchdError(f"the memory of slot {slot} did not come within {ANSWER_TIMEOUT_S:g} s")
