"""tf.data service: dispatcher and worker in one process, and trainers that read from them.

With the variant "apart" the dispatcher and each worker have a process of their own, and a worker
decodes in one thread.

Chosen: the dataset of ``tf_side`` runs in the worker; no compression, as all is on one host; with
several trainers the cross-trainer cache, which exists for them: they name the same job, and each
its own trainer id. Server and trainer load TensorFlow at the same time.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import common

SERVER = "server"
APART, DISPATCHER = "apart", "dispatcher"


@contextmanager
def serve(options: common.Options) -> Iterator[str]:
    """Start the servers' processes; gives the dispatcher's address."""
    with ExitStack() as stack:
        server = stack.enter_context(_server(*([DISPATCHER] if options.variant == APART else [])))
        import tf_side  # noqa: F401, PLC0415  takes seconds, in which the server does the same

        address = _target(server)
        workers = options.workers if options.variant == APART else 0
        for worker in [stack.enter_context(_server(address)) for _ in range(workers)]:
            _target(worker)
        yield address


@contextmanager
def _server(*role: str) -> Iterator["subprocess.Popen[str]"]:
    """A server's process, which ends with its standard input."""
    command = [sys.executable, __file__, SERVER, *role]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        yield server
        server.stdin.close()


def _target(server: "subprocess.Popen[str]") -> str:
    """The dispatcher's address, as soon as a server runs."""
    assert server.stdout is not None
    return server.stdout.readline().strip()


def be_server(role: str = "") -> None:
    """A dispatcher, a worker of the one at address ``role``, or both, until standard input ends."""
    from tensorflow.data.experimental import service  # noqa: PLC0415  see serve

    running: list[Any] = []
    target = role
    if role in {"", DISPATCHER}:
        running.append(service.DispatchServer())
        target = running[0].target
    if role != DISPATCHER:
        address = target.partition("://")[2]
        running.append(service.WorkerServer(service.WorkerConfig(dispatcher_address=address)))
    print(target, flush=True)
    sys.stdin.read()


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    import tf_side  # noqa: PLC0415  see serve

    service = tf_side.tf.data.experimental.service
    cache = service.CrossTrainerCache(f"trainer-{options.trainer}") if options.trainers > 1 else None
    each = options._replace(workers=1) if options.variant == APART else options
    distributed = tf_side.dataset(each).apply(
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
    if sys.argv[1] == SERVER:
        be_server(*sys.argv[2:])
    else:
        common.play(batches, serve)
