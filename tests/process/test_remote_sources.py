"""Shards on servers, served: the same batches as from files, also during a server's outage."""

import io
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import batchd_client
from batchd_client.errors import BatchTimeout, StreamStopped
from support.commands import batchd
from support.http_files import SECRET, Cut, FileServer, Status, serving
from support.network import free_port
from support.parquet_files import photo_rows
from support.s3_server import CREDENTIALS
from support.seen import samples, see
from support.settings import STILL_PIPELINE, folder_stream, write_settings
from support.shards import photo_shards, write_shard
from support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def _obstore_runs():
    """Start obstore's threads, which live as long as the process, before any test's leak check."""
    obstore.put(MemoryStore(), "x", b"x")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_shards_on_servers_give_the_batches_that_the_files_give(start_daemon, photos, tmp_path, web, bucket):
    """Samples are shuffled and cropped; fingerprints are equal. Each image may be an object."""
    source = photo_shards(photos, tmp_path)
    web.files.update(contents(tmp_path))
    bucket.put({f"some/where/{name}": data for name, data in web.files.items()})
    files = folder_stream(photos, source=source)
    streams = {
        "files": files,
        "http": {**files, "source": {**source, "root": web.url}},
        "s3": {**files, "source": {**source, "root": "s3://bucket/some/where", "shards": ["train-*.tar"]}},
    }
    bucket.put({f"photos/{name}": data for name, data in contents(photos).items()})
    objects = {"here": folder_stream(photos), "there": folder_stream("s3://bucket/photos")}
    daemon = start_daemon(streams | objects)
    with batchd_client.connect(daemon.address) as connection:
        one, other = (connection.stream(name, epochs=1) for name in objects)
        assert (one.classes, see(one)) == (other.classes, see(other))
        reads = {name: connection.stream(name, epochs=2) for name in streams}
        assert len({reads[name].fingerprint for name in reads}) == 1
        expected = see(reads["files"])
        assert see(reads["http"]) == expected
        assert see(reads["s3"]) == expected
        assert [connection.bad(name).total for name in streams] == [0, 0, 0]
    assert not [value for name, value in CREDENTIALS.items() if "KEY" in name and value in daemon.log]


@pytest.fixture
def servers(web, bucket, google):
    """Start one server of each kind."""
    return web, bucket, google


@pytest.mark.thorough
def test_rows_on_servers_give_the_batches_that_the_files_give(start_daemon, photos, tmp_path, servers):
    """Rows are read by value and by row group, with class names; a worker is killed meanwhile."""
    web, bucket, google = servers
    here = folder_stream(photos)
    streams = {"files": here}
    for compression in ("none", "snappy"):
        source = photo_rows(photos, tmp_path / compression, compression=compression)
        web.files.update({f"{compression}/{name}": data for name, data in contents(tmp_path / compression).items()})
        for kind, root in {"http": web.url, "s3": "s3://bucket/some", "gs": "gs://bucket/some"}.items():
            shards = ["train-{0..1}.parquet"] if kind == "http" else ["train-*"]
            source = {**source, "root": f"{root}/{compression}", "shards": shards}
            streams[f"{kind}-{compression}"] = {**here, "source": source}
    bucket.put({f"some/{name}": data for name, data in web.files.items()})
    google.files.update({f"bucket/some/{name}": data for name, data in web.files.items()})
    daemon = start_daemon(streams, workers=2)
    with batchd_client.connect(daemon.address) as connection:
        reads = {name: connection.stream(name, epochs=2) for name in streams}
        expected = see(reads["files"])
        for name in streams.keys() - {"files"}:
            assert reads[name].classes == reads["files"].classes == ("cat", "dog", "owl", "yak")
            os.kill(daemon.status()["workers"][0]["pid"], signal.SIGKILL)
            assert see(reads[name]) == expected
        assert [connection.bad(name).total for name in streams] == [0] * 7


@pytest.mark.thorough
def test_what_fails_in_rows_on_a_server_is_asked_again_or_named(start_daemon, photos, tmp_path, web):
    """Passing faults cost time and no sample; every row of a changed or missing file is bad."""
    streams = {}
    for compression in ("none", "snappy"):
        source = photo_rows(photos, tmp_path / compression, compression=compression)
        source["shards"] = ["train-{0..1}.parquet"]
        for fault in ("passes", "stays"):
            name = f"{compression}-{fault}"
            web.files.update({f"{name}/{file}": data for file, data in contents(tmp_path / compression).items()})
            stream = folder_stream(photos, source={**source, "root": f"{web.url}/{name}"}, pipeline=STILL_PIPELINE)
            streams[name] = {**stream, "on_error": "mask", "max_bad_fraction": 1.0}
    daemon = start_daemon(streams, storage_retries=10)
    for name in ("none-passes", "snappy-passes"):
        faults = web.faults[f"{name}/train-0.parquet"] = [Status(503), Cut(5), Status(500)]
        with batchd_client.connect(daemon.address) as connection:
            assert len(see(connection.stream(name, epochs=1))) > 0
            assert connection.bad(name).total == 0
        assert faults == []
    for name in ("none-stays", "snappy-stays"):
        web.files[f"{name}/train-0.parquet"] = web.files[f"{name}/train-0.parquet"][:-1] + b"!"
        web.files.pop(f"{name}/train-1.parquet")
        with batchd_client.connect(daemon.address) as connection:
            assert sum(len(one.samples) for one in see(connection.stream(name, epochs=1))) == 40
            wait_until(lambda name=name: connection.bad(name).total == 40, "all samples are listed")
            bad = {one.path.removeprefix(f"{web.url}/{name}/"): one.reason for one in connection.bad(name).samples}
        assert bad.keys() == {f"train-{file}.parquet: row {row}" for file in range(2) for row in range(20)}
        for place, reason in bad.items():
            what = "it has changed since the source was scanned" if "train-0" in place else "it is not there (404)"
            assert what in reason
    assert SECRET not in daemon.log


def test_a_server_that_is_gone_for_a_while_costs_time_and_no_sample(start_daemon, photos, tmp_path):
    """The trainer waits; after the outage, the batches are those that the files give."""
    source = photo_shards(photos, tmp_path)
    port = free_port()
    with serving(contents(tmp_path), port=port) as server:
        stream = {**folder_stream(photos), "source": {**source, "root": server.url}}
        daemon = start_daemon(
            {"files": folder_stream(photos, source=source), "http": stream}, storage_retries=100, sample_timeout_s=120
        )
    with batchd_client.connect(daemon.address, batch_timeout_s=0.5) as connection:
        reads = connection.stream("http", epochs=1)
        with suppress(BatchTimeout):
            next(iter(reads))
            raise AssertionError("no server ran that could send it")
        with serving(contents(tmp_path), port=port):
            seen = see_patiently(reads)
        with batchd_client.connect(daemon.address) as other:
            assert seen == see(other.stream("files", epochs=1))
        assert connection.bad("http").total == 0
        assert daemon.log_lines("worker ended") == []


def test_a_server_that_is_gone_for_good_stops_the_stream_with_the_reason(start_daemon, photos, tmp_path):
    """The stream stops soon: the daemon does not request every possible substitute."""
    source = photo_shards(photos, tmp_path)
    with serving(contents(tmp_path), port=free_port()) as server:
        stream = {**folder_stream(photos), "source": {**source, "root": server.url}, "max_bad_fraction": 1.0}
        daemon = start_daemon({"photos": stream | {"storage_away_s": 0}}, storage_retries=1)
    with batchd_client.connect(daemon.address) as connection, pytest.raises(StreamStopped) as stopped:
        see(connection.stream("photos", epochs=1))
    reason = str(stopped.value)
    assert f"could stand in for {server.url}/train-0" in reason
    assert "no server listens at its host and port (asked 2 times)" in reason


def see_patiently(reads: "batchd_client.Stream") -> list:
    """Read all batches, however often the trainer's wait reaches its timeout."""
    seen: list = []
    while True:
        with suppress(BatchTimeout):
            one = see(reads, batches=1)
            if not one:
                return seen
            seen += one


def test_what_changes_on_a_server_makes_bad_samples_that_say_so(start_daemon, photos, tmp_path, web: FileServer):
    """The reason has URL, member and byte, and no text from the server."""
    source = photo_shards(photos, tmp_path, count=2)
    web.files.update(contents(tmp_path))
    stream = {
        **folder_stream(photos),
        "source": {**source, "root": web.url},
        "pipeline": STILL_PIPELINE,
        "on_error": "mask",
        "max_bad_fraction": 1.0,
    }
    daemon = start_daemon({"photos": stream})
    web.files["train-00.tar"] = web.files["train-00.tar"][:-1] + b"!"
    web.files.pop("train-01.tar")
    with batchd_client.connect(daemon.address) as connection:
        assert sum(len(one.samples) for one in see(connection.stream("photos", epochs=1))) == 40
        wait_until(lambda: connection.bad("photos").total == 40, "all samples are listed")
        bad = connection.bad("photos").samples
    reasons = {
        shard: {one.reason.partition(": ")[2] for one in bad if shard in one.path} for shard in ("train-00", "train-01")
    }
    assert reasons == {
        "train-00": {"it has changed since the source was scanned (412)"},
        "train-01": {"it is not there (404)"},
    }
    assert all(one.path.startswith(f"{web.url}/train-0") and ".tar: " in one.path for one in bad)
    assert all(one.reason.startswith("cannot be read at byte ") for one in bad)
    assert SECRET not in daemon.log


def test_a_check_says_what_is_wrong_with_a_server(tmp_path, web: FileServer):
    """The check also reports a good server, with the URL as it was written."""
    file = tmp_path / "batchd.toml"
    stream = folder_stream(tmp_path, source={"type": "webdataset", "root": f"{web.url}/x", "shards": ["a-{0..3}.tar"]})
    write_settings(file, {"a": stream}, {"runtime_dir": str(tmp_path / "run")})
    web.files["x/a-0.tar"] = b"x"
    assert f"webdataset {web.url}/x: a-{{0..3}}.tar" in batchd("check", file).stdout

    web.faults["x/a-0.tar"] = [Status(403)] * 2
    assert f"{web.url}/x/a-0.tar cannot be read: it may not be read (403)" in batchd("check", file, status=2).stderr
    wild = batchd("check", file, "--set", 'streams.a.source.shards=["*.tar"]', status=2).stderr
    assert "cannot be expanded, as http servers cannot list files" in " ".join(wild.split())


@pytest.fixture
def blocks(tmp_path, web):
    """Streams of two open blocks of four samples over the same shards, here and on a server."""
    chance = np.random.default_rng(0)
    for shard in range(2):
        rows = chance.integers(0, 256, (24, 100_000), np.uint8)
        write_shard(tmp_path / f"{shard}.tar", [(f"{number}.x.npy", npy(row)) for number, row in enumerate(rows)])
    web.files.update(contents(tmp_path))
    fields = {"shards": ["{0..1}.tar"], "fields": {"x": "uint8[100000]"}, "names": {"x": "x.npy"}}
    stream = {"batch_size": 8, "shuffle": {"blocks": 2, "block_samples": 4}, "window": 2}
    return {
        name: {"source": {"type": "webdataset", "root": root, **fields}, **stream}
        for name, root in {"files": str(tmp_path), "http": web.url}.items()
    }


def test_each_block_of_neighbours_is_read_by_one_request(start_daemon, web, blocks):
    """One worker has all twelve blocks, and reads each of them once, although orders are short."""
    daemon = start_daemon(blocks, workers=1, chunk_rows=3)
    with batchd_client.connect(daemon.address) as connection:
        before = len(web.asked)
        found = see(connection.stream("http", epochs=1))
        assert len(web.asked) == before + 12
        assert found == see(connection.stream("files", epochs=1))
    assert samples(found) == list(range(48))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("workers", "faults"), [(2, {}), (5, {}), (2, {"worker.chunk.written": "kill@4"})], ids=["two", "five", "killed"]
)
def test_blocks_of_a_server_have_the_same_bytes_with_any_workers(start_daemon, blocks, workers, faults):
    """A worker that dies takes the blocks that it has read with it, and the next one reads them."""
    daemon = start_daemon(blocks, workers=workers, chunk_rows=2, lasting_faults=faults)
    with batchd_client.connect(daemon.address) as connection:
        found = see(connection.stream("http", epochs=1))
        assert found == see(connection.stream("files", epochs=1))
    assert samples(found) == list(range(48))


def npy(array) -> bytes:
    """Return an array as `numpy.save` writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
