"""The status of a daemon: from values to maps and back, and between versions."""

import json
from dataclasses import replace
from typing import get_args, get_origin, get_type_hints

import msgpack
import pytest

from batchd_wire.status import (
    STATUS_BYTES_MAX,
    CacheStatistics,
    DaemonFacts,
    DaemonStatus,
    PartStatistics,
    ReloadOutcome,
    SubscriptionStatistics,
    TcpCounts,
    WaitStatistics,
    difference,
    plain_status,
    read_status,
    shorten,
)
from support.statuses import link, status_classes, two_looks, with_pool


@pytest.fixture
def status():
    """The status of a daemon that has everything that a status can have."""
    looks = two_looks(slowest={"a.jpg": 0.5})
    with_pool(
        looks, link(refused=("masks: no index",)), interface="eth0", interface_bytes_per_s=1e9, sent_away=("a: b",)
    )
    found = looks[1]
    daemon = replace(found.daemon, tcp=TcpCounts(1, 2, 3, 4, 5), reload=ReloadOutcome(1.5, 2, "no"))
    stream = replace(found.streams[0], cache=CacheStatistics("encoded", 1, 2, 3, 4, "/cache", 5), bgr_fields=("image",))
    return replace(found, daemon=daemon, streams=(stream,))


@pytest.mark.parametrize(
    "travel", [lambda plain: msgpack.unpackb(msgpack.packb(plain)), lambda plain: json.loads(json.dumps(plain))]
)
def test_what_is_written_is_read_again(status, travel) -> None:
    """The map survives the wire, and the JSON that `batchd status --json` prints."""
    assert read_status(travel(plain_status(status))) == status


def test_a_daemon_without_tcp_has_no_counts_of_it(status) -> None:
    """The key is missing, so programs can test for it."""
    assert "tcp" in plain_status(status)["daemon"]
    assert "tcp" not in plain_status(replace(status, daemon=replace(status.daemon, tcp=None)))["daemon"]


def test_a_daemon_without_a_pool_has_no_key_for_it(status) -> None:
    """The key is missing, so programs can test for it."""
    assert "pool" in plain_status(status)
    assert "pool" not in plain_status(replace(status, pool=None))


def test_a_newer_daemon_is_understood(status) -> None:
    """Unknown keys of a newer daemon are ignored."""
    plain = plain_status(status)
    plain["news"] = plain["daemon"]["news"] = plain["streams"][0]["work"]["news"] = {"more": [1]}

    assert read_status(plain) == status


def test_an_older_daemon_is_understood() -> None:
    """A missing key gets its default, or the empty value of its type."""
    old = read_status(
        {"daemon": {"pid": 7}, "trainers": [{"name": "a"}], "streams": [{"subscriptions": [{"rank": 1}]}]}
    )

    assert old.daemon.pid == 7
    assert (old.daemon.version, old.daemon.uptime_s, old.daemon.draining, old.daemon.reload) == ("", 0.0, False, None)
    assert old.workers == ()
    assert (old.trainers[0].name, old.trainers[0].host, old.trainers[0].connections) == ("a", None, 1)
    (claim,) = old.streams[0].subscriptions
    assert (claim.rank, claim.epoch, claim.waits) == (1, None, WaitStatistics())


@pytest.mark.parametrize(
    "nonsense", [None, 3, "x", [], [None, 3], {"pid": "7"}, {"pid": True}, {"reload": 3, "tcp": []}]
)
def test_nonsense_reads_as_nothing(nonsense) -> None:
    """Values have their types, whatever the other process sends."""
    read = read_status({"daemon": nonsense, "workers": nonsense, "streams": nonsense})

    assert read.daemon == read_status({}).daemon
    assert isinstance(read.daemon, DaemonFacts)
    assert all(worker == read_status({"workers": [{}]}).workers[0] for worker in read.workers)
    assert not any(isinstance(one, SubscriptionStatistics) for one in read.streams)


def test_lists_end_where_a_status_would_be_longer_than_a_message(status) -> None:
    """Streams come before their trainers; each list says how much it lacks."""
    (stream,), (trainer,) = status.streams, status.trainers
    many = replace(stream, subscriptions=stream.subscriptions * 2_000, subscriptions_left_out=7)
    crowd = replace(status, streams=(many,) * 3, trainers=(trainer,) * 5_000, workers=status.workers * 5_000)
    plain = plain_status(replace(crowd, pool=replace(status.pool, links=status.pool.links * 3_000)))
    shorten(plain)

    assert STATUS_BYTES_MAX * 0.9 < len(msgpack.packb(plain)) <= STATUS_BYTES_MAX + 64
    short = read_status(plain)
    assert len(short.streams) == 3
    for one in short.streams:
        assert len(one.subscriptions) + one.subscriptions_left_out == len(many.subscriptions) + 7
    assert len(short.streams[0].subscriptions) > 0
    assert len(short.trainers) + short.left_out.trainers == 5_000
    assert len(short.workers) + short.left_out.workers == len(crowd.workers)
    assert len(short.pool.links) + short.left_out.links == 3_000 * len(status.pool.links)
    assert short.left_out.streams == 0


@pytest.mark.parametrize("kind", [*dict.fromkeys(status_classes(DaemonStatus))], ids=lambda kind: kind.__name__)
def test_every_number_says_what_it_is(kind) -> None:
    """A new field needs a decision: a counter, a gauge, or a fact without a value over time."""
    hints = get_type_hints(kind, include_extras=True)
    unmarked = {name: hint for name, hint in hints.items() if not hasattr(hint, "__metadata__")}

    numbers = {name for name, hint in unmarked.items() if {hint, *get_args(hint)} & {int, float, bool}}
    assert {name for name in numbers if get_origin(hints[name]) is not tuple} == set()


def test_a_difference_has_what_the_counters_have_grown_by(status) -> None:
    """All else is as it is now, and what was not there before keeps its counts."""
    (stream,), worker = status.streams, status.workers[0]
    claim = replace(stream.subscriptions[0], consumed_batches=stream.subscriptions[0].consumed_batches + 3, window=9)
    work = replace(stream.work, cpu_wait_s=None, parts=(*stream.work.parts, PartStatistics("flip", 2.0)) * 2)
    now = replace(stream, decoded_samples=stream.decoded_samples + 5, work=work, subscriptions=(claim,), slots=1)
    later = replace(status, streams=(now, replace(now, number=2)), workers=(replace(worker, number=8), worker))
    change = difference(status, later)
    one, new = change.streams

    assert (one.decoded_samples, one.slots, one.name) == (5, 1, stream.name)
    assert (one.subscriptions[0].consumed_batches, one.subscriptions[0].window) == (3, 9)
    assert (one.work.cpu_wait_s, one.work.read_bytes) == (None, 0)
    assert [part.busy_s for part in one.work.parts] == [0.0, 0.0, 2.0, *(part.busy_s for part in work.parts[3:])]
    assert new == replace(now, number=2)
    assert [one.busy_s for one in change.workers] == [worker.busy_s, 0.0]
    assert change.pool.links[0].samples == 0
    assert change.pool.links[0].name == status.pool.links[0].name


def test_status_that_fits_is_whole(status) -> None:
    """Nothing says that something is missing."""
    plain = plain_status(status)
    shorten(plain)
    assert read_status(plain) == status
    assert "left_out" not in plain
