"""The stream of the fake daemon and its record of trainers: data without behaviour."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchd_wire.fields import Field, Rooms, SlotLayout, place_fields
from batchd_wire.messages import Subscribe, Subscribed
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays


@dataclass
class FakeStream:
    """The stream that the fake daemon serves."""

    name: str = "photos"
    fingerprint: str = "f1" * 32
    steps: int = 5
    rows: int = 4
    slots: int = 8
    window: int = 2
    drop_last: bool = False
    fields: tuple[Field, ...] = (Field("image", "uint8", (2, 2, 3)), Field("label", "int64", ()))
    writes_pixels: bool = True
    bgr_fields: tuple[str, ...] = ()
    overlays: tuple[tuple[str, str, str, str, bool], ...] = ()
    in_lockstep: bool = False
    rooms: Rooms | None = None
    """All batches are of the first bucket."""

    @property
    def layout(self) -> SlotLayout:
        return place_fields(self.fields, self.rows, self.rooms)

    def rounds(self, base: int, world_size: int) -> int:
        full, rest = divmod(self.steps - base, world_size)
        return full + bool(rest and not self.drop_last)

    def positions(self, asked: Subscribe) -> Iterator[tuple[int, int]]:
        """Every (epoch, step) of a subscription, counted one by one."""
        epoch, start = asked.epoch, asked.step
        while asked.end_epoch is None or epoch < asked.end_epoch:
            while (left := self.steps - start) > 0:
                if left >= asked.world_size:
                    yield epoch, start + asked.rank
                elif not self.drop_last:
                    yield epoch, start + asked.rank * left // asked.world_size
                start += asked.world_size
            epoch, start = epoch + 1, 0

    def page(self, epoch: int, step: int) -> bytearray:
        """A slot with this position in it, without its header."""
        page = bytearray(self.layout.slot_bytes)
        layout = self.layout.of(0)
        arrays = slot_arrays(page, layout)
        arrays["image"][:] = (10 * epoch + step) % 256
        arrays["label"][:] = self.label(epoch, step)
        checksums = RowChecksums(layout)
        for row in range(self.rows):
            checksums.write(memoryview(page), row)
        return page

    def admit(self, asked: Subscribe, number: int) -> Subscribed:
        """Admit a request as this subscription."""
        return Subscribed(
            asked.request,
            number,
            asked.epoch,
            asked.step,
            self.fingerprint,
            self.steps * self.rows,
            self.rows,
            self.steps,
            self.rounds(0, asked.world_size),
            self.rounds(asked.step, asked.world_size),
            asked.window or self.window,
            self.layout.to_wire(),
            ["cat", "dog"],
            in_lockstep=self.in_lockstep,
            overlays=list(self.overlays),
        )

    def label(self, epoch: int, step: int) -> np.ndarray:
        """The values of the field ``label`` at a position."""
        return np.arange(self.rows) + 1_000_000 * epoch + self.rows * step


@dataclass(eq=False)
class FakeSlot:
    """One slot; it keeps the writable descriptor."""

    number: int
    descriptor: int
    generation: int = 0
    is_leased: bool = False


@dataclass(eq=False)
class FakeSubscription:
    """The fake daemon's record of one subscription."""

    number: int
    asked: Subscribe
    positions: Iterator[tuple[int, int]]
    window: int
    granted: int = 0
    consumed: int = 0
    waiting: bool = False
    ended: bool = False
    leases: dict[int, tuple[FakeSlot, int]] = field(default_factory=dict)


@dataclass(eq=False)
class FakeSession:
    """One trainer's session."""

    lifeline: socket.socket
    secret: bytes | None = None
    routing: bytes | None = None
    wants_writable: bool = False
    shared: set[int] = field(default_factory=set)
    subscriptions: dict[int, FakeSubscription] = field(default_factory=dict)
