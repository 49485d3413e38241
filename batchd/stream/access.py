"""What the workers of a stream have to reach, of all that a process may. Daemon and commands.

    source     its files and folders, and those that its files name; a link may lead out of them
               with ``allow_outside_root`` only, and then anywhere
    steps      the files that they read
    URLs       the ports of their servers, and of a proxy
    own code   python_path, and what ``read`` and ``network`` of the stream name; without ``read``
               nobody knows

Invariant: what a worker opens without the user's own code is named here, or lies in a folder here.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from batchd.config.schema import problem_at
from batchd.config.tree import Config, StreamConfig
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.options import with_inner
from batchd.data.samples.location import Url
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.options import SourceOptions
from batchd.errors import Problem, ProblemKind
from batchd.runtime.sandbox import NOTHING, Access, version

HTTP, HTTPS = 80, 443
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that name where requests go instead of a URL's own host."""


def access_of(config: StreamConfig, python_path: Sequence[Path]) -> Access | None:
    """What a worker of the stream has to reach; None if nobody knows."""
    sources = [source for _key, source in sources_in(config.source)]
    steps = with_inner({(place,): step for place, step in enumerate(config.pipeline)}).values()
    runs_own_code = any(source.is_own_code for source in sources) or any(isinstance(step, Call) for step in steps)
    if runs_own_code and config.read is None:
        return None
    code = [*python_path, *(config.read or ())] if runs_own_code else []
    files = [path for step in steps for path in step.files.values()]
    places = [place for source in sources for place in _places(source)]
    ports = {port for place in places if isinstance(place, Url) for port in _ports(str(place))}
    here = {os.path.realpath(place) for place in [*places, *code, *files] if not isinstance(place, Url)}
    return NOTHING.joined(Access([*here], [*ports], any_port=runs_own_code and config.network, write=[]))


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


def _places(source: SourceOptions) -> list[Path]:
    """The files and folders of a source that is no part, and of those that its files name."""
    if getattr(source, "allow_outside_root", False):
        return [Path("/")]
    named = {field.name: getattr(source, field.name) for field in fields(source)}
    paths = [value for value in named.values() if isinstance(value, Path)]
    path, folder = named.get("path"), "image_root" if "image_root" in named else "root"
    if isinstance(path, Path) and named.get(folder, path) is None:  # its files are beside it
        paths.append(path.parent)
    return paths


def _ports(url: str) -> set[int]:
    """The ports of a server, or of what stands for it: a store's endpoint, or a proxy."""
    others = [text for name in (*_ENDPOINTS, *_PROXIES) if (text := os.environ.get(name))]
    ports = {HTTP, HTTPS}  # HTTP: of the address at which a cloud gives its machines credentials
    for text in [url, *others]:
        try:
            ports.add(urlsplit(text if "://" in text else f"//{text}").port or HTTPS)
        except ValueError:  # no port, so whoever uses it refuses it
            continue
    return ports
