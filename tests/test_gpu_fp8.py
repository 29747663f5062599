"""The fp8 kernel on a GPU: run with `pytest -m gpu`. Its bounds are its own; without a GPU: test_kernel_fp8.py.

Two references, both in fp64. That of the rounded q, k, v is met closely: only the probabilities are rounded besides, so
a wrong scale, mask or order of keys shows. That of q, k, v as given says how much is lost; the table of that loss, with
bf16's beside it, is `test_error_beside_bf16`.
"""

from __future__ import annotations

import emulated_fp8 as emulated
import numpy as np
import pytest
import torch
from test_gpu import MASKS, draw, inputs, masks_of, of_call, play, want

import ringflash
from ringflash import mask
from ringflash.kernels import State, gluon_fp8
from ringflash.kernels.gluon_fp8.tiling import BLOCK_K
from ringflash.layouts import LAYOUTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# ||got - want|| / ||want||. Rounding to e4m3 has a relative error of 2.6% rms: `ROUNDED` has it once in out, by the
# probabilities, and in what follows from out; `GIVEN` up to four times, and in the score.
ROUNDED = {"out": 0.03, "dq": 0.015, "dk": 0.015, "dv": 0.005}
GIVEN = dict.fromkeys(("out", "dq", "dk", "dv"), 0.08)
LSE_ROUNDED, LSE_GIVEN = 2e-3, 0.2  # largest difference, where the scale is D^-0.5


def rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN is an error."""
    got, wanted = got.detach().double(), wanted.detach().double()
    assert not got.isnan().any(), "NaN"
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def lse_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach()
    empty = wanted.isinf()
    assert torch.equal(got.isinf(), empty), "other rows are empty"
    return float((got - wanted)[~empty].abs().max())


def represented(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[np.ndarray] | None = None) -> tuple:
    """What q, k, v are after rounding, where key tiles are cut from these segments; default: from one."""
    segments = [np.array([[0, k.shape[1]]])] if segments is None else segments
    tiles = np.concatenate([mask.cut(part, BLOCK_K) for part in segments])
    return emulated.rounded(q, (3,)), emulated.rounded_tiles(k, tiles), emulated.rounded_tiles(v, tiles)


def check(got: dict, tensors: tuple, masks: dict, record, segments: list[np.ndarray] | None = None) -> None:
    q, k, v, dout, dlse = tensors
    wanted = {
        "rounded": want(*represented(q, k, v, segments), dout, dlse, **masks),
        "given": want(q, k, v, dout, dlse, **masks),
    }
    errors = {to: {name: rms(got[name], other[name]) for name in GIVEN} for to, other in wanted.items()}
    for to, other in wanted.items():
        errors[to]["lse"] = lse_error(got["lse"], other["lse"])
    record("errors", {to: {name: float(f"{x:.3g}") for name, x in some.items()} for to, some in errors.items()})
    for to, bounds in (("rounded", ROUNDED | {"lse": LSE_ROUNDED}), ("given", GIVEN | {"lse": LSE_GIVEN})):
        assert all(errors[to][name] <= bound for name, bound in bounds.items()), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name, dtype, record_property):
    tensors = inputs(768, 6, 2, 64, dtype)
    masks = masks_of(name, 768)
    got = play(*tensors[:4], dlse=tensors[4], kernel="gluon_fp8", **masks)
    check(got, tensors, masks, record_property)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "length"), [(64, 1000), (96, 300), (128, 777)])
def test_head_dimensions_tails_and_a_batch(width, length, causal, record_property):
    tensors = inputs(length, 4, 2, width, torch.bfloat16, batch=2)
    got = of_call(*tensors, causal=causal, kernel="gluon_fp8")
    check(got, tensors, {"causal": causal}, record_property)


@pytest.mark.parametrize("name", ["causal", "window", "documents, padding, window", "prefix"])
@pytest.mark.parametrize(("layout", "size"), [("contiguous", 3), ("zigzag", 2), ("zigzag", 4), ("striped", 2)])
def test_the_state_is_carried_round_a_ring(layout, size, name, record_property):
    tensors = inputs(768, 4, 2, 128, torch.bfloat16)
    masks = masks_of(name, 768)
    segments = LAYOUTS[layout].segments(768, size, 1, np.arange(768))
    got = play(*tensors[:4], dlse=tensors[4], layout=layout, size=size, kernel="gluon_fp8", **masks)
    check(got, tensors, masks, record_property, segments)


@pytest.mark.parametrize(("queries", "keys"), [(130, 400), (400, 130), (1, 257), (257, 1)])
def test_keys_may_be_more_or_fewer_than_queries(queries, keys):
    q, _, _, dout, _ = inputs(queries, 4, 2, 64, torch.bfloat16)
    _, k, v, *_ = inputs(keys, 4, 2, 64, torch.bfloat16, seed=1)
    got = of_call(q, k, v, dout, kernel="gluon_fp8")
    wanted = want(*represented(q, k, v), dout, None)
    assert rms(got["out"], wanted["out"]) <= ROUNDED["out"]
    assert lse_error(got["lse"], wanted["lse"]) <= LSE_ROUNDED
    empty = wanted["lse"][0, 0].isinf()
    assert not got["out"][:, empty].any() and not got["dq"][:, empty].any()


@pytest.mark.parametrize("scale", [-0.2, 0.0, 0.5])
def test_any_finite_scale(scale):
    """A product keeps 14 bits of the largest number in it, so the error of lse grows with the scores."""
    q, k, v, dout, _ = inputs(300, 4, 2, 64, torch.bfloat16)
    got = of_call(q, k, v, dout, scale=scale, kernel="gluon_fp8")
    wanted = want(*represented(q, k, v), dout, None, scale=scale)
    assert rms(got["out"], wanted["out"]) <= ROUNDED["out"]
    assert lse_error(got["lse"], wanted["lse"]) <= LSE_ROUNDED * max(1.0, abs(scale) * 64**0.5)


def test_tiles_of_zeros_and_tiles_of_other_size():
    """The scale of a value tile rides in the softmax: a tile may be 2^48 smaller than its neighbour, or 0."""
    q, k, v, dout, _ = inputs(768, 4, 2, 64, torch.bfloat16)
    v[:, :128] = 0.0
    v[:, 128:256] *= 1e-6
    v[:, 256:384] *= 1e4
    k[:, 384:512] = 0.0
    for causal in (True, False):
        got = of_call(q, k, v, dout, causal=causal, kernel="gluon_fp8")
        wanted = want(*represented(q, k, v), dout, None, causal=causal)
        for rows in (slice(0, 256), slice(256, 768)):
            if wanted["out"][:, rows].any():
                assert rms(got["out"][:, rows], wanted["out"][:, rows]) <= ROUNDED["out"]
        assert lse_error(got["lse"], wanted["lse"]) <= LSE_ROUNDED


def test_exact_integers_survive():
    """Equal scores and small integers: every product is exact in e4m3, so a key at a wrong place shows as a bit."""
    for width in (64, 128):
        generator = torch.Generator().manual_seed(width)
        k, v, dout = (torch.randint(-3, 4, (1, 256, 2, width), generator=generator).cuda().bfloat16() for _ in "123")
        q = torch.zeros_like(k)
        got = of_call(q, k, v, dout, causal=False, scale=1.0, kernel="gluon_fp8")
        wanted = want(q, k, v, dout, None, causal=False, scale=1.0)
        assert torch.equal(got["out"], wanted["out"].bfloat16()) and torch.equal(got["dv"], wanted["dv"].bfloat16())
        q = torch.randint(-3, 4, q.shape, generator=generator).cuda().bfloat16()
        lse = of_call(q, k, v, dout, causal=False, scale=0.01, kernel="gluon_fp8")["lse"]
        assert lse_error(lse, want(q, k, v, dout, None, causal=False, scale=0.01)["lse"]) < 1e-5


def test_a_long_row_is_as_exact_as_a_short_one(record_property):
    """2^20 keys of equal score: one fp8 accumulator for all of them would stop growing, at 14 bits."""
    q = torch.zeros(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (draw(1, 2**20, 1, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    v = (1.0 + 0.1 * v).bfloat16()
    out = ringflash.attention(q, k, v, causal=False, kernel="gluon_fp8")
    exact = emulated.rounded_tiles(v, emulated.tiles_of(2**20)).double().mean(1)
    worst = float((out[0, :, 0].double() - exact[0, 0]).abs().max())
    record_property("largest error", worst)
    assert worst <= 4e-3  # half a unit in the last place of bf16 at 1


def test_repeats_give_the_same_bits():
    q, k, v, dout, dlse = inputs(1000, 8, 2, 128, torch.bfloat16)
    first = of_call(q, k, v, dout, dlse, kernel="gluon_fp8", deterministic=True)
    for _ in range(20):
        again = of_call(q, k, v, dout, dlse, kernel="gluon_fp8", deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_strides_change_no_bit():
    q, k, v, dout, _ = inputs(300, 4, 4, 64, torch.bfloat16)
    plain = of_call(q, k, v, dout, kernel="gluon_fp8", deterministic=True)
    for move in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2],
    ):
        got = of_call(*map(move, (q, k, v, dout)), kernel="gluon_fp8", deterministic=True)
        assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, False), (False, True)])
def test_every_row_that_is_due_is_written_and_no_other(first, last):
    q, k, v, *_ = inputs(400, 2, 1, 64, torch.bfloat16)
    segments = np.array([[0, 400]])
    lo, hi = np.zeros(400, np.int32), np.maximum(np.arange(400) - 200, 0).astype(np.int32)  # half sees nothing
    before = torch.zeros if not first else lambda *size, **how: torch.full(size, torch.nan, **how)
    acc, out = before(*q.shape, device="cuda"), torch.full_like(q, torch.nan)
    lse = torch.full((1, 2, 400), torch.nan if first else -torch.inf, device="cuda")
    state = State(None if first and last else acc, out, lse)
    gluon_fp8.forward(q, k, v, mask.View(lo, hi, segments, segments), state, scale=0.1, first=first, last=last)
    written, other = (out, acc) if last else (acc, out)
    assert not written.isnan().any() and not lse.isnan().any() and (lse[..., :201].isinf()).all()
    assert torch.equal(written[:, :201], torch.zeros_like(written[:, :201]))
    assert other.isnan().all() if first or not last else not other.any()


INPUTS = {
    "normal": lambda q, k, v: (q, k, v),
    "scores of deviation 4": lambda q, k, v: (4 * q, k, v),
    "v: 1% of the columns x100": lambda q, k, v: (q, k, _columns(v, 100)),
    "k: 1% of the columns x10": lambda q, k, v: (q, _columns(k, 10), v),
    "q, k, v: 0.1% of the numbers x10": lambda q, k, v: tuple(_numbers(x, 10) for x in (q, k, v)),
    "k: columns with a bias of 10": lambda q, k, v: (q, k + 10.0 * (torch.arange(128).cuda() % 16 == 0), v),
}  # fmt: skip


def _columns(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * torch.where(torch.arange(x.shape[3], device=x.device) % 100 == 5, factor, 1.0)


def _numbers(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * torch.where(draw(*x.shape, seed=99).abs() > 3.29, factor, 1.0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", INPUTS)
def test_error_beside_bf16(kind, causal, record_property):
    """The table: ||got - want|| / ||want|| of gluon_fp8 and of gluon, and the largest difference of lse."""
    q, k, v, dout, _ = inputs(4096, 2, 2, 128, torch.float32)
    q, k, v, dout = (x.bfloat16() for x in (*INPUTS[kind](q, k, v), dout))
    wanted, table = want(q, k, v, dout, None, causal=causal), {}
    for kernel in ("gluon_fp8", "gluon"):
        got = of_call(q, k, v, dout, causal=causal, kernel=kernel, deterministic=True)
        errors = {name: rms(got[name], wanted[name]) for name in GIVEN} | {"lse": lse_error(got["lse"], wanted["lse"])}
        table[kernel] = {name: float(f"{value:.3g}") for name, value in errors.items()}
    record_property("errors", table)
    assert all(table["gluon_fp8"][name] <= 0.5 for name in GIVEN), table
