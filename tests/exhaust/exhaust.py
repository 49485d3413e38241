"""Let each call for descriptors, memory or threads fail, one at a time, and count the outcomes.

    make exhaust [ROLES="server client"] [CALLS="accept4 mmap"] [ERRORS=EMFILE] [SAMPLES=6]

For each role (``server`` is the daemon with everything that it starts, ``client`` a trainer), call
and error, the N-th such call of every thread fails. N is each number, or one of ``SAMPLES`` numbers
if there are more: half of them are spread over all calls, half are the last ones. A run serves two
epochs to a trainer on this host, and to one over TCP. Each run has one of these outcomes:

    served      each process that was not hit got every byte; the daemon exited cleanly
    refused     a process printed why it cannot continue (the daemon not while it served)
    ended       the daemon ended while it served
    start       Python or one of its libraries could not be loaded: no code of ours ran yet
    traceback   a process hit a bug of ours
    abort       a signal that no process sent ended a process
    hang        no process made progress for ``PATIENCE_S``

It needs strace. The exit status is 1 if a run ended as ``ended``, ``traceback``, ``abort`` or
``hang``, unless ``UNAVOIDABLE`` names its message.
"""

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from support.images import write_photos
from support.network import free_port
from support.settings import STILL_PIPELINE, folder_stream, write_settings

PATIENCE_S = 30.0
CALLS = ("accept4", "memfd_create", "fallocate", "epoll_ctl", "clone", "clone3", "mmap")
ERRORS = ("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "ENOSPC")
BAD = ("traceback", "abort", "hang", "ended")
READER = Path(__file__).with_name("reader.py")
MARK = "BATCHD_TEST_EXHAUST"
UNAVOIDABLE = (
    r"\((src/)?(epoll|signaler|thread|mailbox|ctx|ip|io_thread|reaper|poller_base)\.cpp:",
    r"No space left on device \(src/tcp_listener",
    r"FATAL ERROR: OUT OF MEMORY",
    r"bad_alloc",
)
"""Messages with which libzmq aborts, which no code outside of it can prevent: see SECURITY.md."""
_SIGNALLED = re.compile(r"signal=|\"exit_status\": -|ended by signal|SIGABRT|SIGSEGV|SIGBUS")


class Run(NamedTuple):
    """One run: its outcome, and the message that decided it."""

    outcome: str
    words: str


class Bench:
    """The photographs, the configuration, and the expected batches of a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_photos(folder / "photos", {"cat": 8, "dog": 8}, height=48, width=64)
        self.trace = folder / "trace"
        self.seen = ""
        self.environment = {**os.environ, MARK: str(folder)}
        run = self.run("", "", [])
        assert run.outcome == "served", run
        self.seen = self.heard

    def run(self, role: str, call: str, injection: list[str]) -> Run:
        """Serve, with the injection in one role."""
        self.trace.write_text("")
        strace = ["strace", "-D", "-f", "-qq", "-o", str(self.trace), "-e", f"trace={call}", *injection]
        daemon_log = self.folder / "daemon.log"
        port = free_port()
        runtime_dir = Path(tempfile.mkdtemp(prefix="run", dir=self.folder))
        config = write_settings(
            self.folder / "batchd.toml",
            {"photos": folder_stream(self.folder / "photos", batch_size=4, pipeline=STILL_PIPELINE)},
            {
                "runtime_dir": str(runtime_dir),
                "workers": 2,
                "memory": "1 MiB",
                "http": f"127.0.0.1:{free_port()}",
                "tcp": f"127.0.0.1:{port}",
                "drain_timeout_s": 5,
            },
        )
        command = [sys.executable, "-m", "batchd", "serve", "--config", str(config)]
        with daemon_log.open("wb") as log:
            daemon = subprocess.Popen(
                [*(strace if role == "server" else []), *command],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                process_group=0,
            )
        try:
            return self._look(daemon, role, strace, [f"ipc://{runtime_dir}", f"tcp://127.0.0.1:{port}"], daemon_log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
            assert daemon.stdout is not None
            daemon.stdout.close()

    def _look(
        self, daemon: "subprocess.Popen[bytes]", role: str, strace: list[str], addresses: list[str], log: Path
    ) -> Run:
        said = _first_line(daemon)
        if said is None:
            return Run("hang", "the daemon, before it was ready")
        trainers = []
        if said:
            self.heard = ""
            for address in addresses:
                trainers.append(self._read(strace if role == "client" else [], address))
                if daemon.poll() is not None:
                    break
        is_over_early = bool(said) and daemon.poll() is not None
        ended = self._end(daemon)
        words = "\n".join(map(_plain, log.read_text(errors="replace").splitlines()))
        if not said and ended != 0:
            return judge(
                ended, words, has_begun=any(one in words for one in ('"event"', "batchd: ", "daemon/serve.py"))
            )
        runs = [judge(ended, words, has_begun=True, is_over_early=is_over_early), *trainers]
        for outcome in ("abort", "traceback", "hang", "ended", "start", "refused"):
            for run in runs:
                if run.outcome == outcome:
                    return run
        return Run("served", "")

    def _read(self, strace: list[str], address: str) -> Run:
        """Run a trainer."""
        command = [*strace, sys.executable, str(READER), address]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, env=self.environment, check=False
            )
        except subprocess.TimeoutExpired:
            return Run("hang", "the trainer")
        batches = ended.stdout.removeprefix("begun\n")
        if not strace and self.seen and not self.seen.startswith(batches):
            return Run("traceback", "wrong bytes")
        if ended.returncode == 0:
            self.heard = batches
            return Run("served", "") if not self.seen or batches == self.seen else Run("traceback", "wrong bytes")
        if ended.returncode == 3:
            return Run("refused", ended.stderr)
        return judge(ended.returncode, ended.stderr, has_begun=ended.stdout.startswith("begun"))

    def _end(self, daemon: "subprocess.Popen[bytes]") -> int | None:
        daemon.send_signal(signal.SIGTERM)
        try:
            return daemon.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None

    @property
    def was_injected(self) -> bool:
        """Tell whether any call has failed, other than one that frees, as none does in truth."""
        begun: dict[str, str] = {}
        for line in self.trace.read_text(errors="replace").splitlines():
            pid, _blank, call = line.partition(" ")
            if call.endswith("<unfinished ...>"):
                begun[pid] = call
            elif call.endswith("(INJECTED)") and "EPOLL_CTL_DEL" not in begun.pop(pid, "") + call:
                return True
        return False

    def count(self, role: str, call: str) -> int:
        """Return the number of such calls of the process that has most of them."""
        self.run(role, call, [])
        pids = Counter(line.split()[0] for line in self.trace.read_text(errors="replace").splitlines() if call in line)
        return max(pids.values(), default=0)


def _first_line(daemon: "subprocess.Popen[bytes]") -> str | None:
    """Return the address, "" if the daemon ended, or None if it prints nothing."""
    assert daemon.stdout is not None
    os.set_blocking(daemon.stdout.fileno(), False)
    poll = select.poll()
    poll.register(daemon.stdout)
    if not poll.poll(PATIENCE_S * 1000):
        return None
    return (daemon.stdout.read() or b"").decode()


def _plain(line: str) -> str:
    """Return what a child process wrote, if the daemon has logged it as its text."""
    return json.loads(line)["text"] if line.startswith('{"text": ') else line


def judge(status: int | None, words: str, *, has_begun: bool, is_over_early: bool = False) -> Run:
    """Judge a process by its end and its last line.

    ``is_over_early``: it ended without a request.
    """
    lines = [line for line in words.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    fatal = next((line for line in lines if re.search(r"\.cpp:\d+\)|OUT OF MEMORY|bad_alloc|Fatal Python", line)), "")
    if status is None:
        return Run("hang", last)
    if not has_begun:
        return Run("start", last)
    if fatal or (status < 0 and -status not in {signal.SIGTERM, signal.SIGKILL}) or _SIGNALLED.search(words):
        return Run("abort", fatal or next((line for line in lines if _SIGNALLED.search(line)), last))
    if "Traceback" in words:
        errors = [line for line in lines if re.match(r"\w*(Error|Exception|ZMQ\w+|KeyboardInterrupt)\b", line)]
        is_loading = errors[-1:] != [] and "failed to map segment from shared object" in errors[-1]
        return Run("start" if is_loading else "traceback", errors[-1] if errors else last)
    if is_over_early:
        return Run("ended", last)
    return Run("served" if status == 0 else "refused", last)


def injections(bench: Bench, role: str, call: str, samples: int) -> Iterator[int]:
    """Return the numbers of the calls that will fail."""
    total = bench.count(role, call)
    if total <= samples:
        yield from range(1, total + 1)
    else:
        last = samples // 2  # the first calls are Python's, which loads libraries
        spread = {1 + round(step * (total - 1) / (samples - last)) for step in range(samples - last)}
        yield from sorted(spread | {total - step for step in range(last)})


def main() -> int:
    """Run them all, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roles", nargs="+", default=["server", "client"])
    parser.add_argument("--calls", nargs="+", default=CALLS)
    parser.add_argument("--errors", nargs="+", default=ERRORS)
    parser.add_argument("--samples", type=int, default=6)
    options = parser.parse_args()
    total: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="exhaust-") as folder:
        bench = Bench(Path(folder))
        for role in options.roles:
            for call in options.calls:
                chosen = list(injections(bench, role, call, options.samples))
                for error in options.errors if chosen else ():
                    outcomes: Counter[str] = Counter()
                    for when in chosen:
                        run = bench.run(role, call, ["-e", f"inject={call}:error={error}:when={when}"])
                        if bench.was_injected:
                            outcomes[run.outcome] += 1
                            if run.outcome in BAD:
                                reasons[run.outcome, f"{role} {call} {error}: {run.words[-160:]}"] += 1
                    print(
                        f"{role:7} {call:13} {error:8}",
                        *(f"{one} {often}" for one, often in outcomes.items()),
                        flush=True,
                    )
                    total += outcomes
    for (outcome, words), often in sorted(reasons.items()):
        known = any(re.search(pattern, words) for pattern in UNAVOIDABLE)
        print(f"{often:4} {outcome:10}{'(libzmq) ' if known else ''}{words}")
    print("all:", *(f"{one} {often}" for one, often in total.items()))
    return int(any(not any(re.search(one, words) for one in UNAVOIDABLE) for _outcome, words in reasons))


if __name__ == "__main__":
    sys.exit(main())
