"""`suggest`: times by hand, what must hold of any of them, and what is refused."""

import itertools

import pytest
import torch

import ringflash
from ringflash import arguments

# 2^20 tokens, 32:8 heads of 128, bf16: 4 D H pairs = 16384 * 2^39 flops in all
GIVEN = {
    "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 2**20, "gpus_per_node": 8, "link_bytes_per_s": 400e9,
    "forward_flops_per_s": 600e12, "backward_flops_per_s": 550e12,
}  # fmt: skip
TWO_NODES = GIVEN | {"nodes": 2, "network_bytes_per_s": 45e9}


def row(found, arrangement, ulysses=1):
    (one,) = [x for x in found.alternatives if (x.arrangement, x.ulysses) == (arrangement, ulysses)]
    return one


def test_a_ring_by_hand():
    found = ringflash.suggest(**GIVEN)
    one = row(found, "ring")
    flops = 4 * 128 * 32 * (2**20 * (2**20 + 1) / 2) / 8
    block = 2 * 2**17 * 8 * 128  # keys and values of 128k tokens, 268 M numbers: 1.3 ms a hop, far below its 143 ms
    assert one.forward_s == pytest.approx(flops / 600e12)
    assert one.exposed_s == pytest.approx(4 * block / 400e9)  # the way home of fp32 gradients is all that is seen
    assert one.backward_s == pytest.approx(2.5 * flops / 550e12 + 4 * block / 400e9)
    assert (one.ring, one.layout) == (8, "zigzag")
    assert one.memory_bytes == 4 * (2**17 * 32 * 128 + block) + 2 * (2 * block + 4 * block)


def test_slow_links_are_waited_for_at_every_hop():
    slow = ringflash.suggest(**GIVEN | {"link_bytes_per_s": 1e9})
    flops = 4 * 128 * 32 * (2**20 * (2**20 + 1) / 2) / 8
    block = 2 * 2**17 * 8 * 128
    forward = 7 * (2 * block / 1e9 - flops / 600e12 / 8)
    backward = 7 * (6 * block / 1e9 - 2.5 * flops / 550e12 / 8) + 4 * block / 1e9
    assert row(slow, "ring").exposed_s == pytest.approx(forward + backward)
    there, back = 7 * 2 * block / 1e9, 7 * 6 * block / 1e9
    bare = there / 2 + max(0, there - flops / 600e12) / 2 + back
    assert row(slow, "gather").exposed_s == pytest.approx(bare)
    queries, keys = 2**17 * 7 * 32 // 8, 2**17 * 7  # rows that one rank sends of 8 heads' worth
    there = (2 * queries + 2 * keys) * 128 * 2 + queries * 4
    back = (3 * queries + 2 * keys) * 128 * 2 + 2 * keys * 128 * 2 + 2 * queries * 4
    assert row(slow, "ring", 8).exposed_s == pytest.approx((there + back) / 1e9)


def test_a_double_ring_hides_the_network_behind_rounds():
    # 8:8 heads: keys and values are large, and a flat ring waits for the network at each of its hops
    given = TWO_NODES | {"heads": 8, "seq_len": 2**17, "network_bytes_per_s": 10e9}
    found = ringflash.suggest(**given)
    flat, double = row(found, "ring"), row(found, "double")
    assert flat.exposed_s > 2 * double.exposed_s and double.time_s < flat.time_s
    hop = 4 * 128 * 8 * (2**17 * (2**17 + 1) / 2) / 16 / 16 / 600e12
    block = 2 * 2**13 * 8 * 128 * 2
    inside, between = max(0, block / 400e9 - hop), max(0, block / 10e9 - 8 * hop)
    compute = 16 * hop
    assert double.forward_s == pytest.approx(compute + 2 * 7 * inside + between)


def test_in_the_backward_travels_what_is_fewer_bytes():
    # MHA: q, dout, lse, delta and dq are 8 D + 8 bytes a token and head; k, v, dk, dv are 12 D
    given = GIVEN | {"kv_heads": 32, "link_bytes_per_s": 1e6}
    one = row(ringflash.suggest(**given), "ring")
    rows, flops = 2**17 * 32, 4 * 128 * 32 * (2**20 * (2**20 + 1) / 2) / 8
    moved, home = rows * (8 * 128 + 8) / 1e6, rows * 4 * 128 / 1e6
    assert one.backward_s == pytest.approx(2.5 * flops / 550e12 / 8 + 7 * moved + home)


@pytest.mark.parametrize("name", ["link_bytes_per_s", "network_bytes_per_s", "forward_flops_per_s"])
def test_faster_hardware_is_never_slower(name):
    times = [ringflash.suggest(**TWO_NODES | {name: rate}) for rate in (1e8, 1e9, 1e10, 1e11, 1e12, 1e15)]
    by_kind = [{x[:3]: x.time_s for x in found.alternatives} for found in times]
    for before, after in itertools.pairwise(by_kind):
        assert all(after[kind] <= before[kind] for kind in before)
    assert [x.best.time_s for x in times] == sorted((x.best.time_s for x in times), reverse=True)


def test_one_gpu_sends_nothing():
    found = ringflash.suggest(**GIVEN | {"gpus_per_node": 1})
    assert [(x.arrangement, x.ring, x.ulysses, x.exposed_s, x.memory_bytes) for x in found.alternatives] == [
        ("ring", 1, 1, 0.0, 0)
    ]


def test_every_way_to_split_the_ranks_is_there_and_none_that_heads_forbid():
    found = ringflash.suggest(**TWO_NODES | {"heads": 24, "kv_heads": 8})
    kinds = {(x.arrangement, x.ring, x.ulysses) for x in found.alternatives}
    assert kinds == {(name, 16 // u, u) for u in (1, 2, 4, 8) for name in ("ring", "gather", "double")
                     if (name, u) != ("double", 8)}  # fmt: skip
    assert {x.arrangement for x in found.alternatives} == set(ringflash.ARRANGEMENTS)
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(found.alternatives))
    assert str(found).count("->") == 1 and len(str(found).splitlines()) == 1 + len(kinds)


def test_many_ranks_and_heads_are_counted_at_once():
    found = ringflash.suggest(**GIVEN | {"seq_len": 2**30, "gpus_per_node": 2**29, "heads": 2**30})
    assert {x.ulysses for x in found.alternatives} == {2**power for power in range(30)}


def test_what_does_not_fit_is_shown_and_not_chosen():
    free = ringflash.suggest(**TWO_NODES)
    limit = free.best.memory_bytes - 1
    found = ringflash.suggest(**TWO_NODES, memory_bytes=limit)
    assert found.best.memory_bytes <= limit and found.alternatives == free.alternatives
    assert "does not fit" in str(found)
    with pytest.raises(ValueError, match="memory_bytes=1 is too little for any arrangement; the least needs"):
        ringflash.suggest(**GIVEN, memory_bytes=1)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"heads": 12}, ValueError, "heads=12 must be a multiple of kv_heads=8"),
        ({"heads": 0}, ValueError, "heads=0 must be at least 1"),
        ({"head_dim": 80}, ValueError, r"head_dim=80 must be one of \(16, 32, 64, 96, 128, 192, 256\)"),
        ({"head_dim": 512}, ValueError, "head_dim=512 must be one of"),
        ({"seq_len": 2**31}, ValueError, r"seq_len=2147483648 must be in \[1, 2147483647\]"),
        ({"seq_len": 2.0**20}, TypeError, "seq_len=1048576.0 is float"),
        ({"dtype": "bfloat16"}, TypeError, "dtype='bfloat16' is str; it must be a torch.dtype"),
        ({"transit": "float32"}, TypeError, "transit='float32' is str; it must be a torch.dtype"),
        ({"nodes": 2.0}, TypeError, "nodes=2.0 is float"),
        ({"nodes": 2}, ValueError, "network_bytes_per_s=None with nodes=2: it is needed"),
        ({"network_bytes_per_s": 1e9}, ValueError, "of no use on one node"),
        ({"link_bytes_per_s": 0}, ValueError, "link_bytes_per_s=0 must be positive"),
        ({"forward_flops_per_s": "fast"}, TypeError, "forward_flops_per_s='fast' is str"),
        ({"dtype": torch.int8}, ValueError, "dtype=torch.int8 must be one of torch.float32"),
        ({"transit": torch.float16}, ValueError, "transit=torch.float16 must be one of"),
        ({"causal": 1}, TypeError, "causal=1 is int"),
        ({"seq_len": 1000}, ValueError, "seq_len=1000 must be a multiple of 16 for 8 GPUs; pad to 1008"),
        (
            {"seq_len": 2**31 - 1},
            ValueError,
            "multiple of 16 for 8 GPUs; positions are int32, so 2147483632 is the most",
        ),
        ({"gpus_per_node": 2**31 - 1}, ValueError, "for 2147483647 GPUs; .* no length is: fewer ranks are needed"),
        ({"gpus_per_node": 2**31}, ValueError, "gpus_per_node=2147483648 must be at most 2147483647"),
        ({"heads": 8 * 10**400}, ValueError, "must be at most 2147483647"),
        ({"link_bytes_per_s": 10**400}, ValueError, "must be positive and finite"),
        ({"memory_bytes": -1}, ValueError, "memory_bytes=-1 must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, error, words):
    with pytest.raises(error, match=words):
        ringflash.suggest(**GIVEN | changed)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 3), (2, 4)])
@pytest.mark.parametrize("head_dim", [8, 16, 48, 96, 100, 192, 256, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_attention_refuses_is_not_suggested(heads, kv_heads, head_dim, dtype):
    q, k = (torch.empty(1, 16, count, head_dim, dtype=dtype, device="meta") for count in (heads, kv_heads))

    def refuses(function, *args, **given) -> bool:
        try:
            function(*args, **given)
        except (TypeError, ValueError):
            return True
        return False

    asked = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    refused = refuses(ringflash.explain, q, k, k, kernel="eager")
    assert refuses(ringflash.suggest, **GIVEN | asked) == refused
    assert refused == (dtype not in arguments.DTYPES or head_dim not in arguments.HEAD_DIMS or heads % kv_heads > 0)
