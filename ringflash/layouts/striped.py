"""Stripes dealt round robin: rank r holds stripes r, r + P, r + 2P, ... Even work for masks smooth in position.

A stripe is a block of tokens, not one token, so that tiles stay whole. Source: Striped Attention, arXiv:2311.09431.
"""

import numpy as np

MAX_STRIPE = 128  # tokens; a key tile of the kernels


def multiple(ring_size: int, ulysses: int) -> int:
    """S must divide by n * b for a stripe b of S / n: that is, by n = P * U."""
    return ring_size * ulysses


def stripe(seq_len: int, ring_size: int, ulysses: int) -> int:
    """Tokens of a stripe: the largest divisor of S / n that is not above 128."""
    local = seq_len // (ring_size * ulysses)
    return next((size for size in range(min(MAX_STRIPE, local), 0, -1) if local % size == 0), 1)


def segments(seq_len: int, ring_size: int, ulysses: int, work: object) -> list[np.ndarray]:
    """See `layouts.LayoutRule.segments`."""
    size = stripe(seq_len, ring_size, ulysses)
    starts = np.arange(seq_len // size) * size
    stripes = np.stack((starts, np.full_like(starts, size)), 1)
    return [stripes[rank::ring_size] for rank in range(ring_size)]
