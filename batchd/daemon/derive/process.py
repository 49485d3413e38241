"""Derives and defines streams for a running daemon. DERIVING process, and a fork for each of them.

    daemon   --- DeriveStream + request, index --->  python -m batchd.daemon.derive.process FD
             --- DefineStream + request ---------->     |             ^
                                                        v             | answer
                                                      fork: ``derive``, ``define``
             <-- StreamDerived + facts, index -----   or the problems

What a trainer sends is read in a fork and nowhere else, and steps are planned there, so the
daemon's loop does not wait for it, and a crash harms nobody. Several work beside one another; the
daemon chooses. For a derived stream the source is not scanned: the index is that of the stream in
service, also where files have changed since. For one that is defined it is, with the rights of who
asks, unless the same source was scanned for the same owner, and has not changed: ``known``. It
takes requests until its channel ends.

Invariant: it changes nothing, and the memory of each fork is limited. This process reads nothing
that a fork or a trainer has written.
"""

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import TypeAlias

from batchd.config.derive import Settings
from batchd.config.schema import path_keys
from batchd.config.tree import MEMORY_BYTES_MIN, Config, DaemonConfig
from batchd.core.epochs import BOUNDS, FACT, STARTS, WEIGHTS
from batchd.daemon.derive.define import define, may_define
from batchd.daemon.derive.known import KnownScan, KnownScans, OwnScans, owner_of
from batchd.daemon.derive.messages import (
    ANSWER_MAX_S,
    AT_ONCE_MAX,
    FROM_DERIVING,
    TO_DERIVING,
    DefineRequest,
    DefineStream,
    DeriveRequest,
    DeriveStream,
    StreamDerived,
)
from batchd.data.pipeline.options import STEP_KINDS, import_families
from batchd.data.samples.kinds import prepare_readers
from batchd.data.sources.interface import import_scan
from batchd.data.sources.options import SOURCE_KINDS
from batchd.data.sources.scan import ScanMemory
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem, ProblemKind, SourceInvalid, path_text
from batchd.runtime.child_log import log_over
from batchd.runtime.children import Child, describe, die_with_parent, fork_linked
from batchd.runtime.compiled import outdated_extension
from batchd.runtime.plain import from_plain
from batchd.runtime.poller import Poller
from batchd.runtime.sandbox import prepare as prepare_sandbox
from batchd.runtime.sizes import round_bytes
from batchd.stream.grouping import MeasureOptions, grouping_of
from batchd.stream.plan import StreamPlan, plan_stream
from batchd.stream.rings import DERIVED_SLOTS_MAX, plan_rings
from batchd.stream.served import ServedStream, stream_of
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage

ANSWER_CHARACTERS_MAX = 4_000
END_MAX_S = 1.0
"""A fork that has closed its channel has so long to end by itself, which tells how."""
HUNG_MAX = 16
"""Forks that were ended and are still there, as some storages hold them."""
LONG_CPU_S, LONG_NICER = 0.5, 14
"""After so much processor time a fork has the lowest priority."""
WITH_SCAN = 4
"""Descriptors of an answer with a scan that is to be kept."""
_WorkOut: TypeAlias = Callable[[ExitStack], tuple[StreamDerived, list[int]]]
"""Returns an answer with its descriptors, which are closed with the stack."""


def main() -> int:
    """Have requests worked out until the daemon closes the channel; the exit status."""
    die_with_parent()  # also while a file system hangs
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        log_over(lambda _line: None)  # what it would say of a stream was said of the other one
        _load_all()
        forks = _Forks(channel)
        with suppress(ChannelClosed):
            while True:
                forks.poller.wait()
        return 0


def _load_all() -> None:
    """Import and make what streams may need, so that no fork has to."""
    path_keys()
    outdated_extension()
    prepare_sandbox()
    prepare_readers(SOURCE_KINDS)
    prepare_readers(STEP_KINDS)
    import_families("effects")
    for kind in SOURCE_KINDS.values():
        if not kind.requires:  # those that many have not are large
            import_scan(kind)
    gc.collect()
    gc.freeze()  # a fork that looked at these objects would copy their memory


@dataclass(slots=True, eq=False)
class _Attempt:
    """A fork that works out a request. ``owner``: for whom its scan is kept.

    ``until_s``: when it is ended.
    """

    request: int
    owner: str
    child: Child
    channel: socket.socket
    until_s: float
    has_answered: bool = False


class _Forks:
    """The forks of this process. ``channel``: the daemon's."""

    def __init__(self, channel: socket.socket) -> None:
        self.poller = Poller()
        self._channel = channel
        self._known = KnownScans()
        self._forks: list[_Attempt] = []
        """Until they have ended."""
        self.poller.watch(channel.fileno(), self._receive)
        self.poller.at(lambda: min((fork.until_s for fork in self._forks), default=inf), self._end_late)

    def _receive(self) -> None:
        """Have a request worked out. Raises ``ChannelClosed``."""
        message, (request, *index) = receive_message(self._channel, TO_DERIVING)
        assert isinstance(message, DefineStream | DeriveStream)
        with os.fdopen(request, "rb") as given:
            plain = json.loads(given.read())
        try:
            if sum(fork.has_answered for fork in self._forks) >= HUNG_MAX:
                raise OSError(f"{HUNG_MAX} processes that worked out others do not end: is a storage hung?")
            if isinstance(message, DefineStream):
                asked: DefineRequest = from_plain(DefineRequest, plain)
                owner = owner_of(asked.identity)
                self._fork(message.request, owner, partial(_defined, asked, self._known.of(owner)))
            else:
                self._fork(message.request, "", partial(_derived, from_plain(DeriveRequest, plain), index[0]))
        except OSError as error:
            send_message(self._channel, StreamDerived(message.request, str(error)))
        for descriptor in index:
            os.close(descriptor)

    def _fork(self, request: int, owner: str, work_out: _WorkOut) -> None:
        """Have a fork work out a request. Raises ``OSError``."""
        forked = fork_linked("batchd.daemon.derive.define")
        if isinstance(forked, socket.socket):
            self._leave(owner)
            ScanMemory(AT_ONCE_MAX).bound()
            _give_way_when_long()
            with forked:
                _answer_with(forked, work_out)
            sys.exit(0)
        fork = _Attempt(request, owner, *forked, until_s=monotonic() + ANSWER_MAX_S)
        self._forks.append(fork)
        self.poller.watch(fork.channel.fileno(), lambda: self._pass_on(fork))
        self.poller.watch(fork.child.pidfd, lambda: self._reap(fork))

    def _leave(self, owner: str) -> None:
        """Close what is not for a fork, in the fork."""
        self._channel.detach()  # it is closed already
        self.poller.close()
        for fork in self._forks:
            fork.channel.close()
            fork.child.close()
        self._known.close(but=owner)

    def _pass_on(self, fork: _Attempt) -> None:
        """Pass an answer on. A fork that has closed its channel has so long to end by itself."""
        self.poller.unwatch(fork.channel.fileno())
        with fork.channel:
            try:
                answer, descriptors = receive_message(fork.channel, FROM_DERIVING)
            except (ChannelClosed, MalformedMessage):
                fork.until_s = monotonic() + END_MAX_S
                return
        assert isinstance(answer, StreamDerived)
        fork.child.kill()
        if answer.scan and len(descriptors) == WITH_SCAN:
            self._known.add(fork.owner, answer.scan, KnownScan(*descriptors[2:]))
            del descriptors[2:]
        self._answer(fork, replace(answer, request=fork.request, scan=""), descriptors)

    def _reap(self, fork: _Attempt) -> None:
        """A fork has ended."""
        if fork.channel.fileno() >= 0:
            self._pass_on(fork)
        self.poller.unwatch(fork.child.pidfd)
        self._forks.remove(fork)
        how = describe(fork.child.reap())
        if not fork.has_answered:
            text = f"the process that works it out has ended: {how}; a file is damaged, or it needs more memory"
            self._answer(fork, StreamDerived(fork.request, text))

    def _end_late(self) -> None:
        for fork in self._forks:
            if fork.until_s <= monotonic():
                fork.child.kill()
                fork.until_s = inf  # one that hangs in a storage may end later
                if fork.channel.fileno() >= 0:
                    self.poller.unwatch(fork.channel.fileno())
                    fork.channel.close()
                    text = f"it was not worked out within {ANSWER_MAX_S:.0f} s"
                    self._answer(fork, StreamDerived(fork.request, text))

    def _answer(self, fork: _Attempt, answer: StreamDerived, descriptors: Sequence[int] = ()) -> None:
        fork.has_answered, fork.until_s = True, inf
        send_message(self._channel, answer, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _defined(asked: DefineRequest, known: Mapping[str, KnownScan], stack: ExitStack) -> tuple[StreamDerived, list[int]]:
    """Work out a stream that is defined; its answer, with the scan that was made for it."""
    scans = OwnScans(known)
    stream, roots = define(asked, scans)
    stack.callback(stream.close)
    descriptors = [_facts(stream, stack), stream.index_descriptor]
    if (found := scans.found(stream.index_descriptor)) is None:
        return StreamDerived(roots=roots), descriptors
    key, scan = found
    stack.callback(scan.close)
    return StreamDerived(scan=key, roots=roots), [*descriptors, *scan]


def _derived(asked: DeriveRequest, index: int, stack: ExitStack) -> tuple[StreamDerived, list[int]]:
    """Work out a stream that is derived; its answer."""
    stream = derive(asked, SourceIndex.from_descriptor(index))
    stack.callback(stream.close)
    return StreamDerived(), [_facts(stream, stack), stream.index_descriptor]


def _facts(stream: ServedStream, stack: ExitStack) -> int:
    """The facts as JSON in memory."""
    facts = stack.enter_context(os.fdopen(os.memfd_create("batchd-derived", os.MFD_CLOEXEC), "w+b"))
    facts.write(json.dumps(stream.facts.to_wire()).encode("ascii"))
    facts.seek(0)  # the daemon reads on where this file is
    return facts.fileno()


def _answer_with(channel: socket.socket, work_out: _WorkOut) -> None:
    """Send what is worked out, or why it is not."""
    with ExitStack() as stack:
        try:
            answer, descriptors = work_out(stack)
        except (BatchdError, OSError, MemoryError, RecursionError) as error:
            answer, descriptors = StreamDerived(problem=_said(error)[:ANSWER_CHARACTERS_MAX]), []
        send_message(channel, answer, descriptors)


def _give_way_when_long() -> None:
    """Leave the processors to workers and trainers once it has taken long: a large scan."""
    signal.signal(signal.SIGPROF, lambda _signal, _frame: os.nice(LONG_NICER))
    signal.setitimer(signal.ITIMER_PROF, LONG_CPU_S)


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
