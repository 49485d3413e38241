"""Users' functions end to end: trainers' batches, operators' reports, streams without functions."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import batchd_client
from batchd.runtime.limits import LINES_TOGETHER
from batchd_client.errors import StateMismatch, StreamStopped
from support.commands import batchd
from support.daemon_process import clean_environment
from support.seen import samples, see
from support.settings import STILL_PIPELINE, folder_stream, write_settings
from support.waiting import wait_until

CALL = {"op": "call", "function": "mine:fn", "outputs": {"image": "uint8[32,32,3]", "score": "float32"}}
AUGMENT = """
    import numpy as np
    def fn(sample, rng):
        print("a word")
        noise = rng.integers(0, 9, sample["image"].shape, np.uint8)
        return {"image": sample["image"] // 2 + noise, "score": float(rng.random())}
"""
DATA = """
    import numpy as np
    class Data:
        def __init__(self, count):
            self._all = np.random.default_rng(7).integers(0, 256, (count, 8, 8, 3), np.uint8)
        def __len__(self): return len(self._all)
        def __getitem__(self, i): return self._all[i], i
"""
NUMBERS = {
    "source": {
        "type": "python",
        "function": "mine:Data",
        "fields": {"image": "uint8[8,8,3]", "label": "int64"},
        "options": {"count": 50},
    },
    "batch_size": 8,
    "pipeline": [{"op": "random_flip"}],
}
GENERATED = {
    "source": {"type": "generator", "function": "mine:generate", "fields": {"x": "int64", "worker": "int64"}},
    "batch_size": 8,
}


PRINTS = """
    import faulthandler, os, pathlib
    SEEN = pathlib.Path(__file__).with_name("seen")
    def fn(sample, rng):
        os.write(2, b"libpng warning: ")
        os.write(2, b'a "line" of its own\\n\\x1b[31mred\\n\\n')
        if not SEEN.exists():
            SEEN.touch()
            print("last words without an end", end="", flush=True)
            faulthandler.enable()
            os.abort()
        return {"score": 1.0}
"""

CRASHES = """
    import os, pathlib, signal
    SEEN = pathlib.Path(__file__).with_name("seen")
    def fn(sample, rng):
        if not SEEN.exists():
            SEEN.touch()
            os.write(2, b"decoder: reads\\nframe 7 ")
            os.write(2, b"is broken")
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"score": 1.0}
"""


def called(photos, **changes):
    """Return a stream of photographs whose last step is a call."""
    return folder_stream(photos, pipeline=[*STILL_PIPELINE, {**CALL, **changes}])


def bad_reasons(connection, stream):
    """Wait until bad samples are listed; return their reasons."""
    return [bad.reason for bad in wait_until(lambda: connection.bad(stream).samples, "bad samples are listed")]


def see_epochs(stream, count):
    """Read so many epochs."""
    for _ in range(count):
        see(stream)


# --- call -----------------------------------------------------------------------------------------


def test_functions_give_the_same_bytes_on_any_number_of_workers(start_daemon, photos, code, write):
    """Chunks, a killed worker, random numbers and printing functions change no byte.

    A user's dataset has every sample once in an epoch.
    """
    write("mine.py", AUGMENT + DATA)
    streams = {"photos": called(photos), "numbers": NUMBERS}
    one, two = (
        start_daemon(streams, python_path=[str(code)], workers=workers, chunk_rows=rows)
        for workers, rows in ((1, 256), (2, 1))
    )
    expected = np.random.default_rng(7).integers(0, 256, (50, 8, 8, 3), np.uint8)
    with batchd_client.connect(one.address) as first, batchd_client.connect(two.address) as second:
        reads = [connection.stream("photos", epochs=3) for connection in (first, second)]
        assert see(reads[0]) == see(reads[1])
        os.kill(second.status()["workers"][0]["pid"], signal.SIGKILL)
        epochs = [[see(stream), see(stream)] for stream in reads]
        reads = [connection.stream("numbers", epochs=2) for connection in (first, second)]
        assert see(reads[0]) == see(reads[1])
        found = {}
        for batch in reads[0]:
            images, labels = batch["image"].copy(), batch["label"].tolist()
            assert labels == batch["index"].tolist()
            found |= dict(zip(labels, images, strict=True))
            del batch
        assert see(reads[1])
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]
    assert "a word" in one.log
    assert sorted(found) == list(range(50))
    for label, image in found.items():
        assert np.array_equal(image, expected[label]) or np.array_equal(image, expected[label][:, ::-1])


def test_an_exception_is_a_bad_sample_with_its_place(start_daemon, photos, code, write):
    """`batchd bad` shows it as text and JSON; SystemExit in a function is a bad sample, too."""
    file = write(
        "mine.py",
        """
        def fn(sample, rng):
            if sample["label"] == 1:
                return {"score": broken(sample)}
            if sample["label"] == 2:
                raise SystemExit("enough")
            return {"score": 1.0}
        def broken(sample):
            raise ValueError("cannot do this one, " + "for many reasons " * 15)
        def Data(count): return Odd()
        class Odd:
            def __len__(self): return 50
            def __getitem__(self, i):
                if i == 9: raise OSError("the disk is gone")
                return [[[i] * 3] * 8] * 8, i
        """,
    )
    stream = called(photos, outputs={"score": "float32"}) | {"on_error": "mask", "max_bad_fraction": 1.0}
    daemon = start_daemon({"photos": stream, "numbers": NUMBERS}, python_path=[str(code)])
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
        reasons = bad_reasons(connection, "photos")
        see(connection.stream("numbers", epochs=1))
        (bad,) = wait_until(lambda: connection.bad("numbers").samples, "it is listed")
        workers = {worker["pid"] for worker in connection.status()["workers"]}
    text = batchd("bad", "photos", address=daemon.address).stdout
    listed = json.loads(batchd("bad", "photos", "--json", address=daemon.address).stdout)["samples"]

    raised = [reason for reason in reasons if "ValueError" in reason]
    assert len(raised) == 10
    place = f"\n  at {file}:9 in broken: raise ValueError("
    assert place in raised[0]
    assert f"\n  from {file}:4 in fn: " in raised[0]
    assert place in text
    assert len([reason for reason in reasons if reason.startswith("mine:fn: SystemExit: enough")]) == 10
    assert [entry["reason"] for entry in listed] == reasons
    assert bad.path == "mine:Data[9]"
    assert bad.reason.startswith(f"OSError: the disk is gone\n  at {file}:14 in __getitem__: if i == 9")
    assert workers == daemon.worker_pids()


def test_a_function_that_never_returns_costs_its_sample(start_daemon, code, write):
    """The sample is quarantined by name the second time, as a file that hangs a decoder is."""
    write("mine.py", DATA)
    write("slow.py", "import time\ndef fn(sample, rng):\n    if sample['label'] == 9: time.sleep(1000)\n    return {}")
    stream = {**NUMBERS, "pipeline": [{"op": "call", "function": "slow:fn"}]}
    daemon = start_daemon({"numbers": stream}, python_path=[str(code)], sample_timeout_s=2)
    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("numbers", epochs=1))
        (bad,) = connection.bad("numbers").samples
    assert sum(len(one.samples) for one in seen) == 50
    assert bad.path == "mine:Data[9]"
    assert bad.reason.startswith("quarantined: it ended 2 workers")


def test_what_cannot_be_imported_made_or_called_stops_its_stream_at_once(start_daemon, photos, code, write):
    """Trainers and log get reason and place; no worker dies, no sample is bad, others continue.

    Examples are an object that only the helper can make, and options behind a decorator, which the
    check cannot see. A part of another source makes its object at its first sample.
    """
    broken = write("broken.py", "\nimport not_there_at_all\ndef fn(sample, rng): ...")
    write("wrapped.py", "def same(call): return call\n@same\ndef generate(size, *, rng):\n    yield 1, 2")
    write("mine.py", DATA)
    write(
        "helpers.py",
        """
        import sys
        def Data(count):
            if "batchd.worker.loop" in sys.modules: raise OSError("not here")
            return range(count)
        """,
    )
    generated = {**GENERATED["source"], "function": "wrapped:generate", "options": {"sise": 3}}
    helpers = {**NUMBERS["source"], "function": "helpers:Data"}
    stopped = {
        "import": called(photos, function="broken:fn"),
        "options": {**GENERATED, "source": generated},
        "whole": {**NUMBERS, "source": helpers},
        "part": {**NUMBERS, "source": {"type": "subset", "stop": 20, "of": helpers}},
    }
    reasons = {
        "import": "importing broken:fn in a worker: ModuleNotFoundError: No module named 'not_there_at_all'\n"
        f"  to install it where batchd runs: {sys.executable} -m pip install not_there_at_all\n"
        f"  at {broken}:2 in <module>: import not_there_at_all",
        "options": "wrapped:generate(size, *, rng) cannot be called as wrapped:generate(sise=3, rng): "
        "there is no option 'sise'",
        "whole": "calling helpers:Data in a worker: OSError: not here",
        "part": "calling helpers:Data in a worker: OSError: not here",
    }
    good = {
        "plain": folder_stream(photos),
        "good": {**NUMBERS, "source": {**stopped["part"]["source"], "of": NUMBERS["source"]}},
    }
    daemon = start_daemon({**stopped, **good}, python_path=[str(code)])
    workers = daemon.worker_pids()
    with batchd_client.connect(daemon.address) as connection:
        for name, reason in reasons.items():
            with pytest.raises(StreamStopped) as told:
                see(connection.stream(name), 1)
            assert reason in str(told.value)
            assert not connection.bad(name).samples
        assert len(see(connection.stream("plain", epochs=1))) == 5
        assert sorted(samples(see(connection.stream("good", epochs=1)))) == list(range(20))
    logged = {line["stream"]: line["reason"] for line in daemon.log_lines("stream stopped")}
    assert all(reason in logged[name] for name, reason in reasons.items())
    assert daemon.worker_pids() == workers
    assert not daemon.log_lines("worker ended")


def test_a_module_that_has_changed_stops_the_stream_instead_of_changing_bytes(start_daemon, photos, code, write):
    """A later worker would run the new code, so a restarted daemon serves another stream."""
    write("mine.py", AUGMENT)
    daemon = start_daemon({"photos": called(photos)}, python_path=[str(code)], workers=1)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=None)
        see(stream)
        state = stream.state_dict()
        write("mine.py", AUGMENT + "\n    # changed")
        os.kill(connection.status()["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(StreamStopped, match=r"mine\.py has changed since the daemon started"):
            see_epochs(stream, 20)
    daemon.restart()
    with batchd_client.connect(daemon.address) as connection, pytest.raises(StateMismatch):
        connection.stream("photos").load_state_dict(state)


def test_what_workers_write_to_standard_error_is_a_line_of_the_log(start_daemon, photos, code, write):
    """Each line of the log is JSON: with prints, libraries' warnings, and the words of a crash."""
    write("mine.py", PRINTS)
    daemon = start_daemon({"photos": called(photos, outputs={"score": "float32"})}, python_path=[str(code)])
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
        wait_until(lambda: "Fatal Python error" in daemon.log and "red" in daemon.log, "the log has what was written")
    daemon.terminate()

    lines = [json.loads(line) for line in daemon.log.splitlines()]
    output = [line["text"] for line in lines if line["event"] == "output of a child process"]
    assert {'libpng warning: a "line" of its own', "\x1b[31mred"} <= set(output)
    assert "last words without an endFatal Python error: Aborted" in output
    assert all(output)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_last_line_of_a_worker_that_crashes_stands_before_its_death(start_daemon, photos, code, write, log_format):
    """It names the worker, as what was written before; the line about the death repeats it."""
    write("mine.py", CRASHES)
    streams = {"photos": called(photos, outputs={"score": "float32"})}
    daemon = start_daemon(streams, python_path=[str(code)], workers=1)
    daemon.terminate()
    daemon.log_format = log_format
    before = len(daemon.log.splitlines())
    daemon.start()
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
        wait_until(lambda: "worker ended" in daemon.log, "the death is logged")
    daemon.terminate()

    lines = daemon.log.splitlines()[before:]
    death = next(number for number, line in enumerate(lines) if "worker ended" in line)
    output = [line for line in lines[:death] if "output of a child process" in line]
    assert lines[death - 1] == output[-1]
    if log_format == "json":
        assert all(json.loads(line)["event"] for line in lines)
        died, *written = map(json.loads, [lines[death], *output])
        assert [one["text"] for one in written] == ["decoder: reads", "frame 7 is broken"]
        assert {(one["worker"], one["pid"]) for one in written} == {(died["worker"], died["pid"])}
        assert (died["said"], died["how"]) == ("frame 7 is broken", "signal 11 (SIGSEGV)")
    else:
        assert all(f"pid={re.search(r'pid=([0-9]+)', lines[death])[1]}" in line for line in output)
        assert all("frame 7 is broken" in line and "worker=" in line for line in lines[death - 1 : death + 1])


def test_a_flood_of_output_is_limited_and_counted(start_daemon, photos, code, write):
    """A worker that prints is not held up, and the log says how much it leaves out."""
    write("mine.py", "def fn(sample, rng):\n    print('word\\n' * 20_000)\n    return {'score': 1.0}")
    daemon = start_daemon({"photos": called(photos, outputs={"score": "float32"})}, python_path=[str(code)])
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
    wait_until(lambda: "log lines left out" in daemon.log, "the log says what it leaves out")
    daemon.terminate()

    events = [json.loads(line)["event"] for line in daemon.log.splitlines()]
    assert events.count("output of a child process") <= LINES_TOGETHER
    assert events.count("log lines left out") <= 4


def test_the_daemon_and_the_check_import_nothing(start_daemon, photos, code, write, tmp_path):
    """Only workers import the module, also those that try samples."""
    trace = tmp_path / "trace"
    write(
        "mine.py",
        "import os, sys\nhelps = 'batchd.worker' in sys.orig_argv\n"
        f"open({str(trace)!r}, 'a').write(f'{{0 if helps else os.getpid()}}\\n')\ndef fn(sample, rng): return {{}}",
    )
    streams = {"photos": called(photos, outputs={})}
    config = write_settings(
        tmp_path / "batchd.toml", streams, {"python_path": [str(code)], "runtime_dir": str(tmp_path / "run")}
    )
    batchd("check", config)
    assert trace.read_text() == "0\n"
    trace.unlink()

    daemon = start_daemon(streams, python_path=[str(code)])
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
    pids = {int(line) for line in trace.read_text().split()}
    assert pids <= daemon.worker_pids()


def test_a_wrong_name_is_told_by_the_check_with_the_folders(photos, code, write, tmp_path):
    """The message names the configuration's folder if no other folder is configured."""
    config = write_settings(
        code / "batchd.toml",
        {"one": called(photos, function="mien:fn"), "two": called(photos, function="mine:nf"), "three": called(photos)},
        {"runtime_dir": str(tmp_path / "run")},
    )
    write("mine.py", AUGMENT)

    told = batchd("check", config, status=2).stderr

    assert "streams.one.pipeline[2].function: there is no module mien [" in told
    assert f"= help: did you mean mine? searched: {code}, " in told
    assert f"streams.two.pipeline[2].function: {code}/mine.py does not define 'nf' at its top level [" in told
    assert "= help: defined there: fn, np\n" in told
    assert "streams.three" not in told
    assert told.count('= note: The function, as "package.module:name".') == 1
    assert "2 problems" in told


def test_prepare_calls_functions_too(photos, code, write):
    """The list of bad samples has the places of exceptions; a failed import ends the command."""
    write(
        "mine.py",
        "def fn(sample, rng):\n    if sample['label'] == 1: raise ValueError('not this one')\n    return {'label': 7}",
    )
    call = {"op": "call", "function": "mine:fn"}
    stream = folder_stream(photos, pipeline=[*STILL_PIPELINE, call])
    broken = folder_stream(photos, pipeline=[*STILL_PIPELINE, {**call, "function": "broken:fn"}])
    config = write_settings(
        code / "batchd.toml", {"photos": stream, "broken": broken, "live": GENERATED}, {"workers": 2}
    )
    write("broken.py", "def fn(sample, rng): ...\nimport not_there_at_all")
    write("mine.py", (code / "mine.py").read_text() + "\ndef generate(): yield 1, 2")

    batchd("prepare", "photos", "-c", config, "--to", code / "out", "--shard-samples", 20)
    told = batchd("prepare", "broken", "-c", config, "--to", code / "none", status=1).stderr
    live = batchd("prepare", "live", "-c", config, "--to", code / "none", status=2).stderr

    rows = [line.split("\t") for line in (code / "out" / "bad.tsv").read_text().splitlines()]
    assert len(rows) == 1 + 10
    assert rows[1][3].startswith("mine:fn: ValueError: not this one")
    with tarfile.open(code / "out" / "photos-000000.tar") as shard:
        labels = {shard.extractfile(name).read() for name in shard.getnames() if name.endswith(".cls")}
    assert labels == {b"7"}
    assert "importing broken:fn in a worker: ModuleNotFoundError: No module named 'not_there_at_all'" in told
    assert 'samples of type "generator" cannot be read twice' in live


# --- python ---------------------------------------------------------------------------------------


def test_a_daemon_whose_object_has_no_length_does_not_start(code, write, tmp_path):
    """The message has the key, and the error of the helper."""
    write("mine.py", "def Data(count): raise OSError('no such disk')")
    config = write_settings(
        code / "batchd.toml",
        {"numbers": NUMBERS},
        {"runtime_dir": str(tmp_path / "run"), "workers": 1, "memory": "64MiB"},
    )
    done = subprocess.run(
        [sys.executable, "-m", "batchd", "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert (
        "streams.numbers.source: asking mine:Data for its length: its process ended with exit status 1:\n"
        in done.stderr
    )
    assert "OSError: no such disk" in done.stderr


# --- generator ------------------------------------------------------------------------------------

COUNTING = """
    import os
    def generate(rng):
        seed = int(rng.integers(1 << 62))
        while True:
            yield seed, os.getpid()
"""


def test_each_worker_runs_a_generator_with_a_seed_of_its_own(start_daemon, code, write):
    """A worker that starts later has its own seed too; the epoch never ends."""
    write("mine.py", COUNTING)
    daemon = start_daemon({"live": GENERATED}, python_path=[str(code)], chunk_rows=1)
    seeds = {}
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("live", epochs=1)
        batches = iter(stream)

        def read_from_both_workers():
            with next(batches) as batch:
                assert batch["index"].tolist() == list(range(batch.step * 8, batch.step * 8 + 8))
                seeds.update(zip(batch["worker"].tolist(), batch["x"].tolist(), strict=True))
            return daemon.worker_pids() <= seeds.keys()

        wait_until(read_from_both_workers, "both workers have filled rows")
        os.kill(min(daemon.worker_pids()), signal.SIGKILL)
        wait_until(lambda: read_from_both_workers() and len(seeds) > 2, "the new worker has filled rows")
        assert stream.steps == (1 << 40) // 8
    assert len(set(seeds.values())) == len(seeds) >= 3


def test_trainers_share_what_is_in_the_ring_and_a_position_counts(start_daemon, code, write):
    """Simultaneous readers get the same batches; a resumed state counts on, with new samples.

    With a seed, one worker gives the samples of ``numpy.random.default_rng((seed, 1))`` again.
    """
    write("mine.py", "def generate(rng):\n    while True: yield int(rng.integers(1 << 62)), 0")
    source = {**GENERATED["source"], "epoch_samples": 24}
    streams = {
        "live": {**GENERATED, "source": source, "lag": "lockstep"},
        "seeded": {**GENERATED, "source": {**GENERATED["source"], "seed": 5}},
    }
    daemon = start_daemon(streams, python_path=[str(code)], workers=1)
    expected = np.random.default_rng((5, 1)).integers(1 << 62, size=8).tolist()

    def seeded_batch(connection):
        with next(iter(connection.stream("seeded"))) as batch:
            return batch["x"].tolist()

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as two:
        assert seeded_batch(one) == expected
        first, second = one.stream("live", epochs=2), two.stream("live", epochs=2)
        pairs = [(see(first, 1), see(second, 1)) for _ in range(3)]
        assert all(mine == theirs for mine, theirs in pairs)
        epoch = [seen for mine, _ in pairs for seen in mine]
        state = first.state_dict()
    daemon.restart()
    with batchd_client.connect(daemon.address) as connection:
        assert seeded_batch(connection) == expected
        stream = connection.stream("live", epochs=2)
        again = see(stream)
        stream.load_state_dict(state)
        (later, *_) = see(stream)
    assert [seen.position for seen in epoch] == [seen.position for seen in again] == [(0, 0), (0, 1), (0, 2)]
    assert {seen.digest for seen in epoch}.isdisjoint(seen.digest for seen in again)
    assert later.position == (1, 0)


def test_a_generator_that_raises_now_and_then_loses_a_sample(start_daemon, code, write):
    """The next sample replaces it under its own number; the bad samples' list has its place."""
    write(
        "mine.py",
        """
        count = 0
        def generate():
            global count
            while True:
                count += 1
                if count % 20 == 0: raise ValueError("every twentieth")
                yield count, 0
        """,
    )
    daemon = start_daemon({"live": {**GENERATED, "max_bad_fraction": 0.5}}, python_path=[str(code)], workers=1)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("live", epochs=1)
        batches = iter(stream)
        for step in range(10):
            with next(batches) as batch:
                assert batch["index"].tolist() == list(range(step * 8, step * 8 + 8))
                assert not (batch["x"] % 20 == 0).any()
        assert "ValueError: every twentieth" in bad_reasons(connection, "live")[0]
