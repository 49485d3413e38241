"""A script that leaves its loader open after a restart of the daemon still ends."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from support.fake_daemon import FakeDaemon
from support.waiting import PATIENCE_S

SCRIPT = """
import sys
from batchd_client.torch import BatchdLoader

loader = BatchdLoader("photos", address=sys.argv[1])
batches = iter(loader)
next(batches)
print("ready", flush=True)
for restart in sys.stdin:
    next(batches)
    print("ready", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("restarts", [1, pytest.param(2, marks=pytest.mark.jobs)])
def test_a_script_ends_with_a_loader_open_that_has_reconnected(tmp_path, restarts):
    """The lifeline is then younger than the loader, so it is finalised first."""
    with (
        FakeDaemon(tmp_path / "run") as fake,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, fake.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as script,
    ):
        try:
            assert script.stdout.readline() == "ready\n"
            for _ in range(restarts):
                fake.kill()
                fake.start()
                script.stdin.write("again\n")
                script.stdin.flush()
                assert script.stdout.readline() == "ready\n"
            _, errors = script.communicate(timeout=PATIENCE_S)
        finally:
            script.kill()
        assert (script.returncode, errors) == (0, "")
        fake.wait_until(lambda: not fake.sessions)
