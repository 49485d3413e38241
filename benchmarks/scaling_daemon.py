"""``batchd serve`` with workers that sleep instead of decoding; see ``scaling``. The same arguments."""

import os
import sys
from pathlib import Path

from batchd.cli.main import main
from batchd.daemon import launch

SLEEPING = Path(__file__).with_name("sleeping_worker.py")

launch.command = lambda channel: [sys.executable, "-P", os.fspath(SLEEPING), str(channel)]  # all else is as it is
main(sys.argv[1:])
