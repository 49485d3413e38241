"""A daemon serves clients of earlier protocol versions: the tests replay recorded conversations."""

import json
from pathlib import Path

import pytest

from conversation.play import Player
from conversation.record import start_daemon

RECORDINGS = sorted((Path(__file__).parents[1] / "conversation").glob("version_*.json"))


@pytest.fixture
def daemon(daemons_folder, photos):
    """Serve the streams of the recorded conversations."""
    daemon = start_daemon(daemons_folder, photos)
    yield daemon
    daemon.close()


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_a_recorded_client_is_served(daemon, file):
    """Clients are local, remote and producers. Each message has exactly that client's fields."""
    for conversation in json.loads(file.read_text()):
        with Player(daemon, conversation["over"]) as player:
            player.play(conversation["said"])
