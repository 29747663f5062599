"""Copies of rings and layouts: ranks and their groups exist once, in this process; and groups that are gone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from oracle import inputs

import ringflash
from ringflash import Ring, ops


def test_a_copy_of_a_ring_is_the_ring_and_one_of_a_layout_cuts_alike():
    ring = Ring()
    layout = ring.layout(16, cu_seqlens=[0, 5, 16])
    q, k, v, *_ = inputs(16)
    assert copy.copy(ring) is ring and copy.deepcopy(ring) is ring
    for twin in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert torch.equal(twin.position_ids, layout.position_ids)
        assert torch.equal(ringflash.attention(q, k, v, layout=twin), ringflash.attention(q, k, v, layout=layout))


def on_ranks() -> None:
    ring = Ring()
    layout = ring.layout(16)
    twin = copy.deepcopy(layout)
    assert copy.deepcopy(ring) is ring and twin.ring is ring
    q, k, v = (layout.shard(x) for x in inputs(16)[:3])
    assert torch.equal(ringflash.attention(q, k, v, layout=twin), ringflash.attention(q, k, v, layout=layout))
    for thing in (ring, layout):
        with pytest.raises(TypeError, match="a Ring over the 2 ranks of a process group cannot be pickled"):
            pickle.dumps(thing)
    group = dist.new_group([0, 1])
    gone = Ring(group).layout(16)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match=r"of this layout's ring is gone: .* make another Ring and its layouts"):
        ringflash.attention(q, k, v, layout=gone)


def test_a_ring_with_a_group_is_copied_as_itself_and_not_pickled(pool):
    pool(2)(on_ranks)


def test_a_group_that_nobody_made_is_told_in_our_words():
    with pytest.raises(RuntimeError, match="the process group 'nobody' of this layout's ring is gone"):
        ops._group("nobody")
