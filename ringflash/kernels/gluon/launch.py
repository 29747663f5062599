"""From tensors and a view to launches of the Gluon kernels: descriptors, tile tables, grids. Host code.

Imports triton, so only `kernels.gluon`'s functions import it, when they are called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...mask import View
from ..scaling import positive
from ..trimming import trimmed
from ..triton.launch import LOG2E, clear_around, grid, rows_argument
from . import (
    forward_in_turns_kernel,
    forward_kernel,
    fused_in_turns_kernel,
    fused_kernel,
    keys_kernel,
    queries_kernel,
    wide_keys_kernel,
)
from .jobs import BY_KEY, NUM_SMS, jobs_of, section_of
from .tiling import TILINGS, Tiling, columns
from .turns import turns

GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
SUM_BYTES = 2**30  # of a dq in fp32 that lies beside dq; so much is work enough for a launch
MAX_NUMBERS = 2**31 - 1  # two a row, of all heads together: the backward's TMA finds them by one 32-bit coordinate

# kernel -> its form whose programs stay, and the tiles that a program visits on average below which it is taken
IN_TURNS = {"forward": ("forward in turns", 24), "fused": ("fused in turns", 24)}


class Walkable(NamedTuple):
    """A tensor [B, N, H, D] that TMA can walk. shape, strides: of [B, H, N, D], in elements."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]


def walkable(x: torch.Tensor) -> Walkable:
    """x [B, N, H, D] as TMA can walk it: itself, or a copy where a stride or the start is no multiple of 16 bytes."""
    batch, rows, heads, width = x.shape
    in_batch, in_row, in_head, in_column = x.stride()
    assert in_column == 1, f"innermost stride {in_column}, must be 1"
    # the stride of a dimension of size 1 is never used, and may be anything
    sides = ((batch, in_batch), (heads, in_head), (rows, in_row))
    strides = [stride if size > 1 else width for size, stride in sides]
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and all(stride > 0 and stride % unit == 0 for stride in strides):
        return Walkable(x, [batch, heads, rows, width], [*strides, 1])
    return walkable(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x))


@functools.cache
def box_of(dtype: torch.dtype, *box: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    """(box, how it lies in shared memory)."""
    if len(box) == 1:
        return list(box), gl.NVMMASharedLayout(0, dtype.itemsize * 8, 1)
    return list(box), gl.NVMMASharedLayout.get_default_for(list(box), GLUON_TYPES[dtype])


def descriptor(x: Walkable, rows: int, pieces: int = 1) -> TensorDescriptor:
    """x as a descriptor of [B, H, N, D] in boxes of one head, `rows` x `columns` / pieces."""
    return TensorDescriptor(
        x.base, x.shape, x.strides, *box_of(x.base.dtype, 1, 1, rows, columns(x.shape[3]) // pieces)
    )


def flat(x: torch.Tensor, numbers: int) -> TensorDescriptor:
    """Numbers of rows, contiguous, as a descriptor of boxes of so many."""
    return TensorDescriptor(x, [x.numel()], [1], *box_of(x.dtype, numbers))


class Work(NamedTuple):
    """What one kernel has to do for one view, without heads and batch; made once a view. Tensors are on the device.

    kernel: a key of TILINGS; lo, hi: int32 [L]; q_tiles, k_tiles: see `mask.Tiles`
    jobs: int32 [num_tiles, 8], see `walk.job_and_head`
    num_tiles: how many tiles; num_busy: how many of them, first in order, see anything
    num_steps: how many tiles all its programs visit together
    regular: key tile i starts at i * block_k
    lengths: int [num_tiles] on the host, how many tiles each visits, the longest first
    bounds: int32 [num query tiles, 2, block_q], lo and hi tile by tile, (0, 0) behind a short tile's end
    """

    kernel: str
    tiling: Tiling
    lo: torch.Tensor
    hi: torch.Tensor
    q_tiles: torch.Tensor
    k_tiles: torch.Tensor
    jobs: torch.Tensor
    num_tiles: int
    num_busy: int
    num_steps: int
    regular: bool
    lengths: np.ndarray
    bounds: torch.Tensor

    @classmethod
    def of(cls, kernel: str, q: torch.Tensor, view: View) -> Work:
        width = columns(q.shape[3])
        return view.memo((cls, kernel, width, q.device), lambda: cls._made(kernel, width, q.device, view))

    @classmethod
    def _made(cls, kernel: str, width: int, device: torch.device, view: View) -> Work:
        tiles = TILINGS[kernel][width]
        made: Any = view.tiles(tiles.block_q, tiles.block_k, device, aligned=True)
        host: Any = view.tiles(tiles.block_q, tiles.block_k, aligned=True)
        regular = bool((host.k_tiles[:, 0] == np.arange(len(host.k_tiles)) * tiles.block_k).all())
        ranges = host.k_ranges if kernel in BY_KEY else host.q_ranges
        jobs = jobs_of(kernel, view, host, tiles)
        start, _, count = host.q_tiles.T[:, :, None]
        o_row = np.arange(tiles.block_q)
        rows = np.where(o_row < count, start + o_row, 0)
        bounds = np.stack([np.where(o_row < count, side[rows], 0) for side in (view.lo, view.hi)], 1)
        lengths = ranges[:, 3] - ranges[:, 0]
        num_busy = int((lengths > 0).sum())
        return cls(
            kernel, tiles, *view.bounds(device), made.q_tiles, made.k_tiles, torch.from_numpy(jobs).to(device),
            len(ranges), num_busy, int(lengths.sum()), regular, np.sort(lengths)[::-1],
            torch.from_numpy(bounds).to(device),
        )  # fmt: skip

    def section(self, view: View, groups: int, group: int, *shared: torch.Tensor) -> int:
        """How many heads end a grid together, see `walk.job_and_head` and `jobs.section_of`; made once a view.

        groups: of heads that share, in one batch entry, `group` heads of the grid each
        shared: [B, N, ..., D], what its programs read again and again
        """
        batch = shared[0].shape[0]
        group_bytes = sum(x.numel() * x.element_size() for x in shared) // (batch * groups)
        heads, head_bytes = batch * groups * group, -(-group_bytes // group)
        key = ("section", self.kernel, self.tiling, heads, head_bytes)
        return view.memo(key, lambda: section_of(self.lengths, heads, head_bytes))


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


def stays(kernel: str, q: torch.Tensor, view: View, num_heads: int) -> Work | None:
    """The work in the form whose programs stay and do one job after the other, where jobs are short and many.

    num_heads: of the grid, of all batch entries
    """
    name, short_steps = IN_TURNS[kernel]
    if columns(q.shape[3]) not in TILINGS[name]:
        return None
    work = Work.of(name, q, view)
    is_short = work.num_steps < short_steps * work.num_busy
    return work if is_short and work.num_busy * num_heads >= 2 * num_sms(q.device) else None


def all_turns(view: View, work: Work, num_tiles: int, *, batch: int, heads: int, section: int) -> torch.Tensor:
    """`turns.turns` of the first num_tiles jobs, on the device; made once a view."""
    tiles, device = work.tiling, work.jobs.device

    def make() -> torch.Tensor:
        host: Any = view.tiles(tiles.block_q, tiles.block_k, aligned=True)
        jobs = jobs_of(work.kernel, view, host, tiles)[:num_tiles]
        together = min(max(section, 2), batch * heads)  # after one head alone, programs would not end together
        return torch.from_numpy(turns(jobs, batch, heads, together, num_sms(device))).to(device)

    return view.memo(("turns", work.kernel, tiles, device, num_tiles, batch, heads, section), make)


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """Launch `forward_kernel.attend` or `forward_in_turns_kernel.attend_in_turns`. See `kernels.Kernel.forward`."""
    keys, view = trimmed(view).keys, trimmed(view).of_keys
    k, v = k[:, keys], v[:, keys]
    batch, num_rows, heads, width = q.shape
    in_turns = stays("forward", q, view, batch * heads)
    work = in_turns or Work.of("forward", q, view)
    num_tiles = work.num_tiles if (first or last) and not view.shares_queries else work.num_busy
    if not num_tiles:
        return
    q, scale = positive(q, scale)
    tiles = work.tiling
    run, programs, jobs = forward_kernel.attend, grid(num_tiles, batch, heads), work.jobs
    ends = [work.section(view, k.shape[2], heads // k.shape[2], k, v)]
    if in_turns:
        jobs = all_turns(view, work, num_tiles, batch=batch, heads=heads, section=ends[0])
        run, programs, num_tiles, ends = forward_in_turns_kernel.attend_in_turns, (num_sms(q.device),), len(jobs), []
    run[programs](
        descriptor(walkable(q), 64), descriptor(walkable(k), tiles.block_k), descriptor(walkable(v), tiles.block_k),
        rows_argument(state.out if state.acc is None else state.acc), rows_argument(state.out), state.lse,
        work.lo, work.hi, work.k_tiles, jobs,
        scale * LOG2E, num_tiles, work.regular, heads, heads // k.shape[2], num_rows, *ends,
        D=columns(width), WIDTH=width, BK=tiles.block_k, NC=tiles.num_consumers, STAGES=tiles.num_stages,
        REGISTERS=tiles.registers, FIRST=first, LAST=last, num_warps=4,
    )  # fmt: skip


def from_row(x: torch.Tensor, row: int) -> torch.Tensor:
    """[B, H, L], contiguous, as a kernel takes it that counts rows from `row` on: a pointer to the first of them."""
    return x.view(-1)[row:] if row else x


def row_starts(work: Work, lse, delta, row: int, scale: float) -> torch.Tensor:
    """Launch `keys_kernel.row_starts`: what the accumulators start at, two numbers a row. row: the view's first."""
    batch, heads, num_rows = lse.shape
    q_tiles, block = work.q_tiles, work.tiling.block_q
    if batch * heads * len(q_tiles) * block * 2 > MAX_NUMBERS:
        raise ValueError(f"batch {batch} x {heads} heads x {num_rows} queries are more than {MAX_NUMBERS // 2} rows")
    starts = lse.new_empty(batch * heads * len(q_tiles) * block * 2)
    keys_kernel.row_starts[grid(len(q_tiles), batch, heads)](
        from_row(lse, row), from_row(delta, row), q_tiles, starts, 1.0 / scale, len(q_tiles), num_rows,
        BQ=block, num_warps=2,
    )  # fmt: skip
    return starts


def key_gradients(dout, q, k, v, lse, delta, view: View, dk, dv, *, scale: float, adds: bool) -> None:
    """Launch `keys_kernel.keys` or `wide_keys_kernel.wide_keys`: every row of dk and dv is written, or added to."""
    kernel = "keys" if columns(q.shape[3]) in TILINGS["keys"] else "wide keys"
    _by_key_tile(kernel, dout, q, k, v, lse, delta, view, (dk, dv), scale=scale, adds=adds)


def all_gradients(dout, q, k, v, lse, delta, view: View, dq, dk, dv, *, scale: float, adds: bool) -> None:
    """Launch `fused_kernel.all_gradients`: as `key_gradients`, and dq is summed up in fp32 in an order that varies.

    A dq that is no fp32 is written: its sums stand beside it, where it is long those of a few heads at a time.
    """
    if dq.dtype == torch.float32:
        _by_key_tile("fused", dout, q, k, v, lse, delta, view, (dk, dv), dq, scale=scale, adds=adds)
        return
    batch, num_rows, num_heads, width = q.shape
    group, sums = num_heads // k.shape[2], None
    for entries, groups in parts(batch, k.shape[2], 4 * num_rows * group * width):
        heads = slice(groups.start * group, groups.stop * group)
        mine = dq[entries, :, heads]
        if sums is None:  # the first part is the largest
            sums = torch.empty(mine.shape, dtype=torch.float32, device=dq.device)
        total = sums[: mine.shape[0], :, : mine.shape[2]].zero_()
        some_k, some_v, *grads = (x[entries, :, groups] for x in (k, v, dk, dv))
        _by_key_tile(
            "fused", dout[entries, :, heads], q[entries, :, heads], some_k, some_v, lse[entries, heads],
            delta[entries, heads], view, tuple(grads), total, scale=scale, adds=adds,
        )  # fmt: skip
        mine.copy_(total)


def parts(batch: int, groups: int, head_bytes: int) -> Iterator[tuple[slice, slice]]:
    """(batch entries, key/value heads) of each launch: as many as have SUM_BYTES of sums together, or one head.

    head_bytes: of the sums of one key/value head in one batch entry
    """
    heads = min(groups, max(1, SUM_BYTES // head_bytes))
    entries = max(1, SUM_BYTES // (groups * head_bytes))
    for entry in range(0, batch, entries):
        for head in range(0, groups, heads):
            yield slice(entry, min(entry + entries, batch)), slice(head, min(head + heads, groups))


def _by_key_tile(
    kernel: str, dout, q, k, v, lse, delta, view: View, grads: tuple[torch.Tensor, ...], dq=None, *, scale: float,
    adds: bool,
) -> None:  # fmt: skip
    """What the kernels share whose program is a key tile. grads: dk and dv."""
    rows, keys, _, view = trimmed(view)
    some = adds or view.shares_keys
    if not some:
        clear_around(keys, *grads)
    dout, q, k, v, grads = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], tuple(grad[:, keys] for grad in grads)
    batch, _, heads, width = q.shape
    groups = k.shape[2]
    in_turns = stays(kernel, q, view, batch * groups) if kernel in IN_TURNS else None
    work = in_turns or Work.of(kernel, q, view)
    num_tiles = work.num_busy if some else work.num_tiles
    if not num_tiles:
        return
    q, sharp = positive(q, scale)
    tiles, q_tiles = work.tiling, work.q_tiles
    run, programs, jobs = keys_kernel.keys, grid(num_tiles, batch, groups), work.jobs
    extra, scales, shared, box = [], [sharp, sharp * LOG2E], [q, dout], 2 * tiles.block_q
    if kernel == "wide keys":
        run, box = wide_keys_kernel.wide_keys, tiles.block_q
    if dq is not None:
        run, scales, shared = fused_kernel.all_gradients, [*scales, scale], [*shared, dq[:, rows]]
        target = walkable(dq[:, rows])
        assert target.base.data_ptr() == dq[:, rows].data_ptr(), "dq must be walked itself: a copy's sums would be lost"
        extra = [descriptor(target, tiles.block_q, 2)]
    ends = [work.section(view, groups, 1, *shared)]
    if in_turns:
        jobs = all_turns(view, work, num_tiles, batch=batch, heads=groups, section=ends[0])
        run, programs = fused_in_turns_kernel.all_gradients_in_turns, (num_sms(q.device),)
        num_tiles, ends = len(jobs), []
    run[programs](
        descriptor(walkable(q), tiles.block_q), descriptor(walkable(k), tiles.block_k),
        descriptor(walkable(v), tiles.block_k), descriptor(walkable(dout), tiles.block_q),
        flat(row_starts(work, lse, delta, rows.start, sharp), box), flat(work.bounds, 2 * tiles.block_q), *extra,
        *map(rows_argument, grads), q_tiles, jobs, *scales, num_tiles, len(q_tiles), groups, heads // groups, *ends,
        D=columns(width), WIDTH=width, ADDS=adds, STAGES=tiles.num_stages, REGISTERS=tiles.registers, num_warps=4,
    )  # fmt: skip


def query_gradient(dout, q, k, v, lse, delta, view: View, dq, *, scale: float) -> None:
    """Launch `queries_kernel.queries`: add to dq, or write every row of it where it is no fp32."""
    rows, keys, _, view = trimmed(view)
    adds = dq.dtype == torch.float32
    if not adds:
        clear_around(rows, dq)
    dout, q, k, v, dq = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], dq[:, rows]
    batch, _, heads, width = q.shape
    work = Work.of("queries", q, view)
    num_tiles = work.num_busy if adds else work.num_tiles
    if not num_tiles:
        return
    q, sharp = positive(q, scale)
    tiles = work.tiling
    queries_kernel.queries[grid(num_tiles, batch, heads)](
        descriptor(walkable(q), 64), descriptor(walkable(k), tiles.block_k), descriptor(walkable(v), tiles.block_k),
        descriptor(walkable(dout), 64),
        rows_argument(dq), from_row(lse, rows.start), from_row(delta, rows.start),
        work.lo, work.hi, work.k_tiles, work.jobs, scale, sharp * LOG2E, num_tiles, heads, heads // k.shape[2],
        lse.shape[2], work.section(view, k.shape[2], heads // k.shape[2], k, v),
        D=columns(width), WIDTH=width, BK=tiles.block_k, NC=tiles.num_consumers, STAGES=tiles.num_stages,
        V_STAGES=tiles.v_stages or tiles.num_stages, REGISTERS=tiles.registers, num_warps=4,
    )  # fmt: skip
