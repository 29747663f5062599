"""Views that share the rows of their tensors, for kernels that write all rows they are given.

A kernel with `SHARES_ROWS` leaves alone what belongs to another view, see `mask.View`; the results of any other one are
made beside, and the rows with work are copied, run by run: others may be written meanwhile. Called by `gathering`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..mask import View
from . import Kernel, State


def forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, **given: Any
) -> None:  # fmt: skip
    """`Kernel.forward`, by any kernel. Where it shares rows, one that sees nothing may be written, or not."""
    if not view.shares_queries or hasattr(kernel, "SHARES_ROWS"):
        kernel.forward(q, k, v, view, state, **given)
        return
    runs = view.memo("runs of queries", lambda: _runs(view.lo < view.hi))
    made = State(state.acc, torch.empty_like(state.out), torch.zeros_like(state.lse))
    for rows in runs:
        made.lse[:, :, rows] = state.lse[:, :, rows]
    kernel.forward(q, k, v, view, made, **given)
    for rows in runs:
        state.out[:, rows] = made.out[:, rows]
        state.lse[:, :, rows] = made.lse[:, :, rows]


def backward(
    kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor, view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, **given: Any,
) -> None:  # fmt: skip
    """`Kernel.backward`, by any kernel; dq is fp32 where it shares rows. A key that nobody sees: as in `forward`."""
    if not view.shares_keys or hasattr(kernel, "SHARES_ROWS"):
        kernel.backward(dout, q, k, v, lse, delta, view, dq, dk, dv, **given)
        return
    made = [torch.empty_like(x) for x in (dk, dv)]
    kernel.backward(dout, q, k, v, lse, delta, view, dq, *made, **given)
    for keys in view.memo("runs of keys", lambda: _runs(view.keys_seen())):
        for x, y in zip((dk, dv), made, strict=True):
            x[:, keys] = y[:, keys]


def _runs(seen: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(seen, prepend=False, append=False))
    return [slice(begin, end) for begin, end in edges.reshape(-1, 2).tolist()]
