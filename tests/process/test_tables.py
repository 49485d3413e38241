"""Tables and arrays, served without any step: the same bytes with any number of workers."""

import os

import numpy as np

import batchd_client
from support.expected import Expected
from support.seen import see
from support.settings import STILL_PIPELINE
from support.waiting import wait_until

SAMPLES = 50


def write_sources(folder):
    """Write equal numbers as CSV, arrays, archive, records: ``x`` float32 [3], ``label`` int64."""
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


def test_streams_serve_what_the_files_hold(start_daemon, tmp_path):
    """Four kinds of source without a pipeline are equal over two epochs; so are ready pictures."""
    tables = {name: {"source": source, "batch_size": 8} for name, source in write_sources(tmp_path).items()}
    daemon = start_daemon({**tables, "pictures": pictures(tmp_path / "pictures.npy")})
    expected = Expected(daemon.config, "npy")
    with batchd_client.connect(daemon.address) as connection:
        for name in tables:
            stream = connection.stream(name, epochs=2)
            assert [see(stream), see(stream)] == [expected.epoch(0), expected.epoch(1)], name
        assert see(connection.stream("pictures", epochs=1)) == Expected(daemon.config, "pictures").epoch(0)


def pictures(file):
    """Make a stream of pixels in an array; steps on images accept them unchanged."""
    np.save(file, np.random.default_rng(1).integers(0, 256, (SAMPLES, 40, 48, 3), np.uint8))
    steps = [{"op": "random_resized_crop", "size": [32, 32]}, {"op": "random_flip"}, {"op": "normalize"}]
    return {"source": {"type": "npy", "path": str(file)}, "batch_size": 8, "pipeline": steps}


def test_what_is_missing_or_cut_while_it_is_served_is_a_bad_sample_and_kills_no_worker(start_daemon, photos, tmp_path):
    """Bad samples of a table are named with record, column and path; an array's are all bad.

    A truncated array's remaining bytes may be other data by now.
    """
    files = sorted(path.relative_to(photos) for path in photos.rglob("*.jpg"))[:10]
    lines = ["file,label", *(f"{file},{number}" for number, file in enumerate([*files, "gone.jpg"]))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    np.save(tmp_path / "x.npy", np.arange(SAMPLES * 4).reshape(SAMPLES, 4))
    table = {"type": "csv", "path": str(tmp_path / "t.csv"), "image": "file", "image_root": str(photos)}
    masked = {"batch_size": 8, "on_error": "mask", "max_bad_fraction": 1.0}
    streams = {
        "table": {**masked, "source": {**table, "fields": {"label": "int64"}}, "pipeline": STILL_PIPELINE},
        "array": {**masked, "source": {"type": "npy", "path": str(tmp_path / "x.npy"), "field": "x"}},
    }
    daemon = start_daemon(streams)
    workers = daemon.worker_pids()
    os.truncate(tmp_path / "x.npy", 128 + 20 * 32)
    valid = {}
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("array", epochs=1):
            valid |= dict(zip(batch["index"].tolist(), batch["valid"].tolist(), strict=True))
        cut = connection.bad("array").samples
        assert see(connection.stream("table", epochs=1)) == Expected(daemon.config, "table").epoch(0)
        wait_until(lambda: connection.bad("table").total > 0, "the sample is listed")
        (gone,) = connection.bad("table").samples
    assert valid == dict.fromkeys(range(SAMPLES), False)
    assert {("ends at byte" if one.sample >= 20 else "its file has changed") in one.reason for one in cut} == {True}
    assert gone.path == f"{tmp_path}/t.csv: record 11 (byte {sum(len(line) + 1 for line in lines[:-1])})"
    assert gone.reason == "'file' is 'gone.jpg': No such file or directory"
    assert daemon.worker_pids() == workers
