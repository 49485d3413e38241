"""JAX loaders in programs' lives: forks, threads, interrupts, exits, hosts. No resource remains."""

import json
import signal
import socket

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from batchd_client.jax import BatchdLoader  # noqa: E402
from support.garbage import CYCLES, collected  # noqa: E402
from support.loaders import in_use  # noqa: E402
from support.programs import end, gone, start  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCH = 40


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve a stream of whole batches, and one whose last batch is smaller."""
    return start_shared_daemon(
        {"photos": folder_stream(photos, drop_last=True), "uneven": folder_stream(photos, batch_size=6)}
    )


@pytest.mark.parametrize("program", ["exit_with_batches_held", "exit_with_everything_open", "exit_by_an_exception"])
def test_a_script_ends_at_once_with_everything_still_open(daemon, program):
    """The script exits without waiting, whatever it holds, and the daemon has its slots back."""
    said, status, errors = end(start("jax_program", program, daemon))
    assert said, errors
    assert status == (1 if program == "exit_by_an_exception" else 0)
    assert ("the loss is nan" in errors) == bool(status)
    assert "Exception ignored" not in errors
    gone(daemon)


def test_ctrl_c_leaves_a_state_from_which_nothing_is_repeated_or_skipped(daemon):
    """The signal may hit any place in the loop."""
    program = start("jax_program", "wait_for_interrupt", daemon)
    assert json.loads(program.stdout.readline()) == {"ready": True}
    program.send_signal(signal.SIGINT)
    (said,), status, errors = end(program)
    assert status == 130, errors
    before = []
    with BatchdLoader("photos", address=daemon.address) as loader:
        while loader.state_dict() != said["state"]:
            before.append(next(iter(loader))["index"].tolist())
    assert said["trained"] in (before, before[:-1])  # the last one may be untrained
    gone(daemon)


def test_a_forked_child_does_not_disturb_its_parent(daemon):
    """The child gets an error with the remedy, and the parent continues."""
    said, status, errors = end(start("jax_program", "fork_and_go_on", daemon))
    assert status == 0, errors
    assert said[0] == {"child": "ForkedConnection"}
    assert said[1]["child_status"] == 7
    assert sorted(said[1]["numbers"]) == list(range(EPOCH))
    gone(daemon)


def test_threads_have_a_loader_each(daemon):
    """All threads get the same whole epoch."""
    ((said,), status, errors) = end(start("jax_program", "read_in_threads", daemon))
    assert status == 0, errors
    assert all(epoch == said["epochs"][0] for epoch in said["epochs"])
    assert sorted(said["epochs"][0]) == list(range(EPOCH))


def test_a_loader_that_is_forgotten_is_closed(daemon):
    """The program need not close it."""
    in_use(BatchdLoader, daemon)
    gone(daemon)


@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_a_loader_in_a_cycle_ends_with_it(daemon, tie):
    """The loader's iterator and a batch are part of the cycle, and end with it."""
    collected(lambda: in_use(BatchdLoader, daemon), tie)
    gone(daemon)


def test_processes_have_arrays_of_all_of_them(daemon):
    """Each reads its share, its rows of the whole; a computation sees every sample."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    programs = [start("jax_program", "train_as_a_host", daemon, coordinator, process, 2) for process in range(2)]
    ends = [end(program) for program in programs]
    assert [status for _, status, _ in ends] == [0, 0], ends
    said = [steps for steps, _, _ in ends]
    for steps in said:
        refused = steps.pop()
        assert refused["error"] == "TensorsInvalid"
        assert "drop_last = true" in refused["text"]
    assert len(said[0]) == len(said[1]) == 2
    for first, second in zip(*said, strict=True):
        assert (first["first_row"], second["first_row"]) == (0, 8)
        assert first["shape"] == second["shape"] == first["schema"] == [16, 32, 32, 3]
        assert first["total"] == second["total"] == sum(first["numbers"]) + sum(second["numbers"])
        assert first["state"] == second["state"]
    read = [number for steps in said for step in steps for number in step["numbers"]]
    assert len(set(read)) == len(read) == 32
    gone(daemon)
