"""What travels, as messages: blocks that visit this rank hop by hop, and the sums of gradients that follow them.

`Blocks` sends on what stands here before the kernel runs and waits behind it, `Sums` does the same for gradients, one
hop behind. Which rows go to whom is a `trips.Route`; the calls are those of `exchange`. Rows are tokens, outermost in
memory, so that a run of rows is one message without a copy; only rows that are several runs are packed first.
Called by `ring`; rows, buffers and their loans are `gathering`'s, too.

Letters: B batch, L local tokens, n rows, H heads of a tensor, D head dimension, F gradients of one kind of block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from . import moving
from .arrangements import HOME
from .exchange import Messages, Pending
from .lanes import Lanes
from .needs import Rows
from .routes import UNIT_BYTES
from .trips import Message, Route, Trip, Visit


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """These rows of x [n, ...]: a view where they are one run, else a copy."""
    return x[rows.span] if rows.span else x.index_select(0, rows.index(x.device))


def add(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """x[rows] += values, for x [n, ...] in fp32."""
    if rows.span:
        x[rows.span] += values
    else:
        at = rows.index(x.device)
        target, part = in_units(x, x.index_select(0, at) + values)
        target.index_copy_(0, at, part)  # index_add_ goes number by number


def put(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """x[rows] = values, for x [n, ...]."""
    for here, there in rows.places():
        x[there].copy_(values[here])
    if not rows.places():
        x.index_copy_(0, rows.index(x.device), values)


def move(x: torch.Tensor, rows: Rows, y: torch.Tensor, of: Rows) -> None:
    """x[rows] = y[of], for x and y [n, ...]."""
    runs = rows.beside(of)
    for here, there in runs:
        x[here].copy_(y[there])
    if not runs and rows.count:
        x.index_copy_(0, rows.index(x.device), y.index_select(0, of.index(y.device)).to(x.dtype))


def rounded_sum(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x + y, added in fp32 and rounded once, in one pass over memory; in x, where nothing is to be rounded. x: fp32."""
    return torch.add(x, y, out=x if dtype == x.dtype else torch.empty(x.shape, dtype=dtype, device=x.device))


class Record:
    """How tensors lie side by side in the row of a token, in bytes: types may differ, and all go in one message.

    tensors: [B, L, H, D], or [B, H, L] for one number a head
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._dims = [1 if x.dim() == 4 else 2 for x in tensors]
        self._dtypes = [x.dtype for x in tensors]
        self._shapes = [x.movedim(dim, 0).shape[1:] for x, dim in zip(tensors, self._dims, strict=True)]
        sizes = [shape.numel() * x.element_size() for shape, x in zip(self._shapes, tensors, strict=True)]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // UNIT_BYTES) * UNIT_BYTES)
        self._places = [slice(start, start + size) for start, size in zip(ends, sizes, strict=False)]
        self.num_bytes = ends[-1]

    def read(self, block: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that lie in a block, uint8 [n, num_bytes]: views, [B, n, H, D] or [B, H, n]."""
        fields = zip(self._places, self._dtypes, self._shapes, self._dims, strict=True)
        return [self._field(block, *field) for field in fields]

    def _field(
        self, block: torch.Tensor, place: slice, dtype: torch.dtype, shape: torch.Size, dim: int
    ) -> torch.Tensor:
        if not self.num_bytes:  # an empty batch
            return torch.empty(len(block), *shape, dtype=dtype, device=block.device).movedim(0, dim)
        return block[:, place].view(dtype).unflatten(1, shape).movedim(0, dim)

    def write(self, tensors: Sequence[torch.Tensor], rows: Rows, block: torch.Tensor) -> None:
        """Copy these rows of the tensors into a block."""
        for x, into, dim in zip(tensors, self.read(block), self._dims, strict=True):
            part = (
                x.narrow(dim, rows.span.start, rows.count) if rows.span else x.index_select(dim, rows.index(x.device))
            )
            target, part = in_units(into, part)
            target.copy_(part)

    def put(self, tensors: Sequence[torch.Tensor], home: Rows, rows: Rows, block: torch.Tensor) -> None:
        """Copy the rows `home` of the tensors into the rows `rows` of a block."""
        if moving.copy_rows(tensors, home, rows, block, first_bytes=[place.start for place in self._places]):
            return
        for x, into, dim in zip(tensors, self.read(block), self._dims, strict=True):
            target, part = (each.movedim(dim, 0) for each in in_units(into, x))
            move(target, rows, part, home)


def in_units(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors as numbers of UNIT_BYTES, where all can be; for copying only.

    torch copies number by number, and numbers of 2 bytes at less than half the speed of memory.
    """
    for x in tensors:
        per_unit = UNIT_BYTES // x.element_size()
        places = (x.shape[-1], x.storage_offset(), x.data_ptr() // x.element_size(), *x.stride()[:-1])
        if x.stride(-1) != 1 or any(place % per_unit for place in places):
            return tensors
    return [x.view(torch.complex128) for x in tensors]


class Pool:
    """Buffers of one shape that are used again: a loop allocates in its first rounds only.

    A buffer given back is free where it was used: messages wait for all lanes before they fill it, and a lane uses its
    heads of it in the order of its stream. made: called whenever a buffer is new, so that it may be memory in which the
    caller's stream still works
    """

    def __init__(
        self, num_rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
        made: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._empty = lambda: torch.empty(num_rows, *shape, dtype=dtype, device=device)
        self._made = made
        self._free: list[torch.Tensor] = []

    def stock(self, count: int) -> None:
        """Make so many buffers now."""
        self._free += [self._empty() for _ in range(count)]
        self._made()

    def take(self) -> torch.Tensor:
        """A buffer with any content."""
        if not self._free:
            self.stock(1)
        return self._free.pop()

    def give(self, buffer: torch.Tensor) -> None:
        """It may be filled anew."""
        self._free.append(buffer)


class Loan:
    """A buffer of a pool that goes back when all its users have let go."""

    def __init__(self, pool: Pool, users: int) -> None:
        self._pool, self.buffer, self._users = pool, pool.take(), users

    def let_go(self) -> None:
        """One user less."""
        self._users -= 1
        if not self._users:
            self._pool.give(self.buffer)


class Part(NamedTuple):
    """Gradients in a buffer, which are `rows` of a sum. there: its rows; None: the first ones"""

    loan: Loan
    there: Rows | None
    rows: Rows

    def values(self, heads: slice) -> torch.Tensor:
        """[n, F, B, heads, D]."""
        x = self.loan.buffer[:, :, :, heads]
        return x[: self.rows.count] if self.there is None else take(x, self.there)

    @property
    def is_a_sum(self) -> bool:
        """All rows of the sum, in fp32, at the begin of the buffer: others can be added there."""
        begins = self.there is None or (self.there.span is not None and self.there.span.start == 0)
        return begins and self.rows.all and self.loan.buffer.dtype == torch.float32


class Posted(NamedTuple):
    """A trip under way. arriving: a buffer and its rows for each receive.

    source, sends: what is sent from, or None, and what is sent: kept until it has gone
    """

    pending: Pending
    source: Loan | None
    sends: Messages
    arriving: list[tuple[Loan, Message]]


def _largest(messages: Iterator[Message]) -> int:
    return max((message.rows.count for message in messages), default=0)


class Blocks:
    """The blocks that visit this rank. Each is here from `visit` on, until the next one is asked for."""

    def __init__(self, tensors: Sequence[torch.Tensor], route: Route, lanes: Lanes) -> None:
        self._tensors, self._route, self._lanes = tensors, route, lanes
        self._device = tensors[0].device
        self._record = Record(tensors)
        count = max((visit.count for visit in route.visits if not visit.own), default=0)
        home, row = route.home.count, [self._record.num_bytes]
        self._pool = Pool(max(home, count), row, torch.uint8, self._device)
        self._posted: dict[int, list[Posted]] = {}
        self._loans: dict[int, Loan] = {}

    def __iter__(self) -> Iterator[tuple[Visit, list[torch.Tensor]]]:
        """Each visit with its tensors; what later visits need of it is on its way when it is handed out."""
        route = self._route
        if route.trips:
            self._leave_home()
        for i, visit in enumerate(route.visits):
            for posted in self._posted.pop(i, []):
                self._arrive(posted)
            if visit.own:
                yield visit, list(self._tensors)
                continue
            block = self._loan(i)
            for trip in visit.trips:
                self._post(trip, block, visit.count)
            yield visit, self._record.read(block.buffer[: visit.count])
            self._loans.pop(i).let_go()

    def _loan(self, i: int) -> Loan:
        """The buffer of a visit, with which its kernel and each of its trips have to do."""
        if i not in self._loans:
            self._loans[i] = Loan(self._pool, 1 + len(self._route.visits[i].trips))
        return self._loans[i]

    def _leave_home(self) -> None:
        home = Loan(self._pool, len(self._route.trips))
        with self._lanes.beside():
            self._record.write(self._tensors, self._route.home, home.buffer[: self._route.home.count])
        for trip in self._route.trips:
            self._post(trip, home, self._route.home.count)

    def _post(self, trip: Trip, source: Loan, count: int) -> None:
        receives = [(message.peer, self._room(trip.visit, message)) for message in trip.receives]
        with self._lanes.beside():
            block = source.buffer[:count]
            sends = [(message.peer, take(block, message.rows)) for message in trip.sends]
            pending = self._lanes.transport.post(sends, receives, trip.what, trip.slow)
        self._posted.setdefault(trip.visit, []).append(Posted(pending, source, sends, []))

    def _room(self, i: int, message: Message) -> torch.Tensor:
        """Where the block of a visit arrives."""
        assert message.rows.all, "a block comes as one message"
        return self._loan(i).buffer[: message.rows.count]

    def _arrive(self, posted: Posted) -> None:
        self._lanes.wait(posted.pending)
        if posted.source:
            posted.source.let_go()


class Sums:
    """The sums of gradients that follow the blocks one hop behind, in fp32, and what has come home of the own ones.

    own: the gradients of the own block, [B, L, H, D] fp32 each, to which all that comes home is added
    transit: the type in which they travel; sums are fp32
    """

    def __init__(self, own: Sequence[torch.Tensor], route: Route, lanes: Lanes, transit: torch.dtype) -> None:
        self._own, self._route, self._lanes = own, route, lanes
        self._device = own[0].device
        batch, _, heads, width = own[0].shape
        shape = (len(own), batch, heads, width)
        totals = max((visit.total for visit in route.visits), default=0)
        received = _largest(message for trip in route.gradient_trips for message in trip.receives)
        counts = max((visit.count for visit in route.visits if not visit.own), default=0)
        fp32 = torch.float32
        self._fresh = Pool(counts, shape, fp32, self._device, lanes.follow)
        # made now, since later lanes would wait for each other: one is on its way while the next is computed, or, where
        # it is another that is sent, rounded, one is enough
        in_use = 2 if transit == fp32 else 1
        self._fresh.stock(min(in_use, sum(not visit.own and visit.view is not None for visit in route.visits)))
        self._arriving = Pool(received, shape, transit, self._device)
        self._totals = Pool(totals, shape, fp32, self._device, lanes.follow)
        self._rounded = None if transit == fp32 else Pool(totals, shape, transit, self._device, lanes.follow)
        self._posted: dict[int, list[Posted]] = {}

    def fresh(self, visit: Visit) -> tuple[Loan, list[torch.Tensor]]:
        """Room for what a kernel computes at this visit: a loan, and its views [B, n, H, D], fp32, any content."""
        loan = Loan(self._fresh, 1)
        return loan, [loan.buffer[: visit.count, f].movedim(0, 1) for f in range(len(self._own))]

    def pass_on(self, i: int, fresh: Loan | None) -> None:
        """Add what was computed at visit i to what has arrived for it, and send the sum on."""
        visit = self._route.visits[i]
        if visit.own:
            return
        total = self._summed(i, visit, fresh)
        for trip in visit.returns:
            self._post(trip, total, visit.total)
        if total and not visit.returns:
            total.let_go()

    def come_home(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """When all lanes are done: add what comes home to the own gradients; returns the sums, rounded to `dtype`."""
        held: tuple[Loan, Message] | None = None
        for posted in self._posted.pop(HOME, []):
            posted.pending.wait()
            for part, message in posted.arriving:
                self._add(held)
                held = part, message
        if held is None or not held[1].rows.all:
            self._add(held)
            return [x.to(dtype) for x in self._own]
        last = held[0].buffer[: held[1].rows.count]
        return [rounded_sum(x, last[:, f].movedim(0, 1), dtype) for f, x in enumerate(self._own)]

    def _add(self, held: tuple[Loan, Message] | None) -> None:
        """Add what has come home to the own gradients."""
        if held:
            part, message = held
            for f, x in enumerate(self._own):
                add(x.movedim(1, 0), message.rows, part.buffer[: message.rows.count, f])
            part.let_go()

    def _summed(self, i: int, visit: Visit, fresh: Loan | None) -> Loan | None:
        """What has arrived for visit i and what was computed there, in one buffer: in theirs, if one has all rows."""
        parts = []
        for posted in self._posted.pop(i, []):
            self._lanes.wait(posted.pending)
            if posted.source:
                posted.source.let_go()
            parts += [Part(loan, None, message.rows) for loan, message in posted.arriving]
        if fresh:
            parts.append(Part(fresh, visit.computed, visit.added))
        total = next((part.loan for part in parts if part.is_a_sum), None)
        is_new = visit.total and total is None
        if is_new:
            total = Loan(self._totals, 1)
        if total is not None:
            others = [part for part in parts if part.loan is not total]
            for lane in self._lanes.all if is_new or others else ():
                with lane.on():
                    self._sum_up(total, visit.total if is_new else 0, others, lane.heads(self._route.what))
        for part in parts:
            if part.loan is not total:
                part.loan.let_go()
        return total

    def _sum_up(self, total: Loan, num_new: int, parts: list[Part], heads: slice) -> None:
        """Add these heads of the parts to the total, of which so many rows are set to 0 before."""
        into = total.buffer[:, :, :, heads]
        if num_new:
            into[:num_new].zero_()
        for part in parts:
            add(into, part.rows, part.values(heads))

    def _post(self, trip: Trip, total: Loan | None, count: int) -> None:
        arriving = [(Loan(self._arriving, 1), message) for message in trip.receives]
        receives = [(message.peer, loan.buffer[: message.rows.count]) for loan, message in arriving]
        if total and self._rounded:
            rounded = Loan(self._rounded, 1)
            for lane in self._lanes.all:
                heads = lane.heads(self._route.what)
                with lane.on():
                    rounded.buffer[:count, :, :, heads].copy_(total.buffer[:count, :, :, heads])
            total.let_go()
            total = rounded
        with self._lanes.beside():
            sends = [(one.peer, take(total.buffer[:count], one.rows)) for one in trip.sends] if total else []
            pending = self._lanes.transport.post(sends, receives, trip.what, trip.slow)
        self._posted.setdefault(trip.visit, []).append(Posted(pending, total, sends, arriving))
