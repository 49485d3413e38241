"""Entry of the OBSERVER process, which only the daemon starts:

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
from batchd.observer.access import AccessRules, HostNames
from batchd.observer.contact_sheets import ContactSheets
from batchd.observer.history import StatusRecorder
from batchd.observer.routes import Pages, Router
from batchd.observer.server import Server
from batchd.observer.status_client import StatusClient
from batchd_client.errors import BatchdClientError, ConnectTimeout
from batchd_client.lifeline import DaemonBusy
from batchd_wire.runtime import runtime_directory
from batchd_wire.threads import MORE_THREADS, TooFewThreads, check_threads

OWN_THREADS = 4
"""One that serves, one that asks the resolver, and some for connections."""


def answer(server: Server) -> None:
    """Serve as long as the process lives. A failure ends it, so that the daemon restarts it."""
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
    listener, directory, details, *configured, lifeline = arguments
    failpoints.passing("observer.starting")
    runtime = runtime_directory(Path(directory))
    recorder = StatusRecorder()
    client = StatusClient(recorder.add)
    sheets = ContactSheets(runtime.address)
    names = HostNames(configured)
    names.start()
    access = AccessRules(runtime.path, details_for_all=details == "all")
    listening = socket.socket(fileno=int(listener))
    server = Server(listening, Router(client, names, access, Pages(client, recorder, sheets)))
    Thread(target=answer, args=(server,), name="http", daemon=True).start()
    try:
        client.run(runtime, socket.socket(fileno=int(lifeline)))
    except (ConnectTimeout, DaemonBusy):
        return ExitCode.NO_DAEMON  # the daemon is gone, or stuck, and then its own log says so
    except BatchdClientError as error:
        sys.stderr.write(f"batchd.observer: {error}\n")
        return ExitCode.FAILED
    finally:
        sheets.close()
        names.close()
    listening.close()  # at once: the next daemon may be about to bind the address
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
