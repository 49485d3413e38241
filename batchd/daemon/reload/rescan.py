"""Reads and scans the configuration again for a running daemon. RESCAN, a process of the daemon.

    daemon   --- request (JSON, stdin) --->  python -m batchd.daemon.reload.rescan CHANNEL_FD
             <-- ScanProgressed ---------   now and then, while the scan makes progress
             <-- ChildLogged -----------   each log line, which the daemon writes into its own log
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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil, floor
from pathlib import Path
from threading import Thread
from time import monotonic

from batchd.config.load import read_config
from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig, Mark, keys_marked
from batchd.daemon.config_checks import check_reading
from batchd.daemon.identity import look_up, named_in
from batchd.daemon.reload import messages
from batchd.data.pipeline.cache_split import KINDS_OF_FACTS
from batchd.data.sources.composed.options import sources_in
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, ConfigInvalid, ExitCode, MemoryTooSmall, ProblemKind
from batchd.runtime import __version__, failpoints
from batchd.runtime.available import available_bytes, shortage
from batchd.runtime.child_log import log_over
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.plain import from_plain, to_plain
from batchd.runtime.sizes import round_bytes
from batchd.stream.access import access_of_roots
from batchd.stream.rings import RingSize, plan_descriptors
from batchd.stream.served import ServedStream, open_stream
from batchd_wire.channel import ChannelClosed, send_message

PROGRESS_EVERY_S = 0.5
LOOK_MAX_S = 10
"""More than ``CHECK_LIMITS`` allow for a stream."""


class ScanProgress:
    """Tells the daemon what begins, and now and then how far it is."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._patience_s = messages.SILENCE_MAX_S
        self._told_s = float("-inf")

    def begun(self, stream: str, may_take_s: float) -> None:
        """Report that a scan or, "", checks begin, and how long a library may be silent."""
        self._patience_s = messages.SILENCE_MAX_S + ceil(may_take_s)
        self._tell(stream, 0)

    def found(self, stream: str, samples: int) -> None:
        """Report the samples of a stream found so far."""
        if monotonic() - self._told_s >= PROGRESS_EVERY_S:
            self._tell(stream, samples)

    def _tell(self, stream: str, samples: int) -> None:
        self._told_s = monotonic()
        send_message(self._channel, messages.ScanProgressed(stream, samples, self._patience_s))


def main() -> int:
    """Do one request; the exit status."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        Thread(target=_end_with_daemon, args=(channel,), daemon=True).start()
        log_over(partial(send_message, channel))
        try:
            document = _do(json.load(sys.stdin), channel)
        except BatchdError as error:
            document = messages.ReloadDocument(exit_code=int(error.exit_code), problem=str(error))
        except OSError as error:
            text = f"the new configuration cannot be loaded: {error}"
            document = messages.ReloadDocument(exit_code=int(ExitCode.FAILED), problem=text)
        try:
            _send_document(channel, document)
        except ChannelClosed:
            return 1
    return 0


def _end_with_daemon(channel: socket.socket) -> None:
    """End with the daemon: its only message is the end of file, or a reset if some are unread."""
    try:
        channel.recv(1)
    except ConnectionResetError:
        pass
    except OSError:  # the request was done, and the channel closed, before this thread began
        return
    os._exit(1)


def _do(plain: dict[str, object], channel: socket.socket) -> messages.ReloadDocument:
    if plain["version"] != __version__:  # the requests of other versions are not known
        raise BatchdError(
            f"batchd {__version__} is installed, and the daemon that runs is {plain['version']}: restart it, since it can start "
            "no workers of its own version any more"
        )
    request: messages.ReloadRequest = from_plain(messages.ReloadRequest, plain)
    failpoints.passing("rescan.starting")
    # this process ends with its request, and its connections with it
    storage = Storage(CHECK_LIMITS)
    file = Path(request.file)
    reading = read_config(file, request.overrides)
    progress = ScanProgress(channel)
    progress.begun("", LOOK_MAX_S * (len(reading.config.streams) if reading.config is not None else 0))
    config, rings = check_reading(reading, file, storage)
    storage.limits, storage.encloses = config.daemon.storage_limits(), config.daemon.encloses
    storage.forks_scans = True
    now = DaemonConfig.model_validate_json(json.dumps(request.daemon))
    streams = _scan(config, rings, now, storage, progress)
    same = [name for name, stream in streams.items() if request.signatures.get(name) == stream.facts.signature]
    rings |= {name: replace(rings[name], slots_max=request.slots[name]) for name in same}
    live = keys_marked(Mark.LIVE, DaemonConfig)
    restart = [
        key for key in DaemonConfig.model_fields if key not in live and getattr(config.daemon, key) != getattr(now, key)
    ]
    made_bytes = request.made_bytes + sum(stream.facts.mailbox_bytes for stream in streams.values())
    specs = [stream.facts.cache for stream in streams.values()]
    caches = {
        spec.key: spec for spec in specs if spec is not None and not spec.folder and spec.kind not in KINDS_OF_FACTS
    }
    caches_bytes = sum(spec.budget_bytes - request.cached_bytes.get(key, 0) for key, spec in caches.items())
    kept_bytes = sum(rings[name].ring_bytes for name in same)
    after = now.model_copy(update={key: getattr(config.daemon, key) for key in ("memory", "define")})
    limit_bytes = after.rings_bytes
    if limit_bytes < kept_bytes:
        restart += [key for key in ("memory", "define") if getattr(after, key) != getattr(now, key)]
        limit_bytes = now.rings_bytes
    others = [name for name in rings if name not in same]
    problem = _memory_problem(rings, kept_bytes, others, limit_bytes, made_bytes - caches_bytes)
    if problem is not None:
        raise MemoryTooSmall(
            reading.located([problem_at(("daemon", "memory"), ProblemKind.MEMORY_TOO_SMALL, problem)]), str(file)
        )
    define = {"define": now.define} if "define" in restart else {}
    named = config.daemon.model_copy(update=define)
    plan = plan_descriptors(config, rings)
    refusal = plan.refusal(len(rings))
    if refusal is not None:
        raise ConfigInvalid(reading.located([refusal]), str(file))
    for name, stream in streams.items():
        if name not in same:
            failpoints.passing("rescan.sending")
            mailbox = [stream.mailbox.writable] if stream.mailbox is not None else []
            send_message(channel, messages.StreamScanned(name), [stream.index_descriptor, *mailbox])
    daemon = config.daemon.model_dump(mode="json")
    return messages.ReloadDocument(
        daemon={key: daemon[key] for key in live if key not in restart},
        workers=config.daemon.worker_count(),
        storage=config.daemon.storage_limits(),
        restart=restart,
        numbers=look_up(name for _key, name in named_in(named)),
        roots=access_of_roots(named),
        reserved=plan.reserved,
        same=same,
        streams={name: stream.facts.to_wire() for name, stream in streams.items() if name not in same},
    )


def _scan(
    config: Config, rings: Mapping[str, RingSize], now: DaemonConfig, storage: Storage, progress: ScanProgress
) -> dict[str, ServedStream]:
    index_cache = IndexCache(now.cache_dir or default_cache_dir())
    request_s = storage.limits.timeout_s * (1 + storage.limits.retries)
    streams = {}
    for name, stream in config.streams.items():
        sources = [source for _key, source in sources_in(stream.source)]
        timeouts_s = [getattr(one, key, 0.0) for one in sources for key in ("length_timeout_s", "scan_timeout_s")]
        progress.begun(name, request_s + max(timeouts_s))
        failpoints.passing("rescan.scanning")
        found = partial(progress.found, name)
        streams[name] = open_stream(0, name, config, rings[name], storage, index_cache, found)
    return streams


def _memory_problem(
    rings: Mapping[str, RingSize], kept_bytes: int, others: list[str], limit_bytes: int, made_bytes: int
) -> str | None:
    """Say why the ``others`` of the rings do not fit beside those that stay.

    ``made_bytes``: the part of the needed memory that the rings have already, including replaced
    ones, less what caches may still take.
    """
    need_bytes = sum(rings[name].ring_bytes for name in others)
    if kept_bytes + need_bytes > limit_bytes:
        return (
            f"need {round_bytes(need_bytes, ceil)} for {', '.join(others)}, have {round_bytes(limit_bytes - kept_bytes, floor)} "
            f"beside the {round_bytes(kept_bytes, ceil)} of the streams that stay as they are: set memory = in "
            f"[streams.{others[0]}] to less, raise memory in [daemon], or restart the daemon, which divides it again"
        )
    return shortage(max(0, kept_bytes + need_bytes - made_bytes), available_bytes()) if others else None


def _send_document(channel: socket.socket, document: messages.ReloadDocument) -> None:
    data = json.dumps(to_plain(document)).encode("ascii")
    with os.fdopen(os.memfd_create("batchd-rescan", os.MFD_CLOEXEC), "w+b") as memory:
        memory.write(data)
        memory.seek(0)  # the daemon reads on where this file is
        send_message(channel, messages.ConfigRead(len(data)), (memory.fileno(),))
    failpoints.passing("rescan.sent")


if __name__ == "__main__":
    sys.exit(main())
