"""CUDA's streams on a CPU: which access to which byte comes before which, as events order it, and what has no order.

A rank's operations run at once, one after the other, as they are told; a vector clock for each stream knows which of
them the GPU would hold back for which. An access is a fault if the last write of one of its bytes, or for a write the
last read, is not before it. Memory that a tensor lets go of is given to the next one on its stream at once, as by
torch's caching allocator, so what still uses it on another stream must be before that, too.
Source: vector clocks, Mattern 1989; the allocator, torch.Tensor.record_stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ringflash.exchange import Messages

NAMES = "caller", "second", "side", "messages", "slow messages"
_current = threading.local()  # ranks are threads


class Stream:
    """clock: how far each stream was when what this one does next may begin."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, np.zeros(len(NAMES), np.int64)

    def wait_stream(self, other: Stream) -> None:
        self.clock = np.maximum(self.clock, other.clock)

    def tick(self) -> None:
        self.clock = self.clock.copy()
        self.clock[self.number] += 1


def current(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return _current.stack[-1]


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    _current.stack.append(stream)
    try:
        yield
    finally:
        _current.stack.pop()


class Memory:
    """Of a storage. writer, written: the last write of each byte; read: the last read on each stream, [streams, n]."""

    def __init__(self, storage: torch.UntypedStorage, stream: int, used: np.ndarray) -> None:
        count = storage.nbytes()
        self.alive, self.stream = StorageWeakRef(storage), stream
        self.writer, self.written = np.zeros((2, count), np.int64)
        self.read = np.repeat(used[:, None], count, 1)

    def last(self) -> np.ndarray:
        """The last use on each stream."""
        found = self.read.max(1, initial=0)
        np.maximum.at(found, self.writer, self.written)
        return found


class Watch(TorchDispatchMode):
    """Of one rank. faults: what each access without order was."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [Stream(number) for number in range(len(NAMES))]
        self.faults: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._freed = np.zeros((len(NAMES), len(NAMES)), np.int64)  # by the stream that owned it: its last uses

    def __enter__(self) -> Watch:
        _current.stack = [self.streams[0]]
        return super().__enter__()

    def _of(self, x: torch.Tensor, is_new: bool) -> Memory:
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            gone = self._memory.pop(key)
            self._freed[gone.stream] = np.maximum(self._freed[gone.stream], gone.last())
        storage = x.untyped_storage()
        if storage._cdata not in self._memory:
            owner = current() if is_new else self.streams[0]
            used = self._freed[owner.number] * is_new
            self._memory[storage._cdata] = Memory(storage, owner.number, used)
            late = [NAMES[i] for i in np.flatnonzero(used > owner.clock)]
            if late:
                self.faults.append(f"{NAMES[owner.number]} may get memory that is in use on {late}")
        return self._memory[storage._cdata]

    def access(self, x: torch.Tensor, stream: Stream, what: str, *, writes: bool, is_new: bool = False) -> None:
        """Note it, and what it has no order with."""
        if not x.numel():
            return
        memory, size = self._of(x, is_new), x.element_size()
        places = np.array([x.storage_offset() * size])
        for count, step in zip(x.shape, x.stride(), strict=True):
            places = (places[:, None] + np.arange(count) * step * size).ravel()
        places = (places[:, None] + np.arange(size)).ravel()
        others = {NAMES[i] for i in memory.writer[places][memory.written[places] > stream.clock[memory.writer[places]]]}
        if writes:
            others |= {NAMES[i] for i in np.flatnonzero(memory.read[:, places].max(1) > stream.clock)}
            memory.writer[places], memory.written[places] = stream.number, stream.clock[stream.number]
        else:
            memory.read[stream.number, places] = stream.clock[stream.number]
        if others:
            self.faults.append(f"{what} {'writes' if writes else 'reads'} on {NAMES[stream.number]} beside {others}")

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, stream, name = kwargs or {}, current(), str(op)
        out = op(*args, **kwargs)
        returns = op._schema.returns
        if returns and all(x.alias_info is not None and not x.alias_info.is_write for x in returns):
            return out  # a view
        stream.tick()
        given = [*zip(op._schema.arguments, args, strict=False)]
        given += [(x, kwargs[x.name]) for x in op._schema.arguments if x.name in kwargs]
        kinds = [
            (x.alias_info is not None and x.alias_info.is_write, y) for x, value in given for y in tree_leaves(value)
        ]
        tensors = [(writes, y) for writes, y in kinds if isinstance(y, torch.Tensor)]
        for writes, y in sorted(tensors, key=lambda pair: pair[0]):
            if not name.startswith(("aten.empty", "aten.zeros_like", "aten.new_")):
                self.access(y, stream, name, writes=writes)
        if not any(writes for writes, _ in tensors):
            for y in tree_leaves(out):
                if isinstance(y, torch.Tensor):
                    self._of(y, True) if "empty" in name else self.access(y, stream, name, writes=True, is_new=True)
        return out


class Transport:
    """Another one, whose messages go on streams. See `exchange.Transport`."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch, self.rank, self.size = inner, watch, inner.rank, inner.size

    def second_stream(self, device: torch.device) -> Stream:
        return self._watch.streams[1]

    @contextlib.contextmanager
    def beside(self, device: torch.device, others: Any = ()) -> Iterator[None]:
        side = self._watch.streams[2]
        for other in (current(), *others):
            side.wait_stream(other)
        with on(side):
            yield

    def post(self, sends: Messages, receives: Messages, what: str, slow: bool = False) -> Arriving:
        stream = self._watch.streams[4 if slow else 3]
        stream.wait_stream(current())
        stream.tick()
        for tensors, writes in ((sends, False), (receives, True)):
            for _, x in tensors:
                self._watch.access(x, stream, what, writes=writes)
        with _disable_current_modes():
            return Arriving(self._inner.post(sends, receives, what, slow), stream)


class Arriving:
    """Messages that are there when their stream says so."""

    def __init__(self, inner: Any, stream: Stream) -> None:
        self._inner, self._end, self._is_here = inner, Stream(stream.number), False
        self._end.wait_stream(stream)

    def wait(self) -> None:
        current().wait_stream(self._end)
        if not self._is_here:
            self._is_here = True
            with _disable_current_modes():
                self._inner.wait()
