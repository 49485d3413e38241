"""Storage of the sources and of caches on disk: a quick test of speed. Runs in the user's shell.

    folder or file -> some files -> each opened, pieces read at random   for single images
                                 -> read whole, in order                 for shards and videos

The page cache drops a file before it is read, as far as the kernel can, so the storage is measured.
For the same reason no file is looked up before it is opened, and no piece is read twice.

Invariant: at most ``FILES_MAX`` files are opened, and each kind of reading takes at most
``SECONDS_MAX``. If a storage hangs, ``measure_place`` returns after ``ANSWER_TIMEOUT_S``.
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
from typing import NamedTuple

from batchd.commands.doctor.machine import Finding, Machine, note, ok, problem, warning
from batchd.data.samples.location import Url
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.files.options import ListSource
from batchd.data.sources.options import SourceOptions
from batchd.runtime.sizes import round_bytes
from batchd.stream.cache_file import cache_files, folder_problem
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
NAMED_MAX = 8
NETWORK_KINDS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "9p", "orangefs", "wekafs",
}  # fmt: skip
FASTER = (
    "`batchd prepare` writes shards, which are read in order, to a local disk; a larger ring (memory =) evens out pauses; "
    "more workers than CPUs help if they only wait"
)


class PlaceSpeed(NamedTuple):
    """Speed of one place. ``failure``: why there is none, else ""."""

    files: int = 0
    mb_per_s: float = 0.0
    piece_ms: float = 0.0
    mean_bytes: float = 0.0
    failure: str = ""


def places_of(whole: SourceOptions) -> list[Path]:
    """The files and folders of a source and of its parts, each once."""
    found: list[Path] = []
    for _key, source in sources_in(whole):
        if isinstance(source, ListSource):
            found.append(source.root or source.path.parent)
        else:
            found += [value for one in fields(source) if isinstance(value := getattr(source, one.name), Path)]
    return list(dict.fromkeys(found))


def check_place(machine: Machine, stream: str, place: Path, speed: PlaceSpeed | None) -> Finding:
    """Finding on one place of a stream's source. ``speed``: None for a URL."""
    subject = f"storage of {stream}"
    if speed is None:
        found = f"{place} is on a server, which is not measured"
        return note(subject, found, "`batchd check` shows whether it answers")
    kind = file_system(machine, place)
    network = kind in NETWORK_KINDS or kind.startswith("fuse.")
    where = f"{place} ({kind}{', over the network' if network else ''})"
    if speed.failure:
        return problem(subject, f"{where}: {speed.failure}", "`batchd check` names the problem of the source")
    found = (
        f"{where}: {speed.mb_per_s:,.0f} MB/s in order, {speed.piece_ms:.2f} ms for a piece of 64 KiB, "
        f"measured on {counted(speed.files, 'file')} of {round_bytes(round(speed.mean_bytes))} on average"
    )
    # single pieces for small files, throughput for large ones
    if speed.piece_ms > SLOW_PIECE_MS or (speed.mean_bytes >= LARGE_BYTES and speed.mb_per_s < SLOW_MB_PER_S):
        return warning(subject, f"{found}; slow", FASTER)
    return note(subject, found, FASTER) if network else ok(subject, found)


def file_system(machine: Machine, place: Path) -> str:
    """Type of the file system of ``place``, by the longest mount point above it; "?" if unknown."""
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
    """Read a few files, in a thread because a storage may hang. None for a URL."""
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
    """Totals of reading pieces of non-empty files."""

    files: list[Path] = field(default_factory=list)
    file_bytes: int = 0
    pieces: int = 0
    spent_s: float = 0.0


def _measure(place: Path) -> PlaceSpeed:
    try:
        found = list(islice(_files(place), FILES_MAX))
        Random(1).shuffle(found)  # noqa: S311  an order to read in, no secret
        read = _here_and_there(found)
        if not read.files:
            return PlaceSpeed(failure=f"no file can be read, of {len(found)} tried")
        for file in read.files:
            with _opened(file) as descriptor:
                _forget(descriptor)
        count = len(read.files)
        return PlaceSpeed(count, _in_order(read.files), 1000 * read.spent_s / read.pieces, read.file_bytes / count)
    except OSError as error:
        return PlaceSpeed(failure=error.strerror or str(error))


def _files(place: Path) -> Iterator[Path]:
    """The first files in a folder and below it, from directory entries, without a stat."""
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
    """A file's descriptor. Opening does not block, even for a link to a FIFO."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _forget(descriptor: int) -> None:
    """Drop a file from the page cache, but for mapped and dirty pages."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _here_and_there(files: Sequence[Path]) -> _Pieces:
    """Open each file and read pieces of it, ``PIECES_MAX`` for all files together."""
    random = Random(1)  # noqa: S311  places to read, no secret
    read = _Pieces()
    for file in files:
        if read.spent_s > SECONDS_MAX:
            break
        began = perf_counter()
        with suppress(PermissionError, FileNotFoundError), _opened(file) as descriptor:
            opened_s = perf_counter() - began
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                continue
            _forget(descriptor)
            # otherwise the kernel reads ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            read.files.append(file)
            read.file_bytes += status.st_size
            read.spent_s += opened_s
            there = range(0, status.st_size, PIECE_BYTES)
            for place in random.sample(there, min(len(there), max(1, PIECES_MAX // len(files)))):
                began = perf_counter()
                os.pread(descriptor, PIECE_BYTES, place)
                read.spent_s += perf_counter() - began
                read.pieces += 1
                if read.spent_s > SECONDS_MAX:
                    break
    return read


def _in_order(files: Sequence[Path]) -> float:
    """Read whole files in order. Return MB/s."""
    buffer = bytearray(PORTION_BYTES)
    read_bytes, began = 0, perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                read_bytes += count
                if read_bytes > BYTES_MAX or perf_counter() - began > SECONDS_MAX:
                    return read_bytes / (perf_counter() - began) / 1e6
    return read_bytes / (perf_counter() - began) / 1e6


def check_cache(folder: Path) -> Finding:
    """Finding on a folder. Only a scan tells which files a stopped daemon would use."""
    subject = f"caches in {folder}"
    wrong = folder_problem(folder)
    if wrong is not None:
        return problem(subject, wrong, "cache_dir = names the folder; `batchd check` names the stream")
    try:
        files = list(cache_files(folder))
    except OSError as error:
        return problem(subject, str(error), "cache_dir = names the folder")
    idle = [file for file in files if not file.in_use]
    size, idle_size = (round_bytes(sum(file.disk_bytes for file in some)) for some in (files, idle))
    found = f"{counted(len(files), 'file')}, {size}"
    if not idle:
        return ok(subject, found)
    names = " ".join(str(file.path) for file in idle[:NAMED_MAX]) + (" ..." if len(idle) > NAMED_MAX else "")
    return note(
        subject,
        f"{found}; no daemon that runs uses {len(idle)} of them, {idle_size}",
        f"a daemon logs at its start which ones it uses; to remove these: rm {names}",
    )
