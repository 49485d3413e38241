"""The demo of the pool: each position has the same bytes, and no process or file remains."""

import pytest

from support.cluster_demo import check_demo, start_demo
from support.containers import need_containers


@pytest.mark.thorough
def test_the_demo_finds_the_same_bytes_with_nodes_and_without(tmp_path):
    """The demo kills one of its two plain worker hosts meanwhile."""
    need_containers()
    said = check_demo(tmp_path, "--plain")
    assert "the first worker host was killed" in said


def test_a_killed_demo_leaves_nothing(tmp_path):
    """The demo leaves no processes (which the fixture of all tests looks for) and no files."""
    need_containers()
    with start_demo(tmp_path, "--plain") as demo:
        assert "1 local worker" in demo.stdout.readline()
        demo.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
