"""What the ranks of a gloo world do in the tests: top-level functions, so that the pool can send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from masks import MASKS
from oracle import NAMES, check, inputs, want

import ringflash
from ringflash import Ring, gathering, needs
from ringflash.kernels import eager
from ringflash.layouts import balanced, striped

# several tiles, stripes, blocks and sections a rank, though sequences are short
SMALL_PIECES = (
    (eager, "BLOCK_Q", 16), (eager, "BLOCK_K", 8), (eager, "SLAB", 24),
    (striped, "MAX_STRIPE", 6), (balanced, "MAX_BLOCKS", 3), (gathering, "SECTION_PAIRS", 1),
    (needs, "FEW", 2),
)  # fmt: skip


def small_pieces(setting: Callable[[Any, str, int], None] = setattr) -> None:
    """SMALL_PIECES, of a worker process for good; or as long as pytest's `monkeypatch.setattr` keeps them."""
    for module, name, value in SMALL_PIECES:
        setting(module, name, value)


def split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a mask -> those of `ring.layout`, those of `attention`."""
    return {k: v for k, v in given.items() if k != "window"}, {k: v for k, v in given.items() if k == "window"}


def on_ring(
    ring: Ring, tensors: tuple[torch.Tensor, ...], given: dict[str, Any], **call: Any
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of the whole sequence, computed over the ring through the public functions."""
    for_layout, for_call = split(given)
    q, k, v, dout, dlse = tensors
    layout = ring.layout(q.shape[1], **for_layout)
    leaves = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.attention(*leaves, layout=layout, return_lse=True, **for_call, **call)
    grads = torch.autograd.grad((out, lse), leaves, (layout.shard(dout), layout.shard(dlse, dim=2)))
    parts = [(out.detach(), 1), (lse.detach(), 2), *((grad, 1) for grad in grads)]
    return dict(zip(NAMES, (layout.unshard(part, dim) for part, dim in parts), strict=True))


def equals_reference(
    names: list[str], layout: str, seq_len: int, ulysses: int = 1, heads: tuple[int, int] = (4, 2), kernel: str = "auto"
) -> None:
    """The world as one ring, for each of these masks."""
    small_pieces()
    ring = Ring(layout=layout, ulysses=ulysses)
    for name in names:
        given = MASKS[name](seq_len)
        tensors = inputs(seq_len, heads=heads[0], groups=heads[1])
        check(on_ring(ring, tensors, given, kernel=kernel), want(*tensors, **given))


def groups_equal_reference(groups: list[list[int]], layout: str) -> None:
    """R25: each group is a ring of its own, with its own sequence."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
    ring = Ring(made[mine], layout=layout)
    assert (ring.size, ring.rank) == (len(groups[mine]), groups[mine].index(dist.get_rank()))
    tensors = inputs(48, seed=mine)
    check(on_ring(ring, tensors, {}), want(*tensors))


def told(kind: type[BaseException], function: Callable[..., Any], *args: Any, **given: Any) -> str:
    """The message of the error that the call must raise."""
    try:
        function(*args, **given)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised no {kind.__name__}")
