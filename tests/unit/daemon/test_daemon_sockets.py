"""The sockets in the runtime directory: their permissions, and the order of their messages."""

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest
import zmq
from structlog.testing import capture_logs

from batchd.core.actions import GrantLease
from batchd.daemon.doors import DaemonSide
from batchd.daemon.local import sessions as sessions_module
from batchd.daemon.local.sessions import HANDLES_AT_ONCE, LocalDoor
from batchd.errors import BatchdError
from batchd.runtime import descriptors
from batchd.runtime.limits import SessionLimits
from batchd.runtime.poller import Poller
from batchd.runtime.slots import SlotPool
from batchd_wire import PROTOCOL_VERSION
from batchd_wire import messages as wire
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import Field, place_fields
from batchd_wire.runtime import RuntimeDirectory
from support.waiting import PATIENCE_S, wait_until

DIRECTORY_GROUP = 54_323


@pytest.fixture
def sessions() -> Iterator[LocalDoor]:
    """A door for local trainers to which no trainer connects."""
    with closing(Poller()) as poller:
        sessions = LocalDoor(DaemonSide(poller, print, SlotPool()), SessionLimits(1, 1))
        yield sessions
        sessions.close()


@pytest.fixture
def names(tmp_path: Path) -> RuntimeDirectory:
    """A runtime directory."""
    return RuntimeDirectory(tmp_path)


def access(path: Path) -> tuple[int, int]:
    """Return the group and the mode of a file."""
    status = path.stat()
    return status.st_gid, stat.S_IMODE(status.st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other groups")
def test_the_sockets_have_the_directorys_group(sessions: LocalDoor, names: RuntimeDirectory) -> None:
    """The operator may have chosen a group other than the daemon's own."""
    os.chown(names.path, -1, DIRECTORY_GROUP)

    sessions.bind(names.lifeline_path, names.zmq_path)

    assert access(names.lifeline_path) == access(names.zmq_path) == (DIRECTORY_GROUP, 0o660)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other groups")
def test_a_group_that_the_daemon_cannot_set_is_logged(
    sessions: LocalDoor, names: RuntimeDirectory, monkeypatch
) -> None:
    """The daemon is not a member; otherwise members would be refused without a log line."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.chown(names.path, -1, DIRECTORY_GROUP)
    monkeypatch.setattr(os, "chown", refuse)
    with capture_logs() as log:
        sessions.bind(names.lifeline_path, names.zmq_path)

    assert [(line["event"], line["log_level"]) for line in log] == [
        ("socket is not open to the directory's group", "warning")
    ] * 2
    assert access(names.lifeline_path)[1] == 0o660


def test_only_errors_of_the_directory_are_reported_as_such(
    sessions: LocalDoor, names: RuntimeDirectory, monkeypatch
) -> None:
    """A missing descriptor for the epoll is no error of the directory's file system."""

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sessions._daemon.poller, "watch", refuse)
        with pytest.raises(OSError, match="No space left on device"):
            sessions.bind(names.lifeline_path, names.zmq_path)


@pytest.mark.parametrize("call", ["unlink", "chmod"])
def test_a_directory_without_room_is_reported(sessions: LocalDoor, names: RuntimeDirectory, monkeypatch, call) -> None:
    """Any of the calls may find it out."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, refuse)
        with pytest.raises(
            BatchdError, match=r"^the runtime directory \S+ cannot be used: .* no space or no inodes left"
        ):
            sessions.bind(names.lifeline_path, names.zmq_path)


# --- slots that can be mapped writable ------------------------------------------------------------

SLOT_BYTES = 8192
LAYOUT = place_fields((Field("label", "int64", ()),), 1)


class Trainer:
    """A trainer with an open session and earlier requests. The daemon may read ZeroMQ first."""

    def __init__(self, stack: ExitStack, directory: Path, *, allowed: bool, asks: bool) -> None:
        names = RuntimeDirectory(directory)
        self.poller = poller = stack.enter_context(closing(Poller()))
        self.asked: list[object] = []
        self.memory = SlotPool()
        stack.callback(self.memory.close)
        self.memory.create(1, SLOT_BYTES)
        side = DaemonSide(poller, self.asked.append, self.memory)
        self.sessions = LocalDoor(side, SessionLimits(1, 1), writable_slots=allowed)
        stack.callback(self.sessions.close)
        self.sessions.bind(names.lifeline_path, names.zmq_path)
        self.lifeline = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.lifeline.connect(str(names.lifeline_path))
        poller.dispatch()
        send_message(self.lifeline, wire.Hello(PROTOCOL_VERSION, "trainer", 1))
        poller.dispatch()
        welcome, _ = receive_message(self.lifeline, wire.TO_TRAINER_LIFELINE)
        assert isinstance(welcome, wire.Welcome)
        if asks:
            send_message(self.lifeline, wire.AskWritable())
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.rcvtimeo = int(PATIENCE_S * 1000)
        self.dealer.connect(names.zmq_endpoint)
        self.dealer.send(wire.Open(PROTOCOL_VERSION, welcome.secret).encode())
        wait_until(
            lambda: poller.dispatch() or self.sessions.receive(()) or self.sessions.trainers()[0].connection,
            "the session is open",
        )

    def subscribes(self, *, takes_several: bool) -> None:
        """Send a subscription, and have the daemon read it."""
        self.dealer.send(
            wire.Subscribe(1, "photos", 0, 1, 4, 0, 0, None, None, False, takes_several=takes_several).encode()
        )
        wait_until(lambda: self.poller.dispatch() or self.sessions.receive(()) or self.asked, "the daemon has read it")

    def granted(self, *sequences: int) -> None:
        """Grant leases of the slot."""
        (session,) = self.sessions.trainers()
        for sequence in sequences:
            grant = GrantLease(1, session.number, 1, sequence, 0, sequence, 1, 7, 0, 1, is_remote=False)
            self.sessions.deliver(grant, LAYOUT)

    def received(self, count: int) -> list[Message]:
        """So many messages behind the answer to ``Open``."""
        self.sessions.flush()
        opened, *messages = [wire.TO_TRAINER.decode(self.dealer.recv()) for _ in range(1 + count)]
        assert type(opened) is wire.Opened
        return messages

    def shared(self) -> int:
        """The mode of the slot's descriptor, as it is shared now."""
        (session,) = self.sessions.trainers()
        self.sessions.deliver(GrantLease(1, session.number, 1, 0, 0, 0, 1, 1, 0, 1, is_remote=False), LAYOUT)
        message, (descriptor,) = receive_message(self.lifeline, wire.TO_TRAINER_LIFELINE)
        assert message == wire.SlotShared(1, SLOT_BYTES)
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        os.close(descriptor)
        return mode


@pytest.mark.parametrize(
    ("allowed", "asks", "mode"),
    [(True, True, os.O_RDWR), (True, False, os.O_RDONLY), (False, True, os.O_RDONLY), (False, False, os.O_RDONLY)],
)
def test_a_slot_is_shared_writable_on_request_if_that_is_allowed(tmp_path: Path, allowed, asks, mode) -> None:
    """A request on the lifeline before the session opens is known when the session is open."""
    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=allowed, asks=asks)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough

        assert trainer.shared() == mode
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_daemon_short_of_descriptors_shares_slots_read_only(tmp_path: Path, monkeypatch) -> None:
    """The trainer then copies them with the CPU, and the log reports it."""

    def none(_slot: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=True, asks=True)
        monkeypatch.setattr(trainer.memory, "open_writable", none)
        with capture_logs() as log:
            assert trainer.shared() == os.O_RDONLY
    assert [line["event"] for line in log] == ["slot shared read-only, though writable_slots is set"]


STOPPED = wire.Refused(0, 1, ErrorCode.STREAM_STOPPED, "it is broken")


def test_leases_that_are_granted_together_travel_in_one_message(tmp_path: Path) -> None:
    """What is sent between two of them stays between them."""
    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=False, asks=False)
        trainer.subscribes(takes_several=True)
        trainer.granted(0, 1)
        (session,) = trainer.sessions.trainers()
        trainer.sessions.send(session.number, STOPPED)
        trainer.granted(2)

        assert trainer.received(3) == [
            wire.Handles([[1, 0, 0, 0, 1, 7, 0, 1, 0], [1, 1, 0, 1, 1, 7, 0, 1, 0]]),
            STOPPED,
            wire.Handles([[1, 2, 0, 2, 1, 7, 0, 1, 0]]),
        ]


def test_one_message_has_a_bounded_number_of_leases(tmp_path: Path) -> None:
    """A session with hundreds of subscriptions may get more at once than a message may have."""
    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=False, asks=False)
        trainer.subscribes(takes_several=True)
        trainer.granted(*range(HANDLES_AT_ONCE + 1))

        first, last = trainer.received(2)

    assert isinstance(first, wire.Handles)
    assert isinstance(last, wire.Handles)
    assert [len(first.handles), len(last.handles)] == [HANDLES_AT_ONCE, 1]


def test_a_trainer_of_an_earlier_version_gets_each_lease_in_a_message(tmp_path: Path) -> None:
    """It does not say that it understands several."""
    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=False, asks=False)
        trainer.subscribes(takes_several=False)
        trainer.granted(0, 1)

        assert trainer.received(2) == [wire.Handle(1, 0, 0, 0, 1, 7, 0, 1), wire.Handle(1, 1, 0, 1, 1, 7, 0, 1)]


def test_a_trainer_that_is_gone_gets_no_leases(tmp_path: Path) -> None:
    """Its lifeline ends between the grant and the end of the daemon's round."""
    with ExitStack() as stack:
        trainer = Trainer(stack, tmp_path, allowed=False, asks=False)
        trainer.subscribes(takes_several=True)
        trainer.granted(0)
        trainer.lifeline.close()
        wait_until(lambda: trainer.poller.dispatch() or not trainer.sessions.trainers(), "its session has ended")
        trainer.sessions.flush()

        assert trainer.received(0) == []
        assert trainer.dealer.poll(0) == 0


# --- descriptors that peers send ------------------------------------------------------------------

LINGER_S = 20
NO_OPTION = 32_000
"""A number that no kernel knows as an option of a socket."""


@contextmanager
def slow_to_close() -> Iterator[socket.socket]:
    """A TCP socket whose last holder waits for ``LINGER_S`` when it closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = socket.create_connection(server.getsockname())
        other, _address = server.accept()
        slow.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                slow.send(bytes(1 << 16))
        slow.setblocking(True)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        yield slow
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()  # it resets the connection, so nothing waits for it any more


@pytest.mark.parametrize("case", ["lifeline", "refused", "batchd"])
def test_descriptor_that_is_slow_to_close_holds_up_no_loop(tmp_path: Path, monkeypatch, case) -> None:
    """An older kernel lets any peer send one, also a user who is refused.

    Then it closes its own.
    """
    monkeypatch.setattr(descriptors, "SO_PASSRIGHTS", NO_OPTION)
    monkeypatch.setattr(sessions_module, "why_refused", lambda *_: "a test" if case == "refused" else None)
    names = RuntimeDirectory(tmp_path)
    kind, path = (
        (socket.SOCK_STREAM, names.zmq_path) if case == "batchd" else (socket.SOCK_SEQPACKET, names.lifeline_path)
    )
    with closing(Poller()) as poller, slow_to_close() as slow:
        with closing(LocalDoor(DaemonSide(poller, print, SlotPool()), SessionLimits(1, 1))) as door:
            door.bind(names.lifeline_path, names.zmq_path)
            with socket.socket(socket.AF_UNIX, kind) as peer:
                peer.connect(str(path))
                socket.send_fds(peer, [b"\xff"], [slow.fileno()])
            slow.close()
            begun_s = monotonic()
            poller.dispatch()
            wait_until(lambda: poller.dispatch() or door.counts().connections == 0, "the peer is gone")
        assert monotonic() - begun_s < LINGER_S / 2


def test_kernel_refuses_descriptors_where_it_can(tmp_path: Path) -> None:
    """Then there is nothing to close."""
    names = RuntimeDirectory(tmp_path)
    kinds = {socket.SOCK_STREAM: names.zmq_path, socket.SOCK_SEQPACKET: names.lifeline_path}
    with (
        closing(Poller()) as poller,
        closing(LocalDoor(DaemonSide(poller, print, SlotPool()), SessionLimits(1, 1))) as door,
    ):
        door.bind(names.lifeline_path, names.zmq_path)
        if door._peers.may_carry:
            pytest.skip("a kernel of before 6.16")
        for kind, path in kinds.items():
            with socket.socket(socket.AF_UNIX, kind) as peer:
                peer.connect(str(path))
                for _ in ("before it is accepted", "after"):
                    with pytest.raises(PermissionError):
                        socket.send_fds(peer, [b"x"], [0])
                    poller.dispatch()
