"""Tensors that a forward keeps for its backward, in host memory: out beside the compute, back one ahead of it.

A `Lane` is one kind of them, one entry a layer, needed back in the opposite order. On a GPU copies run on a stream of
their own through host memory that is page-locked once and used again in every step; on a CPU the same code copies in
turn. Called by `checkpointing`.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class Lane:
    """One kind of tensors in host memory.

    away = lane.put(tensors)        # the copy starts; the device lets go of them once the next are put
    tensors = away.get()            # they are back, and those that were put before them are on their way

    num_bytes: of host memory that it has taken so far
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
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
        away = Away(self, [x.detach() for x in tensors], self._before)
        self._last, self._before = away, weakref.ref(away)
        return away

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Host memory for that many bytes, uint8: used before, or new."""
        free = self._free.setdefault(num_bytes, [])
        if free:
            return free.pop()
        self.num_bytes += num_bytes
        return _host_memory(num_bytes, locked=device.type == "cuda")

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

    def get(self) -> list[Tensor]:
        """The tensors on the device; those that were put before them start on their way. Afterwards it holds none."""
        self._lane.forget(self)
        self.fetch()
        self._wait()
        assert self._here is not None
        tensors, self._here = self._here, None
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return tensors


def _host_memory(num_bytes: int, *, locked: bool) -> Tensor:
    """Page-locked by hand: torch's own allocator rounds sizes up to powers of two, which at 9 GB a layer is too much.

    Raises: RuntimeError if the machine locks no more.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if locked:
        buffer.zero_()  # by many threads, where locking would touch the pages by one
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
        if result != runtime.cudaError.success:
            raise RuntimeError(f"{num_bytes / 2**30:.2f} GiB of host memory cannot be page-locked: {result}")
    return buffer
