"""Streams with a cache: the same bytes as without, and what was read once is not read again. Real daemons and workers."""

import os

import pytest

import batchd_client
from batchd.doctor.caches import check_caches
from batchd.doctor.finding import Level
from batchd.pipeline.image import jpeg_box
from support.commands import batchd as command
from support.expected import Expected
from support.images import encode, jpeg, jpeg_with_exif, photo, progressive_jpeg, write_photos
from support.kernel import descriptors_of
from support.mounts import small_file_system
from support.seen import see
from support.settings import folder_stream, write_settings
from support.waiting import wait_until

PHOTOS = 40
RESTART_INTERVAL = b"\xff\xdd\x00\x04"
"""The marker of a JPEG with restart markers."""
CACHE = {"cache": "encoded", "cache_memory": "16MiB", "memory": "1MiB"}


@pytest.fixture
def own_photos(tmp_path):
    """A folder of photographs that the test may spoil."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_photos(folder, {"cat": 20, "dog": 20}, height=72, width=96)
    return folder


def read(daemon, stream="photos", epochs=1):
    """Epochs from the first on, as a trainer sees them."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(stream, epochs=epochs) as batches:
        return [see(batches) for _ in range(epochs)]


def status_of(daemon, name="photos"):
    return next(stream for stream in daemon.status()["streams"] if stream["name"] == name)


def test_epochs_have_the_same_bytes_with_a_cache(start_daemon, photos):
    """And each sample is read once."""
    daemon = start_daemon({"photos": folder_stream(photos, **CACHE)})

    epochs = read(daemon, epochs=3)

    expected = Expected(daemon.config)
    assert epochs == [expected.epoch(number) for number in range(3)]
    stream = status_of(daemon)
    files_bytes = sum(file.stat().st_size for file in photos.rglob("*.jpg"))
    assert stream["cache"]["held_samples"] == PHOTOS
    assert files_bytes <= stream["cache"]["used_bytes"] <= stream["cache"]["budget_bytes"]
    assert (stream["work"]["cache_misses"], stream["work"]["cache_hits"]) == (PHOTOS, 2 * PHOTOS)
    assert stream["work"]["read_bytes"] == files_bytes
    shown = command("status", address=daemon.address).stdout
    assert "cache of encoded samples has 40 of 40 in" in shown
    assert "67% of 120 reads found there" in shown


def test_the_second_epoch_needs_no_storage(start_daemon, own_photos):
    """The folder is gone by then."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **CACHE)})
    expected = Expected(daemon.config)
    expected_epochs = [expected.epoch(number) for number in range(2)]
    read(daemon)
    own_photos.rename(own_photos.with_name("gone"))

    assert read(daemon, epochs=2) == expected_epochs
    assert status_of(daemon)["bad_rows"] == 0


def test_streams_over_the_same_source_share_a_cache(start_daemon, own_photos):
    """Whatever their batches and their steps are; one with another budget has its own."""
    streams = {
        "photos": folder_stream(own_photos, **CACHE),
        "others": folder_stream(own_photos, **CACHE, batch_size=4, seed=5),
        "larger": folder_stream(own_photos, **{**CACHE, "cache_memory": "17MiB"}),
    }
    daemon = start_daemon(streams)
    read(daemon)
    expected = Expected(daemon.config, "others")
    first = expected.epoch(0)
    own_photos.rename(own_photos.with_name("gone"))

    assert read(daemon, "others") == [first]
    others, larger = status_of(daemon, "others"), status_of(daemon, "larger")
    assert (others["work"]["cache_hits"], others["cache"]["streams"]) == (PHOTOS, 2)
    assert (larger["cache"]["held_samples"], larger["cache"]["streams"]) == (0, 1)


def test_a_cache_that_is_too_small_holds_a_part(start_daemon, photos):
    """Within its budget; the rest is read each time."""
    daemon = start_daemon({"photos": folder_stream(photos, **{**CACHE, "cache_memory": "72KiB"})})

    epochs = read(daemon, epochs=3)

    expected = Expected(daemon.config)
    assert epochs == [expected.epoch(number) for number in range(3)]
    stream = status_of(daemon)
    cache, work = stream["cache"], stream["work"]
    assert 5 <= cache["held_samples"] < PHOTOS
    assert cache["used_bytes"] <= cache["budget_bytes"] == 72 << 10
    assert work["cache_hits"] == 2 * cache["held_samples"]
    assert work["cache_hits"] + work["cache_misses"] == 3 * PHOTOS


def test_a_bad_file_that_is_mended_is_read_again(start_daemon, own_photos):
    """What cannot be decoded is not kept."""
    spoilt = sorted(own_photos.rglob("*.jpg"))[7]
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[: len(good) // 2])
    daemon = start_daemon({"photos": folder_stream(own_photos, **CACHE, max_bad_fraction=1.0)})
    read(daemon)
    assert status_of(daemon)["bad_rows"] == 1
    spoilt.write_bytes(good)

    assert read(daemon, epochs=2)[1] == Expected(daemon.config).epoch(1)


def test_a_reload_keeps_the_cache_of_a_source_that_stays(start_daemon, own_photos):
    """A stream with another seed has it at once; without a stream it is gone."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **CACHE)})
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    read(daemon)
    write_settings(daemon.config, {"photos": folder_stream(own_photos, **CACHE, seed=5)}, settings)
    daemon.reload()

    assert read(daemon) == [Expected(daemon.config).epoch(0)]
    assert status_of(daemon)["work"]["cache_hits"] == PHOTOS

    write_settings(daemon.config, {"photos": folder_stream(own_photos)}, settings)
    daemon.reload()
    read(daemon)
    assert status_of(daemon)["cache"] is None
    held = [target for pid in {daemon.pid, *daemon.worker_pids()} for target in descriptors_of(pid).values()]
    assert not [target for target in held if "batchd-cache" in target]


def on_disk(folder, **changes):
    """The keys of a stream with a cache in a folder."""
    return {"cache": "encoded", "cache_dir": str(folder), "cache_size": "16MiB", "memory": "1MiB", **changes}


@pytest.fixture
def disk(tmp_path):
    """A folder for caches."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def damage(folder, every_bytes=1500):
    """Flip bits all over the records of the only cache in a folder."""
    (file,) = folder.iterdir()
    with file.open("r+b") as opened:
        for place in range(8192, file.stat().st_size, every_bytes):
            opened.seek(place)
            (byte,) = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte ^ 1]))


def test_a_cache_on_disk_survives_the_daemon(start_daemon, own_photos, disk):
    """It is killed, and the next one has every sample at once, though the folder of the photographs is empty by then."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **on_disk(disk))})
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(2)]
    assert read(daemon, epochs=2) == epochs
    daemon.kill()
    contents = {file: file.read_bytes() for file in own_photos.rglob("*.jpg")}
    for file in contents:
        file.write_bytes(b"")

    daemon.start()

    assert read(daemon, epochs=2) == epochs
    stream = status_of(daemon)
    assert (stream["work"]["cache_hits"], stream["work"]["cache_misses"], stream["bad_rows"]) == (2 * PHOTOS, 0, 0)
    assert stream["cache"]["folder"] == str(disk)
    opened = daemon.log_lines("cache on disk opened")
    assert [line["held_samples"] for line in opened] == [0, PHOTOS]
    shown = command("status", address=daemon.address).stdout
    assert f"cache of encoded samples on disk ({disk}) has 40 of 40 in" in shown


def test_a_daemon_that_dies_while_its_cache_on_disk_fills_loses_none_of_it(start_daemon, photos, disk):
    """It is killed with its workers in the middle of an epoch; what they had entered is there at once."""
    daemon = start_daemon({"photos": folder_stream(photos, **on_disk(disk))})
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.address) as connection, connection.stream("photos", epochs=1) as batches:
        next(iter(batches)).release()
        held = status_of(daemon)["cache"]["held_samples"]
        daemon.kill()
    assert held > 0

    daemon.start()

    assert read(daemon, epochs=2) == [expected.epoch(0), expected.epoch(1)]
    work = status_of(daemon)["work"]
    assert work["cache_hits"] >= held
    assert work["cache_hits"] + work["cache_misses"] == 2 * PHOTOS


def test_a_cache_that_is_damaged_while_it_is_in_use_is_read_around(start_daemon, photos, disk):
    """Flipped bits, and a file that is cut off: the same bytes, and the log and the status say so. Then it fills again."""
    daemon = start_daemon({"photos": folder_stream(photos, **on_disk(disk))})
    expected = Expected(daemon.config)
    assert read(daemon) == [expected.epoch(0)]
    damage(disk)

    assert read(daemon, epochs=2) == [expected.epoch(0), expected.epoch(1)]
    (file,) = disk.iterdir()
    os.truncate(file, 10_000)
    assert read(daemon, epochs=4) == [expected.epoch(number) for number in range(4)]

    stream = status_of(daemon)
    assert stream["bad_rows"] == 0
    assert stream["cache"]["held_samples"] == PHOTOS
    wait_until(lambda: status_of(daemon)["cache"]["spoilt_samples"] > PHOTOS, "all records were missed")
    assert daemon.log_lines("a record of a cache on disk is damaged")


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_workers_that_die_while_they_fill_a_cache_spoil_nothing(start_daemon, photos, disk, where):
    """At every step: neither for those that come after them nor, on a disk, for the next daemon."""
    deaths = {"worker.cache.claimed": "kill@7", "worker.cache.written": "kill@5", "worker.cache.entered": "kill@3"}
    keys = CACHE if where == "in memory" else on_disk(disk)
    daemon = start_daemon({"photos": folder_stream(photos, **keys)}, faults=deaths)
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(3)]

    assert read(daemon, epochs=3) == epochs
    assert len({daemon.wait_for_fault(step) for step in deaths}) == len(deaths)
    assert status_of(daemon)["cache"]["held_samples"] == PHOTOS
    if where == "on disk":
        daemon.restart()
        assert read(daemon, epochs=3) == epochs
        assert status_of(daemon)["work"]["cache_misses"] == 0


def test_a_second_daemon_does_not_fill_the_same_cache(start_daemon, photos, disk):
    """It is told whose file it is; streams of one daemon share it."""
    streams = {name: folder_stream(photos, **on_disk(disk)) for name in ("photos", "others")}
    daemon = start_daemon(streams)
    read(daemon)
    assert status_of(daemon, "others")["cache"]["streams"] == 2

    settings = {"runtime_dir": str(daemon.folder / "second"), "workers": 1, "memory": "64MiB", "http": "off"}
    config = write_settings(daemon.folder / "second.toml", streams, settings)
    refused = command("serve", "-c", str(config), status=2)

    assert "streams.photos.cache_dir: another daemon fills" in refused.stderr.replace("\n", " ")
    assert read(daemon, "others") == [Expected(daemon.config, "others").epoch(0)]


def test_a_full_disk_is_nobodys_error(start_daemon, photos, tmp_path):
    """The cache fills no further, and the log says why."""
    folder = tmp_path / "small"
    with small_file_system(folder, size="64k"):
        daemon = start_daemon({"photos": folder_stream(photos, **on_disk(folder))})
        expected = Expected(daemon.config)
        assert read(daemon, epochs=2) == [expected.epoch(0), expected.epoch(1)]
        stream = status_of(daemon)
        assert 3 <= stream["cache"]["held_samples"] < PHOTOS
        wait_until(lambda: daemon.log_lines("a cache on disk cannot be used at present"), "the log says so")
        daemon.kill()


def test_a_reload_gives_a_cache_on_disk_another_size(start_daemon, photos, disk):
    """What it has stays; and it is another cache's folder that is refused, with everything as before."""
    daemon = start_daemon({"photos": folder_stream(photos, **on_disk(disk, cache_size="128KiB"))})
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    read(daemon)
    before = status_of(daemon)["cache"]["held_samples"]
    assert 0 < before < PHOTOS

    write_settings(daemon.config, {"photos": folder_stream(photos, **on_disk(disk))}, settings)
    daemon.reload()
    read(daemon)
    cache = status_of(daemon)["cache"]
    assert (cache["held_samples"], cache["budget_bytes"]) == (PHOTOS, 16 << 20)

    write_settings(daemon.config, {"photos": folder_stream(photos, **on_disk(disk / "gone"))}, settings)
    refused = daemon.reload(exit_code=2)
    assert "there is no" in refused
    assert status_of(daemon)["cache"]["held_samples"] == PHOTOS


def test_caches_of_no_stream_are_told_and_not_removed(start_daemon, own_photos, disk):
    """By the log of the daemon, and by the doctor."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **on_disk(disk))})
    read(daemon)
    (old,) = disk.iterdir()
    next(own_photos.rglob("*.jpg")).unlink()

    daemon.restart()

    (line,) = daemon.log_lines("unused cache files")
    assert line["files"] == 1
    assert line["advice"].endswith(f"rm {old}")
    assert len(list(disk.iterdir())) == 2
    (finding,) = check_caches([disk])
    assert finding.level is Level.NOTE
    assert "2 files" in finding.found
    assert "no daemon that runs uses 1 of them" in finding.found
    assert finding.advice.endswith(f"rm {old}")


DECODED = {"cache": "decoded", "cache_memory": "16MiB", "memory": "1MiB"}
STEADY = [{"op": "decode"}, {"op": "resize", "shorter_side": 48}]
RANDOM = [{"op": "random_crop", "size": [32, 32]}, {"op": "random_flip"}]


@pytest.mark.parametrize("changes", [{}, {"cache_short_side": 40}, {"pipeline": STEADY + RANDOM}])
def test_decoded_samples_are_made_once(start_daemon, own_photos, changes):
    """Every epoch has the bytes that it would have without a cache behind the cut. The first one is in the ring already."""
    daemon = start_daemon({"photos": folder_stream(own_photos, **DECODED, **changes)})
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(3)]
    assert read(daemon) == epochs[:1]
    own_photos.rename(own_photos.with_name("gone"))

    assert read(daemon, epochs=3) == epochs

    stream = status_of(daemon)
    parts = [part["name"] for part in stream["work"]["parts"]]
    assert (stream["work"]["cache_misses"], stream["work"]["cache_hits"]) == (PHOTOS, 2 * PHOTOS)
    assert stream["cache"]["kind"] == "decoded"
    assert stream["cache"]["held_samples"] == PHOTOS
    assert parts.count("store") == 1
    assert "cache of decoded samples has 40 of 40 in" in command("status", address=daemon.address).stdout


def test_streams_with_the_same_beginning_share_decoded_samples(start_daemon, photos):
    """Whatever is random in them; one that begins otherwise has its own."""
    streams = {
        "photos": folder_stream(photos, **DECODED, pipeline=STEADY + RANDOM),
        "others": folder_stream(photos, **DECODED, pipeline=[*STEADY, RANDOM[0]], batch_size=4, seed=5),
        "larger": folder_stream(photos, **DECODED, pipeline=[STEADY[0], *RANDOM]),
    }
    daemon = start_daemon(streams)
    read(daemon)

    assert read(daemon, "others") == [Expected(daemon.config, "others").epoch(0)]
    others, larger = status_of(daemon, "others"), status_of(daemon, "larger")
    assert (others["work"]["cache_hits"], others["cache"]["streams"]) == (PHOTOS, 2)
    assert (larger["cache"]["held_samples"], larger["cache"]["streams"]) == (0, 1)


def test_decoded_samples_that_were_kept_in_part_have_the_same_bytes(start_daemon, photos):
    """Within the budget, on any worker."""
    daemon = start_daemon({"photos": folder_stream(photos, **{**DECODED, "cache_memory": "200KiB"})})

    epochs = read(daemon, epochs=3)

    expected = Expected(daemon.config)
    assert epochs == [expected.epoch(number) for number in range(3)]
    stream = status_of(daemon)
    assert 0 < stream["cache"]["held_samples"] < PHOTOS
    assert 0 < stream["work"]["cache_hits"] < 2 * PHOTOS


def test_decoded_samples_on_disk_survive_the_daemon_and_its_workers(start_daemon, photos, disk):
    """Some of these die while they fill the cache."""
    keys = on_disk(disk, cache="decoded", pipeline=STEADY + RANDOM)
    daemon = start_daemon({"photos": folder_stream(photos, **keys)}, lasting_faults={"worker.cache.written": "kill@6"})
    expected = Expected(daemon.config)
    epochs = [expected.epoch(number) for number in range(2)]
    assert read(daemon, epochs=2) == epochs

    daemon.restart()

    assert read(daemon, epochs=2) == epochs
    assert status_of(daemon)["work"]["cache_misses"] == 0


def test_a_bad_file_of_decoded_samples_is_a_bad_sample(start_daemon, own_photos):
    """It is substituted by the same other one each time, with a cache or without."""
    spoilt = sorted(own_photos.rglob("*.jpg"))[7]
    spoilt.write_bytes(spoilt.read_bytes()[:300])
    daemon = start_daemon({"photos": folder_stream(own_photos, **DECODED, max_bad_fraction=1.0)})

    epochs = read(daemon, epochs=2)

    expected = Expected(daemon.config)
    assert epochs == [expected.epoch(number) for number in range(2)]
    assert status_of(daemon)["cache"]["held_samples"] == PHOTOS - 1


def test_seekable_files_of_a_cache_change_no_byte(start_daemon, tmp_path, disk):
    """Photographs of several kinds, one broken where only some crops look: the same pixels, and the same bad samples."""
    if not jpeg_box.IS_BUILT:
        pytest.skip("needs the extension that decodes crops")
    folder = tmp_path / "kinds" / "all"
    folder.mkdir(parents=True)
    for number in range(16):
        image = photo(200, 300, seed=number)
        (folder / f"a{number:02}.jpg").write_bytes(jpeg(image))
        (folder / f"b{number:02}.jpg").write_bytes(jpeg_with_exif(jpeg(image), 1 + number % 8))
        (folder / f"c{number:02}.jpg").write_bytes(progressive_jpeg(image))
    (folder / "d.png").write_bytes(encode(photo(200, 300), ".png"))
    hole = bytearray(jpeg(photo(200, 300)))
    hole[-2000:-200] = bytes(1800)
    (folder / "e.jpg").write_bytes(hole)
    keys = on_disk(disk, cache="seekable", max_bad_fraction=1.0)
    daemon = start_daemon({"photos": folder_stream(folder.parent, **keys)})
    expected = Expected(daemon.config)

    assert read(daemon, epochs=6) == [expected.epoch(number) for number in range(6)]

    stream = status_of(daemon)
    (file,) = disk.iterdir()
    assert stream["cache"]["held_samples"] >= 49
    assert file.read_bytes().count(RESTART_INTERVAL) >= 48
    assert stream["work"]["cache_hits"] > 0
