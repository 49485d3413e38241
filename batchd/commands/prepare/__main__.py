"""Entry of a WRITER: ``python -m batchd.commands.prepare NOTE_FD CHANNEL_FD``.

Only ``batchd prepare`` starts it.
"""

import socket
import sys

from batchd.worker.process import limit_threads, settle_in
from batchd_wire.channel import SEND_BUFFER_BYTES

limit_threads()


def main() -> int:
    """Write shards until the process of the command has ended."""
    settle_in()
    from batchd.commands.prepare.shards import ShardWriter  # noqa: PLC0415  after the environment is set
    from batchd.worker.process import NoteMemory  # noqa: PLC0415  the same

    note, channel_descriptor = map(int, sys.argv[1:])
    with socket.socket(fileno=channel_descriptor) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        ShardWriter(channel, NoteMemory(note)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
