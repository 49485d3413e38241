"""JAX loaders in programs' lives: forks, threads, interrupts, exits, hosts. No resource remains."""

import socket

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from batchd_client.jax import BatchdLoader  # noqa: E402
from support.loader_suite import LifeSuite  # noqa: E402
from support.programs import end, gone, start  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCH = 40


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve a stream of whole batches, and one whose last batch is smaller."""
    return start_shared_daemon(
        {"photos": folder_stream(photos, drop_last=True), "uneven": folder_stream(photos, batch_size=6)}
    )


class TestLife(LifeSuite):
    """Of loaders of arrays."""

    loader_type = BatchdLoader
    program = "jax_program"

    def test_a_script_ends_at_once_with_a_stream_of_its_own(self, daemon):
        """It has opened the stream and the connection itself."""
        self.test_a_script_ends_at_once_with_everything_still_open(daemon, "exit_with_everything_open")


def test_threads_have_a_loader_each(daemon):
    """All threads get the same whole epoch."""
    ((said,), status, errors) = end(start("jax_program", "read_in_threads", daemon))
    assert status == 0, errors
    assert all(epoch == said["epochs"][0] for epoch in said["epochs"])
    assert sorted(said["epochs"][0]) == list(range(EPOCH))


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
