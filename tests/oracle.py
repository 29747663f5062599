"""Inputs, what the fp64 reference makes of them with all gradients, and the comparison."""

from __future__ import annotations

from typing import Any

import torch
from conftest import TOLERANCE, error

import ringflash

NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(
    queries: int, keys: int | None = None, *, heads: int = 4, groups: int = 2, width: int = 16, batch: int = 1,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v, dout of `dtype`, and dlse; the same on every process."""
    keys = queries if keys is None else keys
    random = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
    q, k, v, dout = (torch.randn(batch, *shape, width, generator=random).to(dtype) for shape in shapes)
    return q, k, v, dout, torch.randn(batch, heads, queries, generator=random)


def want(q, k, v, dout, dlse, **given: Any) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of the reference, fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.reference.attention(*leaves, return_lse=True, **given)
    grads = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()), materialize_grads=True)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def got(q, k, v, dout, dlse, **given: Any) -> dict[str, torch.Tensor]:
    """The same of `ringflash.attention`, through autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.attention(*leaves, return_lse=True, **given)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check(
    results: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Every result that is wanted is within the tolerance of its type."""
    errors = {name: error(results[name], wanted[name]) for name in wanted}
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors
