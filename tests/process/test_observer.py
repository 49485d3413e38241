"""The observer over HTTP: the daemon's own numbers, and its reports on a silent daemon."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

import batchd
import batchd_client
from batchd.observe.http.metrics import METRICS
from batchd_wire.status import read_status
from support.commands import batchd as run_batchd
from support.kernel import children_of, fork_servers_of, is_alive, is_stopped
from support.network import free_port
from support.observing import ANYWHERE, fetch, observer_of, place_of, scrape, written
from support.seen import see
from support.settings import folder_stream, write_settings
from support.waiting import PATIENCE_S, wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
NOBODY = 65_534
BATCHES, SAMPLES = 5, 40


@pytest.fixture(scope="module")
def observed(start_shared_daemon):
    """Start a daemon with an observer, for tests that leave it unchanged."""
    return start_shared_daemon(http=ANYWHERE, http_names=["batchd.example.org"])


def counters(status) -> dict[str, float]:
    """Return all counters of the table, as a scrape shows them."""
    return {
        written(metric.name, dict(zip(metric.scope.labels, labels, strict=True))): value
        for metric in METRICS
        if metric.is_counter
        for labels, value in metric.values(read_status(status))
    }


def test_metrics_agree_with_the_status_and_with_what_trainers_counted(start_daemon, start_trainer, photos, tmp_path):
    """All counters agree exactly right after the last batch: a scrape queries the daemon again."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "cat" / "broken.jpg").write_bytes(b"nonsense")
    streams = {"photos": folder_stream(folder, max_bad_fraction=1.0)}
    daemon = start_daemon(streams, http=ANYWHERE, tcp=f"127.0.0.1:{free_port()}")
    addresses = daemon.address, daemon.tcp_address
    trainers = [start_trainer(address, rank=rank, world_size=2, epochs=2) for rank, address in enumerate(addresses)]
    for trainer in trainers:
        trainer.begin(do="take", batches=None)
    seen = [trainer.finish()[0] for trainer in trainers]
    counted = [trainer.statistics() for trainer in trainers]

    def all_is_said() -> bool:
        claims = daemon.stream_status()["subscriptions"]
        return all(one["held_slots"] == 0 for one in claims) and sorted(
            one["consumed_batches"] for one in claims
        ) == sorted(one["batches"] for one in counted)

    wait_until(all_is_said, "the trainers' last reports have arrived")

    wait_until(
        lambda: scrape(daemon)["trainers{transport=shared memory}"] == 1, "the session of the status query has ended"
    )
    metrics, status = scrape(daemon), daemon.status()

    expected = counters(status)
    assert {name: metrics[name] for name in expected} == expected
    (stream,) = status["streams"]
    assert metrics["stream_delivered_samples_total{stream=photos}"] == sum(one["samples"] for one in counted)
    assert metrics["stream_bad_rows_total{stream=photos}"] == stream["bad_rows"] > 0
    assert metrics["tcp_sent_bytes_total"] > 0
    sessions = {one["transport"]: one["session"] for one in status["trainers"] if one["name"] == "trainer_program.py"}
    for rank, (transport, mine) in enumerate(zip(("shared memory", "tcp"), counted, strict=True)):
        who = {"trainer": "trainer_program.py", "session": str(sessions[transport])}
        labels = who | {"rank": str(rank), "stream": "photos", "transport": transport}
        assert metrics[written("trainer_delivered_samples_total", labels)] == mine["samples"]
        assert metrics[written("trainer_consumed_batches_total", labels)] == mine["batches"] == len(seen[rank])
        assert metrics[written("trainer_wait_seconds_total", labels)] == pytest.approx(
            mine["wait_s"], abs=1e-6 * mine["batches"]
        )
        assert (written("trainer_sent_bytes_total", who) in metrics) == (transport == "tcp")
    assert sum(one["samples"] for one in counted) == sum(len(batch.samples) for batches in seen for batch in batches)
    assert metrics["up"] == 1
    assert metrics["trainers{transport=shared memory}"] == metrics["trainers{transport=tcp}"] == 1


def test_what_a_stream_has_delivered_outlives_its_trainers(observed):
    """The trainers' own numbers end with the trainers."""
    with batchd_client.connect(observed.address) as connection:
        see(connection.stream("photos", epochs=1))
    wait_until(lambda: not observed.stream_status()["subscriptions"], "the trainer has left")

    metrics = scrape(observed)

    assert metrics["stream_delivered_samples_total{stream=photos}"] == SAMPLES
    assert not [name for name in metrics if name.startswith("trainer_")]


def test_a_ready_daemon_says_so(observed):
    """Probes and ``batchd status`` both report it; the observer does not count as a trainer."""
    assert (
        wait_until(lambda: (reply := fetch(observed, "/readyz")).status == 200 and reply, "it is ready").text
        == "ready\n"
    )
    assert fetch(observed, "/healthz").text == "ok\n"
    host, port = place_of(observed)
    assert observed.status()["daemon"]["http"] == f"http://{host}:{port}"
    assert f"http://{host}:{port}" in run_batchd("status", address=observed.address).stdout
    told = json.loads(fetch(observed, "/status.json").text)
    assert told["observer"]["up"] is True
    assert told["trainers"] == []


def test_a_daemon_with_no_worker_is_not_ready(start_daemon):
    """The probe's answer has the reason."""
    daemon = start_daemon(http=ANYWHERE, lasting_faults={"worker.starting": "hang"})

    wait_until(lambda: "no worker" in fetch(daemon, "/readyz").text, "it says why it is not ready")

    assert fetch(daemon, "/readyz")[::2] == (503, "no worker is ready\n")
    assert fetch(daemon, "/healthz").status == 200


@pytest.mark.thorough
def test_a_stopped_daemon_is_told_of_by_its_observer(observed):
    """The observer shows the last numbers with their age, until the daemon continues."""
    daemon = observed
    wait_until(lambda: fetch(daemon, "/readyz").status == 200, "it is ready")
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: is_stopped(daemon.pid), "it is stopped")

    wait_until(lambda: fetch(daemon, "/healthz").status == 503, "the silence is noticed", every_s=0.2)

    assert "the daemon's loop has not answered for " in fetch(daemon, "/healthz").text
    assert fetch(daemon, "/readyz").status == 503
    metrics = scrape(daemon)
    assert metrics["up"] == 0
    assert metrics["status_age_seconds"] > 4
    assert metrics["workers{state=ready}"] == 2
    page = json.loads(fetch(daemon, "/overview.json").text)["observer"]
    assert not page["up"]
    assert page["silent_s"] >= 5
    daemon.send(signal.SIGCONT)
    wait_until(lambda: fetch(daemon, "/healthz").status == 200, "the daemon answers again")
    assert scrape(daemon)["up"] == 1


@pytest.mark.slow  # its observer sees a stopped process, too
def test_a_loop_that_hangs_is_told_of(start_daemon, start_trainer):
    """The process has not ended, so no service manager restarts it."""
    daemon = start_daemon(http=ANYWHERE, faults={"daemon.release.received": "hang"})
    wait_until(lambda: fetch(daemon, "/readyz").status == 200, "it is ready")
    trainer = start_trainer(daemon.address)
    trainer.begin(do="take")
    daemon.wait_for_fault("daemon.release.received")

    wait_until(lambda: fetch(daemon, "/healthz").status == 503, "the silence is noticed", every_s=0.2)

    assert scrape(daemon)["up"] == 0
    trainer.kill()


def test_a_killed_observer_comes_back_until_the_daemon_is_killed(start_daemon, start_trainer):
    """The new one has the same address; trainers notice nothing; waiting requests are answered.

    It takes no trainer's place: ``sessions_max`` is for trainers.
    """
    daemon = start_daemon(http=ANYWHERE, sessions_max=1)
    trainer = start_trainer(daemon.address)
    victims = []
    for _ in range(2):
        victims.append(observer_of(daemon))
        os.kill(victims[-1], signal.SIGKILL)
        wait_until(lambda: len(daemon.log_lines("observer ended")) == len(victims), "the daemon knows of its end")
        assert fetch(daemon, "/healthz").status == 200

    assert observer_of(daemon) not in victims
    with pytest.raises(batchd_client.BatchdClientError, match="sessions_max"):
        batchd_client.connect(daemon.address)
    assert len(trainer.take()) == BATCHES
    assert not daemon.log_lines("worker ended")
    observer = observer_of(daemon)
    daemon.kill()
    wait_until(lambda: not is_alive(observer), "the observer has ended")


@pytest.mark.thorough
def test_an_address_that_was_asked_for_and_is_taken_is_refused(tmp_path, photos):
    """The error comes before any scan, with the key and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_settings(
            tmp_path / "batchd.toml",
            {"photos": folder_stream(photos)},
            {"runtime_dir": str(tmp_path / "run"), "http": place},
        )

        message = run_batchd("serve", "-c", config, status=2).stderr

    assert f"daemon.http: cannot listen on {place}: address already in use" in message
    assert 'or to "off"' in message


@pytest.mark.thorough
def test_a_daemon_inside_a_script_has_no_observer(tmp_path, photos, daemons_folder, monkeypatch):
    """The script can request one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemons_folder))
    config = write_settings(
        tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {"workers": 1, "memory": "16MiB"}
    )
    with batchd.serve(config) as address, batchd_client.connect(address) as connection:
        daemon = connection.status()["daemon"]
        assert daemon["http"] is None
        assert children_of(daemon["pid"]) == fork_servers_of(daemon["pid"])
    with (
        batchd.serve(config, overrides={"daemon.http": ANYWHERE}) as address,
        batchd_client.connect(address) as connection,
    ):
        assert connection.status()["daemon"]["http"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:7071", 200),
        ("batchd.example.org", 200),
        ("[::1]:7071", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_a_name_that_is_not_ours_is_refused(observed, host, status):
    """A web page whose name resolves to this machine can read nothing."""
    assert fetch(observed, "/metrics", Host=host).status == status


def test_only_reading_is_answered_and_every_answer_is_closed_in(observed):
    """The test tries methods, unknown paths, and the headers that browsers obey."""
    assert fetch(observed, "/metrics", method="POST").status == 405
    assert fetch(observed, "/nothing").status == 404
    head = fetch(observed, "/metrics", method="HEAD")
    assert (head.status, head.text) == (200, "")
    for reply in (head, fetch(observed, "/nothing"), fetch(observed, "/metrics", Host="evil.example")):
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Cache-Control"] == "no-store"


ASK_AS = """
import os, sys, encodings.idna, http.client
host, port, user = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]); os.setgid(user); os.setuid(user)
for path in ("/status.json", "/", "/history.json", "/metrics"):
    connection = http.client.HTTPConnection(host, port)
    connection.request("GET", path)
    response = connection.getresponse()
    print(response.status, response.read().decode().split("\\n")[0])
"""


@as_root
@pytest.mark.parametrize(("options", "status"), [({}, 403), ({"http_details": True}, 200)])
def test_a_stranger_on_this_machine_sees_numbers_and_no_details(observed, start_daemon, options, status):
    """The kernel gives the user's id; a configuration key can permit details for all users."""
    daemon = start_daemon(http=ANYWHERE, **options) if options else observed
    host, port = place_of(daemon)
    program = [sys.executable, "-I", "-S", "-c", ASK_AS, host, str(port), str(NOBODY)]

    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=True)

    details, *pages, metrics = done.stdout.splitlines()
    assert all(answer.startswith(str(status)) for answer in (details, *pages))
    assert status == 200 or f"ssh -L {port}:localhost:{port}" in details
    assert metrics.startswith("200 ")


def test_the_daemon_is_scraped_at_most_ten_times_a_second(observed):
    """One answer serves all visitors that wait for it, however many they are."""
    began_s = time.monotonic()
    for _ in range(20):
        assert scrape(observed)["up"] == 1

    assert time.monotonic() - began_s >= 1.8
