"""Attention of one hop by FlashAttention-4, where the package flash-attn-4 is installed: its sm_90 path, on Hopper.

The four functions of `kernels.Kernel`. The hop is cut into `pieces`, full rectangles and causal squares, and joined in
fp32; windows and documents are many pieces, and more than `pieces.MOST` are refused. What the package returns is
rounded to the type of q: over P hops out, dq, dk and dv are rounded P times, where our kernels round once.

The functions called are private to the package and may change; written against 4.0.0b36. Each kind of call is compiled
at its first use.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING

import torch

from ..mask import View
from . import pieces
from .eager import delta
from .pieces import few
from .scaling import positive

if TYPE_CHECKING:
    from types import ModuleType

    from . import State

__all__ = ["backward", "delta", "few", "forward", "refuses"]

TYPES = (torch.bfloat16, torch.float16)


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """See `kernels.Kernel.refuses`. Any number of hops; what depends on the mask is refused by `few`."""
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"kernel 'fa4' needs an NVIDIA GPU of compute capability 9.0, q is on {q.device}; see kernel='triton'"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        return f"kernel 'fa4' needs compute capability 9.0, {q.device} has {capability}; kernel='triton' runs there"
    if q.dtype not in TYPES:
        return f"kernel 'fa4' needs bfloat16 or float16, got {q.dtype}; kernel='triton' takes it"
    try:
        interface = _interface()
    except ImportError as error:
        return f"kernel 'fa4' needs the package flash-attn-4 ({error}); kernel='triton' and 'gluon' need no package"
    if "dlse" not in inspect.signature(interface._flash_attn_bwd).parameters:
        return "kernel 'fa4' needs a flash-attn-4 whose backward takes dlse, as 4.0.0b36 does; see kernel='gluon'"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`. Raises ValueError for a view of more than `pieces.MOST` pieces."""
    parts = few(view)
    with torch.cuda.device_of(q):
        pieces.forward(attend, q, k, v, parts, state, scale=scale, first=first, last=last)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    parts = few(view)
    one = functools.partial(differentiate, deterministic=deterministic)
    with torch.cuda.device_of(q):
        pieces.backward(one, dout, q, k, v, lse, delta, parts, dq, dk, dv, scale=scale, adds=adds)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece; see `pieces.Attend`."""
    q, scale = positive(q, scale)
    return _flash_forward(q, k, v, causal=causal, scale=scale)


def differentiate(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, *,
    causal: bool, scale: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of one piece; see `pieces.Differentiate`.

    The package takes out and dlse instead of delta, and forms sum(out * dout) - dlse in fp32: with out = 0 and
    dlse = -delta that is delta, exactly.
    """
    sign = (scale > 0) - (scale < 0)
    q, scale = positive(q, scale)
    dq, dk, dv = _flash_backward(
        dout, q, k, v, lse.contiguous(), -delta, causal=causal, scale=scale, deterministic=deterministic
    )
    return dq * sign if sign < 1 else dq, dk, dv


@functools.cache
def _interface() -> ModuleType:
    """The package's module of functions; ImportError where it is missing.

    It and its compiler warn about each other, when it is imported and while it compiles. A filter for good, because one
    around each call would make Python forget which of the other warnings it has shown.
    """
    warnings.filterwarnings("ignore", module=r"(flash_attn|cutlass|quack)\b")
    from flash_attn.cute import interface

    return interface


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, n, H, D]; k, v: [B, m, G, D]; scale > 0; returns out in q's type, lse [B, H, n] fp32, natural log."""
    return _interface()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]


def _flash_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor, *,
    causal: bool, scale: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv in q's type, as if the output were 0. lse, dlse: [B, H, n] fp32; the rest as in `_flash_forward`."""
    return _interface()._flash_attn_bwd(
        q, k, v, torch.zeros_like(dout), dout, lse,
        softmax_scale=scale, causal=causal, deterministic=deterministic, dlse=dlse,
    )  # fmt: skip
