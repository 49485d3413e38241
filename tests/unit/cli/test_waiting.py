"""Messages of ``batchd peek`` and the client during the wait for a stream's first batch."""

import logging

import pytest
from click.testing import CliRunner

import batchd_client
import batchd_client.reader
from batchd.cli import peek
from batchd.cli.main import cli
from batchd.errors import BatchdError
from batchd_client.errors import BatchTimeout
from batchd_client.hints import missing_samples_hint
from batchd_wire.messages import AskStatus, Pull, Status, Subscribe
from batchd_wire.status import read_status
from support.fake_daemon import FakeDaemon
from support.waiting import PATIENCE_S

NONE_YET = "stream 'photos' has no producers yet, and its next batch has 0 of 4 samples"


@pytest.fixture(autouse=True)
def _impatience(monkeypatch):
    """Shorten the silence after which the client reports what it waits for."""
    monkeypatch.setattr(batchd_client.reader, "SILENCE_MAX_S", 0.05)


def status(**live):
    """The status of a daemon with one live stream."""
    counts = {"producers": 0, "pushed_samples": 0, "queued_samples": 0, "bound_samples": 0, **live}
    return {"streams": [{"name": "photos", "batch_size": 4, "live": counts}]}


@pytest.fixture
def fake(tmp_path):
    """A daemon that grants batches only after a waiting client has asked for its status."""

    def answer(session, message):
        if isinstance(message, AskStatus):
            fake.send(session, Status(message.request, fake.status))
            if fake.heard_of(Subscribe):
                fake.grants_at_most = fake.granted_when_asked
                fake.grant_all()
        return isinstance(message, AskStatus)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.grants_at_most, fake.granted_when_asked, fake.status = 0, 1, status()
        fake.answer = answer
        yield fake


@pytest.mark.parametrize(
    ("live", "text"),
    [
        ({}, "has no producers yet, and its next batch has 0 of 4 samples; "),
        ({"producers": 1}, "has 1 producer, and its next batch has 0 of 4 samples"),
        (
            {"producers": 2, "queued_samples": 1, "bound_samples": 2},
            "has 2 producers, and its next batch has 3 of 4 samples",
        ),
        ({"pushed_samples": 9}, "has no producers just now, and its next batch has 0 of 4 samples"),
    ],
)
def test_what_is_missing_is_counted(live, text) -> None:
    """The hint also says what to do."""
    told = missing_samples_hint(read_status(status(**live)), "photos")

    assert told is not None
    assert text in told
    assert "batchd_client.push('photos')" in told


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"streams": None},
        {"streams": [None, 3, {"name": "photos"}]},
        {"streams": [{"name": "photos", "batch_size": 4, "live": None}]},
        {"streams": [{"name": "photos", "batch_size": "4", "live": {"producers": 0}}]},
        status(queued_samples=4),
        {"streams": [{**status()["streams"][0], "name": "other"}]},
    ],
)
def test_nothing_is_said_where_samples_are_not_what_is_missing(said) -> None:
    """There is no hint either if the daemon sends nonsense."""
    assert missing_samples_hint(read_status(said), "photos") is None


def test_peek_says_what_it_waits_for(fake, tmp_path) -> None:
    """The message is printed once on standard error, and the command continues."""
    result = CliRunner().invoke(cli, ["peek", "photos", "--address", fake.address, "-o", str(tmp_path / "sheet.png")])

    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"batchd: waiting for samples: {NONE_YET}")
    assert result.stderr.count("\n") == 1
    assert result.stdout.startswith(str(tmp_path / "sheet.png"))
    assert len(fake.heard_of(AskStatus)) == 2, "peek asks once before it waits, too"


def test_peek_says_at_last_what_never_came(fake, monkeypatch) -> None:
    """The message does not say that the daemon hangs, because it does not."""
    monkeypatch.setattr(peek, "BATCH_TIMEOUT_S", 0.2)
    fake.granted_when_asked = 0

    result = CliRunner().invoke(cli, ["peek", "photos", "--address", fake.address])

    assert isinstance(result.exception, BatchdError)
    assert "within 0.2 s: the daemon" in str(result.exception)
    assert f"holds 0 batches of the stream; {NONE_YET}" in str(result.exception)


def test_peek_says_nothing_of_a_batch_that_takes_its_time(fake, tmp_path) -> None:
    """A stream of files waits for workers."""
    fake.status = {"streams": [{"name": "photos", "batch_size": 4, "live": None}]}

    result = CliRunner().invoke(cli, ["peek", "photos", "--address", fake.address, "-o", str(tmp_path / "sheet.png")])

    assert (result.exit_code, result.stderr) == (0, "")


def test_the_log_says_what_a_trainers_first_batch_waits_for(fake, caplog, let_pass) -> None:
    """The log has one line; later batches add none. One that is overdue asks for storage alone."""

    def let_it_wait(_session, message):
        if isinstance(message, Pull) and message.waiting:
            let_pass(PATIENCE_S)
        return False

    with batchd_client.connect(fake.address, batch_timeout_s=PATIENCE_S) as daemon:
        stream = daemon.stream("photos")
        with caplog.at_level(logging.WARNING):
            first = next(iter(stream))
            fake.answer = let_it_wait
            with pytest.raises(BatchTimeout):
                next(iter(stream))

    assert (first.epoch, first.step) == (0, 0)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"waiting for samples: {NONE_YET}")
    assert len(fake.heard_of(AskStatus)) == 2  # the hint, and the end of the second batch's time
