"""Entry of a WRITER: ``python -m batchd.prepare NOTE_FD CHANNEL_FD``. Started by ``batchd prepare`` and by nobody else."""

import sys

from batchd.worker.process import enter, limit_threads

limit_threads()


def main() -> int:
    """Write shards until whoever ordered them is gone."""
    with enter(sys.argv[1:]) as (note_descriptor, channel):
        from batchd.prepare.shards import ShardWriter  # noqa: PLC0415  after the environment is set
        from batchd.worker.note import Note  # noqa: PLC0415  the same

        ShardWriter(channel, Note(note_descriptor)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
