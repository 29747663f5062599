"""From tensors and a view to launches of the Gluon kernels: descriptors, tile tables, grids. Host code.

Imports triton, so only `kernels.gluon`'s functions import it, when they are called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...mask import View
from ..triton.launch import LOG2E, grid, rows_argument
from . import forward_kernel
from .tiling import TILINGS, Tiling

GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def walkable(x: torch.Tensor) -> torch.Tensor:
    """x [B, N, H, D] as TMA can walk it: itself, or a copy where a stride or the start is no multiple of 16 bytes."""
    assert x.stride(3) == 1, f"innermost stride {x.stride(3)}, must be 1"
    strides = [x.stride(dim) for dim in range(3) if x.shape[dim] > 1]
    if x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x [B, N, H, D], `walkable`, as a descriptor of [B, H, N, D] in boxes of `rows` rows of one head."""
    order = (0, 2, 1, 3)
    shape = [x.shape[dim] for dim in order]
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = [x.stride(dim) if x.shape[dim] > 1 else shape[3] for dim in order[:3]] + [1]
    box = [1, 1, rows, shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON_TYPES[x.dtype])
    return TensorDescriptor(x, shape, strides, box, layout)


class Work(NamedTuple):
    """What one kernel has to do for one view, without heads and batch.

    tables: lo, hi, q_tiles, k_tiles, ranges, order, on the device; the last two are those of the kernel's own tiles
    num_tiles: how many tiles; num_busy: how many of them, first in order, see anything
    num_full: so many key tiles, from the first on, are full
    """

    tiling: Tiling
    tables: tuple[torch.Tensor, ...]
    num_tiles: int
    num_busy: int
    num_full: int

    @classmethod
    def of(cls, kernel: str, q: torch.Tensor, view: View) -> Work:
        tiles = TILINGS[kernel][q.shape[3]]
        made = view.tiles(tiles.block_q, tiles.block_k, q.device)
        host = view.tiles(tiles.block_q, tiles.block_k)
        side = "k" if kernel == "keys" else "q"
        ranges = getattr(host, f"{side}_ranges")
        tables = (
            *view.bounds(q.device), made.q_tiles, made.k_tiles,
            getattr(made, f"{side}_ranges"), getattr(made, f"{side}_order"),
        )  # fmt: skip
        counts = view.k_segments[:, 1]
        ragged = bool((counts[:-1] % tiles.block_k).any())
        num_full = 0 if ragged else int(counts.sum()) // tiles.block_k
        return cls(tiles, tables, len(ranges), int((ranges[:, 0] < ranges[:, 3]).sum()), num_full)


def sharpened(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """(q, scale) with the same products and a scale > 0, which the kernels want: they take maxima before scaling."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale else (torch.zeros_like(q), 1.0)


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """Launch `forward_kernel.attend`. See `kernels.Kernel.forward`."""
    batch, num_rows, heads, width = q.shape
    work = Work.of("forward", q, view)
    num_tiles = work.num_tiles if first or last else work.num_busy
    if not num_tiles:
        return
    q, scale = sharpened(q, scale)
    q, k, v = map(walkable, (q, k, v))
    tiles = work.tiling
    forward_kernel.attend[grid(num_tiles, batch, heads)](
        descriptor(q, 64), descriptor(k, tiles.block_k), descriptor(v, tiles.block_k),
        rows_argument(state.out if state.acc is None else state.acc), rows_argument(state.out), state.lse, *work.tables,
        scale * LOG2E, num_tiles, work.num_full, heads, heads // k.shape[2], num_rows,
        D=width, BK=tiles.block_k, NC=tiles.num_consumers, STAGES=tiles.num_stages, REGISTERS=tiles.registers,
        FIRST=first, LAST=last, num_warps=4,
    )  # fmt: skip
