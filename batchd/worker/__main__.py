"""Entry of the WORKER process: ``python -m batchd.worker CHANNEL_FD NOTE_FD``. Started by the daemon and by nobody else."""

import sys

from batchd.worker.process import enter, limit_threads

limit_threads()


def main() -> int:
    """Work until the daemon is gone."""
    with enter(sys.argv[1:]) as (channel, note_descriptor):
        from batchd.worker.loop import WorkerLoop  # noqa: PLC0415  after the environment is set
        from batchd.worker.note import Note  # noqa: PLC0415  the same

        WorkerLoop(channel, Note(note_descriptor)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
