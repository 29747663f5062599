"""A whole ring inside this process: global tensors in, global results out, through the ring's own loop."""

from __future__ import annotations

import dataclasses

import torch

from ringflash import arguments, exchange, mask, ops, ring, routes
from ringflash.kernels import KERNELS
from ringflash.kernels.choice import capped
from ringflash.layouts import LAYOUTS


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *,
    layout: str = "contiguous", size: int = 1, kernel: str = "eager", dlse: torch.Tensor | None = None,
    scale: float | None = None, deterministic: bool = False, rotate: str = "auto", arrangement: str = "ring",
    inner: int | None = None, transit: torch.dtype = torch.float32, sinks: torch.Tensor | None = None,
    softcap: float = 0.0, **masks,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """out, lse, dq, dk, dv of attention over a ring of `size` ranks played in threads, in the order of the sequence;
    with sinks dsinks too.


    q, k, v, dout: [B, S, H or G, D], whole; dlse: [B, H, S] or None; masks: causal, window, cu_seqlens, intervals
    inner: ranks of a node, all unless given
    """
    seq_len, scale = q.shape[1], arguments.scale_of(q, scale)
    given = {"causal": None, "window": None, "cu_seqlens": None, "intervals": None} | masks
    asked = arguments.mask_of(q, k, None, **given)
    lo, hi = asked.intervals(seq_len, seq_len)
    segments = LAYOUTS[layout].segments(seq_len, size, 1, dataclasses.replace(asked, window=None).work(seq_len))

    gradients_of_sinks: list[torch.Tensor] = []

    def rank(transport: exchange.Transport) -> tuple[torch.Tensor, ...]:
        plan = routes.Plan(segments, transport.rank, lo, hi, arrangement=arrangement, inner=inner)
        where = torch.from_numpy(mask.positions(segments[transport.rank])).to(q.device)
        q_local, k_local, v_local, dout_local = (x.detach()[:, where] for x in (q, k, v, dout))
        dlse_local = None if dlse is None else dlse[:, :, where]
        way, engine = transport if size > 1 else None, capped(KERNELS[kernel], softcap)
        out, lse = ring.forward(q_local, k_local, v_local, plan.forward, way, engine, scale=scale, sinks=sinks)
        dsinks, delta = ops._sinks_gradient(sinks, lse, engine.delta(out, dout_local, dlse_local), dlse_local)
        route = plan.backward(routes.sizes_of(q_local, k_local, transit), rotate)
        grads = ring.backward(
            dout_local, q_local, k_local, v_local, lse, delta, route, way, engine,
            scale=scale, deterministic=deterministic, transit=transit,
        )  # fmt: skip
        if sinks is not None:
            gradients_of_sinks.append(dsinks)
        return out, lse.transpose(1, 2), *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))

    results = exchange.play(size, rank)
    order = torch.argsort(torch.cat([torch.from_numpy(mask.positions(part)) for part in segments])).to(q.device)
    whole = [torch.cat(parts, 1)[:, order] for parts in zip(*results, strict=True)]
    whole[1] = whole[1].transpose(1, 2)
    if gradients_of_sinks:
        whole.append(torch.stack(gradients_of_sinks).sum(0))
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), whole, strict=False))
