"""What travels round a ring, between which ranks, and no row that nobody needs: the hops of a call.

A block (keys and values, or queries with what belongs to them) visits the ranks that need it, see `needs`; which rank
gets it from whom is one of the `arrangements`. Every rank derives all of it alone, from layout and mask. numpy on the
host, no device, no communication. Made by `ops`; what comes out are the records of `trips`.

Letters: P ring size, S global sequence, E elements; hops as in `arrangements`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from .arrangements import ARRANGEMENTS, AT_ONCE, HOME, Geometry
from .mask import Segments, View, cut_at, plan_one_device, positions
from .needs import NOBODY, Needs, Rows, few, inside, needs_of, undivided
from .trips import FIRST, REST, WHOLE, Message, Route, Trip, Visit

UNIT_BYTES = 16  # what TMA wants of starts and strides: parts of a row of bytes begin at multiples of it

TRAVELLERS = {"keys": "keys and values", "queries": "queries"}


class Travel:
    """The sets of elements that travel along each leg, for all ranks.

    seen, kept, carried: bool [E] a leg: needed at its end; in the block that goes there: what this and all later ends
    need, so it only shrinks; in the gradients that leave it: what this and all earlier ends touched, so it only grows
    """

    def __init__(self, needs: Needs, geometry: Geometry, arrangement: str, *, down: bool) -> None:
        self.needs, self.geometry = needs, geometry
        hops = [hop for hop in range(geometry.size) if needs.at(geometry, hop).any()]
        self.hops = geometry.ordered(hops, down)
        self.legs = ARRANGEMENTS[arrangement]([hop for hop in self.hops if hop], geometry.inner)
        self.seen = [needs.at(geometry, leg.hop) for leg in self.legs]
        self.kept, self.carried = ([seen.copy() for seen in self.seen] for _ in range(2))
        for i, leg in reversed(list(enumerate(self.legs))):
            if leg.parent != HOME:
                self.kept[leg.parent] |= self.kept[i]
        for i, leg in enumerate(self.legs):
            if leg.sink != HOME:
                self.carried[leg.sink] |= self.carried[i]

    def rows(self) -> tuple[int, int]:
        """Rows of blocks and rows of gradients that all ranks send together."""
        length = self.needs.length
        kept, carried = (int(sum(length[held].sum() for held in sets)) for sets in (self.kept, self.carried))
        return kept, carried


class Walk:
    """One rank's visits and trips, out of a `Travel`. Elements are numbers in `needs`, always ascending."""

    def __init__(self, travel: Travel, rank: int, what: str) -> None:
        self.travel, self.rank, self.what = travel, rank, TRAVELLERS[what]
        self.offset = int(0 in travel.hops)  # the own block is the first visit
        owner = travel.needs.owner
        self.owned = [np.flatnonzero(owner == other) for other in range(travel.geometry.size)]
        self._here: dict[tuple[int, int], np.ndarray] = {}
        self.groups: dict[int, list[int]] = {}
        for i, leg in enumerate(travel.legs):
            self.groups.setdefault(leg.visit, []).append(i)

    def elements(self, sets: list[np.ndarray], leg: int, owner: int) -> np.ndarray:
        """Of the block of `owner`, what is in the set of this leg."""
        mine = self.owned[owner]
        return mine[sets[leg][mine]]

    def here(self, sets: list[np.ndarray], visit: int) -> np.ndarray:
        """The elements that stand here at this visit, or leave from home."""
        key = (id(sets), visit)
        if key not in self._here:
            legs = self.travel.legs
            if visit == HOME:
                kept = [self.elements(sets, i, self.rank) for i, leg in enumerate(legs) if leg.parent == HOME]
            else:
                kept = [self.elements(sets, i, self._owner(legs[i].hop)) for i in self.groups[visit]]
            self._here[key] = kept[0] if len(kept) == 1 else np.unique(np.concatenate([NOBODY, *kept]))
        return self._here[key]

    def _owner(self, hop: int) -> int:
        return int(self.travel.geometry.owner(self.rank, hop))

    def _message(self, sets: list[np.ndarray], leg: int, hop: int, other: int, whole: np.ndarray) -> list[Message]:
        """At most one: what travels along `leg` of the block that stands here after `hop`, and there after `other`."""
        owner = self._owner(hop)
        elements = self.elements(sets, leg, owner)
        if not len(elements):
            return []
        peer = int(self.travel.geometry.holder(owner, other))
        return [Message(peer, self.travel.needs.rows(elements, whole))]

    def exchanged(self, sets: list[np.ndarray], whole: np.ndarray) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """(own rows that go to others, rows of others that come here), where each stands among those of `whole`.

        Runs of the sequence are pieces, if they are few: both ranks of a message see the same ones.
        """
        legs, needs = self.travel.legs, self.travel.needs
        goes: list[Message] = []
        comes: list[Message] = []
        for i, leg in enumerate(legs):
            for found, hop, other in ((goes, 0, leg.hop), (comes, leg.hop, 0)):
                for peer, rows, _ in self._message(sets, i, hop, other, whole):
                    runs = needs.segments(self.elements(sets, i, self._owner(hop)))
                    starts = needs.rows_before(runs[:, 0], whole)
                    pieces = [slice(a, a + n) for a, n in zip(starts.tolist(), runs[:, 1].tolist(), strict=True)]
                    found.append(Message(peer, rows, tuple(pieces) if few(runs) else ()))
        return tuple(goes), tuple(comes)

    def _hop(self, leg: int) -> int:
        return 0 if leg == HOME else self.travel.legs[leg].hop

    def trips(self, visit: int) -> tuple[Trip, ...]:
        """The blocks that are sent on when those of `visit`, or the own ones (HOME), are here."""
        legs, kept = self.travel.legs, self.travel.kept
        parents = [HOME] if visit == HOME else self.groups[visit]
        made = []
        below = [i for i, leg in enumerate(legs) if leg.parent in parents]
        for target in dict.fromkeys(legs[i].visit for i in below):
            children = [i for i in below if legs[i].visit == target]
            sends, receives = [], []
            for i in children:
                hop, before = legs[i].hop, self._hop(legs[i].parent)
                sends += self._message(kept, i, before, hop, self.here(kept, visit))
                receives += self._message(kept, i, hop, before, self.here(kept, target))
            what = f"{self.what} for hop {', '.join(str(legs[i].hop) for i in children)}"
            if sends or receives:
                slow = legs[children[0]].slow_in
                made.append(Trip(target + self.offset, tuple(sends), tuple(receives), slow, what))
        return tuple(sorted(made, key=lambda trip: not trip.slow))  # those with the longest way first

    def returns(self, visit: int) -> tuple[Trip, ...]:
        """The gradients that leave when those of `visit` are summed."""
        legs, carried = self.travel.legs, self.travel.carried
        whole = self.here(carried, visit)
        sends, receives = [], []
        for i in self.groups[visit]:
            hop, sink = legs[i].hop, legs[i].sink
            target = self.owned[self.rank] if sink == HOME else self.here(carried, legs[sink].visit)
            sends += self._message(carried, i, hop, self._hop(sink), whole)
            receives += self._message(carried, i, self._hop(sink), hop, target)
        if not sends and not receives:
            return ()
        leg = legs[self.groups[visit][0]]
        goal = HOME if leg.sink == HOME else legs[leg.sink].visit + self.offset
        way = "home from" if goal == HOME else "after"
        what = f"gradients {way} hop {', '.join(str(legs[i].hop) for i in self.groups[visit])}"
        return (Trip(goal, tuple(sends), tuple(receives), leg.slow_out, what),)


class Sizes(NamedTuple):
    """Bytes of one token of each thing that may travel, on one rank."""

    keys: int
    key_gradients: int
    queries: int
    query_gradients: int

    def bytes_of(self, what: str, blocks: int, gradients: int) -> int:
        """Bytes of so many rows of blocks and of gradients."""
        if what == "keys":
            return blocks * self.keys + gradients * self.key_gradients
        return blocks * self.queries + gradients * self.query_gradients


def sizes_of(q: torch.Tensor, k: torch.Tensor, transit: torch.dtype, ulysses: int = 1) -> Sizes:
    """Bytes of a token of q [B, L, H, D] and k [B, L, G, D], as `travel` lays them into rows.

    transit: the type of gradients under way; ulysses: ranks over which the heads are split
    """
    heads = [max(1, x.shape[2] // ulysses) for x in (k, q)]
    tensors = [q.element_size() * q.shape[0] * q.shape[3] * count for count in heads]
    rows = -(-4 * q.shape[0] * heads[1] // UNIT_BYTES) * UNIT_BYTES  # lse or delta
    gradients = [size // q.element_size() * transit.itemsize for size in tensors]
    return Sizes(2 * tensors[0], 2 * gradients[0], 2 * tensors[1] + 2 * rows, gradients[1])


class Plan:
    """All ways of one rank round the ring for one layout and mask; each is made when it is asked for.

    segments: of every ring rank; lo, hi: int32 [S]; arrangement: a key of ARRANGEMENTS; inner: ranks of a node
    """

    def __init__(
        self, segments: list[Segments], ring_rank: int, lo: np.ndarray, hi: np.ndarray, *,
        arrangement: str = "ring", inner: int | None = None,
    ) -> None:  # fmt: skip
        self._segments, self.rank, self._lo, self._hi = segments, ring_rank, lo, hi
        self.geometry = Geometry(len(segments), inner or len(segments))
        self._arrangement = arrangement
        self._made: dict[Any, Any] = {}

    def _memo(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def travel(self, what: str, *, down: bool) -> Travel:
        """What travels, for all ranks."""
        borders = self._undivided.ravel() if self._arrangement in AT_ONCE else NOBODY
        needs = self._memo(what, lambda: needs_of(what, self._lo, self._hi, self._segments, borders))
        return self._memo((what, down), lambda: Travel(needs, self.geometry, self._arrangement, down=down))

    @cached_property
    def _undivided(self) -> np.ndarray:
        return undivided(self._lo, self._hi, self._segments)

    @cached_property
    def forward(self) -> Route:
        """Keys and values travel, in the direction that moves fewer rows."""
        return self.route(
            "keys", down=self.travel("keys", down=True).rows()[0] < self.travel("keys", down=False).rows()[0]
        )

    def backward(self, sizes: Sizes, rotate: str = "auto") -> Route:
        """Whatever moves fewest bytes: keys and values or queries, with their gradients, up or down the ranks.

        rotate: "keys" or "queries" leaves the direction alone to choose
        """
        kinds = list(TRAVELLERS) if rotate == "auto" else [rotate]
        if self.geometry.size == 1:
            return self.forward
        ways = [(what, down) for what in kinds for down in (False, True)]
        cost = lambda way: sizes.bytes_of(way[0], *self.travel(way[0], down=way[1]).rows())  # noqa: E731
        what, down = min(ways, key=cost)  # the first of equals
        return self._memo(("back", what, down), lambda: with_rest(self.route(what, down=down)))

    def route(self, what: str, *, down: bool) -> Route:
        """One rank's walk."""
        return self._memo(("route", what, down), lambda: self._route(what, self.travel(what, down=down)))

    def _route(self, what: str, travel: Travel) -> Route:
        walk = Walk(travel, self.rank, what)
        if self._arrangement in AT_ONCE and travel.legs:
            return self._joined(what, travel, walk)
        own = walk.owned[self.rank]
        nothing = Rows(np.zeros((0, 2), np.int64), 0)
        visits = []
        if walk.offset:
            works = bool(travel.needs.seen[self.rank, own].any())
            view = self._view(what, travel.needs, own) if works else None
            count = int(travel.needs.length[own].sum())
            visits.append(Visit(view, True, WHOLE, count, (), 0, nothing, nothing, ()))
        for number in walk.groups:
            block, total = walk.here(travel.kept, number), walk.here(travel.carried, number)
            touched = walk.here(travel.seen, number)
            view = self._view(what, travel.needs, block) if len(touched) else None
            rows = travel.needs.rows
            visits.append(
                Visit(
                    view, False, WHOLE, int(travel.needs.length[block].sum()), walk.trips(number),
                    int(travel.needs.length[total].sum()), rows(touched, block), rows(touched, total),
                    walk.returns(number),
                )
            )  # fmt: skip
        home = travel.needs.rows(walk.here(travel.kept, HOME), own)
        return Route(what, tuple(travel.hops), tuple(visits), walk.trips(HOME), home)

    def _joined(self, what: str, travel: Travel, walk: Walk) -> Route:
        """One visit to the own rows that are undivided, see `needs`, one to the others between those of other ranks.

        A rank without messages has but its own rows.
        """
        needs, own = travel.needs, walk.owned[self.rank]
        apart = inside(needs.start[own], self._undivided)
        apart &= needs.seen[self.rank, own[apart]].any()  # what sees nothing is no visit
        block = np.union1d(own[~apart], walk.here(travel.kept, 0))
        goes, comes = walk.exchanged(travel.kept, block)
        back, away = walk.exchanged(travel.carried, block)  # gradients go the other way
        trip = Trip(0, goes, comes, False, f"{walk.what} for all hops")
        home = Trip(HOME, away, back, False, "gradients home from all hops")
        trips, returns = ((one,) if one.sends or one.receives else () for one in (trip, home))
        visits, nothing, count = [], Rows(np.zeros((0, 2), np.int64), 0), int(needs.length[own].sum())
        is_seen = lambda elements: bool(needs.seen[self.rank, elements].any())  # noqa: E731
        if not trips:
            view = self._view(what, needs, own) if is_seen(own) else None
            visits.append(Visit(view, True, WHOLE, count, (), 0, nothing, nothing, ()))
        elif apart.any():
            visits.append(Visit(self._own_view(), True, WHOLE, count, (), 0, nothing, nothing, ()))
        if trips:
            view = self._view(what, needs, block, shares=bool(apart.any())) if is_seen(block) else None
            everything = needs.rows(block, block)
            total = everything.count
            visits.append(Visit(view, False, WHOLE, total, (), total, everything, everything, returns))
        left, joined = needs.rows(own[~apart], own), needs.rows(own[~apart], block)
        pairs, blind = self._shared_pairs // self.geometry.size, len(visits) > 1 and self._is_blind()
        return Route(what, tuple(travel.hops), tuple(visits), trips, left, joined, pairs, blind)

    @cached_property
    def _shared_pairs(self) -> int:
        """What all ranks see together, without what is one rank's alone."""
        edges = np.unique(np.append(0, self._undivided))
        edges = edges[edges < len(self._lo)]
        seen = self._hi - self._lo
        sums = np.add.reduceat(np.maximum(seen, 0, out=seen), edges, dtype=np.int64)
        return int(sums[~inside(edges, self._undivided)].sum())

    def _is_blind(self) -> bool:
        """Does any own row see nothing, or is seen by nobody?"""
        rows = positions(self._segments[self.rank])
        needs = self.travel("keys", down=False).needs
        seen = needs.seen[:, needs.owner == self.rank].any(0).all()
        return bool((self._lo[rows] >= self._hi[rows]).any() or not seen)

    def _own_view(self) -> View:
        """The own queries and the own keys, of which only the undivided ones see anything."""
        lo, hi = self._bounds(undivided=True)
        return self._memo("own", lambda: View(lo, hi, self._cut, self._cut, shares_queries=True, shares_keys=True))

    @cached_property
    def _cut(self) -> Segments:
        """The own segments, cut where undivided parts of the sequence begin and end."""
        return cut_at(self._segments[self.rank], self._undivided.ravel())

    def _bounds(self, *, undivided: bool) -> tuple[np.ndarray, np.ndarray]:
        """lo and hi of the own rows, where only the undivided ones see anything, or only the others.

        The others are one point, all rows in a row, so that no tile of them seems to see what lies between.
        """

        def make() -> tuple[np.ndarray, np.ndarray]:
            rows = positions(self._cut)
            lo, hi = self._lo[rows], self._hi[rows]
            sees = np.repeat(inside(self._cut[:, 0], self._undivided) == undivided, self._cut[:, 1])
            first = np.flatnonzero(np.diff(sees, prepend=not sees[:1].any()))
            point = np.repeat(lo[first], np.diff(first, append=len(rows)))
            # ends never fall; one that is raised is at most its row's lo
            return np.where(sees, lo, point), np.maximum.accumulate(np.where(sees, hi, point))

        return self._memo(("bounds", undivided), make)

    def _view(self, what: str, needs: Needs, elements: np.ndarray, *, shares: bool = False) -> View:
        """The own queries and these keys, or these queries and the own keys; one object for equal ones.

        shares: own rows that are undivided belong to another view
        """
        block, own = needs.segments(elements), self._cut if shares else self._segments[self.rank]
        queries, keys = (own, block) if what == "keys" else (block, own)
        if shares and what == "keys":
            lo, hi = self._bounds(undivided=False)
            return self._memo(("shared", keys.tobytes()), lambda: View(lo, hi, queries, keys, shares_queries=True))

        def bounds() -> tuple[np.ndarray, np.ndarray]:
            rows = positions(queries)
            return self._lo[rows], self._hi[rows]

        lo, hi = self._memo(queries.tobytes(), bounds)
        return self._memo(
            (queries.tobytes(), keys.tobytes(), shares), lambda: View(lo, hi, queries, keys, shares_keys=shares)
        )


def with_rest(route: Route) -> Route:
    """The same walk with a second visit to the own block at its end, while the last gradients are on their way home.

    Where a ring has one lane there is nothing left for it.
    """
    own = next((visit for visit in route.visits if visit.own and visit.view), None)
    if own is None or not route.travels or route.joined is not None:
        return route
    assert route.visits[0] is own and not own.trips, "what leaves home leaves before the first visit"
    return replace(route, visits=(replace(own, part=FIRST), *route.visits[1:], replace(own, part=REST)))


class OneDevice:
    """The plan of one device: all queries against all keys, whose lengths may differ. Nothing travels."""

    def __init__(self, num_keys: int, lo: np.ndarray, hi: np.ndarray) -> None:
        nothing = Rows(np.zeros((0, 2), np.int64), 0)
        plan = plan_one_device(num_keys, lo, hi)
        visits = [Visit(view, True, WHOLE, num_keys, (), 0, nothing, nothing, ()) for view in plan.views]
        self.forward = Route("keys", plan.hops, tuple(visits), (), nothing)

    def backward(self, sizes: Sizes, rotate: str = "auto") -> Route:
        """The same: there is nothing to choose."""
        return self.forward
