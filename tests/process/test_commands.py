"""The commands that query a daemon: output and exit status, with and without a daemon."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import cv2
import numpy as np
import pytest

import batchd_client
from batchd_wire.runtime import SYSTEM_DIRECTORY
from support.commands import batchd
from support.expected import Expected
from support.images import write_photos
from support.seen import see
from support.settings import SIDE_PIXELS, STILL_PIPELINE, folder_stream, list_stream, write_settings
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve two streams."""
    return start_shared_daemon(
        {"photos": folder_stream(photos), "check": folder_stream(photos, shuffle=False, pipeline=STILL_PIPELINE)}
    )


def test_status_as_json_agrees_with_what_trainers_counted(daemon):
    """Two trainers read, one of them half an epoch; the JSON has every number in its place."""
    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        first, second = one.stream("photos", epochs=1), other.stream("photos", rank=1, world_size=2, epochs=1)
        seen = see(first), see(second, 1)
        status = json.loads(batchd("status", "--json", address=daemon.address).stdout)
        waits = first.statistics().wait_s, second.statistics().wait_s

    photos = next(stream for stream in status["streams"] if stream["name"] == "photos")
    whole, share = sorted(photos["subscriptions"], key=lambda one: one["rank"])
    assert (whole["consumed_batches"], share["consumed_batches"]) == (len(seen[0]), len(seen[1])) == (5, 1)
    assert whole["epoch"] is None
    assert (share["epoch"], share["step"], share["world_size"]) == (0, 3, 2)
    assert whole["delivered_samples"] == sum(len(batch.samples) for batch in seen[0])
    assert [whole["wait_s"], share["wait_s"]] == pytest.approx(list(waits), abs=0.05)
    assert photos["fingerprint"] == first.fingerprint
    assert (photos["samples"], photos["batch_size"], photos["steps"]) == (40, 8, 5)
    assert status["daemon"]["pid"] == daemon.pid
    assert status["daemon"]["version"] == version("batchd")
    assert {worker["pid"] for worker in status["workers"]} == daemon.worker_pids()
    connected = {trainer["session"] for trainer in status["trainers"]}
    assert len(connected & {whole["session"], share["session"]}) == 2


def test_status_for_people_has_every_stream_trainer_and_worker(daemon):
    """The output is a readable table, without colours because the output is not a terminal."""
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", rank=1, world_size=2), 1)
        printed = batchd("status", address=daemon.address).stdout

    assert printed.startswith(f"batchd {version('batchd')} on {socket.gethostname()}, pid {daemon.pid}, up ")
    assert "simplejpeg" not in printed, "doctor has it"
    for text in ("photos", "check", "40", "5 x 8", "1 of 2", "0:3", *map(str, daemon.worker_pids())):
        assert text in printed
    assert "\x1b" not in printed


def test_a_stream_in_detail_and_the_log_come_from_the_daemon(start_daemon, tmp_path):
    """`batchd status photos` follows a reload; status, `logs` and the log show a bad sample."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"nonsense")
    write_photos(tmp_path, {"dog": 4})
    daemon = start_daemon({"photos": folder_stream(tmp_path, max_bad_fraction=1.0)})
    with batchd_client.connect(daemon.address, name="resnet-50") as connection:
        see(connection.stream("photos", epochs=1))
        printed = batchd("status", "photos", address=daemon.address).stdout
        whole = batchd("status", address=daemon.address).stdout
    for text in ("source", f"folder {tmp_path}", "uint8[", "decode", "resnet-50", "1 sample (batchd bad photos)"):
        assert text in printed
    logs = batchd("logs", address=daemon.address)
    assert "bad sample" in whole.partition("warnings")[2]
    assert "bad sample" in logs.stdout
    assert "serving" in logs.stdout
    assert "the whole log: " in logs.stderr
    assert len(batchd("logs", "--lines", 1, address=daemon.address).stdout.splitlines()) == 1
    (line,) = daemon.log_lines("trainer subscribed")
    assert line["name"] == "resnet-50"

    daemon.config.write_text(daemon.config.read_text().replace("batch_size = 8", "batch_size = 2"))
    daemon.reload()
    assert "uint8[2, " in batchd("status", "photos", address=daemon.address).stdout


def test_the_log_is_followed_until_ctrl_c(daemon):
    """The command prints each line when it is written, here that of a new trainer."""
    words = [sys.executable, "-m", "batchd", "logs", "--follow", "--lines", "0", "--address", daemon.address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        assert follower.stderr.readline() == f"the whole log: {daemon.log_file}\n"
        with batchd_client.connect(daemon.address, name="followed") as connection:
            connection.stream("photos")
            while "name=followed" not in (line := follower.stdout.readline()):
                assert line, "the command ended"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(PATIENCE_S) == 0
        assert follower.stderr.read() == ""


def test_status_shows_odd_names_of_trainers_as_they_are(daemon, monkeypatch):
    """A program may have any name: neither markup nor terminal sequences have an effect."""
    monkeypatch.setattr("sys.argv", ["/bin/[red]train[b]\x1b[2J.py"])
    with batchd_client.connect(daemon.address) as connection:
        connection.stream("photos")
        printed = batchd("status", address=daemon.address).stdout

    assert "[red]train[b]?[2J.py" in printed


def test_status_shows_odd_paths_as_they_are(start_daemon, tmp_path):
    """A stream that stopped names the file in one piece, whatever characters its name has."""
    folder = tmp_path / ("long " * 40) / "[bold]cat["
    folder.mkdir(parents=True)
    file = folder / "red].jpg"
    file.write_bytes(b"broken")
    daemon = start_daemon({"photos": folder_stream(folder.parent, on_error="fail")})
    with batchd_client.connect(daemon.address) as connection, pytest.raises(batchd_client.errors.StreamStopped):
        see(connection.stream("photos"))

    assert str(file)[-200:] in batchd("status", address=daemon.address).stdout


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("stream", ["photos", "check"])
def test_peek_draws_the_first_batch_as_a_trainer_gets_it(daemon, tmp_path, stream):
    """The PNG shows every sample of the batch; the command does not affect the trainers."""
    sheet = tmp_path / "sheet.png"
    with batchd_client.connect(daemon.address) as connection:
        reading = connection.stream(stream, epochs=1)
        seen = see(reading, 2)
        printed = batchd("peek", stream, "-o", sheet, address=daemon.address).stdout
        seen += see(reading)
        images = []
        for batch in connection.stream(stream, epochs=1):
            images += list(batch["image"].copy())
            break
        del batch

    assert printed == f"{sheet}: epoch 0, step 0, 8 samples\n"
    picture = cv2.cvtColor(cv2.imread(str(sheet)), cv2.COLOR_BGR2RGB)
    assert picture.shape[0] >= SIDE_PIXELS
    assert picture.shape[1] >= SIDE_PIXELS
    for image in images:
        assert is_shown(image, picture)
    assert seen == Expected(daemon.config, stream).epoch(0)


def is_shown(image, picture):
    """Tell whether the picture contains the image, pixel by pixel, perhaps enlarged."""
    for factor in range(1, 9):
        enlarged = image.repeat(factor, axis=0).repeat(factor, axis=1)
        if enlarged.shape[0] > picture.shape[0] or enlarged.shape[1] > picture.shape[1]:
            return False
        differences = cv2.matchTemplate(picture, enlarged, cv2.TM_SQDIFF)
        if float(differences.min()) < 1e-3 * np.square(enlarged, dtype=np.float64).sum():
            return True
    return False


@pytest.mark.parametrize("arguments", [("peek", "photo", "-o", "never.png"), ("bad", "photo")])
def test_an_unknown_stream_is_named_together_with_the_one_that_was_meant(daemon, tmp_path, arguments):
    """The command exits with status 1 and writes no file."""
    message = batchd(*arguments, address=daemon.address, folder=tmp_path, status=1).stderr

    assert message == "batchd: there is no stream 'photo'; did you mean photos?\n"
    assert list(tmp_path.iterdir()) == []


def test_peek_says_why_it_cannot_write(daemon, tmp_path):
    """The message has the file's name and the system's reason, without a traceback."""
    message = batchd("peek", "photos", "-o", tmp_path / "no" / "sheet.png", address=daemon.address, status=1).stderr

    assert str(tmp_path / "no" / "sheet.png") in message


def test_bad_says_that_there_is_none(daemon):
    """Without bad samples, `batchd bad` prints a sentence or an empty list."""
    assert batchd("bad", "photos", address=daemon.address).stdout == "no bad samples so far in stream photos\n"
    assert json.loads(batchd("bad", "photos", "--json", address=daemon.address).stdout)["total"] == 0


@pytest.mark.parametrize("where", ["option", "variable", "plain path", "user's directory"])
def test_commands_find_the_daemon(daemon, monkeypatch, tmp_path, where):
    """Commands use ``--address``, the environment variable, or the usual directory."""
    address, options = None, ()
    match where:
        case "option":
            options = ("--address", daemon.address)
        case "variable":
            address = daemon.address
        case "plain path":
            address = str(daemon.runtime_dir)
        case "user's directory":
            with suppress(batchd_client.errors.DaemonNotFound):
                batchd_client.connect(f"ipc://{SYSTEM_DIRECTORY}", connect_timeout_s=0).close()
                pytest.skip(f"the system's own daemon is found first, in {SYSTEM_DIRECTORY}")
            (tmp_path / "batchd").symlink_to(daemon.runtime_dir)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    status = json.loads(batchd("status", "--json", *options, address=address).stdout)
    assert status["daemon"]["pid"] == daemon.pid


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("peek", "photos"), ("bad", "photos")])
def test_without_a_daemon_every_command_ends_with_3(tmp_path, arguments):
    """The message names the address and the remedy."""
    message = batchd(*arguments, address=f"ipc://{tmp_path}", folder=tmp_path, status=3).stderr

    assert (
        f"no batchd daemon could be reached; tried {tmp_path}: the directory exists, but has no lifeline.sock"
        in message
    )
    assert "`batchd serve`" in message


def test_without_a_file_here_commands_name_that_of_the_daemon(daemon, tmp_path):
    """The command that the error has can be typed as it is; for `serve` there is none."""
    told = batchd("replay", "check", "0:1", address=daemon.address, folder=tmp_path, status=2).stderr
    command = f"batchd replay {daemon.config} check 0:1"

    assert f"the daemon at {daemon.address} uses {daemon.config}: `{command}`; `batchd init PATH`" in told
    assert batchd(*command.split()[1:], folder=tmp_path).stdout.startswith("check, epoch 0, step 1: ")
    (problem,) = json.loads(
        batchd("check", "--format", "json", address=daemon.address, folder=tmp_path, status=2).stdout
    )["problems"]
    assert f"the daemon at {daemon.address} uses {daemon.config}: `batchd check {daemon.config}" in problem["help"]
    told = batchd("serve", address=daemon.address, folder=tmp_path, status=2).stderr
    assert f"the daemon at {daemon.address} uses {daemon.config}; `batchd init PATH`" in told


@pytest.mark.thorough
def test_without_a_file_here_the_doctor_names_that_of_the_daemon(daemon, tmp_path):
    """The doctor goes on with the machine, which takes some seconds."""
    examined = batchd("doctor", "--json", address=daemon.address, folder=tmp_path).stdout
    assert f"the daemon at {daemon.address} uses {daemon.config}: `batchd doctor {daemon.config}`" in examined


def test_a_killed_daemon_is_no_daemon(start_daemon):
    """A killed daemon's sockets remain, yet the commands report that no daemon runs."""
    daemon = start_daemon()
    daemon.kill()
    assert "no process listens on it any more" in batchd("status", address=daemon.address, status=3).stderr


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("stauts",), "there is no command 'stauts'; did you mean status?"),
        (("peek",), "missing argument 'STREAM'"),
        (("status", "--jsn"), "there is no option --jsn; did you mean --json?"),
        (("serve", "--set", "nonsense"), "'nonsense' is not PATH=VALUE"),
        (("serve", "-c", "none.toml"), "none.toml"),
    ],
)
def test_wrong_usage_ends_with_2(tmp_path, arguments, text):
    """The message quotes the wrong argument."""
    assert text in batchd(*arguments, folder=tmp_path, status=2).stderr


def test_version_and_help_need_no_daemon(tmp_path):
    """The help lists every command and every exit code."""
    assert batchd("--version", folder=tmp_path).stdout == f"batchd {version('batchd')}\n"
    overview = batchd("--help", folder=tmp_path).stdout
    for word in ("serve", "check", "config", "status", "peek", "bad", "Exit codes", "BATCHD_ADDRESS"):
        assert word in overview
    for command in ("serve", "check", "config", "status", "peek", "bad"):
        assert "Usage: batchd " + command in batchd(command, "--help", folder=tmp_path).stdout


def test_the_log_says_once_what_workers_decode_with(daemon):
    """The log has the same words for it as `batchd status`."""
    [line] = daemon.log_lines("decoding")

    assert line["decoders"] == daemon.status()["daemon"]["decoders"]
    assert line["level"] == "info"


def test_what_check_passes_serves_and_what_it_refuses_does_not(daemon, tmp_path):
    """The printed default configuration with a user's source is valid for both commands."""
    checked = batchd("check", daemon.config).stdout
    assert f"{daemon.config} is fine: 2 workers" in checked

    broken = tmp_path / "batchd.toml"
    broken.write_text(Path(daemon.config).read_text().replace("batch_size", "batchsize"))
    for command in (("check", broken), ("serve", "-c", broken)):
        message = batchd(*command, status=2).stderr
        assert "streams.photos.batchsize" in message
        assert "batch_size" in message


def test_check_says_all_of_it_in_one_round_with_lines(tmp_path):
    """Problems are a wrong value, a missing source, a step, and a missing list item in --set."""
    config = tmp_path / "batchd.toml"
    config.write_text(
        f'[daemon]\nruntime_dir = "{tmp_path}/run"\n[streams.a]\nbatch_size = "2"\n'
        'source = { type = "folder", path = "photos" }\n'
        'pipeline = [\n{ op = "decode" },\n{ op = "resize", field = "imge", size = [8, 8] },\n]\n'
    )
    message = batchd("check", config, "--set", "streams.a.pipeline.2.size=[4, 4]", status=2).stderr

    assert f"{config} has 4 problems:" in message
    assert f'{config}:4: streams.a.batch_size: must be an integer, such as 256, not "2"' in message
    assert f"{config}:5: streams.a.source.path: there is no folder {tmp_path}/photos" in message
    assert f"{config}:8: streams.a.pipeline[1].field: " in message
    assert "did you mean 'image'?" in message
    assert "cannot be set by --set streams.a.pipeline.2.size: streams.a.pipeline has 2 items, numbers 0 to 1" in message


@pytest.mark.thorough
def test_a_source_without_samples_ends_the_start_with_file_and_line(tmp_path):
    """The exit status is 2, with the first problem that `check` lists; no stream is served."""
    for name, content in {"empty": "", "bare": "a.jpg\n", "wordy": "a.jpg 0\nb.jpg one\n"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "photos").mkdir()
    wrong = {
        "empty": f"the list {tmp_path}/empty names no sample",
        "bare": f"{tmp_path}/bare:1: not a path, a space and a whole number: a.jpg",
        "wordy": f"{tmp_path}/wordy:2: not a path, a space and a whole number: b.jpg one",
        "photos": f"{tmp_path}/photos holds no image",
    }
    streams = {name: list_stream(tmp_path / name, tmp_path) for name in ("empty", "bare", "wordy")}
    streams["photos"] = folder_stream(tmp_path / "photos")
    config = write_settings(
        tmp_path / "batchd.toml", streams, {"runtime_dir": str(tmp_path / "run"), "memory": "16MiB"}
    )

    checked = batchd("check", config, status=2).stderr
    for name, words in wrong.items():
        assert f"streams.{name}.source: {words}" in checked
    assert f"streams.empty.source: {wrong['empty']}" in batchd("serve", "-c", config, status=2).stderr
