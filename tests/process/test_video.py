"""Videos, served: equal frames from one worker and from two, and damaged files."""

import numpy as np
import pytest

import batchd_client
from support.commands import batchd
from support.seen import see
from support.shards import write_shard
from support.sounds import RATE, coded, sweep, without_table
from support.videos import Coding, number_in, write_video
from support.waiting import wait_until

FRAMES = 40


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Make three files in two class folders; each frame shows its number."""
    folder = tmp_path_factory.mktemp("videos")
    for number, (name, coding) in enumerate(
        [("cats/a.mp4", Coding()), ("cats/b.webm", Coding("libvpx-vp9")), ("dogs/c.mkv", Coding(gop=250))]
    ):
        write_video(folder / name, FRAMES, coding, first=number * FRAMES)
    (folder / "kinetics.csv").write_text("cats/a.mp4 1\ncats/b.webm 2\ndogs/c.mkv 3\n" * 4)
    segments = [f"dogs/c.mkv {number * 7 % 10 / 10}\n" for number in range(10)]
    (folder / "segments.csv").write_text(
        "".join([*segments, *(one.replace("dogs/c.mkv", "cats/a.mp4") for one in segments)])
    )
    return folder


def streams_over(videos):
    """Serve shuffled single frames with random crops, and clips in their order."""
    source = {"type": "video", "root": str(videos), "files": ["**/*.{mp4,webm,mkv}"], "classes": "folder"}
    crop = {"op": "random_resized_crop", "size": [32, 32]}
    return {
        "frames": {"source": source, "batch_size": 8, "pipeline": [crop, {"op": "random_flip"}]},
        "clips": {
            "source": {**source, "frames": 4, "every": 4, "stride": 2, "size": [24, 32], "path_bytes": 16},
            "batch_size": 4,
            "shuffle": False,
        },
        "blocks": {
            "source": {**source, "frames": 3, "stride": 2, "size": [24, 32]},
            "batch_size": 4,
            "shuffle": {"blocks": 2, "block_samples": 10},
        },
        "drawn": {
            "source": {
                "type": "csv",
                "path": str(videos / "kinetics.csv"),
                "delimiter": " ",
                "header": False,
                "fields": {"video": "video", "label": "int64"},
            },
            "batch_size": 3,
            "pipeline": [{"op": "decode_video", "frames": 4, "fps": 8, "clips": 2}, crop, {"op": "random_flip"}],
        },
        "segments": {
            "source": {
                "type": "csv",
                "path": str(videos / "segments.csv"),
                "delimiter": " ",
                "header": False,
                "fields": {"video": "video", "at": "float64"},
            },
            "batch_size": 4,
            "shuffle": {"blocks": 2, "block_samples": 5},
            "repeats": 2,
            "pipeline": [{"op": "decode_video", "frames": 8, "fps": 25, "start": "at"}, crop],
        },
        "whole": {"source": source, "batch_size": 8, "pipeline": [{"op": "pad_batch", "max_shape": [48, 64, 3]}]},
    }


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, videos):
    """Start a daemon with two workers."""
    return start_shared_daemon(streams_over(videos), workers=2, chunk_rows=3)


@pytest.mark.thorough
def test_one_worker_and_two_give_the_same_bytes(daemon, start_daemon, videos):
    """The bytes are equal in any order, over epochs."""
    one = start_daemon(streams_over(videos), workers=1)
    with batchd_client.connect(one.address) as alone, batchd_client.connect(daemon.address) as both:
        for name in streams_over(videos):
            single, many = alone.stream(name, epochs=2), both.stream(name, epochs=2)
            assert single.fingerprint == many.fingerprint
            assert [see(single), see(single)] == [see(many), see(many)]


@pytest.mark.thorough
def test_frames_and_clips_come_with_label_time_and_path(daemon):
    """Each sample shows the number that its index requires."""
    assert "image uint8[4, 4, 24, 32, 3]" in batchd("check", daemon.config).stdout
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("whole", epochs=1):
            shown = [number_in(image) for image in batch["image"]]
            assert shown == batch["index"].tolist()
            assert batch["label"].tolist() == [number // (2 * FRAMES) for number in shown]
            assert batch["time"] == pytest.approx([number % FRAMES / 25 for number in shown], abs=1e-3)
        starts = [file * FRAMES + first for file in range(3) for first in range(0, FRAMES - 6, 4)]
        seen = []
        for batch in connection.stream("clips", epochs=1):
            for clip, times, path in zip(batch["image"], batch["time"], batchd_client.text(batch["path"]), strict=True):
                numbers = [number_in(image) for image in clip]
                assert np.diff(numbers).tolist() == [2, 2, 2]
                assert times == pytest.approx([number % FRAMES / 25 for number in numbers], abs=1e-3)
                assert path == ("cats/a.mp4", "cats/b.webm", "dogs/c.mkv")[numbers[0] // FRAMES]
                seen.append(numbers[0])
        assert seen == starts


def test_a_file_that_changes_while_it_is_served_makes_bad_samples_that_are_named(start_daemon, tmp_path):
    """The reason has the file, the frame and its second."""
    file = write_video(tmp_path / "a.mp4", FRAMES, Coding(muxer={"movflags": "faststart"}))
    source = {"type": "video", "root": str(tmp_path), "files": ["*.mp4"], "size": [24, 32]}
    stream = {"source": source, "batch_size": 8, "shuffle": False, "on_error": "mask", "max_bad_fraction": 1.0}
    daemon = start_daemon({"frames": stream})
    content = file.read_bytes()
    with batchd_client.connect(daemon.address) as connection:
        file.write_bytes(content[: len(content) // 2])
        valid = np.concatenate([batch["valid"].copy() for batch in connection.stream("frames", epochs=1)])
        assert valid.shape == (FRAMES,)
        assert not valid[-12:].any()
        wait_until(lambda: connection.bad("frames").total >= 12, "the samples are listed")
        bad = connection.bad("frames").samples
    assert any(one.path == f"{file}: frame {FRAMES - 1} at {(FRAMES - 1) / 25:.3f} s" for one in bad)
    assert all("the file has changed since the source was scanned" in one.reason or "cut" in one.reason for one in bad)


def test_a_file_is_read_through_once_and_known_behind_a_restart(start_daemon, videos, tmp_path):
    """Of twelve rows over three files three records are kept, and no batch differs for them."""
    drawn = streams_over(videos)["drawn"]
    streams = {"kept": {**drawn, "cache_dir": str(tmp_path)}, "memory": drawn, "off": {**drawn, "cache": "off"}}
    daemon = start_daemon(streams, workers=2)
    with batchd_client.connect(daemon.address) as connection:
        seen = {}
        for name in streams:
            batches = connection.stream(name, epochs=2)
            seen[name] = [see(batches), see(batches)]
    assert seen["kept"] == seen["memory"] == seen["off"]
    caches = [daemon.stream_status(name)["cache"] for name in ("kept", "memory")]
    assert [(cache["kind"], cache["held_samples"]) for cache in caches] == [("media", 3)] * 2
    assert "cache of what is known of files has 3 in" in batchd("status", address=daemon.address).stdout

    daemon.terminate()
    daemon.start()
    assert daemon.stream_status("kept")["cache"]["held_samples"] == 3
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("kept", epochs=1)) == seen["off"][0]
    assert daemon.stream_status("kept")["cache"]["held_samples"] == 3


def test_a_clip_of_a_long_video_on_a_server_takes_only_its_bytes(start_daemon, tmp_path, web):
    """From the first use of the file on: its index, and the packets of the clip."""
    video = write_video(tmp_path / "a.mov", 4500, Coding("prores", b_frames=0, pixels="yuv422p10le"))
    write_shard(tmp_path / "a.tar", [("a.mov", video.read_bytes())])
    web.files["a.tar"] = (tmp_path / "a.tar").read_bytes()
    source = {"type": "webdataset", "shards": ["a.tar"], "fields": {"video": "video"}, "names": {"video": "mov"}}
    step = {"op": "decode_video", "frames": 4, "fps": 25.0, "start": 120.0}
    stream = {
        "source": {**source, "root": web.url},
        "batch_size": 1,
        "pipeline": [step, {"op": "resize", "size": [48, 64]}],
    }
    daemon = start_daemon({"there": stream}, workers=1)
    web.asked.clear()
    with batchd_client.connect(daemon.address) as connection:
        [numbers] = [[number_in(one) for one in batch["image"][0]] for batch in connection.stream("there", epochs=1)]
    assert numbers == [3000, 3001, 3002, 3003]
    spans = [one.span.removeprefix("bytes=").split("-") for one in web.asked if one.method == "GET"]
    assert 0 < sum(int(last) + 1 - int(first) for first, last in spans) < len(web.files["a.tar"]) // 10


def test_batches_are_of_videos_or_sounds_of_one_length(start_daemon, tmp_path):
    """Of MP3 without a table, too; what measuring has found is kept for the first epoch."""
    for number in range(4):
        write_video(tmp_path / "videos" / f"{number % 2}" / f"{number}.mp4", 10 if number % 2 else 40)
        sound = without_table(coded("mp3", "libmp3lame", sweep()[: RATE if number % 2 else 3 * RATE]))
        (tmp_path / "sounds" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sounds" / f"{number % 2}" / f"{number}.mp3").write_bytes(sound)
    steps = {
        "video": {"op": "decode_video", "frames": 2},
        "audio": {"op": "decode_audio", "rate": 8000, "seconds": 0.5},
    }
    streams = {
        kind: {
            "source": {"type": "folder", "path": str(tmp_path / f"{kind}s".replace("audios", "sounds")), "media": kind},
            "batch_size": 2,
            "pipeline": [step, *([{"op": "resize", "size": [24, 32]}] if kind == "video" else [])],
            "bucket": {"field": kind, "by": "seconds", "bounds": [1.2]},
        }
        for kind, step in steps.items()
    }
    daemon = start_daemon(streams, workers=1)
    for kind in streams:
        assert daemon.stream_status(kind)["cache"]["held_samples"] == 4
        with batchd_client.connect(daemon.address) as connection:
            labels = [sorted(batch["label"].tolist()) for batch in connection.stream(kind, epochs=1)]
        assert sorted(labels) == [[0, 0], [1, 1]]
