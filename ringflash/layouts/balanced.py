"""Dealt by work: every rank holds equally many tokens and, as nearly as can be, equally many pairs.

A pair is a query and a key that it sees. For packed documents, whose work no fixed pattern follows. Where nothing but
documents limits what is seen, `documents` evens every hop. Other masks are cut into blocks, dealt by their sums:
greedy longest-processing-time under equal counts, then swaps between the heaviest rank and the others while they help.
Deterministic: every rank computes the same answer.
"""

import heapq

import numpy as np

from . import documents

MAX_BLOCKS = 16  # blocks a rank of the n = P * U
MIN_BLOCK = 128  # tokens, where S / n allows it
MAX_SWAPS = 10_000


def multiple(ring_size: int, ulysses: int) -> int:
    """S must divide by n = P * U; the block is then chosen so that it divides too."""
    return ring_size * ulysses


def block(seq_len: int, ring_size: int, ulysses: int) -> int:
    """Tokens of a block: S / n in the most equal blocks, at most 16, of 128 tokens or more (any if S / n < 256)."""
    local = seq_len // (ring_size * ulysses)
    smallest = MIN_BLOCK if local >= 2 * MIN_BLOCK else 1
    count = next((c for c in range(MAX_BLOCKS, 1, -1) if local % c == 0 and local // c >= smallest), 1)
    return local // count


def segments(
    seq_len: int, ring_size: int, ulysses: int, work: np.ndarray | documents.Documents
) -> list[np.ndarray]:  # fmt: skip
    """See `layouts.LayoutRule.segments`."""
    if isinstance(work, documents.Documents):
        return documents.deal(work, seq_len, ring_size)
    size = block(seq_len, ring_size, ulysses)
    weight = work.reshape(-1, size).sum(1)
    owner = _deal(weight, ring_size)
    _swap(weight, owner, ring_size)
    return [_join(np.flatnonzero(owner == rank), size) for rank in range(ring_size)]


def _deal(weight: np.ndarray, ring_size: int) -> np.ndarray:
    """Heaviest block first, each to the lightest rank that still has room."""
    room = [len(weight) // ring_size] * ring_size
    ranks = [(0, rank) for rank in range(ring_size)]
    owner = np.empty(len(weight), np.int64)
    for index in np.argsort(-weight, kind="stable"):
        load, rank = heapq.heappop(ranks)
        owner[index] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(ranks, (load + int(weight[index]), rank))
    return owner


def _swap(weight: np.ndarray, owner: np.ndarray, ring_size: int) -> None:
    """Swap a block of the heaviest rank for the one elsewhere that lowers the larger load most; in place."""
    load = np.bincount(owner, weight, ring_size).astype(np.int64)
    for _ in range(MAX_SWAPS):
        heaviest = int(load.argmax())
        mine, theirs = np.flatnonzero(owner == heaviest), np.flatnonzero(owner != heaviest)
        if not len(theirs):
            return
        moved = weight[mine][:, None] - weight[theirs][None, :]  # how much leaves the heaviest rank by each swap
        after = np.maximum(load[heaviest] - moved, load[owner[theirs]][None, :] + moved)
        best = int(after.argmin())
        i, j = mine[best // len(theirs)], theirs[best % len(theirs)]
        if after.flat[best] >= load[heaviest]:
            return
        step = weight[i] - weight[j]
        load[heaviest] -= step
        load[owner[j]] += step
        owner[i], owner[j] = owner[j], heaviest


def _join(blocks: np.ndarray, size: int) -> np.ndarray:
    """Ascending block numbers -> segments; neighbours become one segment."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    runs = np.split(blocks, breaks)
    return np.array([[run[0] * size, len(run) * size] for run in runs], np.int64)
