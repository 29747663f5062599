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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import agreement, arguments, mask, ring, ulysses
from .exchange import Processes, Transport
from .kernels import KERNELS, Kernel
from .kernels.choice import choose, num_pieces
from .layout import segments_of

NO_WINDOW = 0

WITHOUT_DLSE = ("cudnn",)
"""Kernels whose `delta` refuses a gradient of lse. It may come on one rank alone: their backwards are agreed on too."""


@functools.lru_cache(maxsize=32)
def make_plan(
    shape: tuple[int, int, int], segments: bytes, cu_seqlens: bytes | None, bounds: bytes | None, *,
    causal: bool, window: int,
) -> mask.Plan:  # fmt: skip
    """One rank's hops and views, from the content of the tensors.

    shape: (ring rank, queries, keys), the lengths of the whole sequence; segments: b"" on one device
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
        return mask.plan_one_device(num_keys, lo, hi)
    return mask.plan(segments_of(np.frombuffer(segments, np.int32).reshape(-1, 3)), ring_rank, lo, hi)


def _content(x: Tensor | None) -> bytes | None:
    return None if x is None else x.numpy().tobytes()


class _Call:
    """What a forward and its backward derive alike from the arguments of the op."""

    def __init__(
        self, q: Tensor, k: Tensor, segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None,
        causal: bool, window: int, kernel: str, group: str, num_ulysses: int, timeout_s: float, *, deterministic: bool,
    ) -> None:  # fmt: skip
        self.groups, self.timeout_s = k.shape[2], timeout_s
        self.ring: Transport | None = None
        self.heads: Transport | None = None
        self.pg: dist.ProcessGroup | None = None
        size = 1
        if group:
            self.pg = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a NewType since 2.12
            rank, size = dist.get_rank(self.pg), dist.get_world_size(self.pg)
            ring_rank, head_rank = divmod(rank, num_ulysses)
            if size > num_ulysses:
                self.ring = Processes(self.pg, ring_rank, range(head_rank, size, num_ulysses), timeout_s)
            if num_ulysses > 1:
                first = ring_rank * num_ulysses
                self.heads = Processes(self.pg, head_rank, range(first, first + num_ulysses), timeout_s)
        self.name, self.refused = kernel, ""
        try:
            self.name = choose(kernel, q, k, deterministic, self.ring.size if self.ring else 1).kernel
        except ValueError as error:
            self.refused = str(error)
        shape = (self.ring.rank if self.ring else 0, q.shape[1] * size, k.shape[1] * size)
        table = _content(segments) or b""
        self.plan = make_plan(shape, table, _content(cu_seqlens), _content(bounds), causal=causal, window=window)

    @property
    def kernel(self) -> Kernel:
        """Only for a call that was not refused."""
        return KERNELS[self.name]

    def scatter(self, tensors: list[Tensor]) -> list[Tensor]:
        """All heads of the local tokens -> this rank's heads of the ring rank's tokens."""
        return ulysses.scatter_heads(tensors, self.groups, self.heads) if self.heads else tensors

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
            num_pieces(self.name, self.plan)
        except ValueError as error:
            return f"kernel={self.name!r}: {error}"
        return ""

    def agree(self, text: str, refusal: str) -> None:
        """Raise on every rank if this one refuses, or if they were called differently. text: the call, see `describe`.

        Ranks differ in what they see, in their cards and packages, so one may refuse alone: all must hear of it before
        anything is sent.
        """
        if self.pg is not None:
            agreement.agree(self.pg, text, self.timeout_s, refusal=refusal)
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


def _no_autocast(q: Tensor) -> contextlib.AbstractContextManager:
    """Inputs were cast before the op; inside it a kernel's own fp32 products must stay fp32."""
    on = torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else contextlib.nullcontext()


def describe(q: Tensor, k: Tensor, pieces: tuple[Tensor | None, ...], flags: tuple[object, ...]) -> str:
    """The call as text, equal on all ranks that make the same one."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(b"none" if piece is None else str(list(piece.shape)).encode())
        digest.update(_content(piece) or b"")
    names = ("causal", "window", "scale", "kernel", "deterministic", "ulysses")
    rest = ", ".join(f"{name}={value}" for name, value in zip(names, flags, strict=True))
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
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None,
    causal: bool, window: int, scale: float, kernel: str, deterministic: bool,
    group: str, ulysses: int, timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The local part of attention over a ring.

    q: [B, L, H, D]; k, v: [B, L, G, D], innermost stride 1
    segments: int32 [n, 3] (ring rank, global start, count) of all ranks, None on one device
    cu_seqlens: int32 [m + 1]; bounds: int32 [2, S] (lo, hi); window: 0 = none; group: its name, "" = one process
    returns out [B, L, H, D] in q's type, lse [B, H, L] fp32
    """
    where = (group, ulysses, timeout_s)
    call = _Call(q, k, segments, cu_seqlens, bounds, causal, window, kernel, *where, deterministic=deterministic)
    flags = (causal, window, scale, call.name, deterministic, ulysses)
    refusal = call.refusal()
    call.agree(describe(q, k, (segments, cu_seqlens, bounds), flags) if group else "", refusal)
    with _no_autocast(q):
        q_heads, k_heads, v_heads = call.scatter([q, k, v])
        out, lse = ring.forward(q_heads, k_heads, v_heads, call.plan, call.ring, call.kernel, scale=scale)
    return call.gather(out), call.gather_rows(lse)


@torch.library.register_fake("ringflash::attention", lib=_LIBRARY)
def _(q, k, v, segments, cu_seqlens, bounds, causal, window, scale, kernel, deterministic, group, ulysses, timeout_s):
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("ringflash::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor | None, cu_seqlens: Tensor | None, bounds: Tensor | None,
    causal: bool, window: int, scale: float, kernel: str, deterministic: bool,
    group: str, ulysses: int, timeout_s: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attention`, of the sum of all ranks' losses; dlse: [B, H, L] or None. Each in its input's type."""
    where = (group, ulysses, timeout_s)
    call = _Call(q, k, segments, cu_seqlens, bounds, causal, window, kernel, *where, deterministic=deterministic)
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)  # what a caller made of -inf, NaN too, reaches no gradient
    if call.name in WITHOUT_DLSE:
        flags = (causal, window, scale, call.name, deterministic, ulysses)
        text = describe(q, k, (segments, cu_seqlens, bounds), flags) if group else ""
        call.agree(f"backward of {text}", _refusal_of_dlse(call.kernel, out, dout, dlse))
    with _no_autocast(q):
        delta = call.kernel.delta(out, dout, dlse)
        q_heads, k_heads, v_heads, dout_heads = call.scatter([q, k, v, dout])
        lse, delta = call.scatter_rows(lse, delta)
        dq, dk, dv = ring.backward(
            dout_heads, q_heads, k_heads, v_heads, lse, delta, call.plan, call.ring, call.kernel,
            scale=scale, deterministic=deterministic, rounded=not call.shares_heads,
        )  # fmt: skip
    return call.gather(dq.to(q.dtype)), call.gather_kv(dk, k.dtype), call.gather_kv(dv, v.dtype)


@attention_backward.register_fake
def _(
    dout, dlse, q, k, v, out, lse, segments, cu_seqlens, bounds, causal, window, scale, kernel, deterministic, group,
    ulysses, timeout_s,
):  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Differentiable(torch.autograd.Function):
    """`attention` with its gradients, for the dispatcher's autograd key."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = attention(*inputs)
        q, k, v, segments, cu_seqlens, bounds, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, *output, segments, cu_seqlens, bounds)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        q, k, v, out, lse, segments, cu_seqlens, bounds = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()
        grads = attention_backward(dout, dlse, q, k, v, out, lse, segments, cu_seqlens, bounds, *ctx.rest)
        return *grads, *(None,) * 11


_LIBRARY.impl("attention", lambda *inputs: _Differentiable.apply(*inputs), "Autograd")
