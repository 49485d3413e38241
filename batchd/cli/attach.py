"""A session with a running daemon, for the commands that look at one. Runs in the user's shell.

The server's distribution does not import the trainer's library, so this is the least that can ask a question and look at one
batch: no reconnecting, no prefetch, every answer within a deadline.

Invariant: leaving the context ends the lifeline, which gives back whatever was held.
"""

import mmap
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import zmq

from batchd.errors import BatchdError, DaemonUnreachable
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.fields import PlacedField, layout_from_wire, length_texts, sizes_field
from batchd_wire.messages import (
    TO_TRAINER,
    TO_TRAINER_LIFELINE,
    AskStatus,
    Handle,
    Hello,
    Open,
    Opened,
    Pull,
    Refused,
    SlotShared,
    Status,
    Subscribe,
    Subscribed,
    Welcome,
)
from batchd_wire.runtime import ADDRESS_VARIABLE, RuntimeDirectory, candidate_directories, parse_address
from batchd_wire.slot import holds_generation
from batchd_wire.views import checked_sizes, row_views, slot_arrays
from batchd_wire.waiting import SILENCE_MAX_S, missing_samples

ANSWER_TIMEOUT_S = 10.0
BATCH_TIMEOUT_S = 120.0
LOOK_EVERY_S = 1.0
_Answer = TypeVar("_Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class PeekedBatch:
    """A copy of one batch: ``arrays`` by field, each ``[samples, ...]``; ``classes`` may be empty.

    ``varying``: the fields of which samples differ in shape, by name. Their arrays have room for the largest there may be.
    """

    epoch: int
    step: int
    classes: list[str]
    arrays: dict[str, np.ndarray]
    varying: dict[str, PlacedField] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many samples it has."""
        return len(next(iter(self.arrays.values())))

    def samples(self, name: str) -> list[np.ndarray]:
        """The values of a field, one array for each sample, in its own shape. Raises ``BatchdError`` where sizes cannot be."""
        array, placed = self.arrays[name], self.varying.get(name)
        sizes = sizes_field(placed) if placed else None
        if placed is None or placed.varying is None or sizes is None:
            return [array[row, ...] for row in range(len(array))]
        try:
            known = checked_sizes(self.arrays[sizes.name], placed.shape, placed.varying)
        except ValueError as error:
            raise BatchdError(f"the batch cannot be read: field {name!r}: {error}") from None
        return row_views(array, known, placed.varying)

    def type_text(self, name: str) -> str:
        """Type and shape of one sample, for people."""
        array, placed = self.arrays[name], self.varying.get(name)
        lengths = length_texts(array.shape[1:], placed.varying if placed else None)
        return f"{array.dtype}[{', '.join(lengths)}]" if lengths else str(array.dtype)


class Attachment:
    """An open session. Use as a context manager."""

    def __init__(self, directory: RuntimeDirectory, opening_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._directory = directory
        self._opening_timeout_s = opening_timeout_s
        self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def ask(self, question: Message, answer: type[_Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> _Answer:
        """Send a message and wait for the answer to it. Raises ``BatchdError`` with the daemon's words where it refuses."""
        self._dealer.send(question.encode())
        reply = self._reply(timeout_s)
        if reply is None:
            raise self._silent(type(question).__name__, timeout_s)
        if not isinstance(reply, answer):
            raise BatchdError(f"the daemon answered {type(question).__name__} with {type(reply).__name__}")
        return reply

    def peek(self, stream: str, say: Callable[[str], None]) -> PeekedBatch:
        """Wait for the first batch of the stream and copy it, as a trainer that begins now would get it.

        Where it does not come soon, and it is known why, ``say`` is called with that, once.
        """
        subscribe = Subscribe(
            request=1,
            stream=stream,
            rank=0,
            world_size=1,
            window=1,
            epoch=0,
            step=0,
            end_epoch=None,
            fingerprint=None,
            is_spectator=True,
        )
        told = self.ask(subscribe, Subscribed)
        self._dealer.send(Pull(told.subscription, 0, True, 0, []).encode())
        handle = self._first_handle(stream, say)
        memory = self._map(handle.slot)
        if not holds_generation(memory[:4096], handle.generation):
            raise BatchdError(f"slot {handle.slot} does not hold the batch that its handle names")
        rows = slice(handle.first, handle.first + handle.count)
        layout = layout_from_wire(told.layout)
        arrays = {name: array[rows].copy() for name, array in slot_arrays(memory, layout).items()}
        varying = {placed.name: placed for placed in layout.sample_fields if placed.varying}
        return PeekedBatch(handle.epoch, handle.step, told.classes, arrays, varying)

    def _open(self) -> None:
        path = self._directory.lifeline_path
        try:
            self._lifeline.settimeout(self._opening_timeout_s)
            self._lifeline.connect(os.fspath(path))
            with suppress(ChannelClosed):  # whoever was turned away already finds the reason in the daemon's last words
                send_message(self._lifeline, Hello(PROTOCOL_VERSION, "batchd", os.getpid()))
            welcome, _descriptors = receive_message(self._lifeline, TO_TRAINER_LIFELINE)
        except (OSError, ChannelClosed) as error:
            raise DaemonUnreachable(_unreachable(self._directory, error)) from None
        if isinstance(welcome, Refused):
            raise BatchdError(welcome.text)
        assert isinstance(welcome, Welcome)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(self._directory.zmq_endpoint)
        self.ask(Open(PROTOCOL_VERSION, welcome.secret), Opened, self._opening_timeout_s)

    def _first_handle(self, stream: str, say: Callable[[str], None]) -> Handle:
        """Wait for what a pull brings. Whoever waits for long is told why, if it is for samples; that is asked for once."""
        deadline = monotonic() + BATCH_TIMEOUT_S
        missing = None
        reply = self._reply(SILENCE_MAX_S)
        if reply is None:
            self._dealer.send(AskStatus(2).encode())
            reply = self._reply(deadline - monotonic())
        if isinstance(reply, Status):
            missing = missing_samples(reply.status, stream)
            if missing is not None:
                say(f"waiting for samples: {missing}")
            reply = self._reply(deadline - monotonic())
        if isinstance(reply, Handle):
            return reply
        if reply is not None:
            raise BatchdError(f"the daemon answered Pull with {type(reply).__name__}")
        if missing is not None:
            raise BatchdError(f"no batch came within {BATCH_TIMEOUT_S:g} s: {missing}")
        raise self._silent("Pull", BATCH_TIMEOUT_S)

    def _reply(self, timeout_s: float) -> Message | None:
        """The next message, or None where none comes in time. Raises ``BatchdError`` where it is a refusal.

        Raises ``DaemonUnreachable`` where the daemon ends meanwhile.
        """
        if not self._wait(timeout_s):
            return None
        reply = self._decode(self._dealer.recv())
        if isinstance(reply, Refused):
            raise BatchdError(reply.text)
        return reply

    def _wait(self, timeout_s: float) -> bool:
        """Wait until there is an answer; looks at the lifeline now and then, since an answer may take minutes."""
        deadline = monotonic() + timeout_s
        while not self._dealer.poll(max(0, int(min(LOOK_EVERY_S, deadline - monotonic()) * 1000))):
            if monotonic() >= deadline:
                return False
            if self._is_deserted():
                raise DaemonUnreachable(f"the daemon at {self._directory.address} ended before it answered")
        return True

    def _is_deserted(self) -> bool:
        """Has the daemon closed the lifeline? What else there is to read stays there."""
        if not select.select([self._lifeline], [], [], 0)[0]:
            return False
        try:
            return not self._lifeline.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            return True

    def _silent(self, question: str, timeout_s: float) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"the daemon at {self._directory.address} has not answered {question} for {timeout_s:g} s; "
            "it lives (its lifeline is open), so its machine is overloaded or it is stuck: look at its log"
        )

    def _close(self) -> None:
        self._context.destroy(linger=0)
        self._lifeline.close()

    def _decode(self, data: bytes) -> Message:
        try:
            return TO_TRAINER.decode(data)
        except MalformedMessage as error:
            raise BatchdError(f"the daemon at {self._directory.address} talks nonsense: {error}") from None

    def _map(self, slot: int) -> mmap.mmap:
        """Take slots from the lifeline until the one that is wanted is there."""
        deadline = monotonic() + ANSWER_TIMEOUT_S
        while monotonic() < deadline and select.select([self._lifeline], [], [], ANSWER_TIMEOUT_S)[0]:
            message, descriptors = receive_message(self._lifeline, TO_TRAINER_LIFELINE)
            maps = []
            for descriptor in descriptors:
                maps.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, mmap.PROT_READ))
                os.close(descriptor)
            if isinstance(message, SlotShared) and message.slot == slot and maps:
                return maps[0]
        raise BatchdError(f"the memory of slot {slot} did not come within {ANSWER_TIMEOUT_S:g} s")


def find_daemon(address: str | None) -> RuntimeDirectory:
    """The runtime directory of the address given, of ``$BATCHD_ADDRESS``, or the first where a daemon answers.

    Sockets alone are no daemon: one that was killed leaves them. Where none answers, but something is there, connecting to it
    will say what is wrong.
    """
    named = address or os.environ.get(ADDRESS_VARIABLE)
    if named:
        try:
            place = parse_address(named)
        except ValueError as error:
            raise DaemonUnreachable(str(error)) from None
        if isinstance(place, RuntimeDirectory):
            return place
        raise DaemonUnreachable(
            f"{place.address} is for trainers; this command asks a daemon on its own host: run it there, "
            "with --address ipc:///run/batchd or none"
        )
    directories = [RuntimeDirectory(path) for path in candidate_directories()]
    problems = {directory: _problem(directory) for directory in directories}
    answering = [directory for directory, problem in problems.items() if problem is None]
    silent = [directory for directory, problem in problems.items() if not isinstance(problem, FileNotFoundError)]
    if answering or silent:
        return (answering or silent)[0]
    tried = ", ".join(str(directory.path) for directory in directories)
    raise DaemonUnreachable(
        f"no daemon was found in {tried}: start one with `batchd serve`, or name its address with --address or {ADDRESS_VARIABLE}"
    )


def _problem(directory: RuntimeDirectory) -> OSError | None:
    """Knock: why does nobody answer? None where somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(os.fspath(directory.lifeline_path))
        except OSError as error:
            return error
    return None


def _unreachable(directory: RuntimeDirectory, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"this user may not connect to the daemon at {directory.address}: join the group of {directory.path}"
    return (
        f"no daemon answers at {directory.address} ({error.strerror or error}): start one with `batchd serve`, "
        f"or name its address with --address or {ADDRESS_VARIABLE}"
    )
