"""Memory nodes, read from a tree as the kernel has it."""

import ctypes
import os
import platform

import pytest

from batchd.runtime.numa import NO_NODES, NODES_FOLDER, Nodes
from batchd.runtime.slots import SlotPool


@pytest.fixture
def machine(tmp_path):
    """Make the tree of a machine: of each node the text of its list of CPUs."""

    def make(*lists: str):
        for number, text in enumerate(lists):
            folder = tmp_path / NODES_FOLDER / f"node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{text}\n")
        return tmp_path

    return make


def test_nodes_have_the_cpus_that_this_process_may_use(machine):
    """Nodes without one are none of its."""
    nodes = Nodes.found(machine("0-3,8-11", "4-7,12-15", "16-19", ""), usable=range(8))
    assert nodes.cpus == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}


@pytest.mark.parametrize("lists", [(), ("0-7",), ("0-3", "8-11"), ("0-3", "nonsense")])
def test_one_node_is_none(machine, lists):
    """Nor is what cannot be read: then nothing is placed."""
    nodes = Nodes.found(machine(*lists), usable=range(8))
    assert nodes.cpus == {}
    assert nodes.places() == ()
    assert nodes.node_of(os.getpid()) is None


def test_workers_are_dealt_to_nodes_in_proportion_to_their_cpus(machine):
    """Any first few of them are, too."""
    places = Nodes.found(machine("0-5", "6-8"), usable=range(9)).places()
    assert places == (0, 1, 0, 0, 1, 0, 0, 1, 0)


def test_a_trainer_is_on_the_node_of_its_cpu(machine):
    """Whatever its name is; one that is gone is on none."""
    root = machine("0-3", "4-7")
    for pid, name, cpu in ((7, "python", 2), (8, "a) b (c", 5), (9, "far", 12)):
        (root / "proc" / str(pid)).mkdir(parents=True)
        fields = ["S", *map(str, range(1, 36)), str(cpu), "0", "0"]
        (root / "proc" / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    nodes = Nodes.found(root, usable=range(8))
    assert [nodes.node_of(pid) for pid in (7, 8, 9, 10, None)] == [0, 1, None, None, None]


def test_the_field_of_the_cpu_is_the_one_of_this_kernel():
    """This process runs on one of the CPUs that it is bound to."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    os.sched_setaffinity(0, {cpu})
    try:
        nodes = Nodes({0: frozenset({cpu}), 1: frozenset({cpu + 1})})
        assert nodes.node_of(os.getpid()) == 0
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="the numbers of the calls are not known")
def test_memory_is_preferred_from_a_node_for_as_long_as_it_is_asked():
    """The kernel says so itself; node 0 is on every machine."""
    nodes = Nodes({0: frozenset({0}), 1: frozenset({1})})
    with nodes.prefers(None):
        assert policy() == 0
    with nodes.prefers(7):
        assert policy() == 0
    with nodes.prefers(0):
        assert policy() in {0, 1}, "0 where the kernel has no NUMA"
    assert policy() == 0


def policy() -> int:
    """The policy of this thread: 0 is the default, 1 a preferred node. See get_mempolicy(2)."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode = ctypes.c_int(0)
    ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value


def test_a_slot_of_a_node_is_a_slot_like_any_other():
    """Also where the kernel refuses the node."""
    for nodes in (NO_NODES, Nodes({0: frozenset({0}), 1: frozenset({1})})):
        pool = SlotPool(nodes=nodes)
        pool.create(1, 8192, 0)
        pool.create(2, 8192, 1)
        assert pool.total_bytes == 16384
        pool.close()
