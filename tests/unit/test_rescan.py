"""The process that reads a configuration again, by itself."""

import json
import os
import socket
import subprocess
import sys

from batchd_wire.channel import receive_message
from batchd_wire.orders import TO_DAEMON_FROM_RESCAN, ConfigRead

REFUSED_NICE = """
import errno, os, sys
from batchd.daemon import rescan

def refuse(_increment):
    raise PermissionError(errno.EPERM, "Operation not permitted")

os.nice = refuse
sys.exit(rescan.main())
"""


def test_a_filter_that_refuses_a_lower_priority_does_not_refuse_the_reload() -> None:
    """Services and containers may not change priorities; the errand, here of another version, is answered all the same."""
    errand = {"version": "0", "file": "none.toml", "overrides": {}, "daemon": {}, "signatures": {}, "slots": {}}
    memory = os.memfd_create("errand")
    os.pwrite(memory, json.dumps(errand).encode(), 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = theirs.fileno(), memory
    command = [sys.executable, "-c", REFUSED_NICE, *map(str, descriptors)]
    with ours, subprocess.Popen(command, pass_fds=descriptors) as reader:
        theirs.close()
        os.close(memory)
        message, (answer,) = receive_message(ours, TO_DAEMON_FROM_RESCAN)
        with os.fdopen(answer) as document:
            problem = json.load(document)["problem"]
        assert reader.wait() == 0
    assert isinstance(message, ConfigRead)
    assert "the daemon that runs is 0: restart it" in problem
