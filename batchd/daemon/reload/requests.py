"""Reloads of the configuration while the daemon serves: SIGHUP, ``batchd reload``. DAEMON process.

    asked -> process of ``rescan`` -> document -> ``applier`` -> outcome: log, status, answers
                  |                      |  |
                  |                      |  +--- only dry runs asked: what it would change
                  +--- died -------------+--- problems: the old configuration stays; outcome: all
                  +--- silent for too long: killed, and the same

A request that arrives while a configuration is being read may mean a later version of it, so the
file is read once more afterwards, for all such requests.

A process that hangs in a system call survives its kill. The daemon does not wait for it: it is
reaped when the kernel reports its end, and the next one may begin before that.

Invariant: one process reads at a time; the loop never waits for one; each request is answered once.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time

import structlog

from batchd.daemon.manager import Service
from batchd.daemon.reload import messages
from batchd.daemon.reload.apply import Descriptors, ReloadApplier
from batchd.errors import ExitCode
from batchd.runtime import __version__, failpoints
from batchd.runtime.child_log import ChildLogged, write_line
from batchd.runtime.children import Child, start_linked
from batchd.runtime.plain import from_plain, to_plain
from batchd.runtime.poller import Poller
from batchd.runtime.slots import ADVICE
from batchd_wire.channel import ChannelClosed, receive_message
from batchd_wire.codec import TEXT_CHARACTERS_MAX, MalformedMessage, Message
from batchd_wire.messages import AskReload, Reloaded
from batchd_wire.record import frozen
from batchd_wire.status import ReloadOutcome

_log = structlog.get_logger()

NO_FILE = (
    "this daemon serves one script, which gave it its configuration and ends with it: end the script's `batchd.serve` and begin "
    "another one"
)
KEPT = "nothing has changed, since trainers would end"
NICENESS = 5
"""Of the reading process: workers and trainers have priority, from its first moment on."""
KILL_TIMEOUT_S = 2.0


@frozen
class Origin:
    """The configuration's file, and the ``--set`` overrides, to read it again."""

    file: Path
    overrides: Mapping[str, str]


@frozen
class _Asker:
    """A session whose request a reading answers; see ``AskReload``."""

    session: int
    request: int
    is_dry: bool
    keeps_trainers: bool


@dataclass(slots=True, eq=False)
class _Reading:
    """The process that reads, and what it has sent.

    ``heard_s``: when it sent its last message; after ``patience_s`` without one it hangs, as it
    said itself. ``stream``: which one it is scanning. ``problem``: why it is not listened to.
    """

    child: Child
    channel: socket.socket
    heard_s: float
    patience_s: int = messages.SILENCE_MAX_S
    stream: str = ""
    descriptors: Descriptors = field(default_factory=dict)
    document: messages.ReloadDocument | None = None
    problem: str = ""

    def close(self) -> None:
        """Close everything but the process, and descriptors that another part has taken."""
        self.channel.close()
        for descriptors in self.descriptors.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self.descriptors.clear()


@dataclass(slots=True)
class Reloader:
    """Runs reloads. ``send`` answers sessions. ``origin`` None: there is no file to read again."""

    poller: Poller
    applier: ReloadApplier
    origin: Origin | None
    send: Callable[[int, Message], None]
    service: Service
    outcome: ReloadOutcome | None = None
    _reading: _Reading | None = None
    _killed: list[_Reading] = field(default_factory=list)
    """Killed processes that have not ended yet."""
    _is_wanted: bool = False
    _is_over: bool = False
    _askers: list[_Asker] = field(default_factory=list)
    """Whom the present reading answers."""
    _later: list[_Asker] = field(default_factory=list)
    _is_signalled: bool = False
    """Whether a signal asked for the present reading."""
    _will_be_signalled: bool = False

    @property
    def is_reading(self) -> bool:
        """True while a configuration is being read."""
        return self._reading is not None

    def ask(self, session: int = 0, question: AskReload | None = None) -> None:
        """Read the configuration again, once that is possible; a session is answered then."""
        if question is None:
            self._will_be_signalled = True
        else:
            self._later.append(_Asker(session, question.request, question.is_dry, question.keeps_trainers))
        self._is_wanted = True
        if self._reading is None:
            self._begin()

    def round_ended(self) -> None:
        """Give up a reading without progress for too long; called after every message was read."""
        reading = self._reading
        if reading is None or (silent_s := monotonic() - reading.heard_s) <= reading.patience_s:
            return
        self._kill(reading)
        where = f"scanning stream {reading.stream!r}" if reading.stream else "reading the configuration"
        self._conclude(
            ExitCode.FAILED,
            f"{where} has made no progress for {silent_s:.0f} s, and was given up: is its storage hung? Bring it back, and "
            "reload again",
        )
        self._begin()

    def abandon(self) -> None:
        """The daemon is about to end: cancel reloads, and answer their sessions."""
        self._is_over = True
        reading = self._reading
        if reading is not None:
            self._kill(reading)
        if reading is not None or self._later:
            self._askers += self._later
            self._later = []
            self._conclude(ExitCode.FAILED, "the daemon is shutting down")

    def close(self) -> None:
        """End all processes, except one that the kernel does not let go."""
        self.abandon()
        for reading in list(self._killed):
            if not reading.child.has_ended(KILL_TIMEOUT_S):
                _log.error("reloading process cannot be killed", pid=reading.child.pid, advice="is its storage hung?")
            self._on_exit(reading)

    def _begin(self) -> None:
        if self._is_over or not self._is_wanted:
            return
        self._is_wanted = False
        self._askers, self._later = self._later, []
        self._is_signalled, self._will_be_signalled = self._will_be_signalled, False
        self.service.reloading()
        failpoints.passing("daemon.reloading")
        if self.origin is None:
            self._conclude(ExitCode.FAILED, NO_FILE)
            return
        try:
            reading = self._reading = self._start(self.origin)
        except OSError as error:
            self._conclude(ExitCode.FAILED, f"the process that reads the configuration cannot be started: {error}")
            return
        self.poller.watch(reading.channel.fileno(), lambda: self._receive(reading))
        self.poller.watch(reading.child.pidfd, lambda: self._end(reading))

    def _start(self, origin: Origin) -> _Reading:
        request = self.applier.request(__version__, str(origin.file), dict(origin.overrides))
        child, channel = start_linked(
            "batchd.daemon.reload.rescan",
            given=json.dumps(to_plain(request)).encode("ascii"),
            stdout=2,  # standard output is for the address
            nicer_by=NICENESS,
        )
        channel.setblocking(False)
        return _Reading(child, channel, monotonic())

    def _receive(self, reading: _Reading) -> None:
        """Take what the other process sends, until there is nothing."""
        try:
            while not reading.problem:
                message, descriptors = receive_message(reading.channel, messages.TO_DAEMON_FROM_RESCAN)
                reading.heard_s = monotonic()
                self._take(reading, message, descriptors)
        except BlockingIOError:
            return
        except ChannelClosed:
            self.poller.unwatch(reading.channel.fileno())
        except MalformedMessage as error:
            # The rest must not take effect without the content of this message.
            reading.problem = f"what it sent cannot be read ({error}). If there are no descriptors left: {ADVICE}"
            self.poller.unwatch(reading.channel.fileno())
            reading.child.kill()

    def _take(self, reading: _Reading, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, messages.ScanProgressed):
            reading.stream, reading.patience_s = message.name, message.patience_s
            if message.name:
                self.service.scanned(message.name, message.found)
        elif isinstance(message, ChildLogged):
            write_line(message)
        elif isinstance(message, messages.StreamScanned):
            reading.descriptors[message.name] = descriptors
        else:
            assert isinstance(message, messages.ConfigRead)
            (memory,) = descriptors
            with os.fdopen(memory, "rb") as document:
                reading.document = from_plain(messages.ReloadDocument, json.loads(document.read()))

    def _end(self, reading: _Reading) -> None:
        """The other process has ended: with a document, or without one."""
        self._receive(reading)
        self.poller.unwatch(reading.channel.fileno())
        status = self._forget(reading)
        self._reading = None
        failpoints.passing("daemon.reload.read")
        self._conclude(*self._apply(reading, status))
        reading.close()
        self._begin()

    def _apply(self, reading: _Reading, status: int | None) -> tuple[int, str]:
        """Put what was read into force; an exit code and the outcome for users."""
        document = reading.document
        if reading.problem or document is None:
            how = reading.problem or f"it ended without a word (status {status}); see the log"
            return ExitCode.FAILED, f"the process that reads the configuration failed: {how}"
        if document.exit_code:
            return document.exit_code, document.problem
        missing = sorted(document.streams.keys() - reading.descriptors.keys())
        if missing:
            return ExitCode.FAILED, f"the new configuration cannot be loaded: no index of {', '.join(missing)} arrived"
        try:
            changes = self.applier.changes(document)
            in_earnest = [asker for asker in self._askers if not asker.is_dry]
            if not in_earnest and not self._is_signalled:
                return ExitCode.FINE, changes.text
            if changes.ends and not self._is_signalled and all(asker.keeps_trainers for asker in in_earnest):
                return ExitCode.FAILED, f"{KEPT}:\n{changes.text}"
            self.applier.apply(document, reading.descriptors)
        except OSError as error:
            return ExitCode.FAILED, f"the new configuration cannot be loaded: {error}"
        changes.log()
        failpoints.passing("daemon.reloaded")
        return ExitCode.FINE, changes.text

    def _conclude(self, exit_code: int, text: str) -> None:
        """Log the outcome, and send it to every session that asked."""
        is_kept = text.startswith(KEPT)
        is_dry = bool(self._askers) and not self._is_signalled and all(asker.is_dry for asker in self._askers)
        # where trainers are kept, nothing is wrong with the file
        is_tried = not is_dry and not is_kept
        if exit_code and is_tried:
            _log.error("configuration not reloaded", reason=text, advice="the one before stays in force")
        shown = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 4]} ..."
        if is_tried:
            self.outcome = ReloadOutcome(time(), exit_code, shown)
        for asker in self._askers:
            self.send(asker.session, Reloaded(asker.request, exit_code, shown))
        self._askers.clear()
        outcome = "a dry run: nothing has changed" if is_dry else shown.partition("\n")[0].rstrip(":")
        self.service.reloaded(self.applier.workers_wanted, outcome)

    def _kill(self, reading: _Reading) -> None:
        """Kill a process and ignore it; it is reaped when it has ended."""
        self._reading = None
        for descriptor in (reading.channel.fileno(), reading.child.pidfd):
            self.poller.unwatch(descriptor)
        reading.child.kill()
        reading.close()
        self._killed.append(reading)
        self.poller.watch(reading.child.pidfd, lambda: self._on_exit(reading))

    def _on_exit(self, reading: _Reading) -> None:
        """A killed process has ended, or the daemon no longer waits for that."""
        self._killed.remove(reading)
        self._forget(reading)

    def _forget(self, reading: _Reading) -> int | None:
        """Stop watching a process; its exit status if it has ended."""
        self.poller.unwatch(reading.child.pidfd)
        return reading.child.end(kill_timeout_s=0.0)
