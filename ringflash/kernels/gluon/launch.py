"""From tensors and a view to launches of the Gluon kernels: descriptors, tile tables, grids. Host code.

Imports triton, so only `kernels.gluon`'s functions import it, when they are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...mask import View
from ..triton.launch import LOG2E, grid, rows_argument
from . import forward_kernel, fused_kernel, keys_kernel, queries_kernel
from .tiling import TILINGS, Tiling, columns

GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
MAX_ROWS = 2**31 - 1  # of all heads together: the backward's TMA finds a row by one 32-bit coordinate


def walkable(x: torch.Tensor) -> torch.Tensor:
    """x [B, N, H, D] as TMA can walk it: itself, or a copy where a stride or the start is no multiple of 16 bytes."""
    assert x.stride(3) == 1, f"innermost stride {x.stride(3)}, must be 1"
    strides = [x.stride(dim) for dim in range(3) if x.shape[dim] > 1]
    if x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def descriptor(x: torch.Tensor, rows: int, pieces: int = 1) -> TensorDescriptor:
    """x [B, N, H, D], `walkable`, as a descriptor of [B, H, N, D] in boxes of one head, `rows` x `columns` / pieces."""
    order = (0, 2, 1, 3)
    shape = [x.shape[dim] for dim in order]
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = [x.stride(dim) if x.shape[dim] > 1 else shape[3] for dim in order[:3]] + [1]
    box = [1, 1, rows, columns(shape[3]) // pieces]
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
        tiles = TILINGS[kernel][columns(q.shape[3])]
        made: Any = view.tiles(tiles.block_q, tiles.block_k, q.device)
        host = view.tiles(tiles.block_q, tiles.block_k)
        side = "k" if kernel in ("keys", "fused") else "q"
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
        D=columns(width), WIDTH=width, BK=tiles.block_k, NC=tiles.num_consumers, STAGES=tiles.num_stages,
        REGISTERS=tiles.registers, FIRST=first, LAST=last, num_warps=4,
    )  # fmt: skip


def flat(x: torch.Tensor) -> TensorDescriptor:
    """One number a row, contiguous, as a descriptor of the tiles' 64 rows."""
    return TensorDescriptor(x, [x.numel()], [1], [64], gl.NVMMASharedLayout(0, 32, 1))


def row_starts(work: Work, q, lse, delta, scale: float) -> list[TensorDescriptor]:
    """Launch `keys_kernel.row_starts`: starts, deltas, los, his, one number a row."""
    batch, num_rows, heads, _ = q.shape
    lo, hi, q_tiles = work.tables[:3]
    block, num_q_tiles = work.tiling.block_q, len(q_tiles)
    if batch * heads * num_q_tiles * block > MAX_ROWS:
        raise ValueError(f"batch {batch} x {heads} heads x {num_rows} queries are more than {MAX_ROWS} rows")
    starts, deltas = lse.new_empty(2, batch * heads * num_q_tiles * block)
    los, his = lo.new_empty(2, num_q_tiles * block)
    keys_kernel.row_starts[grid(num_q_tiles, batch, heads)](
        lse, delta, lo, hi, q_tiles, starts, deltas, los, his, 1.0 / scale, num_q_tiles, num_rows, BQ=block, num_warps=2
    )
    return [flat(x) for x in (starts, deltas, los, his)]


def key_gradients(dout, q, k, v, lse, delta, view: View, dk, dv, *, scale: float) -> None:
    """Launch `keys_kernel.keys`: every row of dk and dv is written."""
    _by_key_tile("keys", dout, q, k, v, lse, delta, view, (dk, dv), scale=scale)


def all_gradients(dout, q, k, v, lse, delta, view: View, dq, dk, dv, *, scale: float) -> None:
    """Launch `fused_kernel.all_gradients`: dk and dv are written, dq is added to, in an order that varies."""
    _by_key_tile("fused", dout, q, k, v, lse, delta, view, (dk, dv), dq, scale=scale)


def _by_key_tile(
    kernel: str, dout, q, k, v, lse, delta, view: View, grads: tuple[torch.Tensor, ...], dq=None, *, scale: float
) -> None:
    """What the two kernels share whose program is a key tile."""
    batch, _, heads, width = q.shape
    groups = k.shape[2]
    work = Work.of(kernel, q, view)
    q, sharp = sharpened(q, scale)
    dout, q, k, v = map(walkable, (dout, q, k, v))
    tiles, q_tiles = work.tiling, work.tables[2]
    run, extra, scales = keys_kernel.keys, [], [sharp, sharp * LOG2E]
    if dq is not None:
        run, extra, scales = fused_kernel.all_gradients, [descriptor(dq, tiles.block_q, 2)], [*scales, scale]
    run[grid(work.num_tiles, batch, groups)](
        descriptor(q, tiles.block_q), descriptor(k, tiles.block_k), descriptor(v, tiles.block_k),
        descriptor(dout, tiles.block_q), *row_starts(work, q, lse, delta, sharp), *extra,
        *map(rows_argument, grads), *work.tables[2:], *scales, work.num_tiles, len(q_tiles), groups, heads // groups,
        D=columns(width), WIDTH=width, STAGES=tiles.num_stages, REGISTERS=tiles.registers, num_warps=4,
    )  # fmt: skip


def query_gradient(dout, q, k, v, lse, delta, view: View, dq, *, scale: float) -> None:
    """Launch `queries_kernel.queries`: add to dq."""
    batch, num_rows, heads, width = q.shape
    work = Work.of("queries", q, view)
    if not work.num_busy:
        return
    q, sharp = sharpened(q, scale)
    dout, q, k, v = map(walkable, (dout, q, k, v))
    tiles = work.tiling
    queries_kernel.queries[grid(work.num_busy, batch, heads)](
        descriptor(q, 64), descriptor(k, tiles.block_k), descriptor(v, tiles.block_k), descriptor(dout, 64),
        rows_argument(dq), lse, delta, *work.tables,
        scale, sharp * LOG2E, work.num_busy, work.num_full, heads, heads // k.shape[2], num_rows,
        D=columns(width), WIDTH=width, BK=tiles.block_k, STAGES=tiles.num_stages, REGISTERS=tiles.registers,
        num_warps=4,
    )  # fmt: skip
