"""Live data: each pushed sample arrives once, whatever process dies on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing, contextmanager

import numpy as np
import pytest

import batchd as batchd_package
import batchd_client
from batchd.errors import ExitCode
from batchd_client import errors
from support.commands import batchd
from support.daemon_process import clean_environment
from support.images import jpeg
from support.network import free_port
from support.producers import ProducerProcess, frame, numbers_in, push_stream, read
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until

LIVE = {"live": push_stream()}
STREAMS = {
    **{name: push_stream() for name in ("order", "never", "stopped", "forked", "refused")},
    **{name: push_stream(capacity=64) for name in ("mirrored", "saved", "far")},
    "shared": push_stream(capacity=8),
    "interrupted": push_stream(batch_size=1, capacity=2),
    **{name: push_stream(when_full=name) for name in ("drop_oldest", "drop_newest")},
    "images": {
        **push_stream(2, fields={"image": "image", "label": "int32"}, sample_bytes_max="64KiB", capacity=16),
        "pipeline": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}],
        "max_bad_fraction": 1.0,
    },
    "peeked": push_stream(fields={"image": "uint8[6,8,3]", "label": "int64"}),
}
"""One stream for each test that leaves its daemon intact."""


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve all of these streams and one of files, over TCP too."""
    return start_shared_daemon({**STREAMS, "photos": folder_stream(photos)}, tcp=f"127.0.0.1:{free_port()}")


@contextmanager
def producing(address, stream, count, first=0):
    """Push frames in a thread; at the end of the context it has pushed all of them."""
    failures = []

    def run():
        try:
            with batchd_client.push(stream, address) as producer:
                for number in range(first, first + count):
                    assert producer.put(frame(number))
        except BaseException as error:  # noqa: BLE001  to be shown where the test fails
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures


def test_every_sample_arrives_once_and_in_order(daemon):
    """One producer and one trainer; far more samples than the mailbox holds."""
    with batchd_client.connect(daemon.address) as connection, producing(daemon.address, "order", 200):
        assert read(connection.stream("order"), 50) == list(range(200))
    live = wait_until(lambda: daemon.stream_status("order"), "there is a status")["live"]
    assert (live["pushed_samples"], live["queued_samples"], live["lost_batches"]) == (200, 0, 0)


@contextmanager
def peeking(address, stream, folder):
    """Run ``batchd peek`` on the live stream, waiting for samples, until the context ends."""
    command = [sys.executable, "-m", "batchd", "peek", stream, "--address", address, "-o", str(folder / "sheet.png")]
    peek = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    )
    try:
        said = f"stream '{stream}' has no producers yet, and its next batch has 0 of 4 samples"
        assert said in peek.stderr.readline().decode()
        yield peek
    finally:
        peek.kill()
        peek.communicate()


def test_peek_reports_that_there_is_no_sample_yet_and_draws_the_first_batch(daemon, tmp_path):
    """The command waits for the number of samples that its message names."""
    with peeking(daemon.address, "peeked", tmp_path) as peek:
        with batchd_client.push("peeked", daemon.address) as producer:
            for number in range(4):
                producer.put({"image": np.full((6, 8, 3), number, np.uint8), "label": number})
        out, err = peek.communicate(timeout=PATIENCE_S)
    assert (peek.returncode, err) == (0, b"")
    assert b"sheet.png: epoch 0, step 0, 4 samples" in out


def test_peek_that_waits_ends_with_ctrl_c(daemon, tmp_path):
    """The command ends at once, without a traceback."""
    with peeking(daemon.address, "never", tmp_path) as peek:
        peek.send_signal(signal.SIGINT)
        out, err = peek.communicate(timeout=PATIENCE_S)
    assert peek.returncode == ExitCode.INTERRUPTED
    assert (out, err.split()) == (b"", [])


def test_two_producers_and_two_mirrored_trainers(daemon):
    """Both trainers get the same batches, with every sample of both producers once."""
    with (
        batchd_client.connect(daemon.address) as one,
        batchd_client.connect(daemon.address) as other,
        producing(daemon.address, "mirrored", 120),
        producing(daemon.address, "mirrored", 120, first=1000),
    ):
        streams = one.stream("mirrored"), other.stream("mirrored")
        seen = [[], []]
        for _ in range(60):
            for stream, found in zip(streams, seen, strict=True):
                found.extend(read(stream, 1))
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == [*range(120), *range(1000, 1120)]


def test_two_ranks_share_what_is_pushed(daemon):
    """Each sample goes to one rank; no batch waits for the other rank."""
    with (
        batchd_client.connect(daemon.address) as one,
        batchd_client.connect(daemon.address) as other,
        producing(daemon.address, "shared", 160),
    ):
        streams = one.stream("shared", 0, 2), other.stream("shared", 1, 2)
        seen = [number for _ in range(20) for stream in streams for number in read(stream, 1)]
    assert sorted(seen) == list(range(160))


def test_killed_producers_killed_workers_and_a_killed_trainer_lose_no_sample(start_daemon, start_trainer):
    """Each sample that a producer reported as pushed arrives once, and no sample arrives twice."""
    daemon = start_daemon({"live": push_stream(capacity=48)})
    producers = [ProducerProcess(daemon.address, "live", 1000 * number, 900) for number in range(2)]
    mirror = start_trainer(daemon.address, "live")
    mirror.begin(do="take", batches=1000)
    got, said = [], []
    try:
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("live")
            for round_number in range(6):
                got += read(stream, 6)
                daemon.kill_a_worker()
                got += read(stream, 2)
                if round_number == 2:
                    mirror.kill()
                if round_number in (3, 5):
                    producers[0].kill()
                    said += list(producers[0].said())
                    producers[0].close()
                    producers[0] = ProducerProcess(daemon.address, "live", 10_000 * round_number, 900)
            for producer in producers:
                producer.kill()
                said += list(producer.said())
            wait_until(lambda: daemon.stream_status("live")["live"]["producers"] == 0, "the producers have ended")
            left = daemon.stream_status("live")["live"]
            assert left["lent_places"] == 0
            while len(got) + 3 < left["pushed_samples"]:
                got += read(stream, 1)
    finally:
        for producer in producers:
            producer.close()
    assert max(Counter(got).values()) == 1
    missing = set(said) - set(got)
    assert len(missing) <= 3, "the samples in no batch must be fewer than a batch"
    assert len(set(got) - set(said)) <= 4, "each killed producer may have pushed one sample without reporting it"
    assert daemon.stream_status("live")["live"]["lost_batches"] == 0


def test_a_stopped_trainer_makes_producers_wait_and_nothing_is_dropped(daemon):
    """A put waits for room until its timeout; its error has the remedy."""
    with batchd_client.push("stopped", daemon.address) as producer:
        assert all(producer.put(frame(number)) for number in range(producer.capacity))
        with pytest.raises(errors.PushTimeout, match="32 in the mailbox"):
            producer.put(frame(99), timeout_s=0.05)
        assert daemon.stream_status("stopped")["live"]["waiting_producers"] == 0
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("stopped")
            assert read(stream, 1) == [0, 1, 2, 3]
            assert producer.put(frame(100))
            assert producer.statistics().pushed == 33


@pytest.mark.parametrize(
    ("when_full", "counter", "kept"),
    [("drop_oldest", "dropped_oldest", range(8, 40)), ("drop_newest", "dropped_newest", range(32))],
)
def test_a_full_mailbox_drops_by_policy_and_counts(daemon, when_full, counter, kept):
    """No producer waits; a put whose own sample is dropped says so."""
    with batchd_client.push(when_full, daemon.address) as producer:
        pushed = [producer.put(frame(number)) for number in range(40)]
        assert pushed.count(False) == (8 if when_full == "drop_newest" else 0)
        assert producer.statistics().dropped == pushed.count(False)
    live = daemon.stream_status(when_full)["live"]
    assert live[counter] == 8
    with batchd_client.connect(daemon.address) as connection:
        assert read(connection.stream(when_full), 8) == list(kept)
    assert "8 dropped" in batchd("status", address=daemon.address).stdout


def test_a_daemon_restart_goes_on_with_what_is_pushed_from_then_on(start_daemon):
    """Trainer and producer reconnect; the trainer's position continues, the old queue is lost."""
    daemon = start_daemon(LIVE)
    with batchd_client.connect(daemon.address) as connection, batchd_client.push("live", daemon.address) as producer:
        stream = connection.stream("live")
        for number in range(11):
            producer.put(frame(number))
        assert read(stream, 2) == list(range(8))
        daemon.restart()
        for number in range(100, 112):
            producer.put(frame(number))
        assert read(stream, 2) == list(range(100, 108))
        assert (stream.epoch, stream.step) == (0, 4)


def test_a_saved_state_goes_on_at_its_position_or_behind_what_is_gone(daemon):
    """A live stream has no past: a position counts what was seen, not what is available."""
    with batchd_client.connect(daemon.address) as connection, producing(daemon.address, "saved", 200):
        with closing(connection.stream("saved")) as stream:
            state = stream.state_dict()
            seen = read(stream, 30)
            middle = stream.state_dict()
        with closing(connection.stream("saved", state=middle)) as stream:
            assert stream.step == 30
            seen += read(stream, 10)
        assert seen == list(range(160))
        with closing(connection.stream("saved", state=state)) as stream:
            assert 0 < stream.step <= 40
            with pytest.raises(errors.PositionInvalid):
                stream.seek(0, stream.steps + 1)
            assert read(stream, 50 - stream.step)[-1] == 199


def test_pushed_images_are_decoded_and_bad_ones_masked(daemon):
    """An image is decoded like one from a file; broken ones are masked and named."""
    picture = jpeg(np.full((16, 16, 3), 200, np.uint8))
    with batchd_client.push("images", daemon.address) as producer, batchd_client.connect(daemon.address) as connection:
        assert producer.fields == {"image": "image", "label": "int32"}
        producer.put({"image": picture, "label": 1})
        producer.put({"image": b"no image at all", "label": np.int32(2)})
        with pytest.raises(errors.SampleInvalid, match="sample_bytes_max"):
            producer.put({"image": bytes(65 * 1024), "label": 1})
        batch = next(iter(connection.stream("images")))
        assert batch["valid"].tolist() == [True, False]
        assert abs(batch["image"][0].astype(int) - 200).max() < 3
        assert batch["image"][1].max() == 0
        assert batch["index"].tolist() == [0, 1]
        batch.release()
        (bad,) = connection.bad("images").samples
        assert bad.path == "pushed sample 1"


def test_a_push_into_a_stream_that_is_not_live_is_an_error(daemon):
    """The stream does not exist, reads files, or belongs to a daemon in the network."""
    with pytest.raises(errors.StreamUnknown, match=r"forked, .*photos"):
        batchd_client.push("life", daemon.address)
    with pytest.raises(errors.StreamNotLive, match="photos"):
        batchd_client.push("photos", daemon.address)
    with pytest.raises(errors.PushNotLocal, match="tcp://"):
        batchd_client.push("refused", "tcp://127.0.0.1:7070")
    producer = batchd_client.push("refused", daemon.address)
    producer.close()
    producer.close()
    with pytest.raises(errors.ProducerClosed):
        producer.put(frame(1))


def test_a_trainer_in_the_network_reads_what_is_pushed(daemon):
    """TCP carries its batches, as those of any stream; a mirror on the host gets the same."""
    with (
        batchd_client.connect(daemon.tcp_address) as remote,
        batchd_client.connect(daemon.address) as local,
        producing(daemon.address, "far", 80),
    ):
        streams = remote.stream("far"), local.stream("far")
        seen = [[], []]
        for _ in range(20):
            for stream, found in zip(streams, seen, strict=True):
                found.extend(read(stream, 1))
    assert seen == [list(range(80))] * 2


def test_a_put_that_is_interrupted_leaves_the_producer_as_it_was(daemon):
    """A signal ends the wait; the next put pushes its own sample, once."""
    with (
        batchd_client.push("interrupted", daemon.address) as producer,
        batchd_client.connect(daemon.address) as connection,
    ):
        assert producer.put(frame(0))
        assert producer.put(frame(1))
        with interrupted_soon(daemon, "interrupted"), pytest.raises(KeyboardInterrupt):
            producer.put(frame(2))
        stream = connection.stream("interrupted")
        assert read(stream, 1) == [0]
        assert producer.put(frame(3))
        assert read(stream, 2) == [1, 3]


@contextmanager
def interrupted_soon(daemon, stream):
    """Interrupt the main thread, as Ctrl-C does, once a producer waits."""

    def interrupt():
        wait_until(lambda: daemon.stream_status(stream)["live"]["waiting_producers"], "a producer waits")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_forked_child_makes_a_producer_of_its_own(daemon):
    """The child cannot use its parent's producer, which continues undisturbed."""
    with batchd_client.push("forked", daemon.address) as producer:
        producer.put(frame(0))
        child = os.fork()
        if not child:
            status = 1
            try:
                producer.put(frame(1))
            except errors.ForkedConnection:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert producer.put(frame(2))
    assert daemon.stream_status("forked")["live"]["pushed_samples"] == 2


@pytest.mark.parametrize(
    "when_full", ["block", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("drop_oldest", "drop_newest"))]
)
def test_a_killed_daemon_in_the_middle_of_pushes(start_daemon, when_full, tmp_path):
    """Producer and trainer continue with the next daemon, and no sample arrives twice.

    The journal has each batch that the trainer got, of both daemons.
    """
    daemon = start_daemon(
        {"live": {**push_stream(when_full=when_full), "journal": "64KiB"}},
        faults={"daemon.push.received": "kill@50"},
        cache_dir=str(tmp_path),
    )
    with batchd_client.push("live", daemon.address) as producer, batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("live")
        seen, crc32 = [], 0
        for number in range(48):
            producer.put(frame(number))
            if number % 4 == 3:
                with next(iter(stream)) as batch:
                    seen, crc32 = [*seen, *numbers_in(batch)], batch.crc32()
        assert producer.put(frame(48))
        assert producer.put(frame(49))
        daemon.wait()
        daemon.start()
        for number in range(100, 108):
            assert producer.put(frame(number))
        seen += read(stream, 2)
        assert producer.statistics().unconfirmed == 1
    assert seen == [*range(48), *range(100, 108)]
    journal = batchd_package.journal(daemon.config, "live")
    assert [number for batch in journal for number in batch.fields["label"].tolist()] == seen
    assert [batch.position for batch in journal] == [(0, step) for step in range(14)]
    assert [batch.pushed.tolist() for batch in list(journal)[10:13]] == [
        [40, 41, 42, 43],
        [44, 45, 46, 47],
        [0, 1, 2, 3],
    ]
    verified = batchd("replay", "live", "0:11", "--config", daemon.config, "--verify", f"{crc32:08x}")
    assert "row 2: push 46, label 46, CRC " in verified.stdout
    assert "the CRC matches" in verified.stderr
    of_rank = ["0:12", "--rank", "1", "--world-size", "2", "--back", "1"]
    assert batchd("replay", "live", *of_rank, "--config", daemon.config).stdout == verified.stdout
    others, unlike = tmp_path / "others.json", tmp_path / "unlike.json"
    state = {"stream": "live", "fingerprint": "5" * 32, "epoch": 0, "step": 11}
    unlike.write_text(json.dumps(state))
    others.write_text(json.dumps({**state, "stream": "others"}))
    batchd("replay", "live", "0:11", "--running", "--verify", f"{crc32 ^ 1:08x}", address=daemon.address, status=1)
    found = batchd("seen", "live", "label=101", "--config", daemon.config).stdout
    assert "label = 101: 1 row of the journal, which has 14 batches, 0:0 (" in found
    assert "epoch 0, step 12, row 1, " in found
    for words, said in (
        (["replay", "live", "0:99"], "of stream 'live' has no batch 0:99; it has 14 batches, 0:0 ("),
        (["seen", "live", "colour=3"], "has no number 'colour'"),
        (["seen", "live", "cat.jpg"], "'cat.jpg' is no FIELD=NUMBER, such as label=3"),
        (["replay", "live", "0:2", "--back", "3"], "no batch before 0:0"),
        (["replay", "live", "0:2", "--rank", "1"], "there is no rank 1 of 1 rank"),
        (["replay", "live", "--state", others], "the state is of stream 'others', not 'live'"),
        (["seen", "live", "label=3", "--state", others], "the state is of stream 'others', not 'live'"),
        (["replay", "live", "--state", unlike], "of stream 'live' has no batch 0:11; it has no batch"),
    ):
        assert said in batchd(*words, "--config", daemon.config, status=1).stderr
    batchd("seen", "live", "label=3", "--rows", "--config", daemon.config, status=2)
    places = json.loads(batchd("seen", "live", "--index", "1", "--config", daemon.config, "--json").stdout)["places"]
    assert [(one["step"], one["row"]) for one in places] == [(0, 1), (12, 1)], "each daemon counts from 0"


@pytest.mark.parametrize(
    "changes",
    [
        {"image": np.zeros((6, 8), np.uint8)},
        {"image": np.zeros((8, 6), np.uint16)},
        {"label": 3.5},
        {"label": "three"},
        {"label": 1 << 70},
        {"more": 1},
    ],
)
def test_a_sample_of_other_fields_is_refused_before_it_is_written(refused, changes):
    """The error names the field, its value and the required one."""
    with pytest.raises(errors.SampleInvalid, match=r"has to|cannot be"):
        refused.put(frame(1) | changes)
    assert refused.statistics().pushed == 0


@pytest.fixture(scope="module")
def refused(daemon):
    """Return a producer for tests that push nothing."""
    with batchd_client.push("refused", daemon.address) as producer:
        yield producer
