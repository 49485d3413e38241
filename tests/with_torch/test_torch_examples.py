"""The PyTorch examples on a few photographs: they train, stop at Ctrl-C, resume, and clean up."""

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from support.programs import examples, finish  # noqa: E402
from support.settings import folder_stream  # noqa: E402
from support.waiting import wait_until  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 120.0
FOREVER = "1000000"


@pytest.fixture
def start(tmp_path, daemons_folder):
    """Start an example."""
    with examples(tmp_path, XDG_RUNTIME_DIR=str(daemons_folder)) as start:
        yield start


def resnet(photos, out, epochs, *more):
    """Return the command for a tiny network: 5 steps in an epoch."""
    sizes = ("--batch-size", 8, "--side", 32, "--width", 4, "--save-every", 2)
    return (EXAMPLES / "torch_resnet.py", "--data", photos, "--out", out, "--epochs", epochs, *sizes, *more)


@pytest.fixture
def run(tmp_path, daemons_folder, monkeypatch, capfd):
    """Run an example in this process, which has torch loaded; return status and both outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemons_folder))
    monkeypatch.delenv("BATCHD_ADDRESS", raising=False)

    def run(*command):
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(command[0]), run_name="__main__")
        return ended.value.code, *capfd.readouterr()

    return run


def until(example, beginning):
    """Return the first line with this beginning."""
    for line in example.stdout:
        if line.startswith(beginning):
            return line.strip()
    raise AssertionError(example.stderr.read())


@pytest.mark.thorough
def test_the_resnet_trains_to_the_end(run, photos, tmp_path):
    """Every step prints its loss; a second run has nothing left to do."""
    command = resnet(photos, tmp_path / "out", 1)
    code, said, _ = run(*command)
    steps = [line.partition(":")[0] for line in said.splitlines() if line.startswith("epoch ")]
    assert steps == [f"epoch 0, step {step} of 5" for step in range(1, 6)]
    assert said.endswith("\ndone: 1 epochs\n")
    code_again, said, _ = run(*command)
    assert said == "resuming at epoch 1, step 0\ndone: 1 epochs\n"
    assert code == code_again == 0


@pytest.mark.jobs
def test_the_resnet_goes_on_after_ctrl_c(start, photos, tmp_path):
    """The example continues with the step after its last checkpoint, perhaps amid an epoch."""
    out = tmp_path / "out"
    example = start(*resnet(photos, out, FOREVER))
    until(example, "epoch 0, step 3")
    os.killpg(example.pid, signal.SIGINT)
    said, complained = example.communicate(timeout=DEADLINE_S)
    assert (example.returncode, complained) == (130, "")
    assert "the same command goes on from" in said
    data = torch.load(out / "checkpoint.pt", weights_only=True)["data"]
    again = start(*resnet(photos, out, FOREVER))
    assert until(again, "resuming") == f"resuming at epoch {data['epoch']}, step {data['step']}"
    assert until(again, "epoch").startswith(f"epoch {data['epoch']}, step {data['step'] + 1} of 5")
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 130


@pytest.mark.jobs
def test_the_resnet_reads_from_a_daemon_that_runs_already(start, start_daemon, tmp_path):
    """$BATCHD_ADDRESS names it; the example needs no folder then."""
    daemon = start_daemon()
    small = ("--width", 4, "--epochs", 1, "--out", tmp_path)
    said = finish(start(EXAMPLES / "torch_resnet.py", *small, BATCHD_ADDRESS=daemon.address)).splitlines()
    assert said[-1] == "done: 1 epochs"


@pytest.mark.jobs
def test_the_resnet_is_told_how_many_classes_a_source_without_names_has(start, start_daemon, photos, tmp_path):
    """The error says so, and with the number the example trains."""
    listed = tmp_path / "listed.txt"
    files = sorted(photos.rglob("*.jpg"))[:16]
    listed.write_text("".join(f"{file} {number % 7}\n" for number, file in enumerate(files)))
    source = {"type": "list", "path": str(listed), "allow_outside_root": True}
    daemon = start_daemon({"photos": folder_stream(photos, source=source)})
    command = (EXAMPLES / "torch_resnet.py", "--width", 4, "--epochs", 1, "--out", tmp_path)
    example = start(*command, BATCHD_ADDRESS=daemon.address)
    _, complained = example.communicate(timeout=DEADLINE_S)
    assert example.returncode == 2
    assert "names no classes: say with --classes N how many there are" in complained
    said = finish(start(*command, "--classes", 7, BATCHD_ADDRESS=daemon.address)).splitlines()
    assert said[-1] == "done: 1 epochs"
    model = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert list(model.values())[-1].shape == (7,)


def test_a_mistake_is_said_in_a_line(run, tmp_path):
    """The error has no traceback."""
    code, _, complained = run(*resnet(tmp_path / "nothing", tmp_path / "out", 1))
    assert code == 1
    assert "Traceback" not in complained
    assert "torch_resnet: " in complained


def ddp(photos, out, epochs, ranks):
    """Return the command for a job of several ranks on the CPU: 4 steps in an epoch."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return (
        *launcher,
        EXAMPLES / "torch_ddp.py",
        "--data",
        photos,
        "--out",
        out,
        "--epochs",
        epochs,
        "--batch-size",
        10,
    )


@pytest.mark.jobs
def test_the_ranks_of_the_ddp_example_share_an_epoch(start, photos, tmp_path):
    """A later job of another number of ranks continues."""
    said = finish(start(*ddp(photos, tmp_path / "out", 2, ranks=2), CUDA_VISIBLE_DEVICES="")).splitlines()
    # torchrun's ranks write a line and its end one by one, so lines of both may stand in one
    lines = re.findall(r"rank . of 2: epoch ., \d+ samples", "\n".join(said))
    assert sorted(lines) == [f"rank {rank} of 2: epoch {epoch}, 20 samples" for rank in range(2) for epoch in range(2)]
    said = finish(start(*ddp(photos, tmp_path / "out", 3, ranks=1), CUDA_VISIBLE_DEVICES="")).splitlines()
    assert said == ["resuming at epoch 2, step 0", "rank 0 of 1: epoch 2, 40 samples"]


@pytest.mark.jobs
def test_the_ddp_example_goes_on_after_ctrl_c(start, photos, tmp_path):
    """All ranks and the daemon end, and the checkpoint exists."""
    checkpoint = tmp_path / "out" / "checkpoint.pt"
    example = start(*ddp(photos, tmp_path / "out", FOREVER, ranks=2), CUDA_VISIBLE_DEVICES="")
    wait_until(checkpoint.exists, "a checkpoint has been written", DEADLINE_S)
    os.killpg(example.pid, signal.SIGINT)
    example.communicate(timeout=DEADLINE_S)
    assert example.returncode != 0
    again = start(*ddp(photos, tmp_path / "out", FOREVER, ranks=2), CUDA_VISIBLE_DEVICES="")
    assert until(again, "resuming at epoch")
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=DEADLINE_S)
