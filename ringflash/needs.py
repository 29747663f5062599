"""Who needs which tokens: the keys that the queries of each rank see, or the queries that see the keys of each rank.

From intervals and segments alone, so every rank knows it of all. numpy on the host. Called by `routes`.

Letters: P ring size, S global sequence, E elements. An element is a run of tokens of one owner which the same ranks
need.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .arrangements import Geometry
from .mask import Segments, positions

FEW = 4  # runs that are copied, or sent, one by one; of more an index is made, or one message
MANY = 12  # runs of two blocks beside each other that are still copied one by one: by index they are copied twice
NOBODY = np.zeros(0, np.int64)  # no elements


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a block, which has `of`. runs: int64 [n, 2] (first, count), ascending, none next to another."""

    runs: np.ndarray
    of: int
    _made: dict = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """How many."""
        return int(self.runs[:, 1].sum())

    @property
    def all(self) -> bool:
        """The whole block."""
        return self.count == self.of

    @property
    def span(self) -> slice | None:
        """The rows as a slice; None where they are several runs."""
        if len(self.runs) > 1:
            return None
        first, count = self.runs[0].tolist() if len(self.runs) else (0, 0)
        return slice(first, first + count)

    def places(self) -> list[tuple[slice, slice]]:
        """(among these rows, in the block) of each run, if they are few; otherwise none. Made once."""
        if "places" not in self._made:
            begin = (self.runs[:, 1].cumsum() - self.runs[:, 1]).tolist()
            runs = zip(begin, self.runs.tolist(), strict=True) if few(self.runs) else ()
            self._made["places"] = [(slice(b, b + n), slice(a, a + n)) for b, (a, n) in runs]
        return self._made["places"]

    def beside(self, other: Rows) -> list[tuple[slice, slice]]:
        """(in this block, in the other) of the same rows, run by run, where runs of both go on; [] if they are not few.

        other: as many rows of another block. Made once for each.
        """

        def make() -> list[tuple[slice, slice]]:
            edges = np.unique(np.concatenate([np.append(0, rows.runs[:, 1].cumsum()) for rows in (self, other)]))
            places = [rows.at(edges[:-1]).tolist() for rows in (self, other)]
            runs = zip(*places, np.diff(edges).tolist(), strict=True) if len(edges) <= MANY else ()
            return [(slice(a, a + n), slice(b, b + n)) for a, b, n in runs]

        return self.with_(other, "beside", make)

    def with_(self, other: Rows, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned when this key was first asked for together with other rows.

        They are not kept: rows that kept each other, or themselves, would hold their tables, on a GPU, too, until the
        garbage collector comes by.
        """
        at = key, weakref.ref(other)  # equal only while they live, unlike an id, which the next object may get
        if at not in self._made:
            self._made[at] = make()
        return self._made[at]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy makes its own: what was made belongs to these rows and to others of which it knows nothing."""
        return Rows, (self.runs, self.of)

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """Where in the block these of the rows are."""
        ends = self.runs[:, 1].cumsum()
        run = np.searchsorted(ends, numbers, "right")
        return self.runs[run, 0] + numbers - (ends - self.runs[:, 1])[run]

    def before(self, places: np.ndarray) -> np.ndarray:
        """How many of the rows come before each of these places in the block."""
        first, count = np.append(0, self.runs[:, 0]), np.append(0, self.runs[:, 1])
        run = np.searchsorted(self.runs[:, 0], places, "right")
        return (count.cumsum() - count)[run] + np.minimum(places - first[run], count[run])

    @property
    def others(self) -> Rows:
        """The rest of the block. Made once."""
        if "others" not in self._made:
            begin, end = np.append(0, self.runs.sum(1)), np.append(self.runs[:, 0], self.of)
            filled = begin < end
            self._made["others"] = Rows(np.stack((begin, end - begin), 1)[filled], self.of)
        return self._made["others"]

    def index(self, device: torch.device) -> torch.Tensor:
        """int64 [count] on a device, made once."""
        if device not in self._made:
            self._made[device] = torch.from_numpy(positions(self.runs)).to(device)
        return self._made[device]


def few(runs: np.ndarray) -> bool:
    """Are these runs worth a copy, or a message, each?"""
    return len(runs) <= FEW


class Needs(NamedTuple):
    """The sequence in elements, ascending, and who needs them. owner, start, length: int64 [E]; seen: bool [P, E]."""

    owner: np.ndarray
    start: np.ndarray
    length: np.ndarray
    seen: np.ndarray

    def at(self, geometry: Geometry, hop: int) -> np.ndarray:
        """bool [E]: which elements are needed where they stand after this hop."""
        return self.seen[geometry.holder(self.owner, hop), np.arange(len(self.owner))]

    def segments(self, elements: np.ndarray) -> Segments:
        """These elements as segments, neighbours joined."""
        starts, ends = self.start[elements], (self.start + self.length)[elements]
        if not len(starts):
            return np.zeros((0, 2), np.int64)
        breaks = np.flatnonzero(starts[1:] != ends[:-1])
        begin, end = starts[np.concatenate(([0], breaks + 1))], ends[np.append(breaks, len(ends) - 1)]
        return np.stack((begin, end - begin), 1)

    def rows_before(self, positions: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """How many tokens of the elements `whole` come before each of these positions, at which some of them begin."""
        counts = self.length[whole]
        return (np.cumsum(counts) - counts)[np.searchsorted(self.start[whole], positions)]

    def rows(self, part: np.ndarray, whole: np.ndarray) -> Rows:
        """Where the tokens of the elements `part` lie among those of `whole`."""
        counts = self.length[whole]
        slots = np.searchsorted(whole, part)
        begin = (np.cumsum(counts) - counts)[slots]
        end = begin + counts[slots]
        if not len(begin):
            return Rows(np.zeros((0, 2), np.int64), int(counts.sum()))
        breaks = np.flatnonzero(begin[1:] != end[:-1])
        begin, end = begin[np.concatenate(([0], breaks + 1))], end[np.append(breaks, len(end) - 1)]
        return Rows(np.stack((begin, end - begin), 1), int(counts.sum()))


def runs_of_keys(lo: np.ndarray, hi: np.ndarray, queries: list[Segments]) -> list[np.ndarray]:
    """The keys that each rank's queries see, int64 [n, 2] (begin, end) a rank: ascending, none next to another."""
    parts = np.concatenate(queries)
    owner = np.repeat(np.arange(len(queries)), [len(part) for part in queries])
    # between two rows of a segment there is a gap where the next one begins behind the end of this one
    gaps = np.flatnonzero(lo[1:] > hi[:-1]) + 1
    edges = np.unique(np.concatenate((parts[:, 0], parts.sum(1), gaps)))
    order = np.argsort(parts[:, 0], kind="stable")
    where = order[np.searchsorted(parts[order, 0], edges[:-1], "right") - 1]
    begin, end, owners = lo[edges[:-1]].astype(np.int64), hi[edges[1:] - 1].astype(np.int64), owner[where]
    return [_joined(begin[owners == rank], end[owners == rank]) for rank in range(len(queries))]


def runs_of_queries(lo: np.ndarray, hi: np.ndarray, keys: list[Segments]) -> list[np.ndarray]:
    """The rows that see any key of each rank, as `runs_of_keys`; rows that see nothing at all may lie among them."""
    runs = []
    for part in keys:
        first, end = part[:, 0].astype(hi.dtype), part.sum(1).astype(lo.dtype)  # else numpy would copy lo and hi
        runs.append(_joined(np.searchsorted(hi, first, "right"), np.searchsorted(lo, end, "left")))
    return runs


def _joined(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Runs whose begins and ends never fall -> those that are not empty, joined where they touch."""
    filled = begin < end
    begin, end = begin[filled], end[filled]
    if not len(begin):
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(begin[1:] > end[:-1])
    return np.stack((begin[np.concatenate(([0], breaks + 1))], end[np.append(breaks, len(end) - 1)]), 1)


def undivided(lo: np.ndarray, hi: np.ndarray, segments: list[Segments]) -> np.ndarray:
    """Parts of the sequence that see nothing of the rest, and of which it sees nothing, where one rank has all of them.

    A whole document, say. int64 [n, 2] (begin, end), ascending, joined where they touch.
    """
    where = np.arange(1, len(lo), dtype=lo.dtype)
    cuts = np.flatnonzero((lo[1:] >= where) & (hi[:-1] <= where)) + 1
    begin, end = np.append(0, cuts), np.append(cuts, len(lo))
    parts, owners = np.concatenate(segments), np.repeat(np.arange(len(segments)), [len(part) for part in segments])
    order = np.argsort(parts[:, 0], kind="stable")
    first = np.flatnonzero(np.diff(owners[order], prepend=-1))
    starts = parts[order, 0][first]
    ends = np.append(starts[1:], len(lo))
    held = end <= ends[np.searchsorted(starts, begin, "right") - 1]
    return _joined(begin[held], end[held])


def needs_of(
    what: str, lo: np.ndarray, hi: np.ndarray, segments: list[Segments], borders: np.ndarray = NOBODY
) -> Needs:  # fmt: skip
    """Which keys each rank needs for its queries, or which queries for its keys.

    lo, hi: int32 [S], the intervals of the whole sequence; segments: of every ring rank
    borders: positions at which no element goes on
    """
    extra = borders
    if what == "queries":
        runs = runs_of_queries(lo, hi, segments)
        extra = np.concatenate((borders, np.flatnonzero(np.diff(lo < hi)) + 1))
    else:
        runs = runs_of_keys(lo, hi, segments)
    parts = np.concatenate(segments)
    edges = np.unique(np.concatenate((parts[:, 0], parts.sum(1), extra, *(run.ravel() for run in runs))))
    start = edges[:-1]
    owners = np.repeat(np.arange(len(segments)), [len(part) for part in segments])
    order = np.argsort(parts[:, 0], kind="stable")
    owner = owners[order[np.searchsorted(parts[order, 0], start, "right") - 1]]
    seen = np.stack([inside(start, run) for run in runs])
    if what == "queries":
        seen &= (lo < hi)[start]
    return Needs(owner, start, np.diff(edges), seen)


def inside(start: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """bool: does what starts at each of these positions lie in a run?"""
    if not len(runs):
        return np.zeros(len(start), bool)
    at = np.searchsorted(runs[:, 0], start, "right") - 1
    return (at >= 0) & (start < runs[at, 1])
