"""`batchd init`: what it recognises, what it writes, and what it refuses.

Every configuration passes the checks of `batchd check` before it is written. The tests serve some
of them, too.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from batchd.cli import config_file
from batchd.config.load import parse_config
from batchd.data.sources import interface
from batchd.data.sources.options import SOURCE_KINDS
from batchd.errors import ExitCode
from support.commands import batchd
from support.daemon_process import clean_environment
from support.http_files import serving
from support.images import jpeg, photo, write_photos
from support.lmdb_files import write_lmdb
from support.parquet_files import class_labels, hugging_face, write_parquet
from support.shards import write_shard
from support.tfrecords import example, write_records
from support.videos import write_video
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("forked_children", "own_cache")
PICTURES = [jpeg(photo(seed=seed)) for seed in range(4)]
AUGMENTED = ["decode", "random_resized_crop", "random_flip"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Make the folder of the data; the configuration is saved next to it."""
    folder = tmp_path / "things"
    folder.mkdir()
    return folder


def found(path: Path | str, *options: str, status: int = 0) -> dict[str, Any]:
    """Return what `batchd init --json` prints; it writes no file."""
    done = batchd("init", path, "--json", "--dry-run", *options, status=status)
    assert done.stderr == ""
    whole = json.loads(done.stdout)
    assert tomllib.loads(whole["toml"])["streams"][whole["stream"]]["source"] == whole["source"]
    return dict(whole)


def refused(path: Path | str, status: int = 2) -> str:
    return batchd("init", path, "--dry-run", status=status).stderr


# --- images ---------------------------------------------------------------------------------------


def test_a_folder_of_classes_is_written_checked_and_served(data: Path) -> None:
    """Each step has a line of its own; the output has a batch, and the next steps."""
    write_photos(data, {"cat": 5, "dog": 7})

    text = batchd("init", data, folder=data.parent).stdout

    written = (data.parent / "batchd.toml").read_text()
    assert text.startswith(written)
    assert written.splitlines() == [
        "# 12 samples: image (image file), label (int64)",
        "# 2 classes: cat (5), dog (7)",
        "# image: JPEG, 64 x 48 pixels (12 files checked)",
        "[streams.things]",
        f'source = {{ type = "folder", path = "{data}" }}',
        "batch_size = 8",
        "pipeline = [",
        '    { op = "decode" },',
        '    { op = "random_resized_crop", size = [48, 48] },',
        '    { op = "random_flip" },',
        "]",
    ]
    assert "uint8[48, 48, 3] " in text
    assert "\nNext: batchd serve\n" in text
    assert 'batchd_client.connect().stream("things")' in text
    assert "is fine" in batchd("check", folder=data.parent).stdout


def test_a_flat_folder_has_no_classes(data: Path) -> None:
    """The current folder needs no path argument."""
    write_photos(data, {"": 3})

    done = batchd("init", "--dry-run", folder=data)

    assert done.stdout.startswith("# 3 samples: image (image file), label (int64)\n# image: JPEG")
    assert "[streams.things]" in done.stdout
    assert not (data / "batchd.toml").exists()


def test_a_mixture_is_used_as_far_as_it_goes(data: Path) -> None:
    """The message names unknown files, images beside class folders, and unusable samples."""
    write_photos(data, {"cat": 3, "dog": 3, "": 1})
    (data / "empty").mkdir()
    (data / "notes.md").write_text("hello")
    (data / "cat" / "Thumbs.db").write_bytes(b"x")
    (data / "dog" / "a.jpg").write_bytes(b"no image")

    whole = found(data)

    assert whole["source"] == {"type": "glob", "root": str(data), "patterns": ["*/**/*.jpg"], "classes": "folder"}
    assert whole["samples"] == 7
    assert whole["classes"] == {"cat": 3, "dog": 4}
    assert sorted(whole["left_out"]) == ["00000.jpg", "cat/Thumbs.db", "notes.md"]
    assert "# 1 of 10 files left out, outside of the class folders: 1 .jpg (00000.jpg)" in whole["toml"]
    assert "# 2 of 10 files left out, which no source reads: 1 ." in whole["toml"]
    assert "# 1 of the 7 samples read cannot be used: " in whole["toml"].replace("\n#   ", " ")


def test_more_images_at_the_top_than_below_are_a_flat_folder(data: Path) -> None:
    """The larger part counts, and the message names the other part."""
    write_photos(data, {"": 3, "more": 2})

    whole = found(data)

    assert (whole["source"]["patterns"], whole["samples"]) == (["*.jpg"], 3)
    assert "2 of 5 files left out, in folders beside more images without one" in whole["toml"]


def test_a_list_of_images_has_the_labels(data: Path) -> None:
    """The lines are `path label`, and the images exist."""
    (data / "a b.jpg").write_bytes(PICTURES[0])
    (data / "c.jpg").write_bytes(PICTURES[1])
    (data / "labels.txt").write_text("a b.jpg 3\nc.jpg 4\n")

    assert found(data)["source"] == {"type": "list", "path": str(data / "labels.txt")}
    assert found(data / "labels.txt")["samples"] == 2


def test_links_out_of_the_folder_are_followed_on_request(data: Path) -> None:
    """Every source follows links on request only; the message has the name of the option."""
    (data / "cat").mkdir()
    for path in write_photos(data.parent / "elsewhere", {"": 2}):
        (data / "cat" / path.name).symlink_to(path)

    assert "set allow_outside_root = true if you mean it" in refused(data)
    source = found(data, "--allow-outside-root")["source"]
    assert source == {"type": "folder", "path": str(data), "allow_outside_root": True}


# --- tables, shards, records ----------------------------------------------------------------------


def test_a_table_names_images_and_their_labels(data: Path) -> None:
    """The column of paths is found even if another folder has the images; text gets enough room."""
    write_photos(data / "images", {"": 4})
    names = sorted(path.name for path in (data / "images").iterdir())
    rows = [f"{name};{number};some words;0.5;" for number, name in enumerate(names)]
    (data / "train.csv").write_text("\n".join(["file;Class;What is it;weight;odd", *rows]))

    whole = found(data)

    source = whole["source"]
    assert (source["image"], source["image_root"], source["delimiter"]) == ("file", str(data / "images"), ";")
    assert source["fields"] == {"label": "int64", "What_is_it": "text", "weight": "float32"}
    assert source["names"] == {"label": "Class", "What_is_it": "What is it"}
    assert whole["notes"] == ["1 column left out, empty in 4 of 4 records: odd"]
    assert [step["op"] for step in whole["pipeline"]] == [*AUGMENTED, "text_bytes"]
    assert (whole["pipeline"][-1]["length"], whole["pipeline"][-1]["truncation"]) == (16, False)


def test_a_table_of_numbers_needs_no_steps(data: Path) -> None:
    """Several files with the same titles are one table; tabs are delimiters as well."""
    for number in range(2):
        (data / f"part-{number}.tsv").write_text("box\ty\n" + "1 2 3 4\t7\n" * 3)

    whole = found(data)

    assert whole["source"]["files"] == ["*.tsv"]
    assert whole["source"]["fields"] == {"box": "int64[4]", "label": "int64"}
    assert (whole["samples"], whole["batch_size"], "pipeline" in whole) == (6, 4, False)


def test_shards_are_recognised_by_their_members(data: Path) -> None:
    """An image with a class needs no fields; test shards are a stream of their own."""
    members = [("a.jpg", PICTURES[0]), ("a.cls", b"1"), ("b.jpg", PICTURES[1]), ("b.cls", b"0")]
    for name in ("train-0000.tar", "train-0001.tar", "test-0000.tar"):
        write_shard(data / name, members)

    whole = found(data)

    assert whole["source"] == {"type": "webdataset", "root": str(data), "shards": ["train-*.tar"]}
    assert whole["samples"] == 4
    assert whole["parts"][0]["source"]["shards"] == ["test-0000.tar"]
    assert whole["left_out"] == []


def test_images_of_shards_with_an_ending_in_capitals_are_found(data: Path) -> None:
    """Each class of ImageNet is a tar file of .JPEG files."""
    write_shard(data / "n01440764.tar", [(f"n01440764_{number}.JPEG", PICTURES[number]) for number in range(3)])

    text = batchd("init", data / "n01440764.tar", folder=data.parent).stdout

    assert 'shards = ["n01440764.tar"], label = "" }' in text
    assert "uint8[75, 75, 3]" in text


def test_shards_with_captions_masks_and_json_have_fields(data: Path) -> None:
    """Each member has its type; a member that some samples lack is left out."""
    members = []
    for number in range(3):
        described = json.dumps({"width": 3, "id": "x", "none": None}).encode()
        members += [(f"{number}.jpg", PICTURES[number]), (f"{number}.seg.png", PICTURES[number])]
        members += [(f"{number}.txt", b"a cat"), (f"{number}.json", described)]
    write_shard(data / "a.tar", [*members, ("2.bin", b"\0")])

    whole = found(data / "a.tar")

    assert whole["source"]["fields"] == {
        "image": "image",
        "seg": "image",
        "text": "text",
        "width": "int64",
        "id": "text",
    }
    assert whole["source"]["names"] == {"seg": "seg.png", "text": "txt", "id": "json:id"}
    assert whole["notes"] == [
        "1 member left out, missing or null in 3 of 3 samples: .json:none",
        "1 member left out, absent from 2 of the first 3 samples: .bin",
    ]
    assert [step["op"] for step in whole["pipeline"]] == [
        "decode",
        "resize",
        "decode",
        "resize",
        "text_bytes",
        "text_bytes",
    ]


def test_parquet_with_hugging_faces_metadata_has_images_and_classes(data: Path) -> None:
    """The class label becomes the label; columns of other types are left out."""
    rows = {"picture": hugging_face(PICTURES), "animal": [0, 1, 0, 1], "odd": [{"a": 1}] * 4}
    write_parquet(data / "train.parquet", rows, class_labels(animal=["cat", "dog"]))

    whole = found(data)

    assert whole["source"]["fields"] == {"image": "image", "label": "int64"}
    assert whole["source"]["names"] == {"image": "picture", "label": "animal"}
    assert whole["classes"] == {"cat": 2, "dog": 2}
    assert whole["notes"] == ["1 column left out, no type reads struct<a: int64>: odd"]


def test_parquet_of_tokens_gets_room_for_the_longest(data: Path) -> None:
    """Columns are lists of numbers, text, and bytes that are not an image."""
    write_parquet(data / "a.parquet", {"ids": [[1, 2, 3], [4]], "text": ["abc", "é"], "raw": [b"\xff", b"\0\1"]})

    whole = found(data)

    assert whole["source"]["fields"] == {"ids": "int64[?]", "text": "text", "raw": "uint8[?]"}
    rooms = {step["field"]: step.get("length", step.get("max_shape")) for step in whole["pipeline"]}
    assert rooms == {"ids": [4], "text": 4, "raw": [2]}


def test_lines_of_json_have_the_fields_that_all_of_them_have(data: Path) -> None:
    """Keys within objects get names, and images are those in the folder that the keys name."""
    write_photos(data, {"images": 2})
    names = sorted(path.name for path in (data / "images").iterdir())
    rows = [{"file": name, "meta": {"label": n}, "text": "é" * n, "rest": None} for n, name in enumerate(names)]
    (data / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    whole = found(data)

    assert whole["source"] == {
        "type": "jsonl",
        "root": str(data),
        "shards": ["*.jsonl"],
        "fields": {"image": "image", "label": "int64", "text": "text"},
        "names": {"image": "file", "label": "meta.label"},
        "image_root": str(data / "images"),
    }
    assert [step["op"] for step in whole["pipeline"]] == [*AUGMENTED, "text_bytes"]
    assert (whole["samples"], whole["left_out_files"]) == (2, 0)


def test_files_of_tokens_are_cut_into_windows(data: Path) -> None:
    """A batch has inputs and targets; the assumptions are in a note."""
    (data / "train.bin").write_bytes((np.arange(5000, dtype=np.uint16) % 100).tobytes())
    (data / "val.bin").write_bytes(b"\0\0\1\0")

    whole = found(data)

    path = str(data / "train.bin")
    assert whole["source"] == {"type": "tokens", "path": path, "dtype": "uint16", "length": 1025, "overlap": 1}
    assert whole["samples"] == 4
    assert whole["pipeline"] == [{"op": "cast", "field": "tokens", "dtype": "int64"}]
    assert whole["notes"] == [
        "no stream of the part val: no file of the part val can be used",
        "windows of 1,024 tokens and the one behind them, as uint16",
    ]


def test_tfrecords_are_recognised_by_their_features(data: Path) -> None:
    """Names of files may end in their numbers, without an extension."""
    records = [
        example(image__encoded=data_, image__class__label=[number], box=[0.0, 1.0], image__format=b"JPEG")
        for number, data_ in enumerate(PICTURES)
    ]
    write_records(data / "train-00000-of-00001", records)

    whole = found(data)

    assert (whole["source"]["type"], whole["source"]["shards"]) == ("tfrecord", ["train-*"])
    assert whole["source"]["fields"] == {
        "box": "float32[2]",
        "label": "int64",
        "image": "image",
        "image_format": "text",
    }
    assert whole["source"]["names"]["image"] == "image/encoded"
    assert whole["samples"] == 4


def test_arrays_of_one_length_belong_together(data: Path) -> None:
    """Test arrays are another stream; images and labels get their names."""
    for part, count in (("train", 6), ("test", 3)):
        np.save(data / f"x_{part}.npy", np.zeros((count, 8, 8, 3), np.uint8))
        np.save(data / f"y_{part}.npy", np.arange(count))

    whole = found(data)

    assert whole["source"]["arrays"] == {"image": "x_train.npy", "label": "y_train.npy"}
    assert "pipeline" not in whole
    assert found(data / "y_test.npy")["source"] == {"type": "npy", "path": str(data / "y_test.npy"), "field": "label"}


def test_an_archive_of_arrays_has_a_training_part_as_well(data: Path) -> None:
    """Keras saves its data sets in such archives."""
    arrays = {"x_train": np.zeros((5, 4)), "y_train": np.arange(5), "x_test": np.zeros((2, 4)), "y_test": np.arange(2)}
    np.savez(data / "all.npz", **arrays)

    whole = found(data)

    assert whole["source"]["arrays"] == {"x": "x_train", "label": "y_train"}
    assert whole["samples"] == 5


@pytest.mark.usefixtures("forked_scans")
def test_videos_give_frames(data: Path) -> None:
    """Folders are classes."""
    write_video(data / "run" / "a.mp4", 5)
    write_video(data / "jump" / "b.mkv", 5)

    whole = found(data)

    assert whole["source"] == {"type": "video", "root": str(data), "files": ["**/*.{mkv,mp4}"], "classes": "folder"}
    assert whole["samples"] == 10
    assert [step["op"] for step in whole["pipeline"]] == AUGMENTED[1:]


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("forked_scans")
@pytest.mark.parametrize(
    ("records", "options"),
    [
        (
            {b"%d" % number: msgpack.packb({"img": one, "label": number}) for number, one in enumerate(PICTURES)},
            {"fields": {"image": "image", "label": "int64"}, "names": {"image": "img"}, "format": "msgpack"},
        ),
        (
            {
                **{b"image-%09d" % number: one for number, one in enumerate(PICTURES)},
                **{b"label-%09d" % number: b"word" for number in range(4)},
                b"num-samples": b"4",
            },
            {"fields": {"image": "image", "label": "text"}, "key": "{field}-*"},
        ),
        ({b"%d" % number: one for number, one in enumerate(PICTURES)}, {"fields": {"image": "image"}}),
    ],
    ids=["msgpack", "a record for each field", "images"],
)
def test_databases_are_recognised_by_their_records(
    data: Path, records: dict[bytes, bytes], options: dict[str, Any]
) -> None:
    """The databases have three common layouts."""
    write_lmdb(data, records)

    whole = found(data)

    assert whole["source"] == {"type": "lmdb", "path": str(data), **options}
    assert whole["samples"] == 4
    assert whole["left_out"] == []


def test_a_pattern_selects_the_files(data: Path) -> None:
    """The pattern is quoted, so that the shell does not expand it."""
    for number in range(3):
        write_shard(data / f"part-{number}.tar", [("a.jpg", PICTURES[0])])

    whole = found(data / "part-{0..1}.tar")

    assert whole["source"] == {
        "type": "webdataset",
        "root": str(data),
        "shards": ["part-{0..1}.tar"],
        "label": "",
    }
    assert whole["stream"] == "part"


# --- servers --------------------------------------------------------------------------------------


def test_a_bucket_is_listed(bucket: Any) -> None:
    """The command lists a bucket as it lists a local folder."""
    bucket.put({f"photos/{name}/{number}.jpg": PICTURES[number] for name in ("cat", "dog") for number in range(2)})

    whole = found("s3://bucket/photos")

    assert whole["source"] == {"type": "folder", "path": "s3://bucket/photos"}
    assert whole["classes"] == {"cat": 2, "dog": 2}


@pytest.mark.usefixtures("_network_library")
def test_a_web_server_needs_the_names(data: Path) -> None:
    """A web server cannot list: the message says how to name files, which are then inspected."""
    shard = write_shard(data / "a.tar", [("a.jpg", PICTURES[0]), ("a.cls", b"1")]).read_bytes()
    with serving({"train-0.tar": shard, "train-1.tar": shard}) as server:
        whole = found(f"{server.url}/train-{{0..1}}.tar")
        text = refused(server.url)

    assert whole["source"] == {"type": "webdataset", "root": server.url, "shards": ["train-{0..1}.tar"]}
    assert whole["samples"] == 2
    assert f"batchd init '{server.url}/train-{{000..123}}.tar'" in text


# --- what it writes, and does not -----------------------------------------------------------------


def test_an_existing_configuration_stays(data: Path) -> None:
    """`--force` overwrites it; `-o` names another file, and `-o -` prints."""
    np.save(data / "x.npy", np.zeros((4, 3), np.float32))
    file = data.parent / "batchd.toml"
    file.write_text("# mine\n")

    text = batchd("init", data, folder=data.parent, status=1).stderr
    printed = batchd("init", data, "-o", "-", folder=data.parent).stdout
    batchd("init", data, "--json", "-o", "other.toml", folder=data.parent)

    assert text == (
        "batchd: batchd.toml exists; `batchd init --add PATH` adds a stream to it, --force overwrites it, "
        "-o FILE writes another file\n"
    )
    assert file.read_text() == "# mine\n"
    assert (data.parent / "other.toml").read_text() == printed

    written = json.loads(batchd("init", data, "--force", "--json", folder=data.parent).stdout)
    assert file.read_text() == printed == written["toml"]
    assert written["written"] == str(file)


def test_a_batch_of_text_and_tokens_is_shown(data: Path) -> None:
    """The output has what `batchd peek` prints; the next steps name the file."""
    write_parquet(data / "a.parquet", {"ids": [[1, 2, 3], [4]], "text": ["abc", "é"]})

    text = batchd("init", data, "-o", "my.toml", folder=data.parent).stdout

    assert '"abc"' in text
    assert "1 2 3" in text
    assert "\nNext: batchd serve my.toml\n" in text


def test_a_batch_of_pictures_is_drawn(data: Path) -> None:
    """`--sheet` draws it, and needs a batch."""
    write_photos(data, {"": 2})

    text = batchd("init", data, "--sheet", "sheet.png", folder=data.parent).stdout

    assert "sheet.png: epoch 0, step 0, 2 samples" in text
    assert (data.parent / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "--sheet saves a batch" in batchd("init", data, "--sheet", "a.png", "--dry-run", status=2).stderr


def test_a_batch_is_smaller_where_memory_is_short(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written configuration passes `batchd check` on this machine."""
    np.save(data / "x.npy", np.zeros((64, 1 << 18), np.uint8))
    monkeypatch.setattr(
        config_file, "parse_config", lambda text, file: parse_config(text, file, {"daemon.memory": "8MiB"})
    )

    assert found(data)["batch_size"] < 64


def test_what_cannot_be_served_is_said(data: Path) -> None:
    """Missing data, an empty folder, unknown files and unreadable files each have a message."""
    assert refused(data / "absent") == (
        f"batchd: there is no file or folder {data / 'absent'}; name the folder or file that has the data\n"
    )
    assert refused(data) == f"batchd: {data} has no files; name the folder or file that has the data\n"
    assert refused(f"{data}s") == (
        f"batchd: there is no file or folder {data}s; did you mean {data}?; name the folder or file that has the data\n"
    )

    (data / "chats.json").write_text('[{"id": 1}]')
    assert refused(data / "chats.json").endswith(
        "chats.json is a list, and batchd reads records of JSON one a line: jq -c '.[]' FILE > NEW.jsonl\n"
    )
    (data / "chats.json").unlink()
    (data / "a.xyz").write_text("x")
    text = refused(data)
    assert "has no files that batchd recognises, but 1 .xyz (a.xyz)\n" in text
    assert "  folder: .bmp .gif .jpeg .jpg .png .webp .aac .aif .aiff .flac .m4a .mp3 .oga .ogg .opus .wav\n" in text

    (data / "c.jpg").write_text("no image")
    assert "none of 1 sample can be used, for example" in refused(data)
    assert "ftp" in batchd("init", "ftp://host/a", status=2).stderr
    refusal = batchd("init", data, "-o", data / "no" / "a.toml", status=1).stderr
    assert refusal.endswith(f"there is no folder {data / 'no'}; make it, or name another place\n")


def test_data_without_permission_is_a_problem_of_the_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no wrong usage, and a packed file comes with no command that could not read it."""
    (data / "a.zip").write_bytes(b"x")
    monkeypatch.setattr(os, "access", lambda _path, mode, **_options: mode != os.R_OK)

    assert refused(data / "a.zip") == f"batchd: the file {data / 'a.zip'} is not readable for this user\n"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", ["my photos.zip", "photos.TAR.GZ", "photos.tgz", "labels.csv.gz"])
def test_a_packed_file_comes_with_the_command_that_unpacks_it(data: Path, name: str) -> None:
    """The command unpacks next to the file, and goes on with the content."""
    write_photos(data / "inside", {"cat": 2, "dog": 3})
    file = data / name
    if name.endswith(".zip"):
        shutil.make_archive(str(file.with_suffix("")), "zip", data / "inside")
    elif name.endswith(".csv.gz"):
        file.write_bytes(gzip.compress(b"x,label\n1.5,1\n"))
    else:
        with tarfile.open(file, "w:gz") as archive:
            archive.add(data / "inside", ".")

    done = run_advice(refused(file), "is packed; unpack it first")

    assert done["samples"] == (1 if name.endswith(".csv.gz") else 5)
    assert list(done["classes"]) == ([] if name.endswith(".csv.gz") else ["cat", "dog"])


@pytest.mark.thorough
def test_packed_files_in_folders_come_with_commands_for_all_of_them(data: Path) -> None:
    """Each archive gets a folder of its own, so an archive for each class makes classes."""
    write_photos(data.parent / "inside", {"": 2})
    for name in ("cat", "dog's"):
        shutil.make_archive(str(data / name), "zip", data.parent / "inside")
    (data / "labels.txt.gz").write_bytes(gzip.compress(b"no image\n"))

    done = run_advice(refused(data), "unpack them first")

    assert done["classes"] == {"cat": 2, "dog's": 2}
    assert done["left_out"] == ["cat.zip", "dog's.zip", "labels.txt"]


def run_advice(text: str, words: str) -> dict[str, Any]:
    """Run the commands below the words in a shell; return the JSON that `batchd init` prints."""
    lines = takewhile(lambda line: line.startswith("  "), text.partition(f"{words}:\n")[2].splitlines())
    commands = "\n".join(lines)
    script = f'batchd() {{ "{sys.executable}" -m batchd "$@" --json --dry-run; }}\n{commands}'
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True, env=clean_environment())
    return dict(json.loads(done.stdout))


def test_a_packed_file_at_a_url_has_to_be_downloaded() -> None:
    """No server is asked: the name says that it is packed."""
    text = refused("https://example.com/photos.zip")

    assert text.splitlines() == [
        "batchd: https://example.com/photos.zip is packed; download it, and unpack it:",
        "  python3 -m zipfile -e photos.zip photos && batchd init photos",
    ]


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("forked_scans")
@pytest.mark.parametrize("content", [b"", b"garbage\n", b"\xff\xd8\0garbage" * 400], ids=["empty", "text", "bytes"])
def test_broken_files_of_every_kind_are_refused(data: Path, content: bytes) -> None:
    """The message has the file's name, without a traceback."""
    for ending in (ending for kind in SOURCE_KINDS.values() for ending in kind.endings):
        file = data / f"broken{ending}"
        file.write_bytes(content)
        text = refused(file)
        assert text.startswith("batchd: ")
        assert str(data) in text


def test_a_table_with_other_titles_is_left_out(data: Path) -> None:
    """The tables with the most common titles are the source; the file says why others are not."""
    for name, title in (("a", "x"), ("b", "y"), ("c", "x")):
        (data / f"{name}.csv").write_text(f"{title}\n1\n")

    whole = found(data)

    assert (whole["source"]["files"], whole["samples"]) == (["a.csv", "c.csv"], 2)
    assert "1 of 3 files left out, its titles are not those of a.csv: 1 .csv (b.csv)" in whole["toml"]
    assert found(data / "b.csv")["source"]["path"] == str(data / "b.csv")


def test_a_library_that_is_missing_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that installs it."""
    write_parquet(data / "a.parquet", {"x": [1]})
    monkeypatch.setattr(interface, "find_spec", lambda _module: None)

    assert f"needs pyarrow, which is not installed: {sys.executable} -m pip install 'batchd[arrow]'" in refused(data)


def test_a_damaged_file_is_told_by_the_kind_that_all_such_files_have(data: Path) -> None:
    """Not by one for a special form of them, such as LeRobot's folders, that this is none of."""
    (data / "a.parquet").write_bytes(b"PAR1 and nothing else")

    text = refused(data)

    assert str(data / "a.parquet") in text
    assert "meta/info.json" not in text


def test_an_interrupt_leaves_nothing(data: Path, tmp_path: Path) -> None:
    """An interrupt while a scan hangs leaves no file, process or traceback."""
    write_lmdb(data, {b"1": PICTURES[0]})
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    environment = {"BATCHD_FAILPOINTS": "scan.isolated=hang", "BATCHD_FAILPOINTS_LEDGER": str(ledger)}

    with subprocess.Popen(
        [sys.executable, "-m", "batchd", "init", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | environment,
        cwd=tmp_path,
    ) as process:
        wait_until(lambda: list(ledger.iterdir()), "the scan hangs")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == ExitCode.INTERRUPTED
    assert (output, errors.strip()) == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {"things", "ledger"}


def test_every_kind_with_endings_is_recognised() -> None:
    """Each kind that has file extensions has a recogniser.

    No extension has two kinds of which none outranks the other.
    """
    kinds = [kind for kind in SOURCE_KINDS.values() if kind.endings]
    endings = [(ending, kind.outranks) for kind in kinds for ending in kind.endings]

    assert all(callable(interface.recogniser_of(kind)) for kind in kinds)
    assert len(endings) == len(set(endings))
