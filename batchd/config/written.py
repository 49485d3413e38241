"""Values as TOML, for configurations that batchd writes. CLI.

Invariant: ``tomllib`` reads the value again.
"""

import json
import re
from collections.abc import Mapping, Sequence

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def toml_value(value: object) -> str:
    """A value on one line: a text, number, boolean, list, or table (a mapping)."""
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(toml_value, value))}]"
    # in JSON, a text may have an unescaped DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """A key, in quotes if it needs them."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)
