"""Tensors that a forward keeps for its backward, in host memory: out beside the compute, back one ahead of it.

A `Lane` is one kind of them, one entry a layer, needed back in the opposite order. On a GPU copies run on a stream of
their own through host memory that is page-locked once and used again in every step; on a CPU the same code copies in
turn. Called by `checkpointing`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from .host_memory import HostMemory


class Lane:
    """One kind of tensors in host memory.

    away = lane.put(tensors)        # the copy starts; the device lets go of them once the next are put
    tensors = away.get()            # they are back
    away.fetch_next()               # those that were put before them are on their way
    lane.reserve([num_bytes], 32, device)       # before the first of 32, so that no step waits for it

    num_bytes: of host memory that it has taken so far
    """

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._stream: torch.cuda.Stream | None = None
        self._last: Away | None = None
        self._before: weakref.ref[Away] | None = None

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

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
        """Take the host memory of `count` entries, each of tensors of so many bytes. See `HostMemory.reserve`."""
        return self._memory.reserve([*sizes] * count, device)

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Host memory for that many bytes. See `HostMemory.take`."""
        return self._memory.take(num_bytes, device)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """The next `take` may have them. What was started on the stream of copies is done before what follows there."""
        self._memory.give_back(buffers)

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

    def get(self) -> list[Tensor]:
        """The tensors on the device. Afterwards it holds none."""
        self._lane.forget(self)
        self.fetch()
        self._wait()
        assert self._here is not None
        tensors, self._here = self._here, None
        return tensors

    def fetch_next(self, *, upwards: bool = False) -> None:
        """Those that were put before these start on their way back.

        upwards: those that were put after them, which are needed next
        """
        there = self.after if upwards else self._before
        following = there() if there is not None else None
        if following is not None:
            following.fetch()
