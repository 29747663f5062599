"""A rank's walk round the ring as data: visits, and the trips of messages between them.

Nothing here knows how a walk is found, see `routes`, nor how it is walked, see `ring`, `travel` and `gathering`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .mask import View
from .needs import Rows

WHOLE, FIRST, REST = "whole", "first", "rest"
"""Parts of a block, by its heads: all, those of the first lane, and those of the other lanes."""


class Message(NamedTuple):
    """Rows that go to a peer, or come from it. rows: of the block or of the sum that stands on this rank.

    pieces: runs of the rows that go each by itself, so that none is copied first; none = all rows go together
    """

    peer: int
    rows: Rows
    pieces: tuple[slice, ...] = ()


class Trip(NamedTuple):
    """One batch of messages, which every rank posts at the same point of its walk. visit: for which, or HOME."""

    visit: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    slow: bool
    what: str


@dataclass(frozen=True, eq=False)
class Visit:
    """What one rank does between two waits.

    view: what it computes, None without work; own: with its own block, which has not travelled
    part: of the block: gradients of the own one are computed in one visit, WHOLE, or in two, FIRST and REST
    count: rows of the visiting block
    trips: of blocks, posted before the kernel
    total: rows of the sum of gradients which leaves with these returns; empty if none does
    computed, added: the rows of the block whose gradients are computed here, and the rows of the sum that they are
    returns: trips of gradients, posted behind the kernel and what arrived
    """

    view: View | None
    own: bool
    part: str
    count: int
    trips: tuple[Trip, ...]
    total: int
    computed: Rows
    added: Rows
    returns: tuple[Trip, ...]


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's walk round the ring with one kind of block.

    what: a key of routes.TRAVELLERS; hops: distances in the order of visits, the same on every rank; may lack 0 or
        be empty
    visits: one a hop; with `joined` one to own rows, one to the block, or both; trips: those that are posted before the
        first; home: own rows that leave
    joined: where all is computed at once, the rows of the one block that are this rank's own, in the order of `home`;
        None where blocks visit
    pairs: of that block, that one head of a rank sees on average, the same on every rank; with `joined`
    blind: with `joined` and two visits, that some own row sees nothing or is seen by nobody: neither may write it
    """

    what: str
    hops: tuple[int, ...]
    visits: tuple[Visit, ...]
    trips: tuple[Trip, ...]
    home: Rows
    joined: Rows | None = None
    pairs: int = 0
    blind: bool = False
    _made: dict = field(default_factory=dict, init=False, repr=False)

    def memo(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned when this key was first asked for: tables on a device, say."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def first(self) -> int:
        """Index of this rank's first visit with work; the number of visits if there is none."""
        return next((i for i, visit in enumerate(self.visits) if visit.view), len(self.visits))

    @property
    def last(self) -> int:
        """Index of this rank's last visit with work; -1 if there is none."""
        return next((i for i in reversed(range(len(self.visits))) if self.visits[i].view), -1)

    @property
    def views(self) -> tuple[View | None, ...]:
        """What is computed at each visit."""
        return tuple(visit.view for visit in self.visits)

    @property
    def travels(self) -> bool:
        """Anything leaves any rank."""
        return any(self.hops)

    @property
    def block_trips(self) -> list[Trip]:
        """All trips of blocks, in order."""
        return [*self.trips, *(trip for visit in self.visits for trip in visit.trips)]

    @property
    def gradient_trips(self) -> list[Trip]:
        """All trips of gradients, in order."""
        return [trip for visit in self.visits for trip in visit.returns]

    def sent_rows(self) -> tuple[int, int]:
        """Rows of blocks and rows of gradients that this rank sends."""
        blocks, gradients = (
            sum(message.rows.count for trip in trips for message in trip.sends)
            for trips in (self.block_trips, self.gradient_trips)
        )
        return blocks, gradients
