"""ring-flash-attention's zigzag ring with torch's own kernels behind it, as a rival of `ring.py`.

That package takes its kernels from flash_attn. Here a module of that name gives it torch's cuDNN or FlashAttention-2
(on a CPU torch's kernel for it), so that rings are compared and not installations. Needs
`pip install --no-deps ring-flash-attn==0.1.8`, of which only the zigzag ring is imported.

Letters: B batch, n, m rows of queries and keys, H, G heads of queries and of keys, D head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import torch

PACKAGE, KERNELS = "ring_flash_attn", "flash_attn.flash_attn_interface"
aten = torch.ops.aten
Tensor = torch.Tensor


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, causal, scale=scale
    )[:2]  # fmt: skip
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(dout, q, k, v, out), lse[..., None].contiguous(), seed, seed, None, None, None,
        q.shape[1], k.shape[1], 0.0, causal, scale=scale,
    )  # fmt: skip
    return _heads_first(*grads)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    ends = (None, None, q.shape[1], k.shape[1])
    return aten._flash_attention_forward(q, k, v, *ends, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    ends = (None, None, q.shape[1], k.shape[1])
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return list(aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *ends, 0.0, causal, seed, seed[:0], scale=scale
    ))  # fmt: skip


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, k, v), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    groups = k.shape[2]
    k, v = (x.repeat_interleave(q.shape[2] // groups, 2) for x in (k, v))
    dq, dk, dv = _heads_first(*aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=scale
    ))  # fmt: skip
    return [dq, *(x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))]


BACKENDS: dict[str, tuple[Callable, Callable]] = {
    "cudnn": (_cudnn, _cudnn_backward),
    "flash": (_flash, _flash_backward),
}


def kernels(backend: str, device: torch.device) -> ModuleType:
    """What stands in for flash_attn: the names and arguments by which the package calls its kernels."""
    forward, backward = BACKENDS[backend] if device.type == "cuda" else (_cpu, _cpu_backward)
    module = ModuleType(KERNELS)

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        out, lse = forward(q, k, v, causal, softmax_scale)
        return out, lse, None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    ):  # fmt: skip
        grads = backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    module._flash_attn_forward = _flash_attn_forward  # type: ignore[attr-defined]
    module._flash_attn_backward = _flash_attn_backward  # type: ignore[attr-defined]
    return module


def attention(backend: str, device: torch.device) -> Callable[..., Tensor]:
    """The package's zigzag attention, (q [B, n, H, D], k, v [B, m, G, D], causal=) -> out, over one of BACKENDS.

    Raises: ValueError where the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.submodule_search_locations is None:
        raise ValueError(f"{PACKAGE} is not installed: pip install --no-deps ring-flash-attn==0.1.8")
    package = ModuleType(PACKAGE)  # its own __init__ imports rings that need more of flash_attn, and transformers
    package.__path__ = list(found.submodule_search_locations)
    made = {PACKAGE: package, KERNELS.split(".")[0]: ModuleType("flash_attn"), KERNELS: kernels(backend, device)}
    before = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in (PACKAGE, "flash_attn")
    }
    sys.modules.update(made)
    try:
        return importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in (PACKAGE, "flash_attn")]:
            del sys.modules[name]
        sys.modules.update(before)
