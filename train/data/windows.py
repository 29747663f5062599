"""Packed sequences -> whole accumulation windows of one ring, made in a thread beside the step; their checksums.

The order of the sequences does not depend on the mesh: each rank keeps those that fall to its ring.
"""

import queue
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..config import Batch
from .packing import Packer, Sequence

AHEAD = 2
"""Windows that are made before they are asked for."""

PATIENCE_S = 0.1
"""How often the thread looks whether its windows are still wanted."""

Window = list[list[Sequence]]
"""For one step: `accumulation` micro-batches of `micro_batch` sequences."""


class Windows:
    """For each step, what this ring trains on. An iterator; from the first `next` on a thread works ahead of it.

    A step takes the next `global_batch` sequences, whatever the mesh, so every rank makes the same number of steps.
    Where the sequences end or cannot be read, so do the windows: what does not fill one is left out.
    """

    def __init__(self, sequences: Packer, batch: Batch, *, data_rank: int, data_size: int) -> None:
        self._sequences = sequences
        self._state = sequences.state()
        self._made: queue.Queue[tuple[Window, dict[str, Any]] | Exception] = queue.Queue(AHEAD)
        self._end: Exception | None = None
        stop = threading.Event()
        made = _windows(sequences, batch, data_rank, data_size)
        self._thread = threading.Thread(target=_fill, args=(self._made, made, stop), name="data", daemon=True)
        weakref.finalize(self, stop.set)

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Window:
        """Raises: what reading, encoding or packing raised."""
        if self._end is None:
            if self._thread.ident is None:
                self._thread.start()
            made = self._made.get()
            if not isinstance(made, Exception):
                window, self._state = made
                return window
            self._end = made
        raise self._end

    def state(self) -> dict[str, Any]:
        """Where the data stand behind the last window that was taken, in global sequences, alike on every rank.

        Plain dicts, lists, numbers and strings; `restore` goes on from there, in a mesh of any size.
        """
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; only before the first window. Raises: ValueError for a state of other data."""
        if self._thread.ident is not None:
            raise ValueError("a position in the data is restored before the first window is taken, not later")
        self._sequences.restore(state)
        self._state = self._sequences.state()


def _windows(
    sequences: Packer, batch: Batch, data_rank: int, data_size: int
) -> Iterator[tuple[Window, dict[str, Any]]]:
    while True:
        step = []
        for _ in range(batch.global_batch):
            sequence = next(sequences, None)
            if sequence is None:
                return
            step.append(sequence)
        mine = step[data_rank::data_size]
        starts = range(0, len(mine), batch.micro_batch)
        yield [mine[start : start + batch.micro_batch] for start in starts], sequences.state()


def _fill(made: queue.Queue, windows: Iterator[Any], stop: threading.Event) -> None:
    """Body of the thread: every window, then what ended them."""
    end: Exception = StopIteration()
    try:
        for window in windows:
            if not _put(made, window, stop):
                return
    except Exception as error:
        end = error
    _put(made, end, stop)


def _put(made: queue.Queue, item: Any, stop: threading.Event) -> bool:
    """Wait for room, unless nobody wants the item any more: then False."""
    while not stop.is_set():
        try:
            made.put(item, timeout=PATIENCE_S)
            return True
        except queue.Full:
            pass
    return False


def window_digest(window: Window) -> int:
    """A checksum of a whole window, below 2^32."""
    return zlib.crc32(np.asarray([sequence.digest() for micro in window for sequence in micro], np.int64).tobytes())


def check_digests(digests: np.ndarray, ring_size: int) -> None:
    """Refuse to go on when the ranks of a ring hold different batches.

    digests: [ranks] of all ranks, rings one after the other; ring_size: ranks that share a sequence
    Raises: ValueError naming the odd ranks, on every rank alike.
    """
    for first in range(0, len(digests), ring_size):
        mine = digests[first : first + ring_size].tolist()
        common = max(mine, key=mine.count)
        odd = [first + index for index, digest in enumerate(mine) if digest != common]
        if odd:
            raise ValueError(
                f"rank(s) {odd} hold another batch than the rest of their ring, "
                f"ranks {first} to {first + ring_size - 1}: all ranks of a ring must read the same files in one order"
            )
