"""Streams with a cache, in real processes: the same bytes as without, and one read per sample."""

import os
from pathlib import Path

import pytest

import batchd_client
from batchd.commands.doctor.machine import Level
from batchd.commands.doctor.storage import check_cache
from batchd.data.pipeline.image import jpeg_box
from support.commands import batchd as command
from support.expected import Expected
from support.images import encode, jpeg, jpeg_with_exif, photo, progressive_jpeg, write_photos
from support.kernel import descriptors_of
from support.mounts import small_file_system
from support.parquet_files import photo_rows
from support.seen import see
from support.settings import folder_stream, write_settings
from support.shards import photo_shards
from support.tfrecords import photo_records
from support.waiting import wait_until

PHOTOS = 40
"""The marker of a JPEG with restart markers."""
CACHE = {"cache": "encoded", "cache_memory": "16MiB", "memory": "1MiB"}
DECODED = {**CACHE, "cache": "decoded"}
STEADY = [{"op": "decode"}, {"op": "resize", "shorter_side": 48}]
RANDOM = [{"op": "random_crop", "size": [32, 32]}, {"op": "random_flip"}]
KINDS = {
    "photos": CACHE,
    "decoded": DECODED,
    "shorter": {**DECODED, "cache_short_side": 40},
    "resized": {**DECODED, "pipeline": STEADY + RANDOM},
}
"""Streams whose caches have samples of different kinds."""


@pytest.fixture
def own_photos(tmp_path):
    """Copy the photographs into a folder that the test may damage."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_photos(folder, {"cat": 20, "dog": 20}, height=72, width=96)
    return folder


def read(daemon, stream="photos", epochs=1):
    """Read whole epochs, from the first one on, as a trainer sees them."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(stream, epochs=epochs) as batches:
        return [see(batches) for _ in range(epochs)]


def test_each_sample_is_read_and_made_once(start_daemon, own_photos):
    """Every epoch has an uncached one's bytes, though the folder is removed after the first."""
    daemon = start_daemon({name: folder_stream(own_photos, **keys) for name, keys in KINDS.items()})
    expected = {name: Expected(daemon.config, name) for name in KINDS}
    epochs = {name: [each.epoch(number) for number in range(3)] for name, each in expected.items()}
    for name in KINDS:
        assert read(daemon, name) == epochs[name][:1]
    files_bytes = sum(file.stat().st_size for file in own_photos.rglob("*.jpg"))
    own_photos.rename(own_photos.with_name("gone"))

    for name, keys in KINDS.items():
        assert read(daemon, name, epochs=3) == epochs[name]  # the ring already has the first one
        stream = daemon.stream_status(name)
        cache, work = stream["cache"], stream["work"]
        assert (work["cache_misses"], work["cache_hits"], stream["bad_rows"]) == (PHOTOS, 2 * PHOTOS, 0)
        assert work["read_bytes"] == files_bytes
        assert (cache["kind"], cache["held_samples"]) == (keys["cache"], PHOTOS)
        assert files_bytes <= cache["used_bytes"] <= cache["budget_bytes"]
        assert [part["name"] for part in work["parts"]].count("store") == 1
    shown = command("status", address=daemon.address).stdout
    assert shown.count("cache of encoded samples has 40 of 40 in") == 1
    assert shown.count("cache of decoded samples has 40 of 40 in") == 3
    assert shown.count("67% of 120 reads found there") == 4


SHARING = {
    "encoded": (CACHE, {}, {"cache_memory": "17MiB"}),
    "decoded": (KINDS["resized"], {"pipeline": [*STEADY, RANDOM[0]]}, {"pipeline": [STEADY[0], *RANDOM]}),
}
"""Keys of a stream, and two changes for others over its source: same cache, and another one."""


def test_streams_share_a_cache(start_daemon, own_photos):
    """Streams of one source share a cache; another budget or first step needs its own cache."""
    streams = {}
    for kind, (keys, same, different) in SHARING.items():
        streams[kind] = folder_stream(own_photos, **keys)
        streams[f"{kind}-others"] = folder_stream(own_photos, **{**keys, **same, "batch_size": 4, "seed": 5})
        streams[f"{kind}-larger"] = folder_stream(own_photos, **{**keys, **different})
    daemon = start_daemon(streams)
    for kind in SHARING:
        read(daemon, kind)
    first = {kind: Expected(daemon.config, f"{kind}-others").epoch(0) for kind in SHARING}
    own_photos.rename(own_photos.with_name("gone"))

    for kind in SHARING:
        assert read(daemon, f"{kind}-others") == [first[kind]]
        others, larger = daemon.stream_status(f"{kind}-others"), daemon.stream_status(f"{kind}-larger")
        assert (others["work"]["cache_hits"], others["cache"]["streams"]) == (PHOTOS, 2)
        assert (larger["cache"]["held_samples"], larger["cache"]["streams"]) == (0, 1)


def test_a_cache_that_is_too_small_holds_a_part(start_daemon, photos):
    """Other samples are read each time (one worker: two might both read a sample first)."""
    budgets = {"encoded": 72 << 10, "decoded": 200 << 10}
    streams = {
        kind: folder_stream(photos, memory="1MiB", cache=kind, cache_memory=budget) for kind, budget in budgets.items()
    }
    daemon = start_daemon(streams, workers=1)
    for kind, budget in budgets.items():
        expected = Expected(daemon.config, kind)
        assert read(daemon, kind, epochs=3) == [expected.epoch(number) for number in range(3)]
        stream = daemon.stream_status(kind)
        cache, work = stream["cache"], stream["work"]
        assert 5 <= cache["held_samples"] < PHOTOS
        assert cache["used_bytes"] <= cache["budget_bytes"] == budget
        assert work["cache_hits"] == 2 * cache["held_samples"]
        assert work["cache_hits"] + work["cache_misses"] == 3 * PHOTOS


def test_a_bad_file_is_not_kept(start_daemon, own_photos):
    """A bad file has the same substitute each time, as without a cache, until it is mended."""
    spoilt = sorted(own_photos.rglob("*.jpg"))[7]
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[: len(good) // 2])
    kinds = {"photos": CACHE, "decoded": DECODED}
    daemon = start_daemon({name: folder_stream(own_photos, **keys, max_bad_fraction=1) for name, keys in kinds.items()})
    for name in kinds:
        expected = Expected(daemon.config, name)
        assert read(daemon, name, epochs=2) == [expected.epoch(number) for number in range(2)]
        stream = daemon.stream_status(name)
        assert (stream["bad_rows"], stream["cache"]["held_samples"]) == (2, PHOTOS - 1)
    spoilt.write_bytes(good)
    os.utime(spoilt, (0, 0))  # with a later time it would be another file

    for name in kinds:
        assert read(daemon, name, epochs=3)[2] == Expected(daemon.config, name).epoch(2)


def test_a_reload_keeps_the_cache_of_a_source_that_stays(start_daemon, own_photos):
    """A stream with another seed uses it at once; the last stream's end removes the cache."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **CACHE)})
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    read(daemon)
    write_settings(daemon.config, {"photos": folder_stream(own_photos, **CACHE, seed=5)}, settings)
    daemon.reload()

    assert read(daemon) == [Expected(daemon.config).epoch(0)]
    assert daemon.stream_status()["work"]["cache_hits"] == PHOTOS

    write_settings(daemon.config, {"photos": folder_stream(own_photos, cache="off")}, settings)
    daemon.reload()
    read(daemon)
    assert daemon.stream_status()["cache"] is None
    processes = {daemon.pid, *daemon.worker_pids()}

    def is_gone():  # a worker that had no row of that epoch may not have heard yet
        held = [target for pid in processes for target in descriptors_of(pid).values()]
        return not [target for target in held if "batchd-cache" in target]

    wait_until(is_gone, "no process has the cache open")


def on_disk(folder, **changes):
    """Return the keys of a stream with a cache in a folder."""
    return {"cache": "encoded", "cache_dir": str(folder), "cache_size": "16MiB", "memory": "1MiB", **changes}


@pytest.fixture
def disk(tmp_path):
    """Make a folder for caches."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def damage(folder, every_bytes=1500):
    """Flip bits throughout the records of the only cache in a folder."""
    (file,) = folder.iterdir()
    with file.open("r+b") as opened:
        for place in range(8192, file.stat().st_size, every_bytes):
            opened.seek(place)
            (byte,) = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte ^ 1]))


def test_caches_on_disk_survive_the_daemon_and_its_workers(start_daemon, photos, own_photos, disk):
    """A restarted daemon uses every cached sample at once, though the photographs are now empty.

    Workers die while they fill the caches, and the daemon is killed during a first epoch.
    """
    streams = {
        "photos": folder_stream(own_photos, **on_disk(disk)),
        "decoded": folder_stream(own_photos, **on_disk(disk, cache="decoded", pipeline=STEADY + RANDOM)),
        "begun": folder_stream(photos, **on_disk(disk)),
    }
    daemon = start_daemon(streams, lasting_faults={"worker.cache.written": "kill@6"})
    expected = {name: Expected(daemon.config, name) for name in streams}
    epochs = {name: [each.epoch(number) for number in range(2)] for name, each in expected.items()}
    for name in ("photos", "decoded"):
        assert read(daemon, name, epochs=2) == epochs[name]
    with batchd_client.connect(daemon.address) as connection, connection.stream("begun", epochs=1) as batches:
        next(iter(batches)).release()
        held = daemon.stream_status("begun")["cache"]["held_samples"]
        daemon.kill()
    assert held > 0
    for file in own_photos.rglob("*.jpg"):
        file.write_bytes(b"")

    daemon.start()

    assert {name: read(daemon, name, epochs=2) for name in streams} == epochs
    for name in ("photos", "decoded"):
        stream = daemon.stream_status(name)
        assert (stream["work"]["cache_hits"], stream["work"]["cache_misses"], stream["bad_rows"]) == (2 * PHOTOS, 0, 0)
        assert stream["cache"]["folder"] == str(disk)
    work = daemon.stream_status("begun")["work"]
    assert work["cache_hits"] >= held
    assert work["cache_hits"] + work["cache_misses"] == 2 * PHOTOS
    opened = [line["held_samples"] for line in daemon.log_lines("cache on disk opened")]
    assert opened[:3] == [0, 0, 0]
    assert min(opened[3:]) >= held
    assert sorted(opened[3:])[1:] == [PHOTOS, PHOTOS]
    shown = command("status", address=daemon.address).stdout
    assert f"cache of encoded samples on disk ({disk}) has 40 of 40 in" in shown


def test_a_cache_that_is_damaged_while_it_is_in_use_is_read_around(start_daemon, photos, disk):
    """Flipped bits or a short file change no byte; log and status report it; the cache refills."""
    daemon = start_daemon({"photos": folder_stream(photos, **on_disk(disk))})
    expected = Expected(daemon.config)
    assert read(daemon) == [expected.epoch(0)]
    damage(disk)

    assert read(daemon, epochs=2) == [expected.epoch(0), expected.epoch(1)]
    (file,) = disk.iterdir()
    os.truncate(file, 10_000)
    assert read(daemon, epochs=4) == [expected.epoch(number) for number in range(4)]

    stream = daemon.stream_status()
    assert stream["bad_rows"] == 0
    assert stream["cache"]["held_samples"] == PHOTOS
    wait_until(lambda: daemon.stream_status()["cache"]["spoilt_samples"] > PHOTOS, "all records were missed")
    assert daemon.log_lines("a record of a cache on disk is damaged")


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_workers_that_die_while_they_fill_a_cache_spoil_nothing(start_daemon, photos, disk, where):
    """A death at any step harms neither later workers nor, for a cache on disk, the next daemon."""
    deaths = {"worker.cache.claimed": "kill@7", "worker.cache.written": "kill@5", "worker.cache.entered": "kill@3"}
    keys = CACHE if where == "in memory" else on_disk(disk)
    daemon = start_daemon({"photos": folder_stream(photos, **keys)}, faults=deaths)
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(3)]

    assert read(daemon, epochs=3) == epochs
    assert len({daemon.wait_for_fault(step) for step in deaths}) == len(deaths)
    assert daemon.stream_status()["cache"]["held_samples"] == PHOTOS
    if where == "on disk":
        daemon.restart()
        assert read(daemon, epochs=3) == epochs
        assert daemon.stream_status()["work"]["cache_misses"] == 0


def test_a_second_daemon_does_not_fill_the_same_cache(start_daemon, photos, disk):
    """The error names the process that has the file; streams of one daemon share the file."""
    streams = {name: folder_stream(photos, **on_disk(disk)) for name in ("photos", "others")}
    daemon = start_daemon(streams)
    read(daemon)
    assert daemon.stream_status("others")["cache"]["streams"] == 2

    settings = {"runtime_dir": str(daemon.folder / "second"), "workers": 1, "memory": "64MiB", "http": "off"}
    config = write_settings(daemon.folder / "second.toml", streams, settings)
    refused = command("serve", "-c", str(config), status=2)

    assert "streams.photos.cache_dir: another daemon fills" in refused.stderr.replace("\n", " ")
    assert read(daemon, "others") == [Expected(daemon.config, "others").epoch(0)]


def test_a_full_disk_is_no_error(start_daemon, photos, tmp_path):
    """The cache stops growing, and the log gives the reason."""
    folder = tmp_path / "small"
    with small_file_system(folder, size="64k"):
        daemon = start_daemon({"photos": folder_stream(photos, **on_disk(folder))})
        expected = Expected(daemon.config)
        assert read(daemon, epochs=2) == [expected.epoch(0), expected.epoch(1)]
        stream = daemon.stream_status()
        assert 3 <= stream["cache"]["held_samples"] < PHOTOS
        wait_until(lambda: daemon.log_lines("a cache on disk cannot be used at present"), "the log says so")
        daemon.kill()


@pytest.mark.thorough
def test_a_reload_gives_a_cache_on_disk_another_size(start_daemon, photos, disk):
    """The content stays; a missing folder is rejected, and that reload changes nothing."""
    daemon = start_daemon({"photos": folder_stream(photos, **on_disk(disk, cache_size="128KiB"))})
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    read(daemon)
    before = daemon.stream_status()["cache"]["held_samples"]
    assert 0 < before < PHOTOS

    write_settings(daemon.config, {"photos": folder_stream(photos, **on_disk(disk))}, settings)
    daemon.reload()
    read(daemon)
    cache = daemon.stream_status()["cache"]
    assert (cache["held_samples"], cache["budget_bytes"]) == (PHOTOS, 16 << 20)

    write_settings(daemon.config, {"photos": folder_stream(photos, **on_disk(disk / "gone"))}, settings)
    refused = daemon.reload(exit_code=2)
    assert "does not exist" in refused
    assert daemon.stream_status()["cache"]["held_samples"] == PHOTOS


def test_unused_cache_files_are_reported_and_not_removed(start_daemon, own_photos, disk):
    """The daemon's log and `batchd doctor` report them."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **on_disk(disk))})
    read(daemon)
    (old,) = disk.iterdir()
    next(own_photos.rglob("*.jpg")).unlink()

    daemon.restart()

    (line,) = daemon.log_lines("unused cache files")
    assert line["files"] == 1
    assert line["advice"].endswith(f"rm {old}")
    assert len(list(disk.iterdir())) == 2
    finding = check_cache(disk)
    assert finding.level is Level.NOTE
    assert "2 files" in finding.found
    assert "no daemon that runs uses 1 of them" in finding.found
    assert finding.advice.endswith(f"rm {old}")


def read_until_all_are_walked(daemon, stream, samples):
    """Return the first three epochs of a trainer that goes on until the cache has all points."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(stream) as batches:
        first = [see(batches) for _ in range(3)]
        wait_until(
            lambda: see(batches) and daemon.stream_status(stream)["cache"]["held_samples"] == samples, "all are walked"
        )
    return first


def test_access_points_are_kept_by_default_and_change_no_byte(start_daemon, tmp_path):
    """Access points speed up crops of JPEGs: found once, kept in memory, shared between streams."""
    if not jpeg_box.IS_BUILT:
        pytest.skip("needs the extension that decodes crops")
    folder = tmp_path / "kinds" / "all"
    folder.mkdir(parents=True)
    for number in range(12):
        image = photo(200, 300, seed=number)
        (folder / f"a{number:02}.jpg").write_bytes(jpeg(image))
        (folder / f"c{number:02}.jpg").write_bytes(progressive_jpeg(image))
    streams = {name: folder_stream(folder.parent, seed=seed) for seed, name in enumerate(("one", "two"))}
    daemon = start_daemon(streams)

    for name in streams:
        expected = Expected(daemon.config, name)
        assert read_until_all_are_walked(daemon, name, 24) == [expected.epoch(number) for number in range(3)]

    statistics = [stream["cache"] for stream in daemon.status()["streams"]]
    assert [(one["kind"], one["held_samples"], one["streams"]) for one in statistics] == [("points", 24, 2)] * 2
    assert daemon.stream_status("two")["work"]["cache_misses"] == 0
    changed = folder / "a03.jpg"
    changed.write_bytes(jpeg(photo(200, 300, seed=77)))
    os.utime(changed, (0, 0))  # or it would be a bad sample
    assert read(daemon, "one", epochs=2) == [Expected(daemon.config, "one").epoch(number) for number in range(2)]


def test_access_points_of_images_in_shards_change_no_byte(start_daemon, tmp_path):
    """Members of archives, records and rows have the same batches as without a cache."""
    if not jpeg_box.IS_BUILT:
        pytest.skip("needs the extension that decodes crops")
    photos = tmp_path / "photos"
    photos.mkdir()
    write_photos(photos, {"cat": 6, "dog": 6}, height=200, width=300)
    writers = {"webdataset": photo_shards, "tfrecord": photo_records, "parquet": photo_rows}
    sources = {kind: write(photos, tmp_path / kind) for kind, write in writers.items()}
    streams = {kind: {**folder_stream(photos), "source": source} for kind, source in sources.items()}
    daemon = start_daemon(streams | {f"{kind}-off": {**one, "cache": "off"} for kind, one in streams.items()})

    for kind in streams:
        assert read_until_all_are_walked(daemon, kind, 12) == read(daemon, f"{kind}-off", epochs=3)
        assert daemon.stream_status(kind)["cache"]["kind"] == "points"


PIXELS = {"cache": "pixels", "max_bad_fraction": 1.0}


def many_kinds(folder):
    """Make photographs of several formats and sizes; one is broken where few crops read."""
    folder.mkdir(parents=True)
    for number in range(8):
        image = photo(150, 200, seed=number)
        (folder / f"a{number}.jpg").write_bytes(jpeg_with_exif(jpeg(image), 1 + number))
        (folder / f"b{number}.jpg").write_bytes(progressive_jpeg(image))
        (folder / f"c{number}.png").write_bytes(encode(image, ".png"))
        (folder / f"d{number}.jpg").write_bytes(jpeg(photo(480, 640, seed=number)))
    hole = bytearray(jpeg(photo(200, 300)))
    hole[-2000:-200] = bytes(1800)
    (folder / "e.jpg").write_bytes(hole)
    (folder / "f.jpg").write_bytes(b"no photograph")
    return folder.parent


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("place", ["memory", "too little memory", "disk"])
def test_kept_pixels_change_no_byte(start_daemon, tmp_path, disk, place):
    """Streams with other steps and seeds share them. Large images are decoded at a lower scale."""
    folder = many_kinds(tmp_path / "kinds" / "all")
    in_memory = {"cache_memory": "16MiB" if place == "memory" else "2MiB"}
    keys = {**PIXELS, **(on_disk(disk, cache="pixels") if place == "disk" else in_memory), "memory": "4MiB"}
    crop = {"op": "random_resized_crop", "size": [32, 48], "field": "image"}
    pipelines = {
        "crops": [{"op": "decode"}, crop, {"op": "random_flip"}],
        "large": [{"op": "decode"}, {**crop, "size": [220, 230]}],
        "whole": [{"op": "decode"}, {"op": "rotate", "degrees": [-20, 20]}, {"op": "resize", "size": [64, 64]}],
        "darker": [
            {"op": "decode"},
            {"op": "random_crop", "size": [120, 120]},
            {"op": "color_jitter", "brightness": 0.4},
        ],
    }
    streams = {name: folder_stream(folder, **keys, pipeline=steps, seed=7) for name, steps in pipelines.items()}
    daemon = start_daemon(streams)

    for name in streams:
        expected = Expected(daemon.config, name)
        assert read(daemon, name, epochs=3) == [expected.epoch(number) for number in range(3)]

    caches = [stream["cache"] for stream in daemon.status()["streams"]]
    works = [stream["work"] for stream in daemon.status()["streams"]]
    assert [(cache["kind"], cache["streams"]) for cache in caches] == [("pixels", 4)] * 4
    hits = [work["cache_hits"] / (work["cache_hits"] + work["cache_misses"]) for work in works]
    if place == "too little memory":
        assert all(0 < part < 0.8 for part in hits)
    else:
        assert hits[3] > 0.9


def test_a_file_that_was_replaced_after_its_pixels_were_kept_is_not_mixed_with_them(start_daemon, tmp_path):
    """The file is read again where a crop is decoded at a smaller scale."""
    folder = tmp_path / "kinds" / "all"
    folder.mkdir(parents=True)
    (folder / "a.jpg").write_bytes(jpeg(photo(300, 300)))
    source = {"type": "folder", "path": str(folder.parent)}
    near, far = {"op": "center_crop", "size": [50, 50]}, {"op": "resize", "size": [50, 50]}
    keys = {"source": source, "batch_size": 1, "cache_memory": "1MiB", "max_bad_fraction": 1.0, "on_error": "mask"}
    streams = {
        "near": {**keys, "pipeline": [{"op": "decode"}, near]},
        "far": {**keys, "pipeline": [{"op": "decode"}, far]},
    }
    daemon = start_daemon(streams)
    expected = Expected(daemon.config, "near")
    old = [expected.epoch(number) for number in range(8)]
    assert read(daemon, "near") == old[:1]
    (folder / "a.jpg").write_bytes(jpeg(photo(300, 300, seed=8), quality=50))
    os.utime(folder / "a.jpg", (0, 0))  # or it would be a bad sample for this reason

    assert read(daemon, "near", epochs=8) == old
    with batchd_client.connect(daemon.address) as connection, connection.stream("far", epochs=1) as batches:
        assert [batch["valid"].tolist() for batch in batches] == [[False]]
    assert "when its pixels were cached" in command("bad", "far", address=daemon.address).stdout


def test_no_points_are_sought_for_a_last_epoch(start_daemon, photos):
    """A second epoch is worth the search; a last one is not, as the memory ends with the daemon."""
    if not jpeg_box.IS_BUILT:
        pytest.skip("needs the extension that decodes crops")
    daemon = start_daemon({"photos": folder_stream(photos, batch_size=2)})

    def allowed():
        named = descriptors_of(daemon.pid).items()
        descriptor = next(number for number, name in named if name.removesuffix(" (deleted)").endswith("batchd-cache"))
        with Path(f"/proc/{daemon.pid}/fd/{descriptor}").open("rb") as file:
            return int.from_bytes(file.read(24)[16:], "little")

    assert daemon.status()["streams"]
    assert allowed() < 1 << 20  # the first batch shall not wait for a search
    with batchd_client.connect(daemon.address) as connection:
        for epochs, is_closed in ((1, True), (2, False)):
            with connection.stream("photos", epochs=epochs) as stream:
                next(iter(stream)).release()
                wait_until(lambda is_closed=is_closed: (allowed() < 1 << 20) is is_closed, "the daemon has set it")


def test_files_of_a_last_epoch_are_walked_in_time_that_no_trainer_waits_for(start_daemon, photos, disk):
    """On disk the points are for the next run, so none is sought until the windows are full."""
    if not jpeg_box.IS_BUILT:
        pytest.skip("needs the extension that decodes crops")
    keys = {"cache": "points", "cache_dir": str(disk), "batch_size": 2}
    daemon = start_daemon({"photos": folder_stream(photos, **keys)})
    window, steps = 4, PHOTOS // keys["batch_size"]

    def held_after(decoded_batches):
        wait_until(lambda: daemon.stream_status()["decoded_batches"] == decoded_batches, "all ahead are ready")
        return daemon.stream_status()["cache"]["held_samples"]

    with batchd_client.connect(daemon.address) as connection, connection.stream("photos", epochs=1) as stream:
        batches = iter(stream)
        assert held_after(window) == 0
        for number in range(1, steps - window + 1):
            next(batches).release()
            assert held_after(window + number) == number * keys["batch_size"]
    assert read(daemon, epochs=2) == [Expected(daemon.config).epoch(number) for number in range(2)]
    assert daemon.stream_status()["cache"]["held_samples"] == PHOTOS
