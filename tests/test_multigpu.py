"""Real rings over NCCL: run with `pytest -m multigpu` on a host with several GPUs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import TOLERANCE, error
from masks import MASKS
from oracle import NAMES, inputs, want
from worlds import on_ring

import ringflash
from ringflash import gathering, lanes, routes

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs"),
]
SEQ_LEN = 1536


def over_nccl(mask: str, layout: str, num_ulysses: int, dtype: torch.dtype, width: int) -> dict[str, float]:
    """Largest relative errors of one call over all GPUs against the fp64 reference."""
    return errors_of(ringflash.Ring(layout=layout, ulysses=num_ulysses), MASKS[mask](SEQ_LEN), dtype, width)


def errors_of(ring: ringflash.Ring, given: dict, dtype: torch.dtype, width: int, **call: str) -> dict[str, float]:
    tensors = tuple(x.cuda() for x in inputs(SEQ_LEN, heads=8, groups=4, width=width, dtype=dtype))
    results, wanted = on_ring(ring, tensors, given, **call), want(*tensors, **given)
    return {name: error(results[name], wanted[name]) for name in NAMES}


def check(outcomes: list[dict[str, float]], dtype: torch.dtype, record) -> None:
    worst = {name: max(outcome[name] for outcome in outcomes) for name in NAMES}
    record("errors", {name: float(f"{value:.3g}") for name, value in worst.items()})
    assert worst["lse"] <= 1e-5 and max(worst.values()) <= TOLERANCE[dtype], worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ringflash.LAYOUTS)
def test_ring_over_nccl_equals_the_reference(gpus, layout, mask, dtype, record_property):
    check(gpus(over_nccl, mask, layout, 1, dtype, 64), dtype, record_property)


def arranged(mask: str, rotate: str, given: dict) -> dict[str, float]:
    with patch.object(gathering, "SECTION_PAIRS", 1):  # else so few tokens are gathered in one section
        return errors_of(ringflash.Ring(**given), MASKS[mask](SEQ_LEN), torch.bfloat16, 64, rotate=rotate)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents_window", "random", "past"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced", "striped"])
@pytest.mark.parametrize("arrangement", ["ring", "double", "gather"])
def test_arrangements_over_nccl_equal_the_reference(gpus, arrangement, layout, mask, rotate, record_property):
    if arrangement == "double" and gpus.size < 4:
        pytest.skip("a double ring needs 4 GPUs")
    given = {"arrangement": arrangement, "layout": layout}
    given |= {"topology": gpus.size // 2} if arrangement == "double" else {}
    check(gpus(arranged, mask, rotate, given), torch.bfloat16, record_property)


def in_two_lanes(mask: str, layout: str, rotate: str) -> dict[str, float]:
    """Rings of so few tokens have one lane, unless told otherwise."""
    with patch.object(lanes, "LANE_ROWS", 256):
        return errors_of(ringflash.Ring(layout=layout), MASKS[mask](SEQ_LEN), torch.bfloat16, 64, rotate=rotate)


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("mask", ["causal", "documents_window", "random"])
@pytest.mark.parametrize("layout", ringflash.LAYOUTS)
def test_an_own_block_in_two_lanes_over_nccl_equals_the_reference(gpus, layout, mask, rotate, record_property):
    check(gpus(in_two_lanes, mask, layout, rotate), torch.bfloat16, record_property)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_ulysses_over_nccl_equals_the_reference(gpus, mask, dtype, record_property):
    for num_ulysses in {2, gpus.size} - {1}:
        check(gpus(over_nccl, mask, "zigzag", num_ulysses, dtype, 128), dtype, record_property)


def over_a_part() -> dict[str, float]:
    """Two rings in one world: the even ranks and the odd ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(start, size, 2))) for start in range(2)]
    return errors_of(ringflash.Ring(groups[rank % 2]), {}, torch.bfloat16, 64)


def test_R25_rings_in_a_part_of_the_world(gpus, record_property):
    if gpus.size < 4:
        pytest.skip("needs 4 GPUs")
    check(gpus(over_a_part), torch.bfloat16, record_property)


def large_blocks() -> float:
    """64 MiB of keys and values a rank, many times: milliseconds of one forward and backward."""
    ring = ringflash.Ring()
    layout = ring.layout(16384 * ring.size)
    q, k, v = (torch.randn(1, 16384, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    before = None
    for step in range(12):
        ringflash.attention(q, k, v, layout=layout).sum().backward()
        if step == 5:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == before, "memory grows from step to step"
    torch.cuda.synchronize()
    return float(q.grad.isfinite().all())


def test_R27_R108_large_blocks_do_not_hang_and_leave_nothing_behind(gpus):
    assert all(gpus(large_blocks))


def odd_one() -> str:
    """Rank 1 calls with another window: every rank must be told, and by name."""
    ring = ringflash.Ring()
    layout = ring.layout(SEQ_LEN)
    q = torch.zeros(1, layout.local_len, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rank") as caught:
        ringflash.attention(q, q, q, layout=layout, window=100 if ring.rank == 1 else 200)
    return str(caught.value)


def test_ranks_called_with_different_arguments_raise_together(gpus):
    assert all("window=100" in message and "window=200" in message for message in gpus(odd_one))
