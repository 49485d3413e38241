"""A worker host with real workers, and a gateway in the test: the same bytes, whatever happens."""

import os
import signal
import socket
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from batchd import __version__
from batchd.core.actions import WithdrawOrder
from batchd.core.events import HostLeaves, OrderFilled, StreamOpened, StreamRefused, WorkerDown, WorkerUp
from batchd.core.rows import rows_of
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool import messages
from batchd.runtime.keys import KeyDirectory
from batchd.worker.supervisor import WorkerProcesses
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import Role, connection_file_text
from support.commands import batchd
from support.expected import Expected
from support.fake_gateway import FakeGateway, WorkerHostProcess, index_of, served
from support.images import encode, photo, write_photos
from support.kernel import descriptors_of, is_stopped
from support.network import free_port
from support.settings import SIDE_PIXELS, STILL_PIPELINE, folder_stream, list_stream, write_settings
from support.shards import photo_shards
from support.sounds import stored, sweep
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")
PROGRAM_MIB_MAX = 60
LONG_NAME = "x" * 200
LINES = 30_000
"""With such names, an index has more parts than a worker host requests ahead."""


@pytest.fixture
def gateway():
    """Start a gateway without keys, on loopback."""
    with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
def start_host(tmp_path, gateway):
    """Start worker hosts; they end with the test."""
    started = []

    def start(*options, workers=1, address=None, **more):
        host = WorkerHostProcess(tmp_path, address or gateway.address, "--workers", str(workers), *options, **more)
        started.append(host)
        return host

    yield start
    for host in started:
        host.close()


@pytest.fixture
def opened(tmp_path):
    """Open streams of configurations as the daemon does; return each with its expected batches."""
    made = []

    def open_stream(keys, **more):
        config = write_settings(tmp_path / f"{len(made)}.toml", {"photos": keys}, {"memory": "64MiB"})
        made.append((served(config, **more), Expected(config)))
        return made[-1]

    yield open_stream
    for stream, expected in made:
        stream.close()
        expected.close()


@pytest.fixture
def stream(opened, photos):
    """Open a stream over photographs."""
    return opened(folder_stream(photos))[0]


def same_rows(rows, expected, epoch, step, first, count):
    """Tell whether the rows are those that the configuration and the files alone determine."""
    assert rows.arrays is not None
    wanted = expected.arrays(epoch, step)
    assert rows.arrays.keys() == wanted.keys()
    return all(np.array_equal(rows.arrays[name], wanted[name][first : first + count]) for name in wanted)


def stop_worker(pid):
    """Stop a worker between two orders."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "the worker is stopped")


# --- the same bytes -------------------------------------------------------------------------------


def test_a_worker_host_names_its_versions(gateway, start_host) -> None:
    """The host sends its version and that of the pixels, so that a gateway can refuse it."""
    host = start_host("--name", "rack 7", workers=2)

    register = gateway.admit()

    assert register == messages.Register(
        messages.LINK_VERSION,
        __version__,
        CONTENT_VERSION,
        "rack 7",
        socket.gethostname(),
        host.pid,
        2,
        os.uname().machine,
    )
    ups = [gateway.expect(WorkerUp) for _ in range(2)]
    assert {up.worker for up in ups} == {1, 2}
    assert all("OpenCV" in up.decoders for up in ups)


def test_a_worker_host_fills_the_rows_that_the_files_make(gateway, start_host, opened, photos) -> None:
    """Orders have several sizes, and one is sent twice."""
    stream, expected = opened(folder_stream(photos))
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    assert host.line() == "serving photos of 127.0.0.1 with 1 worker"

    for order in [(0, 0, 0, 8), (0, 1, 3, 5), (3, 4, 7, 1), (0, 0, 0, 8)]:
        rows = gateway.fill(stream, *order)
        assert same_rows(rows, expected, *order)
        assert rows.answer.work[0] > 0


def test_rows_with_gaps_come_one_behind_the_other(gateway, start_host, opened, photos) -> None:
    """The rows arrive as the frames of an order with that many rows, with their checksums."""
    stream, expected = opened(folder_stream(photos, verify=True))
    start_host()
    gateway.admit()
    gateway.opened(stream)

    for runs in ([(1, 2), (6, 1)], [(0, 1), (7, 1)], [(2, 5)]):
        rows = gateway.rows(gateway.order_runs(stream, 1, 3, runs))
        wanted = expected.arrays(1, 3)
        assert all(np.array_equal(rows.arrays[name], wanted[name][list(rows_of(runs))]) for name in wanted)
        assert rows.wrong == []


def test_ragged_and_bad_rows_leave_nothing_of_former_ones(gateway, start_host, opened, tmp_path) -> None:
    """Rows of any size were in the same memory before; the checksums fit."""
    folder = tmp_path / "sizes"
    (folder / "one").mkdir(parents=True)
    for number in range(20):
        (folder / "one" / f"{number:02}.png").write_bytes(encode(photo(8 + number, 40 - number, number), ".png"))
    (folder / "one" / "07.png").write_bytes(b"no image")
    ragged = [{"op": "decode"}, {"op": "ragged", "max_shape": [40, 40, 3]}]
    keys = folder_stream(folder, pipeline=ragged, on_error="mask", max_bad_fraction=1.0, verify=True)
    stream, expected = opened(keys)
    start_host()
    gateway.admit()
    gateway.opened(stream)

    for epoch in range(3):
        for order in [(epoch, 0, 0, 8), (epoch, 1, 0, 8), (epoch, 2, 0, 4), (epoch, 1, 2, 3)]:
            rows = gateway.fill(stream, *order)
            assert same_rows(rows, expected, *order)
            assert rows.wrong == []


CACHES = {
    "without one here": (),
    "in memory": ("--cache-memory", "16MiB"),
    "on disk": ("--cache-dir", "DIR", "--cache-size", "16MiB"),
    "too small for one": ("--cache-memory", "1KiB"),
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_a_cache_here_or_none_makes_the_same_bytes(gateway, start_host, opened, photos, tmp_path, options) -> None:
    """Two passes, so that a cache is read; a decoded cache splits the pipeline even if absent."""
    (tmp_path / "DIR").mkdir()
    start_host(*(str(tmp_path / "DIR") if word == "DIR" else word for word in options))
    gateway.admit()

    for number, kind in enumerate(("encoded", "decoded"), 1):
        stream, expected = opened(folder_stream(photos, cache=kind, cache_memory="16MiB"), number=number)
        gateway.opened(stream)
        hits = 0
        for _ in range(2):
            for step in range(stream.spec.plan.steps):
                rows = gateway.fill(stream, 1, step, 0, 8)
                assert same_rows(rows, expected, 1, step, 0, 8)
                hits += rows.answer.work[11]
                assert len(rows.answer.work[5]) > 1
        assert hits == (0 if not options or "1KiB" in options else 40)
        gateway.send(messages.HostForget(gateway.link, number))


def test_rows_name_the_parts_that_the_daemons_workers_have(gateway, start_host, opened, photos) -> None:
    """The number of parts is the same with and without a cache on the worker host."""
    lengths = []
    stream, _expected = opened(folder_stream(photos, cache="encoded", cache_memory="16MiB"))
    for options in ([], ["--cache-memory", "16MiB"]):
        host = start_host(*options)
        gateway.admit()
        gateway.opened(stream)
        lengths.append(len(gateway.fill(stream, 0, 0, 0, 8).answer.work[5]))
        host.close()
        gateway.close()
        gateway.open()

    assert lengths[0] == lengths[1]


def test_the_program_beside_its_workers_stays_small(gateway, start_host, stream) -> None:
    """The program loads no decoder, and sends rows from the memory in which workers made them."""
    host = start_host(is_new=True)
    gateway.admit()
    gateway.opened(stream)
    for step in range(stream.spec.plan.steps):
        gateway.fill(stream, 0, step, 0, 8)

    maps, rollup = (Path(f"/proc/{host.pid}/{name}").read_text() for name in ("maps", "smaps_rollup"))
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss")}

    assert not any(name in maps for name in ("cv2", "simplejpeg", "batchd/data/pipeline/_pixels"))
    assert (kib["Pss_Anon"] + kib["Pss_File"]) / 1024 < PROGRAM_MIB_MAX
    assert kib["Pss_Shmem"] * 1024 <= 2 * stream.layout.slot_bytes


# --- paths ----------------------------------------------------------------------------------------


def test_paths_of_the_daemons_host_may_be_elsewhere(gateway, start_host, opened, tmp_path) -> None:
    """``--map`` rewrites whole components: the longest FROM first, and no mere common prefix."""
    there, here = tmp_path / "there", tmp_path / "here"
    write_photos(there / "photos", {"cat": 9, "dog": 9}, height=72, width=96)
    stream, expected = opened(folder_stream(there / "photos"))
    wanted = expected.arrays(0, 1)
    there.rename(here)
    start_host("--map", f"{tmp_path}/the=/nowhere", "--map", f"{tmp_path}={tmp_path}/no", "--map", f"{there}={here}/")
    gateway.admit()
    gateway.opened(stream)

    rows = gateway.fill(stream, 0, 1, 0, 8)

    assert all(np.array_equal(rows.arrays[name], wanted[name]) for name in wanted)


def test_shards_of_another_time_are_not_the_daemons(gateway, start_host, opened, photos, tmp_path) -> None:
    """All samples would be bad: the worker host reports it when it opens the stream."""
    folder = tmp_path / "shards"
    stream, _expected = opened(folder_stream(photos, source=photo_shards(photos, folder)))
    os.utime(folder / "train-01.tar", (1, 1))
    start_host()
    gateway.admit()
    gateway.serve(stream)
    gateway.send_parts()

    reason = gateway.expect(StreamRefused).reason

    assert "train-01.tar is not the file that the daemon reads" in reason
    assert "rsync -a" in reason


def test_missing_data_is_named_with_the_option_that_helps(gateway, start_host, opened, tmp_path, photos) -> None:
    """The worker host still serves its other streams."""
    write_photos(tmp_path / "gone", {"cat": 4})
    missing, _expected = opened(folder_stream(tmp_path / "gone"))
    (tmp_path / "gone").rename(tmp_path / "moved")
    there, _expected = opened(folder_stream(photos), number=2)
    start_host()
    gateway.admit()
    gateway.serve(missing)
    gateway.opened(there)

    refused = gateway.expect(StreamRefused)

    assert refused.stream == missing.number
    assert f"there is no {tmp_path / 'gone'} on this host" in refused.reason
    assert "--map FROM=TO" in refused.reason
    assert gateway.fill(there, 0, 0, 0, 8).arrays is not None


def test_the_folder_of_a_step_may_be_elsewhere_and_must_be_the_same(
    gateway, start_host, opened, photos, tmp_path
) -> None:
    """A further file in it is other content."""
    there, here = tmp_path / "noise", tmp_path / "mine"
    there.mkdir()
    (there / "a.wav").write_bytes(stored("WAV", "PCM_16", sweep(16_000, 0.1, 1), 16_000))
    np.save(tmp_path / "sounds.npy", np.full((8, 400), 0.5, np.float32))
    source = {"type": "npy", "root": str(tmp_path), "arrays": {"audio": "sounds.npy"}}
    pipeline = [{"op": "add_noise", "root": str(there)}]
    stream, expected = opened(folder_stream(photos, source=source, pipeline=pipeline))
    rows = expected.arrays(0, 0)["audio"]
    there.rename(here)
    start_host("--map", f"{there}={here}")
    gateway.admit()
    gateway.opened(stream)

    made = gateway.fill(stream, 0, 0, 0, 8).arrays["audio"]

    assert np.array_equal(made, rows)
    gateway.send(messages.HostForget(gateway.link, stream.number))
    (here / "b.wav").write_bytes((here / "a.wav").read_bytes())
    gateway.serve(stream)
    gateway.send_parts()
    assert f"{here} has other content than the daemon's" in gateway.expect(StreamRefused).reason


def test_users_functions_may_be_elsewhere_and_must_be_the_same(
    request, gateway, start_host, opened, photos, tmp_path
) -> None:
    """Functions are found without an import; files with other content are not used."""
    there, here = tmp_path / "code", tmp_path / "mine"
    there.mkdir()
    (there / "my_steps.py").write_text("def fn(sample, rng):\n    return {'image': 255 - sample['image']}\n")
    call = {"op": "call", "function": "my_steps:fn", "outputs": {"image": f"uint8[{SIDE_PIXELS},{SIDE_PIXELS},3]"}}
    keys = folder_stream(photos, pipeline=[*STILL_PIPELINE, call])
    _plain, expected = opened(folder_stream(photos, pipeline=STILL_PIPELINE))
    daemon = {"memory": "64MiB", "python_path": [str(there)]}
    stream = served(write_settings(tmp_path / "call.toml", {"photos": keys}, daemon))
    request.addfinalizer(stream.close)
    there.rename(here)
    start_host("--map", f"{there}={here}")
    gateway.admit()
    gateway.opened(stream)

    rows = gateway.fill(stream, 0, 0, 0, 8)

    assert np.array_equal(rows.arrays["image"], 255 - expected.arrays(0, 0)["image"])
    gateway.send(messages.HostForget(gateway.link, stream.number))
    (here / "my_steps.py").write_text("def fn(sample, rng):\n    return {'image': sample['image']}\n")
    gateway.serve(stream)
    gateway.send_parts()
    assert f"{here / 'my_steps.py'} has other content than the daemon's" in gateway.expect(StreamRefused).reason
    changed = served(write_settings(tmp_path / "call.toml", {"photos": keys}, {**daemon, "python_path": [str(here)]}))
    request.addfinalizer(changed.close)
    gateway.opened(changed)
    gone = gateway.expect(WorkerDown)
    assert gone.how == "signal 9 (SIGKILL): it has imported an earlier version of a user's module"
    gateway.workers.discard(gone.worker)
    assert np.array_equal(gateway.fill(changed, 0, 0, 0, 8).arrays["image"], expected.arrays(0, 0)["image"])
    (here / "my_steps.py").unlink()
    gateway.serve(stream)
    gateway.send_parts()
    assert "--map FROM=TO" in gateway.expect(StreamRefused).reason


# --- indexes --------------------------------------------------------------------------------------


@pytest.fixture
def long_index(opened, tmp_path):
    """Open a stream of many samples: a few files with long paths, many times."""
    root = tmp_path / "root"
    write_photos(root / LONG_NAME, {"cat": 3})
    names = [f"{LONG_NAME}/cat/{number % 3:05}.jpg {number % 5}\n" for number in range(LINES)]
    (tmp_path / "list.txt").write_text("".join(names))
    stream, expected = opened(list_stream(tmp_path / "list.txt", root))
    assert len(index_of(stream)) > messages.INDEX_PARTS_AHEAD * messages.INDEX_PART_BYTES + 1
    return stream, expected


def test_an_index_is_kept_for_the_next_start(gateway, start_host, long_index) -> None:
    """The digest of all its bytes is its name; the second worker host requests no part."""
    stream, expected = long_index
    for starts in range(2):
        host = start_host()
        gateway.admit()
        gateway.serve(stream)
        parts = -(-len(index_of(stream)) // messages.INDEX_PART_BYTES)
        assert gateway.send_parts() == (0 if starts else parts)
        assert gateway.expect(StreamOpened).stream == stream.number
        assert same_rows(gateway.fill(stream, 0, 1000, 0, 8), expected, 0, 1000, 0, 8)
        host.close()
        gateway.close()
        gateway.open()

    (file,) = host.index_folder.iterdir()
    assert file.name == f"{sha256(index_of(stream)).hexdigest()}.index"
    assert file.read_bytes() == index_of(stream)


def test_a_worker_host_asks_for_few_parts_ahead(gateway, start_host, long_index) -> None:
    """Rows do not wait behind an index."""
    stream, _expected = long_index
    start_host()
    gateway.admit()
    gateway.serve(stream)

    offsets = [gateway.expect(messages.AskIndex).offset for _ in range(messages.INDEX_PARTS_AHEAD)]

    assert offsets == [part * messages.INDEX_PART_BYTES for part in range(messages.INDEX_PARTS_AHEAD)]
    assert not gateway.hears(messages.AskIndex, 0.3)


def test_an_index_that_is_interrupted_goes_on_where_it_was(gateway, start_host, long_index) -> None:
    """The next link begins with the first part that is missing."""
    stream, expected = long_index
    start_host()
    gateway.admit()
    gateway.serve(stream)
    gateway.send_parts(2)
    # it asks once it has both
    while gateway.expect(messages.AskIndex).offset < 5 * messages.INDEX_PART_BYTES:
        pass
    gateway.close()
    gateway.open()
    gateway.admit()
    gateway.serve(stream)

    assert gateway.send_parts() == -(-len(index_of(stream)) // messages.INDEX_PART_BYTES) - 2
    assert gateway.expect(StreamOpened).stream == stream.number
    assert same_rows(gateway.fill(stream, 0, 7, 0, 8), expected, 0, 7, 0, 8)


def test_a_damaged_index_on_disk_is_received_again(gateway, start_host, stream) -> None:
    """Bytes with another digest are rejected: changed ones, too few, and too many."""
    content = index_of(stream)
    for damaged in (bytes([content[0] ^ 1]) + content[1:], content[:-1], content + b"\0"):
        host = start_host()
        host.index_folder.mkdir(exist_ok=True)
        file = host.index_folder / f"{sha256(content).hexdigest()}.index"
        file.write_bytes(damaged)
        gateway.admit()
        gateway.serve(stream)

        assert gateway.send_parts() == 1
        assert gateway.expect(StreamOpened).stream == stream.number
        assert gateway.fill(stream, 0, 0, 0, 8).arrays is not None
        assert file.read_bytes() == content
        assert "a kept index cannot be used" in host.log
        host.close()


# --- orders ---------------------------------------------------------------------------------------


def test_withdrawn_orders_are_not_begun_or_their_rows_not_sent(gateway, start_host, stream) -> None:
    """A stopped worker has four orders; the two that still wait in the host end at once."""
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    worker = gateway.a_worker()
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    stop_worker(pid)
    orders = [gateway.order(stream, 0, step, 0, 8) for step in range(4)]
    for order in (orders[0], orders[2], orders[3]):
        gateway.send(WithdrawOrder(gateway.link, worker, order.order))

    for order in orders[2:]:
        rows = gateway.rows(order)
        assert rows.arrays is None
        assert rows.answer.work[0] == 0
    assert not gateway.hears(OrderFilled, 0.3)
    os.kill(pid, signal.SIGCONT)
    assert gateway.rows(orders[0]).arrays is None
    assert gateway.rows(orders[1]).arrays is not None


def test_withdrawing_what_is_over_does_nothing(gateway, start_host, stream) -> None:
    """The withdrawal and the rows have crossed on their way."""
    start_host()
    gateway.admit()
    gateway.opened(stream)
    order = gateway.order(stream, 0, 0, 0, 8)
    assert gateway.rows(order).arrays is not None

    gateway.send(WithdrawOrder(gateway.link, order.worker, order.order))

    assert gateway.fill(stream, 0, 1, 0, 8).arrays is not None


def test_a_killed_worker_is_reported_and_another_one_started(gateway, start_host, opened, photos) -> None:
    """The worker's orders end, also those that wait; its replacement has a new number."""
    stream, expected = opened(folder_stream(photos))
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    first = gateway.a_worker()
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    stop_worker(pid)
    for step in range(3):
        gateway.order(stream, 0, step, 0, 8)
    os.kill(pid, signal.SIGKILL)

    down = gateway.expect(WorkerDown)

    assert (down.worker, down.how) == (first, "signal 9 (SIGKILL)")
    gateway.workers.discard(first)
    assert gateway.a_worker() > first
    assert same_rows(gateway.fill(stream, 0, 0, 0, 8), expected, 0, 0, 0, 8)
    assert not gateway.hears(OrderFilled, 0.2)


def test_an_order_for_a_worker_that_is_gone_is_over(gateway, start_host, stream) -> None:
    """The gateway sent it before it heard of the death; the order has no other effect."""
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    gone = gateway.a_worker()
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    os.kill(pid, signal.SIGKILL)
    gateway.expect(WorkerDown)
    gateway.workers.discard(gone)

    gateway.order(stream, 0, 0, 0, 8, worker=gone)

    assert gateway.fill(stream, 0, 1, 0, 8).arrays is not None


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("is_told_later", [False, True])
def test_a_worker_that_is_stuck_is_killed(gateway, start_host, stream, is_told_later) -> None:
    """The gateway sets the time that a sample may take, and a reload can change it."""
    host = start_host()
    gateway.admit(**({} if is_told_later else {"sample_timeout_s": 1.0}))
    gateway.opened(stream)
    if is_told_later:
        gateway.send(messages.HostLimits(gateway.link, 1.0))
    worker = gateway.a_worker()
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    stop_worker(pid)
    gateway.order(stream, 0, 1, 0, 8)

    down = gateway.expect(WorkerDown)

    assert down.worker == worker
    assert down.how.startswith("signal 9 (SIGKILL): it ")
    assert down.how.endswith("for 1 s")


def test_quarantined_samples_are_bad_without_decoding(gateway, start_host, opened, photos) -> None:
    """Some samples are quarantined from the start, others later."""
    stream, expected = opened(folder_stream(photos, on_error="mask", max_bad_fraction=1.0))
    first, second = (int(one) for one in expected.arrays(0, 0)["index"][:2])
    start_host()
    gateway.admit()
    gateway.serve(stream, quarantined=(first,))
    gateway.send_parts()
    gateway.expect(StreamOpened)

    assert [one[0] for one in gateway.fill(stream, 0, 0, 0, 8).answer.bad] == [first]
    gateway.send(messages.HostQuarantine(gateway.link, stream.number, [second]))
    rows = gateway.fill(stream, 0, 0, 0, 8)

    assert [one[0] for one in rows.answer.bad] == [first, second]
    assert rows.arrays["valid"].tolist() == [False, False] + 6 * [True]


def test_a_stream_that_ends_leaves_nothing_open(gateway, start_host, opened, photos) -> None:
    """The stream's index and the memory of its rows are closed; limits of storage may follow."""
    stream, _expected = opened(folder_stream(photos))
    host = start_host()
    gateway.admit()
    gateway.a_worker()

    def held() -> list[str]:
        names = descriptors_of(host.pid).values()
        return [name for name in names if "batchd-index" in name or "batchd-scratch" in name]

    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 8)
    assert len(held()) > 1

    gateway.send(messages.HostForget(gateway.link, stream.number))
    gateway.send(messages.HostStorage(gateway.link, (1000, 1, 2000)))

    wait_until(lambda: not held(), "index and rows are closed")
    again, expected = opened(folder_stream(photos), number=2)
    gateway.opened(again)
    assert same_rows(gateway.fill(again, 0, 0, 0, 8), expected, 0, 0, 0, 8)


# --- the link -------------------------------------------------------------------------------------


def test_a_gateway_that_comes_back_finds_everything_as_it_was(gateway, start_host, opened, photos) -> None:
    """The worker is the same, and no index is requested; an order of the former link is dropped."""
    stream, expected = opened(folder_stream(photos))
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    stop_worker(pid)
    for step in range(4):
        gateway.order(stream, 0, step, 0, 8)
    gateway.close()
    gateway.open()
    gateway.admit()
    gateway.serve(stream)
    assert gateway.expect(StreamOpened).stream == stream.number
    os.kill(pid, signal.SIGCONT)

    order = gateway.order(stream, 2, 1, 0, 8)

    assert same_rows(gateway.rows(order), expected, 2, 1, 0, 8)
    assert host.worker_pids() == {pid}
    assert not gateway.hears(OrderFilled, 0.2)


def test_another_daemon_at_the_address_is_served_its_own_streams(gateway, start_host, opened, photos, tmp_path) -> None:
    """The number of its stream meant another stream before."""
    write_photos(tmp_path / "others", {"cat": 9, "dog": 9}, height=72, width=96)
    first, _expected = opened(folder_stream(photos))
    second, expected = opened(folder_stream(tmp_path / "others"))
    assert first.number == second.number
    start_host()
    gateway.admit()
    gateway.opened(first)
    gateway.fill(first, 0, 0, 0, 8)
    gateway.end_link()
    gateway.admit()
    gateway.opened(second)

    assert same_rows(gateway.fill(second, 0, 0, 0, 8), expected, 0, 0, 0, 8)


def test_an_order_that_cannot_be_ends_the_link(gateway, start_host, stream) -> None:
    """The worker host registers again."""
    host = start_host()
    impossible = {
        "too many rows": (stream.number, [(0, 9)], 1),
        "a row twice": (stream.number, [(0, 2), (1, 1)], 1),
        "an unknown stream": (9, [(0, 8)], 1),
        "too many orders": (stream.number, [(0, 8)], WorkerProcesses.kind.orders_max + messages.ORDERS_MAX + 1),
    }
    for ended, (number, runs, orders) in enumerate(impossible.values(), 1):
        gateway.admit()
        gateway.opened(stream)
        worker = gateway.a_worker()
        gateway.fill(stream, 0, 0, 0, 1)
        stop_worker(*host.worker_pids())
        for order in range(100, 100 + orders):
            gateway.send(messages.FillRows(gateway.link, worker, order, number, 0, 0, runs))
        wait_until(lambda: host.log.count("an invalid order") == ended, "the worker host ends the link")  # noqa: B023
        for pid in host.worker_pids():
            os.kill(pid, signal.SIGCONT)


def test_messages_of_a_former_link_are_ignored(gateway, start_host, stream) -> None:
    """A gateway that believes the link alive has no effect."""
    start_host()
    gateway.admit()
    gateway.opened(stream)
    worker = gateway.a_worker()

    gateway.send(messages.FillRows(gateway.link + 7, worker, 1, stream.number, 0, 0, [(0, 8)]))
    gateway.send(messages.HostForget(gateway.link + 7, stream.number))

    assert not gateway.hears(OrderFilled, 0.3)
    assert gateway.fill(stream, 0, 0, 0, 8).arrays is not None


def test_a_link_that_is_closed_begins_again(gateway, start_host, stream) -> None:
    """The log has the reason."""
    host = start_host()
    gateway.admit()
    gateway.end_link("the key was revoked for a moment")

    gateway.admit()
    gateway.opened(stream)

    assert gateway.fill(stream, 0, 0, 0, 8).arrays is not None
    assert "the key was revoked for a moment" in host.log


def test_a_link_that_is_closed_for_good_ends_the_program(gateway, start_host) -> None:
    """It prints the gateway's sentence."""
    host = start_host()
    gateway.admit()
    gateway.end_link("these pixels are others", is_final=True)

    assert host.wait() == 1
    assert host.log.endswith(f"batchd: the gateway at {gateway.address} closed the link: these pixels are others\n")


@pytest.mark.parametrize(("code", "status"), [(ErrorCode.UNSUPPORTED_VERSION, 1), (ErrorCode.KEY_REFUSED, 2)])
def test_a_worker_host_that_is_refused_for_good_ends(gateway, start_host, code, status) -> None:
    """It prints the gateway's sentence."""
    host = start_host()
    gateway.expect(messages.Register)
    gateway.send(messages.Rejected(int(code), "it has batchd 0.1 and you have 0.2", is_final=True))

    assert host.wait() == status
    assert "refuses this host: it has batchd 0.1 and you have 0.2" in host.log


def test_a_worker_host_that_is_refused_for_now_tries_again(gateway, start_host) -> None:
    """The reason is too many hosts, for example."""
    host = start_host()
    gateway.expect(messages.Register)
    gateway.send(messages.Rejected(int(ErrorCode.TOO_MANY_SESSIONS), "too many links", is_final=False))

    gateway.admit()

    assert "too many links" in host.log


# --- several gateways -----------------------------------------------------------------------------


@pytest.fixture
def second(gateway):
    """Start the next gateway: its port follows that of the first one."""
    with FakeGateway(port=gateway.port + 1) as second:
        yield second


def moves(gateway, host_gateway: int, not_at: list[int]) -> None:
    """Send the next worker host to another gateway, after it has named those that refused it."""
    assert gateway.expect(messages.Register).not_at == not_at
    gateway.send(messages.Moved(host_gateway))


def test_a_worker_host_registers_where_it_is_sent(gateway, second, start_host, stream) -> None:
    """When that link ends, it registers at the first address again."""
    host = start_host()
    moves(gateway, 1, [])
    second.admit()
    second.opened(stream)
    assert second.fill(stream, 0, 0, 0, 8).arrays is not None
    assert second.address in host.log

    second.end_link("the test ends it")

    gateway.admit()
    gateway.opened(stream)
    assert gateway.fill(stream, 0, 0, 0, 8).arrays is not None


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("what", ["closed", "silent", "refuses"])
def test_a_worker_host_that_is_not_admitted_elsewhere_returns_to_the_first_gateway(
    gateway, start_host, stream, what, request
) -> None:
    """The host reports the refusal there; it does not stay disconnected."""
    second = None if what == "closed" else request.getfixturevalue("second")
    host = start_host()
    moves(gateway, 1, [])
    if what == "refuses":
        second.expect(messages.Register)
        second.send(messages.Rejected(int(ErrorCode.NOT_ALLOWED), "too many links", is_final=False))

    assert gateway.admit().not_at == [1]

    gateway.opened(stream)
    assert gateway.fill(stream, 0, 0, 0, 8).arrays is not None
    reason = {"closed": "nothing listens there", "silent": "no answer", "refuses": "too many links"}[what]
    assert any("another gateway does not admit this host" in line and reason in line for line in host.log.splitlines())
    gateway.end_link("the test ends it")
    moves(gateway, 1, [])


def test_a_worker_host_that_is_sent_to_impossible_gateways_tries_again_with_pauses(gateway, start_host) -> None:
    """The targets are this gateway, a port beyond the last one, and a gateway that refused it."""
    host = start_host()
    for impossible in (0, 65_535):
        moves(gateway, impossible, [])
    moves(gateway, 1, [])
    moves(gateway, 1, [1])
    assert gateway.admit().not_at == []
    assert host.log.count("which is not a valid one") == 3


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_orders_in_hand(gateway, start_host, opened, photos, number) -> None:
    """The orders' rows are sent, also of those that wait in the host; the exit status is 0.

    The host waits until the gateway, which has all rows then, ends the link.
    """
    stream, expected = opened(folder_stream(photos))
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 1)
    (pid,) = host.worker_pids()
    stop_worker(pid)
    orders = [gateway.order(stream, 0, step, 0, 8) for step in range(4)]
    gateway.pump(0.3)
    host.send(number)
    gateway.expect(HostLeaves)
    os.kill(pid, signal.SIGCONT)

    for step, order in enumerate(orders):
        assert same_rows(gateway.rows(order), expected, 0, step, 0, 8)
    gateway.end_link("its orders are done")
    assert host.wait(gateway) == 0
    assert "connection to the gateway ended" not in host.log


def test_a_leaving_worker_host_does_not_wait_for_a_gateway_that_hangs(gateway, start_host, stream) -> None:
    """The gateway does not end the link."""
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 1)
    host.send(signal.SIGTERM)
    gateway.expect(HostLeaves)

    assert host.wait() == 0


def test_a_second_signal_ends_at_once(gateway, start_host, stream) -> None:
    """A worker has unfinished orders."""
    host = start_host()
    gateway.admit()
    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 1)
    stop_worker(*host.worker_pids())
    third = [gateway.order(stream, 0, 0, 0, 8) for _ in range(3)][-1]
    gateway.send(WithdrawOrder(gateway.link, third.worker, third.order))
    assert gateway.rows(third).arrays is None, "the last worker has no process yet, and the host has the others"
    host.send(signal.SIGINT)
    gateway.expect(HostLeaves)
    host.send(signal.SIGINT)

    assert host.wait(gateway) == 0
    assert "stopping at once" in host.log


def test_a_signal_without_a_link_ends_at_once(start_host) -> None:
    """There is no order to finish."""
    host = start_host(address=f"tcp://127.0.0.1:{free_port()}")
    wait_until(lambda: "decoding" in host.log, "a worker is ready")
    host.send(signal.SIGTERM)

    assert host.wait() == 0


def test_a_worker_host_gives_up_without_a_gateway(start_host) -> None:
    """The host ends after the configured time, and prints the reason."""
    address = f"tcp://127.0.0.1:{free_port()}"
    host = start_host("--give-up", "1", address=address)

    assert host.wait() == 3
    assert f"no gateway at {address} has admitted this host for 1 s: nothing listens there" in host.log


def test_a_killed_worker_host_leaves_no_worker(gateway, start_host, stream) -> None:
    """The kernel ends them; the fixture looks for remains."""
    host = start_host(workers=2)
    gateway.admit()
    gateway.opened(stream)
    gateway.fill(stream, 0, 0, 0, 8)

    host.send(signal.SIGKILL)

    assert host.wait() == -signal.SIGKILL


# --- keys -----------------------------------------------------------------------------------------


def write_key(folder, key):
    """Write a connection file."""
    file = folder / f"{key.name}.key"
    file.touch(0o600)
    file.write_text(connection_file_text(key))
    return str(file)


@pytest.fixture
def keys(tmp_path):
    """Make the daemon's keys."""
    directory = KeyDirectory(tmp_path / "keys")
    directory.make_daemon_key()
    return directory


def test_rows_come_encrypted_with_a_key(start_host, opened, photos, keys, tmp_path) -> None:
    """The environment may name its file."""
    stream, expected = opened(folder_stream(photos))
    with FakeGateway(keys) as gateway:
        start_host(
            address=gateway.address, environment={"BATCHD_KEY": write_key(tmp_path, keys.new("pool", role=Role.WORKER))}
        )
        gateway.admit()
        gateway.opened(stream)
        assert same_rows(gateway.fill(stream, 0, 0, 0, 8), expected, 0, 0, 0, 8)


def test_a_revoked_key_ends_the_program(start_host, keys, tmp_path) -> None:
    """The message names the key; the exit status is that of key files."""
    key = write_key(tmp_path, keys.new("pool", role=Role.WORKER))
    keys.new("other", role=Role.WORKER)
    keys.revoke("pool")
    with FakeGateway(keys) as gateway:
        host = start_host("--key", key, address=gateway.address)

        assert host.wait(gateway) == 2
        assert "does not know the key 'pool'" in host.log


def test_a_key_of_another_daemon_is_not_taken(start_host, keys, tmp_path) -> None:
    """The handshake fails without a reason, so the program retries until its timeout."""
    others = KeyDirectory(tmp_path / "others")
    others.make_daemon_key()
    keys.new("pool", role=Role.WORKER)
    with FakeGateway(keys) as gateway:
        host = start_host(
            "--key",
            write_key(tmp_path, others.new("pool", role=Role.WORKER)),
            "--give-up",
            "2",
            address=gateway.address,
        )

        assert host.wait(gateway) == 3
        assert (
            f"no gateway at {gateway.address} has admitted this host for 2 s: the handshake failed: the key is "
            in host.log
        )


def test_a_gateway_with_keys_wants_one(start_host, keys) -> None:
    """The program names the option for it."""
    keys.new("pool", role=Role.WORKER)
    with FakeGateway(keys) as gateway:
        host = start_host("--give-up", "2", address=gateway.address)

        assert host.wait(gateway) == 3
        assert "the daemon probably requires a key (--key FILE)" in host.log


def test_a_worker_host_names_a_gateway_that_it_cannot_find_at_once(start_host, keys, tmp_path) -> None:
    """The first warning says so, not only the last line; no setting of the daemon would help."""
    key = write_key(tmp_path, keys.new("pool", role=Role.WORKER))
    host = start_host("--key", key, address="tcp://no-such-host.invalid:7072")

    wait_until(lambda: "gateway does not admit this host" in host.log, "it has tried once")

    (line,) = [line for line in host.log.splitlines() if "gateway does not admit this host" in line]
    assert "the host 'no-such-host.invalid' is not known here" in line
    assert "worker_address" not in host.log
    host.send(signal.SIGTERM)
    assert host.wait() == 0


def test_the_key_of_a_trainer_is_not_taken(keys, tmp_path) -> None:
    """The gateway would refuse it; the message says how to make the right one."""
    key = write_key(tmp_path, keys.new("gpu-7"))

    done = batchd("worker", "tcp://127.0.0.1:1", "--key", key, status=2)

    assert "is the key of a trainer; a worker host needs a key of its own" in done.stderr


def test_another_host_is_not_dialled_without_a_key() -> None:
    """Rows and orders would travel unencrypted."""
    done = batchd("worker", "tcp://gpu1.example:7072", status=2)

    assert "tcp://gpu1.example:7072 is another host, which needs a key" in done.stderr
    assert "batchd keys new --role worker" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ipc:///run/batchd"], "worker hosts need a network address"),
        (["tcp://127.0.0.1:1", "--map", "data=/mnt"], "is not FROM=TO with absolute paths"),
        (["tcp://127.0.0.1:1", "--cache-dir", "/tmp"], "--cache-dir and --cache-size"),
        (["tcp://127.0.0.1:1", "--cache-memory", "much"], "no amount of memory"),
        (["tcp://127.0.0.1:1", "--key", "/nowhere.key"], "there is no file /nowhere.key"),
    ],
)
def test_wrong_words_are_refused(words, text) -> None:
    """The error comes before any process starts."""
    assert text in " ".join(batchd("worker", *words, status=2).stderr.split())
