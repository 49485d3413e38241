"""A remote daemon sends almost valid messages: each call ends by its deadline, or with an error.

The client believes what it cannot check: other pixels, another label. It never reads or writes
outside its own buffers, and its next connection to an honest daemon works as usual.
"""

import time
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchd_client
from batchd_client.errors import BatchdClientError, DaemonUnavailable, ProtocolError
from batchd_wire.fields import SLOT_BYTES_MAX
from batchd_wire.messages import TO_TRAINER_REMOTE, Greeted, Parcel, Subscribed
from batchd_wire.tcp import PIECE_BYTES
from support.fake_remote import FakeRemoteDaemon, honest
from support.fuzzer import PLAIN
from support.hostile_messages import corpus, encode, hostile_messages, mutated
from support.waiting import PATIENCE_S

DEADLINE_S = 0.1
SHORT = {"reconnect_timeout_s": DEADLINE_S, "batch_timeout_s": DEADLINE_S}
ENDS_WITHIN_S = PATIENCE_S / 4
"""Far above several deadlines in a row, including the time to diagnose a failure."""
SPOILT_SHARE = 0.1


@pytest.fixture(scope="module")
def fake():
    """Start a daemon that does whatever a test asks for."""
    with FakeRemoteDaemon() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _honest_in_the_end(fake):
    """After all messages, the next connection reads an epoch."""
    yield
    fake.alter = honest
    with batchd_client.connect(fake.address) as daemon:
        assert [batch["image"].max() for batch in daemon.stream("photos", epochs=1)] == [0, 1, 2, 3, 4]


def train(fake):
    """Send every query and read an epoch, until the client's own error or the deadline."""
    began_s = time.monotonic()
    with (
        suppress(BatchdClientError),
        batchd_client.connect(fake.address, connect_timeout_s=DEADLINE_S, **SHORT) as daemon,
    ):
        daemon.status()
        stream = daemon.stream("photos", epochs=1)
        daemon.bad("photos")
        len(stream)
        with np.errstate(all="ignore"):
            for batch in stream:
                for value in batch.values():
                    for array in value if isinstance(value, list) else [value]:
                        array.sum()
    assert time.monotonic() - began_s < ENDS_WITHIN_S


def fields_of(message):
    """Return the fields of a message, by name."""
    return {name: getattr(message, name) for name in message.field_names}


# --- messages that are well formed, more or less, and frames that are not those which are due -----

layouts = st.builds(
    lambda dtype, shape, offset, rows, slot_bytes: [[["image", dtype, shape, offset, "", []]], rows, slot_bytes],
    st.sampled_from(["uint8", "float16", "bool", "object"]),
    st.lists(st.sampled_from([0, 1, 2, 1 << 20, 1 << 40]), max_size=3),
    st.sampled_from([0, 4096, 4097, 8192, 1 << 39]),
    st.sampled_from([0, 1, 4, 5, 1 << 40]),
    st.sampled_from([0, 4096, 8192, 1 << 30, SLOT_BYTES_MAX, SLOT_BYTES_MAX + 1]),
)
varying_layouts = st.builds(
    lambda shape, kind, axes, sizes: [
        [["image", "uint8", shape, 4096, kind, axes], ["image_shape", "int32", sizes, 4160, "", []]],
        4,
        8192,
    ],
    st.sampled_from([[2, 2, 3], [12, 1], [3, 4], [1, 12, 1], [1 << 20, 1 << 20]]),
    st.sampled_from(["padded", "ragged", "", "jagged"]),
    st.just([0, 1]) | st.lists(st.integers(-1, 3), max_size=3),
    st.just([2]) | st.sampled_from([[], [1], [3]]),
)
"""They fit the honest daemon's frames, so that the client takes its labels for sizes of images."""
FRAME_CHANGES = {
    "as they are": lambda frames: frames,
    "the first alone": lambda frames: frames[:1],
    "without the last": lambda frames: frames[:-1],
    "one too many": lambda frames: [*frames, b""],
    "a long one too many": lambda frames: [*frames, bytes(1000)],
    "an empty one first": lambda frames: [b"", *frames],
    "all empty": lambda frames: [frames[0], *(b"" for _ in frames[1:])],
    "the last cut": lambda frames: [*frames[:-1], frames[-1][:-1]],
    "the last longer": lambda frames: [*frames[:-1], frames[-1] + b"!"],
    "twice": lambda frames: frames * 2,
    "the other way round": lambda frames: frames[::-1],
    "one that is far too long": lambda frames: [*frames[:-1], bytes(2 * PIECE_BYTES)],
    "none": lambda _frames: [],
}
changes = st.tuples(
    st.none() | hostile_messages(TO_TRAINER_REMOTE),
    st.just("as they are") | st.sampled_from(list(FRAME_CHANGES)),
    st.none() | layouts | varying_layouts,
)
scripts = st.dictionaries(st.integers(0, 8), changes, min_size=1, max_size=3)
"""For messages with these numbers: the substitutes, their frames, and their layout."""


def keep_to(script):
    """Return an ``alter`` that counts sent messages, and changes those that the script names."""
    sent = -1

    def alter(message, frames):
        nonlocal sent
        sent += 1
        if sent not in script:
            return frames
        parts, change, layout = script[sent]
        known = fields_of(message)
        if parts is not None:
            frames = [encode(parts, known), *frames[1:]]
        elif layout is not None and isinstance(message, Subscribed):
            frames = [encode([message.code, *(known | {"layout": layout}).values()], {})]
        return FRAME_CHANGES[change](frames)

    return alter


def follow_scripts(fake, examples):
    """Let so many trainers connect to a daemon that follows a script."""

    @settings(max_examples=examples)
    @given(scripts)
    def follow(script):
        fake.alter = keep_to(script)
        train(fake)

    follow()


@pytest.mark.thorough
def test_hostile_values_and_wrong_frames_end_in_an_error_of_ours(fake):
    """The daemon sends them first, later, or all the time."""
    follow_scripts(fake, 60)


@pytest.mark.slow
def test_hostile_values_and_wrong_frames_end_in_an_error_of_ours_for_long(fake):
    """The first test's scripts run for minutes."""
    follow_scripts(fake, 5_000)


# --- damaged messages -----------------------------------------------------------------------------


def meet_spoilt_bytes(fake, trainers):
    """Let so many trainers connect to a daemon whose messages are damaged now and then."""
    chance = Random(4)
    others = corpus(TO_TRAINER_REMOTE, known=PLAIN)

    def alter(_message, frames):
        if chance.random() > SPOILT_SHARE:
            return frames
        number = chance.randrange(len(frames))
        return [*frames[:number], mutated([frames[number], *others], chance), *frames[number + 1 :]]

    for _ in range(trainers):
        fake.alter = alter
        train(fake)


def test_spoilt_bytes_end_in_an_error_of_ours(fake):
    """Bits flip, parts are cut, repeated and spliced; the client believes valid messages."""
    meet_spoilt_bytes(fake, 100)


@pytest.mark.slow
def test_spoilt_bytes_end_in_an_error_of_ours_for_long(fake):
    """The first test's messages are sent for minutes."""
    meet_spoilt_bytes(fake, 5_000)


# --- named cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["padded", "ragged"])
def test_labels_that_are_passed_off_as_sizes_are_believed_as_far_as_there_is_room(fake, kind):
    """The first sample's label is 0, the fourth's is 3, and an image is 2 high."""
    fields = [["image", "uint8", [2, 2, 3], 4096, kind, [0, 1]], ["image_shape", "int32", [2], 4160, "", []]]
    fake.alter = lambda message, frames: (
        [encode([message.code, *(fields_of(message) | {"layout": [fields, 4, 8192]}).values()], {})]
        if isinstance(message, Subscribed)
        else frames
    )
    with batchd_client.connect(fake.address) as daemon:
        batch = next(iter(daemon.stream("photos")))
        assert batch["image_shape"].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
        with pytest.raises(ProtocolError, match=r"field 'image': row 3 has the sizes \[3, 0\]"):
            batch["image"]


def test_a_batch_larger_than_any_memory_is_refused(fake):
    """The daemon's layout says how much memory a batch needs."""
    layout = [[["image", "uint8", [1 << 37], 4096, "", []]], 4, SLOT_BYTES_MAX]
    fake.alter = lambda message, frames: (
        [encode([message.code, *(fields_of(message) | {"layout": layout}).values()], {})]
        if isinstance(message, Subscribed)
        else frames
    )
    with batchd_client.connect(fake.address) as daemon, pytest.raises(ProtocolError, match=str(SLOT_BYTES_MAX)):
        next(iter(daemon.stream("photos")))


@pytest.mark.parametrize("change", ["without the last", "one too many", "the last cut", "the last longer"])
def test_a_batch_whose_frames_do_not_fit_is_refused(fake, change):
    """The layout determines their number and their lengths."""
    fake.alter = lambda message, frames: FRAME_CHANGES[change](frames) if isinstance(message, Parcel) else frames
    with batchd_client.connect(fake.address) as daemon, pytest.raises(ProtocolError):
        next(iter(daemon.stream("photos")))


def test_a_frame_that_no_message_has_ends_the_connection(fake):
    """The client does not read it, and retries until its deadline."""
    change = FRAME_CHANGES["one that is far too long"]
    fake.alter = lambda message, frames: change(frames) if isinstance(message, Parcel) else frames
    with batchd_client.connect(fake.address, **SHORT) as daemon, pytest.raises(DaemonUnavailable):
        next(iter(daemon.stream("photos")))


def test_a_second_greeting_is_refused(fake):
    """A session begins once."""
    fake.alter = lambda message, frames: (
        frames if isinstance(message, Greeted) else [Greeted("again", "", bytes(16)).encode()]
    )
    with batchd_client.connect(fake.address) as daemon, pytest.raises(ProtocolError, match="twice"):
        daemon.status()
