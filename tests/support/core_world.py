"""A world around ``DaemonState`` that performs each action and checks it. Tests only.

    trainer --events--> DaemonState --actions--> World: memory = rows and position in each slot
    worker  --------->                                  leases = readers and generation of slots
                                                        courses = batches, by ``core_course``

Invariant: the state of the world comes from events and actions alone, never from the inside of the
core.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import numpy as np

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.blocks import BlockOrder
from batchd.core.buckets import buckets_of
from batchd.core.course import Share
from batchd.core.epochs import planned
from batchd.core.events import StreamSpec
from batchd.core.fleet import REMOTE_NUMBERS, WorkerKind, remote_number
from batchd.core.links import PROOF_ROWS, LinkRules
from batchd.core.plan import Plan
from batchd.core.state import DaemonState
from batchd.core.work import NO_WORK, Work
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from support.core_course import reading, rows_of

Kind = TypeVar("Kind")
ENTITLEMENT = 2
SAMPLE_TIMEOUT_S = 30.0
WORKERS = WorkerKind(orders_max=2, start_timeout_s=60.0, note_delay_s=0.0)
REMOTE = WorkerKind(orders_max=4, start_timeout_s=60.0, note_delay_s=0.0, is_remote=True)
RULES = LinkRules(audit=0.2)


def make_spec(number: int = 1, **changes: object) -> StreamSpec:
    """A small stream: 12 samples in 4 batches of 3, in order, in a ring of 8 slots.

    ``changes`` also takes ``Plan``'s fields, ``open_blocks`` for a shuffle of blocks of two, and a
    ``budget``: then batches have 1 to ``batch_size`` rows, of samples of 1 to 5 elements.
    """
    plan: dict[str, object] = {
        "samples": 12,
        "batch_size": 3,
        "seed": 7,
        "shuffle": False,
        "drop_last": False,
        "repeats": 1,
    }
    open_blocks = changes.pop("open_blocks", None)
    values: dict[str, object] = {
        "number": number,
        "name": f"stream{number}",
        "fingerprint": "f" * 64,
        "equal_epochs": False,
        "window": 2,
        "remote_window_max": 5,
        "max_skew": None,
        "slots_max": 8,
        "row_bytes": (4,) * 8,
        "on_error": "substitute",
        "bad_fraction_max": 1.0,
    }
    budget = changes.pop("budget", None)
    for key, value in changes.items():
        (plan if key in plan else values)[key] = value
    made = Plan(**plan)  # type: ignore[arg-type]
    if open_blocks is not None:
        starts = np.append(np.arange(0, made.samples, 2), made.samples)
        made = replace(made, order=BlockOrder(starts, open_blocks, 7))  # type: ignore[arg-type]
    if budget is not None:
        sizes = 1 + np.arange(made.samples) % 5
        made = planned(made, {}, buckets_of(sizes, 3, made.batch_size, 2, budget))  # type: ignore[arg-type]
        values |= {"equal_epochs": False, "has_buckets": True}
    return StreamSpec(plan=made, **values)  # type: ignore[arg-type]


def pick(kind: type[Kind], actions: list[act.Action]) -> list[Kind]:
    """The actions of one kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


@dataclass(eq=False)
class ModelSlot:
    """The content of one slot's memory."""

    stream: int
    lost: bool = False
    generation: int = 0
    committed: Position | None = None
    spoilt: bool = False
    """A reader found other bytes than were written: the slot must never be granted again."""
    is_ahead: bool = False
    """It was made in advance, and no trainer has needed it yet."""
    rows: set[tuple[Position, int]] = field(default_factory=set)
    only_here: set[int] = field(default_factory=set)
    """Rows that a worker host reported bad: no other host may fill them."""


@dataclass(eq=False)
class ModelWorker:
    """The knowledge of one worker process."""

    ready: bool = False
    killed: bool = False
    orders: list[act.OrderChunk] = field(default_factory=list)
    link: int = 0
    """The worker host of a remote worker; 0 for a local one."""
    proofs: list[act.ProveChunk] = field(default_factory=list)
    withdrawing: list[int] = field(default_factory=list)
    """Orders that the daemon withdraws."""
    unsettled: list[int] = field(default_factory=list)
    """Withdrawn orders that the worker does not know of yet."""


@dataclass(eq=False)
class ModelLink:
    """One worker host, as its gateway sees it."""

    opened: set[int] = field(default_factory=set)
    equal_rows: Counter[int] = field(default_factory=Counter)
    closed: bool = False
    leaving: bool = False
    released: bool = False


@dataclass(eq=False)
class Trainer:
    """One trainer's subscription. ``leases``: sequence to (slot, generation, content)."""

    number: int
    session: int
    spec: StreamSpec
    window: int
    course: Iterator[Share]
    upcoming: Share | None
    granted: int = 0
    consumed: int = 0
    waiting: bool = False
    ended: bool = False
    is_remote: bool = False
    """It gets batches as bytes: a lease ends when they are sent, not by a message."""
    is_spectator: bool = False
    """It only looks at batches."""
    told: list[ErrorCode] = field(default_factory=list)
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    grants: list[tuple[int, int]] = field(default_factory=list)
    """All its leases so far."""

    @property
    def committed_least(self) -> int:
        """Slots that the core must not take from it."""
        return len(self.leases) if self.ended else max(ENTITLEMENT, len(self.leases))


AWAY = "/data/photos cannot be reached: No such file or directory"
"""What a worker says of storage that is away."""
NEVER_SEEN = 1 << 60
"""A sequence beyond all used ones."""


def _named(number: int) -> tuple[int, int]:
    """The link of a remote worker, and its number there."""
    return divmod(number, REMOTE_NUMBERS)


class World:
    """Feeds events, performs and checks actions.

    ``slots_left`` is the number of further slots for which the machine has memory.
    """

    def __init__(
        self,
        specs: list[StreamSpec],
        workers: int = 1,
        chunk_rows_max: int = 256,
        kind: WorkerKind = WORKERS,
        nodes: tuple[int, ...] = (),
    ) -> None:
        self.state = DaemonState(
            specs,
            workers,
            kind,
            sample_timeout_s=SAMPLE_TIMEOUT_S,
            chunk_rows_max=chunk_rows_max,
            rules=RULES,
            remote_kind=REMOTE,
            nodes=nodes,
        )
        self.kind = kind
        self.links: dict[int, ModelLink] = {}
        self.specs = {spec.number: spec for spec in specs}
        """All specs so far."""
        self.serving = [spec.number for spec in specs]
        self.ended: set[int] = set()
        """Streams that the core has ended, and must not mention again."""
        self.workers_wanted = workers
        self.now = 0.0
        self.slots: dict[int, ModelSlot] = {}
        self._batches: dict[tuple[int, Position], list[int]] = {}
        """The samples of each position that a worker got, which are always the same."""
        self.slots_left: int | None = None
        self.losses: list[ev.SlotLost] = []
        self.workers: dict[int, ModelWorker] = {}
        self.trainers: dict[int, Trainer] = {}
        self.stopped: set[int] = set()
        self.away: dict[int, float] = {}
        """Streams whose storage is away, with the time before which it must not be tried again."""
        self.probes: dict[int, act.OrderChunk] = {}
        """By stream whose storage is away: the last order to try it."""
        self.quarantined: set[tuple[int, int]] = set()
        self.deaths_noted: dict[tuple[int, int], int] = {}
        self.refilled_s = {spec.number: -1.0 for spec in specs}
        self.generations = Counter[int]()
        self.slots_max = {spec.number: spec.slots_max for spec in specs}
        self.slots_most = dict(self.slots_max)
        """By stream: what its ring may have while no other needs the memory."""
        self._asked: ev.SubscriptionAsked | None = None
        self._numbers = count(1)
        self._is_ahead = False
        self._orders_seen: set[int] = set()
        self._workers_seen: set[int] = set()
        self._links_seen: set[int] = set()

    # --- events -----------------------------------------------------------------------------------

    def do(self, event: ev.Event) -> list[act.Action]:
        """Handle one event; perform and check the actions."""
        while self.links and self.losses and isinstance(event, ev.Ticked):
            self.lose_next()  # it was in the queue already
        self._is_ahead = isinstance(event, ev.SlotWanted)
        actions = self.state.handle(event, self.now)
        for action in actions:
            getattr(self, f"_perform_{type(action).__name__}")(action)
        return actions

    def start_workers(self) -> None:
        """Make every worker that is due ready."""
        self.do(ev.Ticked())
        for number, worker in self.workers.items():
            if not worker.ready:
                self.ready(number)

    def ready(self, number: int) -> list[act.Action]:
        """A worker becomes ready."""
        self.workers[number].ready = True
        return self.do(ev.WorkerReady(number))

    def subscribe(self, stream: int = 1, session: int = 1, **changes: object) -> list[act.Action]:
        """A trainer subscribes to a stream; the subscription has the next number."""
        values: dict[str, object] = {
            "rank": 0,
            "world_size": 1,
            "window": 0,
            "epoch": 0,
            "step": 0,
            "end_epoch": None,
            "fingerprint": None,
            "is_spectator": False,
        }
        number = next(self._numbers)
        name = changes.pop("name", self.specs[stream].name)
        asked = ev.SubscriptionAsked(session, number, 1000 + number, stream=name, **(values | changes))  # type: ignore[arg-type]
        self._asked = asked
        actions = self.do(asked)
        self._asked = None
        return actions

    def pull(
        self, number: int, *, consume: int = 1 << 30, release: int = 1 << 30, waiting: bool = True
    ) -> list[act.Action]:
        """A trainer takes up to ``consume`` batches and returns its oldest ``release`` leases.

        Then it may wait for the next.

        If a trainer waits for a batch that was already granted, its message and the handle crossed,
        and the batch counts as consumed.
        """
        trainer = self.trainers[number]
        consumed = min(trainer.granted, trainer.consumed + consume)
        leases = [(sequence, trainer.leases[sequence][1]) for sequence in sorted(trainer.leases)]
        released = [] if trainer.is_remote else [lease for lease in leases if lease[0] < consumed][:release]
        trainer.consumed = min(trainer.granted, consumed + waiting)
        trainer.waiting = waiting and consumed == trainer.granted and not trainer.ended
        for sequence, _generation in released:
            del trainer.leases[sequence]
        self._bury(trainer)
        return self.do(ev.Pulled(trainer.session, number, consumed, waiting, 0, released))

    def reconfigure(
        self,
        added: tuple[StreamSpec, ...] = (),
        removed: tuple[int, ...] = (),
        replaced: tuple[int, ...] = (),
        workers: int | None = None,
        *,
        renews_workers: bool = False,
    ) -> list[act.Action]:
        """The configuration is read again; ``added`` streams have new numbers."""
        self.workers_wanted = workers or self.workers_wanted
        self.serving = [number for number in self.serving if number not in {*removed, *replaced}]
        for spec in added:
            self.specs[spec.number] = spec
            self.serving.append(spec.number)
            self.slots_max[spec.number] = self.slots_most[spec.number] = spec.slots_max
            self.refilled_s[spec.number] = -1.0
        return self.do(
            ev.Reconfigured(added, removed, replaced, self.workers_wanted, SAMPLE_TIMEOUT_S, 256, renews_workers)
        )

    def size_ring(self, number: int, slots_max: int) -> list[act.Action]:
        """The ring of a stream may have so many slots, and those that trainers were promised."""
        held = [one for one in self.trainers.values() if one.spec.number == number]
        promised = sum(len(one.leases) if one.ended else max(ENTITLEMENT, len(one.leases)) for one in held)
        if number not in self.stopped:
            self.slots_max[number] = max(min(slots_max, self.slots_most[number]), promised)
        return self.do(ev.RingsSized({number: slots_max}))

    def send(self, number: int) -> list[act.Action]:
        """The oldest batch of a remote trainer was sent, or never will be."""
        trainer = self.trainers[number]
        sequence = min(trainer.leases)
        _slot, generation = trainer.leases.pop(sequence)
        self._bury(trainer)
        return self.do(ev.BatchSent(trainer.session, number, sequence, generation))

    def mismatch(self, number: int, sequence: int) -> list[act.Action]:
        """A trainer reports a mismatched batch; the daemon acts on one report a second."""
        trainer = self.trainers[number]
        slot, generation = trainer.grants[sequence]
        model = self.slots.get(slot)
        held = (
            model is not None
            and model.committed is not None
            and (model.generation, model.spoilt) == (generation, False)
        )
        if (
            held
            and model is not None
            and model.stream in self.serving
            and self.now - self.refilled_s[model.stream] >= 1
        ):
            self.refilled_s[model.stream] = self.now
            model.spoilt = True
        return self.do(ev.BatchMismatched(trainer.session, number, sequence, generation))

    def end(self, number: int) -> list[act.Action]:
        """A trainer unsubscribes: unread batches are freed at once, or when they are sent."""
        trainer = self.trainers[number]
        consumed = NEVER_SEEN if trainer.is_remote else trainer.consumed
        self._end(trainer, leases_from=consumed)
        return self.do(ev.SubscriptionEnded(trainer.session, number, consumed))

    def end_session(self, session: int) -> list[act.Action]:
        """A trainer's process dies, or a remote one's connection ends; sending continues."""
        trainers = [one for one in self.trainers.values() if one.session == session]
        if any(one.is_remote for one in trainers):
            return self.cut_off(session)
        for trainer in trainers:
            self._end(trainer, leases_from=0)
        return self.do(ev.SessionEnded(session))

    def leave(self, trainer: Trainer, how: str) -> None:
        """A trainer "dies", "is cut off" or "ends", unless it has ended."""
        if how == "dies":
            self.end_session(trainer.session)
        elif how == "is cut off":
            self.cut_off(trainer.session)
        elif not trainer.ended:
            self.end(trainer.number)

    def cut_off(self, session: int) -> list[act.Action]:
        """The daemon disconnects a trainer, which may still read its leased batches."""
        for trainer in [one for one in self.trainers.values() if one.session == session]:
            self._end(trainer, leases_from=NEVER_SEEN)
        return self.do(ev.SessionCutOff(session))

    def fill(
        self,
        number: int,
        busy_us: int = 1000,
        bad: tuple[int, ...] = (),
        orders: int = 1,
        joining: tuple[int, ...] = (),
    ) -> list[act.Action]:
        """A worker carries out its oldest orders; samples of ``bad`` are reported as such.

        So are those of ``joining``, which would have joined those of some row.
        """
        waiting = self.workers[number].orders
        done = [waiting.pop(0)]
        while waiting and len(done) < orders and waiting[0].stream == done[0].stream:
            done.append(waiting.pop(0))
        reported = [(sample, f"{sample}.jpg", "is no image") for sample in joining]
        for order in done:
            self.slots[order.slot].rows.update((order.position, row) for row in order.rows)
            reported += [(sample, f"{sample}.jpg", "is no image") for sample in self.samples(order) if sample in bad]
        return self.do(ev.ChunkDone(number, tuple(order.order for order in done), work(busy_us), reported, ""))

    def find_away(self, number: int) -> list[act.Action]:
        """A worker finds the storage away with its oldest order: nothing in its rows counts."""
        order = self.workers[number].orders.pop(0)
        return self.do(ev.ChunkDone(number, (order.order,), NO_WORK, [], "", AWAY))

    # --- worker hosts -----------------------------------------------------------------------------

    def host_joins(self, workers: int, name: str = "", *, at_first: bool = False) -> int:
        """A worker host connects that can fill all streams; return its link.

        Its window has the largest limit, or with ``at_first`` the initial one.
        """
        link = len(self._links_seen) + 1
        self._links_seen.add(link)
        self.links[link] = ModelLink()
        self.do(ev.LinkBegun(link, name or f"pod-{link}", "node", "", 7, workers, "x86_64", "1.2.3"))
        for stream in list(self.serving):
            self.opens(link, stream)
        for _ in range(workers):
            self.joins(link, at_first=at_first)
        return link

    def opens(self, link: int, stream: int) -> None:
        """A worker host opens one more stream."""
        self.links[link].opened.add(stream)
        self.do(ev.StreamOpened(link, stream))

    def joins(self, link: int, *, at_first: bool = False) -> int:
        """A worker of a worker host is ready. See ``host_joins``."""
        number = remote_number(link, len(self._workers_seen))
        self._workers_seen.add(number)
        self.workers[number] = ModelWorker(ready=True, link=link)
        self.do(ev.WorkerUp(*_named(number), "libjpeg 3"))
        if not at_first:
            fleet = self.state.fleet
            window = fleet.windows.by_link[link]
            fleet.windows.set_limit(window, window.orders_max)
            for one in window.workers:
                fleet.sort(fleet.workers[one])
            self.do(ev.Ticked())
        return number

    def host_leaves(self, link: int) -> list[act.Action]:
        """A worker host takes no more orders."""
        self.links[link].leaving = True
        return self.do(ev.HostLeaves(link))

    def host_dies(self, link: int) -> None:
        """The connection of a worker host ends: the gateway drops all its orders."""
        for number in [number for number, worker in self.workers.items() if worker.link == link]:
            del self.workers[number]
        del self.links[link]
        self.do(ev.LinkClosed(link, "its connection ended", is_final=False))

    def remote_fill(
        self,
        number: int,
        bad: tuple[int, ...] = (),
        *,
        joining: tuple[int, ...] = (),
        hopeless: bool = False,
        busy_us: int = 1000,
    ) -> list[act.Action]:
        """The gateway has copied the rows of a remote worker's oldest order; as ``fill``."""
        worker = self.workers[number]
        order = worker.orders.pop(0)
        if order.order in worker.withdrawing:
            worker.withdrawing.remove(order.order)
        slot, samples = self.slots[order.slot], self.samples(order)
        for row, sample in zip(order.rows, samples, strict=True):
            if hopeless or joining or sample in bad:
                slot.only_here.add(row)
            else:
                slot.rows.add((order.position, row))
        reported = [
            (sample, f"{sample}.jpg", "is no image") for sample in (*samples, *joining) if sample in bad + joining
        ]
        why = "no such file" if hopeless else ""
        return self.do(ev.OrderFilled(*_named(number), order.order, work(busy_us), reported, why))

    def compare(
        self, number: int, difference: str = "", *, bad_rows: int = 0, is_hopeless: bool = False
    ) -> list[act.Action]:
        """The gateway has compared the rows of a remote worker's oldest proof."""
        worker = self.workers[number]
        proof = worker.proofs.pop(0)
        if proof.order in worker.withdrawing:
            worker.withdrawing.remove(proof.order)
        if not difference:
            self.links[worker.link].equal_rows[proof.stream] += len(proof.rows)
        last_bad = "7.jpg: is no image" if bad_rows else ""
        return self.do(ev.OrderProved(*_named(number), proof.order, difference, bad_rows, is_hopeless, last_bad))

    def take_reference(self, number: int) -> list[act.Action]:
        """The gateway has copied the rows that it will compare."""
        worker = self.workers[number]
        at = next(at for at, proof in enumerate(worker.proofs) if proof.slot)
        proof = worker.proofs[at]
        worker.proofs[at] = act.ProveChunk(proof.worker, proof.order, proof.stream, 0, proof.position, proof.rows)
        return self.do(ev.ReferenceCopied(*_named(number), proof.order))

    def give_back(self, number: int) -> list[act.Action]:
        """The gateway writes no row of an order that the daemon wants back."""
        worker = self.workers[number]
        order = worker.withdrawing.pop(0)
        worker.orders = [one for one in worker.orders if one.order != order]
        worker.proofs = [one for one in worker.proofs if one.order != order]
        worker.unsettled.append(order)
        return self.do(ev.OrderWithdrawn(*_named(number), order))

    def settle(self, number: int) -> list[act.Action]:
        """A remote worker has finished an order that was withdrawn from it."""
        order = self.workers[number].unsettled.pop(0)
        return self.do(ev.OrderFilled(*_named(number), order, work(0), [], ""))

    def _perform_ProveChunk(self, proof: act.ProveChunk) -> None:  # noqa: N802  named after the action
        worker, slot = self.workers[proof.worker], self.slots[proof.slot]
        link = self.links[worker.link]
        assert worker.link, "a local worker gets a proof"
        assert not link.closed
        assert not link.leaving
        assert proof.stream in link.opened
        assert proof.order not in self._orders_seen, "an order's number is used twice"
        self._orders_seen.add(proof.order)
        assert not any(one.proofs for one in self.workers.values() if one.link == worker.link)
        rows = {(proof.position, row) for row in proof.rows}
        assert rows <= slot.rows, "unfilled rows are compared"
        worker.proofs.append(proof)

    def _perform_WithdrawOrder(self, action: act.WithdrawOrder) -> None:  # noqa: N802
        worker = self.workers[remote_number(action.link, action.worker)]
        assert action.order not in worker.withdrawing, "an order is withdrawn twice"
        assert action.order in {one.order for one in (*worker.orders, *worker.proofs)}
        worker.withdrawing.append(action.order)

    def _perform_EndLink(self, action: act.EndLink) -> None:  # noqa: N802
        assert not self.links[action.link].closed, "a link is closed twice"
        self.links[action.link].closed = True

    def _perform_ReleaseLink(self, action: act.ReleaseLink) -> None:  # noqa: N802
        link = self.links[action.link]
        assert link.leaving, "a link is released that does not leave"
        assert not link.released, "a link is released twice"
        assert not any(one.orders or one.proofs for one in self.workers.values() if one.link == action.link)
        link.released = True

    def _perform_ReportServing(self, action: act.ReportServing) -> None:  # noqa: N802
        assert action.refusal or action.stream in self.links[action.link].opened

    def _check_remote(self, order: act.OrderChunk, worker: ModelWorker) -> None:
        """A remote worker may fill these rows."""
        link, spec = self.links[worker.link], self.specs[order.stream]
        assert not link.closed, "a closed link has an order"
        assert not link.leaving, "a leaving link has an order"
        assert order.stream in link.opened
        assert not spec.decodes_here
        assert spec.live is None
        assert link.equal_rows[order.stream] >= PROOF_ROWS, "rows of a link without a passed proof are used"
        assert not {*order.rows} & self.slots[order.slot].only_here, "a remote worker decides about bad samples"

    def fill_all(self) -> list[act.Action]:
        """Let the workers carry out all orders, and those that follow."""
        actions: list[act.Action] = []
        while busy := [number for number, worker in self.workers.items() if worker.orders]:
            actions += [action for number in busy for action in self.fill(number)]
        return actions

    def fill_all_local(self) -> None:
        """Let the local workers carry out all their orders."""
        while busy := [number for number, worker in self.workers.items() if worker.orders and not worker.link]:
            for number in busy:
                self.fill(number)

    def replace_workers(self) -> None:
        """Killed workers end, and new workers become ready."""
        for number in [number for number, worker in self.workers.items() if worker.killed]:
            self.kill(number)
        for number in [number for number, worker in self.workers.items() if not worker.ready]:
            self.ready(number)

    def kill(self, number: int, note: ev.Note | None = None, **why: bool) -> list[act.Action]:
        """A worker dies, by itself or for ``why``: ``from_outside``, ``out_of_memory``."""
        worker = self.workers.pop(number)
        how = "signal 9 (SIGKILL)" if any(why.values()) else "signal 11 (SIGSEGV)"
        if worker.link:
            return self.do(ev.WorkerDown(*_named(number), how))
        return self.do(ev.WorkerGone(number, how, note, **why))

    def kill_at(self, number: int, row: int, **why: bool) -> list[act.Action]:
        """A worker dies at ``row`` of its oldest order, and its note says so."""
        order = self.workers[number].orders[0]
        sample = self.samples(order)[order.rows.index(row)]
        return self.kill(number, ev.Note(order.order, row, sample), **why)

    def lose_next(self) -> list[act.Action]:
        """The daemon reports that the memory for a slot is not available."""
        lost = self.losses.pop(0)
        if lost.slot not in self.slots:
            return self.do(lost)  # it was returned before
        made = sum(slot.stream == lost.stream for slot in self.slots.values())
        self.slots_max[lost.stream] = self.slots_most[lost.stream] = min(self.slots_max[lost.stream], made - 1)
        del self.slots[lost.slot]
        return self.do(lost)

    def samples(self, order: act.OrderChunk) -> list[int]:
        """The samples of an order's rows."""
        batch = self._batches.get((order.stream, order.position))
        if batch is None:
            plan = self.specs[order.stream].plan
            batch = plan.indices(order.position, 0, plan.rows(order.position)).tolist()
            self._batches[order.stream, order.position] = batch
        return [batch[row] for row in order.rows]

    def orders_for(self, slot: int) -> list[act.OrderChunk]:
        """The orders whose workers, dead or alive, may still write into a slot."""
        return [order for worker in self.workers.values() for order in worker.orders if order.slot == slot]

    def proofs_of(self, slot: int) -> list[act.ProveChunk]:
        """The comparisons that still read a slot."""
        return [proof for worker in self.workers.values() for proof in worker.proofs if proof.slot == slot]

    def holders(self, slot: int) -> list[int]:
        """The subscriptions that may read a slot."""
        return [one.number for one in self.trainers.values() for held, _ in one.leases.values() if held == slot]

    def active(self, stream: int) -> list[Trainer]:
        """The trainers of a stream that want more batches."""
        return [one for one in self.trainers.values() if one.spec.number == stream and not one.ended]

    def _end(self, trainer: Trainer, leases_from: int) -> None:
        trainer.ended, trainer.waiting = True, False
        for sequence in [sequence for sequence in trainer.leases if sequence >= leases_from]:
            del trainer.leases[sequence]
        self._bury(trainer)

    def _bury(self, trainer: Trainer) -> None:
        if trainer.ended and not trainer.leases:
            self.trainers.pop(trainer.number, None)

    # --- actions, checked -------------------------------------------------------------------------

    def _perform_SpawnWorker(self, action: act.SpawnWorker) -> None:  # noqa: N802  named after the action
        assert action.worker not in self._workers_seen, "a worker's number is used twice"
        self._workers_seen.add(action.worker)
        self.workers[action.worker] = ModelWorker()

    def _perform_KillWorker(self, action: act.KillWorker) -> None:  # noqa: N802
        worker = self.workers[action.worker]
        assert not worker.killed, "a worker is killed twice"
        worker.killed = True

    def _perform_DismissWorker(self, action: act.DismissWorker) -> None:  # noqa: N802
        worker = self.workers[action.worker]
        assert not worker.killed, "a killed worker is dismissed"
        assert not worker.orders, "a worker with orders is dismissed"
        worker.killed = True

    def _perform_FreeSlots(self, action: act.FreeSlots) -> None:  # noqa: N802
        if action.stream in self.serving:
            left = self.state.streams[action.stream].delivery.ring.slots
            assert len(left) >= self.slots_max[action.stream], "a slot is freed that the ring may have"
        for slot in action.slots:
            assert not self.holders(slot), f"slot {slot} is freed under its readers"
            assert not self.orders_for(slot), f"slot {slot} is freed under its writers"
            assert not self.proofs_of(slot), f"slot {slot} is freed under a comparison"
            assert self.slots.pop(slot).stream == action.stream

    def _perform_EndStream(self, action: act.EndStream) -> None:  # noqa: N802
        assert action.stream not in {*self.serving, *self.ended}, "a stream ends twice, or while it is served"
        assert all(slot.stream != action.stream for slot in self.slots.values()), "a stream ends before its slots"
        self.ended.add(action.stream)

    def _perform_CreateSlot(self, action: act.CreateSlot) -> None:  # noqa: N802
        assert action.slot not in self.slots, "a slot's number is used twice"
        slot = self.slots[action.slot] = ModelSlot(action.stream, is_ahead=self._is_ahead)
        assert sum(one.stream == action.stream for one in self.slots.values()) <= self.slots_max[action.stream]
        if self.slots_left is not None:
            slot.lost = self.slots_left == 0
            self.slots_left = max(0, self.slots_left - 1)
        if slot.lost:
            self.losses.append(ev.SlotLost(action.stream, action.slot, "Cannot allocate memory"))

    def _perform_ReserveSlot(self, action: act.ReserveSlot) -> None:  # noqa: N802
        slot = self.slots[action.slot]
        assert not self.holders(action.slot), f"slot {action.slot} is reserved under its readers"
        assert not self.orders_for(action.slot), f"slot {action.slot} is reserved under its writers"
        self.generations[slot.stream] += 1
        slot.generation = self.generations[slot.stream]
        slot.committed = None
        slot.spoilt = slot.is_ahead = False
        slot.rows.clear()
        slot.only_here.clear()
        assert not self.proofs_of(action.slot), f"slot {action.slot} is reserved under a comparison"

    def _perform_OrderChunk(self, order: act.OrderChunk) -> None:  # noqa: N802
        worker, slot = self.workers[order.worker], self.slots[order.slot]
        if order.stream in self.away:
            self._check_probe(order, worker)
        assert worker.ready, "a worker is ordered before it is ready"
        assert not worker.killed, "a killed worker gets an order"
        orders_max = REMOTE.orders_max if worker.link else self.kind.orders_max
        orders_max = max(orders_max, 0 if worker.link else self.kind.small_orders_max)
        assert len(worker.orders) + len(worker.unsettled) < orders_max, "a worker has more orders than its kind allows"
        if worker.link:
            self._check_remote(order, worker)
        assert order.order not in self._orders_seen, "an order's number is used twice"
        self._orders_seen.add(order.order)
        assert slot.stream == order.stream
        assert slot.committed is None, "a complete batch is filled again"
        assert not self.holders(order.slot), f"slot {order.slot} is written under its readers"
        rows = {(order.position, row) for row in order.rows}
        assert list(order.rows) == sorted(set(order.rows)), "rows are not in order, or named twice"
        assert 0 <= order.rows[0] <= order.rows[-1] < rows_of(self.specs[order.stream].plan, *order.position)
        for other in self.orders_for(order.slot):
            assert other.position == order.position, "two positions are filled into one slot"
            taken = {(other.position, row) for row in other.rows}
            assert not taken & rows, "a row is ordered twice"
        assert not slot.rows & rows, "a written row is ordered again"
        assert {position for position, _row in slot.rows} <= {order.position}
        if not slot.lost:
            worker.orders.append(order)

    def _check_probe(self, order: act.OrderChunk, worker: ModelWorker) -> None:
        assert not worker.link, "a worker host tries storage that is away here"
        assert len(order.rows) == 1, "more than a row is tried while the storage is away"
        assert self.now >= self.away[order.stream], "storage that is away is tried too soon"
        before = self.probes.get(order.stream)
        assert before is None or before not in self.orders_for(before.slot), "storage is tried by two workers"
        self.probes[order.stream] = order
        self.away[order.stream] = self.now + 1.0

    def _perform_ReportAway(self, action: act.ReportAway) -> None:  # noqa: N802
        assert action.stream not in {*self.away, *self.stopped}, "storage is reported away twice"
        self.away[action.stream] = self.now + min(1.0, self.specs[action.stream].storage_away_s)

    def _perform_ReportBack(self, action: act.ReportBack) -> None:  # noqa: N802
        del self.away[action.stream]
        self.probes.pop(action.stream, None)

    def _perform_CommitSlot(self, action: act.CommitSlot) -> None:  # noqa: N802
        slot = self.slots[action.slot]
        rows = rows_of(self.specs[action.stream].plan, *action.position)
        assert slot.rows == {(action.position, row) for row in range(rows)}, "an incomplete batch is committed"
        assert not self.orders_for(action.slot), "a batch is committed while it is written"
        assert (action.samples, action.generation) == (rows, slot.generation)
        slot.committed = action.position

    def _perform_AdmitSubscription(self, action: act.AdmitSubscription) -> None:  # noqa: N802
        asked = self._asked
        assert asked is not None
        spec = self.specs[action.stream]
        assert (action.session, action.request, action.subscription) == (
            asked.session,
            asked.request,
            asked.subscription,
        )
        assert self.committed_least(action.stream) + ENTITLEMENT <= self.slots_max[action.stream], (
            "admitted without memory"
        )
        window = asked.window or spec.window
        assert action.window == (min(window, spec.remote_window_max) if asked.is_remote else window)
        start = self._start(asked, action)
        course = reading(spec.plan, asked.rank, asked.world_size, start, asked.end_epoch)
        trainer = Trainer(action.subscription, action.session, spec, action.window, course, next(course, None))
        trainer.is_remote, trainer.is_spectator = asked.is_remote, asked.is_spectator
        self.trainers[trainer.number] = trainer

    def _start(self, asked: ev.SubscriptionAsked, _action: act.AdmitSubscription) -> Position:
        """The position at which a trainer with this request must begin."""
        return Position(asked.epoch, asked.step)

    def _perform_GrantLease(self, lease: act.GrantLease) -> None:  # noqa: N802
        trainer, slot = self.trainers[lease.subscription], self.slots[lease.slot]
        position, first, rows = trainer.upcoming or (None, 0, 0)
        assert not trainer.ended, "an ended trainer gets a batch"
        assert (trainer.session, trainer.is_remote) == (lease.session, lease.is_remote)
        assert not trainer.is_remote or len(trainer.leases) < ENTITLEMENT, "a third batch is sent to one host"
        assert (lease.sequence, lease.epoch, lease.step, lease.first, lease.count) == (
            trainer.granted,
            *(position or ()),
            first,
            rows,
        )
        assert lease.sequence < trainer.consumed + trainer.window, "more batches are granted than the window"
        assert slot.committed is not None, "a batch is granted before it is complete"
        assert not slot.spoilt, "a batch with a mismatch is granted"
        assert slot.committed == (Position(0, lease.step) if trainer.spec.equal_epochs else position), (
            "another batch is granted"
        )
        assert (slot.stream, slot.generation) == (trainer.spec.number, lease.generation)
        trainer.leases[lease.sequence] = (lease.slot, lease.generation)
        trainer.grants.append((lease.slot, lease.generation))
        trainer.granted += 1
        trainer.upcoming = next(trainer.course, None)
        if trainer.waiting:
            trainer.waiting, trainer.consumed = False, trainer.granted

    def _perform_Refuse(self, action: act.Refuse) -> None:  # noqa: N802
        code = ErrorCode(action.error)
        if action.request and self._asked is not None and code in {ErrorCode.RING_TOO_SMALL, ErrorCode.RING_BUSY}:
            stream = next(one for one in self.serving if self.specs[one].name == self._asked.stream)
            assert self.committed_least(stream) + ENTITLEMENT > self.slots_max[stream], (
                "refused although there is memory"
            )
        if code is ErrorCode.UNKNOWN_SUBSCRIPTION:
            assert all(
                (one.session, one.number) != (action.session, action.subscription) for one in self.trainers.values()
            )
        elif action.subscription:
            trainer = self.trainers[action.subscription]
            assert trainer.waiting, "a trainer that does not wait gets a message"
            trainer.waiting = False
            trainer.told.append(code)
            assert code is not ErrorCode.RING_EXHAUSTED or len(trainer.leases) >= ENTITLEMENT

    def _perform_ReportBad(self, action: act.ReportBad) -> None:  # noqa: N802
        assert 0 <= action.sample < self.specs[action.stream].plan.samples

    def _perform_ReportMismatch(self, action: act.ReportMismatch) -> None:  # noqa: N802
        assert action.position.step < self.specs[action.stream].plan.steps

    def _perform_QuarantineSample(self, action: act.QuarantineSample) -> None:  # noqa: N802
        assert (action.stream, action.sample) not in self.quarantined, "a sample is quarantined twice"
        self.quarantined.add((action.stream, action.sample))

    def _perform_ReportStopped(self, action: act.ReportStopped) -> None:  # noqa: N802
        assert action.stream not in self.stopped, "a stream stops twice"
        self.stopped.add(action.stream)
        self.away.pop(action.stream, None)

    def committed_least(self, stream: int) -> int:
        """Slots that are promised in every case: two for each trainer, or its leases."""
        return sum(one.committed_least for one in self.trainers.values() if one.spec.number == stream)


def work(busy_us: int) -> Work:
    """A worker's report of a chunk that kept it busy for this long."""
    return NO_WORK._replace(busy_us=busy_us)
