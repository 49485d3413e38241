"""Tables and arrays, served: without any step, and the same bytes whatever the workers are."""

import os

import numpy as np
import pytest

import batchd_client
from support.expected import Expected
from support.seen import see
from support.settings import STILL_PIPELINE
from support.waiting import wait_until

SAMPLES = 50


def write_sources(folder):
    """The same numbers as a table, as arrays, in an archive and as records: ``x`` is float32 [3], ``label`` int64."""
    x = np.random.default_rng(1).random((SAMPLES, 3), np.float32)
    label = np.arange(SAMPLES) * 3
    lines = [f'{number},"{" ".join(map(str, row.tolist()))}"' for number, row in zip(label.tolist(), x, strict=True)]
    (folder / "t.csv").write_text("\n".join(["Class,x", *lines]))
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", label.astype(">i8"))
    np.savez(folder / "a.npz", x=x, y=label)
    records = np.empty(SAMPLES, [("x", "<f4", 3), ("label", "<i8")])
    records["x"], records["label"] = x, label
    (folder / "x.bin").write_bytes(records.tobytes())
    return {
        "csv": {
            "type": "csv",
            "path": str(folder / "t.csv"),
            "fields": {"x": "float32[3]", "label": "int64"},
            "names": {"label": "Class"},
        },
        "npy": {"type": "npy", "root": str(folder), "arrays": {"x": "x.npy", "label": "y.npy"}},
        "npz": {"type": "npz", "path": str(folder / "a.npz"), "arrays": {"x": "x", "label": "y"}},
        "raw": {"type": "raw", "path": str(folder / "x.bin"), "record": {"x": "float32[3]", "label": "int64"}},
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_serve_what_the_files_hold(start_daemon, tmp_path, workers):
    """Four kinds of source, no pipeline at all, the same batches over two epochs; and pictures that need no decoding."""
    tables = {name: {"source": source, "batch_size": 8} for name, source in write_sources(tmp_path).items()}
    daemon = start_daemon({**tables, "pictures": pictures(tmp_path / "pictures.npy")}, workers=workers)
    expected = Expected(daemon.config, "npy")
    with batchd_client.connect(daemon.address) as connection:
        for name in tables:
            stream = connection.stream(name, epochs=2)
            assert [see(stream), see(stream)] == [expected.epoch(0), expected.epoch(1)], name
        assert see(connection.stream("pictures", epochs=1)) == Expected(daemon.config, "pictures").epoch(0)


def pictures(file):
    """A stream of pixels in an array, which steps on images take as they are."""
    np.save(file, np.random.default_rng(1).integers(0, 256, (SAMPLES, 40, 48, 3), np.uint8))
    steps = [{"op": "random_resized_crop", "size": [32, 32]}, {"op": "random_flip"}, {"op": "normalize"}]
    return {"source": {"type": "npy", "path": str(file)}, "batch_size": 8, "pipeline": steps}


def test_an_array_that_is_cut_while_it_is_served_kills_no_worker(start_daemon, tmp_path):
    """All of it is bad samples: what is left may be something else by now."""
    np.save(tmp_path / "x.npy", np.arange(SAMPLES * 4).reshape(SAMPLES, 4))
    stream = {"source": {"type": "npy", "path": str(tmp_path / "x.npy"), "field": "x"}, "batch_size": 8}
    daemon = start_daemon({"photos": {**stream, "on_error": "mask", "max_bad_fraction": 1.0}})
    workers = daemon.worker_pids()
    os.truncate(tmp_path / "x.npy", 128 + 20 * 32)
    valid = {}
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            valid |= dict(zip(batch["index"].tolist(), batch["valid"].tolist(), strict=True))
        bad = connection.bad("photos").samples
    assert valid == dict.fromkeys(range(SAMPLES), False)
    assert {("ends at byte" if one.sample >= 20 else "its file has changed") in one.reason for one in bad} == {True}
    assert daemon.worker_pids() == workers


def test_images_that_a_table_names_are_decoded_and_missing_ones_are_bad_samples(start_daemon, photos, tmp_path):
    """With the table, the record, the column and the path."""
    files = sorted(path.relative_to(photos) for path in photos.rglob("*.jpg"))[:10]
    lines = [f"{file},{number}" for number, file in enumerate([*files, "gone.jpg"])]
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *lines]))
    source = {
        "type": "csv",
        "path": str(tmp_path / "t.csv"),
        "image": "file",
        "image_root": str(photos),
        "fields": {"label": "int64"},
    }
    stream = {
        "source": source,
        "batch_size": 8,
        "pipeline": STILL_PIPELINE,
        "on_error": "mask",
        "max_bad_fraction": 1.0,
    }
    daemon = start_daemon({"photos": stream})
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
        wait_until(lambda: connection.bad("photos").total > 0, "the sample is listed")
        (bad,) = connection.bad("photos").samples
    assert (
        bad.path == f"{tmp_path}/t.csv: record 11 (byte {sum(len(line) + 1 for line in ['file,label', *lines[:-1]])})"
    )
    assert bad.reason == "'file' is 'gone.jpg': No such file or directory"
