"""Layouts: which global positions each rank of a ring holds. LAYOUTS is the table; the same word is `Ring(layout=)`.

A layout is a module with the two functions of `LayoutRule`; it is pure arithmetic on numpy arrays. Segments are counted
over the P ring ranks; the Ulysses ranks of one ring rank cut its tokens into U equal runs afterwards.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from . import balanced, contiguous, striped, zigzag
from .documents import Documents


class LayoutRule(Protocol):
    """What every layout module offers."""

    def multiple(self, ring_size: int, ulysses: int) -> int:
        """The sequence length must be a multiple of this many tokens."""

    def segments(self, seq_len: int, ring_size: int, ulysses: int, work: np.ndarray | Documents) -> list[np.ndarray]:
        """The segments of each ring rank, int64 [n, 2] (global start, count), ascending; each rank S / P tokens.

        work: the documents where nothing else limits what is seen; otherwise int64 [S], how many keys each query sees.
            Read only by layouts that cut by work
        """


LAYOUTS: dict[str, LayoutRule] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "balanced": balanced,
}
