"""The memory nodes of this machine: whose CPUs these are, and whose memory. Daemon; no library.

    /sys/devices/system/node/node*/cpulist ∩ the affinity of this process -> nodes
    worker's place -> node     trainer's process -> node     slot -> memory of a node

A machine with one node, or a process that may use the CPUs of one alone, has no nodes here: then
there is nothing to place. Sources: Linux' Documentation/ABI/stable/sysfs-devices-node, proc(5),
set_mempolicy(2).

Invariant: a missing or malformed file means "no nodes", or "on no node", never an error.
"""

import ctypes
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NODES_FOLDER = "sys/devices/system/node"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1
_LAST_CPU_AT = 36
"""Of the fields of /proc/PID/stat behind the name in brackets, from 0."""
_MASK_BITS = 1024


class Nodes:
    """See the module. ``cpus``: those of each node that this process may use."""

    def __init__(self, cpus: Mapping[int, frozenset[int]], filesystem: Path = Path("/")) -> None:
        self.cpus = dict(cpus) if len(cpus) > 1 else {}
        self._node_of_cpu = {cpu: node for node, own in self.cpus.items() for cpu in own}
        self._proc = filesystem / "proc"

    @classmethod
    def found(cls, filesystem: Path = Path("/"), usable: Collection[int] | None = None) -> "Nodes":
        """Those of the machine; ``usable``: the CPUs of this process, if not those it has."""
        mine = frozenset(os.sched_getaffinity(0) if usable is None else usable)
        cpus = {}
        for folder in sorted((filesystem / NODES_FOLDER).glob("node[0-9]*")):
            own = _cpu_list(folder / "cpulist") & mine
            if own and folder.name[4:].isdecimal():
                cpus[int(folder.name[4:])] = own
        return cls(cpus, filesystem)

    def places(self) -> tuple[int, ...]:
        """The node of each worker's place, in turn: each node in proportion to its CPUs."""
        turns = [((turn + 0.5) / len(own), node) for node, own in self.cpus.items() for turn in range(len(own))]
        return tuple(node for _turn, node in sorted(turns))

    def node_of(self, pid: int | None) -> int | None:
        """The node of the CPU that a process ran on last; None if that is not known."""
        if not self.cpus or pid is None:
            return None
        try:
            fields = (self._proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            return self._node_of_cpu.get(int(fields[_LAST_CPU_AT]))
        except (OSError, IndexError, ValueError):
            return None

    @contextmanager
    def prefers(self, node: int | None) -> Iterator[None]:
        """Take memory from a node meanwhile, while it has some; None: as always."""
        if node is None or node not in self.cpus or not _set_policy(_PREFERRED, node):
            yield
            return
        try:
            yield
        finally:
            _set_policy(_DEFAULT, None)


NO_NODES = Nodes({})


def _set_policy(mode: int, node: int | None) -> bool:
    """Set the policy of this thread; false where the kernel or the machine has none."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or (node or 0) >= _MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(0 if node is None else _MASK_BITS)
    done: int = ctypes.CDLL(None).syscall(number, mode, None if node is None else mask, bits)
    return done == 0


def _cpu_list(file: Path) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it: 0-3,8-11."""
    try:
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return frozenset(cpu for first, _dash, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
