"""`Ring(layout="auto")`: the layout that fits a mask, or several masks, best.

Time first, then what travels: of the layouts whose makespan is at most 5% longer than the shortest, the one that moves
the fewest rows of keys and of their gradients. A window takes contiguous, plain causal attention zigzag. Pure
arithmetic: every rank chooses alike. Called by `group.Ring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import makespan
from .layouts import LAYOUTS
from .layouts.documents import Documents
from .routes import Plan

if TYPE_CHECKING:
    from .arguments import Mask
    from .group import Ring

AUTO = "auto"
SLACK = 1.05  # of the makespan, which only a measurement could call worth more than the rows that it saves


def work_of(masks: list[Mask], seq_len: int) -> np.ndarray | Documents:
    """What layouts cut by, of calls with these masks; see `layouts.LayoutRule.segments`."""
    if len(masks) == 1:
        return masks[0].work(seq_len)
    every = [mask.intervals(seq_len, seq_len) for mask in masks]
    return np.sum([(hi.astype(np.int64) - lo).clip(0) for lo, hi in every], 0)


def choose(masks: list[Mask], work: np.ndarray | Documents, seq_len: int, ring: Ring) -> str:
    """The name of the layout for calls with these masks over the ranks of this ring. work: their `work_of`"""
    times, rows = {}, {}
    every = [mask.intervals(seq_len, seq_len) for mask in masks]
    for name, rule in LAYOUTS.items():
        if seq_len % rule.multiple(ring.ring_size, ring.ulysses):
            continue
        segments = rule.segments(seq_len, ring.ring_size, ring.ulysses, work)
        times[name] = sum(float(makespan.simulate(makespan.pairs(segments, lo, hi))[1].max()) for lo, hi in every)
        plans = [Plan(segments, 0, lo, hi, arrangement=ring.arrangement, inner=ring.inner) for lo, hi in every]
        ways = [[sum(plan.travel("keys", down=down).rows()) for down in (False, True)] for plan in plans]
        rows[name] = sum(min(way) for way in ways)
    even = [name for name, time in times.items() if time <= SLACK * min(times.values())]
    return min(even, key=rows.__getitem__)
