"""Why is there no session over TCP? CURVE says nothing, so the greeting that comes before it is asked. Runs in the trainer.

resolve the name -> connect -> exchange ZMTP greetings (64 bytes, RFC 37) -> which mechanism does the daemon want?
    -> CURVE, and a key is there: ``rehearsal``, to see where the handshake ends

Invariant: ``KeyRefused``, for which nobody tries again, needs a second connection that says the
same as the first; whatever a cut of the network may have been is an ``OSError``.
"""

import socket
import time

from batchd_client.errors import KeyRefused
from batchd_client.rehearsal import GREETING_BYTES, Rehearsal, rehearse
from batchd_client.sockets import Sockets
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey
from batchd_wire.runtime import TcpAddress

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(12, 32)
_OUR_FIRST_WORDS = _SIGNATURE + b"\x03"
"""So much of a greeting as makes the other side say the whole of its own. With the rest it would hang up on us instead, if it
wants another mechanism."""

_CUT = (
    "the connection was cut while it was made: by the network, or by a daemon that keeps this host out for some seconds"
)
_SILENT = "it took the connection, but did not answer in time: the daemon hangs, or has too much to do"


def unknown_key(address: TcpAddress, key: ConnectionKey) -> KeyRefused:
    """The daemon itself has said that it does not accept the key."""
    return KeyRefused(
        f"the daemon at {address.address} does not know the key {key.name!r}: it was revoked, or made for another daemon"
    )


def explain(
    sockets: Sockets,
    address: TcpAddress,
    key: ConnectionKey | None,
    timeout_s: float,
    *,
    timed_out: bool,
) -> Exception:
    """Find out why there is no session: an ``OSError`` where trying again may help, else ``KeyRefused``.

    ``timed_out``: the connection did not end, but there was no answer.
    """
    deadline = time.monotonic() + timeout_s
    try:
        mechanism = _mechanism(address, deadline)
        if mechanism == "CURVE" and key is not None:
            return _judge(rehearse(sockets, address, key, deadline), address, key, timed_out=timed_out)
    except socket.gaierror as error:
        return OSError(f"the host {address.host!r} is not known here ({error.strerror}): is the name right?")
    except ConnectionRefusedError:
        return OSError(
            f"the host answers, but nobody listens on port {address.port}: is the daemon running, with tcp = set?"
        )
    except TimeoutError:
        return OSError("no answer: the host is down or unreachable, or a firewall drops what is sent to the port")
    except OSError as error:
        return OSError(error.strerror or str(error))
    if mechanism == "CURVE":
        return KeyRefused(
            f"the daemon at {address.address} lets in who has a key, and none was given in ${KEY_VARIABLE} or connect(key=...)"
        )
    if mechanism == "NULL" and key is not None:
        return KeyRefused(
            f"the daemon at {address.address} has no keys, and a key was given: unset ${KEY_VARIABLE} if that is the right daemon"
        )
    return OSError(_SILENT if timed_out else _CUT)


def _judge(seen: Rehearsal, address: TcpAddress, key: ConnectionKey, *, timed_out: bool) -> Exception:
    if seen.hung_up and seen.heard_bytes == GREETING_BYTES and not timed_out:
        return KeyRefused(f"the daemon at {address.address} has other keys than those for which {key.name!r} was made")
    if seen.hung_up:
        return OSError(_CUT)
    if seen.has_welcome and not seen.has_verdict:
        return OSError("the daemon did not answer whether it knows the key: what answers for its keys hangs or is gone")
    return OSError(_SILENT if timed_out or not seen.has_verdict else _CUT)


def _mechanism(address: TcpAddress, deadline: float) -> str:
    """What the other side wants for a handshake. Raises ``OSError`` where it does not say."""
    with socket.create_connection((address.host, address.port), timeout=_left_s(deadline)) as connection:
        greeting = b""
        try:
            connection.sendall(_OUR_FIRST_WORDS)
            while len(greeting) < GREETING_BYTES:
                connection.settimeout(_left_s(deadline))
                part = connection.recv(GREETING_BYTES - len(greeting))
                if not part:
                    break
                greeting += part
        except TimeoutError:
            if not greeting:
                raise OSError("it took the connection but says nothing: stopped, hung, or no batchd daemon") from None
        except ConnectionError:
            pass  # it has hung up
    if not greeting:
        raise OSError(
            "something listens there and hangs up without a word: no batchd daemon, or one that keeps this host out for some "
            "seconds; its log says so"
        )
    ends = slice(None, len(_SIGNATURE), len(_SIGNATURE) - 1)
    if not _SIGNATURE[ends].startswith(greeting[ends]):
        raise OSError("something listens there, but it is no batchd daemon")
    if len(greeting) < GREETING_BYTES:
        raise OSError(_CUT)
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
