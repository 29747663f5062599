"""Launches of `moving_kernels`: many runs of rows of several tensors at once. Host code, called by `ringflash.moving`.

Imports triton, so it is imported when it is called. Tensors must be such that `columns_of` finds their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from . import moving_kernels

COPIED, SUMMED = 1024, 512  # columns of a program, at most
MAX_PROGRAMS = 2**31 - 1  # of a grid: triton counts them in 32 bits, and launches nothing where that is not positive
MAX_ENTRIES = 65_535  # of the axis on which tensors and batch entries lie
MAX_TENSORS = 4


class Columns(NamedTuple):
    """How the rows of x lie. strides: of batch, rows, columns, in elements; the first is 0 where one entry is all"""

    x: torch.Tensor
    num_batches: int
    strides: tuple[int, int, int]
    num_columns: int


def columns_of(x: torch.Tensor) -> Columns | None:
    """Of x [B, n, H, D] or, one number a head, [B, H, n].

    None where its heads are not evenly apart, or where a launch might need a larger grid than there is.
    """
    batch_stride = x.stride(0) if len(x) > 1 else 0
    if x.dim() == 3:
        found = Columns(x, len(x), (batch_stride, x.stride(2), x.stride(1)), x.shape[1])
    else:
        _, row_stride, head_stride, stride = x.stride()
        if x.shape[2] > 1 and head_stride != x.shape[3] * stride:
            return None
        found = Columns(x, len(x), (batch_stride, row_stride, stride), x.shape[2] * x.shape[3])
    return found if _fits(found, x.shape[2 if x.dim() == 3 else 1]) else None


def _fits(x: Columns, num_rows: int) -> bool:
    """Even if every row were a step of its own, in the launch of most tensors."""
    entries = MAX_TENSORS * x.num_batches
    return entries <= MAX_ENTRIES and num_rows * entries * triton.cdiv(x.num_columns, SUMMED) <= MAX_PROGRAMS


def copy(
    tensors: Sequence[Columns], block: torch.Tensor, steps: torch.Tensor, *, first_bytes: Sequence[int], rows: int
) -> None:  # fmt: skip
    """Launch `copy_rows`. block: uint8 [m, row_bytes]; first_bytes: where each tensor begins in a row of it

    rows: of a step at most, here and below
    """
    widths = [min(triton.next_power_of_2(one.num_columns), COPIED) for one in tensors]
    blocks = max(triton.cdiv(one.num_columns, width) for one, width in zip(tensors, widths, strict=True))
    batches = tensors[0].num_batches
    args = tuple((one.x, *one.strides, one.num_columns, first) for one, first in zip(tensors, first_bytes, strict=True))
    moving_kernels.copy_rows[len(steps), len(tensors) * batches, blocks](
        args, block, steps, block.stride(0), batches, NUM=len(args), ROWS=rows, WIDTHS=tuple(widths), num_warps=4
    )


def _places(tensors: Sequence[Columns]) -> tuple[tuple[torch.Tensor, int, int], ...]:
    assert all(one.strides[2] == 1 for one in tensors), "sums are of whole rows"
    return tuple((one.x, *one.strides[:2]) for one in tensors)


def add_up(
    targets: Sequence[Columns], sums: Sequence[Columns], arrived: torch.Tensor | None,
    tables: tuple[torch.Tensor, ...], *, rows: int,
) -> None:  # fmt: skip
    """Launch `sum_rows`. arrived: [m, F, B, H, D], each [H, D] contiguous; tables: (steps, spans, arrivals)"""
    steps, *lists = tables
    first = targets[0]
    width = min(triton.next_power_of_2(first.num_columns), SUMMED)
    given = None if arrived is None else (arrived, *arrived.stride()[:3])
    moving_kernels.sum_rows[len(steps), len(targets) * first.num_batches, triton.cdiv(first.num_columns, width)](
        _places(targets), _places(sums), given, *(lists or (None, None)), steps, first.num_batches, first.num_columns,
        NUM=len(targets), ROWS=rows, COLUMNS=width, num_warps=4,
    )  # fmt: skip


def clear(x: Columns, steps: torch.Tensor, *, rows: int) -> None:
    """Launch `clear_rows`."""
    width = min(triton.next_power_of_2(x.num_columns), COPIED)
    (place,) = _places([x])
    moving_kernels.clear_rows[len(steps), x.num_batches, triton.cdiv(x.num_columns, width)](
        place, steps, x.num_columns, ROWS=rows, COLUMNS=width, num_warps=4
    )
