"""Push samples into a live stream, across restarts of the daemon. Runs in the producer.

    put:  have a place?  -- no --> ask for one, and wait (or the daemon drops the sample)
               |
               +-- yes --> write the sample -- Pushed --> PushTaken: in the queue, even if we exit

The daemon never reads a sample: it lends places to producers, and workers read what is in them.

Invariant: this writes into a place only between the daemon's ``PlaceLent`` and its own ``Pushed``.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from batchd_client import errors
from batchd_client.connection import Connection, Deadlines
from batchd_client.discovery import find_daemon, find_name, find_reconnect_timeout
from batchd_client.lifeline import SessionLost
from batchd_client.opening import Target
from batchd_client.session import Session
from batchd_client.sockets import Sockets
from batchd_wire.mailbox import BYTES_KINDS, MailColumn, PlaceLayout, place_layout_from_wire
from batchd_wire.messages import AskPlace, PlaceLent, Produce, Producing, Pushed, PushTaken, WithdrawAsk
from batchd_wire.views import Array

ANSWER_S = 0.05
"""Shortest wait of a put: the daemon's time to answer that there is room."""
ASK_AGAIN_S = 1.0
"""Interval of a waiting producer's requests: they detect a daemon that lost the session."""

SHOWN_MAX = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """Totals of one producer.

    ``pushed``: samples put into the queue. ``dropped``: samples dropped because the mailbox was
    full (``when_full = "drop_newest"``). ``unconfirmed``: those of ``pushed`` during which the
    daemon was lost, perhaps with the sample. ``wait_s``: seconds spent waiting for room.
    """

    pushed: int
    dropped: int
    unconfirmed: int
    wait_s: float


class _MailboxTerms(NamedTuple):
    stream: int
    capacity: int
    layout: PlaceLayout


def push(  # noqa: PLR0913  options of a connection, each by name
    stream: str,
    address: str | None = None,
    *,
    connect_timeout_s: float = 10.0,
    reconnect_timeout_s: float | None = None,
    put_timeout_s: float = 300.0,
    name: str | None = None,
) -> "Producer":
    """Connect to the daemon on this host, to push samples into ``stream``: one of type "push".

    ``address``: the daemon's runtime directory, as in ``ipc:///run/batchd``; default: as for
    ``connect``, which has ``name``, too. ``put_timeout_s``: how long ``put`` waits for room.
    ``reconnect_timeout_s``: how long a daemon may be away meanwhile; default: as for ``connect``.
    All in seconds.

    Raises ``StreamUnknown``, ``StreamNotLive``, ``PushNotLocal``, and what ``connect`` raises.
    """
    sockets = Sockets(1)
    connection = None
    try:
        target_at = partial(Target, sockets, find_name(name, os.environ))
        target, session = find_daemon(target_at, address, connect_timeout_s, not_local=errors.PushNotLocal)
        reconnect_s = find_reconnect_timeout(reconnect_timeout_s, target.place)
        connection = Connection(target, session, Deadlines(connect_timeout_s, reconnect_s, put_timeout_s))
    finally:
        if connection is None:
            sockets.destroy()
    return Producer(connection, stream)


class Producer(errors.NotCopyable):
    """A connection that pushes samples into one stream; ``push`` makes it.

    Use it in a ``with``, or close it. One thread at a time may put samples. A producer belongs to
    the process that made it: after a fork, make another one.
    """

    COPY_ADVICE = "a connection is its program's own; make another with batchd_client.push(...)"

    def __init__(self, connection: Connection, stream: str) -> None:
        """Register as a producer; if the daemon refuses, close the connection."""
        self._connection = connection
        self._name = stream
        self._session: Session | None = None
        self._terms: _MailboxTerms | None = None
        self._place: int | None = None
        self._closed = False
        self._pushed = self._dropped = self._unconfirmed = 0
        self._wait_s = 0.0
        with ExitStack() as on_failure:
            on_failure.callback(connection.close)
            connection.run(self._introduce)
            on_failure.pop_all()

    @property
    def name(self) -> str:
        """The stream's name in the daemon's configuration."""
        return self._name

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields of a sample: names, and types in the configuration's notation."""
        return MappingProxyType({column.name: column.text for column in self._layout.columns})

    @property
    def capacity(self) -> int:
        """Number of samples that the stream's mailbox holds."""
        assert self._terms is not None
        return self._terms.capacity

    def put(self, sample: Mapping[str, object], timeout_s: float | None = None) -> bool:
        """Push one sample: a value for each of ``fields``.

        Arrays must have exactly the field's dtype and shape; numbers must fit it. An "image" is
        ``bytes``, a "text" is ``str``. Returns True once the sample is in the queue: it stays there
        even if this program ends. Returns False if it was dropped because the mailbox is full, by
        the stream's ``when_full``. With ``"block"`` this waits for room, up to ``timeout_s``
        seconds (default: ``push(put_timeout_s=)``). A put that a signal interrupts may have pushed
        its sample.

        Raises ``SampleInvalid``, ``PushTimeout``, ``ReconnectTimeout``, ``StreamStopped``,
        ``StreamChanged``, ``ProducerClosed``.
        """
        if self._closed:
            raise errors.ProducerClosed(f"the producer of stream {self._name!r} has been closed")
        values, lengths = pack_sample(self._layout, sample)
        limit_s = self._connection.deadlines.batch_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + max(limit_s, ANSWER_S)
        attempt = partial(self._attempt, deadline=deadline, values=values, lengths=lengths)
        while (is_pushed := self._connection.run(attempt)) is None:
            pass
        return is_pushed

    def statistics(self) -> ProducerStatistics:
        """Return the totals so far, as a frozen value."""
        return ProducerStatistics(self._pushed, self._dropped, self._unconfirmed, self._wait_s)

    def close(self) -> None:
        """Close the connection. Pushed samples stay. Closing twice does nothing."""
        self._closed = True
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Producer {self._name} pushed={self._pushed}{' [closed]' if self._closed else ''}>"

    @property
    def _layout(self) -> PlaceLayout:
        assert self._terms is not None
        return self._terms.layout

    # --- each of these has the session to itself --------------------------------------------------

    def _introduce(self, session: Session) -> _MailboxTerms:
        """Register as a producer in this session, once."""
        if session is self._session and self._terms is not None:
            return self._terms
        deadline = self._connection.deadlines.request_deadline()
        mailbox = session.request(lambda request: Produce(request, self._name), Producing, deadline)
        try:
            layout = place_layout_from_wire(mailbox.layout)
        except ValueError as error:
            raise errors.ProtocolError(f"the daemon describes its mailbox wrongly: {error}") from None
        if self._terms is not None and layout != self._terms.layout:
            raise errors.StreamChanged(f"the daemon has other fields for stream {self._name!r} now")
        if session.mailbox(mailbox.stream).mailbox_bytes != mailbox.capacity * layout.place_bytes:
            raise errors.ProtocolError(f"the mailbox of stream {self._name!r} is not {mailbox.capacity} places long")
        self._terms = _MailboxTerms(mailbox.stream, mailbox.capacity, layout)
        self._place = None  # the last session's place is void
        self._session = session
        return self._terms

    def _attempt(
        self, session: Session, deadline: float, values: list[tuple[int, memoryview]], lengths: bytes
    ) -> bool | None:
        """Push a sample: True if taken, False if dropped, None if there is no room yet."""
        session.check_link()  # a place lent by a daemon that is gone is void
        terms = self._introduce(session)
        if not self._has_place(session, terms, deadline):
            return None
        if self._place is None:
            self._dropped += 1
            return False
        if not self._hand_in(session, terms, self._place, values, lengths):
            return None
        self._pushed += 1
        return True

    def _has_place(self, session: Session, terms: _MailboxTerms, deadline: float) -> bool:
        """Ask for a place. True once the daemon lent one, or has none for this sample."""
        if self._place is not None:
            return True
        begun_s = time.monotonic()
        try:
            answer = session.request(
                lambda request: AskPlace(request, terms.stream), PlaceLent, min(deadline, begun_s + ASK_AGAIN_S)
            )
        except errors.StreamReplaced:
            self._leave(session, terms)
            return False
        except errors.ConnectTimeout:
            if time.monotonic() < deadline:
                return False
            session.send(WithdrawAsk(terms.stream))
            raise errors.PushTimeout(
                f"no place of the {terms.capacity} in the mailbox of stream {self._name!r} became free in time"
            ) from None
        finally:
            self._wait_s += time.monotonic() - begun_s
        self._place = self._checked(answer.place, terms)
        return True

    def _hand_in(
        self, session: Session, terms: _MailboxTerms, place: int, values: list[tuple[int, memoryview]], lengths: bytes
    ) -> bool:
        """Write and report the sample; False if the stream has a new mailbox.

        If the session is lost meanwhile, the sample may be lost, too.
        """
        mailbox, start = session.mailbox(terms.stream), place * terms.layout.place_bytes
        mailbox.write(start, memoryview(lengths))
        for offset, value in values:
            mailbox.write(start + offset, value)
        self._place = None
        deadline = self._connection.deadlines.request_deadline()
        try:
            taken = session.request(lambda request: Pushed(request, terms.stream, place), PushTaken, deadline)
        except SessionLost:
            self._unconfirmed += 1
            return True
        except errors.StreamReplaced:
            self._leave(session, terms)
            return False
        self._place = self._checked(taken.next_place, terms)
        return True

    def _leave(self, session: Session, terms: _MailboxTerms) -> None:
        """Forget a mailbox that a reload replaced; the next attempt registers for the new one."""
        session.forget_mailbox(terms.stream)
        self._session = self._place = None

    def _checked(self, place: int | None, terms: _MailboxTerms) -> int | None:
        if place is not None and place >= terms.capacity:
            raise errors.ProtocolError(f"place {place} was lent of a mailbox that has {terms.capacity}")
        return place


def pack_sample(layout: PlaceLayout, sample: Mapping[str, object]) -> tuple[list[tuple[int, memoryview]], bytes]:
    """(offset, bytes) of each value, and the lengths before them. Raises ``SampleInvalid``."""
    names = [column.name for column in layout.columns]
    if not isinstance(sample, Mapping):
        raise errors.SampleInvalid(
            f"a sample has to be a dict with the fields {sorted(names)}, and is {_shown(sample)}"
        )
    if set(names) != set(sample):
        raise errors.SampleInvalid(
            f"the sample has the fields {sorted(map(str, sample))}, and has to have {sorted(names)}"
        )
    arrays = [_bytes_of(column, sample[column.name]) for column in layout.columns]
    shapes = zip(layout.columns, arrays, strict=True)
    lengths = [
        have for column, array in shapes for want, have in zip(column.shape, array.shape, strict=True) if want is None
    ]
    try:
        extents = layout.extents(lengths)
    except ValueError as error:
        raise errors.SampleInvalid(f"the sample is too large: {error}") from None
    values = [
        (extent.start, array.reshape(-1).view(np.uint8).data) for extent, array in zip(extents, arrays, strict=True)
    ]
    return values, layout.pack_lengths(lengths)


def _bytes_of(column: MailColumn, value: object) -> Array:
    """Convert to a C-contiguous array of the column's dtype and shape. Raises ``SampleInvalid``."""
    if column.kind in BYTES_KINDS:
        return np.frombuffer(_raw(column, value), np.uint8)
    dtype = np.dtype(column.kind)
    array = value if isinstance(value, np.ndarray) else _array_of(column, value, dtype)
    fits = len(array.shape) == len(column.shape) and all(
        want in (None, have) for want, have in zip(column.shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        raise errors.SampleInvalid(f"{column.name!r} is {array.dtype}{list(array.shape)}, and has to be {column.text}")
    return np.asarray(array, order="C")


def _array_of(column: MailColumn, value: object, dtype: np.dtype[np.generic]) -> Array:
    """Convert numbers or lists to ``dtype`` if it holds them exactly; ints may become floats."""
    try:
        made = np.asarray(value)
        if made.size and made.dtype.kind not in "biuf":
            raise TypeError("no numbers")
        array = made.astype(dtype)
    except (TypeError, ValueError, OverflowError):
        raise errors.SampleInvalid(f"{column.name!r} is {_shown(value)}, and has to be {column.text}") from None
    if dtype.kind != "f" and not np.array_equal(array, made):
        raise errors.SampleInvalid(
            f"{column.name!r} has to be {column.text}, which cannot hold {str(value)[:SHOWN_MAX]}"
        )
    return array


def _raw(column: MailColumn, value: Any) -> bytes | memoryview:
    if column.kind == "text" and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise errors.SampleInvalid(f"{column.name!r} has half a character in it, which no UTF-8 can hold") from None
    if column.kind == "image" and not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return memoryview(value).cast("B")
    wanted = "the bytes of an image file" if column.kind == "image" else "a str"
    raise errors.SampleInvalid(f"{column.name!r} is {_shown(value)}, and has to be {wanted}")


def _shown(value: object) -> str:
    text = repr(value)
    short = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    return short if value is None else f"{type(value).__name__} {short}"
