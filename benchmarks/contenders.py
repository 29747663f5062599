"""How each contender is called: our kernels as a user calls them, and the peers in the layout that each likes best.

A maker takes a case and gives `attend(q, k, v) -> out`; it raises ValueError for what the contender does not have.
Needs torch, and a GPU as soon as a peer runs. Called by attention.py.

Letters: B batch, S tokens of one row, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from cases import WINDOW, Case, Contender, documents
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash
from ringflash import mask
from ringflash.kernels import State

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NOT_RIVALS = ("eager", "sdpa", "cudnn", "fa4")  # right and slow; or a peer, which is measured without us around it
FLEX_BLOCK = 128


def our_kernels() -> list[str]:
    """Names of ringflash.KERNELS that are measured."""
    return [name for name in ringflash.KERNELS if name not in NOT_RIVALS]


def borders(case: Case, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(documents(case.length), dtype=torch.int32, device=device)


def ours(case: Case, kernel: str, *, deterministic: bool = False) -> Attend:
    window = WINDOW if case.mask == "window" else None
    cu_seqlens = borders(case) if case.mask == "documents" else None
    causal = case.mask != "full"

    def attend(q, k, v):
        return ringflash.attention(
            q, k, v, causal=causal, window=window, cu_seqlens=cu_seqlens, kernel=kernel, deterministic=deterministic
        )

    return attend


def one_hop(case: Case, kernel: str, tensors: list[torch.Tensor], *, carried: bool) -> Callable[[], None]:
    """A kernel without the library around it: alone, or as a hop in the middle of a ring, which carries the state."""
    lo, hi = mask.intervals(case.length, case.length, causal=case.mask != "full")
    (view,) = mask.plan_one_device(case.length, lo, hi).views
    q, k, v = tensors
    lse = torch.zeros(case.batch, case.heads, case.length, device=q.device)
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if carried else None
    state, scale, ends = State(acc, torch.empty_like(q), lse), case.head_dim**-0.5, not carried
    return lambda: ringflash.KERNELS[kernel].forward(q, k, v, view, state, scale=scale, first=ends, last=ends)


def _sdpa(backend: SDPBackend) -> Callable[[Case], Attend]:
    def make(case: Case) -> Attend:
        if case.mask not in ("full", "causal"):
            raise ValueError(f"scaled_dot_product_attention has no mask {case.mask!r} that this backend takes")
        causal, grouped = case.mask == "causal", case.grouped

        def attend(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return attend

    return make


def _flash2(case: Case) -> Attend:
    """torch's FlashAttention-2 by its operator: `scaled_dot_product_attention` reaches no window and no documents."""
    lengths = np.diff(documents(case.length)) if case.mask == "documents" else [case.length]
    cu_seqlens = borders(case, "cuda") if case.mask == "documents" else None
    longest, causal = int(max(lengths)), case.mask != "full"
    window = {"window_size_left": WINDOW - 1, "window_size_right": 0} if case.mask == "window" else {}

    def attend(q, k, v):
        if cu_seqlens is not None:
            q, k, v = q[0], k[0], v[0]
        ends = (cu_seqlens, cu_seqlens, longest, longest)
        out = torch.ops.aten._flash_attention_forward(q, k, v, *ends, 0.0, causal, False, **window)[0]
        return out if cu_seqlens is None else out[None]

    return attend


def _flash4(case: Case) -> Attend:
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise ValueError(f"flash_attn.cute is not installed: {error}") from error
    causal = case.mask != "full"
    if case.mask == "documents":
        cu_seqlens, longest = borders(case, "cuda"), int(max(np.diff(documents(case.length))))
        ends = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
        both = {f"{name}_{side}": value for name, value in ends.items() for side in "qk"}
        return lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], causal=True, **both)[0][None]
    window = (WINDOW - 1, 0) if case.mask == "window" else (None, None)
    return lambda q, k, v: flash_attn_func(q, k, v, causal=causal, window_size=window)[0]


def block_mask(case: Case, device: str):
    """FlexAttention's block mask, made from our ranges: `create_block_mask` would hold S x S numbers. None for full."""
    from torch.nn.attention.flex_attention import BlockMask

    if case.mask == "full":
        return None
    lo, hi = mask.intervals(
        case.length, case.length, causal=True, window=WINDOW if case.mask == "window" else None,
        cu_seqlens=np.array(documents(case.length), np.int32) if case.mask == "documents" else None,
    )  # fmt: skip
    view = mask.plan_one_device(case.length, lo, hi).views[0]
    ranges = view.tiles(FLEX_BLOCK, FLEX_BLOCK).q_ranges
    blocks = np.arange(case.length // FLEX_BLOCK)
    v0, w0, w1, v1 = (ranges[:, i, None] for i in range(4))
    whole = (w0 <= blocks) & (blocks < w1)
    tables = []
    for chosen in ((v0 <= blocks) & (blocks < v1) & ~whole, whole):
        order = np.argsort(~chosen, axis=1, kind="stable")  # the chosen ones first, ascending
        tables += [torch.from_numpy(x.astype(np.int32)).to(device)[None, None] for x in (chosen.sum(1), order)]
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=FLEX_BLOCK, mask_mod=_rule(case, device))


def _rule(case: Case, device: str) -> Callable:
    """The mask as a user of FlexAttention writes it."""
    if case.mask == "causal":
        return lambda b, h, q, kv: q >= kv
    if case.mask == "window":
        return lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW)
    lengths = torch.from_numpy(np.diff(documents(case.length)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    return lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])


def _flex(case: Case) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    # fresh for each case: a second shape would be compiled for sizes that vary, which is slower
    torch.compiler.reset()
    compiled, blocks, grouped = torch.compile(flex_attention, dynamic=False), block_mask(case, "cuda"), case.grouped
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)


class Peer(NamedTuple):
    """heads_first: takes [B, H, S, D], otherwise [B, S, H, D] as we do"""

    make: Callable[[Case], Attend]
    heads_first: bool


PEERS = {
    "cudnn": Peer(_sdpa(SDPBackend.CUDNN_ATTENTION), True),
    "fa2": Peer(_flash2, False),
    "flex": Peer(_flex, True),
    "fa4": Peer(_flash4, False),
}


class Prepared(NamedTuple):
    """A contender on the GPU, to run again and again.

    comparable: what a run returned -> out or dq [B, S, H, D]; None where it is not what the other contenders compute
    """

    run: Callable[[], Any]
    comparable: Callable[[Any], torch.Tensor | None]


FORMS: dict[str, Callable[[Case, str], Attend]] = {
    "": ours,
    "deterministic": lambda case, kernel: ours(case, kernel, deterministic=True),
    "causal": lambda case, kernel: ours(case._replace(mask="causal"), kernel),
}
HOPS = {"one hop": False, "carried": True}  # of the forward: form -> is the state carried?


def prepare(case: Case, contender: Contender, tensors: list[torch.Tensor]) -> Prepared:
    """Ready to be timed: tensors in the contender's layout, its forward done where its backward is measured.

    tensors: q, k, v, dout [B, S, H or G, D]

    Raises: whatever the contender raises
    """
    *inputs, dout = tensors
    if contender.form in HOPS:
        run = one_hop(case, contender.kernel, inputs, carried=HOPS[contender.form])
        return Prepared(run, lambda _: None)
    peer = PEERS.get(contender.kernel)
    attend = peer.make(case) if peer else FORMS[contender.form](case, contender.kernel)
    order = (0, 2, 1, 3) if peer and peer.heads_first else (0, 1, 2, 3)
    *inputs, dout = (x.permute(order).contiguous() for x in tensors)
    if case.direction == "forward":
        run = lambda: attend(*inputs)  # noqa: E731
    else:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend(*leaves)
        run = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)[0]  # noqa: E731
    return Prepared(run, lambda result: None if contender.form == "causal" else result.permute(order))
