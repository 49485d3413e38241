"""Faults of a chaos run: kinds are dealt like cards, so each is as frequent as configured.

A fault may be impossible when its card is dealt, for example a kill without a worker. Another one
is then injected instead.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import batchd_client
from chaos.gaps import Gaps
from chaos.member import Member
from chaos.run import Run
from support.kernel import deriving_of, fork_servers_of, gateways_of, observers_of, workers_of

STOPPED_MAX_S = 2.0
RANKS_MAX = 3
FREE_TIMEOUT_S = 20.0
REFUSED_TIMEOUT_S = 10.0
AGAIN_S, POSSIBLE_MAX_S = 0.05, 30.0
STARTING_MAX_S = 0.8
"""A trainer, or a daemon, starts in about this time."""

Pids = Callable[[int], set[int]]


class Faults:
    """The deck of faults. ``one`` injects the next possible fault."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._chance = run.chance
        self._is_full = False
        self._is_to_die = False
        """Whether a second kill is due. The next daemon reads the current configuration."""
        self._deck: list[str] = []
        self._kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill a worker": (6, partial(self._kill, workers_of)),
            "kill the fork server": (3, partial(self._kill, fork_servers_of)),
            "kill the observer": (2, partial(self._kill, observers_of)),
            "kill the daemon": (6, self._kill_daemon),
            "kill the daemon twice": (1, self._kill_daemon_twice),
            "kill the deriving process": (3, partial(self._kill, deriving_of)),
            "kill a worker host": (4, self._kill_host),
            "kill a worker of a host": (3, self._kill_worker_of_host),
            "kill the gateway": (3, partial(self._kill, gateways_of)),
            "kill a trainer": (7, self._kill_trainer),
            "kill a starting trainer": (4, self._kill_starting_trainer),
            "stop a worker": (4, partial(self._stop_one, workers_of)),
            "stop the fork server": (2, partial(self._stop_one, fork_servers_of)),
            "stop the observer": (1, partial(self._stop_one, observers_of)),
            "stop the deriving process": (1, partial(self._stop_one, deriving_of)),
            "stop a worker host": (3, self._stop_host),
            "stop the gateway": (2, partial(self._stop_one, gateways_of)),
            "stop the daemon": (3, self._stop_daemon),
            "stop a trainer": (4, self._stop_trainer),
            "reload": (4, self._reload),
            "reload what is wrong": (1, self._reload_what_is_wrong),
            "resume with other ranks": (3, self._resume),
            "fill the disk, or free it": (2, self._fill_disk),
        }
        if not run.stage.has_small_disk:
            del self._kinds["fill the disk, or free it"]

    def one(self) -> None:
        """Inject the next fault that is possible now; the cards of the others stay in the deck.

        Where none is for long, as a process that was killed is not there, a new deck is dealt.
        """
        until_s = time.monotonic() + POSSIBLE_MAX_S
        while True:
            for kind in reversed(self._deck):
                if self._kinds[kind][1]():
                    self._deck.remove(kind)
                    self._run.faults[kind] += 1
                    return
            if not self._deck or time.monotonic() > until_s:
                self._shuffle()
            else:
                self._run.watch(AGAIN_S)

    def _shuffle(self) -> None:
        """Put a new deck before the cards that are left.

        The first one has each kind once, so that a short run has all of them.
        """
        is_first = not self._run.faults
        deck = [kind for kind, (weight, _) in self._kinds.items() for _ in range(1 if is_first else weight)]
        self._chance.shuffle(deck)
        self._deck += deck

    # --- kills ------------------------------------------------------------------------------------

    def _kill(self, pids: Pids) -> bool:
        run = self._run
        found = sorted(pids(run.stage.daemon.pid))
        if not found:
            return False
        gaps = {workers_of: run.past_dead_worker, gateways_of: run.past_dead_host}.get(pids)
        if gaps is not None:
            self._begin(gaps)
        _send(self._chance.choice(found), signal.SIGKILL)
        return True

    def _begin(self, gaps: Gaps) -> None:
        for member in self._run.running():
            gaps.begin(member.number, time.monotonic())

    def _kill_host(self) -> bool:
        if not self._run.hosts:
            return False
        self._begin(self._run.past_dead_host)
        self._run.kill_host(self._chance.choice(self._run.hosts))
        return True

    def _kill_worker_of_host(self) -> bool:
        found = sorted(pid for host in self._run.hosts for pid in host.worker_pids())
        if not found:
            return False
        self._begin(self._run.past_dead_worker)
        _send(self._chance.choice(found), signal.SIGKILL)
        return True

    def _kill_daemon(self) -> bool:
        self._run.past_dead_worker.forget_all()
        self._run.past_dead_host.forget_all()
        self._run.restart_daemon()
        return True

    def _kill_daemon_twice(self) -> bool:
        """Kill the daemon, and its successor while that starts."""
        self._kill_daemon()
        self._is_to_die = True

        def kill_again() -> None:
            self._is_to_die = False
            self._run.restart_daemon()

        self._run.later(self._chance.uniform(0, STARTING_MAX_S), kill_again)
        return True

    def _kill_trainer(self) -> bool:
        """Kill a trainer; its successor continues from the state that it last wrote.

        Its slots are free as soon as the kernel reports its end.
        """
        run = self._run
        lasting = [one for one in run.running() if one.batches is None]
        if not lasting:
            return False
        victim = self._chance.choice(lasting)
        if not run.is_up or run.stage.daemon.pid in run.stopped or victim.is_remote:
            run.kill(victim)
            return True
        with batchd_client.connect(run.stage.daemon.address) as connection:
            began = time.monotonic()
            run.slots_free.begin(victim.number, began)
            run.kill(victim)
            while any(one["pid"] == victim.pid for one in connection.status()["trainers"]):
                if time.monotonic() > began + FREE_TIMEOUT_S:
                    run.wrong(f"the slots of a dead trainer are not free after {FREE_TIMEOUT_S:g} s")
                    break
            run.slots_free.end(victim.number, time.monotonic())
        return True

    def _kill_starting_trainer(self) -> bool:
        """Kill a new trainer while it imports, connects, claims, reads first batches or leaves."""
        visitor = self._run.visit()
        self._run.later(self._chance.uniform(0, STARTING_MAX_S), partial(self._kill_visitor, visitor))
        return True

    def _kill_visitor(self, visitor: Member) -> None:
        if visitor.number in self._run.members:
            self._run.kill(visitor)

    # --- stops ------------------------------------------------------------------------------------

    def _stop_one(self, pids: Pids) -> bool:
        found = sorted(pids(self._run.stage.daemon.pid) - set(self._run.stopped))
        return bool(found) and self._stop(self._chance.choice(found))

    def _stop_host(self) -> bool:
        """Stop a worker host; its workers continue, and the daemon gives its orders to others."""
        found = sorted({host.pid for host in self._run.hosts} - set(self._run.stopped))
        return bool(found) and self._stop(self._chance.choice(found))

    def _stop_daemon(self) -> bool:
        self._run.first_from_new.forget_all()
        self._run.from_new_daemon.forget_all()
        self._run.past_dead_worker.forget_all()
        self._run.past_dead_host.forget_all()
        return self._stop(self._run.stage.daemon.pid)

    def _stop_trainer(self) -> bool:
        found = self._run.running()
        if not found:
            return False
        victim = self._chance.choice(found)
        self._run.forget(victim)
        return self._stop(victim.pid)

    def _stop(self, pid: int) -> bool:
        """Stop a process for a while.

        A pidfd refers to it, so that no other process gets the SIGCONT in its place.
        """
        if pid in self._run.stopped:
            return False
        try:
            process = os.pidfd_open(pid)
            signal.pidfd_send_signal(process, signal.SIGSTOP)
        except ProcessLookupError:
            return False

        def go_on() -> None:
            if self._run.stopped.get(pid) is go_on:
                del self._run.stopped[pid]
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGCONT)
                os.close(process)

        self._run.stopped[pid] = go_on
        self._run.later(self._chance.uniform(0, STOPPED_MAX_S), go_on)
        return True

    # --- changes ----------------------------------------------------------------------------------

    def _reload(self) -> bool:
        """Reload a ready daemon only: SIGHUP ends a starting one, which has no handler yet."""
        if not self._run.is_up:
            return False
        self._run.stage.change_configuration()
        self._run.stage.daemon.send(signal.SIGHUP)
        return True

    def _reload_what_is_wrong(self) -> bool:
        """Reload a wrong configuration: the daemon reports the problem, and nothing else changes.

        Only a running daemon is asked: another would not start.
        """
        run = self._run
        daemon = run.stage.daemon
        if not run.is_up or self._is_to_die or daemon.pid in run.stopped:
            return False
        size = daemon.log_file.stat().st_size
        before = run.stage.spoil_configuration()
        try:
            daemon.send(signal.SIGHUP)
            run.watch(REFUSED_TIMEOUT_S, lambda: b"configuration not reloaded" in daemon.log_file.read_bytes()[size:])
        finally:
            run.stage.restore_configuration(before)
        return True

    def _resume(self) -> bool:
        """Kill all ranks of a job; others continue from the position of all ranks."""
        run = self._run
        job = self._chance.choice([job for job in run.jobs if job.name in {"ranks", "cached", "own"}])
        for member in [one for one in run.members.values() if one.job is job]:
            member.is_leaving = True
            run.kill(member)
        run.watch(REFUSED_TIMEOUT_S, lambda: not any(one.job is job for one in run.members.values()))
        run.start_job(job, self._chance.randrange(1, RANKS_MAX + 1))
        return True

    def _fill_disk(self) -> bool:
        self._is_full = not self._is_full
        if self._is_full:
            self._run.stage.fill_disk()
        else:
            self._run.stage.free_disk()
        return True


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
