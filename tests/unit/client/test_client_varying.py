"""Padded and ragged fields in a trainer, and from a daemon that lies about sizes."""

import numpy as np
import pytest

import batchd_client
from batchd_client.errors import BatchReleased, ProtocolError
from batchd_wire.fields import CHECKSUM, Field, Rooms, Varying, place_fields
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream

FIELDS = (
    Field("image", "uint8", (4, 6, 3), Varying("padded", (0, 1))),
    Field("image_shape", "int32", (2,)),
    Field("label", "int64", ()),
    Field("tokens", "int16", (5, 2), Varying("ragged", (0,))),
    Field("tokens_length", "int32", ()),
)
SHAPES = [(2, 1), (3, 4), (0, 0), (1, 5)]
LENGTHS = [3, 0, 5, 1]


class VaryingStream(FakeStream):
    """Four samples in each batch, with these sizes."""

    def __init__(self) -> None:
        super().__init__(steps=50, fields=FIELDS)
        self.shapes: object = SHAPES
        self.lengths: object = LENGTHS
        self.width = 5

    def page(self, epoch: int, step: int) -> bytearray:
        page = super().page(epoch, step)
        arrays = slot_arrays(page, self.layout.of(0))
        arrays["image_shape"][:] = self.shapes
        arrays["tokens_length"][:] = self.lengths
        arrays["tokens"][:] = np.arange(8 * self.width).reshape(4, self.width, 2)
        return page


@pytest.fixture
def fake(tmp_path):
    with FakeDaemon(tmp_path / "run", VaryingStream()) as fake:
        yield fake


@pytest.fixture
def stream(fake):
    with batchd_client.connect(fake.address) as daemon:
        yield daemon.stream("photos")


def test_a_padded_field_is_cut_to_the_largest_of_the_batch(stream) -> None:
    """The field is a view with the height of the tallest and the width of the widest sample."""
    image = next(iter(stream))["image"]

    assert image.shape == (4, 3, 5, 3)
    assert not image.flags.writeable
    assert not image.flags.owndata


def test_a_ragged_field_is_a_list_of_arrays(stream) -> None:
    """Each sample has one array in its own shape, contiguous and read-only."""
    tokens = next(iter(stream))["tokens"]

    assert [one.shape for one in tokens] == [(length, 2) for length in LENGTHS]
    assert [one.reshape(-1).tolist() for one in tokens] == [
        list(range(10 * row, 10 * row + 2 * length)) for row, length in enumerate(LENGTHS)
    ]
    assert all(one.flags.c_contiguous and not one.flags.writeable and not one.flags.owndata for one in tokens)


def test_a_ragged_field_is_also_one_array(stream) -> None:
    """The array comes with the start and the length of each sample.

    The compacted copy has no room between the samples.
    """
    batch = next(iter(stream))

    values, offsets, lengths = batch.ragged("tokens")
    compact, row_splits = batch.ragged("tokens").compact()

    assert values.shape == (20, 2)
    assert not values.flags.writeable
    assert (offsets.tolist(), lengths.tolist()) == ([0, 5, 10, 15], LENGTHS)
    assert row_splits.tolist() == [0, 3, 3, 8, 9]
    assert compact.tolist() == [value.tolist() for one in batch["tokens"] for value in one]


def test_one_sample_of_a_ragged_field_holds_the_whole_batch(stream) -> None:
    """This holds for any other array of the batch; the compacted copy does not hold it."""
    batches = iter(stream)
    kept = next(batches)["tokens"][3]
    copy = next(batches).ragged("tokens").compact()
    next(batches)
    assert stream.statistics().batches_held == 1
    assert kept.tolist() == [[30, 31]]
    assert len(copy.values) == sum(LENGTHS)

    del kept

    assert stream.statistics().batches_held == 0


def test_a_ragged_field_is_exported_in_parts(stream) -> None:
    """No single array has all samples."""
    batch = next(iter(stream))
    with pytest.raises(KeyError, match=r"export batch\.ragged\('tokens'\)\.values"):
        batch.dlpack("tokens")
    assert np.from_dlpack(batch.ragged("tokens").values).shape == (20, 2)
    assert np.from_dlpack(batch.dlpack("image")).shape == batch["image"].shape


@pytest.mark.parametrize(
    ("name", "message"), [("image", "'image' is not a ragged field"), ("words", "'words' is not a field of this batch")]
)
def test_fields_that_are_not_ragged_are_refused_by_name(stream, name, message) -> None:
    """The error says how to read the field instead."""
    with pytest.raises(KeyError, match=message):
        next(iter(stream)).ragged(name)


def test_a_released_batch_has_no_ragged_field(stream) -> None:
    """Its other fields are released, too."""
    batch = next(iter(stream))
    batch.release()

    with pytest.raises(BatchReleased, match="'tokens'"):
        batch.ragged("tokens")


def test_schema_and_repr_show_the_varying_dimensions(stream) -> None:
    """They have the largest possible sizes."""
    assert stream.schema["image"] == (np.uint8, (4, 6, 3), Varying("padded", (0, 1)))
    assert stream.schema["tokens"].varying.kind == "ragged"
    assert stream.schema["label"].varying is None
    assert "image=uint8[4, <=4, <=6, 3] image_shape=int32[4, 2]" in repr(next(iter(stream)))


@pytest.mark.parametrize(
    ("shapes", "lengths", "field"),
    [
        ([(2, 1), (5, 1), (1, 1), (1, 1)], LENGTHS, "image"),
        ([(2, 1), (1, 7), (1, 1), (1, 1)], LENGTHS, "image"),
        ([(2, 1), (1, -1), (1, 1), (1, 1)], LENGTHS, "image"),
        (SHAPES, [1, 6, 1, 1], "tokens"),
        (SHAPES, [1, -1, 1, 1], "tokens"),
        (SHAPES, [1, (1 << 31) - 1, 1, 1], "tokens"),
        (SHAPES, [1, -(1 << 31), 1, 1], "tokens"),
    ],
)
def test_sizes_larger_than_the_room_are_rejected(fake, stream, shapes, lengths, field) -> None:
    """The error names field and row.

    The other fields of the batch stay readable, and the next batch arrives.
    """
    fake.stream.shapes, fake.stream.lengths = shapes, lengths
    batches = iter(stream)
    for _ in range(9):  # those that were ready earlier
        batch = next(batches)
    for read in [lambda: batch[field], *([lambda: batch.ragged(field)] if field == "tokens" else [])]:
        with pytest.raises(ProtocolError, match=rf"epoch 0, step 8\) of stream 'photos': field '{field}': row 1 has"):
            read()

    assert len(batch["label"]) == 4
    fake.stream.shapes, fake.stream.lengths = SHAPES, LENGTHS
    assert next(batches).step == 9


def test_a_batch_has_the_room_of_its_bucket(fake) -> None:
    """Other fields are at other places, and a size that is within the field may exceed the room."""
    fake.stream.rooms = Rooms("tokens", ((4, 3), (2, 5)))
    fake.stream.fields = (FIELDS[3], FIELDS[4], FIELDS[0], FIELDS[1], FIELDS[2])
    fake.stream.lengths, fake.stream.width = [3, 0, 2, 1], 3
    with batchd_client.connect(fake.address) as daemon:
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        assert [one.tolist() for one in batch["tokens"]] == [
            [[6 * row + 2 * place, 6 * row + 2 * place + 1] for place in range(length)]
            for row, length in enumerate(fake.stream.lengths)
        ]
        assert batch["label"].tolist() == [0, 1, 2, 3]
        assert stream.schema["tokens"].shape == (5, 2)
        assert "tokens=int16[4, <=5, 2]" in repr(batch)
        assert batch.detached().ragged("tokens").values.shape == (12, 2)

        fake.stream.lengths = [3, 4, 2, 1]
        later = next(one for one in stream if one.step == 9)  # those before were ready earlier
        with pytest.raises(ProtocolError, match=r"row 1 has the sizes \[4\], and the largest may be \[5\], 3 together"):
            later.ragged("tokens")


def test_checksums_cover_the_room_and_the_sizes() -> None:
    """A changed bit in either is found before the client uses a size."""
    layout = place_fields((*FIELDS, CHECKSUM), 4)
    checksums = RowChecksums(layout)
    page = memoryview(bytearray(layout.slot_bytes))
    for row in range(4):
        checksums.write(page, row)
    for field in layout.sample_fields:
        last_of_row_2 = field.offset + 3 * field.row_bytes - 1
        page[last_of_row_2] ^= 1

        assert checksums.wrong_rows(page, 0, 4) == [2], field.name
        page[last_of_row_2] ^= 1
