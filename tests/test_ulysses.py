"""Ulysses: heads for sequence and back, alone and inside a ring, with fewer key/value heads than ranks."""

from __future__ import annotations

import pytest
import torch
from test_layouts import ring_at
from worlds import equals_reference, told

import ringflash
from ringflash import LAYOUTS, exchange, ulysses


@pytest.mark.parametrize(
    ("size", "heads", "groups"), [(2, 4, 4), (2, 4, 2), (2, 6, 1), (4, 8, 2), (4, 4, 1), (4, 8, 8), (3, 3, 3)]
)
def test_heads_go_out_and_come_back(size, heads, groups):
    length, width = 5, 3
    q, k = torch.randn(2, size * length, heads, width), torch.randn(2, size * length, groups, width)

    def body(transport):
        rows = slice(transport.rank * length, (transport.rank + 1) * length)
        q_heads, k_heads = ulysses.scatter_heads([q[:, rows], k[:, rows]], groups, transport)
        mine = slice(transport.rank * heads // size, (transport.rank + 1) * heads // size)
        assert torch.equal(q_heads, q[:, :, mine])
        used = {head * groups // heads for head in range(mine.start, mine.stop)}
        kv = ulysses.kv_heads(groups, size, transport.rank)
        assert set(range(kv.start, kv.stop)) == used and torch.equal(k_heads, k[:, :, kv])
        assert torch.equal(ulysses.gather_heads(q_heads, transport), q[:, rows])
        summed = ulysses.gather_kv_heads(k_heads, groups, transport)
        assert torch.allclose(summed, k[:, rows] * max(1, size // groups))

    exchange.play(size, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ulysses", [2, 4])
def test_ulysses_in_a_ring_equals_the_reference(pool, num_ulysses, layout):
    names = ["causal", "documents_window", "padding", "random", "only_padding"]
    pool(4)(equals_reference, names, layout, 96, num_ulysses, (4, 2))


@pytest.mark.parametrize(("num_ulysses", "heads"), [(2, (2, 1)), (4, (8, 1)), (4, (4, 4)), (2, (6, 2)), (4, (8, 2))])
def test_grouped_heads_over_ulysses_ranks(pool, num_ulysses, heads):
    pool(4)(equals_reference, ["window", "full"], "zigzag", 64, num_ulysses, heads)


def test_odd_ulysses(pool):
    pool(3)(equals_reference, ["causal", "chunked"], "zigzag", 66, 3, (6, 3))


def refused(num_ulysses: int, heads: int, groups: int) -> str:
    layout = ringflash.Ring(ulysses=num_ulysses).layout(64)
    q, k = torch.zeros(1, 16, heads, 16), torch.zeros(1, 16, groups, 16)
    return told(ValueError, ringflash.attention, q, k, k, layout=layout)


@pytest.mark.parametrize(
    ("num_ulysses", "heads", "groups", "words"),
    [
        (4, 6, 6, "q has 6 heads, which do not divide by ulysses=4"),
        (4, 12, 6, "k has 6 heads; ulysses=4 must divide them or be a multiple of them"),
    ],
)
def test_heads_that_do_not_divide_are_refused_on_every_rank(pool, num_ulysses, heads, groups, words):
    assert all(words in message for message in pool(4)(refused, num_ulysses, heads, groups))


@pytest.mark.parametrize(("num_ulysses", "heads", "groups"), [(2, 4, 3), (4, 6, 2), (2, 3, 3)])
def test_check_heads(num_ulysses, heads, groups):
    with pytest.raises(ValueError, match=f"ulysses={num_ulysses}"):
        ring_at(0, 4, "zigzag", num_ulysses).check_heads(heads, groups)
