"""Batches go by DMA from the ring to a GPU. Runs in the trainer; see ``batchd_client.feed``.

    slot, registered once --(side stream, non_blocking)--> tensors on the device --(event)--> the loop's own stream
                                                              |
                                                              +-- the same event says that the batch has been read

Memory that cannot be registered goes through page-locked memory of torch's own, which costs a copy by the CPU.

Invariants: a batch is held until the event behind its copies has happened, however its transfer ends. Memory is unregistered
before it is unmapped: the register holds it until then.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from batchd_client.batch import Batch, Room
from batchd_client.hints import tell_once
from batchd_client.memory import SlotMemory
from batchd_client.remote import ReceiveBuffer
from batchd_client.torch.placements import Give
from batchd_client.torch.tensors import Recipe, Tensors, cut, is_ragged, largest_in, over, rows_of

Memory = SlotMemory | ReceiveBuffer

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
        """Undo ``register``, before the memory is unmapped."""

    def aside(self) -> AbstractContextManager[object]:
        """Within it, work goes to the side stream, and tensors are made for it."""

    def mark(self) -> Any:
        """An event behind what is in the side stream by now."""

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Let the caller's own stream wait for the event, and keep the memory of these tensors until it has used them."""


class CudaRuntime:
    """CUDA as torch has it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runtime: Any = torch.cuda.cudart()
        self._side = torch.cuda.Stream(device)

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

    def _forget_error(self) -> None:
        """CUDA remembers the last error until somebody asks: the next kernel's check would raise it in somebody's face."""
        try:
            torch.empty(1, device=self.device).fill_(1)
        except RuntimeError:
            return


class Register:
    """The memory that has been registered with a device, each piece once."""

    def __init__(self, runtime: Runtime, present: Callable[[], Iterable[Memory]]) -> None:
        """``present`` gives the memory that batches may lie in now; other memory is unregistered at the next occasion."""
        self._runtime = runtime
        self._present = present
        self._known: dict[int, Memory] = {}
        self._refused = False

    def has(self, memory: Memory, busy: Iterable[Memory]) -> bool:
        """Is the memory registered? Registers it if it can be. ``busy``: memory that is being read."""
        if id(memory) in self._known:
            return True
        if self._refused:
            return False
        self._forget_what_is_over(busy)
        self._known[id(memory)] = memory
        if any(self._runtime.register(memory.address, memory.slot_bytes, flags) for flags in _flags_for(memory)):
            return True
        del self._known[id(memory)]
        self._refused = True
        tell_once(_why_not(memory))
        return False

    def _forget_what_is_over(self, busy: Iterable[Memory]) -> None:
        needed = {id(one) for one in (*self._present(), *busy)}
        for memory in [one for one in self._known.values() if id(one) not in needed]:
            self._runtime.unregister(memory.address)
            del self._known[id(memory)]

    def close(self) -> None:
        """Unregister everything, once nothing of it is read any more."""
        self._present = tuple
        self._forget_what_is_over(())


class _Copying:
    """A batch that is being read by the device, until the event behind its copies has happened."""

    __slots__ = ("batch", "event", "memory")

    def __init__(self, batch: Batch, memory: Memory) -> None:
        self.batch = batch
        self.memory = memory
        self.event: Event | None = None


class _OnItsWay:
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
        self._give = give
        self._runtime = runtime
        self._register = Register(runtime, present)
        self._copying: list[_Copying] = []

    def begin(self, batch: Batch) -> _OnItsWay:
        """See ``feed.Placement``."""
        memory = batch.memory
        direct = self._register.has(memory, [one.memory for one in self._copying])
        rooms = [batch.room(recipe.name) for recipe in self._recipes]
        copying = _Copying(batch, memory)
        if direct:
            self._copying.append(copying)  # first: whatever cuts us off from here on, the batch stays
        with self._runtime.aside():
            raw = [self._copied(room, direct=direct) for room in rooms]
            event = copying.event = self._runtime.mark()
        if not direct:
            batch.release()
        return _OnItsWay(self, [largest_in(room) for room in rooms], raw, event)

    def hand_over(self, lengths: list[dict[int, int]], raw: list[Tensors], event: Event) -> Any:
        """What the loop gets of a batch, ready in its own stream."""
        firsts = (
            field[0] if isinstance(field, list) else field for field in raw if len(field)
        )  # rows share their memory
        self._runtime.adopt(event, firsts)
        tensors: list[Tensors] = []
        for recipe, lengths_of_field, field in zip(self._recipes, lengths, raw, strict=True):
            if isinstance(field, list):
                tensors.append([recipe.look(row, owned=True) for row in field])
            else:
                tensors.append(recipe.look(cut(field, lengths_of_field), owned=True))
        return self._give(tensors)

    def sweep(self) -> None:
        """See ``feed.Placement``."""
        self._copying = [one for one in self._copying if not self._is_over(one)]

    def close(self) -> None:
        """See ``feed.Placement``."""
        if self._copying:
            with self._runtime.aside():
                self._runtime.mark().synchronize()
        for one in self._copying:
            one.batch.release()
        self._copying = []
        self._register.close()

    def _is_over(self, one: _Copying) -> bool:
        if one.event is None:  # an interrupt cut us off before it was marked
            with self._runtime.aside():
                one.event = self._runtime.mark()
        if not one.event.query():
            return False
        one.batch.release()
        return True

    def _copied(self, room: Room, *, direct: bool) -> Tensors:
        """A field on the device, as soon as the side stream has got there."""
        device = self._runtime.device
        if is_ragged(room):
            return rows_of(room, device, non_blocking=direct)
        source = over(room.array)
        if not direct:
            source = torch.empty_like(source, pin_memory=device.type == "cuda").copy_(source)
        return torch.empty_like(source, device=device).copy_(source, non_blocking=True)


def _flags_for(memory: Memory) -> tuple[int, ...]:
    is_writable = not memory.page.readonly
    return (REGISTER_PORTABLE,) if is_writable else (REGISTER_PORTABLE | REGISTER_READ_ONLY,)


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
