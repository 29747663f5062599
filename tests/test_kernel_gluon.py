"""The host side of the Gluon kernels, without a GPU: what runs, what TMA walks. The rest is tests/test_gpu.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from ringflash.kernels import eager, gluon
from ringflash.kernels.gluon import jobs, launch, turns
from ringflash.mask import View, intervals

WHOLE = np.array([[0, 200]])


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the launches that a backward makes, in order."""
    names: list[str] = []
    for name in ("key_gradients", "query_gradient", "all_gradients"):
        monkeypatch.setattr(launch, name, lambda *call, name=name, **how: names.append(name))
    return names


def run_backward(width: int, *, deterministic: bool) -> None:
    q = torch.zeros(1, 200, 2, width, dtype=torch.bfloat16)
    rows = torch.zeros(1, 2, 200)
    view = View(*intervals(200, 200, causal=True), WHOLE, WHOLE)
    gluon.backward(q, q, q, q, rows, rows, view, q, q, q, scale=1.0, deterministic=deterministic)


@pytest.mark.parametrize("width", [64, 96, 128])
def test_gradients_that_must_repeat_are_summed_in_one_order(launched, width):
    run_backward(width, deterministic=True)
    assert launched == ["key_gradients", "query_gradient"]


@pytest.mark.parametrize("width", [64, 96, 128])
def test_other_gradients_come_from_one_kernel(launched, width):
    run_backward(width, deterministic=False)
    assert launched == ["all_gradients"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("width", [192, 256])
def test_the_gradients_of_wide_heads_are_always_summed_in_one_order(launched, width, deterministic):
    run_backward(width, deterministic=deterministic)
    assert launched == ["key_gradients", "query_gradient"]


def test_tensors_that_tma_can_walk_are_not_copied():
    whole = torch.randn(2, 40, 6, 64).bfloat16()
    for x in (whole, whole[:, 3:], whole[:, :, 2:4], whole.transpose(1, 2), whole[:1, :1], whole[:, ::2]):
        made = launch.walkable(x)
        assert made.base is x and made.shape == [x.shape[0], x.shape[2], x.shape[1], 64] and made.strides[3] == 1


def test_tensors_that_tma_cannot_walk_are_copied():
    whole = torch.randn(2, 40, 6, 68).bfloat16()
    plain = whole[..., :64].contiguous()
    for x in (whole[..., :64], whole[..., 1:65], plain[:, :1].expand(2, 40, 6, 64), plain[:1].expand(2, 40, 6, 64)):
        made = launch.walkable(x)
        assert made.base is not x and torch.equal(made.base, x) and made.base.is_contiguous()


def test_bounds_are_laid_out_tile_by_tile():
    lo, hi = intervals(200, 200, causal=True, window=50)
    view = View(lo, hi, np.array([[0, 70], [70, 130]]), WHOLE)
    bounds = launch.Work.of("fused", torch.empty(1, 200, 2, 128), view).bounds
    starts = [0, 64, 70, 134, 198]
    assert bounds.shape == (5, 2, 64)
    for tile, start, end in zip(bounds, starts, [64, 70, 134, 198, 200], strict=True):
        assert tile[0, : end - start].tolist() == lo[start:end].tolist() and not tile[0, end - start :].any()
        assert tile[1, : end - start].tolist() == hi[start:end].tolist() and not tile[1, end - start :].any()


def test_steps_without_a_mask_end_at_the_first_short_key_tile():
    lo, hi = intervals(1200, 1200, causal=True)
    view = View(lo, hi, np.array([[0, 1200]]), np.array([[0, 300], [300, 900]]))  # key tiles of 128 128 44 128 ... 4
    tiles = view.tiles(128, 128)
    made = jobs.jobs_by_query(view, tiles, 128)
    assert made.dtype == np.int32 and made.shape == (10, 8) and (np.diff(made[:, 6] - made[:, 3]) <= 0).all()
    for row, _, _, v0, f0, f1, v1, _ in made:
        assert v0 <= f0 <= f1 <= v1 and f1 == min(2, (row + 1) // 128) and (tiles.k_tiles[f0:f1, 2] == 128).all()


def test_a_short_key_tile_masks_all_its_steps():
    lo, hi = intervals(1200, 1200, causal=True)
    view = View(lo, hi, np.array([[0, 1200]]), np.array([[0, 300], [300, 900]]))
    tiles = view.tiles(64, 128)
    made = jobs.jobs_by_key(tiles, 128)
    for _, _, count, v0, f0, f1, v1, shift in made:
        assert v0 <= f0 <= f1 <= v1 and (f0 == f1 == v1 or count == 128) and 0 <= shift <= max(f1 - f0 - 1, 0)


def of_documents(length: int, mean: int) -> np.ndarray:
    """Jobs of the forward, of packed documents of lognormal lengths."""
    ends = np.cumsum(np.random.default_rng(0).lognormal(np.log(mean), 1.0, length).astype(np.int64) + 1)
    borders = np.array([0, *ends[ends < length], length], np.int32)
    whole = np.array([[0, length]])
    view = View(*intervals(length, length, causal=True, cu_seqlens=borders), whole, whole)
    return jobs.jobs_by_query(view, view.tiles(128, 128), 128)


@pytest.mark.parametrize(("batch", "heads", "section"), [(1, 16, 2), (2, 3, 3), (1, 1, 1), (1, 4, 4)])
@pytest.mark.parametrize("num_programs", [132, 7])
def test_every_job_of_every_head_is_done_once(batch, heads, section, num_programs):
    made = of_documents(8000, 1200)
    lines = turns.turns(made, batch, heads, section, num_programs)
    done = sorted(map(tuple, lines))
    want = [(*job, b, h) for b in range(batch) for h in range(heads) for job in made.tolist()]
    assert done == sorted(want) and lines.dtype == np.int32 and lines.flags.c_contiguous


@pytest.mark.parametrize("heads", [4, 16])
def test_programs_that_stay_end_together(heads):
    """Head by head alone, the programs with the long tiles of the last head would end late."""
    lines = turns.turns(of_documents(65536, 1200), 1, heads, 2, 132)
    costs = lines[:, 6] - lines[:, 3] + turns.JOB_STEPS
    programs = np.bincount(np.arange(len(costs)) % 132, costs)
    assert programs.max() <= 1.02 * programs.mean()


def test_programs_that_run_side_by_side_read_the_same_keys():
    """In one order of length over all heads, hardly two programs at a time would share a document."""
    lines = turns.turns(of_documents(65536, 1200), 1, 16, 2, 132)
    heads = lines[: len(lines) * 3 // 4 // 132 * 132, 9].reshape(-1, 132)
    assert (heads.max(1) - heads.min(1)).max() <= 1


@pytest.mark.parametrize(
    ("tokens", "heads", "head_bytes", "at_most"),
    [(8192, 8, 2**26, 1.02), (8192, 4, 2**26, 1.02), (8192, 16, 2**23, 1.06), (4096, 8, 2**25, 1.02)],
)
def test_few_long_jobs_of_heads_that_share_much_still_end_together(tokens, heads, head_bytes, at_most):
    """Backward of grouped heads: one head after the other would leave a third of the card idle."""
    lengths = np.sort(np.arange(tokens // 128) * 2 + 2)[::-1]
    ideal = heads * (lengths + jobs.JOB_STEPS).sum() / jobs.NUM_SMS
    chosen = jobs.section_of(lengths, heads, head_bytes)
    assert jobs.makespan(lengths, heads, chosen) <= at_most * ideal
    assert jobs.makespan(lengths, heads, 1) >= 1.09 * ideal


def test_long_grids_keep_what_heads_share_in_the_cache():
    lengths = np.sort(np.arange(512) * 2 + 2)[::-1]
    assert jobs.section_of(lengths, 16, 2**26) == 1
    assert jobs.section_of(np.full(64, 64), 16, 2**20) == 1  # jobs that are alike end together anyway


@pytest.mark.parametrize("kernel", ["forward", "fused"])
@pytest.mark.parametrize(
    ("width", "masks", "heads", "stays"),
    [
        (128, {"window": 1024}, 16, True),
        (64, {"window": 1024}, 16, True),
        (256, {"window": 1024}, 16, False),  # no room for more queries
        (128, {}, 16, False),  # long enough
        (128, {"window": 1024}, 2, False),  # too few
    ],
)
def test_programs_stay_where_jobs_are_short_and_many(kernel, width, masks, heads, stays):
    whole = np.array([[0, 8192]])
    view = View(*intervals(8192, 8192, causal=True, **masks), whole, whole)
    work = launch.stays(kernel, torch.empty(1, 8192, heads, width, dtype=torch.bfloat16), view, heads)
    assert (work is not None) == stays


@pytest.mark.parametrize("block_q", [192, 128])
@pytest.mark.parametrize("masks", [{"causal": True}, {"causal": False, "window": 300}, {"cu_seqlens": True}], ids=str)
def test_consumers_pass_over_steps_that_show_them_nothing_and_no_others(block_q, masks):
    """Steps are looked at one by one; those that no row of 64 sees are passed over where they come first."""
    length = 2400
    if "cu_seqlens" in masks:  # with padding, and a document shorter than a tile
        masks = {"causal": True, "cu_seqlens": np.array([0, 900, 950, 950, 2300], np.int32)}
    lo, hi = intervals(length, length, **masks)
    view = View(lo, hi, np.array([[0, 1000], [1000, 1400]]), np.array([[0, 1700], [1700, 700]]))
    tiles = view.tiles(block_q, 128, aligned=True)
    passed = 0
    for row, _, packed, v0, f0, f1, v1, _ in jobs.jobs_by_query(view, tiles, 128, block_q // 64):
        right = [
            *range(v1 - 1, f1 - 1, -1),
            *range(v0, f0),
            *range(f0, f1),
        ]  # in the order of steps, see `walk.tile_at`
        count = packed & (2**jobs.COUNT_BITS - 1)
        for c in range(block_q // 64):
            rows = slice(row + 64 * c, row + min(64 * c + 64, count))
            seen = [
                bool(((lo[rows] < start + size) & (hi[rows] > start) & (lo[rows] < hi[rows])).any())
                for _, start, size in tiles.k_tiles[right]
            ]
            steps = packed >> (jobs.COUNT_BITS + jobs.PASSED_BITS * c) & (2**jobs.PASSED_BITS - 1)
            assert not any(seen[:steps])
            assert steps == len(seen) or seen[steps] or steps >= v1 - f1 or not any(seen)
            passed += steps
    assert passed > 0 or block_q == 128  # where the diagonal goes from corner to corner of its tiles


def test_more_steps_than_the_bits_hold_are_not_all_passed_over():
    whole = np.array([[0, 40000]])
    view = View(*intervals(40000, 40000, causal=True), whole, whole)
    last = jobs.jobs_by_query(view, view.tiles(192, 128), 128, 3)[0]
    assert last[2] == 64 + (127 << 16) + (127 << 23) and last[6] - last[3] == 313


def by_key_tile(kernel, dout, q, k, v, lse, delta, view, grads, dq, *, scale, adds):
    """What the kernel does, by the plain one."""
    assert kernel == "fused" and dq.dtype == torch.float32
    eager.backward(dout, q, k, v, lse, delta, view, dq, *grads, scale=scale, deterministic=False, adds=adds)


@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 4, 2), (3, 4, 2), (2, 6, 6), (2, 3, 1), (4, 5, 5)])
@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 10, 100])
@pytest.mark.parametrize("adds", [False, True])
def test_a_long_dq_is_summed_some_heads_at_a_time(monkeypatch, batch, heads, groups, at_once, adds):
    """All are written once, whatever stood there, and no more than SUM_BYTES lie beside it, or one head."""
    head_bytes = 4 * 90 * (heads // groups) * 64
    monkeypatch.setattr(launch, "SUM_BYTES", at_once * head_bytes)
    monkeypatch.setattr(launch, "_by_key_tile", by_key_tile)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q, dout = (draw(batch, 90, heads, 64).bfloat16() for _ in "12")
    k, v = (draw(batch, 90, groups, 64).bfloat16() for _ in "12")
    lse, delta = (draw(batch, heads, 90) for _ in "12")
    whole = np.array([[0, 90]])
    view = View(*intervals(90, 90, causal=True), whole, whole)
    dk, dv = (draw(batch, 90, groups, 64) for _ in "12")
    want = torch.zeros(q.shape), dk.clone(), dv.clone()
    eager.backward(dout, q, k, v, lse, delta, view, *want, scale=0.1, deterministic=False, adds=adds)
    dq = torch.full_like(q, torch.nan)
    launch.all_gradients(dout, q, k, v, lse, delta, view, dq, dk, dv, scale=0.1, adds=adds)
    assert torch.equal(dq, want[0].to(dq.dtype)) and torch.equal(dk, want[1]) and torch.equal(dv, want[2])
    made = list(launch.parts(batch, groups, head_bytes))
    sizes = [(e.stop - e.start) * (g.stop - g.start) for e, g in made]
    assert sum(sizes) == batch * groups and max(sizes) <= at_once
    assert all(e.stop - e.start == 1 or g == slice(0, groups) for e, g in made)
