"""Entry of the FORK SERVER and its WORKERS: ``python -m batchd.worker CHANNEL_FD``."""

import socket
import sys

from batchd.worker.process import limit_threads

limit_threads()

if __name__ == "__main__":
    from batchd.worker.fork_server import work

    sys.exit(work(socket.socket(fileno=int(sys.argv[1]))))
