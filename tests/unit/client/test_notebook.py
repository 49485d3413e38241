"""The HTML that a notebook shows for batches, streams and connections, with its pictures."""

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest

import batchd_client
from batchd_client.notebook import (
    CHARACTERS_MAX,
    PICTURE_PIXELS,
    PICTURES_MAX,
    SOUND_PIXELS,
    daemon_html,
    png,
    shrunk,
)
from batchd_client.showing import COLORS
from batchd_wire.fields import Field, Overlay, Rooms, Varying
from batchd_wire.views import slot_arrays
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream
from support.statuses import two_looks

NASTY = '<script>alert("1")</script>&\''


class Page(HTMLParser):
    """The tags, texts and pictures of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.pictures: list[np.ndarray] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "img":
            kind, data = dict(attributes)["src"].split(",")
            assert kind == "data:image/png;base64"
            self.pictures.append(cv2.imdecode(np.frombuffer(b64decode(data), np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1])

    def handle_data(self, data):
        self.texts.append(data)


class FilledStream(FakeStream):
    """A stream whose slots hold the ``values`` of its fields."""

    values: dict[str, object]

    def page(self, _epoch, _step):
        page = bytearray(self.layout.slot_bytes)
        for name, array in slot_arrays(page, self.layout.of(0)).items():
            array[:] = self.values.get(name, 0)
        return page


def test_words_that_are_learned_are_marked(tmp_path):
    """As `batchd peek` does; where the tokenizer is not on this machine, numbers are."""
    fields = (Field("tokens", "int32", (3,)), Field("loss_mask", "uint8", (3,)), Field("index", "int64", ()))
    tokens = Overlay("tokens", "tokens", "loss_mask", "0 /nowhere/tokenizer.json")

    page = shown(tmp_path, fields, {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}, rows=1, overlays=[tokens])

    assert "mark" in page.tags
    assert [text.strip() for text in page.texts if text.strip()][1:4] == ["tokens of row 0, sample 0", "5", "6 7"]


def shown(tmp_path, fields, values, rooms=None, rows=2, overlays=()):
    """Return the first batch of a stream of these fields, as a notebook shows it."""
    stream = FilledStream(fields=fields, rows=rows, rooms=rooms, overlays=overlays)
    stream.values = values
    with FakeDaemon(tmp_path / "run", stream) as fake, batchd_client.connect(fake.address) as daemon:
        return Page(next(iter(daemon.stream("photos")))._repr_html_())


RED = np.array([200, 10, 30], np.uint8)


@pytest.mark.parametrize(
    ("shape", "value"),
    [((6, 8, 3), RED), ((3, 6, 8), RED[:, None, None])],
    ids=["channels last", "channels first"],
)
def test_a_batch_shows_its_images_with_the_names_of_their_classes(tmp_path, shape, value) -> None:
    """Images have their right colours in each layout, and the other fields are in a table."""
    fields = (Field("image", "uint8", shape), Field("label", "int64", ()))
    page = shown(tmp_path, fields, {"image": value, "label": [0, 1]})

    assert [picture.shape for picture in page.pictures] == [(6, 8, 3)] * 2
    assert (page.pictures[0] == RED).all()
    assert "photos: epoch 0, step 0, 2 samples" in page.texts
    assert f"image: uint8[2, {', '.join(map(str, shape))}]" in page.texts
    assert [text for text in page.texts if text in {"0 cat", "1 dog"}] == ["0 cat", "1 dog"]
    assert page.texts[page.texts.index("label") :] == ["label", "int64[2]", "0", "1"]


def test_normalised_images_are_stretched_and_that_is_said(tmp_path) -> None:
    """The caption names the smallest and the largest value of the pictures."""
    image = np.linspace(-2, 2.5, 2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3)
    page = shown(tmp_path, (Field("image", "float32", (4, 4, 3)),), {"image": image})

    assert page.pictures[0][0, 0, 0] == 0
    assert page.pictures[1][-1, -1, -1] == 255
    assert "image: float32[2, 4, 4, 3], drawn from -2 (black) to 2.5 (white)" in page.texts


def test_a_mask_of_class_numbers_is_not_black(tmp_path) -> None:
    """The mask is shown beside its image, and a grey photograph keeps its values."""
    fields = (Field("image", "uint8", (4, 4, 1)), Field("mask", "uint8", (4, 4)))
    page = shown(tmp_path, fields, {"image": 90, "mask": np.array([[0, 1, 2, 2]] * 4)})

    image, mask = page.pictures[:2]
    assert (image == 90).all()
    assert mask[0, :, 0].tolist() == [0, 128, 255, 255]
    assert "mask: uint8[2, 4, 4], drawn from 0 (black) to 2 (white)" in page.texts


@pytest.mark.parametrize("rooms", [None, Rooms("image", ((2, 16), (1, 64)))])
def test_images_of_different_sizes_are_shown_in_their_own(tmp_path, rooms) -> None:
    """An image without pixels, such as a masked sample may have, is shown, too."""
    fields = (
        Field("image", "uint8", (8, 8, 3), Varying("ragged", (0, 1))),
        Field("image_shape", "int32", (2,)),
        Field("valid", "bool", ()),
    )
    page = shown(tmp_path, fields, {"image": 7, "image_shape": [[3, 5], [0, 0]], "valid": [True, False]}, rooms)

    assert [picture.shape for picture in page.pictures] == [(3, 5, 3)]
    assert "(no pixels)" in page.texts
    assert "image: uint8[2, <=8, <=8, 3]" in page.texts
    assert "bad, masked: row 1" in page.texts


def test_what_a_notebook_keeps_is_bounded(tmp_path) -> None:
    """Pictures are few and small, samples are few, and texts are short."""
    fields = (Field("image", "uint8", (500, 300, 3)), Field("text", "uint8", (500,)))
    noise = np.random.default_rng(1).integers(0, 256, (40, 500, 300, 3), np.uint8)
    page = shown(tmp_path, fields, {"image": noise, "text": ord("x")}, rows=40)

    assert len(page.pictures) == PICTURES_MAX
    assert page.pictures[0].shape[0] <= PICTURE_PIXELS
    assert max(map(len, page.texts)) <= 2 * CHARACTERS_MAX
    assert "photos: epoch 0, step 0, 40 samples; the first 16 are shown" in page.texts


def test_names_from_elsewhere_are_text_and_no_tags(tmp_path) -> None:
    """Names of streams, fields and classes and texts of samples are escaped."""
    stream = FilledStream(name=NASTY, fields=(Field(NASTY, "uint8", (4, 4, 3)), Field("t", "uint8", (40,))), rows=1)
    stream.values = {"t": np.frombuffer(NASTY.encode().ljust(40, b"\0"), np.uint8)}
    with FakeDaemon(tmp_path / "run", stream) as fake, batchd_client.connect(fake.address) as daemon:
        claim = daemon.stream(NASTY)
        pages = [Page(next(iter(claim))._repr_html_()), Page(claim._repr_html_())]

    for page in pages:
        assert "script" not in page.tags
        assert any(NASTY in text for text in page.texts)


def test_a_stream_shows_its_position_and_its_fields(tmp_path) -> None:
    """A closed stream and a released batch show only their repr."""
    with FakeDaemon(tmp_path / "run", FakeStream()) as fake, batchd_client.connect(fake.address) as daemon:
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        texts = Page(stream._repr_html_()).texts
        batch.release()
        stream.close()

        assert batch._repr_html_() is None
        assert stream._repr_html_() is None
    assert texts[0] == "stream photos: epoch 0, step 1 of 5; 20 samples; batch size 4; rank 0 of 1; 2 classes: cat, dog"
    assert texts[-6:] == ["image", "uint8", "[2, 2, 3]", "label", "int64", "[]"]


def test_a_connection_shows_its_streams_and_their_trainers() -> None:
    """One answer of the daemon is enough, and the name of a program is escaped."""
    _before, status = two_looks()
    status.trainers = tuple(replace(one, name=NASTY) for one in status.trainers)
    page = Page(daemon_html("<Daemon ipc:///run/batchd>", status))

    assert page.texts[0] == "<Daemon ipc:///run/batchd>"
    assert "script" not in page.tags
    (stream,) = status.streams
    assert page.texts.count(stream.name) == 1 + len(stream.subscriptions)
    assert page.texts.count(NASTY) == len(stream.subscriptions) > 0


def test_a_connection_that_cannot_be_asked_is_shown_as_its_repr(tmp_path) -> None:
    """The cell does not fail, and it does not wait for a daemon that has stopped."""
    with FakeDaemon(tmp_path / "run", FakeStream()) as fake:
        daemon = batchd_client.connect(fake.address)
    assert daemon._repr_html_() is None
    daemon.close()
    assert daemon._repr_html_() is None
    assert re.fullmatch(r"<Daemon .* \[closed\]>", repr(daemon))


def test_pictures_are_shrunk_by_means_of_their_cells() -> None:
    """A picture of 200 pixels is averaged in cells of 3; the last cells are smaller."""
    picture = np.arange(200 * 150 * 3, dtype=np.uint32).reshape(200, 150, 3) % 251
    small = shrunk(picture.astype(np.uint8))

    assert small.shape == (67, 50, 3)
    assert small[0, 0, 1] == picture[:3, :3, 1].sum() // 9
    assert small[-1, -1, 2] == picture[198:, 147:, 2].sum() // 6
    assert (cv2.imdecode(np.frombuffer(png(small), np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1] == small).all()


def test_what_belongs_to_an_image_is_drawn_over_it(tmp_path) -> None:
    """Boxes and masks, as `batchd peek` draws them; those and keypoints are no pictures."""
    fields = (
        Field("image", "uint8", (60, 60, 3)),
        Field("boxes", "float32", (1, 4)),
        Field("masks", "uint8", (1, 60, 60)),
        Field("keypoints", "float32", (1, 5, 3)),
    )
    names = (("boxes", "boxes"), ("masks", "masks"), ("keypoints", "keypoints"))
    overlays = tuple(("image", role, name, "xyxy", False) for role, name in names)
    mask = np.zeros((1, 60, 60), np.uint8)
    mask[:, 50:] = 1

    page = shown(tmp_path, fields, {"image": 100, "boxes": [[10, 10, 40, 30]], "masks": mask}, overlays=overlays)

    assert len(page.pictures) == 2
    assert (page.pictures[0][10, 10:40] == COLORS[0]).all()
    assert (page.pictures[0][12:28, 12:38] == 100).all()
    assert (page.pictures[0][50:] == (100 + COLORS[0].astype(int)) // 2).all()


def test_sound_is_drawn_with_its_seconds(tmp_path) -> None:
    """Of the first samples; it is not in the table of numbers, too."""
    fields = (Field("audio", "float32", (100, 40)), Field("index", "int64", ()))
    sound = ("audio", "spectrogram", "", "100 0 8000", False)

    page = shown(tmp_path, fields, {"audio": np.ones((2, 100, 40))}, overlays=[sound])

    assert [picture.shape for picture in page.pictures] == [(SOUND_PIXELS, 3 * SOUND_PIXELS, 3)] * 2
    assert "#0 audio: 1 s, 0 to 8,000 Hz" in page.texts
    assert "float32[2, 100, 40]" not in page.texts
