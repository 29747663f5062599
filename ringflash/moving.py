"""Rows of several tensors copied, summed or cleared in one launch, by kernels of Triton, from tables made once a route.

torch takes a launch, some microseconds, for each run of each tensor; at 8k tokens they cost a forward of packed
documents a tenth of its time. Where there is no triton, or a tensor whose heads are not evenly apart, nothing is done
here, and the caller's torch ops are what runs: with the same results, and the same rows read and written, which
`tests/streams.py` watches in that form. Called by `travel` and `gathering`.

Letters: B batch, L local tokens, n rows, m rows that arrived, F tensors, H heads, D head dimension.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from .mask import cut
from .needs import Rows, inside

logger = logging.getLogger("ringflash")

STEP_ROWS = 8  # that a program moves, at most

Arrival = tuple[Rows, int, int]
"""Rows to which something is added, the row of what arrived where that begins, how many times as many rows follow."""


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module that launches the kernels; None where torch ops do the work."""
    # triton is not imported on a CPU but to interpret
    return _probed(device) if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else None


@functools.cache
def _probed(device: torch.device) -> ModuleType | None:
    """The kernels, after a first launch. Whatever kind of attention runs here need not have Triton, or its compiler."""
    try:
        from .kernels.triton import moving

        if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return None
        x = torch.zeros(1, 1, 1, 16, device=device)
        columns = moving.columns_of(x)
        assert columns is not None
        with torch.cuda.device_of(x):
            moving.clear(columns, torch.zeros(1, 3, dtype=torch.int32, device=device), rows=STEP_ROWS)
    except ImportError:
        return None
    except Exception as error:
        logger.warning("ringflash: torch ops move rows on %s, run by run, since Triton cannot: %s", device, error)
        return None
    return moving


def steps(there: Rows, here: Rows, begins: Sequence[np.ndarray] = ()) -> np.ndarray:
    """The same rows of two blocks in steps of at most STEP_ROWS, in which both go on.

    begins: rows of `here` at which a step begins; returns int32 [n, 3] (first row of there, of here, count)
    """
    ends = [np.append(0, each.runs[:, 1].cumsum()) for each in (there, here)]
    borders = np.unique(np.concatenate([*ends, *(here.before(each) for each in begins)]))
    before, _, count = cut(np.stack((borders[:-1], np.diff(borders)), 1), STEP_ROWS).T
    return np.stack((there.at(before), here.at(before), count), 1).astype(np.int32)


def sums(there: Rows, here: Rows, arrivals: Sequence[Arrival]) -> tuple[np.ndarray, ...]:
    """(steps, spans, arrivals) of `moving_kernels.sum_rows`. arrivals: what is added to rows of `here`, in order"""
    table = steps(there, here, [edges for rows, _, _ in arrivals for edges in (rows.runs[:, 0], rows.runs.sum(1))])
    numbers, entries = [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
    for rows, first, count in arrivals:
        at = np.flatnonzero(inside(table[:, 1], np.stack((rows.runs[:, 0], rows.runs.sum(1)), 1)))
        start = first + rows.before(table[at, 1])
        numbers.append(at)
        entries.append(np.stack((start, np.full(len(at), count), np.full(len(at), rows.count)), 1))
    step = np.concatenate(numbers)
    ends = np.cumsum(np.bincount(step, minlength=len(table)))
    spans = np.stack((np.append(0, ends)[: len(table)], ends), 1).astype(np.int32)
    return table, spans, np.concatenate(entries)[np.argsort(step, kind="stable")].astype(np.int32)


def on_device(device: torch.device, *tables: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Tables where a kernel reads them."""
    return tuple(torch.from_numpy(np.ascontiguousarray(table)).to(device) for table in tables)


def copy_rows(
    tensors: Sequence[torch.Tensor], here: Rows, there: Rows, block: torch.Tensor, *, first_bytes: Sequence[int]
) -> bool:  # fmt: skip
    """Rows `here` of the tensors into rows `there` of a block, uint8 [m, bytes]; False: nothing is done.

    tensors: [B, n, H, D], or [B, H, n] for one number a head; first_bytes: where in a row of the block each begins
    """
    kernels = kernels_for(block.device)
    found = [kernels.columns_of(x) for x in tensors] if kernels else []
    if kernels is None or None in found:
        return False
    if there.count and all(x.numel() for x in tensors):
        (table,) = there.with_(here, block.device, lambda: on_device(block.device, steps(there, here)))
        with torch.cuda.device_of(block):
            kernels.copy(found, block, table, first_bytes=first_bytes, rows=STEP_ROWS)
    return True


def sum_rows(
    into: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], arrived: torch.Tensor | None,
    tables: Callable[[], tuple[torch.Tensor, ...]],
) -> bool:  # fmt: skip
    """Rows of `sums`, and what has arrived for them, added in fp32 and rounded once; False: nothing is done.

    into: [B, L, H, D] each, of any type; sums: fp32 [B, n, H, D] each
    arrived: [m, F, B, H, D], of any type, contiguous; tables: what `sums` made, or the steps alone, on the device
    """
    kernels = kernels_for(into[0].device)
    found = [[kernels.columns_of(x) for x in some] for some in (into, sums)] if kernels else []
    if kernels is None or any(one is None or one.strides[2] != 1 for some in found for one in some):
        return False
    if into[0].numel():
        made = tables()
        with torch.cuda.device_of(into[0]):
            kernels.add_up(*found, arrived, made, rows=STEP_ROWS)
    return True


def round_rows(x: torch.Tensor, sums: torch.Tensor, rows: Rows) -> bool:
    """x[:, rows] = sums[:, rows], for x [B, L, H, D] of any type and sums in fp32; False: nothing is done."""
    return sum_rows([x], [sums], None, lambda: _steps_of(rows, x.device))


def clear_rows(x: torch.Tensor, rows: Rows) -> None:
    """x[:, rows] = 0, for x [B, L, H, D] in which nothing stands yet: torch clears all of it, where runs are many."""
    kernels = kernels_for(x.device)
    columns = kernels.columns_of(x) if kernels else None
    if kernels is None or columns is None:
        whole = [slice(None)] if rows.count else []
        for run in [place for _, place in rows.places()] or whole:
            x[:, run].zero_()
    elif rows.count and x.numel():
        (table,) = _steps_of(rows, x.device)
        with torch.cuda.device_of(x):
            kernels.clear(columns, table, rows=STEP_ROWS)


def _steps_of(rows: Rows, device: torch.device) -> tuple[torch.Tensor, ...]:
    return rows.with_(rows, device, lambda: on_device(device, steps(rows, rows)))
