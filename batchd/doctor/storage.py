"""Where the sources are, and how fast their files are read: a moment's reading of a few of them. Runs in the user's shell.

    folder or file -> some files -> each opened, and pieces of it read, in no order   what single images want
                                 -> in order, whole, for SECONDS_MAX or BYTES_MAX     what shards and videos want

What the page cache has of a file is given up before it is read, as far as the kernel does that, so
that it is the storage that is read. Nothing is looked up before it is opened, and no piece is read
twice, as either would be there the second time.

Invariant: no more than ``FILES_MAX`` files are opened, and nothing is read for longer than
``SECONDS_MAX`` in either way, but for a storage that does not answer: ``measure_place`` comes back
after ``ANSWER_TIMEOUT_S`` all the same.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from random import Random
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

from batchd.doctor.finding import Finding, note, ok, problem, warning
from batchd.doctor.machine import Machine
from batchd.samples.sizes import round_bytes
from batchd.sources.composed.options import sources_in
from batchd.sources.files.options import ListSource
from batchd.sources.options import SourceOptions
from batchd.storage.location import Url
from batchd_wire.wording import counted

FILES_MAX = 200
FOLDERS_MAX = 5_000
SECONDS_MAX = 1.0
BYTES_MAX = 512 << 20
PORTION_BYTES = 1 << 20
PIECE_BYTES = 64 << 10
PIECES_MAX = 200
ANSWER_TIMEOUT_S = 10.0
SLOW_MB_PER_S = 100.0
SLOW_PIECE_MS = 5.0
LARGE_BYTES = 1 << 20
NETWORK_KINDS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "9p", "orangefs", "wekafs",
}  # fmt: skip
NETWORK_BEGINNINGS = ("fuse.",)
FASTER = (
    "`batchd prepare` writes shards, which are read in order, onto a local disk; a larger ring (memory =) evens out pauses; more "
    "workers than CPUs help where they only wait"
)


class PlaceSpeed(NamedTuple):
    """What was measured of one place. ``failure`` says why nothing was, "" where it was."""

    files: int = 0
    mb_per_s: float = 0.0
    piece_ms: float = 0.0
    mean_bytes: float = 0.0
    failure: str = ""

    @property
    def is_slow(self) -> bool:
        """Small files are a matter of finding them, large ones of reading on."""
        return self.piece_ms > SLOW_PIECE_MS or (self.mean_bytes >= LARGE_BYTES and self.mb_per_s < SLOW_MB_PER_S)


def places_of(whole: SourceOptions) -> list[Path]:
    """The files and folders of a source and of all that it is made of, each once."""
    found: list[Path] = []
    for _key, source in sources_in(whole):
        kind: Any = type(source)  # a dataclass, as every kind is
        if isinstance(source, ListSource):
            found.append(source.root or source.path.parent)
        else:
            found += [value for one in fields(kind) if isinstance(value := getattr(source, one.name), Path)]
    return list(dict.fromkeys(found))


def check_place(machine: Machine, stream: str, place: Path, speed: PlaceSpeed | None) -> Finding:
    """What is known of one place of a stream's source; ``speed`` is None for what is on a server."""
    subject = f"storage of {stream}"
    if speed is None:
        return note(
            subject, f"{place} is on a server, which is not measured here", "`batchd check` asks whether it answers"
        )
    kind = file_system(machine, place)
    network = kind in NETWORK_KINDS or kind.startswith(NETWORK_BEGINNINGS)
    where = f"{place} ({kind}{', over the network' if network else ''})"
    if speed.failure:
        return problem(subject, f"{where}: {speed.failure}", "`batchd check` says what is wrong with the source")
    found = (
        f"{where}: {speed.mb_per_s:,.0f} MB/s in order, {speed.piece_ms:.2f} ms for a piece of 64 KiB, "
        f"measured on {counted(speed.files, 'file')} of {round_bytes(round(speed.mean_bytes))} on average"
    )
    if speed.is_slow:
        return warning(subject, f"{found}; slow", FASTER)
    return note(subject, found, FASTER) if network else ok(subject, found)


def file_system(machine: Machine, place: Path) -> str:
    """The type of the file system that a place is on, by the longest mount point above it; "?" where that is not to be had."""
    real = Path(os.path.realpath(place))
    best, kind = -1, "?"
    for line in machine.read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or not after:  # noqa: PLR2004  proc(5): the mount point is word 5
            continue
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def measure_place(place: Path) -> PlaceSpeed | None:
    """Read a few files, in a thread: a storage that hangs does not hang whoever asks. None for a URL."""
    if isinstance(place, Url):
        return None
    measured = [PlaceSpeed(failure=f"it has not answered for {ANSWER_TIMEOUT_S:g} s")]

    def measure() -> None:
        measured[0] = _measure(place)

    thread = Thread(target=measure, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    return measured[0]


@dataclass(slots=True)
class _Pieces:
    """What came of reading pieces of files that hold something."""

    files: list[Path] = field(default_factory=list)
    file_bytes: int = 0
    pieces: int = 0
    spent_s: float = 0.0

    @property
    def is_enough(self) -> bool:
        """Has it taken long enough?"""
        return self.spent_s > SECONDS_MAX


def _measure(place: Path) -> PlaceSpeed:
    try:
        found = list(islice(_files(place), FILES_MAX))
        Random(1).shuffle(found)  # noqa: S311  an order to read in, no secret
        read = _here_and_there(found)
        if not read.files:
            return PlaceSpeed(failure=f"there is no file in it that can be read, of {len(found)} that were tried")
        for file in read.files:
            with _opened(file) as descriptor:
                _forget(descriptor)
        count = len(read.files)
        return PlaceSpeed(count, _in_order(read.files), 1000 * read.spent_s / read.pieces, read.file_bytes / count)
    except OSError as error:
        return PlaceSpeed(failure=error.strerror or str(error))


def _files(place: Path) -> Iterator[Path]:
    """The first files in a folder and below it, by what the folders say of them: nothing is asked of the files themselves."""
    if stat.S_ISREG(place.stat().st_mode):
        yield place
        return
    folders = [place]
    for _ in range(FOLDERS_MAX):
        if not folders:
            return
        with suppress(PermissionError, FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                    yield Path(entry.path)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """A file's descriptor. A link to something else, as to a FIFO, holds nobody up."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _forget(descriptor: int) -> None:
    """Have the page cache give up a file; it keeps what somebody has mapped, or has yet to write."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _here_and_there(files: Sequence[Path]) -> _Pieces:
    """Open each file, and read pieces of it: so many that all files together have ``PIECES_MAX``."""
    random = Random(1)  # noqa: S311  places to read, no secret
    read = _Pieces()
    for file in files:
        if read.is_enough:
            break
        began = perf_counter()
        with suppress(PermissionError, FileNotFoundError), _opened(file) as descriptor:
            opened_s = perf_counter() - began
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                continue
            _forget(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads what comes next, too
            read.files.append(file)
            read.file_bytes += status.st_size
            read.spent_s += opened_s
            there = range(0, status.st_size, PIECE_BYTES)
            _read_pieces(descriptor, random.sample(there, min(len(there), max(1, PIECES_MAX // len(files)))), read)
    return read


def _read_pieces(descriptor: int, places: Sequence[int], read: _Pieces) -> None:
    for place in places:
        began = perf_counter()
        os.pread(descriptor, PIECE_BYTES, place)
        read.spent_s += perf_counter() - began
        read.pieces += 1
        if read.is_enough:
            return


def _in_order(files: Sequence[Path]) -> float:
    """Whole files one after the other: MB/s."""
    buffer = bytearray(PORTION_BYTES)
    read_bytes, began = 0, perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                read_bytes += count
                if read_bytes > BYTES_MAX or perf_counter() - began > SECONDS_MAX:
                    return read_bytes / (perf_counter() - began) / 1e6
    return read_bytes / (perf_counter() - began) / 1e6
