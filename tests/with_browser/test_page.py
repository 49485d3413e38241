"""The observer's page in a real browser, with a real daemon and trainers."""

import os
import shutil
import signal
import sys
from dataclasses import asdict

import pytest

import batchd_client
from batchd.diagnosis.overview import overview_between
from batchd_wire.status import LinkStatistics
from support.observing import ANYWHERE, asked, observer_of, place_of
from support.settings import folder_stream
from support.statuses import link, two_looks, with_pool
from support.waiting import wait_until

PATIENCE_MS = 60_000
HOSTILE = "<img src=x onerror=document.title=1>"
FITS = "document.documentElement.scrollWidth <= innerWidth"
DRAWN = "[...document.querySelectorAll('details.sheet img')].some((one) => one.naturalWidth > 0)"


def address_of(daemon) -> str:
    """Where its page is."""
    host, port = place_of(daemon)
    return f"http://{host}:{port}/"


def shows(page, text: str) -> bool:
    """Wait until it can be read there."""
    found = page.get_by_text(text).first
    found.wait_for(state="visible", timeout=PATIENCE_MS)
    return bool(found.is_visible())


@pytest.fixture
def observed(start_daemon):
    """A daemon that is observed, and whose observer has something to say."""
    return asked(start_daemon(http=ANYWHERE))


def test_the_page_loads_and_goes_on_by_itself(observed, start_trainer, open_page):
    """Positions and plots are those of now, without a click."""
    trainer = start_trainer(observed.address, epochs=100)
    page = open_page(address_of(observed))
    shows(page, "serving")
    shows(page, "photos")
    shows(page, "trainer_program.py")
    trainer.take(7)
    shows(page, "epoch 1, step 2")
    trainer.take(5)
    shows(page, "epoch 2, step 2")
    page.locator("svg.plot path.line[d^=M]").first.wait_for(state="attached", timeout=PATIENCE_MS)
    assert page.get_by_role("img", name="Throughput").count() == 1
    assert page.get_by_role("cell", name="trainer_program.py").count() == 1


def test_a_trainer_that_stands_still_is_shown_as_such(observed, start_trainer, open_page, picture):
    """It holds a batch and asks for none."""
    start_trainer(observed.address, epochs=100).hold(1)
    page = open_page(address_of(observed))

    assert shows(page, "stands still for")
    picture(page, "stands-still")


def test_a_trainer_that_waits_in_vain_is_shown_as_such(observed, start_trainer, open_page):
    """Its workers are stopped, so no batch comes."""
    trainer = start_trainer(observed.address, epochs=100)
    trainer.take(1)
    workers = {one["pid"] for one in observed.status()["workers"]}
    page = open_page(address_of(observed))
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        trainer.begin(do="take", batches=60)
        assert shows(page, "waiting for")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    trainer.finish()


def test_a_daemon_that_does_not_answer_is_shown_as_such(observed, open_page, picture):
    """With how long it has not, and only for as long as it does not."""
    page = open_page(address_of(observed))
    shows(page, "serving")
    observed.send(signal.SIGSTOP)
    try:
        shows(page, "The daemon has given no answer for")
        assert page.locator("#state").text_content() == "no answer"
        picture(page, "no-answer")
    finally:
        observed.send(signal.SIGCONT)
    page.locator("#notice").wait_for(state="hidden", timeout=PATIENCE_MS)
    shows(page, "serving")


def test_a_daemon_that_has_gone_is_shown_as_such(observed, open_page):
    """And nothing of its last numbers is taken for new."""
    page = open_page(address_of(observed))
    shows(page, "serving")
    observed.terminate()
    shows(page, "No answer for")
    assert page.locator("#state").text_content() == "gone"
    assert all("ERR_CONNECTION" in complaint for complaint in open_page.complaints)
    open_page.complaints.clear()


def test_a_way_that_has_gone_silent_is_shown_as_such(observed, open_page):
    """Connections stay open and nothing comes: old numbers are not taken for new."""
    page = open_page(address_of(observed))
    shows(page, "serving")
    os.kill(observer_of(observed), signal.SIGSTOP)
    try:
        shows(page, "No answer for")
        assert page.locator("#state").text_content() == "gone"
    finally:
        os.kill(observer_of(observed), signal.SIGCONT)
    shows(page, "serving")
    page.locator("#notice").wait_for(state="hidden", timeout=PATIENCE_MS)


def test_an_answer_that_is_none_is_shown_as_such(observed, open_page):
    """Of a proxy between that has nobody behind it."""
    page = open_page(address_of(observed))
    shows(page, "serving")
    page.route("**/overview.json", lambda route: route.fulfill(status=502, body="nobody is behind me"))
    shows(page, "nobody is behind me")
    assert page.locator("#state").text_content() == "no answer"
    page.unroute("**/overview.json")
    shows(page, "serving")
    assert all("502" in complaint or "503" in complaint for complaint in open_page.complaints), "503: not answered yet"
    open_page.complaints.clear()


def test_a_broken_answer_stops_nothing(observed, start_trainer, open_page):
    """The next one is drawn."""
    start_trainer(observed.address, epochs=100).take(2)
    broken = []
    page = open_page("about:blank")
    page.route("**/history.json", lambda route: (broken.append(1), route.fulfill(body="{nonsense")), times=1)
    page.goto(address_of(observed))

    page.locator("svg.plot path.line[d^=M]").first.wait_for(state="attached", timeout=PATIENCE_MS)

    assert broken


def test_hostile_names_are_text(start_daemon, photos, tmp_path, monkeypatch, open_page):
    """Of trainers and of files: nothing of them is done."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "cat" / f"{HOSTILE}.jpg").write_bytes(b"nonsense")
    daemon = start_daemon({"photos": folder_stream(folder, max_bad_fraction=1.0)}, http=ANYWHERE)
    monkeypatch.setattr(sys, "argv", [HOSTILE])
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            batch.release()
        page = open_page(address_of(daemon))
        shows(page, HOSTILE)
        page.get_by_text("1 bad sample").click()
        page.get_by_role("cell", name=f"{HOSTILE}.jpg").wait_for(timeout=PATIENCE_MS)
        assert page.title() == "batchd"
        assert page.locator("img").count() == 0


def test_the_current_batch_is_drawn_when_somebody_opens_it(observed, start_trainer, open_page, picture):
    """And its slot is given back."""
    start_trainer(observed.address, epochs=100).take(7)
    page = open_page(address_of(observed))
    shows(page, "Current batch")
    assert page.locator("details.sheet img").count() == 0
    pictures = []
    page.on("response", lambda one: pictures.append(one.url) if "sheet.png" in one.url and one.status == 200 else None)
    page.get_by_text("Current batch").click()
    wait_until(lambda: page.evaluate(DRAWN), "the picture is there")
    assert len(pictures) == 1, "it is fetched twice"
    picture(page, "sheet")

    wait_until(lambda: len(observed.stream_status()["subscriptions"]) == 1, "only the trainer reads")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_on_a_phone_and_in_a_window(observed, start_trainer, open_page, picture, scheme):
    """Nothing has to be moved sideways to be read; there is a picture of each in ``build/page``."""
    start_trainer(observed.address, epochs=100).take(12)
    page = open_page(address_of(observed), color_scheme=scheme, reduced_motion="reduce")
    shows(page, "trainer_program.py")
    page.locator("svg.plot path").first.wait_for(state="attached", timeout=PATIENCE_MS)
    for width in (390, 820, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(FITS)
        picture(page, f"{scheme}-{width}")

    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 3 * 128) == (scheme == "light")


def test_without_javascript_there_are_tables(observed, start_trainer, open_page):
    """Of what was when it was loaded."""
    start_trainer(observed.address, epochs=100).take(2)
    wait_until(lambda: observed.stream_status()["subscriptions"], "the trainer is known")
    page = open_page(address_of(observed), java_script_enabled=False)

    page.get_by_role("cell", name="photos").first.wait_for(timeout=PATIENCE_MS)
    assert page.get_by_role("columnheader", name="delivered/s").count() == 1


@pytest.fixture
def open_with_pool(observed, open_page):
    """Opens the page as if worker hosts were connected; the rest is the daemon's own."""

    def open_with_pool(*links: LinkStatistics, **facts):
        looks = two_looks()
        with_pool(looks, *links, **facts)
        pool = overview_between(*looks).pool
        assert pool is not None

        def answer(route) -> None:
            response = route.fetch()
            route.fulfill(response=response, json=response.json() | {"pool": asdict(pool)} if response.ok else None)

        page = open_page("about:blank")
        page.route("**/overview.json", answer)
        page.goto(address_of(observed))
        return page

    return open_with_pool


def test_worker_hosts_are_a_section_of_the_page(open_with_pool, picture):
    """What is wrong is said above them; it fits on a phone."""
    hosts = link(1), link(2, workers=0, streams=(), refused=("photos: /data is missing",), withdrawn=3)
    page = open_with_pool(*hosts, wanted=24, cap="the NIC, not the cores", interface="eth0", interface_bytes_per_s=1e8)

    shows(page, "8 remote workers, 24 wanted, 200 samples/s, 0.02 GB/s, 20 % of the network")
    shows(page, "limited by the NIC, not the cores")
    shows(page, "node2 (10.0.0.2) cannot fill photos: /data is missing")
    assert page.locator("#hosts tbody tr").count() == 2
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(FITS)
        picture(page, f"worker-hosts-{width}")


def test_hostile_names_of_worker_hosts_are_text(open_with_pool):
    """And so is what they report."""
    page = open_with_pool(link(name=HOSTILE, refused=(f"photos: {HOSTILE}",)), sent_away=(HOSTILE,))

    shows(page, f"sent away: {HOSTILE}")
    assert page.locator("#hosts li").count() == 2
    assert page.title() == "batchd"
    assert page.locator("img").count() == 0


def test_without_a_pool_there_is_no_section_of_worker_hosts(observed, open_page):
    """Most daemons have none."""
    page = open_page(address_of(observed))

    shows(page, "photos")
    assert page.locator("#hosts").is_hidden()
