"""Bad input: each is a ValueError or TypeError that names the argument, its value and what would be accepted."""

from __future__ import annotations

import re

import pytest
import torch
from masks import MASKS
from oracle import check, got, inputs, want
from test_layouts import ring_at

import ringflash
from ringflash import Ring


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def call(change=None, **given):
    q, k, v, *_ = inputs(8)
    return ringflash.attention(*(change(q, k, v) if change else (q, k, v)), **given)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"window": 0}, ValueError, "window=0 must be at least 1"),
        ({"window": -3}, ValueError, "window=-3 must be at least 1"),
        ({"window": 2.5}, TypeError, "window=2.5 is float; it must be an int >= 1 or None"),
        ({"window": True}, TypeError, "window=True is bool"),
        ({"window": "4"}, TypeError, "window='4' is str"),
        ({"causal": 1}, TypeError, "causal=1 is int; it must be True, False or None"),
        ({"causal": "no"}, TypeError, "causal='no' is str"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        ({"scale": float("inf")}, ValueError, "scale=inf must be finite"),
        pytest.param({"scale": 10**400}, ValueError, "must be finite, also in fp32", id="scale=10**400"),
        ({"scale": -1e300}, ValueError, "scale=-1e+300 must be finite, also in fp32"),
        ({"scale": "1"}, TypeError, "scale='1' is str; it must be a finite float or None"),
        ({"scale": torch.tensor(1.0)}, TypeError, "is Tensor; it must be a finite float"),
        ({"kernel": "flash"}, ValueError, "kernel='flash' is unknown; it must be auto or one of eager"),
        ({"kernel": None}, ValueError, "kernel=None is unknown"),
        ({"return_lse": 1}, TypeError, "return_lse=1 is int; it must be True or False"),
        ({"deterministic": None}, TypeError, "deterministic=None is NoneType"),
        ({"deterministic": "no"}, TypeError, "deterministic='no' is str; it must be True or False"),
        ({"cu_seqlens": [0, 5, 4]}, ValueError, "cu_seqlens[2]=4 is below cu_seqlens[1]=5; it must never fall"),
        ({"cu_seqlens": [1, 4, 8]}, ValueError, "cu_seqlens[0]=1 must be 0"),
        ({"cu_seqlens": [0, 4, 8, -1, -1]}, ValueError, "cu_seqlens[3]=-1 is below cu_seqlens[2]=8"),
        ({"cu_seqlens": [0, 9]}, ValueError, "cu_seqlens[-1]=9 is beyond the sequence of 8 tokens"),
        ({"cu_seqlens": [0, 2**40]}, ValueError, "cu_seqlens holds 1099511627776"),
        ({"cu_seqlens": [0]}, ValueError, "cu_seqlens has shape [1]; it must be [documents + 1], one at least"),
        ({"cu_seqlens": []}, ValueError, "cu_seqlens has shape [0]"),
        ({"cu_seqlens": i32(0, 8)[None]}, ValueError, "cu_seqlens has shape [1, 2]"),
        ({"cu_seqlens": torch.tensor([0, 8])}, TypeError, "cu_seqlens is torch.int64; it must be an int32 tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, TypeError, "cu_seqlens is torch.float32"),
        ({"cu_seqlens": [0, 8.0]}, TypeError, "cu_seqlens=[0, 8.0] must be an int32 tensor or a list of ints"),
        ({"cu_seqlens": ""}, TypeError, "cu_seqlens='' must be an int32 tensor or a list of ints"),
        ({"cu_seqlens": 8}, TypeError, "cu_seqlens=8 must be an int32 tensor or a list of ints"),
        ({"cu_seqlens": [False, 8]}, TypeError, "cu_seqlens=[False, 8]"),
        (
            {"intervals": (i32(*[0] * 8), i32(*range(7, -1, -1)))},
            ValueError,
            "hi[1]=6 is below hi[0]=7; it must never fall",
        ),
        ({"intervals": (i32(*[0] * 8), i32(*[9] * 8))}, ValueError, "intervals hi spans [9, 9]; it must lie in [0, 8]"),
        ({"intervals": (i32(*[-1] * 8), i32(*[8] * 8))}, ValueError, "intervals lo spans [-1, -1]"),
        ({"intervals": (i32(0), i32(8))}, ValueError, "intervals lo has shape [1]; it must be [8], one a query"),
        (
            {"intervals": (torch.zeros(8), i32(*[8] * 8))},
            TypeError,
            "intervals lo is torch.float32; it must be an int32",
        ),
        ({"intervals": (i32(*[0] * 8), [8] * 8)}, TypeError, "intervals hi is list; it must be an int32 tensor"),
        ({"intervals": i32(*[0] * 8)}, TypeError, "intervals is Tensor; it must be a pair (lo, hi)"),
        ({"intervals": (i32(*[0] * 8),)}, TypeError, "intervals is tuple; it must be a pair"),
    ],
    ids=str,
)
def test_R45_R48_a_bad_mask_or_flag_is_refused(given, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        call(**given)
    with pytest.raises(kind, match=re.escape(words)):
        ringflash.explain(*inputs(8)[:3], **given)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda q, k, v: (q, k, v[:, :5]), ValueError, "k [1, 8, 2, 16] and v [1, 5, 2, 16] must have the same shape"),
        (lambda q, k, v: (q, k[:, :, :, :8], v[:, :, :, :8]), ValueError, "q has head dimension 16 and k has 8"),
        (lambda q, k, v: (x[..., :8] for x in (q, k, v)), ValueError, "head dimension 8"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "q has 3 heads, which must be a multiple of the 2 heads"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "q has 4 heads, which must be a multiple of the 0"),
        (lambda q, k, v: (q[:, :, :0], k, v), ValueError, "q has 0 heads"),
        (lambda q, k, v: (q.expand(2, -1, -1, -1), k, v), ValueError, "q has batch 2 and k has 1; they must be equal"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "q is torch.float32, k is torch.float16, v is torch.float32"),
        (lambda q, k, v: (x.double() for x in (q, k, v)), TypeError, "all three must be the same of float32, bfloat16"),
        (lambda q, k, v: (q.to("meta"), k, v), ValueError, "q is on meta, k on cpu, v on cpu"),
        (lambda q, k, v: (q[0], k, v), ValueError, "q has shape [8, 4, 16]; it must be [batch, tokens, heads, head"),
        (lambda q, k, v: (q, k, v.tolist()), TypeError, "v is list; it must be a tensor"),
        (lambda q, k, v: (None, k, v), TypeError, "q is NoneType; it must be a tensor"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(change, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        call(change, kernel="eager")
    with pytest.raises(kind, match=re.escape(words)):
        ringflash.explain(*change(*inputs(8)[:3]), kernel="eager")


def test_documents_need_batch_1_and_as_many_keys_as_queries():
    q, k, v, *_ = inputs(8, batch=3)
    words = "cu_seqlens packs documents into one row: batch must be 1, got 3"
    with pytest.raises(ValueError, match=words):
        ringflash.attention(q, k, v, cu_seqlens=[0, 8])
    with pytest.raises(ValueError, match=words):
        ringflash.attention(q, k, v, layout=Ring().layout(8, cu_seqlens=[0, 8]))
    with pytest.raises(ValueError, match="cu_seqlens needs as many keys as queries; q has 8 rows and k has 5"):
        ringflash.attention(q[:1], k[:1, :5], v[:1, :5], cu_seqlens=[0, 5])


@pytest.mark.parametrize(
    "given",
    [{"causal": True}, {"causal": False}, {"cu_seqlens": [0, 8]}, {"intervals": (i32(*[0] * 8), i32(*[8] * 8))}],
    ids=str,
)
@pytest.mark.parametrize("function", [ringflash.attention, ringflash.reference.attention, ringflash.explain])
def test_a_mask_together_with_a_layout_is_refused(function, given):
    q, k, v, *_ = inputs(8)
    with pytest.raises(ValueError, match=f"{next(iter(given))} was given together with layout="):
        function(q, k, v, layout=Ring().layout(8), **given)


def test_R48_documents_may_end_before_the_tensor_does_the_rest_is_padding():
    tensors = inputs(8)
    results = got(*tensors, cu_seqlens=[0, 5])
    assert not results["out"][:, 5:].any() and (results["lse"][..., 5:] == -torch.inf).all()
    check(results, want(*tensors, cu_seqlens=[0, 5]))


@pytest.mark.parametrize("given", [i32(0, 3, 3, 8), [0, 3, 3, 8], (0, 3, 8), i32(0, 3, 8, 8, 8)], ids=str)
def test_R45_filler_at_the_end_empty_documents_and_lists_mean_the_same(given):
    q, k, v, *_ = inputs(8)
    assert torch.equal(
        ringflash.attention(q, k, v, cu_seqlens=given), ringflash.attention(q, k, v, cu_seqlens=[0, 3, 8])
    )


def test_a_default_device_of_torch_changes_nothing():
    q, k, v, *_ = inputs(8)

    def results() -> list[torch.Tensor]:
        layout = Ring().layout(8, cu_seqlens=[0, 3, 8])
        masks = ({"cu_seqlens": [0, 3, 8]}, {"layout": layout})
        return [layout.position_ids, *(ringflash.attention(q, k, v, **given) for given in masks)]

    want = results()
    with torch.device("meta"):  # as models are made on
        assert all(torch.equal(a, b) for a, b in zip(results(), want, strict=True))


def test_intervals_are_not_causal_unless_told():
    q, k, v, *_ = inputs(8)
    whole = (i32(*[0] * 8), i32(*[8] * 8))
    plain = ringflash.attention(q, k, v, intervals=whole)
    assert torch.equal(plain, ringflash.attention(q, k, v, causal=False))
    assert torch.equal(ringflash.attention(q, k, v, intervals=whole, causal=True), ringflash.attention(q, k, v))


def test_R39_intervals_count_key_positions_where_lengths_differ():
    tensors = inputs(3, 6)
    given = {"intervals": (i32(0, 1, 4), i32(2, 5, 6))}
    check(got(*tensors, **given), want(*tensors, **given))
    with pytest.raises(ValueError, match=re.escape("intervals lo has shape [6]; it must be [3], one a query")):
        call(lambda q, k, v: (q[:, :3], k[:, :6], v[:, :6]), intervals=(i32(*range(6)), i32(*[6] * 6)))


def test_a_window_beyond_every_sequence_is_no_window():
    q, k, v, *_ = inputs(8)
    assert torch.equal(ringflash.attention(q, k, v, window=2**62), ringflash.attention(q, k, v))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"layout": "spiral"}, ValueError, "layout='spiral' is unknown; it must be one of contiguous, zigzag"),
        ({"ulysses": 0}, ValueError, "ulysses=0 must be at least 1"),
        ({"ulysses": 2.0}, TypeError, "ulysses=2.0 is float; it must be an int"),
        ({"ulysses": 2}, ValueError, "ulysses=2 must divide the 1 ranks"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be a positive number of seconds"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s=nan"),
        ({"timeout_s": 1e300}, ValueError, "timeout_s=1e+300 must be a positive number of seconds, at most 31536000"),
        pytest.param({"timeout_s": 10**400}, ValueError, "a positive number of seconds", id="timeout_s=10**400"),
        ({"timeout_s": "60"}, TypeError, "timeout_s='60' is str; it must be a number of seconds"),
        ({"group": [0, 1]}, TypeError, "group is list; it must be a ProcessGroup, a DeviceMesh or None"),
    ],
    ids=str,
)
def test_a_bad_ring_is_refused(given, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        Ring(**given)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"seq_len": 0}, ValueError, "seq_len=0 must be in [1, 2147483647]"),
        ({"seq_len": -8}, ValueError, "seq_len=-8"),
        ({"seq_len": 2**31}, ValueError, "seq_len=2147483648 must be in"),
        ({"seq_len": 8.0}, TypeError, "seq_len=8.0 is float; it must be an int"),
        ({"seq_len": 9}, ValueError, "seq_len=9 must be a multiple of 2 for layout 'zigzag'"),
        ({"seq_len": 8, "cu_seqlens": [0, 9]}, ValueError, "cu_seqlens[-1]=9 is beyond the sequence of 8 tokens"),
        ({"seq_len": 8, "causal": 0}, TypeError, "causal=0 is int"),
        ({"seq_len": 8, "intervals": (i32(0), i32(8))}, ValueError, "intervals lo has shape [1]; it must be [8]"),
    ],
    ids=str,
)
def test_a_bad_layout_is_refused(given, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        Ring().layout(**given)


@pytest.mark.parametrize("name", ["q", "k"])
def test_local_tensors_of_the_wrong_length_are_refused(name):
    layout = ring_at(0, 4, "zigzag").layout(64)
    q, k, v, *_ = inputs(16)
    wrong = {"q": (torch.cat([q, q], 1), k, v), "k": (q, torch.cat([k, k], 1), torch.cat([v, v], 1))}[name]
    words = f"{name} has 32 tokens; with this layout of 64 tokens over 4 ranks it must have 16"
    with pytest.raises(ValueError, match=words):
        ringflash.attention(*wrong, layout=layout)
    with pytest.raises(ValueError, match=words):
        ringflash.explain(*wrong, layout=layout)


def test_the_reference_refuses_a_local_part():
    layout = ring_at(0, 4, "zigzag").layout(64)
    with pytest.raises(ValueError, match="q has 16 tokens and k has 16; the reference takes the whole sequence of 64"):
        ringflash.reference.attention(*inputs(16)[:3], layout=layout)


@pytest.mark.parametrize(
    ("change", "given", "kind", "words"),
    [
        (lambda q, k, v: (None, k, v), {}, TypeError, "q is NoneType; it must be a tensor"),
        (lambda q, k, v: (q[0], k, v), {}, ValueError, "it must be [batch, tokens, heads, head dimension]"),
        (lambda q, k, v: (q.long(), k, v), {}, TypeError, "q is torch.int64; the reference takes floating point"),
        (lambda q, k, v: (q[:, :, :3], k, v), {}, ValueError, "q has 3 heads, which must be a multiple of the 2 heads"),
        (lambda q, k, v: (q.repeat(2, 1, 1, 1), k, v), {}, ValueError, "q has batch 2 and k has 1"),
        (lambda q, k, v: (q, k, v[:, 1:]), {}, ValueError, "must have the same shape"),
        (lambda *x: x, {"softcap": 0}, ValueError, "softcap=0 must be positive and finite, or None"),
        (lambda *x: x, {"sinks": torch.zeros(3)}, ValueError, "sinks has shape [3]; it must be [4]"),
        (lambda *x: x, {"layout": "zigzag"}, TypeError, "layout is str; it must come from ring.layout"),
        (lambda *x: x, {"return_lse": 1}, TypeError, "return_lse=1 is int; it must be True or False"),
    ],
)
def test_the_reference_refuses_what_attention_does(change, given, kind, words):
    """Some of it broadcasts, or divides by 0: a right answer to another question is worse than none."""
    with pytest.raises(kind, match=re.escape(words)):
        ringflash.reference.attention(*change(*inputs(8)[:3]), **given)


@pytest.mark.parametrize("name", MASKS)
def test_the_reference_takes_the_mask_of_a_layout(name):
    given = MASKS[name](64)
    layout = ring_at(1, 4, "zigzag").layout(64, **{key: value for key, value in given.items() if key != "window"})
    tensors = inputs(64)[:3]
    for_call = {"window": given["window"]} if "window" in given else {}
    by_layout = ringflash.reference.attention(*tensors, layout=layout, return_lse=True, **for_call)
    by_mask = ringflash.reference.attention(*tensors, return_lse=True, **given)
    assert all(torch.equal(a, b) for a, b in zip(by_layout, by_mask, strict=True))


def test_arguments_after_the_tensors_are_named():
    q, k, v, *_ = inputs(8)
    for function in (ringflash.attention, ringflash.reference.attention, ringflash.explain):
        with pytest.raises(TypeError, match="positional"):
            function(q, k, v, None)


SPARSE = {"sparse": torch.Tensor.to_sparse, "mkldnn": torch.Tensor.to_mkldnn}


@pytest.mark.parametrize("kind", SPARSE)
def test_a_tensor_that_is_not_dense_is_refused(kind):
    q, k, v, *_ = inputs(8)
    out, lse = ringflash.attention(q, k, v, return_lse=True)
    layout = Ring().layout(8)
    words = r" is a torch\.(sparse_coo|_mkldnn) tensor; it must be dense \(torch\.strided\)"
    for function in (ringflash.attention, ringflash.explain, ringflash.reference.attention):
        with pytest.raises(TypeError, match=f"k{words}"):
            function(q, SPARSE[kind](k), v)
        with pytest.raises(TypeError, match=f"sinks{words}"):
            function(q, k, v, sinks=SPARSE[kind](torch.zeros(4)))
    for cut in (layout.shard, layout.unshard):
        with pytest.raises(TypeError, match=f"shard: x{words}"):
            cut(SPARSE[kind](torch.zeros(1, 8)))
    with pytest.raises(TypeError, match=f"out_b{words}"):
        ringflash.merge(out, lse, SPARSE[kind](out), lse)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_is_refused(layout):
    nested = torch.nested.nested_tensor([torch.zeros(5, 2, 16), torch.zeros(3, 2, 16)], layout=layout)
    for function in (ringflash.attention, ringflash.explain, ringflash.reference.attention):
        with pytest.raises(TypeError, match="q is a nested tensor; it must be dense"):
            function(nested, nested, nested)


@pytest.mark.parametrize(
    "given", [{"cu_seqlens": i32(0, 8)}, {"intervals": (i32(*[0] * 8), i32(*[8] * 8))}], ids=["cu_seqlens", "intervals"]
)
def test_a_mask_without_values_is_refused(given):
    q, k, v, *_ = inputs(8)
    (name, value) = next(iter(given.items()))
    value = value.to("meta") if name == "cu_seqlens" else (value[0], value[1].to("meta"))
    words = f"{name}.* is on meta, where it has no values; it must be on a CPU or a GPU"
    for function in (ringflash.attention, ringflash.explain, ringflash.reference.attention):
        with pytest.raises(ValueError, match=words):
            function(q, k, v, **{name: value})
    with pytest.raises(ValueError, match=f"{name}.* is on meta"):
        Ring().layout(8, **{name: value})


def test_a_softcap_that_fp32_cannot_divide_by_is_refused():
    q, k, v, *_ = inputs(8)
    with pytest.raises(ValueError, match=r"softcap=1e-300 must be at least 1\.1754\d+e-38"):
        ringflash.attention(q, k, v, softcap=1e-300)
    assert ringflash.attention(q, k, v, softcap=2e-38).isfinite().all()


def test_the_reference_needs_a_head_dimension():
    empty = torch.zeros(1, 8, 2, 0)
    with pytest.raises(ValueError, match="q has head dimension 0; the reference takes any of at least 1"):
        ringflash.reference.attention(empty, empty, empty)
