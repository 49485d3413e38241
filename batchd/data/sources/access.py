"""What the processes that read a source have to reach, of all that a process may. Every process.

    files and folders  its own, and those that its files name; a link may lead out of them with
                       ``allow_outside_root`` only, and then anywhere
    URLs               the ports of their servers, and of a proxy

Invariant: what is opened for a source without the user's own code is named here, or lies in a
folder here.
"""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from batchd.data.samples.location import Url
from batchd.data.sources.options import SourceOptions
from batchd.runtime.sandbox import NOTHING, Access

HTTP, HTTPS = 80, 443
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that name where requests go instead of a URL's own host."""


def access_of_source(source: SourceOptions) -> Access:
    """What is needed for a source that has no parts."""
    return access_of_places(_places(source))


def access_of_places(places: Sequence[Path]) -> Access:
    """What is needed for files and folders, and all below them."""
    ports = {port for place in places if isinstance(place, Url) for port in _ports(str(place))}
    here = {os.path.realpath(place) for place in places if not isinstance(place, Url)}
    return NOTHING.joined(Access([*here], [*ports], any_port=False, write=[]))


def _places(source: SourceOptions) -> list[Path]:
    """Its files and folders, and those that its files name."""
    if getattr(source, "allow_outside_root", False):
        return [Path("/")]
    named = {field.name: getattr(source, field.name) for field in fields(source)}
    paths = [value for value in named.values() if isinstance(value, Path)]
    path, folder = named.get("path"), "image_root" if "image_root" in named else "root"
    if isinstance(path, Path) and named.get(folder, path) is None:  # its files are beside it
        paths.append(path.parent)
    classes = named.get("classes")
    if isinstance(classes, str) and Path(classes).is_absolute():  # the folder of another stream
        paths.append(Path(classes))
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
