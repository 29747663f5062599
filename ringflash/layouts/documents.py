"""Packed documents dealt to ranks so that every hop, not only the sum of all hops, is even work.

A long document is cut zigzag over k ranks that stand P / k apart on the ring. Turned by P / k such a set of ranks is
itself, so at each of the k hops that the document needs all k ranks do the same work; sets of k ranks lie beside each
other and are filled evenly. Short documents stay whole, on one rank, at hop 0; the lightest ones fill every rank to the
same count of tokens. How short chunks may get is tried, and judged by the makespan. Used by `balanced`.

Letters: S global sequence, P ring size, L tokens of one ring rank (S / P), m documents.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import makespan

RUN = 1 / 16  # of a rank's tokens: documents that begin within so many tokens are dealt together
FILL = 1 / 6  # of all tokens: the lightest documents are kept back to fill the ranks
BAR = 1.098  # a makespan, over the ideal, that is good enough
MANY, WIDE = 2000, 8  # more documents, over more ranks: fewer tries, so that planning stays under 10 ms


class Documents(NamedTuple):
    """What the tokens of a sequence see, where nothing but documents limits it.

    borders: int [m + 1], 0 first, never falling; tokens behind the last are padding; causal: see `Ring.layout`
    """

    borders: np.ndarray
    causal: bool


class Cut(NamedTuple):
    """How far documents are cut. share and most are of a rank's ideal work.

    chunk: tokens that a chunk should have; share: a document that puts more on a rank is cut over more ranks, while
    its chunks are long enough; most: whatever their length
    """

    chunk: int
    share: float
    most: float
    tile: int


# from chunks whose tiles are full to chunks that are even: the first that reaches BAR is taken
CUTS = (
    Cut(1024, 1 / 8, 1, 128), Cut(512, 1 / 8, 1 / 2, 128), Cut(256, 1 / 8, 1 / 4, 128), Cut(512, 1 / 8, 1 / 2, 64),
    Cut(256, 1 / 4, 1 / 2, 64), Cut(128, 1 / 8, 1 / 4, 64), Cut(256, 1 / 8, 1 / 4, 1), Cut(1, 1 / 16, 1 / 16, 1),
)  # fmt: skip
WIDE_CUTS = (CUTS[0], Cut(256, 1 / 8, 1 / 4, 64), *CUTS[5:])  # over more than WIDE ranks, where a try takes longer


class Units(NamedTuple):
    """Documents, or runs of short ones, in the order of the sequence: [n] each. alone: it is one document."""

    start: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray
    alone: np.ndarray

    def of(self, chosen: np.ndarray) -> Units:
        """Some of them: indices or a mask."""
        return Units(*(x[chosen] for x in self))


def deal(documents: Documents, seq_len: int, ring_size: int) -> list[np.ndarray]:
    """The segments of each ring rank, int64 [n, 2] (global start, count), ascending; L tokens each."""
    borders = np.append(np.asarray(documents.borders, np.int64), seq_len)  # the padding is one more, which sees nothing
    start, count = borders[:-1], np.diff(borders)
    pairs = count * (count + 1) // 2 if documents.causal else count * count
    pairs[-1] = 0
    start, count, pairs = (x[count > 0] for x in (start, count, pairs))
    docs = Units(start, count, pairs, np.ones(len(start), bool))

    def tried(cut: Cut) -> tuple[float, _Dealt]:
        dealt = _Dealt(seq_len // ring_size, ring_size, documents.causal)
        dealt.run(_units(docs, dealt, cut), cut)
        return dealt.makespan(), dealt

    cuts = CUTS if ring_size <= WIDE else WIDE_CUTS if len(start) <= MANY else WIDE_CUTS[-2:]
    tries = []
    for cut in cuts:
        tries.append(tried(cut))
        if tries[-1][0] <= BAR:
            break
    else:
        tries.sort(key=lambda x: -x[0])
    return tries[-1][1].segments()


def _units(docs: Units, dealt: _Dealt, cut: Cut) -> Units:
    """Short documents in runs: few of a rank's tokens, and together hardly more work than one document may be."""
    start, count, pairs, _ = docs
    run = int(max(1, min(RUN * dealt.local, np.sqrt(2 * cut.share * pairs.sum() / dealt.size))))
    alone = (count >= run) | (pairs == 0)
    first = np.ones(len(start), bool)
    first[1:] = (start[1:] // run != start[:-1] // run) | alone[1:] | alone[:-1]
    at = np.flatnonzero(first)
    single = np.diff(np.append(at, len(start))) == 1
    return Units(start[at], np.add.reduceat(count, at), np.add.reduceat(pairs, at), single)


def _set_sizes(ring_size: int) -> list[int]:
    """1, ..., P: each a multiple of the one before, by one prime factor of P."""
    sizes, left = [1], ring_size
    for prime in range(2, ring_size + 1):
        while left % prime == 0:
            sizes.append(sizes[-1] * prime)
            left //= prime
    return sizes


@dataclass
class _Dealt:
    """One try. local: L; size: P.

    room: int64 [P], tokens that each rank still takes
    seen: [P, P], pairs of queries of a rank and keys of a rank, of all units but those in `chunks`
    chunks: pairs of [n, P] arrays, tokens of the early and the late chunk of each rank, one row a document
    pieces: [n, 3] arrays (rank, start, count)
    """

    local: int
    size: int
    causal: bool
    room: np.ndarray = field(init=False)
    seen: np.ndarray = field(init=False)
    chunks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    pieces: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = np.full(self.size, self.local)
        self.seen = np.zeros((self.size, self.size))

    def run(self, units: Units, cut: Cut) -> None:
        """Largest part of a rank first, to the set of ranks with the least work; then what was kept back."""
        sizes = _set_sizes(self.size)
        ideal = units.pairs.sum() / self.size
        level = _levels(units, cut, np.array(sizes), ideal)
        kept = _fillers(units, level, FILL * self.local * self.size)
        light = units.of(kept)
        density = light.pairs.sum() / max(1, light.tokens.sum())  # room will be filled with work of this density
        work, room = [0.0], [self.local]
        for index in reversed(range(len(sizes))):
            stride = self.size // sizes[index]  # number of sets; set j is j, j + stride, j + 2 stride, ...
            work, room = work * (stride // len(work)), room * (stride // len(room))
            chosen = np.flatnonzero((level == index) & ~kept)
            chosen = chosen[np.argsort(-units.pairs[chosen], kind="stable")]
            where, turn = _least_first(units.of(chosen), sizes[index], cut, (work, room, density))
            kept[chosen[where < 0]] = True
            self._put(units.of(chosen[where >= 0]), where[where >= 0], turn[where >= 0], (sizes[index], cut))
        heavy = kept & (level > 0)
        for one in np.flatnonzero(heavy):  # no set of ranks had room for it: all take part, each by its room
            before = np.concatenate(([0], np.cumsum(self.room)))
            counts = np.diff(before * units.tokens[one] // before[-1])
            self._zigzag(units.start[[one]], counts[None], np.arange(self.size)[None], np.array([1]))
        self._fill(units.of(kept & ~heavy))

    def _put(self, units: Units, where: np.ndarray, turn: np.ndarray, how: tuple[int, Cut]) -> None:
        """Units to the sets `where` of `size` ranks, in parts as equal as whole tiles allow."""
        size, cut = how
        stride = self.size // size
        if size == 1:
            self._take(np.stack((where, units.start, units.tokens), 1))
            self.seen += np.diag(np.bincount(where, units.pairs, self.size))
            return
        step = _step(units.tokens, size, cut)
        tiles = units.tokens // step
        place = (np.arange(size)[None] - turn[:, None]) % size
        counts = ((tiles // size)[:, None] + (place < (tiles % size)[:, None])) * step[:, None]
        counts += (place == size - 1) * (units.tokens % step)[:, None]
        self._zigzag(units.start, counts, where[:, None] + stride * np.arange(size)[None], step)

    def _zigzag(self, start: np.ndarray, counts: np.ndarray, ranks: np.ndarray, step: np.ndarray) -> None:
        """start, step: [n]; counts, ranks: [n, k]: place i of k takes chunks i and 2k - 1 - i, multiples of step."""
        early = counts // (2 * step[:, None]) * step[:, None]
        late = counts - early
        table = np.zeros((2, len(start), self.size), np.int64)
        row = np.arange(len(start))[:, None]
        table[0][row, ranks], table[1][row, ranks] = early, late
        self.chunks.append((table[0], table[1]))
        both = np.concatenate((early, late[:, ::-1]), 1)
        starts = start[:, None] + np.cumsum(both, 1) - both
        self._take(np.stack((np.concatenate((ranks, ranks[:, ::-1]), 1), starts, both), -1).reshape(-1, 3))

    def _fill(self, units: Units) -> None:
        """Give each rank in turn, of these units in order, as many tokens as it has room for."""
        unit_ends, rank_ends = np.cumsum(units.tokens), np.cumsum(self.room)
        ends = np.union1d(unit_ends, rank_ends)
        ends = ends[ends > 0]
        begins = np.concatenate(([0], ends))[: len(ends)]
        unit, rank = np.searchsorted(unit_ends, begins, "right"), np.searchsorted(rank_ends, begins, "right")
        start = units.start[unit] + begins - (unit_ends - units.tokens)[unit]
        pieces = np.stack((rank, start, ends - begins), 1)
        self._take(pieces)
        density = units.pairs / units.tokens
        cut = units.alone[unit] & (np.bincount(unit)[unit] > 1)
        self.seen += np.diag(np.bincount(rank, density[unit] * pieces[:, 2] * ~cut, self.size))
        for one in np.unique(unit[cut]):
            ranks, counts = pieces[unit == one][:, [0, 2]].T
            pairs = np.outer(counts, counts).astype(float)
            if self.causal:
                pairs = np.tril(pairs, -1) + np.diag(counts * (counts + 1) / 2)
            self.seen[np.ix_(ranks, ranks)] += pairs * (units.pairs[one] > 0)

    def _take(self, pieces: np.ndarray) -> None:
        self.pieces.append(pieces)
        self.room = self.room - np.bincount(pieces[:, 0], pieces[:, 2], self.size).astype(np.int64)

    def makespan(self) -> float:
        """Over the ideal, of the pairs of each rank at each hop; a run that the filling cuts is taken as whole."""
        pairs = self.seen.copy()
        if self.chunks:
            early, late = (np.concatenate(x).astype(float) for x in zip(*self.chunks, strict=True))
            if self.causal:
                first, second = early.T @ early, late.T @ late
                pairs += late.T @ early + np.tril(first, -1) + np.triu(second, 1)
                pairs += np.diag(np.diag(first) + np.diag(second) + (early + late).sum(0)) / 2
            else:
                pairs += (early + late).T @ (early + late)
        rank = np.arange(self.size)
        return makespan.ratio(pairs[rank[:, None], (rank[:, None] - rank) % self.size])

    def segments(self) -> list[np.ndarray]:
        """The pieces of each rank in order; neighbours become one segment."""
        pieces = np.concatenate(self.pieces)
        pieces = pieces[pieces[:, 2] > 0]
        rank, start, count = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))].T
        new = np.ones(len(rank), bool)
        new[1:] = (rank[1:] != rank[:-1]) | (start[1:] != start[:-1] + count[:-1])
        at = np.flatnonzero(new)
        table = np.stack((start[at], np.add.reduceat(count, at)), 1)
        return np.split(table, np.searchsorted(rank[at], np.arange(1, self.size)))


def _levels(units: Units, cut: Cut, sizes: np.ndarray, ideal: float) -> np.ndarray:
    """Index of the number of ranks, of `sizes`, over which each unit is cut; a run of documents is not."""
    wanted, needed = (np.searchsorted(sizes[:-1] * share * ideal, units.pairs) for share in (cut.share, cut.most))
    long = np.searchsorted(2 * cut.chunk * sizes[1:], units.tokens, "right")
    return np.where(units.alone, np.maximum(needed, np.minimum(wanted, long)), 0)


def _fillers(units: Units, level: np.ndarray, tokens: float) -> np.ndarray:
    """bool [n]: units of level 0, those of the fewest pairs a token, together at most so many tokens."""
    order = np.lexsort((units.pairs / units.tokens, level))
    kept = np.zeros(len(order), bool)
    kept[order] = np.cumsum(units.tokens[order]) <= tokens
    return kept & (level == 0)


def _step(count: np.ndarray, size: int, cut: Cut) -> np.ndarray:
    """What the chunks of documents over `size` ranks are multiples of: a tile, or a token where they are short."""
    return np.where(count >= 4 * size * cut.tile, cut.tile, 1)


def _least_first(units: Units, size: int, cut: Cut, state: tuple[list, list, float]) -> tuple[np.ndarray, np.ndarray]:
    """The set that each unit goes to, -1 where none has room, and the place in it from which on ranks take a tile more.

    state: work and room of a rank of each set, which change in place, and the work of a token of room
    """
    work, room, density = state
    step = _step(units.tokens, size, cut)
    more = units.tokens // step % size
    most = np.minimum(units.tokens, -(-(units.tokens // step) // size) * step + units.tokens % step)  # tokens of a rank
    heap = [(w + density * r, j) for j, (w, r) in enumerate(zip(work, room, strict=True))]
    heapq.heapify(heap)
    found, turns, turn = [], [], [0] * len(heap)
    for count, pairs, extra in zip(most.tolist(), (units.pairs / size).tolist(), more.tolist(), strict=True):
        full = []
        while heap and room[heap[0][1]] < count:
            full.append(heapq.heappop(heap))
        j = heap[0][1] if heap else -1
        found.append(j)
        turns.append(turn[j])
        if heap:
            work[j] += pairs
            room[j] -= count
            turn[j] = (turn[j] + extra) % size
            heapq.heapreplace(heap, (work[j] + density * room[j], j))
        for entry in full:
            heapq.heappush(heap, entry)
    return np.array(found, np.int64), np.array(turns, np.int64)
