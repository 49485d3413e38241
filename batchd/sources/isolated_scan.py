"""A scan in a process of its own, for files whose damage can end the process that looks at them. Daemon, once at the start.

    daemon   scan_apart   --- the source, JSON, stdin -->   python -m MODULE DESCRIPTOR      answer
                          <-- lines of JSON, stdout ---     ["found", n], ["saw", ...], ["wrong", text], ["done", bytes]
                          <========== memfd ===========     the index

A library that maps a file into memory dies of SIGBUS where the file is cut meanwhile, and may die
of SIGSEGV where its pages are nonsense. That is then said as what it is: a source that cannot be
used.

What the other process says that it saw, the survey has seen, and the last of it is named where the
process dies. A module whose library opens files by itself leaves that to whoever calls
``scan_apart``.

A library that never comes back from a file is given up, too: each line is progress, and where none
comes for longer than the caller allows, the process is ended. So its module has to report often,
also from within a long file. And the process is ended where the survey ends the scan.

Invariant: nothing of the other process is left when ``scan_apart`` returns or raises.
"""

import json
import mmap
import os
import select
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import IO, Any

from batchd import children, failpoints
from batchd.children import PIPE, Child, describe
from batchd.errors import SourceInvalid
from batchd.sources.kinds import source_from_plain, source_to_plain
from batchd.sources.options import SourceOptions
from batchd.storage.index import SourceIndex, readable, write_all
from batchd.storage.survey import Survey
from batchd.storage.values import Witness

READ_BYTES = 64 << 10
LOOK_EVERY_S = 0.25
"""A scan that is left when its time is over is left so much later at most."""


class _Silent(Exception):  # noqa: N818  names what is wrong
    """The other process has not said anything for too long."""


def scan_apart(module: str, source: SourceOptions, survey: Survey, silence_max_s: float | None = None) -> SourceIndex:
    """Have a module scan a source; it ends in ``answer``. Raises ``SourceInvalid``.

    ``silence_max_s``: how long it may take from one line to the next; None is for ever.
    """
    memory = os.memfd_create("batchd-scan", os.MFD_CLOEXEC)
    try:
        given = json.dumps(source_to_plain(source)).encode()
        with children.start(module, str(memory), descriptors=[memory], given=given, stdout=PIPE) as child:
            size = _listen(child, source, survey, silence_max_s)
        return SourceIndex.from_memory(memoryview(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)))
    finally:
        os.close(memory)


def answer(scan: Callable[[Any, Survey], SourceIndex]) -> int:
    """Scan what the other side asks for. Called by a module's ``__main__``; returns its exit status."""

    def say(*words: object) -> None:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()

    children.die_with_parent()  # a library that hangs in a file does not see that the daemon is gone
    failpoints.passing("scan.apart")
    survey = _TellingSurvey(say)
    try:
        index = scan(source_from_plain(json.load(sys.stdin)), survey)
    except SourceInvalid as error:
        say("wrong", str(error))
        return 0
    sections, size = index.sections()
    memory = int(sys.argv[1])
    os.ftruncate(memory, size)
    for start, section in sections:
        write_all(memory, section, start)
    say("done", size)
    return 0


class _TellingSurvey(Survey):
    """Tells the daemon of everything."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(lambda found: say("found", found))
        self._say = say

    def add(self, seen: Witness) -> None:
        """See ``Survey``; only the daemon keeps it."""
        self._say("saw", *seen)


def _listen(child: Child, source: SourceOptions, survey: Survey, silence_max_s: float | None) -> int:
    """How many bytes the index has."""
    size, at = 0, source.place
    try:
        for line in _lines(child.output, survey.looked, silence_max_s):
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
    except _Silent:
        raise SourceInvalid(
            f"{at}: the scan got no further within {silence_max_s:g} s, and was ended: the file is damaged, or its storage "
            "hangs; copy it again or leave it out, or raise scan_timeout_s of the source where the storage is just slow"
        ) from None
    if status < 0:
        raise SourceInvalid(
            f"{at} is damaged, or was changed while it was scanned: looking at it ended a process by {describe(status)}; "
            "copy it again"
        )
    if status or not size:
        raise SourceInvalid(f"{source.place} cannot be scanned: the process that should ended with {describe(status)}")
    return size


def _lines(stream: IO[bytes], looked: Callable[[], None], silence_max_s: float | None) -> Iterator[bytes]:
    """What the other process says, line by line; not what it died within. Raises ``_Silent``, and what ``looked`` raises."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    begun, heard_s = b"", monotonic()
    while True:
        looked()
        if not poll.poll(LOOK_EVERY_S * 1000):
            if silence_max_s is not None and monotonic() - heard_s >= silence_max_s:
                raise _Silent
            continue
        data = os.read(stream.fileno(), READ_BYTES)
        if not data:
            return
        *lines, begun = (begun + data).split(b"\n")
        yield from lines
        heard_s = monotonic()
