"""Copy batches by DMA from the ring to a GPU. Runs in the trainer; see ``batchd_client.prefetch``.

    slot, registered once --(side stream, non_blocking)--> tensors --(event)--> the loop's stream
                                                              |
                                                              +-- the same event: the batch is read

Batches in memory that cannot be registered are copied by the CPU into torch's page-locked memory
first. Some drivers register no memory that is mapped read-only (that of an H100, 580, does), so
slots are mapped writable for them, if the daemon's operator allows it.

Invariants: a batch is held until the event after its copies has happened, however its transfer
ends. Memory is unregistered before it is unmapped: ``RegisteredMemory`` holds it until then.
"""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from batchd_client.batch import Batch, WholeField
from batchd_client.hints import log_once
from batchd_client.memory import BatchMemory, SlotMemory
from batchd_client.torch.tensors import MakeItem, Recipe, Tensors, cut, fill, is_ragged, largest_in, over, rows_in
from batchd_wire.fields import BUCKETED

STEPS_AHEAD_MAX = 4
"""Steps that the loop may be ahead of the device: each keeps a batch in the device's memory."""

GAP_BYTES_MAX = 65536
"""Mean unused room per ragged row, up to which rows are copied in one piece, with their gaps.

Moving so many bytes costs a device less than starting a copy for each row, some microseconds. With
larger gaps each row is copied by itself, without its gap.
"""

REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device's context."""
REGISTER_READ_ONLY = 8
"""``cudaHostRegisterReadOnly``: for memory mapped read-only. Few devices support it."""

Event: TypeAlias = torch.cuda.Event  # a plain variable is no type where torch is not installed
T = TypeVar("T")


class CudaRuntime:
    """The CUDA functions that a placement needs; tests use a fake."""

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = torch.cuda.cudart()
        self._side = torch.cuda.Stream(device)
        self.device = self._side.device  # with its number, as the current device may change

    def register(self, address: int, size: int, flags: int) -> bool:
        """Page-lock memory for reads by the device; False if the driver refuses."""
        with torch.cuda.device(self.device):
            if int(self._runtime.cudaHostRegister(address, size, flags)) == 0:
                return True
            self._forget_error()
        return False

    def unregister(self, address: int) -> None:
        """Undo ``register`` before the memory is unmapped; nothing for unregistered memory."""
        with torch.cuda.device(self.device):
            if int(self._runtime.cudaHostUnregister(address)) != 0:
                self._forget_error()

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a page-locked tensor of ``shape`` and ``dtype`` on the host.

        Its memory is kept until the copies from it in ``aside`` are done.
        """
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def aside(self) -> AbstractContextManager[object]:
        """Make the side stream current within this context."""
        return torch.cuda.stream(self._side)

    def mark(self) -> Event:
        """Record an event after the work now in the side stream."""
        return self._side.record_event()

    def adopt(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Let the caller's stream wait for the event; keep tensors of any shape until then."""
        own = torch.cuda.current_stream(self.device)
        own.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(own)

    def reached(self) -> Event:
        """Record an event after the caller's work; a wait for it sleeps instead of spinning."""
        event = Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the check after the next kernel would raise."""
        try:
            torch.empty(1, device=self.device).fill_(1)
        except RuntimeError:
            return


def needs_writable(runtime: CudaRuntime) -> bool:
    """Try one read-only page: True if the device reads only memory mapped writable."""
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
    """The memory that is registered with a device, each piece once.

    After an interrupt it is unknown whether a call took effect. So memory is held from before it is
    registered until after it is unregistered, and an interrupted call is repeated.
    """

    def __init__(self, runtime: CudaRuntime, present: Callable[[], Iterable[BatchMemory]]) -> None:
        """``present`` lists the memory of current and future batches; no other stays registered."""
        self._runtime = runtime
        self._present = present
        self._held: dict[int, BatchMemory] = {}
        self._registered: set[int] = set()
        """Memory, by id, that is known to be registered."""
        self._refused: set[int] = set()
        """Flags that the driver refuses."""
        self._sources: dict[int, dict[tuple[str, int, int, int], torch.Tensor]] = {}
        """Tensors over the memory, by id, to copy from; by field, bucket and rows."""

    def has(self, memory: BatchMemory, busy: Iterable[BatchMemory]) -> bool:
        """Register the memory if possible; True if it is. ``busy``: memory being read."""
        number, flags = id(memory), _flags_for(memory)
        if number in self._registered:
            return True
        self.let_go(busy)
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
        log_once(_why_not(memory))
        return False

    def source(self, batch: Batch, name: str) -> torch.Tensor:
        """A tensor over a field with one shape, made once for each slot; hold the batch meanwhile.

        Only of memory that is registered.
        """
        sources = self._sources.setdefault(id(batch.memory), {})
        key = name, batch.bucket, batch.first_row, batch.samples
        found = sources.get(key)
        if found is None:
            found = sources[key] = over(batch.unleased(name))
        return found

    def let_go(self, busy: Iterable[BatchMemory] = ()) -> None:
        """Unregister memory that will hold no further batch, unless ``busy``: a copy reads it."""
        needed = {id(one) for one in (*self._present(), *busy)}
        for number, memory in list(self._held.items()):
            if number not in needed:
                self._registered.discard(number)
                self._sources.pop(number, None)
                self._runtime.unregister(memory.address)
                del self._held[number]

    def close(self) -> None:
        """Unregister everything. No copy may read it any more."""
        self._present = tuple
        self.let_go()

    def abandon(self) -> None:
        """Unregister as far as a broken device, which reads no more, allows; hold nothing."""
        for number, memory in list(self._held.items()):
            with suppress(RuntimeError):
                self._runtime.unregister(memory.address)
            self._registered.discard(number)
            self._sources.pop(number, None)
            del self._held[number]


@dataclass(slots=True)
class _Copying:
    """A batch that the device reads, until the event after its copies."""

    batch: Batch
    memory: BatchMemory
    event: Event | None = None


class _CudaTransfer(NamedTuple):
    placement: "CudaPlacement"
    lengths: list[dict[int, int]]
    raw: list[Tensors]
    numbers: list[torch.Tensor]
    event: Event

    def finish(self) -> object:
        """See ``prefetch.Transfer``. The rest of the work runs in the loop's stream."""
        return self.placement.hand_over(self.lengths, self.raw, self.numbers, self.event)


class CudaPlacement:
    """Copies batches to a GPU; see the module."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        make_item: MakeItem,
        runtime: CudaRuntime,
        present: Callable[[], Iterable[BatchMemory]],
        on_host: Sequence[Recipe] = (),
    ) -> None:
        """``on_host``: fields whose tensors stay on the host, and come behind the others."""
        self._recipes = recipes
        self._on_host = on_host
        self._constants = [constant for recipe in recipes for constant in recipe.constants]
        """Read by the loop's stream, which therefore adopts them with every batch."""
        self._make_item = make_item
        self._runtime = runtime
        self._register = RegisteredMemory(runtime, present)
        self._copying: list[_Copying] = []
        self._steps: deque[Event] = deque()
        """Events in the loop's stream at the hand-overs of the last batches."""

    def begin(self, batch: Batch) -> _CudaTransfer:
        """See ``prefetch.Placement``."""
        memory = batch.memory
        numbers = [recipe.tensor(over(batch.room(recipe.name).array), owned=False) for recipe in self._on_host]
        is_direct = self._register.has(memory, [copying.memory for copying in self._copying])
        if is_direct:
            fields = [self._direct_field(batch, recipe) for recipe in self._recipes]
            copying = _Copying(batch, memory)
            self._copying.append(copying)  # first, so that an interrupt does not lose the batch
            raw, event = self._copied(fields, _copy_direct)
            copying.event = event
        else:
            rooms = [batch.room(recipe.name) for recipe in self._recipes]
            fields = [*rooms]
            try:
                raw, event = self._copied(rooms, self._copy_staged)
            finally:
                batch.release()
        lengths = [largest_in(field) if isinstance(field, WholeField) else {} for field in fields]
        return _CudaTransfer(self, lengths, raw, numbers, event)

    def _direct_field(self, batch: Batch, recipe: Recipe) -> "WholeField | torch.Tensor":
        """What is copied of a field in registered memory."""
        if recipe.schema.varying is None or recipe.schema.varying.kind == BUCKETED:
            return self._register.source(batch, recipe.name)
        return batch.room(recipe.name)

    def hand_over(
        self, lengths: list[dict[int, int]], raw: list[Tensors], numbers: list[torch.Tensor], event: Event
    ) -> object:
        """Make the loop's item from the fields of a batch, ready in the loop's stream.

        ``raw``: the fields as in the slot, with its shapes and dtypes, on the device. ``numbers``:
        the fields that stay on the host.
        """
        # one row of a ragged field suffices: all rows share their memory
        read = [field[0] if isinstance(field, list) else field for field in raw if len(field)]
        self._runtime.adopt(event, [*read, *self._constants])
        self._steps.append(self._runtime.reached())
        if len(self._steps) > STEPS_AHEAD_MAX:
            self._steps.popleft().synchronize()
        tensors: list[Tensors] = []
        for recipe, lengths_of_field, field in zip(self._recipes, lengths, raw, strict=True):
            if isinstance(field, list):
                tensors.append([recipe.tensor(row, owned=True) for row in field])
            else:
                tensors.append(recipe.tensor(cut(field, lengths_of_field), owned=True))
        return self._make_item([*tensors, *numbers])

    def sweep(self, *, wait: bool = False) -> None:
        """See ``prefetch.Placement``."""
        self._copying = [copying for copying in self._copying if not self._is_over(copying)]
        if wait:
            self._wait_for_all()
            self._register.let_go()

    def close(self) -> None:
        """See ``prefetch.Placement``. Raises the device's error, and then holds nothing either."""
        try:
            self._wait_for_all()
            self._register.close()
        except Exception:  # any error of the driver; after an interrupt, ``close`` is called again
            self._register.abandon()
            for one in self._copying:
                one.batch.release()
            self._copying = []
            raise

    def _wait_for_all(self) -> None:
        """Release the batches, the oldest first, each when it has been read."""
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
        if event is None:  # interrupted before the event was recorded
            with self._runtime.aside():
                event = one.event = self._runtime.mark()
        return event

    def _copied(self, fields: Sequence[T], copy: Callable[[T, torch.device], Tensors]) -> tuple[list[Tensors], Event]:
        """Copy in the side stream: the device tensors, and the event after them."""
        # The loop may use the tensors in another mode than the present one.
        with torch.inference_mode(mode=False), self._runtime.aside():
            raw = [copy(field, self._runtime.device) for field in fields]
            return raw, self._runtime.mark()

    def _copy_staged(self, room: WholeField, device: torch.device) -> Tensors:
        """Copy through page-locked memory. The batch may be released once this returns."""
        if is_ragged(room):
            packed = rows_in(room).packed(self._runtime.locked, fill)
            return packed._replace(values=_on(device, packed.values)).views()
        source = over(room.array)
        return _on(device, self._runtime.locked(source.shape, source.dtype).copy_(source))


def _copy_direct(room: WholeField | torch.Tensor, device: torch.device) -> Tensors:
    if isinstance(room, torch.Tensor):
        return _on(device, room)
    if not is_ragged(room):
        return _on(device, over(room.array))
    rows = rows_in(room)
    if rows.gap_bytes <= GAP_BYTES_MAX * len(rows.lengths):
        return rows._replace(values=_on(device, rows.values)).views()
    return rows.packed(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device), _begin_copy).views()


def _begin_copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.copy_(source, non_blocking=True)


def _on(device: torch.device, source: torch.Tensor) -> torch.Tensor:
    return _begin_copy(source, torch.empty_like(source, device=device))


def _flags_for(memory: BatchMemory) -> int:
    return REGISTER_PORTABLE | REGISTER_READ_ONLY if memory.page.readonly else REGISTER_PORTABLE


def _why_not(memory: BatchMemory) -> str:
    if memory.page.readonly:
        return (
            "this GPU's driver registers no memory that is mapped read-only, so batches are copied once by the CPU on their way "
            "to it; to avoid that, set writable_slots = true in [daemon] of batchd.toml, which lets trainers of this host map "
            "the ring writable"
        )
    return (
        "the CUDA driver does not register this memory (is `ulimit -l` too low?), so batches are copied once by the CPU"
    )
