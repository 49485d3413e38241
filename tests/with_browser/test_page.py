"""The observer's page in a real browser, with a real daemon and trainers."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from itertools import chain, repeat

import pytest

import batchd_client
from batchd.observe.diagnosis.overview import overview_between
from batchd.observe.http.routes import plain_overview
from batchd_wire.status import LinkStatistics
from support.observing import ANYWHERE, asked, observer_of, place_of
from support.settings import folder_stream
from support.statuses import link, two_looks, with_pool
from support.waiting import wait_until

PATIENCE_MS = 60_000
HOSTILE = "<img src=x onerror=document.title=1>"
FITS = "document.documentElement.scrollWidth <= innerWidth"
LEGENDS = ["…large-4711", "…small-4711"]
SHORTENED = "imagenet-ba…-small-4711"
DRAWN = "[...document.querySelectorAll('details.sheet img')].some((one) => one.naturalWidth > 0)"


def address_of(daemon) -> str:
    """Return the address of the daemon's page."""
    host, port = place_of(daemon)
    return f"http://{host}:{port}/"


def shows(page, text: str) -> bool:
    """Wait until the page shows this text."""
    found = page.get_by_text(text).first
    found.wait_for(state="visible", timeout=PATIENCE_MS)
    return bool(found.is_visible())


@pytest.fixture
def observed(start_daemon):
    """Start a daemon with an observer that has something to show."""
    return asked(start_daemon(http=ANYWHERE))


def test_the_page_loads_and_goes_on_by_itself(observed, start_trainer, open_page):
    """Positions and plots are current without a click."""
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
    """The trainer holds a batch and does not ask for another."""
    start_trainer(observed.address, epochs=100).hold(1)
    page = open_page(address_of(observed))

    assert shows(page, "stands still for")
    picture(page, "stands-still")


def test_a_trainer_that_waits_in_vain_is_shown_as_such(observed, start_trainer, open_page):
    """The workers are stopped, so no batch arrives."""
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
    """The page shows how long it has not answered, until it answers again."""
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
    """The daemon's last numbers do not look current."""
    page = open_page(address_of(observed))
    shows(page, "serving")
    observed.terminate()
    shows(page, "No answer for")
    assert page.locator("#state").text_content() == "gone"
    assert all("ERR_CONNECTION" in complaint for complaint in open_page.complaints)
    open_page.complaints.clear()


def test_a_connection_that_has_gone_silent_is_shown_as_such(observed, open_page):
    """Connections stay open without data: old numbers do not look current."""
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


def test_an_answer_of_a_proxy_is_shown_as_such(observed, open_page):
    """The daemon behind the proxy is down."""
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
    """The next answer is drawn."""
    start_trainer(observed.address, epochs=100).take(2)
    broken = []
    page = open_page("about:blank")
    page.route("**/history.json*", lambda route: (broken.append(1), route.fulfill(body="{nonsense")), times=1)
    page.goto(address_of(observed))

    page.locator("svg.plot path.line[d^=M]").first.wait_for(state="attached", timeout=PATIENCE_MS)

    assert broken


def test_hostile_names_are_text(start_daemon, photos, tmp_path, monkeypatch, open_page):
    """Names of trainers and files are shown, and never executed."""
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
        assert page.title() == f"{socket.gethostname()} · batchd"
        assert page.locator("img").count() == 0


def test_the_current_batch_is_drawn_when_a_visitor_opens_it(observed, start_trainer, open_page, picture):
    """The slot of the batch is released afterwards."""
    start_trainer(observed.address, epochs=100).take(7)
    page = open_page(address_of(observed))
    shows(page, "Current batch")
    assert page.locator("details.sheet img").count() == 0
    pictures = []
    page.on("response", lambda one: pictures.append(one.url) if "sheet.png" in one.url and one.status == 200 else None)
    page.get_by_text("Current batch").click()
    wait_until(lambda: page.evaluate(DRAWN), "the picture is shown")
    assert len(pictures) == 1, "the sheet is fetched twice"
    picture(page, "sheet")

    wait_until(lambda: len(observed.stream_status()["subscriptions"]) == 1, "only the trainer reads")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_on_a_phone_and_in_a_window(observed, start_trainer, open_page, picture, scheme):
    """No text needs sideways scrolling; ``build/page`` has a picture of each."""
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
    """The tables have the numbers of the moment when the page was loaded."""
    start_trainer(observed.address, epochs=100).take(2)
    wait_until(lambda: observed.stream_status()["subscriptions"], "the trainer is known")
    page = open_page(address_of(observed), java_script_enabled=False)

    page.get_by_role("cell", name="photos").first.wait_for(timeout=PATIENCE_MS)
    assert page.get_by_role("columnheader", name="delivered/s").count() == 1


@pytest.fixture
def open_with_pool(observed, open_page):
    """Open the page as if worker hosts were connected; the rest is the daemon's own."""

    def open_with_pool(*links: LinkStatistics, **facts):
        looks = two_looks()
        with_pool(looks, *links, **facts)
        pool = plain_overview(overview_between(*looks))["pool"]

        def answer(route) -> None:
            response = route.fetch()
            route.fulfill(response=response, json=response.json() | {"pool": pool} if response.ok else None)

        page = open_page("about:blank")
        page.route("**/overview.json", answer)
        page.goto(address_of(observed))
        return page

    return open_with_pool


def test_worker_hosts_are_a_section_of_the_page(open_with_pool, picture):
    """Problems are above them; the section fits on a phone."""
    hosts = link(1), link(2, workers=0, streams=(), refused=("photos: /data is missing",), withdrawn=3)
    page = open_with_pool(*hosts, wanted=24, cap="the NIC, not the cores", interface="eth0", interface_bytes_per_s=1e8)

    shows(page, "8 remote workers, 24 wanted, 200 samples/s, 0.02 GB/s, 20% of the network")
    shows(page, "limited by the NIC, not the cores")
    shows(page, "node2 (10.0.0.2) cannot fill photos: /data is missing")
    assert page.locator("#hosts tbody tr").count() == 2
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(FITS)
        picture(page, f"worker-hosts-{width}")


def test_hostile_names_of_worker_hosts_are_text(open_with_pool):
    """The reports of worker hosts are text as well."""
    page = open_with_pool(link(name=HOSTILE, refused=(f"photos: {HOSTILE}",)), sent_away=(HOSTILE,))

    shows(page, f"sent away: {HOSTILE}")
    assert page.locator("#hosts li").count() == 2
    assert page.title() == f"{socket.gethostname()} · batchd"
    assert page.locator("img").count() == 0


def test_without_a_pool_there_is_no_section_of_worker_hosts(observed, open_page):
    """Most daemons have none."""
    page = open_page(address_of(observed))

    shows(page, "photos")
    assert page.locator("#hosts").is_hidden()


@pytest.mark.parametrize(
    ("seconds", "trainers", "streams"),
    [(1, 0, 1), (1, 1, 1), (45, 1, 1), (300, 8, 1), (60, 64, 1), (900, 8, 20)],
    ids=str,
)
def test_a_made_daemon_is_shown_at_every_age_and_size(open_page, serve_page, picture, seconds, trainers, streams):
    """Both colour schemes, a phone and a window are shown; ``build/page`` has a picture of each."""
    address = serve_page(seconds, trainers=trainers, streams=streams)
    for scheme in ("light", "dark"):
        page = open_page(address, color_scheme=scheme, reduced_motion="reduce")
        shows(page, "batchd on bigbox")
        shows(page, "folder /data/imagenet/train")
        page.locator("svg.plot text", has_text="now").first.wait_for(state="attached", timeout=PATIENCE_MS)
        for width in (390, 880, 1030, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate(FITS)
            picture(page, f"made-{seconds}s-{trainers}x{streams}-{scheme}-{width}")
        assert page.locator("#trainers tbody tr").count() == min(trainers, 16)
        page.context.close()


def test_plots_reach_back_to_the_start_or_as_far_as_a_user_wants(open_page, serve_page):
    """In the first minute the data already takes most of the width."""
    address = serve_page(40, trainers=1)
    page = open_page(address)
    plot = page.get_by_role("img", name="Throughput")
    plot.locator("path.line[d^=M]").first.wait_for(state="attached", timeout=PATIENCE_MS)
    width_of = "(plot) => plot.querySelector('path.line').getBBox().width / plot.clientWidth"
    assert plot.evaluate(width_of) > 0.75
    assert "of the last 0.7 minutes" in plot.get_attribute("aria-label")
    for name, part in (("5 min", 0.05), ("15 min", 0.01), ("1 min", 0.4), ("since the start", 0.75)):
        button = page.get_by_role("button", name=name, exact=True)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator("#range [aria-pressed=true]").count() == 1
        wait_until(lambda low=part: low < plot.evaluate(width_of) < max(3 * low, 0.7 if low < 0.7 else 1), name)


def test_plots_of_an_old_daemon_have_the_last_fifteen_minutes(open_page, serve_page):
    """They do not reach back to the start, so no button says so; another range can be chosen."""
    address = serve_page(1000, trainers=1)
    page = open_page(address)
    plot = page.get_by_role("img", name="Throughput")
    plot.locator("path.line[d^=M]").first.wait_for(state="attached", timeout=PATIENCE_MS)
    pressed = page.locator("#range [aria-pressed=true]")

    assert pressed.all_text_contents() == ["15 min"]
    assert not page.get_by_text("since the start").is_visible()
    assert "of the last 15 minutes" in plot.get_attribute("aria-label")
    page.get_by_role("button", name="5 min", exact=True).click()
    assert pressed.all_text_contents() == ["5 min"]


def test_the_ring_is_plotted_in_the_slots_that_are_used(open_page, serve_page):
    """A few slots of many are seen, too: the axis ends above the most, not at all of them."""
    address = serve_page(40, trainers=1)
    page = open_page(address)
    plot = page.get_by_role("img", name="Ring", exact=False)
    areas = plot.locator("path.area[d^=M]")
    areas.first.wait_for(state="attached", timeout=PATIENCE_MS)

    heights = (
        "(plot) => [...plot.querySelectorAll('path.area')].reduce((sum, one) => sum + one.getBBox().height, 0) / 120"
    )
    assert plot.evaluate(heights) > 0.5
    now = page.locator("ul[aria-label=ring] .value").all_text_contents()
    assert page.locator("figure", has_text="Ring, slots").locator(".legend .value").all_text_contents() == now[:3]


def test_numbers_beside_each_other_are_the_same(open_page, serve_page):
    """Legends of plots, headline and table have the same numbers, of one window."""
    address = serve_page(40, trainers=5)
    page = open_page(address)
    section = page.locator("#streams section")
    section.locator(".plots .legend li").nth(2).wait_for(timeout=PATIENCE_MS)
    wait_until(
        lambda: "random_resized_crop" in section.locator(".plots:not(.losses)").inner_text(), "the plots are drawn"
    )
    text = " ".join(section.inner_text().split())

    delivered, decoded = re.findall(r"([\d,]+) (?:delivered|decoded)/s", text)
    assert f"delivered {delivered} decoded {decoded}" in text
    assert "no CPU 0.32 ms" in text
    assert text.count("no CPU 0.32 ") == 2
    assert "resnet-55-sweep 60%" in text


def test_legends_have_the_runs_that_read_now_by_short_names(observed, open_page, picture):
    """What all names begin with is left out; a pointer on a name shows all of it."""
    page = open_page(address_of(observed))
    legend = page.locator("figure", has_text="Trainers wait, %").locator(".legend li > span:nth-child(2)")
    first, second = (f"imagenet-baseline-{name}-4711" for name in ("small", "large"))
    with batchd_client.connect(observed.address, name=first) as one, one.stream("photos") as stream:
        batches = chain.from_iterable(repeat(stream))
        with batchd_client.connect(observed.address, name=second) as two, two.stream("photos") as other:
            others = chain.from_iterable(repeat(other))
            wait_until(
                lambda: next(batches) and next(others) and sorted(legend.all_text_contents()) == LEGENDS,
                "both are shown",
            )
            assert {entry.get_attribute("title") for entry in legend.all()} == {first, second}
            picture(page, "legends")
        wait_until(lambda: next(batches) and legend.all_text_contents() == [SHORTENED], "one is left")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["decode", "random_resized_crop"], ["decode", "random_resized_crop"]),
        (["resnet-51-sweep", "resnet-52-sweep"], ["resnet-51-sweep", "resnet-52-sweep"]),
        (["pretraining.py-1, rank 0", "pretraining.py-1, rank 12"], ["rank 0", "rank 12"]),
        (["vit_base/run_1_of_sweep", "vit_base/run_12_of_sweep"], ["…1_of_sweep", "…12_of_sweep"]),
        (["a-long-name-of-one-run-alone"], ["a-long-name…e-run-alone"]),
        (["the same long name", "the same long name"], ["…name", "…name"]),
        ([], []),
    ],
)
def test_names_are_shortened_at_words(open_page, serve_page, names, short):
    """Short ones stay as they are."""
    page = open_page(serve_page(3, trainers=1))

    assert page.evaluate("async (names) => (await import('/plots.js')).shortNames(names)", names) == short


def test_lines_to_copy_connect_a_trainer_to_an_idle_daemon(observed, open_page, tmp_path):
    """The lines run unchanged, and are hidden while a trainer reads."""
    page = open_page(address_of(observed))
    page.locator("#connect").wait_for(state="visible", timeout=PATIENCE_MS)
    lines = page.locator("#connect-lines").text_content()
    script = tmp_path / "trainer.py"
    script.write_text(lines + "\n        break\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.startswith("(")
    with batchd_client.connect(observed.address) as connection, connection.stream("photos"):
        page.locator("#connect").wait_for(state="hidden", timeout=PATIENCE_MS)


def test_of_many_trainers_those_that_wait_most_are_shown_first(open_page, serve_page):
    """A visitor can have all of them shown."""
    address = serve_page(20, trainers=64)
    page = open_page(address)
    rows = page.locator("#trainers tbody tr")
    rows.first.wait_for(timeout=PATIENCE_MS)
    waits = page.locator("#trainers td[data-label=waits]").all_text_contents()
    assert waits[:12] == ["60%"] * 12
    page.get_by_role("button", name="show all 64 trainers").click()
    assert rows.count() == 64


def test_the_last_warnings_are_on_the_page(open_page, serve_page):
    """The newest is on top, as text."""
    address = serve_page(3, trainers=1, warnings=True)
    page = open_page(address)
    shows(page, "gateway cannot listen")
    assert page.locator("#warnings li").count() == 2
    assert page.locator("#warnings li .pill").first.text_content() == "error"


def test_reported_losses_are_drawn_with_their_outliers(observed, open_page, picture):
    """Those far above the others are circles, named by position; hostile names are text."""
    page = open_page(address_of(observed))
    assert page.locator("div.losses").first.is_hidden()
    with (
        batchd_client.connect(observed.address, name=HOSTILE) as client,
        client.stream("photos") as stream,
    ):
        for _ in range(20):
            for batch in stream:
                usual = 1 + 0.1 * ((7 * batch.step + batch.epoch) % 5)
                stream.report({(3, 2): 9.0, (7, 1): float("nan")}.get((batch.epoch, batch.step), usual))

    assert shows(page, "2 far above the usual: 7:1, 3:2; batchd blame says what was in them")
    assert shows(page, f"Reported by {HOSTILE}, by epoch:step")
    assert page.locator("div.losses circle.outlier").count() == 2
    assert page.evaluate("document.title") != "1"
    picture(page, "losses")
