"""The kernels: what one GPU computes at one hop. KERNELS is the table; the same word is the `kernel=` argument.

A kernel is a module with the four functions of `Kernel`. It knows tensors, a `View` (intervals, tiles, ranges) and the
carried state; it knows no mask type, no rank and no communication. Called by `ring` and `gathering`, `delta` by `ops`.

Letters: B batch, L local queries, K visiting keys, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..mask import View
from . import cudnn, eager, fa4, gluon, gluon_fp8, sdpa, triton


class State(NamedTuple):
    """The running attention of the local queries, carried from hop to hop and updated in place.

    acc: [B, L, H, D] fp32, normalised over the keys seen so far; None where one hop is all there is
    out: [B, L, H, D] in q's type, written once, by the last hop; may be the same tensor as acc where q is fp32
    lse: [B, H, L] fp32, natural log of the softmax denominator; -inf = no key seen yet
    """

    acc: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


class Kernel(Protocol):
    """What every kernel module offers. The innermost stride of q, k, v, dout is 1, the others are free.

    One that does not take every mask also has `few`, see `pieces.few`: it is asked before anything is sent. One with
    CAPS_SCORES takes `softcap=` in forward and backward: scores s become softcap * tanh(s / softcap). One with
    SHARES_ROWS writes only its part of the rows of a view that shares them, see `mask.View`; dq then is fp32.
    """

    def refuses(self, q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
        """Why this kernel cannot do such a call, as a sentence that says what would do; None if it can."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
        scale: float, first: bool, last: bool,
    ) -> None:  # fmt: skip
        """Attend q [B, L, H, D] to the visiting k, v [B, K, G, D] and join the result to `state`, in place.

        first: start from (0, -inf) instead of reading the state; last: write `out` instead of `acc`. On these two every
        query is written, also those that see nothing here; in between untouched queries are left alone.
        """

    def delta(self, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
        """sum over D of out * dout, minus dlse, in fp32 [B, H, L]: once a backward, for all hops."""

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
        delta: torch.Tensor, view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float,
        deterministic: bool, adds: bool = False,
    ) -> None:  # fmt: skip
        """Gradients of one hop from the lse [B, H, L] and delta over *all* keys.

        dq: [B, L, H, D]: fp32 is added to; q's half type, where one hop is all there is, is written, every row
        dk, dv: [B, K, G, D], every row written (0 where nobody looks); fp32, or k's type where one hop is all there is
        adds: dk and dv are fp32 and are added to, like dq
        deterministic: the same call gives the same bits; otherwise dq may be summed in any order
        """


KERNELS: dict[str, Kernel] = {
    "eager": eager,
    "triton": triton,
    "gluon": gluon,
    "gluon_fp8": gluon_fp8,
    "sdpa": sdpa,
    "cudnn": cudnn,
    "fa4": fa4,
}
