"""From tensors and a view to kernel launches: tile sizes, tile tables, tensor descriptors, grids. Host code.

Imports triton, so only `kernels.triton`'s functions import it, when they are called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...mask import View
from ..scaling import positive
from ..trimming import trimmed
from . import backward_kernels, forward_kernel
from .tiling import Card, Tiling, columns, tiling

LOG2E = 1.4426950408889634
MAX_PROGRAMS = 2**31 - 1  # of a grid's first axis, on which everything lies: the other axes end at 65,535
DELTA_ROWS = 64  # rows of one program of `row_sums`


def interpreting() -> bool:
    return triton.knobs.runtime.interpret


def card() -> Card:
    """The current device, as far as tile sizes depend on it; under the interpreter, a Hopper."""
    if interpreting():
        return Card("cuda", 90)
    target = triton.runtime.driver.active.get_current_target()
    return Card(target.backend, target.arch)


def precision(dtype: torch.dtype, card: Card) -> str:
    """How `tl.dot` multiplies.

    fp32 on NVIDIA is three TF32 products, as exact as one in fp32 up to its last bits; the plain form holds whole tiles
    in registers and spills kilobytes of them. AMD has matrix cores for fp32.
    """
    if dtype != torch.float32 or interpreting():
        return "ieee"
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if card.backend == "cuda" else "ieee"


def rows_argument(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A [B, N, H, D] tensor as kernels take it: see `rows`.

    One batch entry has no stride: beyond 2^31 it would be of another type, for which kernels are compiled once more.
    """
    assert x.stride(3) == 1, f"innermost stride {x.stride(3)}, must be 1"
    return x, x.stride(0) if len(x) > 1 else 0, x.stride(1), x.stride(2)


def walkable(x: torch.Tensor) -> bool:
    """Can TMA walk x [B, N, H, D]? Its start and strides must be multiples of 16 bytes."""
    size = x.element_size()
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = (x.stride(dim) for dim in range(3) if x.shape[dim] > 1)
    return x.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in strides) and x.numel() > 0


def descriptors(x: torch.Tensor, block: int, card: Card) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """x [B, N, H, D] as descriptors of [B, H, N, D] with boxes of `block` rows, one per column block of D.

    (None, None), which means pointers, where the card has no TMA or the strides are not multiples of 16 bytes.
    """
    if not (card.has_tma and walkable(x)):
        return None, None
    order = (0, 2, 1, 3)
    shape = [x.shape[dim] for dim in order]
    strides = [x.stride(dim) if x.shape[dim] > 1 else shape[3] for dim in order[:3]] + [1]
    d0, d1 = columns(shape[3])
    boxes = [[1, 1, block, width] for width in (d0, d1) if width]
    made = [TensorDescriptor(x, shape, strides, box) for box in boxes]
    return made[0], made[1] if d1 else None


class Work(NamedTuple):
    """What one kernel has to do for one view, without heads and batch; made once a view.

    tables: lo, hi, q_tiles, k_tiles, ranges, order, on the device; the last two are those of the kernel's own tiles
    num_tiles: how many tiles; num_busy: how many of them, first in order, see anything
    num_full: of the tiles that the kernel walks in its loop; see `forward_kernel.attend`
    constants: the compile-time arguments that all attention kernels share, but for PRECISION
    """

    tiling: Tiling
    card: Card
    tables: tuple
    num_tiles: int
    num_busy: int
    num_full: int
    constants: dict

    @classmethod
    def of(cls, kernel: str, q: torch.Tensor, view: View) -> Work:
        return view.memo((cls, kernel, q.shape[3], q.dtype, q.device), lambda: cls._made(kernel, q, view))

    @classmethod
    def _made(cls, kernel: str, q: torch.Tensor, view: View) -> Work:
        here = card()
        tiles = tiling(kernel, q.shape[3], q.element_size(), here)
        made = view.tiles(tiles.block_q, tiles.block_k, q.device)
        host = view.tiles(tiles.block_q, tiles.block_k)
        if kernel == "keys":
            ranges, own = host.k_ranges, (made.k_ranges, made.k_order)
            counts, block = view.q_segments[:, 1], tiles.block_q
        else:
            ranges, own = host.q_ranges, (made.q_ranges, made.q_order)
            counts, block = view.k_segments[:, 1], tiles.block_k
        tables = (*view.bounds(q.device), made.q_tiles, made.k_tiles, *own)
        d0, d1 = columns(q.shape[3])
        constants = {
            "D0": d0, "D1": d1, "BQ": tiles.block_q, "BK": tiles.block_k,
            "RAGGED": bool((counts[:-1] % block).any()), "UPCAST": interpreting() and q.dtype == torch.bfloat16,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True,
        }  # fmt: skip
        num_busy = int((ranges[:, 0] < ranges[:, 3]).sum())
        return cls(tiles, here, tables, len(ranges), num_busy, int(counts.sum()) // block, constants)


def numbers(lse: torch.Tensor, delta: torch.Tensor, skipped: int, work: Work) -> tuple[TensorDescriptor | None, ...]:
    """lse, delta, lo, hi as descriptors of one dimension in boxes of a query tile.

    All None, which means pointers, where TMA cannot walk them: every tile must start at a multiple of 16 bytes.
    A kernel takes each as an argument of its own: the driver does not look for descriptors inside tuples.
    """
    some = (lse, delta, *work.tables[:2])
    aligned = not work.constants["RAGGED"] and lse.shape[2] % 4 == 0 and skipped % 4 == 0
    if not (aligned and work.card.has_tma and all(x.data_ptr() % 16 == 0 and 0 < x.numel() < 2**31 for x in some)):
        return (None,) * 4
    return tuple(TensorDescriptor(x, [x.numel()], [1], [work.tiling.block_q]) for x in some)


def grid(num_tiles: int, batch: int, heads: int) -> tuple[int]:
    programs = num_tiles * batch * heads
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"{num_tiles} tiles x batch {batch} x {heads} heads are {programs} programs, of at most {MAX_PROGRAMS}"
        )
    return (programs,)


def scores_of(scale: float, softcap: float) -> tuple[float, float, bool]:
    """(scale_log2, cap_scale, CAP) of the kernels, see `forward_kernel.attend`."""
    return (softcap * LOG2E, scale / softcap, True) if softcap else (scale * LOG2E, 0.0, False)


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool, softcap: float = 0.0) -> None:
    """Launch `forward_kernel.attend`. See `kernels.Kernel.forward`."""
    keys, view = trimmed(view).keys, trimmed(view).of_keys
    k, v = k[:, keys], v[:, keys]
    q, scale = positive(q, scale)
    batch, num_rows, heads, _ = q.shape
    num_keys, groups = k.shape[1:3]
    work = Work.of("forward", q, view)
    num_tiles = work.num_tiles if (first or last) and not view.shares_queries else work.num_busy
    if not num_tiles:
        return
    block, here = work.tiling.block_k, work.card
    *scales, caps = scores_of(scale, softcap)
    forward_kernel.attend[grid(num_tiles, batch, heads)](
        *map(rows_argument, (q, k, v)), *descriptors(k, block, here), *descriptors(v, block, here),
        rows_argument(state.out if state.acc is None else state.acc), rows_argument(state.out), state.lse, *work.tables,
        *scales, num_tiles, work.num_full, heads, heads // groups, num_rows, num_keys,
        FIRST=first, LAST=last, CAP=caps, PRECISION=precision(q.dtype, here), **work.constants,
    )  # fmt: skip


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """Launch `backward_kernels.row_sums`. See `kernels.Kernel.delta`."""
    batch, num_rows, heads, width = out.shape
    total = out.new_empty((batch, heads, num_rows), dtype=torch.float32)
    d0, d1 = columns(width)
    num_tiles = triton.cdiv(num_rows, DELTA_ROWS)
    backward_kernels.row_sums[grid(num_tiles, batch, heads)](
        rows_argument(out), rows_argument(dout), dlse, total, *((0, 0, 0) if dlse is None else dlse.stride()),
        num_tiles, heads, num_rows, D0=d0, D1=d1, BQ=DELTA_ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return total


def clear_around(part: slice, *grads: torch.Tensor) -> None:
    """Zero the rows of [B, N, H, D] tensors before and behind `part`."""
    for x in grads:
        if part.stop - part.start < x.shape[1]:
            x[:, : part.start].zero_()
            x[:, part.stop :].zero_()


def key_gradients(
    dout, q, k, v, lse, delta, view: View, dk, dv, *, scale: float, adds: bool, softcap: float = 0.0
) -> None:
    """Launch `backward_kernels.keys`: every row of dk and dv is written, or added to."""
    rows, keys, _, view = trimmed(view)
    some = adds or view.shares_keys
    if not some:
        clear_around(keys, dk, dv)
    dout, q, k, v, dk, dv = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], dk[:, keys], dv[:, keys]
    batch, num_rows, heads, _ = q.shape
    groups = k.shape[2]
    work = Work.of("keys", q, view)
    num_tiles = work.num_busy if some else work.num_tiles
    if not num_tiles:
        return
    block, here = work.tiling.block_q, work.card
    *scales, caps = scores_of(scale, softcap)
    backward_kernels.keys[grid(num_tiles, batch, groups)](
        *map(rows_argument, (q, k, v, dout)), *descriptors(q, block, here), *descriptors(dout, block, here),
        *numbers(lse, delta, rows.start, work), rows_argument(dk), rows_argument(dv), lse, delta, *work.tables,
        scale, *scales,
        num_tiles, work.num_full, groups, heads // groups, num_rows, lse.shape[2], rows.start,
        ADDS=adds, CAP=caps, PRECISION=precision(q.dtype, here), **work.constants,
    )  # fmt: skip


def query_gradient(dout, q, k, v, lse, delta, view: View, dq, *, scale: float, softcap: float = 0.0) -> None:
    """Launch `backward_kernels.queries`: add to dq where it is fp32, else write every row of it."""
    rows, keys, _, view = trimmed(view)
    adds = dq.dtype == torch.float32
    if not adds:
        clear_around(rows, dq)
    dout, q, k, v, dq = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], dq[:, rows]
    batch, _, heads, _ = q.shape
    num_keys, groups = k.shape[1:3]
    work = Work.of("queries", q, view)
    num_tiles = work.num_busy if adds else work.num_tiles
    if not num_tiles:
        return
    block, here = work.tiling.block_k, work.card
    *scales, caps = scores_of(scale, softcap)
    backward_kernels.queries[grid(num_tiles, batch, heads)](
        *map(rows_argument, (q, k, v, dout)), *descriptors(k, block, here), *descriptors(v, block, here),
        rows_argument(dq), lse, delta, *work.tables,
        scale, *scales, num_tiles, work.num_full, heads, heads // groups, lse.shape[2], rows.start, num_keys,
        CAP=caps, PRECISION=precision(q.dtype, here), **work.constants,
    )  # fmt: skip
