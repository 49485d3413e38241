"""All kinds of sources, and sources in messages. Daemon, workers and CLI; standard library only.

Invariant: ``source_from_plain(source_to_plain(source)) == source``.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import get_type_hints

from batchd.data.samples.kinds import Kinds
from batchd.data.sources.options import SourceOptions
from batchd.runtime.plain import Readers, from_plain, to_plain

SOURCE_KINDS = Kinds("batchd.data.sources", SourceOptions, "type", first="files")
"""The options class of each kind, by its ``type``."""


def source_to_plain(source: SourceOptions) -> dict[str, object]:
    """The source as strings, numbers, booleans, lists, tables and None, for a message."""
    return {field.name: to_plain(getattr(source, field.name)) for field in fields(SOURCE_KINDS[source.type])}


def source_from_plain(plain: Mapping[str, object]) -> SourceOptions:
    """Read what ``source_to_plain`` wrote. Raises ``ValueError`` or ``TypeError``."""
    kind = SOURCE_KINDS.get(str(plain.get("type")))
    if kind is None:
        raise ValueError(f"the source {plain.get('type')!r} is not one of {', '.join(SOURCE_KINDS)}")
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the source {plain['type']!r} has the options {sorted(names)}, not {sorted(plain)}")
    return kind(**{name: from_plain(hints[name], value, _READERS) for name, value in plain.items()})


_READERS: Readers = {SourceOptions: source_from_plain}
