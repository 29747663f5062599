"""How a block gets from its owner to the ranks that need it: an arrangement is one function and one line of the table.

Pure arithmetic on hops, the same for every rank; which rows of a block go along a leg is `routes`'.

Letters: P ring size. A hop is a distance: at hop h ring rank r works on the block of rank r - h. Where the ring is cut
into P / I nodes of I ranks, h = o * I + i is o nodes and i ranks within a node, each modulo its own count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

HOME = -1  # the owner of a block, where a leg begins or its gradients end


class Leg(NamedTuple):
    """The way of every block to the rank `hop` behind its owner.

    parent: the leg from whose end the block comes, or HOME; sink: the one to whose end gradients go on, or HOME
    visit: legs with one number are computed together
    slow_in, slow_out: the block, its gradients, go from node to node while others travel inside the nodes
    """

    hop: int
    parent: int
    sink: int
    visit: int
    slow_in: bool = False
    slow_out: bool = False


def ring(hops: list[int], inner: int) -> list[Leg]:
    """Each rank passes on to the next what it had itself; gradients follow one hop behind."""
    return [Leg(hop, i - 1, i + 1 if hop != hops[-1] else HOME, i) for i, hop in enumerate(hops)]


def double(hops: list[int], inner: int) -> list[Leg]:
    """A ring inside every node, and one between nodes whose blocks come a whole inner round before they are used.

    What begins a round is sent on to the next node at once; gradients of a round are summed inside it, and go to the
    next node while its round runs. Source: double ring of LoongTrain, arXiv:2406.18485.
    """
    rounds = [[hop for hop in hops if hop // inner == o] for o in dict.fromkeys(hop // inner for hop in hops)]
    legs: list[Leg] = []
    head = HOME  # the leg that began the round before; round 0 begins with the rank's own block
    for at, members in enumerate(rounds):
        first, last, outer = len(legs), len(legs) + len(members) - 1, members[0] // inner
        after = last + len(rounds[at + 1]) if at + 1 < len(rounds) else HOME
        for i, hop in enumerate(members, first):
            parent = i - 1 if i > first else (head if outer else HOME)
            crosses = i == last and (after != HOME or outer > 0)
            sink = i + 1 if i < last else after
            legs.append(Leg(hop, parent, sink, i, slow_in=i == first and outer > 0, slow_out=crosses))
        head = first if outer else HOME
    return legs


def gather(hops: list[int], inner: int) -> list[Leg]:
    """Every rank gets all that it needs from its owners at once, and computes it in one go with its own block."""
    return [Leg(hop, HOME, HOME, 0) for hop in hops]


AT_ONCE = ("gather",)
"""Arrangements whose only blocks are all that a rank needs, its own among them."""

# name -> (hops in order, ranks of a node) -> legs
ARRANGEMENTS: dict[str, Callable[[list[int], int], list[Leg]]] = {"ring": ring, "double": double, "gather": gather}


class Geometry(NamedTuple):
    """size: P; inner: ranks of a node, P where there is one."""

    size: int
    inner: int

    def holder(self, owner: Any, hop: int) -> Any:
        """The rank where a block stands after this hop: an int, or numpy arrays of them."""
        return self._moved(owner, hop, 1)

    def owner(self, holder: Any, hop: int) -> Any:
        """Whose block it is that stands here after this hop."""
        return self._moved(holder, hop, -1)

    def _moved(self, rank: Any, hop: int, sign: int) -> Any:
        node, place = rank // self.inner, rank % self.inner
        nodes = self.size // self.inner
        return (node + sign * (hop // self.inner)) % nodes * self.inner + (place + sign * hop) % self.inner

    def ordered(self, hops: list[int], down: bool) -> list[int]:
        """Hops in the order of visits, away from the own rank and node: blocks go up the ranks, or down."""
        sign, nodes = (-1 if down else 1), self.size // self.inner
        return sorted(hops, key=lambda hop: (sign * (hop // self.inner) % nodes, sign * hop % self.inner))
