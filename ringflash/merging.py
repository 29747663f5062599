"""Joining two results over disjoint sets of keys. Kernels carry their state themselves; this is for everybody else."""

from __future__ import annotations

import torch

from . import arguments


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the attention of the same queries to two disjoint sets of keys.

    out_a, out_b: [B, L, H, D] any float type, each normalised over its own keys
    lse_a, lse_b: [B, H, L] any float type, natural log of each softmax denominator; -inf = no key seen
    returns (out, lse): the attention to the union, in the types of out_a and lse_a; inputs are not modified

    Numerics: computed in fp32, symmetric, never overflows: only exp of a difference <= 0 is taken. Two empty rows give
        out 0, lse -inf and zero gradients. Differentiable in all four.
    Raises: TypeError for anything but dense floating tensors, ValueError for shapes that do not belong together.
    Source: Milakov & Gimelshein, arXiv:1805.02867 (online normaliser); Liu et al., arXiv:2310.01889 (ring).
    """
    _check(out_a, lse_a, out_b, lse_b)
    a, b = lse_a.float(), lse_b.float()
    empty = torch.maximum(a, b) == -torch.inf
    top = torch.maximum(a, b).detach().masked_fill(empty, 0.0)
    weight_a, weight_b = (a - top).exp(), (b - top).exp()
    # an empty row keeps its gradient out of the division and the logarithm, where 0 * inf would be NaN
    denominator = (weight_a + weight_b).masked_fill(empty, 1.0)
    lse = (top + denominator.log()).masked_fill(empty, -torch.inf)
    share_a, share_b = ((w / denominator).transpose(1, 2)[..., None] for w in (weight_a, weight_b))
    out = out_a.float() * share_a + out_b.float() * share_b
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{name} is {kind}; merge takes floating point tensors")
        arguments.check_dense(name, tensor)
        if tensor.device != out_a.device:
            raise ValueError(f"{name} is on {tensor.device} and out_a on {out_a.device}; all must be on one device")
    if out_a.dim() != 4 or out_a.shape != out_b.shape:
        raise ValueError(f"out_a {list(out_a.shape)} and out_b {list(out_b.shape)} must both be the same [B, L, H, D]")
    batch, length, heads, _ = out_a.shape
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tensor.shape != (batch, heads, length):
            raise ValueError(f"{name} is {list(tensor.shape)}; it must be [B, H, L] = {[batch, heads, length]}")
