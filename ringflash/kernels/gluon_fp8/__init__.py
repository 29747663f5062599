"""Attention of one hop with e4m3 products for Hopper: twice the rate of `gluon`'s forward, a tenth of its digits.

The four functions of `kernels.Kernel`, chosen by name only. The forward rounds queries by row, keys and values by key
tile, and probabilities, to e4m3 (`quantise_kernel`, `forward_kernel`); numbers far below the largest of their row or
tile lose digits. The state is fp32 as everywhere, so hops add no error.

The backward is `gluon`'s, in q's own type, for the rounded q, k, v: the gradient of what the forward computed, handed
on as that of q, k, v. With the q, k, v as given its probabilities exp(score - lse) would miss a sum of 1 by the factor
exp(error of the score), which large scores make huge. Errors beside bf16's, measured: docs/results.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...mask import View
from .. import gluon
from ..gluon import delta
from .tiling import HEAD_DIMS

if TYPE_CHECKING:
    from .. import State

__all__ = ["backward", "delta", "forward", "refuses"]


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """See `kernels.Kernel.refuses`. Deterministic where asked, any number of hops."""
    if reason := gluon.refuses(q, k, deterministic, num_hops):
        return f"kernel 'gluon_fp8' rests on another: {reason}"
    if q.shape[3] not in HEAD_DIMS:
        return f"kernel 'gluon_fp8' needs a head dimension in {HEAD_DIMS}, got {q.shape[3]}; kernel='gluon' takes it"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    from . import launch

    with torch.cuda.device_of(q):
        launch.forward(q, k, v, view, state, scale=scale, first=first, last=last)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    from . import launch

    with torch.cuda.device_of(q):
        q, k, v = launch.represented(q, k, v, view)
    gluon.backward(dout, q, k, v, lse, delta, view, dq, dk, dv, scale=scale, deterministic=deterministic, adds=adds)
