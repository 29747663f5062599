"""Arrangements, what rotates, the type of gradients under way: against the fp64 reference, mostly in one process."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from types import SimpleNamespace

import numpy as np
import played
import pytest
import torch
import torch.distributed as dist
from masks import MASKS
from oracle import NAMES, check, inputs, want
from test_layouts import ring_at
from test_op import bytes_sent
from worlds import on_ring, small_pieces, told

import ringflash
from ringflash import LAYOUTS, Ring, exchange, gathering, mask, ring, routes, ulysses
from ringflash.kernels import eager

SIZE = 96
KINDS = ("causal", "full", "documents_window", "random", "past")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    small_pieces(monkeypatch.setattr)


@pytest.fixture(scope="module")
def wanted():
    tensors = inputs(SIZE)
    made = {}
    return lambda name: (tensors, made.setdefault(name, want(*tensors, **MASKS[name](SIZE))))


LAYOUT_OF = dict(zip(MASKS, itertools.cycle(["zigzag", "balanced", "striped", "contiguous", "zigzag"]), strict=False))


@pytest.mark.parametrize(("name", "layout"), list(LAYOUT_OF.items()))
def test_queries_that_travel_give_the_same_gradients(wanted, name, layout):
    (q, k, v, dout, dlse), reference = wanted(name)
    check(
        played.attention(q, k, v, dout, dlse=dlse, layout=layout, size=3, rotate="queries", **MASKS[name](SIZE)),
        reference,
    )


@pytest.mark.parametrize(
    ("layout", "rotate"),
    [("zigzag", "queries"), ("balanced", "queries"), ("striped", "keys"), ("contiguous", "keys")],
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("arrangement", "inner"), [("double", 2), ("gather", None)])
def test_arrangements_equal_the_reference(wanted, arrangement, inner, name, layout, rotate):
    (q, k, v, dout, dlse), reference = wanted(name)
    given = {"layout": layout, "size": 4, "arrangement": arrangement, "inner": inner, "rotate": rotate}
    check(played.attention(q, k, v, dout, dlse=dlse, **given, **MASKS[name](SIZE)), reference)


@pytest.mark.parametrize(
    ("name", "layout"), [("causal", "zigzag"), ("documents", "balanced"), ("window", "contiguous")]
)
@pytest.mark.parametrize(("arrangement", "inner"), [("double", 2), ("double", 4), ("gather", None)])
def test_arrangements_of_8_ranks_equal_the_reference(wanted, arrangement, inner, name, layout):
    (q, k, v, dout, dlse), reference = wanted(name)
    given = {"layout": layout, "size": 8, "arrangement": arrangement, "inner": inner}
    check(played.attention(q, k, v, dout, dlse=dlse, **given, **MASKS[name](SIZE)), reference)


@pytest.mark.parametrize("heads", [1, 3])
def test_rows_of_odd_heads_and_batches_travel_too(heads):
    """Their lse does not fill a unit of the row."""
    tensors = inputs(48, heads=heads, groups=heads, batch=2)
    for rotate in routes.TRAVELLERS:
        check(played.attention(*tensors[:4], dlse=tensors[4], size=4, rotate=rotate), want(*tensors))


@pytest.mark.parametrize(
    ("pairs", "heads", "groups", "forward", "backward"),
    [
        (2**24, 16, 16, 1, 1),  # as in short documents
        (2**26, 16, 4, 2, 2),
        (2**26, 16, 1, 1, 1),  # heads of one key head stay together
        (2**27, 15, 5, 1, 1),  # all sections are of one size
        (2**27, 12, 6, 2, 2),
        (2**31, 16, 16, 2, 1),
    ],
)
def test_a_gather_has_as_many_sections_as_its_pairs_are_worth(monkeypatch, pairs, heads, groups, forward, backward):
    monkeypatch.setattr(gathering, "SECTION_PAIRS", 2**29)
    lo, hi = mask.intervals(8, 8, causal=True)
    route = routes.Plan(LAYOUTS["contiguous"].segments(8, 2, 1, hi - lo), 1, lo, hi, arrangement="gather").forward
    assert route.pairs == 18, "36 pairs of two ranks"
    q, k = (torch.empty(1, 4, count, 8, device="meta") for count in (heads, groups))
    route = dataclasses.replace(route, pairs=pairs)
    transport = SimpleNamespace(second_stream=lambda device: None)
    for way, count in ((False, forward), (True, backward)):
        sections = gathering.sections_of(q, k, route, transport, backward=way).all
        assert len(sections) == count
        for name, number in (("queries", heads), ("keys", groups)):
            assert [i for lane in sections for i in range(number)[lane.heads(name)]] == list(range(number))


class Part:
    """Some ranks of a transport as a transport."""

    def __init__(self, whole, members):
        self.whole, self.members = whole, members
        self.rank, self.size = members.index(whole.rank), len(members)

    def second_stream(self, device):
        return self.whole.second_stream(device)

    def beside(self, device, others=()):
        return self.whole.beside(device, others)

    def post(self, sends, receives, what, slow=False):
        sends, receives = ([(self.members[peer], x) for peer, x in side] for side in (sends, receives))
        return self.whole.post(sends, receives, what, slow)


@pytest.mark.parametrize(("arrangement", "inner"), [("double", 2), ("gather", None)])
@pytest.mark.parametrize(("groups", "rotate"), [(2, "queries"), (1, "keys")])
def test_ulysses_around_every_arrangement(arrangement, inner, groups, rotate):
    """8 ranks, 2 of which share the tokens of one ring rank."""
    q, k, v, dout, _ = tensors = inputs(64, heads=4, groups=groups)
    lo, hi = mask.intervals(64, 64, causal=True)
    segments = LAYOUTS["zigzag"].segments(64, 4, 2, hi - lo)
    order = np.concatenate([mask.positions(part) for part in segments])

    def body(transport):
        ring_rank, head_rank = divmod(transport.rank, 2)
        heads, way = Part(transport, range(2 * ring_rank, 2 * ring_rank + 2)), Part(transport, range(head_rank, 8, 2))
        rows = torch.from_numpy(order[8 * transport.rank : 8 * transport.rank + 8])
        split = ulysses.scatter_heads([x[:, rows] for x in (q, k, v, dout)], groups, heads)
        plan = routes.Plan(segments, ring_rank, lo, hi, arrangement=arrangement, inner=inner)
        out, lse = ring.forward(*split[:3], plan.forward, way, eager, scale=0.25)
        route = plan.backward(routes.sizes_of(q, k, torch.float32, 2), rotate)
        delta = eager.delta(out, split[3], None)
        dq, dk, dv = ring.backward(split[3], *split[:3], lse, delta, route, way, eager, scale=0.25, rounded=False)
        back = [ulysses.gather_heads(x, heads) for x in (out, lse.transpose(1, 2)[..., None], dq)]
        return *back, *(ulysses.gather_kv_heads(x, groups, heads) for x in (dk, dv))

    parts = [torch.cat(part, 1)[:, np.argsort(order)] for part in zip(*exchange.play(8, body), strict=True)]
    parts[1] = parts[1][..., 0].transpose(1, 2)
    check(dict(zip(NAMES, parts, strict=True)), want(*tensors[:4], torch.zeros(1, 4, 64), scale=0.25))


def errors_in_transit(tensors, reference, **given) -> dict[str, float]:
    """Rms error of what a ring makes of bf16 inputs, relative to the rms of the result."""
    results = played.attention(*tensors[:4], dlse=tensors[4], layout="zigzag", **given)
    rms = {name: ((results[name] - reference[name]).square().mean().sqrt(), reference[name]) for name in NAMES}
    return {name: float(error / wanted.square().mean().sqrt()) for name, (error, wanted) in rms.items()}


@pytest.mark.parametrize(("rotate", "travelling"), [("keys", ("dk", "dv")), ("queries", ("dq",))])
def test_gradients_in_bf16_on_the_way_cost_what_was_measured_and_only_those_that_travel(
    rotate, travelling, record_property
):
    tensors = inputs(256, heads=4, groups=4, width=64, dtype=torch.bfloat16)
    reference = want(*tensors)
    for size, most in ((2, 1.6), (8, 2.6)):  # docs/decisions.md has the numbers
        full, half = (
            errors_in_transit(tensors, reference, rotate=rotate, size=size, transit=transit)
            for transit in (torch.float32, torch.bfloat16)
        )
        record_property(f"ring of {size}", {"float32": full, "bfloat16": half})
        for name in NAMES:
            if name in travelling:
                assert 1.05 * full[name] < half[name] < most * full[name], (name, size)
            else:
                assert half[name] == full[name], name


# --- processes


def equal_over_gloo(given: dict) -> str:
    small_pieces()
    if given.get("topology") == "mesh":
        given = given | {"topology": dist.init_device_mesh("cpu", (2, 2))}
    if given.get("topology") == "hosts":
        socket.gethostname = lambda: f"host{dist.get_rank() // 2}"
    over = Ring(**given)
    for name, rotate in (("causal", "queries"), ("documents_window", "auto")):
        tensors, masks = inputs(SIZE), MASKS[name](SIZE)
        check(on_ring(over, tensors, masks, rotate=rotate), want(*tensors, **masks))
    return over.arrangement


@pytest.mark.parametrize(
    ("given", "arrangement"),
    [
        ({"topology": 2}, "double"), ({"topology": "mesh", "layout": "balanced"}, "double"),
        ({"topology": "hosts"}, "double"), ({"topology": 4}, "ring"), ({"topology": 2, "ulysses": 2}, "ring"),
        ({"arrangement": "gather"}, "gather"), ({"arrangement": "gather", "ulysses": 2}, "gather"),
    ],
    ids=str,
)  # fmt: skip
def test_rings_of_processes_equal_the_reference(pool, given, arrangement):
    assert pool(4)(equal_over_gloo, given) == [arrangement] * 4


@pytest.mark.parametrize(
    ("name", "rotate", "given"),
    [
        ("causal", "queries", {"topology": 2}), ("window", "keys", {"arrangement": "gather"}),
        ("documents", "queries", {"transit": torch.bfloat16}),
    ],
)  # fmt: skip
def test_explain_announces_the_bytes_of_every_arrangement(pool, name, rotate, given):
    pool(4)(announced, name, rotate, given)


def announced(name: str, rotate: str, given: dict) -> None:
    bytes_sent(1, 2, name, torch.bfloat16, rotate, **given)


def scattered_hosts() -> str:
    plain, socket.gethostname = socket.gethostname, lambda: f"host{dist.get_rank() % 2}"
    try:
        return told(ValueError, Ring, topology="hosts")
    finally:
        socket.gethostname = plain


def test_hosts_whose_ranks_are_scattered_are_refused_on_every_rank(pool):
    words = "the ranks in order are 1 on host0, 1 on host1, 1 on host0, 1 on host1; every host must have equally many"
    assert all(words in message for message in pool(4)(scattered_hosts))


def refusals() -> list[str]:
    flat = dist.init_device_mesh("cpu", (4,))
    wrong = [
        {"topology": 3}, {"topology": "racks"}, {"topology": flat}, {"topology": 2, "ulysses": 4},
        {"topology": 2, "arrangement": "gather"}, {"topology": dist.DeviceMesh("cpu", [[0, 2], [1, 3]])},
    ]  # fmt: skip
    return [told(ValueError, Ring, **given) for given in wrong]


def test_topologies_that_do_not_fit_are_refused(pool):
    words = [
        "topology=3 ranks a node must be at least 1 and divide 4 ranks",
        "topology='racks' is unknown; it must be 'hosts', a number of ranks a node or a mesh",
        "topology is a mesh of 1 dimensions; it must have two (node, rank of a node)",
        "topology tells of 2 ranks a node, which must be a multiple of ulysses=4",
        "topology is of no use to arrangement='gather'",
        "it must hold those of the group in order",
    ]
    for messages in pool(4)(refusals):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"arrangement": "star"}, ValueError, "arrangement='star' is unknown; it must be None or one of ring, double"),
        ({"arrangement": "double"}, ValueError, "arrangement='double' needs topology="),
        ({"topology": 1.5}, TypeError, "topology=1.5 is float; it must be 'hosts', a number of ranks a node"),
        ({"arrangement": ["ring"]}, ValueError, r"arrangement=\['ring'\] is unknown"),
        ({"topology": 2}, ValueError, "topology=2 ranks a node must be at least 1 and divide 1 ranks"),
        ({"topology": 0}, ValueError, "topology=0 ranks a node must be at least 1"),
        ({"transit": torch.float16}, ValueError, "transit=torch.float16 must be one of torch.float32, torch.bfloat16"),
        ({"transit": "bf16"}, TypeError, "transit='bf16' is str; it must be a torch.dtype"),
    ],
    ids=str,
)
def test_a_ring_refuses_nonsense(given, kind, words):
    with pytest.raises(kind, match=words.replace("(", r"\(")):
        Ring(**given)


def test_windows_that_are_no_list_are_refused():
    with pytest.raises(TypeError, match="windows=5 is int; it must be a list of windows"):
        Ring(layout="auto").layout(64, windows=5)


def test_what_rotates_is_refused_where_nothing_does():
    q, k, v, *_ = inputs(8)
    for function in (ringflash.attention, ringflash.explain):
        with pytest.raises(ValueError, match="rotate='keys' needs layout=: on one device nothing travels"):
            function(q, k, v, rotate="keys")
        with pytest.raises(ValueError, match="rotate='values' is unknown; it must be one of auto, keys, queries"):
            function(q, k, v, rotate="values", layout=Ring().layout(8))


def test_rotate_is_taken_in_a_ring_of_one_and_explain_says_that_it_is_idle():
    q, k, v, dout, dlse = inputs(8)
    for rotate in routes.TRAVELLERS:
        check(on_ring(Ring(), (q, k, v, dout, dlse), {}, rotate=rotate), want(q, k, v, dout, dlse))
        told = (f"rotate={rotate}: nothing to act on in a ring of size 1",)
        assert ringflash.explain(q, k, v, rotate=rotate, layout=Ring().layout(8)).warnings == told
    whole = ring_at(0, 2, "zigzag", 2).layout(8)  # heads travel, blocks do not
    (told,) = ringflash.explain(*(x[:, :4] for x in (q, k, v)), rotate="keys", layout=whole).warnings
    assert told == "rotate=keys: nothing to act on in a ring of size 1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ()),
        ({"arrangement": "ring"}, ()),
        ({"arrangement": "gather"}, ("arrangement=gather: nothing to act on in a ring of size 1",)),
        ({"arrangement": "double", "topology": "hosts", "transit": torch.bfloat16},
         ("arrangement=double and transit=torch.bfloat16: nothing to act on in a ring of size 1",)),
    ],
    ids=str,
)  # fmt: skip
def test_a_ring_of_one_takes_the_words_of_a_large_one_and_explain_says_which_are_idle(given, words):
    q, k, v, dout, dlse = inputs(8)
    alone = Ring(**given)
    assert ringflash.explain(q, k, v, layout=alone.layout(8)).warnings == words
    check(on_ring(alone, (q, k, v, dout, dlse), {}), want(q, k, v, dout, dlse))
    several = ring_at(0, 2, "zigzag")
    several.arrangement, several.transit = alone.arrangement, alone.transit
    told_of = ringflash.explain(*(x[:, :4] for x in (q, k, v)), layout=several.layout(8))
    assert not any("nothing to act on" in text for text in told_of.warnings)


# --- the layout that suits a mask


@pytest.mark.parametrize(
    ("given", "windows", "name"),
    [
        ({}, None, "zigzag"), ({"causal": False}, None, "contiguous"), ({}, [64], "contiguous"),
        ({}, [64, None], "zigzag"), ({}, [None], "zigzag"),
    ],
)  # fmt: skip
def test_auto_takes_the_layout_that_suits_the_masks(given, windows, name):
    layout = ring_at(1, 4, "auto").layout(4096, windows=windows, **given)
    assert layout.name == name
    plain = ring_at(1, 4, name).layout(4096, **given)
    assert torch.equal(layout.segments, plain.segments) and layout.cu_seqlens is None


def test_auto_cuts_what_only_one_layout_can_and_tells_what_it_needs():
    assert ring_at(0, 4, "auto").layout(4 * 1023).name != "zigzag"
    with pytest.raises(ValueError, match="seq_len=4095 must be a multiple of 4 for layout 'auto' over 4 ranks"):
        ring_at(0, 4, "auto").layout(4095)


def test_windows_choose_a_layout_and_are_refused_where_it_is_given():
    with pytest.raises(ValueError, match=r"windows=\[64\] choose a layout, which is 'zigzag'"):
        Ring().layout(64, windows=[64])
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        Ring(layout="auto").layout(64, windows=[0])
    with pytest.raises(ValueError, match="windows is empty"):
        Ring(layout="auto").layout(64, windows=[])


def test_calls_with_other_windows_over_one_layout_each_get_the_hops_they_need():
    layout = ring_at(2, 8, "contiguous").layout(1024)
    q, k, v, *_ = (x[:, :128] for x in inputs(1024))
    told_of = {w: ringflash.explain(q, k, v, layout=layout, window=w) for w in (None, 300, 20)}
    assert {w: len(one.hops) for w, one in told_of.items()} == {None: 8, 300: 4, 20: 2}
    assert (
        told_of[20].forward_bytes == 2 * 19 * 2 * 16 * 4 and told_of[300].forward_bytes > 3 * 128 * 2 * 2 * 16 * 4 / 2
    )
