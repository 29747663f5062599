"""Host memory for copies of what a GPU holds: page-locked once, used again, taken ahead in a thread.

Called by `offload`, for what layers keep, and by `saver`, for what a checkpoint copies.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class HostMemory:
    """Buffers by their size.

    coming = memory.reserve([num_bytes] * 32, device)       # beside the caller
    buffer = memory.take(num_bytes, device)
    memory.give_back([buffer])

    num_bytes: taken so far
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False  # a process that ends need not
        self._coming: dict[int, list[Future[None]]] = {}

    def reserve(self, sizes: Sequence[int], device: torch.device) -> Future[None]:
        """Take buffers of so many bytes in a thread beside the caller.

        To lock a page costs as much as to write it, and a GPU may have to rest meanwhile. Returns what is done when
        they are there; what fails is raised by that, and by the first `take` that needs it.
        """

        def work() -> None:
            for num_bytes in sizes:
                self._free.setdefault(num_bytes, []).append(self._new(num_bytes, device))

        pool = ThreadPoolExecutor(1)
        done = pool.submit(work)
        pool.shutdown(wait=False)
        for num_bytes in set(sizes):
            self._coming.setdefault(num_bytes, []).append(done)
        return done

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes]: used before, or new. device: whose copies it is for. Raises: RuntimeError, OSError."""
        free, coming = self._free.setdefault(num_bytes, []), self._coming.get(num_bytes, [])
        while not free and coming:
            coming.pop(0).result()
        return free.pop() if free else self._new(num_bytes, device)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """The next `take` may have them."""
        for buffer in buffers:
            self._free[len(buffer)].append(buffer)

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        buffer = _mapped(num_bytes)
        buffer.zero_()  # the pages come now, by many threads, where locking would touch them by one
        if device.type == "cuda" and num_bytes:
            _lock(buffer, device)
            self._locked.append(buffer)
        self.num_bytes += num_bytes
        return buffer


def _mapped(num_bytes: int) -> Tensor:
    """uint8, in large pages where there are such."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _lock(buffer: Tensor, device: torch.device) -> None:
    """Page-locked by hand: torch's own allocator rounds sizes up to powers of two, which at 9 GB a layer is too much.

    Raises: RuntimeError if the machine locks no more.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):  # a thread begins on the first GPU
        result = runtime.cudaHostRegister(buffer.data_ptr(), len(buffer), 0)
    if result != runtime.cudaError.success:
        raise RuntimeError(f"{len(buffer) / 2**30:.2f} GiB of host memory cannot be page-locked: {result}")


def _unlock(buffers: list[Tensor]) -> None:
    """Before they are given back: the same addresses may be locked again."""
    if buffers:
        torch.cuda.synchronize()
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
