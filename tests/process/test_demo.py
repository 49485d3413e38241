"""`batchd demo`: the first thing that a new user sees."""

from support.commands import batchd
from support.images import write_photos


def test_two_trainers_share_one_decode_and_a_batch_is_drawn(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    write_photos(photos, {"cat": 40, "dog": 30})

    said = batchd("demo", "--data", photos, "--epochs", "2", "--folder", tmp_path / "new" / "demo").stdout

    rows = [line.split()[1:6] for line in said.splitlines() if line.startswith("trainer ")]
    assert rows == [[name, "4", "of", "4", "140"] for name in "AB"]
    assert "4 batches were decoded once and handed out 8 times" in said
    assert (tmp_path / "new" / "demo" / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert said.endswith(f"\nNext: batchd init {photos}\n")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    said = batchd("demo", "--folder", tmp_path / "file" / "demo", status=1).stderr

    assert "Not a directory; --folder names another place" in said
