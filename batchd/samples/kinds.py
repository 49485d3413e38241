"""A table that is one of several kinds, told apart by one of its keys: sources by ``type``, steps by ``op``. Daemon and CLI.

pydantic takes a tenth of a second of a CPU for validators of all kinds, and two milliseconds for those of one. So each is made
when the first table of its kind is read. To read the meanings of keys, which are the strings under them, takes it another tenth.
Where everything is wanted, for the JSON Schema, ``IS_WHOLE`` is set before the tree is imported.

Invariant: what is wrong with a table has the type that pydantic's own tagged union would give it, and the key where it stands.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

IS_WHOLE = False


@dataclass(frozen=True, slots=True)
class OneOf:
    """Says of a field that it is one of ``kinds``, which are dataclasses, by the value of ``key``."""

    kinds: Mapping[str, type]
    key: str

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Tell pydantic how such a field is validated."""
        if not IS_WHOLE:
            return core_schema.no_info_plain_validator_function(self._validated)
        choices = {name: handler.generate_schema(kind) for name, kind in self.kinds.items()}
        return core_schema.tagged_union_schema(choices, self.key)

    def _validated(self, value: Any) -> Any:
        """The table as an instance of its kind. Raises what pydantic expects of validators."""
        if isinstance(value, tuple(self.kinds.values())):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        discriminator = repr(self.key)
        if self.key not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": discriminator})
        tag = value[self.key]
        kind = self.kinds.get(tag) if isinstance(tag, str) else None
        if kind is None:
            expected = ", ".join(map(repr, self.kinds))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": discriminator, "tag": str(tag), "expected_tags": expected}
            )
        return _reader(kind)(json.dumps(value), strict=True)


@cache
def _reader(kind: type) -> Callable[..., Any]:
    """Reads a table of one kind from JSON, the only way in for which strict mode takes a table for a dataclass."""
    return TypeAdapter[Any](kind).validate_json
