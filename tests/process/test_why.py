"""``batchd why`` with real trainers: each verdict where it is true by construction, and none where nothing is wrong.

What is slow here sleeps, so that it is slow on any machine.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import batchd_client
from batchd_client import BatchdClientError, Stream
from support.commands import batchd
from support.images import jpeg, photo, write_photos
from support.network import Proxy, free_port
from support.settings import folder_stream
from support.waiting import wait_until

SECONDS = 2.5
SLEEPING = "import time\ndef fn(sample, rng):\n    time.sleep({})\n    return sample"
FAILING = """import time
def fn(sample, rng):
    if sample["label"] == 0:
        time.sleep(0.02)
        raise ValueError("bad")
    return sample"""
CALL = {"op": "call", "function": "slow:fn"}
PNG_SIDE_PIXELS = 2200


@contextmanager
def reading(address: str, between: Callable[[int], None] = lambda _taken: None) -> Iterator[Stream]:
    """Somebody trains on the stream ``photos`` in a thread of his own; after each batch he does ``between``."""
    stop = threading.Event()
    with batchd_client.connect(address) as connection:
        stream = connection.stream("photos")

        def train() -> None:
            with suppress(BatchdClientError):
                while not stop.is_set():
                    for taken, batch in enumerate(stream):
                        batch.release()
                        between(taken)
                        if stop.is_set():
                            return

        thread = threading.Thread(target=train)
        thread.start()
        try:
            wait_until(lambda: stream.statistics().batches >= 3, "the first batches have come")
            yield stream
        finally:
            stop.set()
            thread.join()


def why(address: str, *options: str) -> dict[str, Any]:
    """The verdict about the one trainer."""
    printed = batchd("why", "photos", "--seconds", str(SECONDS), "--json", *options, address=address).stdout
    (verdict,) = json.loads(printed)
    return verdict


def pause(seconds: float, every: int = 1) -> Callable[[int], None]:
    """A trainer that computes for so long after every so many batches."""
    return lambda taken: time.sleep(seconds if taken % every == every - 1 else 0)


def test_a_slow_trainer_is_told_that_it_is_its_own_pace(start_daemon, photos):
    """The ring is full whenever it comes."""
    daemon = start_daemon({"photos": folder_stream(photos)})
    with reading(daemon.address, pause(0.3)):
        verdict = why(daemon.address)

    assert verdict["kind"] == "trainer-bound"
    assert "4 of 4 batches ready ahead" in verdict["proof"]
    assert verdict["wait_share"] < 0.05


def test_nothing_is_claimed_where_nothing_is_wrong(start_daemon, photos):
    """Workers have just as much to do as they can, and the trainer hardly waits."""
    daemon = start_daemon({"photos": folder_stream(photos, window=1)})
    with reading(daemon.address, pause(0.25)):
        line = batchd("why", "--seconds", str(SECONDS), address=daemon.address).stdout

    assert " on photos: " in line
    assert any(f": {kind}: " in line for kind in ("trainer-bound", "fed"))


def test_a_slow_step_is_named(start_daemon, photos, code, write):
    """A function of the user's takes 200 ms: so long that it outweighs any waiting for CPUs that others share."""
    write("slow.py", SLEEPING.format(0.2))
    pipeline = [*folder_stream(photos)["pipeline"], CALL]
    stream = folder_stream(photos, pipeline=pipeline, batch_size=2)
    daemon = start_daemon({"photos": stream}, python_path=[str(code)])
    with reading(daemon.address):
        verdict = why(daemon.address)

    assert verdict["kind"] == "decode-bound"
    assert float(re.search(r"call takes ([0-9.]+) ms", verdict["proof"])[1]) >= 200
    assert "core" in verdict["remedy"]


def test_slow_storage_is_told_from_a_slow_step(start_daemon, web):
    """Files come from a server that thinks about each for a moment."""
    for number in range(16):
        web.files[f"{number}.jpg"] = jpeg(photo(48, 64, number))
    web.files["list.txt"] = "\n".join(f"{number}.jpg 1" for number in range(16)).encode()
    source = {"type": "list", "path": f"{web.url}/list.txt"}
    daemon = start_daemon({"photos": folder_stream(Path("/"), source=source)})
    web.delay_s = 0.05
    with reading(daemon.address):
        verdict = why(daemon.address)

    assert verdict["kind"] == "storage-bound"
    assert "workers wait for files" in verdict["proof"]


def test_a_ring_that_is_too_small_is_told(start_daemon, photos, code, write):
    """The trainer takes batches in bursts of six, and there is room for two."""
    write("slow.py", SLEEPING.format(0.004))
    pipeline = [*folder_stream(photos)["pipeline"], CALL]
    stream = folder_stream(photos, pipeline=pipeline, window=6, memory="80KiB")
    daemon = start_daemon({"photos": stream}, python_path=[str(code)])
    with reading(daemon.address, pause(0.6, every=5)):
        verdict = why(daemon.address)

    assert verdict["kind"] == "memory-bound"
    assert "a ring of 2 slots for a window of 6" in verdict["proof"]


def test_a_throttled_link_is_told(start_daemon, photos):
    """Large batches of small photographs, and a way that takes a moment for every 64 KiB."""
    pipeline = [{"op": "decode"}, {"op": "resize", "size": [224, 224]}]
    stream = folder_stream(photos, pipeline=pipeline, shuffle=False)
    port = free_port()
    daemon = start_daemon({"photos": stream}, tcp=f"127.0.0.1:{port}")
    with Proxy(port) as far:
        far.delay_s = 0.01
        with reading(f"tcp://127.0.0.1:{far.port}"):
            verdict = why(daemon.address)

    assert verdict["kind"] == "network-bound"
    assert "MB/s" in verdict["proof"]


def test_a_few_large_files_among_small_ones_are_named(start_daemon, tmp_path):
    """Two of forty are PNGs of millions of pixels."""
    write_photos(tmp_path, {"small": 38}, height=32, width=32)
    noise = np.random.default_rng(0).integers(0, 255, (PNG_SIDE_PIXELS, PNG_SIDE_PIXELS, 3), np.uint8)
    for name in ("huge1.png", "huge2.png"):
        assert cv2.imwrite(str(tmp_path / "small" / name), noise)
    daemon = start_daemon({"photos": folder_stream(tmp_path)})
    with reading(daemon.address):
        verdict = why(daemon.address)

    assert verdict["kind"] == "slow-samples"
    assert "huge" in verdict["proof"]


def test_bad_samples_that_take_long_are_told(start_daemon, tmp_path, code, write):
    """A quarter of them; what is wrong with them turns out after 20 ms."""
    write("slow.py", FAILING)
    write_photos(tmp_path / "photos", {"bad": 5, "good": 15}, height=32, width=32)
    stream = folder_stream(tmp_path / "photos", max_bad_fraction=1.0)
    stream["pipeline"] = [*stream["pipeline"], CALL]
    daemon = start_daemon({"photos": stream}, python_path=[str(code)])
    with reading(daemon.address):
        verdict = why(daemon.address)

    assert verdict["kind"] == "bad-data"
    assert "batchd bad photos" in verdict["remedy"]


def test_without_a_trainer_nobody_waits(start_daemon, photos):
    """And a stream that does not exist is a mistake."""
    daemon = start_daemon({"photos": folder_stream(photos)})

    printed = batchd("why", "--seconds", "0.5", address=daemon.address).stdout
    assert printed == "no trainer reads any stream: nobody waits\n"
    message = batchd("why", "photo", "--seconds", "0.5", address=daemon.address, status=1).stderr
    assert message == "batchd: there is no stream 'photo'; there are photos\n"


@pytest.mark.parametrize("seconds", ["0", "often"])
def test_a_time_that_is_none_is_refused(seconds: str):
    """With what would do."""
    message = batchd("why", "--seconds", seconds, status=2).stderr

    assert "--seconds" in message
