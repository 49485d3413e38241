"""``batchd prepare --seekable``: the same pictures with restart markers, in shards and in files."""

import tarfile

import cv2
import numpy as np
import pytest
from click.testing import CliRunner

import batchd_client
from batchd.cli.main import cli
from batchd.data.pipeline.image import jpeg_box
from batchd.errors import BatchdError
from support.images import JPEG_END, encode, jpeg, photo, ycck_jpeg
from support.preparing import bad_samples, config_in, finish, prepare, proposed, start
from support.seen import see
from support.settings import folder_stream

pytestmark = pytest.mark.usefixtures("forked_children")

needs_extension = pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="not built: apt install gcc libjpeg62-turbo-dev")


@pytest.fixture
def config(photos, tmp_path):
    """Write a configuration of one stream over forty photographs."""
    return config_in(tmp_path, photos)


def seekable(config_file, *options, status=0, **changes):
    return prepare(config_file, "--seekable", *options, status=status, **changes)


def stored_images(folder):
    """Return every image of all shards, in order."""
    images = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as members:
            images += [members.extractfile(name).read() for name in members.getnames() if name.endswith("jpg")]
    return images


@needs_extension
def test_seekable_shards_hold_the_same_pictures(config, start_daemon, photos, tmp_path):
    """Images get the missing markers without a run of the pipeline: all crops are equal."""
    summary = seekable(config()).stdout
    crop = [{"op": "decode"}, {"op": "random_resized_crop", "size": [24, 24]}]
    shards = {**folder_stream(photos), "pipeline": crop, "source": proposed(summary), "shuffle": False}
    straight = {**folder_stream(photos), "pipeline": crop, "shuffle": False}

    daemon = start_daemon({"shards": shards, "straight": straight})

    images = stored_images(tmp_path / "out")
    assert len(images) == 40
    assert all(b"\xff\xdd\0\4" in image for image in images)
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("shards", epochs=1)) == see(connection.stream("straight", epochs=1))


@needs_extension
def test_seekable_shards_can_hold_smaller_pictures(config, tmp_path):
    """Images are resized to the shorter side, with markers; a lower quality saves bytes."""
    small = seekable(config(), "--short-side", "20", "--quality", "60").stdout
    images = stored_images(tmp_path / "out")
    sides = [cv2.imdecode(np.frombuffer(image, np.uint8), 1).shape[:2] for image in images]

    assert "40 samples" in small
    assert {min(side) for side in sides} == {20}
    assert all(b"\xff\xdd\0\4" in image for image in images)
    assert "quality was 60, and is 90 now" in seekable(config(), "--short-side", "20", status=1).stderr


def written_files(folder):
    """Return the path and content of every file below the folder for files."""
    files = (path for path in (folder / "files").rglob("*") if path.is_file())
    return {str(path.relative_to(folder / "files")): path.read_bytes() for path in files}


@needs_extension
def test_seekable_files_have_the_names_and_pixels_of_those_that_they_are_made_of(
    config, start_daemon, photos, tmp_path
):
    """A folder of classes becomes one with the same labels and paths in every place."""
    keys = {"source": {"type": "folder", "path": str(photos), "path_bytes": 40}}
    summary = seekable(config(**keys), "--files").stdout

    assert summary.startswith("40 files of ")
    table = proposed(summary)
    assert table == {"type": "folder", "path": str(tmp_path / "out" / "files"), "path_bytes": 40}
    files = written_files(tmp_path / "out")
    assert files.keys() == {str(path.relative_to(photos)) for path in photos.rglob("*.jpg")}
    assert all(b"\xff\xdd\0\4" in content for content in files.values())
    crop = [{"op": "decode"}, {"op": "random_resized_crop", "size": [24, 24]}]
    made = {**folder_stream(photos), "pipeline": crop, "source": table}
    straight = {**folder_stream(photos), "pipeline": crop, **keys}
    daemon = start_daemon({"made": made, "straight": straight})
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("made", epochs=1)) == see(connection.stream("straight", epochs=1))


@needs_extension
def test_files_of_a_list_become_files_and_a_list(config, photos, tmp_path):
    """Order and labels stay; a file that the list names twice is written once."""
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.jpg"))[:3]
    (tmp_path / "mine.txt").write_text(
        "".join(f"{name} {9 - place}\n" for place, name in enumerate([*names, names[0]]))
    )
    source = {"type": "list", "path": str(tmp_path / "mine.txt"), "root": str(photos)}
    table = proposed(seekable(config(source=source), "--files", shard_samples=1).stdout)

    assert table == {
        "type": "list",
        "path": str(tmp_path / "out" / "photos.list"),
        "root": str(tmp_path / "out" / "files"),
    }
    lines = (tmp_path / "out" / "photos.list").read_text().splitlines()
    assert lines == [f"{name} {9 - place}" for place, name in enumerate([*names, names[0]])]
    assert written_files(tmp_path / "out").keys() == set(names)


@needs_extension
def test_a_class_without_a_good_file_keeps_its_number(config, tmp_path):
    """A folder would renumber the classes, so a list has the labels; the files are JPEGs."""
    for name in ("a/1.png", "b/broken.jpg", "c/2.jpg"):
        (tmp_path / "mixed" / name).parent.mkdir(parents=True)
        content = jpeg(photo(60, 80)) if name.startswith("c") else encode(photo(60, 80), ".png")
        (tmp_path / "mixed" / name).write_bytes(b"nothing" if "broken" in name else content)
    source = {"type": "folder", "path": str(tmp_path / "mixed")}

    said = seekable(config(source=source), "--files", "--short-side", "20").stdout

    assert "1 bad one left out" in said
    assert proposed(said)["type"] == "list"
    assert (tmp_path / "out" / "photos.list").read_text().splitlines() == ["a/1.png.jpg 0", "c/2.jpg 2"]
    assert all(content.startswith(b"\xff\xd8") for content in written_files(tmp_path / "out").values())


@pytest.mark.thorough
@needs_extension
def test_killed_writers_of_files_are_followed_by_others(config, photos, tmp_path):
    """Another writer restarts the unfinished work, and no unfinished file is left."""
    (tmp_path / "faults").mkdir()
    faults = "prepare.sample.begin:3=kill;prepare.shard.written=kill"
    finish(start(config(), faults, tmp_path / "faults", more=("--seekable", "--files")))
    assert written_files(tmp_path / "out").keys() == {str(path.relative_to(photos)) for path in photos.rglob("*.jpg")}
    assert len((tmp_path / "out" / "photos.list").read_text().splitlines()) == 40


@needs_extension
@pytest.mark.parametrize(
    ("name", "problem"),
    [("../outside.jpg", "does not lie below its source's root"), ("{folder}/inside.jpg", "does not lie below")],
)
def test_a_file_that_lies_elsewhere_is_not_written_there(config, tmp_path, name, problem):
    """The file is written nowhere else either; shards accept any file."""
    for file in ("outside.jpg", "in/inside.jpg"):
        (tmp_path / "source" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / file).write_bytes(jpeg(photo(20, 20)))
    (tmp_path / "mine.txt").write_text(name.format(folder=tmp_path / "source" / "in") + " 0\n")
    source = {"type": "list", "path": str(tmp_path / "mine.txt"), "root": str(tmp_path / "source" / "in")}
    stream = config(source={**source, "allow_outside_root": True})

    assert problem in seekable(stream, "--files", status=1).stderr
    assert written_files(tmp_path / "out") == {}
    assert (tmp_path / "source" / "outside.jpg").read_bytes() == jpeg(photo(20, 20))


@needs_extension
def test_samples_that_are_no_files_cannot_become_files(config):
    """Samples in shards are an example; without ``--seekable`` the command writes shards only."""
    table = proposed(seekable(config()).stdout)
    refused = seekable(config(source=table), "--files", status=2).stderr
    assert 'the samples of type "webdataset" are no files of their own' in refused
    assert "--files is for --seekable" in prepare(config(), "--files", status=2).stderr


@needs_extension
def test_a_broken_jpeg_is_left_out_and_others_stay(config, tmp_path):
    """Images that cannot have markers (a PNG, CMYK) are copied unchanged."""
    folder = tmp_path / "mixed" / "a"
    folder.mkdir(parents=True)
    whole, inks = jpeg(photo(60, 80)), ycck_jpeg(np.full((16, 16, 4), 9, np.uint8))
    files = {"1.jpg": whole, "2.jpg": whole[:-300] + JPEG_END, "3.jpg": inks, "4.png": encode(photo(20, 20), ".png")}
    for name, data in files.items():
        (folder / name).write_bytes(data)

    said = seekable(config(source={"type": "folder", "path": str(folder.parent)})).stdout

    assert "3 samples in 1 shard" in said
    assert "1 bad one left out" in said
    (bad,) = bad_samples(tmp_path / "out").values()
    assert "2.jpg" in str(bad)
    assert "premature end" in str(bad)
    first, second = stored_images(tmp_path / "out")
    assert first != whole
    assert second == inks


def test_seekable_needs_what_it_is_made_with(config, tmp_path, monkeypatch):
    """Sides without it, formats without markers, and a missing extension are each rejected."""
    assert "--short-side is for --seekable" in prepare(config(), "--short-side", "20", status=2).stderr
    if jpeg_box.IS_BUILT:
        said = seekable(config(), "--short-side", "20", "--format", "png", status=2).stderr
        assert "cannot encode them with --format png" in said
    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)

    command = ["prepare", "photos", "-c", str(config()), "--to", str(tmp_path / "out"), "--seekable"]
    refused = CliRunner().invoke(cli, command).exception

    assert isinstance(refused, BatchdError)
    assert "needs the extension that decodes crops, which was not built: apt install gcc" in str(refused)
    assert not (tmp_path / "out").exists()
