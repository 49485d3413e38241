"""What the tests of packages have: a small Debian of their own."""

import shutil

import pytest

from support.roots import Root, collect_wheels, need_debian


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    """A Debian that the tests of one module change in turn; skips with the reason without one."""
    need_debian()
    collect_wheels()
    folder = tmp_path_factory.mktemp("root")
    yield Root(folder)
    shutil.rmtree(folder)
