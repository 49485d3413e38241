"""The GATEWAY process, which only the daemon starts: worker hosts over TCP, rows into slots.

python -m batchd.pool.gateway ENDPOINT CONFIGURATION_KEY KEYS_DIRECTORY|"" CHANNEL_FD
"""

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from batchd.errors import BatchdError, ExitCode
from batchd.pool.gateway.loop import Gateway
from batchd.pool.messages import GatewayFailed, GatewayReady
from batchd.runtime import failpoints
from batchd.runtime.child_log import log_over
from batchd.runtime.keys import RoleKeys, open_keys
from batchd.runtime.tcp.router import check_context_threads
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, send_message


def main(arguments: list[str]) -> int:
    """Serve worker hosts until the daemon is gone; the exit status."""
    endpoint, key_path, keys_directory, channel_fd = arguments
    failpoints.passing("gateway.starting")
    with socket.socket(fileno=int(channel_fd)) as channel:
        channel.setblocking(False)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            keys = open_worker_keys(Path(keys_directory) if keys_directory else None)
            serve(endpoint, key_path, keys, channel)
        except ChannelClosed:
            return ExitCode.FINE
        except (BatchdError, OSError) as error:
            with suppress(ChannelClosed, BlockingIOError):  # the daemon sees the end
                send_message(channel, GatewayFailed(str(error)))
            return ExitCode.FAILED


def open_worker_keys(configured: Path | None) -> RoleKeys | None:
    """The keys of worker hosts; None if the daemon has no key: on loopback, as it has checked.

    Raises ``BatchdError``.
    """
    keys = open_keys(configured)
    return keys.workers if keys.daemon_key() is not None else None


def serve(endpoint: str, key_path: str, keys: RoleKeys | None, channel: socket.socket) -> NoReturn:
    """Serve until ``ChannelClosed``. Raises ``BatchdError`` (``key_path``) if it cannot listen."""
    check_context_threads()
    gateway = Gateway(channel, keys)
    try:
        log_over(gateway.tell)
        gateway.tell(GatewayReady(gateway.hosts.listen(endpoint, key_path)))
        gateway.run()
    finally:
        gateway.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
