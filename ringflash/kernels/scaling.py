"""A scale that no kernel has to think about. Kernels take the maximum of scores before they scale them."""

from __future__ import annotations

import torch


def positive(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """q and a scale above 0 with the same products, exactly."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
