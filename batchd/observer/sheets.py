"""Contact sheets for the page: `batchd peek` in a process of its own, when somebody asks for one. OBSERVER process.

    asked for --> kept? --> give it
                  +-- no --> one is being drawn? --> "come again"
                             +-- no --> start a child: peek -o FILE --> keep what it drew, or said

Drawing needs OpenCV, takes a second, and a slot of the stream's ring for that long, so nothing is drawn that nobody looks at.

Invariant: one child at a time, ended after ``DRAWING_S``; a stream is drawn once in ``KEPT_S`` at most, however many ask.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from time import monotonic

KEPT_S = 30.0
KEPT_MAX = 4
DRAWING_S = 30.0
NICE = 10
SHEET_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True)
class Sheet:
    """What there is for a stream: a PNG, or where there is none a text that says why. ``came_s``: of the monotonic clock."""

    picture: bytes
    text: str
    came_s: float


class Sheets:
    """Use from any thread. ``address`` is the daemon's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = Condition()
        self._kept: dict[str, Sheet] = {}
        self._is_drawing = False
        self._child: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the child, if there is one."""
        with self._changed:
            if self._child is not None:
                self._child.kill()
                self._child.wait()

    def sheet(self, stream: str, within_s: float) -> Sheet | None:
        """The sheet of a stream that there is; None where it is yet to be drawn, or another is before it."""
        with self._changed:
            self._forget()
            if stream not in self._kept and not self._is_drawing:
                self._is_drawing = True
                Thread(target=self._draw, args=(stream,), name="sheet", daemon=True).start()
            self._changed.wait_for(lambda: stream in self._kept or not self._is_drawing, within_s)
            return self._kept.get(stream)

    def _forget(self) -> None:
        oldest_s = monotonic() - KEPT_S
        self._kept = {stream: sheet for stream, sheet in self._kept.items() if sheet.came_s > oldest_s}

    def _draw(self, stream: str) -> None:
        try:
            sheet = self._drawn(stream)
        except OSError as error:
            sheet = Sheet(b"", f"no sheet can be drawn: {error.strerror}", monotonic())
        with self._changed:
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[stream] = sheet
            self._is_drawing = False
            self._changed.notify_all()

    def _drawn(self, stream: str) -> Sheet:
        with tempfile.TemporaryDirectory(prefix="batchd-sheet-") as folder:
            file = Path(folder) / "sheet.png"
            command = [
                sys.executable,
                "-P",
                "-m",
                "batchd",
                "peek",
                "--address",
                self._address,
                "--output",
                str(file),
                "--",
                stream,
            ]
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
            ) as child:
                with suppress(PermissionError):  # a sandbox may allow no priorities; it is a courtesy
                    os.setpriority(os.PRIO_PROCESS, child.pid, NICE)
                said = self._waited_for(child)
            if said is None:
                return Sheet(b"", f"no batch came within {DRAWING_S:g} s", monotonic())
            text = said.decode(errors="replace").strip().removeprefix(f"{file}: ")
            if not file.exists() or file.stat().st_size > SHEET_BYTES_MAX:
                return Sheet(b"", text, monotonic())
            return Sheet(file.read_bytes(), text, monotonic())

    def _waited_for(self, child: "subprocess.Popen[bytes]") -> bytes | None:
        """What it said until it ended; None where it took too long."""
        self._child = child
        try:
            return child.communicate(timeout=DRAWING_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            return None
        finally:
            self._child = None
