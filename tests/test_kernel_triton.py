"""The Triton kernels in Triton's interpreter, against the fp64 reference: whole rings played hop by hop, small tiles.

triton looks at TRITON_INTERPRET when it is imported, so all that computes runs in a process of its own. What only a GPU
can show is in test_gpu.py; what a compiler can show, in test_compile.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import masks
import numpy as np
import pytest
import torch
from conftest import TOLERANCE, error
from masks import MASKS
from oracle import NAMES, got, inputs, want

from ringflash import arguments, mask
from ringflash.kernels import State, triton
from ringflash.kernels.trimming import trimmed
from ringflash.kernels.triton.tiling import HEAD_DIMS, Tiling
from ringflash.layouts import LAYOUTS

SIZE = 96
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2 * TOLERANCE[torch.bfloat16]}  # cut, not rounded
TILES = {"forward": Tiling(32, 16, 4, 1), "keys": Tiling(16, 32, 4, 1), "queries": Tiling(32, 16, 4, 1)}


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    """run(function, *args, **kwargs) in the interpreting process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as worker:
        yield lambda function, *args, **kwargs: worker.submit(function, *args, **kwargs).result()


def one_rank(
    rank: int, segments: list, bounds: tuple, tensors: tuple, sums: tuple, *, scale: float, softcap: float
) -> tuple:
    """out and lse of one rank after its forward hops, dq after its backward hops; adds dk and dv to `sums`."""
    q, k, v, dout, dlse = tensors
    where = [torch.from_numpy(mask.positions(part)) for part in segments]
    plan = masks.plan(segments, rank, *bounds)
    rows = where[rank]
    q_local, dout_local = q[:, rows], dout[:, rows]
    acc, out = torch.full(q_local.shape, torch.nan), torch.full_like(q_local, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], len(rows)), torch.nan)
    hops = enumerate(zip(plan.hops, plan.views, strict=True))
    work = [(i, view, where[(rank - hop) % len(segments)]) for i, (hop, view) in hops if view is not None]
    for i, view, keys in work:
        first, last = i == work[0][0], i == work[-1][0]
        state = State(None if first and last else acc, out, lse)
        triton.forward(
            q_local, k[:, keys], v[:, keys], view, state, scale=scale, first=first, last=last, softcap=softcap
        )
    if not work:
        out.zero_(), lse.fill_(-torch.inf)
    delta = triton.delta(out, dout_local, dlse[..., rows])
    dq = torch.zeros(q_local.shape)
    for _, view, keys in work:
        dk, dv = torch.full((2, k.shape[0], len(keys), *k.shape[2:]), torch.nan)
        triton.backward(
            dout_local, q_local, k[:, keys], v[:, keys], lse, delta, view, dq, dk, dv,
            scale=scale, deterministic=True, softcap=softcap,
        )  # fmt: skip
        sums[0][:, keys] += dk
        sums[1][:, keys] += dv
    return out, lse.transpose(1, 2), dq


def ring(
    given: dict,
    segments: list,
    tiles: dict[str, Tiling] | None = None,
    *,
    scale: float = 0.2,
    softcap: float = 0.0,
    **shapes,
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of a ring with these segments, in the order of the sequence."""
    from ringflash.kernels.triton import launch

    if tiles is not None:
        launch.tiling = lambda kernel, width, element_size, card: tiles[kernel]
    tensors = inputs(sum(int(part[:, 1].sum()) for part in segments), **shapes)
    q, k = tensors[:2]
    given = {"causal": None, "window": None, "cu_seqlens": None, "intervals": None} | given
    bounds = arguments.mask_of(q, k, None, **given).intervals(q.shape[1], k.shape[1])
    sums = torch.zeros(k.shape), torch.zeros(k.shape)
    parts = [
        one_rank(rank, segments, bounds, tensors, sums, scale=scale, softcap=softcap) for rank in range(len(segments))
    ]
    order = torch.argsort(torch.cat([torch.from_numpy(mask.positions(part)) for part in segments]))
    out, lse, dq = (torch.cat(some, 1)[:, order] for some in zip(*parts, strict=True))
    return dict(zip(NAMES, (out, lse.transpose(1, 2), dq, *sums), strict=True))


def segments_of(*ranks: list[tuple[int, int]]) -> list[np.ndarray]:
    return [np.array(part) for part in ranks]


WHOLE = segments_of([(0, SIZE)])
RINGS = {
    "even": segments_of([(0, 32), (64, 32)], [(32, 32)]),
    "odd": segments_of([(0, 17), (50, 20)], [(17, 33), (70, 26)]),
    "crumbs": segments_of([(0, 3), (7, 1), (40, 5), (90, 6)], [(3, 4), (8, 32)], [(45, 45)]),
}


def check(results: dict, wanted: dict, dtype: torch.dtype = torch.float32, least: float = 0.0) -> None:
    """least: what the limit is at least, where plain fp32 does no better."""
    errors = {name: error(results[name], wanted[name]) for name in NAMES}
    assert all(value <= max(ROUNDING[dtype], least) for value in errors.values()), errors


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_over_irregular_segments(run, name):
    given, shapes = MASKS[name](SIZE), {"heads": 1, "groups": 1}
    check(run(ring, given, RINGS["odd"], TILES, **shapes), want(*inputs(SIZE, **shapes), scale=0.2, **given))


@pytest.mark.parametrize("name", ["full", "documents_window", "random"])
@pytest.mark.parametrize("segments", ["even", "crumbs"])
def test_every_kind_of_cut(run, segments, name):
    given, shapes = MASKS[name](SIZE), {"heads": 2, "groups": 1}
    check(run(ring, given, RINGS[segments], TILES, **shapes), want(*inputs(SIZE, **shapes), scale=0.2, **given))


def gathered(given: dict, tiles: dict[str, Tiling], **mesh) -> dict[str, torch.Tensor]:
    """A whole ring whose ranks have documents of their own beside the block that they gather."""
    import played

    from ringflash import gathering
    from ringflash.kernels.triton import launch

    launch.tiling = lambda kernel, width, element_size, card: tiles[kernel]
    gathering.SECTION_PAIRS = 1  # half of the heads at a time
    *tensors, dlse = inputs(SIZE, heads=2, groups=2)
    return played.attention(*tensors, dlse=dlse, kernel="triton", arrangement="gather", scale=0.2, **mesh, **given)


CUTS = [("documents", "zigzag"), ("padding", "contiguous"), ("chunked", "striped"), ("random", "zigzag")]


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize(("name", "layout"), CUTS)
def test_views_that_share_rows_leave_each_other_alone(run, name, layout, rotate):
    given = MASKS[name](SIZE)
    found = run(gathered, given, TILES, layout=layout, size=4, rotate=rotate)
    check(found, want(*inputs(SIZE, heads=2, groups=2), scale=0.2, **given))


@pytest.mark.parametrize(("layout", "size"), [*((name, 2) for name in LAYOUTS), ("zigzag", 4), ("contiguous", 3)])
def test_every_layout_carries_its_state_round_the_ring(run, layout, size):
    given, shapes = MASKS["documents"](SIZE), {"heads": 1, "groups": 1}
    segments = LAYOUTS[layout].segments(SIZE, size, 1, np.arange(SIZE))
    check(run(ring, given, segments, TILES, **shapes), want(*inputs(SIZE, **shapes), scale=0.2, **given))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(width, torch.float32) for width in HEAD_DIMS]
    + [(width, dtype) for width in (64, 96) for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_every_head_dimension_and_dtype(run, width, dtype):
    segments, shapes = segments_of([(0, 40)]), {"heads": 2, "groups": 1, "width": width, "dtype": dtype}
    check(run(ring, {}, segments, TILES, **shapes), want(*inputs(40, **shapes), scale=0.2), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [("causal", torch.bfloat16), ("window", torch.float16), ("window", torch.float32)], ids=str
)
def test_the_tiles_that_are_shipped(run, name, dtype):
    """130 rows: a full tile of 128 and a tail of 2, for the keys as for the queries."""
    segments, shapes = segments_of([(0, 130)]), {"heads": 2, "groups": 1, "width": 64, "dtype": dtype}
    given = MASKS[name](130)
    check(run(ring, given, segments, **shapes), want(*inputs(130, **shapes), scale=0.2, **given), dtype)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (3, 1), (8, 2), (8, 1)])
def test_grouped_heads_and_a_batch(run, heads, groups):
    segments, shapes = segments_of([(0, 40)]), {"heads": heads, "groups": groups, "batch": 2}
    check(run(ring, {}, segments, TILES, **shapes), want(*inputs(40, **shapes), scale=0.2))


@pytest.mark.parametrize("scale", [-0.7, 40.0, 0.0])
def test_any_finite_scale(run, scale):
    segments, shapes = segments_of([(0, 40)]), {"heads": 2, "groups": 1}
    results, wanted = run(ring, {}, segments, TILES, scale=scale, **shapes), want(*inputs(40, **shapes), scale=scale)
    for name in NAMES if scale else ("out", "lse", "dv"):
        assert error(results[name], wanted[name]) < (1e-5 if abs(scale) <= 3 else 1e-4), name
    if not scale:
        assert not results["dq"].any() and not results["dk"].any()


@pytest.mark.parametrize("softcap", [0.3, 30.0])
@pytest.mark.parametrize("scale", [0.5, -3.0])
def test_capped_scores(run, scale, softcap):
    given, shapes = MASKS["documents_window"](SIZE), {"heads": 2, "groups": 1, "width": 96}
    scores = {"scale": scale, "softcap": softcap}
    wanted = want(*inputs(SIZE, **shapes), **scores, **given)
    # tanh multiplies the rounding of a product by scale / softcap, 10 at most: twice what plain fp32 makes of it
    plain = got(*inputs(SIZE, **shapes), kernel="eager", **scores, **given)
    least = 2 * max(error(plain[name], wanted[name]) for name in NAMES)
    assert least <= 3e-5, "plain fp32 must stay a measure"
    check(run(ring, given, RINGS["odd"], TILES, **scores, **shapes), wanted, least=least)


def one_device(
    tensors: tuple, given: dict, *, scale: float = 0.2, dq_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """One hop that is all there is. The tensors stay as they stand in memory: no copy straightens their strides."""
    from ringflash.kernels.triton import launch

    launch.tiling = lambda kernel, *_: TILES[kernel]
    q, k, v, dout, dlse = tensors
    masks = {"causal": None, "window": None, "cu_seqlens": None, "intervals": None} | given
    lo, hi = arguments.mask_of(q, k, None, **masks).intervals(q.shape[1], k.shape[1])
    view = mask.View(lo, hi, np.array([[0, len(lo)]]), np.array([[0, k.shape[1]]]))
    out, lse = torch.full(q.shape, torch.nan), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    triton.forward(q, k, v, view, State(None, out, lse), scale=scale, first=True, last=True)
    delta = triton.delta(out, dout, dlse)
    dq = torch.full(q.shape, 0.0 if dq_dtype == torch.float32 else torch.nan, dtype=dq_dtype)
    dk, dv = torch.full(k.shape, torch.nan), torch.full(v.shape, torch.nan)
    triton.backward(dout, q, k, v, lse, delta, view, dq, dk, dv, scale=scale, deterministic=True)
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def moved(tensors: tuple, how: str) -> tuple:
    """The same values in another order of memory; the innermost stride stays 1."""
    if how == "transposed":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:4]) + tensors[4:]
    if how == "odd strides":  # no multiple of 16 bytes: pointers instead of descriptors
        return tuple(torch.cat((x, x[..., :1]), 3)[..., : x.shape[3]] for x in tensors[:4]) + tensors[4:]
    if how == "odd start":
        return tuple(torch.cat((x[..., :1], x), 3)[..., 1:] for x in tensors[:4]) + tensors[4:]
    q, k, v, dout, dlse = tensors
    packed = torch.cat((q, k, v, dout), 2)
    return *packed.split([q.shape[2], k.shape[2], v.shape[2], dout.shape[2]], 2), dlse.transpose(1, 2).contiguous().mT


@pytest.mark.parametrize("how", ["transposed", "odd strides", "odd start", "packed"])
def test_R07_strides_change_nothing(run, how):
    tensors = inputs(40, batch=2, heads=2, groups=2, width=32)
    other = moved(tensors, how)
    assert not any(x.is_contiguous() for x in other[:4])
    plain, results = (run(one_device, some, {}) for some in (tensors, other))
    assert all(torch.equal(results[name], plain[name]) for name in NAMES)


def test_R07_expanded_gradients_and_keys(run):
    """dout of a plain sum has the strides 0; so have keys that all heads share."""
    q, k, v, dout, dlse = inputs(40, heads=2, groups=2)
    k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v))
    tensors = (q, k, v, dout[:1, :1, :1].expand(1, 40, 2, -1), dlse[:, :, :1].expand(-1, -1, 40))
    check(run(one_device, tensors, {}), want(*tensors, scale=0.2))


@pytest.mark.parametrize("given", [{}, {"causal": False}, {"window": 9}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(20, 50), (50, 20), (1, 33), (33, 1)])
def test_R39_keys_may_be_more_or_fewer_than_queries(run, queries, keys, given):
    tensors = inputs(queries, keys, heads=2, groups=1)
    check(run(one_device, tensors, given), want(*tensors, scale=0.2, **given))


@pytest.mark.parametrize(("queries", "keys", "empty"), [(1, 0, 1), (5, 2, 3)])
def test_R08_a_query_without_keys_has_out_0_and_lse_minus_infinity(run, queries, keys, empty):
    tensors = inputs(queries, keys)
    results = run(one_device, tensors, {})
    assert not results["out"][:, :empty].any() and not results["dq"][:, :empty].any()
    assert (results["lse"][..., :empty] == -torch.inf).all()
    check(results, want(*tensors, scale=0.2))


def test_R17_rows_without_keys_put_no_nan_into_the_gradients_of_the_others(run):
    lo, hi = (torch.arange(130, dtype=torch.int32) - back for back in (20, 4))
    given = {"intervals": (lo.clamp_min(0), hi.clamp_min(0))}
    tensors = inputs(130, heads=2, groups=1)
    results = run(one_device, tensors, given)
    assert (results["lse"][..., :5] == -torch.inf).all() and not results["dq"][:, :5].any()
    check(results, want(*tensors, scale=0.2, **given))


def between(state: State, tensors: tuple) -> State:
    """A hop that is neither first nor last: 96 queries with a window of 20 against keys 64 to 80."""
    q, k, v, *_ = tensors
    from ringflash.kernels.triton import launch

    launch.tiling = lambda kernel, *_: TILES[kernel]
    view = mask.View(*mask.intervals(96, 96, causal=True, window=20), np.array([[0, 96]]), np.array([[64, 16]]))
    triton.forward(q, k[:, 64:80], v[:, 64:80], view, state, scale=0.2, first=False, last=False)
    return state


def test_a_hop_in_between_leaves_tiles_that_see_nothing_alone(run):
    tensors = inputs(96)
    before = State(torch.randn(tensors[0].shape), torch.full_like(tensors[0], torch.nan), torch.randn(1, 4, 96))
    after = run(between, State(*(x.clone() for x in before)), tensors)  # tensors go to the process as shared memory
    assert after.out.isnan().all(), "out is written by the last hop only"
    assert torch.equal(after.acc[:, :64], before.acc[:, :64]) and torch.equal(after.lse[..., :64], before.lse[..., :64])
    assert not torch.equal(after.acc[:, 64:], before.acc[:, 64:])


def split_and_looped(given: dict, q_segments: list, k_segments: list, *, first: bool, last: bool) -> list | None:
    """(out or acc, lse) of the specialised and of the looped forward of one hop; None if the view is not for both."""
    from ringflash.kernels.triton import launch, specialised

    launch.tiling = lambda kernel, *_: TILES[kernel]
    specialised.TILES = Tiling(32, 16, 4, 1)
    q, k, v, *_ = inputs(SIZE, heads=2, groups=1, width=32)
    lo, hi = mask.intervals(SIZE, SIZE, **({"causal": True} | given))
    q_segments, k_segments = np.array(q_segments), np.array(k_segments)
    rows, keys = (torch.from_numpy(mask.positions(part)) for part in (q_segments, k_segments))
    q, k, v = q[:, rows], k[:, keys], v[:, keys]
    view = mask.View(lo[rows], hi[rows], q_segments, k_segments)
    if specialised.below(trimmed(view).of_keys, q.device) is None:
        return None
    made = []
    for kernel in (specialised.split, launch.forward):
        random = torch.Generator().manual_seed(7)
        acc, lse = (torch.randn(shape, generator=random) for shape in (q.shape, (1, 2, len(rows))))
        lse[..., ::3], acc[:, ::3] = -torch.inf, 0.0
        state = State(acc, torch.full_like(q, torch.nan), lse)
        kernel(q, k, v, view, state, scale=0.2, first=first, last=last)
        made.append((state.out if last else acc, lse))
    return made


BELOW = {  # mask, query segments, key segments -> does every tile see the first keys of its range?
    "full": ({"causal": False}, [[0, 96]], [[0, 96]], True),
    "causal": ({}, [[0, 96]], [[0, 96]], True),
    "causal, short tiles": ({}, [[0, 17], [50, 30]], [[0, 80]], True),
    "half": ({}, [[40, 32]], [[0, 16], [48, 32]], True),
    "all before": ({}, [[64, 32]], [[0, 64]], True),
    "padding": ({"cu_seqlens": np.array([0, 70])}, [[0, 96]], [[0, 96]], True),
    "documents of whole tiles": ({"cu_seqlens": np.array([0, 32, 96])}, [[0, 96]], [[0, 96]], True),
    "documents": ({"cu_seqlens": np.array([0, 40, 96])}, [[0, 96]], [[0, 96]], False),
    "window": ({"window": 20}, [[0, 96]], [[0, 96]], False),
    "odd cut": ({}, [[0, 96]], [[0, 17], [40, 30]], False),
}


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True)])
def test_the_specialised_forward_is_the_looped_one_where_it_serves(run, name, first, last):
    given, q_segments, k_segments, serves = BELOW[name]
    made = run(split_and_looped, given, q_segments, k_segments, first=first, last=last)
    assert (made is not None) == serves
    if made:
        (out, lse), (wanted, wanted_lse) = made
        assert not wanted.isnan().any() and error(out, wanted) < 1e-5 and error(lse, wanted_lse) < 1e-5


def poisoned(tensors: tuple, rows: slice, keys: slice, value: float) -> tuple:
    """The tensors with `value` in some rows of q and dout, and in some of k and v."""
    q, k, v, dout, dlse = (x.clone() for x in tensors)
    q[:, rows] = dout[:, rows] = value
    k[:, keys] = v[:, keys] = value
    return q, k, v, dout, dlse


def test_nothing_in_the_padding_reaches_the_rows_before_it(run):
    """Padding at the end; rows and keys at the front that nobody sees; and a document's neighbour is no padding."""
    lo, hi = (torch.arange(96, dtype=torch.int32).clamp(low, 90) for low in (7, 5))
    cases = [
        ({"cu_seqlens": [0, 20, 75]}, slice(75, 96), slice(75, 96)),
        ({"intervals": (lo, hi + 2)}, slice(0, 5), slice(0, 7)),
    ]
    tensors = inputs(96, heads=2, groups=1)
    for given, rows, keys in cases:
        zero, nan, inf = (run(one_device, poisoned(tensors, rows, keys, x), given) for x in (0.0, torch.nan, torch.inf))
        check(zero, want(*poisoned(tensors, rows, keys, 0.0), scale=0.2, **given))
        for made in (nan, inf):
            assert all(torch.equal(made[name], zero[name]) for name in NAMES)


def test_a_dq_of_half_type_is_written_and_rows_that_see_nothing_are_0(run):
    """Rows in front and behind, whose tiles are cut off, and a whole tile of them in the middle."""
    lo, hi = torch.arange(96, dtype=torch.int32), torch.arange(96, dtype=torch.int32) + 8
    for empty, position in ((slice(0, 6), 0), (slice(32, 64), 64), (slice(80, 96), 88)):
        lo[empty] = hi[empty] = position
    given = {"intervals": (lo, hi)}
    tensors = inputs(96, heads=2, groups=1, dtype=torch.float16)
    once, added = (run(one_device, tensors, given, dq_dtype=dtype)["dq"] for dtype in (torch.float16, torch.float32))
    assert torch.equal(once, added.half()) and once.any()


def described(x: torch.Tensor, arch: int) -> list[list[int] | None]:
    """The box of each descriptor of x, or None where it is read by pointers."""
    from ringflash.kernels.triton import launch
    from ringflash.kernels.triton.tiling import Card

    return [made and made.block_shape for made in launch.descriptors(x, 32, Card("cuda", arch))]


@pytest.mark.parametrize(
    ("x", "arch", "boxes"),
    [
        (torch.empty(2, 8, 3, 64), 90, [[1, 1, 32, 64], None]),
        (torch.empty(2, 8, 3, 96), 100, [[1, 1, 32, 64], [1, 1, 32, 32]]),
        (torch.empty(2, 8, 3, 64), 80, [None, None]),
        (torch.empty(2, 8, 3, 65)[..., :64], 90, [None, None]),
        (torch.empty(1, 8, 1, 65).as_strided((1, 8, 1, 64), (7, 64, 7, 1)), 90, [[1, 1, 32, 64], None]),
        (torch.empty(2, 8, 1, 64).expand(2, 8, 3, 64), 90, [None, None]),
        (torch.empty(2, 0, 3, 64), 90, [None, None]),
    ],
    ids=["plain", "two blocks", "no TMA", "odd strides", "strides of size 1", "stride 0", "empty"],
)
def test_tensors_are_read_by_descriptor_where_the_card_can(x, arch, boxes):
    assert described(x, arch) == boxes


def test_a_grid_that_no_card_takes_is_refused():
    from ringflash.kernels.triton import launch

    assert launch.grid(8192, 1, 64) == (8192 * 64,)  # R05: all on the axis that goes beyond 65,535
    with pytest.raises(ValueError, match="8589934592 programs, of at most 2147483647"):
        launch.grid(2**20, 128, 64)


def test_refusals_say_what_would_do(monkeypatch):
    q = torch.empty(1, 4, 1, 64)
    assert "TRITON_INTERPRET=1; q is on cpu, where kernel='eager' runs" in triton.refuses(q, q, True, 3)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.refuses(q, q, True, 3) is None
    assert "(16, 32, 64, 96, 128, 192, 256), got 48" in triton.refuses(q[..., :48], q, True, 3)
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert "needs the package triton" in triton.refuses(q, q, True, 3)


def test_a_batch_of_one_has_no_stride():
    """A number beyond 2^31 would be of another type, and the kernel compiled again for it."""
    from ringflash.kernels.triton import launch

    long, pair = (torch.empty(batch, 2**20, 32, 128, device="meta") for batch in (1, 2))
    assert launch.rows_argument(long)[1:] == (0, 32 * 128, 128)
    assert launch.rows_argument(pair)[1:] == (2**32, 32 * 128, 128)
