"""Reports of real trainers arrive once each: of eight ranks, and after everything that can end."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from batchd.commands.history.losses import Losses, from_pages
from batchd.core.plan import Plan
from batchd_client.asking import ask_reports, ask_status, asking
from batchd_wire.messages import Pull
from batchd_wire.position import Position
from support.daemon_process import DaemonProcess
from support.network import Proxy, free_port
from support.settings import folder_stream
from support.waiting import wait_until

RANKS = 8
STEPS = 20
"""Batches of an epoch of 40 photographs, two in each; in the last round, the ranks share some."""


def reports_of(daemon: DaemonProcess, stream: str = "photos") -> dict[str, Losses]:
    with asking(daemon.address) as session:
        return from_pages(ask_reports(session, stream))


def rows_in(losses: Losses) -> Counter[tuple[int, int, int]]:
    """How often each row of each position is in the reports."""
    heads = zip(*(losses.heads[name].tolist() for name in ("epoch", "step", "first", "rows")), strict=True)
    return Counter((epoch, step, first + row) for epoch, step, first, rows in heads for row in range(rows))


def all_rows(samples: int, epochs: range, batch_size: int = 2) -> Counter[tuple[int, int, int]]:
    plan = Plan(samples, batch_size, 0, shuffle=True, drop_last=False)
    return Counter(
        (epoch, step, row)
        for epoch in epochs
        for step in range(plan.steps)
        for row in range(plan.rows(Position(epoch, step)))
    )


def train(address: str, rank: int, epochs: int, between=lambda _batch: None, **options) -> None:
    """Report (epoch, step, row) of each row as one number."""
    with (
        batchd_client.connect(address, name="job", reconnect_timeout_s=60) as daemon,
        daemon.stream("photos", rank, RANKS, epochs=epochs, **options) as stream,
    ):
        for _ in range(epochs):
            for batch in stream:
                between(batch)
                first = batch.span.first
                stream.report([value_of(batch.epoch, batch.step, first + row) for row in range(batch.samples)])


def value_of(epoch: int, step: int, row: int) -> float:
    return 1000.0 * epoch + 10 * step + row


@pytest.fixture
def pair_stream(photos: Path) -> dict:
    return folder_stream(photos, batch_size=2)


@pytest.mark.parametrize("is_tcp", [False, True], ids=["ipc", "tcp"])
def test_reports_of_eight_ranks_have_each_row_once(start_daemon, pair_stream, is_tcp) -> None:
    """Also where ranks share the batches of a last round, and over TCP."""
    daemon = start_daemon({"photos": pair_stream}, **({"tcp": f"127.0.0.1:{free_port()}"} if is_tcp else {}))
    address = daemon.tcp_address if is_tcp else daemon.address
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda rank: train(address, rank, 2), range(RANKS)))

    (losses,) = reports_of(daemon).values()
    assert losses.run == "job"
    with asking(daemon.address) as session:
        stream = ask_status(session).stream("photos")
    assert rows_in(losses) == all_rows(stream.samples, range(2))
    assert stream.reports.values == 2 * stream.samples
    for report in range(len(losses)):
        epoch, step = losses.position(report)
        first = int(losses.heads["first"][report])
        assert losses.of(report).tolist() == [
            value_of(epoch, step, first + row) for row in range(len(losses.of(report)))
        ]
    assert set(losses.heads["rank"].tolist()) == set(range(RANKS))


def test_killed_daemons_lose_and_double_no_report(start_daemon, pair_stream) -> None:
    """The next daemon gets what the trainers reported before, again.

    The trainers stay near each other, so that none has closed its stream before a death.
    """
    daemon = start_daemon({"photos": pair_stream | {"lag": "lockstep", "max_skew": 1}})

    def kill_now_and_then(batch: batchd_client.Batch) -> None:
        if batch.span[:3] in {(0, 8, 0), (1, 0, 0)}:
            daemon.restart()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda rank: train(daemon.address, rank, 3, kill_now_and_then), range(RANKS)))

    (losses,) = reports_of(daemon).values()
    with asking(daemon.address) as session:
        stream = ask_status(session).stream("photos")
    assert rows_in(losses) == all_rows(stream.samples, range(3))
    assert stream.reports.values == 3 * stream.samples


def test_connections_cut_after_each_batch_lose_and_double_no_report(start_daemon, pair_stream) -> None:
    """The daemon is the same, so it has most of what the trainer sends again."""
    port = free_port()
    daemon = start_daemon({"photos": pair_stream}, tcp=f"127.0.0.1:{port}")
    with (
        Proxy(port) as proxy,
        batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", name="job", reconnect_timeout_s=60) as far,
        far.stream("photos", epochs=2) as stream,
    ):
        for _ in range(2):
            for batch in stream:
                stream.report([value_of(batch.epoch, batch.step, row) for row in range(batch.samples)])
                if (batch.epoch, batch.step) < (1, 15):
                    proxy.drop()
        connections = proxy.connections

    (losses,) = reports_of(daemon).values()
    with asking(daemon.address) as session:
        found = ask_status(session).stream("photos")
    assert connections > 2
    assert rows_in(losses) == all_rows(found.samples, range(2))
    assert found.reports.values == 2 * found.samples


def test_resumed_run_replaces_what_it_trains_on_again(start_daemon, pair_stream) -> None:
    """A job that resumes from a checkpoint with other ranks reports the same rows, once."""
    daemon = start_daemon({"photos": pair_stream})
    with batchd_client.connect(daemon.address, name="job") as first, first.stream("photos") as stream:
        batches = iter(stream)
        for _ in range(4):
            next(batches)
            stream.report(1.0)
        state = stream.state_dict()
        for _ in range(4):
            next(batches)
            stream.report(1.0)
    for rank in range(2):
        with (
            batchd_client.connect(daemon.address, name="job") as second,
            second.stream("photos", rank, 2, state=state, epochs=1) as stream,
        ):
            for _batch in stream:
                stream.report(2.0)
            samples = stream.samples

    (losses,) = reports_of(daemon).values()
    assert rows_in(losses) == all_rows(samples, range(1))
    assert [losses.of(report)[0] for report in range(len(losses))] == [1.0] * 4 + [2.0] * (len(losses) - 4)


def test_hostile_reports_are_refused_and_others_go_on(start_daemon, pair_stream) -> None:
    """The log names the trainer and the reason; the session stays, as nothing is at risk.

    Of batches that the trainer was not granted, none is kept.
    """
    daemon = start_daemon({"photos": pair_stream | {"report_memory": "64KiB"}})
    with batchd_client.connect(daemon.address, name="odd") as client, client.stream("photos") as stream:
        batches = iter(stream)
        next(batches)
        session = stream._reader.connection.session
        number = stream._reader.subscription.number
        bad = [(0, 999, 0, 2, b"\0" * 4), (0, 0, 0, 2, b"\0" * 5), (0, 0, 0, 1 << 40, b"\0" * 4)]
        session.send(Pull(number, 1, False, 0, [], bad))
        session.send(Pull(number + 99, 1, False, 0, [], None))
        for flood in range(300):
            session.send(
                Pull(number, 1, False, 0, [], [(epoch, 0, 0, 2, np.float32(flood).tobytes()) for epoch in range(9)])
            )
        stream.report(float("nan"))
        assert next(batches).step == 1
    with asking(daemon.address) as asked:
        found = ask_status(asked).stream("photos").reports
    assert (found.refused, found.not_finite) == (3 + 300 * 8, 1)
    assert found.kept == 1
    wait_until(lambda: "report refused" in daemon.log_file.read_text(), "a line in the log")
    assert '"name": "odd"' in daemon.log_file.read_text()
