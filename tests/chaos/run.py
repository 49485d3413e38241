"""A chaos run: daemon, trainers, worker hosts, and the loop that watches them.

    Run.run   [ watch, one of ``faults`` ]* with rests, in which every trainer must progress
              then trainers and hosts leave, the daemon ends, and nothing remains

One thread does everything. Between faults, ``watch`` handles the trainers' lines, the daemon's
restart and postponed actions (mostly SIGCONT).

Invariant: every error is in ``errors``, and the run continues to its end.
"""

import heapq
import itertools
import json
import os
import random
import re
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import batchd_client
from chaos.gaps import Gaps
from chaos.jobs import Job
from chaos.member import Member
from chaos.stage import STREAMS, Stage
from support.fake_gateway import WorkerHostProcess
from support.good_trainers import descriptor_count
from support.kernel import descriptors_of, reloads_of
from support.waiting import wait_until

JOBS = (
    *(("whole", "photos", 1), ("far", "photos", 1), ("ranks", "photos", 2), ("cached", "cached", 2)),
    *(("own", "own", 2), ("theirs", "theirs", 1)),
)
"""Name, stream and first world size."""
FAR = ("far", "theirs")
"""Jobs whose trainers use TCP, as every second rank of ``ranks`` does."""
HOSTS = 2
"""Worker hosts, of one worker each."""
HOST_AWAY_MAX_S = 1.0
REST_S = 90.0
"""Far above any wait for a batch in a healthy run."""
ERRORS_MAX = 50
LOGGED = frozenset({"configuration not reloaded", "worker not started"})
"""Expected errors in the daemon's log: invalid reloads, and a fork server killed while it forks."""
LINE_BYTES_MAX = 4096
GOING = frozenset({"StreamUnknown", "StreamRemoved", "StreamChanged"})
"""Errors that visitors of ``extra`` may get."""
SETTLED_S = 5.0
"""How long the count of descriptors stays the same before it is final."""


class Run:
    """One chaos run. ``stack`` ends all that it starts."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self.chance = random.Random(seed)
        self.stage = Stage(folder, stack, self.chance)
        self.jobs = [self._job(name, stream) for name, stream, _ranks in JOBS]
        self.members: dict[int, Member] = {}
        self.hosts: list[WorkerHostProcess] = []
        self.stopped: dict[int, Callable[[], None]] = {}
        self.errors: list[str] = []
        self.batches = self.rows = 0
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.from_new_daemon = Gaps("daemon killed -> batch of the new one, each trainer")
        self.first_from_new = Gaps("daemon killed -> batch of the new one, the first")
        self.past_dead_worker = Gaps("worker killed -> next batch, each trainer")
        self.past_dead_host = Gaps("worker host or gateway killed -> next batch")
        self.slots_free = Gaps("trainer killed -> its slots are free")
        self.is_up = False
        self._again: dict[int, int] = {}
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        stack.callback(self._selector.close)
        stack.callback(self._kill_members)
        stack.callback(self._kill_hosts)

    # --- the whole run ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the daemon, and every job."""
        self.start_daemon()
        for _ in range(HOSTS):
            self.start_host()
        for job, (_name, _stream, ranks) in zip(self.jobs, JOBS, strict=True):
            self.start_job(job, ranks)
        self.rest()

    def finish(self) -> None:
        """End all parts without errors, and look for remains."""
        while self._late:
            heapq.heappop(self._late)[2]()
        self.stage.free_disk()
        self.rest()
        self._see_hosts_serve()
        for member in list(self.members.values()):
            member.leave()
        if not self.watch(REST_S, lambda: not self.members):
            self.wrong(f"trainers that do not leave: {[member.job.name for member in self.members.values()]}")
            self._kill_members()
        self._dismiss_hosts()
        self._check_daemon()

    def rest(self) -> None:
        """Wait until every trainer has had a batch from now on: this finds each hang."""
        self.go_on_all()
        now = time.monotonic()

        def late() -> list[Member]:
            return [member for member in self.members.values() if member.last_at < now and member.batches is None]

        if not self.watch(REST_S, lambda: not late()):
            states = [f"{one.job.name} {one.rank} ({'ready' if one.is_ready else 'starting'})" for one in late()]
            self.wrong(f"no batch within {REST_S:g} s for {', '.join(states)}; the daemon is up: {self.is_up}")
            for member in late():
                self.kill(member)

    def wrong(self, what: str) -> None:
        """Print and record an error."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(f"after {self.faults.total()} faults: {what}")
            sys.stderr.write(f"ERROR {self.errors[-1]}\n")

    # --- watching ---------------------------------------------------------------------------------

    def watch(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Handle events for so long, or until ``condition``; return whether it became true."""
        end = time.monotonic() + seconds
        while not condition():
            now = time.monotonic()
            if now >= end:
                return False
            while self._late and self._late[0][0] <= now:
                heapq.heappop(self._late)[2]()
            pause_s = min(end, self._late[0][0] if self._late else end) - now
            for key, _events in self._selector.select(max(0.0, pause_s)):
                key.data()
        return True

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call something after a while."""
        heapq.heappush(self._late, (time.monotonic() + seconds, next(self._numbers), what))

    def _listen(self, member: Member) -> None:
        lines, is_end = member.lines()
        for told in lines:
            if "rows" in told:
                self._hear_batch(member, told)
            elif "changed" in told:
                self.wrong(f"{member.job.name}: the batch at {told['changed']} changed while it was held")
            elif "error" in told:
                member.error = told["error"], told["text"]
            else:
                member.is_ready = member.is_ready or "ready" in told
                member.left = told.get("left")
        if is_end:
            self._bury(member)

    def _hear_batch(self, member: Member, told: dict[str, Any]) -> None:
        for problem in member.job.heard(member.rank, told):
            self.wrong(problem)
        self.batches += 1
        self.rows += len(told["rows"])
        at = member.last_at = told["at"]
        if told["again"] > self._again.get(member.number, told["again"]):
            del self._again[member.number]
            self.from_new_daemon.end(member.number, at)
            self.first_from_new.end(0, at)
        member.again = told["again"]
        self.past_dead_worker.end(member.number, at)
        self.past_dead_host.end(member.number, at)

    def _bury(self, member: Member) -> None:
        """Check how it ended; restart a lasting trainer at its position."""
        self._selector.unregister(member.output)
        del self.members[member.number]
        self.forget(member)
        status, said = member.end()
        going = member.job.stream == "extra" and member.error is not None and member.error[0] in GOING
        if member.error is not None and not going:
            self.wrong(f"{member.job.name}, rank {member.rank}: {member.error[0]}: {member.error[1]}")
        if not member.is_killed and (status or member.left != []):
            self.wrong(
                f"{member.job.name}, rank {member.rank} ended with {status}, and left {member.left}:\n{said[-2000:]}"
            )
        elif "Traceback" in said:
            self.wrong(f"{member.job.name}, rank {member.rank} said:\n{said[-2000:]}")
        if member.batches is None and not member.is_leaving:
            self.start_member(member.job, member.rank)

    # --- trainers ---------------------------------------------------------------------------------

    def start_job(self, job: Job, ranks: int) -> None:
        """Start so many ranks at the common position."""
        job.begin(ranks, job.checkpoint())
        for rank in range(ranks):
            self.start_member(job, rank)

    def start_member(self, job: Job, rank: int, batches: int | None = None) -> Member:
        """Start one rank at its position."""
        remote = job.name in FAR or (job.name == "ranks" and rank % 2 == 1)
        connect, table = self.stage.connect(remote=remote), self.stage.tables.get(job.stream)
        member = Member(next(self._numbers), job, rank, connect, table, batches=batches)
        self.members[member.number] = member
        self._selector.register(member.output, selectors.EVENT_READ, lambda: self._listen(member))
        self.counts["trainers started"] += 1
        return member

    def visit(self) -> Member:
        """Start a trainer of its own that reads a few batches and leaves."""
        stream = self.chance.choice(["photos", "cached", "extra"])
        return self.start_member(self._job("visitor", stream), 0, self.chance.randrange(1, 6))

    def kill(self, member: Member) -> None:
        """Kill a trainer."""
        member.is_killed = True
        self.forget(member)
        member.send(signal.SIGKILL)

    def forget(self, member: Member) -> None:
        """Drop its gap: another fault has hit it."""
        for gaps in (self.from_new_daemon, self.past_dead_worker, self.past_dead_host):
            gaps.forget(member.number)

    def running(self) -> list[Member]:
        """Return the trainers that read, without a fault on them."""
        return [
            one for one in self.members.values() if one.is_ready and not one.is_killed and one.pid not in self.stopped
        ]

    def go_on_all(self) -> None:
        """Send SIGCONT to every stopped process."""
        for go_on in list(self.stopped.values()):
            go_on()

    def _job(self, name: str, stream: str) -> Job:
        expected = self.stage.expected(stream)
        return Job(name, stream, expected.plan.steps, expected.rows)

    def _kill_members(self) -> None:
        for member in list(self.members.values()):
            self._selector.unregister(member.output)
            del self.members[member.number]
            member.send(signal.SIGKILL)
            member.end()

    # --- worker hosts -----------------------------------------------------------------------------

    def start_host(self) -> None:
        """Start a worker host that stays until the end of the run."""
        self.hosts.append(self.stage.start_host())
        self.counts["worker hosts started"] += 1

    def kill_host(self, host: WorkerHostProcess) -> None:
        """Kill a worker host, and start another one after a while."""
        self._bury_host(host)
        self.later(self.chance.uniform(0, HOST_AWAY_MAX_S), self.start_host)

    def _bury_host(self, host: WorkerHostProcess) -> None:
        """End it if it still runs; check that it leaves no process and no error of ours."""
        self.hosts.remove(host)
        try:
            host.close()
        except AssertionError as error:
            self.wrong(f"{error}:\n{host.log[-3000:]}")
        host.log_file.unlink()

    def _see_hosts_serve(self) -> None:
        """Check that all hosts serve again after all faults: each has sent rows since."""
        with batchd_client.connect(self.stage.daemon.address, connect_timeout_s=60.0) as connection:

            def do_serve() -> bool:
                links = connection.status()["pool"]["links"]
                return len(links) == HOSTS and all(
                    link["state"] == "serving" and link["received_bytes"] for link in links
                )

            if not self.watch(REST_S, do_serve):
                self.wrong(f"worker hosts that do not serve: {connection.status()['pool']}")

    def _dismiss_hosts(self) -> None:
        """Have them leave, and check that each exits with status 0."""
        for host in self.hosts:
            host.send(signal.SIGTERM)
        for host in list(self.hosts):
            status = host.wait()
            if status:
                self.wrong(f"a worker host ended with {status}")
            self._bury_host(host)

    def _kill_hosts(self) -> None:
        for host in list(self.hosts):
            self._bury_host(host)

    # --- the daemon -------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        """Start the daemon without waiting: ``watch`` reads its output."""
        self.is_up = False
        self.stage.daemon.start(ready=False)
        self.counts["daemons started"] += 1
        self._selector.register(self.stage.daemon.output, selectors.EVENT_READ, self._listen_to_daemon)

    def restart_daemon(self) -> None:
        """Kill it, and start the next one at once."""
        self.first_from_new.forget_all()
        self._selector.unregister(self.stage.daemon.output)
        now = time.monotonic()
        pid = self.stage.daemon.pid
        self.stage.daemon.kill()
        self.stopped.get(pid, lambda: None)()
        self.start_daemon()
        self.first_from_new.begin(0, now)
        self._again.clear()
        for member in self.running():
            self._again[member.number] = member.again
            self.from_new_daemon.begin(member.number, now)

    def _listen_to_daemon(self) -> None:
        """Read its address, or its end, which must never happen by itself."""
        daemon = self.stage.daemon
        self._selector.unregister(daemon.output)
        if os.read(daemon.output, LINE_BYTES_MAX):
            self.is_up = True
            self._selector.register(daemon.output, selectors.EVENT_READ, self._listen_to_daemon)
        else:
            self.wrong(f"the daemon ended by itself with {daemon.wait()}:\n{daemon.log[-3000:]}")
            self.start_daemon()

    def _check_daemon(self) -> None:
        """Check that the daemon has nothing of its trainers left.

        Then it must exit cleanly and leave no remains.
        """
        daemon = self.stage.daemon
        with batchd_client.connect(daemon.address, connect_timeout_s=60.0) as connection:
            wait_until(lambda: len(connection.status()["trainers"]) == 1, "the daemon has forgotten all trainers")
            names = {*STREAMS}
            wait_until(
                lambda: {stream["name"] for stream in connection.status()["streams"]} <= names,
                "streams that nobody reads have ended",
            )
            for stream in connection.status()["streams"]:
                odd = {name: stream[name] for name in ("leased_slots", "bad_samples", "quarantined_samples", "stopped")}
                if any(odd.values()) or stream["subscriptions"]:
                    self.wrong(f"in stream {stream['name']} is left {odd}, claims {stream['subscriptions']}")
        before = _settled_descriptor_count(daemon.pid)
        kinds = _descriptor_kinds(daemon.pid)
        self._selector.unregister(daemon.output)
        daemon.kill()
        daemon.start()
        try:
            wait_until(lambda: descriptor_count(daemon.pid) >= before, "a fresh daemon has as many descriptors")
        except AssertionError:
            had, has = kinds, _descriptor_kinds(daemon.pid)
            self.wrong(f"beyond a fresh daemon's descriptors, it had {had - has}, and lacked {has - had}")
        status = daemon.terminate()
        if status or daemon.files() != {"lock", "log"}:
            self.wrong(f"the daemon ended with {status}, and left {daemon.files()}")
        self._check_log(daemon.log)

    def _check_log(self, log: str) -> None:
        """Check that every error in the log is the result of a fault."""
        if "Traceback" in log:
            self.wrong("a Traceback in the daemon's log: " + log[log.index("Traceback") :][:2000])
        for line in log.splitlines():
            with suppress(ValueError):  # a killed daemon was writing the line
                said = json.loads(line)
                if said["level"] in {"error", "critical"} and said["event"] not in LOGGED:
                    self.wrong(f"the daemon's log: {line[:1000]}")


def _descriptor_kinds(pid: int) -> Counter[str]:
    """Return the number of descriptors of each kind of a process, as the kernel names them."""
    return Counter(re.sub(r"\[\d+\]", "", name) for name in descriptors_of(pid).values())


def _settled_descriptor_count(pid: int) -> int:
    """Return the number of descriptors once it is stable; a reload under way holds two more."""
    count, since = descriptor_count(pid), time.monotonic()

    def has_settled() -> bool:
        nonlocal count, since
        if (now := descriptor_count(pid)) != count or reloads_of(pid):
            count, since = now, time.monotonic()
        return time.monotonic() - since > SETTLED_S

    wait_until(has_settled, "the daemon's descriptors stay the same", every_s=0.1)
    return count
