"""Entry of the OBSERVER process. Started by the daemon and by nobody else:

python -m batchd.observer LISTENER_FD RUNTIME_DIRECTORY all|insiders NAME... LIFELINE_FD
"""

import os
import socket
import sys
import traceback
from pathlib import Path
from threading import Thread

from batchd import failpoints
from batchd.errors import ExitCode
from batchd.observer.contact_sheets import Sheets
from batchd.observer.history import Chronicle
from batchd.observer.inquiry import Inquiry
from batchd.observer.names import Names
from batchd.observer.pages import Pages
from batchd.observer.routes import Observatory
from batchd.observer.server import Server
from batchd.observer.visitors import Visitors
from batchd_client.errors import BatchdClientError, ConnectTimeout
from batchd_client.lifeline import DaemonBusy
from batchd_wire.runtime import runtime_directory
from batchd_wire.threads import MORE_THREADS, TooFewThreads, check_threads

OWN_THREADS = 4
"""One that serves, one that asks for names, and some for connections."""


def answer(server: Server) -> None:
    """Serve for as long as the process lives: an observer that answers nobody has to be replaced, and so it has to end."""
    try:
        server.serve_forever()
    finally:
        traceback.print_exc()
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Answer HTTP until the daemon is gone."""
    try:
        check_threads(OWN_THREADS)
    except TooFewThreads as error:
        sys.stderr.write(f"batchd.observer {error}: {MORE_THREADS}\n")
        return ExitCode.FAILED
    listener, directory, details, *given, lifeline = arguments
    failpoints.passing("observer.starting")
    place = runtime_directory(Path(directory))
    chronicle = Chronicle()
    inquiry = Inquiry(chronicle.add)
    sheets = Sheets(place.address)
    names = Names(given)
    names.start()
    visitors = Visitors(place.path, names, details_for_all=details == "all")
    door = socket.socket(fileno=int(listener))
    server = Server(door, Observatory(inquiry, visitors, Pages(inquiry, chronicle, sheets)))
    Thread(target=answer, args=(server,), name="http", daemon=True).start()
    try:
        inquiry.run(place, socket.socket(fileno=int(lifeline)))
    except (ConnectTimeout, DaemonBusy):
        return ExitCode.NO_DAEMON  # the daemon is gone, which is no news, or stuck, and then it will say so
    except BatchdClientError as error:
        sys.stderr.write(f"batchd.observer: {error}\n")
        return ExitCode.FAILED
    finally:
        sheets.close()
        names.close()
    door.close()  # at once: the next daemon may be about to take the address
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
