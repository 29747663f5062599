"""What only a GPU can show: run with `pytest -m gpu`. The same kernels under the interpreter: test_kernel_triton.py.

All ranks of a ring are played in one process, so one GPU is enough. Sizes are chosen so that tiles, tails, segments and
int64 offsets all matter.
"""

from __future__ import annotations

import gc
import math

import played
import pytest
import torch
from conftest import TOLERANCE, error

import ringflash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KERNELS = [name for name in ringflash.KERNELS if name not in ("eager", "gluon_fp8", "sdpa")]
ROUNDED_EACH_HOP = ("cudnn", "fa4")  # and made of pieces: masks of too many are refused
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DOCUMENTS = [0, 1, 200, 200, 457, 690, 720]
MASKS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 100},
    "window both ways": {"window": 70, "causal": False},
    "documents": {"cu_seqlens": [*DOCUMENTS, 768]},
    "documents, padding, window": {"cu_seqlens": DOCUMENTS, "window": 64},
    "whole documents": {"cu_seqlens": DOCUMENTS, "causal": False},
    "prefix": {"intervals": "prefix"},
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def inputs(length: int, heads: int, groups: int, width: int, dtype: torch.dtype, seed: int = 0, batch: int = 1):
    """q, k, v, dout, dlse."""
    shapes = [(batch, length, heads, width), *[(batch, length, groups, width)] * 2, (batch, length, heads, width)]
    tensors = [draw(*shape, dtype=dtype, seed=4 * seed + i) for i, shape in enumerate(shapes)]
    return *tensors, draw(batch, heads, length, seed=1000 + seed)


def skip_refused(kernel: str, q: torch.Tensor, deterministic: bool = False) -> None:
    """A kernel of some cards, types or head dimensions says so itself."""
    if reason := ringflash.KERNELS[kernel].refuses(q, q, deterministic, 1):
        pytest.skip(reason)


def attention(*tensors: torch.Tensor, kernel: str, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the public function; a kernel made of pieces refuses a mask of too many itself."""
    try:
        return ringflash.attention(*tensors, kernel=kernel, return_lse=True, **arguments)
    except ValueError as error:
        if kernel not in ROUNDED_EACH_HOP:
            raise
        pytest.skip(str(error))


def for_lse(kernel: str, dlse: torch.Tensor) -> torch.Tensor | None:
    """The gradient of lse, of which cudnn has none."""
    return None if kernel == "cudnn" else dlse


def play(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *, kernel: str, **arguments):
    skip_refused(kernel, q)
    return played.attention(q, k, v, dout, kernel=kernel, **arguments)


def masks_of(name: str, length: int) -> dict:
    masks = dict(MASKS[name])
    if masks.get("intervals") == "prefix":
        hi = torch.arange(1, length + 1, dtype=torch.int32).clamp_min(length // 3)
        masks["intervals"] = (torch.zeros(length, dtype=torch.int32), hi)
    return masks


def want(q, k, v, dout, dlse, **masks) -> dict[str, torch.Tensor]:
    """What the fp64 reference says, gradients included."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = ringflash.reference.attention(q, k, v, return_lse=True, **masks)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * dlse.double()).sum()
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *torch.autograd.grad(loss, (q, k, v))), strict=True))


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype, record) -> None:
    errors = {name: error(got[name], wanted[name]) for name in wanted}
    record("errors", {name: float(f"{value:.3g}") for name, value in errors.items()})
    assert errors.pop("lse") <= 1e-5 if dtype == torch.float32 else 1e-3
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


def of_call(q, k, v, dout, dlse=None, **arguments) -> dict[str, torch.Tensor]:
    """The same through the public function and autograd, on one device."""
    skip_refused(arguments["kernel"], q, arguments.get("deterministic", False))
    leaves = [x.detach().requires_grad_() if x.is_leaf else x for x in (q, k, v)]
    out, lse = attention(*leaves, **arguments)
    grads = torch.autograd.grad(
        (out, lse) if dlse is not None else out, leaves, (dout, dlse) if dlse is not None else dout
    )
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_mask_equals_the_reference(kernel, name, dtype, record_property):
    *tensors, dlse = inputs(768, 6, 2, 64, dtype)
    masks, dlse = masks_of(name, 768), for_lse(kernel, dlse)
    got = play(*tensors, dlse=dlse, kernel=kernel, **masks)
    check(got, want(*tensors, dlse, **masks), dtype, record_property)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_R01_every_head_dimension_equals_the_reference(kernel, width, dtype, record_property):
    for causal in (True, False):
        *tensors, dlse = inputs(193, 4, 4, width, dtype, seed=width)
        dlse = for_lse(kernel, dlse)
        got = play(*tensors, dlse=dlse, kernel=kernel, causal=causal)
        check(got, want(*tensors, dlse, causal=causal), dtype, record_property)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [192, 256])
def test_wide_heads_under_every_mask_equal_the_reference(width, name, rotate, record_property):
    """Their gradients have kernels or tiles of their own: grouped heads, dk and dv that are added to."""
    *tensors, dlse = inputs(768, 6, 2, width, torch.bfloat16)
    masks = masks_of(name, 768)
    for size, layout in ((1, "contiguous"), (3, "zigzag"), (4, "balanced")):
        got = play(*tensors, dlse=dlse, kernel="gluon", rotate=rotate, size=size, layout=layout, **masks)
        check(got, want(*tensors, dlse, **masks), torch.bfloat16, record_property)


@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (8, 2), (8, 1), (4, 4)])
@pytest.mark.parametrize("layout", ringflash.LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layout_equals_the_reference(kernel, layout, heads, groups, record_property):
    masks = {"cu_seqlens": DOCUMENTS}
    for size in (1, 2, 3, 4, 8):
        *tensors, dlse = inputs(768, heads, groups, 64, torch.bfloat16, seed=size)
        dlse = for_lse(kernel, dlse)
        got = play(*tensors, dlse=dlse, kernel=kernel, layout=layout, size=size, **masks)
        check(got, want(*tensors, dlse, **masks), torch.bfloat16, record_property)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("masks", ["documents", "documents, padding, window"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_documents_of_one_rank_beside_gathered_ones_equal_the_reference(kernel, masks, rotate, record_property):
    *tensors, dlse = inputs(768, 4, 2, 128, torch.bfloat16, seed=3)
    given, dlse = masks_of(masks, 768), for_lse(kernel, dlse)
    for layout in ("zigzag", "balanced", "contiguous"):
        mesh = {"layout": layout, "size": 4, "arrangement": "gather", "rotate": rotate}
        got = play(*tensors, dlse=dlse, kernel=kernel, **mesh, **given)
        check(got, want(*tensors, dlse, **given), torch.bfloat16, record_property)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_irregular_segments_equal_the_reference(kernel, width, record_property):
    # 3 ranks of 202 tokens: every segment of zigzag has a short tile at its end
    for name in ("causal", "full", "window"):
        tensors = inputs(606, 4, 2, width, torch.bfloat16)
        got = play(*tensors[:4], kernel=kernel, layout="zigzag", size=3, **masks_of(name, 606))
        check(got, want(*tensors[:4], None, **masks_of(name, 606)), torch.bfloat16, record_property)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", KERNELS)
def test_error_does_not_grow_with_the_ring(kernel, seed, record_property):
    tensors = inputs(4096, 4, 2, 128, torch.bfloat16, seed=seed)
    wanted = want(*tensors[:4], None)

    def rms(size: int) -> dict[str, float]:
        got = play(*tensors[:4], kernel=kernel, layout="zigzag", size=size)
        return {
            x: float((got[x].double() - wanted[x].detach()).square().mean().sqrt()) for x in ("out", "dq", "dk", "dv")
        }

    alone, ring = rms(1), rms(8)
    ratios = {name: ring[name] / alone[name] for name in alone}
    record_property("rms_ratio_8_to_1", {name: float(f"{value:.4g}") for name, value in ratios.items()})
    assert max(ratios.values()) <= (1.5 if kernel in ROUNDED_EACH_HOP else 1.2), ratios


@pytest.mark.parametrize("q_len, kv_len", [(1, 0), (5, 2), (2, 5), (1, 1), (130, 400), (400, 130), (0, 7)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_R08_R39_unequal_lengths_align_to_the_end(kernel, q_len, kv_len):
    q, dout = draw(2, q_len, 4, 64), draw(2, q_len, 4, 64, seed=3)
    k, v = draw(2, kv_len, 2, 64, seed=1), draw(2, kv_len, 2, 64, seed=2)
    got, wanted = of_call(q, k, v, dout, kernel=kernel), want(q, k, v, dout, None)
    for name, dense in wanted.items():
        dense, finite = dense.detach(), dense.detach().isfinite()
        assert torch.equal(got[name].isfinite(), finite), name
        if finite.any():
            # with one visible key the gradient is 0 and rounding is all there is
            bound = TOLERANCE[torch.float32] * max(1.0, dense[finite].abs().max().item())
            assert ((got[name].detach() - dense)[finite].abs() <= bound).all(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_R07_strides_change_no_bit(kernel):
    q, k, v, dout, _ = inputs(200, 6, 6, 64, torch.bfloat16, batch=2)
    plain = of_call(q, k, v, dout, kernel=kernel, deterministic=True)
    packed = torch.stack((q, k, v), 3)  # [B, S, H, 3, D]
    views = {
        "transposed": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)],
        "packed qkv": [*packed.unbind(3), dout],
        "innermost not 1": [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, dout)],
        "not 16-byte aligned": [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v, dout)],
    }
    for name, tensors in views.items():
        got = of_call(*tensors, kernel=kernel, deterministic=True)
        assert all(torch.equal(got[x], plain[x]) for x in plain), name
    ones = torch.ones_like(dout), torch.ones((), device="cuda", dtype=q.dtype).expand_as(dout)
    one, expanded = (of_call(q, k, v, x, kernel=kernel, deterministic=True) for x in ones)
    assert all(torch.equal(one[x], expanded[x]) for x in one)


@pytest.mark.parametrize("kernel", KERNELS)
def test_R12_R06_repeats_give_the_same_bits(kernel):
    for length in (300, 1000):  # the first call of a new shape too
        q, k, v, dout, dlse = inputs(length, 8, 2, 128, torch.bfloat16)
        first = of_call(q, k, v, dout, dlse, kernel=kernel, deterministic=True)
        for _ in range(20):
            again = of_call(q, k, v, dout, dlse, kernel=kernel, deterministic=True)
            assert all(torch.equal(first[x], again[x]) for x in first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_R05_many_heads_and_documents(kernel):
    q, k, v, dout, _ = inputs(16, 32, 32, 64, torch.bfloat16, batch=2049)
    whole = of_call(q, k, v, dout, kernel=kernel, deterministic=True)
    halves = [
        of_call(*(x[part] for x in (q, k, v, dout)), kernel=kernel, deterministic=True)
        for part in (slice(0, 1000), slice(1000, 2049))
    ]
    assert all(torch.equal(whole[x], torch.cat([half[x] for half in halves])) for x in ("out", "lse", "dq", "dk", "dv"))
    borders = torch.arange(0, 2051, dtype=torch.int32) * 8
    q, k, v, dout, _ = inputs(2050 * 8, 32, 32, 64, torch.bfloat16)
    packed = of_call(q, k, v, dout, cu_seqlens=borders, kernel=kernel)
    alone = of_call(*(x.unflatten(1, (2050, 8)).squeeze(0) for x in (q, k, v, dout)), kernel=kernel)
    for name in ("out", "dq", "dk", "dv"):
        assert error(packed[name].squeeze(0).unflatten(0, (2050, 8)), alone[name]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS)
def test_R13_autocast_casts_and_gradients_come_back_in_each_type(kernel):
    q, k, v, dout, _ = inputs(200, 4, 2, 64, torch.float32)
    v = v.bfloat16()
    skip_refused(kernel, v, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", torch.bfloat16):
        out = ringflash.attention(*leaves, kernel=kernel, deterministic=True)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]
    halves = (q.detach().bfloat16(), k.detach().bfloat16(), v.detach(), dout.bfloat16())
    wanted = of_call(*halves, kernel=kernel, deterministic=True)
    assert torch.equal(out, wanted["out"]) and torch.equal(grads[0], wanted["dq"].float())


@pytest.mark.parametrize("kernel", KERNELS)
def test_R15_forward_without_gradients_is_the_same_bits(kernel):
    q, k, v, *_ = inputs(300, 4, 2, 64, torch.bfloat16)
    skip_refused(kernel, q)
    out, lse = ringflash.attention(q.requires_grad_(), k, v, return_lse=True, kernel=kernel)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = ringflash.attention(q, k, v, return_lse=True, kernel=kernel)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1]) and lse.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_R21_R22_lse_is_natural_and_absolute(kernel):
    q = torch.zeros(1, 1, 1, 64, device="cuda")
    skip_refused(kernel, q)
    k = draw(1, 4160, 1, 64)
    v = torch.cat((torch.ones(1, 4096, 1, 64), torch.zeros(1, 64, 1, 64)), 1).cuda()
    out, lse = ringflash.attention(q, k, v, return_lse=True, kernel=kernel)
    assert abs(out[0, 0, 0, 0].item() - 4096 / 4160) < 1e-6 and abs(lse.item() - math.log(4160)) < 1e-5
    q, k, v = draw(1, 64, 2, 64), draw(1, 64, 2, 64, seed=1), draw(1, 64, 2, 64, seed=2)
    q[..., 0], k[..., 0] = 1.0, 0.0
    shifted = k.clone()
    shifted[..., 0] = 50.0 * 8  # scale is 1 / 8: every score + 50
    plain = ringflash.attention(q, k, v, return_lse=True, kernel=kernel)
    moved = ringflash.attention(q, shifted, v, return_lse=True, kernel=kernel)
    assert (moved[1] - plain[1] - 50).abs().max() < 1e-4 and error(moved[0], plain[0]) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
def test_dlse_alone_gives_no_dv_and_none_changes_no_bit(kernel):
    q, k, v, dout, dlse = inputs(300, 4, 2, 64, torch.bfloat16)
    skip_refused(kernel, q, True)  # cudnn too, which has no gradient of lse
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.attention(*leaves, return_lse=True, kernel=kernel, deterministic=True)
    only_lse = torch.autograd.grad(lse, leaves, dlse, retain_graph=True)
    assert not only_lse[2].any() and only_lse[0].any()
    both = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    none = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(both[2], none[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_integers_survive_the_compiler(kernel):
    # uniform softmax over a power of two of keys: every product is exact in bf16, so a miscompiled one shows as a bit
    for width in (64, 128):
        length = 256
        generator = torch.Generator().manual_seed(width)
        v, dout, k = (
            torch.randint(-1, 2, (1, length, 2, width), generator=generator).cuda().bfloat16() for _ in range(3)
        )
        q = torch.zeros_like(v)
        got = of_call(q, k, v, dout, causal=False, scale=1.0, kernel=kernel)
        wanted = want(q, k, v, dout, None, causal=False, scale=1.0)
        assert torch.equal(got["dv"].float(), wanted["dv"].bfloat16().float())
        assert torch.equal(got["out"].float(), wanted["out"].bfloat16().float())
        for name in ("dq", "dk"):
            assert error(got[name], wanted[name]) <= 8e-3


def rows_of(length: int) -> torch.Tensor:
    """The first, middle and last rows, where an offset of 32 bits would be right, wrap once, wrap twice."""
    middle = length // 2
    return torch.cat([torch.arange(start, start + 8) for start in (0, middle - 4, length - 8)]).cuda()


def dense_rows(q, k, v, dout, got: dict[str, torch.Tensor], window: int, group: int) -> dict[str, tuple]:
    """(ours, dense fp32) of some rows of out, lse, dq and of some keys' dk, dv, for the heads of one key/value head."""
    length, width = q.shape[1], q.shape[3]
    per_group = q.shape[2] // k.shape[2]
    rows, scale = rows_of(length), width**-0.5
    position = torch.arange(length, device="cuda")
    k_h, v_h = k[0, :, group].float(), v[0, :, group].float()
    pairs: dict[str, list] = {name: [] for name in ("out", "lse", "dq")}
    dk = dv = 0
    for head in range(group * per_group, (group + 1) * per_group):
        q_h, dout_h, lse = q[0, :, head].float(), dout[0, :, head].float(), got["lse"][0, head]
        delta = (got["out"][0, :, head].float() * dout_h).sum(-1)
        seen = (position <= rows[:, None]) & (position > rows[:, None] - window)
        scores = (q_h[rows] @ k_h.T * scale).masked_fill(~seen, -torch.inf)
        p = scores.softmax(-1)
        ds = p * (dout_h[rows] @ v_h.T - delta[rows, None])
        pairs["out"].append((got["out"][0, rows, head], p @ v_h))
        pairs["lse"].append((lse[rows], scores.logsumexp(-1)))
        pairs["dq"].append((got["dq"][0, rows, head], ds @ k_h * scale))
        seen = (position >= rows[:, None]) & (position < rows[:, None] + window)  # [keys, queries]
        p = (k_h[rows] @ q_h.T * scale - lse).exp().masked_fill(~seen, 0.0)
        dv = dv + p @ dout_h
        dk = dk + p * (v_h[rows] @ dout_h.T - delta) @ q_h * scale
    stacked = {name: tuple(torch.stack(side) for side in zip(*both, strict=True)) for name, both in pairs.items()}
    return stacked | {"dk": (got["dk"][0, rows, group], dk), "dv": (got["dv"][0, rows, group], dv)}


def check_rows(q, k, v, dout, got: dict[str, torch.Tensor], window: int, record) -> None:
    errors: dict[str, float] = {}
    for group in (0, k.shape[2] - 1):
        for name, (ours, dense) in dense_rows(q, k, v, dout, got, window, group).items():
            errors[name] = max(errors.get(name, 0.0), error(ours, dense))
    record("errors", {name: float(f"{value:.3g}") for name, value in errors.items()})
    assert all(value <= TOLERANCE[torch.bfloat16] for value in errors.values()), errors


@pytest.mark.parametrize("kernel", KERNELS)
def test_R03_offsets_beyond_2_32_elements_in_contiguous_tensors(kernel, record_property):
    length = 2**20
    q, k, v, dout = (draw_in_place(1, length, heads, 128, seed=i) for i, heads in enumerate((32, 8, 8, 32)))
    got = of_call(q, k, v, dout, window=4096, kernel=kernel)
    check_rows(q, k, v, dout, got, 4096, record_property)


@pytest.mark.parametrize("kernel", KERNELS)
def test_R03_offsets_beyond_2_32_elements_in_strided_views(kernel, record_property):
    length = 2**18
    buffer = draw_in_place(1, length, 128, 128, seed=0)
    q, k, v = buffer[:, :, 0:8], buffer[:, :, 60:68], buffer[:, :, 120:128]
    dout = draw_in_place(1, length, 8, 128, seed=1)
    got = of_call(q, k, v, dout, kernel=kernel)
    check_rows(q, k, v, dout, got, length, record_property)


def draw_in_place(*shape: int, seed: int) -> torch.Tensor:
    """Large bf16 noise without an fp32 copy."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(
        generator=torch.Generator("cuda").manual_seed(seed)
    )


def test_triton_and_eager_agree_on_long_sequences(record_property):
    q, k, v, dout, dlse = inputs(8192, 8, 2, 128, torch.bfloat16)
    got, other = (of_call(q, k, v, dout, dlse, kernel=kernel) for kernel in ("triton", "eager"))
    errors = {name: error(got[name], other[name]) for name in got}
    record_property("errors", {name: float(f"{value:.3g}") for name, value in errors.items()})
    assert all(value <= TOLERANCE[torch.bfloat16] for value in errors.values()), errors


@pytest.mark.parametrize(
    "masks", [{}, {"causal": False}, {"cu_seqlens": DOCUMENTS}], ids=["causal", "full", "documents"]
)
def test_sdpa_is_a_second_opinion(masks, record_property):
    tensors = inputs(768, 4, 2, 64, torch.bfloat16)
    got = of_call(*tensors[:4], kernel="sdpa", **masks)
    check(got, want(*tensors[:4], None, **masks), torch.bfloat16, record_property)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compile_and_selective_checkpoint(kernel):
    q, k, v, dout, _ = inputs(256, 4, 2, 64, torch.bfloat16)
    arguments = {"kernel": kernel, "deterministic": True}
    plain, leaves = of_call(q, k, v, dout, **arguments), [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda q, k, v: ringflash.attention(q * 1.0, k, v, **arguments), fullgraph=True)
    out = compiled(*leaves)
    assert torch.equal(out, plain["out"])
    assert torch.equal(torch.autograd.grad(out, leaves, dout)[1], plain["dk"])


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_a_graph_replays_right_after_many_other_masks(kernel):
    q, k, v, *_ = inputs(768, 4, 2, 64, torch.bfloat16)
    skip_refused(kernel, q)
    borders = torch.tensor([*DOCUMENTS, 768], dtype=torch.int32)

    def call() -> torch.Tensor:
        return ringflash.attention(q, k, v, cu_seqlens=borders, kernel=kernel)

    wanted = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for window in range(1, 12):
        attention(q, k, v, kernel=kernel, window=window)
    gc.collect()
    taken = [torch.full((2048,), 2**30, dtype=torch.int32, device="cuda") for _ in range(200)]  # where tables had been
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert taken and torch.equal(found, wanted)
