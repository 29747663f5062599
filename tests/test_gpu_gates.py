"""What each kernel must pass before it ships, beyond agreeing with the reference: `pytest -m gpu`.

Exact integers (a miscompiled product shows as a bit), the 2x rule over odd shapes and hard inputs, outputs that nobody
wrote, and 100 repeats. The two backwards of Gluon are two kernels here.
"""

from __future__ import annotations

import pytest
import torch
from test_gpu import draw, masks_of, of_call, want

from ringflash import arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FORMS = [("triton", True), ("gluon", True), ("gluon", False), ("cudnn", False), ("fa4", False), ("fa4", True)]
forms = pytest.mark.parametrize(("kernel", "deterministic"), FORMS)
NAMES = ("out", "dq", "dk", "dv")
ODD = [  # queries, query heads, key heads, head dimension, mask
    (1, 1, 1, 64, "causal"), (63, 2, 1, 64, "full"), (65, 3, 3, 128, "causal"), (127, 4, 2, 128, "full"),
    (191, 2, 2, 96, "causal"), (193, 6, 2, 64, "window"), (257, 2, 1, 128, "window both ways"),
    (320, 2, 2, 192, "causal"), (383, 2, 1, 256, "causal"), (511, 4, 1, 128, "causal"),
    (768, 4, 4, 128, "documents, padding, window"),
]  # fmt: skip


def plain(q, k, v, dout, **masks) -> dict[str, torch.Tensor]:
    """Attention as PyTorch writes it, in the inputs' own type: whose error the rule allows twice."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    q_h, k_h, v_h = (x.transpose(1, 2) for x in leaves)
    scores = q_h @ k_h.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    lo, hi = bounds(q, **masks)
    position = torch.arange(q.shape[1], device=q.device)
    seen = (position >= lo[:, None]) & (position < hi[:, None])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill((lo >= hi)[:, None], 0.0)
    out = (weights @ v_h.repeat_interleave(group, 1)).transpose(1, 2)
    return dict(zip(NAMES, (out, *torch.autograd.grad(out, leaves, dout)), strict=True))


def bounds(q: torch.Tensor, **masks) -> tuple[torch.Tensor, torch.Tensor]:
    """lo, hi of each query."""
    given = {"causal": None, "window": None, "cu_seqlens": None, "intervals": None} | masks
    sides = arguments.mask_of(q, q, None, **given).intervals(q.shape[1], q.shape[1])
    return tuple(torch.from_numpy(side).to(q.device) for side in sides)


def off(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; infinite for NaN."""
    return (x.double() - wanted.double()).abs().nan_to_num(nan=torch.inf).max().item()


def check_twice(tensors, record, *, kernel: str, deterministic: bool, **masks) -> None:
    """No result is further from fp64 than twice plain attention in the same type, and a unit in the last place."""
    got = of_call(*tensors, kernel=kernel, deterministic=deterministic, **masks)
    wanted, other = want(*tensors, None, **masks), plain(*tensors, **masks)
    errors = {name: (off(got[name], wanted[name]), off(other[name], wanted[name])) for name in NAMES}
    record("error_and_plain", {name: [float(f"{x:.3g}") for x in pair] for name, pair in errors.items()})
    for name, (ours, theirs) in errors.items():
        unit = wanted[name].abs().max().item() * torch.finfo(tensors[0].dtype).eps
        # where the result is 0 because two numbers of about 10 cancel, a unit is theirs, in fp32
        unit = max(unit, 10 * torch.finfo(torch.float32).eps)
        assert ours <= 2 * theirs + unit, (name, ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ODD, ids=str)
@forms
def test_error_is_at_most_twice_that_of_plain_attention(kernel, deterministic, shape, dtype, record_property):
    length, heads, groups, width, name = shape
    sizes = [(length, heads), (length, groups), (length, groups), (length, heads)]
    tensors = [draw(1, *size, width, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    masks = masks_of(name, length)
    check_twice(tensors, record_property, kernel=kernel, deterministic=deterministic, **masks)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("inputs", ["large", "outlier columns", "outlier keys", "tiny"])
@forms
def test_hard_inputs(kernel, deterministic, inputs, width, record_property):
    q, k, v, dout = (draw(1, 300, 2, width, dtype=torch.bfloat16, seed=10 + i) for i in range(4))
    if inputs == "large":
        q, k = 4 * q, 4 * k  # scores of some hundreds: nearly one-hot rows
    elif inputs == "outlier columns":
        k[..., :: width // 4] *= 30
    elif inputs == "outlier keys":
        k[:, ::50] *= 20
    else:
        q, k, v, dout = (x * 1e-3 for x in (q, k, v, dout))
    check_twice((q, k, v, dout), record_property, kernel=kernel, deterministic=deterministic)


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@forms
def test_integers_are_exact_in_every_gradient(kernel, deterministic, width):
    """Uniform weights over 256 keys and dS of +-1/256: every product and every sum is exact, in any order."""
    generator = torch.Generator().manual_seed(width)
    length, heads = 256, 2
    integers = lambda: torch.randint(-3, 4, (1, length, heads, width), generator=generator).cuda().bfloat16()  # noqa: E731
    zero = torch.zeros(1, length, heads, width, device="cuda", dtype=torch.bfloat16)
    dout, v = zero.clone(), integers()
    dout[..., 0] = 1.0
    v[:, 0::2, :, 0], v[:, 1::2, :, 0] = 1.0, -1.0  # so delta is 0
    for name, q, k in (("dq", zero, integers()), ("dk", integers(), zero)):
        got = of_call(q, k, v, dout, causal=False, scale=1.0, kernel=kernel, deterministic=deterministic)
        wanted = want(q, k, v, dout, None, causal=False, scale=1.0)
        for result in (name, "dv", "out"):
            assert torch.equal(got[result].float(), wanted[result].bfloat16().float()), result


@pytest.mark.parametrize("width", [128, 256])
@forms
def test_every_element_is_written(kernel, deterministic, width):
    """Memory that the allocator hands out is full of NaN; rows that see nothing and keys that nobody sees are 0."""
    tensors = [draw(1, 700, 2, width, dtype=torch.bfloat16, seed=i) for i in range(4)]
    masks = {"cu_seqlens": [0, 130, 130, 400]}
    of_call(*tensors, kernel=kernel, deterministic=deterministic, **masks)
    wanted = want(*tensors, None, **masks)
    for size in (2**18, 2**20, 2**22):
        poison = [torch.full((size,), torch.nan, device="cuda") for _ in range(6)]
        del poison
        got = of_call(*tensors, kernel=kernel, deterministic=deterministic, **masks)
        for name in NAMES:
            assert off(got[name], wanted[name]) <= 0.03 * wanted[name].abs().max().item(), name
            assert not got[name][:, 400:].any(), name
        assert (got["lse"][:, :, 400:] == -torch.inf).all() and got["lse"][:, :, :400].isfinite().all()


@pytest.mark.parametrize("width", [128, 256])
@forms
def test_a_hundred_repeats(kernel, deterministic, width, record_property):
    """out, lse, dk, dv are the same bits; dq too, or within its rounding where it may be summed in any order."""
    tensors = [draw(1, 1000, heads, width, dtype=torch.bfloat16, seed=i) for i, heads in enumerate((8, 2, 2, 8))]
    first = of_call(*tensors, kernel=kernel, deterministic=deterministic)
    wanted = want(*tensors, None)
    bound = 2 * off(first["dq"], wanted["dq"])
    same = ("out", "lse", "dk", "dv", "dq") if deterministic else ("out", "lse", "dk", "dv")
    same = ("out", "lse") if kernel in ("cudnn", "fa4") and not deterministic else same
    worst = 0.0
    for _ in range(100):
        again = of_call(*tensors, kernel=kernel, deterministic=deterministic)
        assert all(torch.equal(first[name], again[name]) for name in same)
        worst = max(worst, off(again["dq"], wanted["dq"]))
    record_property("dq_error", {"first": bound / 2, "worst of 100": worst})
    assert worst <= bound


@pytest.mark.parametrize("heads", [(8, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128])
def test_a_dq_that_is_summed_some_heads_at_a_time_is_that_of_all(monkeypatch, width, heads):
    """dk and dv are the same bits, dq within its rounding, and the sums take no more memory than they may."""
    launch = pytest.importorskip("ringflash.kernels.gluon.launch")
    length, batch = 1500, 3
    tensors = [draw(batch, length, heads[i % 3 > 0], width, dtype=torch.bfloat16, seed=i) for i in range(4)]
    masks = {"cu_seqlens": [0, 700, 1400]}
    whole = of_call(*tensors, kernel="gluon", deterministic=False, **masks)
    wanted = want(*tensors, None, **masks)
    head_bytes = 4 * length * heads[0] // heads[1] * width
    for at_once in (1, 2, 4):
        monkeypatch.setattr(launch, "SUM_BYTES", at_once * head_bytes)
        parts = of_call(*tensors, kernel="gluon", deterministic=False, **masks)
        assert all(torch.equal(parts[name], whole[name]) for name in ("out", "lse", "dk", "dv"))
        assert off(parts["dq"], wanted["dq"]) <= 2 * off(whole["dq"], wanted["dq"])
        assert not parts["dq"][:, 1400:].any()
