"""Streams that trainers derive: `set=` over one of the file, as long as one of them lives."""

import json
import os
import signal
from itertools import islice

import pytest

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_client.errors import KeyRefused, SettingsInvalid, StateMismatch, StreamChanged, StreamRemoved
from batchd_wire.keys import connection_file_text
from support.commands import batchd as command
from support.expected import Expected
from support.kernel import children_called
from support.network import free_port
from support.seen import see
from support.settings import PIPELINE, SLOT_BYTES, folder_stream
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

SCALE = {"pipeline.1.scale": [0.5, 1.0]}
STRONG = [PIPELINE[0], {**PIPELINE[1], "scale": [0.5, 1.0]}, PIPELINE[2]]
"""What a file would have for them."""


@pytest.fixture
def serving(start_daemon, photos):
    """Start a daemon that allows it, with a stream of photographs, and others."""

    def start(others=None, **options):
        streams = {"photos": folder_stream(photos, memory="1MiB"), **(others or {})}
        return start_daemon(streams, **{"derive": True, **options})

    return start


def served(daemon):
    return {stream["name"] for stream in daemon.status()["streams"]}


def test_a_derived_stream_is_the_one_that_the_file_would_have(serving, photos):
    """Fingerprint, bytes and states are the same; two trainers share what is decoded."""
    daemon = serving({"strong": folder_stream(photos, pipeline=STRONG, batch_size=4, memory="1MiB")})
    settings = {**SCALE, "batch_size": 4}

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        first, second = (connection.stream("photos", set=settings, epochs=1) for connection in (one, other))
        assert (first.name, second.name) == ("photos+1", "photos+1")
        assert first.fingerprint == one.stream("strong").fingerprint
        expected = Expected(daemon.config, "strong").epoch(0)
        for place in range(len(expected)):
            assert see(first, 1) == see(second, 1) == [expected[place]]
        status = daemon.stream_status("photos+1")
        assert status["decoded_batches"] == len(expected)
        assert status["description"]["pipeline"][1].startswith("random_resized_crop(size=[32, 32], scale=[0.5, 1.0]")
        assert "photos+1" in command("status", address=daemon.address).stdout
        shown = command("status", "photos+1", address=daemon.address).stdout
        assert 'set          {"batch_size":4,"pipeline.1.scale":[0.5,1.0]}' in shown
        report = one.bad("photos+1")
        assert report.total == 0
    wait_until(lambda: served(daemon) == {"photos", "strong"}, "it ends with its last trainer")
    assert len(daemon.log_lines("stream derived")) == len(daemon.log_lines("derived stream ended")) == 1


def test_streams_of_one_order_share_pictures_and_keep_their_bytes_while_workers_die(serving, photos):
    """A worker decodes for all of them at once; one that is killed takes the pictures with it."""
    daemon = serving({"strong": folder_stream(photos, pipeline=STRONG, memory="1MiB")})
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream(name, epochs=2) for name in ("photos", "strong")]
        streams.append(connection.stream("photos", set={"pipeline.1.scale": [0.2, 0.9]}, epochs=2))
        for epoch in range(2):
            wanted = [Expected(daemon.config, stream.name).epoch(epoch) for stream in streams[:2]]
            for place, batches in enumerate(zip(*wanted, strict=True)):
                assert [see(stream, 1) for stream in streams[:2]] == [[batch] for batch in batches]
                see(streams[2], 1)
                if place == 1:
                    os.kill(
                        next(worker["pid"] for worker in daemon.status()["workers"] if worker["pid"]), signal.SIGKILL
                    )
        work = [daemon.stream_status(stream.name)["work"] for stream in streams]
    assert sum(one["shared_samples"] for one in work) > 0


def test_a_derived_stream_ends_with_its_last_trainer_also_one_that_is_killed(serving):
    """Its memory is free then, and its name."""
    daemon = serving()
    trainers = [TrainerProcess(daemon.address, set=SCALE, epochs=9) for _ in range(2)]
    try:
        for trainer in trainers:
            trainer.ready().hold(1)
        trainers[0].kill()
        trainers[1].take(2)
        assert served(daemon) == {"photos", "photos+1"}
        trainers[1].kill()
    finally:
        for trainer in trainers:
            trainer.close()
    wait_until(lambda: served(daemon) == {"photos"}, "it ends")
    wait_until(lambda: not daemon.status()["daemon"]["ending_slots"], "its memory is free")
    assert daemon.status()["daemon"]["memory_bytes"] == 0


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_loop_goes_on_after_a_restart_and_so_does_a_saved_state(serving, how):
    """The client asks with the same settings, and gets the same batches."""
    daemon = serving()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", set=SCALE, epochs=2)
        fingerprint = stream.fingerprint
        before = see(stream, 2)
        state = json.loads(json.dumps(stream.state_dict()))
        getattr(daemon, how)()
        daemon.start()
        rest = see(stream, 2)
        assert stream.fingerprint == fingerprint
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("photos", state=state), 2) == rest
        assert see(connection.stream("photos", set=SCALE), 2) == before
        assert state["stream"] == "photos"
        with pytest.raises(StateMismatch, match="scale changed"):
            connection.stream("photos", set={}, state=state)


@pytest.mark.thorough
def test_batches_of_a_derived_stream_are_replayed_from_its_card(serving, tmp_path):
    """The card has the settings; neither the daemon nor its file is needed."""
    daemon = serving()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", set=SCALE)
        (batch,) = islice(stream, 1)
        state = stream.state_dict(card=True)
        rows, crc32 = batch["image"].copy(), batch.crc32()
        assert (connection.stream("photos", set=SCALE).at(0, 0)["image"] == rows).all()
        command("replay", "photos+1", "0:0", "--running", "--verify", f"{crc32:08x}", address=daemon.address)
    daemon.terminate()
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))

    assert state["card"]["configuration"]["streams"]["photos"]["pipeline"][1]["scale"] == [0.5, 1.0]
    command("replay", "photos", "--card", file, "--back", "1", "--verify", f"{crc32:08x}")


def test_where_it_is_not_allowed_a_trainer_is_told_so(start_daemon, photos):
    """The sentence names the key of the operator; the connection stays."""
    daemon = start_daemon({"photos": folder_stream(photos)})
    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(SettingsInvalid, match=r"derive = true in \[daemon\]"):
            connection.stream("photos", set=SCALE)
        with pytest.raises(SettingsInvalid, match="set: "):
            connection.stream("photos", set={"seed": object()})
        assert len(see(connection.stream("photos"), 1)) == 1
    assert not children_called(daemon.pid, b"batchd.daemon.derive.process")


def test_mistakes_and_excess_are_refused_and_the_next_stream_is_derived(serving):
    """Each is said at the trainer, and costs the daemon nothing."""
    daemon = serving()
    wrong = {
        r'set\["pipeline.1.sise"\]: unknown key; did you mean size': {"pipeline.1.sise": [8, 8]},
        "need .* for 2 slots of 65,000 samples": {"batch_size": 65_000},
        r'set\["memory"\]: all derived streams together have 16.0 MiB': {"memory": "1GiB"},
        "sizes of all samples": {"bucket": {"field": "image", "by": "aspect", "count": 2}},
        "drop_last = true drops the rest": {"batch_size": 41, "drop_last": True},
        "recursion limit|too deep": {"pipeline.1.scale": nested(900)},
    }
    with batchd_client.connect(daemon.address) as connection:
        for words, settings in wrong.items():
            with pytest.raises(SettingsInvalid, match=words):
                connection.stream("photos", set=settings)
        (process,) = children_called(daemon.pid, b"batchd.daemon.derive.process")
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: not children_called(daemon.pid, b"batchd.daemon.derive.process"), "it is gone")
        assert connection.stream("photos", set=SCALE).name == "photos+1"
    assert served(daemon) <= {"photos", "photos+1"}


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_streams_that_nobody_reads_make_room_for_others(serving):
    """What is read stays: one more is refused, with the key that limits it."""
    daemon = serving(derive_max=2, memory="8MiB", derive_memory=20 * SLOT_BYTES)
    with batchd_client.connect(daemon.address) as connection:
        first, second = (connection.stream("photos", set={"seed": seed}) for seed in (1, 2))
        with pytest.raises(SettingsInvalid, match="2 derived streams are read, and derive_max = 2"):
            connection.stream("photos", set={"seed": 3})
        assert daemon.stream_status("photos+1")["slots_max"] == 10
        second.close()
        third = connection.stream("photos", set={"seed": 3})
        assert served(daemon) == {"photos", "photos+1", "photos+2"}
        assert len({first.fingerprint, second.fingerprint, third.fingerprint}) == 3
        third.close()
        with pytest.raises(SettingsInvalid, match="beside those of derived streams that are read"):
            connection.stream("photos", set={"seed": 3, "memory": 12 * SLOT_BYTES})
        large = connection.stream("photos", set={"seed": 4, "memory": 10 * SLOT_BYTES})
        assert len(see(large, 3)) == len(see(first, 3)) == 3


def test_a_reload_of_the_stream_of_the_file_is_one_of_those_derived_from_it(serving, photos):
    """Their trainers go on where the batches stay the same, and are told where they do not."""
    daemon = serving({"other": folder_stream(photos, memory="1MiB")})
    text = daemon.config.read_text()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", set=SCALE, epochs=9)
        see(stream, 1)
        daemon.config.write_text(text.replace("window = 4", "window = 3", 1))
        daemon.reload()
        assert see(stream, 1)[0][:2] == (0, 1)
        daemon.config.write_text(text.replace("batch_size = 8", "batch_size = 8\nseed = 9", 1))
        assert "photos+1: ends " in command("reload", "--keep-trainers", address=daemon.address, status=1).stderr
        daemon.reload()
        with pytest.raises(StreamChanged, match=r"seed: \d+ became 9"):
            see(stream)
        changed = connection.stream("photos", set=SCALE, epochs=9)
        see(changed, 1)
        start, _name, rest = text.partition("[streams.photos]")
        daemon.config.write_text(start + rest[rest.index("[streams.other]") :])
        daemon.reload()
        with pytest.raises(StreamRemoved):
            see(changed)
        assert served(daemon) == {"other"}


def test_over_tcp_a_key_opens_what_is_derived_from_its_streams(serving, photos, tmp_path):
    """It sees them in the status, and no others."""
    keys = KeyDirectory(tmp_path / "keys")
    file = tmp_path / "box.key"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new("box", streams=["photos"])))
    streams = {"other": folder_stream(photos, memory="1MiB")}
    daemon = serving(streams, tcp=f"127.0.0.1:{free_port()}", keys_dir=str(tmp_path / "keys"))
    with (
        batchd_client.connect(daemon.address) as here,
        batchd_client.connect(daemon.tcp_address, key=str(file)) as there,
    ):
        near, hidden = here.stream("photos", set=SCALE), here.stream("other", set=SCALE)
        far = there.stream("photos", set=SCALE)
        assert see(far, 3) == see(near, 3)
        assert {stream["name"] for stream in there.status()["streams"]} == {"photos", "photos+1"}
        assert hidden.name == "other+1"
        with pytest.raises(KeyRefused):
            there.stream("other", set=SCALE)
