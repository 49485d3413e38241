"""Copies and pickles of unique objects are refused, with a remedy."""

import copy
import pickle

import pytest

import batchd_client
from batchd_client.errors import CopyRefused
from support.fake_daemon import FakeDaemon
from support.fake_live import FakeLive


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda make: make.__name__)
def test_a_copy_is_refused_with_a_remedy(tmp_path, make) -> None:
    """A copy of a batch would share its lease.

    A release of one would let the daemon overwrite the other.
    """
    with FakeDaemon(tmp_path / "run") as fake, batchd_client.connect(fake.address) as daemon:
        live = FakeLive(fake)
        stream = daemon.stream("photos")
        batches = iter(stream)
        batch = next(batches)
        with batchd_client.push("live", fake.address) as producer:
            for one, advice in (
                (batch, r"copy its arrays, batch\["),
                (stream, r"open a stream in each process: batchd_client\.connect\(address\)\.stream\("),
                (daemon, r"batchd_client\.connect\(daemon\.address\)"),
                (producer, r"batchd_client\.push"),
                ({"nested": [batch]}, "copy its arrays"),
            ):
                if isinstance(one, dict) and make is copy.copy:
                    continue
                with pytest.raises(CopyRefused, match=rf"cannot be copied or pickled: .*{advice}") as caught:
                    make(one)
                assert isinstance(caught.value, TypeError)
                assert "num_workers=0" in str(caught.value)
        live.close()

        assert dict(batch)["label"][0] == batch["label"][0] == 0
