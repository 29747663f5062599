"""MLPs and norms tile by tile along the sequence: what they compute on the way exists for one tile only.

Nothing but a module's input is kept for the backward, which computes each tile again. A token's output and gradient
do not depend on the other tokens, so tiling does not change them beyond the choice of matrix kernels; the gradients of
weights are summed over tiles in fp32 and rounded once. Called by `model`.

Source: the idea is TiledMLP of DeepSpeed, arXiv:2506.13996. There each tile runs a backward of its own, which ZeRO has
to be told of; here weights are inputs of one function, so ZeRO sees one gradient as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def set_tiles(model: nn.Module, tile: int) -> None:
    """Compute MLPs and norms in tiles of so many local tokens. model: a decoder of transformers."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "mlp" or (last.endswith("norm") and not list(module.children())):
            module.forward = Tiles(module, tile)


def is_tiled(module: nn.Module) -> bool:
    """Whether `set_tiles` chose it."""
    return isinstance(module.forward, Tiles)


class Tiles:
    """The forward of a module that maps [B, L, ...] to [B, L, ...], each token for itself."""

    def __init__(self, module: nn.Module, tile: int) -> None:
        self._module, self._whole, self._tile = module, module.forward, tile

    def __call__(self, x: Tensor) -> Any:
        if x.shape[1] <= self._tile:
            return self._whole(x)
        weights = [weight for weight in self._module.parameters() if weight.requires_grad]
        x = _Input.apply(x)
        return _Tiled.apply(self._whole, self._tile, weights, x, *weights)


class _Input(torch.autograd.Function):
    """x, saved for the tiles before they are computed: a recomputation that needs nothing behind it stops here, where
    torch's checkpoint has all that was saved the first time. So the last module of a layer does not run for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], tile: int, weights: list, x: Tensor, *_: Tensor) -> Tensor:
        ctx.input = x.grad_fn  # it has saved x
        if ctx.input is None:
            ctx.save_for_backward(x)
        ctx.run, ctx.tile = run, tile
        ctx.weights = weights  # not saved: ZeRO 3 may have gathered them into other memory by then
        out = None
        for rows in _tiles(x, tile):
            part = run(x[:, rows])
            if out is None:
                out = part.new_empty(part.shape[0], x.shape[1], *part.shape[2:])
            out[:, rows] = part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), (dout,) = (ctx.input or ctx).saved_tensors, gradients
        dx = torch.empty_like(x) if ctx.needs_input_grad[3] else None
        sums = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for weight in ctx.weights]
        for rows in _tiles(x, ctx.tile):
            with torch.enable_grad():
                part = x[:, rows].detach().requires_grad_(dx is not None)
                out = ctx.run(part)
            wanted = [part, *ctx.weights] if dx is not None else ctx.weights
            found = list(torch.autograd.grad(out, wanted, dout[:, rows]))
            if dx is not None:
                dx[:, rows] = found.pop(0)
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
        dweights = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, dx, *dweights


def _tiles(x: Tensor, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, x.shape[1])) for start in range(0, x.shape[1], tile)]
