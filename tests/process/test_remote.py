"""Trainers over TCP: the same bytes as locally, whatever happens to either side."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import batchd_client
from batchd_client.errors import DaemonNotFound, RingExhausted
from batchd_client.hints import log_once
from batchd_client.memory import BATCHES_HELD_MAX
from support.expected import Expected
from support.network import Proxy, free_port
from support.seen import look_at, samples, see
from support.settings import SLOT_BYTES, folder_stream
from support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def start_remote(start_daemon):
    """Start daemons that listen on a port of loopback."""

    def start(streams=None, **daemon):
        return start_daemon(streams, tcp=f"127.0.0.1:{free_port()}", **daemon)

    return start


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty samples, over TCP too; another stream has one sample per batch."""
    streams = {"photos": folder_stream(photos), "single": folder_stream(photos, batch_size=1)}
    return start_shared_daemon(streams, tcp=f"127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def expected(daemon):
    """Compute the content of each position of that daemon's stream."""
    expected = Expected(daemon.config)
    yield expected
    expected.close()


def port_of(daemon):
    """Return the daemon's TCP port."""
    return int(daemon.tcp_address.rpartition(":")[2])


def idle(daemon):
    """Tell whether no trainer has a claim, and no slot is held."""
    status = daemon.stream_status()
    return not status["subscriptions"] and status["leased_slots"] == 0


def test_a_remote_trainer_reads_what_a_local_one_reads(daemon, expected):
    """Epochs, bytes and state are equal."""
    with batchd_client.connect(daemon.tcp_address) as far, batchd_client.connect(daemon.address) as near:
        remote, local = far.stream("photos", epochs=3), near.stream("photos", epochs=3)
        for epoch in range(3):
            assert see(remote) == see(local) == expected.epoch(epoch)
        assert remote.state_dict() == local.state_dict()
        assert (len(remote), remote.classes, dict(remote.schema)) == (len(local), local.classes, dict(local.schema))


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_remote_ranks_read_their_shares(daemon, world_size):
    """Shares are whole batches, and parts of the batches that the last round splits."""
    with batchd_client.connect(daemon.tcp_address) as far:
        streams = [far.stream("photos", rank, world_size, epochs=1) for rank in range(2)]
        shares = [see(stream) for stream in streams]
        others = [far.stream("photos", rank, world_size, epochs=1) for rank in range(2, world_size)]
        for stream in streams:
            stream.close()
        shares += [see(stream) for stream in others[:2]]
    assert all(len(share) == len(shares[0]) for share in shares)


def test_a_state_goes_from_a_local_trainer_to_a_remote_one_and_back(daemon, expected):
    """The state moves three times, at any step."""
    state, seen = None, []
    for address in (daemon.address, daemon.tcp_address, daemon.address):
        with batchd_client.connect(address) as connection:
            stream = connection.stream("photos", epochs=1, state=state)
            seen += see(stream, 4)
            state = stream.state_dict()
    with batchd_client.connect(daemon.tcp_address) as connection:
        seen += see(connection.stream("photos", epochs=1, state=state))
    assert seen == expected.epoch(0)


def test_batches_are_read_only_and_buffers_are_used_again(daemon, expected):
    """A batch that a trainer keeps stays unchanged; a buffer that it releases is filled again."""
    with batchd_client.connect(daemon.tcp_address) as far:
        stream = far.stream("photos", epochs=2)
        kept = [batch for batch, _ in zip(stream, range(3), strict=False)]
        addresses = set()
        for batch in stream:
            with batch:
                addresses.add(batch["image"].__array_interface__["data"][0])
                assert not batch["image"].flags.writeable
        assert [look_at(batch) for batch in kept] == expected.epoch(0)[:3]
        assert len(addresses) <= 3
        assert all(address % 64 == 0 for address in addresses)
        with pytest.raises(ValueError, match="read-only"):
            kept[0]["image"][0] = 0
        array = kept[0]["image"]
        before = array.copy()
        kept.clear()
        see(stream)
        np.testing.assert_array_equal(array, before)
        del batch, array


def test_a_remote_hoarder_is_told(daemon):
    """No ring would stop it, so a limit does; after releasing, the loop continues."""
    with batchd_client.connect(daemon.tcp_address) as far:
        stream = far.stream("single", epochs=1)
        hoard = []
        with pytest.raises(RingExhausted, match=f"holds {BATCHES_HELD_MAX} batches of stream 'single'"):
            hoard.extend(stream)
        seen = [look_at(batch) for batch in hoard]
        for batch in hoard:
            batch.release()
        assert seen + see(stream) == Expected(daemon.config, "single").epoch(0)


def test_status_shows_how_each_trainer_connected(daemon):
    """The status has shared memory or TCP, the peer's host, and the key."""
    with batchd_client.connect(daemon.tcp_address) as far, batchd_client.connect(daemon.address) as near:
        see(far.stream("photos", epochs=1))
        trainers = {one["transport"]: one for one in near.status()["trainers"]}
    assert set(trainers) == {"tcp", "shared memory"}
    assert trainers["tcp"]["host"] == "127.0.0.1"
    assert trainers["tcp"]["sent_bytes_per_s"] > 0
    assert trainers["shared memory"]["pid"] == os.getpid()


def test_a_trainer_on_the_daemons_own_host_is_told_once_that_shared_memory_is_faster(daemon, caplog):
    """The message has level INFO and the address, and is not repeated at every connection."""
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "batchd_client"):
        for _ in range(2):
            batchd_client.connect(daemon.tcp_address).close()
    assert [record.message for record in caplog.records if daemon.address in record.message] == [
        f"the daemon at {daemon.tcp_address} runs on this host: {daemon.address} is faster, as it shares memory"
    ]


def test_a_killed_remote_trainer_leaves_nothing(daemon, start_trainer):
    """The end of its connection ends its claims; slots that were being sent are free again."""
    trainer = start_trainer(daemon.tcp_address)
    trainer.take(2)
    trainer.kill()
    wait_until(lambda: idle(daemon), "nothing is held for it")


def test_a_stopped_remote_trainer_costs_others_nothing_and_goes_on(start_remote, start_trainer, photos):
    """The trainer holds two slots at most, and finds its position again after SIGCONT."""
    daemon = start_remote({"photos": folder_stream(photos, memory=6 * SLOT_BYTES)})
    expected = Expected(daemon.config)
    everything = expected.epoch(0) + expected.epoch(1)
    stopped, other = (start_trainer(daemon.tcp_address, epochs=2) for _ in range(2))
    seen = stopped.take(2)
    stopped.stop()
    assert other.take() == everything
    stopped.go_on()
    assert seen + stopped.take() == everything


def test_remote_trainers_finish_exactly_across_a_restart(start_remote, start_trainer, photos):
    """The daemon is killed while they read; they continue with its successor at their positions."""
    daemon = start_remote({"photos": folder_stream(photos, batch_size=2)})
    expected = Expected(daemon.config)
    everything = expected.epoch(0) + expected.epoch(1)
    trainers = [start_trainer(daemon.tcp_address, epochs=2) for _ in range(2)]
    seen = [trainer.take(count) for trainer, count in zip(trainers, (3, 11), strict=True)]
    for trainer in trainers:
        trainer.begin(do="take")
    daemon.restart()
    assert [first + trainer.finish()[0] for first, trainer in zip(seen, trainers, strict=True)] == [everything] * 2


def test_a_worker_killed_for_a_remote_trainer_changes_nothing(start_remote, photos):
    """The same holds for local trainers."""
    daemon = start_remote({"photos": folder_stream(photos, batch_size=2)}, chunk_rows=1)
    with batchd_client.connect(daemon.tcp_address) as far:
        stream = far.stream("photos", epochs=1)
        seen = []
        for _ in range(5):
            seen += see(stream, 2)
            daemon.kill_a_worker()
        seen += see(stream)
    assert samples(seen) == list(range(40))
    assert seen == Expected(daemon.config).epoch(0)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("cut_after", [0, 1, 63, 64, 100, 300, 1000, 5_000, 20_000, 100_000])
def test_a_connection_cut_at_any_byte_repeats_and_loses_nothing(daemon, expected, cut_after):
    """The cut is in the greeting, in a header or amid pixels: the trainer reconnects."""
    with Proxy(port_of(daemon)) as proxy, batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}") as far:
        stream = far.stream("photos", epochs=2)
        seen = see(stream, 1)
        proxy.cut_after = cut_after
        proxy.drop()
        with ThreadPoolExecutor(1) as background:
            rest = background.submit(lambda: see(stream) + see(stream))
            before = proxy.connections
            wait_until(lambda: rest.done() or proxy.connections >= before + 3, "it was cut three times, or got through")
            proxy.cut_after = None
            seen += rest.result(PATIENCE_S)
    assert seen == expected.epoch(0) + expected.epoch(1)


def test_a_connection_cut_between_any_two_batches_repeats_and_loses_nothing(daemon, expected):
    """The cut follows each batch; the trainer does not request received batches again."""
    with Proxy(port_of(daemon)) as proxy, batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}") as far:
        stream = far.stream("photos", epochs=2)
        seen = []
        for _ in range(2 * len(stream)):
            seen += see(stream, 1)
            proxy.drop()
        connections = proxy.connections
    assert seen == expected.epoch(0) + expected.epoch(1)
    assert connections >= 2


def test_a_slow_network_only_takes_longer(daemon, expected):
    """Each part of the data arrives late."""
    with Proxy(port_of(daemon)) as proxy, batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}") as far:
        proxy.delay_s = 0.005
        assert see(far.stream("photos", epochs=1)) == expected.epoch(0)


def test_a_port_without_a_listener_is_an_error_with_a_remedy():
    """The error comes after ``connect_timeout_s``, during which a daemon may start."""
    with pytest.raises(DaemonNotFound, match=r"nothing listens on port \d+: is the daemon running, with tcp = set"):
        batchd_client.connect(f"tcp://127.0.0.1:{free_port()}", connect_timeout_s=0.3)


def test_a_host_that_does_not_exist_is_said():
    """The error blames the host's name."""
    with pytest.raises(DaemonNotFound, match=r"the host 'no-such-host\.invalid' is not known here"):
        batchd_client.connect("tcp://no-such-host.invalid:7070", connect_timeout_s=0.3)


def test_another_program_that_listens_is_not_taken_for_a_daemon():
    """A web server, for example, answers in another protocol."""
    with Proxy(free_port()) as proxy:
        proxy.is_open = False
        with pytest.raises(DaemonNotFound, match="no batchd daemon"):
            batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", connect_timeout_s=0.3)


def test_a_batch_is_looked_at_by_its_position_over_tcp(daemon, expected):
    """It is a copy, as on the daemon's host, and the trainer's next batch stays the same."""
    with batchd_client.connect(daemon.tcp_address) as connection, connection.stream("photos") as stream:
        first = see(stream, 1)
        assert look_at(stream.at(3, 2)) == expected.batch(3, 2)
        assert first + see(stream, 1) == expected.epoch(0)[:2]
