"""The checks of `attention`'s arguments, done once, before anything is computed or sent.

`Mask` is what causal, window, documents and intervals become once they are known to be right: plain values that travel
to the custom op. ValueError and TypeError name the argument, its value and what would be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import mask
from .layouts.documents import Documents
from .routes import TRAVELLERS

if TYPE_CHECKING:
    from .layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
TRANSITS = (torch.float32, torch.bfloat16)  # fp16 would overflow where a loss is scaled
MAX_TOKENS = 2**31 - 1  # positions are int32 in the kernels
MAX_FLOAT = torch.finfo(torch.float32).max  # scores are fp32 in the kernels
MIN_FLOAT = torch.finfo(torch.float32).tiny  # what is below may be 0 there, and its inverse infinite
MAX_TIMEOUT_S = 31_536_000  # a year: clocks and stores overflow far behind it


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask as it was asked for. Tensors are int32 on the CPU; `intervals` turns it into two numbers a query."""

    causal: bool
    window: int | None = None
    cu_seqlens: torch.Tensor | None = None
    bounds: torch.Tensor | None = None  # [2, S]: lo, hi

    def intervals(self, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi), int32 [num_queries] each, in key positions."""
        return mask.intervals(
            num_queries,
            num_keys,
            causal=self.causal,
            window=self.window,
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.numpy(),
            bounds=None if self.bounds is None else tuple(self.bounds.numpy()),
        )

    def work(self, seq_len: int) -> np.ndarray | Documents:
        """What layouts cut by, see `layouts.LayoutRule.segments`; as many keys as queries."""
        if self.bounds is None and self.window is None:
            whole = np.array([0, seq_len])
            return Documents(whole if self.cu_seqlens is None else self.cu_seqlens.numpy(), self.causal)
        lo, hi = self.intervals(seq_len, seq_len)
        return (hi.astype(np.int64) - lo).clip(0)


def mask_of(
    q: torch.Tensor, k: torch.Tensor, layout: Layout | None, *,
    causal: bool | None, window: int | None, cu_seqlens, intervals,
) -> Mask:  # fmt: skip
    """The checked mask of a call: the layout's with its window, or the one that the other arguments describe."""
    window = window_of(window)
    if layout is not None:
        given = {"causal": causal, "cu_seqlens": cu_seqlens, "intervals": intervals}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} was given together with layout=, whose mask holds: {name} goes to ring.layout()"
                )
        return Mask(layout.causal, window, layout.cu_seqlens, layout.bounds)
    if cu_seqlens is not None and q.shape[1] != k.shape[1]:
        raise ValueError(f"cu_seqlens needs as many keys as queries; q has {q.shape[1]} rows and k has {k.shape[1]}")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: batch must be 1, got {q.shape[0]}")
    return Mask(
        causal_of(causal, intervals),
        window,
        cu_seqlens_of(cu_seqlens, q.shape[1]),
        bounds_of(intervals, q.shape[1], k.shape[1]),
    )


def causal_of(causal: bool | None, intervals) -> bool:
    """None means True, and False where intervals are given."""
    if causal is None:
        return intervals is None
    if not isinstance(causal, bool):
        raise TypeError(f"causal={causal!r} is {type(causal).__name__}; it must be True, False or None")
    return causal


def flag_of(name: str, flag: bool) -> bool:
    """True or False, and nothing that counts as one of them."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}={flag!r} is {type(flag).__name__}; it must be True or False")
    return flag


def rotate_of(rotate: str, layout: Layout | None) -> str:
    """What travels in the backward of a ring: keys or queries, or auto: whichever moves fewer bytes."""
    words = ("auto", *TRAVELLERS)
    if not isinstance(rotate, str) or rotate not in words:
        raise ValueError(f"rotate={rotate!r} is unknown; it must be one of {', '.join(words)}")
    if rotate != "auto" and layout is None:
        raise ValueError(f"rotate={rotate!r} needs layout=: on one device nothing travels")
    return rotate


def dtype_of(name: str, dtype: torch.dtype, known: Sequence[torch.dtype] = DTYPES) -> torch.dtype:
    """One of the known types: of q, k and v unless said."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}={dtype!r} is {type(dtype).__name__}; it must be a torch.dtype")
    if dtype not in known:
        raise ValueError(f"{name}={dtype} must be one of {', '.join(map(str, known))}")
    return dtype


def transit_of(transit: torch.dtype) -> torch.dtype:
    """The type of gradients under way."""
    return dtype_of("transit", transit, TRANSITS)


def seq_len_of(seq_len: int) -> int:
    """S, tokens of a whole sequence: as many as positions in int32 can count."""
    if isinstance(seq_len, bool) or not isinstance(seq_len, int):
        raise TypeError(f"seq_len={seq_len!r} is {type(seq_len).__name__}; it must be an int")
    if not 0 < seq_len <= MAX_TOKENS:
        raise ValueError(f"seq_len={seq_len} must be in [1, {MAX_TOKENS}]")
    return seq_len


def length_beside(seq_len: int, multiple: int, advice: str) -> str:
    """What to do with a length that is no multiple: `advice` with its {padded}, or what is below if it is too long."""
    padded = -(-seq_len // multiple) * multiple
    if padded <= MAX_TOKENS:
        return advice.format(padded=padded)
    below = seq_len // multiple * multiple
    offer = f"{below} is the most that is accepted" if below else "no length is: fewer ranks are needed"
    return f"positions are int32, so {offer}"


def whole(name: str, count: int, most: int = 2**63 - 1) -> None:
    """An int of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name}={count!r} is {type(count).__name__}; it must be an int >= 1")
    if count < 1:
        raise ValueError(f"{name}={count} must be at least 1")
    if count > most:
        raise ValueError(f"{name}={count} must be at most {most}")


def window_of(window: int | None) -> int | None:
    """A window is None or a whole number of keys, at least 1."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window={window!r} is {type(window).__name__}; it must be an int >= 1 or None")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees itself and the window - 1 keys before it")
    return min(window, MAX_TOKENS)


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """The softmax scale: D ** -0.5 unless given; any finite number."""
    if scale is None:
        return float(q.shape[-1]) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale={scale!r} is {type(scale).__name__}; it must be a finite float or None")
    if not abs(scale) <= MAX_FLOAT:
        raise ValueError(f"scale={scale} must be finite, also in fp32")
    return float(scale)


def softcap_of(softcap: float | None) -> float:
    """Where scores are capped, > 0 and finite; 0.0 for None, which caps nothing."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"softcap={softcap!r} is {type(softcap).__name__}; it must be a positive float or None")
    if not 0 < softcap <= MAX_FLOAT:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None")
    if softcap < MIN_FLOAT:
        raise ValueError(f"softcap={softcap} must be at least {MIN_FLOAT}: kernels divide by it in fp32")
    return float(softcap)


def sinks_of(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """One logit a query head, [H], any float type, where q is; as fp32."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point():
        kind = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise TypeError(f"sinks is {kind}; it must be a floating-point tensor [H] or None")
    check_dense("sinks", sinks)
    if sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}; it must be [{q.shape[2]}], one logit a query head")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device} and q on {q.device}; they must be on one device")
    return sinks.float()


def cu_seqlens_of(cu_seqlens: torch.Tensor | Sequence[int] | None, seq_len: int) -> torch.Tensor | None:
    """Document borders, int32 on the CPU: 0 first, never falling, at most seq_len; padding follows the last."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; it must be an int32 tensor or a list of ints")
        check_values("cu_seqlens", cu_seqlens)
        values = cu_seqlens.detach().cpu().clone()
    else:
        whole = isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, str)
        whole = whole and all(type(x) is int for x in cu_seqlens)
        if not whole:
            raise TypeError(f"cu_seqlens={cu_seqlens!r} must be an int32 tensor or a list of ints")
        if any(abs(x) > MAX_TOKENS for x in cu_seqlens):
            raise ValueError(f"cu_seqlens holds {max(cu_seqlens, key=abs)}; positions must lie in [0, {seq_len}]")
        values = torch.tensor(cu_seqlens, dtype=torch.int32, device="cpu")  # whatever torch's default device is
    if values.dim() != 1 or len(values) < 2:
        raise ValueError(f"cu_seqlens has shape {list(values.shape)}; it must be [documents + 1], one at least")
    if not torch.compiler.is_compiling():
        check_borders(values.numpy(), seq_len)
    return values


def check_borders(borders: np.ndarray, seq_len: int) -> None:
    """The values of cu_seqlens; also called by the op, for calls whose values a compiler could not read."""
    if borders[0] != 0:
        raise ValueError(f"cu_seqlens[0]={borders[0]} must be 0")
    falls = np.flatnonzero(np.diff(borders) < 0)
    if len(falls):
        i = int(falls[0])
        fall = f"cu_seqlens[{i + 1}]={borders[i + 1]} is below cu_seqlens[{i}]={borders[i]}"
        raise ValueError(f"{fall}; it must never fall")
    if borders[-1] > seq_len:
        raise ValueError(f"cu_seqlens[-1]={borders[-1]} is beyond the sequence of {seq_len} tokens")


def bounds_of(intervals, num_queries: int, num_keys: int) -> torch.Tensor | None:
    """(lo, hi) as int32 [2, S] on the CPU: never falling, within [0, number of keys]."""
    if intervals is None:
        return None
    if not isinstance(intervals, tuple | list) or len(intervals) != 2:
        raise TypeError(f"intervals is {type(intervals).__name__}; it must be a pair (lo, hi) of int32 tensors")
    for name, bound in zip(("lo", "hi"), intervals, strict=True):
        if not isinstance(bound, torch.Tensor) or bound.dtype != torch.int32:
            kind = bound.dtype if isinstance(bound, torch.Tensor) else type(bound).__name__
            raise TypeError(f"intervals {name} is {kind}; it must be an int32 tensor")
        check_values(f"intervals {name}", bound)
        if bound.shape != (num_queries,):
            raise ValueError(f"intervals {name} has shape {list(bound.shape)}; it must be [{num_queries}], one a query")
    pair = torch.stack([bound.detach().cpu() for bound in intervals])
    if not torch.compiler.is_compiling():
        check_bounds(pair.numpy(), num_keys)
    return pair


def check_bounds(pair: np.ndarray, num_keys: int) -> None:
    """The values of intervals; also called by the op, for calls whose values a compiler could not read."""
    for name, bound in zip(("lo", "hi"), pair, strict=True):
        falls = np.flatnonzero(np.diff(bound) < 0)
        if len(falls):
            i = int(falls[0])
            fall = f"intervals {name}[{i + 1}]={bound[i + 1]} is below {name}[{i}]={bound[i]}"
            raise ValueError(f"{fall}; it must never fall")
        if len(bound) and (bound[0] < 0 or bound[-1] > num_keys):
            raise ValueError(f"intervals {name} spans [{bound[0]}, {bound[-1]}]; it must lie in [0, {num_keys}]")


def check_dense(name: str, x: torch.Tensor) -> None:
    """Its elements lie in memory, each at its strides."""
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} is a {kind} tensor; it must be dense (torch.strided)")


def check_values(name: str, x: torch.Tensor) -> None:
    """It can be read on the CPU."""
    check_dense(name, x)
    if x.device.type == "meta":
        raise ValueError(f"{name} is on meta, where it has no values; it must be on a CPU or a GPU")


def check_no_transform(name: str) -> None:
    """NotImplementedError inside torch.func.grad, vjp, jvp and what rests on them."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"ringflash: {name} is not differentiated or batched by torch.func; torch.autograd.grad and backward() are "
            "accepted"
        )


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are dense tensors of four dimensions."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor")
        check_dense(name, tensor)
        if tensor.dim() != 4:
            shape = list(tensor.shape)
            raise ValueError(f"{name} has shape {shape}; it must be [batch, tokens, heads, head dimension]")


def check_head_dim(what: str, head_dim: int) -> None:
    """A head dimension that the kernels compute. what: begins the sentence which refuses it, as in "head_dim=80"."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{what} must be one of {HEAD_DIMS}")


def check_heads(what: str, heads: int, of: str, groups: int) -> None:
    """Query heads share key/value heads evenly. what, of: how the sentence which refuses them calls either."""
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(f"{what} must be a multiple of {of}")


def check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are on one device, and their sizes belong together, whatever head dimensions are computed."""
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; all three must be on one device")
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} must have the same shape")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k has {k.shape[0]}; they must be equal")
    if q.shape[3] != k.shape[3]:
        widths = f"q has head dimension {q.shape[3]} and k has {k.shape[3]}"
        raise ValueError(f"{widths}; both must be the same of {HEAD_DIMS}")
    check_heads(f"q has {q.shape[2]} heads, which", q.shape[2], f"the {k.shape[2]} heads of k and v", k.shape[2])


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k, v are what the kernels compute: one dtype of DTYPES, a head dimension of HEAD_DIMS, sizes that belong."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise TypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; all three must be the same of float32, bfloat16, float16"
        )
    check_sizes(q, k, v)
    check_head_dim(f"q has head dimension {q.shape[3]}, which", q.shape[3])
    if max(q.shape[1], k.shape[1]) > MAX_TOKENS:
        raise ValueError(f"q has {q.shape[1]} tokens and k has {k.shape[1]}; at most {MAX_TOKENS} fit int32 positions")


def check_local(q: torch.Tensor, k: torch.Tensor, layout: Layout) -> None:
    """q and k are this rank's parts of the layout's sequence."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[1] == layout.local_len:
            continue
        hint = f": cut it with layout.shard({name}) first" if tensor.shape[1] == layout.seq_len else ""
        raise ValueError(
            f"{name} has {tensor.shape[1]} tokens; with this layout of {layout.seq_len} tokens over {layout.ring.size} "
            f"ranks it must have {layout.local_len}{hint}"
        )
    if layout.cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: batch must be 1, got {q.shape[0]}")
    layout.ring.check_heads(q.shape[2], k.shape[2])
