"""Worker hosts in `batchd status`, `top` and `why`, and on the page without scripts."""

import io
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from batchd.cli import status as status_command
from batchd.cli import why as why_command
from batchd.cli.frame import frame
from batchd.observe.diagnosis.overview import overview_between
from batchd.observe.diagnosis.pool import HOSTS_MAX, NOTES_MAX, notes, pool_view, start_command
from batchd.observe.http.routes import tables_of
from batchd_wire.status import DaemonStatus, plain_status
from support.statuses import link, two_looks, with_pool

FACTS: dict[str, Any] = {"wanted": 24, "interface": "eth0", "interface_bytes_per_s": 1e8}
EVIL = "\x1b[2Jevil"


def looks(*links, **facts) -> tuple[DaemonStatus, DaemonStatus]:
    """Make two statuses of a daemon with worker hosts."""
    found = two_looks(waits={"workers_s": 4.0}, work={"busy_s": 100.0, "cpu_s": 100.0})
    with_pool(found, *links, **(FACTS | facts))
    return found


def drawn(found: tuple[DaemonStatus, DaemonStatus], width: int = 140, height: int | None = None) -> str:
    """Draw a frame of `batchd top`."""
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, highlight=False)
    console.print(frame(overview_between(*found), width, height))
    return file.getvalue()


@pytest.fixture
def run(monkeypatch):
    """Run `batchd status` or `batchd why` on fabricated statuses."""

    def run(command: str, found: tuple[DaemonStatus, DaemonStatus], *options: str) -> str:
        plain = plain_status(found[1])
        session = SimpleNamespace(request=lambda *_: SimpleNamespace(status=plain))
        answers = iter(found)

        @contextmanager
        def running_daemon(_address):
            yield session

        module = {"status": status_command, "why": why_command}[command]
        monkeypatch.setattr(module, "running_daemon", running_daemon)
        monkeypatch.setattr(why_command, "ask_status", lambda _session: next(answers))
        monkeypatch.setattr(why_command.time, "sleep", lambda _seconds: None)
        result = CliRunner().invoke(module.command, list(options), catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    return run


# --- the view -------------------------------------------------------------------------------------


def test_rates_of_worker_hosts_are_differences_of_two_looks() -> None:
    """A thousand samples and a hundred megabytes take ten seconds, with 70 of 80 s busy."""
    pool = overview_between(*looks(link())).pool

    assert pool is not None
    (host,) = pool.hosts
    assert (host.samples_per_s, host.bytes_per_s, host.busy_share) == (100, 1e7, 0.875)
    assert (pool.workers, pool.wanted, pool.samples_per_s, pool.network_share) == (8, 24, 100, 0.1)


def test_one_look_has_no_rates_of_worker_hosts() -> None:
    """An unknown value is not shown as zero."""
    _before, only = looks(link())
    pool = overview_between(only, only).pool

    assert pool is not None
    assert [pool.samples_per_s, pool.bytes_per_s, pool.network_share, pool.hosts[0].busy_share] == [None] * 4


def test_a_host_that_has_just_come_has_no_rates_yet() -> None:
    """The other hosts have rates."""
    before, after = looks(link(1), link(2))
    before.pool = replace(before.pool, links=before.pool.links[:1])
    pool = overview_between(before, after).pool

    assert pool is not None
    assert [one.samples_per_s for one in pool.hosts] == [100, None]


def test_bytes_of_hosts_that_went_are_bytes_that_came() -> None:
    """The network carried these bytes, so they stay in the total."""
    pool = overview_between(*looks(received_bytes=10**9)).pool

    assert pool is not None
    assert pool.bytes_per_s == 1e8


def test_a_thousand_hosts_are_shown_in_part_and_summed_up_all() -> None:
    """The list is cut, so that the page stays small."""
    _before, after = looks(*(link(number) for number in range(1, 1_001)))
    view = pool_view(after.pool, None)

    assert (len(view.hosts), view.hosts_count, view.workers) == (HOSTS_MAX, 1_000, 8_000)


def test_what_is_wrong_is_said_of_each_host() -> None:
    """Hosts that serve, or that wait for a trainer to prove themselves, have no problem."""
    _before, after = looks(
        link(1),
        link(2, state="opening", since_s=60.0),
        link(3, streams=(), refused=("photos: /data is missing",)),
        link(4, workers=0),
        link(5, state="proving", streams=()),
        cap="the NIC, not the cores",
        gateways=3,
        gateways_down=(0, 2),
        sent_away=("node9: it makes other pixels than the daemon's host: image",),
    )

    assert list(notes(after.pool)) == [
        "limited by the NIC, not the cores",
        "down, and started again by the daemon: number 0, number 2 of 3 gateways",
        "node2 (10.0.0.2) is opening for 60 s",
        "node3 (10.0.0.3) cannot fill photos: /data is missing",
        "node4 (10.0.0.4) has no workers",
        "sent away: node9: it makes other pixels than the daemon's host: image",
    ]


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("tcp://0.0.0.0:7072", "batchd worker tcp://HOST:7072 --key FILE"),
        ("tcp://[::]:7072", "batchd worker tcp://HOST:7072 --key FILE"),
        ("tcp://*:7072", "batchd worker tcp://HOST:7072 --key FILE"),
        ("tcp://10.0.0.5:7072", "batchd worker tcp://10.0.0.5:7072 --key FILE"),
        ("tcp://eth0:7072", "batchd worker tcp://eth0:7072 --key FILE"),
        ("tcp://127.0.0.1:7072", "batchd worker tcp://127.0.0.1:7072"),
        ("tcp://[::1]:7072", "batchd worker tcp://[::1]:7072"),
    ],
)
def test_the_command_for_a_worker_host_works_on_another_machine(address, command) -> None:
    """All addresses of the daemon's host are those of the other machine there."""
    assert start_command(address) == command


def test_of_many_hosts_with_problems_some_are_named() -> None:
    """The last line gives the number of the others."""
    _before, after = looks(*(link(number, workers=0) for number in range(1, NOTES_MAX + 4)))

    assert len(found := list(notes(after.pool))) == NOTES_MAX + 1
    assert found[-1] == "and 3 worker hosts more with problems"


# --- commands -------------------------------------------------------------------------------------


def test_status_lists_worker_hosts(run) -> None:
    """The list shows each host's work since it connected."""
    text = run("status", looks(link(withdrawn=3, disagreements=2), cap="the NIC", ended_links=1))

    assert "worker hosts come to tcp://gpu1:7072: 1 worker host, 8 remote workers, 24 wanted" in text
    assert "worker hosts: limited by the NIC" in text
    (line,) = [line for line in text.splitlines() if line.startswith("node1")]
    assert line.split() == [
        "node1",
        "10.0.0.1",
        "pool",
        "serving",
        "8",
        "50",
        "1,000",
        "1",
        "min",
        "10",
        "s",
        "0.1",
        "3",
        "0",
        "2",
    ]


def test_status_as_json_has_all_of_the_pool(run) -> None:
    """The JSON has the form of the wire message."""
    plain = json.loads(run("status", looks(link()), "--json"))

    assert plain["pool"]["wanted"] == 24
    assert plain["pool"]["links"][0]["name"] == "node1"


def test_why_ends_with_the_worker_hosts(run) -> None:
    """The verdicts come first."""
    text = run("why", looks(link(workers=0), cap="the NIC"))

    assert text.splitlines()[-3:] == [
        "worker hosts: 1 worker host, 0 remote workers, 24 wanted, 100 samples/s, 0.01 GB/s, 10% of the network",
        "  limited by the NIC",
        "  node1 (10.0.0.1) has no workers",
    ]


@pytest.mark.parametrize("command", ["status", "why"])
def test_without_a_pool_nothing_is_said_of_one(run, command) -> None:
    """Most daemons have no pool."""
    found = two_looks()

    assert "worker host" not in run(command, found)
    assert "worker host" not in drawn(found).lower()
    assert "remote" not in drawn(found)
    assert "Worker hosts" not in "".join(tables_of(overview_between(*found)))


@pytest.mark.parametrize("command", ["status", "why"])
def test_names_of_worker_hosts_are_printed_as_text(run, command) -> None:
    """Worker hosts choose their names and reports, so both are escaped."""
    found = looks(link(name=EVIL, workers=0), sent_away=(f"{EVIL}: {EVIL}",), cap=EVIL)

    assert "\x1b" not in run(command, found)
    assert "\x1b" not in drawn(found)


# --- top and the page -----------------------------------------------------------------------------


def test_a_frame_shows_worker_hosts() -> None:
    """They are drawn below the workers of this host."""
    text = drawn(looks(link(withdrawn=3), link(2, state="opening", workers=0, streams=(), since_s=60.0)))

    assert "2 workers and 8 remote" in text
    assert "2 worker hosts, 8 remote workers, 24 wanted, 200 samples/s, 0.02 GB/s, 20% of the network" in text
    assert "node2 (10.0.0.2) is opening for 60 s" in text
    (line,) = [line for line in text.splitlines() if line.startswith("node1")]
    assert line.split() == ["node1", "10.0.0.1", "serving", "8", "88%", "100", "0.01", "3", "0", "0"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_a_narrow_terminal_has_fewer_columns_of_worker_hosts(width) -> None:
    """No line is wider than the terminal."""
    text = drawn(looks(link(name="a" * 70)), width)

    assert max(map(len, text.splitlines())) <= width
    assert ("withdrawn" in text) == (width >= 80)
    assert ("disagreed" in text) == (width >= 120)


@pytest.mark.parametrize(("hosts", "workers"), [(300, 2), (300, 200), (2, 200)])
def test_many_worker_hosts_leave_room_for_the_rest(hosts, workers) -> None:
    """The frame says how many hosts are left out."""
    found = two_looks(workers=workers)
    with_pool(found, *(link(number) for number in range(1, hosts + 1)), **FACTS)
    text = drawn(found, height=40)

    assert len(text.splitlines()) <= 40
    assert "train-01" in text
    assert "node1 " in text
    assert ("worker hosts more" in text) == (hosts > 2)


def test_without_scripts_worker_hosts_are_a_table() -> None:
    """The names are escaped."""
    text = "".join(tables_of(overview_between(*looks(link(name="<b>"), cap="<i>"))))

    assert "<caption>Worker hosts</caption>" in text
    assert "&lt;b&gt;" in text
    assert "limited by &lt;i&gt;" in text
    assert "<b>" not in text
    assert "<i>" not in text
