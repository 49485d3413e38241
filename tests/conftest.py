"""Fixtures and options of every test.

Hypothesis tries the same examples every time, unless ``--hypothesis-profile=long`` asks for more.
After each test the leak oracle looks for remains. Daemons and trainers that a test starts end with
the test, or with its module.
"""

import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from batchd.data.functions import load
from batchd.data.sources import scan
from batchd.data.storage.access import Storage
from batchd.data.storage.values import StorageLimits
from batchd.runtime import children
from support.daemon_process import DaemonProcess
from support.forked import start_scan
from support.gs_server import GoogleServer
from support.http_files import FileServer, serving
from support.images import write_photos
from support.keeper import cleared_by, keep
from support.kernel import RUN_VARIABLE, carriers
from support.launcher import Launcher
from support.leaks import left_since, look, open_files
from support.pools import WorkerHostProcess, worker_hosts
from support.s3_server import BucketServer
from support.settings import folder_stream
from support.trainer_process import TrainerProcess
from support.waiting import PATIENCE_S, wait_until

settings.register_profile(
    "usual",
    derandomize=True,
    deadline=None,
    max_examples=25,
    stateful_step_count=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # the machine's speed says nothing about the code
)
settings.register_profile(
    "long",
    deadline=None,
    max_examples=2000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("usual")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells ignore SIGINT for background jobs, and child processes of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected: hardly anything of a lane's million objects is garbage
sys.dont_write_bytecode = False  # otherwise each lane of each run compiles these modules again
os.environ[RUN_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(4)}"
keep(os.environ[RUN_VARIABLE])
LEAK_PATIENCE_S = PATIENCE_S / 4

_HAS_FAILED = pytest.StashKey[bool]()

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture(scope="session")
def daemons_folder() -> Iterator[Path]:
    """Make the folder for daemons' directories; its path is short, as a socket's must be."""
    folder = Path(tempfile.mkdtemp(prefix="batchd-"))
    with cleared_by("rm", "-rf", "--", str(folder)):
        yield folder
        marker = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}"
        wait_until(lambda: not carriers(marker), "no process is left of all the tests", LEAK_PATIENCE_S)
        shutil.rmtree(folder)


class FailuresAtOnce:
    """Prints each failure when it happens: a long run may be stopped or killed before its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a line under the dots; this covers failures of other lanes."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash is not None else report.longreprtext).strip().partition("\n")[0]
            self._terminal.write_line(f"\nFAILED in {report.when}: {report.nodeid} - {said}", red=True)
            self._terminal.flush()  # otherwise a file or a pipe gets it some kilobytes later


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register ``FailuresAtOnce`` late, as the terminal exists only then; lanes have none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the first parameters of a ``thorough(after_first=True)`` test in `make test`."""
    mark = item.get_closest_marker("thorough")
    if mark is not None and mark.kwargs.get("after_first") and not any(item.callspec.indices.values()):
        item.own_markers.remove(mark)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that mostly compute between those that mostly wait.

    Tests of processes wait for starts and timeouts, and unit tests keep a CPU busy. If all lanes
    ran one kind and then the other, the CPUs would idle first and be short later. Long files are
    first: a lane that began one last would end after all others.
    """
    files = sorted({item.path for item in items}, key=lambda file: (-file.stat().st_size, file))
    kinds: dict[bool, list[Path]] = {False: [], True: []}
    for file in files:
        kinds["unit" in file.parts].append(file)
    places = {file: (number + 1) / len(kind) for kind in kinds.values() for number, file in enumerate(kind)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """Freeze the imported modules, so that the garbage collector need not scan them each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Store a test's outcome for the leak oracle."""
    report = yield
    item.stash[_HAS_FAILED] = item.stash.get(_HAS_FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _loggers_follow() -> Iterator[None]:
    """Bind no module's logger for good: a command in a test's process would keep it from others."""
    configure = structlog.configure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            structlog, "configure", lambda **options: configure(**options | {"cache_logger_on_first_use": False})
        )
        yield


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the log format: a command in a test's own process may have changed it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, daemons_folder: Path) -> Iterator[None]:
    """Fail a test that leaves processes, threads, descriptors, mappings or files behind."""
    before = look(daemons_folder)
    yield
    if request.node.stash.get(_HAS_FAILED, False):
        return
    try:
        wait_until(lambda: not left_since(before, daemons_folder), "nothing is left behind", LEAK_PATIENCE_S)
    except AssertionError:
        pytest.fail("left behind: " + "; ".join(left_since(before, daemons_folder)), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _no_file_left_open(daemons_folder: Path) -> Iterator[None]:  # noqa: ARG001  it ends after what tests share
    """Fail the last test of a module whose tests leave files open."""
    before = open_files()
    yield
    assert sorted(open_files() - before) == [], "left open"


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make 40 small photographs in four classes in a folder; no test writes to it."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, {"cat": 10, "dog": 10, "owl": 10, "yak": 10}, height=72, width=96)
    return folder


@pytest.fixture
def forked_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork scans that need a process from this one, which has already imported everything."""
    monkeypatch.setattr(scan.children, "start", start_scan)


@pytest.fixture
def scans_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan Parquet in this process: a fork cannot use this one's connections to servers."""
    from batchd.data.sources.parquet import scan as parquet_scan  # noqa: PLC0415  pyarrow takes long to import

    monkeypatch.setattr(
        parquet_scan, "isolated_scan", lambda _module, source, survey: parquet_scan.scan(source, survey)
    )


@pytest.fixture(scope="session")
def _network_library() -> None:
    """Start the library for URLs early: its threads live as long as the process."""
    with Storage(StorageLimits(0.1, 0, 0.5)) as storage:
        storage.client.heads(["http://127.0.0.1:1/nobody"])


@pytest.fixture
def storage(_network_library: None) -> Iterator[Storage]:
    """Return a storage with short limits: three tries; its connections end with the test."""
    with Storage(StorageLimits(timeout_s=1.0, retries=2, deadline_s=10.0)) as storage:
        yield storage


@pytest.fixture
def web() -> Iterator[FileServer]:
    """Start a server of files."""
    with serving() as server:
        yield server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, _network_library: None) -> Iterator[Any]:
    """Start an S3 server with an empty bucket, and set the environment that names it."""
    server = BucketServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, _network_library: None) -> Iterator[FileServer]:
    """Start a server that behaves as Google Cloud Storage; set the environment that names it."""
    with serving(kind=GoogleServer) as server:
        for name, value in server.environment.items():  # type: ignore[attr-defined]
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let so many seconds pass at once, so that a test decides when a client's deadline arrives."""
    real, passed_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(passed_s))
    return passed_s.append


@pytest.fixture
def pausing(let_pass: Callable[[float], None]) -> Callable[..., AbstractContextManager[None]]:
    """Report each pause of a client's module; the time passes without a wait."""

    @contextmanager
    def pausing(module: ModuleType, *pauses_s: float) -> Iterator[None]:
        left_s = iter(pauses_s)
        with pytest.MonkeyPatch.context() as patch:
            changed = {**vars(time), "sleep": lambda _seconds: let_pass(next(left_s))}
            patch.setattr(module, "time", SimpleNamespace(**changed))
            yield
        assert next(left_s, None) is None, "the module paused less often"

    return pausing


@contextmanager
def _daemons(parent: Path, photos: Path) -> Iterator[StartDaemon]:
    """Start daemons, by default with the stream ``photos``. All are closed at the end."""
    with ExitStack() as stack:

        def start(
            streams: dict[str, dict[str, Any]] | None = None,
            *,
            ready: bool = True,
            through: Sequence[str] = (),
            **options: Any,
        ) -> DaemonProcess:
            daemon = DaemonProcess(parent, streams or {"photos": folder_stream(photos)}, **options)
            daemon.through = through
            stack.callback(daemon.close)
            return daemon.start(ready=ready)

        yield start


@pytest.fixture(scope="session")
def _launcher(daemons_folder: Path) -> Iterator[Launcher]:  # noqa: ARG001  it ends before the last look for remains
    """Start the process that daemons, worker hosts and trainers are forked from."""
    with closing(Launcher()) as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def _launcher_of_processes(request: pytest.FixtureRequest) -> None:
    """Start it before the first test of processes, whichever fixtures that one has."""
    if any("unit" not in item.path.parts for item in request.session.items):
        request.getfixturevalue("_launcher")


@pytest.fixture(scope="module")
def forked_children(_launcher: Launcher) -> Iterator[None]:
    """Fork the children of this process, such as workers of a replay, from the launcher, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "start", _launcher.start)
        yield


@pytest.fixture
def start_daemon(daemons_folder: Path, photos: Path, _launcher: Launcher) -> Iterator[StartDaemon]:
    """Start daemons; they end with the test."""
    with _daemons(daemons_folder, photos) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_daemon(daemons_folder: Path, photos: Path, _launcher: Launcher) -> Iterator[StartDaemon]:
    """Start daemons; they end with the module."""
    with _daemons(daemons_folder, photos) as start:
        yield start


@pytest.fixture
def start_trainer(_launcher: Launcher) -> Iterator[Callable[..., TrainerProcess]]:
    """Start trainers as processes of their own; they end with the test."""
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> TrainerProcess:
            trainer = TrainerProcess(*arguments, **options)
            stack.callback(trainer.close)
            return trainer.ready()

        yield start


@pytest.fixture
def start_host(tmp_path: Path) -> Iterator[Callable[..., WorkerHostProcess]]:
    """Start worker hosts of real daemons; they end with the test."""
    with worker_hosts(tmp_path) as start:
        yield start


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the indexes of a test's data out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Make a folder for modules of users' functions."""
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


@pytest.fixture
def write(code: Path) -> Callable[..., Path]:
    """Write a module into that folder: its relative path, and its text, which may be indented."""

    def write(path: str, text: str = "") -> Path:
        file = code / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    return write


@pytest.fixture
def importable(code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make its modules importable; a test's imports from it are removed with the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(load, "_expected", {})
    load.expect([str(code)], {})
    yield
    for name in set(sys.modules) - before:
        if str(code) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
