"""Frames of a video file, pushed into a live stream as a camera's frames would be."""

import re
import signal
import subprocess
import sys
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

import batchd_client
from batchd.data.pipeline.image.opencv import cv2
from batchd_client import camera as camera_module
from support.daemon_process import clean_environment
from support.producers import push_stream
from support.settings import folder_stream
from support.waiting import PATIENCE_S

HEIGHT, WIDTH, FRAMES = 48, 64, 16


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """Make sixteen red frames, each brighter than the last, so that swapped channels show."""
    file = tmp_path_factory.mktemp("video") / "frames.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 30, (WIDTH, HEIGHT))
    for number in range(FRAMES):
        frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        frame[:, :, 2] = 10 * number + 60
        writer.write(frame)
    writer.release()
    return file


PIXELS = f"uint8[{HEIGHT},{WIDTH},3]"


STREAMS = {
    "pixels": {"image": PIXELS, "time": "float64"},
    "jpegs": {"image": "image", "time": "float64"},
    "sigint": {"image": PIXELS},
    "sigterm": {"image": PIXELS},
    "slow": {"image": PIXELS},
    "labelled": {"image": PIXELS, "label": "int64"},
    "small": {"image": "uint8[9,9,3]"},
}
"""The fields of each live stream."""


def camera_stream(**fields):
    """Return a live stream of these fields, four frames to a batch."""
    pipeline = [{"op": "decode"}, {"op": "resize", "size": [HEIGHT, WIDTH]}] if fields["image"] == "image" else []
    more = {"sample_bytes_max": "64KiB"} if pipeline else {}
    return {**push_stream(fields=fields, **more), "pipeline": pipeline, "on_error": "mask"}


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve live streams and one of files; no two tests push into the same stream."""
    live = {name: camera_stream(**fields) for name, fields in STREAMS.items()}
    return start_shared_daemon({**live, "photos": folder_stream(photos)})


def start(daemon, stream, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "batchd_client.camera", stream, "--address", daemon.address, *map(str, options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def finish(process):
    told = process.communicate(timeout=PATIENCE_S)
    return process.returncode, *told


def reds(batch):
    """Return how red each frame is; JPEG rounds a little."""
    image = batch["image"]
    assert np.abs(image[..., 1:].astype(int)).max() < 12
    return (image[..., 0].astype(float).mean(axis=(1, 2)) / 10 - 6).round().astype(int).tolist()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("stream", ["pixels", "jpegs"])
def test_every_frame_of_a_file_arrives_once_and_in_order(stream, daemon, video):
    """Frames are RGB pixels or JPEG files, with a time where a field has it; a summary follows."""
    with batchd_client.connect(daemon.address) as connection:
        camera = start(daemon, stream, "--device", video)
        batches = list(islice(iter(connection.stream(stream)), FRAMES // 4))
        seen = [red for batch in batches for red in reds(batch)]
        times = [time for batch in batches for time in batch["time"].tolist()]

        assert finish(camera) == (0, "16 frames pushed, 0 dropped\n", "")
    assert seen == list(range(FRAMES))
    assert times == sorted(times)
    assert times[0] > 1.7e9, "seconds since 1970"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_file_begins_again_until_a_signal_comes(number, daemon, video):
    """The program repeats the file until a signal, and then exits cleanly."""
    stream = number.name.lower()
    with batchd_client.connect(daemon.address) as connection:
        camera = start(daemon, stream, "--device", video, "--loop", "--bgr")
        batches = list(islice(iter(connection.stream(stream)), 2 * FRAMES // 4))
        blues = [blue for batch in batches for blue in (batch["image"][..., 2].mean(axis=(1, 2)) / 10 - 6).round()]
        camera.send_signal(number)
        status, said, complaint = finish(camera)

    assert blues == 2 * list(range(FRAMES))
    assert (status, complaint) == (0, "")
    assert re.fullmatch(r"\d+ frames pushed, 0 dropped\n", said)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "case",
    [
        ("slow", ["--device", "/nowhere.avi"], "there is no file /nowhere.avi; a camera is a number"),
        ("slow", ["--device", "97"], "camera 97 cannot be opened"),
        ("slow", ["--device", __file__], "cannot be opened"),
        ("slow", ["--field", "frame"], "the stream has no field 'frame': it has image"),
        ("labelled", [], "a camera has nothing for the fields label of the stream"),
        ("small", ["--device", "VIDEO"], r"'image' is uint8\[48, 64, 3\], and has to be uint8\[9,9,3\]"),
        ("photos", [], "the source of stream 'photos' is not of type \"push\""),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(case, daemon, video, capsys):
    """The program prints one line and exits with status 1."""
    stream, options, message = case
    words = [str(video) if option == "VIDEO" else option for option in options]

    assert camera_module.main([stream, "--address", daemon.address, *words]) == 1
    said, complaint = capsys.readouterr()
    assert said == ""
    assert re.search(message, complaint)


@pytest.fixture
def quiet(monkeypatch):
    """Call the program in this process, and keep this process's signal handlers."""
    monkeypatch.setattr(camera_module.signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("quiet")
def test_frames_come_no_faster_than_they_are_asked_for(daemon, video, monkeypatch):
    """The program sleeps until the next frame is due."""
    slept = []
    monkeypatch.setattr(camera_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))

    assert camera_module.main(["slow", "--address", daemon.address, "--device", str(video), "--fps", "10"]) == 0

    assert len(slept) == FRAMES
    assert slept == sorted(slept), "no sleep took place, so each frame is due later"
    assert 1.0 < slept[-1] <= (FRAMES - 1) / 10


@pytest.mark.usefixtures("quiet")
def test_without_opencv_the_program_says_what_to_install(daemon, monkeypatch, capsys):
    """The client itself does not need OpenCV."""
    monkeypatch.setitem(sys.modules, "cv2", None)

    assert camera_module.main(["slow", "--address", daemon.address]) == 1
    assert "pip install opencv-python-headless" in capsys.readouterr().err
