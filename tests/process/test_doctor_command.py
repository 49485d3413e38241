"""`batchd doctor` on this machine: the command reports what the machine has, and ends."""

import json

import pytest

from batchd.commands.doctor import decoding
from batchd.commands.doctor.decoding import DecoderSpeed
from support import commands
from support.commands import batchd
from support.settings import folder_stream, write_settings
from support.waiting import wait_until

SUBJECTS = {
    "configuration",
    "memory",
    "processors",
    "JPEG decoder",
    "open files",
    "kernel",
    "clock",
    "runtime directory",
    "libraries",
    "daemon",
}


@pytest.fixture
def config(tmp_path, photos):
    daemon = {"runtime_dir": str(tmp_path / "run"), "workers": 1, "memory": "8MiB"}
    return write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, daemon)


@pytest.mark.thorough
def test_a_configuration_is_looked_at_with_its_sources(config, tmp_path, photos):
    """The command needs no daemon; each finding is one line, and its remedy another."""
    text = batchd("doctor", "-c", config, "--address", tmp_path / "run").stdout

    lines = text.splitlines()
    assert {line[9:29].strip() for line in lines if not line.startswith(" ")} >= SUBJECTS | {"storage of photos"}
    assert f"storage of photos     {photos} (" in text
    assert "no batchd daemon could be reached" in text
    assert "\x1b" not in text


@pytest.fixture
def within(monkeypatch):
    """Run the command in this process, without measuring a decoder."""
    monkeypatch.setattr(commands, "PROCESSES", set())
    monkeypatch.setattr(decoding, "measure_decoders", lambda: [DecoderSpeed("simplejpeg", 3.8, 7.9)])


@pytest.mark.usefixtures("within")
def test_no_configuration_is_no_problem_and_a_wrong_one_is(tmp_path):
    """The command checks the rest of the machine in both cases."""
    without = json.loads(batchd("doctor", "--json", folder=tmp_path).stdout)
    assert {one["subject"]: one["level"] for one in without["findings"]}["configuration"] == "note"

    (tmp_path / "batchd.toml").write_text("[daemon]\nworkers = -1\n")
    wrong = json.loads(batchd("doctor", "--json", folder=tmp_path, status=1).stdout)
    findings = {one["subject"]: one for one in wrong["findings"]}
    assert findings["configuration"]["level"] == "problem"
    assert findings["configuration"]["advice"] == "batchd check batchd.toml"
    assert findings["kernel"]["level"] == "ok"


@pytest.mark.usefixtures("within")
def test_a_configuration_that_is_asked_for_has_to_be_there(tmp_path):
    """A missing file that the user named is an error, as with every other command."""
    assert "nothing.toml" in batchd("doctor", "-c", tmp_path / "nothing.toml", status=1).stdout


@pytest.mark.thorough
def test_json_has_the_findings_and_a_daemon_that_runs(start_daemon):
    """The JSON has the daemon's version and process; its memory does not count as missing."""
    daemon = start_daemon(reserve="start")
    wait_until(lambda: daemon.status()["daemon"]["memory_bytes"] > 0, "the ring has memory")
    told = json.loads(batchd("doctor", "-c", daemon.config, "--json", address=daemon.address).stdout)

    assert {one["subject"] for one in told["findings"]} >= SUBJECTS | {"storage of photos"}
    assert told["counts"]["problem"] == 0
    assert sum(told["counts"].values()) == len(told["findings"])
    assert all(one["advice"] for one in told["findings"] if one["level"] in ("warning", "problem"))
    (found,) = [one for one in told["findings"] if one["subject"] == "daemon"]
    assert found["level"] == "ok"
    assert f"pid {daemon.pid}" in found["found"]
    (memory,) = [one for one in told["findings"] if one["subject"] == "memory"]
    assert "in slots of the running daemon" in memory["found"]
