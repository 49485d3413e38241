"""Trainers read a stream whose kind of source comes from another package."""

import batchd_client
from support.plugins import install, write_zip
from support.seen import see
from support.settings import folder_stream


def test_a_package_s_source_is_served_as_our_own_are(start_daemon, photos, tmp_path, monkeypatch):
    """The example's zip file of images gives the same batches as the folder."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    files = {str(file.relative_to(photos)): file.read_bytes() for file in sorted(photos.rglob("*.jpg"))}
    archive = write_zip(tmp_path / "photos.zip", files)
    folder = folder_stream(photos)
    zipped = {**folder, "source": {"type": "plugin", "name": "zip", "options": {"path": str(archive)}}}
    daemon = start_daemon({"folder": folder, "zip": zipped})

    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("zip", epochs=1)) == see(connection.stream("folder", epochs=1))
