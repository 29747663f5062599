"""Attention of one hop in Gluon, Triton's low-level dialect, for Hopper: TMA, wgmma, mbarriers, specialised warps.

The four functions of `kernels.Kernel`. triton is imported when one of them is called, so that `import ringflash` works
without it. `launch` is the host side. On the device `forward_kernel` computes the forward, `fused_kernel` the backward,
each with a form `..._in_turns_kernel` for short ranges; `keys_kernel` and `queries_kernel` where bits must repeat. For
head dimensions 192 and 256, whose dk and dv fit the registers of no consumer, `wide_keys_kernel` and `queries_kernel`
are the backward of either kind. What TMA cannot walk (a stride or a start that is no multiple of 16 bytes) is copied
first. Head dimensions 96 and 192 are computed as 128 and 256, with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...mask import View
from .tiling import HEAD_DIMS, TILINGS, columns

if TYPE_CHECKING:
    from .. import State

TYPES = (torch.bfloat16, torch.float16)
SHARES_ROWS = True


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """See `kernels.Kernel.refuses`. Deterministic where asked, any number of hops."""
    try:
        from triton.experimental import gluon  # noqa: F401
    except ImportError as error:
        return f"kernel 'gluon' needs a triton of 3.6 or 3.7 ({error}); kernel='eager' needs nothing"
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"kernel 'gluon' needs an NVIDIA GPU of compute capability 9.0, q is on {q.device}; see kernel='triton'"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        return f"kernel 'gluon' needs compute capability 9.0, {q.device} has {capability}; kernel='triton' runs there"
    if q.dtype not in TYPES:
        return f"kernel 'gluon' needs bfloat16 or float16, got {q.dtype}; kernel='triton' takes it"
    if q.shape[3] not in HEAD_DIMS:
        return f"kernel 'gluon' needs a head dimension in {HEAD_DIMS}, got {q.shape[3]}; kernel='triton' takes it"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    from . import launch

    with torch.cuda.device_of(q):
        launch.forward(q, k, v, view, state, scale=scale, first=first, last=last)


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.Kernel.delta`."""
    from ..triton import launch

    with torch.cuda.device_of(out):
        return launch.delta(out, dout, dlse)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    from . import launch

    with torch.cuda.device_of(q):
        if deterministic or columns(q.shape[3]) not in TILINGS["fused"]:
            launch.key_gradients(dout, q, k, v, lse, delta, view, dk, dv, scale=scale, adds=adds)
            launch.query_gradient(dout, q, k, v, lse, delta, view, dq, scale=scale)
        else:
            launch.all_gradients(dout, q, k, v, lse, delta, view, dq, dk, dv, scale=scale, adds=adds)
