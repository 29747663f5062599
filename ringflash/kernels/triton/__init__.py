"""Attention of one hop in Triton: NVIDIA and AMD GPUs, and CPUs under TRITON_INTERPRET=1.

The four functions of `kernels.Kernel`. triton is imported when one of them is called, so that `import ringflash` works
without it. `launch` is the host side, `forward_kernel` and `backward_kernels` are the device side; `specialised` is a
faster forward, with the look at its numbers that comes before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...mask import View
from .tiling import HEAD_DIMS

if TYPE_CHECKING:
    from .. import State


CAPS_SCORES = True
SHARES_ROWS = True


def refuses(q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int) -> str | None:
    """See `kernels.Kernel.refuses`. Always deterministic, any number of hops."""
    try:
        import triton
    except ImportError as error:
        return f"kernel 'triton' needs the package triton ({error}); kernel='eager' needs nothing"
    interpreted = triton.knobs.runtime.interpret
    if q.device.type != "cuda" and not interpreted:
        return f"kernel 'triton' needs a GPU, or TRITON_INTERPRET=1; q is on {q.device}, where kernel='eager' runs"
    if q.shape[3] not in HEAD_DIMS:
        return f"kernel 'triton' needs a head dimension in {HEAD_DIMS}, got {q.shape[3]}"
    if q.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(q.device)
        if capability < (8, 0):
            return (
                f"kernel 'triton' needs compute capability 8.0, {q.device} has {capability}; kernel='eager' runs there"
            )
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View, state: State, *,
    scale: float, first: bool, last: bool, softcap: float = 0.0,
) -> None:  # fmt: skip
    """See `kernels.Kernel.forward`."""
    from . import launch, specialised

    with torch.cuda.device_of(q):
        if softcap:
            launch.forward(q, k, v, view, state, scale=scale, first=first, last=last, softcap=softcap)
        else:
            specialised.forward(q, k, v, view, state, scale=scale, first=first, last=last)


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.Kernel.delta`."""
    from . import launch

    with torch.cuda.device_of(out):
        return launch.delta(out, dout, dlse)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    view: View, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, scale: float, deterministic: bool,
    adds: bool = False, softcap: float = 0.0,
) -> None:  # fmt: skip
    """See `kernels.Kernel.backward`."""
    from . import launch

    with torch.cuda.device_of(q):
        launch.key_gradients(dout, q, k, v, lse, delta, view, dk, dv, scale=scale, adds=adds, softcap=softcap)
        launch.query_gradient(dout, q, k, v, lse, delta, view, dq, scale=scale, softcap=softcap)
