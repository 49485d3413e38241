"""Contact sheets for the page: `batchd peek` in a process of its own, when somebody asks for one. OBSERVER process.

    asked for --> kept? --> give it
                  +-- no --> one is being drawn? --> "come again"
                             +-- no --> start a child: peek -o FILE --> keep what it drew, or said

Drawing needs OpenCV, takes a second, and a slot of the stream's ring for that long, so nothing is
drawn that nobody looks at.

Whatever goes wrong with one, such as short memory, is what is said instead of it, and the next one
is tried anew.

Invariant: one child at a time, ended after ``DRAWING_S``; a stream is drawn once in ``KEPT_S`` at
most, however many ask.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from time import monotonic

from batchd.children import PIPE, STDOUT, Child, start
from batchd_wire.position import Position
from batchd_wire.status import StreamStatistics

KEPT_S = 30.0
KEPT_MAX = 4
DRAWING_S = 30.0
NICE = 10
SHEET_BYTES_MAX = 32 << 20
WORDS_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Sheet:
    """What there is for a stream: a PNG, or where there is none a text that says why. ``came_s``: of the monotonic clock."""

    picture: bytes
    text: str
    came_s: float


def current_position(stream: StreamStatistics) -> Position:
    """The batch that the foremost trainer of a stream took last, by the status: the ring likely has it."""
    trainers = [one for one in stream.subscriptions if not one.is_spectator]
    taken = [(one.last_epoch, one.last_step) for one in trainers]
    beginning = [(one.epoch, one.step) for one in trainers]
    return max(_known(taken) or _known(beginning), default=Position(0, 0))


def _known(places: Iterable[tuple[int | None, int | None]]) -> list[Position]:
    return [Position(epoch, step) for epoch, step in places if epoch is not None and step is not None]


def _no_sheet(reason: str) -> Sheet:
    return Sheet(b"", f"no sheet can be drawn: {reason}", monotonic())


class Sheets:
    """Use from any thread. ``address`` is the daemon's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = Condition()
        self._kept: dict[str, Sheet] = {}
        self._is_drawing = False
        self._child: Child | None = None

    def close(self) -> None:
        """End the child, if there is one. Its thread reaps it."""
        with self._changed:
            if self._child is not None:
                self._child.kill()
                self._changed.wait_for(lambda: not self._is_drawing)

    def sheet(self, stream: str, position: Position, within_s: float) -> Sheet | None:
        """The sheet of a stream that there is; None where it is yet to be drawn, or another is before it.

        A new one is of the batch at ``position``.
        """
        with self._changed:
            self._forget()
            if stream not in self._kept and not self._is_drawing:
                self._begin(stream, position)
            self._changed.wait_for(lambda: stream in self._kept or not self._is_drawing, within_s)
            return self._kept.get(stream)

    def _forget(self) -> None:
        oldest_s = monotonic() - KEPT_S
        self._kept = {stream: sheet for stream, sheet in self._kept.items() if sheet.came_s > oldest_s}

    def _begin(self, stream: str, position: Position) -> None:
        try:
            Thread(target=self._draw, args=(stream, position), name="sheet", daemon=True).start()
        except RuntimeError as error:  # there is no memory for one, or too many are allowed nobody
            self._keep(stream, _no_sheet(str(error)))
        else:
            self._is_drawing = True

    def _draw(self, stream: str, position: Position) -> None:
        sheet = _no_sheet("the thread that draws it was ended")
        try:
            sheet = self._drawn(stream, position)
        except OSError as error:
            sheet = _no_sheet(error.strerror or str(error))
        except MemoryError:
            sheet = _no_sheet("there is no memory")
        finally:
            with self._changed:
                self._keep(stream, sheet)
                self._is_drawing = False
                self._changed.notify_all()

    def _keep(self, stream: str, sheet: Sheet) -> None:
        while len(self._kept) >= KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[stream] = sheet

    def _drawn(self, stream: str, position: Position) -> Sheet:
        with tempfile.TemporaryDirectory(prefix="batchd-sheet-") as folder:
            file = Path(folder) / "sheet.png"
            arguments = ["peek", "--address", self._address, "--output", str(file), "--at", "{}:{}".format(*position)]
            with start("batchd", *arguments, "--", stream, stdout=PIPE, stderr=STDOUT, nicer_by=NICE) as child:
                said, is_late = self._words_of(child)
            if is_late:
                return Sheet(b"", f"no batch came within {DRAWING_S:g} s", monotonic())
            text = said.decode(errors="replace").strip().removeprefix(f"{file}: ")
            if not file.exists() or file.stat().st_size > SHEET_BYTES_MAX:
                return Sheet(b"", text, monotonic())
            return Sheet(file.read_bytes(), text, monotonic())

    def _words_of(self, child: Child) -> tuple[bytes, bool]:
        """What it said until it ended, and whether it took too long."""
        with self._changed:
            self._child = child
        try:
            return child.read(DRAWING_S, WORDS_BYTES_MAX), not child.has_ended()
        finally:
            with self._changed:
                self._child = None
