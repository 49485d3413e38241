"""A daemon, its gateway and worker hosts as real processes: the same positions, the same bytes."""

import json
import re
import shutil
import signal
import socket
from itertools import count

import numpy as np
import pytest

import batchd_client
from golden.data import write_data
from golden.digests import FILE, digests
from golden.streams import MEMORY, golden_streams
from support.commands import batchd
from support.expected import Expected
from support.gs_server import MODIFIED
from support.http_files import SECRET, FileServer, serving
from support.images import jpeg, photo
from support.kernel import is_alive
from support.network import Proxy, free_port
from support.pools import links, pool_keys, wait_gateways, wait_serving
from support.s3_server import CREDENTIALS
from support.seen import see
from support.settings import PIPELINE, SIDE_PIXELS, folder_stream
from support.shards import photo_shards
from support.waiting import wait_until

REPEATED = {"in-order", "evaluate"}
"""Streams whose epochs are equal: the ring has their batches before a worker host can help."""


@pytest.mark.thorough
def test_worker_hosts_fill_batches_with_the_same_bytes(start_daemon, start_host):
    daemon = start_daemon(**pool_keys(), chunk_rows=2)
    expected = Expected(daemon.config)
    for name in ("one", "two"):
        start_host(daemon, "--name", name)
    wait_serving(daemon, 2)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=6)
        for epoch in range(6):
            assert see(stream) == expected.epoch(epoch)

    found = {link["name"]: link for link in links(daemon)}
    assert found.keys() == {"one", "two"}
    assert sum(link["samples"] for link in found.values()) > 0
    assert {link["workers"] for link in found.values()} == {2}
    assert all(link["disagreements"] == link["late_rows"] == link["withdrawn"] == 0 for link in found.values())


@pytest.mark.thorough
def test_golden_streams_with_caches_give_their_bytes_where_worker_hosts_share_them(start_daemon, start_host, tmp_path):
    """Every kind of cache is covered, and two worker hosts fill rows of every batch."""
    data = tmp_path / "data"
    write_data(data)
    streams = {name: keys for name, keys in golden_streams(data).items() if "cache" in keys}
    daemon = start_daemon(streams, **pool_keys(), chunk_rows=1, pool_cache="shared")
    for name in ("one", "two"):
        start_host(daemon, "--name", name, "--cache-memory", "4MiB")
    wait_serving(daemon, 2, *streams)

    found = digests(daemon, list(streams))

    known = json.loads(FILE.read_text())
    assert len(found) > 2
    assert found == {name: known[name] for name in found}


def test_caches_that_worker_hosts_share_keep_each_sample_once(start_daemon, start_host, photos):
    """Each host reads its own share once, over any number of epochs, and serves it from its cache.

    No comparison is needed here, so both hosts serve before the first batch that they fill.
    """
    streams = {"photos": folder_stream(photos, cache="encoded", cache_memory="16MiB", window=1)}
    keys = pool_keys() | {"pool_accept": "any", "pool_cache": "shared", "pool_withdraw_after_s": 10}
    daemon = start_daemon(streams, **keys, chunk_rows=1)
    expected = Expected(daemon.config)

    def misses() -> int:
        return daemon.stream_status()["work"]["cache_misses"]

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=9)
        assert see(stream) == expected.epoch(0)
        samples = misses()  # the local worker, which has all of them now
        for name in ("one", "two"):
            start_host(daemon, "--name", name, "--cache-memory", "16MiB", workers=4)
        wait_until(lambda: [(link["state"], link["workers"]) for link in links(daemon)] == [("serving", 4)] * 2, "both")
        for epoch in range(1, 9):
            assert see(stream) == expected.epoch(epoch)

    assert all(link["samples"] > samples for link in links(daemon))
    assert misses() - samples <= 1.2 * samples


def test_a_worker_host_with_another_file_is_sent_away(start_daemon, start_host, tmp_path, photos):
    """Each third of its files differs. No batch has any of its pixels."""
    there = tmp_path / "there"
    shutil.copytree(photos, there)
    changed = sorted(there.rglob("*.jpg"))[::3]
    for path in changed:
        path.write_bytes(jpeg(photo(48, 64, seed=999)))
    daemon = start_daemon(**pool_keys())
    expected = Expected(daemon.config)
    host = start_host(daemon, "--map", f"{photos}={there}")
    wait_until(lambda: links(daemon), "the worker host is connected")

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        for epoch in count():
            assert see(stream) == expected.epoch(epoch)
            if not links(daemon):
                break

    assert host.wait() != 0
    assert "other pixels" in host.log
    wait_until(lambda: not links(daemon), "the link has ended")
    (reason,) = daemon.status()["pool"]["sent_away"]
    assert reason.endswith(f"; both hosts decode with {daemon.status()['daemon']['decoders']}")
    assert "other pixels" in daemon.status()["pool"]["last_end"]


def test_with_accept_any_hosts_with_other_files_fill_batches_and_positions_have_another_meaning(
    start_daemon, start_host, tmp_path, photos
):
    """The setting allows that; a position that was saved before it is rejected."""
    there = tmp_path / "there"
    shutil.copytree(photos, there)
    same = start_daemon(**pool_keys())
    other = start_daemon(**pool_keys(), pool_accept="any")
    start_host(other, "--map", f"{photos}={there}")
    wait_until(lambda: [link["state"] for link in links(other)] == ["serving"], "it serves without a proof")
    assert same.stream_status()["fingerprint"] != other.stream_status()["fingerprint"]


def test_a_stream_that_is_decoded_here_goes_to_no_worker_host(start_daemon, start_host, photos):
    streams = {"photos": folder_stream(photos), "here": folder_stream(photos, decode_at="here")}
    daemon = start_daemon(streams, **pool_keys())
    start_host(daemon)
    wait_serving(daemon, 1)
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("here", epochs=1))
    (link,) = links(daemon)
    assert link["streams"] == ["photos"]


def test_ctrl_c_lets_a_worker_host_finish_and_the_trainer_notices_nothing(start_daemon, start_host):
    daemon = start_daemon(**pool_keys())
    expected = Expected(daemon.config)
    host = start_host(daemon)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=8)
        for epoch in range(8):
            if epoch == 4:
                wait_serving(daemon, 1)
                host.send(signal.SIGINT)
            assert see(stream) == expected.epoch(epoch)
    assert host.wait() == 0
    wait_until(lambda: not links(daemon), "the link has ended")
    pool = daemon.status()["pool"]
    assert pool["last_left"]
    assert pool["last_end"].endswith(": it was told to end; its orders are done")


def test_a_worker_host_without_the_files_says_so_and_how_to_help(start_daemon, start_host, tmp_path, photos):
    daemon = start_daemon(**pool_keys())
    start_host(daemon, "--map", f"{photos}={tmp_path / 'nowhere'}")
    wait_until(lambda: links(daemon) and links(daemon)[0]["refused"], "the host refuses the stream")
    (reason,) = links(daemon)[0]["refused"]
    assert reason.startswith("photos: ")
    assert str(tmp_path / "nowhere") in reason
    assert "--map" in reason


@pytest.mark.thorough
def test_new_streams_of_a_reload_go_to_worker_hosts_that_are_there(start_daemon, start_host):
    daemon = start_daemon(**pool_keys())
    start_host(daemon)
    wait_serving(daemon, 1)
    more = daemon.config.read_text().replace("[streams.photos", "[streams.more")
    with daemon.config.open("a") as file:
        file.write("\n" + more[more.index("[streams.more") :])
    daemon.reload()
    wait_serving(daemon, 1, "more")


def test_derived_streams_go_to_worker_hosts_that_are_there(start_daemon, start_host):
    daemon = start_daemon(**pool_keys(), derive=True)
    start_host(daemon)
    wait_serving(daemon, 1)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", set={"seed": 5})
        wait_serving(daemon, 1, "photos+1")
        assert len(see(stream)) == len(stream)


def test_functions_that_have_changed_are_imported_again_at_worker_hosts(start_daemon, start_host, photos, tmp_path):
    """A reload notifies worker hosts of the change, and they replace their workers."""
    module = tmp_path / "mine.py"
    module.write_text("def darker(sample, rng):\n    sample['image'] = sample['image'] // 2\n    return sample\n")
    steps = [{"op": "decode"}, {"op": "resize", "size": [16, 16]}, {"op": "call", "function": "mine:darker"}]
    stream = folder_stream(photos, pipeline=steps)
    daemon = start_daemon({"photos": stream}, python_path=[str(tmp_path)], **pool_keys())
    start_host(daemon)
    wait_serving(daemon, 1)
    module.write_text("def darker(sample, rng):\n    sample['image'] = sample['image'] // 4\n    return sample\n")
    daemon.reload()
    wait_serving(daemon, 1)
    (link,) = links(daemon)
    assert link["refused"] == []


def test_beyond_loopback_worker_hosts_need_a_key(start_daemon, tmp_path):
    port = free_port()
    daemon = start_daemon(ready=False, worker_address=f"0.0.0.0:{port}", keys_dir=str(tmp_path / "keys"))
    assert daemon.wait() != 0
    assert "batchd keys new --role worker" in daemon.log


def test_with_keys_a_worker_host_needs_one_of_its_role(start_daemon, start_host, tmp_path):
    keys, pool, trainer = tmp_path / "keys", tmp_path / "pool.key", tmp_path / "trainer.key"
    batchd("keys", "new", "--role", "worker", "--name", "pool", "-o", str(pool), "--keys-dir", str(keys))
    batchd("keys", "new", "--name", "trainer", "-o", str(trainer), "--keys-dir", str(keys))
    daemon = start_daemon(**pool_keys(), keys_dir=str(keys))
    wrong = start_host(daemon, "--key", str(trainer), "--give-up", "5")
    assert wrong.wait() != 0
    start_host(daemon, "--key", str(pool))
    wait_serving(daemon, 1)
    assert [link["key"] for link in links(daemon)] == ["pool"]


# --- audits ---------------------------------------------------------------------------------------

ONE_OTHER_PIXEL = """
import os
def fn(sample, rng):
    image = sample["image"].copy()
    image[0, 0, 0] ^= os.path.exists(os.environ.get("SPOILT", ""))
    return {"image": image}
"""


def test_an_audit_finds_a_worker_host_that_makes_one_other_pixel_after_its_proof(
    start_daemon, start_host, photos, tmp_path
):
    """An audit compares rows that a local worker makes, so the host's own rows meanwhile count.

    Only these have the other pixel: all batches before the fault are right, and all that are made
    after the link has ended.
    """
    (tmp_path / "mine.py").write_text(ONE_OTHER_PIXEL)
    stream = folder_stream(photos, pipeline=[*PIPELINE, {"op": "call", "function": "mine:fn"}])
    streams = {"photos": stream, "here": {**stream, "decode_at": "here"}}
    daemon = start_daemon(streams, python_path=[str(tmp_path)], **pool_keys(), chunk_rows=2, pool_audit=1.0)
    host = start_host(daemon, workers=1, environment={"SPOILT": str(tmp_path / "spoilt")})
    wait_serving(daemon, 1)
    with batchd_client.connect(daemon.address) as connection:
        reads, right = (connection.stream(name) for name in streams)
        enough = links(daemon)[0]["samples"] + 40

        def has_filled_enough() -> bool:
            assert see(reads) == see(right)
            return links(daemon)[0]["samples"] > enough

        wait_until(has_filled_enough, "it fills rows, and audits find them right")

        (tmp_path / "spoilt").touch()

        def is_sent_away() -> bool:
            assert other_values(reads, right) <= {1}
            return not links(daemon)

        wait_until(is_sent_away, "the link has ended")
        assert other_values(reads, right) <= {1}  # it may have been ready before
        for _ in range(6):
            assert see(reads) == see(right)

    (reason,) = daemon.status()["pool"]["sent_away"]
    difference = re.compile(r"field 'image': (\d+) of ([\d,]+) values differ, by 1 at most, in row [0-7] first")
    other, values = (int(text.replace(",", "")) for text in difference.search(reason).groups())
    assert values == other * SIDE_PIXELS * SIDE_PIXELS * 3
    assert "it makes other pixels than the daemon's host" in reason
    assert host.wait() != 0
    assert difference.search(reason)[0] in host.log


def other_values(reads, right) -> set[int]:
    """Read an epoch of two streams; return how many values of a row differ, where any do."""
    found = set()
    for one, other in zip(reads, right, strict=True):
        with one, other:
            assert np.array_equal(one["index"], other["index"])
            found |= set(np.count_nonzero(one["image"] != other["image"], axis=(1, 2, 3)).tolist())
    return found - {0}


# --- object stores --------------------------------------------------------------------------------


def credentials(store: FileServer, owner: str) -> dict[str, str]:
    """Return the environment in which a program of ``owner`` reads s3:// from a server."""
    keys = {"AWS_ACCESS_KEY_ID": f"key-of-{owner}", "AWS_SECRET_ACCESS_KEY": f"secret-of-{owner}"}
    return {**CREDENTIALS, **keys, "AWS_ENDPOINT_URL": store.url}


@pytest.fixture
def store():
    """Start a server that speaks S3 as far as reading goes; it admits the keys of both sides."""
    with serving() as server:
        server.headers["Last-Modified"] = MODIFIED
        server.admitted = {"key-of-the-daemon", "key-of-the-host"}
        yield server


@pytest.fixture
def shards(start_daemon, photos, tmp_path, store, web):
    """Start a daemon with the same shards thrice: as files, read here only, over S3 and HTTP."""
    source = photo_shards(photos, tmp_path / "shards")
    for file in (tmp_path / "shards").iterdir():
        store.files[f"bucket/shards/{file.name}"] = web.files[f"shards/{file.name}"] = file.read_bytes()
    roots = {"s3": "s3://bucket/shards", "http": f"{web.url}/shards"}
    streams = {name: folder_stream(photos, source={**source, "root": root}) for name, root in roots.items()}
    streams["masked"] = {**streams["s3"], "on_error": "mask"}
    streams["files"] = folder_stream(photos, source=source, decode_at="here")
    return start_daemon(streams, environment=credentials(store, "the-daemon"), **pool_keys(), chunk_rows=2)


@pytest.mark.thorough
def test_worker_hosts_read_object_stores_with_credentials_of_their_own(shards, start_host, store):
    """The rows are those of the files, and nothing of the daemon's credentials is sent."""
    sent = bytearray()
    with Proxy(int(shards.status()["pool"]["address"].rpartition(":")[2])) as proxy:
        proxy.alter = lambda data: sent.extend(data) or data
        address, environment = f"tcp://127.0.0.1:{proxy.port}", credentials(store, "the-host")
        start_host(shards, address=address, environment=environment, workers=1)
        wait_serving(shards, 1, "s3", "http")
        with batchd_client.connect(shards.address) as connection:
            for name in ("s3", "http"):
                filled = links(shards)[0]["samples"]
                reads, expected = (connection.stream(one, epochs=6) for one in (name, "files"))
                for _ in range(6):
                    assert see(reads) == see(expected)
                assert links(shards)[0]["samples"] > filled
                assert connection.bad(name).total == 0

    assert store.signers == {"key-of-the-daemon", "key-of-the-host"}
    assert b"s3://bucket/shards" in sent
    assert b"-of-the-daemon" not in sent


@pytest.mark.thorough
def test_a_worker_host_that_an_object_store_rejects_refuses_that_stream_by_name(shards, start_host, store):
    """Local workers fill every batch of the stream; the worker host goes on with the others."""
    store.admitted = {"key-of-the-daemon"}
    host = start_host(shards, environment=credentials(store, "the-host"), workers=1)
    with batchd_client.connect(shards.address) as connection:
        reads, expected = (connection.stream(one) for one in ("s3", "files"))

        def is_refused() -> bool:
            assert see(reads) == see(expected)
            return any(link["refused"] for link in links(shards))

        wait_until(is_refused, "the host refuses the stream")
        wait_serving(shards, 1, "http")
        for _ in range(6):
            assert see(reads) == see(expected)
        assert connection.bad("s3").total == 0

    (link,) = links(shards)
    assert link["streams"] == ["http"]
    (reason,) = link["refused"]
    assert reason.startswith("s3: none of 32 samples could stand in for s3://bucket/shards/train-")
    assert reason.endswith("it may not be read (403)")
    assert reason.removeprefix("s3: ") in host.log
    assert SECRET not in shards.log + host.log


@pytest.mark.thorough
def test_a_worker_host_that_an_object_store_rejects_masks_no_sample(shards, start_host, store):
    """Without substitutes each of its samples is bad there, so it is sent away with the reason."""
    store.admitted = {"key-of-the-daemon"}
    host = start_host(shards, environment=credentials(store, "the-host"), workers=1)
    wait_until(lambda: links(shards), "the worker host is connected")
    with batchd_client.connect(shards.address) as connection:
        reads = connection.stream("masked")

        def is_sent_away() -> bool:
            for batch in reads:
                with batch:
                    assert batch["valid"].all()
            return not links(shards)

        wait_until(is_sent_away, "the link has ended")
    (reason,) = shards.status()["pool"]["sent_away"]
    assert "that are good on the daemon's host, the last as s3://bucket/shards/train-" in reason
    assert "it may not be read (403): are its files the same, and may it read them?" in reason
    assert host.wait() != 0


# --- several gateways -----------------------------------------------------------------------------


def test_worker_hosts_spread_over_the_gateways_and_fill_batches_with_the_same_bytes(start_daemon, start_host):
    """Each worker host moves to the gateway with the fewest, via the first one's address."""
    daemon = start_daemon(**pool_keys(3), chunk_rows=2)
    expected = Expected(daemon.config)
    wait_gateways(daemon, 3)
    for name in ("one", "two", "three"):
        start_host(daemon, "--name", name)
    wait_serving(daemon, 3)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=6)
        for epoch in range(6):
            assert see(stream) == expected.epoch(epoch)

    found = links(daemon)
    assert sorted(link["gateway"] for link in found) == [0, 1, 2]
    assert sum(link["samples"] for link in found) > 0
    assert all(link["disagreements"] == link["late_rows"] == link["withdrawn"] == 0 for link in found)
    assert daemon.status()["pool"]["gateways_down"] == []


@pytest.mark.thorough
def test_each_golden_stream_gives_its_bytes_through_several_gateways(start_daemon, start_host, tmp_path):
    """This covers every source and step that worker hosts may run; live streams stay local.

    Each stream has proved itself at one worker host at least, and rows come through both gateways.
    """
    data = tmp_path / "data"
    write_data(data)
    streams = golden_streams(data)
    daemon = start_daemon(streams, python_path=[str(data)], memory=MEMORY, **pool_keys(2), chunk_rows=1)
    for name in ("one", "two"):
        start_host(daemon, "--name", name, workers=1)
    wait_until(lambda: sum(link["workers"] for link in links(daemon)) == 2, "all workers are connected")
    assert sorted(link["gateway"] for link in links(daemon)) == [0, 1]
    wait_serving(daemon, 1, *(streams.keys() - REPEATED))

    found = digests(daemon, list(streams))

    known = json.loads(FILE.read_text())
    assert {name for name in found if found[name] != known.get(name)} == set()
    one, other = links(daemon)
    assert one["refused"] == other["refused"] == []
    assert {*one["streams"], *other["streams"]} >= streams.keys() - REPEATED
    assert min(one["samples"], other["samples"]) > 0


@pytest.mark.thorough
def test_with_keys_worker_hosts_come_to_every_gateway(start_daemon, start_host, tmp_path):
    """All gateways accept the same key, and its revocation holds at all of them."""
    keys, pool = tmp_path / "keys", tmp_path / "pool.key"
    batchd("keys", "new", "--role", "worker", "--name", "pool", "-o", str(pool), "--keys-dir", str(keys))
    daemon = start_daemon(**pool_keys(2), keys_dir=str(keys))
    hosts = [start_host(daemon, "--key", str(pool)) for _ in range(2)]
    wait_serving(daemon, 2)
    assert sorted((link["gateway"], link["key"]) for link in links(daemon)) == [(0, "pool"), (1, "pool")]

    batchd("keys", "revoke", "pool", "--keys-dir", str(keys))

    assert all(host.wait() != 0 for host in hosts)
    wait_until(lambda: not links(daemon), "both links have ended")


@pytest.mark.thorough
def test_a_gateway_whose_port_another_program_has_is_named_with_its_key(start_daemon):
    """The daemon and a check before its start both name it."""
    keys = pool_keys(2)
    port = int(keys["worker_address"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port + 1)):
        daemon = start_daemon(ready=False, **keys)
        assert daemon.wait() != 0
        said = batchd("check", str(daemon.config), status=2).stderr
    for text in (daemon.log, said):
        assert f"daemon.pool_gateways: tcp://127.0.0.1:{port + 1} cannot be listened on: Address already in use" in text


@pytest.mark.thorough
def test_all_gateways_end_with_the_daemon(start_daemon):
    daemon = start_daemon(**pool_keys(3))
    gateways = wait_gateways(daemon, 3)
    daemon.kill()
    wait_until(lambda: not any(map(is_alive, gateways)), "all gateways have ended")
