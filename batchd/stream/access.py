"""What the workers of a stream have to reach, of all that a process may. Daemon and commands.

What sources need is in ``data.sources.access``; steps read the files that they name. Own code reads
below python_path and what ``read`` of the stream names; without ``read`` nobody knows.
"""

import os
import platform
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.options import with_inner
from batchd.data.sources.access import access_of_places, access_of_source
from batchd.data.sources.composed.options import sources_in
from batchd.errors import Problem, ProblemKind
from batchd.runtime.sandbox import NOTHING, Access, version


def access_of(config: StreamConfig, python_path: Sequence[Path]) -> Access | None:
    """What a worker of the stream has to reach; None if nobody knows."""
    sources = [source for _key, source in sources_in(config.source)]
    steps = with_inner({(place,): step for place, step in enumerate(config.pipeline)}).values()
    runs_own_code = any(source.is_own_code for source in sources) or any(isinstance(step, Call) for step in steps)
    if runs_own_code and config.read is None:
        return None
    code = [*python_path, *(config.read or ())] if runs_own_code else []
    files = [path for step in steps for path in step.files.values()]
    here = [os.path.realpath(place) for place in [*code, *files]]
    needed = NOTHING.joined(Access(here, [], any_port=runs_own_code and config.network, write=[]))
    return reduce(Access.joined, map(access_of_source, sources), needed)


def access_of_roots(daemon: DaemonConfig) -> Access:
    """What a worker of any stream has to reach that trainers may define."""
    define = daemon.define
    if define is None or define.what != "streams":
        return NOTHING
    code = (daemon.python_path or ()) if define.code else ()
    return access_of_places([*define.places, *code])


def sandbox_problems(config: Config) -> list[Problem]:
    """Why workers of these streams cannot be enclosed."""
    if not version():
        text = (
            f"this kernel does not let a process enclose itself ({platform.release()}): Linux 5.13 with Landlock does"
        )
        return [problem_at(("daemon", "sandbox"), ProblemKind.NO_SANDBOX, text)]
    text = "it runs functions of your own, and what they read is not known; list that in read (or read = [])"
    return [
        problem_at(("streams", name, "read"), ProblemKind.NO_SANDBOX, text)
        for name, stream in config.streams.items()
        if access_of(stream, config.daemon.python_path or ()) is None
    ]
