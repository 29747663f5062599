"""merge: two disjoint sets of keys joined exactly, whatever their sizes, and differentiable in all four arguments."""

import math

import pytest
import torch
from conftest import TOLERANCE, error

import ringflash


def parts(dtype=torch.float32, seed=0):
    """Attention to keys 0..8 and 9..23, and to all of them, in fp64 by the reference."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, h, 16, generator=random) for n, h in ((7, 4), (24, 2), (24, 2)))
    cut = lambda a, b: ringflash.reference.attention(q, k[:, a:b], v[:, a:b], causal=False, return_lse=True)  # noqa: E731
    (out_a, lse_a), (out_b, lse_b), whole = cut(0, 9), cut(9, 24), cut(0, 24)
    return (out_a.to(dtype), lse_a.float(), out_b.to(dtype), lse_b.float()), whole


@pytest.mark.parametrize("dtype", [torch.float64, *TOLERANCE])
def test_merge_equals_attention_to_the_union(dtype):
    given, (want_out, want_lse) = parts(dtype)
    kept = [x.clone() for x in given]
    out, lse = ringflash.merge(*given)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert error(out, want_out) < TOLERANCE.get(dtype, 1e-5) and error(lse, want_lse) < 1e-6
    assert all(torch.equal(x, y) for x, y in zip(given, kept, strict=True))


def test_merge_is_symmetric():
    (out_a, lse_a, out_b, lse_b), _ = parts()
    one, other = ringflash.merge(out_a, lse_a, out_b, lse_b), ringflash.merge(out_b, lse_b, out_a, lse_a)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def row(lse, value=1.0):
    return torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1), float(lse))


@pytest.mark.parametrize(
    ("a", "b", "lse"),
    [(0, 100, 100), (-100, 0, 0), (3e4, 3e4, 3e4 + math.log(2)), (-3e4, 3e4, 3e4), (-math.inf, 5, 5)],
)
def test_R18_large_differences_neither_overflow_nor_lose_weight(a, b, lse):
    out, got = ringflash.merge(*row(a), *row(b))
    assert abs(float(out) - 1) < 1e-6  # the weights sum to 1
    assert float(got) == pytest.approx(lse, rel=1e-6)


def test_R21_lse_is_a_natural_logarithm():
    q, k = torch.zeros(1, 1, 1, 16), torch.randn(1, 4160, 1, 16)
    cut = lambda keys, value: ringflash.attention(  # noqa: E731
        q, keys, torch.full_like(keys, value), causal=False, return_lse=True
    )
    out, lse = ringflash.merge(*cut(k[:, :4096], 1.0), *cut(k[:, 4096:], 0.0))
    assert float(out[..., 0]) == pytest.approx(4096 / 4160, abs=1e-5)
    assert float(lse) == pytest.approx(math.log(4160), abs=1e-5)


def test_R22_lse_is_absolute_not_relative_to_a_blocks_own_maximum():
    q, k, v = (torch.randn(1, 24, 2, 16, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    q[..., -1], k[..., -1] = 1.0, 0.0

    def joined(shift_a, shift_b):
        shifted = k.clone()
        shifted[:, :12, :, -1], shifted[:, 12:, :, -1] = shift_a, shift_b
        halves = (
            ringflash.attention(q, shifted[:, half], v[:, half], causal=False, scale=1.0, return_lse=True)
            for half in (slice(12), slice(12, 24))
        )
        (out_a, lse_a), (out_b, lse_b) = halves
        return *ringflash.merge(out_a, lse_a, out_b, lse_b), out_b

    out, lse, _ = joined(0, 0)
    out_up, lse_up, _ = joined(50, 50)
    assert (lse_up - lse - 50).abs().max() < 1e-4 and (out_up - out).abs().max() < 1e-5
    out, _, out_b = joined(0, 50)
    assert (out - out_b).abs().max() < 1e-5


def test_gradients_of_all_four_equal_those_of_the_plain_formula():
    given, _ = parts(torch.float64)
    given = [x.double().requires_grad_() for x in given]
    dout, dlse = torch.randn_like(given[0]), torch.randn_like(given[1])
    lse = torch.logaddexp(given[1], given[3])
    share_a, share_b = ((x - lse).exp().transpose(1, 2)[..., None] for x in (given[1], given[3]))
    out = given[0] * share_a + given[2] * share_b
    want = torch.autograd.grad((out, lse), given, (dout, dlse))
    got = torch.autograd.grad(ringflash.merge(*given), given, (dout, dlse))
    for g, w in zip(got, want, strict=True):
        assert error(g, w) < 1e-5


@pytest.mark.parametrize("empty", ["both", "a", "b"])
def test_empty_rows_give_zero_and_no_nan_anywhere(empty):
    given = [x.clone() for x in parts()[0]]
    if empty in ("both", "a"):
        given[0][:, 2], given[1][:, :, 2] = 0, -torch.inf
    if empty in ("both", "b"):
        given[2][:, 2], given[3][:, :, 2] = 0, -torch.inf
    given = [x.requires_grad_() for x in given]
    out, lse = ringflash.merge(*given)
    if empty == "both":
        assert not out[:, 2].any() and (lse[:, :, 2] == -torch.inf).all()
    else:
        kept = 0 if empty == "b" else 2
        assert torch.equal(out[:, 2], given[kept][:, 2]) and torch.equal(lse[:, :, 2], given[kept + 1][:, :, 2])
    grads = torch.autograd.grad((out, lse), given, (torch.randn_like(out), torch.randn_like(lse)))
    assert all(torch.isfinite(grad).all() for grad in grads)
    if empty == "both":
        assert not any(grad[:, 2].any() for grad in grads[::2]) and not any(grad[:, :, 2].any() for grad in grads[1::2])


@pytest.mark.parametrize("batch", [1, 3])
def test_R49_a_wrong_layout_of_lse_is_refused(batch):
    out, lse = torch.zeros(batch, 7, 4, 16), torch.zeros(batch, 4, 7)
    ringflash.merge(out, lse, out, lse)
    for wrong in (lse.transpose(1, 2), lse[0], lse[..., None]):
        with pytest.raises(ValueError, match=rf"lse_b is .* must be \[B, H, L\] = \[{batch}, 4, 7\]"):
            ringflash.merge(out, lse, out, wrong)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda o, s: (o.long(), s, o, s), TypeError, "out_a is torch.int64"),
        (lambda o, s: (o, s.int(), o, s), TypeError, "lse_a is torch.int32"),
        (lambda o, s: (o, s, o[:, :3], s), ValueError, r"out_a \[1, 7, 4, 16\] and out_b \[1, 3, 4, 16\]"),
        (lambda o, s: (o, s, o, None), TypeError, "lse_b is NoneType; merge takes floating point tensors"),
        (lambda o, s: (o, s, o.to("meta"), s), ValueError, "out_b is on meta and out_a on cpu; all must be on one"),
        (lambda o, s: (o[0], s, o[0], s), ValueError, r"out_a \[7, 4, 16\]"),
    ],
)
def test_merge_refuses_what_does_not_belong_together(change, kind, words):
    with pytest.raises(kind, match=words):
        ringflash.merge(*change(torch.zeros(1, 7, 4, 16), torch.zeros(1, 4, 7)))
