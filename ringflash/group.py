"""The ranks that share one sequence: a process group seen as P ring ranks times U Ulysses ranks.

Letters: n ranks of the group, P ring size, U Ulysses size (n = P * U), S global sequence.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from . import agreement, arguments
from .arrangements import ARRANGEMENTS
from .fitting import AUTO, choose, work_of
from .layout import Layout, table_of
from .layouts import LAYOUTS
from .topology import ranks_per_node

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Method = TypeVar("Method", bound=Callable[..., Any])

MAX_LAYOUTS = 16  # layouts kept by a ring: a few lengths, or the documents of the batches under way


def _on_the_host(method: Method) -> Method:
    """A method that no compiler follows, as by `torch.compiler.disable`, without the second that its import takes."""
    reason = "layouts are planned on the host: make them before the compiled call, or compile without fullgraph=True"

    @functools.wraps(method)
    def run(*given: Any, **named: Any) -> Any:
        # where a compiler calls it, its parts must not be compiled one by one either
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(method, reason=reason)(*given, **named)
        return method(*given, **named)

    told: Any = run
    told._torchdynamo_disable, told._torchdynamo_disable_msg = True, reason
    return told


class Ring:
    """Ranks that share one sequence. Rank i of the group has ring rank i // U and Ulysses rank i % U.

    group: a ProcessGroup, a DeviceMesh of one dimension (its group) or of two (ring, ulysses), or None for all ranks;
        without torch.distributed a Ring has size 1
    layout: one of ringflash.LAYOUTS; or "auto": the one that suits a mask, see `fitting`
    ulysses: U, ranks that split the heads instead of the keys; 1 unless given or told by a mesh
    timeout_s: seconds after which a rank that does not come is given up
    topology: which ranks share a node: a number of consecutive ranks, a multiple of U; a DeviceMesh (node, rank of a
        node) over the ranks of the group; "hosts": those with one host name; None: nothing is known
    arrangement: one of ringflash.ARRANGEMENTS: "ring"; "double", a ring of nodes around rings of ranks, which needs
        topology and is meant where it tells of several nodes; "gather", all keys and values that a rank needs at once,
        whose memory grows with the sequence
    transit: the type of gradients under way, torch.float32 or torch.bfloat16, which halves their bytes and is rounded
        at every hop; sums are fp32 in both

    A ring of size 1 takes the same words as a large one, so that a program and its configuration go from one GPU to
    many unchanged: nothing is passed on then, and `explain` warns of words without effect.

    size, rank, ulysses: n, this process's rank in the group, U
    Raises: ValueError, TypeError; ValueError on every rank if the ranks were given different arguments.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: str = "zigzag",
        ulysses: int | None = None,
        timeout_s: float = 600,
        *,
        topology: int | str | DeviceMesh | None = None,
        arrangement: str | None = None,
        transit: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(layout, str) or layout not in (*LAYOUTS, AUTO):
            raise ValueError(f"layout={layout!r} is unknown; it must be one of {', '.join((*LAYOUTS, AUTO))}")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s={timeout_s!r} is {type(timeout_s).__name__}; it must be a number of seconds")
        if not 0 < timeout_s <= arguments.MAX_TIMEOUT_S:
            most = arguments.MAX_TIMEOUT_S
            raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds, at most {most}")
        self.layout_name = layout
        self.timeout_s = float(timeout_s)
        self.group, self.ulysses = _group_of(group, ulysses)
        self.size = dist.get_world_size(self.group) if self.group else 1
        self.rank = dist.get_rank(self.group) if self.group else 0
        if self.size % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} must divide the {self.size} ranks of the group")
        self.transit = arguments.transit_of(transit)
        self._layouts: OrderedDict[tuple, Layout] = OrderedDict()
        if self.group and self.size > 1:
            text = (
                f"Ring(layout={layout!r}, ulysses={self.ulysses}, timeout_s={timeout_s:g}, "
                f"topology={'a mesh' if isinstance(topology, dist.DeviceMesh) else topology}, "
                f"arrangement={arrangement}, transit={transit}) of {self.size} ranks"
            )
            agreement.agree(self.group, text, self.timeout_s, once=False)
        self.inner = self._inner(ranks_per_node(topology, self.group, self.timeout_s))
        self.arrangement = self._arranged(arrangement, topology is not None)
        self.slow_group = _twin(self.group) if self.arrangement == "double" else None

    def __copy__(self) -> Ring:
        """Itself: ranks and their groups exist once."""
        return self

    def __deepcopy__(self, memo: object) -> Ring:
        return self

    def __getstate__(self) -> dict:
        """For pickle. TypeError with a group, which no other process has."""
        if self.group is not None:
            raise TypeError(
                f"a Ring over the {self.size} ranks of a process group cannot be pickled, nor can its layouts: "
                "send what ring.layout was given, and make ring and layout where they are used"
            )
        return self.__dict__

    def _inner(self, per_node: int) -> int:
        """Ring ranks of a node."""
        if per_node % self.ulysses:
            raise ValueError(
                f"topology tells of {per_node} ranks a node, which must be a multiple of ulysses={self.ulysses}: "
                "heads are split inside a node"
            )
        return per_node // self.ulysses

    def _arranged(self, arrangement: str | None, told: bool) -> str:
        if arrangement is not None and not (isinstance(arrangement, str) and arrangement in ARRANGEMENTS):
            words = ", ".join(ARRANGEMENTS)
            raise ValueError(f"arrangement={arrangement!r} is unknown; it must be None or one of {words}")
        if arrangement == "double" and not told:
            raise ValueError("arrangement='double' needs topology=: which ranks share a node")
        if arrangement not in (None, "double") and told:
            raise ValueError(f"topology is of no use to arrangement={arrangement!r}; leave it out, or say 'double'")
        is_double = arrangement == "double" or (arrangement is None and 1 < self.inner < self.ring_size)
        return "double" if is_double else arrangement or "ring"

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

    @_on_the_host
    def layout(
        self,
        seq_len: int,
        cu_seqlens: torch.Tensor | list[int] | None = None,
        causal: bool | None = None,
        intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> Layout:
        """Cut a sequence over the ranks. Cheap and cached, never talks; make one per batch when documents change.

        seq_len: S, a multiple of what the layout needs
        cu_seqlens: borders of packed documents, int32 [m + 1], 0 first; tokens from the last border on are padding
        causal: None means True, and False where intervals are given
        intervals: (lo, hi), int32 [S] each, never falling, in [0, S]
        windows: for layout="auto" alone: the windows of the calls that will use it, None for one without
        Raises: ValueError, TypeError, naming the value and what would be accepted.
        """
        self._check_divides(arguments.seq_len_of(seq_len))
        causal = arguments.causal_of(causal, intervals)
        with torch.inference_mode(False):  # a layout made inside inference_mode may be used in training
            borders = arguments.cu_seqlens_of(cu_seqlens, seq_len)
            bounds = arguments.bounds_of(intervals, seq_len, seq_len)
        if windows is not None and self.layout_name != AUTO:
            raise ValueError(
                f"windows={windows} choose a layout, which is {self.layout_name!r}: say Ring(layout='auto')"
            )
        if not isinstance(windows, Sequence | None) or isinstance(windows, str):
            raise TypeError(f"windows={windows!r} is {type(windows).__name__}; it must be a list of windows")
        each = tuple(arguments.window_of(window) for window in ((None,) if windows is None else windows))
        if not each:
            raise ValueError("windows is empty; it must hold one entry a kind of call, or be left out")
        key = (seq_len, causal, each, *(None if x is None else x.numpy().tobytes() for x in (borders, bounds)))
        if key not in self._layouts:
            self._layouts[key] = self._make(seq_len, [arguments.Mask(causal, w, borders, bounds) for w in each])
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _make(self, seq_len: int, masks: list[arguments.Mask]) -> Layout:
        work = work_of(masks, seq_len)
        name = choose(masks, work, seq_len, self) if self.layout_name == AUTO else self.layout_name
        segments = LAYOUTS[name].segments(seq_len, self.ring_size, self.ulysses, work)
        with torch.inference_mode(False):
            table = table_of(segments)
        causal, borders, bounds = masks[0].causal, masks[0].cu_seqlens, masks[0].bounds
        if borders is not None:
            for x in (borders, table):  # another number of documents must not compile anew
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return Layout(self, seq_len, causal, borders, bounds, table, name)

    def _check_divides(self, seq_len: int) -> None:
        rules = LAYOUTS if self.layout_name == AUTO else [self.layout_name]
        multiple = min(LAYOUTS[name].multiple(self.ring_size, self.ulysses) for name in rules)
        if seq_len % multiple:
            advice = f"pad it to {{padded}}, with the padding behind cu_seqlens[-1]={seq_len}"
            raise ValueError(
                f"seq_len={seq_len} must be a multiple of {multiple} for layout {self.layout_name!r} over {self.size} "
                f"ranks; {arguments.length_beside(seq_len, multiple, advice)}"
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
        started = os.environ.get("WORLD_SIZE", "1")
        if not ready and started not in ("", "0", "1"):
            warnings.warn(
                f"this process is one of WORLD_SIZE={started}, but torch.distributed is not initialised: the Ring has "
                "this rank alone. Call torch.distributed.init_process_group() before",
                stacklevel=3,
            )
        return (dist.group.WORLD if ready else None), ulysses or 1
    if isinstance(group, dist.ProcessGroup):
        return group, ulysses or 1
    if dist.is_initialized() and group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives the others
        raise TypeError(f"rank {dist.get_rank()} of the world is not in this group; make its Ring on its members alone")
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


def _twin(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The same processes once more: NCCL carries the messages of one group one after the other."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
