"""`batchd replay`: any position again, in another process, with the bytes that trainers got."""

import errno
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import batchd
import batchd_client
from batchd.cli.replay import drawn_text
from batchd.commands.history import batches
from batchd.commands.history.batches import Replayer, TrainerRank
from batchd.commands.history.seen import SampleLookup
from batchd.config.load import load_config
from batchd.errors import BatchdError, SourceInvalid
from batchd_client.errors import PermissionDenied
from batchd_wire.position import Position
from golden.data import write_data
from golden.digests import FILE as GOLDEN_FILE
from golden.digests import pinned
from golden.streams import MEMORY, golden_streams
from support.commands import batchd as run_batchd
from support.daemon_process import clean_environment
from support.images import encode, write_photos
from support.network import free_port
from support.seen import digest_of
from support.settings import folder_stream, write_settings
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("forked_children")

KINDS = [
    *("train", "webdataset", "mix", "followed", "ragged-tokens", "call", "substituted", "masked", "cached-pixels"),
    *("packed-tokens", "split-tokens", "blocks"),
]
"""Golden streams of many kinds: random steps, records, users' code, bad samples, a cut pipeline."""
POISON, STRANGER = 17, 12345
WIDTH = 80


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Make the golden streams' data, and a configuration of all of them."""
    data = tmp_path_factory.mktemp("golden") / "data"
    write_data(data)
    streams = golden_streams(data)
    return (
        streams,
        data,
        write_settings(
            data.parent / "batchd.toml", streams, {"python_path": [str(data)], "workers": 2, "memory": MEMORY}
        ),
    )


@pytest.fixture(scope="module")
def replayed(golden):
    """Replay two random positions of each of ``KINDS``: {(stream, epoch, step): (digest, CRC)}."""
    chance, made = random.Random(5), {}
    config = load_config(golden[2])
    for name in KINDS:
        with Replayer(config, name) as replayer:
            for epoch in chance.sample(range(20), 2):
                step = chance.randrange(replayer.plan.steps)
                batch = replayer.at(Position(epoch, step))
                made[name, epoch, step] = digest_of(batch.fields.items()), batch.crc32
    return made


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_replay_has_the_bytes_that_trainers_got(start_daemon, golden, replayed, workers):
    """Digest and CRC are equal for random positions, whatever number of workers filled them."""
    streams, data, _config = golden
    chosen = {name: streams[name] for name in KINDS}
    daemon = start_daemon(chosen, python_path=[str(data)], workers=workers)

    found = {}
    with batchd_client.connect(daemon.address) as connection:
        for name, epoch, step in replayed:
            with connection.stream(name) as stream:
                stream.seek(epoch, step)
                with next(iter(stream)) as batch:
                    found[name, epoch, step] = digest_of(batch.items()), batch.crc32()

    assert found == replayed


@pytest.mark.slow
def test_each_golden_stream_is_replayed_with_the_bytes_that_it_always_had(golden):
    """Every position of the first epoch of every stream gives the digest that is on record."""
    known = json.loads(GOLDEN_FILE.read_text())
    config, found = load_config(golden[2]), {}
    for name in golden[0]:
        with Replayer(config, name) as replayer:
            batches = [replayer.at(Position(0, step)) for step in range(replayer.plan.steps)]
            lines = [f"0 {step} {digest_of(batch.fields.items())}" for step, batch in enumerate(batches)]
            text = np.frombuffer("\n".join(lines).encode(), np.uint8)
            found[name] = [pinned(name, replayer.fingerprint), digest_of([("lines", text)])]

    assert found == {name: known[name][:2] for name in found}


# --- from the state of a trainer ------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty samples in batches of three: fourteen, the last with one sample."""
    return start_shared_daemon({"photos": folder_stream(photos, batch_size=3)}, tcp=f"127.0.0.1:{free_port()}")


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("world_size", "taken"), [(1, 13), (2, 3), (3, 4)])
def test_another_process_replays_the_next_batch_and_earlier_ones_from_a_state(daemon, tmp_path, world_size, taken):
    """Only the JSON of the state is known, and the rank; the last round of an epoch is shared."""
    rank = world_size - 1
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", rank, world_size)
        batches, seen = iter(stream), []
        for _ in range(taken):
            with next(batches) as batch:
                seen.append(batch.crc32())
        state = tmp_path / "state.json"
        state.write_text(json.dumps(stream.state_dict()))
        with next(batches) as batch:
            seen.append(batch.crc32())
    options = ["replay", "photos", "--config", daemon.config, "--state", state, "--rank", rank]
    words = [*map(str, options), "--world-size", str(world_size)]
    command = [sys.executable, "-m", "batchd", *words, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), check=True, timeout=PATIENCE_S
    )
    assert int(json.loads(done.stdout)["crc32"], 16) == seen[-1]
    run_batchd(*words, "--back", "1", "--verify", seen[-2])


def test_a_state_with_its_card_is_all_that_a_replay_needs(daemon, tmp_path):
    """A trainer resumes from it, too; without the card it has less than 200 bytes."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", state=connection.stream("photos").state_dict(card=True))
        with next(iter(stream)) as batch:
            crc32 = batch.crc32()
        state, file = stream.state_dict(card=True), tmp_path / "ckpt.json"
        file.write_text(json.dumps(state))
        assert stream.state_dict() == {name: value for name, value in state.items() if name != "card"}
        assert len(json.dumps(stream.state_dict())) < 200
    saved = json.loads(run_batchd("card", "photos", "--running", "--state", file, address=daemon.address).stdout)
    assert {**state["card"], "time_s": 0, "state": saved["state"]} == {**saved, "time_s": 0}
    for words in (["--card", file], ["--card", file, "--state", file]):
        run_batchd("replay", "photos", *words, "--back", "1", "--verify", f"{crc32:08x}")


def test_a_trainer_on_another_host_gets_no_card(daemon):
    """The card has the daemon's configuration; the error names the command to run there."""
    with batchd_client.connect(daemon.tcp_address) as connection:
        stream = connection.stream("photos")
        with pytest.raises(PermissionDenied, match="on another host, or older; run `batchd card photos --running`"):
            stream.state_dict(card=True)
        assert stream.state_dict()["stream"] == "photos"


def test_earlier_batches_are_found_across_epochs(daemon):
    """Three ranks read five rounds in an epoch; ``back`` counts them over its beginning."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", 2, 3, epochs=3)
        seen = []
        for _epoch in range(3):
            for batch in stream:
                with batch:
                    seen.append((batch.epoch, batch.step, tuple(batch["index"].tolist())))
    with Replayer(load_config(daemon.config), "photos") as replayer:
        for back in (1, 5, 6, 11):
            batch = replayer.at(Position(2, 9), TrainerRank(2, 3), back)
            rows = tuple(batch.fields["index"].tolist())
            assert (*batch.position, rows) == seen[13 - back]


def test_a_saved_configuration_replays_what_a_reload_has_changed(start_daemon, photos, tmp_path):
    """The card makes the old batch; the daemon's configuration by the socket makes the new one."""
    daemon = start_daemon({"photos": folder_stream(photos)})
    card, state = tmp_path / "card.json", tmp_path / "state.json"
    old, saved = _batch_at(daemon, 1, 2)
    state.write_text(json.dumps(saved))
    run_batchd("card", "photos", "--running", "--state", state, "-o", card, address=daemon.address)
    text = daemon.config.read_text()
    changed = text.replace("window = 4", "window = 4\nseed = 5").replace(
        '"random_flip"', '"random_flip", "probability" = 0.75'
    )
    daemon.config.write_text(changed)
    daemon.reload()
    new, _state = _batch_at(daemon, 1, 2)
    assert new != old

    run_batchd("replay", "photos", "1:2", "--card", card, "--verify", old)
    run_batchd("replay", "photos", "--card", card, "--back", "1", "--verify", old)
    run_batchd("replay", "photos", "1:2", "--running", "--verify", f"{new:08x}", address=daemon.address)
    refused = run_batchd("replay", "photos", "1:2", "--running", "--card", card, address=daemon.address, status=2)
    assert 'pipeline[2], "random_flip": probability 0.5 became 0.75\n  seed: 0 became 5' in refused.stderr
    unlike = run_batchd("replay", "photos", "--running", "--state", state, address=daemon.address, status=2)
    assert "with other files or other settings" in unlike.stderr
    differs = run_batchd("replay", "photos", "1:2", "--running", "--verify", old, address=daemon.address, status=1)
    assert f"the batch has the CRC {new:08x}, not " in differs.stderr


def test_a_file_that_a_daemon_does_not_know_is_no_part_of_its_batches(start_daemon, tmp_path):
    """With other files on disk, no answer about the running daemon would be right."""
    write_photos(tmp_path / "some", {"cat": 9})
    daemon = start_daemon({"photos": folder_stream(tmp_path / "some")})
    words = ["photos", "--running"]
    run_batchd("replay", *words, "0:0", address=daemon.address)
    write_photos(tmp_path / "some", {"dog": 1})

    for command in (["replay", *words, "0:0"], ["seen", *words, "--index", "3", "--epochs", "1"]):
        refused = run_batchd(*command, address=daemon.address, status=2)
        assert "stream 'photos' makes other batches than the daemon serves:\n  " in refused.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": "1:3"}, "position is '1:3'; give \\(epoch, step\\), or a state"),
        ({"position": 3}, "position is 3; give"),
        ({"position": (0, 1.5)}, "position is \\(0, 1.5\\); give"),
        ({"config": {}}, "config is of type dict; give the path"),
    ],
)
def test_what_is_no_position_or_configuration_is_named(photos, tmp_path, changes, said):
    config = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {})

    with pytest.raises(BatchdError, match=said):
        batchd.replay(**{"config": config, "stream": "photos", "position": (0, 0), **changes})


def _batch_at(daemon, epoch, step):
    """The CRC of a batch, and the state after it."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        stream.seek(epoch, step)
        with next(iter(stream)) as batch:
            return batch.crc32(), stream.state_dict()


# --- how rows were made ---------------------------------------------------------------------------


def test_a_row_names_what_its_random_steps_drew(tmp_path):
    """Each row is the crop of its file that the replay names, flipped where it says so."""
    pixels = (np.arange(60 * 80 * 3).reshape(60, 80, 3) // 7 % 251).astype(np.uint8)
    folder = tmp_path / "photos" / "all"
    folder.mkdir(parents=True)
    (folder / "one.png").write_bytes(encode(pixels, ".png"))
    steps = [{"op": "decode"}, {"op": "random_crop", "size": [50, 30]}, {"op": "random_flip", "direction": "both"}]
    source = {"type": "concat", "sources": [{"type": "folder", "path": str(folder.parent)}] * 9}
    config = write_settings(
        tmp_path / "batchd.toml", {"photos": {"source": source, "batch_size": 9, "pipeline": steps}}, {}
    )

    batch = batchd.replay(config, "photos", (4, 0))

    seen = Counter()
    for row, image in zip(batch.rows, batch.fields["image"], strict=True):
        crop, flip = row.draws
        top, left, height, width = crop.drew["crop"].values()
        expected = pixels[top : top + height, left : left + width]
        for one in flip.drew["flips"]:
            expected = expected[:, ::-1] if one == "horizontal" else expected[::-1]
        np.testing.assert_array_equal(image, expected)
        seen.update(flip.drew["flips"])
        assert (crop.op, flip.op, row.class_name, row.planned) == ("random_crop", "random_flip", "all", row.sample)
    assert set(seen) == {"horizontal", "vertical"}


def test_every_random_step_says_what_it_drew(golden):
    """Colours, rectangles and angles are named; a function draws its own numbers."""
    config, drawn = load_config(golden[2]), {}
    for name in ("jitter", "cutout", "degrees", "quarter-turns", "call", "followed", "views", "decode_video"):
        with Replayer(config, name) as replayer:
            drawn[name] = [row.draws for row in replayer.at(Position(0, 0)).rows if row.is_good]

    for (jitter,) in drawn["jitter"]:
        assert {*jitter.drew} == {"brightness", "contrast", "saturation", "hue"}
        assert 0.6 <= jitter.drew["brightness"] <= 1.4
    assert len({tuple(jitter.drew) for (jitter,) in drawn["jitter"]}) > 1, "in the order that was drawn"
    assert all(len(cutout.drew["holes"]) == 2 for (cutout,) in drawn["cutout"])
    assert all(-30 <= turn.drew["degrees"] <= 30 for (turn,) in drawn["degrees"])
    assert {turn.drew["degrees"] for (turn,) in drawn["quarter-turns"]} <= {0, 90, 180, 270}
    assert all(function.drew == {"numbers": "its own"} for (function,) in drawn["call"])
    assert all(
        [draw.op for draw in row] == ["random_resized_crop", "random_flip", "rotate"] for row in drawn["followed"]
    )
    for (views,) in drawn["views"]:
        assert [*views.drew] == ["image[0]", "image[1]", "local[0]", "local[1]", "local[2]", "floats"]
        assert [step["op"] for step in views.drew["image[1]"]] == [
            "random_resized_crop",
            "random_flip",
            "color_jitter",
            "blur",
        ]
        assert re.fullmatch(
            r"views: image\[0\] random_resized_crop \d+ x \d+ from .*; local\[2\] random_resized_crop .*; floats nothing",
            drawn_text(views),
        )
    for clips in drawn["decode_video"]:
        assert [draw.op for draw in clips] == ["decode_video", "random_resized_crop", "random_flip", "color_jitter"]
        assert re.fullmatch(r"random_resized_crop: clip 0 \d+ x \d+ from .*, clip 1 .*", drawn_text(clips[1]))


def test_bad_samples_are_named_with_what_stands_in_for_them(tmp_path):
    """Substitutes are those of the plan; a masked row has none, and says so."""
    folder = tmp_path / "photos"
    write_photos(folder, {"cat": 5})
    bad = sorted((folder / "cat").iterdir())[2]
    bad.write_bytes(b"no image")
    streams = {
        policy: folder_stream(folder, batch_size=5, on_error=policy, max_bad_fraction=1.0)
        for policy in ("substitute", "mask")
    }
    config = write_settings(tmp_path / "batchd.toml", streams, {})

    batch, masked = batchd.replay(config, "substitute", (0, 0)), batchd.replay(config, "mask", (0, 0))

    (row,) = [row for row in batch.rows if row.tried]
    assert (row.tried[0].name, row.is_good, row.planned) == (str(bad), True, row.tried[0].sample)
    assert row.tried[0].reason.startswith("not a JPEG")
    assert row.sample != row.planned
    assert batch.fields["index"][row.row] == row.sample
    with Replayer(load_config(config), "substitute") as replayer:
        assert row.sample == replayer.plan.substitute(0, row.planned, len(row.tried))
    (empty,) = [row for row in masked.rows if not row.is_good]
    assert (empty.sample, empty.draws) == (empty.planned, ())
    assert masked.fields["valid"].tolist().count(False) == 1


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("action", "timeout_s"), [("segv", 30), ("hang", 4)])
def test_a_sample_that_ends_workers_is_bad_as_in_the_daemon(
    start_daemon, photos, monkeypatch, tmp_path, action, timeout_s
):
    """Two workers die of it, or are stopped in it; then the same other sample stands in for it."""
    fault = f"worker.sample.decoded:{POISON}"
    stream = folder_stream(photos, batch_size=40)
    daemon = start_daemon({"photos": stream}, lasting_faults={fault: "segv"})
    crc, _state = _batch_at(daemon, 0, 0)
    monkeypatch.setenv("BATCHD_FAILPOINTS", f"{fault}={action}")
    settings = {"workers": 3, "sample_timeout_s": timeout_s}

    batch = batchd.replay(write_settings(tmp_path / "batchd.toml", {"photos": stream}, settings), "photos", (0, 0))

    (row,) = [row for row in batch.rows if row.tried]
    assert (row.planned, row.tried[0].reason) == (POISON, "quarantined")
    assert batch.crc32 == crc


def test_a_sample_that_kills_a_worker_among_rows_made_at_once_is_found(golden, monkeypatch):
    """The note names no sample then, so the rows are made one by one."""
    with Replayer(load_config(golden[2]), "npz") as replayer:
        expected = replayer.at(Position(0, 0))
        planned = expected.rows[0].planned
        stand_in = replayer.plan.substitute(0, planned, 1)
    monkeypatch.setenv("BATCHD_FAILPOINTS", f"worker.rows.begin:{planned}=segv")

    batch = batchd.replay(golden[2], "npz", (0, 0))

    assert [row.sample for row in batch.rows] == [stand_in, *(row.sample for row in expected.rows[1:])]
    assert [row.tried[0].reason for row in batch.rows if row.tried] == ["quarantined"]
    assert [row.crc32 for row in batch.rows[1:]] == [row.crc32 for row in expected.rows[1:]]


def test_a_batch_without_any_good_sample_is_the_error_at_which_the_stream_stopped(tmp_path):
    """The same replayer can be asked again."""
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(b"no image")
    stream = folder_stream(folder.parent, batch_size=3, max_bad_fraction=1.0)
    config = load_config(write_settings(tmp_path / "batchd.toml", {"photos": stream}, {}))
    with Replayer(config, "photos") as replayer:
        for epoch in range(2):
            with pytest.raises(BatchdError, match="stopped at this batch: none of 32 samples could stand in for"):
                replayer.at(Position(epoch, 0))


def test_without_memory_for_a_batch_the_error_says_so(photos, monkeypatch, tmp_path):
    """No worker is left."""

    def lack(*_arguments):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    config = load_config(write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {}))
    monkeypatch.setattr(batches.os, "posix_fallocate", lack)
    with pytest.raises(BatchdError, match="stream 'photos' cannot be replayed: Cannot allocate memory"):
        Replayer(config, "photos")


def test_a_worker_that_dies_between_samples_is_replaced(photos, monkeypatch, tmp_path):
    """One death costs time; workers that never begin end the replay, and no process is left."""
    config = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {"workers": 2})
    expected = batchd.replay(config, "photos", (0, 1))
    monkeypatch.setenv("BATCHD_FAILPOINTS", "worker.order.received=kill")
    with pytest.raises(BatchdError, match="the workers end before they make a sample"):
        batchd.replay(config, "photos", (0, 1))
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    monkeypatch.setenv("BATCHD_FAILPOINTS_LEDGER", str(ledger))

    assert batchd.replay(config, "photos", (0, 1)).crc32 == expected.crc32
    assert list(ledger.iterdir()), "one worker has died"


# --- changed files --------------------------------------------------------------------------------


def test_a_file_that_was_written_after_the_card_is_named(tmp_path):
    """A batch without it is fine; one with it is reported, unless its checksum is known."""
    folder = tmp_path / "photos"
    write_photos(folder, {"cat": 6}, height=72, width=96)
    stream = folder_stream(folder, batch_size=3, shuffle=False)
    config, card = write_settings(tmp_path / "batchd.toml", {"photos": stream}, {}), tmp_path / "card.json"
    run_batchd("card", "photos", "--config", config, "-o", card)
    before = batchd.replay(card, "photos", (0, 0))
    first = min((folder / "cat").iterdir())
    saved = json.loads(card.read_text())
    os.utime(first, (saved["time_s"] + 5, saved["time_s"] + 5))

    run_batchd("replay", "photos", "0:1", "--card", card)
    told = run_batchd("replay", "photos", "0:0", "--card", card, status=1)
    assert "1 file of this batch changed after the run, so the batch may be another; --verify CRC" in told.stderr
    assert str(first) in told.stderr.replace("\n  ", "")
    assert batchd.replay(card, "photos", (0, 0)).changed == (str(first),)
    run_batchd("replay", "photos", "0:0", "--card", card, "--verify", f"{before.crc32:08x}")
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"stream": "photos", "fingerprint": saved["fingerprint"], "epoch": 0, "step": 0}))
    os.utime(state, (saved["time_s"], saved["time_s"]))
    assert str(first) in run_batchd("replay", "photos", "--state", state, "--config", config, status=1).stderr.replace(
        "\n  ", ""
    )


def test_a_shard_that_was_written_after_the_card_is_named(golden, tmp_path):
    """The records of a file share its time, which the scan has noted."""
    _streams, data, config = golden
    card = tmp_path / "card.json"
    for name, file in (("tfrecord", "examples.tfrecord"), ("npy", "x.npy"), ("webdataset", "shards/a-0.tar")):
        run_batchd("card", name, "--config", config, "-o", card)
        saved = json.loads(card.read_text())
        assert batchd.replay(card, name, (0, 0)).changed == ()
        card.write_text(json.dumps({**saved, "time_s": (data / file).stat().st_mtime - 1}))
        assert any(file in one for one in batchd.replay(card, name, (0, 0)).changed)


def test_a_source_with_other_files_is_not_replayed(tmp_path):
    """A new file moves all samples behind it."""
    folder = tmp_path / "photos"
    write_photos(folder, {"cat": 6})
    config, card = (
        write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(folder)}, {}),
        tmp_path / "card.json",
    )
    run_batchd("card", "photos", "--config", config, "-o", card)
    (folder / "cat" / "new.jpg").write_bytes(b"")

    with pytest.raises(
        SourceInvalid, match="makes other batches than when the card was written:\n  source: other files"
    ):
        batchd.replay(card, "photos", (0, 0))


# --- the command ----------------------------------------------------------------------------------


def test_text_json_picture_and_arrays_of_one_batch(daemon, tmp_path):
    """Text fits 80 columns; all forms have the same samples and checksums."""
    sheet, npz = tmp_path / "sheet.png", tmp_path / "batch.npz"
    options = ["photos", "2:13", "--config", daemon.config]
    text = run_batchd("replay", *options, "-o", sheet, "--npz", npz).stdout
    plain = json.loads(run_batchd("replay", *options, "--json").stdout)

    (row,) = plain["rows"]
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.startswith(
        f"photos, epoch 2, step 13: 1 row, CRC {plain['crc32']}\nfingerprint {plain['fingerprint']}\n"
    )
    assert f"row 0: sample {row['sample']}, label {row['label']} ({row['class_name']}), CRC {row['crc32']}\n" in text
    assert row["name"] in text.replace("\n    ", "")
    assert "random_resized_crop: " in text
    assert (plain["epoch"], plain["step"], row["crc32"]) == (2, 13, plain["crc32"])
    assert sheet.read_bytes().startswith(b"\x89PNG")
    with np.load(npz) as arrays:
        assert arrays["image"].shape == (1, 32, 32, 3)
        assert arrays["index"].tolist() == [row["sample"]]


def test_ragged_fields_are_saved_as_values_and_splits(golden, tmp_path):
    """The arrays have the values of all rows without gaps."""
    npz = tmp_path / "tokens.npz"
    run_batchd("replay", "ragged-tokens", "0:0", "--config", golden[2], "--npz", npz)
    batch = batchd.replay(golden[2], "ragged-tokens", (0, 0))
    with np.load(npz) as arrays:
        splits = arrays["tokens.row_splits"]
        rows = [arrays["tokens.values"][start:end] for start, end in pairwise(splits)]
    assert [row.tolist() for row in rows] == [row.tolist() for row in batch.fields["tokens"]]


def test_what_cannot_be_replayed_is_said(daemon, tmp_path):
    """Each error names the problem and what helps."""
    config = ["--config", daemon.config]
    live = write_settings(
        tmp_path / "live.toml",
        {
            "pushed": {"source": {"type": "push", "fields": {"x": "float32"}}, "batch_size": 2},
        },
        {},
    )
    state, torn, old = tmp_path / "state.json", tmp_path / "torn.json", tmp_path / "old.json"
    state.write_text(json.dumps({"stream": "others", "fingerprint": "5" * 32, "epoch": 0, "step": 0}))
    torn.write_text('{"card": 1, "stream": "photos"}')
    old.write_text('{"card": 99}')
    for options, status, words in [
        (["nope", "0:0", *config], 1, "there is no stream 'nope'; known here: photos"),
        (["photos", "0:14", *config, "--rank", "0"], 0, "epoch 1, step 0"),
        (["photos", "0:15", *config], 1, "has no step 15: an epoch has the steps 0 to 13"),
        (["photos", "0:0", *config, "--rank", "2", "--world-size", "2"], 1, "there is no rank 2 of 2 ranks"),
        (["photos", "0:4", *config, "--back", "5"], 1, "there are no 5 batches of a rank before epoch 0, step 4"),
        (["photos", "1:4", *config, "--world-size", "3", "--back", "2"], 1, "is no whole number of rounds of 3 ranks"),
        (["photos", "0:0", *config, "--world-size", "99"], 0, "1 row"),
        (["photos", *config], 2, "name the position as EPOCH:STEP"),
        (["photos", "3-7", *config], 2, "'3-7' is not a position"),
        (["photos", "0:0", *config, "--verify", "xyz"], 2, "'xyz' is not a CRC-32"),
        (["photos", "0:0", *config, "--state", state], 2, "batchd: EPOCH:STEP and --state are two positions"),
        (["photos", "0:0", *config, "--running"], 2, "are two configurations"),
        (["photos", *config, "--state", state], 1, "the state is of stream 'others', not 'photos'"),
        (["photos", "0:0", "--card", torn], 1, "is a damaged card: fingerprint, samples, parts"),
        (["photos", "0:0", "--card", old], 1, "is a card of version 99"),
        (["photos", "0:0", "--card", state], 1, "is the state of a trainer, not a card"),
        (["photos", "0:0", "--card", tmp_path / "none.json"], 1, "there is no file"),
        (["photos", "--state", daemon.config], 1, "is neither a card nor the state of a trainer"),
        (
            ["photos", "0:0", *config, "-o", tmp_path / "a.png", "--field", "label"],
            1,
            "has no images in a field 'label'",
        ),
        (["photos", "0:0", *config, "--npz", tmp_path / "no" / "a.npz"], 1, "cannot be written: there is no folder"),
        (["pushed", "0:0", "--config", live], 1, 'is live: samples of type "push" come once and are not kept'),
    ]:
        done = run_batchd("replay", *options, status=status)
        assert words in done.stderr + done.stdout, (options, done.stderr)
    missing = run_batchd("replay", "nope", "0:0", "--running", address=daemon.address, status=1)
    assert "the daemon has no stream 'nope'; known here: photos" in missing.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_its_owner_gets_the_configuration_of_a_daemon(start_daemon, daemons_folder):
    """A trainer of another user reads batches, but not what else the configuration has."""
    daemon = start_daemon()
    for folder in (daemons_folder, daemon.folder):
        folder.chmod(0o711)
    os.setresuid(STRANGER, STRANGER, 0)
    try:
        status = run_batchd("status", address=daemon.address).stdout
        refused = run_batchd("card", "photos", "--running", address=daemon.address, status=1).stderr
        with (
            batchd_client.connect(daemon.address) as connection,
            pytest.raises(PermissionDenied, match="only root and"),
        ):
            connection.stream("photos").state_dict(card=True)
    finally:
        os.setresuid(0, 0, 0)
        daemons_folder.chmod(0o700)

    assert "photos" in status
    assert "only root and the daemon's own user (number 0) may see its configuration" in refused


def test_other_versions_are_named_with_what_shows_whether_they_matter(daemon, tmp_path):
    """The batch is made, with a warning; its checksum decides."""
    card = tmp_path / "card.json"
    run_batchd("card", "photos", "--config", daemon.config, "-o", card)
    saved = json.loads(card.read_text())
    saved["versions"]["decoders"] = "OpenCV 1.0"
    card.write_text(json.dumps(saved))
    crc, _state = _batch_at(daemon, 0, 0)

    told = run_batchd("replay", "photos", "0:0", "--card", card, "--verify", crc).stderr

    assert "so pixels may differ; --verify CRC shows whether they do\n  decoders: OpenCV 1.0 became " in told
    assert f"the CRC {crc:08x} matches" in told


# --- when samples were seen -----------------------------------------------------------------------


@pytest.mark.thorough
def test_every_kind_of_source_finds_the_samples_of_a_file_and_of_a_label(golden):
    """Names are those that a replay prints: each leads to its samples, and so does its file."""
    streams, _data, config_file = golden
    config, kinds = load_config(config_file), set()
    for name, stream in streams.items():
        kinds.add(stream["source"]["type"])
        lookup = SampleLookup(config, name)
        names = {sample: lookup.name(sample) for sample in range(lookup.plan.source_samples)}
        if not names[0]:  # the user's own code
            with pytest.raises(BatchdError, match="the index of the source names no files"):
                lookup.of_file("x")
            continue
        for text in {names[0], *list(names.values())[-2:]}:
            assert lookup.of_file(text).tolist() == [sample for sample, other in names.items() if other == text], name
            file = text.partition(": ")[0]
            in_file = [sample for sample, other in names.items() if other.partition(": ")[0] == file]
            assert lookup.of_file(file).tolist() == lookup.of_file(f"{file[:-2]}*").tolist() == in_file, name
        known = [lookup.reader.known(sample).get("label") for sample in names]
        if None not in known:
            label = int(known[-1])
            assert lookup.of_label(str(label)).tolist() == [one for one, of in enumerate(known) if of == label], name
    assert kinds >= {"folder", "list", "glob", "webdataset", "csv", "jsonl", "npy", "npz", "raw", "tokens", "tfrecord"}


def test_samples_were_seen_where_trainers_logged_them(start_daemon, tmp_path):
    """Two ranks, then three from an older state; two samples are bad, and one kills workers."""
    folder = tmp_path / "photos"
    paths = write_photos(folder, {"cat": 9, "dog": 8})
    for bad in (paths[3], paths[12]):
        bad.write_bytes(b"no image")
    stream = folder_stream(folder, batch_size=3, max_bad_fraction=1.0)
    daemon = start_daemon({"photos": stream}, workers=2, lasting_faults={"worker.sample.decoded:5": "segv"})
    logged = {}

    def read(streams, rounds):
        for _round in range(rounds):
            for rank, stream in enumerate(streams):
                batch = stream.take(stream.epoch)
                with batch:
                    for row, sample in enumerate(batch["index"].tolist(), batch._first):
                        logged.setdefault((batch.epoch, batch.step, row), (sample, []))[1].append(rank)

    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, 2) for rank in range(2)]
        read(streams, 4)
        state = streams[0].state_dict()
        read(streams, 1)
        bad_samples = {one.sample for one in connection.bad("photos").samples}
    for key in [key for key in logged if key[:2] >= (state["epoch"], state["step"])]:
        del logged[key]  # the run goes on from the checkpoint, as if these had not been
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, 3, state=state) for rank in range(3)]
        read(streams, 5)
        end, fingerprint = streams[0].state_dict(), streams[0].fingerprint
        bad_samples |= {one.sample for one in connection.bad("photos").samples}
    legs = [((0, 0), 2), ((state["epoch"], state["step"]), 3)]

    for sample in range(len(paths)):
        seen = batchd.seen(daemon.config, "photos", end, index=sample, legs=legs, bad=bad_samples)
        expected = {(*key, tuple(ranks)) for key, (one, ranks) in logged.items() if one == sample}
        assert {(*place[1:4], place.ranks) for place in seen.places()} == expected
    assert bad_samples == {3, 5, 12}

    card, state_file = tmp_path / "card.json", tmp_path / "state.json"
    state_file.write_text(json.dumps(end))
    run_batchd("card", "photos", "--running", "--state", state_file, "-o", card, address=daemon.address)
    words = [
        "seen",
        "photos",
        str(paths[0]),
        "--world-size",
        "2",
        "--world-size",
        f"3@{state['epoch']}:{state['step']}",
    ]
    before = run_batchd(*words, "--running", "--state", state_file, "--json", address=daemon.address).stdout
    daemon.config.write_text(daemon.config.read_text().replace("window = 4", "window = 4\nseed = 5"))
    daemon.reload()
    refused = run_batchd(*words, "--running", "--state", state_file, address=daemon.address, status=2)
    assert "with other files or other settings" in refused.stderr
    bad_file = tmp_path / "bad.json"
    bad_file.write_text(json.dumps([{"sample": sample} for sample in bad_samples]))
    plain = json.loads(run_batchd(*words, "--card", card, "--bad", bad_file, "--json").stdout)
    assert plain == json.loads(before)
    assert (plain["fingerprint"], plain["bad_known"]) == (fingerprint, 3)


def test_rows_of_a_sample_are_made_again_as_trainers_had_them(daemon, photos):
    """The crop of each place has the bytes of the trainer's row."""
    (file,) = [path for path in photos.rglob("*.jpg") if path.name == "00003.jpg" and path.parent.name == "owl"]
    words = ["seen", "photos", f"owl/{file.name}", "--config", daemon.config, "--epochs", "2", "--rows", "--json"]
    plain = json.loads(run_batchd(*words).stdout)

    assert [place["epoch"] for place in plain["places"]] == [0, 1]
    for place in plain["places"]:
        whole = batchd.replay(daemon.config, "photos", (place["epoch"], place["step"]))
        assert place["made"] == json.loads(json.dumps(whole.rows[place["row"]].to_plain()))
        assert place["made"]["name"] == str(file)
