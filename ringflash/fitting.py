"""`Ring(layout="auto")`: the layout that fits a mask, or several masks, best.

Work first, then what travels: of the layouts whose heaviest rank has at most 5% more to do than the best of them, the
one that moves the fewest rows of keys and of their gradients. A window takes contiguous, plain causal attention zigzag.
Pure arithmetic: every rank chooses alike. Called by `group.Ring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import mask
from .layouts import LAYOUTS
from .routes import Plan

if TYPE_CHECKING:
    from .group import Ring

AUTO = "auto"
SLACK = 1.05  # of work, which only a measurement could call more than the bytes that it saves


def choose(intervals: list[tuple[np.ndarray, np.ndarray]], seq_len: int, ring: Ring) -> str:
    """The name of the layout for calls with these intervals, (lo, hi), int32 [S] each, over the ranks of this ring."""
    work = np.sum([(hi.astype(np.int64) - lo).clip(0) for lo, hi in intervals], 0)
    size, ulysses = ring.ring_size, ring.ulysses
    loads, rows = {}, {}
    for name, rule in LAYOUTS.items():
        if seq_len % rule.multiple(size, ulysses):
            continue
        segments = rule.segments(seq_len, size, ulysses, work)
        loads[name] = max(int(work[mask.positions(part)].sum()) for part in segments)
        plans = [Plan(segments, 0, lo, hi, arrangement=ring.arrangement, inner=ring.inner) for lo, hi in intervals]
        ways = [[sum(plan.travel("keys", down=down).rows()) for down in (False, True)] for plan in plans]
        rows[name] = sum(min(way) for way in ways)
    even = [name for name, load in loads.items() if load <= SLACK * min(loads.values())]
    return min(even, key=rows.__getitem__)
