"""Who reads and who feeds which stream, for the log: one line when a trainer comes, one when it leaves. DAEMON process.

    admitted (an action of the core) -> "trainer subscribed" ... unsubscribed | session ended (an event) -> "trainer left"

Invariant: who came leaves once, whatever ends first; and no peer fills the disk by coming and
going.
"""

from dataclasses import dataclass
from typing import NamedTuple

import structlog

from batchd.core.actions import AdmitProducer, AdmitSubscription
from batchd.core.events import Event, SessionCutOff, SessionEnded, SubscriptionEnded
from batchd.daemon.log_limits import Ration

_log = structlog.get_logger()

SAID_PER_MINUTE = 240
"""About the trainers of one user, or of one host: a crowd of hundreds may come at once, but not again and again."""


@dataclass(frozen=True, slots=True)
class Guest:
    """Who is behind a session. ``peer`` is whom lines are rationed by: a user of this host, or another host."""

    name: str
    pid: int | None
    peer: str
    is_remote: bool = False


class _Entry(NamedTuple):
    guest: Guest
    stream: str


class Guestbook:
    """Is told who is admitted, and of every event."""

    def __init__(self) -> None:
        self._ration = Ration(SAID_PER_MINUTE)
        self._readers: dict[int, dict[int, _Entry]] = {}
        """By session, then by subscription."""
        self._producers: dict[int, dict[int, _Entry]] = {}
        """By session, then by stream."""

    def subscribed(self, action: AdmitSubscription, stream: str, guest: Guest) -> None:
        """A trainer reads a stream from now on."""
        course = action.course
        self._readers.setdefault(action.session, {})[action.subscription] = _Entry(guest, stream)
        speak = _log.info if self._ration.allows(guest.peer) else _log.debug
        speak(
            "trainer subscribed",
            stream=stream,
            name=guest.name,
            pid=guest.pid,
            session=action.session,
            rank=f"{course.rank} of {course.world_size}",
            epoch=course.epoch,
            step=course.base,
        )

    def produces(self, action: AdmitProducer, stream: str, guest: Guest) -> None:
        """A program pushes samples into a stream from now on; it may say so again."""
        streams = self._producers.setdefault(action.session, {})
        if action.stream in streams:
            return
        streams[action.stream] = _Entry(guest, stream)
        speak = _log.info if self._ration.allows(guest.peer) else _log.debug
        speak("producer came", stream=stream, name=guest.name, pid=guest.pid, session=action.session)

    def observe(self, event: Event) -> None:
        """Something happened; perhaps somebody leaves by it."""
        if isinstance(event, SubscriptionEnded):
            entry = self._readers.get(event.session, {}).pop(event.subscription, None)
            if entry is not None:
                self._leaves(event.session, entry, "it closed the stream")
        elif isinstance(event, SessionEnded | SessionCutOff):
            self._all_leave(event)

    def _all_leave(self, event: SessionEnded | SessionCutOff) -> None:
        for entry in self._readers.pop(event.session, {}).values():
            is_cut_off = isinstance(event, SessionCutOff) and not entry.guest.is_remote
            self._leaves(event.session, entry, "it was cut off" if is_cut_off else "its connection ended")
        for entry in self._producers.pop(event.session, {}).values():
            speak = _log.info if self._ration.allows(entry.guest.peer) else _log.debug
            speak(
                "producer left", stream=entry.stream, name=entry.guest.name, pid=entry.guest.pid, session=event.session
            )

    def _leaves(self, session: int, entry: _Entry, reason: str) -> None:
        guest = entry.guest
        speak = _log.info if self._ration.allows(guest.peer) else _log.debug
        speak("trainer left", stream=entry.stream, name=guest.name, pid=guest.pid, session=session, reason=reason)
