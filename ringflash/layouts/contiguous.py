"""Rank r holds the r-th run of S / P tokens: even work for a window, most on the last rank for plain causal."""

import numpy as np


def multiple(ring_size: int, ulysses: int) -> int:
    """S must divide by n = P * U."""
    return ring_size * ulysses


def segments(seq_len: int, ring_size: int, ulysses: int, work: object) -> list[np.ndarray]:
    """See `layouts.LayoutRule.segments`."""
    count = seq_len // ring_size
    return [np.array([[rank * count, count]]) for rank in range(ring_size)]
