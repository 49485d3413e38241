"""Entry of the FORK SERVER and of each WORKER: ``python -m batchd.worker CHANNEL_FD``. Started by the daemon, by nobody else."""

import socket
import sys

from batchd.worker.process import limit_threads, settle_in

limit_threads()


def main() -> int:
    """Fork workers until the daemon is gone; in each of them: work until the daemon is gone."""
    settle_in()
    from batchd.worker.fork_server import serve_forks  # noqa: PLC0415  after the environment is set
    from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  the same
    from batchd.worker.note import Note  # noqa: PLC0415  the same

    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.setblocking(True)
        born = serve_forks(channel)
    if born is not None:
        with born.channel:
            born.channel.setblocking(True)
            WorkerLoop(born.channel, Note(born.note)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
