"""A slow daemon gets help from two nodes, and one of them is killed: the batches stay the same.

Run it with ``make demo-cluster``.

    two trainers <-- daemon, 1 local worker <-- 2 nodes, each with a worker host of 2 workers

A function of the user makes each sample take 20 ms more, so the effect shows on any number of
cores. The nodes are those of a Ray cluster, with `batchd ray`, if Ray is installed, else two plain
`batchd worker`. Everything runs in namespaces of its own, with a network of loopback alone, and
ends with them; all files but the photographs are in their memory.

    python examples/demo_cluster.py [--data /path/to/images] [--seconds 6] [--plain]
"""

import argparse
import hashlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

import batchd
import batchd_client
from batchd.cli.demo import FOLDER, TRAINERS, photographs
from batchd.errors import BatchdError
from batchd_wire.status import LinkStatistics, read_status

NODES = 2
NODE_WORKERS = 2
LOCAL_WORKERS = 16
"""Of the daemon without worker hosts whose bytes are compared."""
BATCH_SIZE = 32
PORT = 7072
SHOWN_EVERY_S = 0.25
PATIENCE_S = 120.0
MEMORY = Path("/dev/shm")
ADDRESS = f"tcp://127.0.0.1:{PORT}"
BATCHD = (sys.executable, "-m", "batchd")
FUNCTION = """\
import time


def slow(sample, rng):
    time.sleep(0.02)
    return sample
"""
CONFIG = """\
[daemon]
python_path = [{folder}]
keys_dir = {keys}
http = "off"

[streams.photos]
source = {{ type = "folder", path = {source} }}
batch_size = {batch_size}
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [224, 224] }},
    {{ op = "random_flip" }},
    {{ op = "call", function = "demo_function:slow" }},
]
"""


# --- trainers -------------------------------------------------------------------------------------


def read(address: str, batches: int | None = None) -> Iterator[str]:
    """Read ``batches``, or without an end; after each, the digest of all fields of all so far."""
    digest = hashlib.sha256()
    with batchd_client.connect(address) as daemon, daemon.stream("photos") as photos:
        count = 0
        while batches is None or count < batches:
            for batch in photos:
                for name in sorted(batch):
                    digest.update(batch[name].tobytes())
                count += 1
                yield digest.hexdigest()
                if count == batches:
                    return


@dataclass(slots=True)
class Trainer:
    """A trainer process: the digest after each batch, and when it came."""

    name: str
    process: "subprocess.Popen[bytes]"
    digests: list[str] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)

    def take_line(self) -> None:
        """Take in one digest."""
        line = self.process.stdout.readline()
        if not line:
            raise BatchdError(f"{self.name} ended with exit status {self.process.wait()}; its message stands above")
        self.digests.append(line.decode().strip())
        self.came_s.append(time.monotonic())


@contextmanager
def trainers(address: str) -> Iterator[list[Trainer]]:
    """Start the trainers; whatever happens, none is left behind."""
    with ExitStack() as stack:
        running = []
        for name in TRAINERS:
            command = [sys.executable, __file__, "--trainer", address]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            running.append(Trainer(name, process))
        yield running


# --- nodes ----------------------------------------------------------------------------------------


class PlainNodes:
    """Two worker hosts, started as a person would on two machines."""

    kind = "two plain worker hosts"
    killed = "the first worker host was killed (kill -9)"

    def __init__(self, folder: Path, key: Path, _address: str, stack: ExitStack) -> None:
        self._processes = []
        for number in range(1, NODES + 1):
            words = ["worker", ADDRESS, "--key", str(key), "--workers", str(NODE_WORKERS), "--name", f"node{number}"]
            self._processes.append(start(folder / f"node{number}.log", stack, *BATCHD, *words))

    def kill_one(self) -> None:
        """Kill the first one."""
        self._processes[0].kill()


class RayNodes:
    """A Ray cluster of a head and two nodes, and `batchd ray`, which asks it for two actors."""

    kind = "a Ray cluster of two nodes"
    killed = "the first node was killed (kill -9 of its raylet)"

    def __init__(self, folder: Path, _key: Path, address: str, stack: ExitStack) -> None:
        command = sys.executable, __file__, "--ray-nodes"
        self._cluster = start(folder / "ray.log", stack, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        cluster = self._cluster.stdout.readline().decode().strip()
        if not cluster:
            raise BatchdError(f"the Ray cluster did not start: {tail(folder / 'ray.log')}")
        many = str(NODES)
        words = ["ray", ADDRESS, "--address", cluster, "--min", many, "--max", many, "--cpus", str(NODE_WORKERS)]
        words += ["--daemon", address, "--keys-dir", str(folder / "keys")]
        start(folder / "driver.log", stack, *BATCHD, *words)

    def kill_one(self) -> None:
        """Kill the first node."""
        self._cluster.stdin.write(b"kill\n")
        self._cluster.stdin.flush()
        self._cluster.stdout.readline()


def ray_nodes() -> None:
    """Start a head without CPUs and the nodes; kill the first one at a line of standard input."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  in this process alone

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=NODE_WORKERS) for _ in range(NODES)]
    print(cluster.address, flush=True)
    sys.stdin.readline()
    cluster.remove_node(nodes[0], allow_graceful=False)
    print("killed", flush=True)
    sys.stdin.readline()


def start(
    log: Path, stack: ExitStack, *command: str, stdin: int = subprocess.DEVNULL, stdout: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start a program that ends with ``stack``; what it says goes into ``log``."""
    file = stack.enter_context(log.open("wb"))
    streams = {"stdin": stdin, "stdout": stdout or file, "stderr": file}
    process = stack.enter_context(subprocess.Popen(command, **streams))
    stack.callback(process.kill)
    return process


def tail(log: Path) -> str:
    """The last line of a log."""
    return (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]


# --- the demo -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Phase:
    """A row of the table: a state of the pool, and the batches of each trainer in it."""

    name: str
    remote_workers: int
    begun_s: float
    batches_before: int
    seconds: float = 0.0
    batches: int = 0

    @property
    def images_per_s(self) -> float:
        """Of each trainer."""
        return self.batches * BATCH_SIZE / self.seconds if self.seconds else 0.0


class Demo:
    """The trainers of a daemon, read while something happens."""

    def __init__(self, address: str, running: list[Trainer], live: Live) -> None:
        self._address = address
        self._running = running
        self._live = live
        self._shown_s = 0.0
        self.phases: list[Phase] = []

    def links(self) -> list[LinkStatistics]:
        """The worker hosts that fill batches."""
        with batchd_client.connect(self._address) as daemon:
            pool = read_status(daemon.status()).pool
        return [link for link in (pool.links if pool is not None else ()) if "photos" in link.streams]

    def phase(self, name: str, seconds: float) -> Phase:
        """Measure for a while."""
        workers = sum(link.workers for link in self.links())
        phase = Phase(name, workers, time.monotonic(), len(self._running[0].digests))
        self.phases.append(phase)
        self.wait(lambda: time.monotonic() - phase.begun_s >= seconds, "the time is over", phase)
        return phase

    def wait(self, is_done: Callable[[], bool], what: str, phase: Phase | None = None) -> None:
        """Take in what the trainers read until something is so."""
        deadline_s = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            for trainer in self._running:
                selector.register(trainer.process.stdout, selectors.EVENT_READ, trainer)
            while not is_done():
                if time.monotonic() > deadline_s:
                    raise BatchdError(f"waited {PATIENCE_S:g} s in vain until {what}")
                for key, _events in selector.select(SHOWN_EVERY_S):
                    key.data.take_line()
                if phase is not None:
                    phase.seconds = time.monotonic() - phase.begun_s
                    phase.batches = len(self._running[0].digests) - phase.batches_before
                if time.monotonic() - self._shown_s > SHOWN_EVERY_S:
                    self.show()

    def show(self) -> None:
        """Draw the table."""
        self._shown_s = time.monotonic()
        self._live.update(table(self.phases), refresh=True)


def table(phases: list[Phase]) -> Table:
    """What each phase brought."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(("", "local workers", "remote workers", "images/s of each trainer")):
        drawn.add_column(column, justify="right" if index else "left")
    for one in phases:
        drawn.add_row(one.name, "1", str(one.remote_workers), f"{one.images_per_s:,.0f}")
    return drawn


def longest_pause_s(running: list[Trainer], since_s: float) -> float:
    """The longest time between two batches of a trainer, since a moment."""
    return max(after - before for one in running for before, after in pairwise(one.came_s) if after >= since_s)


def run(options: argparse.Namespace) -> None:
    """The whole demo, inside its namespaces."""
    console = Console(highlight=False)
    source = photographs(options.data, FOLDER)
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    (folder / "demo_function.py").write_text(FUNCTION)
    config = folder / "batchd.toml"
    places = {"folder": folder, "keys": folder / "keys", "source": source}
    quoted = {name: json.dumps(str(place)) for name, place in places.items()}
    config.write_text(CONFIG.format(**quoted, batch_size=BATCH_SIZE))
    key = folder / "pool.key"
    new_key = [*BATCHD, "keys", "new", "--role", "worker", "--name", "pool", "-o", str(key)]
    subprocess.run([*new_key, "--keys-dir", str(folder / "keys")], check=True, capture_output=True)
    nodes = PlainNodes if options.plain or find_spec("ray") is None else RayNodes
    overrides = {"daemon.workers": "1", "daemon.worker_address": ADDRESS.removeprefix("tcp://")}
    console.print(f"serving {source}: 1 local worker, 20 ms more for each sample, and {nodes.kind}\n", soft_wrap=True)
    with batchd.serve(config, overrides=overrides) as address, trainers(address) as running:
        with Live(table([]), console=console, auto_refresh=False) as live, ExitStack() as stack:
            demo = Demo(address, running, live)
            demo.wait(lambda: all(one.digests for one in running), "the trainers read")
            demo.phase("before", options.seconds)
            cluster = nodes(folder, key, address, stack)
            all_workers = NODES * NODE_WORKERS
            demo.wait(lambda: sum(one.workers for one in demo.links()) == all_workers, "the nodes serve")
            demo.phase("with two nodes", options.seconds)
            killed_s = time.monotonic()
            cluster.kill_one()
            demo.wait(lambda: len(demo.links()) == NODES - 1, "the daemon notices")
            noticed_s = time.monotonic() - killed_s
            demo.phase("one node killed", options.seconds)
            demo.show()
        for one in running:
            one.process.send_signal(signal.SIGTERM)
    pause_s = longest_pause_s(running, killed_s)
    console.print(
        f"\n{nodes.killed}: the daemon gave its orders to others within {noticed_s:.2f} s, and no trainer waited longer "
        f"than {pause_s:.1f} s for a batch.",
        soft_wrap=True,
    )
    compare(config, running, console)


def compare(config: Path, running: list[Trainer], console: Console) -> None:
    """Compare with a daemon without worker hosts. Raises ``BatchdError`` if any batch differs."""
    batches = min(len(one.digests) for one in running)
    with batchd.serve(config, overrides={"daemon.workers": str(LOCAL_WORKERS)}) as address:
        local = list(read(address, batches))[-1]
    found = {"local workers": local, **{one.name: one.digests[batches - 1] for one in running}}
    console.print(f"\nSHA-256 of all fields of the first {batches} batches:")
    for name, digest in found.items():
        console.print(f"  {name:<14}{digest[:32]}...")
    if len(set(found.values())) > 1:
        raise BatchdError("the bytes are not the same")
    console.print("The same bytes, each position once.")


# --- namespaces -----------------------------------------------------------------------------------


def isolated() -> None:
    """Go on in namespaces of our own: no network but loopback, and all processes end together."""
    if shutil.which("unshare") is None:
        raise BatchdError("the demo needs `unshare` of util-linux")
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    words = ["unshare", *user, "--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
    script = f'mount -t tmpfs demo {MEMORY} && ip link set lo up && exec "$@"'
    os.execvp(words[0], [*words, "sh", "-c", script, "demo", sys.executable, __file__, *sys.argv[1:], "--inside"])


def main() -> int:
    """Run the demo, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of images, with or without one sub-folder for each class")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each of the three measurements")
    parser.add_argument("--plain", action="store_true", help="two plain worker hosts, even if Ray is installed")
    for name in ("--inside", "--ray-nodes"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.trainer:
            for digest in read(options.trainer):
                print(digest, flush=True)
        elif options.ray_nodes:
            ray_nodes()
        elif options.inside:
            os.environ.update(TMPDIR=str(MEMORY), RAY_TMPDIR=str(MEMORY), XDG_RUNTIME_DIR=str(MEMORY))
            run(options)
        else:
            isolated()
    except BatchdError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
