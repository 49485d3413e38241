"""The bytes of a ZeroMQ peer over TCP, and damaged forms of them. For fuzzing.

The format is ZMTP 3 (RFC 23).

recorded(bytes) -> [ greeting | command or message | ... ] -> spoilt(parts, chance) -> the same,
nearly

A frame is flags, its length in one byte or in eight, and its body; a command's body starts with its
name, and READY's properties have lengths of their own.
"""

from random import Random
from socket import socket

GREETING_BYTES = 64
VERSION_BYTE, MECHANISM_BYTE = 10, 12
MORE, LONG, COMMAND = 1, 2, 4
LENGTHS = (
    0,
    1,
    255,
    256,
    1 << 16,
    (1 << 16) + 1,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
CHANGES_MAX = 3
REPEATS_MAX = 30
CUT_SHARE = 0.25


def recorded(said: bytes) -> list[bytes]:
    """Cut the bytes of a good peer into its greeting and its frames."""
    parts, rest = [said[:GREETING_BYTES]], said[GREETING_BYTES:]
    while rest:
        head, length_bytes = (9, 8) if rest[0] & LONG else (2, 1)
        end = head + int.from_bytes(rest[1 : 1 + length_bytes], "big")
        parts.append(rest[:end])
        rest = rest[end:]
    return parts


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame of ZMTP 3."""
    length = len(body).to_bytes(8, "big") if flags & LONG else bytes([len(body)])
    return bytes([flags]) + length + body


GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(GREETING_BYTES, b"\0")
READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", COMMAND)


def introduce(connection: socket) -> None:
    """Shake hands with a daemon without keys. Raises ``ConnectionError`` if it hangs up."""
    connection.sendall(GREETING + READY)
    heard = b""
    while b"READY" not in heard:
        part = connection.recv(1 << 10)
        if not part:
            raise ConnectionError("the daemon hung up")
        heard += part


def spoilt(parts: list[bytes], chance: Random) -> list[bytes]:
    """The same parts with errors in them, once or several times, at any layer.

    Some parts may be left out.
    """
    parts = list(parts)
    for _ in range(chance.randrange(1, CHANGES_MAX + 1)):
        chance.choice(_CHANGES)(parts, chance.randrange(len(parts)), chance)
    if chance.random() < CUT_SHARE:
        del parts[chance.randrange(len(parts)) + 1 :]
        _cut(parts, len(parts) - 1, chance)
    return parts


def _flip(parts: list[bytes], number: int, chance: Random) -> None:
    data = bytearray(parts[number])
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    parts[number] = bytes(data)


def _random(parts: list[bytes], number: int, chance: Random) -> None:
    parts[number] = chance.randbytes(chance.choice([0, 1, 9, len(parts[number]), 5000]))


def _drop(parts: list[bytes], number: int, _chance: Random) -> None:
    parts[number] = b""


def _repeat(parts: list[bytes], number: int, chance: Random) -> None:
    parts[number] *= chance.randrange(2, REPEATS_MAX)


def _swap(parts: list[bytes], number: int, chance: Random) -> None:
    other = chance.randrange(len(parts))
    parts[number], parts[other] = parts[other], parts[number]


def _cut(parts: list[bytes], number: int, chance: Random) -> None:
    parts[number] = parts[number][: chance.randrange(len(parts[number]) + 1)]


def _lie_about_length(parts: list[bytes], number: int, chance: Random) -> None:
    """A frame with a wrong length."""
    length = chance.choice([*LENGTHS, len(parts[number]) + 1, max(0, len(parts[number]) - 3)])
    parts[number] = bytes([LONG | (parts[number] or b"\0")[0]]) + length.to_bytes(8, "big") + parts[number][2:]


def _lie_inside(parts: list[bytes], number: int, chance: Random) -> None:
    """Four bytes at any place that announce a length, as those of a property in READY do."""
    data = parts[number]
    start = chance.randrange(len(data) + 1)
    parts[number] = data[:start] + chance.choice(LENGTHS).to_bytes(8, "big")[4:] + data[start + 4 :]


def _change_flags(parts: list[bytes], number: int, chance: Random) -> None:
    parts[number] = (
        chance.choice([0, MORE, LONG, COMMAND, COMMAND | MORE, COMMAND | LONG, 8, 255]).to_bytes(1, "big")
        + parts[number][1:]
    )


def _insert(parts: list[bytes], number: int, chance: Random) -> None:
    """An invalid frame: empty, a command, or a part of a message without an end."""
    parts.insert(number, chance.choice(_STRANGE))


def _change_greeting(parts: list[bytes], _number: int, chance: Random) -> None:
    """Another version, mechanism or role; or a greeting from before ZMTP had versions."""
    greeting = bytearray(parts[0])
    where = chance.choice([0, 9, VERSION_BYTE, VERSION_BYTE + 1, MECHANISM_BYTE, 32])
    if where < len(greeting):
        greeting[where] = chance.choice([0, 1, 2, 3, 4, 127, 255])
    parts[0] = chance.choice([bytes(greeting), bytes(greeting), *_OLD_GREETINGS])


_OLD_GREETINGS = (
    b"\x01\x00",
    b"\x05\x00name",
    b"\xff" + bytes(8) + b"\x7f\x00\x05",
    b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
)
"""ZMTP 1.0 without and with a name, and 2.0."""
_STRANGE = (
    frame(b""),
    frame(b"", MORE),
    frame(b"", COMMAND),
    frame(b"\x04PING\x00\x01context-of-sixteen", COMMAND),
    frame(b"\x04PING", COMMAND),
    frame(b"\x04PONG", COMMAND),
    frame(b"\x05ERROR\xffno", COMMAND),
    frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB", COMMAND),
    frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x04__fd\x00\x00\x00\x011", COMMAND),
    frame(b"\x09SUBSCRIBEall", COMMAND),
    frame(b"\x06CANCEL", COMMAND),
    frame(b"\xffname", COMMAND),
    frame(b"x" * 300, LONG | MORE),
)
_CHANGES = (
    _flip, _flip, _random, _drop, _repeat, _swap, _cut, _lie_about_length, _lie_about_length, _lie_inside, _change_flags, _insert,
    _insert, _change_greeting,
)  # fmt: skip
