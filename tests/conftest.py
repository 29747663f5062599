"""Fixtures and the one table of tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pool import World

# largest error / largest value, against the fp64 reference of the same inputs: a fact of the dtype, not of the machine
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|got - want| / max|want| over finite entries; infinities must be in the same places; NaN is an error."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = torch.isfinite(want)
    assert not got.isnan().any(), "NaN"
    assert torch.equal(got[~finite], want[~finite]), "infinities differ"
    if not finite.any():
        return 0.0
    return float((got - want)[finite].abs().max() / want[finite].abs().max().clamp_min(1e-30))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], World]]:
    """pool(world_size)(body, *args): see pool.py."""
    worlds: dict[int, World] = {}

    def world(size: int) -> World:
        return worlds.setdefault(size, World(size))

    yield world
    for one in worlds.values():
        one.close()
