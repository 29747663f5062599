"""Attention of one hop by cuDNN, as torch ships it: for cards and shapes where it is faster than our own kernels.

The four functions of `kernels.Kernel`. cuDNN knows full and causal and no carried state, so a hop is cut into `pieces`
and joined in fp32; windows and documents are many pieces, and more than `pieces.MOST` are refused. cuDNN rounds what
it returns to the type of q: over P hops out, dq, dk and dv are rounded P times, where our kernels round once. It plans
anew for each shape that it has not seen, so lengths that change with every batch of documents are slow.

Refused: fp32, D > 128, deterministic gradients, gradients of lse. cuDNN computes delta itself, as the sum of out * dout
of rows that it takes for the whole attention; `stand_in` is an `out` that gives it the delta of all hops.

Letters: B batch, H query heads, G key/value heads, D head dimension, n rows and m keys of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..mask import View
from . import eager, pieces, sdpa
from .pieces import few
from .scaling import positive

if TYPE_CHECKING:
    from . import State

TYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 128  # of a head, in cuDNN's backward
MAX_GRID = 65535  # of B and of H
UNIT_BYTES = 16  # starts and strides of what cuDNN reads


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """See `kernels.Kernel.refuses`. Any number of hops; what depends on the mask is refused by `few`."""
    if q.device.type != "cuda" or torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return f"kernel 'cudnn' needs an NVIDIA GPU and cuDNN, q is on {q.device}; see kernel='triton' and 'eager'"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"kernel 'cudnn' needs compute capability 8.0, {q.device} has {capability}; kernel='eager' runs there"
    if q.dtype not in TYPES:
        return f"kernel 'cudnn' needs bfloat16 or float16, got {q.dtype}; kernel='triton' takes it"
    if q.shape[3] > MAX_WIDTH:
        return f"kernel 'cudnn' needs a head dimension up to {MAX_WIDTH}, got {q.shape[3]}; kernel='triton' takes it"
    if max(q.shape[0], q.shape[2]) > MAX_GRID:
        return f"kernel 'cudnn' needs batch and heads up to {MAX_GRID}, q is {list(q.shape)}; kernel='triton' takes it"
    if deterministic:
        return "kernel 'cudnn' sums gradients in any order; deterministic=True needs kernel='triton' or 'gluon'"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`. Raises ValueError for a view of more than `pieces.MOST` pieces."""
    parts = few(view)
    with torch.cuda.device_of(q):
        pieces.forward(attend, q, k, v, parts, state, scale=scale, first=first, last=last)


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.Kernel.delta`. Raises ValueError for a gradient of lse, which no `out` can stand for."""
    if dlse is not None:
        raise ValueError(
            "kernel 'cudnn' has no gradient of lse, and one came; detach lse, or use kernel='triton' or 'gluon'"
        )
    return eager.delta(out, dout, None)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    assert not deterministic, "refuses() comes first"
    parts = few(view)
    with torch.cuda.device_of(q):
        pieces.backward(differentiate, dout, q, k, v, lse, delta, parts, dq, dk, dv, scale=scale, adds=adds)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece; see `pieces.Attend`."""
    if _thin(q, k):
        return sdpa.attend(q, k, v, causal=causal, scale=scale)
    q, scale = positive(q, scale)
    out, lse = _cudnn(*(walkable(x).transpose(1, 2) for x in (q, k, v)), causal=causal, scale=scale)
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def differentiate(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of one piece; see `pieces.Differentiate`."""
    if _thin(q, k):
        return sdpa.differentiate(dout, q, k, v, lse, delta, causal=causal, scale=scale)
    sign = (scale > 0) - (scale < 0)
    q, scale = positive(q, scale)
    b_q, b_k, b_v = (walkable(x).transpose(1, 2) for x in (q, k, v))
    b_dout = _ordered(dout.transpose(1, 2), b_q)
    b_out = _ordered(stand_in(dout, delta.transpose(1, 2)).transpose(1, 2), b_q)
    grads = _cudnn_backward(b_dout, b_q, b_k, b_v, b_out, lse[..., None].contiguous(), causal=causal, scale=scale)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq * sign if sign < 1 else dq, dk, dv


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A tensor in the place of `out`, whose product with dout sums to delta in each row.

    dout: [B, n, H, D]; delta: [B, n, H] fp32, the true sum of out * dout, over all keys
    returns [B, n, H, D] in dout's type, 0 but for two numbers a row, at the largest of |dout|: delta, and what rounding
        left of it

    Numerics: off by at most 2^-16 of delta in bf16 and 2^-22 in fp16, where rounding `out` itself costs 2^-8 and 2^-11
        of every term; exact where a row of dout has one nonzero entry or none. The first number is at most the sum of
        |out|, since |delta| is at most that times the largest |dout|.
    """
    limit = torch.finfo(dout.dtype).max
    out, size, rest = torch.zeros_like(dout), dout.abs(), delta[..., None]
    for _ in range(2):
        where = size.argmax(-1, keepdim=True)
        size.scatter_(-1, where, -1.0)
        grad = dout.gather(-1, where).float()
        share = (rest / grad).nan_to_num(0.0).clamp(-limit, limit).to(dout.dtype)
        out.scatter_(-1, where, share)
        rest = rest - share.float() * grad
    return out


def walkable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its start or a stride is no whole number of units, or is 0."""
    units = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    if x.stride(-1) == 1 and 0 not in x.stride() and all(unit % UNIT_BYTES == 0 for unit in units):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _ordered(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """x in the memory order of torch's own out. torch's plans did not always know the strides of out and dout."""
    if x.stride() == torch.empty_like(q, device="meta").stride() and x.data_ptr() % UNIT_BYTES == 0:
        return x
    return torch.empty_like(q).copy_(x)


def _thin(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Is the piece a single row or a single key? torch refuses cuDNN those."""
    return min(q.shape[1], k.shape[1]) == 1


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, H, n, D]; k, v: [B, G, m, D]; scale > 0; returns out in q's type, lse [B, H, n] or [B, H, n, 1] fp32."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]


def _cudnn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq [B, H, n, D], dk, dv [B, G, m, D] in q's type. lse: [B, H, n, 1], over all keys; the rest as in `_cudnn`."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )
