"""Benchmark: shares. Two tenants by their keys, over TCP on loopback, both limited by decoding.

    weights     3 to 1, one stream against eight: the larger one's part of the workers' time
    idle        ms from the end of the larger one's trainer until workers do no more for it,
                and from its return until the first order for it is done
    hostile     1 to 1: images/s of a tenant beside one that opens streams, reads bad samples, asks
                for the status all the time, defines streams over a folder of 10^6 files ÷ beside
                one that reads a stream

The parts are of the workers' time as the daemon counts it, so foreign load changes little. The
trainers of the hostile tenant have the lowest priority, as if they were on a machine of their own.
"""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from harness import Bench, Figure, beside, endless, served, spread

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_client.errors import BatchdClientError
from batchd_wire.keys import connection_file_text

LARGE, SMALL = "large", "small"
STREAMS = 8
WARM_S, WINDOW_S = 3.0, 10.0
ASKING_S = 0.005
MANY_FILES, FILES_A_FOLDER = 1_000_000, 10_000
LOWEST = 19
STEPS = '[{ op = "decode" }, { op = "resize", size = [64, 64] }]'
BAD_FILES = 64


def run(bench: Bench) -> None:
    """All parts."""
    files = _keys(bench.scratch)
    address = _written(bench, 3.0)
    with served(bench.scratch / "shares.toml") as here:
        _weights(bench, here, address, files)
        _idle(bench, here, address, files)
    many = _many_files(bench.scratch / "many")
    address = _written(bench, 1.0, define=many)
    with served(bench.scratch / "shares.toml") as here:
        _hostile(bench, here, address, files, many)


def _many_files(folder: Path) -> str:
    """A folder of many small files, each a link to one of a folder's."""
    for number in range(MANY_FILES // FILES_A_FOLDER):
        (folder / str(number)).mkdir(parents=True)
        first = folder / str(number) / "first.jpg"
        first.write_bytes(b"\xff\xd8\xff\xe0 no photograph")
        for other in range(1, FILES_A_FOLDER):
            os.link(first, folder / str(number) / f"{other}.jpg")
    return str(folder)


def _keys(scratch: Path) -> dict[str, str]:
    directory = KeyDirectory(scratch / "keys")
    directory.make_daemon_key()
    files = {}
    for name in (LARGE, SMALL):
        file = scratch / f"{name}.key"
        file.touch(0o600)
        file.write_text(connection_file_text(directory.new(name, None)))
        files[name] = str(file)
    return files


def _written(bench: Bench, weight: float, define: str = "") -> str:
    """A configuration with a stream for one tenant, others for the other one, and bad samples."""
    bad = bench.scratch / "bad" / "class"
    bad.mkdir(parents=True, exist_ok=True)
    for number in range(BAD_FILES):
        (bad / f"{number}.jpg").write_bytes(b"\xff\xd8\xff\xe0 no photograph")
    port = 17_070 + int(weight)
    streams = [
        bench.stream(name, pipeline=STEPS, batch_size=32, seed=str(seed))
        for seed, name in enumerate((LARGE, *(f"{SMALL}{number}" for number in range(STREAMS))))
    ]
    (bench.scratch / "shares.toml").write_text(
        f'[daemon]\nworkers = 2\nmemory = "1GiB"\ntcp = "127.0.0.1:{port}"\nkeys_dir = "{bench.scratch}/keys"\n'
        + (f'[daemon.define]\nwho = ["key:{SMALL}"]\nroots = ["{define}"]\n' if define else "")
        + f'[daemon.shares]\n{LARGE} = {{ weight = {weight}, keys = ["{LARGE}"] }}\n'
        f'{SMALL} = {{ keys = ["{SMALL}"] }}\n{"".join(streams)}'
        f'[streams.bad]\nsource = {{ type = "folder", path = "{bad.parent}" }}\nbatch_size = 32\n'
        f'max_bad_fraction = 1.0\non_error = "mask"\npipeline = {STEPS}\n'
    )
    return f"tcp://127.0.0.1:{port}"


class Doing(NamedTuple):
    """What the trainers of a tenant do: read these streams, as fast as they get batches.

    ``nicer``: of what priority. ``asks``: whether one asks for the status all the time.
    ``defines``: the folder of streams that one defines, again and again.
    """

    streams: Sequence[str]
    nicer: int = 0
    asks: bool = False
    defines: str = ""


def _read_all(address: str, key: str, doing: Doing, over: Event) -> None:
    os.nice(doing.nicer)
    readers = [Thread(target=_read, args=(address, key, name, over)) for name in doing.streams]
    readers += [Thread(target=_ask, args=(address, key, over))] if doing.asks else []
    readers += [Thread(target=_define, args=(address, key, doing.defines, over))] if doing.defines else []
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def _read(address: str, key: str, name: str, over: Event) -> None:
    with batchd_client.connect(address, key=key) as daemon:
        while not over.is_set():
            for batch in daemon.stream(name):
                batch.release()
                if over.is_set():
                    break


def _ask(address: str, key: str, over: Event) -> None:
    with batchd_client.connect(address, key=key) as daemon:
        while not over.wait(ASKING_S):
            try:
                daemon.status()
            except BatchdClientError:  # it asks too often
                over.wait(ASKING_S)


def _define(address: str, key: str, folder: str, over: Event) -> None:
    table = {"source": {"type": "folder", "path": folder}, "pipeline": [{"op": "decode"}], "batch_size": 8}
    with batchd_client.connect(address, key=key) as daemon:
        while not over.wait(ASKING_S):
            with suppress(BatchdClientError):  # the sizes of its images are not known
                daemon.define("many", {**table, "seed": time.monotonic_ns() % 1_000_000}, keep_s=0).close()


def _work(daemon: batchd_client.Daemon) -> dict[str, tuple[float, int]]:
    """Worker seconds and samples of each tenant so far."""
    found = {LARGE: (0.0, 0), SMALL: (0.0, 0)}
    for one in daemon.status()["usage"]:
        if one["tenant"] in found:
            work_s, samples = found[one["tenant"]]
            found[one["tenant"]] = work_s + one["work_s"], samples + one["delivered_samples"]
    return found


def _window(daemon: batchd_client.Daemon) -> dict[str, tuple[float, int]]:
    before = _work(daemon)
    time.sleep(WINDOW_S)
    after = _work(daemon)
    return {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}


def _weights(bench: Bench, here: str, address: str, files: dict[str, str]) -> None:
    small = [f"{SMALL}{number}" for number in range(STREAMS)]
    with (
        batchd_client.connect(here) as daemon,
        beside(_read_all, address, files[LARGE], Doing([LARGE])),
        beside(_read_all, address, files[SMALL], Doing(small)),
    ):
        time.sleep(WARM_S)
        parts = []
        for _ in range(bench.rounds):
            work = _window(daemon)
            parts.append(work[LARGE][0] / sum(work_s for work_s, _samples in work.values()))
    print(f"weights 3 to 1: part of the larger tenant {spread(parts, 3)}")
    bench.report(Figure("shares-3-to-1-off", max(abs(part - 0.75) for part in parts), "<=", 0.03, 3))


def _idle(bench: Bench, here: str, address: str, files: dict[str, str]) -> None:
    """Time until an idle share is given away, and until it is taken back."""
    given_ms, taken_ms = [], []
    with (
        batchd_client.connect(here) as daemon,
        batchd_client.connect(address, key=files[LARGE]) as large,
        beside(_read_all, address, files[SMALL], Doing([f"{SMALL}{number}" for number in range(STREAMS)])),
    ):
        for _ in range(bench.rounds):
            before_s = _work(daemon)[LARGE][0]
            began_s = time.monotonic()
            stream = large.stream(LARGE)
            while _work(daemon)[LARGE][0] == before_s:
                pass
            taken_ms.append(1000 * (time.monotonic() - began_s))
            end_s = time.monotonic() + 1.0
            batches = endless(stream)
            while time.monotonic() < end_s:
                next(batches).release()
            stream.close()
            closed_s = last_s = time.monotonic()
            work_s = _work(daemon)[LARGE][0]
            while time.monotonic() < closed_s + 0.5:
                now_s, at_s = _work(daemon)[LARGE][0], time.monotonic()
                if now_s != work_s:
                    work_s, last_s = now_s, at_s
            given_ms.append(1000 * (last_s - closed_s))
    print(
        f"idle share: given away after {spread(given_ms, 0)} ms, first order done {spread(taken_ms, 0)} ms after asking"
    )
    bench.report(Figure("shares-given-away-ms", statistics.median(given_ms), "<=", 100, 0))


def _hostile(bench: Bench, here: str, address: str, files: dict[str, str], many: str) -> None:
    ratios = []
    worst = [*(f"{SMALL}{number}" for number in range(STREAMS)), "bad", "bad"] * 2
    with batchd_client.connect(here) as daemon, beside(_read_all, address, files[LARGE], Doing([LARGE])):
        for _ in range(bench.rounds):
            rates = []
            for doing in (Doing([f"{SMALL}0"], LOWEST), Doing(worst, LOWEST, asks=True, defines=many)):
                with beside(_read_all, address, files[SMALL], doing):
                    time.sleep(WARM_S)
                    work = bench.measure(f"beside {len(doing.streams)} streams", lambda: _window(daemon))
                rates.append(work[LARGE])
            ratios.append(rates[1][1] / rates[0][1])
            print(
                f"worker seconds of the tenant beside a polite and a hostile one: {rates[0][0]:.2f}, {rates[1][0]:.2f}"
            )
    print(f"images/s beside a hostile tenant / beside a polite one: {spread(ratios)}")
    bench.report(Figure("shares-beside-hostile", statistics.median(ratios), ">=", 0.95))
