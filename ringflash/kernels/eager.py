"""Attention of one hop in plain torch, tile by tile: any device, any dtype of the contract, memory never L x K.

The kernel for CPUs and for checking others. Half types are computed in fp32, so a result differs from the fp64
reference only by fp32 rounding and by the input's own precision.
Source: FlashAttention, arXiv:2205.14135 (tiles, recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..mask import View

if TYPE_CHECKING:
    from . import State

BLOCK_Q = 256
BLOCK_K = 256
DELTA_ROWS = 8192  # of an fp32 copy in `delta`
SLAB = 1024  # keys multiplied at once: the largest score matrix is BLOCK_Q x SLAB a head
CAPS_SCORES = True


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """Nothing: every dtype, head dimension and device of the contract is computed, always deterministically."""
    return None


def _slabs(view: View, device: torch.device) -> Iterator[tuple[slice, list[tuple[slice, torch.Tensor | None]]]]:
    """For each query tile its rows and the slabs of keys it sees, with a mask [rows, keys], or None if all is seen."""
    tiles = view.tiles(BLOCK_Q, BLOCK_K)
    lo, hi = view.bounds(device)
    position = view.key_positions(device)
    start, end = tiles.k_tiles[:, 0], tiles.k_tiles[:, 0] + tiles.k_tiles[:, 2]
    for (row, _, count), (v0, w0, w1, v1) in zip(tiles.q_tiles.tolist(), tiles.q_ranges.tolist(), strict=True):
        rows = slice(row, row + count)
        slabs = []
        for first, last, whole in ((v0, w0, False), (w0, w1, True), (w1, v1, False)):
            if first == last:
                continue
            for begin in range(start[first], end[last - 1], SLAB):
                keys = slice(begin, min(begin + SLAB, int(end[last - 1])))
                seen = position[keys]
                mask = None if whole else (seen >= lo[rows, None]) & (seen < hi[rows, None])
                slabs.append((keys, mask))
        yield rows, slabs


def _seen(x: torch.Tensor, mask: torch.Tensor | None, dim: int) -> torch.Tensor:
    """x [B, G, H/G, N, D], 0 where a mask shows nothing along `dim`: there may be NaN, and 0 * NaN is NaN."""
    return x if mask is None else x.masked_fill(~mask.any(dim)[:, None], 0.0)


def _group(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).float()  # [B, N, H, D] -> [B, G, H/G, N, D] fp32


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool, softcap: float = 0.0,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    groups = k.shape[2]
    for rows, slabs in _slabs(view, q.device):
        if not (slabs or first or last):
            continue
        b_q = _group(q[:, rows], groups)
        if first:
            b_acc = torch.zeros_like(b_q)
            b_max = b_q.new_full(b_q.shape[:-1], -torch.inf)
            b_sum = torch.zeros_like(b_max)
        else:
            # the normalised state is a state whose maximum is lse and whose sum is 1
            assert state.acc is not None
            b_acc = _group(state.acc[:, rows], groups)
            b_max = state.lse[:, :, rows].unflatten(1, (groups, -1))
            b_sum = (b_max > -torch.inf).float()
        for keys, mask in slabs:
            scores = (b_q @ _group(k[:, keys], groups).mT).mul_(scale)  # [B, G, H/G, rows, keys]
            if softcap:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            if mask is not None:
                scores.masked_fill_(~mask, -torch.inf)
            new_max = torch.maximum(b_max, scores.amax(-1))
            safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
            weights = scores.sub_(safe_max[..., None]).exp_()
            shrink = (b_max - safe_max).exp_()
            b_sum = b_sum * shrink + weights.sum(-1)
            b_acc = b_acc * shrink[..., None] + weights @ _seen(_group(v[:, keys], groups), mask, 0)
            b_max = new_max
        empty = b_sum == 0
        denominator = b_sum.masked_fill(empty, 1.0)
        b_out = (b_acc / denominator[..., None]).permute(0, 3, 1, 2, 4).flatten(2, 3)  # -> [B, rows, H, D]
        target = state.out if last else state.acc
        assert target is not None
        target[:, rows] = b_out.to(target.dtype)
        state.lse[:, :, rows] = (b_max + denominator.log()).masked_fill(empty, -torch.inf).flatten(1, 2)


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.Kernel.delta`. In runs of rows, so that no fp32 copy of all of out exists.

    Of products and a sum: a matrix product would be one of TF32 where the user allows it.
    """
    runs = zip(out.split(DELTA_ROWS, 1), dout.split(DELTA_ROWS, 1), strict=True)
    total = torch.cat([(b_out.float() * b_dout).sum(-1).transpose(1, 2) for b_out, b_dout in runs], -1)
    return total if dlse is None else total - dlse.float()


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False, softcap: float = 0.0,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    groups = k.shape[2]
    if adds:
        dk_total, dv_total = dk, dv
    else:
        dk_total, dv_total = (
            x.zero_() if x.dtype == torch.float32 else torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv)
        )
    dq_total = dq if dq.dtype == torch.float32 else torch.zeros_like(dq, dtype=torch.float32)
    for rows, slabs in _slabs(view, q.device):
        if not slabs:
            continue
        tile_q, tile_dout = _group(q[:, rows], groups), _group(dout[:, rows], groups)
        b_lse, b_delta = (x[:, :, rows].unflatten(1, (groups, -1))[..., None] for x in (lse, delta))
        b_delta = b_delta.masked_fill(b_lse == -torch.inf, 0.0)
        b_lse = b_lse.masked_fill(b_lse == -torch.inf, torch.inf)  # a row that sees nothing: exp(s - inf) = 0
        b_dq = torch.zeros_like(tile_q)
        for keys, mask in slabs:
            b_k, b_v = (_seen(_group(x[:, keys], groups), mask, 0) for x in (k, v))
            b_q, b_dout = (_seen(x, mask, 1) for x in (tile_q, tile_dout))
            scores = (b_q @ b_k.mT).mul_(scale)
            slope = None
            if softcap:
                capped = scores.div_(softcap).tanh_()
                slope, scores = 1 - capped * capped, capped * softcap
            if mask is not None:
                scores.masked_fill_(~mask, -torch.inf)
            weights = scores.sub_(b_lse).exp_()
            # the heads of a group share k and v: fold them into the rows, and the products sum over them
            folded = weights.flatten(2, 3)
            dv_total[:, keys] += (folded.mT @ b_dout.flatten(2, 3)).transpose(1, 2)
            dscores = (b_dout @ b_v.mT).sub_(b_delta).mul_(weights).mul_(scale)
            if slope is not None:
                dscores *= slope
            b_dq += dscores @ b_k
            dk_total[:, keys] += (dscores.flatten(2, 3).mT @ b_q.flatten(2, 3)).transpose(1, 2)
        dq_total[:, rows] += b_dq.permute(0, 3, 1, 2, 4).flatten(2, 3)
    for x, total in ((dq, dq_total), (dk, dk_total), (dv, dv_total)):
        if total is not x:
            x.copy_(total)
