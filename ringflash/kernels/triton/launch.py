"""From tensors and a view to kernel launches: tile sizes, tile tables, tensor descriptors, grids. Host code.

Imports triton, so only `kernels.triton`'s functions import it, when they are called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...mask import View
from . import backward_kernels, forward_kernel
from .tiling import HEAD_DIMS, Card, Tiling, columns, tiling  # noqa: F401

LOG2E = 1.4426950408889634


def interpreting() -> bool:
    return triton.knobs.runtime.interpret


def card() -> Card:
    """The current device, as far as tile sizes depend on it; under the interpreter, a Hopper."""
    if interpreting():
        return Card("cuda", 90)
    target = triton.runtime.driver.active.get_current_target()
    return Card(target.backend, target.arch)


def rows_argument(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A [B, N, H, D] tensor as kernels take it: see `rows`."""
    assert x.stride(3) == 1, f"innermost stride {x.stride(3)}, must be 1"
    return x, x.stride(0), x.stride(1), x.stride(2)


def descriptors(x: torch.Tensor, block: int, card: Card) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """x [B, N, H, D] as descriptors of [B, H, N, D] with boxes of `block` rows, one per column block of D.

    (None, None), which means pointers, where the card has no TMA or the strides are not multiples of 16 bytes.
    """
    order = (0, 2, 1, 3)
    shape = [x.shape[dim] for dim in order]
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = [x.stride(dim) if x.shape[dim] > 1 else shape[3] for dim in order[:3]] + [1]
    aligned = x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides[:3])
    if not (card.has_tma and aligned and x.numel()):
        return None, None
    d0, d1 = columns(shape[3])
    boxes = [[1, 1, block, width] for width in (d0, d1) if width]
    made = [TensorDescriptor(x, shape, strides, box) for box in boxes]
    return made[0], made[1] if d1 else None


class Side(NamedTuple):
    """The tiles that one kernel walks in its loop: cut regularly or not."""

    ragged: bool  # some tile but the last is short
    num_full: int  # otherwise: tile i starts at i * block, and so many are full

    @classmethod
    def of(cls, segments, block: int) -> Side:
        counts = segments[:, 1]
        return cls(bool((counts[:-1] % block).any()), int(counts.sum()) // block)


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies. Full fp32 on NVIDIA is three TF32 products (as exact, see cuBLAS and CUTLASS 3xTF32):
    the FMA form keeps whole tiles in registers and spills tens of kilobytes. AMD has fp32 matrix cores.
    """
    if dtype != torch.float32 or interpreting():
        return "ieee"
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if card().backend == "cuda" else "ieee"


def constants(q: torch.Tensor, tiles: Tiling) -> dict:
    """The compile-time arguments that all attention kernels share."""
    d0, d1 = columns(q.shape[3])
    upcast = interpreting() and q.dtype == torch.bfloat16
    return {
        "D0": d0, "D1": d1, "BQ": tiles.block_q, "BK": tiles.block_k, "UPCAST": upcast, "PRECISION": precision(q.dtype),
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """Launch `forward_kernel.attend`. See `kernels.Kernel.forward`."""
    batch, num_rows, heads, width = q.shape
    num_keys, groups = k.shape[1:3]
    here = card()
    tile = tiling("forward", width, q.element_size(), here)
    table = view.tiles(tile.block_q, tile.block_k, q.device)
    lo, hi = view.bounds(q.device)
    keys = Side.of(view.k_segments, tile.block_k)
    k_desc, v_desc = descriptors(k, tile.block_k, here), descriptors(v, tile.block_k, here)
    num_tiles = len(table.q_tiles)
    if scale <= 0.0:  # the kernel wants a positive scale
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    forward_kernel.attend[(num_tiles * batch * heads,)](
        rows_argument(q), rows_argument(k), rows_argument(v), *k_desc, *v_desc,
        rows_argument(state.out if state.acc is None else state.acc), rows_argument(state.out), state.lse,
        lo, hi, table.q_tiles, table.k_tiles, table.q_ranges, table.q_order,
        scale * LOG2E, num_tiles, keys.num_full, heads, heads // groups, num_rows, num_keys,
        FIRST=first, LAST=last, RAGGED=keys.ragged, **constants(q, tile),
    )  # fmt: skip


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """Launch `backward_kernels.row_sums`. See `kernels.Kernel.delta`."""
    batch, num_rows, heads, width = out.shape
    total = out.new_empty((batch, heads, num_rows), dtype=torch.float32)
    d0, d1 = columns(width)
    block = 64
    num_tiles = triton.cdiv(num_rows, block)
    backward_kernels.row_sums[(num_tiles * batch * heads,)](
        rows_argument(out), rows_argument(dout), dlse, total, *(dlse.stride() if dlse is not None else (0, 0, 0)),
        num_tiles, heads, num_rows, D0=d0, D1=d1, BQ=block, num_warps=4,
    )  # fmt: skip
    return total


def backward(dout, q, k, v, lse, delta, view: View, dq, dk, dv, *, scale: float) -> None:
    """Launch `backward_kernels.keys` and `backward_kernels.queries`. See `kernels.Kernel.backward`."""
    _key_gradients(dout, q, k, v, lse, delta, view, dk, dv, scale=scale)
    _query_gradient(dout, q, k, v, lse, delta, view, dq, scale=scale)


def _key_gradients(dout, q, k, v, lse, delta, view: View, dk, dv, *, scale: float) -> None:
    batch, num_rows, heads, width = q.shape
    groups = k.shape[2]
    here = card()
    tile = tiling("keys", width, q.element_size(), here)
    table = view.tiles(tile.block_q, tile.block_k, q.device)
    lo, hi = view.bounds(q.device)
    rows = Side.of(view.q_segments, tile.block_q)
    descs = descriptors(q, tile.block_q, here) + descriptors(dout, tile.block_q, here)
    num_tiles = len(table.k_tiles)
    backward_kernels.keys[(num_tiles * batch * groups,)](
        *map(rows_argument, (q, k, v, dout)), *descs, rows_argument(dk), rows_argument(dv), lse, delta,
        lo, hi, table.q_tiles, table.k_tiles, table.k_ranges, table.k_order,
        scale, scale * LOG2E, num_tiles, rows.num_full, groups, heads // groups, num_rows,
        RAGGED=rows.ragged, **constants(q, tile),
    )  # fmt: skip


def _query_gradient(dout, q, k, v, lse, delta, view: View, dq, *, scale: float) -> None:
    batch, num_rows, heads, width = q.shape
    num_keys, groups = k.shape[1:3]
    here = card()
    tile = tiling("queries", width, q.element_size(), here)
    table = view.tiles(tile.block_q, tile.block_k, q.device)
    lo, hi = view.bounds(q.device)
    keys = Side.of(view.k_segments, tile.block_k)
    descs = descriptors(k, tile.block_k, here) + descriptors(v, tile.block_k, here)
    num_tiles = len(table.q_tiles)
    backward_kernels.queries[(num_tiles * batch * heads,)](
        *map(rows_argument, (q, k, v, dout)), *descs, rows_argument(dq), lse, delta,
        lo, hi, table.q_tiles, table.k_tiles, table.q_ranges, table.q_order,
        scale, scale * LOG2E, num_tiles, keys.num_full, heads, heads // groups, num_rows, num_keys,
        RAGGED=keys.ragged, **constants(q, tile),
    )  # fmt: skip
