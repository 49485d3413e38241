"""The daemon disappears and returns: the loop only waits longer and gets each position once."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from batchd_client import connection, errors, hints, lifeline
from batchd_wire.channel import send_message
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import AskStatus, Hello, Open, Pull, Refused, Subscribe
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream
from support.waiting import PATIENCE_S, wait_until

ENDED = "there is a socket, but no process listens on it any more: the daemon has ended"


def restart(fake: FakeDaemon) -> None:
    fake.kill()
    fake.grants_at_most = 1 << 60
    fake.start()


@pytest.mark.parametrize("deaths", [{0}, {1}, {4}, {2, 3, 9}, set(range(15))], ids=str)
def test_restarted_daemon_is_asked_for_the_next_position(fake, daemon, deaths) -> None:
    """This holds across the ends of epochs, and for repeated restarts."""
    stream = daemon.stream("photos")
    found = []
    for _ in range(3):
        for batch in stream:
            np.testing.assert_array_equal(batch["label"], fake.stream.label(batch.epoch, batch.step))
            if len(found) in deaths:
                restart(fake)
            found.append((batch.epoch, batch.step))

    assert found == [(epoch, step) for epoch in range(3) for step in range(5)]


def test_daemon_that_dies_while_the_trainer_waits_is_asked_again(fake, daemon) -> None:
    """End of file on the lifeline ends the wait, not a timeout."""
    fake.grants_at_most = 0
    stream = daemon.stream("photos")

    def restart_when_asked() -> None:
        fake.wait_until(lambda: any(pull.waiting for pull in fake.heard_of(Pull)))
        fake.kill()
        fake.grants_at_most = 1 << 60
        fake.start()

    thread = threading.Thread(target=restart_when_asked)
    thread.start()
    batch = next(iter(stream))
    thread.join()

    assert (batch.epoch, batch.step) == (0, 0)


def test_stream_waits_for_a_daemon_that_returns_late(fake, daemon) -> None:
    """Meanwhile there is no socket at all."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    next(batches)
    fake.kill()
    for path in (fake.runtime.lifeline_path, fake.runtime.zmq_path):
        path.unlink()
    fake.runtime.path.rmdir()
    timer = threading.Timer(0.3, fake.start)
    timer.start()

    steps = [batch.step for batch in batches]
    timer.join()

    assert steps == [1, 2, 3, 4]


def absences(caplog) -> list[str]:
    """The log lines about an absent daemon, without times."""
    lines = [record for record in caplog.records if "daemon at" in record.getMessage()]
    assert {record.levelname for record in lines} <= {"WARNING"}
    return [re.sub(r"[0-9.]+ s|[0-9]+:[0-9:]+", "N", record.getMessage()) for record in lines]


@pytest.mark.parametrize("mentioned", [True, False])
def test_an_absence_logs_one_line_and_the_return_another(tmp_path, caplog, monkeypatch, mentioned) -> None:
    """The line covers all streams and connections of the program; a short absence logs nothing."""
    with (
        FakeDaemon(tmp_path / "run", FakeStream(slots=32)) as fake,  # enough for three loops
        batchd_client.connect(fake.address, reconnect_timeout_s=20, batch_timeout_s=20) as daemon,
        batchd_client.connect(fake.address, reconnect_timeout_s=20, batch_timeout_s=20) as other,
    ):
        loops = [iter(one.stream("photos")) for one in (daemon, daemon, other)]
        for batches in loops:
            next(batches)
        monkeypatch.setattr(hints, "ABSENCE_S", 0.05 if mentioned else 3600.0)
        fake.kill()
        timer = threading.Timer(0.3, fake.start)
        timer.start()
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(steps_of, loops)) == [[1, 2, 3, 4]] * 3
        timer.join()

    lines = [f"no daemon at {fake.address} for N: {ENDED}; waiting for it until N (reconnect_timeout_s=20)"]
    lines += [f"the daemon at {fake.address} is back after N"]
    assert absences(caplog) == (lines if mentioned else [])


def test_an_absence_ends_with_a_new_connection_too(fake, caplog, monkeypatch) -> None:
    """A program may abandon the old connection; its repeated attempts log no further line."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=0.1) as daemon:
        monkeypatch.setattr(hints, "ABSENCE_S", 0.0)
        fake.kill()
        for _attempt in range(2):
            with pytest.raises(errors.ReconnectTimeout):
                daemon.status()
    fake.start()
    batchd_client.connect(fake.address).close()

    assert absences(caplog) == [
        f"no daemon at {fake.address} for N: {ENDED}; waiting for it until N (reconnect_timeout_s=0.1)",
        f"the daemon at {fake.address} is back after N",
    ]


def test_a_long_absence_is_logged_again_with_the_result_of_the_last_try(fake, caplog, monkeypatch) -> None:
    """Not at each try: a trainer may wait for hours."""
    monkeypatch.setattr(hints, "ABSENCE_S", 0.0)
    monkeypatch.setattr(hints, "ABSENCE_AGAIN_S", 0.3)
    with batchd_client.connect(fake.address, reconnect_timeout_s=1.0) as daemon:
        caplog.clear()
        fake.kill()
        fake.runtime.lifeline_path.unlink()
        with pytest.raises(errors.ReconnectTimeout, match=r"has no lifeline\.sock: no daemon runs there"):
            daemon.status()

    assert 3 <= len(absences(caplog)) <= 4
    assert all("has no lifeline.sock" in line for line in absences(caplog)[1:])


def test_a_daemon_that_does_not_answer_is_logged_during_the_try(fake, caplog, monkeypatch) -> None:
    """It took the connection and is stopped; a try lasts as long as the whole wait."""
    monkeypatch.setattr(hints, "ABSENCE_S", 0.1)
    monkeypatch.setattr(lifeline, "LOOK_S", 0.05)
    fake.answer = lambda _session, message: isinstance(message, Hello)

    with pytest.raises(errors.ConnectTimeout):
        batchd_client.connect(fake.address, connect_timeout_s=0.5)

    waiting = f"no daemon at {fake.address} for N: no answer yet; waiting for it until N (connect_timeout_s=0.5)"
    assert absences(caplog) == [waiting]


def test_the_wait_for_a_daemon_is_of_the_caller_the_environment_or_the_kind_of_daemon(fake, monkeypatch) -> None:
    """Hours by default; a daemon of one script does not come back."""

    def limit_s(given=None) -> float:
        with batchd_client.connect(fake.address, reconnect_timeout_s=given) as daemon:
            return daemon._connection.deadlines.reconnect_timeout_s

    assert limit_s() == 4 * 3600
    fake.runtime.one_script_path.touch()
    assert limit_s() == 10
    monkeypatch.setenv("BATCHD_RECONNECT_TIMEOUT", "90.5")
    assert limit_s() == 90.5
    assert limit_s(7) == 7
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("BATCHD_RECONNECT_TIMEOUT", wrong)
        with pytest.raises(
            errors.TimeoutInvalid, match=rf"\$BATCHD_RECONNECT_TIMEOUT is '{wrong}', and has to be a number"
        ):
            limit_s()
    with pytest.raises(errors.TimeoutInvalid, match=r"connect\(reconnect_timeout_s=\) is '-2'"):
        limit_s(-2)


def test_held_batches_stay_readable_and_are_not_returned_to_the_new_daemon(fake, daemon) -> None:
    """A lease belongs to the session that granted it."""
    fake.grants_at_most = 2
    batches = iter(daemon.stream("photos"))
    kept = [next(batches), next(batches)]
    restart(fake)
    fake.heard.clear()
    for batch in batches:
        assert batch.step >= 2
    for step, batch in enumerate(kept):
        np.testing.assert_array_equal(batch["label"], fake.stream.label(0, step))
    kept.clear()
    daemon.status()

    released = [sequence for pull in fake.heard_of(Pull) for sequence, _ in pull.released]
    assert released == sorted(set(released))
    assert all(sequence < 5 for sequence in released)
    assert [asked.step for asked in fake.heard_of(Subscribe)] == [2]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:batchd-fake")


def test_old_memory_is_kept_only_while_it_is_read(fake, daemon) -> None:
    """The memory of many restarts does not add up."""
    stream = daemon.stream("photos")
    kept = [batch["label"] for batch in stream if batch.step == 3]
    for _ in range(3):
        restart(fake)
        list(stream)
    daemon.status()

    assert mappings() <= len(fake.slots) + len(kept)
    kept.clear()
    assert mappings() <= len(fake.slots)


def steps_of(stream: Iterable[batchd_client.Batch]) -> list[int]:
    """Read an epoch and keep no batch."""
    steps = []
    for batch in stream:
        steps.append(batch.step)
        batch.release()
    return steps


def test_a_trainer_that_waits_keeps_only_living_batches(fake, daemon) -> None:
    """The next daemon needs the memory, including that of idle connections."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=20) as idle:
        with idle.stream("photos") as other:
            list(other)
        stream = daemon.stream("photos")
        kept = [batch["label"] for batch in stream if batch.step == 3]
        assert mappings() > len(kept)
        fake.kill()
        with ThreadPoolExecutor(1) as background:
            waiting = background.submit(steps_of, stream)
            wait_until(lambda: mappings() == len(kept), "all other slots are unmapped")
            np.testing.assert_array_equal(kept[0], fake.stream.label(0, 3))
            fake.start()
            assert waiting.result() == [0, 1, 2, 3, 4]


def test_a_program_that_connects_releases_the_memory_of_a_dead_daemon(fake, daemon) -> None:
    """The next daemon may wait for the memory and admit no trainer meanwhile."""
    list(daemon.stream("photos"))
    assert mappings()
    released = threading.Event()

    def drain(session, message) -> bool:
        if isinstance(message, Hello) and not released.is_set():
            send_message(session.lifeline, Refused(0, 0, ErrorCode.DRAINING, "draining"))
            return True
        return False

    fake.kill()
    fake.answer = drain
    fake.start()
    with ThreadPoolExecutor(1) as background:
        connecting = background.submit(batchd_client.connect, fake.address)
        wait_until(lambda: not mappings(), "all slots are unmapped")
        released.set()
        connecting.result().close()


def restart_draining(fake, times) -> list[Hello]:
    """Restart the daemon; it drains and refuses this many sessions. Return the refusals so far."""
    refused: list[Hello] = []

    def drain(session, message) -> bool:
        if isinstance(message, Hello) and len(refused) < times:
            refused.append(message)
            send_message(session.lifeline, Refused(0, 0, ErrorCode.DRAINING, "draining"))
            return True
        return False

    fake.kill()
    fake.answer = drain
    fake.start()
    return refused


@pytest.mark.parametrize("error", [OSError("no descriptor"), MemoryError(), RuntimeError("CUDA")], ids=repr)
@pytest.mark.parametrize("fails", ["check_link", "let_go"])
def test_an_error_of_one_connection_does_not_reach_the_connect_of_another(fake, daemon, error, fails) -> None:
    """The next use of the failed connection opens a new session."""

    def fail() -> None:
        if not connected:
            raise error

    stream, connected = daemon.stream("photos"), []
    next(iter(stream))
    keeper = Keeper(fail if fails == "let_go" else list)
    stream.when_lost(keeper.let_go)
    if fails == "check_link":
        daemon._connection.session.check_link = fail

    refused = restart_draining(fake, times=1)
    batchd_client.connect(fake.address).close()
    connected.append(True)

    assert refused
    assert [batch.step for batch in stream] == [1, 2, 3, 4]


def test_connections_without_references_are_not_kept_for_the_report_of_a_loss(daemon) -> None:
    """A connection may live for months, with one loader for each epoch."""
    stream = daemon.stream("photos")
    for _ in range(100):
        stream.when_lost(Keeper(list).let_go)

    assert len(daemon._connection._callbacks) == 1


class Keeper:
    """An object that releases memory, like a feed."""

    def __init__(self, let_go) -> None:
        self._let_go = let_go

    def let_go(self) -> None:
        self._let_go()


def test_several_streams_continue_each_at_its_position(fake, daemon) -> None:
    """Each stream subscribes again at its next use."""
    fake.grants_at_most = 1
    train, validation = daemon.stream("photos"), daemon.stream("photos", rank=1, world_size=2)
    first, second = iter(train), iter(validation)
    found = [next(first).step, next(second).step]
    restart(fake)

    found += [next(second).step, next(first).step]

    assert found == [0, 1, 3, 1]
    assert train.statistics().resubscribed == validation.statistics().resubscribed == 1


def test_other_fingerprint_after_a_restart_is_an_error(fake, daemon) -> None:
    """The same position would be another batch; the stream keeps its position."""
    fake.grants_at_most = 1
    stream = daemon.stream("photos")
    next(iter(stream))
    fake.kill()
    original, fake.stream = fake.stream, replace(fake.stream, fingerprint="00" * 32)
    fake.start()

    with pytest.raises(errors.StreamChanged, match=r"now 0000[\s\S]*daemon\.stream"):
        list(stream)
    assert (stream.epoch, stream.step) == (0, 1)

    fake.stream = original
    restart(fake)
    assert [batch.step for batch in stream] == [1, 2, 3, 4]


@pytest.mark.parametrize("changes", [{"rows": 8}, {"steps": 9}], ids=str)
def test_other_layout_under_the_same_fingerprint_is_an_error(fake, daemon, changes) -> None:
    """Old code never gets arrays of another shape."""
    stream = daemon.stream("photos")
    next(iter(stream))
    fake.kill()
    fake.stream = replace(fake.stream, **changes)
    fake.start()

    with pytest.raises(errors.StreamChanged):
        list(stream)


def test_daemon_that_stays_away_is_an_error_that_the_stream_survives(fake, pausing) -> None:
    """The error comes after ``reconnect_timeout_s``; the same loop continues with a new daemon."""
    fake.grants_at_most = 1
    with batchd_client.connect(fake.address, reconnect_timeout_s=PATIENCE_S) as daemon:
        stream = daemon.stream("photos")
        next(iter(stream))
        fake.kill()

        with (
            pausing(connection, PATIENCE_S),
            pytest.raises(errors.ReconnectTimeout, match=rf"within {PATIENCE_S:g} s[\s\S]*reconnect_timeout_s"),
        ):
            list(stream)
        with pausing(connection, PATIENCE_S), pytest.raises(errors.ReconnectTimeout):
            daemon.status()
        fake.grants_at_most = 1 << 60
        fake.start()

        assert [batch.step for batch in stream] == [1, 2, 3, 4]


def test_daemon_that_dies_again_and_again_does_not_block_the_trainer_for_ever(fake) -> None:
    """The deadlines also limit sessions that begin and end at once."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=0.3, batch_timeout_s=0.3) as daemon:
        stream = daemon.stream("photos")

        def hang_up(session, message) -> bool:
            if isinstance(message, Subscribe):
                session.lifeline.shutdown(2)
            return isinstance(message, Subscribe)

        fake.answer = hang_up
        fake.do(lambda: fake.sessions[0].lifeline.shutdown(2))

        with pytest.raises((errors.ReconnectTimeout, errors.BatchTimeout)):
            list(stream)


@pytest.mark.parametrize("error", [ErrorCode.DRAINING, ErrorCode.UNKNOWN_SESSION])
def test_daemon_that_no_longer_wants_the_session_is_asked_for_another(fake, daemon, error) -> None:
    """The daemon may refuse a pull or a subscription."""
    stream = daemon.stream("photos")
    next(iter(stream))
    fake.do(lambda: fake.send(fake.sessions[0], Refused(0, 0, error, "going down")))
    assert [batch.step for batch in stream] == [1, 2, 3, 4]
    refused = []

    def refuse_once(session, message) -> bool:
        if isinstance(message, Subscribe) and not refused:
            refused.append(message)
            fake.send(session, Refused(message.request, 0, error, "going down"))
            return True
        return False

    fake.answer = refuse_once
    assert len(list(daemon.stream("photos"))) == 5
    assert len(refused) == 1


def test_connect_retries_a_draining_daemon_until_another_serves(fake, daemon) -> None:
    """The daemon refuses on the lifeline while it finishes; the next one admits the client."""
    stream = daemon.stream("photos")
    refused = restart_draining(fake, times=3)

    assert len(list(stream)) == 5
    assert len(refused) == 3


def test_daemon_that_forgot_the_subscription_gets_it_again(fake, daemon) -> None:
    """The daemon reports this at the next pull."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    next(batches)
    number = max(fake.sessions[0].subscriptions)
    fake.do(lambda: fake.send(fake.sessions[0], Refused(0, number, ErrorCode.UNKNOWN_SUBSCRIPTION, "who?")))

    assert [batch.step for batch in batches] == [1, 2, 3, 4]


def test_late_messages_about_an_ended_subscription_are_no_error(fake, daemon) -> None:
    """A reload replaces the stream during a seek: the old refusal is still in transit."""
    stream = daemon.stream("photos")
    next(iter(stream)).release()
    former = max(fake.sessions[0].subscriptions)

    def replace(session, message) -> bool:
        if isinstance(message, Subscribe):
            fake.send(session, Refused(0, former, ErrorCode.STREAM_REPLACED, "replaced"))
        return False

    fake.answer = replace
    stream.seek(0, 3)

    assert [batch.step for batch in stream] == [3, 4]


def test_newer_daemon_after_a_restart_is_an_error_at_once(fake, daemon) -> None:
    """A wait would not help."""
    stream = daemon.stream("photos")
    fake.kill()

    def refuse(session, message) -> bool:
        if isinstance(message, Hello):
            text = "this daemon speaks version 2 of the protocol, and the trainer version 1"
            send_message(session.lifeline, Refused(0, 0, ErrorCode.UNSUPPORTED_VERSION, text))
        return isinstance(message, Hello)

    fake.answer = refuse
    fake.start()

    with pytest.raises(errors.VersionMismatch, match="version 2"):
        list(stream)


def test_new_session_opens_with_a_new_secret(fake, daemon) -> None:
    """No secret of the old session is valid in the new one."""
    stream = daemon.stream("photos")
    next(iter(stream))
    restart(fake)
    next(iter(stream))

    secrets = [message.secret for message in fake.heard_of(Open)]
    assert all(one != other for one, other in pairwise(secrets))


def test_closing_while_the_daemon_is_away_does_not_wait_for_it(fake) -> None:
    """Streams and connection close at once, also if only ZeroMQ has noticed the loss."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=3600) as daemon, daemon.stream("photos") as stream:
        batch = next(iter(stream))
        fake.kill()
        wait_until(lambda: not daemon._connection.session.send(AskStatus(9)), "ZeroMQ notices the disconnect")
    assert batch.step == 0
    with pytest.raises(errors.DaemonNotFound):
        batchd_client.connect(fake.address, connect_timeout_s=0)


READ_IN_TWO = """
import time
import zmq
from batchd_client.lifeline import remote_socket
from batchd_client.sockets import Sockets

router = zmq.Context().socket(zmq.ROUTER)
port = router.bind_to_random_port("tcp://127.0.0.1")
sockets = Sockets(1)
dealer = remote_socket(sockets, None)
monitor = sockets.monitor(dealer, zmq.EVENT_DISCONNECTED)
dealer.connect(f"tcp://127.0.0.1:{port}")
dealer.send(b"hello")
trainer, _hello = router.recv_multipart()
router.send_multipart([trainer, *(b"%d" % number for number in range(300))])
assert dealer.recv() == b"0"
router.close(linger=0)
monitor.recv_multipart()
time.sleep(0.1)  # until ZeroMQ's thread has told the socket, too
print([int(dealer.recv(zmq.NOBLOCK)) for _ in range(299)] == list(range(1, 300)))
"""


def test_a_daemon_that_dies_during_a_read_over_tcp_leaves_the_trainer_alive() -> None:
    """ZeroMQ would abort the process, so the trainer runs in another process."""
    done = subprocess.run([sys.executable, "-c", READ_IN_TWO], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
