"""Benchmark: private memory of a worker after batches of the main job, without the slots."""

from harness import Bench, Figure, private_bytes, served

import batchd_client


def run(bench: Bench) -> None:
    """One epoch, then look."""
    config = bench.config(repeats=2)
    with served(config) as address, batchd_client.connect(address) as daemon:
        for batch in daemon.stream("photos", epochs=1):
            batch.release()
        pids = [worker["pid"] for worker in daemon.status()["workers"]]
        each = [private_bytes(pid) / 1e6 for pid in pids]
    print(f"private memory of the workers: {', '.join(f'{one:.1f}' for one in each)} MB")
    bench.report(Figure("worker-private-mb", max(each), "<=", 60, 1))
