"""Attention of one hop by torch's own fused kernels: a second opinion that shares no arithmetic with the others.

The hop is cut into `pieces`, each computed in fp32, half types upcast. On CPUs it runs rings; on NVIDIA GPUs one hop,
by the memory-efficient kernels, whose fp32 products are exact to fp32 (three TF32 products each).

Letters: B batch, H query heads, G key/value heads, D head dimension, n rows of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..mask import View
from . import pieces
from .eager import delta

if TYPE_CHECKING:
    from . import State

__all__ = ["backward", "delta", "forward", "refuses"]

PAD = 8  # columns added in the backward: one is needed, whole 32-byte units keep the kernels' loads aligned
LSE_UNIT = 32  # the memory-efficient backward reads lse in runs of 32 rows


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


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    pieces.forward(attend, q, k, v, pieces.pieces(view), state, scale=scale, first=first, last=last)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    parts = pieces.pieces(view)
    pieces.backward(differentiate, dout, q, k, v, lse, delta, parts, dq, dk, dv, scale=scale, adds=adds)


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, n, H or G, D] -> [B, H, n, D]: dense fp32, shared heads repeated."""
    return x.transpose(1, 2).float().repeat_interleave(heads // x.shape[2], 1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece in fp32; see `pieces.Attend`."""
    heads = q.shape[2]
    b_q = _heads_first(q, heads) * scale  # not left to the kernel: see _fused
    out, lse = _fused(b_q, _heads_first(k, heads), _heads_first(v, heads), causal=causal)
    return out.transpose(1, 2), lse


def differentiate(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of one piece in fp32; see `pieces.Differentiate`."""
    heads, groups = q.shape[2], k.shape[2]
    b_dout, b_q, b_k, b_v = (_heads_first(x, heads) for x in (dout, q, k, v))
    dq, dk, dv = _fused_backward(b_dout, b_q * scale, b_k, b_v, lse, delta, causal=causal)
    dk, dv = (grad.unflatten(1, (groups, -1)).sum(2).transpose(1, 2) for grad in (dk, dv))
    return dq.transpose(1, 2) * scale, dk, dv


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
