"""Batches that carry the paths of their samples, from whatever source of files."""

import batchd_client
from support.settings import folder_stream, list_stream

PATH_BYTES = 24


def paths_of(daemon, stream):
    """Sample -> path, of one epoch."""
    with batchd_client.connect(daemon.address) as connection:
        source = connection.stream(stream, epochs=1)
        assert source.schema["path"].shape == (PATH_BYTES,)
        return {
            sample: path
            for batch in source
            for sample, path in zip(batch["index"].tolist(), batchd_client.text(batch["path"]), strict=True)
        }


def test_each_sample_comes_with_its_path(start_daemon, photos, tmp_path):
    """Of a folder, of patterns, of a list; and all read the same files."""
    files = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{file} 0\n" for file in files))
    patterns = {
        "type": "glob",
        "root": str(photos),
        "patterns": ["**/*.jpg"],
        "classes": "folder",
        "path_bytes": PATH_BYTES,
    }
    folder, listed = folder_stream(photos), list_stream(listing, photos)
    for stream in (folder, listed):
        stream["source"]["path_bytes"] = PATH_BYTES
    daemon = start_daemon({"folder": folder, "list": listed, "glob": {**folder, "source": patterns}})

    for stream in ("folder", "list", "glob"):
        assert paths_of(daemon, stream) == dict(enumerate(files))
    with batchd_client.connect(daemon.address) as connection:
        assert connection.stream("glob").classes == connection.stream("folder").classes == ("cat", "dog", "owl", "yak")


def test_the_path_is_that_of_the_sample_which_stands_in_for_a_bad_one(start_daemon, photos, tmp_path):
    """And of the bad one itself where it is masked."""
    for path in sorted(photos.rglob("*.jpg"))[:7]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    source = {"type": "glob", "root": str(tmp_path), "patterns": ["*.jpg"], "path_bytes": PATH_BYTES}
    stream = {**folder_stream(tmp_path), "source": source, "max_bad_fraction": 1.0}
    daemon = start_daemon({"substitute": stream, "mask": {**stream, "on_error": "mask"}})
    names = sorted(path.name for path in tmp_path.glob("*.jpg"))

    for name in ("substitute", "mask"):
        with batchd_client.connect(daemon.address) as connection:
            (batch,) = connection.stream(name, epochs=1)
            seen = batchd_client.text(batch["path"])
            assert seen == [names[sample] for sample in batch["index"].tolist()]
            assert ("bad.jpg" in seen) is (name == "mask")
            batch.release()
