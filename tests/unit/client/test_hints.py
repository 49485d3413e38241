"""Hints to a trainer about a better way to connect or to read."""

import logging
import os
from pathlib import Path

import pytest

from batchd_client.hints import log_once, shared_batches_hint, shared_memory_hint

FAR = "tcp://bigbox:7070"


def test_an_accessible_directory_is_only_named(tmp_path: Path) -> None:
    """The trainer needs only its name."""
    (tmp_path / "lifeline.sock").touch()

    assert shared_memory_hint(FAR, f"ipc://{tmp_path}") == (
        f"the daemon at {FAR} runs on this host: ipc://{tmp_path} is faster, as it shares memory"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_an_inaccessible_directory_is_to_be_shared(tmp_path: Path, exists: bool) -> None:
    """Trainer or daemon may be in a container; a directory of the same name may be another one."""
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()

    assert f"-v {directory}:{directory}) and connect to ipc://{directory}" in shared_memory_hint(
        FAR, f"ipc://{directory}"
    )


def test_a_closed_directory_exists(tmp_path: Path, monkeypatch) -> None:
    """The error of a connection names the group that may open it."""

    def refuse(_path: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "stat", refuse)

    assert "runs on this host" in shared_memory_hint(FAR, f"ipc://{tmp_path}")


@pytest.mark.parametrize("odd", ["tcp://elsewhere:1", "ipc://", "http://x", "ipc:///" + "a" * 200])
def test_an_unknown_directory_is_never_an_error(odd: str) -> None:
    """The daemon may send any text; it is only a hint."""
    assert "is not seen from here" in shared_memory_hint(FAR, odd)


def test_a_hint_is_logged_once(caplog) -> None:
    """Its level is INFO."""
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "batchd_client"):
        for _ in range(3):
            log_once("a hint")

    assert caplog.messages == ["a hint"]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(4, None), (5, "4 batches for 5 ranks"), (16, "fewer samples"), (17, "and some of them the same")],
)
def test_ranks_that_share_batches_get_a_hint(ranks: int, said: str | None) -> None:
    """An epoch of 16 samples has 4 batches here."""
    text = shared_batches_hint("photos", ranks, 4, 16)

    assert text is None if said is None else said in str(text)
    assert text is None or ("the same" in text) == (ranks > 16)
