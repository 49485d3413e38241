"""What a process has left that has become another user."""

import ctypes
import os
from pathlib import Path

import pytest

from batchd.runtime.rights import CAPABILITIES, become, lacking

PR_SET_KEEPCAPS = 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_becomes_another_user_has_no_capability_left():
    """Also where the kernel would keep them, as for a daemon that is not root but has some."""
    assert lacking() == []
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(PR_SET_KEEPCAPS, 1)
        become([51_234, 51_234, 51_234])
        facts = Path("/proc/self/status").read_text(encoding="ascii")
        left = [line.split()[1] for line in facts.splitlines() if line.startswith(("CapPrm", "CapEff", "CapInh"))]
        os.write(writing, " ".join([*left, *lacking()]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read().split() == ["0" * 16] * 3 + list(CAPABILITIES)
    assert os.waitpid(child, 0)[1] == 0
