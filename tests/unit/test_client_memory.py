"""A slot in the trainer: mapped once, without a descriptor of its own, and for as long as anybody looks at it."""

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from batchd_client.memory import SlotMemory

SLOT_BYTES = 3 * 4096
NAME = "test-slot"


def slot_of(content: bytes) -> int:
    """The descriptor of a sealed slot that begins with ``content``."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, SLOT_BYTES)
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def mappings() -> int:
    """How many slots this process has mapped."""
    return Path("/proc/self/maps").read_text().count(NAME)


def test_mapped_slots_cost_a_trainer_no_descriptors() -> None:
    """So a ring may have more slots than a process may usually have descriptors."""
    before = open_descriptors()

    memories = [SlotMemory(slot_of(bytes([number])), SLOT_BYTES) for number in range(5)]

    assert open_descriptors() == before
    assert [memory.page[0] for memory in memories] == list(range(5))
    assert mappings() == 5


def test_a_slot_is_mapped_for_as_long_as_an_array_looks_at_it() -> None:
    """The last one to go ends the mapping."""
    memory = SlotMemory(slot_of(b"abc"), SLOT_BYTES)
    array = np.frombuffer(memory.page, dtype=np.uint8)
    del memory
    assert bytes(array[:3]) == b"abc"
    assert array.size == SLOT_BYTES
    assert mappings() == 1

    del array

    assert mappings() == 0


def test_a_slot_is_read_only() -> None:
    """A trainer cannot spoil what others read."""
    memory = SlotMemory(slot_of(b"abc"), SLOT_BYTES)

    with pytest.raises(TypeError, match="read-only"):
        memory.page[0] = 1
    assert not np.frombuffer(memory.page, dtype=np.uint8).flags.writeable


def test_a_slot_that_the_kernel_does_not_map_says_why() -> None:
    """A descriptor that cannot be read is refused by the kernel, not taken for memory at no address."""
    readable = slot_of(b"")
    blind = os.open(f"/proc/self/fd/{readable}", os.O_WRONLY)
    os.close(readable)

    with pytest.raises(PermissionError):
        SlotMemory(blind, SLOT_BYTES)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(blind)
