"""Layouts: every position has one owner, bad lengths are refused, work is even, shard and unshard agree."""

import time

import numpy as np
import pytest
import torch
from masks import MASKS
from test_mask import intervals_of

import ringflash
from ringflash import LAYOUTS, Ring, mask
from ringflash.layouts import balanced, striped
from ringflash.layouts.documents import Documents

SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (1, 4), (3, 2), (5, 1)]


def ring_at(rank, size, layout, ulysses=1):
    """The ring as one rank of a world sees it, without the world: for all that does not talk."""
    ring = Ring(layout=layout)
    ring.rank, ring.size, ring.ulysses = rank, size, ulysses
    return ring


def work_of(seq_len, **given):
    lo, hi = intervals_of(seq_len, **given)
    return (hi.astype(np.int64) - lo).clip(0)


@pytest.mark.parametrize(("ring_size", "ulysses"), SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_position_has_one_owner_and_segments_ascend(name, ring_size, ulysses):
    rule, random = LAYOUTS[name], np.random.default_rng(ring_size * 10 + ulysses)
    step = rule.multiple(ring_size, ulysses)
    for seq_len in [step, *(step * random.integers(2, 60, 10)).tolist(), step * 400]:
        work = random.integers(0, 1000, seq_len)
        segments = rule.segments(seq_len, ring_size, ulysses, work)
        assert len(segments) == ring_size
        for part in segments:
            starts, counts = part.T
            assert counts.min() > 0 and counts.sum() == seq_len // ring_size
            assert (starts[1:] >= (starts + counts)[:-1]).all()
        held = np.concatenate([mask.positions(part) for part in segments])
        assert np.array_equal(np.sort(held), np.arange(seq_len))


@pytest.mark.parametrize(("ring_size", "ulysses"), SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_holds_its_run_of_the_ring_ranks_tokens(name, ring_size, ulysses):
    size = ring_size * ulysses
    seq_len = 6 * LAYOUTS[name].multiple(ring_size, ulysses)
    layouts = [ring_at(rank, size, name, ulysses).layout(seq_len) for rank in range(size)]
    work = Documents(np.array([0, seq_len]), True)
    segments = LAYOUTS[name].segments(seq_len, ring_size, ulysses, work)
    for rank, layout in enumerate(layouts):
        ring_rank, head_rank = divmod(rank, ulysses)
        want = mask.positions(segments[ring_rank]).reshape(ulysses, -1)[head_rank]
        assert layout.local_len == seq_len // size
        assert layout.positions.dtype == torch.int64 and layout.positions.tolist() == want.tolist()


def test_R37_zigzag_of_24_over_3():
    held = [ring_at(rank, 3, "zigzag").layout(24).positions.tolist() for rank in range(3)]
    assert held == [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [*range(8, 16)]]


@pytest.mark.parametrize(
    ("name", "size", "seq_len", "multiple", "padded"),
    [
        ("zigzag", 4, 2999, 8, 3000),
        ("contiguous", 4, 2999, 4, 3000),
        ("striped", 3, 100, 3, 102),
        ("balanced", 8, 1, 8, 8),
    ],
)
def test_R30_a_length_that_does_not_divide_is_refused_with_the_padded_one(name, size, seq_len, multiple, padded):
    ring = ring_at(0, size, name)
    with pytest.raises(
        ValueError, match=rf"seq_len={seq_len} .* multiple of {multiple} .* {size} ranks; pad it to {padded}"
    ):
        ring.layout(seq_len)
    assert ring.layout(padded, cu_seqlens=[0, seq_len]).seq_len == padded


def test_R30_a_length_that_would_be_accepted_is_offered_where_the_padded_one_is_not():
    with pytest.raises(ValueError, match=r"multiple of 8 .*; positions are int32, so 2147483640 is the most"):
        ring_at(0, 4, "zigzag").layout(2**31 - 1)


@pytest.mark.parametrize(("name", "multiple"), [("contiguous", 6), ("zigzag", 12), ("striped", 6), ("balanced", 6)])
def test_divisors_are_counted_in_all_ranks(name, multiple):
    assert LAYOUTS[name].multiple(3, 2) == multiple


@pytest.mark.parametrize(
    ("local", "want"), [(1, 1), (96, 96), (128, 128), (130, 65), (127 * 2, 127), (131, 1), (4096, 128)]
)
def test_a_stripe_is_the_largest_divisor_not_above_128(local, want):
    assert striped.stripe(local * 6, 3, 2) == want


@pytest.mark.parametrize(
    ("local", "want"),
    [
        (1, 1),
        (16, 1),
        (34, 17),
        (100, 10),
        (255, 17),
        (256, 128),
        (300, 150),
        (4096, 256),
        (2048, 128),
        (1024, 128),
        (257, 257),
    ],
)
def test_a_block_is_one_of_at_most_16_and_128_tokens_where_that_divides(local, want):
    assert balanced.block(local * 6, 3, 2) == want


def test_explain_warns_of_short_stripes():
    q = torch.empty(1, 131, 1, 16)
    told = ringflash.explain(q, q, q, layout=ring_at(0, 2, "striped").layout(262), kernel="eager")
    assert "stripes of 1 token" in str(told)
    q = torch.empty(1, 64, 1, 16)
    assert not ringflash.explain(q, q, q, layout=ring_at(0, 2, "striped").layout(128), kernel="eager").warnings


DRAWS = {
    "lognormal": lambda random: int(random.lognormal(7.5, 1.3)) + 1,
    "uniform": lambda random: int(random.integers(1, 4097)),
    "one_long_many_short": lambda random: int(random.integers(50, 1000)),
}


def documents(kind, seq_len, seed):
    """Borders of documents that fill the sequence."""
    random = np.random.default_rng(seed)
    lengths = [seq_len // 2] if kind == "one_long_many_short" else []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, DRAWS[kind](random)))
    return np.concatenate(([0], np.cumsum(lengths))).tolist()


def loads(seq_len, ring_size, work):
    return np.array([work[mask.positions(part)].sum() for part in balanced.segments(seq_len, ring_size, 1, work)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ring_size", [2, 4, 8])
@pytest.mark.parametrize("kind", DRAWS)
def test_balanced_evens_the_work_of_packed_documents(kind, ring_size, seed):
    for seq_len in (65_536, 262_144):
        load = loads(seq_len, ring_size, work_of(seq_len, cu_seqlens=documents(kind, seq_len, seed)))
        assert load.max() / load.mean() <= 1.05


@pytest.mark.parametrize("seed", range(10))
def test_balanced_is_within_5_percent_of_what_its_blocks_allow(seed):
    random = np.random.default_rng(seed)
    ring_size = int(random.choice([2, 3, 4, 8]))
    seq_len = ring_size * 128 * int(random.integers(1, 17))
    work = (random.pareto(0.7, seq_len) * 10).astype(np.int64).clip(0, 10**7)
    work[: int(random.integers(0, seq_len))] //= 100
    load = loads(seq_len, ring_size, work)
    heaviest = work.reshape(-1, balanced.block(seq_len, ring_size, 1)).sum(1).max()
    assert load.max() / load.mean() <= 1.05 * max(1.0, heaviest / load.mean())


def test_balanced_plans_a_million_tokens_over_64_ranks_in_a_moment():
    work = work_of(2**20, cu_seqlens=documents("lognormal", 2**20, 0))
    began = time.process_time()  # which other processes do not lengthen
    load = loads(2**20, 64, work)
    assert time.process_time() - began < 2.0 and load.max() / load.mean() <= 1.05


def test_position_ids_start_anew_in_each_document():
    held = [ring_at(rank, 2, "zigzag").layout(16, cu_seqlens=[0, 3, 3, 9, 13]).position_ids for rank in range(2)]
    whole = [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2]  # the padding counts as one more document
    assert all(ids.dtype == torch.int64 for ids in held)
    assert held[0].tolist() == whole[0:4] + whole[12:16] and held[1].tolist() == whole[4:12]
    plain = ring_at(1, 2, "zigzag").layout(16)
    assert torch.equal(plain.position_ids, plain.positions)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_R41_shard_cuts_the_axis_that_was_named(dim):
    layout = ring_at(1, 2, "zigzag").layout(16)
    x = torch.arange(3 * 16 * 16).reshape(3, 16, 16)
    assert torch.equal(layout.shard(x, dim=dim), x.index_select(dim, layout.positions))
    wide = torch.arange(3 * 2 * 16).reshape(3, 2, 16)
    assert layout.shard(wide, dim=2).shape == (3, 2, 8)
    with pytest.raises(ValueError, match=r"dim 1 of \[3, 2, 16\] is 2; the whole sequence has 16"):
        layout.shard(wide)


@pytest.mark.parametrize(
    ("call", "shape", "dim", "words"),
    [
        ("shard", (2, 8, 3), 1, "dim 1 of .* is 8; the whole sequence has 16"),
        ("unshard", (2, 16, 3), 1, "dim 1 of .* is 16; this rank's part has 8"),
        ("shard", (16,), 1, r"dim=1 is not an axis of a tensor of shape \[16\]"),
        ("unshard", (2, 8), 2, r"dim=2 is not an axis"),
    ],
)
def test_shard_and_unshard_refuse_the_wrong_length(call, shape, dim, words):
    layout = ring_at(0, 2, "zigzag").layout(16)
    with pytest.raises(ValueError, match=f"{call}: {words}"):
        getattr(layout, call)(torch.zeros(shape), dim=dim)


@pytest.mark.parametrize("call", ["shard", "unshard"])
def test_shard_and_unshard_refuse_what_is_no_tensor_or_no_axis(call):
    cut = getattr(Ring().layout(16), call)
    with pytest.raises(TypeError, match=f"{call}: x is list; it must be a tensor"):
        cut([0] * 16, 0)
    for dim, kind in ((None, "NoneType"), (0.0, "float"), ("0", "str"), (True, "bool")):
        with pytest.raises(TypeError, match=f"{call}: dim={dim!r} is {kind}; it must be an int"):
            cut(torch.arange(16), dim)


@pytest.mark.parametrize("borders", [None, [0, 3, 9, 14]])
def test_positions_that_a_caller_changes_in_place_change_nothing_for_others(borders):
    """A layout is cached, so everybody who asks for the same one gets the same object."""
    ring = ring_at(1, 2, "zigzag")
    held, ids = ring.layout(16, borders).positions.tolist(), ring.layout(16, borders).position_ids.tolist()
    ring.layout(16, borders).positions.add_(100)
    ring.layout(16, borders).position_ids.remainder_(2)
    layout = ring.layout(16, borders)
    assert layout.positions.tolist() == held == layout.shard(torch.arange(16), 0).tolist()
    assert layout.position_ids.tolist() == ids
    with torch.inference_mode():
        assert not layout.positions.is_inference() and not layout.position_ids.is_inference()


def test_shard_copies_and_its_backward_fills_the_other_parts_with_zero():
    layout = ring_at(1, 2, "contiguous").layout(8)
    x = torch.randn(1, 8, 2, requires_grad=True)
    part = layout.shard(x)
    weight = torch.randn_like(part)
    (part * weight).sum().backward()
    assert torch.equal(x.grad[:, 4:], weight) and not x.grad[:, :4].any()
    alone = Ring().layout(8)
    part = alone.shard(x.detach())
    part.zero_()
    assert x.detach().all()


@pytest.mark.parametrize("name", ["documents", "prefix", "causal"])
def test_layouts_are_cached_and_the_cache_is_bounded(name):
    ring = Ring()
    given = {key: value for key, value in MASKS[name](32).items() if key != "window"}
    again = {key: tuple(x.clone() for x in value) if key == "intervals" else [*value] for key, value in given.items()}
    layout = ring.layout(32, **given)
    assert ring.layout(32, **again) is layout
    assert ring.layout(64, **{key: value for key, value in given.items() if key == "cu_seqlens"}) is not layout
    for length in range(100, 150):
        ring.layout(2 * length)
    assert len(ring._layouts) < 50


def unshard_case(seq_len, name, ulysses):
    """On every rank of a world: the round trip of shard and unshard, of many types, and both gradients."""
    ring = Ring(layout=name, ulysses=ulysses)
    layout = ring.layout(seq_len)
    for dtype in (
        torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.int32, torch.int16, torch.complex64,
        torch.float8_e4m3fn,
    ):  # fmt: skip
        x = torch.arange(seq_len).remainder(7).to(dtype)
        for shape, dim in (((1, seq_len, 1), 1), ((1, 1, seq_len), -1), ((seq_len,), 0)):
            got = layout.unshard(layout.shard(x.reshape(shape), dim), dim)
            assert got.dtype == dtype and torch.equal(*(y.cfloat() for y in (got, x.reshape(shape)))), dtype
    assert torch.equal(layout.unshard(layout.shard(torch.arange(seq_len), 0), 0), torch.arange(seq_len))
    # a loss of each rank's own: the gradient of a part is the sum over the ranks of what they did with it
    part = layout.shard(torch.randn(2, seq_len, 3, generator=torch.Generator().manual_seed(0))).requires_grad_()
    layout.unshard(part).mul(ring.rank + 1).sum().backward()
    want = sum(range(1, ring.size + 1))
    assert torch.equal(part.grad, torch.full_like(part, want)), "the gradient is not the sum over ranks"
    half = part.detach().bfloat16().requires_grad_()
    layout.unshard(half).square().sum().div(ring.size).backward()  # alike on all ranks, so divided by their number
    assert half.grad.dtype == torch.bfloat16 and torch.allclose(half.grad.float(), 2 * half.detach().float(), rtol=1e-2)
    turned = torch.complex(part.detach(), part.detach().flip(2)).requires_grad_()
    assert torch.equal(layout.unshard(turned.detach().conj()), layout.unshard(turned.detach()).conj())
    layout.unshard(turned).abs().square().sum().div(ring.size).backward()
    assert torch.allclose(turned.grad, 2 * turned.detach())
    [first] = torch.autograd.grad(layout.unshard(part).pow(3).sum(), part, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("world", "ulysses"), [(4, 1), (4, 2), (3, 1)])
def test_R37_unshard_is_the_inverse_of_shard_and_its_gradient_is_summed(pool, world, ulysses, name):
    pool(world)(unshard_case, 48, name, ulysses)


@pytest.mark.parametrize("name", LAYOUTS)
def test_R37_unshard_on_one_process(name):
    unshard_case(48, name, 1)


def test_a_process_of_several_that_have_not_met_is_told(monkeypatch, recwarn):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ringflash.Ring().size == 1 and not recwarn
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"one of WORLD_SIZE=2.*init_process_group\(\)"):
        assert ringflash.Ring().size == 1
