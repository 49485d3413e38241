"""The table of metrics: complete, bounded, and consistent with page, dashboard and alerts."""

import json
import re
import shutil
import subprocess
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import get_type_hints

import pytest

from batchd.core.fleet import WorkerState
from batchd.observe.http import metrics
from batchd.observe.http.metrics import METRICS, OTHER, OWN, PREFIX, TRAINERS_MAX, Exposition
from batchd.observe.http.routes import why_not_ready
from batchd.observe.http.status_client import Answer
from batchd_wire.status import Counter, DaemonStatus, Gauge, LinkStatistics, ReloadOutcome, WaitStatistics, read_status
from support.statuses import link, status_classes, two_looks, with_pool

ROOT = Path(__file__).parents[3]
NAMES = {PREFIX + metric.name for metric in METRICS} | {PREFIX + name for name, _ in OWN}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)"
)


def claim(session: int, rank: int = 0, **changes: object) -> dict[str, object]:
    """Make a trainer's claim in the status."""
    numbers = dict.fromkeys(("consumed_batches", "held_slots", "ready_ahead"), 1) | {"wait_s": 1.0}
    return {"session": session, "rank": rank, "window": 4, "epoch": 0, "step": 2, "waiting": False, **numbers} | {
        "delivered_samples": 10,
        "waits": {"workers_s": 3.0, "network_s": 4.0},
        **changes,
    }


def trainer(session: int, name: str = "train.py", **changes: object) -> dict[str, object]:
    """Make a trainer in the status."""
    return {"session": session, "name": name, "transport": "shared memory", **changes}


def status(trainers: list[dict], claims: list[dict], **stream: object) -> DaemonStatus:
    """Make the status of a daemon with one stream."""
    parts = [{"name": "read", "busy_s": 1.0}, {"name": "flip", "busy_s": 2.0}, {"name": "flip", "busy_s": 4.0}]
    photos = {"name": "photos", "subscriptions": claims, "work": {"parts": parts}, "live": {}, "cache": {}, **stream}
    daemon = {"version": "1", "decoders": "d", "tcp": {}}
    worker = {"place": 0, "state": "ready"}
    return read_status({"daemon": daemon, "workers": [worker], "trainers": trainers, "streams": [photos]})


class FakeStatusClient:
    """A client that has received an answer."""

    is_answered = True

    def __init__(self, told: DaemonStatus | None) -> None:
        self.told = told

    def fresh(self, _within_s: float) -> Answer | None:
        return Answer(self.told, {}, 0.0, 0.0) if self.told is not None else None


def values(metric: str, told: DaemonStatus) -> dict[tuple[str, ...], float]:
    """Return the values of one metric by its labels."""
    (found,) = [one for one in METRICS if one.name == metric]
    return dict(found.values(told))


def test_every_number_that_has_a_text_is_a_metric():
    """A class of the status whose fields have texts belongs to a scope."""
    texts = {
        (kind, name)
        for kind in status_classes(DaemonStatus)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Counter | Gauge) and mark.help
    }

    assert len(texts) > 80
    assert texts - {(metric.scope.of, metric.key) for metric in METRICS} == set()


def test_reported_values_are_a_histogram():
    """Its buckets are cumulative, and the last one has all finite values."""
    reports = {
        "kept": 3,
        "received": 3,
        "values": 6,
        "sum": 7.5,
        "not_finite": 1,
        "buckets": [1, *[0] * 5, 3, *[0] * 6, 2],
    }
    text = Exposition(FakeStatusClient(status([], [], reports=reports))).text().decode()

    found = re.findall(
        r'^batchd_stream_reported_values(\w+)\{(?:le="(.*?)",)?stream="photos"\} (.*)$', text, re.MULTILINE
    )
    assert [(le, float(count)) for _part, le, count in found if le in {"0.001", "0.3", "1.0", "1000.0", "+Inf"}] == [
        ("0.001", 1),
        ("0.3", 1),
        ("1.0", 4),
        ("1000.0", 4),
        ("+Inf", 6),
    ]
    assert found[-2:] == [("_count", "", "6.0"), ("_sum", "", "7.5")]
    assert "batchd_stream_not_finite_values_total" in text


def test_workers_are_counted_in_every_state_that_there_is():
    """Workers that leave after a reload are counted, too."""
    assert set(metrics.WORKER_STATES) == {state.value for state in WorkerState}


def test_links_are_counted_in_every_state_that_there_is():
    """The metric has every state that the daemon gives to a link."""
    (states,) = re.findall(r"``state``: (.+) or (\w+)\.", LinkStatistics.__doc__ or "")

    assert [*states[0].split(", "), states[1]] == list(metrics.LINK_STATES)


def test_names_say_unit_and_kind():
    """Exactly the counters end in _total, and every name is unique."""
    names = [metric.name for metric in METRICS]
    assert len({*names, *(name for name, _ in OWN)}) == len(names) + len(OWN)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == metric.is_counter, metric.name
        if metric.key.endswith("_s"):
            assert metric.name.removesuffix("_total").endswith("_seconds"), metric.name
        if metric.key.endswith("_bytes"):
            assert metric.name.removesuffix("_total").endswith("_bytes"), metric.name


def test_trainers_of_one_name_are_told_apart():
    """A sum over trainers would fall when one leaves, and would hide one that starves."""
    told = status([trainer(1), trainer(2)], [claim(1), claim(2, step=9)])

    labels = ("photos", "train.py", "0", "shared memory")
    assert values("trainer_delivered_samples_total", told) == {(*labels, "1"): 10, (*labels, "2"): 10}
    assert values("trainer_step", told) == {(*labels, "1"): 2, (*labels, "2"): 9}


def test_claims_of_one_trainer_on_one_stream_are_counted_together():
    """Prometheus rejects two values with the same labels."""
    told = status([trainer(1)], [claim(1), claim(1, step=9)])

    labels = ("photos", "train.py", "0", "shared memory", "1")
    assert values("trainer_delivered_samples_total", told) == {labels: 20}
    assert values("trainer_step", told) == {labels: 9}


def test_who_only_wants_a_look_is_no_trainer():
    """Otherwise each contact sheet of the page would create a series."""
    assert values("trainer_window", status([trainer(1)], [claim(1, is_spectator=True)])) == {}


def test_a_step_that_is_there_twice_has_the_time_of_both():
    """The parts of both steps have the same name, so their time is added."""
    told = status([trainer(1)], [claim(1)])

    assert values("stream_part_seconds_total", told) == {("photos", "read"): 1, ("photos", "flip"): 6}


def test_waiting_is_told_by_its_cause():
    """The metric has the labels of the trainer."""
    told = status([trainer(1)], [claim(1)])

    labels = ("photos", "train.py", "0", "shared memory", "1")
    causes = {"workers": 3, "memory": 0, "trainers": 0, "producers": 0, "network": 4}
    assert values("trainer_wait_cause_seconds_total", told) == {
        (*labels, cause): waited_s for cause, waited_s in causes.items()
    }


def test_a_trainer_at_its_end_has_no_position():
    """A zero would look like the beginning of an epoch, so there is no value."""
    assert values("trainer_epoch", status([trainer(1)], [claim(1, epoch=None, step=None)])) == {}


def test_a_trainer_that_has_only_its_batches_left_is_not_counted():
    """A session can end before its claim does; such a claim has no series."""
    assert values("trainer_held_slots", status([], [claim(1)])) == {("photos", "", "0", "", "1"): 1}


def test_trainers_beyond_the_cap_are_others():
    """The trainers that connected first keep their labels, so new ones do not displace them.

    Counters of the others have no series, because their sum would fall.
    """
    crowd = range(TRAINERS_MAX + 50)
    told = status([trainer(one, f"t{one}") for one in crowd], [claim(one) for one in reversed(crowd)])

    held, delivered = values("trainer_held_slots", told), values("trainer_delivered_samples_total", told)

    assert (len(held), len(delivered)) == (TRAINERS_MAX + 1, TRAINERS_MAX)
    assert held["photos", OTHER, OTHER, OTHER, OTHER] == 50
    assert held["photos", "t0", "0", "shared memory", "0"] == 1
    assert delivered["photos", "t0", "0", "shared memory", "0"] == 10
    assert sum(held.values()) == len(crowd)
    assert len(values("trainer_wait_cause_seconds_total", told)) == len(fields(WaitStatistics)) * TRAINERS_MAX


def pool_of(*links: LinkStatistics, **facts: object) -> DaemonStatus:
    """Make a daemon with worker hosts."""
    looks = two_looks()
    with_pool(looks, *links, **facts)
    return looks[1]


def test_without_a_pool_there_is_no_number_of_it():
    """A metric of zero wanted workers would mislead an autoscaler."""
    text = Exposition(FakeStatusClient(status([], []))).text().decode()

    assert "batchd_workers{" in text
    assert not re.search(r"^batchd_(workers_wanted|pool_|link_)", text, re.MULTILINE)


def test_worker_hosts_are_told_apart_and_counted():
    """A host is labelled by name and link, and each connection of a host is a new link."""
    found = pool_of(link(1), link(2, state="opening", workers=0), wanted=24, cap="the NIC", capped_by="network")

    assert values("workers_wanted", found) == {(): 24}
    assert values("pool_workers", found) == {(): 8}
    assert values("pool_received_bytes_total", found) == {(): 2e8}
    assert values("pool_links", found)["serving",] == values("pool_links", found)["opening",] == 1
    assert values("pool_capped", found) == {("max",): 0, ("network",): 1, ("ring",): 0}
    assert values("link_samples_total", found) == {("node1", "1"): 1_000, ("node2", "2"): 1_000}


def test_worker_hosts_are_counted_by_gateway():
    """A gateway that is down has no value."""
    found = pool_of(link(1), link(2, gateway=2), link(3, gateway=2), gateways=3, gateways_down=(1,))

    assert values("pool_gateway_links", found) == {("0",): 1, ("2",): 2}


def test_worker_hosts_beyond_the_cap_are_others():
    """The hosts above the cap are added up, in gauges alone."""
    found = pool_of(*(link(number, withdrawn=1) for number in range(1, metrics.LINKS_MAX + 4)))

    workers, withdrawn = values("link_workers", found), values("link_withdrawn_orders_total", found)

    assert len(workers) == metrics.LINKS_MAX + 1
    assert workers[OTHER, OTHER] == 3 * 8
    assert len(withdrawn) == metrics.LINKS_MAX
    assert (OTHER, OTHER) not in withdrawn


def test_a_worker_host_may_be_called_like_the_others():
    """The host of that name keeps its own counters."""
    assert values("link_orders_total", pool_of(link(1, name=OTHER))) == {(OTHER, "1"): 50}


def test_remote_trainers_beyond_the_cap_are_others():
    """Remote trainers above the cap are added up in the same way."""
    crowd = range(TRAINERS_MAX + 3)
    told = status([trainer(one, f"t{one}", transport="tcp", sent_bytes=2) for one in crowd], [])

    sent, connections = values("trainer_sent_bytes_total", told), values("trainer_connections", told)

    assert (len(sent), len(connections)) == (TRAINERS_MAX, TRAINERS_MAX + 1)
    assert connections[OTHER, OTHER] == 3


def test_a_stopped_stream_is_a_one():
    """The value is 1; the reason is only in the status."""
    assert values("stream_stopped", status([], [], stopped="too many bad samples")) == {("photos",): 1}
    assert values("stream_stopped", status([], [])) == {("photos",): 0}


def test_a_stream_whose_storage_is_away_is_a_one():
    """The value is 1, beside the seconds so far; the reason is only in the status."""
    told = status([], [], away="/data/photos is empty", away_s=7.5)
    assert values("stream_away", told) == {("photos",): 1}
    assert values("stream_away_seconds", told) == {("photos",): 7.5}
    assert values("stream_away", status([], [])) == {("photos",): 0}


def test_a_reload_that_was_refused_is_told():
    """Before the first reload there is no value."""
    told = status([], [])
    assert values("reload_failed", told) == values("reload_timestamp_seconds", told) == {}

    for code, failed in ((0, 0), (2, 1)):
        told.daemon.reload = ReloadOutcome(1.5e9, code, "why")
        assert values("reload_failed", told) == {(): failed}
        assert values("reload_timestamp_seconds", told) == {(): 1.5e9}


def test_without_an_answer_only_the_observer_speaks():
    """No metric shows a zero that the daemon did not report."""
    text = Exposition(FakeStatusClient(None)).text().decode()

    assert "batchd_up 0.0" in text
    assert "stream" not in text


def test_an_answer_is_written_down_once_however_many_ask(monkeypatch):
    """Only its age, and whether the daemon answers, are computed for each request."""
    client = FakeStatusClient(status([trainer(1)], [claim(1)]))
    answers = [Answer(client.told, {}, 0.0, 0.0), Answer(client.told, {}, 1.0, 1.0)]
    monkeypatch.setattr(client, "fresh", lambda _within_s: answers[0])
    written = []
    table, asked = metrics._Table, Exposition(client)
    monkeypatch.setattr(metrics, "_Table", lambda told: written.append(told) or table(told))

    first, second = asked.text(), asked.text()
    client.is_answered = False
    third = asked.text()
    del answers[0]
    asked.text()

    assert len(written) == 2
    assert b"batchd_up 1.0" in first
    assert b"batchd_up 0.0" in third
    assert first.partition(b"# HELP batchd_info")[2] == third.partition(b"# HELP batchd_info")[2] != b""
    assert first.partition(b"# HELP batchd_info")[0] != second.partition(b"# HELP batchd_info")[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"draining": True}, "the daemon is draining"),
        ({"state": "starting"}, "no worker is ready"),
        ({"stopped": "bad"}, "all streams have stopped; `batchd status` shows the reasons"),
    ],
)
def test_readiness_has_its_reasons(change, reason):
    """The reasons appear in the log of a probe."""
    told = status([], [], **{key: value for key, value in change.items() if key == "stopped"})
    told.daemon.draining = change.get("draining", False)
    told.workers[0].state = change.get("state", "ready")

    assert why_not_ready(told) == reason


def test_the_page_is_up_to_date():
    """docs/metrics.md equals the page that the table generates."""
    spec = spec_from_file_location("make_metrics", ROOT / "docs" / "make_metrics.py")
    maker = module_from_spec(spec)
    spec.loader.exec_module(maker)

    assert (ROOT / "docs" / "metrics.md").read_text() == maker.metrics_markdown(), "run `make docs`"


@pytest.mark.parametrize("file", ["grafana/batchd.json", "prometheus/alerts.yml", "prometheus/alerts_test.yml"])
def test_what_is_deployed_speaks_of_metrics_that_there_are(file):
    """A renamed metric would leave an empty plot, or an alert that never fires."""
    text = (ROOT / "deploy" / file).read_text()

    used = set(re.findall(r"\bbatchd_[a-z_]+", text))

    assert used
    assert used <= NAMES


def test_the_dashboard_has_a_plot_for_each_part_of_the_work():
    """Each panel has a query, and no two panels show the same number."""
    board = json.loads((ROOT / "deploy" / "grafana" / "batchd.json").read_text())
    panels = board["panels"]
    rows = {panel["title"] for panel in panels if panel["type"] == "row"}

    assert {"Throughput", "Trainers", "Rings", "Workers", "Data", "Network", "Live streams"} <= rows
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["expr"] for panel in panels if panel["type"] != "row" for target in panel["targets"])


def test_the_dashboard_shows_what_each_alert_is_about():
    """An alert leads to the dashboard, which has the number that it has fired for."""
    alerts, board = ((ROOT / "deploy" / file).read_text() for file in ("prometheus/alerts.yml", "grafana/batchd.json"))
    metrics = re.findall(r"\bbatchd_[a-z_]+", alerts)

    assert "batchd_stream_away" in metrics
    assert [metric for metric in metrics if metric not in board] == []


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_exposition():
    """The tool promtool accepts the names, types and help texts."""
    text = Exposition(
        FakeStatusClient(status([trainer(1), trainer(2, transport="tcp", sent_bytes=5)], [claim(1)]))
    ).text()

    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@needs_promtool
def test_promtool_finds_the_alerts_right():
    """Each alert fires for its own problem, and no alert fires for a healthy daemon."""
    folder = ROOT / "deploy" / "prometheus"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested():
    """Every alert fires in some test, so a new alert needs a test."""
    folder = ROOT / "deploy" / "prometheus"
    alerts = set(re.findall(r"alert: (\w+)", (folder / "alerts.yml").read_text()))

    assert alerts == set(re.findall(r'alertname="(\w+)"', (folder / "alerts_test.yml").read_text()))
