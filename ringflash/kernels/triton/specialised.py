"""When the forward with specialised warps serves, the look at its numbers that it must pass first, and its launch.

The compiler that splits the loop is young: of some loops it makes binaries that are wrong without an error. So every
configuration (head dimension, type, form, first, last) computes a small case on each device before its first use and is
compared with the kernel that is not split; what it says is logged, and what fails or does not compile is never used.
Called by `kernels.triton.forward`.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton

from ...mask import View, intervals, positions
from ..scaling import positive
from ..trimming import trimmed
from . import launch, specialised_kernel
from .tiling import Card, Tiling

HEAD_DIMS = (64, 128)
CARD = Card("cuda", 90)
TILES = Tiling(128, 128, 4, 2)
COMPILER = "3.6."  # the triton whose splitting is known; 3.7 refuses the same loop
# ||split - not split|| / ||not split|| that means a fault: a wrong row of the 1,200 is 0.03, rounding of bf16 0.0014
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_LIMIT = 1e-5
MAX_STRIDE = 2**31 - 1
REPEATS = 3  # of the look: what a race makes wrong need not be wrong at once
logger = logging.getLogger("ringflash")


def forward(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """See `kernels.Kernel.forward`: with specialised warps where they serve, else looped."""
    kernel = launch.forward if refusal(q, k, v, view, first=first, last=last) else split
    kernel(q, k, v, view, state, scale=scale, first=first, last=last)


def refusal(q, k, v, view: View, *, first: bool, last: bool) -> str | None:
    """Why the looped kernel computes this call; None where the one with specialised warps does."""
    if reason := unfit(q.device, q.shape[3], q.dtype):
        return reason
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    keys, view = trimmed(view).keys, trimmed(view).of_keys
    if not all(0 < x.numel() <= x.shape[0] * MAX_STRIDE for x in (q, k[:, keys], v[:, keys])):
        return f"specialised warps take 1 to {MAX_STRIDE} elements of q, k and v in each sample of a batch"
    seen = below(view, q.device)
    if seen is None:
        return "the mask bounds the keys from below (a window, documents), or their cut is irregular"
    if seen.masked and q.shape[3] == 64:
        return "at head dimension 64 the looped kernel is faster where tiles are masked"
    return fault(Configuration(q.device, q.shape[3], q.dtype, seen.masked, first, last))


@functools.cache
def unfit(device: torch.device, width: int, dtype: torch.dtype) -> str | None:
    """Why no view can take the specialised kernel on the current device; None if some can."""
    if launch.interpreting():
        return "Triton's interpreter has no warps"
    if width not in HEAD_DIMS or dtype not in LIMITS:
        return f"specialised warps take 16 bits and head dimensions {HEAD_DIMS}, this is {dtype}, {width}"
    here = launch.card()
    if here != CARD:
        return f"specialised warps need compute capability 9.0, {device} is {here.backend} {here.arch}"
    if not triton.__version__.startswith(COMPILER):
        return f"specialised warps need triton {COMPILER}x, this is {triton.__version__}"
    return None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x [B, N, H, D], copied unless its strides give the binary that was looked at: Triton makes others of others."""
    strides = [x.stride(dim) for dim in range(3)]
    if launch.walkable(x) and all(0 < stride <= MAX_STRIDE and stride % 16 == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Below(NamedTuple):
    """A view as `specialised_kernel.attend` takes it, without heads and batch; made once a view.

    masked: is any key tile not seen whole?
    tables: ends, q_tiles, q_ranges, q_order, on the device; ends: int32 [L + TILES.block_q], how many of the visiting
        keys, from the first on, each row sees
    num_tiles, num_busy: as in `launch.Work`
    """

    masked: bool
    tables: tuple
    num_tiles: int
    num_busy: int


def below(view: View, device: torch.device) -> Below | None:
    """The view in that form; None where the rows of a query tile do not all see the first keys of its range."""
    return view.memo((Below, device), lambda: _below(view, device))


def _below(view: View, device: torch.device) -> Below | None:
    counts = view.k_segments[:, 1]
    if (counts[:-1] % TILES.block_k).any():
        return None
    position = positions(view.k_segments)
    begins, ends = (np.searchsorted(position, edge) for edge in (view.lo, view.hi))
    begins, ends = (np.where(begins < ends, edge, 0) for edge in (begins, ends))
    tiles, made = (view.tiles(TILES.block_q, TILES.block_k, where) for where in (None, device))
    v0, w0, w1, v1 = tiles.q_ranges.T
    if (begins > np.repeat(v0 * TILES.block_k, tiles.q_tiles[:, 2])).any():
        return None
    whole = (v0 == v1) | ((v0 == w0) & (w1 == v1) & (v1 * TILES.block_k <= counts.sum()))
    padded = torch.from_numpy(np.pad(ends, (0, TILES.block_q)).astype(np.int32)).to(device)
    tables = (padded, made.q_tiles, made.q_ranges, made.q_order)
    return Below(not whole.all(), tables, len(v0), int((v0 < v1).sum()))


class Configuration(NamedTuple):
    """What decides a binary of `specialised_kernel.attend`."""

    device: torch.device
    width: int
    dtype: torch.dtype
    masked: bool
    first: bool
    last: bool

    def __str__(self) -> str:
        hop = f"first={self.first}, last={self.last}, {'masked from above' if self.masked else 'whole'}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"triton's specialised warps for {dtype}, head dimension {self.width}, on {self.device} ({hop})"


@functools.cache
def fault(configuration: Configuration) -> str | None:
    """What is wrong with the binary of this configuration, found by running it once a process; None if it is right."""
    found = _look(configuration)
    if found:
        logger.warning("%s: %s; the looped kernel is used", configuration, found)
    else:
        logger.info("%s: the numbers are right, it is used", configuration)
    return found


def _look(configuration: Configuration) -> str | None:
    try:
        wanted = _sample(configuration, launch.forward)
        for _ in range(REPEATS):
            made = _sample(configuration, split)
            limits = (LIMITS[configuration.dtype], LSE_LIMIT)
            for name, x, y, limit in zip(("out", "lse"), made, wanted, limits, strict=True):
                empty = y == -torch.inf
                if not torch.equal(x == -torch.inf, empty):
                    return f"rows that see nothing differ in {name}"
                difference = float((x - y).masked_fill(empty, 0.0).norm() / y.masked_fill(empty, 0.0).norm())
                if not difference <= limit:
                    return f"{name} differs by {difference:.3g}, of at most {limit}"
    except Exception as error:  # a compiler may raise anything, and there is another kernel
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return None


def _sample(configuration: Configuration, kernel: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp32 of a small case: a batch, grouped heads, five key tiles, rows without a state.

    Masked, there are a tail, and rows that see nothing.
    """
    from .. import State

    device, width, dtype, masked, first, last = configuration
    length, num_keys = (600, 590) if masked else (640, 640)
    random = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=random, device=device)
    q = draw(2, length, 4, width).to(dtype)
    k, v = (draw(2, num_keys, 2, width).to(dtype) for _ in "kv")
    acc, lse = draw(q.shape), draw(2, 4, length)
    lse[..., ::3] = -torch.inf
    acc[:, ::3] = 0.0
    view = View(*intervals(length, num_keys, causal=masked), np.array([[0, length]]), np.array([[0, num_keys]]))
    # NaN: the memory may be that of the other kernel's sample
    state = State(None if first and last else acc, torch.full_like(q, torch.nan), lse)
    kernel(q, k, v, view, state, scale=width**-0.5, first=first, last=last)
    return (state.out if last else acc).float(), lse


def split(q, k, v, view: View, state, *, scale: float, first: bool, last: bool) -> None:
    """Launch `specialised_kernel.attend`."""
    keys, view = trimmed(view).keys, trimmed(view).of_keys
    q, k, v = (aligned(x) for x in (q, k[:, keys], v[:, keys]))
    seen = below(view, q.device)
    assert seen is not None
    num_tiles = seen.num_tiles if (first or last) and not view.shares_queries else seen.num_busy
    if not num_tiles:
        return
    q, scale = positive(q, scale)
    batch, num_rows, heads, width = q.shape
    call = functools.partial(
        specialised_kernel.attend[launch.grid(num_tiles, batch, heads)],
        *map(launch.rows_argument, (q, k, v)),
        launch.descriptors(k, TILES.block_k, CARD)[0], launch.descriptors(v, TILES.block_k, CARD)[0],
        launch.rows_argument(state.out if state.acc is None else state.acc), launch.rows_argument(state.out),
        state.lse, *seen.tables, scale * launch.LOG2E, num_tiles, heads, heads // k.shape[2], num_rows, k.shape[1],
        D0=width, BQ=TILES.block_q, BK=TILES.block_k, FIRST=first, LAST=last, MASK=seen.masked,
        SPECIALISED=not launch.interpreting(),
        num_warps=TILES.num_warps, num_stages=TILES.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    # the descriptor of q is made on the device, in memory of an allocator that triton keeps by context
    contextvars.copy_context().run(_with_memory, call)


def _with_memory(call: Callable[[], object]) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    call()
