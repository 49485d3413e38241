"""Starts the process that workers are forked from. DAEMON process, before it is anything else; standard library only.

It imports for as long as the daemon itself does. So ``batchd serve`` begins with it, before it imports its own.
"""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import NamedTuple

ONE_THREAD = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS"), "1"
    ),
    "TOKENIZERS_PARALLELISM": "false",
}
"""There is a worker for every core, so no library shall start threads of its own."""

MANAGERS = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
"""What tells where the service manager listens, to whom the daemon speaks alone."""


class Launched(NamedTuple):
    """A fork server that was started, and our end of its channel."""

    popen: "subprocess.Popen[bytes]"
    pidfd: int
    channel: socket.socket


def launch() -> Launched:
    """Start one. Raises ``OSError``, and then there is none. Nothing of the working directory is imported (``-P``)."""
    with ExitStack() as until_done, ExitStack() as where_it_fails:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        where_it_fails.callback(ours.close)
        until_done.callback(theirs.close)
        ours.setblocking(False)
        popen = subprocess.Popen(
            command(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal goes to the daemon alone
            env={**{name: value for name, value in os.environ.items() if name not in MANAGERS}, **ONE_THREAD},
        )
        where_it_fails.callback(popen.wait)
        where_it_fails.callback(popen.kill)
        pidfd = os.pidfd_open(popen.pid)
        where_it_fails.pop_all()
    return Launched(popen, pidfd, ours)


def command(channel: int) -> list[str]:
    """What a fork server is started with, and so every worker's command line."""
    return [sys.executable, "-P", "-m", "batchd.worker", str(channel)]
