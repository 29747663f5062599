"""Attention of one hop by torch's own fused kernels: a second opinion that shares no arithmetic with the others.

Those kernels know two masks, none and causal from the top left. So a hop is cut into pieces that are full rectangles or
causal squares; each is computed in fp32, half types upcast, and joined to the state. On CPUs it runs rings; on NVIDIA
GPUs one hop, by the memory-efficient kernels, whose fp32 products are exact to fp32 (three TF32 products each).

Letters: B batch, N rows of either side, H query heads, G key/value heads, D head dimension, n rows of a piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..mask import View, positions
from ..merging import merge
from .eager import delta

if TYPE_CHECKING:
    from . import State

__all__ = ["backward", "delta", "forward", "refuses"]

PAD = 8  # columns added in the backward: one is needed, whole 32-byte units keep the kernels' loads aligned
LSE_UNIT = 32  # the memory-efficient backward reads lse in runs of 32 rows
EMPTY, JUMP = -2, -1  # in `_runs`: a row that sees nothing; a step that is neither 0 nor 1


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """On CPUs nothing; on NVIDIA GPUs rings and deterministic gradients; other devices altogether."""
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"it runs on CPUs and NVIDIA GPUs, and q is on {q.device}; kernel='eager' runs on every device"
    if num_hops > 1:
        return f"on a GPU it checks one hop, and this ring has {num_hops} ranks; kernel='triton' runs rings"
    if deterministic:
        return "on a GPU its gradients differ from call to call; deterministic=True needs kernel='triton' or 'eager'"
    return None


class Piece(NamedTuple):
    """A part of one hop that a fused kernel computes in one call. Never empty.

    rows, keys: which local queries and which visiting keys
    causal: row i of n sees the first i + 1 of n keys; otherwise every row sees every key
    mirrored: causal once rows and keys are both reversed: row i of n sees the last n - i of n keys
    """

    rows: slice
    keys: slice
    causal: bool = False
    mirrored: bool = False


class _Run(NamedTuple):
    """Rows whose keys [begin, end) stay, or move by one key each row, at either side. begin, end: of the first row."""

    row: int
    num_rows: int
    begin: int
    end: int
    begin_rises: bool
    end_rises: bool


def _runs(view: View) -> Iterator[_Run]:
    """The rows that see anything, cut where the two ends of what they see change their pace."""
    # visiting keys ascend, so what a row sees is one range of them, also across the borders of their segments
    keys = positions(view.k_segments)
    begin, end = np.searchsorted(keys, view.lo), np.searchsorted(keys, view.hi)
    begin_step, end_step = (np.append(np.diff(side), 2) for side in (begin, end))  # nothing follows the last row
    sees = begin < end
    regular = (begin_step < 2) & (end_step < 2)
    regular[:-1] &= sees[1:]
    step = np.where(sees, np.where(regular, 2 * begin_step + end_step, JUMP), EMPTY)
    changes = [*(np.flatnonzero(np.diff(step)) + 1).tolist(), len(step)]
    row = 0
    while row < len(step):
        change = changes[bisect_right(changes, row)]
        pace = int(step[row])
        if pace == EMPTY:
            row = change
            continue
        after = row + 1 if pace == JUMP else change + 1  # the row to which the last such step leads belongs to the run
        yield _Run(row, after - row, int(begin[row]), int(end[row]), pace in (2, 3), pace in (1, 3))
        row = after


def pieces(view: View) -> Iterator[Piece]:
    """Full rectangles and causal squares that hold every visible pair of the view once, and no other."""
    for run in _runs(view):
        both = run.begin_rises and run.end_rises
        height = run.end - run.begin if both else run.num_rows  # of a band, so many rows share a key
        for done in range(0, run.num_rows, height):
            row, count = run.row + done, min(height, run.num_rows - done)
            begin, end = run.begin + done, run.end + done  # done > 0 only in a band, where both rise
            rows, left, right = slice(row, row + count), begin, end
            if run.begin_rises:
                left = begin + count
                yield Piece(rows, slice(begin, left), causal=True, mirrored=True)
            elif run.end_rises:
                right = end - 1  # the square begins at the last key of the first row
            if left < right:
                yield Piece(rows, slice(left, right))
            below = slice(row + 1, row + count) if both else rows  # in a band the first row ends at the mirrored square
            if run.end_rises and below.start < below.stop:
                yield Piece(below, slice(right, end + count - 1), causal=True)


def _take(x: torch.Tensor, rows: slice, heads: int, mirrored: bool) -> torch.Tensor:
    """[B, N, H or G, D] -> [B, H, n, D]: rows in dense fp32, shared heads repeated; the last row first if mirrored."""
    part = x[:, rows].transpose(1, 2).float().repeat_interleave(heads // x.shape[2], 1)
    return part.flip(2) if mirrored else part


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    acc = state.acc
    if acc is None:
        acc = state.out if state.out.dtype == torch.float32 else torch.empty_like(state.out, dtype=torch.float32)
    if first:
        acc.zero_()
        state.lse.fill_(-torch.inf)
    heads = q.shape[2]
    for rows, keys, causal, mirrored in pieces(view):
        b_q = _take(q, rows, heads, mirrored) * scale  # not left to the kernel: see _fused
        b_k, b_v = (_take(x, keys, heads, mirrored) for x in (k, v))
        b_out, b_lse = _fused(b_q, b_k, b_v, causal=causal)
        if mirrored:
            b_out, b_lse = b_out.flip(2), b_lse.flip(2)
        acc[:, rows], state.lse[:, :, rows] = merge(acc[:, rows], state.lse[:, :, rows], b_out.transpose(1, 2), b_lse)
    if last and acc is not state.out:
        state.out.copy_(acc)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`. A row with lse = -inf is in no piece."""
    dk_total, dv_total = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (dk, dv))
    heads, groups = q.shape[2], k.shape[2]
    for rows, keys, causal, mirrored in pieces(view):
        b_q = _take(q, rows, heads, mirrored) * scale
        b_dout = _take(dout, rows, heads, mirrored)
        b_k, b_v = (_take(x, keys, heads, mirrored) for x in (k, v))
        b_lse, b_delta = (x[:, :, rows].flip(2) if mirrored else x[:, :, rows] for x in (lse, delta))
        grads = _fused_backward(b_dout, b_q, b_k, b_v, b_lse, b_delta, causal=causal)
        b_dq, b_dk, b_dv = (grad.flip(2) if mirrored else grad for grad in grads)
        dq[:, rows] += b_dq.transpose(1, 2) * scale
        for total, grad in ((dk_total, b_dk), (dv_total, b_dv)):
            total[:, keys] += grad.unflatten(1, (groups, -1)).sum(2).transpose(1, 2)
    dk.copy_(dk_total)
    dv.copy_(dv_total)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T) v of one piece by torch.

    q, k, v: [B, H, n, D] fp32; q is scaled already: torch's CPU kernel multiplies masked scores, -inf, by the scale, so
        that 0 and negative scales give NaN
    returns out [B, H, n, D] and lse [B, H, n], natural log, both fp32
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=1.0)
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=1.0)
    return out, lse[:, :, : q.shape[2]]


def _fused_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of one piece by torch, from the lse and delta [B, H, n] over all keys. The rest as in `_fused`.

    torch wants the output instead of delta and takes sum(out * dout) itself. That sum is made to be delta, exactly: one
    more column, 1 in dout and 0 in v, so that dout v^T stays as it is, and an output of delta there and 0 elsewhere.
    """
    width = q.shape[3]
    q, k, v, dout = (F.pad(x, (0, PAD)) for x in (q, k, v, dout))
    out = torch.zeros_like(dout)
    dout[..., width] = 1.0
    out[..., width] = delta
    aten = torch.ops.aten
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=1.0
        )
    else:
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_UNIT), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
        grads = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=1.0
        )[:3]
    return tuple(grad[..., :width] for grad in grads)
