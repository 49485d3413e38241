"""Entry of the WORKER process: ``python -m batchd.worker CHANNEL_FD NOTE_FD``. Started by the daemon and by nobody else.

Thread pools of numerical libraries are held to one thread before anything imports them: there is a worker for every core.
"""

import ctypes
import os
import signal
import socket
import sys

for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"


PR_SET_PDEATHSIG = 1
"""From sys/prctl.h."""


def main() -> int:
    """Work until the daemon is gone. The end of the channel says so, unless a sample holds us: then the kernel kills us.

    SIGINT is the daemon's business.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel_descriptor, note_descriptor = (int(argument) for argument in sys.argv[1:])

    from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  after the environment is set
    from batchd.worker.note import Note  # noqa: PLC0415  the same

    with socket.socket(fileno=channel_descriptor) as channel:
        channel.setblocking(True)
        WorkerLoop(channel, Note(note_descriptor)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
