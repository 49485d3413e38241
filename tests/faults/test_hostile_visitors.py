"""Hostile peers of the observer: trainers notice nothing; the observer neither grows nor ends."""

import re
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.expected import Expected
from support.observing import ANYWHERE, fetch, observer_of, open_connections, scrape
from support.waiting import wait_until

CROWD = 80
ROUNDS = 6
GROWTH_KIB_MAX = 4096
LORIS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-"
HUGE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000
NONSENSE = b"\x16\x03\x01\x00\xff" * 400 + b"\r\n\r\n"
ENDLESS_NAMES = b"GET /metrics HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % number for number in range(1500)) + b"\r\n"


def anonymous_kib(pid: int) -> int:
    """Return the anonymous memory of a process, in KiB."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def crowd_in(daemon) -> None:
    """Open more connections of each kind than the observer admits, all at once."""
    with ExitStack() as stack:
        for words in (NONSENSE, HUGE, ENDLESS_NAMES, LORIS):
            with suppress(OSError):  # some are disconnected while they send
                stack.enter_context(open_connections(daemon, CROWD, words))


@pytest.mark.thorough
def test_a_crowd_at_the_observers_port_harms_no_trainer(start_daemon, start_trainer):
    """The trainer gets all batches; the observer is the same process, not larger, and answers."""
    daemon = start_daemon(http=ANYWHERE)
    observer = observer_of(daemon)
    wait_until(lambda: fetch(daemon, "/readyz").status == 200, "it is ready")
    crowd_in(daemon)
    before_kib = anonymous_kib(observer)

    trainer = start_trainer(daemon.address, epochs=ROUNDS)
    trainer.begin(do="take")
    for _ in range(ROUNDS):
        crowd_in(daemon)
    seen, _ = trainer.finish()

    expected = Expected(daemon.config)
    assert seen == [batch for epoch in range(ROUNDS) for batch in expected.epoch(epoch)]
    wait_until(lambda: fetch(daemon, "/healthz").status == 200, "the observer answers")
    assert scrape(daemon)["up"] == 1
    assert anonymous_kib(observer) - before_kib < GROWTH_KIB_MAX
    assert observer_of(daemon) == observer
    assert not daemon.log_lines("observer ended")
