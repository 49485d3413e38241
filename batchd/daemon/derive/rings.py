"""The streams that trainers have derived or defined, and the memory of their rings. DAEMON process.

    derive_memory - rings of derived streams --by the weights of tenants--> rings of defined ones

A ring of a defined stream has what it asked for while all find room. Else it is smaller, and grows
again by what others give back.

Invariant: the slots that these rings may have, or have not given back, fit into ``derive_memory``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from batchd.core.events import RingsSized
from batchd.core.tenants import Demand, divide_by_tenant, part_of
from batchd.daemon.identity import Identity, weights_of
from batchd.daemon.reload.apply import ReloadApplier
from batchd.stream.rings import SLOTS_MIN

UNREAD_WEIGHT = 1e-6
"""Weight of a ring without trainers: it keeps only memory that no other ring asks for."""


@dataclass(slots=True)
class DerivedStream:
    """A derived stream in service. ``sessions``: those that asked for it and may still be there."""

    number: int
    name: str
    base: int
    sessions: set[int] = field(default_factory=set)


@dataclass(slots=True)
class DefinedStream:
    """A defined stream in service. ``table``: as it was sent. ``keep_s``: see ``Subscribe``.

    ``tenant``: the share that its ring counts for. ``read_s``: time of the last read, by
    ``monotonic``. ``roots``: those that it needs.
    """

    number: int
    name: str
    owner: Identity
    tenant: str
    table: bytes
    keep_s: int | None
    read_s: float
    roots: list[str]


Serving: TypeAlias = DerivedStream | DefinedStream


class Rings:
    """See the module. ``applier``: the running daemon."""

    def __init__(self, applier: ReloadApplier) -> None:
        self._applier = applier
        self.derived: dict[tuple[int, str], DerivedStream] = {}
        """By the number of the stream of the file, and the settings."""
        self.defined: dict[str, DefinedStream] = {}
        """By name."""
        self._sizes: dict[int, int] = {}
        """Slots that rings of defined streams may have, by number."""

    def left_bytes(self, ending: Sequence[Serving], tenant: str) -> tuple[int, str]:
        """What others leave at least, once those that are ``ending`` have ended; beside what.

        ``tenant``: whose part it is of, if a stream is defined.
        """
        total_bytes = self._applier.daemon.derived_bytes
        least = [(one.tenant, self._demand(one).least) for one in self.defined.values() if one not in ending]
        rings = [self._applier.streams[one.number].ring_bytes for one in self.derived.values() if one not in ending]
        left_bytes = total_bytes - sum(rings) - sum(least_bytes for _whose, least_bytes in least)
        own_bytes = sum(least_bytes for whose, least_bytes in least if whose == tenant)
        part_bytes = part_of(total_bytes, tenant, weights_of(self._applier.daemon)) - own_bytes
        if tenant and part_bytes < left_bytes:
            return max(0, part_bytes), f"the least that the streams of the share {tenant!r} need"
        return max(0, left_bytes), "those of derived streams that are read"

    def _demand(self, stream: DefinedStream) -> Demand:
        """The memory that its ring wants: what trainers were promised, and two slots, at least."""
        served, known = self._applier.streams[stream.number], self._applier.state.streams.get(stream.number)
        is_unread = self.is_idle(stream)
        least = max(0 if is_unread else SLOTS_MIN, 0 if known is None else known.delivery.claims.promised)
        weight, slot_bytes = UNREAD_WEIGHT if is_unread else 1.0, served.layout.slot_bytes
        return Demand(weight, least * slot_bytes, max(least, served.spec.slots_max) * slot_bytes)

    def slots(self, number: int) -> int:
        """Slots that a ring may have now, or has not given back."""
        known = self._applier.state.streams.get(number)
        ring = None if known is None else known.delivery.ring
        if number not in self._applier.derived:  # it has ended
            return 0 if ring is None else ring.made
        size = self._sizes.get(number, self._applier.streams[number].spec.slots_max)
        return size if ring is None else max(size, ring.slots_max, ring.made)

    @property
    def free_bytes(self) -> int:
        """Memory that no ring of a derived or defined stream has or may have."""
        rings = (one for one in self._applier.streams.values() if one.is_derived)
        held_bytes = sum(self.slots(one.number) * one.layout.slot_bytes for one in rings)
        return self._applier.daemon.derived_bytes - held_bytes

    def share(self, need_bytes: int = 0) -> None:
        """Let rings of defined streams have their parts. ``need_bytes``: for one to come.

        One grows only by what others have given back.
        """
        if not self.defined:
            return
        daemon, streams = self._applier.daemon, self._applier.streams
        total_bytes = daemon.derived_bytes - need_bytes
        total_bytes -= sum(streams[one.number].ring_bytes for one in self.derived.values())
        free_bytes, sizes = self.free_bytes - need_bytes, {}
        demands = [(one.tenant, self._demand(one)) for one in self.defined.values()]
        parts = divide_by_tenant(total_bytes, demands, weights_of(daemon))
        for one, part_bytes in zip(self.defined.values(), parts, strict=True):
            now, slot_bytes = self.slots(one.number), streams[one.number].layout.slot_bytes
            wanted = part_bytes // slot_bytes
            size = min(wanted, now + max(0, free_bytes // slot_bytes))
            if size != now:
                free_bytes -= max(0, size - now) * slot_bytes
                sizes[one.number] = size
        self.size(sizes)

    def size(self, sizes: dict[int, int]) -> None:
        """Let these rings have so many slots."""
        self._sizes = {number: size for number, size in self._sizes.items() if number in self._applier.derived} | sizes
        if sizes:
            self._applier.enqueue(RingsSized(sizes))

    def is_idle(self, stream: Serving) -> bool:
        """True without trainers, except for a stream that was just added for one."""
        known = self._applier.state.streams.get(stream.number)
        return known is not None and not known.delivery.subscriptions
