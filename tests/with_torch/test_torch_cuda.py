"""The torch loader's way to a GPU, on a stand-in that copies late (``support.fake_cuda``)."""

import gc
import logging
from collections import deque
from itertools import chain, repeat

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

import batchd_client  # noqa: E402
from batchd_client.errors import ReconnectTimeout  # noqa: E402
from batchd_client.hints import log_once  # noqa: E402
from batchd_client.memory import SlotMemory  # noqa: E402
from batchd_client.torch import BatchdLoader  # noqa: E402
from batchd_client.torch.cuda import REGISTER_PORTABLE, REGISTER_READ_ONLY, STEPS_AHEAD_MAX  # noqa: E402
from batchd_client.torch.tensors import over  # noqa: E402
from support.device_streams import assert_same, bare, idle, streams_over  # noqa: E402
from support.fake_cuda import FakeCuda, mappings  # noqa: E402
from support.network import free_port  # noqa: E402
from support.settings import SLOT_BYTES  # noqa: E402
from support.waiting import wait_until  # noqa: E402

NEVER = 1 << 30
STEPS = 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos, sizes):
    """Serve on this host, and over TCP."""
    return start_shared_daemon(
        streams_over(photos, sizes), tcp=f"127.0.0.1:{free_port()}", memory="16MiB", writable_slots=True
    )


@pytest.fixture(scope="module")
def tight(start_shared_daemon, photos, sizes):
    """Serve from a ring of four slots: enough for a trainer, and for one that is leaving."""
    return start_shared_daemon(streams_over(photos, sizes, memory=4 * SLOT_BYTES))


@pytest.fixture(scope="module")
def tiny(start_shared_daemon, photos, sizes):
    """Serve from a ring of two slots, the minimum."""
    return start_shared_daemon(streams_over(photos, sizes, memory=2 * SLOT_BYTES))


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("where", ["address", "tcp_address"])
@pytest.mark.parametrize("stream", ["photos", "padded", "ragged", "cropped", "letterboxed", "mosaic"])
def test_every_tensor_is_the_bare_clients_batch(daemon, cuda, load, stream, where):
    """The source is the ring, or the memory that receives TCP batches. All tensors are kept."""
    expected = bare(daemon, stream, epochs=2)
    for prefetch in (0, 2, 7):
        loader = load(daemon, stream, prefetch=prefetch, address=getattr(daemon, where))
        given = [batch for _ in range(2) for batch in loader]
        for batch, one in zip(given, expected, strict=True):
            assert_same(batch, one)
    assert cuda.copies["registered"] > 0
    assert cuda.copies["locked"] == cuda.copies["blocking"] == 0


def test_what_is_done_to_images_is_done_on_the_device(daemon, load):
    """Type, normalisation and layout equal those of tensors on the host."""
    options = {"normalize": (MEAN, STD), "channels_last": True, "fields": ["image"], "as_dict": False}
    host = BatchdLoader("photos", address=daemon.address, **options)
    for (ours,), (theirs,) in zip(load(daemon, **options), host, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous(memory_format=torch.channels_last)
    host.close()


def test_prefetch_batches_are_under_way_ahead_of_the_loop(daemon, cuda, load):
    """Copies are queued once the batches arrive; a checkpoint does not count such batches."""
    cuda.patience = NEVER
    loader = load(daemon, prefetch=2)
    next(iter(loader))
    prefetcher = loader._opened.prefetcher
    wait_until(lambda: prefetcher._look_ahead() or len(prefetcher._queue) == 1 + 2, "two batches have arrived")
    prefetcher._look_ahead()
    assert len(cuda.queue) == 2 * len(loader.schema)
    assert loader.state_dict()["step"] == 1


# --- how long a batch is held ---------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("prefetch", "patience"), [(0, 1), (0, NEVER), (1, 3), (2, 1), (7, 1), (7, NEVER)])
def test_a_small_ring_and_late_copies_neither_spoil_a_batch_nor_stop_the_loop(tight, cuda, load, prefetch, patience):
    """Slots are reused only after they were read; the loop waits while all are being read."""
    cuda.patience = patience
    expected = bare(tight, epochs=8)
    loader = load(tight, prefetch=prefetch)
    given = [batch for _ in range(8) for batch in loader]
    for batch, one in zip(given, expected, strict=True):
        assert_same(batch, one)
    # The first registration is the trial.
    assert len(cuda.all_registered) - 1 <= tight.stream_status()["slots"] <= 4


def test_a_lease_ends_when_the_event_has_happened(daemon, cuda, load):
    """The lease stays until then, though the loop has long continued."""
    cuda.patience = NEVER
    loader = load(daemon, prefetch=0)
    batches = iter(loader)
    next(batches)
    assert loader.statistics().batches_held == 1
    cuda.patience = 1
    next(batches)
    assert loader.statistics().batches_held == 1
    cuda.patience = NEVER
    loader._opened.prefetcher._placement.sweep()
    assert loader.statistics().batches_held == 1
    cuda.patience = 1
    loader._opened.prefetcher._placement.sweep()
    assert loader.statistics().batches_held == 0


def test_moving_drops_what_is_under_way_but_does_not_give_it_back_unread(daemon, cuda, load):
    """The queued copies go to memory that no code reads."""
    cuda.patience = NEVER
    loader = load(daemon)
    next(iter(loader))
    loader.set_epoch(3)
    given = list(loader)
    for batch, expected in zip(given, bare(daemon, epochs=4)[3 * STEPS :], strict=True):
        assert_same(batch, expected)


@pytest.mark.parametrize("where", ["address", "tcp_address"])
def test_closing_waits_for_copies_that_are_queued(daemon, cuda, load, where):
    """Afterwards memory is unregistered, then unmapped; the daemon has its slots back."""
    cuda.patience = NEVER
    loader = load(daemon, address=getattr(daemon, where))
    batch = next(iter(loader))
    assert cuda.registered
    loader.close()
    assert not cuda.registered
    assert not cuda.queue
    assert_same(batch, bare(daemon)[0])
    wait_until(lambda: idle(daemon), "the daemon has its slots back")


def test_a_loader_that_is_forgotten_leaves_nothing_registered(daemon, cuda):
    """The program need not close it."""
    loader = BatchdLoader("photos", address=daemon.address, device="cuda")
    next(iter(loader))
    del loader
    gc.collect()
    assert not cuda.registered
    wait_until(lambda: idle(daemon), "the daemon has its slots back")


@pytest.mark.parametrize("refuses", [False, True], ids=["unregisters", "refuses to unregister"])
def test_a_device_that_broke_down_leaves_nothing_registered_or_mapped(daemon, cuda, refuses):
    """Each piece is tried, whatever the device answers; the error reports the fault."""
    cuda.patience = NEVER
    loader = BatchdLoader("photos", address=daemon.address, device="cuda", prefetch=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    slots = list(cuda.registered.values())
    assert len(slots) > 1
    cuda.break_down(refuses=refuses)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(batches)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loader.close()
    assert sorted(cuda.tried) == sorted(one.address for one in slots)
    del batches
    gc.collect()
    present = {(one.start, one.inode) for one in mappings()}
    assert not [one for one in slots if (one.address, one.inode) in present]
    loader.close()
    wait_until(lambda: idle(daemon), "the daemon has its slots back")


def test_no_copy_is_waited_for_where_the_next_batch_has_come(daemon, cuda, load):
    """Nor does the loop wait while the ring has room for the next batch beside those being read."""
    cuda.patience = NEVER
    loader = load(daemon, prefetch=0)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert cuda.waits == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_moves_in_the_smallest_ring_waits_for_its_own_copies(tiny, cuda, load, prefetch):
    """The slots under copy would otherwise keep the loop from its new claim."""
    cuda.patience = NEVER
    expected = bare(tiny, epochs=8)
    loader = load(tiny, prefetch=prefetch)
    for epoch in (3, 5, 7, 2):
        loader.set_epoch(epoch)
        for step, batch in zip(range(3), loader, strict=False):
            assert_same(batch, expected[STEPS * epoch + step])


# --- interrupts -----------------------------------------------------------------------------------


def read_with_interrupts(loader, cuda, batches):
    """Read so many batches of a loader; the loop restarts after each interrupt."""
    given = []
    while len(given) < batches:
        try:
            for batch in loader:
                given.append(batch)
                if len(given) == batches:
                    break
        except KeyboardInterrupt:
            cuda.interrupt(None)
    return given


@pytest.mark.parametrize("stream", ["photos", "padded", "ragged"])
@pytest.mark.parametrize("size", [3, 12])
def test_batches_of_an_own_size_come_from_slots_and_from_own_memory(daemon, cuda, load, stream, size):
    """Parts of a slot are at several rows of one memory; copies are in memory of their own."""
    expected = bare(daemon, stream, epochs=2, batch_size=size)
    loader = load(daemon, stream, batch_size=size)
    given = [batch for _ in range(2) for batch in loader]
    for batch, one in zip(given, expected, strict=True):
        assert_same(batch, one)
    assert cuda.copies["registered"] > 0


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("mode", "size"),
    [("direct", None), ("staged", None), ("direct", 3), pytest.param("direct", 12, marks=pytest.mark.slow)],
)
def test_an_interrupt_in_any_call_loses_and_repeats_nothing(tight, cuda, load, mode, size, after):
    """No batch is released before its queued copy; the sweep covers all calls of five batches."""
    cuda.takes_any = mode == "direct"
    expected = bare(tight, epochs=2, batch_size=size)[:5]
    place = 0
    while True:
        place += 1
        loader = load(tight, batch_size=size)
        cuda.interrupt(place, after=after)
        given = read_with_interrupts(loader, cuda, 5)
        is_over = cuda._interrupt_at is not None
        cuda.interrupt(None)
        for batch, one in zip(given, expected, strict=True):
            assert_same(batch, one)
        loader.close()
        assert not cuda.registered
        if is_over:
            break
    assert place > 40


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupted_close_can_be_done_again(daemon, cuda, load, after):
    """Memory stays registered and mapped until a close is complete."""
    cuda.patience = NEVER
    place, is_over = 0, False
    while not is_over:
        place += 1
        loader = load(daemon)
        next(iter(loader))
        cuda.interrupt(place, after=after)
        try:
            loader.close()
            is_over = True
        except KeyboardInterrupt:
            loader.close()
        cuda.interrupt(None)
        assert not cuda.registered
    assert place > 4
    wait_until(lambda: idle(daemon), "the daemon has its slots back")


# --- what is registered ---------------------------------------------------------------------------


def test_each_slot_is_registered_once(daemon, cuda, load):
    """The number of batches in a slot does not matter; it is read-only, as it is mapped."""
    loader = load(daemon)
    for _ in range(4):
        list(loader)
    slots = cuda.all_registered[1:]  # the first one is the trial
    assert len({one.address for one in slots}) == len(slots) <= daemon.stream_status()["slots"]
    assert {one.flags for one in cuda.all_registered} == {REGISTER_PORTABLE | REGISTER_READ_ONLY}
    loader.close()
    assert cuda.unregistered == len(cuda.all_registered)


def test_what_is_copied_from_is_made_once_for_each_slot(tight, load, monkeypatch):
    """Sixty batches are in the same four slots: a tensor over them keeps no lease."""
    made = []
    monkeypatch.setattr("batchd_client.torch.cuda.over", lambda array: made.append(array) or over(array))
    loader = load(tight, prefetch=0)
    for _ in range(12):
        assert len(list(loader)) == STEPS
    assert len(loader.schema) <= len(made) <= 4 * len(loader.schema)


def test_after_a_restart_of_the_daemon_its_new_slots_are_registered_and_the_old_ones_are_not(start_daemon, cuda, load):
    """Old slots are unregistered before they are unmapped, amid copies; the loop continues."""
    daemon = start_daemon()
    cuda.patience = 3
    expected = bare(daemon, epochs=3)
    loader = load(daemon)
    given = list(loader)
    before = dict(cuda.registered)
    daemon.restart()
    given += list(loader)
    given += list(loader)
    for batch, one in zip(given, expected, strict=True):
        assert_same(batch, one)
    assert before
    assert not any(cuda.registered.get(address) is one for address, one in before.items())
    assert cuda.registered


@pytest.mark.parametrize("way", ["address", "tcp_address"])
def test_while_the_daemon_is_away_nothing_is_registered_or_mapped(start_daemon, cuda, load, way):
    """The loader waits for copies under way: the next daemon needs the memory.

    It first gives out the batches that had arrived over TCP, perhaps a whole epoch.
    """
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    cuda.patience = 3
    loader = load(daemon, address=getattr(daemon, way), reconnect_timeout_s=0.2)
    list(loader)
    assert cuda.registered
    daemon.kill()
    with pytest.raises(ReconnectTimeout):
        deque(chain.from_iterable(repeat(loader)), maxlen=0)
    assert not cuda.registered
    assert not loader.stream.memories()


def test_where_no_read_only_memory_is_registered_slots_are_mapped_writable(daemon, cuda, load):
    """The operator allows it here: batches are copied straight from the ring."""
    cuda.takes_read_only = False
    for batch, expected in zip(load(daemon), bare(daemon), strict=True):
        assert_same(batch, expected)
    assert cuda.copies["registered"] > 0
    assert cuda.copies["locked"] == 0
    assert {one.flags for one in cuda.all_registered} == {REGISTER_PORTABLE}


@pytest.mark.parametrize("stream", ["photos", "padded", "ragged"])
def test_memory_that_is_not_registered_is_copied_by_the_cpu(tight, cuda, load, stream):
    """The tensors are equal, and a batch is released at once."""
    cuda.takes_any = False
    cuda.patience = NEVER
    expected = bare(tight, stream, epochs=2)
    loader = load(tight, stream)
    given = []
    for _ in range(2):
        for batch in loader:
            given.append(batch)
            assert loader.statistics().batches_held == 0
    for batch, one in zip(given, expected, strict=True):
        assert_same(batch, one)
    assert cuda.copies["registered"] == 0
    assert cuda.copies["locked"] > 0


@pytest.fixture
def told(caplog):
    """Return the client's log lines from now on."""
    log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="batchd_client")
    return caplog


@pytest.mark.parametrize(
    ("name", "said"), [("tight", "set writable_slots = true in [daemon]"), ("daemon", "is `ulimit -l` too low?")]
)
def test_one_line_says_what_would_save_the_copy(request, cuda, told, name, said):
    """The line comes once per program: it has the setting, or the reason if that is set."""
    cuda.takes_any = False
    for _ in range(2):
        with BatchdLoader("photos", address=request.getfixturevalue(name).address, device="cuda") as loader:
            list(loader)
    (record,) = told.records
    assert record.levelno == logging.INFO
    assert said in record.getMessage()


def test_once_the_operator_allows_it_the_next_session_is_read_straight_from_the_ring(start_daemon, cuda, load):
    """The loader requests it after the restart, as read-only memory was refused."""
    daemon = start_daemon()
    cuda.takes_read_only = False
    expected = bare(daemon, epochs=3)
    loader = load(daemon)
    given = list(loader)
    assert cuda.copies["registered"] == 0
    daemon.config.write_text(daemon.config.read_text().replace("[daemon]", "[daemon]\nwritable_slots = true"))
    daemon.restart()
    for _ in range(2):  # the first one may have been ready before the restart
        given += list(loader)
    assert cuda.copies["registered"] > 0
    for batch, one in zip(given, expected, strict=True):
        assert_same(batch, one)


def test_the_memory_that_batches_over_tcp_are_received_into_is_registered(daemon, cuda, load):
    """Each buffer is registered once; it is the program's own, and writable."""
    cuda.takes_read_only = False
    loader = load(daemon, address=daemon.tcp_address)
    for _ in range(3):
        list(loader)
    assert {one.flags for one in cuda.all_registered} == {REGISTER_PORTABLE}
    made = loader.stream.memories()
    assert {one.address for one in cuda.all_registered} == {one.address for one in made}
    assert not any(isinstance(one, SlotMemory) for one in made)


# --- the stand-in itself --------------------------------------------------------------------------


def test_the_stand_in_notices_a_batch_that_is_given_back_too_early(daemon):
    """The tests above would otherwise show nothing."""
    with batchd_client.connect(daemon.address, writable_slots=True) as connection:
        batch = next(iter(connection.stream("photos")))
        memory = batch.memory
        source = torch.frombuffer(memory.page, dtype=torch.uint8)[4096:8192]
        for spoil, fault in (
            (True, "a batch stays until it has been read"),
            (False, "it is registered until it is read"),
        ):
            cuda = FakeCuda()
            assert cuda.register(memory.address, memory.slot_bytes, REGISTER_PORTABLE)
            with cuda.aside():
                target = torch.empty_like(source).copy_(source, non_blocking=True)
            assert not torch.equal(target, source)
            if spoil:
                memory.page[5000] ^= 1
            else:
                cuda.registered.clear()
            with pytest.raises(AssertionError, match=fault):
                cuda.mark().synchronize()
            memory.page[5000] ^= spoil
        del source


def test_a_loop_that_never_looks_at_the_device_is_held_up_a_few_steps_ahead_of_it(daemon, cuda):
    """Otherwise batches would fill the device's memory as fast as the daemon makes them."""
    with BatchdLoader("photos", address=daemon.address, device="cuda") as loader:
        for taken, _batch in enumerate((batch for _ in range(4) for batch in loader), 1):
            waited_for = [step.is_reached for step in cuda.steps]
            assert len(waited_for) == taken
            assert waited_for == [number < taken - STEPS_AHEAD_MAX for number in range(taken)]
