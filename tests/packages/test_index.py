"""The package index that `make dist` writes: a static web server, and pip, uv and pipx."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import batchd
from support.roots import PYTHON, TREE, WHEELHOUSE, collect_wheels, make

DIST = TREE / "dist"
TOOLS = Path(sys.executable).parent
PATIENCE_S = 300


class Quiet(SimpleHTTPRequestHandler):
    """A web server of static files, without a log."""

    def log_message(self, *_arguments: object) -> None:
        """Print no line."""


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """Build all that is published, and serve it; return the address of the index."""
    collect_wheels()
    make("dist")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=DIST)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()
        thread.join()


@pytest.fixture
def environment(index, tmp_path) -> dict[str, str]:
    """Return variables with which pip and uv know this index, and the wheels of other projects."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return kept | {
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_FIND_LINKS": str(WHEELHOUSE),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_DEFAULT_INDEX": index,
        "UV_FIND_LINKS": str(WHEELHOUSE),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "PIPX_HOME": str(tmp_path / "pipx"),
    }


def run(environment: dict[str, str], *command: str | Path) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("wanted", "program", "installed"),
    [
        ("batchd-client", "import batchd_client", {"batchd-client"}),
        ("batchd", "import batchd.daemon.serve, batchd_client", {"batchd", "batchd-client"}),
        ("batchd[lmdb]", "import lmdb, batchd", {"batchd", "batchd-client", "lmdb"}),
    ],
)
def test_pip_installs_from_the_index(environment, tmp_path, wanted, program, installed) -> None:
    """The client comes alone, the server with the client, and an extra with its library."""
    python = tmp_path / "venv/bin/python"
    run(environment, PYTHON, "-m", "venv", tmp_path / "venv")
    run(environment, python, "-m", "pip", "install", "-q", wanted)
    found = {line.partition("==")[0] for line in run(environment, python, "-m", "pip", "freeze").splitlines()}

    run(environment, python, "-c", program)
    assert found & {"batchd", "batchd-client", "lmdb"} == installed


@pytest.mark.parametrize(
    "command",
    [
        [TOOLS / "uvx", "--isolated", "--python", PYTHON, "--from", "batchd", "batchd", "--version"],
        [TOOLS / "pipx", "run", "--no-cache", "--python", PYTHON, "--spec", "batchd", "batchd", "--version"],
    ],
    ids=["uvx", "pipx"],
)
def test_a_command_runs_from_the_index_without_an_installation(environment, command) -> None:
    """The same words work with any index that has the packages."""
    assert run(environment, *command) == f"batchd {batchd.__version__}\n"


def test_pip_refuses_a_file_that_the_index_did_not_mean(environment, index, tmp_path) -> None:
    """The pages have the digest of each file, so a damaged or replaced one is not installed."""
    assert index
    [wheel] = DIST.glob("batchd_client-*.whl")
    whole = wheel.read_bytes()
    try:
        wheel.write_bytes(whole + b"x")
        words = [
            PYTHON,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            tmp_path,
            "batchd-client",
        ]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    finally:
        wheel.write_bytes(whole)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
