"""The worker hosts, as the core sees them: what each may fill, and whether its rows can be trusted.

    opened --rows like a local worker's--> serving --an audit now and then--> serving
       |                                      |
       +-- other rows: the link is closed ----+-- rows bad that are good here: closed, in time

A link proves itself for each stream: a local worker fills rows, the link fills the same ones, and
the gateway compares the bytes. No version number says the same: processors with other instructions
decode with the same version to other bytes. Pure code.

Invariant: no row of a link is in a batch before ``PROOF_ROWS`` rows of its stream were equal,
unless the configuration accepts every worker host.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from batchd.core.actions import Action, EndLink, ReleaseLink, ReportServing
from batchd.core.fleet import Worker
from batchd.core.shares import Shares, host_key
from batchd_wire.record import frozen

PROOF_ROWS = 16
PROOFS_MAX = 64
"""Comparisons at a time: the gateway keeps the rows of each."""
DISAGREEMENTS_MAX = 3
DISAGREEMENT_ROWS = 100
"""So many disagreements within so many rows end a link."""


@frozen
class LinkRules:
    """How links are treated. ``audit``: the part of their orders that is compared again.

    ``accepts_any``: a link need not prove itself, and is never compared. ``withdraw_after_s``: a
    waiting trainer's rows are taken from a remote worker after that time.
    """

    audit: float = 0.001
    accepts_any: bool = False
    withdraw_after_s: float = 1.0


@dataclass(slots=True, eq=False)
class Link:
    """One worker host. ``serves``: streams that it may fill; ``proven``: equal rows, by stream.

    ``place``: its number among hosts with the same ``name``. ``registered``: workers that it has
    while none of them has died.
    """

    number: int
    name: str
    place: int
    registered: int
    serves: set[int] = field(default_factory=set)
    proven: dict[int, int] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)
    is_leaving: bool = False
    is_closed: bool = False
    orders: int = 0
    samples: int = 0
    busy_us: int = 0
    withdrawn: int = 0
    disagreements: int = 0
    proofs: int = 0
    """Orders whose rows are being compared just now."""
    unaudited: int = 0
    """Orders since the last comparison."""
    disputes: deque[int] = field(default_factory=lambda: deque(maxlen=DISAGREEMENTS_MAX))
    """How many samples it had filled at each of the last disagreements."""
    last_bad: str = ""
    """The last sample that it reported as bad, and why."""

    @property
    def may_fill(self) -> set[int]:
        """The streams that it may fill now."""
        return set() if self.is_closed else self.serves


class Links:
    """All links by number; the daemon reports them before their workers.

    ``changed`` is called after a change of what a link may fill.
    """

    def __init__(self, rules: LinkRules, changed: Callable[[Link], None]) -> None:
        self.rules = rules
        self.by_number: dict[int, Link] = {}
        self._tell_changed = changed
        self._leaving: list[Link] = []
        """Links that leave and are not released yet."""
        self._shares: dict[int, Shares | None] = {}
        """By stream, since the last change of what a link may fill."""

    def begin(self, number: int, name: str, workers: int) -> None:
        """A worker host has registered. It gets the first place that is free under its name."""
        taken = {link.place for link in self.by_number.values() if link.name == name}
        place = next(place for place in count() if place not in taken)
        self.by_number[number] = Link(number, name, place, max(1, workers))

    def leaves(self, link: Link) -> None:
        """A worker host takes no more orders."""
        link.is_leaving = True
        self._leaving.append(link)
        self._shares.clear()

    def release_idle(self, workers: Mapping[int, Worker], actions: list[Action]) -> None:
        """Release the leaving links whose workers have no order."""
        for link in [one for one in self._leaving if not any(workers[number].orders for number in one.workers)]:
            self._leaving.remove(link)
            actions.append(ReleaseLink(link.number))

    def shares(self, stream: int, batch_rows: int) -> Shares | None:
        """The shares of a stream's samples; None without several hosts that fill it."""
        if stream not in self._shares:
            hosts = [
                (link.number, host_key(link.name, link.place), link.registered)
                for link in self.by_number.values()
                if stream in link.may_fill and not link.is_leaving
            ]
            self._shares[stream] = Shares(hosts, batch_rows) if len(hosts) > 1 else None
        return self._shares[stream]

    def _changed(self, link: Link) -> None:
        self._shares.clear()
        self._tell_changed(link)

    def end(self, number: int) -> None:
        """A link has ended."""
        link = self.by_number.pop(number, None)
        self._shares.clear()
        if link is not None:
            assert not link.workers, f"link {number} has workers"
            if link in self._leaving:
                self._leaving.remove(link)

    def opened(self, number: int, stream: int, rows: int, actions: list[Action]) -> None:
        """A link can fill a stream of ``rows`` samples; it has to prove that first."""
        link = self.by_number.get(number)
        if link is None or stream in link.serves:
            return
        if self.rules.accepts_any or not rows:
            self._serve(link, stream, actions)
        else:
            link.proven[stream] = 0

    def forget_stream(self, stream: int) -> None:
        """No order will name the stream any more."""
        for link in self.by_number.values():
            self.lost(link, stream)

    def lost(self, link: Link, stream: int) -> None:
        """The link cannot fill the stream any more."""
        link.proven.pop(stream, None)
        if stream in link.serves:
            link.serves.remove(stream)
            self._changed(link)

    def due(self, stream: int) -> list[Link]:
        """The links that should fill rows of this stream for a comparison now."""
        is_audited = self.rules.audit > 0 and not self.rules.accepts_any
        every = 1 / self.rules.audit if is_audited else float("inf")
        due = [
            link
            for link in self.by_number.values()
            if not link.proofs
            and not link.is_closed
            and (stream in link.proven or (stream in link.serves and link.unaudited >= every))
        ]
        return due[: max(0, PROOFS_MAX - sum(link.proofs for link in self.by_number.values()))] if due else due

    def compared(self, link: Link, stream: int, rows: int, difference: str, actions: list[Action]) -> None:
        """The rows of a link were compared with a local worker's."""
        link.unaudited = 0
        if difference:
            self.close(link, f"it makes other pixels than the daemon's host: {difference}", actions)
        elif stream in link.proven:
            link.proven[stream] += rows
            if link.proven[stream] >= PROOF_ROWS:
                del link.proven[stream]
                self._serve(link, stream, actions)

    def _serve(self, link: Link, stream: int, actions: list[Action]) -> None:
        link.serves.add(stream)
        actions.append(ReportServing(link.number, stream, ""))
        self._changed(link)

    def filled(self, link: Link, samples: int, busy_us: int) -> None:
        """A link has filled rows of a batch."""
        link.orders += 1
        link.unaudited += 1
        link.samples += samples
        link.busy_us += busy_us

    def disagreed(self, number: int, rows: int, actions: list[Action]) -> None:
        """Rows that a link reported bad are good here."""
        link = self.by_number.get(number)
        if link is None:
            return
        link.disagreements += rows
        link.disputes.extend([link.samples] * min(rows, DISAGREEMENTS_MAX))
        if len(link.disputes) == DISAGREEMENTS_MAX and link.samples - link.disputes[0] <= DISAGREEMENT_ROWS:
            bad = f"it reported {link.disagreements} samples as bad that are good on the daemon's host"
            self.close(
                link, f"{bad}, the last as {link.last_bad}: are its files the same, and may it read them?", actions
            )

    def close(self, link: Link, reason: str, actions: list[Action]) -> None:
        """End a link; its workers are reported gone when no row of it will be written."""
        if not link.is_closed:
            link.is_closed = True
            self._changed(link)
            actions.append(EndLink(link.number, reason))
