"""A small Debian for the tests of packages."""

import shutil

import pytest

from support.roots import Root, collect_wheels, need_debian


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    """Make a Debian that the tests of one module change in turn, or skip with the reason."""
    need_debian()
    collect_wheels()
    folder = tmp_path_factory.mktemp("root")
    yield Root(folder)
    shutil.rmtree(folder)
