"""A gather: all rows that a rank works on lie in one block, its own between those of others, and one kernel takes them.

Nothing is carried from hop to hop and nothing is summed but what comes home. So that messages are hidden all the same,
heads are worked on in sections: while one is computed, the blocks of the next one arrive and the gradients of the one
before go home. `Gathered` is to `travel.Blocks` what `Returned` is to `travel.Sums`. Called by `ring`.

Letters: B batch, L local tokens, n rows, H query heads, G key/value heads, D head dimension, F gradients of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from .exchange import Messages, Pending, Transport
from .kernels import Kernel, State
from .lanes import Lane, Lanes, of_heads
from .travel import Loan, Pool, Record, add, in_units, put, take
from .trips import Message, Route

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
    heads, groups = q.shape[2], k.shape[2]
    pairs = route.pairs * heads
    most = 1 if backward and pairs > LONG_PAIRS else min(MAX_SECTIONS, max(1, pairs // SECTION_PAIRS))
    count = next(n for n in range(most, 0, -1) if groups % n == 0)
    second = transport.second_stream(q.device) if count > 1 else None
    queries, keys = ([slice(i * n // count, (i + 1) * n // count) for i in range(count)] for n in (heads, groups))
    streams = [second if i % 2 else None for i in range(count)]
    return Lanes(list(map(Lane, queries, keys, streams)), transport, q.device)


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


class Gathered:
    """The blocks of all sections, one after the other; that of the next one is on its way when one is handed out.

    Own rows are copied between those of others, and leave from there. A rank without messages has but its own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], route: Route, lanes: Lanes) -> None:
        assert route.joined is not None
        self._tensors, self._route, self._lanes, self._own = tensors, route, lanes, route.joined
        self._device = tensors[0].device
        self._record = Record(self._of(lanes.all[0]))
        (visit,), row = route.visits, [self._record.num_bytes]
        self._count = visit.count
        self._pool = Pool(visit.count, row, torch.uint8, self._device)
        loose = [one.rows.count for trip in route.trips for one in trip.receives if not one.pieces]
        self._loose = Pool(max(loose, default=0), row, torch.uint8, self._device)

    def _of(self, lane: Lane) -> list[torch.Tensor]:
        heads = lane.heads(self._route.what)
        return [x[:, :, heads] if x.dim() == 4 else x[:, heads] for x in self._tensors]

    def __iter__(self) -> Iterator[tuple[Lane, list[torch.Tensor]]]:
        """Each section with its tensors, [B, n, heads, D] or [B, heads, n], to be used on its stream."""
        sections = self._lanes.all
        if not self._route.trips:  # no copy, for no lane would wait for it
            yield from ((lane, self._of(lane)) for lane in sections)
            return
        under_way = [self._ask(sections[0])]
        for i, lane in enumerate(sections):
            if i + 1 < len(sections):
                under_way.append(self._ask(sections[i + 1]))
            block, pending, loose, _ = under_way.pop(0)
            with lane.on():
                for each in pending:
                    each.wait()
                for room, message in loose:
                    into, part = in_units(block.buffer[: self._count], room.buffer[: message.rows.count])
                    put(into, message.rows, part)
                    room.let_go()
            yield lane, self._record.read(block.buffer[: self._count])
            block.let_go()

    def _ask(self, lane: Lane) -> tuple[Loan, list[Pending], list[tuple[Loan, Message]], Messages]:
        """Post the messages of a section: its block, what is under way, what is to be put there, what is sent."""
        loan, pending, loose = Loan(self._pool, 1), [], []
        sends: Messages = []
        block = loan.buffer[: self._count]
        with self._lanes.beside():
            self._record.put(self._of(lane), self._own, block)
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
        return loan, pending, loose, sends


class Returned:
    """The gradients of the blocks of all sections: others' rows go home, and what comes home is added to the own ones.

    into: where those of the own rows go, [B, L, H, D] each, summed in fp32 and rounded once
    transit: the type in which gradients travel
    """

    def __init__(self, into: Sequence[torch.Tensor], route: Route, lanes: Lanes, transit: torch.dtype) -> None:
        assert route.joined is not None
        self._into, self._route, self._lanes, self._own, self._transit = into, route, lanes, route.joined, transit
        (visit,) = route.visits
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
            for (message, *others), room in self._rooms(arriving):
                values = room.sum(0, dtype=torch.float32) if others else room[0]
                for piece, (_, part) in zip(message.pieces, coming(values, message), strict=False):
                    block[piece] += part
                if not message.pieces:
                    add(block, message.rows, values)
            arriving.let_go()
            own = [(here, block[there]) for here, there in self._own.places()]
            for f, x in enumerate(self._into):
                rows = x[:, :, lane.heads(self._route.what)].movedim(1, 0)
                for here, values in own or [(slice(None), take(block, self._own))]:
                    rows[here].copy_(values[:, f])
        loan.let_go()
        self._before = None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: Route, transport: Transport | None, kernel: Kernel, *,
    scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `ring.forward`."""
    (visit,), (batch, length, heads, _) = route.visits, q.shape
    lanes, view = sections_of(q, k, route, transport, backward=False), visit.view
    fill = torch.empty if view else torch.zeros
    out = fill(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    if sinks is not None:  # a state that has seen one key, whose value is 0
        lse.copy_(sinks[:, None].expand_as(lse))
    elif view is None:
        lse.fill_(-torch.inf)
    with lanes.together():
        for lane, (k_all, v_all) in Gathered([k, v], route, lanes):
            if view is None:
                continue
            with lane.on():
                mine, rows = q[:, :, lane.queries], lse[:, lane.queries].contiguous()  # the same, or of few numbers
                acc = None if sinks is None else torch.zeros(mine.shape, dtype=torch.float32, device=q.device)
                state = State(acc, out[:, :, lane.queries], rows)
                kernel.forward(mine, k_all, v_all, view, state, scale=scale, first=sinks is None, last=True)
                if rows.data_ptr() != lse[:, lane.queries].data_ptr():
                    lse[:, lane.queries].copy_(rows)
    return out, lse


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    route: Route, transport: Transport | None, run: Callable[..., None], *, rounded: bool, transit: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `ring.backward`. run: the kernel's, with all that is the same in every call"""
    (visit,) = route.visits
    lanes, view = sections_of(q, k, route, transport, backward=True), visit.view
    keys_travel = route.what == "keys"
    dtype = k.dtype if rounded else torch.float32
    make = torch.empty if view else torch.zeros
    dq = (torch.zeros if q.dtype == torch.float32 else make)(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (make(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    travelling, into = ((k, v), (dk, dv)) if keys_travel else ((q, dout, lse, delta), (dq,))
    returned = Returned(into, route, lanes, transit)
    with lanes.together():
        for lane, block in Gathered(travelling, route, lanes):
            loan, grads = returned.fresh()
            with lane.on():
                if view is None:
                    loan.buffer.zero_()
                elif keys_travel:
                    mine = of_heads(lane.queries, dout, q, lse, delta, dq)
                    run(*mine[:2], *block, *mine[2:4], view, mine[4], *grads)
                else:
                    q_all, dout_all, lse_all, delta_all = (x if x.dim() == 4 else x.contiguous() for x in block)
                    mine = of_heads(lane.keys, k, v, dk, dv)
                    run(dout_all, q_all, *mine[:2], lse_all, delta_all, view, grads[0].zero_(), *mine[2:])
            returned.pass_on(lane, loan)
        returned.finish()
    return dq, dk, dv
