"""A stand-in for CUDA that copies late, on tensors in the memory of the host.

For tests of the torch loader's way to a GPU.

    copy_(non_blocking) in ``aside`` --> queue --(event done, awaited, adopted; ``work``)--> tensor

Errors that a real device would not report are assertions here: a read of memory that is not
registered, or no longer; a read of a batch after its release; an unmap of registered memory.
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from batchd_client.torch.cuda import REGISTER_READ_ONLY

_libc = ctypes.CDLL(None)

POISON = 77
"""The value of a tensor until its copy is made."""


class Mapping(NamedTuple):
    """A part of this process's address space, as the kernel lists it."""

    start: int
    end: int
    mode: str
    inode: str


def mappings() -> list[Mapping]:
    """All mappings of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _offset, _device, inode, *_name = line.split(maxsplit=5)
        start, _, end = span.partition("-")
        found.append(Mapping(int(start, 16), int(end, 16), mode, inode))
    return found


def is_mapped(address: int, size: int) -> bool:
    """Whether there is memory at each page of this place, by one call of the kernel.

    ``mappings`` lists a thousand with torch loaded.
    """
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    return _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0


def mapping_of(address: int, size: int, among: list[Mapping]) -> Mapping | None:
    """The single mapping at this place; None if there is none or several."""
    return next((one for one in among if one.start <= address and address + size <= one.end), None)


@dataclass(eq=False)
class Registration:
    """Memory that the device can read by itself."""

    address: int
    size: int
    flags: int
    inode: str

    def covers(self, address: int, size: int) -> bool:
        return self.address <= address and address + size <= self.address + self.size


@dataclass(eq=False)
class Copy:
    """A requested copy. It holds no reference to the source that a real device would not hold."""

    target: torch.Tensor
    address: int
    bytes_then: torch.Tensor
    value: torch.Tensor
    registration: Registration | None
    locked: torch.Tensor | None


class Making(NamedTuple):
    """A tensor to be made on the device from numbers that the host has passed."""

    target: torch.Tensor
    value: torch.Tensor
    registration: None = None


class Bytes:
    """The bytes at an address now."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}


class FakeEvent:
    """A point in the queue; it reports its end after ``patience`` queries."""

    def __init__(self, cuda: "FakeCuda", end: int) -> None:
        self._cuda = cuda
        self.end = end
        self._asked = 0

    def query(self) -> bool:
        return self._cuda.call("query", self._query)

    def _query(self) -> bool:
        self._cuda.check_sound()
        self._asked += 1
        if self._asked < self._cuda.patience:
            return False
        self._cuda.work(self.end)
        return True

    def synchronize(self) -> None:
        self._cuda.call("synchronize", self._wait)

    def _wait(self) -> None:
        self._cuda.check_sound()
        self._cuda.waits += 1
        self._cuda.work(self.end)


class FakeStep:
    """A point in the loop's own stream: the device reaches it only when the host waits for it."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self._cuda.call("synchronize", self._reach)

    def _reach(self) -> None:
        self.is_reached = True


class FakeCuda:
    """The fake of the module docstring, and of ``batchd_client.torch.cuda.CudaRuntime``.

    ``takes_read_only``, ``takes_any``: the memory that it registers. ``interrupt(at, after=)``:
    ``KeyboardInterrupt`` in one of its calls, before or after the effect of the call.
    ``patience``: the number of queries until an event is done.
    """

    device = torch.device("cpu")

    def __init__(self, *, takes_read_only: bool = True, takes_any: bool = True, patience: int = 2) -> None:
        self.takes_read_only = takes_read_only
        self.takes_any = takes_any
        self.patience = patience
        self.registered: dict[int, Registration] = {}
        self.all_registered: list[Registration] = []
        self.unregistered = 0
        self.copies = {"registered": 0, "locked": 0, "blocking": 0}
        self.calls = 0
        self.faults: list[str] = []
        self.waits = 0
        """Waits of the side stream."""
        self.adopted: list[set[int]] = []
        """Addresses of the tensors that the loop's stream knows, by batch."""
        self.tried: list[int] = []
        """Addresses that were to be unregistered since the device broke down."""
        self.queue: deque[Copy | Making] = deque()
        self.steps: list[FakeStep] = []
        self._begun = 0
        self._done = 0
        self._locked: dict[int, torch.Tensor] = {}
        self._interrupt_at: int | None = None
        self._interrupt_after = False
        self._is_broken = False
        self._refuses = False

    def break_down(self, *, refuses: bool) -> None:
        """From now on no work is done, and each wait for it raises an error.

        ``refuses``: memory cannot be unregistered either.
        """
        self._is_broken = True
        self._refuses = refuses
        self.queue.clear()

    def check_sound(self) -> None:
        """Raise the error of torch for a broken device."""
        if self._is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def interrupt(self, at: int | None, *, after: bool = False) -> None:
        """Interrupt the call with number ``at`` from now on; None cancels the interrupt."""
        self._interrupt_at = None if at is None else self.calls + at
        self._interrupt_after = after

    @property
    def was_interrupted(self) -> bool:
        """Whether the interrupt has happened."""
        return self._interrupt_at is not None and self.calls >= self._interrupt_at

    # --- calls of the loader ----------------------------------------------------------------------

    def register(self, address: int, size: int, flags: int) -> bool:
        return self.call("register", lambda: self._register(address, size, flags))

    def unregister(self, address: int) -> None:
        self.call("unregister", lambda: self._unregister(address))

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.call("locked", lambda: self._lock(shape, dtype))

    def aside(self) -> "Aside":
        return self.call("aside", lambda: Aside(self))

    def mark(self) -> FakeEvent:
        return self.call("mark", lambda: FakeEvent(self, self._begun))

    def adopt(self, event: FakeEvent, tensors: Iterable[torch.Tensor]) -> None:
        owned = list(tensors)
        assert all(tensor.untyped_storage().nbytes() or not tensor.numel() for tensor in owned)
        self.adopted.append({tensor.untyped_storage().data_ptr() for tensor in owned})
        self.call("adopt", lambda: self.work(event.end))

    def reached(self) -> FakeStep:
        return self.call("reached", self._step)

    # --- inside -----------------------------------------------------------------------------------

    def call(self, name: str, effect: Callable[[], Any]) -> Any:
        """Perform a call, or interrupt it."""
        self.calls += 1
        is_interrupted = self.calls == self._interrupt_at
        if name in {"register", "unregister", "mark"}:
            self._check_mapped()
        if is_interrupted and not self._interrupt_after:
            raise KeyboardInterrupt
        result = effect()
        if is_interrupted:
            raise KeyboardInterrupt
        return result

    def work(self, end: int | None = None) -> None:
        """Make the copies up to this one; by default all of them."""
        if self.queue:
            self._check_mapped()
        while self.queue and (end is None or self._done < end):
            self._make(self.queue.popleft())
            self._done += 1

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Record a copy; the target holds other bytes until the copy is made."""
        size = source.numel() * source.element_size()
        if not size:
            return target
        self._claim(source.is_contiguous() and target.is_contiguous(), "a copy is one run of bytes")
        address = source.data_ptr()
        locked = self._locked.get(address)
        registration = next((one for one in self.registered.values() if one.covers(address, size)), None)
        self._claim(locked is not None or registration is not None, "what is copied lies in memory that is page-locked")
        then = torch.from_numpy(np.asarray(Bytes(address, size)).copy())
        self.copies["registered" if locked is None else "locked"] += 1
        self.queue.append(Copy(target, address, then, source.clone(), registration, locked))
        self._begun += 1
        target.fill_(POISON)
        return target

    def begin_making(self, value: torch.Tensor) -> torch.Tensor:
        """Record a tensor that is made from numbers; it holds others until it is made."""
        self.queue.append(Making(torch.full_like(value, POISON), value))
        self._begun += 1
        return self.queue[-1].target

    def _make(self, copy: Copy | Making) -> None:
        if isinstance(copy, Making):
            copy.target.copy_(copy.value)
            return
        if copy.locked is None:
            registration = copy.registration
            self._claim(self.registered.get(registration.address) is registration, "it is registered until it is read")
        now = torch.from_numpy(np.asarray(Bytes(copy.address, copy.bytes_then.numel())).copy())
        self._claim(torch.equal(now, copy.bytes_then), "a batch stays until it has been read")
        if copy.locked is not None:
            self._locked.pop(copy.address, None)
        copy.target.copy_(copy.value)

    def _register(self, address: int, size: int, flags: int) -> bool:
        mapping = mapping_of(address, size, mappings())
        self._claim(mapping is not None, "what is registered is mapped")
        self._claim(address not in self.registered, "memory is registered once")
        is_writable = "w" in mapping.mode
        self._claim(is_writable is not bool(flags & REGISTER_READ_ONLY), "the flags say how memory is mapped")
        if not self.takes_any or not (is_writable or self.takes_read_only):
            return False
        self.registered[address] = Registration(address, size, flags, mapping.inode)
        self.all_registered.append(self.registered[address])
        return True

    def _unregister(self, address: int) -> None:
        if self._is_broken:
            self.tried.append(address)
        registration = self.registered.pop(address, None)
        if registration is not None:
            self.unregistered += 1
            mapping = mapping_of(address, registration.size, mappings())
            is_same = mapping is not None and mapping.inode == registration.inode
            self._claim(is_same, "memory is mapped until it is unregistered, and no other in its place")
            self._claim(
                not any(copy.registration is registration for copy in self.queue), "nothing is read any more of it"
            )
        if self._refuses:
            self.check_sound()

    def _step(self) -> FakeStep:
        self.steps.append(FakeStep(self))
        return self.steps[-1]

    def _lock(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(tuple(shape), dtype=dtype)
        self._locked[memory.data_ptr()] = memory
        return memory

    def _check_mapped(self) -> None:
        for one in self.registered.values():
            self._claim(is_mapped(one.address, one.size), "memory is mapped until it is unregistered")

    def _claim(self, truth: bool, what: str) -> None:
        if not truth:
            self.faults.append(what)
            raise AssertionError(what)


class Aside(TorchFunctionMode):
    """Inside this context, copies without a waiting caller are late, and so are new tensors."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            if (options or {}).get("non_blocking"):
                return self._cuda.call("copy", lambda: self._cuda.begin_copy(*arguments))
            self._cuda.copies["blocking"] += 1
        made = function(*arguments, **(options or {}))
        return self._cuda.begin_making(made) if function is torch.tensor else made
