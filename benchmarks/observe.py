"""Benchmark: the cost of monitoring, with ten trainers and a scrape each second.

CPU time of daemon and observer, and memory.

An open page and `batchd top` have rows of their own: the page asks as a browser does (the overview
each second, the history every five), and `top` runs in a pseudo-terminal of 140 columns; what it
costs is its own process's time and the daemon's for its looks.

Trainers read at a fixed pace that is far below what workers can do, so that the daemon does the
same work in all rounds. What a question costs it is little, so it is measured with as many scrapes
as the observer allows (ten a second), against rounds without an observer; a scrape each second
makes two questions a second at most, as the observer asks by itself too.
"""

import os
import pty
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import NamedTuple

from harness import Bench, Figure, Player, anonymous_bytes, cpu_s, orders, private_bytes, served, spread

import batchd_client

TRAINERS = 10
ROUND_S = 15.0
WARM_S = 3.0
QUESTIONS = 2
PACE_S = 0.1
SCRAPES = 500


def run(bench: Bench) -> None:
    """Rounds by turns, then many scrapes for the memory."""
    plain, hurried, own = [], [], []
    for _ in range(min(bench.rounds, 3)):
        plain.append(bench.measure("alone", partial(_round, bench, "off", 1.0)).daemon_s)
        hurried.append(bench.measure("scrapes at once", partial(_round, bench, "127.0.0.1:0", 0.0)))
        own.append(bench.measure("scrapes", partial(_round, bench, "127.0.0.1:0", 1.0)).observer_s)
    each = [(one.daemon_s - alone_s) / one.scrapes for one, alone_s in zip(hurried, plain, strict=True)]
    print(f"daemon alone, CPU ms a second: {spread([1000 * one for one in plain])}")
    print(f"for each question more, CPU ms: {spread([1000 * one for one in each], 3)}")
    print(f"observer, CPU ms a second: {spread([1000 * one for one in own])}")
    daemon_s = QUESTIONS * median(each)
    bench.report(Figure("observe-daemon-percent-of-a-core", 100 * daemon_s, "<=", 1))
    bench.report(Figure("observe-all-percent-of-a-core", 100 * (daemon_s + median(own)), "<=", 1))
    _watchers(bench)
    _memory(bench)


def _watchers(bench: Bench) -> None:
    """What a page that is open costs the observer beside scrapes, and `batchd top` by itself.

    Rounds by turns.
    """
    alone, pages, tops = [], [], []
    for _ in range(min(bench.rounds, 3)):
        alone.append(bench.measure("nobody", partial(_watched, bench, _nobody)))
        pages.append(bench.measure("page", partial(_watched, bench, _page)))
        tops.append(bench.measure("top", partial(_watched, bench, _top)))
    base = median(one.observer_s for one in alone)
    print(f"observer without requests, CPU ms a second: {spread([1000 * one.observer_s for one in alone])}")
    print(f"observer with a page open, CPU ms a second: {spread([1000 * one.observer_s for one in pages])}")
    print(f"batchd top, CPU ms a second: {spread([1000 * one.watcher_s for one in tops])}")
    page_s = median(one.observer_s for one in pages) - base
    bench.report(Figure("observe-page-percent-of-a-core", 100 * page_s, "<=", 1))
    bench.report(Figure("observe-top-percent-of-a-core", 100 * median(one.watcher_s for one in tops), "<=", 3))


class Watched(NamedTuple):
    """CPU seconds in one second: of the observer, and of a program that watches."""

    observer_s: float
    watcher_s: float


Watcher = Callable[[str, str], "AbstractContextManager[int | None]"]
"""Watches while it is open; called with the addresses of daemon and observer.

Returns its process, if it has one.
"""


def _watched(bench: Bench, watcher: Watcher) -> Watched:
    with _ten_trainers(bench, "127.0.0.1:0") as (url, daemon, observer):
        assert url is not None
        assert observer is not None
        with watcher(_address_of(daemon), url) as pid:
            time.sleep(WARM_S)
            began_s, before = time.monotonic(), (cpu_s(observer), cpu_s(pid) if pid else 0.0)
            time.sleep(ROUND_S)
            lasted_s = time.monotonic() - began_s
            return Watched(
                (cpu_s(observer) - before[0]) / lasted_s, ((cpu_s(pid) if pid else 0.0) - before[1]) / lasted_s
            )


@contextmanager
def _nobody(_address: str, _url: str) -> Iterator[None]:
    yield None


@contextmanager
def _page(_address: str, url: str) -> Iterator[None]:
    """As ``page.js`` asks."""
    over = Event()

    def ask(path: str, every_s: float) -> None:
        while not over.wait(every_s):
            with urllib.request.urlopen(url + path, timeout=10) as response:
                response.read()

    threads = [Thread(target=ask, args=one) for one in (("/overview.json", 1.0), ("/history.json", 5.0))]
    for thread in threads:
        thread.start()
    try:
        yield None
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def _top(address: str, _url: str) -> Iterator[int]:
    """In a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "batchd", "top", "--address", address])
    termios.tcsetwinsize(terminal, (50, 140))
    reader = Thread(target=_read_away, args=(terminal,))
    reader.start()
    try:
        yield pid
    finally:
        os.write(terminal, b"q")
        os.waitpid(pid, 0)
        reader.join()
        os.close(terminal)


def _read_away(terminal: int) -> None:
    with suppress(OSError):  # the other end has gone
        while os.read(terminal, 1 << 16):
            pass


def _address_of(daemon: int) -> str:
    """Where trainers find it: its runtime directory is the argument of its observer."""
    observer = _observer_of(daemon)
    return "ipc://" + Path(f"/proc/{observer}/cmdline").read_text().split("\0")[6]


class Used(NamedTuple):
    """What one second took: CPU time of daemon and observer, and how many scrapes there were."""

    daemon_s: float
    observer_s: float
    scrapes: float


def _round(bench: Bench, http: str, pause_s: float) -> Used:
    """Look on for a while, with scrapes so far apart."""
    with _ten_trainers(bench, http) as (url, daemon, observer):
        began_s, before = time.monotonic(), (cpu_s(daemon), cpu_s(observer) if observer else 0.0)
        scrapes = 0
        while time.monotonic() - began_s < ROUND_S:
            time.sleep(pause_s)
            if url is not None:
                _scrape(url)
                scrapes += 1
        lasted_s = time.monotonic() - began_s
        observer_s = cpu_s(observer) - before[1] if observer else 0.0
        return Used((cpu_s(daemon) - before[0]) / lasted_s, observer_s / lasted_s, scrapes / lasted_s)


def _memory(bench: Bench) -> None:
    with _ten_trainers(bench, "127.0.0.1:0") as (url, _daemon, observer):
        assert url is not None
        assert observer is not None
        for _ in range(SCRAPES // 10):
            _scrape(url)
        before = anonymous_bytes(observer)
        for _ in range(SCRAPES):
            _scrape(url)
        grown_mb = (anonymous_bytes(observer) - before) / 1e6
        bench.report(Figure("observer-private-mb", private_bytes(observer) / 1e6, "<=", 40, 1))
        bench.report(Figure(f"observer-growth-mb-in-{SCRAPES}-scrapes", grown_mb, "<=", 1))


@contextmanager
def _ten_trainers(bench: Bench, http: str) -> Iterator[tuple[str | None, int, int | None]]:
    """A daemon with running trainers: its HTTP address, its process, and its observer's."""
    config = bench.config(batch_size=8, repeats=1, pipeline='[{ op = "decode" }, { op = "resize", size = [32, 32] }]')
    config.write_text(config.read_text().replace("[daemon]", f'[daemon]\nhttp = "{http}"'))
    with served(config) as address, batchd_client.connect(address) as connection:
        status = connection.status()["daemon"]
        players = [Player(_train, address, rank) for rank in range(TRAINERS)]
        try:
            for player in players:
                player.ask("begin")
            time.sleep(2.0)
            yield status["http"], status["pid"], _observer_of(status["pid"])
        finally:
            for player in players:
                player.__exit__(None, None, None)


def _train(pipe: Connection, address: str, rank: int) -> None:
    """A trainer that takes a batch at each beat, for ever."""
    with batchd_client.connect(address) as connection:
        stream = connection.stream("photos", rank=rank, world_size=TRAINERS)
        for _ in orders(pipe):
            pipe.send("begun")
            while not pipe.poll():
                for batch in stream:
                    batch.release()
                    if pipe.poll(PACE_S):
                        return


def _observer_of(daemon: int) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command, stat = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            if b"batchd.observe.http" in command and int(stat.rpartition(")")[2].split()[1]) == daemon:
                return int(entry.name)
    return None


def _scrape(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        assert b"batchd_up 1.0" in response.read()
