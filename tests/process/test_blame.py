"""`batchd blame`: from real reports and files of losses to the data at fault, with pictures."""

import json
import re

import cv2
import numpy as np
import pytest

import batchd_client
from batchd.core.plan import Plan
from batchd_wire.position import Position
from support.commands import batchd as run_batchd
from support.images import write_photos
from support.settings import STILL_PIPELINE, folder_stream, write_settings
from support.shards import photo_shards

pytestmark = pytest.mark.usefixtures("forked_children")

EPOCHS = 6
COUNTS = {"cat": 24, "owl": 24, "yak": 24}
BAD_SHARD = 2


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Make a folder of photographs, and its configurations: a folder, shards, and both mixed."""
    folder = tmp_path_factory.mktemp("animals")
    write_photos(folder / "photos", COUNTS)
    shards = photo_shards(folder / "photos", folder / "shards", 12)
    whole = {"type": "folder", "path": str(folder / "photos")}
    streams = {
        "photos": folder_stream(folder / "photos"),
        "shards": {"source": shards, "batch_size": 8, "pipeline": STILL_PIPELINE},
        "ordered": {"source": shards, "batch_size": 2, "shuffle": False, "pipeline": STILL_PIPELINE},
        "both": {"source": {"type": "concat", "sources": [whole, shards]}, "batch_size": 8, "pipeline": STILL_PIPELINE},
    }
    return folder, streams, write_settings(folder / "batchd.toml", streams, {"workers": 2})


def losses_of(rows, chance, bad):
    """A loss for each row: about 1, and far above where ``bad``."""
    return np.where(bad, 8.0, 1.0) + chance.normal(0, 0.1, len(rows))


def write_losses(file, samples_of, plan, bad, *, epochs=EPOCHS, of_rows=True):
    """Log the losses of a run, as a trainer would; ``bad`` tells of samples."""
    chance, lines = np.random.default_rng(0), []
    for epoch in range(epochs):
        for step in range(plan.steps):
            samples = plan.indices(Position(epoch, step), 0, plan.rows(Position(epoch, step)))
            values = losses_of(samples, chance, bad(samples))
            loss = values.tolist() if of_rows else float(values.mean())
            lines.append(json.dumps({"epoch": epoch, "step": step, "loss": loss}))
    assert samples_of == plan.samples
    file.write_text("\n".join(lines))
    return file


@pytest.mark.thorough
def test_class_is_blamed_from_what_a_trainer_reported(start_daemon, animals, tmp_path) -> None:
    """With the configuration of the daemon, the worst rows, and a picture of them."""
    daemon = start_daemon({"photos": animals[1]["photos"]})
    chance = np.random.default_rng(0)
    with batchd_client.connect(daemon.address, name="run-7") as client, client.stream("photos") as stream:
        for _ in range(EPOCHS):
            for batch in stream:
                stream.report(losses_of(batch["label"], chance, batch["label"] == 1))

    done = run_batchd("blame", "photos", "-o", str(tmp_path / "sheet.png"), address=daemon.address)
    assert done.stdout.startswith(f"photos: {9 * EPOCHS} reports of run run-7, ")
    assert re.search(r"class owl: [2-4]\.\d times its share of the bad rows", done.stdout)
    assert "of its 144 rows" in done.stdout
    assert "class cat" not in done.stdout
    assert "label 1 (owl), loss " in done.stdout
    assert "/owl/000" in done.stdout
    assert cv2.imread(str(tmp_path / "sheet.png")).shape[1] > 1000

    plain = json.loads(run_batchd("blame", "photos", "--run", "run-7", "--json", address=daemon.address).stdout)
    assert (plain["stream"], plain["run"], plain["reports"]) == ("photos", "run-7", 9 * EPOCHS)
    assert {(one["kind"], one["name"]) for one in plain["found"] if one["kind"] == "class"} == {("class", "owl")}
    assert all(one["chance"] <= 0.01 for one in plain["found"])
    assert {one["class_name"] for one in plain["worst"]} == {"owl"}


def test_mislabelled_shard_is_blamed_from_a_file(animals, tmp_path) -> None:
    """By its path, which the index alone does not have in a form for people."""
    folder, _streams, config = animals
    plan = Plan(72, 8, 0, shuffle=True, drop_last=False)
    losses = write_losses(tmp_path / "losses.jsonl", 72, plan, lambda samples: samples // 6 == BAD_SHARD)

    done = run_batchd("blame", "shards", "--losses", losses, "--config", config)
    name = re.escape(f"file {folder}/shards/train-{BAD_SHARD:02}.tar (samples 12 to 17)")
    assert re.search(name + r": \d+\.\d times its share of the bad rows\n  36 of its 36 rows, ", done.stdout)
    assert "train-03" not in done.stdout


def test_shard_in_order_is_blamed_from_losses_of_batches(animals, tmp_path) -> None:
    """Its jumps of eight epochs agree."""
    folder, _streams, config = animals
    plan = Plan(72, 2, 0, shuffle=False, drop_last=False)
    bad = lambda samples: samples // 6 == BAD_SHARD  # noqa: E731  as above
    losses = write_losses(tmp_path / "losses.jsonl", 72, plan, bad, epochs=8, of_rows=False)

    done = run_batchd("blame", "ordered", "--losses", losses, "--config", config)
    assert f"{folder}/shards/train-{BAD_SHARD:02}.tar" in done.stdout
    assert "times its share of the batches at which the loss jumps" in done.stdout


def test_source_of_a_mixture_is_blamed(animals, tmp_path) -> None:
    """And the same class in both sources is one class."""
    _folder, _streams, config = animals
    plan = Plan(144, 8, 0, shuffle=True, drop_last=False)
    chance = np.random.default_rng(1).random(144) < 0.3
    losses = write_losses(tmp_path / "losses.jsonl", 144, plan, lambda samples: (samples >= 72) & chance[samples])

    plain = json.loads(run_batchd("blame", "both", "--losses", losses, "--config", config, "--json").stdout)
    (source,) = [one for one in plain["found"] if one["kind"] == "source"]
    assert source["name"].startswith("sources[1]: webdataset ")
    assert source["hits"] == plain["bad_rows"]


def test_clean_losses_blame_nothing(animals, tmp_path) -> None:
    """The command says so, and draws no picture."""
    plan = Plan(72, 8, 0, shuffle=True, drop_last=False)
    losses = write_losses(tmp_path / "losses.jsonl", 72, plan, lambda samples: samples < 0)

    done = run_batchd("blame", "photos", "--losses", losses, "--config", animals[2])
    assert "nothing stands out: no group of " in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (
            ["--losses", "{losses}", "--config", "{config}"],
            1,
            "no rows 0 to 8 at epoch 0, step 500; give the configuration of the run",
        ),
        (["--losses", "{none}", "--config", "{config}"], 1, "there is no file"),
        (["--config", "{config}"], 2, "--config and --card go with --losses"),
        (["--losses", "{losses}", "--run", "a"], 2, "leave --run out"),
    ],
)
def test_impossible_requests_are_explained(animals, tmp_path, words, status, named) -> None:
    """With what to do instead."""
    losses = tmp_path / "losses.jsonl"
    losses.write_text('{"epoch": 0, "step": 0, "loss": [1, 2, 3, 4, 5, 6, 7, 8], "rows": 8}\n')
    if "step 500" in named:
        losses.write_text('{"epoch": 0, "step": 500, "loss": 1, "rows": 8}\n')
    places = {"losses": losses, "none": tmp_path / "none", "config": animals[2]}
    done = run_batchd("blame", "photos", *(word.format(**places) for word in words), status=status)
    assert named in done.stderr


def test_daemon_without_reports_says_how_to_make_some(start_daemon, animals) -> None:
    """And one with those of several runs names them."""
    daemon = start_daemon({"photos": animals[1]["photos"]})
    assert "call stream.report(loss)" in run_batchd("blame", "photos", address=daemon.address, status=1).stderr
    for name in ("a", "b"):
        with batchd_client.connect(daemon.address, name=name) as client, client.stream("photos") as stream:
            next(iter(stream))
            stream.report(1.0)

    done = run_batchd("blame", "photos", address=daemon.address, status=1)
    assert "reports of 2 runs: 'a', 'b'; choose one with --run" in done.stderr
    assert (
        "no reports of a run 'c'"
        in run_batchd("blame", "photos", "--run", "c", address=daemon.address, status=1).stderr
    )
    assert "1 report of run a" in run_batchd("blame", "photos", "--run", "a", address=daemon.address).stdout
