"""``batchd ray`` with a file in place of the daemon, and a stand-in for ``batchd worker``.

    python -m support.ray_driver FOLDER ARGUMENTS ...    FOLDER/wanted has the number of workers

Minutes of the rule of ``batchd.pool.ray.scaling`` last a second here.
"""

import sys
from functools import partial
from pathlib import Path

from batchd.cli import ray
from batchd.cli.main import main
from batchd.pool.ray import scaling
from batchd.pool.ray.actor import ActorOptions
from batchd_wire.status import PoolStatistics

STAND_IN = Path(__file__).with_name("stand_in_host.py")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.Wanted.pool = lambda _self: PoolStatistics(
        "tcp://0.0.0.0:7072", (), 0, "", wanted=int((folder / "wanted").read_text())
    )
    ray.ActorOptions = partial(ActorOptions, program=(sys.executable, str(STAND_IN), str(folder)))
    scaling.DOUBLING_S = scaling.IDLE_S = 1.0
    main(["ray", *sys.argv[2:]])
