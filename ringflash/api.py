"""`attention` and `explain`: arguments are checked here, once; what follows trusts them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from . import arguments, ops
from .group import Ring
from .kernels import KERNELS
from .kernels.choice import Choice, choose
from .layout import Layout
from .layouts.striped import stripe
from .routes import OneDevice, Plan, Route, sizes_of


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    causal: bool | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | list[int] | None = None,
    intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    deterministic: bool = False,
    rotate: str = "auto",
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, on one device or over a ring.

    q: [B, L, H, D]; k, v: [B, L, G, D], fp32, bf16 or fp16, H a multiple of G; any strides. On one device k and v may
        be longer or shorter than q: causal and window are then aligned to the end (bottom-right)
    layout: from `ring.layout(...)`: q, k, v are this rank's parts, and the layout's mask holds; all ranks must call
    causal: None means True, and False where intervals are given
    window: w >= 1: a query sees itself and the w - 1 keys before it; symmetric, w - 1 on each side, if not causal
    cu_seqlens: int32 tensor or list of ints [m + 1], borders of packed documents, B = 1; tokens behind the last border
        are padding: they see nothing and nobody sees them
    intervals: (lo, hi), int32 [L] each, never falling: each query sees keys lo <= position < hi, and what the other
        arguments allow
    scale: softmax scale, D ** -0.5 unless given
    return_lse: also return lse [B, H, L], fp32, natural log of the softmax denominator; differentiable, but for kernel
        cudnn, whose ranks ask each other in every backward whether one of them has a gradient of it
    kernel: one of ringflash.KERNELS; "auto" is eager on CPUs, and on GPUs gluon where it can run and passes its
        start-up check, else triton; `explain` tells which and why
    deterministic: gradients are bitwise equal in repeated calls; a kernel that cannot raises. So is it where
        torch.use_deterministic_algorithms is on
    rotate: what travels in the backward of a ring: "keys" and values with their gradients, "queries" with theirs, or
        "auto": whichever moves fewer bytes for these heads, types and this mask. In a ring of size 1 nothing travels:
        `explain` warns of it; without layout= it is refused
    sinks: [H], any float type, finite, or -inf for none: a logit of each query head, not multiplied by scale, that is
        one more key of every query, with value 0; lse has it in it, and a query that sees no key has lse = sink. Its
        gradient is that of this rank's queries, so parameters are summed over ranks, as all are. A call with sinks
        starts from a state in fp32, 4 bytes an element of out. NaN and +inf are not looked for, which would make the
        host wait for the GPU: they show, as NaN in their head's gradients and in out of each query that sees a key
    softcap: scores s become softcap * tanh(s / softcap), s with scale in it, before the mask; kernels eager and triton
    returns out [B, L, H, D] in the input's type, or (out, lse)

    Numerics: state and gradients are fp32 from the first hop to the last and rounded once; a query that sees no key has
        out 0, lse -inf, gradient 0. Gradients are those of the sum over ranks of each rank's loss. Under autocast the
        inputs are cast first and gradients come back in each input's own type.
    Raises: TypeError, ValueError, naming argument, value and what would be accepted; on every rank alike.
    Source: FlashAttention, arXiv:2205.14135, arXiv:2307.08691; Ring Attention, arXiv:2310.01889.
    """
    q, k, v = _checked(q, k, v, layout)
    mask = arguments.mask_of(q, k, layout, causal=causal, window=window, cu_seqlens=cu_seqlens, intervals=intervals)
    return_lse = arguments.flag_of("return_lse", return_lse)
    out, lse = ops.attention(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)),
        arguments.sinks_of(q, sinks),
        None if layout is None else layout.segments,
        mask.cu_seqlens,
        mask.bounds,
        mask.causal,
        ops.NO_WINDOW if mask.window is None else mask.window,
        arguments.scale_of(q, scale),
        _known(kernel),
        _deterministic(deterministic),
        *_ranks(layout, arguments.rotate_of(rotate, layout)),
        arguments.softcap_of(softcap),
        return_lse,
    )
    return (out, lse) if return_lse else out


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in the type that autocast asks for, known to belong together and to the layout."""
    arguments.check_shapes(q, k, v)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # explain takes meta tensors
        dtype = torch.get_autocast_dtype(q.device.type)
        # fp64 stays fp64, as under torch's own autocast, and is refused below
        q, k, v = (x.to(dtype) if x.dtype in arguments.DTYPES else x for x in (q, k, v))
    arguments.check_tensors(q, k, v)
    if layout is not None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is {type(layout).__name__}; it must come from ring.layout(...)")
        arguments.check_local(q, k, layout)
    return q, k, v


def _known(name: str) -> str:
    """A name of KERNELS, or auto, which the op resolves: only there are real tensors, also under torch.compile."""
    if not isinstance(name, str) or name not in ("auto", *KERNELS):
        raise ValueError(f"kernel={name!r} is unknown; it must be auto or one of {', '.join(KERNELS)}")
    return name


def _deterministic(flag: bool) -> bool:
    """Asked for here, or of all of torch."""
    return arguments.flag_of("deterministic", flag) or torch.are_deterministic_algorithms_enabled()


def _ranks(layout: Layout | None, rotate: str) -> tuple[str, int, float, str, int, str, str, str]:
    """What the op is told of the ranks, from `group` on, see `ops.How`; a ring of one rank needs no group."""
    if layout is None or layout.ring.size == 1:
        return "", 1, 0.0, "ring", 0, rotate, "float32", ""
    ring = layout.ring
    assert ring.group is not None
    slow = ring.slow_group.group_name if ring.slow_group else ""
    transit = str(ring.transit).removeprefix("torch.")
    where = (ring.group.group_name, ring.ulysses, ring.timeout_s)
    return *where, ring.arrangement, ring.inner, rotate, transit, slow


@dataclass(frozen=True)
class Explanation:
    """What one call of `attention` will do on this rank. str() of it is a few lines to read.

    kernel: the kernel that will run; reason: why this one; hops: distances that keys travel, the same on every rank
    sends: blocks of keys that this rank sends, in a gather piece by piece
    forward_bytes, backward_bytes: bytes that this rank sends, all in all
    arrangement: how ranks pass blocks on, a key of ringflash.ARRANGEMENTS; rotates: what travels in the backward, keys
        or queries; transit: the type of gradients under way
    pairs: (query, key) pairs that this ring rank computes, a head; share: pairs / mean over the ring ranks
    warnings: what is allowed but slow, or changes nothing here
    """

    kernel: str
    reason: str
    hops: tuple[int, ...]
    sends: int
    forward_bytes: int
    backward_bytes: int
    pairs: int
    share: float
    warnings: tuple[str, ...]
    arrangement: str = "ring"
    rotates: str = "keys"
    transit: torch.dtype = torch.float32

    def __str__(self) -> str:
        lines = [
            f"kernel {self.kernel} ({self.reason}); hops {list(self.hops)}, {self.sends} sends of this rank forward",
            f"{self.forward_bytes:,} bytes sent by this rank forward, {self.backward_bytes:,} backward, where "
            f"{self.rotates} travel and gradients are {str(self.transit).removeprefix('torch.')}; {self.arrangement}",
            f"{self.pairs:,} visible pairs a head on this rank, {self.share:.3f} of the mean",
        ]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    causal: bool | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | list[int] | None = None,
    intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    deterministic: bool = False,
    rotate: str = "auto",
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Explanation:
    """Say which kernel, hops and bytes `attention` will use for these tensors and masks; sends nothing.

    q, k, v, sinks: as for `attention`; only shapes, types and devices are read, so tensors on the meta device will do.
        On a GPU it runs a kernel's start-up check, if that has not run yet
    scale, return_lse: change no kernel, hop or byte; checked, so that the arguments of a call can be given as they are
    """
    q, k, v = _checked(q, k, v, layout)
    arguments.scale_of(q, scale)
    arguments.flag_of("return_lse", return_lse)
    arguments.sinks_of(q, sinks)
    mask = arguments.mask_of(q, k, layout, causal=causal, window=window, cu_seqlens=cu_seqlens, intervals=intervals)
    rotate = arguments.rotate_of(rotate, layout)
    num_hops = 1 if layout is None else layout.ring.ring_size
    choice = choose(_known(kernel), q, k, _deterministic(deterministic), num_hops, arguments.softcap_of(softcap))
    if layout is None:
        lo, hi = mask.intervals(q.shape[1], k.shape[1])
        plan = OneDevice(k.shape[1], lo, hi)
        pairs, warnings = _pairs(lo, hi), _pieces(choice.kernel, plan, plan.forward)
        return Explanation(*choice, plan.forward.hops, 0, 0, 0, pairs, 1.0, tuple(warnings))
    return _explain_ring(q, k, layout, mask, choice, rotate)


def _pairs(lo: np.ndarray, hi: np.ndarray) -> int:
    return int((hi.astype(np.int64) - lo).clip(0).sum())


def _explain_ring(
    q: torch.Tensor, k: torch.Tensor, layout: Layout, mask: arguments.Mask, choice: Choice, rotate: str
) -> Explanation:
    ring = layout.ring
    content = [None if x is None else x.numpy().tobytes() for x in (layout.segments, mask.cu_seqlens, mask.bounds)]
    plan = ops.make_plan(
        (ring.ring_rank, layout.seq_len, layout.seq_len), content[0] or b"", content[1], content[2],
        causal=mask.causal, window=mask.window or ops.NO_WINDOW, arrangement=ring.arrangement, inner=ring.inner,
    )  # fmt: skip
    sizes = sizes_of(q, k, ring.transit, ring.ulysses)
    there, back = plan.forward, plan.backward(sizes, rotate)
    pairs = sum(view.pairs() for view in there.views if view)
    mean = _pairs(*mask.intervals(layout.seq_len, layout.seq_len)) / ring.ring_size
    sends = sum(len(trip.sends) for trip in there.block_trips)
    heads = _heads_bytes(q, k, layout)
    warnings = _pieces(choice.kernel, plan, back)
    if layout.name == "striped" and (size := stripe(layout.seq_len, ring.ring_size, ring.ulysses)) < 64:
        warnings.append(f"stripes of {size} tokens are shorter than a tile: choose a length whose S / n divides by 64")
    warnings += _idle(ring, rotate)
    forward = sizes.bytes_of(there.what, there.sent_rows()[0], 0) + heads[0]
    backward = sizes.bytes_of(back.what, *back.sent_rows()) + heads[1]
    share = pairs / mean if mean else 1.0
    return Explanation(
        *choice, tuple(sorted(there.hops)), sends, forward, backward, pairs, share, tuple(warnings),
        arrangement=ring.arrangement, rotates=back.what, transit=ring.transit,
    )  # fmt: skip


def _pieces(kernel: str, plan: OneDevice | Plan, back: Route) -> list[str]:
    """What a kernel that computes hops in pieces makes of each; ValueError, as in `attention`, for too many."""
    counts = ops.pieces_of(kernel, plan, lambda: back)
    if max(counts, default=1) < 2:
        return []
    return [f"kernel {kernel} cuts this rank's hops into {counts} pieces and joins them; kernel='triton' needs no cut"]


def _idle(ring: Ring, rotate: str) -> list[str]:
    """What `explain` tells of words that a program for any number of GPUs may say of its ring."""
    given = [("arrangement", ring.arrangement, "ring"), ("transit", ring.transit, torch.float32),
             ("rotate", rotate, "auto")]  # fmt: skip
    said = [f"{name}={value}" for name, value, plain in given if value != plain]
    return [f"{' and '.join(said)}: nothing to act on in a ring of size 1"] if said and ring.ring_size == 1 else []


def _heads_bytes(q: torch.Tensor, k: torch.Tensor, layout: Layout) -> tuple[int, int]:
    """Bytes that one rank sends for Ulysses, forward and backward."""
    size = layout.ring.ulysses
    if size == 1:
        return 0, 0
    rows = q.shape[0] * layout.local_len * (size - 1)
    queries = rows * q.shape[2] // size  # one number a query and head that leaves
    keys = rows * max(1, k.shape[2] // size)
    element = q.element_size() * q.shape[3]
    gradient = (4 if k.shape[2] < size else k.element_size()) * k.shape[3]  # shared heads are summed in fp32
    forward = (2 * queries + 2 * keys) * element + queries * 4
    return forward, (3 * queries + 2 * keys) * element + 2 * keys * gradient + 2 * queries * 4
