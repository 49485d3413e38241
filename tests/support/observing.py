"""HTTP requests to the observer of a daemon, as from scrapers and browsers.

For tests of processes.
"""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from support.daemon_process import DaemonProcess
from support.kernel import observers_of
from support.waiting import PATIENCE_S, wait_until

ANYWHERE = "127.0.0.1:0"


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    text: str


def place_of(daemon: DaemonProcess) -> tuple[str, int]:
    """Return host and port of its observer from the log; this works while the daemon is blocked."""
    (line, *_more) = wait_until(lambda: daemon.log_lines("observing"), "somebody observes")
    address = urlsplit(line["http"])
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


def fetch(daemon: DaemonProcess, path: str, *, method: str = "GET", **headers: str) -> Reply:
    """Send one request."""
    connection = http.client.HTTPConnection(*place_of(daemon), timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers), response.read().decode(errors="replace"))
    finally:
        connection.close()


def asked(daemon: DaemonProcess) -> DaemonProcess:
    """Return the daemon once its observer has its first status."""
    wait_until(lambda: fetch(daemon, "/overview.json").status == HTTPStatus.OK, "the observer has a status")
    return daemon


def scrape(daemon: DaemonProcess) -> dict[str, float]:
    """Return all metrics by their names with labels, in their text form, without the prefix."""
    found = {}
    for family in text_string_to_metric_families(fetch(daemon, "/metrics").text):
        for sample in family.samples:
            found[written(sample.name.removeprefix("batchd_"), sample.labels)] = sample.value
    return found


def written(name: str, labels: Mapping[str, str]) -> str:
    """Return a metric's name with its labels, in the form of the keys of ``scrape``."""
    text = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return name + (f"{{{text}}}" if text else "")


def observer_of(daemon: DaemonProcess) -> int:
    """Return the process id of its observer."""
    return next(iter(wait_until(lambda: observers_of(daemon.pid), "there is an observer")))


@contextmanager
def open_connections(daemon: DaemonProcess, count: int, first_words: bytes) -> Iterator[list[Any]]:
    """Open so many connections that send some text and stay open."""
    connections = []
    try:
        for _ in range(count):
            connection = socket.create_connection(place_of(daemon), PATIENCE_S)
            connection.sendall(first_words)
            connections.append(connection)
        yield connections
    finally:
        for connection in connections:
            connection.close()
