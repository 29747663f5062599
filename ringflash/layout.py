"""One sequence cut over the ranks of a ring: the object that cuts everything which must be cut the same way.

Tokens, labels, positions and attention all read the same segments. Made by `Ring.layout`, which never talks; only
`unshard` communicates. Which segments a rank holds is decided in `layouts`; what the mask means, in `mask`.

Letters: S global sequence, L local sequence, P ring size, U Ulysses size, n = P * U.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from . import arguments, exchange, makespan, mask

if TYPE_CHECKING:
    from .group import Ring


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Which tokens of one sequence each rank holds, and what they may see.

    ring: the ranks; seq_len: S, tokens of the whole sequence; causal: queries see no later key
    cu_seqlens: int32 [m + 1] on the CPU, borders of packed documents, or None
    bounds: int32 [2, S] on the CPU, (lo, hi) of `intervals=`, or None
    segments: int32 [n segments, 3] on the CPU: (ring rank, global start, count), ascending within a rank
    name: which of ringflash.LAYOUTS it is

    Its repr tells the makespan once somebody has asked for it: it counts the pairs of the whole sequence, milliseconds
    for each 100k tokens, which an error message or a log must not cost.
    """

    ring: Ring
    seq_len: int
    causal: bool
    cu_seqlens: torch.Tensor | None
    bounds: torch.Tensor | None
    segments: torch.Tensor
    name: str

    @property
    def local_len(self) -> int:
        """L: tokens of each rank."""
        return self.seq_len // self.ring.size

    @cached_property
    def makespan(self) -> float:
        """Time of a ring whose links are never late, over that of its pairs spread evenly; see `makespan.ratio`."""
        lo, hi = arguments.Mask(self.causal, None, self.cu_seqlens, self.bounds).intervals(self.seq_len, self.seq_len)
        return makespan.ratio(makespan.pairs(segments_of(self.segments.numpy()), lo, hi))

    def __repr__(self) -> str:
        documents = "" if self.cu_seqlens is None else f" in {len(self.cu_seqlens) - 1:,} documents"
        even = f", makespan {self.makespan:.3f} of the ideal" if "makespan" in vars(self) else ""
        return (
            f"Layout({self.name}: {self.seq_len:,} tokens{documents}, {len(self.segments):,} segments "
            f"over a ring of {self.ring.ring_size}{even})"
        )

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [S] on the CPU: the global position of every token, rank after rank."""
        parts = segments_of(self.segments.numpy())
        return torch.from_numpy(np.concatenate([mask.positions(part) for part in parts]))

    @cached_property
    def _own(self) -> torch.Tensor:
        """`positions`, for this file alone: a layout is shared by all who ask for the same one."""
        start = self.ring.rank * self.local_len
        return _plain(self.order[start : start + self.local_len], self.ring.device)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [L] on the ring's device: the global position of each local token. A copy: it may be changed."""
        self._check_known("_own", "layout.positions")
        return _plain(self._own, self._own.device)

    @cached_property
    def _in_document(self) -> torch.Tensor:
        if self.cu_seqlens is None:
            return self._own
        borders = self.cu_seqlens.to(self.ring.device)
        # padding counts from the last border
        document = torch.searchsorted(borders, self._own.int(), right=True) - 1
        return _plain(self._own - borders[document], self.ring.device)

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [L] on the ring's device: the position of each local token inside its document, for RoPE. A copy."""
        self._check_known("_in_document", "layout.position_ids")
        return _plain(self._in_document, self._own.device)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a tensor along the sequence, a copy.

        x: any dtype, any shape with S at `dim`, the same on every rank
        returns L at `dim`. The gradient of the other ranks' parts is zero: gradients are those of the sum over ranks.
        """
        self._check_len(x, dim, self.seq_len, "shard", "the whole sequence")
        self._check_known("_own", "layout.positions")
        return x.index_select(dim, self._own.to(x.device))

    def unshard(self, x_local: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole tensor, on every rank, from the ranks' parts along the sequence. All ranks must call it.

        x_local: any dtype, any shape with L at `dim`
        returns S at `dim`. Its gradient is summed over the ranks: a loss that every rank computes alike from it must be
        divided by the number of ranks. Sums in fp32.
        """
        self._check_len(x_local, dim, self.local_len, "unshard", "this rank's part")
        if not torch.compiler.is_compiling():
            arguments.check_no_transform("layout.unshard")
        return _Unshard.apply(x_local, self, dim)

    def _check_known(self, name: str, asked: str) -> None:
        """A compiler cannot count positions, which the host does once a layout: with fullgraph=True it is told so.

        Elsewhere nothing happens, but that the graph ends here. A number in the graph would be that of one layout.
        """
        if torch.compiler.is_compiling() and name not in self.__dict__:
            torch._dynamo.graph_break(
                f"{asked} is counted on the host the first time: read {asked} of this layout once before the compiled "
                "call, or compile without fullgraph=True"
            )

    def _check_len(self, x: torch.Tensor, dim: int, want: int, name: str, what: str) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: x is {type(x).__name__}; it must be a tensor")
        arguments.check_dense(f"{name}: x", x)
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"{name}: dim={dim!r} is {type(dim).__name__}; it must be an int")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{name}: dim={dim} is not an axis of a tensor of shape {list(x.shape)}")
        if x.shape[dim] != want:
            raise ValueError(
                f"{name}: dim {dim} of {list(x.shape)} is {x.shape[dim]}; {what} has {want}: name its axis with dim="
            )


def segments_of(table: np.ndarray) -> list[mask.Segments]:
    """The table of `Layout.segments` -> the segments of each ring rank, int64 [n, 2]."""
    table = table.astype(np.int64)
    starts = [0, *(np.flatnonzero(np.diff(table[:, 0])) + 1).tolist(), len(table)]
    return [table[start:end, 1:] for start, end in pairwise(starts)]


def table_of(segments: list[mask.Segments]) -> torch.Tensor:
    """The inverse of `segments_of`, int32 on the CPU."""
    rows = [np.column_stack((np.full(len(part), rank), part)) for rank, part in enumerate(segments)]
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


def _plain(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # a layout may be made inside inference_mode and used in training
        return x.to(device, copy=True)


def _wait(work: dist.Work, ring: Ring, name: str, result: torch.Tensor) -> None:
    exchange.begun([work], [name], ring.rank, ring.timeout_s, result).wait()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_local: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        ctx.layout, ctx.dim = layout, dim
        ring = layout.ring
        if ring.group is None:
            return x_local.index_select(dim, torch.argsort(layout.order).to(x_local.device))
        mine = x_local.resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
        ranks = mine.new_empty(layout.seq_len, *mine.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        whole, part = (x.view(-1).view(torch.uint8) for x in (ranks, mine))  # as bytes: backends know few types
        _wait(gather(whole, part, group=ring.group, async_op=True), ring, "unshard", ranks)
        return ranks.index_select(0, torch.argsort(layout.order).to(ranks.device)).movedim(0, dim)

    @staticmethod
    @once_differentiable  # autograd does not see what others send: second derivatives would lack their part
    def backward(ctx, dx: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, dim = ctx.layout, ctx.dim
        ring = layout.ring
        ranks = dx.movedim(dim, 0).index_select(0, layout.order.to(dx.device))
        if ring.group is None:
            return ranks.movedim(0, dim), None, None
        if dx.is_complex():
            ranks = torch.view_as_real(ranks.resolve_conj())
        mine = ranks.new_empty(layout.local_len, *ranks.shape[1:], dtype=torch.float32)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
        work = scatter(mine, ranks.float().contiguous(), group=ring.group, async_op=True)
        _wait(work, ring, "backward of unshard", mine)
        if dx.is_complex():
            mine = torch.view_as_complex(mine)
        return mine.to(dx.dtype).movedim(0, dim), None, None
