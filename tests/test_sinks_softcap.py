"""Attention sinks and capped scores: on one device, over rings, with Ulysses, against the fp64 reference."""

from __future__ import annotations

import inspect

import played
import pytest
import torch
from conftest import error
from masks import MASKS
from oracle import check, inputs

import ringflash
from ringflash import gathering

SIZE = 96
HEADS = 4
ASKED = {"sinks": {"sinks": True}, "softcap": {"softcap": 1.5}, "both": {"sinks": True, "softcap": 1.5}}
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def asked(name: str) -> dict:
    """One sink far above the scores, one far below, and one that is none at all."""
    given = dict(ASKED[name])
    if given.get("sinks"):
        given["sinks"] = torch.tensor([0.7, 9.0, -40.0, -torch.inf])
    return given


def differentiated(attention, tensors, *, sinks=None, exact=False, **given) -> dict[str, torch.Tensor]:
    """NAMES of attention(q, k, v, ...), a function of the library or the reference."""
    q, k, v, dout, dlse = (x.double() if exact else x for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        leaves.append((sinks.double() if exact else sinks).clone().requires_grad_())
        given["sinks"] = leaves[-1]
    out, lse = attention(*leaves[:3], return_lse=True, **given)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False))


@pytest.mark.parametrize("mask", ["causal", "documents_window", "padding", "nothing", "random"])
@pytest.mark.parametrize("name", ASKED)
def test_one_device_equals_the_reference(name, mask):
    tensors = inputs(SIZE)
    given = asked(name) | MASKS[mask](SIZE)
    wanted = differentiated(ringflash.reference.attention, tensors, exact=True, **given)
    check(differentiated(ringflash.attention, tensors, **given), wanted)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize(("size", "layout", "mask"), [(4, "zigzag", "causal"), (3, "contiguous", "window")])
@pytest.mark.parametrize("name", ASKED)
def test_a_ring_equals_the_reference(name, size, layout, mask, rotate):
    q, k, v, dout, dlse = inputs(SIZE)
    given = MASKS[mask](SIZE)
    wanted = differentiated(ringflash.reference.attention, (q, k, v, dout, dlse), exact=True, **given, **asked(name))
    got = played.attention(q, k, v, dout, layout=layout, size=size, dlse=dlse, rotate=rotate, **given, **asked(name))
    check(got, wanted)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("mask", ["causal", "documents", "padding", "random_documents"])
@pytest.mark.parametrize("name", ASKED)
def test_a_gather_equals_the_reference(monkeypatch, name, mask, rotate):
    """In two sections of the heads, beside documents of one rank, and with rows that no visit may write."""
    monkeypatch.setattr(gathering, "SECTION_PAIRS", 1)
    q, k, v, dout, dlse = inputs(SIZE, heads=HEADS, groups=2)
    given = MASKS[mask](SIZE) | asked(name)
    wanted = differentiated(ringflash.reference.attention, (q, k, v, dout, dlse), exact=True, **given)
    mesh = {"size": 4, "layout": "zigzag", "arrangement": "gather", "rotate": rotate}
    check(played.attention(q, k, v, dout, dlse=dlse, **mesh, **given), wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mask", [{"cu_seqlens": [0, 20, 53]}, {"cu_seqlens": [0, 0]}], ids=["padding", "all"])
def test_nothing_in_the_padding_reaches_the_rows_before_it_or_the_sinks(mask, value):
    """Its lse is the sink and not -inf, so that a NaN made of its out = 0 must be told in another way."""
    begin = mask["cu_seqlens"][-1]

    def results(filling: float, rows_of_lse: float = 0.0) -> dict[str, torch.Tensor]:
        q, k, v, dout, dlse = inputs(SIZE)
        for x in (q, k, v, dout):
            x[:, begin:] = filling
        dlse[..., begin:] += rows_of_lse
        return differentiated(ringflash.attention, (q, k, v, dout, dlse), **asked("sinks"), **mask)

    zero, poisoned, answered = results(0.0), results(value), results(0.0, value)
    assert all(torch.equal(poisoned[name], zero[name]) for name in NAMES)
    assert all(torch.equal(answered[name], zero[name]) for name in NAMES[:-1]), "lse is the sink, which alone sees it"


def test_a_softcap_far_above_the_scores_changes_little_and_one_below_them_much():
    tensors = inputs(SIZE)
    plain = differentiated(ringflash.attention, tensors)
    far, near = (differentiated(ringflash.attention, tensors, softcap=cap) for cap in (1e4, 0.1))
    assert error(far["out"], plain["out"]) < 1e-5 < 1e-2 < error(near["out"], plain["out"])


@pytest.mark.parametrize("kernel", ["sdpa", "gluon", "gluon_fp8", "cudnn", "fa4"])
def test_a_kernel_that_caps_no_scores_says_so(kernel):
    q, k, v, *_ = inputs(SIZE)
    with pytest.raises(ValueError, match=f"kernel '{kernel}' does not cap scores; kernel='eager' or 'triton' does"):
        ringflash.attention(q, k, v, softcap=2.0, kernel=kernel)
    with pytest.raises(ValueError, match="does not cap scores"):
        ringflash.explain(q, k, v, softcap=2.0, kernel=kernel)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"softcap": 0.0}, ValueError, r"softcap=0.0 must be positive and finite, or None"),
        ({"softcap": float("inf")}, ValueError, r"softcap=inf must be positive"),
        ({"softcap": True}, TypeError, r"softcap=True is bool"),
        ({"scale": "1"}, TypeError, r"scale='1' is str; it must be a finite float or None"),
        ({"scale": torch.nan}, ValueError, r"scale=nan must be finite"),
        ({"return_lse": 1}, TypeError, r"return_lse=1 is int; it must be True or False"),
        ({"sinks": [0.0] * HEADS}, TypeError, r"sinks is list; it must be a floating-point tensor \[H\]"),
        ({"sinks": torch.zeros(HEADS, dtype=torch.int32)}, TypeError, r"sinks is torch.int32"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks has shape \[2\]; it must be \[4\]"),
    ],
)
def test_a_wrong_argument_is_refused(given, kind, message):
    q, k, v, *_ = inputs(SIZE)
    for function in (ringflash.attention, ringflash.explain):
        with pytest.raises(kind, match=message):
            function(q, k, v, **given)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [{}, {"window": 3}, {"cu_seqlens": [0, 20, 53]}], ids=["causal", "window", "padding"])
def test_a_sink_that_is_no_number_shows_in_its_head_and_in_no_other(value, kernel, mask):
    def results(sink: float) -> dict[str, torch.Tensor]:
        sinks = torch.tensor([0.5, sink, -1.0, 0.0])
        return differentiated(ringflash.attention, inputs(SIZE), sinks=sinks, kernel=kernel, **mask)

    wrong, right = results(value), results(0.0)
    see = mask.get("cu_seqlens", [SIZE])[-1]
    assert wrong["out"][:, :see, 1].isnan().all() and wrong["dq"][:, :see, 1].isnan().any()
    assert wrong["dk"][:, :, 0].isnan().any() and wrong["dsinks"][1].isnan()
    others = [0, 2, 3]
    for name in ("out", "dq"):
        assert torch.equal(wrong[name][:, :, others], right[name][:, :, others]), name
    assert torch.equal(wrong["lse"][:, others], right["lse"][:, others])
    assert torch.equal(wrong["dsinks"][others], right["dsinks"][others])
    assert torch.equal(wrong["dk"][:, :, 1], right["dk"][:, :, 1]), "the keys of the other heads"


def test_explain_takes_what_attention_takes():
    q, k, v, *_ = inputs(SIZE)
    given = {"scale": 0.3, "sinks": torch.zeros(HEADS), "softcap": 2.0, "return_lse": True, "window": 5}
    assert ringflash.explain(q, k, v, **given) == ringflash.explain(q, k, v, softcap=2.0, window=5)
    taken = [inspect.signature(function).parameters for function in (ringflash.attention, ringflash.explain)]
    assert list(taken[0]) == list(taken[1]), "the same names in the same order"
    assert {n: p.default for n, p in taken[0].items()} == {n: p.default for n, p in taken[1].items()}


def test_the_gradient_of_sinks_has_their_type():
    q, k, v, *_ = inputs(SIZE)
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16, requires_grad=True)
    ringflash.attention(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == torch.bfloat16 and sinks.grad.abs().max() > 0


def on_ranks(ulysses: int) -> None:
    """Sinks of all heads on each rank, which computes some of them; their gradients are summed over ranks."""
    import torch.distributed as dist

    q, k, v, dout, _ = inputs(SIZE)
    layout = ringflash.Ring(ulysses=ulysses).layout(SIZE)
    parts = [layout.shard(x) for x in (q, k, v, dout)]
    sinks = torch.tensor([0.7, 2.0, -1.0, 0.0], requires_grad=True)
    leaves = [x.requires_grad_() for x in parts[:3]]
    out = ringflash.attention(*leaves, layout=layout, sinks=sinks, softcap=1.5)
    grads = torch.autograd.grad(out, [*leaves, sinks], parts[3])
    dist.all_reduce(grads[3])
    got = {"out": layout.unshard(out.detach())} | {
        name: layout.unshard(grad) for name, grad in zip(("dq", "dk", "dv"), grads, strict=False)
    }
    wide = [x.double().requires_grad_() for x in (q, k, v, sinks.detach())]
    wanted = ringflash.reference.attention(*wide[:3], sinks=wide[3], softcap=1.5)
    grads_wanted = torch.autograd.grad(wanted, wide, dout.double())
    expected = dict(zip(("out", "dq", "dk", "dv", "dsinks"), (wanted.detach(), *grads_wanted), strict=True))
    check(got | {"dsinks": grads[3]}, expected)


def test_ulysses_gives_each_rank_the_sinks_of_its_heads(pool):
    pool(4)(on_ranks, 2)
