"""Batches that carry the paths of their samples, from every source of files."""

import shutil

import batchd_client
from support.settings import folder_stream, list_stream

PATH_BYTES = 24


def paths_of(daemon, stream):
    """Map each sample of one epoch to its path."""
    with batchd_client.connect(daemon.address) as connection:
        source = connection.stream(stream, epochs=1)
        assert source.schema["path"].shape == (PATH_BYTES,)
        return {
            sample: path
            for batch in source
            for sample, path in zip(batch["index"].tolist(), batchd_client.text(batch["path"]), strict=True)
        }


def test_each_sample_comes_with_its_path(start_daemon, photos, tmp_path):
    """Sources are a folder, patterns and a list; substitutes and masked samples have paths, too."""
    files = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{file} 0\n" for file in files))
    folder, listed = folder_stream(photos), list_stream(listing, photos)
    for stream in (folder, listed):
        stream["source"]["path_bytes"] = PATH_BYTES
    patterns = {"type": "glob", "root": str(photos), "patterns": ["**/*.jpg"], "path_bytes": PATH_BYTES}
    (tmp_path / "some").mkdir()
    for file in files[:7]:
        shutil.copy(photos / file, tmp_path / "some")
    (tmp_path / "some" / "bad.jpg").write_bytes(b"no image")
    with_bad = {**folder, "source": {**patterns, "root": str(tmp_path / "some")}, "max_bad_fraction": 1.0}
    daemon = start_daemon(
        {
            "folder": folder,
            "list": listed,
            "glob": {**folder, "source": {**patterns, "classes": "folder"}},
            "substitute": with_bad,
            "mask": {**with_bad, "on_error": "mask"},
        }
    )
    names = dict(enumerate(sorted(path.name for path in (tmp_path / "some").iterdir())))

    for stream in ("folder", "list", "glob"):
        assert paths_of(daemon, stream) == dict(enumerate(files))
    substituted = paths_of(daemon, "substitute")
    assert "bad.jpg" not in substituted.values()
    assert substituted.items() <= names.items()
    assert paths_of(daemon, "mask") == names
    with batchd_client.connect(daemon.address) as connection:
        assert connection.stream("glob").classes == connection.stream("folder").classes == ("cat", "dog", "owl", "yak")
