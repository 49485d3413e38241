"""The demo of the pool on a real cluster of Ray."""

import pytest

from support.cluster_demo import check_demo

pytest.importorskip("ray", reason="Ray is not installed (make test-ray)")


def test_the_demo_finds_the_same_bytes_on_a_cluster_of_ray(tmp_path):
    """The test kills one of its two nodes meanwhile."""
    said = check_demo(tmp_path)
    assert "a Ray cluster of two nodes" in said
    assert "kill -9 of its raylet" in said
