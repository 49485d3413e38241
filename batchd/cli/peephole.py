"""One batch of a running daemon, for the commands that look at one. Runs in the user's shell.

Invariant: the batch is a copy, so its slot is given back at once.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click
import numpy as np

import batchd_client
from batchd.cli.asking import client_errors, running_daemon
from batchd_client.asking import ask_status
from batchd_client.batch import Room
from batchd_wire.fields import length_texts
from batchd_wire.views import row_views

BATCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PeekedBatch:
    """A copy of one batch: ``arrays`` by field, each ``[samples, ...]``; ``classes`` may be empty.

    ``varying``: the fields of which samples differ in shape, by name. Their arrays have room for
    the largest there may be. ``bgr_fields``: images that the pipeline makes with their colours blue
    first.
    """

    epoch: int
    step: int
    classes: Sequence[str]
    arrays: Mapping[str, np.ndarray]
    varying: Mapping[str, Room] = field(default_factory=dict)
    bgr_fields: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """How many samples it has."""
        return len(next(iter(self.arrays.values())))

    def samples(self, name: str) -> list[np.ndarray]:
        """The values of a field, one array for each sample, in its own shape."""
        array, room = self.arrays[name], self.varying.get(name)
        if room is None or room.varying is None or room.sizes is None:
            return [array[row, ...] for row in range(len(array))]
        return row_views(array, room.sizes, room.varying)

    def type_text(self, name: str) -> str:
        """Type and shape of one sample, for people."""
        array, room = self.arrays[name], self.varying.get(name)
        lengths = length_texts(array.shape[1:], room.varying if room else None)
        return f"{array.dtype}[{', '.join(lengths)}]" if lengths else str(array.dtype)


class _Echo(logging.Handler):
    """Says what the client would put into a trainer's log, such as that a live stream has no samples yet."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"batchd: {record.getMessage()}", err=True)


def peek(address: str | None, stream: str, epoch: int, step: int) -> PeekedBatch:
    """Wait for a batch of the stream and copy it, as a trainer that begins there would get it. Raises ``BatchdError``."""
    with running_daemon(address) as session:
        known, found = ask_status(session).stream(stream), session.address
    log, echo = logging.getLogger("batchd_client"), _Echo(logging.WARNING)
    log.addHandler(echo)
    try:
        with (
            client_errors(),
            batchd_client.connect(found, reconnect_timeout_s=0, batch_timeout_s=BATCH_TIMEOUT_S) as daemon,
            daemon.spectate(stream, epoch, step) as looked_at,
            next(iter(looked_at)) as batch,
        ):
            rooms = {name: (room := batch.room(name))._replace(array=room.array.copy()) for name in batch}
            arrays = {name: room.array for name, room in rooms.items()}
            varying = {name: room for name, room in rooms.items() if room.varying is not None}
            bgr_fields = known.bgr_fields if known is not None else ()
            return PeekedBatch(batch.epoch, batch.step, looked_at.classes, arrays, varying, bgr_fields)
    finally:
        log.removeHandler(echo)
