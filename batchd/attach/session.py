"""A session with a running daemon: the least that can ask a question. Commands and observer.

No reconnecting, no prefetch, every answer within a deadline. Invariant: leaving the context ends the lifeline, which gives
back whatever was held.
"""

import os
import select
import socket
from contextlib import ExitStack, suppress
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

import zmq

from batchd.attach.threads import CONTEXT_THREADS, check_threads
from batchd.errors import BatchdError, DaemonUnreachable
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.messages import TO_TRAINER, TO_TRAINER_LIFELINE, Hello, Open, Opened, Refused, Welcome
from batchd_wire.runtime import ADDRESS_VARIABLE, RuntimeDirectory

ANSWER_TIMEOUT_S = 10.0
LOOK_EVERY_S = 1.0
_Answer = TypeVar("_Answer", bound=Message)


class Attachment:
    """An open session. Use as a context manager.

    ``lifeline`` is for who was given its own by the daemon; it is waited for as long as the daemon lives.
    """

    def __init__(
        self,
        directory: RuntimeDirectory,
        lifeline: socket.socket | None = None,
        opening_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Raises ``BatchdError`` where there are no threads for it."""
        check_threads(1 + CONTEXT_THREADS)
        self.directory = directory
        self._opening_timeout_s = opening_timeout_s
        self._is_given = lifeline is not None
        self.lifeline = lifeline or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._context = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)

    def __enter__(self) -> Self:
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self._close)
            self._open()
            where_it_fails.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def ask(self, question: Message, answer: type[_Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> _Answer:
        """Send a message and wait for the answer to it. Raises ``BatchdError`` with the daemon's words where it refuses."""
        self.dealer.send(question.encode())
        reply = self.reply(timeout_s)
        if reply is None:
            raise self.silent(type(question).__name__, timeout_s)
        if not isinstance(reply, answer):
            raise BatchdError(f"the daemon answered {type(question).__name__} with {type(reply).__name__}")
        return reply

    def _open(self) -> None:
        try:
            if not self._is_given:
                self.lifeline.settimeout(self._opening_timeout_s)
                self.lifeline.connect(os.fspath(self.directory.lifeline_path))
            with suppress(ChannelClosed):  # whoever was turned away already finds the reason in the daemon's last words
                send_message(self.lifeline, Hello(PROTOCOL_VERSION, "batchd", os.getpid()))
            welcome, _descriptors = receive_message(self.lifeline, TO_TRAINER_LIFELINE)
        except (OSError, ChannelClosed) as error:
            raise DaemonUnreachable(_unreachable(self.directory, error)) from None
        if isinstance(welcome, Refused):
            raise BatchdError(welcome.text)
        assert isinstance(welcome, Welcome)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(self.directory.zmq_endpoint)
        self.ask(Open(PROTOCOL_VERSION, welcome.secret), Opened, self._opening_timeout_s)

    def reply(self, timeout_s: float) -> Message | None:
        """The next message, or None where none comes in time. Raises ``BatchdError`` where it is a refusal.

        Raises ``DaemonUnreachable`` where the daemon ends meanwhile.
        """
        if not self._wait(timeout_s):
            return None
        reply = self._decode(self.dealer.recv())
        if isinstance(reply, Refused):
            raise BatchdError(reply.text)
        return reply

    def _wait(self, timeout_s: float) -> bool:
        """Wait until there is an answer; looks at the lifeline now and then, since an answer may take minutes."""
        deadline = monotonic() + timeout_s
        while not self.dealer.poll(max(0, int(min(LOOK_EVERY_S, deadline - monotonic()) * 1000))):
            if monotonic() >= deadline:
                return False
            if self._is_deserted():
                raise DaemonUnreachable(f"the daemon at {self.directory.address} ended before it answered")
        return True

    def _is_deserted(self) -> bool:
        """Has the daemon closed the lifeline? What else there is to read stays there."""
        poller = select.poll()  # which takes any descriptor, and an observer's may have a high number
        poller.register(self.lifeline, select.POLLIN)
        if not poller.poll(0):
            return False
        try:
            return not self.lifeline.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            return True

    def silent(self, question: str, timeout_s: float) -> DaemonUnreachable:
        """Say that it has not answered in time."""
        return DaemonUnreachable(
            f"the daemon at {self.directory.address} has not answered {question} for {timeout_s:g} s; "
            "it lives (its lifeline is open), so its machine is overloaded or it is stuck: look at its log"
        )

    def _close(self) -> None:
        self._context.destroy(linger=0)
        self.lifeline.close()

    def _decode(self, data: bytes) -> Message:
        try:
            return TO_TRAINER.decode(data)
        except MalformedMessage as error:
            raise BatchdError(f"the daemon at {self.directory.address} talks nonsense: {error}") from None


def _unreachable(directory: RuntimeDirectory, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"this user may not connect to the daemon at {directory.address}: join the group of {directory.path}"
    return (
        f"no daemon answers at {directory.address} ({error.strerror or error}): start one with `batchd serve`, "
        f"or name its address with --address or {ADDRESS_VARIABLE}"
    )
