"""Entry of the OBSERVER process. Started by the daemon and by nobody else:

python -m batchd.observer LIFELINE_FD LISTENER_FD RUNTIME_DIRECTORY HOST all|insiders
"""

import socket
import sys
from pathlib import Path
from threading import Thread

from batchd import failpoints
from batchd.errors import BatchdError, DaemonUnreachable
from batchd.observer.history import Chronicle
from batchd.observer.inquiry import Inquiry
from batchd.observer.pages import Pages
from batchd.observer.routes import Observatory
from batchd.observer.server import Server
from batchd.observer.sheets import Sheets
from batchd.observer.visitors import Visitors
from batchd_wire.runtime import runtime_directory


def main(arguments: list[str]) -> int:
    """Answer HTTP until the daemon is gone."""
    lifeline, listener, directory, host, details = arguments
    failpoints.passing("observer.starting")
    place = runtime_directory(Path(directory))
    chronicle = Chronicle()
    inquiry = Inquiry(chronicle.add)
    sheets = Sheets(place.address)
    visitors = Visitors(place.path, host, details_for_all=details == "all")
    door = socket.socket(fileno=int(listener))
    server = Server(door, Observatory(inquiry, visitors, Pages(inquiry, chronicle, sheets)))
    Thread(target=server.serve_forever, name="http", daemon=True).start()
    try:
        inquiry.run(place, socket.socket(fileno=int(lifeline)))
    except DaemonUnreachable as error:
        return error.exit_code  # the daemon is gone, which is no news, or stuck, and then it will say so
    except BatchdError as error:
        sys.stderr.write(f"batchd.observer: {error}\n")
        return error.exit_code
    finally:
        sheets.close()
    door.close()  # at once: the next daemon may be about to take the address
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
