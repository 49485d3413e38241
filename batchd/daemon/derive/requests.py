"""Streams that trainers derive (``daemon.stream(set=)``) or define. DAEMON process.

    subscription with settings -> known? ------------------------------> the core, by its name
                                  | no                                       ^
                                  +-> waits -> process -> facts, index -> added as a reload does

The same settings of the same stream are one derived stream, whoever asks. It is ``photos+1`` in the
status: no stream of the file can have such a name. It ends with the last session that asked for
it, or earlier if nobody reads it and another needs its room. If a reload changes or removes the
stream of the file, those derived from it go the same way; their trainers ask again.

A stream that is defined has a name of its own, and is read by its owner: the user or key that has
defined it, whoever of them asks. It ends so long after its last trainer as was asked for, or with
the key of its owner; and if a reload takes away what it was allowed by, so that its trainers ask
again, and are told why not.

One process has up to ``AT_ONCE_MAX`` requests worked out beside one another, those of the tenants
and owners first that have the fewest in hand; an owner has half of them at most. It is started
ahead, as its imports take a second.

Invariant: the loop reads no settings and waits for no process. The rings of all derived streams,
those that are ending included, fit into the part of the memory that is kept for them. What is the
same stream is worked out once.
"""

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil, floor, inf
from time import monotonic

import structlog

from batchd.config.tree import DefineConfig
from batchd.core.admission import Refusal, unknown_stream
from batchd.core.events import SubscriptionAsked
from batchd.daemon.derive.messages import (
    ANSWER_MAX_S,
    AT_ONCE_MAX,
    FROM_DERIVING,
    DefineRequest,
    DefineStream,
    DeriveRequest,
    DeriveStream,
    StreamDerived,
)
from batchd.daemon.derive.rings import DefinedStream, DerivedStream, Rings, Serving
from batchd.daemon.doors import Doors
from batchd.daemon.identity import Identity, Numbers, weights_of
from batchd.daemon.reload.apply import ReloadApplier, stream_from
from batchd.runtime import failpoints
from batchd.runtime.children import Child, start_linked
from batchd.runtime.limits import SESSION_LINES_PER_MINUTE, LinesPerMinute
from batchd.runtime.plain import to_plain
from batchd.runtime.poller import Poller
from batchd.runtime.sizes import round_bytes
from batchd.stream.rings import SLOTS_MIN
from batchd.stream.served import ServedStream
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import DEFINITION_BYTES_MAX, MalformedMessage
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import DERIVED_MARK, STREAM_NAME_PATTERN
from batchd_wire.messages import Refused

_log = structlog.get_logger()

OF_A_SESSION_MAX = 8
"""Derived streams of one session at a time."""
SILENCE_MAX_S = ANSWER_MAX_S + 10.0
"""A process that has not answered a request for so long hangs, and is ended."""
OF_AN_OWNER_MAX = AT_ONCE_MAX // 2
"""Requests of one owner that are worked out beside one another."""
NICENESS = 5
"""Of the process: workers and trainers have priority."""
KILL_TIMEOUT_S = 2.0
AHEAD_EVERY_S = 10.0
"""The process is started ahead at most so often: one may die at once, each time."""
SETTINGS_SHOWN_CHARACTERS = 300
_NAME = re.compile(STREAM_NAME_PATTERN, re.ASCII)
NOT_ALLOWED: Refusal = (
    ErrorCode.SETTINGS_REFUSED,
    "this daemon derives no streams; its operator may allow it with derive = true in [daemon], or add a stream to the file",
)
OF_FILE: Refusal = (
    ErrorCode.SETTINGS_REFUSED,
    "a derived stream has its settings; name the stream of the file, and set all keys that differ",
)


@dataclass(slots=True, eq=False)
class _Pending:
    """What waits, or is worked out ``since_s``. ``is_again``: a process has ended over it."""

    asked: SubscriptionAsked
    is_again: bool = False
    since_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The stream; all with the same one get the same."""
        return self.asked.stream, self.asked.settings


@dataclass(slots=True, eq=False)
class _DerivingProcess:
    """The process. ``in_hand``: what it has worked out, by number."""

    child: Child
    channel: socket.socket
    in_hand: dict[int, _Pending] = field(default_factory=dict)


class Deriver:
    """See the module. ``applier``: the running daemon, which a reload changes as well."""

    def __init__(self, poller: Poller, applier: ReloadApplier, doors: Doors) -> None:
        self._poller = poller
        self._applier = applier
        self._doors = doors
        self._rings = Rings(applier)
        self._rules = self._rules_now
        """Those by which they are served."""
        applier.applied = self._end_forbidden
        self._waiting: list[_Pending] = []
        """In the order in which they came."""
        self._numbers = count(1)
        self._process: _DerivingProcess | None = None
        self._killed: list[Child] = []
        """Those that have not ended yet."""
        self._ahead_s = -inf
        """When the process may be started ahead."""
        self._lines_per_minute = LinesPerMinute(SESSION_LINES_PER_MINUTE)

    def resolved(self, asked: SubscriptionAsked) -> SubscriptionAsked | None:
        """The event for the core, of the stream that is derived; None if that has to wait."""
        if asked.defines:
            return self._resolved_definition(asked)
        if not self.may_read(asked.session, asked.stream):
            owner = self._rings.defined[asked.stream].owner.owner
            self._refuse(asked, (ErrorCode.UNKNOWN_STREAM, f"stream {asked.stream!r} is one that {owner} has defined"))
            return None
        defined = self._rings.defined.get(asked.stream)
        if defined is not None and not asked.settings:
            return self._admitted(defined, asked)
        base = self._applier.state.numbers.get(asked.stream)
        if not asked.settings or base is None or self._applier.state.draining:
            return asked  # the core refuses unknown names
        self._forget_ended()
        known = self._rings.derived.get((base, asked.settings))
        if known is not None:
            return _of(known, asked)
        refusal = self._refusal(asked, base)
        if refusal is not None:
            self._refuse(asked, refusal)
            return None
        self._waiting.append(_Pending(asked))
        self._begin()
        return None

    @property
    def tenants(self) -> dict[int, str]:
        """Whose share the memory of each defined stream is of, by the stream's number."""
        return {stream.number: stream.tenant for stream in self._rings.defined.values()}

    def remove(self, session: int, name: str) -> Refusal | None:
        """End a defined stream, also one that is read; or why not."""
        stream = self._rings.defined.get(name)
        if stream is None:
            if name not in self._applier.state.numbers:
                return unknown_stream(name, self._applier.state.numbers)
            return ErrorCode.NOT_ALLOWED, f"nobody has defined stream {name!r}; the operator removes those of the file"
        if not self.may_read(session, name):
            text = f"{stream.owner.owner} has defined stream {name!r}; its owner may remove it, and root"
            return ErrorCode.NOT_ALLOWED, text
        self._end(stream)
        return None

    def may_read(self, session: int, stream: str) -> bool:
        """True but for what another user or key has defined."""
        defined, door = self._rings.defined.get(stream), self._doors.of(session)
        if defined is None or door is None:
            return True
        identity = door.identity(session)
        return identity.is_operator or (identity.is_proved and identity.is_same(defined.owner))

    def _resolved_definition(self, asked: SubscriptionAsked) -> SubscriptionAsked | None:
        """As ``resolved``, of a stream that is defined."""
        door, name = self._doors.of(asked.session), asked.stream
        identity = None if door is None else door.identity(asked.session)
        if self._applier.state.draining:
            return replace(asked, defines=b"")  # the core refuses it
        self._forget_ended()
        refusal = self._refusal_of_definition(asked, identity)
        if refusal is not None:
            self._refuse(asked, refusal)
            return None
        known = self._rings.defined.get(name)
        if known is not None and known.table == asked.defines:
            return self._admitted(known, self._of_defined(known, asked))
        self._waiting.append(_Pending(asked))
        self._begin()
        return None

    def _of_defined(self, stream: DefinedStream, asked: SubscriptionAsked) -> SubscriptionAsked:
        kept = stream.keep_s, asked.keep_s
        stream.keep_s = None if None in kept else max(kept)  # type: ignore[type-var]
        stream.table, stream.read_s = asked.defines, monotonic()
        return replace(asked, defines=b"")

    def _admitted(self, stream: DefinedStream, asked: SubscriptionAsked) -> SubscriptionAsked | None:
        """The event for the core, once the ring has room for a trainer; None if there is none."""
        served, known = self._applier.streams[stream.number], self._applier.state.streams.get(stream.number)
        slots = SLOTS_MIN + (0 if known is None else known.delivery.claims.promised)
        if self._rings.slots(stream.number) < slots <= served.spec.slots_max:
            refusal = self._make_room(asked, [], SLOTS_MIN * served.layout.slot_bytes, stream.tenant)
            if refusal is not None:
                self._refuse(asked, refusal)
                return None
            self._rings.size({stream.number: slots})
        return asked

    def _refusal_of_definition(self, asked: SubscriptionAsked, identity: Identity | None) -> Refusal | None:
        """Why a stream is not even worked out; None if it is."""
        rules, name = self._applier.daemon.define, asked.stream
        known = self._rings.defined.get(name)
        text = ""
        if rules is None or rules.what != "streams":
            text = (
                "this daemon serves the streams of its file alone; its operator may allow others: a table [daemon.define] with "
                'who = ["group:NAME"] and roots = ["/data"]'
            )
        elif identity is None or not identity.is_proved:
            text = (
                "the daemon cannot tell who asks: over TCP that takes a key, and on its host a user that is mapped into its user "
                "namespace"
            )
        elif len(asked.defines) > DEFINITION_BYTES_MAX:
            text = f"a table has at most {DEFINITION_BYTES_MAX} bytes, and this one {len(asked.defines)}"
        elif not _NAME.fullmatch(name):
            text = f'{name[:64]!r} is no name of a stream: 1 to 64 letters, digits, "_", "." and "-"'
        elif known is not None and not known.owner.is_same(identity):
            text = f"{known.owner.owner} has defined stream {name!r}; take another name"
        elif known is None and name in self._applier.state.numbers:
            text = f"{name!r} is a stream of the daemon's file; take another name"
        elif self._is_asking(asked.session):
            return ErrorCode.TOO_OFTEN, "a trainer may define one stream at a time"
        return (ErrorCode.DEFINITION_REFUSED, text) if text else None

    def tick(self) -> None:
        """End streams whose sessions are gone; start the process ahead, and end one that hangs."""
        self._forget_ended()
        self._end_unread()
        self._rings.share()
        for stream in list(self._rings.derived.values()):
            stream.sessions = {session for session in stream.sessions if self._doors.of(session) is not None}
            if not stream.sessions and self._rings.is_idle(stream):
                self._end(stream)
        process, now = self._process, monotonic()
        if process is not None and any(now - one.since_s > SILENCE_MAX_S for one in process.in_hand.values()):
            self._lose(process, f"it was not worked out within {SILENCE_MAX_S:.0f} s")
        elif process is None and monotonic() >= self._ahead_s and self._applier.daemon.derived_bytes:
            self._ahead_s = monotonic() + AHEAD_EVERY_S
            with suppress(OSError):  # the first request tries it again, and says why
                self._start()

    def _end_unread(self) -> None:
        """End defined streams that nobody has read for so long, and those of revoked keys."""
        now = monotonic()
        for stream in list(self._rings.defined.values()):
            if not self._rings.is_idle(stream):
                stream.read_s = now
            is_over = stream.keep_s is not None and now - stream.read_s > stream.keep_s
            if is_over or not all(door.is_valid(stream.owner) for door in self._doors):
                self._end(stream)

    def close(self) -> None:
        """End the process."""
        self._waiting.clear()
        if self._process is not None:
            self._stop(self._process)
        for child in list(self._killed):
            if not child.has_ended(KILL_TIMEOUT_S):
                _log.error("deriving process cannot be killed", pid=child.pid, advice="is a storage hung?")
            self._reap(child)

    # --- what may be ------------------------------------------------------------------------------

    def _refusal(self, asked: SubscriptionAsked, base: int) -> Refusal | None:
        """Why a stream is not even worked out; None if it is."""
        if not self._applier.daemon.derive and self._applier.daemon.define is None:
            return NOT_ALLOWED
        if base in self._applier.derived:
            return OF_FILE
        if self._is_asking(asked.session):
            return ErrorCode.TOO_OFTEN, "a trainer may ask for one derived stream at a time"
        room = self._in_the_way(asked)
        return None if isinstance(room, list) else room

    @property
    def _in_hand(self) -> list[_Pending]:
        return [] if self._process is None else list(self._process.in_hand.values())

    def _is_asking(self, session: int) -> bool:
        return any(one.asked.session == session for one in (*self._waiting, *self._in_hand))

    def _in_the_way(self, asked: SubscriptionAsked) -> list[Serving] | Refusal:
        """The idle streams that end for another one, so that they are not too many; or why not."""
        others = list(self._rings.derived.values())
        own = [stream for stream in others if asked.session in stream.sessions]
        ending: list[Serving] = []
        if len(own) >= OF_A_SESSION_MAX:
            ending += [stream for stream in own if self._rings.is_idle(stream)][:1]
            if not ending:
                text = f"this trainer reads {len(own)} derived streams, and one may have {OF_A_SESSION_MAX}; close one first"
                return ErrorCode.SETTINGS_REFUSED, text
        most = self._applier.daemon.derive_max
        if len(others) - len(ending) >= most:
            idle = [stream for stream in others if self._rings.is_idle(stream)][:1]
            if not idle:
                text = f"{len(others)} derived streams are read, and derive_max = {most} in [daemon]; close one first"
                return ErrorCode.SETTINGS_REFUSED, text
            ending += idle
        return ending

    def _own_in_the_way(self, owner: Identity, need_bytes: int) -> list[Serving] | Refusal:
        """As ``_in_the_way``, of those that the same user or key has defined."""
        daemon = self._applier.daemon
        assert daemon.define is not None, "else it was refused"
        rings = {number: one.ring_bytes for number, one in self._applier.streams.items()}
        own = [one for one in self._rings.defined.values() if one.owner.is_same(owner)]
        idle = sorted(
            (one for one in own if one.keep_s is not None and self._rings.is_idle(one)), key=lambda one: one.read_s
        )
        ending: list[Serving] = []
        while True:
            kept = [one for one in own if one not in ending]
            kept_bytes = sum(rings[one.number] for one in kept)
            if len(kept) < daemon.define.streams_max and kept_bytes + need_bytes <= daemon.defined_bytes:
                return ending
            if not idle:
                return ErrorCode.DEFINITION_REFUSED, (
                    f"{owner.owner} has defined {len(kept)} of up to {daemon.define.streams_max} streams (streams_max in "
                    f"[daemon.define]), with {round_bytes(kept_bytes, ceil)} of {round_bytes(daemon.defined_bytes, floor)} for "
                    f"rings (memory), and this one needs {round_bytes(need_bytes, ceil)}; close some, and remove what is kept: "
                    "`batchd streams remove NAME`"
                )
            ending.append(idle.pop(0))

    def _make_room(
        self, asked: SubscriptionAsked, ending: list[Serving], need_bytes: int, tenant: str = ""
    ) -> Refusal | None:
        """End idle streams for another one; why there is no room for it, or not yet.

        ``tenant``: whose part of the memory it takes, if the stream is defined.
        """
        idle = [one for one in self._rings.derived.values() if one not in ending and self._rings.is_idle(one)]
        while need_bytes > self._rings.left_bytes(ending, tenant)[0] and idle:
            ending.append(idle.pop(0))
        have_bytes, of = self._rings.left_bytes(ending, tenant)
        if need_bytes > have_bytes:
            return _code(asked), (
                f"need {round_bytes(need_bytes, ceil)} for its ring, have {round_bytes(have_bytes, floor)} beside {of}; close "
                "one, set memory to less, or have the operator raise derive_memory in [daemon]"
            )
        for one in ending:
            self._end(one)
        self._rings.share(need_bytes)
        if need_bytes > self._rings.free_bytes:
            return (
                ErrorCode.RING_BUSY,
                "rings of streams that have ended, or that get smaller, have their memory until batches are released",
            )
        return None

    @property
    def _rules_now(self) -> tuple[DefineConfig | None, Numbers]:
        return self._applier.daemon.define, self._applier.numbers

    def _end_forbidden(self) -> None:
        """End streams that a reload does not allow any more."""
        self._forget_ended()
        before, self._rules = self._rules, self._rules_now
        if self._rules != before:
            for stream in list(self._rings.defined.values()):
                if not self._is_allowed(stream, *self._rules):
                    self._end(stream, asks_again=True)

    def _is_allowed(self, stream: DefinedStream, rules: DefineConfig | None, numbers: Numbers) -> bool:
        """True if its owner may have what it is."""
        if rules is None or rules.what != "streams" or not {*stream.roots} <= {*rules.roots}:
            return False
        runs_code = bool(self._applier.streams[stream.number].message.recipe.modules)
        owner = stream.owner
        return (rules.code or not runs_code) and (owner.is_operator or owner.is_one_of(rules.who, numbers))

    def _forget_ended(self) -> None:
        """Forget streams that a reload has ended."""
        ended = [key for key, stream in self._rings.derived.items() if stream.number not in self._applier.derived]
        for key in ended:
            del self._rings.derived[key]
        for name in [
            name for name, stream in self._rings.defined.items() if stream.number not in self._applier.derived
        ]:
            del self._rings.defined[name]

    # --- the process ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Have requests worked out, as many as may be."""
        while (request := self._next()) is not None:
            self._waiting.remove(request)
            asked = request.asked
            base, door = self._applier.state.numbers.get(asked.stream), self._doors.of(asked.session)
            if door is None:
                continue
            identity = door.identity(asked.session)
            known = self._rings.defined.get(asked.stream)
            if asked.defines and known is not None:
                is_done = known.table == asked.defines or not known.owner.is_same(identity)
            else:
                is_done = not asked.defines and (base is None or (base, asked.settings) in self._rings.derived)
            if is_done:
                self._applier.enqueue(asked)
                continue
            try:
                process = self._process or self._start()
                number = next(self._numbers)
                if asked.defines:
                    self._send_definition(process, number, asked, identity)
                else:
                    assert base is not None, "it is known"
                    self._send(process, number, asked, identity, self._applier.streams[base])
            except OSError as error:
                self._refuse(asked, (_code(asked), f"the process that works it out failed: {error}"))
            else:
                process.in_hand[number], request.since_s = request, monotonic()

    def _next(self) -> _Pending | None:
        """The next one to be worked out, if there is room for one."""
        in_hand = self._in_hand
        if len(in_hand) >= AT_ONCE_MAX:
            return None
        keys = {one.key for one in in_hand}
        owners = Counter(one.asked.owner for one in in_hand)
        tenants = Counter(one.asked.tenant for one in in_hand)
        weights = dict(weights_of(self._applier.daemon))
        able = (one for one in self._waiting if one.key not in keys and owners[one.asked.owner] < OF_AN_OWNER_MAX)

        def turn(one: _Pending) -> tuple[float, int]:
            return tenants[one.asked.tenant] / weights.get(one.asked.tenant, 1.0), owners[one.asked.owner]

        return min(able, key=turn, default=None)

    def _start(self) -> _DerivingProcess:
        child, channel = start_linked("batchd.daemon.derive.process", stdout=2, nicer_by=NICENESS)
        channel.setblocking(False)
        process = self._process = _DerivingProcess(child, channel)
        self._poller.watch(channel.fileno(), lambda: self._receive(process))
        failpoints.passing("daemon.deriving")
        return process

    def _send_definition(
        self, process: _DerivingProcess, number: int, asked: SubscriptionAsked, identity: Identity
    ) -> None:
        """Send a request. Raises ``OSError``."""
        request = DefineRequest(
            daemon=self._applier.daemon.model_dump(mode="json"),
            stream=asked.stream,
            table=asked.defines.decode(errors="replace"),
            identity=identity,
            modules={name: digest for name, (digest, _folders) in self._applier.imported.items()},
        )
        with _in_memory(request) as memory:
            send_message(process.channel, DefineStream(number), (memory,))

    def _send(
        self, process: _DerivingProcess, number: int, asked: SubscriptionAsked, identity: Identity, base: ServedStream
    ) -> None:
        """Send a request. Raises ``OSError``."""
        card = json.loads("".join(base.facts.card.configuration))
        caches = {one.cache.spec.key for one in self._applier.streams.values() if one.cache is not None}
        request = DeriveRequest(
            daemon=self._applier.daemon.model_dump(mode="json"),
            stream=base.name,
            configuration=card["streams"][base.name],
            modules=dict(base.message.recipe.modules),
            settings=asked.settings,
            caches=sorted(caches),
            identity=identity,
        )
        with _in_memory(request) as memory:
            send_message(process.channel, DeriveStream(number), (memory, base.index_descriptor))

    def _receive(self, process: _DerivingProcess) -> None:
        """Take the answer, or the end of the process."""
        try:
            answer, descriptors = receive_message(process.channel, FROM_DERIVING)
        except BlockingIOError:
            return
        except (ChannelClosed, MalformedMessage) as error:
            # it may have ended before it had a request, so each is tried once more
            again = {number: one for number, one in process.in_hand.items() if not one.is_again}
            for number in again:
                del process.in_hand[number]
            self._waiting[:0] = [replace(one, is_again=True) for one in again.values()]
            self._lose(process, f"the process that works it out failed: {error}")
            return
        assert isinstance(answer, StreamDerived)
        request = process.in_hand.pop(answer.request, None)
        if descriptors and request is not None:
            if request.asked.defines:
                self._define(request.asked, answer.roots, *descriptors)
            else:
                self._derive(request.asked, *descriptors)
        elif request is not None:
            self._refuse(request.asked, (_code(request.asked), answer.problem))
        self._begin()

    def _lose(self, process: _DerivingProcess, reason: str) -> None:
        """The process has ended, or shall: refuse what it has worked on."""
        self._stop(process)
        for request in process.in_hand.values():
            self._refuse(request.asked, (_code(request.asked), reason))
        self._begin()

    def _stop(self, process: _DerivingProcess) -> None:
        """Kill the process; it is reaped when it has ended."""
        self._process = None
        child = process.child
        self._poller.unwatch(process.channel.fileno())
        process.channel.close()
        child.kill()
        self._killed.append(child)
        self._poller.watch(child.pidfd, lambda: self._reap(child))

    def _reap(self, child: Child) -> None:
        """A killed process has ended, or the daemon no longer waits for that."""
        self._killed.remove(child)
        self._poller.unwatch(child.pidfd)
        child.end(kill_timeout_s=0.0)

    # --- streams ----------------------------------------------------------------------------------

    def _derive(self, asked: SubscriptionAsked, facts: int, index: int) -> None:
        """Serve what was worked out, and let the core have who asked."""
        with os.fdopen(facts, "rb") as document:
            plain = json.loads(document.read())
        base = self._applier.state.numbers.get(asked.stream)
        stream = stream_from(0, plain, [index])
        same = next((one for one in self._rings.derived.values() if self._is_same(one, base, stream)), None)
        if base is None or same is not None or self._doors.of(asked.session) is None:
            stream.close()
            self._applier.enqueue(asked if same is None else _of(same, asked))
            return
        ending = self._in_the_way(asked)
        refusal = self._make_room(asked, ending, stream.ring_bytes) if isinstance(ending, list) else ending
        if refusal is not None:
            stream.close()
            self._refuse(asked, refusal)
            return
        taken = {one.name for one in self._rings.derived.values()}
        name = next(name for number in count(1) if (name := f"{asked.stream}{DERIVED_MARK}{number}") not in taken)
        try:
            number = self._applier.add(stream, name, base, asked.settings)
        except OSError as error:
            stream.close()
            self._refuse(asked, (ErrorCode.SETTINGS_REFUSED, f"there is no memory for it: {error}"))
            return
        derived = self._rings.derived[base, asked.settings] = DerivedStream(number, name, base)
        self._say("stream derived", asked.session, stream=name, settings=asked.settings[:SETTINGS_SHOWN_CHARACTERS])
        failpoints.passing("daemon.derived")
        self._applier.enqueue(_of(derived, asked))

    def _define(self, asked: SubscriptionAsked, roots: list[str], facts: int, index: int) -> None:
        """Serve what was worked out, and let the core have who asked."""
        with os.fdopen(facts, "rb") as document:
            plain = json.loads(document.read())
        stream, door = stream_from(0, plain, [index]), self._doors.of(asked.session)
        identity = None if door is None else door.identity(asked.session)
        refusal = self._refusal_of_definition(asked, identity)
        known = self._rings.defined.get(asked.stream)
        if refusal is None and known is not None and self._has_content(known.number, stream):
            stream.close()
            self._applier.enqueue(self._of_defined(known, asked))
            return
        if refusal is None and identity is not None:
            refusal = self._serve_defined(asked, identity, stream, roots)
        if refusal is not None:
            self._refuse(asked, refusal)
        if refusal is not None or identity is None:
            stream.close()

    def _serve_defined(
        self, asked: SubscriptionAsked, identity: Identity, stream: ServedStream, roots: list[str]
    ) -> Refusal | None:
        """Take a stream into service, if there is room; or why not."""
        name, owner = asked.stream, identity.owner
        before = self._rings.defined.get(name)
        if before is not None and not self._rings.is_idle(before):
            text = f"you have defined stream {name!r} with another table, and it is read: take another name, or end its trainers"
            return ErrorCode.DEFINITION_REFUSED, text
        if before is not None:
            self._end(before)
        ending = self._own_in_the_way(identity, stream.ring_bytes)
        need_bytes = SLOTS_MIN * stream.layout.slot_bytes
        refusal = self._make_room(asked, ending, need_bytes, asked.tenant) if isinstance(ending, list) else ending
        if refusal is not None:
            return refusal
        slots = min(stream.spec.slots_max, self._rings.free_bytes // stream.layout.slot_bytes)
        try:
            number = self._applier.add(stream, name, 0, "", owner)
        except OSError as error:
            return ErrorCode.DEFINITION_REFUSED, f"there is no memory for it: {error}"
        defined = DefinedStream(number, name, identity, asked.tenant, asked.defines, asked.keep_s, monotonic(), roots)
        self._rings.defined[name] = defined
        self._rings.size({number: slots})
        self._say("stream defined", asked.session, stream=name, owner=owner)
        failpoints.passing("daemon.defined")
        self._applier.enqueue(self._of_defined(defined, asked))
        return None

    def _is_same(self, one: DerivedStream, base: int | None, stream: ServedStream) -> bool:
        return one.base == base and self._has_content(one.number, stream)

    def _has_content(self, number: int, stream: ServedStream) -> bool:
        return self._applier.streams[number].facts.signature == stream.facts.signature

    def _end(self, stream: Serving, *, asks_again: bool = False) -> None:
        """Serve it no more."""
        self._applier.remove(stream.number, asks_again=asks_again)
        self._forget_ended()
        if isinstance(stream, DefinedStream):
            self._say("defined stream ended", 0, stream=stream.name, owner=stream.owner.owner)
        else:
            self._say("derived stream ended", 0, stream=stream.name)

    def _say(self, text: str, session: int, **facts: str) -> None:
        peer = self._doors.peer(session)
        write = _log.info if self._lines_per_minute.allows("derived streams", peer.owner) else _log.debug
        write(text, name=peer.name, pid=peer.pid, **facts)

    def _refuse(self, asked: SubscriptionAsked, refusal: Refusal) -> None:
        self._doors.send(asked.session, Refused(asked.request, 0, *refusal))


@contextmanager
def _in_memory(request: DeriveRequest | DefineRequest) -> Iterator[int]:
    """A request as a file, until it is sent."""
    with os.fdopen(os.memfd_create("batchd-derive", os.MFD_CLOEXEC), "w+b") as memory:
        memory.write(json.dumps(to_plain(request)).encode("ascii"))
        memory.seek(0)  # the process reads on where this file is
        yield memory.fileno()


def _code(asked: SubscriptionAsked) -> ErrorCode:
    if asked.defines:
        return ErrorCode.DEFINITION_REFUSED
    return ErrorCode.SETTINGS_REFUSED if asked.settings else ErrorCode.RING_TOO_SMALL


def _of(stream: DerivedStream, asked: SubscriptionAsked) -> SubscriptionAsked:
    """The same subscription of a derived stream, by its name."""
    stream.sessions.add(asked.session)
    return replace(asked, stream=stream.name, settings="")
