"""Batches of samples that are alike have the same bytes everywhere, and positions keep them."""

import numpy as np
import pytest

import batchd_client
from support.expected import Expected
from support.images import jpeg, jpeg_with_exif, photo
from support.megatron import write_megatron
from support.network import free_port
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.seen import samples, see
from support.settings import folder_stream, write_settings

LENGTHS = [1 + 7 * place % 61 for place in range(83)]
ASPECTS = {"portrait": (60, 40), "square": (50, 50), "wide": (40, 60), "banner": (20, 90)}
SIDES = [*ASPECTS.values()]


@pytest.fixture
def texts(tmp_path):
    """Documents whose lengths are in the index of their file: 83, of 1 to 61 tokens."""
    write_megatron(tmp_path / "texts.bin", [[[place] * length] for place, length in enumerate(LENGTHS)], "uint16")
    return {
        "source": {
            "type": "tokens",
            "path": str(tmp_path / "texts.bin"),
            "format": "megatron",
            "dtype": "uint16",
            "field": "t",
        },
        "batch_size": 4,
        "pipeline": [{"op": "pad_batch", "field": "t", "max_shape": [64]}],
        "bucket": {"field": "t", "bounds": [15, 30, 45]},
    }


@pytest.fixture
def pictures(tmp_path):
    """Forty pictures of four aspects; every second one is stored on its side, with a tag."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for place in range(40):
        height, width = SIDES[place % 4]
        upright, sideways = jpeg(photo(height, width)), jpeg_with_exif(jpeg(photo(width, height)), 6)
        (folder / f"{place:02}.jpg").write_bytes(sideways if place // 4 % 2 else upright)
    return folder_stream(folder, bucket={"field": "image", "by": "aspect", "count": 4}, batch_size=5)


@pytest.mark.parametrize(("workers", "chunk_rows"), [(1, 256), (2, 3), (5, 1)])
def test_the_bytes_depend_on_neither_workers_nor_chunks(start_daemon, pictures, workers, chunk_rows):
    """The test's own process computes two epochs; each has every sample once."""
    daemon = start_daemon({"photos": pictures}, workers=workers, chunk_rows=chunk_rows)
    expected = Expected(daemon.config)

    with batchd_client.connect(daemon.address) as connection:
        batches = connection.stream("photos", epochs=2)
        first, second = see(batches), see(batches)

    assert (first, second) == (expected.epoch(0), expected.epoch(1))
    assert samples(first) == samples(second) == list(range(40))
    assert [one.samples for one in first] != [one.samples for one in second]


def test_a_batch_is_cut_to_the_longest_of_its_bucket(start_daemon, texts):
    """Only the last batch of an epoch has fewer rows."""
    daemon = start_daemon({"photos": texts})
    rows, widths, spreads = [], set(), []
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            with batch:
                rows.append(batch.samples)
                widths.add(batch["t"].shape[1])
                spreads.append(np.ptp(batch["t_length"]))
                assert all(
                    (batch["t"][row, : LENGTHS[sample]] == sample).all() for row, sample in enumerate(batch["index"])
                )

    assert rows == [4] * 20 + [3]
    assert min(widths) <= 15
    assert max(widths) == 61
    assert max(spreads) <= 15 + 3


def test_local_and_remote_trainers_and_worker_hosts_have_the_same_bytes(start_daemon, tmp_path, pictures):
    """A worker host makes the order from the index that it gets, by the upright images."""
    daemon = start_daemon({"photos": pictures}, **pool_keys(), chunk_rows=2, tcp=f"127.0.0.1:{free_port()}")
    expected = Expected(daemon.config)
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1)
        with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
            local, remote = near.stream("photos", epochs=4), far.stream("photos", epochs=4)
            for epoch in range(4):
                assert see(local) == see(remote) == expected.epoch(epoch)
        (link,) = links(daemon)

    assert link["samples"] > 0
    assert link["disagreements"] == 0
    assert all(len({sample % 4 for sample in batch.samples}) == 1 for batch in expected.epoch(0))


@pytest.mark.parametrize("by", ["aspect", "pixels"])
def test_pictures_are_sorted_by_what_is_asked_for(start_daemon, pictures, by):
    """Without a shuffle the smallest are first."""
    keys = {"bucket": {"field": "image", "by": by}, "shuffle": False}
    daemon = start_daemon({"photos": {**pictures, **keys}})

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1))

    size = {"aspect": lambda height, width: width / height, "pixels": lambda height, width: width * height}[by]
    sizes = [size(*SIDES[sample % 4]) for batch in seen for sample in batch.samples]
    assert sizes == sorted(sizes)


def test_ranks_of_a_step_read_one_bucket_and_others_resume(start_daemon, texts):
    """Three steps of two ranks, then one rank, then four: together each sample once."""
    daemon = start_daemon({"photos": {**texts, "balance": 4, "bucket": {"field": "t", "bounds": [15, 45]}}})
    starts = Expected(daemon.config).plan.order.starts.tolist()
    place = np.argsort(np.argsort(LENGTHS, kind="stable"), kind="stable")
    seen = []
    with batchd_client.connect(daemon.address) as connection:
        state = None
        for world_size, count in ((2, 2), (1, 4), (4, None)):
            ranks = [connection.stream("photos", rank, world_size, epochs=1, state=state) for rank in range(world_size)]
            read = [see(rank, count) for rank in ranks]
            for step in zip(*(batches for batches in read), strict=True):
                buckets = {int(np.searchsorted(starts, place[one], "right")) for batch in step for one in batch.samples}
                assert len(buckets) == 1
            seen += [batch for batches in read for batch in batches]
            state = ranks[0].state_dict()
            for rank in ranks:
                rank.close()

    assert set(samples(seen)) == set(range(83))


def test_a_stream_of_a_reload_has_its_buckets(start_daemon, pictures, texts):
    """A new stream gets its order from its index, and other buckets are other batches."""
    daemon = start_daemon({"other": pictures})
    for bounds in ([15, 30], [40]):
        streams = {"other": pictures, "photos": {**texts, "bucket": {"field": "t", "bounds": bounds}}}
        settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
        write_settings(daemon.config, streams, settings)
        daemon.reload(0)
        expected = Expected(daemon.config)
        with batchd_client.connect(daemon.address) as connection:
            seen = see(connection.stream("photos", epochs=1))
        assert [batch.samples for batch in seen] == [batch.samples for batch in expected.epoch(0)]


def test_a_bad_sample_has_no_size_and_is_treated_by_the_policy(start_daemon, tmp_path, pictures):
    (tmp_path / "pictures" / "07.jpg").write_bytes(b"no picture")
    daemon = start_daemon({"photos": {**pictures, "on_error": "mask"}})

    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            with batch:
                assert batch["valid"].tolist() == [sample != 7 for sample in batch["index"]]
    (line,) = daemon.log_lines("samples without a size")
    assert line["bad_or_empty"] == 1
    assert "07.jpg: not a JPEG" in line["example"]
