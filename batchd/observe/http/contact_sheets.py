"""Contact sheets for the page: `batchd peek` in a child process, on request. OBSERVER process.

    request --> kept? --> return it
                +-- no --> one is being drawn? --> "ask again"
                           +-- no --> child: peek -o FILE --> keep its picture, or its message

Drawing needs OpenCV, a second, and a slot of the stream's ring for that long, so nothing is drawn
without a request. A failure (short memory, for example) becomes the sheet's text; the next attempt
is a new one.

Invariant: one child at a time, ended after ``DRAWING_S``; a stream is drawn at most once in
``KEPT_S``, however many clients ask.
"""

import os
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic

from batchd.runtime.children import PIPE, STDOUT, Child, StartOptions, start
from batchd_wire.position import Position
from batchd_wire.status import StreamStatus

KEPT_S = 30.0
KEPT_MAX = 4
DRAWING_S = 30.0
NICE = 10
SHEET_BYTES_MAX = 32 << 20
OUTPUT_BYTES_MAX = 1 << 20
_NOT_DRAWN = "no sheet can be drawn"


@dataclass(frozen=True, slots=True)
class ContactSheet:
    """A PNG, or without one a text with the reason. ``made_s``: monotonic clock."""

    picture: bytes
    text: str
    made_s: float


def current_position(stream: StreamStatus) -> Position:
    """Position of the last batch of the foremost trainer of a stream: the ring likely has it."""
    trainers = [one for one in stream.subscriptions if not one.is_spectator]
    for places in ([(one.last_epoch, one.last_step) for one in trainers], [(one.epoch, one.step) for one in trainers]):
        known = [Position(epoch, step) for epoch, step in places if epoch is not None and step is not None]
        if known:
            return max(known)
    return Position(0, 0)


class ContactSheets:
    """The sheets of all streams. Use from any thread. ``address``: the daemon's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = Condition()
        self._kept: dict[str, ContactSheet] = {}
        self._is_drawing = False
        self._child: Child | None = None

    def close(self) -> None:
        """End the child, if there is one; the drawing thread reaps it."""
        with self._changed:
            if self._child is not None:
                self._child.kill()
                self._changed.wait_for(lambda: not self._is_drawing)

    def sheet(self, stream: str, position: Position, within_s: float) -> ContactSheet | None:
        """The sheet of an existing stream, or None if it is not ready within ``within_s`` seconds.

        A new one shows the batch at ``position``.
        """
        with self._changed:
            oldest_s = monotonic() - KEPT_S
            self._kept = {stream: sheet for stream, sheet in self._kept.items() if sheet.made_s > oldest_s}
            if stream not in self._kept and not self._is_drawing:
                self._begin(stream, position)
            self._changed.wait_for(lambda: stream in self._kept or not self._is_drawing, within_s)
            return self._kept.get(stream)

    def _begin(self, stream: str, position: Position) -> None:
        try:
            Thread(target=self._draw, args=(stream, position), name="sheet", daemon=True).start()
        except RuntimeError as error:  # out of memory, or of processes
            self._keep(stream, b"", f"{_NOT_DRAWN}: {error}")
        else:
            self._is_drawing = True

    def _draw(self, stream: str, position: Position) -> None:
        picture, text = b"", f"{_NOT_DRAWN}: the thread that draws it has ended"
        try:
            picture, text = self.drawn(stream, position)
        except OSError as error:
            text = f"{_NOT_DRAWN}: {error.strerror or error}"
        except MemoryError:
            text = f"{_NOT_DRAWN}: out of memory"
        finally:
            with self._changed:
                self._keep(stream, picture, text)
                self._is_drawing = False
                self._changed.notify_all()

    def _keep(self, stream: str, picture: bytes, text: str) -> None:
        while len(self._kept) >= KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[stream] = ContactSheet(picture, text, monotonic())

    def drawn(self, stream: str, position: Position) -> tuple[bytes, str]:
        """The picture, or b"", and what the command said."""
        # no file may be written here
        with os.fdopen(os.memfd_create("batchd-sheet", os.MFD_CLOEXEC), "rb") as sheet:
            file = f"/proc/self/fd/{sheet.fileno()}"
            arguments = ["peek", "--address", self._address, "--output", file, "--at", "{}:{}".format(*position)]
            options: StartOptions = {
                "descriptors": [sheet.fileno()],
                "stdout": PIPE,
                "stderr": STDOUT,
                "nicer_by": NICE,
            }
            with start("batchd", *arguments, "--", stream, **options) as child:
                with self._changed:
                    self._child = child
                try:
                    output, is_late = child.read(DRAWING_S, OUTPUT_BYTES_MAX), not child.has_ended()
                finally:
                    with self._changed:
                        self._child = None
            if is_late:
                return b"", f"no batch arrived within {DRAWING_S:g} s"
            text = output.decode(errors="replace").strip().removeprefix(f"{file}: ")
            picture = sheet.read(SHEET_BYTES_MAX + 1)
            return picture if len(picture) <= SHEET_BYTES_MAX else b"", text
