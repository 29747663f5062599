"""The ring against the fp64 reference, all ranks played in one process, and what it sends, when, and how much."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import played
import pytest
import torch
from masks import MASKS
from oracle import check, inputs, want
from test_mask import intervals_of
from worlds import small_pieces

from ringflash import LAYOUTS, exchange, lanes, mask, ring, routes
from ringflash.kernels import eager

SIZE = 96  # divides by 2 * P for every P below


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    small_pieces(monkeypatch.setattr)


@pytest.fixture(scope="module")
def wanted():
    """The reference of each mask and head count, computed once."""
    made = {}

    def of(name, heads, groups):
        if (name, heads, groups) not in made:
            tensors = inputs(SIZE, heads=heads, groups=groups)
            made[name, heads, groups] = tensors, want(*tensors, **MASKS[name](SIZE))
        return made[name, heads, groups]

    return of


@pytest.mark.parametrize(
    ("size", "layout"), [(1, "contiguous"), *((size, layout) for size in (2, 3, 4) for layout in LAYOUTS)]
)
@pytest.mark.parametrize("name", MASKS)
def test_ring_equals_the_reference(wanted, name, size, layout):
    (q, k, v, dout, dlse), reference = wanted(name, 4, 2)
    check(played.attention(q, k, v, dout, dlse=dlse, layout=layout, size=size, **MASKS[name](SIZE)), reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_of_8_equals_the_reference(wanted, layout):
    for name in ("causal", "documents_window", "random", "past"):  # a ring of 4 has every kind of hop already
        (q, k, v, dout, dlse), reference = wanted(name, 4, 2)
        check(played.attention(q, k, v, dout, dlse=dlse, layout=layout, size=8, **MASKS[name](SIZE)), reference)


@pytest.fixture
def in_lanes(monkeypatch):
    """Rings of 8 local tokens and more have two lanes, as those of thousands have.

    What is to be written is NaN before.
    """
    monkeypatch.setattr(lanes, "LANE_ROWS", 8)
    monkeypatch.setattr(ring, "_empty", lambda x: torch.full(x.shape, torch.nan, dtype=torch.float32))


@pytest.mark.parametrize(("rotate", "size"), [("keys", 2), ("queries", 3)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("name", MASKS)
def test_two_lanes_change_nothing(in_lanes, wanted, name, layout, rotate, size):
    (q, k, v, dout, dlse), reference = wanted(name, 4, 2)
    meshes = [(size, "ring")]
    meshes += [(4, "gather"), (4, "double")] if name in ("causal", "documents_window", "random") else []
    for ranks, arrangement in meshes:
        given = {"size": ranks, "arrangement": arrangement, "inner": 2 if arrangement == "double" else None}
        given |= {"layout": layout, "rotate": rotate} | MASKS[name](SIZE)
        check(played.attention(q, k, v, dout, dlse=dlse, **given), reference)


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (3, 1), (8, 2), (8, 1), (6, 3)])
def test_two_lanes_with_grouped_heads(in_lanes, wanted, heads, groups, rotate):
    for name in ("causal", "past"):  # with and without work for the own block
        (q, k, v, dout, dlse), reference = wanted(name, heads, groups)
        given = {"size": 2, "layout": "contiguous", "rotate": rotate} | MASKS[name](SIZE)
        check(played.attention(q, k, v, dout, dlse=dlse, **given), reference)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (8, 1), (2, 2), (16, 16), (32, 8), (8, 2), (9, 3)])
def test_lanes_have_all_heads_once_and_whole_groups(in_lanes, heads, groups):
    q, k = torch.empty(1, 8, heads, 1), torch.empty(1, 8, groups, 1)
    (found,) = exchange.play(1, lambda transport: lanes.lanes_of(q, k, transport).all)
    assert len(found) == min(groups, 2) and all(len(range(*x.keys.indices(groups))) >= 1 for x in found)
    for what, count in (("queries", heads), ("keys", groups)):
        assert sorted(i for lane in found for i in range(count)[lane.heads(what)]) == list(range(count))
    for lane in found:
        assert {i * groups // heads for i in range(heads)[lane.queries]} == set(range(groups)[lane.keys])
    assert len(lanes.lanes_of(q[:, 1:], k[:, 1:], None).all) == len(lanes.lanes_of(q, k, None).all) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (3, 1), (8, 2), (8, 1)])
def test_grouped_heads(wanted, heads, groups, size, layout):
    for name in ("causal", "documents_window"):
        (q, k, v, dout, dlse), reference = wanted(name, heads, groups)
        check(played.attention(q, k, v, dout, dlse=dlse, layout=layout, size=size, **MASKS[name](SIZE)), reference)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_R35_without_a_causal_mask_every_layout_is_exact(size, layout):
    tensors = inputs(16 * size, batch=2)
    check(
        played.attention(*tensors[:4], dlse=tensors[4], layout=layout, size=size, causal=False),
        want(*tensors, causal=False),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "seq_len"), [(5, 70), (7, 42), (3, 78), (2, 4)])
def test_R26_odd_rings_and_odd_lengths(size, seq_len, layout):
    tensors = inputs(seq_len)
    check(played.attention(*tensors[:4], dlse=tensors[4], layout=layout, size=size), want(*tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_R23_the_backward_uses_the_keys_that_visit_and_not_its_own(layout):
    q, k, v, dout, dlse = inputs(64)
    owner = torch.empty(1, 64, 1, 1)
    for rank, part in enumerate(LAYOUTS[layout].segments(64, 4, 1, np.arange(1, 65))):
        owner[:, torch.from_numpy(mask.positions(part))] = rank + 1.0
    check(
        played.attention(q, k * owner, v * owner, dout, dlse=dlse, layout=layout, size=4),
        want(q, k * owner, v * owner, dout, dlse),
    )


def test_R39_a_block_of_keys_is_seen_by_its_positions():
    lo, hi = mask.intervals(16, 16, causal=True)
    queries = np.array([[6, 2]])
    pairs = [mask.View(lo[6:8], hi[6:8], queries, np.array([[start, 5]])).pairs() for start in (0, 8)]
    assert pairs == [2 * 5, 0]


def test_a_rank_without_any_work_returns_nothing_and_still_passes_keys_on():
    tensors = inputs(SIZE)
    given = {"cu_seqlens": [0, SIZE // 4]}  # only rank 0 of 4 holds documents
    results = played.attention(*tensors[:4], dlse=tensors[4], size=4, **given)
    assert (results["lse"][..., SIZE // 4 :] == -torch.inf).all() and not results["out"][:, SIZE // 4 :].any()
    check(results, want(*tensors, **given))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_the_error_of_bf16_does_not_grow_with_the_ring(layout, seed):
    tensors = inputs(256, width=64, dtype=torch.bfloat16, seed=seed)
    reference = want(*tensors)
    rms = {}
    for size in (1, 8):
        results = played.attention(*tensors[:4], dlse=tensors[4], layout=layout, size=size)
        rms[size] = {
            name: (results[name] - reference[name]).square().mean().sqrt() for name in ("out", "dq", "dk", "dv")
        }
    for name in rms[1]:
        assert rms[8][name] <= 1.2 * rms[1][name], name


class Recorded:
    """A kernel and a transport that write down what happens on one rank, in order."""

    def __init__(self, transport):
        self.rank, self.size, self.transport = transport.rank, transport.size, transport
        self.events, self.posts = [], []

    def second_stream(self, device):
        return self.transport.second_stream(device)

    def beside(self, device, others=()):
        return self.transport.beside(device, others)

    def post(self, sends, receives, what, slow=False):
        self.events.append(f"post {what}")
        self.posts.append((sends, receives, what))
        return Waiting(self, self.transport.post(sends, receives, what, slow), what)

    def forward(self, *tensors, **how):
        self.events.append("kernel")
        eager.forward(*tensors, **how)

    def backward(self, *tensors, **how):
        self.events.append("kernel")
        eager.backward(*tensors, **how)


class Waiting:
    def __init__(self, record, pending, what):
        self.record, self.pending, self.what = record, pending, what

    def wait(self):
        self.record.events.append(f"wait {self.what}")
        self.pending.wait()


def record(size, layout, backward=False, seq_len=SIZE, rotate="keys", transit=torch.float32, plan=None, **given):
    """What each rank of a ring does in one forward, or in one backward. plan: other arguments of the plan."""
    q, k, v, dout, _ = inputs(seq_len)
    lo, hi = intervals_of(seq_len, **given)
    segments = LAYOUTS[layout].segments(seq_len, size, 1, (hi.astype("int64") - lo).clip(0))

    def body(transport):
        seen = Recorded(transport)
        local = [x[:, torch.from_numpy(mask.positions(segments[transport.rank]))] for x in (q, k, v, dout)]
        way = routes.Plan(segments, transport.rank, lo, hi, **(plan or {}))
        if backward:
            rows = torch.zeros(1, q.shape[2], len(local[0][0]))
            route = way.backward(routes.sizes_of(q, k, transit), rotate)
            ring.backward(local[3], *local[:3], rows, rows, route, seen, seen, scale=1.0, transit=transit)
        else:
            ring.forward(*local[:3], way.forward, seen, seen, scale=1.0)
        return seen

    return exchange.play(size, body)


def events(text, block="keys and values"):
    """'+1 K -1' -> the events: + posts, - waits for the block of a hop, > and < gradients after a hop, K computes."""
    words = {"+": f"post {block} for hop ", "-": f"wait {block} for hop "}
    words |= {">": "post gradients after hop ", "<": "wait gradients after hop "}
    words |= {"^": "post gradients home from hop ", "_": "wait gradients home from hop "}
    return ["kernel" if word == "K" else words[word[0]] + word[1:].replace("&", ", ") for word in text.split()]


@pytest.mark.parametrize(
    ("backward", "order"),
    [
        (False, "+1 K -1 +2 K -2 +3 K -3 K"),
        # gradients of the own block stay at home
        (True, "+1 K -1 +2 K >1 -2 +3 K <1 >2 -3 K <2 ^3 _3"),
    ],
)
def test_blocks_are_posted_before_the_kernel_and_gradients_travel_under_the_next_one(backward, order):
    for seen in record(4, "contiguous", backward, causal=False):
        assert seen.events == events(order)
    if backward:
        for seen in record(4, "contiguous", backward, rotate="queries", causal=False):
            assert seen.events == events(order, "queries")


@pytest.mark.parametrize(
    ("backward", "order"),
    [(False, "+1 K -1 +2 K -2 +3 K -3 K"), (True, "+1 K -1 +2 K K >1 -2 +3 K K <1 >2 -3 K K <2 ^3 K _3")],
)
def test_the_last_gradients_come_home_under_what_the_second_lane_has_left(in_lanes, backward, order):
    for rotate, block in (("keys", "keys and values"), ("queries", "queries")):
        for seen in record(4, "contiguous", backward, rotate=rotate, causal=False):
            assert seen.events == events(order, block if backward else "keys and values")


@pytest.mark.parametrize(
    ("arrangement", "backward", "order"),
    [
        # hops 2 and 3 are those of the other node: its block is asked for a whole inner round before it is used
        ("double", False, "+2 +1 K -1 K -2 +3 K -3 K"),
        ("double", True, "+2 +1 K -1 K >1 -2 +3 K -3 K <1 ^3 _3"),
    ],
)
def test_what_is_posted_and_awaited_when_in_other_arrangements(arrangement, backward, order):
    plan = {"arrangement": arrangement, "inner": 2}
    for seen in record(4, "contiguous", backward, plan=plan, causal=False):
        told = events(order)
        if arrangement == "double" and backward:  # gradients of a round go on inside it: from hop 2 to hop 3
            at = told.index("wait keys and values for hop 3")
            told[at:at] = ["post gradients after hop 2"]
            told.insert(told.index("wait gradients after hop 1") + 1, "wait gradients after hop 2")
        assert seen.events == told


@pytest.mark.parametrize(
    ("backward", "order"),
    [
        # heads in two sections: what the second needs is on its way while the first is computed, and so are the
        # gradients of the first while the second is
        (False, "+all +all -all K -all K"),
        (True, "+all +all -all K ^all -all K _all ^all _all"),
    ],
)
def test_a_gather_asks_for_the_next_section_of_heads_before_it_computes_one(backward, order):
    for seen in record(4, "contiguous", backward, plan={"arrangement": "gather"}, causal=False):
        told = [event.replace("for hop all", "for all hops") for event in events(order)]
        assert seen.events == [event.replace("from hop all", "from all hops") for event in told]


@pytest.mark.parametrize(("backward", "order"), [(False, "+2 -2 +3 K -3 K"), (True, "+2 -2 +3 K >2 -3 K <2 ^3 _3")])
def test_keys_jump_to_the_first_hop_that_is_needed(backward, order):
    last = record(4, "contiguous", backward, **MASKS["past"](SIZE))[3]
    assert last.events == events(order)


@pytest.mark.parametrize(
    ("layout", "given", "forward", "backward"),
    [
        ("contiguous", {"window": 16}, "+1 -1", "+1 -1 ^1 _1"),
        ("zigzag", {"window": 16}, "+1 -1 +7 -7", "+1 -1 +7 >1 -7 <1 ^7 _7"),
        ("contiguous", {"cu_seqlens": [*range(0, 1025, 128)]}, "", ""),
        ("zigzag", {"cu_seqlens": [0, 0]}, "", ""),
        ("striped", {"intervals": "nothing"}, "", ""),
    ],
)
def test_keys_and_gradients_make_no_trip_that_nobody_needs(layout, given, forward, backward):
    if given.get("intervals"):
        given = MASKS["nothing"](1024)
    for back, order in ((False, forward), (True, backward)):
        for seen in record(8, layout, back, seq_len=1024, **given)[1:7]:  # the ends of a line have one neighbour
            assert [event for event in seen.events if event != "kernel"] == events(order)


@pytest.mark.parametrize(
    ("arrangement", "name", "backward", "layout"),
    [
        *itertools.product(["ring"], ["causal", "window", "random", "past", "documents"], [False, True], LAYOUTS),
        *itertools.product(["double", "gather"], ["causal", "random"], [True], ["zigzag", "balanced"]),
    ],
)
def test_R28_each_message_is_posted_by_both_of_its_ranks_in_one_order(arrangement, name, backward, layout):
    ranks = record(
        4, layout, backward, rotate="auto", plan={"arrangement": arrangement, "inner": 2}, **MASKS[name](SIZE)
    )
    sent, awaited = collections.defaultdict(list), collections.defaultdict(list)
    for seen in ranks:
        for sends, receives, what in seen.posts:
            assert sends or receives
            for peer, block in sends:
                assert peer != seen.rank and block.is_contiguous() and block.numel()
                sent[seen.rank, peer].append((what, block.shape, block.dtype))
            for peer, block in receives:
                assert block.is_contiguous()
                awaited[peer, seen.rank].append((what, block.shape, block.dtype))
    assert sent == awaited


def test_keys_and_gradients_use_two_buffers_each():
    for seen in record(8, "zigzag", backward=True, seq_len=256, causal=False):
        for kind in ("keys", "gradients"):
            posts = [post for post in seen.posts if post[2].startswith(kind)]
            assert len(posts) == 7
            buffers = {x.data_ptr() for sends, receives, _ in posts for _, x in (*sends, *receives)}
            # the first sum is no arrival: it lies in a buffer of its own
            assert len(buffers) == (2 if kind == "keys" else 3)


def test_a_played_rank_that_does_not_come_is_named():
    def body(transport):
        if transport.rank == 1:
            return None
        with pytest.raises(RuntimeError, match=r"rank 0, keys and values for hop 1: receiving from rank 1: timed out"):
            x = torch.zeros(1)
            transport.post([(1, x)], [(1, x.clone())], "keys and values for hop 1").wait()
        return "told"

    assert exchange.play(2, body, timeout_s=0.2) == ["told", None]
