"""Batches go by DMA from the ring to a GPU. Runs in the trainer; see ``batchd_client.feed``.

    slot, registered once --(side stream, non_blocking)--> tensors on the device --(event)--> the loop's own stream
                                                              |
                                                              +-- the same event says that the batch has been read

Memory that cannot be registered goes through page-locked memory of torch's own, which costs a copy
by the CPU. Most drivers register no memory that is mapped read-only, so slots are mapped writable
there, if the daemon's operator allows it.

Invariants: a batch is held until the event behind its copies has happened, however its transfer
ends. Memory is unregistered before it is unmapped: the register holds it until then.
"""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from batchd_client.batch import Batch, Room
from batchd_client.hints import tell_once
from batchd_client.memory import SlotMemory
from batchd_client.remote import ReceiveBuffer
from batchd_client.torch.tensors import Give, Recipe, Tensors, cut, fill, is_ragged, largest_in, over, rows_in

Memory = SlotMemory | ReceiveBuffer

STEPS_AHEAD_MAX = 4
"""How many steps the loop may be ahead of the device: each has a batch in the device's memory, also if the loop never waits."""

GAP_BYTES_MAX = 65536
"""How much room that a ragged row did not need is copied along, in the mean: moving so much costs a device less than it costs
to begin a copy for each row, some microseconds. Where rows leave more, each is copied by itself, and its gap takes no memory."""

REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device's context."""
REGISTER_READ_ONLY = 8
"""``cudaHostRegisterReadOnly``: for memory that is mapped without the right to write. Few devices take it."""


class Event(Protocol):
    """A point in a stream of work: ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Has everything in front of it been done?"""

    def synchronize(self) -> None:
        """Wait until it has."""


class Runtime(Protocol):
    """What is needed of CUDA; tests have another one."""

    device: torch.device

    def register(self, address: int, size: int, flags: int) -> bool:
        """Lock memory in place, so that the device reads it by itself; False where that cannot be."""

    def unregister(self, address: int) -> None:
        """Undo ``register``, before the memory is unmapped; no matter if it was not registered."""

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory of torch's own, which stays until what is copied from it within ``aside`` has been."""

    def aside(self) -> AbstractContextManager[object]:
        """Within it, work goes to the side stream, and tensors are made for it."""

    def mark(self) -> Any:
        """An event behind what is in the side stream by now."""

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Let the caller's own stream wait for the event, and keep the memory of these tensors until it has used them."""

    def reached(self) -> Any:
        """An event behind what is in the caller's own stream by now."""


class CudaRuntime:
    """CUDA as torch has it."""

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = torch.cuda.cudart()
        self._side = torch.cuda.Stream(device)
        self.device = self._side.device  # with its number, whichever device is the current one later

    def register(self, address: int, size: int, flags: int) -> bool:
        """See ``Runtime``."""
        with torch.cuda.device(self.device):
            if int(self._runtime.cudaHostRegister(address, size, flags)) == 0:
                return True
            self._forget_error()
        return False

    def unregister(self, address: int) -> None:
        """See ``Runtime``."""
        with torch.cuda.device(self.device):
            if int(self._runtime.cudaHostUnregister(address)) != 0:
                self._forget_error()

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Runtime``."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def aside(self) -> AbstractContextManager[object]:
        """See ``Runtime``."""
        return torch.cuda.stream(self._side)

    def mark(self) -> Any:
        """See ``Runtime``."""
        return self._side.record_event()

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Runtime``."""
        own = torch.cuda.current_stream(self.device)
        own.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(own)

    def reached(self) -> Any:
        """See ``Runtime``. Who waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _forget_error(self) -> None:
        """CUDA remembers the last error until somebody asks: the next kernel's check would raise it in somebody's face."""
        try:
            torch.empty(1, device=self.device).fill_(1)
        except RuntimeError:
            return


def needs_writable(runtime: Runtime) -> bool:
    """Must memory be mapped writable for the device to read it by itself? Tried out with a page that is mapped as slots are."""
    page = _read_only_page()
    try:
        return not runtime.register(page.address, page.slot_bytes, _flags_for(page))
    finally:
        runtime.unregister(page.address)


def _read_only_page() -> SlotMemory:
    descriptor = os.memfd_create("batchd-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return SlotMemory(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC), mmap.PAGESIZE)
    finally:
        os.close(descriptor)


class RegisteredMemory:
    """The memory that has been registered with a device, each piece once.

    What an interrupt has cut off may have happened or not. So memory is held from before it is
    registered until after it is unregistered, and either is done again where nobody knows.
    """

    def __init__(self, runtime: Runtime, present: Callable[[], Iterable[Memory]]) -> None:
        """``present`` gives the memory that batches may lie in now; other memory is unregistered at the next occasion."""
        self._runtime = runtime
        self._present = present
        self._held: dict[int, Memory] = {}
        self._registered: set[int] = set()
        """Those of which it is known."""
        self._refused: set[int] = set()
        """With which flags nothing is registered here."""

    def has(self, memory: Memory, busy: Iterable[Memory]) -> bool:
        """Is the memory registered? Registers it if it can be. ``busy``: memory that is being read."""
        number, flags = id(memory), _flags_for(memory)
        if number in self._registered:
            return True
        self._forget_what_is_over(busy)
        if flags in self._refused:
            return False
        if number in self._held:
            self._runtime.unregister(memory.address)
        self._held[number] = memory
        if self._runtime.register(memory.address, memory.slot_bytes, flags):
            self._registered.add(number)
            return True
        del self._held[number]
        self._refused.add(flags)
        tell_once(_why_not(memory))
        return False

    def _forget_what_is_over(self, busy: Iterable[Memory]) -> None:
        needed = {id(one) for one in (*self._present(), *busy)}
        for number, memory in list(self._held.items()):
            if number not in needed:
                self._registered.discard(number)
                self._runtime.unregister(memory.address)
                del self._held[number]

    def let_go(self) -> None:
        """Unregister what no batch will lie in any more; nothing of it is read."""
        self._forget_what_is_over(())

    def close(self) -> None:
        """Unregister everything, once nothing of it is read any more."""
        self._present = tuple
        self.let_go()

    def abandon(self) -> None:
        """Unregister what a broken device lets go of, and hold nothing any more: it reads none of it."""
        for number, memory in list(self._held.items()):
            with suppress(RuntimeError):
                self._runtime.unregister(memory.address)
            self._registered.discard(number)
            del self._held[number]


class _Copying:
    """A batch that is being read by the device, until the event behind its copies has happened."""

    __slots__ = ("batch", "event", "memory")

    def __init__(self, batch: Batch, memory: Memory) -> None:
        self.batch = batch
        self.memory = memory
        self.event: Event | None = None


class _CudaTransfer:
    """A batch on its way to the device; see ``feed.Transfer``."""

    def __init__(
        self, placement: "CudaPlacement", lengths: list[dict[int, int]], raw: list[Tensors], event: Event
    ) -> None:
        self._placement = placement
        self._lengths = lengths
        self._raw = raw
        self._event = event

    def finish(self) -> Any:
        """See ``feed.Transfer``. The rest of the work goes to the loop's own stream."""
        return self._placement.hand_over(self._lengths, self._raw, self._event)


class CudaPlacement:
    """See above."""

    def __init__(
        self, recipes: Sequence[Recipe], give: Give, runtime: Runtime, present: Callable[[], Iterable[Memory]]
    ) -> None:
        self._recipes = recipes
        self._constants = [constant for recipe in recipes for constant in recipe.constants]
        """Read by whichever stream the loop has, so it adopts them with every batch."""
        self._give = give
        self._runtime = runtime
        self._register = RegisteredMemory(runtime, present)
        self._copying: list[_Copying] = []
        self._steps: deque[Event] = deque()
        """Where the loop's stream stood when the last batches were handed over."""

    def begin(self, batch: Batch) -> _CudaTransfer:
        """See ``feed.Placement``."""
        memory = batch.memory
        is_direct = self._register.has(memory, [one.memory for one in self._copying])
        rooms = [batch.room(recipe.name) for recipe in self._recipes]
        lengths = [largest_in(room) for room in rooms]
        if is_direct:
            copying = _Copying(batch, memory)
            self._copying.append(copying)  # first: whatever cuts us off from here on, the batch stays
            raw, event = self._copied(rooms, _copy_direct)
            copying.event = event
        else:
            try:
                raw, event = self._copied(rooms, self._copy_staged)
            finally:
                batch.release()
        return _CudaTransfer(self, lengths, raw, event)

    def hand_over(self, lengths: list[dict[int, int]], raw: list[Tensors], event: Event) -> Any:
        """What the loop gets of a batch, ready in its own stream."""
        # of a ragged field any row will do, as all of them share their memory
        read = [field[0] if isinstance(field, list) else field for field in raw if len(field)]
        self._runtime.adopt(event, [*read, *self._constants])
        self._steps.append(self._runtime.reached())
        if len(self._steps) > STEPS_AHEAD_MAX:
            self._steps.popleft().synchronize()
        tensors: list[Tensors] = []
        for recipe, lengths_of_field, field in zip(self._recipes, lengths, raw, strict=True):
            if isinstance(field, list):
                tensors.append([recipe.look(row, owned=True) for row in field])
            else:
                tensors.append(recipe.look(cut(field, lengths_of_field), owned=True))
        return self._give(tensors)

    def sweep(self, *, wait: bool = False) -> None:
        """See ``feed.Placement``."""
        self._copying = [one for one in self._copying if not self._is_over(one)]
        if wait:
            self._wait_for_all()
            self._register.let_go()

    def close(self) -> None:
        """See ``feed.Placement``. Raises what is wrong with the device; then nothing is held nevertheless."""
        try:
            self._wait_for_all()
            self._register.close()
        except Exception:  # whatever the driver raises; an interrupt is none of it: then ``close`` is called again
            self._register.abandon()
            for one in self._copying:
                one.batch.release()
            self._copying = []
            raise

    def _wait_for_all(self) -> None:
        """Give back batch by batch, the oldest first, each when it has been read."""
        while self._copying:
            oldest = self._copying[0]
            self._event_behind(oldest).synchronize()
            oldest.batch.release()
            del self._copying[0]

    def _is_over(self, one: _Copying) -> bool:
        if not self._event_behind(one).query():
            return False
        one.batch.release()
        return True

    def _event_behind(self, one: _Copying) -> Event:
        event = one.event
        if event is None:  # an interrupt cut us off before it was marked
            with self._runtime.aside():
                event = one.event = self._runtime.mark()
        return event

    def _copied(self, rooms: list[Room], copy: Callable[[Room, torch.device], Tensors]) -> tuple[list[Tensors], Event]:
        """Fields on the device, as soon as the side stream has got there."""
        with (
            torch.inference_mode(mode=False),
            self._runtime.aside(),
        ):  # the loop may get them in another mode than it is in now
            raw = [copy(room, self._runtime.device) for room in rooms]
            return raw, self._runtime.mark()

    def _copy_staged(self, room: Room, device: torch.device) -> Tensors:
        """Copied by the CPU when this returns, so that the batch may be given back."""
        if is_ragged(room):
            packed = rows_in(room).packed(self._runtime.locked, fill)
            return packed.over(_on(device, packed.values)).views()
        source = over(room.array)
        return _on(device, self._runtime.locked(source.shape, source.dtype).copy_(source))


def _copy_direct(room: Room, device: torch.device) -> Tensors:
    if not is_ragged(room):
        return _on(device, over(room.array))
    rows = rows_in(room)
    if rows.gap_bytes <= GAP_BYTES_MAX * len(rows.lengths):
        return rows.over(_on(device, rows.values)).views()
    return rows.packed(partial(_empty, device), _begin_copy).views()


def _empty(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _begin_copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.copy_(source, non_blocking=True)


def _on(device: torch.device, source: torch.Tensor) -> torch.Tensor:
    """A copy on the device of what lies in page-locked memory, which the device reads by itself."""
    return _begin_copy(source, torch.empty_like(source, device=device))


def _flags_for(memory: Memory) -> int:
    return REGISTER_PORTABLE | REGISTER_READ_ONLY if memory.page.readonly else REGISTER_PORTABLE


def _why_not(memory: Memory) -> str:
    if memory.page.readonly:
        return (
            "this GPU's driver registers no memory that is mapped read-only, so batches are copied once by the CPU on their way "
            "to it; to avoid that, set writable_slots = true in [daemon] of batchd.toml, which lets trainers of this host map "
            "the ring writable"
        )
    return (
        "the CUDA driver does not register this memory (is `ulimit -l` too low?), so batches are copied once by the CPU"
    )
