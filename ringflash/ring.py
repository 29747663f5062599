"""The ring, written once: one loop forward and one backward, for every layout, mask, kernel and transport.

The keys and values of a rank visit all ranks that need them, hop by hop. At each hop the block for the next hop is
posted before the kernel and waited for after it, so it travels while the kernel runs. In the backward the gradients of
the visiting block travel with it, one hop behind. Nothing here knows a mask, a process or a dtype rule but one: the
state from the first hop to the last is fp32 and is rounded once. Called by `ops` (processes) and, with
`exchange.play`, by whoever wants a whole ring inside one process.

Letters: B batch, L local tokens, H query heads, G key/value heads, D head dimension.
Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from .exchange import Pending, Transport
from .kernels import Kernel, State
from .mask import Plan


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, transport: Transport | None, kernel: Kernel, *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of the local queries to the keys of every rank.

    q: [B, L, H, D]; k, v: [B, L, G, D], the local parts, one dtype
    plan: the hops and what this rank sees at each; transport: None where the ring has one rank
    returns out [B, L, H, D] in q's type and lse [B, H, L] fp32, natural log; a row that sees nothing: 0 and -inf
    """
    batch, length, heads, _ = q.shape
    first, last = plan.first, plan.last
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    if last < 0:
        out.zero_()
        lse.fill_(-torch.inf)
    acc = None
    if first < last:
        acc = out if q.dtype == torch.float32 else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    state = State(acc, out, lse)
    for i, (k_visiting, v_visiting) in enumerate(_visits(k, v, plan.hops, transport)):
        if view := plan.views[i]:
            kernel.forward(q, k_visiting, v_visiting, view, state, scale=scale, first=i == first, last=i == last)
    return out, lse


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    plan: Plan, transport: Transport | None, kernel: Kernel, *, scale: float, deterministic: bool = False,
    rounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of all ranks' losses, summed, with respect to the local q, k, v.

    dout: [B, L, H, D]; lse, delta: [B, H, L] fp32, over the keys of all ranks (`Kernel.delta`, once a backward)
    deterministic: see `Kernel.backward`
    rounded: False where dk and dv are summed with those of others afterwards, so must not be rounded yet
    returns dq [B, L, H, D] and dk, dv [B, L, G, D], fp32, or in q's type where one hop is all there is
    """
    hops = plan.hops
    run = functools.partial(kernel.backward, scale=scale, deterministic=deterministic)
    if hops in ((), (0,)):
        dtype = k.dtype if rounded else torch.float32
        dk, dv = (torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2))
        fill = torch.zeros if q.dtype == torch.float32 else torch.empty
        dq = fill(q.shape, dtype=q.dtype, device=q.device)  # contiguous, whatever q is: the op promises it
        if plan.last < 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        assert plan.views[0] is not None
        run(dout, q, k, v, lse, delta, plan.views[0], dq, dk, dv)
        return dq, dk, dv
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    total = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)  # dk, dv of the block visiting now
    fresh, spare = torch.empty_like(total), torch.empty_like(total)
    moving: Pending | None = None
    for i, (k_visiting, v_visiting) in enumerate(_visits(k, v, hops, transport)):
        view = plan.views[i]
        if view:
            run(dout, q, k_visiting, v_visiting, lse, delta, view, dq, *(fresh if i else total))
        if moving is not None:
            # what this block collected elsewhere has travelled under the kernel: add ours on arrival
            moving.wait()
            total, spare = spare, total
            if view:
                total += fresh
        if i + 1 < len(hops):
            moving = _move(transport, total, spare, hops[i + 1] - hops[i], f"gradients after hop {hops[i]}")
    if hops[-1]:
        _move(transport, total, spare, -hops[-1], f"gradients home from hop {hops[-1]}").wait()
        total = spare
    return dq, total[0], total[1]


def _visits(
    k: torch.Tensor, v: torch.Tensor, hops: tuple[int, ...], transport: Transport | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values visiting this rank at each hop. The next ones travel until the caller asks for them."""
    if hops in ((), (0,)):
        yield from [(k, v)] * len(hops)
        return
    block = torch.stack((k, v))  # [2, B, L, G, D]: one message a hop
    spare = torch.empty_like(block)
    if hops[0]:
        _move(transport, block, spare, hops[0], f"keys and values for hop {hops[0]}").wait()
        block, spare = spare, block
    for here, there in zip(hops, (*hops[1:], None), strict=True):
        pending = None
        if there is not None:
            pending = _move(transport, block, spare, there - here, f"keys and values for hop {there}")
        yield block[0], block[1]
        if pending is not None:
            pending.wait()
            block, spare = spare, block


def _move(transport: Transport | None, send: torch.Tensor, receive: torch.Tensor, jump: int, what: str) -> Pending:
    """The same move on every rank: `send` goes `jump` ranks up the ring, `receive` is filled from as far below."""
    assert transport is not None, "a ring of one rank has no hop but 0"
    up, down = (transport.rank + jump) % transport.size, (transport.rank - jump) % transport.size
    return transport.post({up: send}, {down: receive}, what)
