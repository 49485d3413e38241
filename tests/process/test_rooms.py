"""A slot has the room of its budget, a row that of its bucket, and samples keep their bytes."""

import json
import os

import pytest

import batchd_client
from batchd.commands.history.batches import Replayer
from batchd.config.load import load_config
from batchd_client.errors import VersionMismatch
from batchd_wire import OPEN_ENDED_SINCE
from batchd_wire.codec import Message
from batchd_wire.messages import Subscribe
from batchd_wire.position import Position
from support.commands import batchd
from support.images import encode, photo
from support.megatron import write_megatron
from support.network import free_port
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.settings import folder_stream, write_settings

LENGTHS = [1 + 7 * place % 61 for place in range(83)]
SHAPES = [(12 + 7 * place % 29, 16 + 11 * place % 41) for place in range(44)]
LARGEST = [64, 64, 3]
TOKENS, PIXELS = 122, 5000
EPOCHS = 2


@pytest.fixture
def streams(tmp_path):
    """Texts that are padded and ragged, and ragged pictures; each with a budget and without."""
    write_megatron(tmp_path / "texts.bin", [[[place] * length] for place, length in enumerate(LENGTHS)], "uint16")
    source = {
        "type": "tokens",
        "path": str(tmp_path / "texts.bin"),
        "format": "megatron",
        "dtype": "uint16",
        "field": "t",
    }
    folder = tmp_path / "pictures" / "one"
    folder.mkdir(parents=True)
    for number, (height, width) in enumerate(SHAPES):
        (folder / f"{number:02}.png").write_bytes(encode(photo(height, width, number), ".png"))
    texts = {"source": source, "batch_size": 16, "verify": True, "memory": "256KiB"}
    steps = [{"op": "decode"}, {"op": "random_flip"}, {"op": "ragged", "max_shape": LARGEST}]
    pictures = folder_stream(folder.parent, batch_size=8, pipeline=steps, verify=True, max_bad_fraction=1.0)
    plain = {
        "padded": {**texts, "pipeline": [{"op": "pad_batch", "field": "t", "max_shape": [64], "fill": 9}]},
        "ragged": {**texts, "pipeline": [{"op": "ragged", "field": "t", "max_shape": [64]}]},
        "pictures": pictures,
    }
    lengths = {"field": "t", "bounds": [15, 30, 45], "budget": TOKENS}
    buckets = {"padded": lengths, "ragged": lengths, "pictures": {"field": "image", "by": "pixels", "count": 4}}
    buckets["pictures"]["budget"] = PIXELS
    return {
        **{f"{name}-whole": {**stream, "memory": "1MiB"} for name, stream in plain.items()},
        **{name: {**stream, "bucket": buckets[name]} for name, stream in plain.items()},
    }


BUDGETED = ["padded", "ragged", "pictures"]


def rows_of(stream):
    """The values of each sample by (epoch, sample), and the number of rows of each batch."""
    rows, counts = {}, []
    for batch in stream:
        with batch:
            counts.append(batch.samples)
            for row, sample in enumerate(batch["index"].tolist()):
                if "image" in batch:
                    value = batch["image"][row]
                    assert value.shape[:2] == tuple(batch["image_shape"][row])
                else:
                    length = batch["t_length"][row]
                    value = batch["t"][row][:length]
                    assert isinstance(batch["t"], list) or (batch["t"][row][length:] == 9).all()
                rows[batch.epoch, sample] = value.shape, value.tobytes()
    return rows, counts


def all_rows(connection, name):
    """All rows of some epochs."""
    rows, counts = {}, []
    stream = connection.stream(name, epochs=EPOCHS)
    for _ in range(EPOCHS):
        of_epoch, counted = rows_of(stream)
        rows, counts = rows | of_epoch, counts + counted
    stream.close()
    return rows, counts


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_rows_have_the_bytes_that_they_have_without_a_budget(start_daemon, streams, workers):
    """Slots are used again for other buckets; near and far trainers, and a lost worker."""
    daemon = start_daemon(streams, workers=workers, chunk_rows=3, memory="64MiB", tcp=f"127.0.0.1:{free_port()}")
    with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
        for name in BUDGETED:
            whole, _counts = all_rows(near, f"{name}-whole")
            local, counts = all_rows(near, name)
            daemon.kill_a_worker()
            remote, same = all_rows(far, name)
            assert local == whole
            assert remote == whole
            assert counts == same
            assert len(set(counts)) > 2
    assert daemon.stream_status("pictures")["mismatched_batches"] == 0


@pytest.mark.thorough
def test_worker_hosts_fill_rows_with_the_room_of_their_bucket(start_daemon, tmp_path, streams):
    daemon = start_daemon(streams, **pool_keys(), chunk_rows=2, memory="64MiB")
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1, *BUDGETED)
        with batchd_client.connect(daemon.address) as near:
            for name in BUDGETED:
                for _ in range(2):
                    assert all_rows(near, name)[0] == all_rows(near, f"{name}-whole")[0]
        (link,) = links(daemon)

    assert link["samples"] > 0
    assert link["disagreements"] == 0


@pytest.mark.thorough
def test_a_slot_takes_what_the_budget_needs(streams, start_daemon):
    """The pictures of a batch of 8 x 64 x 64 pixels have 5,000 of them at most."""
    daemon = start_daemon(streams, memory="64MiB")

    with batchd_client.connect(daemon.address) as connection:
        sizes = {}
        for name in BUDGETED:
            for kind in (name, f"{name}-whole"):
                with next(iter(connection.stream(kind))) as batch:
                    sizes[kind] = batch.memory.slot_bytes
    explained = batchd("check", "--explain", str(daemon.config)).stdout

    assert sizes["pictures-whole"] > 8 * 64 * 64 * 3
    assert sizes["pictures"] <= 4096 + 4096 + PIXELS * 3
    assert sizes["padded-whole"] == sizes["ragged-whole"] == 4096 + 4096
    assert "pictures: a slot takes" in explained
    assert "rows with room for the largest sample would take" in explained


@pytest.mark.thorough
def test_a_batch_is_the_same_by_its_position_and_replayed(start_daemon, streams):
    """A copy from the daemon, and what is made again without it, have the same checksum."""
    daemon = start_daemon(streams, memory="64MiB")
    with batchd_client.connect(daemon.address) as connection:
        for name in BUDGETED:
            stream = connection.stream(name, epochs=1)
            expected = {}
            for batch in stream:
                with batch:
                    expected[batch.step] = batch.samples, batch.crc32()
            assert len({rows for rows, _crc in expected.values()}) > 1
            for step in (0, len(stream) // 2, len(stream) - 1):
                copy = stream.at(0, step)
                assert (copy.samples, copy.crc32()) == expected[step]
            with Replayer(load_config(daemon.config, {}, {}), name) as replayer:
                for step, (rows, crc32) in list(expected.items())[::3]:
                    replayed = replayer.at(Position(0, step))
                    assert (len(replayed.rows), replayed.crc32) == (rows, crc32)


@pytest.mark.thorough
def test_a_stream_of_a_reload_has_its_rooms_and_digests(start_daemon, tmp_path, streams):
    """The digest of an epoch has the checksums where the layout of each bucket has them."""
    found = []
    for number, first in enumerate(({}, {"pictures": {**streams["pictures"], "digest": True}})):
        daemon = start_daemon({"padded-whole": streams["padded-whole"], **first}, memory="64MiB")
        if not first:
            settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
            write_settings(daemon.config, {"pictures": {**streams["pictures"], "digest": True}}, settings)
            daemon.reload(0)
        with batchd_client.connect(daemon.address) as connection:
            rows = all_rows(connection, "pictures")
        file = tmp_path / f"{number}.json"
        batchd("card", "pictures", "--running", "-o", file, address=daemon.address)
        found.append((rows, json.loads(file.read_text())["digests"]))

    assert found[0] == found[1]
    assert [one["rows"] for one in found[0][1]] == [len(SHAPES)] * EPOCHS


def test_a_bad_sample_is_replaced_by_one_of_its_bucket(start_daemon, tmp_path, streams):
    """A picture that became larger does not fit; a broken one has no size. Each batch is whole."""
    streams["pictures"]["pipeline"] = [{"op": "decode"}, {"op": "ragged", "max_shape": LARGEST}]
    folder = tmp_path / "pictures" / "one"
    daemon = start_daemon({"pictures": streams["pictures"]}, memory="64MiB")
    by_size = sorted(range(len(SHAPES)), key=lambda number: SHAPES[number][0] * SHAPES[number][1])
    smallest, middle = by_size[0], by_size[len(by_size) // 2]
    for number, data in ((smallest, encode(photo(60, 60, 1), ".png")), (middle, b"no picture")):
        file = folder / f"{number:02}.png"
        file.write_bytes(data)
        os.utime(file, (0, 0))  # or it would be bad because it was written after the scan

    with batchd_client.connect(daemon.address) as connection:
        rows, counts = all_rows(connection, "pictures")
        bad = connection.bad("pictures")

    assert {sample for _epoch, sample in rows}.isdisjoint({smallest, middle})
    assert sum(counts) == EPOCHS * len(SHAPES)
    reasons = {one.sample: one.reason for one in bad.samples}
    assert reasons.keys() == {smallest, middle}
    assert "'image' is uint8[60, 60, 3], larger than the largest of its bucket" in reasons[smallest]


def test_an_older_trainer_is_refused_by_name(start_daemon, streams, monkeypatch):
    """It could not find the fields. Streams with one layout are served to it."""
    daemon = start_daemon(streams, memory="64MiB")
    monkeypatch.setattr(Subscribe, "encode", lambda self: Message.encode(self, OPEN_ENDED_SINCE - 1))

    with batchd_client.connect(daemon.address) as connection:
        assert len(all_rows(connection, "padded-whole")[1]) == EPOCHS * 6
        with pytest.raises(
            VersionMismatch, match=r"stream 'padded' have another room in each bucket.*pip install \./client"
        ):
            connection.stream("padded")
