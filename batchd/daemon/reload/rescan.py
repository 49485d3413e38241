"""Reads and scans the configuration again for a running daemon. RESCAN, a process of the daemon.

    daemon   --- request (JSON, stdin) --->  python -m batchd.daemon.reload.rescan CHANNEL_FD
             <-- ScanProgressed ---------   now and then, while the scan makes progress
             <-- RescanLogged -----------   each log line, which the daemon writes into its own log
             <-- StreamScanned + index --   one for each stream that is new or has changed
             <-- ConfigRead + document --   the streams to serve, or all problems; then it ends

A scan may take minutes, and so may a validation take noticeable time; in a thread both would hold
the interpreter that serves trainers. Here they do not slow the daemon, and a crash harms only this
process.

Invariant: it changes nothing, and ends with its daemon.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, floor
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, NoReturn

import structlog

from batchd import __version__, failpoints
from batchd.config.directories import default_cache_dir
from batchd.config.load import LoadedConfig, read_config
from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig, Mark, keys_marked
from batchd.daemon.config_checks import check_reading
from batchd.daemon.memory.available import available_bytes, shortage
from batchd.daemon.memory.rings import RingSize, plan_descriptors
from batchd.daemon.streams import ServedStream, open_stream
from batchd.errors import BatchdError, ConfigInvalid, ExitCode, MemoryTooSmall
from batchd.orders.rescan import ConfigRead, RescanLogged, ScanProgressed, StreamScanned
from batchd.samples.sizes import round_bytes
from batchd.sources.composed.options import sources_in
from batchd.sources.options import SourceOptions
from batchd.sources.scan import scan_source
from batchd.storage.access import Storage
from batchd.storage.index import write_all
from batchd.storage.index_cache import IndexCache
from batchd.storage.values import CHECK_LIMITS
from batchd_wire.channel import ChannelClosed, send_message

PROGRESS_EVERY_S = 0.5
SILENCE_MAX_S = 300
"""Silence that is allowed beside that of libraries: a scan reports after some thousand samples, but
not while it checks whether a large former index is still valid."""
LOOK_MAX_S = 10
"""More than ``CHECK_LIMITS`` allow for a stream."""
FACT_CHARACTERS_MAX = 4_000
"""As the log has it."""


@dataclass(frozen=True, slots=True)
class ReloadRequest:
    """The streams in service, and where the configuration is.

    ``daemon``: [daemon] as it is in force. ``signatures``: of each stream that may continue
    unchanged, by name. ``slots`` (the most that a ring may have): of each stream by name.
    ``made_bytes``: memory of all their rings and mailboxes. ``cached_bytes``: memory of each of
    their caches, by its key.
    """

    version: str
    file: str
    overrides: dict[str, str]
    daemon: dict[str, Any]
    signatures: dict[str, str]
    slots: dict[str, int]
    made_bytes: int
    cached_bytes: dict[str, int]


class ScanProgress:
    """Tells the daemon how far it is: when something begins, and then now and then."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._patience_s = SILENCE_MAX_S
        self._told_s = float("-inf")

    def looking(self, streams: int) -> None:
        """Report that so many streams are being checked, without progress in between."""
        self._patience_s = SILENCE_MAX_S + LOOK_MAX_S * streams
        self._tell("", 0)

    def begun(self, stream: str, may_take_s: float) -> None:
        """Report that a scan begins. ``may_take_s``: seconds that a library may be silent."""
        self._patience_s = SILENCE_MAX_S + ceil(may_take_s)
        self._tell(stream, 0)

    def found(self, stream: str, samples: int) -> None:
        """Report the samples of a stream found so far."""
        if monotonic() - self._told_s >= PROGRESS_EVERY_S:
            self._tell(stream, samples)

    def _tell(self, stream: str, samples: int) -> None:
        self._told_s = monotonic()
        send_message(self._channel, ScanProgressed(stream, samples, self._patience_s))


def main() -> int:
    """Do one request; the exit status."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        Thread(target=_end_with_daemon, args=(channel,), daemon=True).start()
        structlog.configure(processors=[partial(_log_there, channel)])
        try:
            document = _do(_parse_request(json.load(sys.stdin)), channel)
        except BatchdError as error:
            document = {"exit_code": int(error.exit_code), "problem": str(error)}
        except OSError as error:
            document = {"exit_code": int(ExitCode.FAILED), "problem": f"what is new cannot be had: {error}"}
        try:
            _send_document(channel, document)
        except ChannelClosed:
            return 1
    return 0


def _end_with_daemon(channel: socket.socket) -> None:
    """End with the daemon: its only message is the end of file."""
    channel.recv(1)
    os._exit(1)


def _log_there(channel: socket.socket, _logger: object, level: str, event: MutableMapping[str, Any]) -> NoReturn:
    """A structlog processor: send the line to the daemon, which knows its log's form and level."""
    facts: dict[str, object] = {name: _printable(fact) for name, fact in event.items() if name != "event"}
    with suppress(ChannelClosed):
        send_message(channel, RescanLogged(level, _printable(event["event"]), facts))
    raise structlog.DropEvent


def _printable(fact: object) -> str:
    """A name of a file need not be text, and a message takes text alone."""
    return str(fact)[:FACT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()


def _parse_request(plain: dict[str, Any]) -> ReloadRequest:
    """The request of a daemon of our own version: no other's is known."""
    if plain["version"] != __version__:
        raise BatchdError(
            f"batchd {__version__} is installed, and the daemon that runs is {plain['version']}: restart it, since it can start "
            "no workers of its own version any more"
        )
    return ReloadRequest(**plain)


def _do(request: ReloadRequest, channel: socket.socket) -> dict[str, Any]:
    failpoints.passing("rescan.starting")
    storage = Storage(CHECK_LIMITS)  # this process ends with its request, and its connections with it
    file = Path(request.file)
    reading = read_config(file, request.overrides)
    progress = ScanProgress(channel)
    progress.looking(len(reading.config.streams) if reading.config is not None else 0)
    config, rings = check_reading(reading, file, storage)
    storage.limits = config.daemon.storage_limits()
    now = DaemonConfig.model_validate_json(json.dumps(request.daemon))
    streams = {name: _scan(name, config, rings[name], now, progress, storage) for name in config.streams}
    same = [name for name, stream in streams.items() if request.signatures.get(name) == stream.signature]
    rings |= {name: replace(rings[name], slots_max=request.slots[name]) for name in same}
    live = keys_marked(Mark.LIVE, DaemonConfig)
    restart = [
        key for key in DaemonConfig.model_fields if key not in live and getattr(config.daemon, key) != getattr(now, key)
    ]
    made_bytes = request.made_bytes + sum(stream.mailbox_bytes for stream in streams.values())
    specs = [stream.cache_spec for stream in streams.values()]
    caches = {spec.key: spec for spec in specs if spec is not None and not spec.folder}
    caches_bytes = sum(spec.budget_bytes - request.cached_bytes.get(key, 0) for key, spec in caches.items())
    restart += _check_memory(reading, file, config, now, rings, same, made_bytes - caches_bytes)
    reserved = _check_descriptors(reading, file, config, rings)
    for name, stream in streams.items():
        if name not in same:
            failpoints.passing("rescan.sending")
            send_message(channel, StreamScanned(name), _descriptors(stream))
    daemon = config.daemon.model_dump(mode="json")
    return {
        "exit_code": 0,
        "daemon": {key: daemon[key] for key in live if key not in restart},
        "workers": config.daemon.worker_count(),
        "storage": config.daemon.storage_limits(),
        "restart": restart,
        "reserved": reserved,
        "same": same,
        "streams": {name: _plain(stream) for name, stream in streams.items() if name not in same},
    }


def _scan(  # noqa: PLR0913, PLR0917  what is scanned, how, and the channel
    name: str, config: Config, ring: RingSize, now: DaemonConfig, progress: ScanProgress, storage: Storage
) -> ServedStream:
    limits = storage.limits
    progress.begun(name, limits.timeout_s * (1 + limits.retries) + _may_take_s(config.streams[name].source))
    failpoints.passing("rescan.scanning")
    python_path = config.daemon.python_path or ()
    cache = IndexCache(now.cache_dir or default_cache_dir())
    found = partial(progress.found, name)
    scan = partial(scan_source, progress=found, cache=cache, storage=storage, python_path=python_path)
    return open_stream(0, name, config.streams[name], ring, scan, limits, python_path=python_path)


def _may_take_s(whole: SourceOptions) -> float:
    """Seconds that a library or a function may be silent, by the source's own configuration."""
    limits = ("length_timeout_s", "scan_timeout_s")
    return max(getattr(source, name, 0.0) for _key, source in sources_in(whole) for name in limits)


def _check_memory(  # noqa: PLR0913, PLR0917  what is there, what shall be there, and what may be said of it
    reading: LoadedConfig,
    file: Path,
    config: Config,
    now: DaemonConfig,
    rings: Mapping[str, RingSize],
    same: list[str],
    made_bytes: int,
) -> list[str]:
    """Refuse rings that do not fit beside those that stay.

    Returns the keys of [daemon] that need a restart. ``made_bytes``: the part of the needed memory
    that the rings have already, including replaced ones, less what caches may still take.
    """
    kept_bytes = sum(rings[name].ring_bytes for name in same)
    others = [name for name in rings if name not in same]
    need_bytes = sum(rings[name].ring_bytes for name in others)
    is_too_little = config.daemon.memory < kept_bytes
    limit_bytes = now.memory if is_too_little else config.daemon.memory
    more_bytes = max(0, kept_bytes + need_bytes - made_bytes)
    problem = shortage(more_bytes, available_bytes()) if others else None
    if kept_bytes + need_bytes > limit_bytes:
        problem = (
            f"need {round_bytes(need_bytes, ceil)} for {', '.join(others)}, have {round_bytes(limit_bytes - kept_bytes, floor)} "
            f"beside the {round_bytes(kept_bytes, ceil)} of the streams that stay as they are: set memory = in "
            f"[streams.{others[0]}] to less, raise memory in [daemon], or restart the daemon, which divides it again"
        )
    if problem is not None:
        raise MemoryTooSmall(reading.located([problem_at(("daemon", "memory"), problem)]), str(file))
    return ["memory"] if is_too_little else []


def _check_descriptors(reading: LoadedConfig, file: Path, config: Config, rings: dict[str, RingSize]) -> int:
    """Number of slots for which the daemon holds descriptors."""
    plan = plan_descriptors(config, rings)
    refusal = plan.refusal(len(rings))
    if refusal is not None:
        raise ConfigInvalid(reading.located([refusal]), str(file))
    return plan.reserved


def _descriptors(stream: ServedStream) -> list[int]:
    """The index, and of a live stream the mailbox, to write."""
    return [stream.index_descriptor] + ([stream.mailbox.writable] if stream.mailbox is not None else [])


def _plain(stream: ServedStream) -> dict[str, Any]:
    """A stream as JSON has it; ``daemon.reload.apply`` reads it."""
    return {
        "spec": asdict(stream.spec),
        "message": asdict(stream.message),
        "signature": stream.signature,
        "classes": stream.classes,
        "place_layout": stream.place_layout,
        "mailbox_bytes": stream.mailbox_bytes,
        "cache": stream.cache_spec._asdict() if stream.cache_spec is not None else None,
    }


def _send_document(channel: socket.socket, document: dict[str, Any]) -> None:
    data = json.dumps(document).encode("ascii")
    memory = os.memfd_create("batchd-rescan", os.MFD_CLOEXEC)
    os.ftruncate(memory, len(data))
    write_all(memory, memoryview(data), 0)
    send_message(channel, ConfigRead(len(data)), (memory,))
    failpoints.passing("rescan.sent")


if __name__ == "__main__":
    sys.exit(main())
