"""An observer that shows a simulated daemon, for pictures of its page. Tests only.

No daemon runs: ``status_at`` makes the statuses of a training, second by second, and the observer's
own recorder, routes and server show them. The clock stops after the last one.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import sin
from pathlib import Path
from time import monotonic

from batchd.observe.http.__main__ import Server
from batchd.observe.http.access import AccessRules, HostNames
from batchd.observe.http.contact_sheets import ContactSheets
from batchd.observe.http.routes import Router
from batchd.observe.http.status_client import Answer, StatusClient, StatusRecorder
from batchd_wire.status import (
    DaemonStatus,
    LogLine,
    PartStatistics,
    StreamDescription,
    StreamStatus,
    SubscriptionStatistics,
    TrainerStatistics,
    WaitStatistics,
    plain_status,
)
from support.statuses import two_looks

DESCRIPTION = StreamDescription(
    "folder /data/imagenet/train",
    ("image uint8[250, 224, 224, 3]", "label int64[250]", "index int64[250]"),
    ("decode", "random_resized_crop(size=[224, 224])", "random_flip"),
)
SAMPLES_PER_S = 900.0
BATCHES_PER_S = 3.6
WARNINGS = (
    LogLine(
        3, 1.7e9, "warning", "bad sample: stream=photos path=/data/imagenet/train/n01440764/x.jpg reason=truncated"
    ),
    LogLine(9, 1.7e9, "error", "gateway cannot listen: address=0.0.0.0:7072 reason=address already in use"),
)


def status_at(second: float, *, trainers: int, streams: int = 1, warnings: bool = False) -> DaemonStatus:
    """Return the status ``second`` seconds after the start; the trainers use different streams."""
    _before, plain = two_looks(workers=4)
    (one,) = plain.streams
    names = ["photos", *(f"stream-{number:02}" for number in range(1, streams))]
    made = [_stream(one, number, name, second, trainers, streams) for number, name in enumerate(names, 1)]
    for number, worker in enumerate(plain.workers):
        worker.busy_s, worker.samples = second * (0.7 + 0.05 * number), int(second * SAMPLES_PER_S / 4)
    sessions = tuple(
        TrainerStatistics(number, f"resnet-{50 + number}-sweep", 4700 + number, 1000, "shared memory")
        for number in range(1, trainers + 1)
    )
    daemon = replace(plain.daemon, uptime_s=second, host="bigbox", address="ipc:///run/batchd")
    return DaemonStatus(daemon, plain.workers, sessions, tuple(made), warnings=WARNINGS if warnings else ())


def _stream(one: StreamStatus, number: int, name: str, second: float, trainers: int, streams: int) -> StreamStatus:
    of_this = [session for session in range(1, trainers + 1) if session % streams == (number - 1) % streams]
    works = bool(of_this)
    done = SAMPLES_PER_S * (second + sin(second / 7 + number)) if works else 0.0
    spent = {"read": 0.2, "decode": 1.6, "random_resized_crop": 0.5, "store": 0.1}
    parts = tuple(PartStatistics(part, ms * done / 1000) for part, ms in spent.items())
    busy_s = done * (sum(spent.values()) + 0.3) / 1000
    work = replace(one.work, parts=parts, busy_s=busy_s, cpu_wait_s=0.12 * busy_s, waited_s=0.05 * busy_s)
    return replace(
        one,
        number=number,
        name=name,
        decoded_samples=int(done),
        delivered_samples=int(done * max(1, len(of_this))),
        slots=8,
        slots_max=120,
        ready_slots=5 if works else 0,
        leased_slots=min(3, len(of_this)),
        filling_slots=2 if works else 0,
        partial_slots=1,
        work=work,
        description=DESCRIPTION,
        subscriptions=tuple(_claim(one.subscriptions[0], session, second) for session in of_this),
    )


def _claim(one: SubscriptionStatistics, session: int, second: float) -> SubscriptionStatistics:
    batches = int(BATCHES_PER_S * second)
    waits = WaitStatistics(workers_s=second * (0.6 if session % 5 == 0 else 0.01))
    return replace(
        one,
        number=session,
        session=session,
        consumed_batches=batches,
        step=batches,
        ready_ahead=session % 5,
        waits=waits,
    )


class _MadeClient(StatusClient):
    """A client that has the last of the simulated statuses, as if it had just arrived."""

    def __init__(self, status: DaemonStatus) -> None:
        self._made = status

    def latest(self) -> Answer:
        return Answer(self._made, plain_status(self._made), monotonic(), monotonic())

    def silent_s(self) -> float:
        return 0.0


@contextmanager
def made_page(folder: Path, seconds: int, **daemon: int) -> Iterator[str]:
    """Return the address of a page that has watched a simulated daemon for so many seconds."""
    clock = [0.0]
    recorder = StatusRecorder(lambda: clock[0])
    for second in range(1, seconds + 1):
        clock[0] = float(second)
        recorder.add(status_at(second, **daemon))
    client = _MadeClient(status_at(seconds, **daemon))
    sheets = ContactSheets(f"ipc://{folder}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        server = Server(listener, Router(client, recorder, sheets, HostNames([]), AccessRules(folder)))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{host}:{port}/"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            sheets.close()
