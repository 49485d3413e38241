"""A real daemon as a child of the test: ``batchd serve`` in a separate runtime directory.

For tests of processes.

    start -> [ address, status, kill | terminate | restart ]* -> close

Invariant: after ``close`` no worker and no socket of the daemon is left, or ``close`` raises with
the leftovers.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Self

import batchd_client
from batchd_client.asking import asking
from batchd_wire.messages import AskReload, Reloaded
from support.kernel import RUN_VARIABLE, carriers, fork_servers_of, is_stopped, members_of, workers_of
from support.launcher import Program, start_program
from support.settings import MEMORY, write_settings
from support.waiting import PATIENCE_S, wait_until

MARKER_VARIABLE = "BATCHD_TEST_DAEMON"


class DaemonProcess:
    """One daemon, which may be started several times. ``daemon`` are keys of ``[daemon]``.

    ``faults`` are named steps with their faults (see ``batchd.runtime.failpoints``); each happens
    once, in the first process that reaches the step. ``lasting_faults`` happen in every process
    that reaches their step. ``environment`` is added to the daemon's. ``descriptors_max`` limits
    its descriptors. ``log_level`` and ``log_format`` may be set before it starts, and so may
    ``through``: words before its command, such as those that run it in a container.
    """

    def __init__(
        self,
        parent: Path,
        streams: dict[str, dict[str, Any]],
        *,
        faults: dict[str, str] | None = None,
        lasting_faults: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        descriptors_max: int | None = None,
        **daemon: Any,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="d", dir=parent))
        self.runtime_dir = self.folder / "run"
        self.log_file = self.folder / "log"
        self.log_file.touch()
        daemon = {"runtime_dir": str(self.runtime_dir), "workers": 2, "memory": MEMORY, "http": "off", **daemon}
        self.config = write_settings(self.folder / "batchd.toml", streams, daemon)
        self.address = f"ipc://{self.runtime_dir}"
        self.tcp_address = f"tcp://{daemon['tcp']}" if "tcp" in daemon else None
        self._marker = f"{MARKER_VARIABLE}={self.folder}"
        self.environment = {**clean_environment(), **(environment or {}), MARKER_VARIABLE: str(self.folder)}
        self.through: Sequence[str] = ()
        self.log_level, self.log_format = "debug", "json"
        self._ledger = self.folder / "faults"
        armed = faults or lasting_faults or {}
        self._stops = {name for name, fault in armed.items() if fault == "stop"}
        if armed:
            self.environment["BATCHD_FAILPOINTS"] = ";".join(f"{name}={action}" for name, action in armed.items())
        if faults:
            self._ledger.mkdir()
            self.environment["BATCHD_FAILPOINTS_LEDGER"] = str(self._ledger)
        self._limit = (
            [] if descriptors_max is None else ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors_max)]
        )
        self._sessions: set[int] = set()
        self._is_new = bool(environment)
        self._process: subprocess.Popen[bytes] | Program | None = None
        self._killed: set[int] = set()
        self._workers = daemon["workers"]
        self._has_workers = False

    # --- its life ---------------------------------------------------------------------------------

    def start(self, *, ready: bool = True) -> Self:
        """Start it, and by default wait until trainers can connect."""
        assert self._process is None, "the daemon runs already"
        self._has_workers = False
        log_options = ["--log-level", self.log_level, "--log-format", self.log_format]
        with self.log_file.open("ab") as log:
            self._process = start_program(
                ["batchd", "serve", "--config", str(self.config), *log_options],
                environment=self.environment,
                folder=self.folder,
                stderr=log.fileno(),
                through=[*self.through, *self._limit],
                is_new=self._is_new,
            )
        self._sessions.add(self._process.pid)
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait for the line with the address."""
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline().decode().strip() if readable else "(nothing)"
        assert line == self.address, f"the daemon said {line!r}:\n{self.log}"

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        assert self._process is not None, "the daemon does not run"
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor of its address, for callers that poll other descriptors, too."""
        assert self._process is not None, "the daemon does not run"
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the daemon has ended, for any reason."""
        return self._process is None or self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        assert self._process is not None, "the daemon does not run"
        self._process.send_signal(number)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Wait for its end; return its exit status, or minus the signal."""
        assert self._process is not None, "the daemon does not run"
        status = self._process.wait(seconds)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def terminate(self) -> int:
        """Let it drain, and wait for its end."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill it, and leave all cleanup to the kernel."""
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def restart(self) -> None:
        """Kill it, and start it again on the same directory."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it, if it still runs, and check that nothing of it is left."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.wait()
        try:
            wait_until(lambda: not self.offspring(), f"the workers of {self.folder} have ended")
        finally:
            for pid in self.offspring():
                os.kill(pid, signal.SIGKILL)
        log = self.log
        print(f"--- log of {self.folder} ---\n{log}")  # noqa: T201  pytest shows it where the test fails
        shutil.rmtree(self.folder)
        assert "Traceback" not in log, "the daemon or a worker raised an unexpected error; see its log"

    # --- observations -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The output of ``batchd status --json``, from a separate session."""
        with batchd_client.connect(self.address) as connection:
            return connection.status()

    def stream_status(self, name: str = "photos") -> dict[str, Any]:
        """The part of the status about one stream."""
        return next(stream for stream in self.status()["streams"] if stream["name"] == name)

    def reload(self, exit_code: int = 0) -> str:
        """Reload its configuration like ``batchd reload``; return its first line, or problems."""
        with asking(self.address) as session:
            outcome = session.request(AskReload, Reloaded, monotonic() + PATIENCE_S)
        assert outcome.exit_code == exit_code, outcome.text
        return outcome.text if exit_code else outcome.text.partition("\n")[0]

    def worker_pids(self) -> set[int]:
        """The processes of its workers, according to the kernel.

        The first ones are forked soon after its start.
        """
        if not self._has_workers:
            wait_until(lambda: len(workers_of(self.pid)) >= self._workers, "all workers are forked")
            self._has_workers = True
        return workers_of(self.pid)

    def fork_server_pid(self) -> int:
        """The process that its workers are forked from."""
        (pid,) = fork_servers_of(self.pid)
        return pid

    def kill_a_worker(self) -> None:
        """Kill its oldest worker that this method has not killed before.

        A dying worker may disappear at any moment.
        """
        victim = min(wait_until(lambda: self.worker_pids() - self._killed, "a worker runs"))
        os.kill(victim, signal.SIGKILL)
        self._killed.add(victim)

    def offspring(self) -> set[int]:
        """All living processes that it ever started."""
        found = carriers(self._marker).union(*map(members_of, self._sessions))
        return found - ({self._process.pid} if self._process is not None else set())

    def wait_for_fault(self, name: str) -> int:
        """Wait until the fault has happened; return the process in which it happened."""
        entry = self._ledger / name
        process = int(wait_until(lambda: entry.exists() and entry.read_text(), f"{name} was passed"))
        if name in self._stops:  # the ledger has it a moment before
            wait_until(lambda: is_stopped(process), f"process {process} is stopped")
        return process

    def files(self) -> set[str]:
        """The files in its runtime directory."""
        return {path.name for path in self.runtime_dir.iterdir()} if self.runtime_dir.exists() else set()

    @property
    def log(self) -> str:
        """Its whole output on standard error."""
        return self.log_file.read_text()

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log about one kind of event."""
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event]


def clean_environment() -> dict[str, str]:
    """The environment without batchd's variables, but with the mark of the leak check."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHD_")}
    return {**kept, RUN_VARIABLE: os.environ[RUN_VARIABLE]}
