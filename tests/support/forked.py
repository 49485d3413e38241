"""Programs of batchd as forks of this process: separate processes without new imports.

For tests of scans and reloads. A fork has the patches of the test.
"""

import faulthandler
import io
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from subprocess import STDOUT
from typing import Any, NoReturn

from batchd.data.sources.scan import answer
from batchd.runtime import failpoints
from batchd.runtime.children import Child
from batchd.worker.fork_server import work


class Forked:
    """A fork that runs ``act``; it has what ``children.Child`` uses of a ``Popen``."""

    def __init__(self, act: Callable[[], int], arguments: Sequence[str], given: bytes, errors: int = 2) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(writing if errors == STDOUT else errors, 2)
            _run(act, arguments, given, writing)
        os.close(writing)
        self.stdout = os.fdopen(reading, "rb")
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; return its exit status, or minus the signal."""
        _pid, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start_scan(module: str, *arguments: str, given: bytes = b"", stderr: int = 2, **_how: Any) -> Child:
    """Fork for a separate scan, or for samples that are measured. Replaces ``children.start``."""
    is_worker = module == "batchd.worker"
    act = partial(_work, int(arguments[0])) if is_worker else partial(answer, import_module(module).scan)
    return Child(Forked(act, arguments, given, stderr))  # type: ignore[arg-type]


def _work(channel: int) -> int:
    return work(socket.socket(fileno=channel))


def _run(act: Callable[[], int], arguments: Sequence[str], given: bytes, output: int) -> NoReturn:
    status = 1
    try:
        faulthandler.disable()
        os.setpgid(0, 0)
        os.dup2(output, 1)
        sys.argv[1:] = arguments
        sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(given)), os.fdopen(1, "w")
        failpoints.arm()
        status = act()
    except BaseException:  # noqa: BLE001  nothing may return into the test
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
