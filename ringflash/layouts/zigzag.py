"""Rank r holds chunks r and 2P - 1 - r of 2P: early and late tokens together, even work for plain causal attention.

Source: zigzag of zhuzilin/ring-flash-attention, "head-tail" in PyTorch, DualChunkSwap in TransformerEngine.
"""

import numpy as np


def multiple(ring_size: int, ulysses: int) -> int:
    """S must divide by 2n, n = P * U."""
    return 2 * ring_size * ulysses


def segments(seq_len: int, ring_size: int, ulysses: int, work: object) -> list[np.ndarray]:
    """See `layouts.LayoutRule.segments`."""
    count = seq_len // (2 * ring_size)
    return [np.array([[rank * count, count], [(2 * ring_size - 1 - rank) * count, count]]) for rank in range(ring_size)]
