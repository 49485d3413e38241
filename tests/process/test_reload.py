"""Reloads while trainers read: kept streams are untouched, removed ones end, nothing remains."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import batchd
import batchd_client
from batchd.daemon.reload.requests import NICENESS
from batchd.runtime.slots import SLOT_DESCRIPTORS
from batchd_client.errors import StreamChanged, StreamRemoved, StreamStopped
from support.commands import batchd as command
from support.expected import Expected
from support.images import write_photos
from support.kernel import descriptors_of
from support.producers import frame, push_stream, read
from support.settings import folder_stream, write_settings
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

RELOADS = (4, 100)
"""Each is a process that imports, reads and scans, so only the long tests have a hundred."""
BATCHES_A_CYCLE = 10


class Reloading:
    """Start a daemon whose configuration changes. ``others`` are served beside ``photos``."""

    def __init__(self, start_daemon, photos, others=None, **options):
        self.photos = photos
        self.daemon = start_daemon({"photos": self.stream(), **(others or {})}, **options)

    def stream(self, **changes):
        return folder_stream(self.photos, **{"batch_size": 4, "memory": "1MiB", **changes})

    def write(self, streams, **daemon):
        settings = {
            "runtime_dir": str(self.daemon.runtime_dir),
            "workers": 2,
            "memory": "64MiB",
            "http": "off",
            **daemon,
        }
        write_settings(self.daemon.config, streams, settings)

    def reload(self, streams, exit_code=0, **daemon):
        """Change the file, reload it, and return the command's output."""
        self.write(streams, **daemon)
        return self.daemon.reload(exit_code)

    def serves(self):
        return {stream["name"] for stream in self.daemon.status()["streams"]}


@pytest.fixture
def reloading(start_daemon, photos):
    def start(**options):
        return Reloading(start_daemon, photos, **{"memory": "64MiB", **options})

    return start


def test_streams_are_added_removed_and_left_alone(reloading):
    """The command, the status and the log all report the changes.

    A trainer of a removed stream keeps its batches and gets an error; the last lease frees the
    memory.
    """
    it = reloading()

    assert it.reload({"photos": it.stream(), "more": it.stream(seed=5)}) == "added more"
    assert it.serves() == {"photos", "more"}
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("more") as stream:
        assert len(list(connection.stream("more", epochs=1))) == 10
        held = next(iter(stream))
        before = held["image"].copy()
        it.write({"photos": it.stream()})
        dry = command("reload", "--dry-run", address=it.daemon.address)
        assert re.fullmatch(r"removed more\n  more: ends \S+ at 0:1\n", dry.stdout)
        kept = command("reload", "--keep-trainers", address=it.daemon.address, status=1)
        assert kept.stderr == f"batchd: nothing has changed, since trainers would end:\n{dry.stdout}"
        assert it.serves() == {"photos", "more"}
        assert it.daemon.log_lines("configuration not reloaded") == []
        assert it.daemon.status()["daemon"]["reload"]["exit_code"] == 0
        assert command("reload", address=it.daemon.address).stdout == dry.stdout
        with pytest.raises(StreamRemoved, match="more"):
            read_on(stream)
        assert (held["image"] == before).all()
        assert it.daemon.status()["daemon"]["ending_slots"] >= 1
        held.release()
        stream.close()
        connection.status()
        wait_until(lambda: not it.daemon.status()["daemon"]["ending_slots"], "the last slot is released")
    assert it.serves() == {"photos"}
    assert it.reload({"photos": it.stream()}) == "nothing has changed"
    outcome = it.daemon.status()["daemon"]["reload"]
    assert (outcome["exit_code"], outcome["text"]) == (0, "nothing has changed")
    assert len(it.daemon.log_lines("configuration reloaded")) == 3
    assert "last reload" in command("status", address=it.daemon.address).stdout


def test_what_becomes_of_each_setting_is_said_before_and_after(reloading):
    """Trainers continue where the batches stay the same."""
    it = reloading()
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("photos") as stream:
        next(iter(stream))
        it.write({"photos": it.stream(window=3)})
        same = command("reload", "--dry-run", "--keep-trainers", address=it.daemon.address).stdout
        assert same == "changed photos\n  photos: window: 4 became 3\n"
        assert command("reload", "--keep-trainers", address=it.daemon.address).stdout == same
        assert next(iter(stream)).step == 1
        it.write({"photos": it.stream(window=3, batch_size=8, cache="encoded", cache_memory="1MiB")})
        other = command("reload", "--dry-run", address=it.daemon.address).stdout.splitlines()
        assert other[:2] == ["changed photos", "  photos: batch_size: 4 became 8"]
        assert '  photos: cache: nothing became "encoded"' in other
        assert re.fullmatch(r"  photos: ends \S+ at 0:2", other[-1])
    assert it.daemon.status()["daemon"]["reload"]["text"] == same.rstrip("\n")


@pytest.mark.thorough
def test_what_is_wrong_is_said_in_full_and_the_old_configuration_stays(reloading):
    """The output lists the problems of `batchd check`; a file that is not TOML has one, too.

    A stream that does not fit beside the kept ones is a problem as well: no ring shrinks for it.
    """
    it = reloading()
    said = it.reload({"photos": it.stream(), "large": it.stream(memory="63MiB")}, exit_code=5, memory="63MiB")
    assert "[daemon]" in said
    for streams in ({"photos": it.stream(batch_size=0, seed=-1)}, {"photos": it.stream() | {"window": 99}}):
        said = it.reload(streams, exit_code=2)
        checked = json.loads(command("check", it.daemon.config, "--format", "json", status=2).stdout)["problems"]
        for one in checked:
            assert f"  {it.daemon.config}:{one['line']}: {one['key']}: {one['problem']}" in said
        assert it.daemon.status()["daemon"]["reload"]["text"] in said
    it.daemon.config.write_text("[daemon\n")
    assert "is not TOML" in command("reload", address=it.daemon.address, status=2).stderr
    assert it.serves() == {"photos"}
    assert len(it.daemon.log_lines("configuration not reloaded")) == 4
    assert "refused" in command("status", address=it.daemon.address).stdout
    with batchd_client.connect(it.daemon.address) as connection:
        assert len(list(connection.stream("photos", epochs=1))) == 10


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("descriptors_max", "holds_blanks"), [(8_000, False), (1_000, True)])
def test_a_trainer_of_a_stream_with_another_window_goes_on_where_it_stands(reloading, descriptors_max, holds_blanks):
    """The trainer gets each batch once, in order, and keeps its slots; no descriptor is lost.

    Slots that are not made have descriptors only where strangers could take the last ones.
    """
    it = reloading(descriptors_max=descriptors_max)
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("photos", epochs=2) as stream:
        expected = Expected(it.daemon.config)
        held = next(iter(stream))
        before = held["image"].copy()
        seen = [tuple(held["index"].tolist())]
        for number, batch in enumerate(iter(lambda: stream.take(0), None)):
            seen.append(tuple(batch["index"].tolist()))
            if number == 2:
                assert it.reload({"photos": it.stream(window=7, memory="2MiB")}) == "changed photos"
        assert seen == [one.samples for one in expected.epoch(0)]
        assert stream.window == 7
        assert (held["image"] == before).all()
        assert stream.statistics().resubscribed == 1
        held.release()
        read_on(connection.stream("photos", epochs=2))
    ring = it.daemon.stream_status()
    assert 0 < ring["slots"] < ring["slots_max"]
    wait_until(
        lambda: descriptors_expected(it.daemon, holds_blanks) == slot_descriptors(it.daemon), "each slot has its own"
    )


def descriptors_expected(daemon, holds_blanks):
    """The descriptors of the slots that are made, or of all."""
    return SLOT_DESCRIPTORS * daemon.stream_status()["slots_max" if holds_blanks else "slots"]


def slot_descriptors(daemon):
    return sum("memfd:batchd-slot" in name for name in descriptors_of(daemon.pid).values())


@pytest.mark.thorough
def test_a_trainer_of_a_stream_with_other_batches_is_told_so(reloading):
    """A restart with another configuration does the same; new trainers get the new stream."""
    it = reloading()
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("photos") as stream:
        next(iter(stream)).release()
        it.reload({"photos": it.stream(seed=99)})
        with pytest.raises(StreamChanged, match=r"seed: \d+ became 99"):
            read_on(stream)
        with connection.stream("photos", epochs=1) as new:
            assert len(list(new)) == 10


@pytest.mark.thorough
def test_workers_come_and_go_without_a_death(reloading):
    """Surplus workers finish their orders; no row is lost, and no death is counted."""
    it = reloading()
    trainer = TrainerProcess(it.daemon.address, epochs=2)
    trainer.begin(do="take")
    try:
        for workers in (4, 1):
            said = it.reload({"photos": it.stream()}, workers=workers)
            assert f"to {workers}" in said
            wait_until(lambda count=workers: len(it.daemon.worker_pids()) == count, "the number of workers is right")
        trainer.ready()
        seen, _ = trainer.finish()
    finally:
        trainer.close()
    expected = Expected(it.daemon.config)
    assert seen == expected.epoch(0) + expected.epoch(1)
    assert it.daemon.status()["daemon"]["worker_deaths"] == 0


@pytest.mark.thorough
def test_a_stopped_stream_restarts_with_a_reload_once_the_cause_is_mended(start_daemon, tmp_path):
    """Neither the stream's settings nor anything that a scan finds has changed."""
    write_photos(tmp_path, {"cat": 40}, height=72, width=96)
    spoilt = min((tmp_path / "cat").iterdir())
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[: len(good) // 2])
    stream = folder_stream(tmp_path, batch_size=4, on_error="fail")
    it = Reloading(start_daemon, tmp_path, {"photos": stream})
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("photos") as reader:
        with pytest.raises(StreamStopped):
            read_on(reader)
        assert it.daemon.stream_status()["stopped"]
        spoilt.write_bytes(good)
        assert it.reload({"photos": stream}) == "revived photos"
        assert it.daemon.log_lines("configuration reloaded")[-1]["revived"] == "photos"
        assert it.daemon.stream_status()["stopped"] is None
        with connection.stream("photos", epochs=1) as again:
            assert len(list(again)) == 10
    assert it.reload({"photos": stream}) == "nothing has changed"


@pytest.mark.thorough
def test_keys_of_the_daemon_that_have_changed_are_named(reloading):
    """The command names them even if no stream changed; some apply, others need a restart."""
    it = reloading()
    said = it.reload({"photos": it.stream()}, sample_timeout_s=7.0, drain_timeout_s=1.0)
    assert said == "[daemon] sample_timeout_s, drain_timeout_s changed"
    assert it.daemon.log_lines("configuration reloaded")[-1]["keys"] == "sample_timeout_s, drain_timeout_s"
    said = it.reload({"photos": it.stream()}, workers=3, memory="32MiB", tcp="127.0.0.1:1", http="127.0.0.1:2")
    assert said == (
        "workers 2 to 3; [daemon] memory, sample_timeout_s, drain_timeout_s changed; "
        "[daemon] tcp, http need a restart, and stay as they were until then"
    )
    it.reload({"photos": it.stream()}, runtime_dir=str(it.daemon.runtime_dir) + "2", writable_slots=True)
    (*_, line) = it.daemon.log_lines("restart needed")
    assert line["keys"] == "runtime_dir, writable_slots"


def test_what_a_reload_logs_looks_like_the_rest_of_the_log(reloading, tmp_path):
    """The scan's process sends the lines, and the daemon writes them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    it = reloading(cache_dir=str(cache))
    it.reload({"photos": it.stream()}, cache_dir=str(cache))
    first, second = it.daemon.log_lines("no index is kept or used: others may write into the folder")
    assert first.keys() == second.keys()
    assert (second["level"], second["folder"]) == ("warning", str(cache))


def test_a_hangup_during_the_first_scan_is_done_after_it(start_daemon, photos):
    """The signal does not end the daemon, which then serves what the file says by that time."""
    daemon = start_daemon(ready=False, faults={"daemon.starting": "stop"})
    daemon.wait_for_fault("daemon.starting")
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    write_settings(daemon.config, {"photos": folder_stream(photos), "more": folder_stream(photos, seed=5)}, settings)
    daemon.send(signal.SIGHUP)
    daemon.send(signal.SIGCONT)
    daemon.wait_ready()
    wait_until(lambda: daemon.log_lines("configuration reloaded"), "it is done")
    assert {stream["name"] for stream in daemon.status()["streams"]} == {"photos", "more"}


@pytest.mark.thorough
def test_a_change_that_is_taken_back_while_it_is_read_is_taken_back(reloading, photos):
    """The second reading begins when the first one ends, and sees its changes."""
    it = reloading(others={"more": folder_stream(photos, seed=5)}, faults={"rescan.sent": "stop"})
    it.write({"photos": it.stream()})
    it.daemon.send(signal.SIGHUP)
    reader = it.daemon.wait_for_fault("rescan.sent")
    it.write({"photos": it.stream(), "more": folder_stream(photos, seed=5)})
    it.daemon.send(signal.SIGHUP)
    it.daemon.status()  # its answer shows that the loop has seen the signal
    os.kill(reader, signal.SIGCONT)
    wait_until(lambda: len(it.daemon.log_lines("configuration reloaded")) == 2, "both are done")
    changes = [(line["added"], line["removed"]) for line in it.daemon.log_lines("configuration reloaded")]
    assert changes == [("", "more"), ("more", "")]
    assert it.serves() == {"photos", "more"}


def test_reading_the_configuration_gives_way_to_workers_trainers_and_the_end(reloading):
    """The reader yields from the start of its imports. A waiting user hears of the daemon's end."""
    it = reloading(faults={"rescan.starting": "stop"})
    it.daemon.send(signal.SIGHUP)
    reader = it.daemon.wait_for_fault("rescan.starting")
    usual = os.getpriority(os.PRIO_PROCESS, it.daemon.pid)
    assert os.getpriority(os.PRIO_PROCESS, reader) == min(usual + NICENESS, 19)
    assert it.daemon.terminate() == 0
    assert it.daemon.log_lines("configuration not reloaded")[-1]["reason"] == "the daemon is shutting down"


@pytest.mark.thorough
@pytest.mark.parametrize("reloads", [RELOADS[0], pytest.param(RELOADS[1], marks=pytest.mark.slow)])
def test_many_reloads_leave_two_trainers_exact_and_nothing_behind(reloading, reloads):
    """A stream is added, read and removed each time; two trainers read another one throughout."""
    it = reloading()
    daemon = it.daemon
    trainers = [TrainerProcess(daemon.address, epochs=1000).ready() for _ in range(2)]
    seen = [[], []]
    with_more = {"photos": it.stream(), "more": it.stream(seed=5)}
    try:
        cycle(it, with_more, trainers, seen)
        wait_until(lambda: settled(it) and not has_strays(daemon), "the first stream has ended")
        before = possessions(daemon)
        for _ in range(reloads // 2 - 1):
            cycle(it, with_more, trainers, seen)
        wait_until(
            lambda: possessions(daemon) == before, f"nothing is left of the streams: {possessions(daemon)} {before}"
        )
        wait_until(lambda: not has_strays(daemon), "the slots and indexes of removed streams are unmapped")
    finally:
        for trainer in trainers:
            trainer.close()
    expected = Expected(daemon.config)
    batches = [one for epoch in range(len(seen[0]) // 10 + 1) for one in expected.epoch(epoch)]
    for each in seen:
        assert each == batches[: len(each)]
    assert daemon.status()["daemon"]["worker_deaths"] == 0


def read_on(stream):
    """Read the rest."""
    for batch in stream:
        batch.release()


def cycle(it, with_more, trainers, seen):
    """Add a stream, read some of it, and remove it, while both trainers read."""
    for trainer in trainers:
        trainer.begin(do="take", batches=BATCHES_A_CYCLE)
    it.write(with_more)
    it.daemon.reload()
    with batchd_client.connect(it.daemon.address) as connection, connection.stream("more") as more:
        next(iter(more)).release()
    it.write({"photos": it.stream()})
    it.daemon.reload()
    for so_far, trainer in zip(seen, trainers, strict=True):
        so_far.extend(trainer.finish()[0])


def settled(it):
    status = it.daemon.status()
    return not status["daemon"]["ending_slots"] and it.serves() == {"photos"}


def possessions(daemon):
    """Count descriptors of daemon and workers by kind. A busier worker may map a stream's first."""
    found = {}
    for pid in (daemon.pid, *sorted(daemon.worker_pids())):
        kinds = {}
        for name in descriptors_of(str(pid)).values():
            kind = name.split(":")[0] if not name.startswith("/memfd") else name
            kinds[kind] = kinds.get(kind, 0) + 1
        # The ring of the kept stream may grow; see below.
        kinds.pop("/memfd:batchd-slot (deleted)", None)
        if pid != daemon.pid:
            kinds.pop("/memfd:batchd-index (deleted)", None)
        found[pid] = kinds
    return found


def has_strays(daemon):
    """Tell whether a worker has a slot, or an index, that does not belong to the served stream."""
    slots = daemon.stream_status()["slots"]
    return any(mappings(pid, "slot") > slots or indexes_of(pid) > 1 for pid in daemon.worker_pids())


def indexes_of(pid):
    descriptors = sum("memfd:batchd-index" in name for name in descriptors_of(pid).values())
    return max(descriptors, mappings(pid, "index"))


def mappings(pid, what):
    """Return how many slots, or indexes, a process has mapped."""
    return sum(f"memfd:batchd-{what}" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.thorough
def test_a_push_stream_keeps_its_mailbox_unless_it_has_changed(start_daemon, photos, tmp_path):
    """The next batch has the queued samples; the mailbox of a changed stream loses them.

    Later samples are safe: producers switch to the new mailbox. The journal has both batches.
    """
    live = {**push_stream(), "memory": "8MiB", "journal": "64KiB"}
    it = Reloading(start_daemon, photos, {"live": live}, memory="64MiB", cache_dir=str(tmp_path))

    def put(*numbers):
        assert all(producer.put(frame(number)) for number in numbers)

    with (
        batchd_client.connect(it.daemon.address) as connection,
        batchd_client.push("live", it.daemon.address) as producer,
    ):
        put(0, 1)
        it.reload({"photos": it.stream(seed=8), "live": live}, cache_dir=str(tmp_path))
        put(2, 3)
        assert read(connection.stream("live"), 1) == [0, 1, 2, 3]
        put(4, 5)
        it.reload({"photos": it.stream(seed=8), "live": {**live, "window": 2}}, cache_dir=str(tmp_path))
        put(6, 7, 8, 9)
        assert read(connection.stream("live"), 1) == [6, 7, 8, 9]
    journal = batchd.journal(it.daemon.config, "live")
    assert [one.fields["label"].tolist() for one in journal.at((0, 0))] == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_a_daemon_of_a_script_has_no_configuration_to_read_again(photos, tmp_path):
    """The command's error says so."""
    streams = {"photos": folder_stream(photos)}
    with batchd.serve(write_settings(tmp_path / "batchd.toml", streams, {"workers": 1, "memory": "64MiB"})) as address:
        said = command("reload", address=address, status=1).stderr
    assert "serves one script" in said
