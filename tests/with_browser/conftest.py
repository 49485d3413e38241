"""A headless Chromium of the system, driven by Playwright; without either, tests are skipped."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.made_page import made_page

PICTURES = Path(__file__).parents[2] / "build/page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """Start one browser for the tests of a module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-page")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve_page(tmp_path) -> Iterator[Callable[..., str]]:
    """Start an observer that shows a simulated daemon; it ends after its pages, which still ask."""
    with ExitStack() as observers:
        yield lambda seconds, **daemon: observers.enter_context(made_page(tmp_path, seconds, **daemon))


@pytest.fixture
def open_page(browser, serve_page) -> Iterator[object]:  # noqa: ARG001  it ends after them
    """Open an observer's page; any complaint of the browser fails the test, unless expected."""
    contexts, complaints = [], []

    def open_page(address: str, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def picture():
    """Save a picture of a page in ``build/page``, for people."""

    def draw(page, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        (PICTURES / f"{name}.png").write_bytes(page.screenshot(full_page=True))

    return draw
