"""Dense attention in fp64: the definition of correct. Every kernel, layout and ring is tested against this file.

Memory is S x S; autograd differentiates it. It shares `mask.intervals` with the library on purpose: that function is in
turn tested against masks written down pair by pair.
"""

from __future__ import annotations

import torch

from . import arguments
from .layout import Layout


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    causal: bool | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | list[int] | None = None,
    intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T + mask) v, dense, in fp64.

    q: [B, S, H, D]; k, v: [B, S_k, G, D], any float type, always the whole sequence, also with layout=
    layout: takes its mask (causal, documents, intervals); the other arguments as in `ringflash.attention`
    returns out [B, S, H, D] fp64, or (out, lse [B, H, S] fp64, natural log); rows that see nothing: out 0, lse -inf

    Source: Vaswani et al., arXiv:1706.03762.
    """
    _check(q, k, v, layout)
    arguments.sinks_of(q, sinks)  # checked alone: here they stay as exact as they are
    cap = arguments.softcap_of(softcap)
    mask = arguments.mask_of(q, k, layout, causal=causal, window=window, cu_seqlens=cu_seqlens, intervals=intervals)
    lo, hi = (torch.from_numpy(bound).to(q.device) for bound in mask.intervals(q.shape[1], k.shape[1]))
    scale = arguments.scale_of(q, scale)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    key = torch.arange(k.shape[1], device=q.device)
    seen = (key >= lo[:, None]) & (key < hi[:, None])  # [S, S_k]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # a key that everybody sees
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse, weights = _softmax(scores)
    out = torch.einsum("bhqk,bkhd->bqhd", weights[..., : k.shape[1]], v)
    return (out, lse) if arguments.flag_of("return_lse", return_lse) else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout | None) -> None:
    """As `ringflash.attention` checks its tensors, but for their type, head dimension and length."""
    arguments.check_shapes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} is {tensor.dtype}; the reference takes floating point tensors")
    arguments.check_sizes(q, k, v)
    if not q.shape[3]:
        raise ValueError("q has head dimension 0; the reference takes any of at least 1")
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {type(layout).__name__}; it must come from ring.layout(...)")
    if not q.shape[1] == k.shape[1] == layout.seq_len:
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}; "
            f"the reference takes the whole sequence of {layout.seq_len}"
        )


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse, weights) over the last axis; a row of -inf gives -inf, zeros and zero gradients."""
    if not scores.shape[-1]:
        return scores.sum(-1) - torch.inf, scores
    top = scores.amax(-1, keepdim=True).detach()
    empty = top == -torch.inf
    weights = (scores - top.masked_fill(empty, 0.0)).exp()
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    lse = (top.masked_fill(empty, 0.0) + total.log()).masked_fill(empty, -torch.inf)
    return lse.squeeze(-1), weights / total
