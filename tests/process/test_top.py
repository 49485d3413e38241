"""``batchd top`` with a real terminal and daemon: it runs, ends, and restores the terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios

import pytest

from support.commands import batchd
from support.daemon_process import clean_environment
from support.waiting import PATIENCE_S, wait_until

ALTERNATE_SCREEN_OFF, CURSOR_ON = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal that runs ``batchd top``; ``seen`` has its whole output."""

    def __init__(self, address: str, *arguments: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(30, 120, tell=False)
        self._before = termios.tcgetattr(self._theirs)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchd", "top", "--address", address, "--interval", "0.2", *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={name: value for name, value in clean_environment().items() if name not in {"LINES", "COLUMNS"}}
            | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    def resize(self, lines: int, columns: int, *, tell: bool = True) -> None:
        """Resize the terminal, as a user who drags a window's corner does."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def read(self) -> bytes:
        """Read the output so far."""
        while select.select([self._ours], [], [], 0)[0]:
            self.seen += os.read(self._ours, 65_536)
        return self.seen

    def shows(self, words: str) -> None:
        """Wait until the output has this text."""
        wait_until(lambda: words.encode() in self.read(), f"it shows {words!r}; it showed {self.seen[-2000:]!r}")

    def ended(self) -> int:
        """Wait for the end of the command."""
        wait_until(lambda: (self.read() or True) and self.process.poll() is not None, "it ends")
        self.read()
        assert self.process.returncode is not None
        return self.process.returncode

    def is_restored(self) -> bool:
        """Tell whether the terminal's settings are restored."""
        screen = ALTERNATE_SCREEN_OFF in self.seen and CURSOR_ON in self.seen
        return screen and termios.tcgetattr(self._theirs) == self._before

    def close(self) -> None:
        """End the command and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def start_top():
    """Start the command; end it after the test."""
    terminals = []

    def start(address: str, *arguments: str) -> Terminal:
        terminals.append(Terminal(address, *arguments))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Start a daemon that stays intact."""
    return start_shared_daemon()


@pytest.mark.parametrize("keys", [b"q", b"\x03"])
def test_it_shows_the_daemon_until_q_or_ctrl_c(daemon, start_top, keys):
    """The terminal's settings are restored, with exit code 0."""
    terminal = start_top(daemon.address)
    terminal.shows("photos")
    terminal.shows("worker")
    terminal.type(keys) if keys == b"q" else terminal.process.send_signal(signal.SIGINT)

    assert terminal.ended() == 0
    assert terminal.is_restored()
    assert b"Traceback" not in terminal.seen


def test_a_terminal_of_another_size_is_drawn_again(daemon, start_top):
    """The command shows the columns that fit, before the next sample of the counters."""
    terminal = start_top(daemon.address, "--interval", "3600")
    terminal.shows("delivered/s")
    terminal.shows("replaced")
    terminal.read()
    terminal.seen = b""
    terminal.resize(30, 50)
    terminal.shows("ms/sample")
    assert b"replaced" not in terminal.seen


@pytest.mark.thorough
def test_a_daemon_that_goes_away_or_does_not_answer_is_shown_as_such(start_daemon, start_top):
    """The last numbers stay until it returns. Only the time reveals a silent living daemon."""
    daemon = start_daemon()
    terminal = start_top(daemon.address)
    terminal.shows(f"pid {daemon.pid}")
    daemon.terminate()
    terminal.shows("the daemon has gone")
    daemon.start()
    terminal.shows(f"pid {daemon.pid}")
    daemon.send(signal.SIGSTOP)
    try:
        terminal.shows("no answer for")
        terminal.type(b"q")
        assert terminal.ended() == 0
    finally:
        daemon.send(signal.SIGCONT)
    assert terminal.is_restored()


def test_what_goes_wrong_leaves_the_terminal_as_it_was(daemon, start_top):
    """SIGTERM ends the command, and the terminal's settings are restored."""
    terminal = start_top(daemon.address)
    terminal.shows("photos")
    terminal.process.terminate()

    assert terminal.ended() == 128 + signal.SIGTERM
    assert terminal.is_restored()


@pytest.mark.thorough
def test_a_pipe_gets_one_frame(daemon):
    """The output has no terminal sequences."""
    for arguments in (["--once"], []):
        text = batchd("top", "--interval", "0.2", *arguments, address=daemon.address).stdout

        assert f"pid {daemon.pid}" in text
        assert "photos" in text
        assert "\x1b" not in text


def test_where_no_daemon_is_that_is_said(tmp_path):
    """The exit code is that of every command."""
    assert "no batchd daemon could be reached" in batchd("top", "--once", address=f"ipc://{tmp_path}", status=3).stderr
