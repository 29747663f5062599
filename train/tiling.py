"""MLPs and norms tile by tile along the sequence: what they compute on the way exists for one tile only.

Nothing but a module's input is kept for the backward, which computes each tile again. A token's output and gradient
do not depend on the other tokens, so tiling does not change them beyond the choice of matrix kernels; the gradients of
weights are summed over tiles in fp32 and rounded once. Called by `model`.

What a norm returns is not kept either: an MLP or a projection that gets it keeps what the norm got, which is kept
anyway, and its backward normalises that again. The norm has a backward of its own, as ever.

Source: the idea is TiledMLP of DeepSpeed, arXiv:2506.13996. There each tile runs a backward of its own, which ZeRO has
to be told of; here weights are inputs of one function, so ZeRO sees one gradient as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]

Lent = Sequence[tuple[Tensor, Tensor]]
"""Weights that may be gone in a backward, and copies of them."""


def set_tiles(model: nn.Module, tile: int) -> None:
    """Compute MLPs and norms in tiles of so many local tokens; no map keeps what a norm returned.

    model: a decoder of transformers
    """
    for name, module in model.named_modules():
        *path, last = name.split(".")
        forward: Tiles | Projection
        if last == "mlp" or (last.endswith("norm") and not list(module.children())):
            forward = Tiles(module, tile, marks=last != "mlp")
        elif type(module) is nn.Linear and "mlp" not in path:  # also of an adapter
            forward = Projection(module)
        else:
            continue
        module.forward = forward


def is_tiled(module: nn.Module) -> bool:
    """Whether `set_tiles` chose it."""
    return isinstance(module.forward, Tiles)


class Source(NamedTuple):
    """Where normalised states came from: norm(x), of all tokens or some."""

    norm: Run
    x: Tensor
    place: tuple[Any, ...]

    @staticmethod
    def of(normalised: Tensor) -> Source | None:
        """None if these are not the very numbers that a norm returned.

        It is their storage that knows: ZeRO 3 hands a module's result on as a view of it.
        """
        source = getattr(normalised.untyped_storage(), "source", None)
        return source if source is not None and source.place == _place(normalised) else None


def _mark(normalised: Tensor, norm: Run, x: Tensor) -> None:
    storage: Any = normalised.untyped_storage()
    storage.source = Source(norm, x.detach(), _place(normalised))


def _place(x: Tensor) -> tuple[Any, ...]:
    """What tells a view of some numbers, or of what became of them, from the numbers themselves."""
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x._version


class Tiles:
    """The forward of a module that maps [B, L, ...] to [B, L, ...], each token for itself.

    marks: what it returns may be made again, see `Source`
    """

    def __init__(self, module: nn.Module, tile: int, *, marks: bool) -> None:
        self._module, self._whole, self._tile, self._marks = module, module.forward, tile, marks

    def __call__(self, x: Tensor) -> Any:
        if x.shape[1] <= self._tile:
            return self._whole(x)
        weights = [weight for weight in self._module.parameters() if weight.requires_grad]
        norm, kept = _kept(x)
        out = _Tiled.apply(self._whole, self._tile, weights, norm, kept, _Input.apply(x, kept), *weights)
        if self._marks and torch.is_grad_enabled():
            sharded = [weight for weight in self._module.parameters() if hasattr(weight, "ds_id")]
            lent = [(weight, weight.detach().clone()) for weight in sharded]
            _mark(out, partial(self._again, lent), x)
        return out

    @torch.no_grad()
    def _again(self, lent: Lent, x: Tensor) -> Tensor:
        """The same for the backward of another module; x: [B, l, ...], of all tokens or some."""
        out = _Joined(x)
        with _lend(lent):
            for rows in _tiles(x, self._tile):
                out.put(rows, self._whole(x[:, rows]))
        return out.whole()


class Projection:
    """The forward of a linear map that does not keep what a norm has given it."""

    def __init__(self, module: nn.Linear) -> None:
        self._module, self._whole = module, module.forward

    def __call__(self, x: Tensor) -> Any:
        norm, kept = _kept(x)
        weights = [weight for weight in (self._module.weight, self._module.bias) if weight is not None]
        if norm is None or not all(weight.requires_grad for weight in weights):  # a frozen one keeps nothing
            return self._whole(x)
        return _Projected.apply(self._module, self._whole, norm, kept, _Input.apply(x, kept), *weights)


def _kept(x: Tensor) -> tuple[Run | None, Tensor]:
    """What to keep of x for a backward, and how it becomes x again; None: it is x."""
    source = Source.of(x) if torch.is_grad_enabled() else None
    return (None, x) if source is None else (source.norm, source.x)


@contextmanager
def _lend(lent: Lent) -> Iterator[None]:
    """Weights with copies of what they were: ZeRO 3 gathers those of a running module, in the first step no others."""
    away = [weight.data for weight, _ in lent]
    for weight, copy in lent:
        weight.data = copy
    try:
        yield
    finally:
        for (weight, _), data in zip(lent, away, strict=True):
            weight.data = data


class _Input(torch.autograd.Function):
    """x, and `kept` saved for the backward before anything is computed: a recomputation that needs nothing behind it
    stops here, where torch's checkpoint has all that was saved the first time. So the last module of a layer does not
    run for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None


def _keep(ctx: Any, x: Tensor, kept: Tensor) -> None:
    """In a forward. x: from `_Input`, which has saved `kept`; but for an x without a gradient."""
    ctx.input = x.grad_fn
    if ctx.input is None:
        ctx.save_for_backward(kept)


def _taken(ctx: Any) -> Tensor:
    """In the backward: what was kept. Once only, says torch's checkpoint."""
    (kept,) = (ctx.input or ctx).saved_tensors
    return kept


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, tile: int, weights: list[Tensor], norm: Run | None, kept: Tensor, x: Tensor, *_: Tensor
    ) -> Tensor:
        _keep(ctx, x, kept)
        ctx.run, ctx.tile, ctx.norm = run, tile, norm
        ctx.weights = weights  # not saved: ZeRO 3 may have gathered them into other memory by then
        out = _Joined(x)
        for rows in _tiles(x, tile):
            out.put(rows, run(x[:, rows]))
        return out.whole()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        kept, (dout,) = _taken(ctx), gradients
        dx = torch.empty_like(kept) if ctx.needs_input_grad[5] else None
        sums = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for weight in ctx.weights]
        for rows in _tiles(kept, ctx.tile):
            part = kept[:, rows] if ctx.norm is None else ctx.norm(kept[:, rows])
            with torch.enable_grad():
                part = part.detach().requires_grad_(dx is not None)
                out = ctx.run(part)
            wanted = [part, *ctx.weights] if dx is not None else ctx.weights
            found = list(torch.autograd.grad(out, wanted, dout[:, rows]))
            if dx is not None:
                dx[:, rows] = found.pop(0)
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
        dweights = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, None, None, dx, *dweights


class _Projected(torch.autograd.Function):
    """A linear map, whose backward needs no product again. Its input is made again as a whole: it is gone before the
    gradient of the input, which is as large, is there."""

    @staticmethod
    def forward(ctx: Any, module: nn.Linear, run: Run, norm: Run, kept: Tensor, x: Tensor, *_: Tensor) -> Tensor:
        _keep(ctx, x, kept)
        ctx.module, ctx.norm = module, norm  # weights as in `_Tiled`
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows = gradients[0].flatten(0, -2)
        dweights = [rows.t() @ ctx.norm(_taken(ctx)).flatten(0, -2)]
        if ctx.module.bias is not None:
            dweights.append(rows.sum(0))
        dx = gradients[0] @ ctx.module.weight if ctx.needs_input_grad[4] else None
        return None, None, None, None, dx, *dweights


class _Joined:
    """Results of tiles, put together. x: [B, L, ...], of all tiles."""

    def __init__(self, x: Tensor) -> None:
        self._length = x.shape[1]
        self._out: Tensor | None = None

    def put(self, rows: slice, part: Tensor) -> None:
        if rows == slice(0, self._length):
            self._out = part
            return
        if self._out is None:
            self._out = part.new_empty(part.shape[0], self._length, *part.shape[2:])
        self._out[:, rows] = part

    def whole(self) -> Tensor:
        assert self._out is not None
        return self._out


def _tiles(x: Tensor, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, x.shape[1])) for start in range(0, x.shape[1], tile)]
