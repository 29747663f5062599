"""The kernels cudnn and fa4: what is around the libraries. A dense stand-in computes what the libraries would.

The stand-ins keep to what the libraries know: full and causal squares, a scale above 0, results in the inputs' type,
and delta only through `out` (cudnn) or `dlse` (fa4). The libraries themselves: test_gpu.py.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import played
import pytest
import torch
from conftest import TOLERANCE, error
from test_kernel_sdpa import MASKS, NAMES, inputs, masks_of, want

import ringflash
from ringflash.kernels import cudnn, fa4, pieces

KERNELS = {"cudnn": cudnn, "fa4": fa4}


def softmax(q, k, v, lse, causal: bool, scale: float):
    """(weights, heads of k, heads of v, lse) of [B, H, n, D], by the given lse or their own."""
    assert scale > 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(repeats, 1) for x in (k, v))
    scores = q.float() @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2], "aligned to the top left here, to the bottom right there"
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), k, v, lse


def gradients(dout, q, k, v, lse, delta, causal: bool, scale: float):
    """dq, dk, dv of [B, H, n, D] in the inputs' types."""
    weights, k_heads, v_heads, _ = softmax(q, k, v, lse, causal, scale)
    dscores = weights * (dout.float() @ v_heads.mT - delta[..., None]) * scale
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dscores.mT @ q.float(), weights.mT @ dout.float()))
    return (dscores @ k_heads).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def dense_cudnn(q, k, v, *, causal, scale):
    assert min(q.shape[2], k.shape[2]) > 1, "torch refuses cuDNN a single query or key"
    weights, _, v_heads, lse = softmax(q, k, v, None, causal, scale)
    return (weights @ v_heads).to(q.dtype), lse[..., None]


def dense_cudnn_backward(dout, q, k, v, out, lse, *, causal, scale):
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1)
    assert dout.stride() == out.stride() == torch.empty_like(q).stride()
    return gradients(dout, q, k, v, lse[..., 0], (dout.float() * out.float()).sum(-1), causal, scale)


def dense_flash(q, k, v, *, causal, scale):
    weights, _, v_heads, lse = softmax(*(x.transpose(1, 2) for x in (q, k, v)), None, causal, scale)
    return (weights @ v_heads).to(q.dtype).transpose(1, 2), lse


def dense_flash_backward(dout, q, k, v, lse, dlse, *, causal, scale, deterministic):
    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v))
    return tuple(x.transpose(1, 2) for x in gradients(*heads_first, lse, -dlse, causal, scale))


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch) -> str:
    """The name of each kernel, whose library is a dense one on the CPU."""
    monkeypatch.setattr(cudnn, "_cudnn", dense_cudnn)
    monkeypatch.setattr(cudnn, "_cudnn_backward", dense_cudnn_backward)
    monkeypatch.setattr(fa4, "_flash_forward", dense_flash)
    monkeypatch.setattr(fa4, "_flash_backward", dense_flash_backward)
    monkeypatch.setattr(ringflash.KERNELS[request.param], "refuses", lambda *call: None)
    return request.param


def compare(kernel: str, tensors, dtype: torch.dtype, *, size: int = 1, layout: str = "contiguous", **arguments):
    """The kernel in a ring of `size`, against the fp64 reference; cudnn without a gradient of lse."""
    dlse = tensors[4] if kernel == "fa4" else torch.zeros_like(tensors[4])
    results = played.attention(
        *tensors[:4], dlse=dlse if kernel == "fa4" else None, kernel=kernel, layout=layout, size=size, **arguments
    )
    wanted = want(*tensors[:4], dlse, **arguments)
    rounding = {
        name for name in ("dq", "dk") if wanted[name].abs().max() < 1e-9
    }  # rows of one key: their true value is 0
    errors = {name: error(results[name], wanted[name]) for name in NAMES if name not in rounding}
    assert all(results[name].abs().max() < 1e-5 for name in rounding)
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


@pytest.mark.parametrize("layout, size", [("contiguous", 1), ("zigzag", 3)])  # test_kernel_sdpa.py has every layout
@pytest.mark.parametrize("name", MASKS)
def test_every_ring_equals_the_reference(kernel, name, layout, size, monkeypatch):
    monkeypatch.setattr(pieces, "MOST", 1000)
    compare(kernel, inputs(), torch.float32, layout=layout, size=size, **masks_of(name))


@pytest.mark.parametrize("dtype", cudnn.TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "prefix"])
def test_half_types_are_joined_in_fp32(kernel, name, size, dtype):
    compare(kernel, inputs(dtype=dtype), dtype, layout="zigzag", size=size, **masks_of(name))


@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (8, 2), (4, 4)])
def test_grouped_heads(kernel, heads, groups):
    compare(kernel, inputs(24, 24, heads, groups, batch=2), torch.float32, window=9)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
def test_any_finite_scale(kernel, scale):
    compare(kernel, inputs(), torch.float32, scale=scale, window=30)


def test_a_mask_of_one_piece_is_handed_over_whole_and_uncopied(kernel, monkeypatch):
    q, k, v, dout, _ = inputs(dtype=torch.bfloat16)
    starts = []
    for name in ("_cudnn", "_cudnn_backward"):
        library = getattr(cudnn, name)
        watched = lambda *tensors, _library=library, **flags: starts.append(tensors) or _library(*tensors, **flags)  # noqa: E731
        monkeypatch.setattr(cudnn, name, watched)
    for name in ("_flash_forward", "_flash_backward"):
        library = getattr(fa4, name)
        watched = lambda *tensors, _library=library, **flags: starts.append(tensors) or _library(*tensors, **flags)  # noqa: E731
        monkeypatch.setattr(fa4, name, watched)
    played.attention(q, k, v, dout, kernel=kernel)
    forward, backward = starts
    assert [x.data_ptr() for x in forward] == [x.data_ptr() for x in backward[1:4]]
    assert [x.dtype for x in forward] == [torch.bfloat16] * 3 and len({x.data_ptr() for x in forward}) == 3


def test_strides_that_a_library_cannot_walk_are_copied():
    x = torch.randn(2, 5, 3, 32).bfloat16()
    packed = torch.stack((x, x), 3)[:, :, :, 1]
    assert cudnn.walkable(x) is x and cudnn.walkable(packed) is packed
    for bad in (x[..., 1:-1], torch.cat((x, x), -1)[..., 4:36], x[:, :, :1].expand(2, 5, 3, 32), x.transpose(2, 3)):
        copied = cudnn.walkable(bad)
        assert torch.equal(copied, bad) and copied.is_contiguous()


def test_R20_a_gradient_of_lse_is_refused_by_cudnn_and_exact_in_fa4(kernel):
    q, k, v, dout, dlse = inputs(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.attention(*leaves, return_lse=True, kernel=kernel)
    if kernel == "cudnn":
        with pytest.raises(ValueError, match=r"kernel 'cudnn' has no gradient of lse.*kernel='triton'"):
            torch.autograd.grad((out, lse), leaves, (dout, dlse))
    else:
        _, _, dv = torch.autograd.grad(lse, leaves, dlse)
        assert not dv.any()


def test_more_than_64_pieces_are_refused_before_anything_is_computed(kernel):
    borders = list(range(0, 131, 2))
    q, k, v, *_ = inputs(130, 130)
    with pytest.raises(ValueError, match=r"into 65 full rectangles and causal squares, and more than 64.*'triton'"):
        ringflash.attention(q, k, v, cu_seqlens=borders, kernel=kernel)
    ringflash.attention(q, k, v, cu_seqlens=borders[:-1], kernel=kernel)


@pytest.mark.parametrize("kernel", ["sdpa", *KERNELS], indirect=True)
def test_the_pieces_of_a_view_are_cut_once(kernel, monkeypatch):
    cut, plain = [], pieces.cut
    monkeypatch.setattr(pieces, "cut", lambda view: cut.append(view) or plain(view))
    played.attention(*inputs(64, 64)[:4], kernel=kernel, window=16, size=2)
    assert len(cut) == len({id(view) for view in cut}) == 3  # rank 0 sees hop 0, rank 1 both


@pytest.mark.parametrize("name", ["thirty keys ahead", "any"])
def test_pieces_that_overlap_are_summed_in_fp32_before_they_are_rounded(kernel, name, monkeypatch):
    monkeypatch.setattr(pieces, "MOST", 1000)
    row = np.arange(96, dtype=np.int32)
    ahead = (row, np.minimum(row + 30, 96))  # its last band: a mirrored square, a rectangle and a square share rows
    lo, hi = ahead if name != "any" else (x.numpy() for x in masks_of("any")["intervals"])
    view = ringflash.mask.plan_one_device(96, lo, hi).views[0]
    q, k, v, dout, _ = inputs(dtype=torch.bfloat16)
    module = KERNELS[kernel]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        acc = torch.empty_like(q, dtype=torch.float32) if dtype == torch.float32 else None
        state = ringflash.kernels.State(acc, torch.empty_like(q), torch.empty(1, 6, 96))
        module.forward(q, k, v, view, state, scale=0.2, first=True, last=True)
        delta = module.delta(state.out, dout, None)
        dq = torch.ones_like(q, dtype=torch.float32)
        dk, dv = (torch.full_like(k, torch.nan, dtype=dtype) for _ in range(2))
        module.backward(dout, q, k, v, state.lse, delta, view, dq, dk, dv, scale=0.2, deterministic=False)
        results.append((state.out, state.lse, dq, dk.bfloat16(), dv.bfloat16()))
    assert all(torch.equal(full, half) for full, half in zip(*results, strict=True))


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-16), (torch.float16, 2**-22)], ids=str)
def test_two_numbers_a_row_stand_for_out(dtype, bound):
    generator = torch.Generator().manual_seed(1)
    out, dout = (torch.randn(2, 50, 3, 64, generator=generator).to(dtype) for _ in range(2))
    dout[:, 1] = 0.0
    dout[:, 2, :, 1:] = 0.0
    dout[:, 3, :, 2:] = 0.0
    dout[:, 4] *= 2.0**-20 if dtype == torch.bfloat16 else 2.0**-4
    dout[:, 5, :, 0] = 1000.0
    out[:, 6] *= 300.0
    delta = (out.float() * dout).sum(-1)
    standing = cudnn.stand_in(dout, delta)
    assert (standing != 0).sum(-1).max() <= 2 and standing.isfinite().all()
    off = (standing.double() * dout.double()).sum(-1) - delta
    smallest = dout.abs().amax(-1) * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    assert (off.abs() <= bound * delta.abs() + smallest).all()
    assert not off[:, 1:3].any(), "nothing, and one number, are exact"


CALL = {"dtype": torch.bfloat16, "width": 64, "batch": 1, "deterministic": False, "capability": (9, 0)}


@pytest.mark.parametrize(
    "kernel, changed, words",
    [
        ("cudnn", {"device": "cpu"}, "q is on cpu; see kernel='triton' and 'eager'"),
        ("cudnn", {"capability": (7, 5)}, "has (7, 5); kernel='eager' runs there"),
        ("cudnn", {"dtype": torch.float32}, "got torch.float32; kernel='triton' takes it"),
        ("cudnn", {"width": 192}, "got 192; kernel='triton' takes it"),
        ("cudnn", {"batch": 70000}, "up to 65535"),
        ("cudnn", {"deterministic": True}, "deterministic=True needs kernel='triton' or 'gluon'"),
        ("fa4", {"device": "cpu"}, "q is on cpu; see kernel='triton'"),
        ("fa4", {"capability": (10, 0)}, "has (10, 0); kernel='triton' runs there"),
        ("fa4", {"dtype": torch.float32}, "got torch.float32; kernel='triton' takes it"),
        ("fa4", {}, "needs the package flash-attn-4 (no module)"),
        ("fa4", {"package": lambda q, k, v: None}, "whose backward takes dlse"),
        ("fa4", {"package": lambda q, k, v, dlse: None, "deterministic": True}, None),
        ("cudnn", {"capability": (8, 0)}, None),
    ],
)
def test_what_they_cannot_do_is_refused(kernel, changed, words, monkeypatch):
    call = CALL | {"device": "cuda"} | changed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: call["capability"])
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    def interface():
        if "package" not in call:
            raise ImportError("no module")
        return SimpleNamespace(_flash_attn_bwd=call["package"])

    monkeypatch.setattr(fa4, "_interface", interface)
    q = SimpleNamespace(
        device=torch.device(call["device"]), dtype=call["dtype"], shape=(call["batch"], 8, 4, call["width"])
    )
    reason = KERNELS[kernel].refuses(q, q, call["deterministic"], 4)
    assert reason is None if words is None else words in reason


def test_the_package_of_fa4_is_silenced_and_nobody_else(monkeypatch):
    package = ModuleType("flash_attn.cute.interface")
    exec("import warnings\ndef _flash_attn_fwd(*call, **how): return warnings.warn('deprecated'), None", vars(package))
    for name, module in (("", ModuleType("flash_attn")), (".cute", SimpleNamespace(interface=package))):
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", module)
    fa4._interface.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        fa4._interface()
        for _ in range(3):
            warnings.warn("of somebody else", stacklevel=1)
            fa4._flash_forward(None, None, None, causal=True, scale=1.0)
    fa4._interface.cache_clear()
    assert [str(warning.message) for warning in seen] == ["of somebody else"], "shown once a place"


@pytest.mark.parametrize("kernel", KERNELS)
def test_explain_refuses_what_attention_refuses(kernel):
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"kernel='{kernel}': kernel '{kernel}' needs an NVIDIA GPU"):
        ringflash.explain(q, q, q, kernel=kernel)


def test_explain_counts_the_pieces_and_refuses_too_many(kernel):
    q = torch.empty(1, 96, 2, 64, dtype=torch.bfloat16)
    (warning,) = ringflash.explain(q, q, q, kernel=kernel, window=16).warnings
    assert f"kernel {kernel} cuts this rank's hops into [11] pieces" in warning
    assert not ringflash.explain(q, q, q, kernel=kernel).warnings
    with pytest.raises(ValueError, match="into 96 full rectangles"):
        ringflash.explain(q, q, q, kernel=kernel, window=1)
