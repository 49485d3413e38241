"""Records the conversation of a client of this version with a daemon.

Run ``python -m conversation.record FILE`` in tests/.

The file is a list of conversations: the sockets, and every message in its order as [sender, name,
bytes as hexadecimal]. When ``PROTOCOL_VERSION`` grows, record the version before the change;
``test_old_clients`` plays all recordings to the daemon.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import batchd_client
from batchd_wire.codec import Message, Vocabulary
from batchd_wire.messages import Greet, Greeted, Status
from support.daemon_process import DaemonProcess
from support.images import write_photos
from support.network import free_port
from support.producers import frame, push_stream
from support.settings import folder_stream


def start_daemon(folder: Path, photos: Path) -> DaemonProcess:
    """Start the daemon of all recordings: a stream of forty photographs and a live one."""
    streams = {"photos": folder_stream(photos), "live": push_stream(capacity=4)}
    return DaemonProcess(folder, streams, tcp=f"127.0.0.1:{free_port()}").start()


def conversations(daemon: DaemonProcess) -> list[tuple[str, list[list[str]]]]:
    """Run a trainer on this host, one over TCP, and a producer.

    Each is recorded from its first message to its last.
    """
    with recorded() as local, batchd_client.connect(daemon.address) as connection:
        connection.status()
        with connection.stream("photos", epochs=1) as stream:
            _read(stream)
        connection.bad("photos")
    with recorded() as remote, batchd_client.connect(daemon.tcp_address, connections=1) as connection:
        connection.status()
        with connection.stream("photos", epochs=1) as stream:
            _read(stream)
    with recorded() as producer, batchd_client.push("live", daemon.address) as live:
        for number in range(3):
            assert live.put(frame(number))
    return [("local", local), ("remote", remote), ("local", producer)]


def _read(stream: batchd_client.Stream) -> None:
    for batch in stream:
        batch.release()


@contextmanager
def recorded() -> Iterator[list[list[str]]]:
    """Record what this process sends and receives within the context."""
    said: list[list[str]] = []
    encode, decode = Message.encode, Vocabulary.decode

    def note(sender: str, message: Message) -> None:
        line = [sender, type(message).__name__, encode(_without_this_machine(message)).hex()]
        if line not in said[-1:]:  # a message that a socket did not take is encoded again
            said.append(line)

    def encoding(message: Message) -> bytes:
        note("trainer", message)
        return encode(message)

    def decoding(vocabulary: Vocabulary, data: bytes | memoryview) -> Message:
        message = decode(vocabulary, data)
        note("daemon", message)
        return message

    Message.encode, Vocabulary.decode = encoding, decoding  # type: ignore[method-assign, assignment]
    try:
        yield said
    finally:
        Message.encode, Vocabulary.decode = encode, decode  # type: ignore[method-assign]


def _without_this_machine(message: Message) -> Message:
    match message:
        case Greet(version, name, pid):
            return Greet(version, name, pid, "")
        case Greeted(daemon, _ipc_address, secret):
            return Greeted(daemon, "", secret)
        case Status(request):
            return Status(request, {})
    return message


def main() -> None:
    """Record everything."""
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        write_photos(Path(folder) / "photos", {"cat": 10, "dog": 10, "owl": 10, "yak": 10}, height=72, width=96)
        daemon = start_daemon(Path(folder), Path(folder) / "photos")
        try:
            found = conversations(daemon)
        finally:
            daemon.close()
    lines = [json.dumps({"over": over, "said": said}) for over, said in found]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines).replace("], [", "],\n [") + "\n]\n")


if __name__ == "__main__":
    main()
