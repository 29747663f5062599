"""How even the hops of a ring are: the pairs that each rank computes at each hop, and the time that they take together.

Ranks wait for their neighbours at every hop, so equal sums are not enough: what counts is the makespan, the end of the
last rank. The model of a ring with two buffers and links that are never late; no rank, device or message is needed.
Called by `layout`, `fitting` and `layouts.documents`, and by benchmarks.

Letters: S global sequence, P ring size, h hop.
"""

from __future__ import annotations

import numpy as np

from .mask import Segments, positions


def pairs(segments: list[Segments], lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """int64 [P, P]: how many (query, key) pairs ring rank r computes at hop h, on the keys of rank (r - h) mod P.

    segments: of every ring rank; lo, hi: int32 [S], the intervals of the whole sequence
    """
    size = len(segments)
    keys = np.concatenate(segments)
    owner = np.repeat(np.arange(size), [len(part) for part in segments])
    edges = np.concatenate((keys[:, 0], keys[:, 0] + keys[:, 1]))
    found = np.empty((size, size), np.int64)
    for rank, part in enumerate(segments):
        rows = positions(part)
        low = lo[rows].astype(np.int64)
        below = _below(edges, low) - _below(edges, np.maximum(hi[rows], low))
        seen = below[len(keys) :] - below[: len(keys)]
        found[rank] = np.bincount(owner, seen, size)[(rank - np.arange(size)) % size]
    return found


def _below(edges: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64: for each edge the sum of max(0, edge - end) over ascending `ends`."""
    count = np.searchsorted(ends, edges)
    return count * edges - np.concatenate(([0], np.cumsum(ends)))[count]


def simulate(work: np.ndarray, hops: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """When each rank begins and ends each hop, [P, number of hops] each, in the unit of `work`.

    work: [P, number of hops], the time of each rank at each hop
    hops: the distances themselves, as in `routes.Route`; 0, 1, 2, ... unless given

    A rank begins a hop when it has ended the one before and the ranks that it sends to and receives from have begun
    that: only then have both buffers of the exchange been filled and emptied.
    """
    size, count = work.shape
    jumps = np.diff(np.arange(count) if hops is None else np.asarray(hops))
    rank = np.arange(size)
    start, end = np.zeros((2, count, size))
    for i, each in enumerate(work.T):
        if i:
            before, jump = start[i - 1], jumps[i - 1]
            peers = np.maximum(before[(rank - jump) % size], before[(rank + jump) % size])
            np.maximum(end[i - 1], peers, out=start[i])
        np.add(start[i], each, out=end[i])
    return start.T, end.T


def ratio(work: np.ndarray) -> float:
    """The makespan over the ideal, the same work spread evenly: 1 is perfect. 1 where there is no work.

    work: [P, P], of each rank at each hop. Ranks wait for their neighbours at hops without work too: a ring that leaves
    such hops out is never later.
    """
    total = work.sum()
    return float(simulate(work)[1].max() * len(work) / total) if total else 1.0
