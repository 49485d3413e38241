"""``batchd why`` with real trainers: each verdict is true by construction; a good stream has none.

Slow parts sleep, so that they are slow on any machine.
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
from support.daemon_process import DaemonProcess
from support.images import jpeg, photo, write_photos
from support.network import Proxy, free_port
from support.settings import PIPELINE, folder_stream
from support.waiting import wait_until

SECONDS = 2.5
MODULE = """
import time
def slow(sample, rng):
    time.sleep(0.2)
    return sample
def brief(sample, rng):
    time.sleep(0.01)
    return sample
def failing(sample, rng):
    if sample["label"] == 0:
        time.sleep(0.2)
        raise ValueError("bad")
    return sample"""
PNG_SIDE_PIXELS = 2200
LARGER = [{"op": "decode"}, {"op": "resize", "size": [224, 224]}]


def called(folder: Path, function: str, **changes: Any) -> dict[str, Any]:
    """Return a stream of random crops whose last step calls a function of the module."""
    call = {"op": "call", "function": f"slow:{function}"}
    return folder_stream(folder, **changes, pipeline=[*PIPELINE, call])


@pytest.fixture(scope="module")
def daemon(
    start_shared_daemon: Callable[..., DaemonProcess], photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> DaemonProcess:
    """Serve a stream for each reason to wait; each test reads one."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "slow.py").write_text(MODULE)
    write_photos(folder / "few", {"bad": 15, "good": 5}, height=32, width=32)
    write_photos(folder / "large", {"small": 38}, height=32, width=32)
    noise = np.random.default_rng(0).integers(0, 255, (PNG_SIDE_PIXELS, PNG_SIDE_PIXELS, 3), np.uint8)
    for name in ("huge1.png", "huge2.png"):
        assert cv2.imwrite(str(folder / "large" / "small" / name), noise)
    streams = {
        "photos": folder_stream(photos),
        "narrow": folder_stream(photos, window=1),
        "slow-step": called(photos, "slow", batch_size=2),
        "small-ring": called(photos, "brief", window=6, memory="80KiB"),
        "far": folder_stream(photos, pipeline=LARGER, shuffle=False),
        "large-files": folder_stream(folder / "large"),
        "bad-files": called(folder / "few", "failing", batch_size=2, on_error="mask", max_bad_fraction=1.0),
    }
    # One worker: with two, one idles while the other has a huge file.
    return start_shared_daemon(streams, workers=1, tcp=f"127.0.0.1:{free_port()}", python_path=[str(folder)])


@contextmanager
def reading(
    address: str, name: str = "photos", between: Callable[[int], None] = lambda _taken: None
) -> Iterator[Stream]:
    """Train on a stream in a thread; call ``between`` after each batch."""
    stop = threading.Event()
    with batchd_client.connect(address) as connection:
        stream = connection.stream(name)

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
            wait_until(lambda: stream.statistics().batches >= 3, "the first batches have arrived")
            yield stream
        finally:
            stop.set()
            thread.join()


def why(address: str, name: str = "photos") -> dict[str, Any]:
    """Return the verdict about the only trainer of a stream."""
    printed = batchd("why", name, "--seconds", str(SECONDS), "--json", address=address).stdout
    (verdict,) = json.loads(printed)
    return verdict


def pause(seconds: float, every: int = 1) -> Callable[[int], None]:
    """Return a function that sleeps so long after every so many batches."""
    return lambda taken: time.sleep(seconds if taken % every == every - 1 else 0)


@pytest.mark.thorough
def test_without_a_trainer_no_stream_has_a_verdict(daemon):
    """A stream that does not exist is an error."""
    printed = batchd("why", "--seconds", "0.5", address=daemon.address).stdout
    assert printed == "no trainer reads any stream, so none waits\n"
    message = batchd("why", "photo", "--seconds", "0.5", address=daemon.address, status=1).stderr
    assert message.startswith("batchd: there is no stream 'photo'; did you mean photos")


def test_a_slow_trainer_is_told_that_it_is_its_own_pace(daemon):
    """The ring is full whenever it asks; a sample just then finds one batch less."""
    with reading(daemon.address, between=pause(0.3)):
        verdict = why(daemon.address)

    assert verdict["kind"] == "trainer-bound", verdict["proof"]
    assert re.search(r"\b[34] of 4 batches ready ahead", verdict["proof"])
    assert verdict["wait_share"] < 0.05


def test_nothing_is_claimed_where_nothing_is_wrong(daemon):
    """The workers' capacity equals the demand, and the trainer hardly waits."""
    with reading(daemon.address, "narrow", pause(0.25)):
        line = batchd("why", "--seconds", str(SECONDS), address=daemon.address).stdout

    assert " on narrow: " in line
    assert any(f": {kind}: " in line for kind in ("trainer-bound", "fed"))


@pytest.mark.thorough
def test_a_slow_step_is_named(daemon):
    """A user's function takes 200 ms: longer than any wait for shared CPUs."""
    with reading(daemon.address, "slow-step"):
        verdict = why(daemon.address, "slow-step")

    assert verdict["kind"] == "decode-bound", verdict["proof"]
    assert float(re.search(r"call takes ([0-9.]+) ms", verdict["proof"])[1]) >= 200
    assert "core" in verdict["remedy"]


def test_slow_storage_is_told_from_a_slow_step(start_daemon, web):
    """The server delays every file for a moment."""
    for number in range(16):
        web.files[f"{number}.jpg"] = jpeg(photo(48, 64, number))
    web.files["list.txt"] = "\n".join(f"{number}.jpg 1" for number in range(16)).encode()
    source = {"type": "list", "path": f"{web.url}/list.txt"}
    daemon = start_daemon({"photos": folder_stream(Path("/"), source=source)})
    web.delay_s = 0.05
    with reading(daemon.address):
        verdict = why(daemon.address)

    assert verdict["kind"] == "storage-bound", verdict["proof"]
    assert "workers wait for files" in verdict["proof"]


def test_a_ring_that_is_too_small_is_told(daemon):
    """The trainer takes batches in bursts of six; the ring has room for two."""
    with reading(daemon.address, "small-ring", pause(2.0, every=5)):
        verdict = why(daemon.address, "small-ring")

    assert verdict["kind"] == "memory-bound", verdict["proof"]
    assert "a ring of 2 slots for a window of 6" in verdict["proof"]


@pytest.mark.thorough
def test_a_throttled_link_is_told(daemon):
    """Batches of small photographs are large; the link delays every 64 KiB."""
    with Proxy(int(daemon.tcp_address.rpartition(":")[2])) as far:
        far.delay_s = 0.01
        with reading(f"tcp://127.0.0.1:{far.port}", "far"):
            verdict = why(daemon.address, "far")

    assert verdict["kind"] == "network-bound", verdict["proof"]
    assert "MB/s" in verdict["proof"]


def test_a_few_large_files_among_small_ones_are_named(daemon):
    """Two of forty files are PNGs of millions of pixels."""
    with reading(daemon.address, "large-files"):
        verdict = why(daemon.address, "large-files")

    assert verdict["kind"] == "slow-samples", verdict["proof"]
    assert "huge" in verdict["proof"]


@pytest.mark.thorough
def test_bad_samples_that_take_long_are_told(daemon):
    """Three quarters are bad, each after 200 ms: longer than any wait for shared CPUs."""
    with reading(daemon.address, "bad-files"):
        verdict = why(daemon.address, "bad-files")

    assert verdict["kind"] == "bad-data", verdict["proof"]
    assert "batchd bad bad-files" in verdict["remedy"]


@pytest.mark.parametrize("seconds", ["0", "often"])
def test_a_time_that_is_none_is_refused(seconds: str):
    """The message has valid values."""
    message = batchd("why", "--seconds", seconds, status=2).stderr

    assert "--seconds" in message
