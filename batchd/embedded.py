"""A daemon for one script, as its child. Runs in the user's process.

    script --- lifeline -----------> daemon   end of file: the script has ended, so the daemon ends
           <-- one line: address --- daemon   once trainers can connect, or lines with the reason

The child has its own runtime directory, so it disturbs no other daemon, and its own session, so
Ctrl-C reaches the script only, which then decides.

Invariant: when the context ends, the child has ended and its directory is removed.
"""

import json
import os
import re
import select
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import monotonic

from batchd.errors import BatchdError
from batchd.runtime.children import PIPE, Child, describe, start_linked

END_TIMEOUT_S = 15.0
LINE_BYTES_MAX = 4096
_ADDRESS_LINE = re.compile(rb"^(ipc://.*)\n", re.MULTILINE)


@contextmanager
def serve(
    config: str | os.PathLike[str], *, overrides: Mapping[str, str] | None = None, start_timeout_s: float = 600.0
) -> Iterator[str]:
    """Run a daemon as a child of this process; gives the address for ``batchd_client.connect``.

    ``config`` is a TOML file; ``overrides`` are dotted keys with values, as for ``--set`` of
    ``batchd serve`` (``{"daemon.workers": "2"}``). The daemon logs warnings and errors to this
    process's stderr, one line of text each. ``start_timeout_s`` bounds the scan of the sources, in
    seconds. Raises ``BatchdError`` with the daemon's reason if it does not start.

    The daemon ends with the context, and also when this process dies in any other way.
    """
    import shutil  # noqa: PLC0415  workers import this package too, and need neither
    import tempfile  # noqa: PLC0415  the same

    for key in overrides or {}:
        if not key.strip() or "=" in key:
            raise BatchdError(f"overrides: {key!r} is not a path of keys, such as streams.photos.batch_size")
    with ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="batchd-", dir=os.environ.get("XDG_RUNTIME_DIR"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        settings = {**(overrides or {}), "daemon.runtime_dir": directory}
        asked = json.dumps([os.fspath(config), settings])
        child, lifeline = start_linked("batchd.cli.daemon", asked, stdout=PIPE, own_session=True)
        stack.callback(child.end, END_TIMEOUT_S)  # its workers end with it, by their lifelines
        stack.callback(lifeline.close)
        import batchd_client.daemon  # noqa: F401, PLC0415  a script connects next: load it meanwhile

        yield address_of_child(child, start_timeout_s)


def address_of_child(child: Child, timeout_s: float) -> str:
    """Wait for the line with the daemon's address. Raises ``BatchdError``."""
    deadline = monotonic() + timeout_s
    poller = select.poll()  # a script may have more descriptors than ``select`` takes
    poller.register(child.output, select.POLLIN)
    said = b""
    while not (address := _ADDRESS_LINE.search(said)):
        if not poller.poll(max(0.0, 1000 * (deadline - monotonic()))):
            raise BatchdError(
                f"the daemon was not ready within {timeout_s:g} s; give it longer with start_timeout_s, or see what it "
                "scans with `batchd serve`"
            )
        part = os.read(child.output.fileno(), LINE_BYTES_MAX)
        if not part:
            ended = f"the daemon ended with {describe(child.reap())} before it was ready"
            reason = said.decode(errors="replace").strip()
            raise BatchdError(f"{ended}: {reason}" if reason else f"{ended}; its messages are on standard error")
        said += part
    return os.fsdecode(address[1])
