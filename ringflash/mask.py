"""Masks as intervals, and what follows from them: tiles, ranges, hops.

Every mask of this library is two int32 numbers a query: the half-open interval `[lo, hi)` of global key positions that
the query sees. This file is the only one that knows what causal, window, documents or padding mean; everything below it
(ring, kernels) reads intervals, tiles and ranges. It is numpy on the host: no device, no communication. Asked for
intervals through `arguments.Mask` and by `ops` and `reference`, for views of a hop by `routes`.

Letters: S global sequence, L local sequence, P ring size, BQ and BK rows of a query and of a key tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

Segments = np.ndarray  # int64 [n, 2]: (global start, count), ascending, not overlapping
ALIGNMENT = 256  # a multiple of every tile: a segment that is cut at a multiple of it keeps its tiles whole
LONG_TILES = 4  # a document of fewer tiles is not worth a short tile at each of its ends


def intervals(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None = None,
    cu_seqlens: np.ndarray | None = None,
    bounds: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The interval of keys that each query sees: the intersection of all masks given.

    num_queries, num_keys: with unequal lengths query i stands at key position i + num_keys - num_queries (bottom-right)
    causal: [0, p + 1)
    window: w >= 1 keys, [p - w + 1, p + 1), or symmetric [p - w + 1, p + w) where not causal
    cu_seqlens: int32 [m + 1]; a document is [start, end), and rows from cu_seqlens[-1] on are padding
    bounds: (lo, hi), int32 [num_queries] each, any intervals that never fall
    returns (lo, hi), int32 [num_queries] each; neither ever falls along the sequence; lo >= hi sees nothing
    """
    position = np.arange(num_queries, dtype=np.int64) + (num_keys - num_queries)
    lo = np.zeros(num_queries, np.int64)
    hi = np.full(num_queries, num_keys, np.int64)
    if cu_seqlens is not None:
        lengths = np.diff(cu_seqlens)
        used = int(cu_seqlens[-1])
        lo[:used] = np.repeat(cu_seqlens[:-1], lengths)
        hi[:used] = np.repeat(cu_seqlens[1:], lengths)
    if causal:
        hi = np.minimum(hi, position + 1)
    if window is not None:
        lo = np.maximum(lo, position - window + 1)
        if not causal:
            hi = np.minimum(hi, position + window)
    if bounds is not None:
        lo = np.maximum(lo, bounds[0])
        hi = np.minimum(hi, bounds[1])
    if cu_seqlens is not None:
        # rows that bounds sent into the padding are empty as well: lo must not fall after them
        lo = np.minimum(lo, used)
        lo[used:] = hi[used:] = used
    return np.clip(lo, 0, num_keys).astype(np.int32), np.clip(hi, 0, num_keys).astype(np.int32)


def positions(segments: Segments) -> np.ndarray:
    """int64 [L]: the global position of each local token of these segments."""
    starts, counts = segments[:, 0], segments[:, 1]
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def cut(segments: Segments, block: int) -> np.ndarray:
    """Cut segments into tiles of at most `block` tokens; no tile crosses the border of a segment.

    returns int32 [num_tiles, 3]: (local start, global start, count), ascending
    """
    starts, counts = segments[:, 0], segments[:, 1]
    tiles = -(-counts // block)
    before = np.cumsum(counts) - counts
    offset = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * block
    count = np.minimum(np.repeat(counts, tiles) - offset, block)
    return np.stack((np.repeat(before, tiles) + offset, np.repeat(starts, tiles) + offset, count), 1).astype(np.int32)


def cut_at(segments: Segments, where: np.ndarray) -> Segments:
    """The same tokens in more segments: one also begins at each of these global positions."""
    return _split(segments, _rows_at(segments, where))


def _split(segments: Segments, rows: np.ndarray) -> Segments:
    """The same tokens in more segments: one also begins at each of these local rows."""
    starts, counts = segments[:, 0], segments[:, 1]
    before = np.cumsum(counts) - counts
    edges = np.unique(np.concatenate((before, rows[(rows > 0) & (rows < counts.sum())])))
    owner = np.searchsorted(before, edges, "right") - 1
    return np.stack((starts[owner] + edges - before[owner], np.diff(np.append(edges, counts.sum()))), 1)


def _rows_at(segments: Segments, where: np.ndarray) -> np.ndarray:
    """The local rows of these global positions, of those that the segments hold."""
    starts, counts = segments[:, 0], segments[:, 1]
    owner = np.searchsorted(starts, where, "right") - 1
    held = (owner >= 0) & (where < (starts + counts)[owner])
    return ((np.cumsum(counts) - counts - starts)[owner] + where)[held]


def part_of(segments: Segments, rows: slice) -> Segments:
    """The segments of these local rows."""
    starts, counts = segments[:, 0], segments[:, 1]
    before = np.cumsum(counts) - counts
    first, last = (np.clip(edge - before, 0, counts) for edge in (rows.start, rows.stop))
    return np.stack((starts + first, last - first), 1)[last > first]


class Tiles(NamedTuple):
    """Tile tables of one view, int32: numpy arrays on the host, or tensors on a device.

    q_tiles, k_tiles: [n, 3] (local start, global start, count)
    q_ranges: [num q tiles, 4] (v0, w0, w1, v1): key tiles [v0, v1) are visible to the query tile, of which [w0, w1) are
        seen whole, by every row; v0 <= w0 <= w1 <= v1, and v0 == v1 where nothing is seen
    k_ranges: [num k tiles, 4] the transpose: the same four numbers, in query tiles, for each key tile
    q_order, k_order: [n] the tiles, longest range first, so that a GPU's last wave is short
    """

    q_tiles: np.ndarray | torch.Tensor
    k_tiles: np.ndarray | torch.Tensor
    q_ranges: np.ndarray | torch.Tensor
    k_ranges: np.ndarray | torch.Tensor
    q_order: np.ndarray | torch.Tensor
    k_order: np.ndarray | torch.Tensor


def _ranges(v0: np.ndarray, w0: np.ndarray, w1: np.ndarray, v1: np.ndarray) -> np.ndarray:
    v1 = np.maximum(v0, v1)
    w0 = np.clip(w0, v0, v1)
    w1 = np.clip(w1, w0, v1)
    return np.stack((v0, w0, w1, v1), 1).astype(np.int32)


def _longest_first(ranges: np.ndarray) -> np.ndarray:
    return np.argsort(ranges[:, 0] - ranges[:, 3], kind="stable").astype(np.int32)


@dataclass(frozen=True, eq=False)
class View:
    """What the queries of one rank see of one visiting block of keys. Kernels get this and nothing else of a mask.

    lo, hi: int32 [L]: the interval of each local query, in global key positions
    q_segments, k_segments: where the local queries and the visiting keys stand in the sequence
    shares_queries, shares_keys: other views have their part in these rows, whole segments each: what belongs to a
        segment that sees nothing here, or that nobody sees here, is left alone by a kernel with `SHARES_ROWS`
    """

    lo: np.ndarray
    hi: np.ndarray
    q_segments: Segments
    k_segments: Segments
    shares_queries: bool = False
    shares_keys: bool = False
    _made: dict = field(default_factory=dict, repr=False)

    def memo(self, key, make):
        """What `make` returned when this key was first asked for: kernels keep here what they made of a view."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def of_rows(self, rows: slice) -> View:
        """What these local queries see of all the keys."""
        lo, hi, segments = self.lo[rows], self.hi[rows], part_of(self.q_segments, rows)
        return View(lo, hi, segments, self.k_segments, self.shares_queries, self.shares_keys)

    def of_keys(self, keys: slice) -> View:
        """What all queries see of these of the visiting keys."""
        segments = part_of(self.k_segments, keys)
        return View(self.lo, self.hi, self.q_segments, segments, self.shares_queries, self.shares_keys)

    def key_positions(self, device: torch.device) -> torch.Tensor:
        """int32 [number of visiting keys]: the global position of each."""
        make = lambda: torch.from_numpy(positions(self.k_segments).astype(np.int32)).to(device)  # noqa: E731
        return self.memo(("positions", device), make)

    def bounds(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(lo, hi) on a device, int32 [L] each."""
        return self.memo(device, lambda: (torch.from_numpy(self.lo).to(device), torch.from_numpy(self.hi).to(device)))

    def tiles(self, block_q: int, block_k: int, device: torch.device | None = None, *, aligned: bool = False) -> Tiles:
        """Tile tables for tiles of block_q queries and block_k keys; on the host, or on `device`; made once.

        aligned: cut also where a long document begins or ends, see `aligned_segments`
        """
        if device is not None:
            host = self.tiles(block_q, block_k, aligned=aligned)
            make = lambda: Tiles(*(torch.from_numpy(table).to(device) for table in host))  # noqa: E731
            return self.memo((block_q, block_k, aligned, device), make)
        return self.memo((block_q, block_k, aligned), lambda: self._tiles(block_q, block_k, aligned))

    def aligned_segments(self, long: int) -> tuple[Segments, Segments]:
        """(queries, keys), cut also at both ends of every document of at least `long` local rows.

        A tile across such an end visits the keys of two documents, and hides one of them from each row. A document is
        a run of rows along which `lo` never jumps; short ones stay together in tiles, which they could not fill.
        """
        jumps = np.flatnonzero(np.diff(self.lo) > 1) + 1
        runs = np.diff(np.concatenate(([0], jumps, [len(self.lo)]))) >= long
        ends = jumps[runs[:-1] | runs[1:]]
        return _split(self.q_segments, ends), cut_at(self.k_segments, self.lo[ends])

    def _tiles(self, block_q: int, block_k: int, aligned: bool) -> Tiles:
        q_segments, k_segments = self.q_segments, self.k_segments
        if aligned and len(self.lo) and len(k_segments):
            q_segments, k_segments = self.aligned_segments(LONG_TILES * max(block_q, block_k))
        q_tiles, k_tiles = cut(q_segments, block_q), cut(k_segments, block_k)
        first, last = q_tiles[:, 0], q_tiles[:, 0] + q_tiles[:, 2] - 1
        lo_first, lo_last, hi_first, hi_last = self.lo[first], self.lo[last], self.hi[first], self.hi[last]
        start, end = k_tiles[:, 1], k_tiles[:, 1] + k_tiles[:, 2]
        # visible: start < hi_last and end > lo_first; whole: start >= lo_last and end <= hi_first. All four columns
        # ascend, so each side of each condition is a search, and its transpose another.
        sees_some = lo_first < hi_last
        q_ranges = _ranges(
            np.searchsorted(end, lo_first, "right"),
            np.searchsorted(start, lo_last, "left"),
            np.searchsorted(end, hi_first, "right"),
            np.where(sees_some, np.searchsorted(start, hi_last, "left"), 0),
        )
        # the padding's empty interval may lie inside a key tile, whose range must not stretch over all the padding
        filled = np.flatnonzero(sees_some)
        k_ranges = _ranges(
            np.append(filled, len(first))[np.searchsorted(hi_last[filled], start, "right")],
            np.searchsorted(hi_first, end, "left"),
            np.searchsorted(lo_last, start, "right"),
            np.append(0, filled + 1)[np.searchsorted(lo_first[filled], end, "left")],
        )
        return Tiles(q_tiles, k_tiles, q_ranges, k_ranges, _longest_first(q_ranges), _longest_first(k_ranges))

    def pairs(self) -> int:
        """How many (query, key) pairs are visible: the work, exact."""
        at = positions(self.k_segments)
        seen = np.searchsorted(at, self.hi) - np.searchsorted(at, self.lo)
        return int(np.maximum(seen, 0).sum())

    def keys_seen(self) -> np.ndarray:
        """bool [number of visiting keys]: does any of these queries see it?"""
        at = positions(self.k_segments)
        filled = self.lo < self.hi
        changes = np.zeros(len(at) + 1, np.int64)
        np.add.at(changes, np.searchsorted(at, self.lo[filled]), 1)
        np.add.at(changes, np.searchsorted(at, self.hi[filled]), -1)
        return changes[:-1].cumsum() > 0


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank computes. hops: as in `routes.Route`; views: a View for each visit, or None without work."""

    hops: tuple[int, ...]
    views: tuple[View | None, ...]


def plan_one_device(num_keys: int, lo: np.ndarray, hi: np.ndarray) -> Plan:
    """The plan of a ring of one: all queries against all keys, whose lengths may differ."""
    if not (lo < hi).any():
        return Plan((), ())
    whole_q, whole_k = np.array([[0, len(lo)]]), np.array([[0, num_keys]])
    return Plan((0,), (View(lo, hi, whole_q, whole_k),))
