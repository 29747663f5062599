"""The start-up check of the Gluon kernels: every form for one type and head dimension, once, on a small case.

The kernels are compiled on the user's machine by the user's Triton, whose sm_90 compilers have produced wrong code for
such kernels before (docs/decisions.md). So before `kernel="auto"` may mean gluon, what they compute is compared with
the plain kernel in fp32: first, middle and last hop, one hop alone, the backward; tiles that are full, masked, short.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from ...mask import View, intervals

KEYS = (0, 200, 328, 520)  # borders of three hops: no block is a multiple of a tile
FIRST_QUERY = 200
HEADS, GROUPS, WINDOW, SCALE = 2, 1, 400, 0.2
# the relative error that means a fault; rounding to 8 or 11 bits of mantissa makes at most a third of it
LIMITS = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def fault(device: torch.device, dtype: torch.dtype, width: int, deterministic: bool) -> str | None:
    """What is wrong with the kernels on this device; None if nothing is. Compiles what is not in Triton's cache yet."""
    from .. import eager, gluon

    try:
        drawn = torch.Generator(device).manual_seed(0)
        shapes = [(KEYS[-1] - FIRST_QUERY, HEADS)] * 2 + [(KEYS[-1], GROUPS)] * 2
        tensors = [torch.randn(1, *shape, width, device=device, generator=drawn).to(dtype) for shape in shapes]
        with torch.no_grad():
            found = results(gluon, *tensors, deterministic=deterministic)
            wanted = results(eager, *(x.float() for x in tensors), deterministic=True)
    except Exception as error:  # a compiler may raise anything, and that must not end a run that has another kernel
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    for name, right in wanted.items():
        off = ((found[name].float() - right.float()).norm() / right.float().norm()).item()
        if not off <= LIMITS[dtype]:
            return f"{name} is off by {off:.1e} of its size, more than {LIMITS[dtype]:.1e}"
    return None


def results(
    kernel, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool
) -> dict[str, torch.Tensor]:
    """What a kernel computes in three hops, in one, and backwards. dout, q: [1, L, H, D]; k, v: [1, K, G, D]."""
    from .. import State

    rows = np.array([[FIRST_QUERY, q.shape[1]]])
    lo, hi = (side[FIRST_QUERY:] for side in intervals(KEYS[-1], KEYS[-1], causal=True, window=WINDOW))
    view = lambda begin, end: View(lo, hi, rows, np.array([[begin, end - begin]]))  # noqa: E731
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    hops = State(acc, torch.empty_like(q), acc.new_empty(1, HEADS, q.shape[1]))
    last = len(KEYS) - 2
    for i, (begin, end) in enumerate(itertools.pairwise(KEYS)):
        keys = slice(begin, end)
        kernel.forward(q, k[:, keys], v[:, keys], view(begin, end), hops, scale=SCALE, first=i == 0, last=i == last)
    whole, alone = view(0, KEYS[-1]), State(None, torch.empty_like(q), torch.empty_like(hops.lse))
    kernel.forward(q, k, v, whole, alone, scale=SCALE, first=True, last=True)
    dq, dk, dv = torch.zeros_like(acc), torch.empty_like(k), torch.empty_like(v)
    delta = kernel.delta(alone.out, dout, None)
    kernel.backward(dout, q, k, v, alone.lse, delta, whole, dq, dk, dv, scale=SCALE, deterministic=deterministic)
    return {
        "out over three hops": hops.out, "lse over three hops": hops.lse, "out": alone.out, "lse": alone.lse,
        "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
