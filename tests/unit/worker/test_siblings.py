"""Streams of one order: a worker decodes each picture once, and their bytes are their own."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.data.pipeline.image.decode import Decoder
from batchd.data.samples.shared_boxes import BOX_BYTES_USUAL
from batchd.worker.loop import WorkerStream
from support.images import encode, jpeg, jpeg_with_exif, photo, progressive_jpeg
from support.worker_streams import fill, worker_streams

CROP = "{{ op = 'decode' }}, {{ op = 'random_resized_crop', size = [48, 40]{} }}, {{ op = 'random_flip' }}"
STEPS = {
    "a crop": CROP.format(""),
    "a larger one": CROP.format(", scale = [0.3, 1]"),
    "colours": CROP.format("") + ", { op = 'color_jitter', brightness = 0.5 }",
    "another size and type": "{ op = 'decode' }, { op = 'random_resized_crop', size = [20, 20] }, { op = 'normalize' }",
    "the middle": "{ op = 'decode' }, { op = 'resize', size = [60, 60] }, { op = 'center_crop', size = [48, 40] }",
    "views": "{ op = 'decode' }, { op = 'views', into = { image = { count = 2, steps = [ "
    "{ op = 'random_resized_crop', size = [32, 32] } ] }, local = { steps = [ "
    "{ op = 'random_resized_crop', size = [16, 16], scale = [0.05, 0.4] } ] } } }",
}
FILES = {
    "a": jpeg(photo(300, 400)),
    "b-444": jpeg(photo(200, 150, 1), 80, "444"),
    "c-turned": jpeg_with_exif(jpeg(photo(160, 260, 2)), 6),
    "d-grey": jpeg(photo(170, 250, 4)[..., 0]),
    "e-large": jpeg(photo(400, 520, 5)),
    "f-progressive": progressive_jpeg(photo(200, 200, 6)),
    "g-png": encode(photo(160, 200, 7), ".png"),
    "h-same-length": jpeg(photo(300, 400)),
}
HOLE = jpeg(photo(200, 150, 9))
HOLE = HOLE[: len(HOLE) * 5 // 6] + HOLE[-2:]
"""Its lower part is missing: crops above that are good."""
WHOLE = 0, 1
"""The share of the only worker."""
SAMPLES = len(FILES) + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the files; the last one has a hole."""
    folder = tmp_path_factory.mktemp("siblings")
    for name, file in {**FILES, "z-hole": HOLE}.items():
        path = folder / "photos" / name[0] / f"{name}.{'png' if 'png' in name else 'jpg'}"
        path.parent.mkdir(parents=True)
        path.write_bytes(file)
    return folder


@contextmanager
def started(folder, names, siblings="one", cache="off"):
    """Start a stream for each name of steps, in one worker; all share a cache."""
    source = f"{{ type = 'folder', path = '{folder}/photos' }}"
    with worker_streams(folder) as worker:
        streams: dict[str, WorkerStream] = {}
        for name in names:
            shares = cache != "off" and bool(streams)
            streams[name] = worker.start(
                source, STEPS[name], "mask", cache, samples=SAMPLES, siblings=siblings, shares_cache=shares
            )
        yield worker.shared, streams


def read(stream, first, count, epoch, share=WHOLE):
    """Bad samples and rows, as data that can be compared."""
    bad, arrays = fill(stream, first, count, epoch, share=share)
    return bad, {name: array.copy() for name, array in arrays.items()}


def are_equal(one, other):
    """Whether both have the same bad samples and the same bytes."""
    return one[0] == other[0] and all(np.array_equal(array, other[1][name]) for name, array in one[1].items())


class Rows(dict):
    """Bad samples and arrays by (name, epoch, row); Hypothesis shows a failing test's arguments."""

    def __repr__(self):
        return f"{len(self)} rows"


@pytest.fixture(scope="module")
def alone(folder):
    """What each stream makes of each row without siblings, in two epochs."""
    with started(folder, STEPS, siblings="") as (_shared, streams):
        return Rows(
            ((name, epoch, row), read(stream, row, 1, epoch))
            for name, stream in streams.items()
            for epoch in range(2)
            for row in range(SAMPLES)
        )


@pytest.fixture
def decoded(monkeypatch):
    """The boxes that are decoded."""
    made = []
    decode_box = Decoder.decode_box

    def noting(decoder, data, header, factor, box, *rest):
        made.append((header, factor, box))
        return decode_box(decoder, data, header, factor, box, *rest)

    monkeypatch.setattr(Decoder, "decode_box", noting)
    return made


def test_some_crops_of_the_file_with_a_hole_are_good_and_some_bad(alone):
    """So that the other tests show that a sibling's crop does not make a sample bad."""
    found = {bool(bad) for (_name, _epoch, row), (bad, _arrays) in alone.items() if row == SAMPLES - 1}
    assert found == {True, False}


@pytest.mark.parametrize("cache", ["off", "points", "pixels"])
def test_the_bytes_of_a_stream_do_not_depend_on_its_siblings(folder, alone, cache):
    """Whichever comes first, with and without a cache, of files of any kind."""
    with started(folder, STEPS, cache=cache) as (shared, streams):
        for epoch in (0, 1, 0):
            for row in range(SAMPLES):
                for name in list(streams)[:: -1 if row % 2 else 1]:
                    assert are_equal(read(streams[name], row, 1, epoch), alone[name, epoch, row]), (name, epoch, row)
        assert shared.usual_bytes != BOX_BYTES_USUAL or cache == "pixels"


@settings(max_examples=10)
@given(
    moves=st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(1, 4), st.booleans()), min_size=10, max_size=30),
    bytes_max=st.sampled_from([0, 40_000, 1 << 20, 32 << 20]),
    leaving=st.sampled_from([None, *STEPS]),
)
def test_siblings_go_at_any_pace_and_leave_at_any_time(folder, alone, moves, bytes_max, leaving):
    """Some rows are ordered from other workers, and the room is too small for some boxes."""
    with started(folder, STEPS) as (shared, streams):
        shared.bytes_max = bytes_max
        at = dict.fromkeys(streams, 0)
        for number, (name, count, is_mine) in enumerate(moves):
            if number == len(moves) // 2 and leaving is not None:
                streams.pop(leaving).close()
            if name in streams:
                epoch, first = divmod(at[name], SAMPLES)
                count = min(count, SAMPLES - first)  # noqa: PLW2901  what is left of the epoch
                bad, arrays = read(streams[name], first, count, epoch % 2, WHOLE if is_mine else (0, 0))
                wanted = [alone[name, epoch % 2, row] for row in range(first, first + count)]
                assert bad == [sample for one, _arrays in wanted for sample in one]
                for field, array in arrays.items():
                    assert np.array_equal(array, np.concatenate([rows[field] for _bad, rows in wanted]))
                at[name] += count
            assert shared.kept_bytes == sum(box[2].nbytes for kept in shared.kept.values() for box in kept.boxes)
            assert shared.kept_bytes <= bytes_max
    assert (shared.kept_bytes, shared.kept) == (0, {})


def test_each_picture_is_decoded_once_for_siblings_that_go_together(folder, decoded):
    """But for the first one, when no stream has begun; what all have is forgotten."""
    with started(folder, ["a crop", "a larger one", "colours"]) as (shared, streams):
        for row in (0, 1, 2, 3, 5, 6):
            decoded.clear()
            for stream in streams.values():
                fill(stream, row, 1, share=WHOLE)
            assert len({factor for _header, factor, _box in decoded}) == len(decoded) or row == 0
            assert len(shared.kept) <= 1


@pytest.mark.parametrize("share", [(0, 0), WHOLE])
def test_a_stream_whose_siblings_are_elsewhere_decodes_its_own_crop(folder, decoded, share):
    """They are at later rows, or the row is one of which another worker has theirs."""
    with started(folder, ["a crop", "a larger one"]) as (shared, streams):
        first, second = streams.values()
        fill(second, 2, 1, epoch=1 if share == WHOLE else 0, share=share)
        for row in range(3, 7):
            fill(first, row, 1, share=share)
        assert shared.kept == {}
        assert len(decoded) == 5


def test_nothing_is_kept_for_a_sibling_that_is_too_far_behind(folder):
    """Its boxes would be pushed out before it comes to them."""
    with started(folder, ["a crop", "a larger one"]) as (shared, streams):
        first, second = streams.values()
        fill(second, 0, 1, share=WHOLE)
        fill(first, 1, 1, share=WHOLE)
        assert shared.kept
        shared.usual_bytes = shared.bytes_max // 3
        for row in range(2, 7):
            fill(first, row, 1, share=WHOLE)
            assert all(sample <= 3 for _order, _epoch, sample in shared.kept)
