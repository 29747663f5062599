"""Which kernel `kernel="auto"` is: the first of a device's list that can do the call and passes its start-up check.

A kernel that a compiler may get wrong has a check, asked once for each device, type and head dimension; what it says is
logged, and told by `explain`. Named kernels are taken as they are. Called by `ops` and `api`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..mask import Plan
from . import KERNELS, Kernel
from .gluon.check import fault

FASTEST_FIRST = {"cpu": ("eager",), "cuda": ("gluon", "triton")}
CHECKS = {"gluon": fault}  # kernel -> what is wrong with it for a device, type, head dimension and backward; or None
logger = logging.getLogger("ringflash")


class Choice(NamedTuple):
    """kernel: its name; reason: why it is this one, for people."""

    kernel: str
    reason: str


def choose(
    name: str, q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int, softcap: float = 0.0
) -> Choice:
    """The kernel of a call: a name of KERNELS, or "auto". ValueError if it refuses, for auto if all of the list do."""
    if name != "auto":
        refusal = _refusal(name, q, k, deterministic, num_hops, softcap)
        if refusal:
            raise ValueError(f"kernel={name!r}: {refusal}")
        return Choice(name, "named")
    reasons: list[str] = []
    for candidate in FASTEST_FIRST.get(q.device.type, ("eager",)):
        reason = _refusal(candidate, q, k, deterministic, num_hops, softcap) or _fault(candidate, q, deterministic)
        if not reason:
            return Choice(candidate, "; ".join(["auto", *reasons]))
        reasons.append(reason)
    raise ValueError(f"kernel='auto': no kernel can do this call: {'; '.join(reasons)}")


def _refusal(
    name: str, q: torch.Tensor, k: torch.Tensor, deterministic: bool, num_hops: int, softcap: float
) -> str | None:
    if softcap and not getattr(KERNELS[name], "CAPS_SCORES", False):
        able = " or ".join(repr(other) for other, kernel in KERNELS.items() if hasattr(kernel, "CAPS_SCORES"))
        return f"kernel {name!r} does not cap scores; kernel={able} does"
    return KERNELS[name].refuses(q, k, deterministic, num_hops)


class Capped(NamedTuple):
    """A kernel that caps its scores. See `kernels.Kernel`."""

    refuses: Callable
    forward: Callable
    delta: Callable
    backward: Callable


def capped(kernel: Any, softcap: float) -> Kernel:
    """The kernel itself, or with its softcap given. One that `choose` let pass."""
    if not softcap:
        return kernel
    forward, backward = (functools.partial(f, softcap=softcap) for f in (kernel.forward, kernel.backward))
    return Capped(kernel.refuses, forward, kernel.delta, backward)


def num_pieces(name: str, plan: Plan) -> list[int]:
    """Into how many pieces a kernel cuts each hop that this rank computes; [] for one that takes any mask whole.

    ValueError for a hop of more pieces than it takes.
    """
    few = getattr(KERNELS[name], "few", None)
    return [len(few(view)) for view in plan.views if view] if few else []


def _fault(name: str, q: torch.Tensor, deterministic: bool) -> str | None:
    return _checked(name, q.device, q.dtype, q.shape[3], deterministic) if name in CHECKS else None


@functools.cache
def _checked(name: str, device: torch.device, dtype: torch.dtype, width: int, deterministic: bool) -> str | None:
    """What the start-up check of a kernel found, asked once and logged."""
    with torch.autocast(device.type, enabled=False):  # what it compares with is computed in fp32
        found = CHECKS[name](device, dtype, width, deterministic)
    what = f"kernel {name} for {str(dtype).removeprefix('torch.')}, head dimension {width}, on {device}"
    if found:
        told = f"{what} failed its start-up check: {found}"
        logger.warning("%s; the next of %s is used", told, ", ".join(FASTEST_FIRST[device.type]))
        return told
    logger.info("%s passed its start-up check and is used", what)
    return None
