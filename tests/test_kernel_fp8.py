"""The fp8 kernels without a GPU: rounding in Triton's interpreter, the product of what it stored emulated in torch.

triton looks at TRITON_INTERPRET when it is imported, so all that computes runs in a process of its own. What only a GPU
can show is in test_gpu_fp8.py; what a compiler can show, in test_compile_gluon.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import emulated_fp8 as emulated
import numpy as np
import pytest
import torch
from oracle import inputs, want

from ringflash import mask
from ringflash.kernels import gluon_fp8

CUTS = {
    "tiles": [(0, 256)],
    "tail": [(0, 200)],
    "segments": [(40, 17), (100, 150), (300, 1), (310, 128)],
}


@pytest.fixture(autouse=True)
def _gluon() -> None:
    pytest.importorskip("triton.experimental.gluon")


def _interpret() -> None:
    """In triton 3.6 and 3.7 the interpreter's own rounding to e4m3 loses carries (1.99 becomes 1), so torch does it."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(x, given, wanted, rounding):
        if str(wanted) == "fp8e4nv":
            return torch.from_numpy(x.astype(np.float32)).to(emulated.E4M3).view(torch.uint8).numpy()
        if str(given) == "fp8e4nv" and str(wanted) == "fp32":
            return torch.from_numpy(x.copy()).view(emulated.E4M3).float().numpy().view(np.uint32)
        return convert(x, given, wanted, rounding)

    interpreter._convert_float = converted


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    """run(function, *args) in the interpreting process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as worker:
        yield lambda function, *args: worker.submit(function, *args).result()


def quantised(k: torch.Tensor, v: torch.Tensor, tiles: np.ndarray) -> tuple[torch.Tensor, ...]:
    """As bytes, because fp8 tensors do not travel between processes."""
    from ringflash.kernels.gluon_fp8 import launch

    made = launch.quantised(k, v, torch.from_numpy(tiles))
    return made.k.view(torch.uint8), made.v.view(torch.uint8), made.scales


def represented(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: mask.View) -> list[torch.Tensor]:
    from ringflash.kernels.gluon_fp8 import launch

    return launch.represented(q, k, v, view)


def noise(num_keys: int, width: int, *, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """q, k, v in fp16, of which some heads are larger, one tile is zero and some numbers are far below the largest."""
    q, k, v, *_ = inputs(num_keys, heads=2, groups=2, width=width, batch=batch)
    k[:, :, 1] *= 30.0
    v[:, :128] *= 1e-3
    v[:, :, 0, ::7] *= 1e-4
    k[:, :17, 0] = 0.0
    return q.half(), k.half(), v.half()


def test_a_lane_finds_its_probabilities_where_the_product_reads_them():
    """The order that the kernels write down as a formula is the one that PTX's register layouts ask for."""
    from ringflash.kernels.gluon_fp8.quantise_kernel import stored_key

    assert emulated.key_order(128) == [stored_key.fn(position) for position in range(128)]
    assert sorted(emulated.key_order(128)) == list(range(128))


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("name", CUTS)
def test_keys_and_values_are_rounded_as_defined(run, name, width):
    segments = np.array(CUTS[name])
    tiles = mask.cut(segments, 128)
    _, k, v = noise(int(segments[:, 1].sum()), width)
    got, wanted = run(quantised, k, v, tiles), emulated.quantise(k, v, tiles)
    assert torch.equal(got[0], wanted[0].view(torch.uint8)), "k"
    assert torch.equal(got[1], wanted[1].view(torch.uint8)), "v"
    assert torch.equal(got[2], wanted[2]), "scales"


def test_strides_change_no_byte_and_no_nan_comes_in_from_outside(run):
    _, k, v = noise(200, 96, batch=2)
    packed = torch.full((2, 200, 6, 101), torch.nan, dtype=torch.float16)
    packed[:, :, 1:3, 3:99], packed[:, :, 3:5, 3:99] = k, v
    tiles = emulated.tiles_of(200)
    plain, views = run(quantised, k, v, tiles), run(quantised, packed[:, :, 1:3, 3:99], packed[:, :, 3:5, 3:99], tiles)
    assert all(torch.equal(a, b) for a, b in zip(plain, views, strict=True))


@pytest.mark.parametrize("name", CUTS)
def test_the_backward_gets_what_the_forward_rounded_to(run, name):
    segments = np.array(CUTS[name])
    count = int(segments[:, 1].sum())
    q, k, v = noise(count, 64)
    view = mask.View(np.zeros(count, np.int32), np.full(count, 500, np.int32), segments, segments)
    tiles = mask.cut(segments, 128)
    local = tiles[:, [0, 0, 2]]
    wanted = emulated.rounded(q, (3,)), emulated.rounded_tiles(k, local), emulated.rounded_tiles(v, local)
    assert all(torch.equal(a, b) for a, b in zip(run(represented, q, k, v, view), wanted, strict=True))
    k8, _, scales = emulated.quantise(k, v, tiles)
    first = k8.float().unflatten(2, (-1, 128))[:, :, 0, : tiles[0, 2]] * scales[:, :, 0, 0, None, None]
    assert torch.equal(first.transpose(1, 2).half(), wanted[1][:, : tiles[0, 2]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "num_keys"), [(64, 300), (128, 256)])
def test_the_product_of_what_was_stored_is_attention(run, width, num_keys, causal):
    """Stored keys, values and scales mean what the forward takes them for: besides, only probabilities are rounded."""
    tensors = [x.bfloat16().half() for x in inputs(num_keys, heads=4, groups=2, width=width)]
    q, k, v = tensors[:3]
    tiles = emulated.tiles_of(num_keys)
    k8, v8, scales = run(quantised, k, v, tiles)
    seen = torch.ones(num_keys, num_keys, dtype=torch.bool)
    stored = k8.view(emulated.E4M3), v8.view(emulated.E4M3), scales
    out, lse = emulated.attention(q, stored, seen.tril() if causal else seen, scale=0.1)
    exact = emulated.rounded(q, (3,)), emulated.rounded_tiles(k, tiles), emulated.rounded_tiles(v, tiles)
    wanted = want(*exact, *tensors[3:], causal=causal, scale=0.1)
    assert (lse - wanted["lse"]).abs().max() < 1e-5
    assert (out - wanted["out"]).norm() < 0.03 * wanted["out"].norm()
    given = want(*tensors, causal=causal, scale=0.1)
    assert (out - given["out"]).norm() < 0.08 * given["out"].norm()


def test_refusals_say_what_would_do(monkeypatch):
    q = torch.empty(1, 4, 1, 64, dtype=torch.bfloat16)
    assert "'gluon_fp8'" in gluon_fp8.refuses(q, q, False, 1) and "q is on cpu" in gluon_fp8.refuses(q, q, False, 1)
    monkeypatch.setattr(gluon_fp8.gluon, "refuses", lambda *_: None)
    wide = torch.empty(1, 4, 1, 256, dtype=torch.bfloat16)
    assert gluon_fp8.refuses(q, q, True, 4) is None
    assert "(64, 96, 128), got 256; kernel='gluon'" in gluon_fp8.refuses(wide, wide, True, 4)
