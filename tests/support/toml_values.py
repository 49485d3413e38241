"""Random values and how TOML writes them. For tests of the configuration."""

import json
from typing import Any

from hypothesis import strategies as st

KEYS = st.text("ab.= #[]\"'", min_size=1, max_size=4)
SCALARS = st.one_of(
    st.integers(-9, 9),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("a#[]{}=,'\"\n", max_size=5),
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)),
    max_size=4,
)


def written(value: Any, separator: str) -> str:
    """Write a value as TOML: arrays span several lines with comments if the separator has them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(item, separator)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + separator + "".join(f"{written(item, separator)},{separator}" for item in value) + "]"
    return json.dumps(value)
