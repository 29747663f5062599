"""A gather: all rows that a rank works on lie in one block, its own between those of others, and one kernel takes them.

Nothing is carried from hop to hop and nothing is summed but what comes home. So that messages are hidden all the same,
heads are worked on in sections: while one is computed, the blocks of the next one arrive and the gradients of the one
before go home. Own rows with which no other rank has to do, of whole documents say, are no part of the block: they are
computed where they are, while it is on its way. `Gathered` is to `travel.Blocks` what `Returned` is to `travel.Sums`.
Called by `ring`.

Letters: B batch, L local tokens, n rows, H query heads, G key/value heads, D head dimension, F gradients of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from . import moving
from .exchange import Messages, Pending, Transport
from .kernels import Kernel, State, sharing
from .lanes import Lane, Lanes, of_heads
from .mask import View
from .needs import Rows
from .travel import Loan, Pool, Record, add, in_units, move, put, take
from .trips import Message, Route, Visit

MAX_SECTIONS = 2
"""Of the heads. Four were slower where it was measured, on 2 GPUs and on one; see `docs/decisions.md`."""

SECTION_PAIRS = 2**29
"""Visible pairs that a section of a rank has at least: with fewer its kernels are too short to hide anything."""

LONG_PAIRS = 2**34
"""Visible pairs of a rank beyond which a backward is one section: two cost 1% there, and messages are nothing."""


def sections_of(
    q: torch.Tensor, k: torch.Tensor, route: Route, transport: Transport | None, *, backward: bool
) -> Lanes:  # fmt: skip
    """Equal sections of the heads, every other one on a second stream. q: [B, L, H, D]; k: [B, L, G, D]"""
    assert transport is not None
    pairs = route.pairs * q.shape[2]
    most = 1 if backward and pairs > LONG_PAIRS else min(MAX_SECTIONS, max(1, pairs // SECTION_PAIRS))
    count = next(n for n in range(most, 0, -1) if k.shape[2] % n == 0)
    second = transport.second_stream(q.device) if count > 1 or own_of(route) else None
    sections = equal(q, k, [second if i % 2 else None for i in range(count)])
    return Lanes(sections, transport, q.device, second)


def equal(q: torch.Tensor, k: torch.Tensor, streams: Sequence[torch.cuda.Stream | None]) -> list[Lane]:
    """As many heads on each of these streams."""
    count, heads = len(streams), (q.shape[2], k.shape[2])
    queries, keys = ([slice(i * n // count, (i + 1) * n // count) for i in range(count)] for n in heads)
    return list(map(Lane, queries, keys, streams))


def own_of(route: Route) -> View | None:
    """What is computed of own rows with which no other rank has to do."""
    return next((visit.view for visit in route.visits if visit.own), None)


def joined_of(route: Route) -> Visit | None:
    """The visit to all others; None where this rank sends nothing and gets nothing."""
    return next((visit for visit in route.visits if not visit.own), None)


def leaving(block: torch.Tensor, messages: Sequence[Message]) -> Messages:
    """What goes to others out of a block [n, ...]."""
    return [(one.peer, x) for one in messages for x in ([block[s] for s in one.pieces] or [take(block, one.rows)])]


def _rows(message: Message) -> bytes:
    return message.rows.runs.tobytes()


def coming(room: torch.Tensor, message: Message) -> Messages:
    """Where a message comes to, row by row: room has as many rows."""
    ends = [0]
    for piece in message.pieces:
        ends.append(ends[-1] + piece.stop - piece.start)
    pieces = [room[a:b] for a, b in itertools.pairwise(ends)]
    return [(message.peer, x) for x in pieces or [room]]


class Asked(NamedTuple):
    """A section's block, what is under way to it, what is to be put there when it is here, and what is sent."""

    block: Loan
    pending: list[Pending]
    loose: list[tuple[Loan, Message]]
    sends: Messages


class Gathered:
    """The blocks of all sections, one after the other; that of the next one is on its way when one is handed out.

    Own rows are copied between those of others, and leave from there. A rank without messages has no block.
    ahead: sections whose messages are posted now, 1 or 2: with more, ranks would post theirs in different orders
    """

    def __init__(self, tensors: Sequence[torch.Tensor], route: Route, lanes: Lanes, ahead: int) -> None:
        assert route.joined is not None
        self._tensors, self._route, self._lanes, self._own = tensors, route, lanes, route.joined
        self._device = tensors[0].device
        self._record = Record(self._of(lanes.all[0]))
        visit, row = joined_of(route), [self._record.num_bytes]
        self._count = visit.count if visit else 0
        self._pool = Pool(self._count, row, torch.uint8, self._device)
        loose = [one.rows.count for trip in route.trips for one in trip.receives if not one.pieces]
        self._loose = Pool(max(loose, default=0), row, torch.uint8, self._device)
        self._sections = lanes.all if visit else ()
        self._num_asked, self._under_way = 0, list[Asked]()
        self._ask_for(self._sections[:ahead])

    def _of(self, lane: Lane) -> list[torch.Tensor]:
        heads = lane.heads(self._route.what)
        return [x[:, :, heads] if x.dim() == 4 else x[:, heads] for x in self._tensors]

    def __iter__(self) -> Iterator[tuple[Lane, list[torch.Tensor]]]:
        """Each section with its tensors, [B, n, heads, D] or [B, heads, n], to be used on its stream."""
        for i, lane in enumerate(self._sections):
            self._ask_for(self._sections[: i + 2])
            block, pending, loose, _ = self._under_way.pop(0)
            with lane.on():
                for each in pending:
                    each.wait()
                for room, message in loose:
                    into, part = in_units(block.buffer[: self._count], room.buffer[: message.rows.count])
                    put(into, message.rows, part)
                    room.let_go()
            yield lane, self._record.read(block.buffer[: self._count])
            block.let_go()

    def _ask_for(self, sections: Sequence[Lane]) -> None:
        for lane in sections[self._num_asked :]:
            self._under_way.append(self._ask(lane))
            self._num_asked += 1

    def _ask(self, lane: Lane) -> Asked:
        """Post the messages of a section."""
        loan, pending, loose = Loan(self._pool, 1), [], []
        sends: Messages = []
        block = loan.buffer[: self._count]
        with self._lanes.beside():
            self._record.put(self._of(lane), self._route.home, self._own, block)
            for trip in self._route.trips:
                receives: list[tuple[int, torch.Tensor]] = []
                for one in trip.receives:
                    if one.pieces:
                        receives += [(one.peer, block[s]) for s in one.pieces]
                    else:
                        loose.append((Loan(self._loose, 1), one))
                        receives.append((one.peer, loose[-1][0].buffer[: one.rows.count]))
                sends = leaving(block, trip.sends)
                pending.append(self._lanes.transport.post(sends, receives, trip.what))
        return Asked(loan, pending, loose, sends)


class Returned:
    """The gradients of the blocks of all sections: others' rows go home, and what comes home is added to the own ones.

    into: where those of the own rows in the block go, [B, L, H, D] each, summed in fp32 and rounded once
    transit: the type in which gradients travel
    """

    def __init__(self, into: Sequence[torch.Tensor], route: Route, lanes: Lanes, transit: torch.dtype) -> None:
        assert route.joined is not None
        self._into, self._route, self._lanes, self._own, self._transit = into, route, lanes, route.joined, transit
        visit = joined_of(route)
        assert visit is not None
        self._count, self._trips = visit.count, visit.returns
        # those of the same rows one behind the other, so that they are added up in one pass
        received = sorted((one for trip in self._trips for one in trip.receives), key=_rows)
        self._groups = [list(group) for _, group in itertools.groupby(received, _rows)]
        heads = lanes.all[0].heads(route.what)
        shape, device = (len(into), into[0].shape[0], heads.stop - heads.start, into[0].shape[3]), into[0].device
        self._fresh = Pool(visit.count, shape, torch.float32, device, lanes.follow)
        self._fresh.stock(min(2, len(lanes.all)))  # one is on its way while the next is computed
        self._arriving = Pool(sum(message.rows.count for message in received), shape, transit, device)
        self._before: tuple[Lane, Loan, list[Pending], Loan, Messages] | None = None

    def fresh(self) -> tuple[Loan, list[torch.Tensor]]:
        """Room for the gradients of a section's block: a loan, and its views [B, n, heads, D], fp32, any content."""
        loan = Loan(self._fresh, 1)
        return loan, [loan.buffer[: self._count, f].movedim(0, 1) for f in range(len(self._into))]

    def pass_on(self, lane: Lane, loan: Loan) -> None:
        """Send home what was computed, when those of the section before are summed."""
        self.finish()
        pending, arriving = [], Loan(self._arriving, 1)
        sends: Messages = []
        for trip in self._trips:
            rooms = [each for group, room in self._rooms(arriving) for each in zip(room, group, strict=True)]
            receives = list(itertools.chain.from_iterable(coming(*each) for each in rooms))
            with self._lanes.beside():
                sends = [(peer, x.to(self._transit)) for peer, x in leaving(loan.buffer[: self._count], trip.sends)]
                pending.append(self._lanes.transport.post(sends, receives, trip.what))
        self._before = lane, loan, pending, arriving, sends

    def _rooms(self, arriving: Loan) -> Iterator[tuple[list[Message], torch.Tensor]]:
        """The messages of the same rows, and their room [messages, rows, ...]."""
        start = 0
        for group in self._groups:
            end = start + len(group) * group[0].rows.count
            yield group, arriving.buffer[start:end].unflatten(0, (len(group), -1))
            start = end

    def finish(self) -> None:
        """Add what comes home of the last section that was passed on."""
        if self._before is None:
            return
        lane, loan, pending, arriving, _ = self._before
        block = loan.buffer[: self._count]
        with lane.on():
            for each in pending:
                each.wait()
            into = [x[:, :, lane.heads(self._route.what)] for x in self._into]
            sums = [block[:, f].movedim(0, 1) for f in range(len(into))]
            if not moving.sum_rows(into, sums, arriving.buffer, self._tables):
                self._add(block, arriving)
                for f, x in enumerate(into):
                    move(x.movedim(1, 0), self._route.home, block[:, f], self._own)
            arriving.let_go()
        loan.let_go()
        self._before = None

    def _add(self, block: torch.Tensor, arriving: Loan) -> None:
        """What came home to the sums of a block, message by message."""
        for (message, *others), room in self._rooms(arriving):
            values = room.sum(0, dtype=torch.float32) if others else room[0]
            for piece, (_, part) in zip(message.pieces, coming(values, message), strict=False):
                block[piece] += part
            if not message.pieces:
                add(block, message.rows, values)

    def _tables(self) -> tuple[torch.Tensor, ...]:
        """Which rows are summed with which that arrived, on the device."""
        device = self._into[0].device

        def make() -> tuple[torch.Tensor, ...]:
            begin = np.cumsum([0] + [len(group) * group[0].rows.count for group in self._groups])
            arrivals = [(one[0].rows, int(start), len(one)) for one, start in zip(self._groups, begin, strict=False)]
            return moving.on_device(device, *moving.sums(self._route.home, self._own, arrivals))

        return self._route.memo(("sums", device), make)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: Route, transport: Transport | None, kernel: Kernel, *,
    scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `ring.forward`."""
    batch, length, heads, _ = q.shape
    lanes, own, joined = sections_of(q, k, route, transport, backward=False), own_of(route), joined_of(route)
    blind = route.blind or not any(route.views)
    out = (torch.zeros if blind else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    acc = None
    if sinks is not None:  # a state that has seen one key, whose value is 0
        acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse.copy_(sinks[:, None].expand_as(lse))
    elif blind:
        lse.fill_(-torch.inf)

    def compute(lane: Lane, view: View, k: torch.Tensor, v: torch.Tensor) -> None:
        with lane.on():
            mine, rows = q[:, :, lane.queries], lse[:, lane.queries].contiguous()  # the same, or of few numbers
            start = None if acc is None else acc[:, :, lane.queries]
            state = State(start, out[:, :, lane.queries], rows)
            sharing.forward(kernel, mine, k, v, view, state, scale=scale, first=sinks is None, last=True)
            if rows.data_ptr() != lse[:, lane.queries].data_ptr():
                lse[:, lane.queries].copy_(rows)

    with lanes.together():
        gathered = Gathered([k, v], route, lanes, ahead=2 if own else 1)
        if own:
            (beside,) = equal(q, k, [lanes.second])
            compute(beside, own, k, v)
        for lane, (k_all, v_all) in gathered:
            if joined and joined.view:
                compute(lane, joined.view, k_all, v_all)
    return out, lse


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    route: Route, transport: Transport | None, run: Callable[..., None], *, rounded: bool, transit: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `ring.backward`. run: `sharing.backward`, with all that is the same in every call"""
    lanes, own, joined = sections_of(q, k, route, transport, backward=True), own_of(route), joined_of(route)
    keys_travel = route.what == "keys"
    dtype = k.dtype if rounded else torch.float32
    blind = route.blind or not any(route.views)
    make = torch.zeros if blind else torch.empty
    dk, dv = (make(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    dq, summed = query_gradients(q, route, blind=blind)
    travelling, into = ((k, v), (dk, dv)) if keys_travel else ((q, dout, lse, delta), (dq,))

    def compute_own(lane: Lane) -> None:
        with lane.on():
            *queries, some_dq = of_heads(lane.queries, dout, q, lse, delta, summed)
            keys, grads = of_heads(lane.keys, k, v), of_heads(lane.keys, dk, dv)
            run(*queries[:2], *keys, *queries[2:], own, some_dq, *grads)

    with lanes.together():
        gathered = Gathered(travelling, route, lanes, ahead=2 if own else 1)
        early, late = own_lanes(q, k, own, lanes, halves=joined is not None) if own else ([], [])
        for lane in early:
            compute_own(lane)
        returned = Returned(into, route, lanes, transit) if joined else None
        for lane, block in gathered:
            assert joined is not None and returned is not None
            loan, grads = returned.fresh()
            with lane.on():
                if joined.view is None:
                    loan.buffer.zero_()
                elif keys_travel:
                    mine = of_heads(lane.queries, dout, q, lse, delta, summed)
                    run(*mine[:2], *block, *mine[2:4], joined.view, mine[4], *grads)
                else:
                    q_all, dout_all, *rows = block
                    mine = of_heads(lane.keys, k, v, dk, dv)
                    numbers = torch.stack(rows)  # contiguous for the kernels, in one launch
                    run(dout_all, q_all, *mine[:2], *numbers, joined.view, grads[0].zero_(), *mine[2:])
            returned.pass_on(lane, loan)
        for lane in late:
            compute_own(lane)
        if returned:
            returned.finish()
    _round(summed, dq, None if keys_travel else route.home.others)
    return dq, dk, dv


def _round(summed: torch.Tensor, dq: torch.Tensor, rows: Rows | None) -> None:
    """Write these rows of dq where they were summed beside it; None = all."""
    if summed is dq:
        return
    if rows is None:
        dq.copy_(summed)
    elif not moving.round_rows(dq, summed, rows):
        move(dq.movedim(1, 0), rows, summed.movedim(1, 0), rows)


def query_gradients(q: torch.Tensor, route: Route, *, blind: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """dq [B, L, H, D] in q's type, and where kernels add to own rows; the same, where they write all rows once.

    Two visits add to one sum, in fp32, which is rounded behind both. Where queries travel they have not a row in
    common: those in the block are rounded when they come home, and only the others are 0 here.
    """
    made = torch.zeros if blind or q.dtype == torch.float32 else torch.empty
    if own_of(route) is None or joined_of(route) is None:
        dq = made(q.shape, dtype=q.dtype, device=q.device)
        return dq, dq
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    summed = dq if q.dtype == torch.float32 else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if route.what == "keys":
        summed.zero_()
    else:
        moving.clear_rows(summed, route.home.others)
    return dq, summed


def own_lanes(
    q: torch.Tensor, k: torch.Tensor, own: View, lanes: Lanes, *, halves: bool
) -> tuple[list[Lane], list[Lane]]:  # fmt: skip
    """Where own rows are computed before the sections, and behind them: half of the heads, where they are worth it.

    Under the first what is sent for the sections arrives, and under the second their gradients go home.
    """
    pairs = own.memo("pairs", own.pairs) * q.shape[2]
    if halves and k.shape[2] % 2 == 0 and pairs >= 2 * SECTION_PAIRS:
        early, late = equal(q, k, [lanes.second, None])
        return [early], [late]
    return equal(q, k, [lanes.second]), []
