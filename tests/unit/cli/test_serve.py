"""The command that starts a daemon in the background."""

import os
from pathlib import Path

from batchd.cli.serve import await_start


def test_a_daemon_that_could_not_be_forked_is_reported_by_what_was_logged(tmp_path: Path, capsys) -> None:
    """The process that was to wait for it has no pid to tell, and ends with the reason."""
    log = tmp_path / "batchd.log"
    log.write_text("of an earlier daemon\nbatchd: no process can be started\n")
    told, telling = os.pipe()
    parent = os.fork()
    if not parent:
        os._exit(70)
    os.close(telling)

    assert await_start(parent, told, log, len("of an earlier daemon\n")) == 70

    assert capsys.readouterr() == ("", "batchd: no process can be started\n")
