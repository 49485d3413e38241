"""tf.data service: dispatcher and worker in one process, and trainers that read from them.

Chosen: the dataset of ``tf_side`` runs in the worker; no compression, as all is on one host; with
several trainers the cross-trainer cache, which exists for them: they name the same job, and each
its own trainer id. Server and trainer load TensorFlow at the same time.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import common

SERVER = "server"


@contextmanager
def serve(_options: common.Options) -> Iterator[str]:
    """Start the server's process; gives the dispatcher's address."""
    command = [sys.executable, __file__, SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        import tf_side  # noqa: F401, PLC0415  takes seconds, in which the server does the same

        yield server.stdout.readline().strip()
        server.stdin.close()


def be_server() -> None:
    """A dispatcher and a worker, until standard input ends."""
    from tensorflow.data.experimental import service  # noqa: PLC0415  see serve

    dispatcher = service.DispatchServer()
    _worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.partition("://")[2]))
    print(dispatcher.target, flush=True)
    sys.stdin.read()


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    import tf_side  # noqa: PLC0415  see serve

    service = tf_side.tf.data.experimental.service
    cache = service.CrossTrainerCache(f"trainer-{options.trainer}") if options.trainers > 1 else None
    distributed = tf_side.dataset(options).apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=options.address,
            job_name="photographs",
            compression=None,
            cross_trainer_cache=cache,
        )
    )
    return distributed.prefetch(tf_side.AUTOTUNE).as_numpy_iterator()


if __name__ == "__main__":
    if sys.argv[1:] == [SERVER]:
        be_server()
    else:
        common.play(batches, serve)
