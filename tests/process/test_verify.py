"""Streams with ``verify = true``: bytes changed under way are found, requested again, counted."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from batchd.runtime.available import MEMORY_NAME
from batchd_client import reader as client_reader
from batchd_client.errors import BatchCorrupt
from batchd_wire.fields import HEADER_BYTES
from batchd_wire.position import Position
from batchd_wire.slot import MAGIC, UNFINISHED, unpack_header
from batchd_wire.wording import counted
from support.commands import batchd
from support.expected import Expected
from support.network import Proxy, free_port
from support.seen import look_at, see
from support.settings import folder_stream
from support.waiting import wait_until

NEEDLE_BYTES = 24


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve two streams of the same batches, one of them with checksums; over TCP too."""
    stream = folder_stream(photos)
    streams = {"photos": {**stream, "verify": True}, "bare": stream}
    return start_shared_daemon(streams, tcp=f"127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def expected(daemon):
    """Compute the content of each position of either stream."""
    return Expected(daemon.config)


@contextmanager
def bad_network(daemon):
    """Start a proxy that can change bytes on their way; return its address and the proxy."""
    with Proxy(int(daemon.tcp_address.rpartition(":")[2])) as proxy:
        yield f"tcp://127.0.0.1:{proxy.port}", proxy


def spoil(proxy, image, times):
    """Change one pixel of this image, the first ``times`` times that it passes."""
    flat = image.tobytes()
    needles = [flat[at : at + NEEDLE_BYTES] for at in range(0, len(flat) - NEEDLE_BYTES, NEEDLE_BYTES)]
    left = [times]

    def alter(data):
        found = next((needle for needle in needles if needle in data), None)
        if found is None or not left[0]:
            return data
        left[0] -= 1
        return data.replace(found, bytes([found[0] ^ 1]) + found[1:], 1)

    proxy.alter = alter


def second_image(daemon):
    """Return the first image of the second batch, unchanged."""
    with batchd_client.connect(daemon.address) as near:
        stream = near.stream("bare")
        stream.seek(0, 1)
        with next(iter(stream)) as batch:
            return batch["image"][0].copy()


def mismatched(daemon, stream="photos"):
    """Return the number of mismatches that trainers reported to the daemon."""
    return daemon.stream_status(stream)["mismatched_batches"]


def test_checksums_change_nothing_that_a_trainer_sees(daemon, expected):
    """Bytes, fields and fingerprint are equal, on this host and over TCP."""
    for address in (daemon.address, daemon.tcp_address):
        with batchd_client.connect(address) as connection:
            checked, bare = connection.stream("photos", epochs=2), connection.stream("bare", epochs=2)
            assert (dict(checked.schema), checked.fingerprint) == (dict(bare.schema), bare.fingerprint)
            for epoch in range(2):
                assert see(checked) == see(bare) == expected.epoch(epoch)
            assert checked.statistics().mismatches == 0
    assert batchd("peek", "photos", address=daemon.address)


def test_a_byte_that_changes_on_the_wire_is_asked_for_again(daemon, expected, caplog):
    """One change in an epoch: the trainer gets every batch intact, in order."""
    image, before = second_image(daemon), mismatched(daemon)
    with bad_network(daemon) as (address, proxy), batchd_client.connect(address) as far:
        spoil(proxy, image, times=1)
        stream = far.stream("photos", epochs=1)
        assert see(stream) == expected.epoch(0)
        assert stream.statistics().mismatches == 1
    assert "batch (epoch 0, step 1) of stream 'photos': 1 of 8 rows with checksums that do not match" in caplog.text
    assert mismatched(daemon) == before + 1
    assert "batch did not match its checksums" in daemon.log
    shown = batchd("status", address=daemon.address).stdout
    assert f"stream photos: {counted(before + 1, 'batch')} came to trainers other than they were written" in shown


def test_without_checksums_it_would_go_unseen(daemon, expected):
    """The test shows that it is the checksums that find the change."""
    image = second_image(daemon)
    with bad_network(daemon) as (address, proxy), batchd_client.connect(address) as far:
        spoil(proxy, image, times=1)
        seen = see(far.stream("bare", epochs=1))
    assert [one == other for one, other in zip(seen, expected.epoch(0), strict=True)] == [True, False, True, True, True]
    assert mismatched(daemon, "bare") == 0


def test_a_network_that_always_changes_a_batch_is_an_error_that_names_it(daemon, expected, monkeypatch):
    """Once the network is repaired, the same loop continues with the same batch."""
    monkeypatch.setattr(client_reader, "MISMATCH_PAUSE_S", 0.001)
    image = second_image(daemon)
    with bad_network(daemon) as (address, proxy), batchd_client.connect(address) as far:
        spoil(proxy, image, times=client_reader.MISMATCHES_MAX)
        stream = far.stream("photos", epochs=1)
        first = look_at(next(iter(stream)))
        with pytest.raises(BatchCorrupt, match=r"\(epoch 0, step 1\) of stream 'photos'.* the 5th time"):
            next(iter(stream))
        assert (stream.epoch, stream.step) == (0, 1)
        assert [first, *see(stream)] == expected.epoch(0)
        assert stream.statistics().mismatches == client_reader.MISMATCHES_MAX


def slots_of(daemon):
    """Return the memory of filled slots, as files of /proc, with their headers."""
    for file in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if f"memfd:{MEMORY_NAME}" in str(file.readlink()):
            with file.open("rb") as slot:
                page = slot.read(4096)
            if page.startswith(MAGIC) and (header := unpack_header(page)).generation != UNFINISHED:
                yield file, header


def test_memory_that_changes_under_a_batch_is_found_and_the_batch_decoded_again(start_daemon, photos):
    """The trainer reads the worker's memory locally: one bit changes in a ready slot.

    The trainer continues after restarts that turn checksums off and on: they do not belong to a
    stream's fingerprint.
    """
    daemon = start_daemon({"photos": folder_stream(photos, verify=True)})
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.address) as near:
        stream = near.stream("photos", epochs=1, window=4)
        first = look_at(next(iter(stream)))
        wait_until(lambda: daemon.stream_status()["ready_slots"] >= 4, "the window is full")
        third = next(file for file, header in slots_of(daemon) if (header.epoch, header.step) == (0, 2))
        with third.open("r+b") as slot:
            slot.seek(HEADER_BYTES + 1000)
            byte = slot.read(1)[0]
            slot.seek(HEADER_BYTES + 1000)
            slot.write(bytes([byte ^ 0x10]))
        decoded = daemon.stream_status()["decoded_batches"]
        assert [first, *see(stream)] == expected.epoch(0)
        assert stream.statistics().mismatches >= 1
    assert mismatched(daemon) >= 1
    assert daemon.stream_status()["decoded_batches"] > decoded
    text = daemon.config.read_text()
    for turned in ("false", "true"):
        with batchd_client.connect(daemon.address) as near:
            stream = near.stream("photos", epochs=1)
            seen = see(stream, 2)
            daemon.config.write_text(text.replace("verify = true", f"verify = {turned}"))
            daemon.restart()
            assert seen + see(stream) == expected.epoch(0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_a_batch_compare_their_own_rows(daemon, world_size):
    """The last round of an epoch is split by rows; TCP carries only these rows."""
    with batchd_client.connect(daemon.tcp_address) as far:
        streams = [far.stream("photos", rank, world_size, epochs=1) for rank in range(world_size)]
        seen = [one for stream in streams for batch in stream for one in batch["index"].tolist()]
        assert set(seen) == set(range(40))
        assert all(stream.statistics().mismatches == 0 for stream in streams)


def test_bad_samples_have_checksums_too(start_daemon, photos, tmp_path):
    """Bad samples are rows of zeros under ``mask``, or substitutes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in sorted(photos.rglob("*.jpg"))[:7]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "bad.jpg").write_bytes(b"no image")
    for policy in ("mask", "substitute"):
        streams = {"photos": folder_stream(folder, verify=True, on_error=policy, max_bad_fraction=1.0)}
        daemon = start_daemon(streams)
        with batchd_client.connect(daemon.address) as near:
            stream = near.stream("photos", epochs=1)
            batch = next(iter(stream))
            assert stream.statistics().mismatches == 0
            assert policy == "substitute" or np.asarray(batch["valid"]).sum() == 7
            plan = Expected(daemon.config).plan
            assert batch.samples == plan.rows(Position(0, 0))
            batch.release()
