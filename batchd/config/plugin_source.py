"""A source of a kind that another package brings. Daemon, workers and CLI; standard library only."""

from dataclasses import dataclass, field
from typing import Any, Literal

from batchd.config.source import SourceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSource(SourceOptions):
    """A kind of source that an installed package brings, under an entry point of the group `batchd.sources`."""

    type: Literal["plugin"] = "plugin"
    """Kind of source."""

    name: str
    """Name of the entry point."""

    options: dict[str, Any] = field(default_factory=dict)
    """The options of the package; see its documentation. Relative paths under keys such as `path`
    and `root` are relative to the file, as everywhere."""

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])
