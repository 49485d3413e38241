"""The worker processes of this host, and the fork server they come from.

Runs in the daemon, in a worker host, and in a command that makes rows.

    first fork -> fork server started -> [ fork -> Forked, or NotForked ]*, reap*
    it ends -> its workers end, by the kernel -> the next fork starts another one

Messages become events for the loop's queue:
``WorkerReady``, ``ChunkDone``, and ``WorkerGone`` when the kernel reports that the process has
ended (its pidfd is readable), never before: a process that may still write is not gone. Workers are
children of the fork server, which reaps one on request: the daemon reads its exit status before
that.

Invariant: a worker has exactly the descriptors of its channel and its note.
Invariant: each requested worker is reported: ``forked``, or ``failed``.
"""

import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic

import structlog
from structlog.typing import FilteringBoundLogger

from batchd.core.events import ChunkDone, Event, Note, PartsNamed, WorkerGone, WorkerReady
from batchd.core.fleet import WorkerKind
from batchd.core.work import Work
from batchd.errors import why_no_process
from batchd.runtime.available import OomKills
from batchd.runtime.child_log import ChildOutput
from batchd.runtime.children import Child, Grandchild, Linked, describe, start_linked
from batchd.runtime.limits import CountedPerMinute, printable
from batchd.runtime.poller import Poller
from batchd.runtime.sandbox import Access, rules_of, version
from batchd.runtime.slots import ADVICE
from batchd.worker import messages as orders
from batchd.worker.interface import SentBefore
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message

_log: FilteringBoundLogger = structlog.get_logger()

FAULT_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that the kernel, or the C library, sends to a process for its own fault."""
KILL_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class _Process:
    """One worker process. ``grandchild`` is None until the fork server has answered.

    ``is_killed``: by this daemon, for its own fault. ``is_dismissed``: no further order follows.
    ``is_over``: its channel has ended, so the process shall end, too. ``is_enclosed``: it gives up
    what it does not need before its first stream.
    """

    number: int
    channel: socket.socket
    note: mmap.mmap
    grandchild: Grandchild | None = None
    known: SentBefore = field(default_factory=SentBefore)
    is_killed: bool = False
    is_dismissed: bool = False
    is_over: bool = False
    is_enclosed: bool = False
    cpus: frozenset[int] | None = None
    """The CPUs that it shall run on; None: any."""

    @property
    def pid(self) -> int:
        """Its process id; 0 before it is known."""
        return self.grandchild.pid if self.grandchild is not None else 0

    def settle(self) -> None:
        """Have it run on its CPUs, as soon as there is a process. The kernel may refuse them."""
        if self.cpus is not None and self.grandchild is not None:
            with suppress(OSError):
                os.sched_setaffinity(self.grandchild.pid, self.cpus)

    def end(self) -> None:
        """Have the kernel end the process, at once or when it is known."""
        self.is_over = True
        if self.grandchild is not None:
            self.grandchild.kill()


class WorkerProcesses:
    """Starts workers, sends messages, and enqueues events when ``poller`` is dispatched."""

    kind = WorkerKind(orders_max=2, start_timeout_s=60.0, note_delay_s=0.0, small_orders_max=32)

    def __init__(  # noqa: PLR0913  each is another end
        self,
        poller: Poller,
        enqueue: Callable[[Event], None],
        launched: Linked | None = None,
        output: ChildOutput | None = None,
        *,
        on_report: Callable[[int, Message], None] | None = None,
        log: FilteringBoundLogger = _log,
    ) -> None:
        """``output``: what workers write, which names them.

        ``on_report``: gets what they report, instead of events; they may report more then.
        """
        self._output = output
        self._on_report = on_report
        self._vocabulary = orders.TO_DAEMON_FROM_WORKER if on_report is None else orders.TO_RUNNER_FROM_WORKER
        self._log = log
        self._poller = poller
        self._enqueue = enqueue
        self._forks = ForkServer(poller, self._adopt, self._fail, launched, log)
        self._processes: dict[int, _Process] = {}
        self._access: Access | None = None
        self.decoders = ""
        self._oom_kills = OomKills()
        self._counted_per_minute = CountedPerMinute()
        self._missing = 0
        """Dead workers without a replacement: a replacement is logged, the first start is not."""

    def enclose(self, needed: Access | None, *, is_all: bool = False) -> bool:
        """Enclose each worker before its first stream; it may reach ``needed`` at least.

        None ends that; ``is_all``: what was needed before does not count. True if a present worker
        may reach other things.
        """
        before = self._access
        self._access = needed if needed is None or before is None or is_all else before.joined(needed)
        return before != self._access and any(process.is_enclosed for process in self._processes.values())

    def spawn(self, number: int) -> None:
        """Start worker ``number``, unless it was started early. Raises ``OSError``."""
        if number in self._processes:
            return
        with ExitStack() as until_done, ExitStack() as where_it_fails:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            where_it_fails.callback(ours.close)
            until_done.callback(theirs.close)
            note = os.memfd_create("batchd-note", os.MFD_CLOEXEC)
            until_done.callback(os.close, note)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            ours.setblocking(False)
            os.posix_fallocate(note, 0, orders.NOTE_BYTES)
            memory = mmap.mmap(note, orders.NOTE_BYTES)
            process = _Process(number, ours, memory)
            self._poller.watch(ours.fileno(), lambda: self._receive(process))
            where_it_fails.callback(self._poller.unwatch, ours.fileno())
            self._forks.fork(number, theirs.fileno(), note)
            where_it_fails.pop_all()
        self._processes[number] = process

    def start(self, number: int) -> None:
        """Start worker ``number`` as ``spawn``; ``WorkerGone`` follows if there is no process."""
        try:
            self.spawn(number)
        except OSError as error:
            self._not_started(number, why_no_process(error))

    def run_on(self, number: int, cpus: frozenset[int]) -> None:
        """Have a worker run on these CPUs alone, from its first order at the latest."""
        process = self._processes.get(number)
        if process is not None:
            process.cpus = cpus
            process.settle()

    def lacks_stream(self, number: int, stream: int) -> bool:
        """Whether a worker has to get a stream now. It counts as sent from here on."""
        process = self._processes.get(number)
        return process is not None and process.known.enter_stream(stream)

    def lacks_slot(self, number: int, slot: int) -> bool:
        """Whether a worker has to get a slot now. It counts as sent from here on."""
        process = self._processes.get(number)
        return process is not None and process.known.enter_slot(slot)

    def quarantine(self, stream: int, samples: Sequence[int]) -> None:
        """Tell the workers that know a stream to treat samples as bad."""
        for number, process in self._processes.items():
            if stream in process.known.streams:
                self.send_quarantined(number, stream, samples)

    def send_quarantined(self, number: int, stream: int, samples: Sequence[int]) -> None:
        """Tell a worker to treat samples as bad."""
        for part in orders.quarantines(stream, samples):
            self.send(number, part)

    def forget_stream(self, stream: int) -> None:
        """Tell the workers that know a stream that no order will name it."""
        for number, process in self._processes.items():
            if process.known.drop_stream(stream):
                self.send(number, orders.ForgetStream(stream))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Tell the workers that know any of these slots that no order will name it."""
        for number, process in self._processes.items():
            if known := process.known.drop_slots(slots):
                self.send(number, orders.ForgetSlots(known))

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """Have all workers use these limits for file servers."""
        for number in self._processes:
            self.send(number, orders.UseStorage(storage))

    def send(self, number: int, message: Message, *descriptors: int) -> None:
        """Send without waiting. A worker that does not read is killed."""
        process = self._processes.get(number)
        if process is None:
            return
        if isinstance(message, orders.OPENING) and self._access is not None and not process.is_enclosed and version():
            process.is_enclosed = True
            try:
                rules = rules_of(self._access, process.pid)
            except OSError as error:
                self.kill(number, str(error))
                return
            self.send(number, orders.Enclose(self._access.has_network), rules)
            os.close(rules)
        try:
            send_message(process.channel, message, descriptors)
        except ChannelClosed:
            return
        except BlockingIOError:
            self.kill(number, "it does not read its orders")

    def kill(self, number: int, reason: str) -> None:
        """Kill a worker that does not do what it should. ``WorkerGone`` follows when it is dead."""
        process = self._processes.get(number)
        if process is None:
            return
        self._log.warning("worker killed", worker=number, pid=process.pid, reason=reason)
        process.is_killed = True
        process.end()
        if not process.pid:
            self._forks.kill("it has not started a worker that it was asked for")

    def dismiss(self, number: int) -> None:
        """Dismiss a worker without orders by closing its channel. ``WorkerGone`` follows."""
        process = self._processes.get(number)
        if process is not None:
            process.is_dismissed = True
            with suppress(OSError):  # it is dead: its pidfd will report that
                process.channel.shutdown(socket.SHUT_WR)

    def note(self, number: int) -> Note | None:
        """The note of the worker's current row."""
        process = self._processes.get(number)
        return _read_note(process.note) if process is not None else None

    def pids(self) -> dict[int, int]:
        """The process id of each worker, by its number; 0 before it is known."""
        return {number: process.pid for number, process in self._processes.items()}

    def close(self, wait_s: float) -> None:
        """End all workers: close their channels, wait, and kill those that remain."""
        for process in self._processes.values():
            self._poller.unwatch(process.channel.fileno())
            process.channel.close()
        deadline = monotonic() + wait_s
        for process in list(self._processes.values()):
            grandchild = process.grandchild
            if grandchild is not None and not grandchild.has_ended(deadline - monotonic()):
                grandchild.kill()
                # the kernel kills at once, except in a storage call
                if not grandchild.has_ended(KILL_TIMEOUT_S):
                    facts = {"worker": process.number, "pid": process.pid, "advice": "is its storage hung?"}
                    self._log.error("worker cannot be killed", **facts)
            self._forget(process)
        self._forks.close()

    def _adopt(self, number: int, grandchild: Grandchild) -> None:
        """The fork server has started a worker."""
        process = self._processes[number]
        process.grandchild = grandchild
        try:
            self._poller.watch(grandchild.pidfd, lambda: self._on_exit(process, grandchild))
        except OSError as error:
            process.end()
            self._forks.reap(grandchild.pid)
            self._fail(number, str(error))
            return
        process.settle()
        if self._output is not None:
            self._output.begin(grandchild.pid, number)
        if process.is_over:
            process.end()
        if self._missing:
            self._missing -= 1
            self._log.info("worker started", worker=number, pid=grandchild.pid)

    def _fail(self, number: int, reason: str) -> None:
        """The fork server could not start a worker."""
        self._forget(self._processes[number])
        self._not_started(number, reason)

    def _not_started(self, number: int, reason: str) -> None:
        if (more := self._counted_per_minute.more("worker not started", reason)) is not None:
            self._log.error("worker not started", worker=number, reason=reason, **more)
        self._enqueue(WorkerGone(number, f"it could not be started: {reason}", None))

    def _receive(self, process: _Process) -> bool:
        """Read one message, so that workers take turns; False if there is none."""
        try:
            message, descriptors = receive_message(process.channel, self._vocabulary)
        except BlockingIOError:
            return False
        except ChannelClosed:
            self._poller.unwatch(process.channel.fileno())
            if not process.is_dismissed:
                process.end()  # nearly always dead by now; if not, it is of no use any more
            return False
        except MalformedMessage as error:
            self.kill(process.number, f"it sends invalid messages: {error}")
            return False
        _close(descriptors)
        if self._on_report is None or isinstance(message, orders.Ready):
            self._enqueue(self._event(process, message))
        else:
            self._on_report(process.number, message)
        return True

    def _event(self, process: _Process, message: Message) -> Event:
        if isinstance(message, orders.Ready):
            if message.decoders != self.decoders:
                self.decoders = message.decoders
                self._log.info("decoding", decoders=message.decoders)
            return WorkerReady(process.number)
        if isinstance(message, orders.StreamMeasured):
            return PartsNamed(message.stream, tuple(message.parts))
        assert isinstance(message, orders.ChunksFilled)
        bad = [(sample, path, reason) for sample, path, reason in message.bad]
        work = Work(*message.work)
        return ChunkDone(process.number, tuple(message.orders), work, bad, message.hopeless, message.away)

    def _on_exit(self, process: _Process, grandchild: Grandchild) -> None:
        """The kernel reports that the process has ended. What it reported before still counts."""
        while self._receive(process):
            pass
        status = grandchild.status()
        from_outside, out_of_memory = self._why_it_ended(process, status)
        self._forks.reap(process.pid)
        note = _read_note(process.note) or _NOTHING_IN_HAND
        how = describe(status) if status is not None else "with the fork server"
        write = self._log.info if process.is_dismissed and status == 0 else self._log.warning
        printed = self._output.end(process.pid) if self._output is not None else ""
        said = {"said": said} if (said := _last_words(process.note) or printed) else {}
        write("worker ended", worker=process.number, pid=process.pid, how=how, **said)
        self._forget(process)
        self._missing += 1
        self._enqueue(WorkerGone(process.number, how, note, from_outside, out_of_memory))

    def _why_it_ended(self, process: _Process, status: int | None) -> tuple[bool, bool]:
        """(killed by another process, killed for lack of memory); else it or the daemon did it.

        A worker whose fork server has ended was killed for that, whatever the kernel counts.
        """
        killed = status is not None and status < 0 and -status not in FAULT_SIGNALS and not process.is_killed
        alone = killed and status == -signal.SIGKILL and self._forks.serves(process.pid)
        oom_killed = self._oom_kills.explain(monotonic(), is_killed=alone)
        if status is None:
            return not process.is_killed, False
        return killed and not oom_killed, oom_killed or status == orders.OUT_OF_MEMORY_STATUS

    def _forget(self, process: _Process) -> None:
        self._poller.unwatch(process.channel.fileno())
        process.channel.close()
        if process.grandchild is not None:
            self._poller.unwatch(process.grandchild.pidfd)
            process.grandchild.close()
        process.note.close()
        del self._processes[process.number]


_NOTHING_IN_HAND = Note(order=0, row=0, sample=0)
"""Note of a worker that died between samples: an order that was never given, so no sample is
blamed. Otherwise kills from outside, which often hit workers that have just started, would blame
the same first row each time."""


def _read_note(memory: mmap.mmap) -> Note | None:
    order, row_after, sample = orders.NOTE.unpack_from(memory)
    return Note(order, row_after - 1, sample) if row_after else None


def _last_words(memory: mmap.mmap) -> str:
    """What a library printed while it decoded the file that the worker died with.

    "" for nothing.
    """
    return printable(bytes(memory[orders.NOTE_TEXT_AT :]).partition(b"\0")[0].decode(errors="replace").strip(), 1_000)


class ForkServer:
    """Forks workers. Calls ``forked`` for each requested worker, or ``failed`` with the reason."""

    def __init__(
        self,
        poller: Poller,
        forked: Callable[[int, Grandchild], None],
        failed: Callable[[int, str], None],
        launched: Linked | None = None,
        log: FilteringBoundLogger = _log,
    ) -> None:
        """Own the fork server that was ``launched`` already, if any."""
        self._log = log
        self._poller = poller
        self._forked = forked
        self._failed = failed
        self._child: Child | None = None
        self._channel: socket.socket
        self._asked: dict[int, list[int]] = {}
        """Requested workers, in the order of requests and answers; each with descriptors that are
        closed to make room for those of its answer."""
        self._children: set[int] = set()
        """Pids of the workers of the current fork server."""
        if launched is not None:
            self._adopt(launched)

    def fork(self, worker: int, channel: int, note: int) -> None:
        """Start a worker with these two descriptors. Raises ``OSError``; then no answer follows."""
        if self._child is None:
            self._adopt(start_linked("batchd.worker"))
        with ExitStack() as where_it_fails:
            spare = [os.dup(channel), os.dup(note)]
            where_it_fails.callback(_close, spare)
            with suppress(ChannelClosed):  # it has just ended: its pidfd will report that
                send_message(self._channel, orders.Fork(worker), [channel, note])
            where_it_fails.pop_all()
        self._asked[worker] = spare

    def serves(self, pid: int) -> bool:
        """Return whether the worker's fork server still runs."""
        return pid in self._children and self._child is not None and not self._child.has_ended()

    def reap(self, pid: int) -> None:
        """Reap a dead worker, once its status is read. Without a fork server, init reaps it."""
        if pid in self._children:
            self._children.remove(pid)
            with suppress(ChannelClosed, BlockingIOError):  # it is reaped at the fork server's end
                send_message(self._channel, orders.Reap(pid))

    def kill(self, reason: str) -> None:
        """End a fork server that misbehaves, and all of its workers with it."""
        if self._child is not None:
            self._log.warning("fork server killed", pid=self._child.pid, reason=reason)
            self._child.kill()

    def close(self) -> None:
        """End the fork server. Its workers have ended, or end with it."""
        if self._child is not None:
            self._child.kill()
            self._forget(self._child)
            self._asked.clear()

    def _adopt(self, launched: Linked) -> None:
        """Own a fork server. Raises ``OSError``, and ends it then."""
        self._child, self._channel = launched
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            self._channel.setblocking(False)
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._poller.watch(self._channel.fileno(), self._receive)
            self._poller.watch(self._child.pidfd, self._on_exit)
            where_it_fails.pop_all()

    def _receive(self) -> bool:
        """Read the answer to the oldest request; False if there is none."""
        spare = next(iter(self._asked.values()), [])
        _close(spare)
        spare.clear()
        try:
            message, descriptors = receive_message(self._channel, orders.TO_DAEMON_FROM_FORKSERVER)
        except BlockingIOError:
            return False
        except ChannelClosed:
            self._poller.unwatch(self._channel.fileno())
            return False
        except MalformedMessage as error:
            self._poller.unwatch(self._channel.fileno())
            self.kill(f"its answer cannot be read: {error}. If there are no descriptors left: {ADVICE}")
            return False
        assert isinstance(message, orders.Forked | orders.NotForked)
        del self._asked[message.worker]
        if isinstance(message, orders.Forked):
            (pidfd,) = descriptors
            self._children.add(message.pid)
            self._forked(message.worker, Grandchild(message.pid, pidfd))
        else:
            self._failed(message.worker, message.reason)
        return True

    def _on_exit(self) -> None:
        """The kernel reports that it has ended. What it reported before still counts."""
        assert self._child is not None
        while self._receive():
            pass
        pid, how = self._child.pid, describe(self._forget(self._child))
        self._log.warning("fork server ended", pid=pid, how=how, advice="its workers end with it; others are started")
        asked, self._asked = self._asked, {}
        for worker in asked:
            self._failed(worker, f"the fork server ended ({how})")

    def _forget(self, child: Child) -> int:
        """Reap it; its exit status."""
        for descriptor in (child.pidfd, self._channel.fileno()):
            self._poller.unwatch(descriptor)
        self._channel.close()
        self._child = None
        self._children.clear()
        for spare in self._asked.values():
            _close(spare)
            spare.clear()
        return child.reap()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
