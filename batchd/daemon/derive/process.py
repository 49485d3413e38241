"""Derives streams for a running daemon: other settings over one of its indexes. DERIVING process.

    daemon   --- DeriveStream + request, index --->  python -m batchd.daemon.derive.process FD
             --- DefineStream + request ---------->   a fork of it: ``define``
             <-- StreamDerived + facts, index -----   or the problems

What a trainer sends is read here and nowhere else, and steps are planned here, so the daemon's loop
does not wait for it, and a crash harms nobody. For a derived stream the source is not scanned: the
index is that of the stream in service, also where files have changed since. A stream that is
defined is worked out by a process of its own, with the rights of who asks. It takes requests until
its channel ends.

Invariant: it changes nothing, and its memory is limited.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from batchd.config.derive import Settings
from batchd.config.tree import MEMORY_BYTES_MIN, Config, DaemonConfig
from batchd.core.epochs import BOUNDS, FACT, STARTS, WEIGHTS
from batchd.daemon.derive.define import define, may_define
from batchd.daemon.derive.messages import (
    FROM_DERIVING,
    TO_DERIVING,
    DefineRequest,
    DefineStream,
    DeriveRequest,
    StreamDerived,
)
from batchd.data.sources.scan import ScanMemory
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem, ProblemKind, SourceInvalid, path_text
from batchd.runtime.child_log import log_over
from batchd.runtime.children import describe, die_with_parent, fork_linked
from batchd.runtime.plain import from_plain
from batchd.runtime.sizes import round_bytes
from batchd.stream.grouping import MeasureOptions, grouping_of
from batchd.stream.plan import StreamPlan, plan_stream
from batchd.stream.rings import DERIVED_SLOTS_MAX, plan_rings
from batchd.stream.served import ServedStream, stream_of
from batchd_wire.channel import ChannelClosed, receive_message, send_message

ANSWER_CHARACTERS_MAX = 4_000
END_MAX_S = 1.0
"""A fork that has closed its channel has so long to end by itself, which tells how."""


def main() -> int:
    """Answer requests until the daemon closes the channel; the exit status."""
    die_with_parent()  # also while a file system hangs
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        log_over(lambda _line: None)  # what it would say of a stream was said of the other one
        ScanMemory().bound()
        try:
            while True:
                message, descriptors = receive_message(channel, TO_DERIVING)
                if isinstance(message, DefineStream):
                    _define_apart(channel, *descriptors)
                else:
                    _answer(channel, *descriptors)
        except ChannelClosed:
            return 0


def _define_apart(channel: socket.socket, request: int) -> None:
    """Have a fork of this process work out a stream, and pass its answer on."""
    forked = fork_linked("batchd.daemon.derive.define")
    if isinstance(forked, socket.socket):
        channel.detach()  # the fork does not have it
        with forked, os.fdopen(request, "rb") as given:
            asked: DefineRequest = from_plain(DefineRequest, json.loads(given.read()))
            _answer_with(forked, partial(define, asked))
        sys.exit(0)
    os.close(request)
    with forked.channel:
        try:
            answer, descriptors = receive_message(forked.channel, FROM_DERIVING)
        except ChannelClosed:
            answer, descriptors = None, []
    status = forked.child.end(0.0 if answer is not None else END_MAX_S)
    if answer is None:
        how = "" if status is None else f": {describe(status)}"
        answer = StreamDerived(
            f"the process that works it out has ended{how}; a file is damaged, or it needs more memory"
        )
    send_message(channel, answer, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def _answer(channel: socket.socket, request: int, index: int) -> None:
    source = SourceIndex.owning(index)
    with os.fdopen(request, "rb") as given:
        asked: DeriveRequest = from_plain(DeriveRequest, json.loads(given.read()))
    _answer_with(channel, partial(derive, asked, source))


def _answer_with(channel: socket.socket, work_out: Callable[[], ServedStream]) -> None:
    with ExitStack() as stack:
        try:
            stream = work_out()
        except (BatchdError, OSError, MemoryError, RecursionError) as error:
            text = _said(error)
            send_message(channel, StreamDerived(text[:ANSWER_CHARACTERS_MAX]))
            return
        stack.callback(stream.close)
        facts = stack.enter_context(os.fdopen(os.memfd_create("batchd-derived", os.MFD_CLOEXEC), "w+b"))
        facts.write(json.dumps(stream.facts.to_wire()).encode("ascii"))
        facts.seek(0)  # the daemon reads on where this file is
        send_message(channel, StreamDerived(), (facts.fileno(), stream.index_descriptor))


def _said(error: BaseException) -> str:
    if isinstance(error, ConfigInvalid | MemoryTooSmall):
        return "; ".join(f"{problem.path}: {problem.message}" for problem in error.problems)
    if isinstance(error, RecursionError):
        return "tables or lists in one another too deep to read"
    if isinstance(error, MemoryError):
        return "it takes more memory than there is to work it out"
    return str(error)


def derive(asked: DeriveRequest, index: SourceIndex) -> ServedStream:
    """Derive a stream over the ``index`` of the other one. Raises ``BatchdError``, ``OSError``."""
    name, settings = asked.stream, Settings(asked.stream, asked.settings)
    daemon = DaemonConfig.model_validate_json(json.dumps(asked.daemon))
    rings_bytes = daemon.derived_bytes
    part_bytes = max(MEMORY_BYTES_MIN, rings_bytes // daemon.derive_max)
    before, stream = asked.configuration, {**asked.configuration, "memory": part_bytes}
    if not daemon.derive and not may_define(daemon.define, asked.identity):
        raise BatchdError(f"{asked.identity.owner} may derive no streams: it is not in who of [daemon.define]")
    whole = {
        "daemon": {**asked.daemon, "memory": rings_bytes, "derive": False, "define": None},
        "streams": {name: stream},
    }
    config = settings.config(whole)
    own_bytes = config.streams[name].memory or part_bytes
    if own_bytes > rings_bytes:
        text = f"all derived streams together have {round_bytes(rings_bytes)} (derive_memory in [daemon])"
        raise settings.located([Problem(path_text(("streams", name, "memory")), ProblemKind.MEMORY_TOO_SMALL, text)])
    former = Config.model_validate_json(json.dumps({"daemon": asked.daemon, "streams": {name: before}}))
    with Storage(CHECK_LIMITS) as storage:
        try:
            ring = plan_rings(config, storage)[name]
            ring = replace(ring, slots_max=min(ring.slots_max, DERIVED_SLOTS_MAX))
            storage.limits = daemon.storage_limits()
            old, new = (plan_stream(name, one.streams[name], ring.columns, daemon) for one in (former, config))
            _check(old, new, asked.modules, storage)
            served = stream_of(0, new, config, ring, storage, _of_source(index))
        except SourceInvalid as error:
            path, _colon, text = str(error).partition(": ")
            raise settings.located([Problem(path, ProblemKind.WRONG_VALUE, text)]) from None
        except (ConfigInvalid, MemoryTooSmall) as error:
            raise settings.located(list(error.problems)) from None
    facts = served.facts
    if facts.cache is not None and facts.cache.key not in asked.caches:
        message, spec = replace(facts.message, cache="off"), replace(facts.spec, shares_caches=False)
        served.facts = replace(facts, cache=None, message=message, spec=spec)
    return served


def _check(old: StreamPlan, new: StreamPlan, modules: Mapping[str, str], storage: Storage) -> None:
    """Refuse what takes a scan of the source, or other code. Raises ``SourceInvalid``."""
    table = path_text(("streams", new.name))
    if new.config.source.is_live:
        raise SourceInvalid(f'{table}: samples of type "{new.config.source.type}" come once, to one stream')
    pass_ = MeasureOptions(1, 1.0, storage, lambda _found: None)
    extended = [None if found is None else found.key for found in (grouping_of(plan, pass_) for plan in (old, new))]
    if extended[0] != extended[1]:
        what = '"pack"' if new.pack is not None or old.pack is not None else "bucket"
        raise SourceInvalid(
            f"{table}: {what} needs the sizes of all samples after these settings, and those that the daemon has are of the "
            "stream in the file: it is for the operator to add"
        )
    if any(modules.get(name) != digest for name, digest in new.code.digests.items()):
        raise SourceInvalid(f"{table}: the code of its functions has changed; have the operator reload the daemon")


def _of_source(index: SourceIndex) -> SourceIndex:
    """The index without the order of the other stream's epochs; of most it is the same memory."""
    if FACT not in index.facts:
        return index
    facts = {key: fact for key, fact in index.facts.items() if key != FACT}
    arrays = {name: array for name, array in index.arrays.items() if name not in {STARTS, BOUNDS, WEIGHTS}}
    return replace(index, facts=facts, arrays=arrays)


if __name__ == "__main__":
    sys.exit(main())
