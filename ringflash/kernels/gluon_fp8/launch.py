"""From tensors and a view to launches of the fp8 kernels: rounded copies, descriptors, tile tables. Host code.

Imports triton, so only `kernels.gluon_fp8`'s functions import it, when they are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...mask import View
from ..gluon.jobs import evening_heads, jobs_by_query
from ..gluon.launch import descriptor, walkable
from ..gluon.tiling import columns
from ..scaling import positive
from ..trimming import trimmed
from ..triton.launch import LOG2E, grid, rows_argument
from . import forward_kernel, quantise_kernel
from .tiling import BLOCK_K, BLOCK_Q, REGISTERS, STAGES


class Work(NamedTuple):
    """What the forward has to do for one view, without heads and batch; made once a view.

    tables: lo, hi, q_tiles, k_tiles, jobs (`walk.job_and_head`), on the device
    num_tiles: how many query tiles; num_busy: how many of them, first in order, see anything
    together: how many heads end the grid together, see `gluon.launch.evening_heads`
    """

    tables: tuple[torch.Tensor, ...]
    num_tiles: int
    num_busy: int
    together: int

    @classmethod
    def of(cls, view: View, device: torch.device) -> Work:
        return view.memo((cls, device), lambda: cls._made(view, device))

    @classmethod
    def _made(cls, view: View, device: torch.device) -> Work:
        made: Any = view.tiles(BLOCK_Q, BLOCK_K, device)
        host: Any = view.tiles(BLOCK_Q, BLOCK_K)
        ranges = host.q_ranges
        lengths = ranges[:, 3] - ranges[:, 0]
        jobs = torch.from_numpy(jobs_by_query(view, host, BLOCK_K)).to(device)
        tables = (*view.bounds(device), made.q_tiles, made.k_tiles, jobs)
        return cls(tables, len(ranges), int((lengths > 0).sum()), evening_heads(lengths))

    @property
    def q_tiles(self) -> torch.Tensor:
        return self.tables[2]

    @property
    def k_tiles(self) -> torch.Tensor:
        return self.tables[3]


class Quantised(NamedTuple):
    """Visiting keys as e4m3, N = num_slots x BLOCK_K: k [B, G, N, D], v [B, G, D, N], scales [B, G, num_slots, 2]."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor


def quantised(k: torch.Tensor, v: torch.Tensor, k_tiles: torch.Tensor) -> Quantised:
    """Launch `quantise_kernel.quantise` for k, v [B, K, G, D] cut into `k_tiles` of at most BLOCK_K keys.

    Without any key there is one slot all the same, because a descriptor's sizes are positive; nobody reads it.
    """
    batch, _, groups, width = k.shape
    num_slots, num_columns = max(len(k_tiles), 1), columns(width)
    k8 = k.new_empty((batch, groups, num_slots * BLOCK_K, num_columns), dtype=torch.float8_e4m3fn)
    v8 = k.new_empty((batch, groups, num_columns, num_slots * BLOCK_K), dtype=torch.float8_e4m3fn)
    scales = k.new_empty((batch, groups, num_slots, 2), dtype=torch.float32)
    if len(k_tiles):
        quantise_kernel.quantise[grid(num_slots, batch, groups)](
            rows_argument(k), rows_argument(v), k8, v8, scales, k_tiles, num_slots, groups,
            WIDTH=width, D=num_columns, BK=BLOCK_K, num_warps=8,
        )  # fmt: skip
    return Quantised(k8, v8, scales)


def represented(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View) -> list[torch.Tensor]:
    """What the forward computed with in place of q, k, v, 0 in padding: launches `quantise_kernel.represent`."""
    rows, keys, _, view = trimmed(view)
    work = Work.of(view, q.device)
    q_sides, k_sides = (rows, work.q_tiles, BLOCK_Q), (keys, work.k_tiles, BLOCK_K)
    made = []
    for x, (part, tiles, block) in ((q, q_sides), (k, k_sides), (v, k_sides)):
        batch, num_rows, heads, width = x.shape
        whole = part.stop - part.start == num_rows
        made.append((torch.empty if whole else torch.zeros)(x.shape, dtype=x.dtype, device=x.device))
        if len(tiles):
            quantise_kernel.represent[grid(len(tiles), batch, heads)](
                rows_argument(x[:, part]), rows_argument(made[-1][:, part]), tiles, len(tiles), heads,
                BY_ROW=x is q, WIDTH=width, D=columns(width), BLOCK=block, num_warps=8,
            )  # fmt: skip
    return made


def _boxes(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """A contiguous e4m3 tensor of 4 dimensions as a descriptor of boxes [1, 1, rows, width]."""
    box = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """Launch `quantise_kernel.quantise` and `forward_kernel.attend_fp8`. See `kernels.Kernel.forward`."""
    keys, view = trimmed(view).keys, trimmed(view).of_keys
    work = Work.of(view, q.device)
    num_tiles = work.num_tiles if first or last else work.num_busy
    if num_tiles:
        there = quantised(k[:, keys], v[:, keys], work.k_tiles)
        attend(q, there, work, state, scale=scale, num_tiles=num_tiles, ends=(first, last))


def attend(
    q: torch.Tensor, keys: Quantised, work: Work, state, *, scale: float, num_tiles: int, ends: tuple[bool, bool]
) -> None:
    """The first num_tiles query tiles, longest first, against keys and values that are quantised. ends: first, last."""
    batch, num_rows, heads, width = q.shape
    num_groups, num_slots, num_columns = keys.k.shape[1], keys.scales.shape[2], columns(width)
    q, scale = positive(q, scale)
    forward_kernel.attend_fp8[grid(num_tiles, batch, heads)](
        descriptor(walkable(q), 64), _boxes(keys.k, BLOCK_K, num_columns), _boxes(keys.v, num_columns, BLOCK_K),
        keys.scales, rows_argument(state.out if state.acc is None else state.acc), rows_argument(state.out), state.lse,
        *work.tables[:2], *work.tables[3:], scale * LOG2E, num_tiles, heads, heads // num_groups, num_rows, num_slots,
        work.together, D=num_columns, WIDTH=width, BK=BLOCK_K, STAGES=STAGES[num_columns], REGISTERS=REGISTERS,
        FIRST=ends[0], LAST=ends[1], num_warps=4,
    )  # fmt: skip
