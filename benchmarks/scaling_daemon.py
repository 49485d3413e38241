"""``batchd serve`` or ``batchd worker`` with workers that sleep instead of decoding.

The same arguments; see ``scaling`` and ``pool``. Where SCALING_DECISIONS names a file, the daemon
keeps two numbers in it: the CPU time of the core's decisions, and the orders that it has given.
"""

import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from batchd.cli.main import main
from batchd.core.actions import OrderChunk, ProveChunk
from batchd.core.state import DaemonState
from batchd.runtime import children
from batchd.worker import entry
from batchd.worker.process import limit_threads

SLEEPING = Path(__file__).with_name("sleeping_worker.py")
DECISIONS = struct.Struct("<dQ")
"""CPU time in seconds, orders."""


def command(module: str, *arguments: str) -> list[str]:
    """As ``children.command``, but for workers."""
    module_arguments = [os.fspath(SLEEPING)] if module == "batchd.worker" else ["-m", module]
    return [sys.executable, "-P", *module_arguments, *arguments]


def count_decisions(path: str) -> None:
    """Have ``DaemonState.handle`` write what it costs to a file of ``DECISIONS``."""
    with open(path, "r+b") as file:  # noqa: PTH123  it is mapped at once
        kept = mmap.mmap(file.fileno(), DECISIONS.size)
    handle = DaemonState.handle
    spent_s, orders = 0.0, 0

    def timed(state: DaemonState, *arguments: Any) -> Any:
        nonlocal spent_s, orders
        began_s = time.thread_time()
        actions = handle(state, *arguments)
        spent_s += time.thread_time() - began_s
        orders += sum(isinstance(action, OrderChunk | ProveChunk) for action in actions)
        DECISIONS.pack_into(kept, 0, spent_s, orders)
        return actions

    DaemonState.handle = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    limit_threads()
    children.command = command
    entry.start_early = lambda: children.start_linked("batchd.worker")
    if "SCALING_DECISIONS" in os.environ:
        count_decisions(os.environ["SCALING_DECISIONS"])
    main(sys.argv[1:])
