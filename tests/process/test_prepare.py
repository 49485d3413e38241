"""``batchd prepare``: shards of a pipeline's samples, whatever fails on the way."""

import os
import resource
import signal
import tomllib

import msgpack
import numpy as np
import pytest

import batchd_client
from batchd.errors import ExitCode
from support.commands import batchd
from support.images import encode, photo
from support.lmdb_files import write_lmdb
from support.preparing import SHORTER, bad_samples, config_in, digests, finish, prepare, proposed, start
from support.seen import see
from support.settings import folder_stream, write_settings
from support.videos import Coding, number_in, write_video
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def config(photos, tmp_path):
    """Write a configuration of one stream over forty photographs."""
    return config_in(tmp_path, photos)


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """Make the expected shards in a run without failures."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(write_settings(folder / "batchd.toml", {"photos": folder_stream(photos, pipeline=SHORTER)}, {}))
    return digests(folder / "out")


def test_shards_hold_what_the_pipeline_makes(config, start_daemon, photos, tmp_path):
    """Every sample has its label and pixels; the settings in the summary serve the shards."""
    done = prepare(config(), "--format", "png")
    summary = done.stdout
    source = proposed(summary)
    crop = [{"op": "decode"}, {"op": "center_crop", "size": [24, 24]}]
    shards = {**folder_stream(photos), "pipeline": crop, "source": source, "shuffle": False}
    straight = {**folder_stream(photos), "pipeline": [*SHORTER, crop[1]], "shuffle": False}

    daemon = start_daemon({"shards": shards, "straight": straight})

    assert summary.startswith("40 samples in 6 shards of ")
    assert digests(tmp_path / "out").keys() == {f"photos-{number:06}.tar" for number in range(6)}
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("shards", epochs=1)) == see(connection.stream("straight", epochs=1))


def test_without_a_pipeline_shards_hold_the_files_themselves(config, start_daemon, photos):
    """All crops have the pixels of those of the files."""
    source = proposed(prepare(config(), "--set", "streams.photos.pipeline=[]").stdout)
    crop = [{"op": "decode"}, {"op": "random_resized_crop", "size": [24, 24]}]
    shards = {**folder_stream(photos), "pipeline": crop, "source": source, "shuffle": False}
    straight = {**folder_stream(photos), "pipeline": crop, "shuffle": False}

    daemon = start_daemon({"shards": shards, "straight": straight})

    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("shards", epochs=1)) == see(connection.stream("straight", epochs=1))


@pytest.mark.parametrize("option", [["--seekable"], ["--files"], ["--short-side", "20"]])
def test_options_of_earlier_versions_are_told_what_replaces_them(config, option):
    """A command that named them needs another pipeline."""
    assert "is no more: shards have access points" in prepare(config(), *option, status=2).stderr


def test_a_second_time_only_what_is_missing_is_made(config, whole, tmp_path):
    """First no shard is missing; then a truncated and a removed one are made, the others stay."""

    def times():
        return {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.tar")}

    prepare(config())
    before = times()
    assert prepare(config()).stdout.startswith("40 samples in 6 shards")
    assert times() == before
    cut, gone, *kept = sorted((tmp_path / "out").glob("*.tar"))
    os.truncate(cut, cut.stat().st_size - 10_240)
    gone.unlink()

    assert prepare(config()).stdout.startswith("40 samples in 6 shards")

    assert digests(tmp_path / "out") == whole
    assert {file.name for file in kept} == {name for name, time in times().items() if before[name] == time}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_same_command_goes_on_where_it_was(number, config, whole, tmp_path):
    """Killed or interrupted, between shards or within: no remains, and the same bytes."""
    command = start(config(), "prepare.sample.begin:30=stop")
    wait_until(lambda: len(digests(tmp_path / "out")) >= 3, "some shards are there")
    done = digests(tmp_path / "out")
    command.send_signal(number)
    said = command.communicate()[0]

    assert command.returncode == (-signal.SIGKILL if number == signal.SIGKILL else ExitCode.INTERRUPTED)
    assert number == signal.SIGKILL or "interrupted; the same command continues where it stopped" in said
    assert number == signal.SIGKILL or not list((tmp_path / "out").glob("*.unfinished"))
    assert 3 <= len(done) < 6
    prepare(config())
    assert digests(tmp_path / "out") == whole
    assert not list((tmp_path / "out").glob("*.unfinished"))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("step", ["prepare.sample.begin@9", "prepare.shard.written@1"])
def test_a_writer_that_is_killed_costs_nothing(step, config, whole, tmp_path):
    """Another writer restarts its shard."""
    name, _, at = step.partition("@")

    finish(start(config(), f"{name}=kill@{at}", ledger=tmp_path))

    assert len(list(tmp_path.glob("prepare.*"))) == 1, "no writer was killed"

    assert digests(tmp_path / "out") == whole
    assert bad_samples(tmp_path / "out") == {}


@pytest.mark.thorough
def test_a_sample_that_kills_two_writers_is_left_out(config, tmp_path):
    """The command names the sample; all others are in the shards."""
    assert "39 samples in 6 shards" in finish(start(config(), "prepare.sample.begin:17=segv"))

    ((sample, (shard, where, reason)),) = bad_samples(tmp_path / "out").items()
    assert (sample, shard) == (17, "photos-000002.tar")
    assert where.endswith(".jpg")
    assert reason == "killed the process that worked on it, twice"


@pytest.mark.thorough
def test_a_sample_that_never_ends_is_left_out(photos, tmp_path):
    """The command kills the sample's writer after sample_timeout_s."""
    stream = folder_stream(photos, pipeline=SHORTER)
    file = write_settings(tmp_path / "batchd.toml", {"photos": stream}, {"workers": 2, "sample_timeout_s": 1})

    finish(start(file, "prepare.sample.begin:17=hang"))

    assert set(bad_samples(tmp_path / "out")) == {17}


@pytest.fixture
def broken(photos, tmp_path):
    """Copy the photographs; four of them cannot be decoded."""
    folder = tmp_path / "broken"
    for number, file in enumerate(sorted(photos.rglob("*.jpg"))):
        (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        (folder / file.parent.name / file.name).write_bytes(data[:50] if number in {3, 4, 20, 39} else data)
    return folder


def test_bad_samples_are_left_out_and_listed(config, broken, tmp_path):
    """The list has shard, path and reason, once each, also after an interruption."""
    file = config(source={"type": "folder", "path": str(broken)}, max_bad_fraction=0.5)
    command = start(file, "prepare.sample.begin:30=stop")
    wait_until(lambda: len(digests(tmp_path / "out")) >= 3, "some shards are there")
    command.kill()
    command.communicate()

    done = prepare(file)

    assert "36 samples in 6 shards" in done.stdout
    assert f"4 bad ones left out, see {tmp_path}/out/bad.tsv" in done.stdout
    bad = bad_samples(tmp_path / "out")
    assert {sample: shard for sample, (shard, _, _) in bad.items()} == {
        sample: f"photos-{sample // 7:06}.tar" for sample in (3, 4, 20, 39)
    }
    assert all("truncated" in reason and str(broken) in path for _, path, reason in bad.values())


def test_bad_samples_end_it_where_the_stream_says_so(config, broken):
    """The command stops at the first one, or when their share of the samples is too large."""
    source = {"type": "folder", "path": str(broken)}

    first = prepare(config(source=source, on_error="fail"), status=1)
    assert "truncated" in first.stderr and 'on_error = "fail"' in first.stderr  # noqa: PT018  one message


def test_a_shard_without_any_good_sample_is_named(config, broken, tmp_path):
    """A shard without good samples cannot be served."""
    file = config(source={"type": "folder", "path": str(broken)}, max_bad_fraction=1.0)

    done = prepare(file, shard_samples=1)

    assert "no sample is good in photos-000003.tar, photos-000004.tar" in done.stdout
    assert len(digests(tmp_path / "out")) == 40


@pytest.mark.thorough
def test_a_folder_belongs_to_one_command(config, tmp_path):
    """Another running command, other options or steps, and foreign files are each rejected."""
    file = config()
    command = start(file, "prepare.sample.begin:30=stop")
    wait_until(lambda: len(digests(tmp_path / "out")) >= 1, "the command writes")
    assert "another batchd prepare is at work" in prepare(file, status=1).stderr
    command.kill()
    command.communicate()

    assert "quality was 90, and is 80 now" in prepare(file, "--quality", "80", status=1).stderr
    assert (
        "the pipeline, the seed, or what a step reads or calls has changed" in prepare(config(seed=3), status=1).stderr
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    other = batchd("prepare", "photos", "-c", file, "--to", tmp_path / "mine", status=1)
    assert f"{tmp_path}/mine is not empty (file)" in other.stderr


@pytest.mark.thorough
def test_a_disk_that_is_full_is_told(config, tmp_path):
    """The command removes the unfinished shard."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = start(config(), preexec_fn=limit)
    said = command.communicate()[0]

    assert command.returncode == 1
    assert "photos-00000" in said and "File too large; the same command goes on from here" in said  # noqa: PT018  one message
    assert not list((tmp_path / "out").glob("*.unfinished"))


def test_what_cannot_be_is_said_before_anything_is_written(config, tmp_path):
    """The stream does not exist, or the steps make no sense."""
    file = config()
    assert "did you mean photos?" in batchd("prepare", "photo", "-c", file, "--to", tmp_path / "out", status=2).stderr
    wrong = batchd(
        *("prepare", "photos", "-c", file, "--to", tmp_path / "out"),
        *("--set", 'streams.photos.pipeline=[{op = "resize", shorter_side = 3}]'),
        status=2,
    )
    assert "the first step must be" in wrong.stderr
    assert not (tmp_path / "out").exists()


def test_numbers_alone_are_served_as_well(config, start_daemon):
    """The proposed source has the columns of the samples, whatever they are."""
    steps = '[{op = "decode"}, {op = "resize", size = [8, 8]}, {op = "one_hot", classes = 4}, {op = "drop", fields = ["image"]}]'
    said = prepare(config(), "--set", f"streams.photos.pipeline={steps}").stdout
    source = proposed(said)

    daemon = start_daemon({"numbers": {"source": source, "batch_size": 40, "pipeline": [], "shuffle": False}})

    assert source["fields"] == {"label": "float32[4]"}
    with batchd_client.connect(daemon.address) as connection:
        labels = next(iter(connection.stream("numbers", epochs=1)))["label"]
        assert labels.shape == (40, 4)
        assert labels.sum(axis=1).tolist() == [1] * 40


def test_every_field_of_a_source_comes_back_whole(start_daemon, photos, tmp_path):
    """Images, a mask, numbers, arrays of any length, texts and zeros come back equal."""
    images = [file.read_bytes() for file in sorted(photos.rglob("*.jpg"))[:9]]
    rng = np.random.default_rng(5)
    records = [
        {
            "image": image,
            "mask": encode(photo(8, 8)[:, :, :1] // 128, ".png"),
            "label": number,
            "score": float(rng.normal()),
            "good": number % 2 == 0,
            "box": rng.normal(size=4).astype(float).tolist(),
            "ids": list(range(number)),
            "caption": f"grüße {number}" if number else "",
        }
        for number, image in enumerate(images)
    ]
    write_lmdb(tmp_path / "a.lmdb", {b"%03d" % n: msgpack.packb(one) for n, one in enumerate(records)}, subdir=False)
    fields = {
        "image": "image",
        "mask": "image",
        "label": "int64",
        "score": "float64",
        "good": "bool",
        "box": "float32[4]",
        "ids": "int32[?]",
        "caption": "text",
    }
    source = {"type": "lmdb", "path": str(tmp_path / "a.lmdb"), "fields": fields, "format": "msgpack"}
    file = write_settings(tmp_path / "batchd.toml", {"all": {"source": source, "batch_size": 1, "pipeline": []}}, {})

    said = batchd("prepare", "all", "-c", file, "--to", tmp_path / "out", "--shard-samples", 4).stdout

    assert proposed(said)["fields"] == fields
    assert "names" not in proposed(said)
    steps = [
        *({"op": "decode"}, {"op": "resize", "size": [16, 16]}),
        *({"op": "decode", "field": "mask", "color": "gray"}, {"op": "center_crop", "field": "mask", "size": [8, 8]}),
        *(
            {"op": "pad_batch", "field": "ids", "max_shape": [9]},
            {"op": "text_bytes", "field": "caption", "length": 20},
        ),
    ]
    stream = {"batch_size": 9, "pipeline": steps, "shuffle": False}
    daemon = start_daemon({"one": {**stream, "source": source}, "other": {**stream, "source": proposed(said)}})
    with batchd_client.connect(daemon.address) as connection:
        one, other = (next(iter(connection.stream(name, epochs=1))) for name in ("one", "other"))
        assert list(one) == list(other)
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert batchd_client.text(other["caption"])[:2] == ["", "grüße 1"]
        assert other["score"].tolist() == [record["score"] for record in records]
        del one, other


@pytest.fixture
def clips(tmp_path):
    """Configure segments of two videos, the long one of one group; each video is in two samples."""
    for name, gop in (("long.mp4", 60), ("short.mp4", 6)):
        write_video(tmp_path / "videos" / name, 60, Coding(gop=gop))
    rows = [f"videos/{name}.mp4,{at}\n" for name in ("long", "short") for at in (0.4, 1.6)]
    (tmp_path / "clips.csv").write_text("video,at\n" + "".join(rows))
    source = {"type": "csv", "path": str(tmp_path / "clips.csv"), "fields": {"video": "video", "at": "float64"}}
    decode = {"op": "decode_video", "frames": 4, "fps": 25, "start": "at"}
    stream = {
        "source": source,
        "batch_size": 2,
        "shuffle": False,
        "pipeline": [decode, {"op": "resize", "size": [48, 64]}],
    }
    return write_settings(tmp_path / "batchd.toml", {"photos": stream}, {"workers": 2})


def test_videos_get_short_groups_and_their_loss_is_told(clips, start_daemon, tmp_path):
    """The shards serve the same clips, nearly; what a killed command had finished is kept."""
    options = ("--short-groups", "8", "--set", "streams.photos.pipeline=[]", "--shard-samples", "2")
    start(clips, "prepare.shard.written=kill", tmp_path / "ledger", options).communicate(timeout=60)
    summary = prepare(clips, *options, shard_samples=2).stdout
    assert "videos: 2 kept, 2 re-encoded, PSNR" in summary
    titles, *rows = [line.split("\t") for line in (tmp_path / "out" / "short_groups.tsv").read_text().splitlines()]
    facts = [dict(zip(titles, row, strict=True)) for row in rows]
    assert [one["done"] for one in facts] == ["re-encoded"] * 2 + ["kept"] * 2
    assert [one["longest_group"] for one in facts] == ["60", "60", "6", "6"]
    assert all(float(one["psnr"]) > 40 for one in facts[:2])

    stream = tomllib.loads(clips.read_text())["streams"]["photos"]
    daemon = start_daemon({"old": stream, "new": {**stream, "source": proposed(summary)}})
    with batchd_client.connect(daemon.address) as connection:
        old, new = ([batch["image"].copy() for batch in connection.stream(name, epochs=1)] for name in ("old", "new"))
    for before, after in zip(old, new, strict=True):
        assert [number_in(frame) for frame in before.reshape(-1, *before.shape[2:])] == [
            number_in(frame) for frame in after.reshape(-1, *after.shape[2:])
        ]


def test_short_groups_are_for_videos(config):
    """Fields that are pixels have none."""
    said = prepare(config(), "--short-groups", "8", status=ExitCode.USAGE).stderr
    assert "short groups are for fields that are video files after the pipeline" in said
