"""The ring, written once: one loop forward and one backward, for every layout, mask, kernel and transport.

A block visits all ranks that need it, hop by hop. At each hop what the next one needs is posted before the kernel and
waited for after it, so it travels while the kernel runs. In the backward either keys and values travel or queries with
what belongs to them, and the gradients of the visiting block follow it, one hop behind. Nothing here knows a mask, a
process or a dtype rule but one: state and sums are fp32 from the first hop to the last and are rounded once. What
has no hops is handed on to `gathering`. Called by `ops` (processes) and, with `exchange.play`, by whoever wants a whole
ring inside one process.

Letters: B batch, L local tokens, H query heads, G key/value heads, D head dimension.
Source: Liu et al., Ring Attention, arXiv:2310.01889; queries that travel in the backward: BurstAttention,
arXiv:2403.09347.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from . import gathering
from .exchange import Transport
from .kernels import Kernel, State, sharing
from .lanes import Lane, Lanes, lanes_of, of_heads, one_lane
from .mask import View
from .travel import Blocks, Sums
from .trips import Route


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: Route, transport: Transport | None, kernel: Kernel, *,
    scale: float, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of the local queries to the keys of every rank.

    q: [B, L, H, D]; k, v: [B, L, G, D], the local parts, one dtype
    route: `Plan.forward`, on which keys and values travel; transport: None where the ring has one rank
    sinks: [H] fp32, a logit of each head that is in every softmax and has no value; None = none
    returns out [B, L, H, D] in q's type and lse [B, H, L] fp32, natural log, the sink in it; a row that sees nothing:
        0 and -inf, or the sink
    """
    if route.joined is not None:
        return gathering.forward(q, k, v, route, transport, kernel, scale=scale, sinks=sinks)
    batch, length, heads, _ = q.shape
    first, last = route.first, route.last
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    if last < 0:
        out.zero_()
        lse.fill_(-torch.inf)
    acc = None
    if first < last or sinks is not None:
        acc = out if q.dtype == torch.float32 else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if sinks is not None:  # a state that has seen one key, whose value is 0
        assert acc is not None
        acc.zero_()
        lse.copy_(sinks[:, None].expand_as(lse))
        first = -1
    state = State(acc, out, lse)
    for i, (visit, (k_visiting, v_visiting)) in enumerate(Blocks([k, v], route, one_lane(q, k, transport))):
        if visit.view:
            kernel.forward(q, k_visiting, v_visiting, visit.view, state, scale=scale, first=i == first, last=i == last)
    return out, lse


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    route: Route, transport: Transport | None, kernel: Kernel, *, scale: float, deterministic: bool = False,
    rounded: bool = True, transit: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of all ranks' losses, summed, with respect to the local q, k, v.

    dout: [B, L, H, D]; lse, delta: [B, H, L] fp32, over the keys of all ranks (`Kernel.delta`, once a backward)
    route: `Plan.backward`; what travels on it is what it says
    deterministic: see `Kernel.backward`
    rounded: False where dk and dv are summed with those of others afterwards, so must not be rounded yet
    transit: the type of gradients under way, fp32 or bf16; sums are fp32
    returns dq [B, L, H, D] and dk, dv [B, L, G, D], in q's type, summed in fp32 and rounded once, if at all
    """
    run = functools.partial(sharing.backward, kernel, scale=scale, deterministic=deterministic)
    if not route.travels:
        dtype = k.dtype if rounded else torch.float32
        dk, dv = (torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2))
        fill = torch.zeros if q.dtype == torch.float32 else torch.empty
        dq = fill(q.shape, dtype=q.dtype, device=q.device)  # contiguous, whatever q is: the op promises it
        if route.last < 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        view = route.visits[0].view
        assert view is not None
        run(dout, q, k, v, lse, delta, view, dq, dk, dv)
        return dq, dk, dv
    if route.joined is not None:
        tensors = dout, q, k, v, lse, delta
        return gathering.backward(*tensors, route, transport, run, rounded=rounded, transit=transit)
    lanes = lanes_of(q, k, transport)
    side = (Keys if route.what == "keys" else Queries)((dout, q, k, v, lse, delta), lanes, run)
    if not any(visit.own and visit.view for visit in route.visits):
        for x in side.own:
            x.zero_()
    sums = Sums(side.own, route, lanes, transit)
    with lanes.together():
        for i, (visit, blocks) in enumerate(Blocks(side.travelling, route, lanes)):
            fresh, grads = None, side.own
            if visit.view and not visit.own:
                fresh, grads = sums.fresh(visit)
            for lane in lanes.of(visit.part) if visit.view else ():
                assert visit.view is not None
                with lane.on():
                    side.compute(lane, blocks, visit.view, grads)
            sums.pass_on(i, fresh)
    return side.gradients(sums, k.dtype if rounded else torch.float32)


Tensors = Sequence[torch.Tensor]


class Keys:
    """A backward in which keys and values travel, with dk and dv behind them; dq stays.

    travelling: what the other ranks get; own: the gradients of this rank's own part of it, fp32, to which those that
        come home are added; they are written by `compute`
    """

    def __init__(self, tensors: Tensors, lanes: Lanes, run: Callable[..., None]) -> None:
        dout, q, k, v, lse, delta = tensors
        self._run, self._dtype = run, q.dtype
        self.travelling = (k, v)
        self.own = [_empty(x) for x in (k, v)]
        self._dq = _zeros(q)
        self._queries = {lane: of_heads(lane.queries, dout, q, lse, delta, self._dq) for lane in lanes.all}

    def compute(self, lane: Lane, blocks: Tensors, view: View, grads: Tensors) -> None:
        """Write the gradients of a lane's heads of these keys and values, and add to dq."""
        dout, q, lse, delta, dq = self._queries[lane]
        k, v, dk, dv = of_heads(lane.keys, *blocks, *grads)
        self._run(dout, q, k, v, lse, delta, view, dq, dk, dv)

    def gradients(self, sums: Sums, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq in q's type, dk and dv in `dtype`, when all lanes are done and what comes home is here."""
        dk, dv = sums.come_home(dtype)
        return self._dq.to(self._dtype), dk, dv


class Queries:
    """A backward in which queries travel with dout, lse and delta, and dq behind them; dk and dv stay. See `Keys`."""

    def __init__(self, tensors: Tensors, lanes: Lanes, run: Callable[..., None]) -> None:
        dout, q, k, v, lse, delta = tensors
        self._run, self._dtype = run, q.dtype
        self.travelling = (q, dout, lse, delta)
        self.own = [_empty(q)]
        self._total = [_empty(x) for x in (k, v)]  # dk, dv
        self._keys = {lane: of_heads(lane.keys, k, v, *self._total) for lane in lanes.all}
        self._new = set(lanes.all)  # whose heads of dk and dv nobody has written

    def compute(self, lane: Lane, blocks: Tensors, view: View, grads: Tensors) -> None:
        """Write the gradient of a lane's heads of these queries, and write dk and dv, or add to them."""
        q, dout, lse, delta, dq = of_heads(lane.queries, *blocks, *grads)
        k, v, dk, dv = self._keys[lane]
        self._run(dout, q, k, v, lse, delta, view, dq.zero_(), dk, dv, adds=lane not in self._new)
        self._new.discard(lane)

    def gradients(self, sums: Sums, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Keys.gradients`."""
        for lane in self._new:
            for x in self._total:
                x[:, :, lane.keys].zero_()
        dk, dv = (x.to(dtype) for x in self._total)
        (dq,) = sums.come_home(self._dtype)
        return dq, dk, dv


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
