"""Run the benchmarks.

``make bench``, ``make bench ONLY=efficiency``, ``make bench DATA=/path/to/images``

Each figure ends as a line ``BENCH name value >= target ok`` (or ``short``). The exit status is 0
either way: a figure that is short is a finding, not a failure.
"""

import argparse
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from harness import benchmark, processor

from batchd.runtime.cpus import available_cpus

BENCHMARKS = (
    "efficiency",
    "handover",
    "sharing",
    "start",
    "sandbox",
    "shares",
    "define",
    "numa",
    "plan",
    "memory",
    "observe",
    "remote",
    "connections",
    "speed",
    "verify",
    "sources",
    "slow_storage",
    "cache",
    "call",
    "crops",
    "recipes",
    "structure",
    "media",
    "index",
    "torch_loader",
    "batches",
    "reports",
    "reload",
    "restart",
    "scaling",
    "pool",
)
PACKAGES = ("batchd", "numpy", "opencv-python-headless", "simplejpeg", "pyzmq", "msgpack")


def main() -> int:
    """Run what is asked for and repeat all figures at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of photographs (default: 512 generated ones)")
    parser.add_argument("--only", choices=BENCHMARKS, help="run one")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison (default: 7)")
    options = parser.parse_args()
    print(f"{available_cpus()} CPUs, {processor()}, {platform.platform()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    data = Path(options.data).resolve() if options.data else None
    if data is not None and not data.is_dir():
        parser.error(f"--data: there is no folder {data}")
    os.chdir(Path(__file__).parent)
    with benchmark(data, options.rounds) as bench:
        for name in [options.only] if options.only else BENCHMARKS:
            print(f"\n{name}: {(import_module(name).__doc__ or '').splitlines()[0]}", flush=True)
            bench.begin()
            import_module(name).run(bench)
    print()
    for figure in bench.figures:
        print(figure.line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
