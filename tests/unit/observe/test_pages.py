"""The page that the observer serves.

The tests cover its files and its initial state for browsers without JavaScript.
"""

import re
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchd.observe.http.access import AccessRules, HostNames
from batchd.observe.http.contact_sheets import ContactSheets
from batchd.observe.http.routes import STATE_MARK, Router
from batchd.observe.http.status_client import StatusRecorder
from batchd_wire.status import StreamDescription
from support.statuses import later, open_status_client, two_looks

HOSTILE = "<img src=x onerror=alert(1)>\"'&<!-- state -->"


@pytest.fixture
def recorder():
    """Make a recorder of a daemon whose names are hostile."""
    found = StatusRecorder(now=count(step=10).__next__)
    before, after = two_looks(stream={"name": HOSTILE}, waits={"workers_s": 4.0}, slowest={HOSTILE: 1.0})
    for status in (before, after):
        status.streams[0].name = HOSTILE
        status.trainers[0].name = HOSTILE
    found.add(before)
    found.add(later(after, 0))
    return found


@pytest.fixture
def make_pages(tmp_path):
    """Return a function that makes the pages of a recorder."""
    with open_status_client() as client:
        sheets = ContactSheets(f"ipc://{tmp_path}")
        yield lambda recorder: Router(client, recorder, sheets, HostNames([]), AccessRules(tmp_path))


def test_names_are_text_in_the_page_for_browsers_without_javascript(make_pages, recorder):
    """Every name is escaped."""
    body = make_pages(recorder).routes["/"].answer({}).body.decode()

    assert "<img" not in body
    assert "&lt;img src=x onerror=alert(1)&gt;" in body
    assert "1,000" in body


def test_the_page_brings_everything_with_it(make_pages, recorder):
    """The content security policy rejects other hosts and inline scripts or styles."""
    pages = make_pages(recorder)
    for path in ("/", "/page.css", "/page.js", "/plots.js", "/icon.svg"):
        text = pages.routes[path].answer({}).body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=\"", text), path


def test_names_are_never_put_in_as_markup():
    """The script calls no function that parses text as markup."""
    for file in (Path(str(files("batchd.observe.http"))) / "page").glob("*.js"):
        text = file.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text
        )


def test_before_the_daemon_has_answered_that_is_said(make_pages):
    """The page and its JSON say that there is no answer yet."""
    pages = make_pages(StatusRecorder())

    assert b"has not answered yet" in pages.routes["/"].answer({}).body
    assert STATE_MARK.encode() not in pages.routes["/"].answer({}).body
    assert pages.routes["/overview.json"].answer({}).status == 503
    for seconds in ({}, {"seconds": "30"}, {"seconds": "-1"}, {"seconds": "9" * 5000}, {"seconds": "²"}):
        assert pages.routes["/history.json"].answer(seconds).status == 200


def test_a_page_just_after_the_start_has_numbers(tmp_path, monkeypatch):
    """The daemon's first answer arrives while the request waits a moment for it."""
    found = StatusRecorder()
    with open_status_client() as client:
        waits = []
        monkeypatch.setattr(client, "fresh", lambda within_s: waits.append(within_s) or found.add(two_looks()[0]))
        router = Router(client, found, ContactSheets(f"ipc://{tmp_path}"), HostNames([]), AccessRules(tmp_path))
        body = router.routes["/"].answer({}).body

    assert len(waits) == 1
    assert b"photos" in body
    assert b"has not answered yet" not in body


@pytest.mark.parametrize("path", ["/bad.json", "/losses.json", "/sheet.png"])
@pytest.mark.parametrize("query", [{}, {"stream": "other"}, {"stream": "--address"}])
def test_streams_that_there_are_not_have_no_sheets(make_pages, recorder, path, query):
    """No work is started for an unknown stream."""
    assert make_pages(recorder).routes[path].answer(query).status == 404


def test_a_stream_that_a_trainer_has_defined_has_no_sheet_for_others(tmp_path, monkeypatch):
    """The observer is the daemon's user, who may read it; those who look at its page may not."""
    found, (_before, after) = StatusRecorder(), two_looks()
    found.add(after)
    owned = replace(after.streams[0], description=StreamDescription(owner="user:anna"))
    status = SimpleNamespace(status=replace(after, streams=(owned,)))
    with open_status_client() as client:
        router = Router(client, found, ContactSheets(f"ipc://{tmp_path}"), HostNames([]), AccessRules(tmp_path))
        monkeypatch.setattr(client, "latest", lambda: status)
        for path in ("/bad.json", "/losses.json", "/sheet.png"):
            assert router.routes[path].answer({"stream": owned.name}).status == 404


def test_what_names_details_is_private_and_what_costs_something_is_for_our_page_alone(make_pages, recorder):
    """The static files of the page are public."""
    routes = make_pages(recorder).routes

    assert {path for path, route in routes.items() if not route.is_private} == {
        "/metrics",
        "/healthz",
        "/readyz",
        "/page.css",
        "/page.js",
        "/plots.js",
        "/icon.svg",
    }
    assert {path for path, route in routes.items() if route.has_effect} == {"/sheet.png"}


def luminance(colour: str) -> float:
    """Return the luminance as defined by WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast: 1 for the same colour, 21 for black on white."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_can_be_read_and_colours_be_seen(scheme):
    """Text has a contrast of at least 4.5, and drawn lines have at least 3."""
    style = (Path(str(files("batchd.observe.http"))) / "page/page.css").read_text()
    found = dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]{6});", style.split(":root {")[1 + scheme].partition("}")[0]))

    for text, grounds in (
        ("ink", ("ground", "surface", "plain-ground")),
        ("soft", ("ground", "surface")),
        ("accent", ("ground", "surface")),
        ("good", ("good-ground",)),
        ("bad", ("bad-ground",)),
    ):
        for ground in grounds:
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for line in ("c0", "c1", "c2", "c3", "c4", "c5"):
        assert contrast(found[line], found["surface"]) >= 3, line
