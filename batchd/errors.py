"""Errors on the server's side, sorted by what the operator does next. Daemon, workers and CLI.

    BatchdError                   exit code 1: it failed
    ├── ArgumentInvalid           2: give the command something else, as what is there does not fit
    ├── ConfigInvalid             2: correct the configuration
    ├── SourceInvalid             2: correct the files that the configuration names
    ├── KeysInvalid               2: correct the key files, or use another name
    ├── DaemonUnreachable         3: start the daemon, or name its address
    ├── AlreadyRunning            4: use the daemon that runs, or another runtime directory
    ├── MemoryTooSmall            5: give more memory, or ask for less
    └── Interrupted               130: start the command again if it is to go on

Invariant: every error that leaves the command line because of the world outside is one of these,
and its exit code is the class's. A bad sample is no error but data (``SampleUnreadable``,
``SampleUndecodable``).
"""

import errno
import json
import re
import resource
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import ClassVar

from batchd_wire.record import frozen
from batchd_wire.wording import counted

KeyPath = tuple[str | int, ...]
"""The path of a value in the configuration: names of keys, and numbers of items of lists."""
REMEDY = "; "
"""Stands in a message between the problem and what helps."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


class ExitCode(IntEnum):
    """How every ``batchd`` command ends; documented in ``batchd --help``."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    ALREADY_RUNNING = 4
    NOT_ENOUGH_MEMORY = 5
    INTERRUPTED = 130


EXIT_CODE_MEANINGS = {
    ExitCode.FINE: "fine",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "wrong usage, configuration, source or key files",
    ExitCode.NO_DAEMON: "no daemon answers at the address",
    ExitCode.ALREADY_RUNNING: "another daemon holds the runtime directory",
    ExitCode.NOT_ENOUGH_MEMORY: "not enough memory",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}
"""One line for each exit code, for users."""


class BatchdError(Exception):
    """Something outside of batchd is wrong; the text says what, where, and what helps."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class Interrupted(BatchdError):  # noqa: N818  as below
    """Ctrl-C ended a command; the text says what is there already."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERRUPTED


DESCRIPTORS_ADVICE = "raise the limit (LimitNOFILE= in the unit, ulimit -Hn, --ulimit nofile= of docker)"
_REMEDIES = {
    errno.EMFILE: f"this process needs more file descriptors: {DESCRIPTORS_ADVICE}",
    errno.ENFILE: "this machine needs more file descriptors: raise fs.file-max",
    errno.ENOMEM: "more memory is needed: give the machine or the cgroup more, or set memory = to less",
    errno.ENOBUFS: "the kernel needs more memory: give the machine or the cgroup more",
    errno.ENOSPC: "see df, df -i, /dev/shm and fs.epoll.max_user_watches for what is full",
    errno.EDQUOT: "free some of this user's files, or raise its quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f, LimitFSIZE= in the unit)",
    errno.EROFS: "write to another place, or mount this one for writing",
    errno.EIO: "check the device: the kernel's log (dmesg) says more",
}


_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "RLIMIT_NOFILE is {:,}"),
    errno.ENOMEM: (resource.RLIMIT_AS, "RLIMIT_AS is {:,} bytes: raise it (ulimit -v, LimitAS= in the unit)"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "RLIMIT_FSIZE is {:,} bytes, and holds for shared memory, too"),
    errno.EAGAIN: (resource.RLIMIT_NPROC, "RLIMIT_NPROC is {:,}"),
}
"""The limit of this process that may be the cause of an error, and its words."""
_PROCESSES_ADVICE = (
    "raise the limit of processes (ulimit -u, LimitNPROC= or TasksMax= in the unit, --pids-limit of docker)"
)


def scarcity(error: OSError) -> str | None:
    """Say what the system lacks, and what helps; None for an error that is a bug of ours."""
    remedy = _REMEDIES.get(error.errno or 0)
    return None if remedy is None else _lacking(error, remedy)


def why_no_process(error: OSError) -> str:
    """Say why a process was not started, and what helps: EAGAIN is a limit only there."""
    if error.errno == errno.EAGAIN:
        return _lacking(error, _PROCESSES_ADVICE)
    return scarcity(error) or str(error)


def _lacking(error: OSError, remedy: str) -> str:
    where = f" ({error.filename})" if error.filename is not None else ""
    number, words = _LIMITS.get(error.errno or 0, (None, ""))
    limit = resource.RLIM_INFINITY if number is None else resource.getrlimit(number)[0]
    own = "" if limit == resource.RLIM_INFINITY else f"; {words.format(limit)}"
    return f"{error.strerror}{where}; {remedy}{own}"


def path_text(path: KeyPath) -> str:
    """Write a path as in TOML, items in brackets: ``streams."a.b".pipeline[1].size``."""
    parts = []
    for name in path:
        if isinstance(name, int):
            parts.append(f"[{name}]")
        else:
            parts.append("." + (name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)))
    return "".join(parts).removeprefix(".")


class ProblemKind(StrEnum):
    """The name of a kind of problem; ``batchd explain NAME`` has its manual (``config.manual``)."""

    UNREADABLE_FILE = "unreadable-file"
    NOT_TOML = "not-toml"
    KEY_TWICE = "key-twice"
    UNKNOWN_KEY = "unknown-key"
    MISSING_KEY = "missing-key"
    UNKNOWN_KIND = "unknown-kind"
    MISSING_KIND = "missing-kind"
    WRONG_TYPE = "wrong-type"
    WRONG_VALUE = "wrong-value"
    WRONG_OVERRIDE = "wrong-override"
    UNUSABLE_SOURCE = "unusable-source"
    OWN_FUNCTION = "own-function"
    NO_SANDBOX = "no-sandbox"
    STEP_MISFIT = "step-misfit"
    UNUSABLE_CACHE = "unusable-cache"
    NO_SAMPLE = "no-sample"
    NO_BATCH = "no-batch"
    MEMORY_TOO_SMALL = "memory-too-small"
    TOO_FEW_DESCRIPTORS = "too-few-descriptors"
    FILES_TOO_SMALL = "files-too-small"
    RUNTIME_DIRECTORY = "runtime-directory"
    UNUSABLE_ADDRESS = "unusable-address"
    MISSING_KEYS = "missing-keys"
    NOT_TO_PREPARE = "not-to-prepare"


@frozen
class Problem:
    """One problem of the configuration."""

    path: str
    """The key, such as ``streams.photos.pipeline[1].size``; "" for the file as a whole."""
    kind: ProblemKind
    message: str
    meaning: str = ""
    """Explains the key."""
    line: int | None = None
    """From 1; None if the file does not have the key."""
    column: int | None = None
    """Start of the key, from 1; None if unknown."""
    length: int = 1
    """Characters of the key."""
    source: str = ""
    """The line of the file."""

    @property
    def what(self) -> str:
        """The message without its remedy."""
        return self.message.partition(REMEDY)[0]

    @property
    def remedy(self) -> str:
        """The remedy; "" if the message does not have one."""
        return self.message.partition(REMEDY)[2]


class ArgumentInvalid(BatchdError):  # noqa: N818  the tree names things by what is wrong with them
    """A command cannot do what its arguments say with what is there, such as a file that exists."""

    exit_code = ExitCode.USAGE


class ConfigInvalid(BatchdError):  # noqa: N818  as above
    """The configuration cannot be used; ``problems`` holds all problems, not only the first."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Sequence[Problem], file: str = "") -> None:
        self.problems, self.file = tuple(problems), file
        super().__init__(_problems_text(self.problems, file))


class MemoryTooSmall(BatchdError):  # noqa: N818  as above
    """The memory is too small: each of the ``problems`` names need, supply and the key to set."""

    exit_code = ExitCode.NOT_ENOUGH_MEMORY

    def __init__(self, problems: Sequence[Problem], file: str = "") -> None:
        self.problems, self.file = tuple(problems), file
        super().__init__(_problems_text(self.problems, file))


class SourceInvalid(BatchdError):  # noqa: N818  as above
    """A stream's files cannot be served: an empty folder, a malformed list, an unreadable file."""

    exit_code = ExitCode.USAGE


class KeysInvalid(BatchdError):  # noqa: N818  as above
    """A key file is damaged or open to other users, or the name is unknown or already used."""

    exit_code = ExitCode.USAGE


class DaemonUnreachable(BatchdError):  # noqa: N818  as above
    """No daemon answers. Start one with ``batchd serve``, or set ``BATCHD_ADDRESS``."""

    exit_code = ExitCode.NO_DAEMON


class AlreadyRunning(BatchdError):  # noqa: N818  as above
    """Another daemon holds the runtime directory: use it, stop it, or set ``runtime_dir``."""

    exit_code = ExitCode.ALREADY_RUNNING


def _problems_text(problems: Sequence[Problem], file: str) -> str:
    """Each problem for users: where it is and what is wrong, then the meaning of the key."""
    name = file or "the configuration"
    lines = [f"{name} has {counted(len(problems), 'problem')}:"]
    for problem in problems:
        place = f"{file or 'line'}:{problem.line}: " if problem.line is not None else ""
        key = f"{problem.path}: " if problem.path else ""
        lines.append(f"  {place}{key}{problem.message}")
        if problem.meaning:
            lines.append(f"      ({problem.meaning})")
    return "\n".join(lines)
