"""What a trainer is told of a better way."""

import logging
import os
from pathlib import Path

import pytest

from batchd_client.hints import log_once, shared_batches_hint, shared_memory_hint

FAR = "tcp://bigbox:7070"


def test_a_directory_that_is_here_is_only_named(tmp_path: Path) -> None:
    """That is all that the trainer needs."""
    (tmp_path / "lifeline.sock").touch()

    assert shared_memory_hint(FAR, f"ipc://{tmp_path}") == (
        f"the daemon at {FAR} runs on this host: ipc://{tmp_path} is faster, as it shares memory"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_that_is_not_here_is_to_be_shared(tmp_path: Path, exists: bool) -> None:
    """We are in a container, or the daemon is; one of the same name may be there and be another."""
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()

    assert f"-v {directory}:{directory}) and connect to ipc://{directory}" in shared_memory_hint(
        FAR, f"ipc://{directory}"
    )


def test_a_directory_that_is_closed_is_here(tmp_path: Path, monkeypatch) -> None:
    """Connecting to it says which group opens it."""

    def refuse(_path: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "stat", refuse)

    assert "runs on this host" in shared_memory_hint(FAR, f"ipc://{tmp_path}")


@pytest.mark.parametrize("odd", ["tcp://elsewhere:1", "ipc://", "http://x", "ipc:///" + "a" * 200])
def test_what_is_no_directory_of_ours_is_never_an_error(odd: str) -> None:
    """The daemon may say anything; it is only a hint."""
    assert "is not seen from here" in shared_memory_hint(FAR, odd)


def test_a_hint_is_given_once(caplog) -> None:
    """At INFO."""
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "batchd_client"):
        for _ in range(3):
            log_once("a hint")

    assert caplog.messages == ["a hint"]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(4, None), (5, "4 batches for 5 ranks"), (16, "fewer samples"), (17, "and some of them the same")],
)
def test_ranks_that_share_batches_are_told(ranks: int, said: str | None) -> None:
    """Where an epoch of 16 samples has 4 batches."""
    text = shared_batches_hint("photos", ranks, 4, 16)

    assert text is None if said is None else said in str(text)
    assert text is None or ("the same" in text) == (ranks > 16)
