"""A scan in a process of its own, for files whose damage can end the process that looks at them. Daemon, once at the start.

    daemon   scan_apart   --- the source, JSON, stdin -->   python -m MODULE DESCRIPTOR      answer
                          <-- lines of JSON, stdout ---     ["found", n], ["saw", ...], ["wrong", text], ["done", bytes]
                          <========== memfd ===========     the index

A library that maps a file into memory dies of SIGBUS where the file is cut meanwhile, and may die of SIGSEGV where its pages are
nonsense. That is then said as what it is: a source that cannot be used.

What the other process says that it saw, the survey has seen, and the last of it is named where the process dies. A module whose
library opens files by itself leaves that to whoever calls ``scan_apart``.

Invariant: nothing of the other process is left when ``scan_apart`` returns or raises.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from batchd import failpoints
from batchd.config.sources import Source, source_from_plain, source_to_plain
from batchd.errors import SourceInvalid
from batchd.sources.index import SourceIndex, readable, write_all
from batchd.sources.survey import Survey, Witness


def scan_apart(module: str, source: Source, survey: Survey) -> SourceIndex:
    """Have a module scan a source; it ends in ``answer``. Raises ``SourceInvalid``."""
    memory = os.memfd_create("batchd-scan", os.MFD_CLOEXEC)
    try:
        size = _listen(_start(module, source, memory), source, survey)
        return SourceIndex.from_memory(memoryview(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)))
    finally:
        os.close(memory)


def answer(scan: Callable[[Any, Survey], SourceIndex]) -> int:
    """Scan what the other side asks for. Called by a module's ``__main__``; returns its exit status."""

    def say(*words: object) -> None:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()

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


def _start(module: str, source: Source, memory: int) -> "subprocess.Popen[str]":
    """Start the other process and tell it what to scan; Ctrl-C in a terminal goes to the daemon alone."""
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(memory)],
        pass_fds=(memory,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert popen.stdin is not None
    with suppress(BrokenPipeError), popen.stdin:
        json.dump(source_to_plain(source), popen.stdin)
    return popen


def _listen(popen: "subprocess.Popen[str]", source: Source, survey: Survey) -> int:
    """How many bytes the index has."""
    size, at = 0, source.place
    assert popen.stdout is not None
    try:
        for line in popen.stdout:
            if not line.endswith("\n"):
                break  # it died within a line
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
        status = popen.wait()
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()
    if status < 0:
        raise SourceInvalid(
            f"{at} is damaged, or was changed while it was scanned: looking at it ended a process by signal "
            f"{-status} ({signal.Signals(-status).name}); copy it again"
        )
    if status or not size:
        raise SourceInvalid(
            f"{source.place} cannot be scanned: the process that should ended with exit status {status}"
        )
    return size
