"""What travels, from layout and mask: against sets of positions that are collected row by row from the dense mask."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from masks import MASKS
from test_mask import dense, intervals_of

from ringflash import LAYOUTS, mask, needs, routes
from ringflash.arrangements import ARRANGEMENTS, HOME, Geometry
from ringflash.layouts import balanced, striped
from ringflash.routes import Plan, Sizes

SIZE = 96
GEOMETRIES = [("ring", 2, 2), ("ring", 4, 4), ("double", 4, 2), ("double", 8, 4), ("double", 8, 2), ("gather", 4, 4)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(striped, "MAX_STRIPE", 6)
    monkeypatch.setattr(balanced, "MAX_BLOCKS", 3)


@functools.cache
def world(name: str, layout: str, size: int):
    """(lo, hi, segments, positions of each rank, bool [rows, keys])."""
    lo, hi = intervals_of(SIZE, **MASKS[name](SIZE))
    segments = LAYOUTS[layout].segments(SIZE, size, 1, (hi.astype(np.int64) - lo).clip(0))
    return lo, hi, segments, [mask.positions(part) for part in segments], dense(lo, hi, np.arange(SIZE))


@functools.cache
def needed(what: str, name: str, layout: str, size: int, owner: int, rank: int) -> set[int]:
    """The positions of `owner` that `rank` needs, by looking at each pair."""
    *_, held, seen = world(name, layout, size)
    if what == "queries":
        return {int(row) for row in held[owner] if seen[row, held[rank]].any()}
    return {int(key) for key in held[owner] if seen[held[rank], key].any()}


def ways(arrangement: str, hops: list[int], inner: int) -> list[tuple[list[int], list[int]]]:
    """For each hop: those that its block serves on the way, itself first, and those whose gradients it carries on."""
    if arrangement == "gather":
        return [([hop], [hop]) for hop in hops]
    if arrangement == "ring":
        return [(hops[i:], hops[: i + 1]) for i in range(len(hops))]
    made = []
    rounds = [[hop for hop in hops if hop // inner == o] for o in dict.fromkeys(hop // inner for hop in hops)]
    for at, members in enumerate(rounds):
        before = [hop for earlier in rounds[:at] for hop in earlier]
        after = [hop for later in rounds[at + 1 :] for hop in later]
        for i in range(len(members)):
            crosses = i == 0 and members[0] >= inner  # what begins a round of another node goes on to the next one
            ends = i == len(members) - 1  # where the sums of earlier rounds are added
            made.append((members[i:] + after * crosses, before * ends + members[: i + 1]))
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", routes.TRAVELLERS)
@pytest.mark.parametrize("name", MASKS)
def test_rows_that_travel_are_those_that_the_rest_of_the_way_needs_row_by_row(name, what, layout):
    for arrangement, size, inner in GEOMETRIES:
        lo, hi, segments, *_ = world(name, layout, size)
        plan, geometry = Plan(segments, 0, lo, hi, arrangement=arrangement, inner=inner), Geometry(size, inner)
        for down in (False, True):
            travel = plan.travel(what, down=down)
            hops = [leg.hop for leg in travel.legs]
            for i, (serves, collects) in enumerate(ways(arrangement, hops, inner)):
                for owner in range(size):
                    for sets, of in ((travel.kept, serves), (travel.carried, collects)):
                        elements = np.flatnonzero(sets[i] & (travel.needs.owner == owner))
                        got = set(mask.positions(travel.needs.segments(elements)).tolist())
                        ranks = [int(geometry.holder(owner, hop)) for hop in of]
                        assert got == set().union(*(needed(what, name, layout, size, owner, rank) for rank in ranks))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal", "window", "documents_window", "random", "past"])
def test_the_counters_of_all_ranks_are_what_travels(name, layout):
    """Rows sent by the ranks add up to the sets of the legs, and every sum reaches its owner."""
    for arrangement, size, inner in GEOMETRIES:
        lo, hi, segments, *_ = world(name, layout, size)
        for what in routes.TRAVELLERS:
            plans = [Plan(segments, rank, lo, hi, arrangement=arrangement, inner=inner) for rank in range(size)]
            walks = [plan.route(what, down=False) for plan in plans]
            sent = np.array([walk.sent_rows() for walk in walks])
            assert tuple(sent.sum(0)) == plans[0].travel(what, down=False).rows()
            for walk, part in zip(walks, segments, strict=True):
                if arrangement == "gather" and any(walk.hops):  # what a rank has stands between what it gathers
                    assert walk.joined is not None and walk.joined.count == walk.home.count <= part[:, 1].sum()
                    assert [visit.own for visit in walk.visits] in ([True], [False], [True, False])
                else:
                    assert [visit.own for visit in walk.visits].count(True) == (0 in walk.hops)
                assert walk.hops == walks[0].hops


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", MASKS)
def test_hops_and_work_are_those_that_some_rank_needs(name, size, layout):
    lo, hi, segments, held, seen = world(name, layout, size)
    sees = np.array([[seen[np.ix_(rows, keys)].any() for keys in held] for rows in held])
    for what, down in (("keys", False), ("keys", True), ("queries", False)):
        want = sees if what == "keys" else sees.T  # [rank, owner of what visits it]
        hops = [hop for hop in range(size) if any(want[rank, (rank - hop) % size] for rank in range(size))]
        for rank in range(size):
            route = Plan(segments, rank, lo, hi).route(what, down=down)
            assert sorted(route.hops) == hops
            work = [want[rank, (rank - hop) % size] for hop in route.hops]
            assert [view is not None for view in route.views] == work
            assert route.first == (work.index(True) if any(work) else len(hops))
            assert route.last == (len(work) - 1 - work[::-1].index(True) if any(work) else -1)


def causal(layout: str, size: int, seq_len: int, **given) -> Plan:
    lo, hi = mask.intervals(seq_len, seq_len, causal=True, **given)
    return Plan(LAYOUTS[layout].segments(seq_len, size, 1, hi.astype(np.int64) - lo), 0, lo, hi)


def test_a_window_over_a_contiguous_layout_moves_its_own_length_and_no_more():
    for window, hops in ((128, (0, 1)), (1000, (0, 1)), (1025, (0, 1)), (1026, (0, 1, 2))):
        plan = causal("contiguous", 8, 8192, window=window)
        assert plan.forward.hops == hops
        if window <= 1025:
            assert plan.travel("keys", down=False).rows() == (7 * (window - 1), 7 * (window - 1))
    zigzag = causal("zigzag", 8, 8192, window=128)
    assert zigzag.forward.hops == (0, 1, 7) and zigzag.travel("keys", down=False).rows()[0] > 14 * 127


def test_causal_zigzag_sends_keys_down_and_their_gradients_up():
    """Down the ranks the late half of a block is dropped at rank 0, ring.md's 25%; gradients would be whole at once."""
    plan, size, local = causal("zigzag", 8, 1024), 8, 128
    down, up = (plan.travel("keys", down=down).rows() for down in (True, False))
    assert down[0] == size * (size - 1) * local * 3 // 4 and down[0] < up[0] and up[1] < down[1]
    assert plan.forward.hops == (0, 7, 6, 5, 4, 3, 2, 1)
    assert plan.backward(Sizes(4, 8, 100, 100)).hops == tuple(range(8))


def test_causal_contiguous_blocks_stop_at_the_last_rank():
    plan, size, local = causal("contiguous", 4, 256), 4, 64
    assert plan.travel("keys", down=False).rows()[0] == local * size * (size - 1) // 2
    assert not any(trip.sends for trip in Plan(plan._segments, 3, plan._lo, plan._hi).forward.block_trips)


@pytest.mark.parametrize(
    ("heads", "groups", "transit", "rotates"),
    [
        (8, 8, torch.float32, "queries"), (8, 6, torch.float32, "queries"), (8, 5, torch.float32, "keys"),
        (8, 7, torch.bfloat16, "queries"), (8, 6, torch.bfloat16, "keys"), (32, 8, torch.float32, "keys"),
    ],
)  # fmt: skip
def test_what_rotates_is_what_the_closed_form_says(heads, groups, transit, rotates):
    """Per token and D, b bytes a number, g a gradient: G (2 b + 2 g) against H (2 b + g) + 8 H / D."""
    width = 128
    lo, hi = mask.intervals(SIZE, SIZE, causal=False)
    plan = Plan(LAYOUTS["contiguous"].segments(SIZE, 4, 1, hi - lo), 1, lo, hi)
    q, k = (torch.empty(1, 24, count, width, dtype=torch.bfloat16, device="meta") for count in (heads, groups))
    sizes = routes.sizes_of(q, k, transit)
    blocks = 2 * 2 * width * groups, 2 * transit.itemsize * width * groups
    rows = 2 * 2 * width * heads + 2 * 4 * heads, transit.itemsize * width * heads
    assert sizes == (*blocks, *rows)
    assert plan.backward(sizes).what == rotates == ("keys" if sum(blocks) <= sum(rows) else "queries")
    for what in routes.TRAVELLERS:
        assert plan.backward(sizes, what).what == what


def test_a_double_ring_asks_for_the_next_node_a_whole_round_ahead():
    lo, hi = mask.intervals(SIZE, SIZE, causal=False)
    plan = Plan(LAYOUTS["contiguous"].segments(SIZE, 8, 1, hi - lo), 5, lo, hi, arrangement="double", inner=4)
    route = plan.route("keys", down=False)
    assert route.hops == tuple(range(8))
    slow = [(i, trip) for i, visit in enumerate(route.visits) for trip in visit.trips if trip.slow]
    assert slow == [] and [(trip.visit, trip.slow) for trip in route.trips] == [(4, True), (1, False)]
    assert [message.peer for trip in route.trips for message in (*trip.sends, *trip.receives)] == [1, 1, 6, 4]
    back = [(i, trip.visit) for i, visit in enumerate(route.visits) for trip in visit.returns if trip.slow]
    assert back == [(3, 7), (7, HOME)]


def test_arrangements_are_a_table_of_their_names():
    assert list(ARRANGEMENTS) == [rule.__name__ for rule in ARRANGEMENTS.values()] == ["ring", "double", "gather"]


@pytest.mark.parametrize(("name_of_mask", "hops"), [("past", (2, 3)), ("nothing", ()), ("only_padding", ())])
def test_a_hop_list_may_lack_0_and_may_be_empty(name_of_mask, hops):
    lo, hi, segments, *_ = world(name_of_mask, "contiguous", 4)
    assert Plan(segments, 3, lo, hi).forward.hops == hops


def parts_of(seen: np.ndarray) -> list[set[int]]:
    """The positions that see each other, over any number of others, by looking at each pair."""
    part = np.arange(len(seen))
    while True:
        least = np.where(seen | seen.T | np.eye(len(seen), dtype=bool), part, len(seen)).min(1)
        if (least == part).all():
            return [set(np.flatnonzero(part == each).tolist()) for each in np.unique(part)]
        part = least


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_what_is_undivided_sees_nothing_of_other_ranks_and_is_seen_by_none(name, layout):
    lo, hi, segments, held, seen = world(name, layout, 4)
    runs = needs.undivided(lo, hi, segments)
    assert (runs[1:, 0] > runs[:-1, 1]).all()
    found = {int(row) for begin, end in runs for row in range(begin, end)}
    whole = [part for part in parts_of(seen) if any(part <= set(rows.tolist()) for rows in held)]
    assert found <= set().union(*whole)
    if name.startswith("documents"):
        assert found == set().union(*whole), "every document of one rank"


@pytest.mark.parametrize("what", routes.TRAVELLERS)
@pytest.mark.parametrize("name", ["documents", "documents_full", "chunked", "random", "random_documents", "padding"])
def test_two_visits_of_a_gather_share_the_own_rows(name, what):
    """Each pair is seen by one of them, and no tile has rows of both; what is undivided is in no message."""
    twice = 0
    for layout, size in itertools.product(LAYOUTS, (2, 4)):
        lo, hi, segments, held, seen = world(name, layout, size)
        for rank in range(size):
            route = Plan(segments, rank, lo, hi, arrangement="gather").route(what, down=False)
            side = seen[held[rank]] if what == "keys" else seen[:, held[rank]]
            assert sum(visit.view.pairs() for visit in route.visits if visit.view) == side.sum()
            if len(route.visits) < 2:
                continue
            twice += 1
            own, joined = route.visits
            assert own.view.shares_queries and own.view.shares_keys
            shared = set(positions_of(route.home, held[rank]))
            apart = set(held[rank].tolist()) - shared
            assert apart and not {int(row) for row in held[rank][own.view.lo < own.view.hi]} - apart
            if own.view:
                assert not of_tiles(own.view, "q", held[rank]) & shared
                assert not of_tiles(own.view, "k", held[rank]) & shared
            if joined.view:
                assert not of_tiles(joined.view, "q" if what == "keys" else "k", held[rank]) & apart
            if joined.view and what == "keys":
                assert not {int(row) for row in held[rank][joined.view.lo < joined.view.hi]} & apart
                assert joined.view.shares_queries and not joined.view.shares_keys
            elif joined.view:
                assert joined.view.shares_keys and not joined.view.shares_queries
                assert not {int(key) for key in held[rank][joined.view.keys_seen()]} & apart
    assert twice


def of_tiles(view: mask.View, side: str, held: np.ndarray) -> set[int]:
    """The own positions in tiles with work, which a kernel writes."""
    found: set[int] = set()
    for aligned in (False, True):
        tables = view.tiles(24, 8, aligned=aligned)._asdict()
        ranges = tables[f"{side}_ranges"]
        tiles = tables[f"{side}_tiles"][ranges[:, 0] < ranges[:, 3]]
        found |= {int(row) for start, _, count in tiles for row in held[start : start + count]}
    return found


def positions_of(rows: needs.Rows, held: np.ndarray) -> list[int]:
    return [int(held[row]) for first, count in rows.runs for row in range(first, first + count)]


def test_runs_of_two_blocks_beside_each_other():
    rows = needs.Rows(np.array([[0, 4], [10, 3]]), 20), needs.Rows(np.array([[5, 2], [8, 5]]), 30)
    assert rows[0].beside(rows[1]) == [
        (slice(0, 2), slice(5, 7)), (slice(2, 4), slice(8, 10)), (slice(10, 13), slice(10, 13)),
    ]  # fmt: skip
    many = needs.Rows(np.stack((np.arange(0, 60, 3), np.ones(20, np.int64)), 1), 60)
    assert many.beside(needs.Rows(np.array([[0, 20]]), 20)) == []
