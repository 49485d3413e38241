"""Make the index of a source, in a process of its own where damaged files can end it. Daemon.

    isolated_scan --- JSON, stdin -------------->   python -m MODULE DESCRIPTOR   answer
                      the source, StorageLimits,
                      what it may reach
                  <-- lines of JSON, stdout ---     ["found", n], ["saw", …], ["done", n], …
                  <-- text, stderr ------------     a library's last words, or a traceback
                  <========== memfd ===========     the index, of n bytes

Sources of this machine that Python reads itself (names, headers, tables) are scanned by an enclosed
fork of the daemon, or of the process that reads its file again: ``_forked_scan``, with the same
lines. Those with URLs are not, since their library has threads.

A library that maps a file dies of SIGBUS if the file is truncated meanwhile, and may die of SIGSEGV
if its pages are damaged. Another one aborts its process for some wrong bytes of a file. The daemon
then reports a source that cannot be used.

The daemon's survey records each file that the other process saw. If the process dies, the message
names the last one. The caller of ``isolated_scan`` records files that a library opens itself. Both
processes have the same environment, and with it the same credentials for servers.

A scan may take half of the memory that is free when it begins, because an index is in memory twice
while it is shared. The kernel keeps the other process to that, whatever a file announces; in this
process, reports of progress compare it with the memory that the process has taken.

A library may also hang in a file. Each line is progress: without one for longer than the caller
allows, the process is ended. So a module has to report often, also within a long file. The process
is ended as well if the survey ends the scan.

Invariants: the other process is gone when ``isolated_scan`` returns or raises. No word of a library
gets into the log by itself.
"""

import errno
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from batchd.data.samples.location import looks_like_url
from batchd.data.sources.access import access_of_source
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.interface import BuiltInKind, kind_of
from batchd.data.sources.options import SourceOptions, source_from_plain, source_to_plain
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable, write_all
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import ReportProgress, Survey
from batchd.data.storage.values import StorageLimits, Witness
from batchd.errors import SourceInvalid
from batchd.runtime import children, failpoints
from batchd.runtime.available import available_bytes, numbers_in
from batchd.runtime.children import PIPE, Child, describe
from batchd.runtime.sandbox import NOTHING, Access, enclose, prepare, version
from batchd.runtime.sizes import round_bytes
from batchd_wire.wording import counted

READ_BYTES = 64 << 10
LOOK_EVERY_S = 0.25
"""Longest delay between the end of a scan's time and the end of its process."""
SCAN_BYTES_MIN = 256 << 20
"""A scan may take so much, however little memory is free."""
MEMORY_EVERY = 1 << 16
"""Samples between two looks at the memory that a scan has taken: 20 us each."""
FORKED_KINDS = frozenset(
    {"files", "arrays", "coco", "csv", "jsonl", "pairs", "tokens", "webdataset", "tfrecord", "composed"}
)
"""Folders of kinds that a fork may scan; others isolate their scan, or run the user's code."""
WORDS_BYTES_MAX = 200
"""Of the last line that a library wrote before it ended its process."""


class IndexExtension(NamedTuple):
    """What a stream adds to the index of its source, and the ``key`` of it in the index cache.

    ``extend`` raises ``SourceInvalid``.
    """

    key: str
    extend: Callable[[SourceIndex], SourceIndex]


def scan_source(  # noqa: PLR0913, PLR0917  each is one thing that a scan needs
    source: SourceOptions,
    progress: ReportProgress,
    cache: IndexCache,
    storage: Storage,
    python_path: Sequence[Path] = (),
    extension: IndexExtension | None = None,
) -> SourceIndex:
    """Find all samples, or load an unchanged index. Raises ``SourceInvalid``."""
    storage.begin_scan()
    kind, plain = kind_of(source), source_to_plain(source)
    if extension is not None:
        plain["extension"] = extension.key
    try:
        known = cache.load(plain, storage)
        if known is not None:
            progress(len(known))
            return known
        memory = ScanMemory()
        survey = Survey(memory.watched(progress), python_path, storage=storage)
        index = _forked_scan(kind, source, survey) if _may_fork(source, storage) else kind.scan(source, survey)
        if extension is not None:
            index = extension.extend(index)
        cache.keep(plain, index, survey)
        return index
    finally:
        storage.close()  # no server is asked after the scan


class ScanMemory:
    """The memory that the scan of a source may take in this process, from now on.

    ``at_once``: how many such processes there may be.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free_bytes = available_bytes()
        self.bytes_max = max(SCAN_BYTES_MIN, self._free_bytes // (2 * at_once))
        self._begun_bytes = _own_bytes()
        self._look_at = MEMORY_EVERY

    def watched(self, progress: ReportProgress) -> ReportProgress:
        """``progress``, which raises ``SourceInvalid`` if the scan has taken more."""

        def report(found: int) -> None:
            if found >= self._look_at:
                self._look_at = found + MEMORY_EVERY
                if _own_bytes() - self._begun_bytes > self.bytes_max:
                    raise self.refusal(found)
            progress(found)

        return report

    def bound(self) -> None:
        """Have the kernel refuse more to this process, which does nothing but this scan."""
        _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._begun_bytes + self.bytes_max
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    def refusal(self, found: int) -> SourceInvalid:
        """The error of a scan that needs more, and has found so many samples."""
        return SourceInvalid(
            f"the scan needs more than {round_bytes(self.bytes_max)} of memory, which is what it may take of the "
            f"{round_bytes(self._free_bytes)} that are free; it has found {counted(found, 'sample')} until then: give the "
            "machine or the container more memory, or serve fewer of the files; if they are small, one of them is damaged"
        )


def _own_bytes() -> int:
    """The private memory that this process has, as RLIMIT_DATA counts it."""
    return numbers_in(Path("/proc/self/status")).get("VmData", 0) * 1024


def isolated_scan(
    module: str, source: SourceOptions, survey: Survey, silence_max_s: float | None = None
) -> SourceIndex:
    """Have a module scan a source; its ``__main__`` calls ``answer``. Raises ``SourceInvalid``.

    ``silence_max_s``: the longest time between two lines; None is no limit.
    """
    if survey.storage.scans_here:
        made: SourceIndex = sys.modules[module].scan(source, survey)  # it is the caller's
        return made
    access = access_of_source(source) if survey.storage.encloses and version() else None
    given = json.dumps([source_to_plain(source), survey.storage.limits, access]).encode()
    with ExitStack() as until_scanned:
        memory = os.memfd_create("batchd-scan", os.MFD_CLOEXEC)
        until_scanned.callback(os.close, memory)
        words = os.memfd_create("batchd-scan-words", os.MFD_CLOEXEC)
        until_scanned.callback(os.close, words)
        child = until_scanned.enter_context(
            children.start(module, str(memory), descriptors=[memory], given=given, stdout=PIPE, stderr=words)
        )
        size = _listen(child, child.output.fileno(), words, source, survey, silence_max_s)
        return SourceIndex.from_memory(memoryview(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)))


def _may_fork(source: SourceOptions, storage: Storage) -> bool:
    """True if a fork shall scan it: what reads files of this machine, in Python."""
    if not storage.forks_scans or not storage.encloses or storage.scans_here or not version():
        return False
    parts = [part for _key, part in sources_in(source)]
    folders = {type(part).__module__.split(".")[-2] for part in parts}
    return folders <= FORKED_KINDS and not any(looks_like_url(part.place) for part in parts)


def _forked_scan(kind: BuiltInKind, source: SourceOptions, survey: Survey) -> SourceIndex:
    """Have an enclosed fork of this process scan a source. Raises ``SourceInvalid``."""
    access = NOTHING
    for _key, part in sources_in(source):
        access = access.joined(access_of_source(part))
    with ExitStack() as until_scanned:
        memory = os.memfd_create("batchd-scan", os.MFD_CLOEXEC)
        until_scanned.callback(os.close, memory)
        words = os.memfd_create("batchd-scan-words", os.MFD_CLOEXEC)
        until_scanned.callback(os.close, words)
        prepare()
        forked = children.fork_linked("batchd.data.sources.scan")
        if isinstance(forked, socket.socket):
            _scan_in_fork(forked, memory, words, access, partial(kind.scan, source))
        until_scanned.enter_context(forked.child)
        until_scanned.enter_context(forked.channel)
        size = _listen(forked.child, forked.channel.fileno(), words, source, survey, None)
        return SourceIndex.from_memory(memoryview(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)))


def _scan_in_fork(
    channel: socket.socket, memory: int, words: int, access: Access, scan: Callable[[Survey], SourceIndex]
) -> NoReturn:
    """Close all that is the parent's, scan, and end."""
    status = 1
    try:
        os.dup2(words, 2)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  numbers, not paths
            if descriptor not in {*children.STANDARD_STREAMS, channel.fileno(), memory}:
                with suppress(OSError):  # the one that listed them is closed
                    os.close(descriptor)
        allowed = ScanMemory()  # an enclosed process does not see the limits of its cgroup
        enclose(access)
        with Storage() as storage:
            storage.begin_scan()
            survey = _TellingSurvey(lambda *said: channel.sendall(_line(said)), storage)
            _scan_and_say(survey, scan, memory, allowed)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def _line(words: tuple[object, ...]) -> bytes:
    return json.dumps(words).encode() + b"\n"


def answer(scan: Callable[[Any, Survey], SourceIndex]) -> int:
    """Scan the source on standard input, for a module's ``__main__``; returns its exit status."""

    def say(*words: object) -> None:
        sys.stdout.buffer.write(_line(words))
        sys.stdout.buffer.flush()

    # a library that hangs in a file does not see that the daemon is gone
    children.die_with_parent()
    say("found", 0)
    failpoints.passing("scan.isolated")
    plain, limits, access = json.load(sys.stdin)
    source, allowed = source_from_plain(plain), ScanMemory()
    if access is not None:
        enclose(Access(*access))
    with Storage(StorageLimits(*limits)) as storage:
        _scan_and_say(_TellingSurvey(say, storage), partial(scan, source), int(sys.argv[1]), allowed)
    return 0


def _scan_and_say(
    survey: "_TellingSurvey", scan: Callable[[Survey], SourceIndex], memory: int, allowed: ScanMemory
) -> None:
    """Scan, with bounded memory, and put the index into ``memory``."""
    allowed.bound()
    try:
        index = scan(survey)
        sections, size = index.sections()
        os.ftruncate(memory, size)
        for start, section in sections:
            write_all(memory, section, start)
    except SourceInvalid as error:
        survey.say("wrong", str(error))
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        survey.say("wrong", str(allowed.refusal(survey.found)))
    else:
        survey.say("done", size)


class _TellingSurvey(Survey):
    """Reports everything to the daemon."""

    def __init__(self, say: Callable[..., None], storage: Storage) -> None:
        super().__init__(self._found, storage=storage)
        self.say = say
        self.found = 0

    def part(self, found_before: int) -> Survey:
        """See ``Survey``; what it sees is reported, too."""

        def say(what: str, first: object, *words: object) -> None:
            if what == "found" and isinstance(first, int):
                first += found_before
            self.say(what, first, *words)

        part = _TellingSurvey(say, self.storage)
        self._parts.append(part)
        return part

    def _found(self, found: int) -> None:
        self.found = found
        self.say("found", found)

    def add(self, seen: Witness) -> None:
        """See ``Survey``; the daemon keeps it."""
        self.say("saw", *seen)


def _listen(  # noqa: PLR0913, PLR0917  each is one thing about the process
    child: Child, output: int, words: int, source: SourceOptions, survey: Survey, silence_max_s: float | None
) -> int:
    """Listen until the process ends; returns the bytes of the index. Raises ``SourceInvalid``.

    ``output``: what it says; ``words``: its standard error, as descriptors.
    """
    size, at = 0, source.place
    try:
        for line in _lines(output, survey.looked, silence_max_s):
            match json.loads(line):
                case ["found", int(found)]:
                    survey.progress(found)
                case ["saw", *fields]:
                    seen = Witness(*fields)
                    at = readable(os.fsencode(seen.path))
                    survey.add(seen)
                case ["wrong", str(text)]:
                    raise SourceInvalid(text)
                case ["done", int(count)]:
                    size = count
        status = child.reap()
    except TimeoutError:
        raise SourceInvalid(
            f"{at}: the scan got no further within {silence_max_s:g} s, and was ended: the file is damaged, or its storage "
            "hangs; copy it again or leave it out, or raise scan_timeout_s of the source where the storage is just slow"
        ) from None
    said = os.pread(words, os.fstat(words).st_size, 0)
    if status == -signal.SIGKILL:
        raise SourceInvalid(
            f"{at} was not scanned to its end: the process was killed by {describe(status)}, as the kernel does where there is "
            "no memory left; give it more memory, or begin again"
        )
    if status < 0:
        reason = readable(said.rstrip().rpartition(b"\n")[2].strip()[:WORDS_BYTES_MAX])
        raise SourceInvalid(
            f"{at} is damaged, or was changed while it was scanned: looking at it ended a process by {describe(status)}"
            f"{reason and f', {reason}'}; copy or write it again, or leave it out"
        )
    if status or not size:
        os.write(2, said)  # a traceback of ours
        raise SourceInvalid(f"{source.place} cannot be scanned: the process that should ended with {describe(status)}")
    return size


def _lines(stream: int, looked: Callable[[], None], silence_max_s: float | None) -> Iterator[bytes]:
    """The whole lines of the other process. Raises ``TimeoutError``, and what ``looked`` raises.

    ``looked`` is called from the first line on.
    """
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    begun, heard_s, is_running = b"", monotonic(), False
    while True:
        if is_running:
            looked()
        if not poll.poll(LOOK_EVERY_S * 1000):
            if silence_max_s is not None and monotonic() - heard_s >= silence_max_s:
                raise TimeoutError
            continue
        data = os.read(stream, READ_BYTES)
        if not data:
            return
        *lines, begun = (begun + data).split(b"\n")
        yield from lines
        heard_s, is_running = monotonic(), True
