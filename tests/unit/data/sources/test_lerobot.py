"""Frames of robots' episodes, windows of time around them, and damaged data sets."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchd.data.samples.columns import Column
from batchd.data.sources.interface import kind_of
from batchd.data.sources.lerobot.info import file_at
from batchd.data.sources.lerobot.options import LeRobotSource
from batchd.data.sources.lerobot.scan import nearest
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.recognise import recognise
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import quick_look
from support.lerobot_files import FPS, TASKS, Layout, info_of, png, state, write_lerobot, write_rows
from support.samples import opened, read_samples, reason, refused, request, scan
from support.source_files import source_problems
from support.videos import HEIGHT, WIDTH, number_in

pytestmark = pytest.mark.usefixtures("forked_scans")
LAYOUT = Layout()
ROWS = range(sum(LAYOUT.lengths))
TOP = "videos/observation.images.top/chunk-000/file-000.mp4"


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of three episodes with two cameras, which no test changes."""
    return write_lerobot(tmp_path_factory.mktemp("robot"))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a data set of a test's own."""
    return write_lerobot(tmp_path / "robot")


def rewrite(file: Path, **columns: Any) -> None:
    """Change columns of a Parquet file."""
    table = parquet.read_table(file)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    parquet.write_table(table, file)


def edit(root: Path, **changes: Any) -> None:
    """Change ``meta/info.json``."""
    file = root / "meta/info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- samples --------------------------------------------------------------------------------------


def test_columns_have_the_shapes_and_dtypes_of_the_data_set(robot) -> None:
    """A shape of [1] is one number; times are a dimension in front, and have their padding."""
    source = LeRobotSource(root=robot, cameras=("top",), times={"action": (0, 0.1), "top": (-0.1, 0)})
    columns = {column.name: column for column in kind_of(source).columns(source, Storage())}

    assert columns["top"] == Column("top", shape=(2, HEIGHT, WIDTH, 3))
    assert columns["observation.state"] == Column("observation.state", dtype="float32", shape=(2,))
    assert columns["action"] == Column("action", dtype="float32", shape=(2, 3))
    assert columns["action_is_pad"] == Column("action_is_pad", dtype="bool", shape=(2,))
    assert columns["next.done"] == Column("next.done", dtype="bool")
    assert "observation.state_is_pad" not in columns
    assert "wrist" not in columns


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_every_frame_of_every_camera_is_that_of_its_time(version, tmp_path) -> None:
    """Episodes share files in v3, and have files of their own in v2.1."""
    root = write_lerobot(tmp_path, Layout(version=version))
    samples = read_samples(LeRobotSource(root=root))

    assert [number_in(values["top"]) for values in samples] == list(ROWS)
    assert [number_in(values["wrist"]) for values in samples] == [1000 + row for row in ROWS]
    assert [values["observation.state"].tolist() for values in samples] == [state(row) for row in ROWS]
    assert "index" not in samples[0]


def test_times_stay_in_the_episode_and_padding_says_where_they_do_not(robot) -> None:
    """All rows are compared with a loop over LeRobot's rule."""
    steps = (-7, -1, 0, 2)
    times = {name: tuple(step / FPS for step in steps) for name in ("action", "observation.images.wrist")}
    with opened(LeRobotSource(root=robot, times=times)) as (reader, _index):
        for episode in range(3):
            rows = LAYOUT.rows(episode)
            for row in rows:
                values = reader.read(row)
                wanted = [min(max(row + step, rows.start), rows.stop - 1) for step in steps]
                assert values["action"][:, 0].tolist() == wanted
                assert [number_in(frame) for frame in values["wrist"]] == [1000 + one for one in wanted]
                outside = [row + step not in rows for step in steps]
                assert values["action_is_pad"].tolist() == values["wrist_is_pad"].tolist() == outside


def test_announced_samples_have_the_same_pixels(robot) -> None:
    """Frames in common are decoded once; an order that is given up leaves nothing behind."""
    source, storage = LeRobotSource(root=robot, times={"top": (-0.2, 0.1)}), Storage()
    with opened(source) as (reader, index):
        alone = [reader.read(sample)["top"].tobytes() for sample in range(len(index))]
        for samples in ([3, 4, 9], [0, 1, 2, 14]):
            request(storage, reader, samples)
            assert [reader.read(sample)["top"].tobytes() for sample in samples] == [alone[one] for one in samples]


def test_chosen_episodes_are_in_the_order_of_the_data_set(robot) -> None:
    """Files of others are not read."""
    samples = read_samples(LeRobotSource(root=robot, episodes=(2, 0)))

    assert [number_in(values["top"]) for values in samples] == [*LAYOUT.rows(0), *LAYOUT.rows(2)]
    with opened(LeRobotSource(root=robot, episodes=(2,))) as (reader, _index):
        assert reader.name(1) == f"{robot}: episode 2, frame 1 at 0.100 s"


def test_tasks_are_texts(robot) -> None:
    """An episode has one each."""
    samples = read_samples(LeRobotSource(root=robot, cameras=(), fields=("task", "action")))

    assert [values["task"] for values in samples] == [TASKS[0]] * 6 + [TASKS[1]] * 4 + [TASKS[0]] * 5
    assert set(samples[0]) == {"task", "action"}


@pytest.mark.parametrize("kind", ["mean_std", "min_max"])
def test_numbers_are_normalised_by_the_statistics(kind, robot) -> None:
    """The formulas of LeRobot, in float64."""
    samples = read_samples(LeRobotSource(root=robot, cameras=(), normalize={"observation.state": kind}))
    rows = np.array([state(row) for row in ROWS])
    if kind == "mean_std":
        expected = (rows - rows.mean(0)) / (rows.std(0) + 1e-8)
    else:
        expected = 2 * (rows - rows.min(0)) / (rows.max(0) - rows.min(0)) - 1

    found = np.array([values["observation.state"] for values in samples])
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_pictures_in_rows_are_image_files(tmp_path) -> None:
    """A step decodes them; times make a list."""
    root = write_lerobot(tmp_path, Layout(videos=(), images=("observation.image",)))
    source = LeRobotSource(root=root)
    listed = replace(source, times={"observation.image": (-0.1, 0)})

    (column,) = [one for one in kind_of(listed).columns(listed, Storage()) if one.name == "observation.image"]
    assert (column.kind, column.most) == ("images", 2)
    assert [bytes(values["observation.image"]) for values in read_samples(source)] == [png(row) for row in ROWS]
    with opened(listed) as (reader, _index):
        assert list(map(bytes, reader.read(6)["observation.image"])) == [png(6), png(6)]
        assert list(map(bytes, reader.read(8)["observation.image"])) == [png(7), png(8)]


def test_the_nearest_frame_within_tolerance_is_shown() -> None:
    """Of two that are as near it is the first; none is -1."""
    shown = np.array([0.0, 0.1, 0.2])
    wanted = np.array([-0.01, 0.04, 0.05, 0.06, 0.2, 0.3])

    assert nearest(shown, wanted, 0.06).tolist() == [0, 0, 0, 1, 2, -1]
    assert nearest(shown, wanted, 1e-4).tolist() == [-1, -1, -1, -1, 2, -1]
    assert nearest(shown[:1], wanted, 1.0).tolist() == [0] * 6
    assert nearest(shown[:0], wanted, 1.0).tolist() == [-1] * 6


def test_a_data_set_is_recognised_by_its_information(robot) -> None:
    """Its Parquet files and videos are not read as such."""
    found = recognise(robot, quick_look(Storage()))

    assert found.recognised.source == LeRobotSource(root=robot)
    assert found.left_out == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ("tpo",)}, "cameras: meta/info.json has no camera 'tpo'; did you mean top?"),
        ({"fields": ("actoin",)}, "fields: meta/info.json has no numbers 'actoin'; did you mean action?"),
        ({"times": {"acton": (0.0,)}}, "times: there is no field 'acton'; did you mean action?"),
        ({"times": {"action": (0.05,)}}, "times.action has 0.05 s, which is no multiple of a frame at 10 fps"),
        ({"normalize": {"top": "mean_std"}}, "it is a camera: use the step normalize"),
        ({"normalize": {"timestamp": "min_max"}}, "meta/stats.json has no \"min\" of 'timestamp'"),
        ({"normalize": {"observation.state": "quantiles"}}, 'has no "q01" of'),
        ({"episodes": (1, 7)}, "has no episode 7"),
    ],
)
def test_options_that_do_not_fit_the_data_set_are_refused(options, message, robot) -> None:
    """Names come with the one that was probably meant."""
    assert message in refused(LeRobotSource(root=robot, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"times": {"action": ()}},
        {"times": {"action": (float("nan"),)}},
        {"times": {"action": (0.0,) * 5000}},
        {"cameras": ("top", "top")},
        {"cameras": (), "fields": ()},
        {"episodes": ()},
        {"episodes": (-1,)},
        {"codecs": ("h265",)},
    ],
)
def test_options_that_make_no_sense_are_refused(options) -> None:
    """Before any file is read."""
    with pytest.raises(ValueError, match=next(iter(options))):
        LeRobotSource(root=Path("/data"), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version is 'v1.6'"),
        ({"codebase_version": 3}, "codebase_version is 3"),
        ({"fps": 0}, "fps are 0"),
        ({"fps": "fast"}, "fps are 'fast'"),
        ({"features": {}}, "no features"),
        ({"features": {"action": {"dtype": "float32", "shape": [-1]}}}, "'action' has no dtype, or no shape"),
        ({"features": {"action": {"dtype": "float32", "shape": [1 << 31]}}}, "action would be float32[2147483648]"),
        ({"data_path": "../{chunk_index}.parquet"}, "may lead out of the root"),
        ({"data_path": "/etc/passwd"}, "may lead out of the root"),
        ({"data_path": "{chunk_index.__class__}"}, "no path of files"),
        ({"data_path": "{chunk_index:099999999d}"}, "no path of files"),
        ({"data_path": "{other}"}, "'{other}'"),
    ],
)
def test_information_that_lies_is_refused(changes, message, mine) -> None:
    """It may be made by anybody: no path leads out, and no number is allocated."""
    edit(mine, **changes)

    assert message in refused(LeRobotSource(root=mine, cameras=(), fields=("action",)))


def test_a_path_has_its_numbers_and_nothing_else() -> None:
    """As ``str.format`` would make it."""
    pattern = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

    assert file_at(pattern, video_key="a.b", chunk_index=1, file_index=1234) == "videos/a.b/chunk-001/file-1234.mp4"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"episode_index": [0] * 5 + [1] * 5}, "has 5 rows of episode 0, and meta says 6"),
        ({"episode_index": [0] * 3 + [1] * 4 + [0] * 3}, "the rows of episode 0 are not together"),
        ({"action": [[1.0, 2.0]] * 10}, "action is no float32[3] in a row: dimension 0 has 2"),
        ({"action": [[1.0, 2.0]] * 5 + [[1.0, 2.0, 3.0, 4.0]] * 5}, "action is no float32[3]"),
        ({"action": [[1.0, None, 2.0]] * 10}, "action lacks 10 numbers"),
        ({"action": [1.0] * 10}, "action is double, and meta/info.json says float32[3]"),
        ({"task_index": [None] * 10}, "task_index is null"),
        ({"frame_index": ["a"] * 10}, "frame_index is string"),
    ],
)
def test_data_that_are_not_what_the_information_says_are_refused(columns, message, mine) -> None:
    """No row is taken for another episode's."""
    rewrite(mine / "data/chunk-000/file-000.parquet", **columns)

    assert message in refused(LeRobotSource(root=mine))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"length": [6, 1 << 62, 5]}, "length is 4611686018427387904"),
        ({"length": [6, 3, 5]}, "has 4 rows of episode 1, and meta says 3"),
        ({"episode_index": [0, 0, 1]}, "it has episode 0 a second time"),
        ({"videos/observation.images.top/from_timestamp": [0.0, float("nan"), 0.0]}, "episode 1 begins at nan s"),
        ({"videos/observation.images.top/file_index": [0, -1, 0]}, "file_index is -1"),
        ({"data/file_index": [0, 0, 7]}, "file-007.parquet"),
    ],
)
def test_a_table_of_episodes_that_lies_is_refused(columns, message, mine) -> None:
    """The message names the episode or the file."""
    rewrite(mine / "meta/episodes/chunk-000/file-000.parquet", **columns)

    assert message in refused(LeRobotSource(root=mine))


def test_a_video_that_is_missing_is_refused_and_can_be_left_out(mine) -> None:
    """As after a download that ended early."""
    (mine / TOP).unlink()
    message = refused(LeRobotSource(root=mine))

    assert f"{TOP} cannot be read: No such file" in message
    assert "leave out the camera observation.images.top or episode 0, or download the file" in message
    assert len(read_samples(LeRobotSource(root=mine, cameras=("wrist",)))) == len(ROWS)
    assert len(read_samples(LeRobotSource(root=mine, episodes=(2,)))) == LAYOUT.lengths[2]


# --- bad samples ----------------------------------------------------------------------------------


def bad(source: SourceOptions) -> Iterator[str]:
    """The reason of each bad sample, "" of the others."""
    with opened(source) as (reader, index):
        for sample in range(len(index)):
            try:
                reader.read(sample)
            except Exception:  # noqa: BLE001  ``reason`` raises what is not SampleUnreadable
                yield f"{reader.name(sample)}: {reason(reader, sample)}"
            else:
                yield ""


def test_a_video_that_is_cut_makes_bad_samples_of_its_episodes(mine) -> None:
    """The message names episode, camera, second and file."""
    data = (mine / TOP).read_bytes()
    (mine / TOP).write_bytes(data[: len(data) // 2])
    found = list(bad(LeRobotSource(root=mine)))

    assert found[10:] == [""] * 5
    assert found[7].startswith(f"{mine}: episode 1, frame 1 at 0.100 s: top at 0.100 s, {TOP}: the video is no mp4")
    assert all(found[:10])


def test_a_time_outside_of_its_video_makes_a_bad_sample(mine) -> None:
    """Each sample whose window has the time."""
    name = "videos/observation.images.top/from_timestamp"
    rewrite(mine / "meta/episodes/chunk-000/file-000.parquet", **{name: [0.0, 0.8, 0.0]})
    found = list(bad(LeRobotSource(root=mine, times={"top": (0, 0.1)})))

    assert [place for place, text in enumerate(found) if text] == [7, 8, 9]
    assert "top at 0.200 s" in found[7]
    assert "shows no frame within tolerance_s of its second 1.000000: it has frames from 0.000 s to 0.900 s" in found[7]


def test_frames_of_another_size_are_bad_samples(mine) -> None:
    """A field has one shape."""
    features = info_of(LAYOUT)["features"]
    features["observation.images.top"]["shape"] = [HEIGHT, WIDTH + 2, 3]
    edit(mine, features=features)

    assert "top has frames of 48 x 64 pixels, and meta/info.json says 48 x 66" in next(bad(LeRobotSource(root=mine)))


def test_videos_of_other_codecs_are_bad_samples(robot) -> None:
    """The version of PyAV counts unless all are lossless."""
    source = LeRobotSource(root=robot, codecs=("ffv1",))

    assert "is coded as h264, which is none of codecs = ['ffv1']" in next(bad(source))
    assert (source.libraries, replace(source, codecs=("h264",)).libraries) == ((), ("av",))


def test_a_task_without_a_text_is_a_bad_sample(mine) -> None:
    """The numbers stay readable."""
    rewrite(mine / "data/chunk-000/file-001.parquet", task_index=[0, 0, 9, 0, 0])
    found = list(bad(LeRobotSource(root=mine, cameras=(), fields=("task",))))

    assert found[12].endswith("is of task 9, and there are 2")
    assert [place for place, text in enumerate(found) if text] == [12]


def test_depth_is_left_out_and_said(mine) -> None:
    """LeRobot codes it in a way of its own."""
    features = info_of(LAYOUT)["features"]
    features["observation.images.top"]["info"] = {"is_depth_map": True}
    edit(mine, features=features)

    assert "top" not in read_samples(LeRobotSource(root=mine))[0]
    assert "is depth" in refused(LeRobotSource(root=mine, cameras=("top",)))
    assert any("observation.images.top" in note for note in scan(LeRobotSource(root=mine)).place["notes"])


def test_timestamps_are_those_of_the_rows(mine) -> None:
    """Where they are no multiples of a frame, the video has to show frames then."""
    write_rows(mine / "data/chunk-000/file-001.parquet", LAYOUT, (2,))
    rewrite(mine / "data/chunk-000/file-001.parquet", timestamp=[0.0, 0.11, 0.2, 0.3, 0.4])

    assert [place for place, text in enumerate(bad(LeRobotSource(root=mine))) if text] == [11]
    assert not any(bad(LeRobotSource(root=mine, tolerance_s=0.02)))


def test_it_is_checked_before_a_scan(mine) -> None:
    """`batchd check` names what is missing."""
    assert source_problems(LeRobotSource(root=mine)) == []
    (mine / "meta/info.json").unlink()
    assert "meta/info.json" in source_problems(LeRobotSource(root=mine))[0]
