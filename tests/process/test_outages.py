"""Storage that is away, end to end: the stream waits for it, and no batch is another one."""

import time
from contextlib import contextmanager
from threading import Thread

import obstore
import pytest
from obstore.store import MemoryStore

import batchd_client
from batchd_client.errors import StreamStopped
from support.commands import batchd
from support.expected import Expected
from support.http_files import serving
from support.images import write_photos
from support.network import free_port
from support.seen import see
from support.settings import folder_stream
from support.shards import photo_shards
from support.waiting import wait_until

PHOTOS = 30


@pytest.fixture(scope="module", autouse=True)
def _obstore_runs():
    """Start obstore's threads, which live as long as the process, before any test's leak check."""
    obstore.put(MemoryStore(), "x", b"x")


@pytest.fixture
def folder(tmp_path):
    """A folder of thirty photographs of two classes."""
    root = tmp_path / "photos"
    root.mkdir()
    write_photos(root, {"cat": PHOTOS // 2, "dog": PHOTOS // 2}, height=72, width=96)
    return root


def stream_of(folder, **keys):
    """A stream that opens each file by its whole path, as after a change of a mount."""
    source = {"type": "folder", "path": str(folder), "allow_outside_root": True}
    return folder_stream(folder, source=source, batch_size=3, window=2, **keys)


@contextmanager
def away(folder):
    """Rename a folder during the context."""
    there = folder.with_name("away")
    folder.rename(there)
    try:
        yield
    finally:
        there.rename(folder)


def blink(folder, seconds=0.3):
    """Rename a folder for some time, after a moment."""
    time.sleep(0.05)
    with away(folder):
        time.sleep(seconds)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("keys", [{}, {"on_error": "mask"}, {"on_error": "fail"}], ids=["substitute", "mask", "fail"])
def test_a_folder_that_is_renamed_for_a_moment_costs_time_and_no_sample(start_daemon, folder, keys):
    """The batches are those of the plan, none is bad, and the trainer sees a delay."""
    daemon = start_daemon({"photos": stream_of(folder, **keys)}, workers=2)
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(8)]
    with batchd_client.connect(daemon.address) as connection, connection.stream("photos", epochs=8) as stream:
        found = [see(stream, batches=2)]
        blinker = Thread(target=blink, args=(folder,))
        blinker.start()
        while blinker.is_alive() and len(found) < 5:
            found.append(see(stream, batches=1))
            time.sleep(0.1)
        seen = [one for some in found for one in some]
        while len(seen) < 80:
            seen += see(stream)
        blinker.join()
        assert seen == [one for epoch in epochs for one in epoch]
        assert connection.bad("photos").total == 0
    assert daemon.stream_status()["bad_rows"] == 0
    (line,) = daemon.log_lines("storage away")
    assert (line["level"], line["stream"], line["up_to_s"]) == ("warning", "photos", 3600.0)
    assert str(folder) in line["reason"]
    assert len(daemon.log_lines("storage back")) == 1
    assert not daemon.log_lines("bad sample")


def test_who_asks_gets_to_know_that_the_storage_is_away(start_daemon, folder):
    """The status and the verdict name the root; then the stream goes on by itself."""
    daemon = start_daemon({"photos": stream_of(folder)}, workers=2)
    expected = Expected(daemon.config).epoch(0)
    with batchd_client.connect(daemon.address) as connection, connection.stream("photos", epochs=1) as stream:
        with away(folder):
            reader = Thread(target=lambda: found.extend(see(stream)))
            found: list = []
            reader.start()
            wait_until(lambda: daemon.stream_status()["away"], "the storage is reported away")
            reason = f"{folder} cannot be reached: No such file or directory"
            assert daemon.stream_status()["away"] == reason
            status = " ".join(batchd("status", address=daemon.address).stdout.split())
            assert "waits for its storage" in status
            assert reason in status
            why = " ".join(batchd("why", address=daemon.address).stdout.split())
            assert "storage-away: the storage of the stream has been away for" in why
            assert "the stream goes on by itself" in why
        reader.join()
        assert found == expected
    assert daemon.stream_status()["away"] is None


def test_a_folder_that_stays_away_stops_the_stream_and_a_reload_starts_it(start_daemon, folder):
    """The error has the reason and the command; new trainers get it, too, until the reload."""
    daemon = start_daemon({"photos": stream_of(folder, storage_away_s=1)}, workers=2)
    expected = Expected(daemon.config).epoch(0)
    with batchd_client.connect(daemon.address) as connection:
        with away(folder), pytest.raises(StreamStopped) as stopped:
            see(connection.stream("photos", epochs=1))
        text = str(stopped.value)
        assert f"{folder} cannot be reached: No such file or directory; it was waited for" in text
        assert "storage_away_s = 1" in text
        assert "`batchd reload` starts the stream again" in text
        with pytest.raises(StreamStopped, match="batchd reload"):
            see(connection.stream("photos", epochs=1))
        assert daemon.reload() == "revived photos"
        assert see(connection.stream("photos", epochs=1)) == expected
        assert connection.bad("photos").total == 0


def test_without_a_wait_samples_of_storage_that_is_away_are_bad(start_daemon, folder):
    """storage_away_s = 0 stops the stream at the first row without a sample."""
    daemon = start_daemon({"photos": stream_of(folder, storage_away_s=0)}, workers=2)
    with batchd_client.connect(daemon.address) as connection, away(folder), pytest.raises(StreamStopped) as stopped:
        see(connection.stream("photos", epochs=1))
    assert "could stand in for" in str(stopped.value) or "are bad, more than" in str(stopped.value)
    assert not daemon.log_lines("storage away")


def test_a_server_that_is_gone_is_waited_for(start_daemon, photos, tmp_path):
    """It is away for longer than batchd retries; then the batches are those that the files give."""
    shards = photo_shards(photos, tmp_path)
    held = {file.name: file.read_bytes() for file in tmp_path.glob("*.tar")}
    port = free_port()
    keys = {"batch_timeout_s": 3.0}  # a busy machine takes a second to find the server gone
    with serving(held, port=port) as server:
        streams = {"files": folder_stream(photos, source=shards)}
        streams["http"] = folder_stream(photos, source={**shards, "root": server.url})
        daemon = start_daemon(streams, workers=2, storage_retries=1, sample_timeout_s=5)
    with batchd_client.connect(daemon.address, **keys) as connection:
        reader = Thread(target=lambda: found.extend(see(connection.stream("http", epochs=1))))
        found: list = []
        reader.start()
        wait_until(lambda: daemon.stream_status("http")["away"], "the storage is reported away")
        # no BatchTimeout while the daemon waits for storage
        time.sleep(keys["batch_timeout_s"] + 1)
        with serving(held, port=port):
            reader.join()
    with batchd_client.connect(daemon.address) as connection:
        assert found == see(connection.stream("files", epochs=1))
        assert connection.bad("http").total == 0


def test_a_mount_that_is_gone_leaves_an_empty_folder(start_daemon, folder):
    """Where a mount was, there is an empty folder: that is no data set whose files are all gone."""
    daemon = start_daemon({"photos": stream_of(folder)}, workers=2)
    expected = Expected(daemon.config).epoch(0)
    with batchd_client.connect(daemon.address) as connection, connection.stream("photos", epochs=1) as stream:
        with away(folder):
            folder.mkdir()
            reader = Thread(target=lambda: found.extend(see(stream)))
            found: list = []
            reader.start()
            wait_until(lambda: daemon.stream_status()["away"], "the storage is reported away")
            assert daemon.stream_status()["away"] == f"{folder} is empty"
            folder.rmdir()
        reader.join()
        assert found == expected
