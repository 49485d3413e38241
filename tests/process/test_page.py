"""The page's requests to the observer of a real daemon: overview, history, bad samples, sheets."""

import json
import shutil

import pytest

import batchd_client
from support.commands import batchd
from support.kernel import children_of, is_alive
from support.observing import ANYWHERE, asked, fetch, observer_of
from support.settings import PIPELINE, folder_stream
from support.waiting import wait_until


@pytest.fixture(scope="module")
def observed(start_shared_daemon, photos, tmp_path_factory):
    """Start a daemon with an observer that has something to show."""
    folder = shutil.copytree(photos, tmp_path_factory.mktemp("page") / "photos")
    (folder / "cat" / "broken.jpg").write_bytes(b"nonsense")
    streams = {
        "photos": folder_stream(photos),
        "bgr": folder_stream(photos, pipeline=[PIPELINE[0] | {"color": "bgr"}, *PIPELINE[1:]]),
        "held": folder_stream(photos),
        "bad": folder_stream(folder, max_bad_fraction=1.0),
    }
    return asked(start_shared_daemon(streams, http=ANYWHERE))


def drawn(daemon, stream: str = "photos"):
    """Request a sheet until it is drawn; return the answer."""

    def ask():
        reply = fetch(daemon, f"/sheet.png?stream={stream}")
        return reply if reply.headers.get("Content-Type") == "image/png" else None

    return wait_until(ask, "the sheet is drawn")


def overview(daemon):
    """Return the overview that the page shows."""
    return json.loads(fetch(daemon, "/overview.json").text)


def cells(found, table, title):
    """Return the texts of one column of the page's tables."""
    place = [page for page, _kind in found["columns"][table]].index(title)
    return [row["cells"][place][0] for row in found[table]]


def test_the_page_shows_what_the_status_says(observed, start_trainer):
    """The page has the same trainers and positions, and rates after two samples of counters."""
    start_trainer(observed.address).take(3)

    def shown():
        found = overview(observed)
        return found["trainers"] if cells(found, "trainers", "position") == ["epoch 0, step 3"] else None

    (trainer,) = wait_until(shown, "the page shows the trainer's step")
    assert trainer["name"] == "trainer_program.py"
    found = wait_until(lambda: overview(observed) if overview(observed)["seconds"] else None, "there are rates")
    assert found["observer"]["up"]
    assert {*cells(found, "workers", "pid")} == {str(one["pid"]) for one in observed.status()["workers"]}
    kinds = {one["kind"] for one in json.loads(fetch(observed, "/history.json").text)["series"]}
    assert "ready_slots" in kinds


def test_a_sheet_is_a_picture_that_is_kept_for_a_while(observed):
    """A sheet is drawn once for any number of visitors, and the ring gets its slot back."""
    wait_until(lambda: not overview(observed)["trainers"], "the trainer of the test before has left")
    first = drawn(observed)
    assert (first.status, first.headers["Content-Type"]) == (200, "image/png")
    assert first.text.startswith("\ufffdPNG")
    assert fetch(observed, "/sheet.png?stream=photos").text == first.text
    assert not observed.stream_status()["subscriptions"]
    assert not children_of(observer_of(observed))


def peeked(daemon, folder, position: str) -> str:
    """Return the picture of a batch, as the command draws it."""
    batchd("peek", "held", "--at", position, "-o", folder / "sheet.png", address=daemon.address)
    return (folder / "sheet.png").read_bytes().decode(errors="replace")


def test_a_sheet_is_of_the_batch_that_the_foremost_trainer_has(observed, start_trainer, tmp_path):
    """That batch is not the stream's first one, and the ring has it."""
    start_trainer(observed.address, "held").hold(1)
    start_trainer(observed.address, "held").hold(3)
    steps = {"epoch 0, step 1", "epoch 0, step 3"}
    wait_until(lambda: {*cells(overview(observed), "trainers", "position")} == steps, "the steps are shown")
    before = observed.stream_status("held")["decoded_batches"]

    sheet = drawn(observed, "held").text

    assert observed.stream_status("held")["decoded_batches"] == before
    assert sheet == peeked(observed, tmp_path, "0:2")
    assert sheet != peeked(observed, tmp_path, "0:0")


def test_a_sheet_of_a_pipeline_that_decodes_to_bgr_has_the_right_colours(observed):
    """The picture equals that of a pipeline that decodes to RGB."""
    assert observed.stream_status("photos")["bgr_fields"] == []
    assert observed.stream_status("bgr")["bgr_fields"] == ["image"]
    assert drawn(observed, "bgr").text == drawn(observed, "photos").text


def test_only_our_page_has_sheets_drawn(observed):
    """Another page could have a visitor's browser request sheets all day."""
    drawn(observed)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        found = fetch(observed, "/sheet.png?stream=photos", **{"Sec-Fetch-Site": site}).status
        assert found == status


def test_a_daemon_that_drains_while_a_sheet_is_drawn_leaves_nothing(start_daemon):
    """No observer, child of the observer or folder remains."""
    observed = asked(start_daemon(http=ANYWHERE))
    observer = observer_of(observed)
    wait_until(lambda: fetch(observed, "/sheet.png?stream=photos").status in {200, 202}, "a sheet is drawn")
    assert observed.terminate() == 0
    assert not is_alive(observer)
    assert not observed.log_lines("observer ended")


def test_bad_samples_are_listed_by_name_and_reason(observed, start_trainer):
    """A stream without bad samples has an empty list."""
    start_trainer(observed.address, "bad").take()

    found = json.loads(fetch(observed, "/bad.json?stream=bad").text)

    assert found == json.loads(batchd("bad", "bad", "--json", address=observed.address).stdout)
    assert found["total"] == 1
    assert found["samples"][0]["path"].endswith("cat/broken.jpg")
    assert "not a JPEG" in found["samples"][0]["reason"]
    none = {"total": 0, "left_out": 0, "file": None, "samples": []}
    assert json.loads(fetch(observed, "/bad.json?stream=photos").text) == none
    assert overview(observed)["observer"]["up"]


def test_reported_losses_are_listed_by_position_and_run(observed):
    """The mean of each batch; NaN is null. The page learns of new ones by their number."""
    assert json.loads(fetch(observed, "/losses.json?stream=held").text) == {"runs": []}
    with (
        batchd_client.connect(observed.address, name="run-7") as client,
        client.stream("photos") as stream,
    ):
        for batch in stream:
            stream.report([float("nan"), *[1.0] * 7] if batch.step == 2 else [batch.step, *[0.0] * 7])
            if batch.step == 3:
                break

    def shown():
        (found,) = [one for one in overview(observed)["streams"] if one["name"] == "photos"]
        return found["reports"] == 4

    wait_until(shown, "the page knows of the reports")
    (run,) = json.loads(fetch(observed, "/losses.json?stream=photos").text)["runs"]
    assert run == {"run": "run-7", "reports": [[0, 0, 0, 0.0], [0, 1, 0, 0.125], [0, 2, 0, None], [0, 3, 0, 0.375]]}
