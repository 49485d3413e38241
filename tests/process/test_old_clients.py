"""A daemon serves clients of earlier protocol versions: recorded conversations are played to it."""

import json
from pathlib import Path

import pytest

from conversation.play import Player
from conversation.record import start_daemon

RECORDINGS = sorted((Path(__file__).parents[1] / "conversation").glob("version_*.json"))


@pytest.fixture
def daemon(daemons_folder, photos):
    """Serve what was served when the conversations were recorded."""
    daemon = start_daemon(daemons_folder, photos)
    yield daemon
    daemon.close()


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_a_recorded_client_is_served(daemon, file):
    """Locally, over TCP and as a producer. Each message has exactly the fields of that client."""
    for conversation in json.loads(file.read_text()):
        with Player(daemon, conversation["over"]) as player:
            player.play(conversation["said"])
