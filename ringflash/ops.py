"""The custom ops `ringflash::attention` and `ringflash::attention_backward`: what lies between checks and ring.

They take tensors, numbers and strings only, so that torch.compile sees one node and a checkpoint policy can name and
save it. Segments, documents and intervals come as int32 CPU tensors whose sizes may change with the batch; hops, tile
tables and the digest are derived inside, cached by content. The fake implementations never talk.

Letters: B batch, L local tokens, H query heads, G key/value heads, D head dimension, P ring size, U Ulysses size.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import agreement, arguments, mask, ring, routes, ulysses
from .exchange import Processes, Transport, connect
from .kernels import KERNELS, Kernel
from .kernels.choice import capped, choose, num_pieces
from .layout import segments_of

NO_WINDOW = 0

WITHOUT_DLSE = ("cudnn",)
"""Kernels whose `delta` refuses a gradient of lse. It may come on one rank alone: their backwards are agreed on too."""

_captured: dict[int, routes.Plan | routes.OneDevice] = {}
"""Plans, by identity, that a CUDA graph was captured with: it reads their tables, and does not ask for them again."""


@functools.lru_cache(maxsize=8)  # each holds the intervals of a whole sequence
def make_plan(
    shape: tuple[int, int, int], segments: bytes, cu_seqlens: bytes | None, bounds: bytes | None, *,
    causal: bool, window: int, arrangement: str = "ring", inner: int = 0,
) -> routes.Plan | routes.OneDevice:  # fmt: skip
    """One rank's ways round the ring, from the content of the tensors.

    shape: (ring rank, queries, keys), the lengths of the whole sequence; segments: b"" on one device
    arrangement, inner: see `routes.Plan`; 0 = all ranks are one node
    """
    ring_rank, num_queries, num_keys = shape
    borders = None if cu_seqlens is None else np.frombuffer(cu_seqlens, np.int32)
    pair = None if bounds is None else np.frombuffer(bounds, np.int32).reshape(2, -1)
    if borders is not None:
        arguments.check_borders(borders, num_queries)
    if pair is not None:
        arguments.check_bounds(pair, num_keys)
    lo, hi = mask.intervals(
        num_queries,
        num_keys,
        causal=causal,
        window=None if window == NO_WINDOW else window,
        cu_seqlens=borders,
        bounds=None if pair is None else (pair[0], pair[1]),
    )
    if not segments:
        return routes.OneDevice(num_keys, lo, hi)
    parts = segments_of(np.frombuffer(segments, np.int32).reshape(-1, 3))
    return routes.Plan(parts, ring_rank, lo, hi, arrangement=arrangement, inner=inner or len(parts))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _content(x: Tensor | None) -> bytes | None:
    return None if x is None else x.numpy().tobytes()


class How(NamedTuple):
    """The numbers and words of the op, in the order of its arguments, and whether it has sinks.

    window: 0 = none; group: its name, "" = one process; arrangement, inner: see `routes.Plan`
    rotate: what travels in the backward, auto or a key of routes.TRAVELLERS; transit: the type of gradients under way
    slow_group: the group for what goes between nodes, "" = the same
    softcap: scores s become softcap * tanh(s / softcap); 0 = they do not
    returns_lse: whether the caller gets lse, so that a gradient of it may come
    sinks: whether there are any; the tensor itself holds parameters, which ranks are not asked to compare
    """

    causal: bool
    window: int
    scale: float
    kernel: str
    deterministic: bool
    group: str
    ulysses: int
    timeout_s: float
    arrangement: str
    inner: int
    rotate: str
    transit: str
    slow_group: str
    softcap: float
    returns_lse: bool
    sinks: bool


def _group(name: str) -> dist.ProcessGroup:
    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a NewType since 2.12
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"the process group {name!r} of this layout's ring is gone: torch.distributed was ended after the Ring was "
            "made; make another Ring and its layouts"
        ) from error


class _Call:
    """What a forward and its backward derive alike from the arguments of the op."""

    def __init__(
        self, q: Tensor, k: Tensor, segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None, how: How
    ) -> None:
        self.groups = k.shape[2]
        self.how, self.transit = how, getattr(torch, how.transit)
        self.ring: Transport | None = None
        self.heads: Transport | None = None
        self.pg: dist.ProcessGroup | None = None
        self.slow = _group(how.slow_group) if how.slow_group else None
        size = 1
        if how.group:
            self.pg = _group(how.group)
            rank, size = dist.get_rank(self.pg), dist.get_world_size(self.pg)
            ring_rank, head_rank = divmod(rank, how.ulysses)
            if size > how.ulysses:
                members = range(head_rank, size, how.ulysses)
                self.ring = Processes(self.pg, ring_rank, members, how.timeout_s, self.slow)
            if how.ulysses > 1:
                first = ring_rank * how.ulysses
                self.heads = Processes(self.pg, head_rank, range(first, first + how.ulysses), how.timeout_s)
        self.name, self.refused = how.kernel, ""
        try:
            self.name = choose(
                how.kernel, q, k, how.deterministic, self.ring.size if self.ring else 1, how.softcap
            ).kernel
        except ValueError as error:
            self.refused = str(error)
        shape = (self.ring.rank if self.ring else 0, q.shape[1] * size, k.shape[1] * size)
        self.plan = make_plan(
            shape, _content(segments) or b"", _content(cu_seqlens), _content(bounds),
            causal=how.causal, window=how.window, arrangement=how.arrangement, inner=how.inner,
        )  # fmt: skip
        if _is_capturing(q.device):
            _captured[id(self.plan)] = self.plan
        self._sizes = routes.sizes_of(q, k, self.transit, how.ulysses)
        self.may_refuse_dlse = how.returns_lse and self.name in WITHOUT_DLSE
        told = how._replace(kernel=self.name, returns_lse=self.may_refuse_dlse)
        self._text = functools.partial(describe, q, k, (segments, cu_seqlens, bounds), told)

    @property
    def kernel(self) -> Kernel:
        """Only for a call that was not refused."""
        return capped(KERNELS[self.name], self.how.softcap)

    @property
    def way_back(self) -> routes.Route:
        """What travels in the backward, and how."""
        return self.plan.backward(self._sizes, self.how.rotate)

    def connect(self, device: torch.device) -> None:
        """Make the communicators while all ranks are here."""
        for group in (self.pg, self.slow):
            if group is not None:
                connect(group, device, self.how.timeout_s)

    def scatter(self, tensors: list[Tensor]) -> list[Tensor]:
        """All heads of the local tokens -> this rank's heads of the ring rank's tokens."""
        return ulysses.scatter_heads(tensors, self.groups, self.heads) if self.heads else tensors

    def heads_of(self, x: Tensor | None) -> Tensor | None:
        """Of one number a query head those of this rank's heads."""
        return x if x is None or not self.heads else x.chunk(self.heads.size)[self.heads.rank]

    def gather(self, x: Tensor) -> Tensor:
        """The way back, for tensors with query heads."""
        return ulysses.gather_heads(x, self.heads) if self.heads else x

    def scatter_rows(self, *rows: Tensor) -> list[Tensor]:
        """`scatter` for one number a query, in one message: [B, H, L] each -> [B, H / U, U * L]."""
        if not self.heads:
            return list(rows)
        there = self.scatter([x.transpose(1, 2)[..., None] for x in rows])
        return [x[..., 0].transpose(1, 2).contiguous() for x in there]

    def gather_rows(self, x: Tensor) -> Tensor:
        """`gather` for one number a query."""
        if not self.heads:
            return x
        return self.gather(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2).contiguous()

    def refusal(self) -> str:
        """Why the kernel does not take this call or this rank's part of the mask; "" if it does."""
        if self.refused:
            return self.refused
        try:
            pieces_of(self.name, self.plan, lambda: self.way_back)
        except ValueError as error:
            return f"kernel={self.name!r}: {error}"
        return ""

    def agree(self, refusal: str, prefix: str = "", *, once: bool = True) -> None:
        """Raise on every rank if this one refuses, or if they were called differently. prefix: of the call's text.

        Ranks differ in what they see, in their cards and packages, so one may refuse alone: all must hear of it before
        anything is sent. once: see `agreement.agree`
        """
        if self.pg is not None:
            agreement.agree(self.pg, prefix + self._text(), self.how.timeout_s, once=once, refusal=refusal)
        if refusal:
            raise ValueError(refusal)

    @property
    def shares_heads(self) -> bool:
        """Several Ulysses ranks work on one key/value head, whose gradients are summed on arrival."""
        return self.heads is not None and self.groups < self.heads.size

    def gather_kv(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`gather` for gradients of keys or values, rounded once: before the way, or after a sum on arrival."""
        if not self.heads:
            # dk and dv in one buffer, which an op may not return; without elements nobody can tell
            shares = x.untyped_storage().nbytes() > x.nbytes or not x.numel()
            return x.to(dtype, copy=shares)
        return ulysses.gather_kv_heads(x if self.shares_heads else x.to(dtype), self.groups, self.heads).to(dtype)


def _refusal_of_dlse(kernel: Kernel, out: Tensor, dout: Tensor, dlse: Tensor | None) -> str:
    """What a kernel that takes none says of a gradient of lse, asked with one row of it; "" without one."""
    if dlse is None:
        return ""
    try:
        kernel.delta(out[:, :1], dout[:, :1], dlse[:, :, :1])
    except ValueError as error:
        return str(error)
    return ""


def pieces_of(name: str, plan: routes.Plan | routes.OneDevice, way_back: Callable[[], routes.Route]) -> list[int]:
    """`choice.num_pieces` of a forward; ValueError also where the backward would have too many."""
    counts = num_pieces(name, mask.Plan((), plan.forward.views))
    if counts:
        num_pieces(name, mask.Plan((), way_back().views))
    return counts


def _no_autocast(q: Tensor) -> contextlib.AbstractContextManager:
    """Inputs were cast before the op; inside it a kernel's own fp32 products must stay fp32."""
    on = torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else contextlib.nullcontext()


def describe(q: Tensor, k: Tensor, pieces: tuple[Tensor | None, ...], how: How) -> str:
    """The call as text, equal on all ranks that make the same one."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(b"none" if piece is None else str(list(piece.shape)).encode())
        digest.update(_content(piece) or b"")
    hidden = ("group", "timeout_s", "slow_group")  # groups have other names on other ranks
    rest = ", ".join(f"{name}={value}" for name, value in how._asdict().items() if name not in hidden)
    shapes = f"q {list(q.shape)} {q.dtype}, k {list(k.shape)}"
    return f"attention({shapes}, {rest}, layout and documents {digest.hexdigest()[:12]})"


# Not by `custom_op`, whose way through autograd takes the host 0.1 ms a call: more than launching a kernel does.
_LIBRARY = torch.library.Library("ringflash", "FRAGMENT")


def _op(body: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op ringflash::<name of body>, on all devices, with the schema that its annotations give."""
    name = body.__name__
    _LIBRARY.define(name + torch.library.infer_schema(body, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    op: Callable[..., Any] = getattr(torch.ops.ringflash, name).default
    return op


@_op
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None,
    causal: bool, window: int, scale: float, kernel: str, deterministic: bool,
    group: str, ulysses: int, timeout_s: float, arrangement: str, inner: int, rotate: str, transit: str,
    slow_group: str, softcap: float, returns_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The local part of attention over a ring.

    q: [B, L, H, D]; k, v: [B, L, G, D], innermost stride 1; sinks: [H] fp32
    segments: int32 [n, 3] (ring rank, global start, count) of all ranks, None on one device
    cu_seqlens: int32 [m + 1]; bounds: int32 [2, S] (lo, hi); the rest: see `How`
    returns out [B, L, H, D] in q's type, lse [B, H, L] fp32
    """
    how = How(
        causal, window, scale, kernel, deterministic, group, ulysses, timeout_s, arrangement, inner, rotate, transit,
        slow_group, softcap, returns_lse, sinks is not None,
    )  # fmt: skip
    call = _Call(q, k, segments, cu_seqlens, bounds, how)
    call.agree(call.refusal())
    call.connect(q.device)
    with _no_autocast(q):
        q_heads, k_heads, v_heads = call.scatter([q, k, v])
        out, lse = ring.forward(
            q_heads, k_heads, v_heads, call.plan.forward, call.ring, call.kernel,
            scale=scale, sinks=call.heads_of(sinks),
        )  # fmt: skip
    return call.gather(out), call.gather_rows(lse)


@torch.library.register_fake("ringflash::attention", lib=_LIBRARY)
def _(
    q, k, v, sinks, segments, cu_seqlens, bounds, causal, window, scale, kernel, deterministic, group, ulysses,
    timeout_s, arrangement, inner, rotate, transit, slow_group, softcap, returns_lse,
):  # fmt: skip
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=torch.float32)


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """[H] fp32, [0] without sinks, and delta as kernels take it. A sink is a key without a value: its dS is -P delta.

    Of a query that sees no key out is 0, whatever dout may hold, and NaN times 0 is NaN. Without sinks kernels tell
    these queries by lse = -inf; with them lse is the sink.
    """
    if sinks is None:
        return lse.new_empty(0), delta
    blind = (lse == sinks[:, None]) & ~delta.isfinite()
    own = delta.masked_fill(blind, 0.0) if dlse is None else torch.where(blind, -dlse, delta)
    weight = (sinks[:, None] - lse).exp().masked_fill(lse == -torch.inf, 0.0)
    return -(weight * own).sum((0, 2)), delta.masked_fill(blind, 0.0)


@torch.library.custom_op("ringflash::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None,
    causal: bool, window: int, scale: float, kernel: str, deterministic: bool,
    group: str, ulysses: int, timeout_s: float, arrangement: str, inner: int, rotate: str, transit: str,
    slow_group: str, softcap: float, returns_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attention`, of the sum of all ranks' losses; dlse: [B, H, L] or None. Each in its input's type.

    That of sinks is of this rank's queries, and [0] without sinks.
    """
    how = How(
        causal, window, scale, kernel, deterministic, group, ulysses, timeout_s, arrangement, inner, rotate, transit,
        slow_group, softcap, returns_lse, sinks is not None,
    )  # fmt: skip
    call = _Call(q, k, segments, cu_seqlens, bounds, how)
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)  # what a caller made of -inf, NaN too, reaches no gradient
    if call.may_refuse_dlse:  # each time: what the call is does not tell what is made of its lse, on this rank or that
        call.agree(_refusal_of_dlse(call.kernel, out, dout, dlse), "backward of ", once=False)
    with _no_autocast(q):
        delta = call.kernel.delta(out, dout, dlse)
        q_heads, k_heads, v_heads, dout_heads = call.scatter([q, k, v, dout])
        dsinks, delta = _sinks_gradient(sinks, lse, delta, dlse)
        lse, delta = call.scatter_rows(lse, delta)
        dq, dk, dv = ring.backward(
            dout_heads, q_heads, k_heads, v_heads, lse, delta, call.way_back, call.ring, call.kernel,
            scale=scale, deterministic=deterministic, rounded=not call.shares_heads, transit=call.transit,
        )  # fmt: skip
    return call.gather(dq.to(q.dtype)), call.gather_kv(dk, k.dtype), call.gather_kv(dv, v.dtype), dsinks


@attention_backward.register_fake
def _(
    dout, dlse, q, k, v, sinks, out, lse, segments, cu_seqlens, bounds, causal, window, scale, kernel, deterministic,
    group, ulysses, timeout_s, arrangement, inner, rotate, transit, slow_group, softcap, returns_lse,
):  # fmt: skip
    dsinks = lse.new_empty(0 if sinks is None else len(sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "ringflash: attention has no second derivative; a loss may hold its result, but no gradient through it "
        "(create_graph=True)"
    )


attention_backward.register_autograd(_no_second_derivative)


class _Differentiable(torch.autograd.Function):
    """`attention` with its gradients, for the dispatcher's autograd key."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = attention(*inputs)
        q, k, v, sinks, segments, cu_seqlens, bounds, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, sinks, *output, segments, cu_seqlens, bounds)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        q, k, v, sinks, out, lse, segments, cu_seqlens, bounds = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()
        grads = attention_backward(dout, dlse, q, k, v, sinks, out, lse, segments, cu_seqlens, bounds, *ctx.rest)
        dsinks = None if sinks is None else grads[3]
        return *grads[:3], dsinks, *(None,) * (3 + len(ctx.rest))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("ringflash: attention has no forward-mode derivative; backward() is accepted")


def _differentiable(*inputs):
    arguments.check_no_transform("attention")
    return _Differentiable.apply(*inputs)


_LIBRARY.impl("attention", _differentiable, "Autograd")
