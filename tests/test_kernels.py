"""Every kernel of the table against the fp64 reference, on one device, and the promises of the kernel protocol."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import TOLERANCE, error
from masks import MASKS
from oracle import NAMES, check, got, inputs, want

import ringflash
from ringflash import mask
from ringflash.arguments import HEAD_DIMS
from ringflash.kernels import KERNELS, State, eager

SIZE = 70  # several tiles and a tail


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """The name of each kernel that computes here; eager in tiles small enough to matter."""
    q = torch.empty(1, 1, 1, 16)
    if reason := KERNELS[request.param].refuses(q, q, False, 1):
        pytest.skip(reason)
    for name, value in (("BLOCK_Q", 16), ("BLOCK_K", 8), ("SLAB", 24)):
        monkeypatch.setattr(eager, name, value)
    return request.param


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_equals_the_reference(kernel, name):
    tensors, given = inputs(SIZE), MASKS[name](SIZE)
    check(got(*tensors, kernel=kernel, **given), want(*tensors, **given))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype(kernel, dtype):
    tensors = inputs(SIZE, dtype=dtype, batch=2)
    check(got(*tensors, kernel=kernel), want(*tensors), dtype)


@pytest.mark.parametrize("width", HEAD_DIMS)
def test_every_head_dimension(kernel, width):
    tensors = inputs(40, width=width)
    check(got(*tensors, kernel=kernel), want(*tensors))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (3, 1), (8, 2), (8, 1), (6, 2)])
def test_grouped_heads(kernel, heads, groups):
    tensors = inputs(40, heads=heads, groups=groups, batch=2)
    check(got(*tensors, kernel=kernel), want(*tensors))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3, 40.0])
def test_any_finite_scale(kernel, scale):
    tensors = inputs(40)
    wanted = want(*tensors, scale=scale)
    results = got(*tensors, kernel=kernel, scale=scale)
    for name in NAMES if scale else ("out", "lse", "dv"):  # without a scale dq and dk are 0
        assert error(results[name], wanted[name]) < (1e-5 if abs(scale) <= 3 else 1e-4), name
    if not scale:
        assert not results["dq"].any() and not results["dk"].any()


@pytest.mark.parametrize("given", [{}, {"causal": False}, {"window": 9}, {"causal": False, "window": 9}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(30, 70), (70, 30), (1, 33), (33, 1)])
def test_R39_keys_may_be_more_or_fewer_than_queries(kernel, queries, keys, given):
    tensors = inputs(queries, keys)
    check(got(*tensors, kernel=kernel, **given), want(*tensors, **given))


@pytest.mark.parametrize(("queries", "keys", "empty"), [(1, 0, 1), (5, 2, 3), (3, 0, 3)])
def test_R08_a_query_without_keys_has_out_0_and_lse_minus_infinity(kernel, queries, keys, empty):
    tensors = inputs(queries, keys)
    results = got(*tensors, kernel=kernel)
    assert not results["out"][:, :empty].any() and not results["dq"][:, :empty].any()
    assert (results["lse"][..., :empty] == -torch.inf).all()
    check(results, want(*tensors))


def test_R08_no_query_at_all(kernel):
    results = got(*inputs(0, 5), kernel=kernel)
    assert results["out"].shape == (1, 0, 4, 16) and not results["dk"].any() and not results["dv"].any()


def test_R17_rows_without_keys_put_no_nan_into_the_gradients_of_the_others(kernel):
    tensors = inputs(130)
    lo = torch.arange(130, dtype=torch.int32) - 20
    hi = torch.arange(130, dtype=torch.int32) - 4
    given = {"intervals": (lo.clamp_min(0), hi.clamp_min(0))}
    results = got(*tensors, kernel=kernel, **given)
    assert (results["lse"][..., :5] == -torch.inf).all() and not results["dq"][:, :5].any()
    check(results, want(*tensors, **given))


def test_R21_lse_is_the_natural_log_of_the_sum(kernel):
    q, k, v, *_ = inputs(SIZE, groups=4)
    _, lse = ringflash.attention(q, k, v, causal=False, scale=0.3, return_lse=True, kernel=kernel)
    assert lse.dtype == torch.float32
    assert error(lse, torch.logsumexp(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3, -1)) < 1e-5


def test_R22_a_shift_of_all_scores_moves_lse_and_nothing_else(kernel):
    q, k, v, *_ = inputs(SIZE)
    q[..., -1], k[..., -1] = 1.0, 0.0
    out, lse = ringflash.attention(q, k, v, scale=1.0, return_lse=True, kernel=kernel)
    k[..., -1] = 50.0
    out_up, lse_up = ringflash.attention(q, k, v, scale=1.0, return_lse=True, kernel=kernel)
    assert (lse_up - lse - 50).abs().max() < 1e-4 and (out_up - out).abs().max() < 1e-5


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another memory order."""
    if how == "transposed":  # [B, H, L, D] underneath
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "innermost last but one":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((*x.shape[:2], 2 * x.shape[2], 3 * x.shape[3]), torch.nan)
    wide[:, :, ::2, 5 : 5 + x.shape[3]] = x
    return wide[:, :, ::2, 5 : 5 + x.shape[3]]


@pytest.mark.parametrize("how", ["transposed", "innermost last but one", "slice"])
def test_R07_strides_change_nothing(kernel, how):
    tensors = inputs(SIZE, batch=2)
    moved = [strided(x, how) for x in tensors[:4]]
    assert not any(x.is_contiguous() for x in moved)
    want_bitwise = got(*tensors, kernel=kernel, deterministic=True)
    results = got(*moved, tensors[4], kernel=kernel, deterministic=True)
    assert all(torch.equal(results[name], want_bitwise[name]) for name in NAMES)


def test_R07_a_packed_qkv_and_the_gradient_of_a_plain_sum(kernel):
    q, k, v, *_ = inputs(SIZE, groups=4)
    packed = torch.stack((q, k, v), 2).requires_grad_()
    ringflash.attention(*packed.unbind(2), kernel=kernel).sum().backward()  # dout is expanded: all strides 0
    wanted = want(q, k, v, torch.ones_like(q), torch.zeros(1, 4, SIZE))
    for index, name in enumerate(("dq", "dk", "dv")):
        assert error(packed.grad[:, :, index], wanted[name]) < 1e-5


def test_R69_gradients_scale_with_dout(kernel):
    q, k, v, dout, dlse = inputs(SIZE)
    once, four = (got(q, k, v, dout * c, dlse * c, kernel=kernel, deterministic=True) for c in (1, 4))
    assert all(torch.equal(four[name], 4 * once[name]) for name in ("dq", "dk", "dv"))
    none = got(q, k, v, dout * 0, dlse * 0, kernel=kernel)
    assert not any(none[name].any() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_either_result_alone_carries_its_gradient(kernel, which):
    q, k, v, dout, dlse = inputs(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pair = ringflash.attention(*leaves, return_lse=True, kernel=kernel)
    chosen = {"out": [(pair[0], dout)], "lse": [(pair[1], dlse)], "both": [(pair[0], dout), (pair[1], dlse)]}[which]
    grads = torch.autograd.grad([x for x, _ in chosen], leaves, [x for _, x in chosen])
    wanted = want(q, k, v, dout * (which != "lse"), dlse * (which != "out"))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if which == "lse" and name == "dv":
            assert not grad.any()
        else:
            assert error(grad, wanted[name]) < 1e-5, name


def test_the_gradient_of_a_plain_sum_of_lse(kernel):
    q, k, v, dout, _ = inputs(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = ringflash.attention(*leaves, return_lse=True, kernel=kernel)
    dq, dk = torch.autograd.grad(lse.sum(), leaves[:2])  # dlse is expanded: all strides 0
    wanted = want(q, k, v, dout * 0, torch.ones(1, 4, 40))
    assert error(dq, wanted["dq"]) < 1e-5 and error(dk, wanted["dk"]) < 1e-5


def test_deterministic_repeats_are_bitwise_equal(kernel):
    tensors = inputs(SIZE, dtype=torch.bfloat16)
    first, second = (got(*tensors, kernel=kernel, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_an_empty_batch(kernel):
    results = got(*inputs(8, batch=0), kernel=kernel)
    assert {name: x.shape[0] for name, x in results.items()} == dict.fromkeys(NAMES, 0)


def part_of(lo, hi, keys: slice) -> mask.View:
    """All queries against one run of keys."""
    whole = np.array([[0, len(lo)]])
    return mask.View(lo, hi, whole, np.array([[keys.start, keys.stop - keys.start]]))


def test_a_hop_in_between_leaves_queries_that_see_nothing_alone(kernel):
    q, k, v, *_ = inputs(96)
    lo, hi = mask.intervals(96, 96, causal=True, window=20)
    out, acc = torch.full_like(q, torch.nan), torch.randn_like(q)
    lse = torch.randn(1, 4, 96)
    before = acc.clone(), lse.clone()
    keys = slice(64, 80)
    KERNELS[kernel].forward(
        q, k[:, keys], v[:, keys], part_of(lo, hi, keys), State(acc, out, lse), scale=0.25, first=False, last=False
    )
    assert out.isnan().all(), "out is written by the last hop only"
    assert torch.equal(acc[:, :64], before[0][:, :64])
    assert error(lse[..., :64], before[1][..., :64]) < 1e-6  # a kernel that works in base 2 may round it
    assert not torch.equal(acc[:, 64:80], before[0][:, 64:80])


def test_the_state_is_carried_over_hops_and_the_first_and_last_write_every_query(kernel):
    q, k, v, *_ = inputs(96, dtype=torch.bfloat16)
    lo, hi = mask.intervals(96, 96, causal=True, window=20)
    out, acc = torch.full_like(q, torch.nan), torch.full(q.shape, torch.nan)
    state = State(acc, out, torch.full((1, 4, 96), torch.nan))
    for first, last, keys in ((True, False, slice(32, 64)), (False, False, slice(0, 32)), (False, True, slice(64, 80))):
        view = part_of(lo, hi, keys)
        KERNELS[kernel].forward(q, k[:, keys], v[:, keys], view, state, scale=0.25, first=first, last=last)
        assert not state.acc.isnan().any()
    wanted, lse = ringflash.reference.attention(
        q,
        k,
        v,
        intervals=tuple(torch.from_numpy(np.minimum(bound, 80)) for bound in (lo, hi)),
        scale=0.25,
        return_lse=True,
    )
    assert error(out, wanted) < TOLERANCE[torch.bfloat16] and error(state.lse, lse) < 1e-5


@pytest.mark.parametrize("adds", [False, True])
def test_the_backward_adds_to_dq_and_writes_every_row_of_dk_and_dv_or_adds_to_them(kernel, adds):
    q, k, v, dout, dlse = inputs(96)
    lo, hi = mask.intervals(96, 96, causal=True, cu_seqlens=np.array([0, 10, 50], np.int32))
    wanted = want(q, k, v, dout, dlse, cu_seqlens=[0, 10, 50], scale=0.25)
    delta = KERNELS[kernel].delta(wanted["out"].float(), dout, dlse)
    before = 1.0 if adds else 0.0
    dq, dk, dv = torch.ones(q.shape), *(torch.full(x.shape, 1.0 if adds else torch.nan) for x in (k, v))
    view = part_of(lo, hi, slice(0, 96))
    KERNELS[kernel].backward(
        dout, q, k, v, wanted["lse"].float(), delta, view, dq, dk, dv, scale=0.25, deterministic=True, adds=adds
    )
    assert error(dq - 1, wanted["dq"]) < 1e-5
    assert error(dk - before, wanted["dk"]) < 1e-5 and error(dv - before, wanted["dv"]) < 1e-5


def test_delta_is_rowsum_of_out_times_dout_minus_dlse_in_fp32(kernel):
    q, *_, dlse = inputs(SIZE, dtype=torch.bfloat16)
    dout = torch.randn(q.shape).bfloat16()
    delta = KERNELS[kernel].delta(q, dout, dlse)
    plain = (q.double() * dout.double()).sum(-1).transpose(1, 2)
    assert delta.dtype == torch.float32 and error(delta, plain - dlse) < 1e-5
    assert error(KERNELS[kernel].delta(q, dout, None), plain) < 1e-5


FRONT = {"intervals": tuple((torch.arange(SIZE, dtype=torch.int32) + ahead).clamp_min(7 + ahead) for ahead in (-5, 0))}
PADDED = {  # mask, and which queries and keys it leaves out
    "padding": ({"cu_seqlens": [0, 20, 53]}, slice(53, SIZE), slice(53, SIZE)),
    "padding, window": ({"cu_seqlens": [0, 20, 53], "window": 9}, slice(53, SIZE), slice(53, SIZE)),
    "keys in front": (FRONT, slice(0, 0), slice(0, 2)),
    "all": ({"cu_seqlens": [0, 0]}, slice(0, SIZE), slice(0, SIZE)),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", PADDED)
def test_nothing_in_the_padding_reaches_the_rows_before_it(monkeypatch, name, value):
    """Padding holds what the caller left there, and 0 * NaN is NaN: bitwise the same results as with zeros there."""
    for constant, tile in (("BLOCK_Q", 16), ("BLOCK_K", 8), ("SLAB", 24)):
        monkeypatch.setattr(eager, constant, tile)
    given, rows, keys = PADDED[name]

    def results(filling: float) -> dict[str, torch.Tensor]:
        q, k, v, dout, dlse = inputs(SIZE)
        q[:, rows] = dout[:, rows] = dlse[..., rows] = filling
        k[:, keys] = v[:, keys] = filling
        return got(q, k, v, dout, dlse, kernel="eager", **given)

    zero, poisoned = results(0.0), results(value)
    assert all(torch.equal(poisoned[result], zero[result]) for result in NAMES)


class Made(NamedTuple):
    """A tensor that an operation made or wrote, without holding it."""

    operation: str
    dtype: torch.dtype
    shape: torch.Size
    address: int


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down what is computed inside; views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.made.append(Made(func.overloadpacket.__name__, result.dtype, result.shape, result.data_ptr()))
        return result


def test_eager_never_holds_a_matrix_of_all_scores_nor_copies_of_fp32_gradients():
    """The largest tensor that the kernel makes for 2048 x 2048 tokens is far below 2048 x 2048."""
    q, k, v, dout, dlse = inputs(2048, heads=1, groups=1)
    view = part_of(*mask.intervals(2048, 2048, causal=True), slice(0, 2048))
    out, lse = torch.empty_like(q), torch.empty(1, 1, 2048)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    with Watch() as before:
        eager.forward(q, k, v, view, State(None, out, lse), scale=0.25, first=True, last=True)
        delta = eager.delta(out, dout, dlse)
    with Watch() as backward:
        eager.backward(dout, q, k, v, lse, delta, view, *grads, scale=0.25, deterministic=True)
    assert max(x.shape.numel() for x in before.made + backward.made) <= eager.BLOCK_Q * eager.SLAB < 2048 * 2048 / 8
    assert {x.address for x in backward.made if x.shape == k.shape} <= {x.data_ptr() for x in grads}


def test_delta_is_no_matrix_product_and_copies_few_rows_at_once(monkeypatch):
    """A matrix product of fp32 is one of TF32 where the user allows it."""
    monkeypatch.setattr(eager, "DELTA_ROWS", 16)
    q, *_ = inputs(SIZE, dtype=torch.bfloat16)
    with Watch() as watch:
        eager.delta(q, q, None)
    assert not {x.operation for x in watch.made} & {"bmm", "mm", "matmul", "baddbmm", "addmm", "mv", "dot"}
    assert max(x.shape.numel() for x in watch.made if x.dtype == torch.float32) <= q[:, :16].numel()
