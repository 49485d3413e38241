"""Trainers whose streams mix sources, or read parts of a source."""

import batchd_client
from support.expected import Expected
from support.seen import see
from support.settings import folder_stream


def test_a_mix_and_its_subsets_give_what_their_parts_give(start_daemon, photos):
    """The test computes the samples from the configuration alone; two parts share no sample."""
    folder = folder_stream(photos)
    mix = {"type": "mix", "sources": [folder["source"], folder["source"]], "weights": [3, 1], "source_field": "from"}
    parts = {
        name: {**folder, "source": {"type": "subset", "of": mix, "shuffle_seed": 4, **share}}
        for name, share in (("train", {"stop": "75%"}), ("rest", {"start": "75%"}))
    }
    daemon = start_daemon({"mix": {**folder, "source": mix}, **parts})
    with batchd_client.connect(daemon.address) as connection:
        for name in ("mix", "train", "rest"):
            expected = Expected(daemon.config, name)
            reads = connection.stream(name, epochs=2)
            assert [see(reads), see(reads)] == [expected.epoch(0), expected.epoch(1)]
        counts = [len(connection.stream(name)) * 8 for name in ("train", "rest")]
        assert counts[0] > 2 * counts[1]
