"""The sdpa kernel: its cut of every mask into full rectangles and causal squares, and what torch computes of them."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import masks
import numpy as np
import oracle
import played
import pytest
import torch
from conftest import TOLERANCE, error
from oracle import NAMES, check, want

import ringflash
from ringflash import mask
from ringflash.kernels import pieces, sdpa

DOCUMENTS = [0, 1, 17, 17, 60, 61, 88]
MASKS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 10},
    "window of one": {"window": 1},
    "window both ways": {"window": 7, "causal": False},
    "documents": {"cu_seqlens": [*DOCUMENTS, 96]},
    "documents, padding, window": {"cu_seqlens": DOCUMENTS, "window": 9},
    "whole documents": {"cu_seqlens": DOCUMENTS, "causal": False},
    "prefix": {"intervals": "prefix"},
    "chunks": {"intervals": "chunks"},
    "any": {"intervals": "any"},
    "any, causal": {"intervals": "any", "causal": True},
}
got = functools.partial(oracle.got, kernel="sdpa")


def intervals(name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(length, dtype=torch.int32)
    if name == "prefix":
        return torch.zeros_like(row), (row + 1).clamp_min(length // 3)
    if name == "chunks":
        return row // 20 * 20, row + 1
    drawn = np.random.default_rng(5).integers(0, length + 1, (2, length)).astype(np.int32)
    return torch.from_numpy(np.sort(drawn[0])), torch.from_numpy(np.sort(drawn[1]))


def masks_of(name: str, length: int = 96) -> dict:
    masks = dict(MASKS[name])
    if "intervals" in masks:
        masks["intervals"] = intervals(masks["intervals"], length)
    return masks


def inputs(
    queries: int = 96, keys: int = 96, heads: int = 6, groups: int = 2, *, width: int = 32, batch: int = 1,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v, dout, dlse."""
    generator = torch.Generator().manual_seed(heads * width + queries)
    q, k, v, dout = (
        torch.randn(batch, length, count, width, generator=generator).to(device, dtype)
        for length, count in ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    )
    return q, k, v, dout, torch.randn(batch, heads, queries, generator=generator).to(device)


def paint(view: mask.View) -> np.ndarray:
    """int [queries, keys]: how often the pieces compute each pair."""
    counts = np.zeros((len(view.lo), view.k_segments[:, 1].sum()), int)
    for rows, keys, causal, mirrored in pieces.cut(view):
        height, width = rows.stop - rows.start, keys.stop - keys.start
        assert height > 0 and width > 0, "an empty piece"
        assert not causal or height == width, "a causal piece must be square"
        assert causal or not mirrored
        block = np.tri(height, width, dtype=int) if causal else np.ones((height, width), int)
        counts[rows, keys] += block[::-1, ::-1] if mirrored else block
    return counts


def seen(view: mask.View) -> np.ndarray:
    key = mask.positions(view.k_segments)
    return ((key >= view.lo[:, None]) & (key < view.hi[:, None])).astype(int)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_hold_every_visible_pair_once(seed):
    rng = np.random.default_rng(seed)

    def segments() -> np.ndarray:
        ends = np.sort(rng.choice(np.arange(1, 60), 8, replace=False))
        return np.stack((ends[::2], np.diff(ends)[::2]), 1)

    q_segments, k_segments = segments(), segments()
    rows = q_segments[:, 1].sum()
    # steps of 0, 1 and more, each in runs, so that all kinds of run meet each other
    steps = np.repeat(rng.choice([0, 1, 1, 3], (2, rows)), rng.integers(1, 6), axis=1)[:, :rows]
    lo, hi = np.minimum(np.cumsum(steps, 1) + rng.integers(0, [[8], [30]]), 60).astype(np.int32)
    view = mask.View(lo, hi, q_segments, k_segments)
    assert np.array_equal(paint(view), seen(view))


@pytest.mark.parametrize("name", MASKS)
def test_pieces_of_every_mask_hold_every_visible_pair_once(name):
    q, k, *_ = inputs()
    given = {"causal": None, "window": None, "cu_seqlens": None, "intervals": None} | masks_of(name)
    lo, hi = ringflash.arguments.mask_of(q, k, None, **given).intervals(96, 96)
    for rule in ringflash.LAYOUTS.values():
        segments = rule.segments(96, 4, 1, (hi.astype(np.int64) - lo).clip(0))
        for rank in range(4):
            for view in filter(None, masks.plan(segments, rank, lo, hi).views):
                assert np.array_equal(paint(view), seen(view))


@pytest.mark.parametrize(
    "layout, size, length, arguments, num_pieces",
    [
        ("contiguous", 1, 64, {"causal": False}, [1]),
        ("contiguous", 1, 64, {"causal": True}, [1]),
        ("contiguous", 1, 64, {"causal": True, "cu_seqlens": np.array([0, 20, 20, 50], np.int32)}, [2]),
        # a square up to the window, then bands of 16 rows: a mirrored square and a square each
        ("contiguous", 1, 64, {"causal": True, "window": 16}, [1 + 2 * 3]),
        # segments need no cut of their own: one square at hop 0, and at hop 1 the later half sees all or one stripe
        ("zigzag", 2, 64, {"causal": True}, [1, 1]),
        ("striped", 2, 512, {"causal": True}, [1, 1]),
    ],
)
def test_common_masks_are_few_pieces(layout, size, length, arguments, num_pieces):
    lo, hi = mask.intervals(length, length, **arguments)
    segments = ringflash.LAYOUTS[layout].segments(length, size, 1, hi - lo)
    views = masks.plan(segments, 0, lo, hi).views
    assert [len(list(pieces.cut(view))) for view in views] == num_pieces


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_equals_the_reference(name):
    tensors, masks = inputs(), masks_of(name)
    check(got(*tensors, **masks), want(*tensors, **masks))


@pytest.mark.parametrize("layout", ringflash.LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_every_ring_equals_the_reference(name, layout):
    """Of 3 ranks: a first, a middle and a last hop."""
    tensors, masks = inputs(), masks_of(name)
    results = played.attention(*tensors[:4], dlse=tensors[4], kernel="sdpa", layout=layout, size=3, **masks)
    check(results, want(*tensors, **masks))


@pytest.mark.parametrize("width", [16, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (8, 2)])
def test_every_head_count_and_dimension(heads, groups, width):
    tensors = inputs(24, 24, heads, groups, width=width, batch=2)
    check(got(*tensors, window=9), want(*tensors, window=9))


@pytest.mark.parametrize("queries, keys", [(1, 0), (5, 2), (2, 5), (1, 1), (13, 40), (40, 13), (0, 7)])
def test_R08_unequal_lengths_align_to_the_end(queries, keys):
    tensors = inputs(queries, keys, batch=2)
    check(got(*tensors), want(*tensors))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
def test_any_finite_scale(scale):
    tensors = inputs()
    check(got(*tensors, scale=scale), want(*tensors, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4])
def test_half_types_are_computed_in_fp32(dtype, size):
    tensors = inputs(dtype=dtype)
    results = played.attention(*tensors[:4], dlse=tensors[4], kernel="sdpa", layout="zigzag", size=size, window=30)
    wanted = want(*tensors, window=30)
    check(results, wanted, dtype)
    assert error(results["lse"], wanted["lse"].detach()) <= TOLERANCE[torch.float32]
    assert results["out"].dtype == results["dq"].dtype == dtype


def test_R07_strides_change_nothing():
    q, k, v, dout, dlse = inputs()
    packed = torch.cat((q, k, v), 2)
    strided = (*packed.split((6, 2, 2), 2), dout.transpose(1, 2).contiguous().transpose(1, 2), dlse)
    plain, views = got(q, k, v, dout, dlse, window=30), got(*strided, window=30)
    assert all(torch.equal(plain[name], views[name]) for name in NAMES)
    ones = torch.ones(())
    spread, dense = (got(q, k, v, one, dlse) for one in (ones.expand_as(dout), torch.ones_like(dout)))
    assert all(torch.equal(spread[name], dense[name]) for name in NAMES)


def test_gradients_are_the_same_in_every_call():
    first, *others = (got(*inputs(), window=30, deterministic=True) for _ in range(3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in NAMES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_R15_forward_is_the_same_without_gradients(mode):
    tensors = inputs()
    training = got(*tensors)
    with mode():
        out, lse = ringflash.attention(*tensors[:3], return_lse=True, kernel="sdpa")
    assert torch.equal(out, training["out"]) and torch.equal(lse, training["lse"])


def test_R17_rows_that_see_nothing_leave_gradients_finite():
    tensors = inputs(130, 130)
    masks = {"cu_seqlens": [0, 60, 125]}
    results = got(*tensors, **masks)
    check(results, want(*tensors, **masks))
    assert not results["dq"][:, 125:].any() and results["lse"][..., 125:].eq(-torch.inf).all()


def test_R21_lse_is_the_natural_logarithm():
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 4160, 1, 16)
    v = torch.zeros(1, 4160, 1, 16)
    v[:, :4096] = 1.0
    out, lse = ringflash.attention(q, k, v, return_lse=True, kernel="sdpa")
    assert out.sub(4096 / 4160).abs().max() < 1e-6
    assert abs(float(lse) - np.log(4160)) < 1e-5


def test_scores_far_from_zero_do_not_overflow():
    q, k, v, dout, dlse = inputs()
    tensors = (40 * q, 40 * k, v, dout, dlse)
    results = got(*tensors, window=30)
    check(results, want(*tensors, window=30), torch.float16)  # rounding of scores in the thousands


@pytest.mark.parametrize(
    "device, deterministic, num_hops, words",
    [
        ("meta", False, 1, "q is on meta"),
        ("cuda", False, 4, "this ring has 4 ranks"),
        ("cuda", True, 1, "deterministic=True needs"),
    ],
)
def test_what_it_cannot_do_is_refused(device, deterministic, num_hops, words):
    q = SimpleNamespace(device=torch.device(device))
    assert words in sdpa.refuses(q, q, deterministic, num_hops)


def test_on_cpu_nothing_is_refused():
    q = torch.zeros(1, 1, 1, 16)
    assert sdpa.refuses(q, q, True, 8) is None
    gpu = SimpleNamespace(device=torch.device("cuda"))
    assert sdpa.refuses(gpu, gpu, False, 1) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [16, 96, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_one_hop_on_a_gpu_equals_the_reference(name, width, dtype):
    tensors, masks = inputs(width=width, dtype=dtype, device="cuda"), masks_of(name)
    check(got(*tensors, **masks), want(*tensors, **masks), dtype)
