"""The recipes of docs/trackers.md with the real packages, offline: card and losses are there.

Each program of the page runs as it is, against a real daemon; then `batchd blame` takes the losses
from the tracker.
"""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import batchd as run_batchd
from support.settings import folder_stream

PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
STEPS, EPOCHS = 5, 2
BEFORE = """
import json, sys
from pathlib import Path
import batchd_client

def train(batch):
    return 10.0 * batch.epoch + batch.step

with batchd_client.connect(sys.argv[1], name="tracked") as daemon, daemon.stream("photos", epochs=1) as stream:
"""


def program_of(title: str) -> str:
    """The first Python program below a title of the page."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def tracked(start_daemon, photos, tmp_path):
    """Save the card, run a program of the page, and return the daemon."""

    def run(title: str, **environment: str) -> None:
        daemon = start_daemon({"photos": folder_stream(photos)})
        run_batchd("card", "photos", "--running", "-o", str(tmp_path / "card.json"), address=daemon.address)
        lines = "".join(f"    {line}\n" for line in program_of(title).splitlines())
        program = tmp_path / "program.py"
        program.write_text(BEFORE + lines)
        words = [sys.executable, str(program), daemon.address]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        blamed = run_batchd("blame", "photos", "--json", address=daemon.address)
        assert json.loads(blamed.stdout)["reports"] == STEPS

    return run


def card_in(text: str) -> dict:
    card = json.loads(text)
    assert card["stream"] == "photos"
    return card


def records_in(log: bytes) -> Iterator[bytes]:
    """The records of an offline run: a log of LevelDB's form, behind a head of 7 bytes.

    In blocks of 32 KiB: checksum, length, type (1 whole, 2 first, 3 middle, 4 last), a part.
    """
    at, whole = 7, b""
    while at + 7 <= len(log):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:
            yield whole
            whole = b""


def test_wandb_has_card_and_losses(tracked, tmp_path) -> None:
    """Offline, it writes them into a file of its own."""
    pytest.importorskip("wandb")
    tracked("Weights & Biases", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))

    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    config, losses = {}, []
    for data in records_in(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for updates in (record.config.update, record.run.config.update):
            config |= {one.key or ".".join(one.nested_key): one.value_json for one in updates}
        items = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
        if "loss" in items:
            losses.append(tuple(float(items[name]) for name in ("batchd/epoch", "batchd/step", "loss")))
    assert losses == [(0, step, step) for step in range(STEPS)]
    card_in(config["batchd"])


def test_mlflow_has_card_and_losses_that_blame_takes(tracked, tmp_path, monkeypatch) -> None:
    """In a store of files; the page says how they become lines."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracked("MLflow", MLFLOW_TRACKING_URI=f"file://{tmp_path}/runs")

    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    card_in(Path(run.info.artifact_uri.removeprefix("file://"), "card.json").read_text())
    scope = {"mlflow": mlflow, "json": json, "run_id": run.info.run_id, "stream_steps": STEPS}
    file = tmp_path / "losses.jsonl"
    exec(program_of("From the tracker back to the data").replace('"losses.jsonl"', repr(str(file))), scope)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["epoch"], one["step"], one["loss"]) for one in lines] == [
        (0, step, float(step)) for step in range(STEPS)
    ]
    done = run_batchd("blame", "photos", "--losses", file, "--card", tmp_path / "card.json")
    assert done.stdout.startswith("photos: 5 reports, ")


def test_tensorboard_has_card_and_losses(tracked, tmp_path) -> None:
    """In its event file."""
    pytest.importorskip("torch")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracked("TensorBoard")

    events = accumulator.EventAccumulator(str(tmp_path / "runs" / "photos"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(step, float(step)) for step in range(STEPS)]
    (text,) = events.Tensors("batchd card/text_summary")
    card_in(text.tensor_proto.string_val[0].decode())
