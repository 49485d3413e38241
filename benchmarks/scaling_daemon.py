"""``batchd serve`` with workers that sleep instead of decoding; see ``scaling``.

The same arguments.
"""

import os
import sys
from pathlib import Path

from batchd import children
from batchd.cli.main import main

SLEEPING = Path(__file__).with_name("sleeping_worker.py")


def command(module: str, *arguments: str) -> list[str]:
    """As ``children.command``, but for workers."""
    module_arguments = [os.fspath(SLEEPING)] if module == "batchd.worker" else ["-m", module]
    return [sys.executable, "-P", *module_arguments, *arguments]


children.command = command
main(sys.argv[1:])
