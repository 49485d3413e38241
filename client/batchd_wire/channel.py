"""Messages and descriptors over an AF_UNIX SOCK_SEQPACKET socket. Standard library only.

One datagram is one message; order and borders are kept. End of file is an event, not an error: the
kernel reports that the last holder of the other end is gone.
"""

import os
import socket
from array import array
from collections.abc import Sequence

from batchd_wire import PROTOCOL_VERSION
from batchd_wire.codec import MalformedMessage, Message, Vocabulary

DATAGRAM_BYTES_MAX = 128 * 1024
"""Longest message on a channel."""
DESCRIPTORS_MAX = 5
SEND_BUFFER_BYTES = 1 << 20
_CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # joining flags each time is slow
_RIGHTS_BYTES = socket.CMSG_LEN(DESCRIPTORS_MAX * array("i").itemsize)


class ChannelClosed(ConnectionError):  # noqa: N818  an event, not an error of ours
    """The other side is gone."""


def send_message(
    channel: socket.socket, message: Message, descriptors: Sequence[int] = (), version: int = PROTOCOL_VERSION
) -> None:
    """Send one message with its descriptors to a side that speaks ``version``.

    Raises ``ChannelClosed`` if the other side has closed, and ``BlockingIOError`` if a non-blocking
    channel is full.
    """
    send_encoded(channel, message.encode(version), descriptors)


def send_encoded(channel: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send the bytes of an encoded message. Raises ``ChannelClosed`` and ``BlockingIOError``."""
    assert len(data) <= DATAGRAM_BYTES_MAX, f"a message of {len(data)} bytes"
    try:
        if descriptors:
            socket.send_fds(channel, [data], list(descriptors))
        else:
            channel.send(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChannelClosed(str(error)) from None


def receive_message(channel: socket.socket, vocabulary: Vocabulary) -> tuple[Message, list[int]]:
    """Receive one message with its descriptors, which now belong to the caller (close-on-exec).

    Raises ``ChannelClosed`` at end of file, ``MalformedMessage`` for a datagram that is not a
    message (its descriptors are closed), and what the socket raises: ``BlockingIOError`` or
    ``TimeoutError``.
    """
    try:
        data, ancillary, flags, _address = _receive(channel)
    except ConnectionResetError:
        # The other side closed before it read all our messages. The kernel reports that once; its
        # own last messages are behind that report.
        data, ancillary, flags, _address = _receive(channel)
    descriptors = _descriptors_in(ancillary)
    if not data and not descriptors:
        raise ChannelClosed("the other side closed the channel")
    try:
        if flags & _CUT_SHORT:
            raise MalformedMessage("a message too long, or with too many descriptors")
        return vocabulary.decode(data), descriptors
    except MalformedMessage:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive(channel: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
    return channel.recvmsg(DATAGRAM_BYTES_MAX, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Like ``socket.recv_fds``, which drops its flags: child programs would inherit descriptors."""
    descriptors = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)
