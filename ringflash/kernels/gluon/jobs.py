"""What each program of a Gluon kernel does: one line a tile, made on the host from a view's ranges. numpy.

A job is (row, position, count, v0, f0, f1, v1, shift), as `walk.job_and_head` reads it. Called by `launch`.
"""

from __future__ import annotations

import heapq

import numpy as np

from ...mask import Tiles, View
from .tiling import Tiling

NUM_SMS = 132  # of the largest Hopper; a program of these kernels has one to itself
BY_KEY = ("keys", "wide keys", "fused", "fused in turns")  # kernels whose job is a key tile
PASSING = ("forward", "forward in turns")  # whose consumers pass over what they do not see
SECTION_BYTES = 2**25  # what the programs of a section share should stay in the L2, which is 50 MB
SPILL_COST = 0.03
LONG_ROUNDS = 24  # a grid of so many programs an SM ends evenly enough
JOB_STEPS = 1.5  # what a job costs besides its steps, in steps
COUNT_BITS, PASSED_BITS = 9, 7  # of a job's count where consumers pass over: the rows, and above them steps


def jobs_by_query(view: View, tiles: Tiles, block_k: int, num_consumers: int = 0) -> np.ndarray:
    """What each program of a query tile does, the longest first: int32 [n, 8], see `walk.job_and_head`.

    A short key tile needs the mask, also where it is seen whole: the range without a mask ends at the first of them.
    num_consumers: how many share the tile, 64 rows each: `count` then says also what each passes over, see `_packed`
    """
    v0, f0, w1, v1 = tiles.q_ranges.T
    short = np.append(np.flatnonzero(tiles.k_tiles[:, 2] < block_k), len(tiles.k_tiles))
    f1 = np.minimum(w1, short[np.searchsorted(short, f0)])
    row, position, count = tiles.q_tiles.T
    passed = [_passed(view, tiles, f1, 64 * c, 64 * c + 64) for c in range(num_consumers)]
    jobs = np.stack((row, position, _packed(count, passed), v0, f0, f1, v1, np.zeros_like(v0)), 1)
    return jobs.astype(np.int32)[tiles.q_order]


def _passed(view: View, tiles: Tiles, f1: np.ndarray, begin: int, end: int) -> np.ndarray:
    """How many of each query tile's first steps show nothing to its rows begin ... end - 1; all if there are none.

    Steps begin at the right end, with tiles whose first key stands behind the last that these rows see.
    """
    start, _, count = tiles.q_tiles.T
    v0, _, _, v1 = tiles.q_ranges.T
    hi = view.hi[start + np.minimum(end, count) - 1]
    unseen = v1 - np.maximum(np.searchsorted(tiles.k_tiles[:, 1], hi), f1)
    return np.where(begin < count, np.clip(unseen, 0, v1 - v0), v1 - v0)


def _packed(count: np.ndarray, passed: list[np.ndarray]) -> np.ndarray:
    """The rows of a tile, and above them what each consumer passes over: as much of it as the bits hold."""
    for c, steps in enumerate(passed):
        count = count + (np.minimum(steps, 2**PASSED_BITS - 1) << (COUNT_BITS + PASSED_BITS * c))
    return count


def jobs_by_key(tiles: Tiles, block_k: int) -> np.ndarray:
    """The same of a key tile.

    Behind the end of a short tile lie another tile's keys, which dq must not see: all its steps are masked. The plain
    steps start at another place in each program, so that programs which run side by side do not all add to the same
    rows of dq at once.
    """
    v0, f0, f1, v1 = tiles.k_ranges.T
    short = tiles.k_tiles[:, 2] < block_k
    f0, f1 = np.where(short, v1, f0), np.where(short, v1, f1)
    shift = 2 * np.arange(len(v0), dtype=np.int32) % np.maximum(f1 - f0, 1)
    return np.stack((*tiles.k_tiles.T, v0, f0, f1, v1, shift), 1)[tiles.k_order]


def jobs_of(kernel: str, view: View, tiles: Tiles, tiling: Tiling) -> np.ndarray:
    """`jobs_by_key` or `jobs_by_query`, as the kernel takes them."""
    if kernel in BY_KEY:
        return jobs_by_key(tiles, tiling.block_k)
    return jobs_by_query(view, tiles, tiling.block_k, tiling.num_consumers if kernel in PASSING else 0)


def evening_heads(lengths: np.ndarray) -> int:
    """The tiles of so many heads keep the card busy for twice the time of the longest; 1 where tiles are alike.

    lengths: int [tiles], the steps of each tile of one head
    """
    longest, total = int(lengths.max(initial=0)), int(lengths.sum())
    is_uneven = longest * int((lengths > 0).sum()) > 1.25 * total
    return -(-2 * NUM_SMS * longest // total) if is_uneven else 1


def makespan(lengths: np.ndarray, num_heads: int, section: int, num_programs: int = NUM_SMS) -> float:
    """Steps until the last program of a grid ends, in the order of `walk.job_and_head`: each to whoever is free first.

    lengths: int [tiles], of one head, the longest first
    """
    costs = lengths + JOB_STEPS
    free = [0.0] * num_programs
    for cost in np.concatenate((np.tile(costs, num_heads - section), np.repeat(costs, section))).tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def section_of(lengths: np.ndarray, num_heads: int, head_bytes: int) -> int:
    """How many heads should end a grid together: the more, the more evenly; the fewer, the more of what their programs
    share stays in the L2. Beyond SECTION_BYTES each doubling is taken to cost SPILL_COST of the time.

    lengths: as in `makespan`; head_bytes: what the programs of one head read again and again
    """
    most = min(evening_heads(lengths), num_heads)
    fits = min(max(SECTION_BYTES // head_bytes, 1), most)
    if fits == most or len(lengths) * num_heads > LONG_ROUNDS * NUM_SMS:
        return fits

    def cost(section: int) -> float:
        return makespan(lengths, num_heads, section) * (1 + SPILL_COST * np.log2(max(section / fits, 1)))

    doublings = [fits * 2**i for i in range(10) if fits * 2**i < most]
    return min((*doublings, most), key=cost)
