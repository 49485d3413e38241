"""The process of a daemon: for ``batchd serve``, and ``python -m batchd.cli.daemon`` for a script.

The fork server of the workers is forked before the daemon imports its own modules, so both import
at the same time. The imported modules stay, so the garbage collector skips them: during the
imports, which saves a tenth of the time, and later. Libraries also import what the daemon never
uses, which ``imports_for_a_daemon`` leaves out: more than another tenth. A script's daemon has no
command line, so it imports no click.

Invariant: standard output has one line: the address, once trainers can connect. For a script that
embeds the daemon it has the reason instead if the daemon does not start. All else is log, on
standard error.
"""

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from batchd.cli import terminal
from batchd.errors import BatchdError
from batchd.runtime.children import collect_output, fill_standard_streams, stop_collecting
from batchd.worker.fork_server import start_early
from batchd_wire.wording import counted

if TYPE_CHECKING:
    from batchd.cli.options import LogFormat

PYDANTIC_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
"""Variable of pydantic that turns its plugins off."""


def run_daemon(
    config_file: Path,
    overrides: dict[str, str],
    log_level: str,
    log_format: "LogFormat",
    *,
    lifeline: int | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or the end of the lifeline. Raises ``BatchdError``.

    ``ready`` is called with the address instead of printing it.
    """
    fill_standard_streams()
    # Threads of NumPy that have no work take 10 ms to start, also in children.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    # the standard error of a script is for what its functions print
    output = collect_output() if lifeline is None else None
    fork_server = start_early()
    try:
        with imports_for_a_daemon():  # imported here for the reasons above
            from batchd.cli.log_lines import log_place, log_unknown_variables, print_line, set_up_logs  # noqa: PLC0415
            from batchd.config.load import load_config  # noqa: PLC0415
            from batchd.daemon.kept_log import KeptLog  # noqa: PLC0415
            from batchd.daemon.reload.requests import Origin  # noqa: PLC0415
            from batchd.daemon.serve import ServeOptions, serve  # noqa: PLC0415

            gc.freeze()
            gc.enable()
            kept = KeptLog(log_place())
            set_up_logs(log_level, log_format, kept.add)
            log_unknown_variables()
            config = load_config(config_file, overrides)
        say_ready = ready or print_line

        def begin_serving(address: str) -> None:
            terminal.show_progress("")
            say_ready(address)

        options = ServeOptions(
            lifeline=lifeline,
            progress=_show_scan,
            ready=begin_serving,
            origin=Origin(config_file.absolute(), overrides),
            log=kept,
            launched=fork_server,
            output=output,
        )
        if sys.stderr is not None:  # None if it was closed
            faulthandler.enable()  # if the daemon hangs and is aborted, the log says where
        serve(config, options)
    finally:
        stop_collecting()
        if fork_server is not None:
            fork_server.child.end()
            fork_server.channel.close()


def _show_scan(stream: str, found: int) -> None:
    terminal.show_progress(f"scanning {stream}: {counted(found, 'sample')}")


@contextmanager
def imports_for_a_daemon() -> Iterator[None]:
    """In the context, libraries do not load what they need for other programs.

    ``structlog`` loads ``rich`` if it is installed, for tracebacks that are never printed, and
    ``asyncio``; pydantic looks for plugins in all installed packages.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    # the import system takes None for "not installed"
    without: dict[str, ModuleType | None] = {"rich": None}
    without |= {name: _loaded_at_first_call(name) for name in ("asyncio", "importlib.metadata")}
    without = {name: module for name, module in without.items() if name not in modules}
    plugins = os.environ.get(PYDANTIC_PLUGINS)
    os.environ[PYDANTIC_PLUGINS] = "__all__"
    modules |= without
    try:
        yield
    finally:
        for name in without:
            if modules.get(name) is without[name]:
                del modules[name]
        del os.environ[PYDANTIC_PLUGINS]
        if plugins is not None:
            os.environ[PYDANTIC_PLUGINS] = plugins


def _loaded_at_first_call(name: str) -> ModuleType:
    """Return a module whose functions are those of the module called ``name``, which they load."""
    module = ModuleType(name)

    def function(of_module: str) -> Callable[..., object]:
        if of_module.startswith("__"):
            raise AttributeError(of_module)

        def call(*arguments: object, **options: object) -> object:
            if sys.modules.get(name) is module:
                del sys.modules[name]
            return getattr(import_module(name), of_module)(*arguments, **options)

        return call

    module.__getattr__ = function  # type: ignore[method-assign]
    return module


def main() -> None:
    """Serve for a script. The arguments: its configuration and overrides, as JSON; the lifeline."""
    config, overrides = json.loads(sys.argv[1])
    try:
        run_daemon(Path(config), overrides, "warning", "text", lifeline=int(sys.argv[2]))
    except BatchdError as error:
        with suppress(OSError):  # the script has ended meanwhile
            terminal.emit(str(error))  # the script reads it
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
