"""The source that reads prepared shards, or files, again, as TOML for people's configuration. The process of ``batchd prepare``.

Invariant: it reads every column that was written; the shortest form that does so is taken.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from batchd.prepare.lists import FileSet
from batchd.prepare.members import stored
from batchd.samples.columns import Column
from batchd.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.sources.webdataset.options import usual_member

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PAIR = {"image": "image", "label": "int64"}
"""What a source without fields reads."""


def source_table(root: Path, shards: str, columns: Mapping[str, Column]) -> str:
    """The table of a ``webdataset`` source over the shards that the pattern ``shards`` names below ``root``."""
    members = stored(columns)
    fields = {name: column.text for name, (column, _member) in members.items()}
    names = {name: member.text for name, (column, member) in members.items() if member != usual_member(column)}
    options = [
        'type = "webdataset"',
        f"root = {_text(str(root))}",
        f"shards = [{_text(shards)}]",
        *([f"fields = {_table(fields)}"] if list(fields.items()) != list(_PAIR.items()) else []),
        *([f"names = {_table(names)}"] if names else []),
    ]
    return f"{{ {', '.join(options)} }}"


def files_table(source: FolderSource | ListSource | GlobSource, files: FileSet) -> str:
    """The table of a source over ``files`` that were written: a folder's where it was one, and nothing of it is missing."""
    if isinstance(source, FolderSource) and files.has_all_classes:
        options = ['type = "folder"', f"path = {_text(str(files.root.absolute()))}"]
    else:
        places = {"path": files.list_file, "root": files.root}
        options = ['type = "list"', *(f"{key} = {_text(str(path.absolute()))}" for key, path in places.items())]
    if source.path_bytes:
        options.append(f"path_bytes = {max(source.path_bytes, files.path_bytes)}")
    return f"{{ {', '.join(options)} }}"


def _table(texts: Mapping[str, str]) -> str:
    pairs = (f"{key if _BARE_KEY.fullmatch(key) else _text(key)} = {_text(value)}" for key, value in texts.items())
    return f"{{ {', '.join(pairs)} }}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
