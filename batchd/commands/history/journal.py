"""What was in the batches of a push stream, by its journal: `batchd replay`, `seen`, and programs.

Runs in the user's process. The daemon may write the journal meanwhile, or be gone.

Invariant: nothing is computed: a batch that the journal has no more, or never had, is not found.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from batchd.commands.history.batches import TrainerRank, check_state_stream, check_stream, crc_text
from batchd.commands.history.cards import TrainerState
from batchd.config.load import load_config
from batchd.config.tree import Config
from batchd.errors import BatchdError
from batchd.runtime.suggestions import suggestion
from batchd.stream.journal import ROW, Records, journal_spec, read_journal
from batchd_wire.fields import CHECKSUM
from batchd_wire.position import Position
from batchd_wire.views import Array

PUSHED = "pushed"
_WANTED = re.compile(r"([^=]+)=(-?\d{1,18})")


@dataclass(frozen=True, slots=True, eq=False)
class JournalBatch:
    """A batch that a trainer got, without its samples.

    ``time_s``: when it was handed over first, in Unix time. ``pushed``: number of the push of each
    row since the daemon started, uint64 ``[rows]``. ``fields``: the small ones, ``[rows, *shape]``.
    ``row_crc32``: checksum of each row, uint32 ``[rows]``; ``crc32``: as ``Batch.crc32``.
    """

    position: Position
    time_s: float
    fingerprint: str
    pushed: Array
    fields: Mapping[str, Array]
    row_crc32: Array
    crc32: int

    @property
    def time_text(self) -> str:
        """Its time in UTC."""
        return f"{datetime.fromtimestamp(self.time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def row_text(self, row: int) -> str:
        """The facts of a row, for people."""
        values = [
            f"{name} {values[row].tolist()}" for name, values in self.fields.items() if name not in {"valid", "index"}
        ]
        values += ["not valid"] if not self.fields.get("valid", np.ones(len(self.pushed)))[row] else []
        return ", ".join([f"push {self.pushed[row]}", *values, f"CRC {crc_text(int(self.row_crc32[row]))}"])

    def to_plain(self) -> dict[str, object]:
        """The facts as JSON."""
        rows = [
            {"push": int(push), "crc32": crc_text(int(crc))}
            | {name: one[row].tolist() for name, one in self.fields.items()}
            for row, (push, crc) in enumerate(zip(self.pushed, self.row_crc32, strict=True))
        ]
        facts = {"time_s": self.time_s, "fingerprint": self.fingerprint, "crc32": crc_text(self.crc32)}
        return {**self.position._asdict(), **facts, "rows": rows}


class JournalReader:
    """The batches in the journal of a stream, the oldest first. Raises ``BatchdError``."""

    def __init__(self, config: Config, stream: str, state: TrainerState | None = None) -> None:
        """``state``: only batches of its stream, with its settings, are found."""
        if state is not None:
            check_state_stream(state, stream)
        spec = journal_spec(config, stream) if stream in config.streams else None
        if spec is None:
            check_stream(config, stream)  # a live stream without a journal
            raise BatchdError(f"stream {stream!r} needs no journal: its batches can be made again, by `batchd replay`")
        self._read: Records = read_journal(spec.path)
        if state is not None:
            of_state = self._read.records["fingerprint"] == state.fingerprint.encode()
            self._read = self._read._replace(records=self._read.records[of_state])
        self._stream, self._file = stream, spec.path

    def __len__(self) -> int:
        return len(self._read.records)

    def __getitem__(self, at: int) -> JournalBatch:
        record = self._read.records[at]
        names = [name for name in record.dtype.names if name.startswith(ROW)]
        fields = {name.removeprefix(ROW): record[name] for name in names}
        sums, crc = fields.pop(CHECKSUM.name), 0
        blank = bytes(self._read.row_bytes)
        for one in sums.tolist():  # the checksum of all rows, as CRC-32 is linear
            crc = zlib.crc32(blank, crc) ^ zlib.crc32(blank) ^ one
        position = Position(int(record["epoch"]), int(record["step"]))
        time_s = float(record["time_ns"]) / 1e9
        return JournalBatch(position, time_s, record["fingerprint"].decode(), record[PUSHED], fields, sums, crc)

    @property
    def extent(self) -> str:
        """Which batches it has, for people."""
        if not len(self):
            return "no batch yet"
        first, last = self[0], self[-1]
        ends = " to ".join(f"{one.position.epoch}:{one.position.step} ({one.time_text})" for one in (first, last))
        return f"{len(self):,} batches, {ends}"

    def at(self, position: tuple[int, int]) -> list[JournalBatch]:
        """The batches at a position, one for each start of the daemon that began there.

        Raises ``BatchdError`` if the journal has none.
        """
        records, (epoch, step) = self._read.records, position
        found = np.flatnonzero((records["epoch"] == epoch) & (records["step"] == step))
        if not len(found):
            raise BatchdError(
                f"the journal {self._file} of stream {self._stream!r} has no batch {epoch}:{step}; it has {self.extent}"
            )
        return [self[at] for at in found.tolist()]

    def find(self, field: str, value: int, until: tuple[int, int] | None = None) -> list[tuple[JournalBatch, int]]:
        """(Batch, row) of each sample with a number in a field of one number, or ``"pushed"``.

        ``until``: only batches before this position. Raises ``BatchdError`` for an unknown field.
        """
        records = self._read.records
        numbers = {name.removeprefix(ROW): name for name in records.dtype.names or () if records.dtype[name].ndim == 1}
        if field not in numbers:
            known = sorted(set(numbers) - {CHECKSUM.name})
            raise BatchdError(
                f"the journal of stream {self._stream!r} has no number {field!r}; {suggestion(field, known)}"
            )
        rows = np.argwhere(records[numbers[field]] == value).tolist()
        found = [(self[at], row) for at, row in rows]
        return [one for one in found if until is None or one[0].position < until]


def live_position(position: Position, trainer: TrainerRank, back: int) -> Position:
    """The batch of a trainer of a live stream at the ``position`` of all, or ``back`` earlier.

    Raises ``BatchdError``.
    """
    trainer.check()
    step = position.step + trainer.rank - back * trainer.world_size
    if step < 0:
        raise BatchdError(
            f"a live stream has no batch before 0:0, so none {back} back from {position.epoch}:{position.step}"
        )
    return Position(position.epoch, step)


def parse_wanted(text: str) -> tuple[str, int]:
    """Parse FIELD=NUMBER. Raises ``BatchdError``."""
    found = _WANTED.fullmatch(text)
    if found is None:
        raise BatchdError(f"{text!r} is no FIELD=NUMBER, such as label=3: a journal has numbers, no names")
    return found[1], int(found[2])


def journal(
    config: str | os.PathLike[str], stream: str, *, overrides: Mapping[str, str] | None = None
) -> JournalReader:
    """Read the journal of a push stream (``journal = "64MiB"``): what was in its batches.

    ``config`` and ``overrides``: as of ``batchd.replay``. The result is a sequence of batches, the
    oldest first, each with ``position``, ``time_s``, ``pushed``, ``fields`` (numpy arrays of the
    small ones, such as labels) and ``crc32``; ``at((epoch, step))`` and ``find("label", 3)`` search
    it. Raises ``BatchdError`` if the stream has no journal.
    """
    return JournalReader(load_config(Path(config), overrides or {}), stream)
