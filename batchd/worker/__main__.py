"""Entry of the WORKER process: ``python -m batchd.worker CHANNEL_FD NOTE_FD``. Started by the daemon and by nobody else.

Thread pools of numerical libraries are held to one thread before anything imports them: there is a worker for every core.
"""

import os
import signal
import socket
import sys

for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"


def main() -> int:
    """Work until the daemon is gone. SIGINT is the daemon's business: a terminal sends it to the whole group."""
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
