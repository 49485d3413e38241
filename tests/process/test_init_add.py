"""`batchd init --add`: a further stream for a configuration in use, which stays as it is."""

import json
import os
import pty
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from support.commands import batchd
from support.daemon_process import clean_environment
from support.images import write_photos

pytestmark = pytest.mark.usefixtures("forked_children", "own_cache")
MINE = """# mine
[streams.photos] # these
batch_size = 2
source = { type = "folder", path = "photos" }
pipeline = [ { op = "decode" }, { op = "resize", size = [8, 8] } ]"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a configuration, the photographs that it serves, and others."""
    write_photos(tmp_path / "photos", {"cat": 2, "dog": 2})
    write_photos(tmp_path / "more", {"": 4})
    (tmp_path / "batchd.toml").write_text(MINE)
    return tmp_path


def refused(folder: Path, *words: str | Path, status: int = 1) -> str:
    """Return the message of a mistake, which leaves every file as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told = batchd("init", *words, folder=folder, status=status)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert told.stdout == ""
    return told.stderr


def test_a_stream_is_added_behind_a_text_that_stays(folder: Path) -> None:
    """The output has what was added, under which name, and the next step; the file passes check."""
    done = batchd("init", "--add", "more", folder=folder)

    text = (folder / "batchd.toml").read_text()
    added = text.removeprefix(f"{MINE}\n\n")
    assert added.startswith("# 4 samples: image (image file), label (int64)\n# image: JPEG, 64 x 48 pixels")
    assert done.stdout.startswith(f"{added}\nadded to batchd.toml as more\n\nNext: batchd serve\n")
    assert 'connect().stream("more")' in done.stdout
    assert list(tomllib.loads(text)["streams"]) == ["photos", "more"]
    assert "is fine" in batchd("check", folder=folder).stdout


@pytest.mark.parametrize("words", [["my.toml", "--add", "more"], ["--add", "more", "-c", "my.toml"]])
def test_another_file_is_named_as_for_other_commands(folder: Path, words: list[str]) -> None:
    """A symbolic link stays one, and the file behind it keeps mode and line ends."""
    real = folder / "real.toml"
    real.write_bytes(f"{MINE}\n".replace("\n", "\r\n").encode())
    real.chmod(0o640)
    (folder / "my.toml").symlink_to(real)

    assert "added to my.toml as more" in batchd("init", *words, folder=folder).stdout

    assert (folder / "my.toml").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.read_bytes().count(b"\n") == real.read_bytes().count(b"\r\n") > 8
    assert {path.name for path in folder.iterdir()} == {"batchd.toml", "my.toml", "real.toml", "photos", "more"}
    assert (folder / "batchd.toml").read_text() == MINE


def test_the_name_is_free_and_may_be_chosen(folder: Path) -> None:
    """Other data in a folder of the same name gets a number; a dot needs quotes."""
    (folder / "other").mkdir()
    (folder / "more").rename(folder / "other" / "photos")

    assert "[streams.photos-2]" in batchd("init", "--add", "other/photos", "-n", folder=folder).stdout
    assert (folder / "batchd.toml").read_text() == MINE
    written = json.loads(batchd("init", "--add", "other/photos", "--name", "v1.5", "--json", folder=folder).stdout)
    assert (written["stream"], written["written"]) == ("v1.5", str(folder / "batchd.toml"))
    assert (folder / "batchd.toml").read_text() == f"{MINE}\n\n{written['toml']}"
    assert '[streams."v1.5"]' in written["toml"]


def test_a_file_without_streams_gets_its_first(folder: Path) -> None:
    """An empty file, and one that has [daemon] alone, are no mistakes."""
    for text in ("", "[daemon]\nworkers = 1\n"):
        (folder / "batchd.toml").write_text(text)
        batchd("init", "--add", "more", folder=folder)
        assert list(tomllib.loads((folder / "batchd.toml").read_text())["streams"]) == ["more"]


def test_mistakes_leave_the_file_as_it_is(folder: Path) -> None:
    """Each message says what is wrong, where, and what helps."""
    (folder / "empty").mkdir()
    (folder / "broken.toml").write_text("x =\n")
    (folder / "misspelt.toml").write_text(MINE.replace("batch_size", "batchsize"))
    (folder / "streams.toml").write_text("streams = 3\n")

    assert "there is no file or folder" in refused(folder, "--add", "nowhere", status=2)
    assert "empty has no files" in refused(folder, "--add", "empty", status=2)
    assert "batchd.toml serves this data already, as stream photos; --name NAME adds it" in refused(
        folder, "--add", folder / "more/../photos"
    )
    taken = refused(folder, "--add", "more", "--name", "photos")
    assert taken == "batchd: batchd.toml has a stream photos already; choose another name, such as --name photos-2\n"
    assert "a stream's name is made of letters, digits" in refused(folder, "--add", "more", "--name", "a b", status=2)
    missing = refused(folder, "no.toml", "--add", "more", status=2)
    assert "no.toml has 1 problem" in missing
    assert "`batchd init PATH` writes one" in missing
    assert "broken.toml:1: is not TOML" in refused(folder, "broken.toml", "--add", "more", status=2)
    assert "misspelt.toml:3: streams.photos.batchsize: unknown key" in refused(
        folder, "misspelt.toml", "--add", "more", status=2
    )
    assert "streams: must be a table" in refused(folder, "streams.toml", "--add", "more", status=2)
    assert "cat is no configuration, and --add takes one PATH" in refused(folder, "--add", "more", "cat", status=2)
    assert "two configurations" in refused(folder, "a.toml", "--add", "more", "-c", "b.toml", status=2)
    assert "have no use beside --add" in refused(folder, "--add", "more", "--force", status=2)
    assert "-c goes with --add PATH" in refused(folder, "more", "-c", "a.toml", status=2)


def test_what_check_refuses_is_not_added(folder: Path) -> None:
    """A problem of a stream that was there is one of the result, too, with its line."""
    (folder / "photos" / "dog").rename(folder / "photos" / "emu")
    (folder / "batchd.toml").write_text(MINE.replace('photos" }', 'photos", classes = ["cat", "dog"] }'))

    told = refused(folder, "--add", "more", status=2)

    assert "batchd.toml with [streams.more] has 1 problem" in told
    assert "'emu', which is none of the classes cat, dog" in told


def test_a_folder_that_cannot_be_written_is_said_before_the_data_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be added can still be printed."""
    monkeypatch.setattr(os, "access", lambda path, _mode, **_options: path != folder)

    assert refused(folder, "--add", "nowhere").endswith(f"may not write to {folder}; --dry-run prints what to add\n")
    assert "[streams.more]" in batchd("init", "--add", "more", "-n", folder=folder).stdout


@pytest.mark.parametrize("inline", ["", "streams."])
def test_streams_in_an_inline_table_come_with_what_to_paste(folder: Path, inline: str) -> None:
    """TOML allows no table beside `streams = { ... }`, but beside `streams.photos = { ... }`."""
    table = '{ source = { type = "folder", path = "photos" }, batch_size = 2, pipeline = [{ op = "decode" }, '
    table += '{ op = "resize", size = [8, 8] }] }'
    file = folder / "batchd.toml"
    if inline:
        file.write_text(f"streams.photos = {table}\n")
        batchd("init", "--add", "more", folder=folder)
    else:
        file.write_text(f"# mine\nstreams = {{ photos = {table} }}\n")
        told, pasted = refused(folder, "--add", "more").rstrip().split("\n")
        assert told.startswith("batchd: batchd.toml:2 has all streams in one inline table")
        file.write_text(f"streams = {{ photos = {table}{pasted} }}\n")
    assert "is fine" in batchd("check", folder=folder).stdout
    assert list(tomllib.loads(file.read_text())["streams"]) == ["photos", "more"]


def test_a_running_daemon_serves_the_stream_after_a_reload(start_daemon, tmp_path: Path) -> None:
    """The next step is `batchd reload`; on a terminal, the command asks, and reloads."""
    for name in ("one", "two"):
        np.save(tmp_path / f"{name}.npy", np.zeros((4, 3), np.float32))
    daemon = start_daemon()
    added = batchd("init", daemon.config, "--add", tmp_path / "one.npy", address=daemon.address).stdout
    assert "\nNext: batchd reload\n" in added
    other = batchd("init", "--add", tmp_path / "one.npy", address=daemon.address, folder=tmp_path, status=2).stderr
    command = f"batchd init {daemon.config} --add {tmp_path}/one.npy"
    assert f"the daemon at {daemon.address} uses {daemon.config}: `{command}`" in other

    pid, terminal = pty.fork()
    if not pid:
        words = ["-m", "batchd", "init", str(daemon.config), "--add", str(tmp_path / "two.npy")]
        os.execve(sys.executable, [sys.executable, *words], clean_environment() | {"BATCHD_ADDRESS": daemon.address})
    said = b""
    while b"[y/N]" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"y\n")
    while b"in a trainer" not in said:
        said += os.read(terminal, 4096)
    assert os.waitpid(pid, 0) == (pid, 0)
    os.close(terminal)
    with batchd_client.connect(daemon.address) as client:
        assert {"one", "two"} <= {stream["name"] for stream in client.status()["streams"]}


def test_a_daemon_that_has_no_memory_left_is_restarted_instead(start_daemon, tmp_path: Path) -> None:
    """Its rings have all of it, and are as large as at its start until it starts again."""
    np.save(tmp_path / "more.npy", np.zeros((64, 1 << 12), np.float32))
    daemon = start_daemon(memory="8MiB")

    added = batchd("init", daemon.config, "--add", tmp_path / "more.npy", address=daemon.address).stdout

    assert "for more, have " in added
    assert f"\nNext: batchd stop && batchd serve {daemon.config}\n" in added
    assert "batchd reload" not in added
