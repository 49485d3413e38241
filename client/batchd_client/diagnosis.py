"""Why is there no session over TCP? CURVE says nothing, so the greeting that comes before it is asked. Runs in the trainer.

resolve the name -> connect -> exchange ZMTP greetings (64 bytes, RFC 37) -> which mechanism does the daemon want?
"""

import socket

from batchd_client.errors import KeyRefused
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey
from batchd_wire.runtime import TcpAddress

GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(12, 32)
_OUR_FIRST_WORDS = _SIGNATURE + b"\x03"
"""So much of a greeting as makes the other side say the whole of its own. With the rest it would hang up on us instead, if it
wants another mechanism."""


def explain(address: TcpAddress, key: ConnectionKey | None, timeout_s: float, *, key_refused: bool) -> Exception:
    """Find out why there is no session: an ``OSError`` where trying again may help, else ``KeyRefused``."""
    if key_refused:
        assert key is not None
        return KeyRefused(
            f"the daemon at {address.address} does not know the key {key.name!r}: it was revoked, or made for another daemon"
        )
    try:
        mechanism = _mechanism(address, timeout_s)
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
    if mechanism is None:
        return OSError("something listens there, but it is no batchd daemon")
    if mechanism == "CURVE" and key is None:
        return KeyRefused(
            f"the daemon at {address.address} lets in who has a key, and none was given in ${KEY_VARIABLE} or connect(key=...)"
        )
    if mechanism == "NULL" and key is not None:
        return KeyRefused(
            f"the daemon at {address.address} has no keys, and a key was given: unset ${KEY_VARIABLE} if that is the right daemon"
        )
    if mechanism == "CURVE":
        return KeyRefused(
            f"the daemon at {address.address} has other keys than those for which {key.name if key else ''!r} was made"
        )
    return OSError("the connection was cut while it was made")


def _mechanism(address: TcpAddress, timeout_s: float) -> str | None:
    """What the other side wants for a handshake; None where it does not speak ZMTP."""
    with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
        connection.sendall(_OUR_FIRST_WORDS)
        greeting = b""
        while len(greeting) < GREETING_BYTES:
            try:
                part = connection.recv(GREETING_BYTES - len(greeting))
            except (TimeoutError, ConnectionResetError):
                return None
            if not part:
                return None
            greeting += part
    if greeting[0] != _SIGNATURE[0] or greeting[9] != _SIGNATURE[9]:
        return None
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
