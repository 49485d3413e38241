"""Push sources: options, samples in their places, and how a worker handles any bytes there."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.composed.options import ConcatSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.push.options import PushSource
from batchd.data.sources.push.reader import PushReader
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import MemoryTooSmall
from batchd.runtime.slots import MailboxMemory
from batchd.stream.rings import plan_rings
from batchd_client.errors import ProtocolError, SampleInvalid
from batchd_client.memory import Mailbox
from batchd_client.producer import pack_sample
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.mailbox import MailColumn, PlaceLayout, place_layout_from_wire

FIELDS = {"image": "image", "wave": "float32[?,2]", "name": "text", "grid": "bool[2,3]", "label": "int16"}
SAMPLE = {
    "image": b"\xff\xd8not really",
    "wave": np.arange(10, dtype=np.float32).reshape(5, 2),
    "name": "Zoë",
    "grid": np.eye(2, 3, dtype=bool),
    "label": -5,
}


@pytest.fixture
def mailbox():
    """Return a function that makes mailboxes: (source, reader, writable descriptor)."""
    opened = []

    def make(fields=FIELDS, *, capacity=3, max_bytes=1 << 20, **options):
        source = PushSource(fields=fields, capacity=capacity, **({"sample_bytes_max": "4KiB"} | options))
        memory = MailboxMemory(source.mailbox_bytes)
        index = kind_of(source).scan(source, Survey(lambda _found: None))
        reader = open_reader(source, index, max_bytes, Storage())
        assert isinstance(reader, PushReader)
        reader.attach(os.dup(memory.readable))
        opened.append((memory, reader))
        return source, reader, memory.writable

    yield make
    for memory, reader in opened:
        reader.close()
        memory.close()


def write(source: PushSource, descriptor: int, place: int, sample: dict[str, Any]) -> None:
    """Write a sample into its place, as a producer does."""
    values, lengths = pack_sample(source.layout, sample)
    start = place * source.layout.place_bytes
    for offset, data in [(0, memoryview(lengths)), *values]:
        os.pwrite(descriptor, data, start + offset)


def test_a_sample_is_read_as_it_was_written(mailbox):
    """Every kind of value is read from the place that the order names."""
    source, reader, descriptor = mailbox()
    write(source, descriptor, 2, SAMPLE)
    reader.expect(70, (0, 2))
    values = reader.read(71)
    assert bytes(values["image"]) == SAMPLE["image"]
    assert values["name"] == "Zoë"
    for name in ("wave", "grid", "label"):
        want = np.asarray(SAMPLE[name], {"wave": np.float32, "grid": bool, "label": np.int16}[name])
        assert values[name].dtype == want.dtype
        assert np.array_equal(values[name], want)
    assert reader.name(71) == "pushed sample 71"
    assert not reader.known(71)


def test_what_is_read_is_a_copy(mailbox):
    """Later writes of the producer into the place do not change the values."""
    source, reader, descriptor = mailbox()
    write(source, descriptor, 0, SAMPLE)
    reader.expect(0, (0,))
    values = reader.read(0)
    os.pwrite(descriptor, b"\xaa" * source.layout.place_bytes, 0)
    assert bytes(values["image"]) == SAMPLE["image"]
    assert values["label"] == -5


@given(place=st.binary(max_size=400), lengths=st.lists(st.integers(0, (1 << 64) - 1), min_size=3, max_size=3))
def test_whatever_is_in_a_place_is_a_sample_or_a_reason(place, lengths):
    """Values have the declared types, and are in the worker's own memory."""
    source = PushSource(fields=FIELDS, capacity=1, sample_bytes_max="1KiB")
    memory = MailboxMemory(source.mailbox_bytes)
    reader = PushReader(source, 512)
    reader.attach(os.dup(memory.readable))
    try:
        os.pwrite(memory.writable, b"".join(one.to_bytes(8, "little") for one in lengths) + place, 0)
        reader.expect(0, (0,))
        try:
            values = reader.read(0)
        except SampleUnreadable:
            return
        assert values["grid"].shape == (2, 3)
        assert set(values["grid"].view(np.uint8).ravel().tolist()) <= {0, 1}
        assert values["wave"].shape == (lengths[1], 2)
        assert len(values["image"]) == lengths[0] <= 512
        assert isinstance(values["name"], str)
    finally:
        reader.close()
        memory.close()


columns = st.lists(
    st.tuples(
        st.sampled_from([*ITEM_BYTES, "image", "text"]),
        st.lists(st.sampled_from([None, 1, 2, 3, 17]), max_size=3),
    ),
    min_size=1,
    max_size=6,
).map(
    lambda drawn: tuple(
        MailColumn(f"c{number}", kind, (None,) if kind in ("image", "text") else tuple(shape))
        for number, (kind, shape) in enumerate(drawn)
    )
)


@given(columns, st.integers(1, 5000), st.data())
def test_no_value_lies_outside_of_its_place(columns, sample_bytes_max, data):
    """Any lengths either fit or are rejected, and no two values overlap."""
    layout = PlaceLayout(columns, sample_bytes_max)
    assert place_layout_from_wire(layout.to_wire()) == layout
    length = st.integers(0, 40) | st.integers(0, (1 << 64) - 1)
    lengths = data.draw(st.lists(length, min_size=layout.open_lengths, max_size=layout.open_lengths))
    assert layout.unpack_lengths(layout.pack_lengths(lengths)) == lengths
    try:
        extents = layout.extents(lengths)
    except ValueError:
        return
    end = layout.values_start
    for extent in extents:
        assert extent.start >= end
        assert extent.start % 64 == 0
        end = extent.start + extent.size
    assert end <= layout.place_bytes


@pytest.mark.parametrize(
    "wire",
    [
        3,
        [],
        [[], 5],
        [[["a", "uint8", [1]]], -1],
        [[["a", "uint8", [1]], ["a", "uint8", [1]]], 0],
        [[["a", "object", [1]]], 0],
        [[["a", "uint8", [0]]], 0],
        [[["a", "uint8", [True]]], 0],
        [[["a", "uint8", [1] * 9]], 0],
        [[["a", "image", [3]]], 0],
        [[["a", "uint8", [1 << 40, 1 << 40]]], 0],
        [[["a", "uint8", [None]]], 1 << 60],
    ],
)
def test_a_daemon_cannot_describe_a_mailbox_that_cannot_be(wire):
    """A producer computes the addresses of its writes from this description."""
    with pytest.raises(ValueError, match=r"column|place"):
        place_layout_from_wire(wire)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label": None}, "^'label' is None, and has to be int16"),
        ({"label": "a"}, "^'label' is str 'a', and has to be int16"),
        ({"label": "7"}, "^'label' is str '7', and has to be int16"),
        ({"label": {}}, "^'label' is dict {}, and has to be int16"),
        ({"label": 1 << 70}, f"^'label' is int {1 << 70}, and has to be int16"),
        ({"wave": [[1, 2], [3]]}, r"^'wave' is list \[\[1, 2\], \[3\]\], and has to be float32\[\?,2\]"),
        ({"wave": ["x"] * 99}, r"^'wave' is list .{60}…, and has to be float32\[\?,2\]"),
        ({"label": 40_000}, "cannot hold 40000"),
        ({"label": 1.5}, r"cannot hold 1\.5"),
        ({"label": np.array(3, np.int64)}, r"'label' is int64\[\], and has to be int16"),
        ({"label": [1]}, "has to be int16"),
        ({"wave": np.zeros((5, 3), np.float32)}, r"float32\[5, 3\], and has to be float32\[\?,2\]"),
        ({"wave": np.zeros((5, 2), ">f4")}, "wave"),
        ({"wave": "12"}, "wave"),
        ({"image": "path.jpg"}, "^'image' is str 'path.jpg', and has to be the bytes of an image file"),
        ({"image": 7}, "^'image' is int 7, and has to be the bytes of an image file"),
        ({"image": bytes(5000)}, "sample_bytes_max = 4096"),
        ({"name": b"bytes"}, "^'name' is bytes b'bytes', and has to be a str"),
        ({"name": "\ud800"}, "^'name' has half a character in it, which no UTF-8 can hold"),
        ({"more": 1}, "has to have"),
    ],
)
def test_a_producer_is_told_what_is_wrong_with_its_sample(changes, said):
    """The check runs before the producer asks for a place."""
    layout = PushSource(fields=FIELDS, sample_bytes_max="4KiB").layout
    with pytest.raises(SampleInvalid, match=said):
        pack_sample(layout, SAMPLE | changes)


@pytest.mark.parametrize(("sample", "shown"), [(None, "None"), ([1, 2], r"list \[1, 2\]"), (7, "int 7")])
def test_what_is_no_sample_at_all_is_said_to_be_none(sample, shown):
    """The error lists the required fields."""
    layout = PushSource(fields={"label": "int16"}).layout
    with pytest.raises(SampleInvalid, match=rf"^a sample has to be a dict with the fields \['label'\], and is {shown}"):
        pack_sample(layout, sample)


@pytest.mark.parametrize("value", [3, np.int16(3), 3.0, True, np.array(3, np.int16), np.uint8(3)])
def test_numbers_that_fit_are_taken(mailbox, value):
    """Any form of a number is accepted."""
    source, reader, descriptor = mailbox({"label": "int16"})
    write(source, descriptor, 0, {"label": value})
    reader.expect(0, (0,))
    assert reader.read(0)["label"] == int(value)


def test_arrays_in_any_order_of_memory_are_taken(mailbox):
    """Views, steps and Fortran order are written element after element."""
    source, reader, descriptor = mailbox({"a": "uint8[3,4]", "b": "uint8[?]"})
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    write(source, descriptor, 1, {"a": array, "b": np.arange(20, dtype=np.uint8)[::-3]})
    reader.expect(0, (1,))
    values = reader.read(0)
    assert np.array_equal(values["a"], array)
    assert values["b"].tolist() == list(range(19, -1, -3))


def test_an_image_that_no_step_takes_is_a_bad_sample(mailbox):
    """The limit is that of the decode step."""
    source, reader, descriptor = mailbox({"image": "image"}, max_bytes=100)
    write(source, descriptor, 0, {"image": bytes(101)})
    reader.expect(0, (0,))
    with pytest.raises(SampleUnreadable, match="101 bytes, more than max_bytes = 100"):
        reader.read(0)


@pytest.mark.parametrize(
    "options",
    [
        {"fields": {}},
        {"fields": {"a": "uint9"}},
        {"fields": {"1a": "uint8"}},
        {"capacity": 0},
        {"capacity": 1 << 30},
        {"sample_bytes_max": "many"},
        {"sample_bytes_max": "0B"},
        {"fields": {"a": "image"}, "sample_bytes_max": "1TiB"},
    ],
)
def test_senseless_settings_are_refused(options):
    """The error names the key."""
    with pytest.raises(ValueError, match=r"fields|uint9|1a|capacity|sample_bytes_max|amount|places"):
        PushSource(**({"fields": {"a": "uint8[4]"}} | options))


def stream(**changes: Any) -> StreamConfig:
    source = PushSource(fields={"a": "uint8[4]"}, capacity=changes.pop("capacity", 16))
    return StreamConfig(source=source, batch_size=4, **changes)


def test_a_live_stream_has_its_own_defaults():
    """Options that can have only one value need not be set."""
    made = stream()
    assert (made.is_shuffled, made.lag, made.on_error) == (False, "lockstep", "mask")
    assert stream(on_error="fail", max_skew=3).on_error == "fail"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shuffle": True}, "shuffle = true cannot be done"),
        ({"lag": "independent"}, "lockstep"),
        ({"on_error": "substitute"}, '"mask" or "fail"'),
        ({"capacity": 3}, "capacity must be batch_size or more"),
    ],
)
def test_what_needs_samples_at_any_time_is_refused(changes, said):
    """`batchd check` rejects these, with the reason."""
    with pytest.raises(ValueError, match=said):
        stream(**changes)


def test_a_live_source_is_no_part_of_another():
    """The number of its samples is unknown before they arrive."""
    with pytest.raises(ValueError, match='samples of type "push" have no numbers'):
        ConcatSource(sources=(PushSource(fields={"a": "uint8"}),))


def test_the_mailbox_is_part_of_the_streams_memory():
    """The error for too little memory includes the mailbox."""
    made = stream(capacity=1000)
    (ring,) = plan_rings(Config(daemon=DaemonConfig(memory=6 << 20), streams={"a": made}), Storage()).values()
    assert ring.mailbox_bytes == 1000 * 4096
    assert ring.ring_bytes <= 6 << 20
    assert ring.slots_max == ((6 << 20) - ring.mailbox_bytes) // ring.layout.slot_bytes
    with pytest.raises(MemoryTooSmall, match=r"2 slots of 4 samples and the mailbox.*a smaller capacity"):
        plan_rings(Config(daemon=DaemonConfig(memory=2 << 20), streams={"a": made}), Storage())


def test_a_mailbox_that_is_not_sealed_is_not_written_into():
    """Without the seal a daemon could truncate it; a mailbox of the wrong size is rejected, too."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ProtocolError, match="seal"):
        Mailbox(descriptor, 4096)
    memory = MailboxMemory(8192)
    with pytest.raises(ProtocolError, match="8192"):
        Mailbox(memory.open_writable(), 4096)
    memory.close()
