"""The GPU feed benchmark on the stand-in for CUDA: it ends, and says that it measured nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from support.daemon_process import clean_environment  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 300.0
MEASUREMENTS = {
    "host to device, registered ring",
    "registered ring / pin_memory()",
    "CPU time of the trainer for each batch",
    "next(loader), batches ready",
    "ResNet-50 training, batchd",
    "ResNet-50 training, DataLoader",
    "idle share of the device, batchd",
    "images/s, batchd / DataLoader",
}


@pytest.fixture
def rehearse(photos, tmp_path, daemons_folder):
    """Run the script to its end; return its output, and the lines of its table."""

    def rehearse(*options):
        out = tmp_path / "results" / "table.md"
        command = (BENCHMARKS / "gpu_feed.py", "--data", photos, "--workers", 1, "--batch", 4, "--out", out, *options)
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=tmp_path,
            env={**clean_environment(), "XDG_RUNTIME_DIR": str(daemons_folder)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return done, out.read_text().splitlines() if out.exists() else []

    return rehearse


@pytest.mark.jobs
def test_a_rehearsal_goes_through_all_of_it_and_measures_nothing(rehearse):
    """The table has every row, says first that there is no GPU, and has no figures."""
    done, lines = rehearse("--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    caption = "Not measured on a GPU: none could be had; the code paths were run on a stand-in for the CUDA runtime ("
    assert lines[2].startswith(caption)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert {name for name, _found, _target in rows} >= MEASUREMENTS
    assert all(found.startswith("not measured (") for _name, found, _target in rows)
    assert "\n".join(lines) in done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the script would measure")
def test_without_a_gpu_nothing_is_measured_unless_a_rehearsal_is_asked_for(rehearse):
    """The script says so, and writes nothing."""
    done, lines = rehearse()
    assert done.returncode == 1
    assert "no GPU that torch can use is here" in done.stdout
    assert not lines


def test_the_rehearsal_that_is_kept_says_that_it_is_one():
    """The rehearsal has no figures, folder or host name."""
    kept = (BENCHMARKS / "results" / "gpu_feed-rehearsal.md").read_text()
    assert "Not measured on a GPU: none could be had" in kept
    assert "/tmp" not in kept
    assert "/home" not in kept
