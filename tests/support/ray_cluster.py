"""A real Ray cluster of several raylets on this machine. For the tests of ``tests/with_ray``.

    test --- a line: CPUs of one more node ---> program --- its pids, as JSON ---> test

The program is a process of its own, because Ray leaves threads in its process. Ray's processes
overwrite their environments, where a mark would be, and listen on every address of the machine.
So such a test runs in namespaces of its own, where all new processes belong to it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from support.kernel import is_alive, process_ids
from support.waiting import wait_until

TESTS = Path(__file__).parents[1]
REAP_S = 0.1
FAST = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
    "gcs_rpc_server_reconnect_timeout_s": 10,
}
"""Shorter timeouts than Ray's defaults, which add up to a minute."""


PORT = 6390
AUTOSCALED_NODES = 2
AUTOSCALED = {
    "cluster_name": "test",
    "max_workers": AUTOSCALED_NODES,
    "provider": {
        "type": "fake_multinode",
        "gcs_address": f"127.0.0.1:{PORT}",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "node": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": AUTOSCALED_NODES},
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.05,
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
"""Configuration of Ray's own autoscaler, whose nodes are raylets of this machine."""


class RayCluster:
    """A cluster whose head has no CPUs; ``add`` or Ray's autoscaler gives it nodes."""

    def __init__(self, folder: Path, environment: dict[str, str], *, autoscaled: bool = False) -> None:
        alone = os.getppid() == 1 and {name for _number, name in socket.if_nameindex()} == {"lo"}
        assert alone, "run this by `make test-ray`, which gives it namespaces of its own"
        self._before = set(process_ids())
        self.environment = environment
        self._log = (folder / "cluster.log").open("wb")
        self._program = subprocess.Popen(
            [sys.executable, "-m", "support.ray_cluster", *([str(folder)] if autoscaled else [])],
            cwd=TESTS,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        head = self._answer()
        self.address: str = head["address"]
        self.gcs: int | None = head["gcs_server"]

    def add(self, cpus: int) -> int:
        """Add a node, and return the pid of its raylet."""
        self._program.stdin.write(f"{cpus}\n".encode())
        self._program.stdin.flush()
        raylet: int = self._answer()["raylet"]
        return raylet

    def _answer(self) -> dict[str, Any]:
        while line := self._program.stdout.readline():
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(Path(self._log.name).read_text())

    def close(self) -> None:
        """End every process that has started since."""

        def kill() -> bool:
            found = [pid for pid in set(process_ids()) - self._before if is_alive(pid)]
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        if not self._log.closed:
            self._program.kill()
            self._program.communicate()
            self._log.close()
        wait_until(kill, "no process of the cluster is left")


def main() -> None:
    """Start a head, then a node for each line of standard input."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  in this process alone

    def say(**facts: Any) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    if len(sys.argv) > 1:
        configuration = Path(sys.argv[1], "autoscaling.json")
        configuration.write_text(json.dumps(AUTOSCALED))
        start = ["start", "--head", f"--port={PORT}", "--num-cpus=0", f"--autoscaling-config={configuration}"]
        environment = os.environ | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *start], env=environment, check=True, stdout=2)
        say(address=f"127.0.0.1:{PORT}", gcs_server=None)
        sys.stdin.read()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": FAST},
    )
    Thread(target=_reap, args=[cluster], daemon=True).start()
    say(address=cluster.address, gcs_server=_pid(cluster.head_node, "gcs_server"))
    for line in sys.stdin:
        say(raylet=_pid(cluster.add_node(num_cpus=int(line)), "raylet"))


def _reap(cluster: Any) -> None:
    """Reap ended processes: a raylet that is a zombie counts as alive for its workers."""
    while True:
        for node in cluster.list_all_nodes():
            for kind in list(node.all_processes.values()):
                for process in kind:
                    process.process.poll()
        time.sleep(REAP_S)


def _pid(node: Any, kind: str) -> int:
    [process] = node.all_processes[kind]
    pid: int = process.process.pid
    return pid


if __name__ == "__main__":
    main()
