"""Divides the daemon's memory among the rings. Daemon and ``batchd check``; reserves nothing.

    [daemon] memory = 4GiB
    |-- streams.a: memory = 1GiB -----|-- streams.b: half of the rest --|-- streams.c: the same --|
    |-- slot --|-- slot --|-- ... --| |-- slot --|-- slot --|           |-- slot --|-- slot --|

Invariant: the slots of all rings together never exceed the daemon's memory, and each ring has at
least two: one is read while the other is filled.
"""

from dataclasses import dataclass
from math import ceil, floor

from batchd.config.draft import whole_draft
from batchd.config.schema import meaning_of
from batchd.config.tree import Config, StreamConfig
from batchd.daemon.memory.cache_folder import cache_problems
from batchd.daemon.stream_checks import look_at_stream
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem, path_text
from batchd.pipeline.sample_fields import sample_fields
from batchd.samples.columns import Column
from batchd.samples.sizes import round_bytes
from batchd.sources.push.options import PushSource
from batchd.storage.access import Storage
from batchd_wire.fields import CHECKSUM, Field, SlotLayout, place_fields
from batchd_wire.wording import counted

SLOTS_MIN = 2
SLOTS_MAX = 512
"""Two slots for each of 200 trainers on one stream of small batches, and some more. Each slot costs
the daemon two descriptors and, on Python before 3.13, one more in each process that maps it (the
daemon too, for TCP); a process may often have 1024."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class RingSize:
    """Limits of one stream's ring: ``slots_max`` slots of ``layout.slot_bytes`` bytes.

    ``columns``: of the source's samples. ``mailbox_bytes``: memory of pushed samples.
    """

    columns: tuple[Column, ...]
    layout: SlotLayout
    slots_max: int
    mailbox_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """The memory of one slot."""
        return self.layout.slot_bytes

    @property
    def ring_bytes(self) -> int:
        """The most memory that the ring takes, with the mailbox before it."""
        return self.slots_max * self.slot_bytes + self.mailbox_bytes


def plan_rings(config: Config, storage: Storage, *, thoroughly: bool = False) -> dict[str, RingSize]:
    """Lay out the slots of every stream and count them.

    ``thoroughly``: for a caller that does not scan the sources afterwards. Raises ``ConfigInvalid``
    if a source cannot be read or the steps of a stream are wrong, and ``MemoryTooSmall`` if only
    the memory is too small; either has all problems of all streams. The problems have no lines yet.
    """
    problems = cache_problems(config)
    columns: dict[str, tuple[Column, ...]] = {}
    layouts: dict[str, SlotLayout] = {}
    for name, stream in config.streams.items():
        draft, python_path = whole_draft(stream), config.daemon.python_path or ()
        findings = look_at_stream(name, draft, python_path, storage, thoroughly=thoroughly)
        problems += findings.problems
        if findings.columns is not None:
            columns[name] = findings.columns
            layouts[name] = place_fields(_row_fields(stream, findings.columns), stream.batch_size)
    memory_problems = _memory_problems(config, layouts)
    if problems:
        raise ConfigInvalid(problems + memory_problems)
    if memory_problems:
        raise MemoryTooSmall(memory_problems)
    shares = _shares(config)
    rings = {}
    for name, layout in layouts.items():
        mailbox_bytes = _mailbox_bytes(config.streams[name])
        slots_max = min(SLOTS_MAX, (shares[name] - mailbox_bytes) // layout.slot_bytes)
        rings[name] = RingSize(columns[name], layout, slots_max, mailbox_bytes)
    return rings


def _row_fields(stream: StreamConfig, columns: tuple[Column, ...]) -> tuple[Field, ...]:
    sample = sample_fields(columns, stream.pipeline, stream.on_error)
    return (*sample, CHECKSUM) if stream.verify else sample


def _mailbox_bytes(stream: StreamConfig) -> int:
    return stream.source.mailbox_bytes if isinstance(stream.source, PushSource) else 0


def _shares(config: Config) -> dict[str, int]:
    """Bytes of each stream: its own, or an equal part of the rest (negative if overdrawn)."""
    own = {name: stream.memory for name, stream in config.streams.items() if stream.memory is not None}
    sharing = len(config.streams) - len(own)
    rest = (config.daemon.memory - sum(own.values())) // max(1, sharing)
    return {name: own.get(name, rest) for name in config.streams}


def _memory_problems(config: Config, layouts: dict[str, SlotLayout]) -> list[Problem]:
    """Find rings without room for two slots, and own memory that adds up to more than there is."""
    own_bytes = sum(stream.memory or 0 for stream in config.streams.values())
    sharing = [name for name, stream in config.streams.items() if stream.memory is None]
    mailboxes = {name: _mailbox_bytes(config.streams[name]) for name in layouts}
    needs = {name: SLOTS_MIN * layout.slot_bytes + mailboxes[name] for name, layout in layouts.items()}
    daemon_need = own_bytes + len(sharing) * max((needs[name] for name in sharing if name in needs), default=0)
    problems = []
    if own_bytes > config.daemon.memory:
        have = f"have {round_bytes(config.daemon.memory, floor)} for all rings together"
        remedy = f"set memory = {_setting(daemon_need)} in [daemon], or less in the streams"
        text = f"need {round_bytes(own_bytes, ceil)}, which the streams' own memory adds up to, {have}; {remedy}"
        problems.append(Problem("daemon.memory", text, meaning_of(("daemon", "memory"), {})))
    for name, share in _shares(config).items():
        if needs.get(name, 0) <= share:
            continue
        have = f"have {round_bytes(max(0, share), floor)}"
        if name in sharing:
            have += " as the stream's part of [daemon] memory"
            remedy = f"set memory = {_setting(daemon_need)} in [daemon]"
        else:
            remedy = f"set memory = {_setting(needs[name])} in [{path_text(('streams', name))}]"
        slots = f"{SLOTS_MIN} slots of {counted(layouts[name].rows, 'sample')}" + (
            " and the mailbox" if mailboxes[name] else ""
        )
        text = f"need {round_bytes(needs[name], ceil)} for {slots}, {have}; {remedy}"
        varying = [field.name for field in layouts[name].fields if field.varying]
        smaller = [f"a smaller max_shape of {' and '.join(varying)}"] if varying else []
        smaller += ["a smaller capacity"] if mailboxes[name] else []
        problems.append(_problem(name, "memory", f"{text}, or {', or '.join([*smaller, 'a smaller batch_size'])}"))
    return problems


def _problem(stream: str, key: str, message: str) -> Problem:
    """A problem with one key of a stream."""
    meaning = meaning_of(("streams", stream, key), {})
    return Problem(path_text(("streams", stream, key)), message, meaning)


def _setting(need_bytes: int) -> str:
    """The next whole MiB, as written in the file."""
    return f'"{-(-need_bytes // MEBIBYTE)}MiB"'
