"""The ranks that share one sequence: a process group seen as P ring ranks times U Ulysses ranks.

Letters: n ranks of the group, P ring size, U Ulysses size (n = P * U), S global sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import agreement, arguments
from .layout import Layout, table_of
from .layouts import LAYOUTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_LAYOUTS = 16  # layouts kept by a ring: a few lengths, or the documents of the batches under way


class Ring:
    """Ranks that share one sequence. Rank i of the group has ring rank i // U and Ulysses rank i % U.

    group: a ProcessGroup, a DeviceMesh of one dimension (its group) or of two (ring, ulysses), or None for all ranks;
        without torch.distributed a Ring has size 1
    layout: one of ringflash.LAYOUTS
    ulysses: U, ranks that split the heads instead of the keys; 1 unless given or told by a mesh
    timeout_s: seconds after which a rank that does not come is given up

    size, rank, ulysses: n, this process's rank in the group, U
    Raises: ValueError, TypeError; ValueError on every rank if the ranks were given different arguments.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: str = "zigzag",
        ulysses: int | None = None,
        timeout_s: float = 600,
    ) -> None:
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} is unknown; it must be one of {', '.join(LAYOUTS)}")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s={timeout_s!r} is {type(timeout_s).__name__}; it must be a number of seconds")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
        self.layout_name = layout
        self.timeout_s = float(timeout_s)
        self.group, self.ulysses = _group_of(group, ulysses)
        self.size = dist.get_world_size(self.group) if self.group else 1
        self.rank = dist.get_rank(self.group) if self.group else 0
        if self.size % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} must divide the {self.size} ranks of the group")
        self._layouts: OrderedDict[tuple, Layout] = OrderedDict()
        if self.group and self.size > 1:
            text = f"Ring(layout={layout!r}, ulysses={self.ulysses}, timeout_s={timeout_s:g}) of {self.size} ranks"
            agreement.agree(self.group, text, self.timeout_s, once=False)

    @property
    def ring_size(self) -> int:
        """P: ranks between which keys and values travel."""
        return self.size // self.ulysses

    @property
    def ring_rank(self) -> int:
        """Which of the P this process is."""
        return self.rank // self.ulysses

    @property
    def device(self) -> torch.device:
        """Where positions lie: the current GPU for NCCL groups and for one process with a GPU, else the CPU."""
        on_gpu = "nccl" in str(dist.get_backend_config(self.group)) if self.group else torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def layout(
        self,
        seq_len: int,
        cu_seqlens: torch.Tensor | list[int] | None = None,
        causal: bool | None = None,
        intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Layout:
        """Cut a sequence over the ranks. Cheap and cached, never talks; make one per batch when documents change.

        seq_len: S, a multiple of what the layout needs
        cu_seqlens: borders of packed documents, int32 [m + 1], 0 first; tokens from the last border on are padding
        causal: None means True, and False where intervals are given
        intervals: (lo, hi), int32 [S] each, never falling, in [0, S]
        Raises: ValueError, TypeError, naming the value and what would be accepted.
        """
        self._check_len(seq_len)
        causal = arguments.causal_of(causal, intervals)
        with torch.inference_mode(False):  # a layout made inside inference_mode may be used in training
            borders = arguments.cu_seqlens_of(cu_seqlens, seq_len)
            bounds = arguments.bounds_of(intervals, seq_len, seq_len)
        key = (seq_len, causal, *(None if x is None else x.numpy().tobytes() for x in (borders, bounds)))
        if key not in self._layouts:
            self._layouts[key] = self._make(seq_len, causal, borders, bounds)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _make(self, seq_len: int, causal: bool, borders: torch.Tensor | None, bounds: torch.Tensor | None) -> Layout:
        work = arguments.Mask(causal, None, borders, bounds).work(seq_len)
        segments = LAYOUTS[self.layout_name].segments(seq_len, self.ring_size, self.ulysses, work)
        with torch.inference_mode(False):
            table = table_of(segments)
        if borders is not None:
            for x in (borders, table):  # another number of documents must not compile anew
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return Layout(self, seq_len, causal, borders, bounds, table)

    def _check_len(self, seq_len: int) -> None:
        if isinstance(seq_len, bool) or not isinstance(seq_len, int):
            raise TypeError(f"seq_len={seq_len!r} is {type(seq_len).__name__}; it must be an int")
        if not 0 < seq_len <= arguments.MAX_TOKENS:
            raise ValueError(f"seq_len={seq_len} must be in [1, {arguments.MAX_TOKENS}]")
        multiple = LAYOUTS[self.layout_name].multiple(self.ring_size, self.ulysses)
        if seq_len % multiple:
            padded = -(-seq_len // multiple) * multiple
            raise ValueError(
                f"seq_len={seq_len} must be a multiple of {multiple} for layout {self.layout_name!r} over {self.size} "
                f"ranks; pad it to {padded}, with the padding behind cu_seqlens[-1]={seq_len}"
            )

    def check_heads(self, heads: int, groups: int) -> None:
        """Heads split over the Ulysses ranks: H % U == 0, and G % U == 0 or U % G == 0; else ValueError."""
        size = self.ulysses
        if heads % size:
            raise ValueError(f"q has {heads} heads, which do not divide by ulysses={size}")
        if groups % size and size % groups:
            raise ValueError(f"k has {groups} heads; ulysses={size} must divide them or be a multiple of them")


def _group_of(
    group: dist.ProcessGroup | DeviceMesh | None, ulysses: int | None
) -> tuple[dist.ProcessGroup | None, int]:
    """The process group of whatever was given, and U."""
    if ulysses is not None and (isinstance(ulysses, bool) or not isinstance(ulysses, int)):
        raise TypeError(f"ulysses={ulysses!r} is {type(ulysses).__name__}; it must be an int")
    if ulysses is not None and ulysses < 1:
        raise ValueError(f"ulysses={ulysses} must be at least 1")
    if group is None:
        ready = dist.is_available() and dist.is_initialized()
        return (dist.group.WORLD if ready else None), ulysses or 1
    if isinstance(group, dist.ProcessGroup):
        return group, ulysses or 1
    if not isinstance(group, dist.DeviceMesh):
        raise TypeError(f"group is {type(group).__name__}; it must be a ProcessGroup, a DeviceMesh or None")
    if group.ndim == 1:
        return group.get_group(), ulysses or 1
    if group.ndim > 2:
        raise ValueError(
            f"the mesh has {group.ndim} dimensions {group.mesh_dim_names}; "
            "slice it to one (ring) or two (ring, ulysses)"
        )
    if ulysses not in (None, group.size(1)):
        raise ValueError(f"ulysses={ulysses} differs from the mesh's second dimension of {group.size(1)}; leave it out")
    ranks = group.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the mesh holds ranks {ranks}; they must ascend, ring first and ulysses second")
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world, group.size(1)
    return dist.new_group(ranks, use_local_synchronization=True), group.size(1)
