"""ringflash/mask.py: intervals against masks written pair by pair; tiles, ranges and hops against brute force."""

import numpy as np
import pytest
import torch
from masks import MASKS, seen

from ringflash import arguments, mask


def intervals_of(size, num_keys=None, **given):
    """The intervals that `attention` would use for these arguments."""
    num_keys = size if num_keys is None else num_keys
    checked = arguments.Mask(
        arguments.causal_of(given.get("causal"), given.get("intervals")),
        arguments.window_of(given.get("window")),
        arguments.cu_seqlens_of(given.get("cu_seqlens"), size),
        arguments.bounds_of(given.get("intervals"), size, num_keys),
    )
    return checked.intervals(size, num_keys)


def dense(lo, hi, keys):
    return (keys >= lo[:, None]) & (keys < hi[:, None])


@pytest.mark.parametrize("size", [24, 37])
@pytest.mark.parametrize("name", MASKS)
def test_intervals_equal_the_mask_written_pair_by_pair(name, size):
    given = MASKS[name](size)
    lo, hi = intervals_of(size, **given)
    assert lo.dtype == hi.dtype == np.int32
    assert np.array_equal(dense(lo, hi, np.arange(size)), seen(size, size, **given))


@pytest.mark.parametrize("size", [24, 37])
@pytest.mark.parametrize("name", MASKS)
def test_neither_bound_ever_falls(name, size):
    lo, hi = intervals_of(size, **MASKS[name](size))
    assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()
    assert lo.min() >= 0 and hi.max() <= size


@pytest.mark.parametrize("given", [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 3}], ids=str)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 5), (5, 2), (1, 0), (0, 3), (7, 7)])
def test_R39_unequal_lengths_are_aligned_at_the_end(num_queries, num_keys, given):
    lo, hi = intervals_of(num_queries, num_keys, **given)
    assert np.array_equal(dense(lo, hi, np.arange(num_keys)), seen(num_queries, num_keys, **given))


def test_R39_row_0_of_2_sees_4_of_5_keys():
    lo, hi = intervals_of(2, 5)
    assert (hi - lo).tolist() == [4, 5]


def test_padding_has_both_bounds_at_the_last_border():
    lo, hi = intervals_of(8, cu_seqlens=[0, 3, 5])
    assert lo[5:].tolist() == hi[5:].tolist() == [5, 5, 5]


def random_case(seed):
    """Random intervals that never fall, and random ascending segments of queries and of keys in one sequence."""
    random = np.random.default_rng(seed)
    size = int(random.integers(20, 90))
    lo, hi = (np.sort(random.integers(0, size + 1, size)) for _ in range(2))
    if seed % 3 == 0:  # narrow, so that whole and partial tiles both exist
        hi = np.minimum(lo + int(random.integers(1, 30)), size)
    pieces = []
    for _ in range(2):
        cuts = np.unique(np.concatenate(([0, size], random.integers(0, size, 8))))
        parts = np.stack((cuts[:-1], np.diff(cuts)), 1)
        kept = parts[random.random(len(parts)) < 0.6]
        pieces.append(kept if len(kept) else parts[:1])
    blocks = random.integers(1, 20, 2).tolist()
    return lo.astype(np.int32), hi.astype(np.int32), *pieces, *blocks


@pytest.mark.parametrize("seed", range(60))
def test_tiles_cover_their_segments_and_cross_no_border(seed):
    _, _, segments, _, block, _ = random_case(seed)
    tiles = mask.cut(segments, block)
    assert tiles.dtype == np.int32 and tiles[:, 2].max() <= block and tiles[:, 2].min() > 0
    local = np.concatenate([np.arange(start, start + count) for start, _, count in tiles])
    assert np.array_equal(local, np.arange(segments[:, 1].sum()))
    held = np.concatenate([np.arange(start, start + count) for _, start, count in tiles])
    assert np.array_equal(held, mask.positions(segments))
    owner = np.repeat(np.arange(len(segments)), segments[:, 1])
    assert all(len(set(owner[start : start + count])) == 1 for start, _, count in tiles)


def hulls(lo, hi, keys, row_tiles, key_tiles):
    """(visible, whole): bool [row tiles, key tiles]: do the rows' outer bounds reach it; do all rows see all of it?"""
    visible = np.zeros((len(row_tiles), len(key_tiles)), bool)
    whole = visible.copy()
    for i, (first, _, count) in enumerate(row_tiles):
        mine = slice(first, first + count)
        for j, (k_first, _, k_count) in enumerate(key_tiles):
            theirs = keys[k_first : k_first + k_count]
            visible[i, j] = ((theirs >= lo[mine].min()) & (theirs < hi[mine].max())).any()
            whole[i, j] = dense(lo[mine], hi[mine], theirs).all()
    return visible, whole


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_ranges_and_their_transpose_equal_brute_force(monkeypatch, seed, aligned):
    monkeypatch.setattr(mask, "LONG_TILES", seed % 2)  # 0: cut at every jump of lo
    lo, hi, q_segments, k_segments, block_q, block_k = random_case(seed)
    rows, keys = mask.positions(q_segments), mask.positions(k_segments)
    view = mask.View(lo[rows], hi[rows], q_segments, k_segments)
    tiles = view.tiles(block_q, block_k, aligned=aligned)
    for table, length in ((tiles.q_tiles, len(rows)), (tiles.k_tiles, len(keys))):
        held = np.concatenate([np.arange(start, start + count) for start, _, count in table])
        assert np.array_equal(held, np.arange(length))
    visible, whole = hulls(lo[rows], hi[rows], keys, tiles.q_tiles, tiles.k_tiles)
    assert view.pairs() == dense(lo[rows], hi[rows], keys).sum()
    seen_here = dense(lo[rows], hi[rows], keys)
    for ranges, table, want in ((tiles.q_ranges, visible, whole), (tiles.k_ranges, visible.T, whole.T)):
        for (v0, w0, w1, v1), sees_any, sees_all in zip(ranges, table, want, strict=True):
            assert 0 <= v0 <= w0 <= w1 <= v1 <= len(sees_any)
            reached = np.flatnonzero(sees_any)
            assert (v0, v1) == (reached[0], reached[-1] + 1) if len(reached) else v0 == v1
            assert np.flatnonzero(sees_all).tolist() == list(range(w0, w1))
    for i, (first, _, count) in enumerate(tiles.q_tiles):  # no pair that is seen lies outside of the ranges
        touched = np.zeros(len(keys), bool)
        for k_first, _, k_count in tiles.k_tiles[tiles.q_ranges[i, 0] : tiles.q_ranges[i, 3]]:
            touched[k_first : k_first + k_count] = True
        assert not seen_here[first : first + count, ~touched].any()


@pytest.mark.parametrize(("begin", "end", "cuts"), [(0, 900, {300, 325, 700}), (250, 800, {325, 700})])
def test_aligned_tiles_begin_where_long_documents_do(begin, end, cuts):
    """Documents of 300, 10, 15 and 375 tokens, then padding. What is short here shares tiles, what is long does not."""
    lo, hi = intervals_of(900, cu_seqlens=[0, 300, 310, 325, 700])
    mine, keys = np.array([[begin, end - begin]]), np.array([[100, 100], [290, 500]])
    view = mask.View(lo[begin:end], hi[begin:end], mine, keys)
    tiles = view.tiles(32, 32, aligned=True)
    starts, k_starts = set(tiles.q_tiles[:, 1].tolist()), set(tiles.k_tiles[:, 1].tolist())
    assert cuts <= starts and 310 not in starts and cuts <= k_starts and 310 not in k_starts
    plain = view.tiles(32, 32)
    assert 325 not in plain.q_tiles[:, 1] and len(plain.q_tiles) + 3 >= len(tiles.q_tiles)


@pytest.mark.parametrize("masks", [{}, {"causal": False}, {"window": 100}, {"window": 3, "causal": False}])
def test_masks_without_documents_have_nothing_to_align(masks):
    lo, hi = intervals_of(900, **masks)
    whole = np.array([[0, 900]])
    view = mask.View(lo, hi, whole, whole)
    assert all(np.array_equal(a, b) for a, b in zip(view.tiles(32, 64), view.tiles(32, 64, aligned=True), strict=True))


def test_a_key_tile_does_not_visit_the_padding_behind_it():
    lo, hi = intervals_of(64, cu_seqlens=[0, 20])
    whole = np.array([[0, 64]])
    tiles = mask.View(lo, hi, whole, whole).tiles(8, 8)  # the last border is inside key tile 2
    assert tiles.q_ranges[3:, 0].tolist() == tiles.q_ranges[3:, 3].tolist()
    assert tiles.k_ranges[:3, 3].tolist() == [3, 3, 3] and (tiles.k_ranges[3:, 0] == tiles.k_ranges[3:, 3]).all()


@pytest.mark.parametrize("seed", range(5))
def test_orders_hold_every_tile_longest_range_first(seed):
    lo, hi, q_segments, k_segments, block_q, block_k = random_case(seed)
    rows = mask.positions(q_segments)
    tiles = mask.View(lo[rows], hi[rows], q_segments, k_segments).tiles(block_q, block_k)
    for order, ranges in ((tiles.q_order, tiles.q_ranges), (tiles.k_order, tiles.k_ranges)):
        assert sorted(order) == list(range(len(ranges)))
        assert (np.diff((ranges[:, 3] - ranges[:, 0])[order]) <= 0).all()


def test_tiles_and_bounds_are_made_once_a_device():
    lo, hi, q_segments, k_segments, *_ = random_case(1)
    rows = mask.positions(q_segments)
    view = mask.View(lo[rows], hi[rows], q_segments, k_segments)
    cpu = torch.device("cpu")
    assert view.tiles(8, 8) is view.tiles(8, 8) and view.tiles(8, 8, cpu) is view.tiles(8, 8, cpu)
    assert view.bounds(cpu)[0] is view.bounds(cpu)[0]
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(view.tiles(8, 8), view.tiles(8, 8, cpu), strict=True))
