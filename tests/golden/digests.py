"""The digests of each golden stream.

``python -m golden.digests``, run in tests/, writes ``digests.json`` next to this module.

Write it again only if bytes are meant to change, in the commit that raises the content version.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import batchd_client
from golden.data import write_data
from golden.streams import MEMORY, golden_streams
from support.daemon_process import DaemonProcess
from support.kernel import RUN_VARIABLE
from support.seen import digest_of

FILE = Path(__file__).with_name("digests.json")
EPOCHS = 2
NAME_A_VERSION = {"picture-and-sound"}
"""Streams whose fingerprint names the version of PyAV, which is another one for each Python."""


def digests(daemon: DaemonProcess, streams: list[str]) -> dict[str, list[str]]:
    """Return the fingerprint of each stream, and a digest of every position of its first epochs."""
    found = {}
    with batchd_client.connect(daemon.address) as connection:
        for name in streams:
            with connection.stream(name, epochs=EPOCHS) as stream:
                fingerprint = pinned(name, str(stream.state_dict()["fingerprint"]))
                found[name] = [fingerprint, *(_epoch(stream) for _ in range(EPOCHS))]
    return found


def pinned(stream: str, fingerprint: str) -> str:
    """The fingerprint of a stream; "" for one that only its bytes are compared of."""
    return "" if stream in NAME_A_VERSION else fingerprint


def _epoch(stream: batchd_client.Stream) -> str:
    lines = []
    for batch in stream:
        with batch:
            lines.append(f"{batch.epoch} {batch.step} {digest_of(batch.items())}")
    return digest_of([("lines", np.frombuffer("\n".join(lines).encode(), np.uint8))])


def main() -> None:
    """Serve all golden streams and write their digests."""
    os.environ.setdefault(RUN_VARIABLE, str(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        data = Path(folder) / "data"
        write_data(data)
        streams = golden_streams(data)
        daemon = DaemonProcess(Path(folder), streams, python_path=[str(data)], memory=MEMORY).start()
        try:
            found = digests(daemon, list(streams))
        finally:
            daemon.close()
    lines = [f"{json.dumps(name)}: {json.dumps(those)}" for name, those in sorted(found.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stderr.write(f"{len(found)} streams\n")


if __name__ == "__main__":
    main()
