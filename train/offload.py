"""Tensors that a forward keeps for its backward, in host memory: out beside the compute, back one ahead of it.

A `Lane` is one kind of them, one entry a layer, needed back in the opposite order. On a GPU copies run on a stream of
their own through host memory that is page-locked once and used again in every step; on a CPU the same code copies in
turn. Called by `checkpointing`.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Lane:
    """One kind of tensors in host memory.

    away = lane.put(tensors)        # the copy starts; the device lets go of them once the next are put
    tensors = away.get()            # they are back, and those that were put before them are on their way
    lane.reserve([num_bytes], 32, device)       # before the first of 32, so that no step waits for it

    num_bytes: of host memory that it has taken so far
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False  # a process that ends need not
        self._coming: dict[int, Future[None]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._last: Away | None = None
        self._before: weakref.ref[Away] | None = None

    def put(self, tensors: Sequence[Tensor]) -> Away:
        """Copy contiguous tensors of one device out. The latest ones stay there too, until others are put."""
        if self._last is not None:
            self._last.leave()
        device = tensors[0].device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        before = self._before() if self._before is not None else None
        away = Away(self, [x.detach() for x in tensors], self._before)
        if before is not None:
            before.after = weakref.ref(away)
        self._last, self._before = away, weakref.ref(away)
        return away

    def reserve(self, sizes: Sequence[int], count: int, device: torch.device) -> Future[None]:
        """Take the host memory of `count` entries, each of tensors of so many bytes, in a thread beside the caller.

        To lock a page costs as much as to write it, and a GPU may have to rest meanwhile. Returns when it is there;
        what fails is raised by that, and by the first `put` that needs it.
        """

        def work() -> None:
            for _ in range(count):
                for num_bytes in sizes:
                    self._free.setdefault(num_bytes, []).append(self._new(num_bytes, device))

        pool = ThreadPoolExecutor(1)
        done = pool.submit(work)
        pool.shutdown(wait=False)
        self._coming |= dict.fromkeys(sizes, done)
        return done

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Host memory for that many bytes, uint8: used before, or new. Raises: RuntimeError, see `reserve`."""
        free = self._free.setdefault(num_bytes, [])
        if not free and num_bytes in self._coming:
            self._coming[num_bytes].result()
        return free.pop() if free else self._new(num_bytes, device)

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        self.num_bytes += num_bytes
        buffer = _host_memory(num_bytes)
        if device.type == "cuda" and num_bytes:
            _lock(buffer, device)
            self._locked.append(buffer)
        return buffer

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """The next `take` may have them. What was started on the stream of copies is done before what follows there."""
        for buffer in buffers:
            self._free[len(buffer)].append(buffer)

    def forget(self, away: Away) -> None:
        """Not to be left any more: it is about to be used."""
        if self._last is away:
            self._last = None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> torch.cuda.Event | None:
        """Start target <- source for each pair, behind all that the device was given to do. Returns when it is done."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class Away:
    """Tensors that were put into a lane. Once nobody holds it, its host memory is used again."""

    def __init__(self, lane: Lane, tensors: list[Tensor], before: weakref.ref[Away] | None) -> None:
        self._lane, self._before = lane, before
        self._device = tensors[0].device
        self._shapes = [(x.shape, x.dtype) for x in tensors]
        self._buffers = [lane.take(x.nbytes, self._device) for x in tensors]
        self.after: weakref.ref[Away] | None = None
        weakref.finalize(self, lane.give_back, self._buffers)
        self._here: list[Tensor] | None = tensors  # on the device, perhaps under way to it or from it
        self._moved = lane.copy(list(zip(self._hosts(), tensors, strict=True)), self._device)

    def _hosts(self) -> list[Tensor]:
        return [
            buffer.view(dtype).view(shape)
            for buffer, (shape, dtype) in zip(self._buffers, self._shapes, strict=True)
        ]  # fmt: skip

    def _wait(self) -> None:
        """What the device does from now on comes after the copy."""
        if self._moved is not None:
            torch.cuda.current_stream(self._device).wait_event(self._moved)

    def leave(self) -> None:
        """Let go of the tensors on the device."""
        self._wait()
        self._here = None

    def fetch(self) -> None:
        """Start the way back."""
        if self._here is None:
            self._here = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes]
            self._moved = self._lane.copy(list(zip(self._here, self._hosts(), strict=True)), self._device)

    def get(self, *, upwards: bool = False) -> list[Tensor]:
        """The tensors on the device; those that were put before them start on their way. Afterwards it holds none.

        upwards: those that were put after them, which are needed next
        """
        self._lane.forget(self)
        self.fetch()
        self._wait()
        assert self._here is not None
        tensors, self._here = self._here, None
        there = self.after if upwards else self._before
        following = there() if there is not None else None
        if following is not None:
            following.fetch()
        return tensors


def _host_memory(num_bytes: int) -> Tensor:
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
    buffer.zero_()  # by many threads, where locking would touch the pages by one
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
