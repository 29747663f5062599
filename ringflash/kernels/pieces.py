"""A hop as a few pieces that the kernels of other libraries can compute, and the way from their results to a hop's.

Those kernels know two masks, none and causal from the top left, and no carried state. So a hop is cut into pieces that
are full rectangles or causal squares; `forward` joins each result to the state by `merge`, `backward` adds up the
gradients, which each piece computes from the lse and delta over all keys. Used by the kernels sdpa, cudnn and fa4.

Letters: B batch, N rows of either side, H query heads, G key/value heads, D head dimension, n rows, m keys of a piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..mask import View, positions
from ..merging import merge

if TYPE_CHECKING:
    from . import State

MOST = 64  # pieces of a hop, each a few launches of its own, that a kernel of other libraries is worth
EMPTY, JUMP = -2, -1  # in `_runs`: a row that sees nothing; a step that is neither 0 nor 1

# (q [B, n, H, D], k, v [B, m, G, D], causal=, scale=) -> out [B, n, H, D] in any type, lse [B, H, n] fp32, natural log
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# (dout, q, k, v, lse [B, H, n], delta [B, H, n], causal=, scale=) -> dq [B, n, H, D], dk, dv [B, m, G, D] in any type
Differentiate = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Piece(NamedTuple):
    """A part of one hop that one call computes. Never empty.

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


def cut(view: View) -> Iterator[Piece]:
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


def pieces(view: View) -> tuple[Piece, ...]:
    """`cut`, once a view."""
    return view.memo("pieces", lambda: tuple(cut(view)))


def few(view: View) -> tuple[Piece, ...]:
    """The pieces of a view; ValueError, before anything is computed, where they are more than MOST."""
    parts = pieces(view)
    if len(parts) > MOST:
        raise ValueError(
            f"this mask cuts a hop into {len(parts)} full rectangles and causal squares, and more than {MOST} are "
            "refused; kernel='triton' and kernel='gluon' compute any mask in one pass"
        )
    return parts


def forward(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Piece], state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """`kernels.Kernel.forward` of a hop whose pieces `attend` computes."""
    cover = _cover([part.rows for part in parts], q.shape[1])
    acc = state.acc
    if acc is None:
        # what is written once needs no fp32 in between
        direct = state.out.dtype == torch.float32 or cover.max(initial=0) < 2
        acc = state.out if direct else torch.empty_like(state.out, dtype=torch.float32)
    if first and (cover != 1).any():
        acc.zero_()
        state.lse.fill_(-torch.inf)
    written = np.full(q.shape[1], not first)
    for rows, keys, causal, mirrored in parts if q.numel() else ():
        b_q, b_k, b_v = _turn(1, mirrored, q[:, rows], k[:, keys], v[:, keys])
        b_out, b_lse = attend(b_q, b_k, b_v, causal=causal, scale=scale)
        (b_out,), (b_lse,) = _turn(1, mirrored, b_out), _turn(2, mirrored, b_lse)
        if written[rows].any():
            b_out, b_lse = merge(acc[:, rows], state.lse[:, :, rows], b_out, b_lse)
        acc[:, rows], state.lse[:, :, rows] = b_out, b_lse
        written[rows] = True
    if last and acc is not state.out:
        state.out.copy_(acc)


def backward(
    differentiate: Differentiate, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor, parts: Sequence[Piece], dq: torch.Tensor, dk: torch.Tensor,
    dv: torch.Tensor, *, scale: float, adds: bool,
) -> None:  # fmt: skip
    """`kernels.Kernel.backward` of a hop whose pieces `differentiate` computes. No piece has a row with lse = -inf."""
    cover = _cover([part.keys for part in parts], k.shape[1])
    direct = dk.dtype == torch.float32 or cover.max(initial=0) < 2
    totals = (dk, dv) if direct else tuple(torch.empty_like(x, dtype=torch.float32) for x in (dk, dv))
    if not adds and (cover != 1).any():
        for total in totals:
            total.zero_()
    added = dq
    if dq.dtype != torch.float32:
        once = _cover([part.rows for part in parts], q.shape[1]).max(initial=0) < 2
        added = dq.zero_() if once else torch.zeros_like(dq, dtype=torch.float32)
    written = np.full(k.shape[1], adds)
    for rows, keys, causal, mirrored in parts if q.numel() else ():
        tensors = _turn(1, mirrored, dout[:, rows], q[:, rows], k[:, keys], v[:, keys])
        statistics = _turn(2, mirrored, lse[:, :, rows], delta[:, :, rows])
        b_dq, *grads = _turn(1, mirrored, *differentiate(*tensors, *statistics, causal=causal, scale=scale))
        added[:, rows] += b_dq
        for total, grad in zip(totals, grads, strict=True):
            if written[keys].any():
                total[:, keys] += grad
            else:
                total[:, keys] = grad
        written[keys] = True
    for grad, total in ((dq, added), (dk, totals[0]), (dv, totals[1])):
        if total is not grad:
            grad.copy_(total)


def _cover(spans: list[slice], length: int) -> np.ndarray:
    """int [length]: in how many spans each position lies."""
    steps = np.zeros(length + 1, int)
    for span in spans:
        steps[span.start] += 1
        steps[span.stop] -= 1
    return np.cumsum(steps)[:-1]


def _turn(dim: int, mirrored: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, the last row first if mirrored."""
    return tuple(x.flip(dim) for x in tensors) if mirrored else tensors
