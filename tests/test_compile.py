"""The Triton kernels compiled for cards that are not here: they fit, they do not spill, and nothing is serialised.

Each kernel is compiled in a process that does nothing else, so that a compiler that aborts fails its test and no other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pool as pools
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import triton

from benchmarks import offline
from ringflash.kernels.triton import specialised
from ringflash.kernels.triton import tiling as tiles
from ringflash.kernels.triton.tiling import Card, Tiling, tiling
from ringflash.mask import View, intervals

MAX_SPILL_BYTES = 256  # a thread

Case = tuple[str, int, torch.dtype, str, bool]  # arch, head dimension, dtype, kernel, ragged


def cases() -> Iterator[Case]:
    """Head dimensions that need most registers, on Hopper all from 64 on; every dtype; an irregular cut.

    A case takes seconds; `python benchmarks/offline.py` compiles everything. Where a forward is compiled once, it is
    the one that carries a state, which needs more registers.
    """
    for kernel in offline.KERNELS:
        for width in (64, 128, 256) if kernel == "forward" else (64, 96, 128, 192, 256):
            yield "sm_90", width, torch.bfloat16, kernel, False
        if kernel == "forward":
            continue
        for arch in ("sm_80", "sm_100", "gfx942"):
            for width in (128, 256):
                yield arch, width, torch.bfloat16, kernel, False
            yield arch, 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.float16, kernel, False
        yield "sm_90", 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.bfloat16, kernel, True
    if triton.__version__.startswith(specialised.COMPILER):
        for kernel in offline.SPLIT:
            for width in specialised.HEAD_DIMS:
                yield "sm_90", width, torch.bfloat16, kernel, False
        yield "sm_90", 128, torch.float16, "split", False


def named(case: Case) -> str:
    arch, width, dtype, kernel, ragged = case
    return f"{arch}-{kernel}-{width}-{str(dtype).removeprefix('torch.')}" + "-ragged" * ragged


def _child(answer: Connection, cache: str, case: Case) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    answer.send(offline.compile_offline(*case))


def _alone(cache: str, case: Case) -> offline.Compiled | str:
    """What a process of its own made of the case, or how that process ended."""
    context = pools.context("gloo")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, cache, case))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        child.join()
        return f"the compiler ended with exit code {child.exitcode}"
    finally:
        child.join()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Iterator[Callable[[Case], offline.Compiled]]:
    """compiled(case): all cases compile from the start, two at a time."""
    cache = str(tmp_path_factory.mktemp("triton"))
    with ThreadPoolExecutor(2) as pool:
        pending = {case: pool.submit(_alone, cache, case) for case in (*moves(), *cases())}

        def result(case: Case) -> offline.Compiled:
            made = pending[case].result()
            assert isinstance(made, offline.Compiled), made
            return made

        yield result
        pool.shutdown(cancel_futures=True)


def moves() -> Iterator[Case]:
    """What moves rows: a width that is no power of two, too."""
    for kernel in offline.MOVES:
        for arch in ("sm_80", "sm_90", "sm_100", "gfx942"):
            yield arch, 128, torch.bfloat16, kernel, False
        yield "sm_90", 96, torch.float32, kernel, False


@pytest.mark.parametrize("case", list(cases()), ids=named)
def test_it_fits_and_neither_spills_nor_serialises(compiled, case):
    arch, _, dtype, _, _ = case
    made = compiled(case)
    assert made.shared_bytes <= offline.SHARED_BYTES[arch]
    assert made.spill_bytes <= MAX_SPILL_BYTES
    assert not made.warnings  # among them C75xx: products that wait for each other
    assert not made.narrow_offsets
    if (arch, dtype) != ("sm_90", torch.float32):  # whose tiles are too small for wgmma
        assert made.num_products > 0
    assert (made.num_tma > 0) == (arch in ("sm_90", "sm_100"))


@pytest.mark.parametrize("case", list(moves()), ids=named)
def test_rows_are_moved_16_bytes_at_a_time(compiled, case):
    made = compiled(case)
    assert not made.spill_bytes and not made.warnings and not made.narrow_offsets
    assert made.num_wide >= 4, made  # a wave of AMD has 64 threads, so each has half as many
    assert made.shared_bytes <= 4096  # or few programs would fit an SM


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", offline.KERNELS)
def test_every_stage_has_its_buffers(compiled, kernel, width):
    """A load that the compiler adds to the pipeline takes a stage from the tiles, which shows in the shared memory."""
    block_q, block_k, _, num_stages = tiling(
        "forward" if kernel in offline.FORWARDS else kernel, width, 2, Card("cuda", 90)
    )
    still, streamed = {
        "forward": (block_q, 2 * block_k),
        "carried": (block_q, 2 * block_k),
        "keys": (2 * block_k, 2 * block_q),
        "queries": (2 * block_q, 2 * block_k),
    }[kernel]
    made = compiled(("sm_90", width, torch.bfloat16, kernel, False))
    assert made.shared_bytes >= (still + num_stages * streamed) * width * 2


TTIR = """
    %c3_i32 = arith.constant 3 : i32 loc(#loc1)
    %0 = arith.muli %row, %{factor} : i32 loc(#loc2)
    %1 = tt.splat %0 : i32 -> tensor<64xi32> loc(#loc3)
    %2 = arith.addi %1, %range : tensor<64xi32> loc(#loc4)
    %3 = arith.extsi %2 : tensor<64xi32> to tensor<64xi64> loc(#loc5)
    %4 = tt.addptr %base, %3 : tensor<64x!tt.ptr<f32>>, tensor<64xi64> loc(#loc6)
"""


@pytest.mark.parametrize(("factor", "found"), [("stride", 1), ("c3_i32", 0)])
def test_R03_a_stride_multiplied_in_32_bits_is_found(factor, found):
    assert len(offline.narrow_offsets(TTIR.replace("{factor}", factor))) == found
    assert not offline.narrow_offsets(TTIR.replace("{factor}", factor).replace(": i32", ": i64"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_descriptor_inside_a_tuple_is_found_before_a_launch(nested):
    """Triton compiles it; the driver fails when it makes the launcher."""
    descriptor = "tensordesc<fp32[64]>"
    kernel = SimpleNamespace(
        src=SimpleNamespace(signature={"x": (descriptor, "i32") if nested else descriptor, "n": "i32"}),
        metadata=SimpleNamespace(tensordesc_meta=[{"swizzle": 0}]),
    )
    with pytest.raises(AssertionError) if nested else contextlib.nullcontext():
        offline.check_arguments(kernel)


@pytest.mark.parametrize(
    ("card", "version", "width", "dtype", "reason"),
    [
        (Card("cuda", 90), "3.6.0", 128, torch.bfloat16, None),
        (Card("cuda", 90), "3.6.0", 64, torch.float16, None),
        (Card("cuda", 90), "3.7.1", 128, torch.bfloat16, "need triton 3.6.x, this is 3.7.1"),
        (Card("cuda", 100), "3.6.0", 128, torch.bfloat16, "compute capability 9.0, cpu is cuda 100"),
        (Card("hip", "gfx942"), "3.6.0", 128, torch.bfloat16, "is hip gfx942"),
        (Card("cuda", 90), "3.6.0", 256, torch.bfloat16, r"head dimensions \(64, 128\), this is torch.bfloat16, 256"),
        (Card("cuda", 90), "3.6.0", 64, torch.float32, "this is torch.float32, 64"),
    ],
    ids=str,
)
def test_the_split_forward_says_where_it_does_not_serve(monkeypatch, card, version, width, dtype, reason):
    monkeypatch.setattr(specialised.launch, "card", lambda: card)
    monkeypatch.setattr(triton, "__version__", version)
    said = specialised.unfit.__wrapped__(torch.device("cpu"), width, dtype)
    assert (said is None) if reason is None else re.search(reason, said)


def rows_of(*, width: int = 64, stride: int = 0, start: int = 0, batch_stride: int = 300 * 64) -> torch.Tensor:
    """[1, 300, 1, width] with these strides."""
    stride = stride or width
    x = torch.zeros(start + 300 * stride).bfloat16()[start:]
    return x.as_strided((1, 300, 1, width), (batch_stride, stride, width, 1))


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (rows_of(), False),
        (rows_of(stride=80), False),
        (rows_of(stride=72), True),
        (rows_of(start=1), True),
        (rows_of(batch_stride=2**31), True),
        (rows_of(batch_stride=7), True),
    ],
    ids=["plain", "wide rows", "odd rows", "odd start", "64-bit stride", "odd batch stride"],
)
def test_other_strides_are_copied_before_the_split_forward(x, copied):
    made = specialised.aligned(x)
    assert (made is not x) == copied and torch.equal(made, x)
    assert made.data_ptr() % 16 == 0 and all(0 < n < 2**31 and n % 16 == 0 for n in made.stride()[:3])


@pytest.mark.parametrize(
    ("given", "looped", "capturing", "length", "width"),
    [
        ({"causal": True}, None, False, 300, 128),
        ({"causal": False}, None, False, 300, 128),
        ({"causal": False}, None, False, 256, 64),
        ({"causal": True}, "faster where tiles are masked", False, 256, 64),
        ({"causal": True}, "take 1 to 2147483647 elements", False, 0, 128),
        ({"causal": True, "window": 20}, "bounds the keys from below", False, 300, 128),
        ({"causal": True}, "graph is being captured", True, 300, 128),
    ],
    ids=["causal", "full", "full 64", "causal 64", "empty", "window", "capturing"],
)
@pytest.mark.parametrize("found", [None, "out differs"])
def test_a_call_is_split_where_it_can_be_and_its_numbers_are_right(
    monkeypatch, given, looped, capturing, length, width, found
):
    q = rows_of(width=width)[:, :length]
    monkeypatch.setattr(specialised, "unfit", lambda *what: None)
    monkeypatch.setattr(specialised, "fault", lambda configuration: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    taken = []
    monkeypatch.setattr(specialised, "split", lambda *call, **how: taken.append("split"))
    monkeypatch.setattr(specialised.launch, "forward", lambda *call, **how: taken.append("looped"))
    view = View(*intervals(length, length, **given), np.array([[0, length]]), np.array([[0, length]]))
    reason = specialised.refusal(q, q, q, view, first=True, last=True)
    assert (looped in reason) if looped else reason == found
    specialised.forward(q, q, q, view, None, scale=0.1, first=True, last=True)
    assert taken == ["split" if reason is None else "looped"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: (torch.ones(8), torch.ones(8)), None),
        (lambda: (torch.ones(8) + torch.arange(8) / 8, torch.ones(8)), "out differs by 0.52"),
        (lambda: (torch.ones(8), torch.ones(8) * 1.001), "lse differs by 0.001"),
        (lambda: (torch.ones(8) * torch.nan, torch.ones(8)), "out differs by nan"),
        (lambda: (torch.ones(8), torch.full((8,), -torch.inf)), "rows that see nothing differ in lse"),
        (lambda: triton.no_such_thing, "AttributeError: module 'triton' has no attribute"),
    ],
    ids=["right", "out", "lse", "nan", "empty", "error"],
)
def test_a_split_forward_that_is_wrong_is_found_and_logged_once(monkeypatch, caplog, wrong, reason):
    caplog.set_level(logging.INFO, "ringflash")
    here = specialised.Configuration(torch.device("cpu"), 64, torch.bfloat16, masked=True, first=True, last=True)
    right = (torch.ones(8), torch.ones(8))
    monkeypatch.setattr(specialised, "_sample", lambda _, kernel: wrong() if kernel is specialised.split else right)
    specialised.fault.cache_clear()
    said = [specialised.fault(here) for _ in range(2)]
    specialised.fault.cache_clear()
    assert said[0] == said[1] and (said[0] is None if reason is None else reason in said[0])
    assert [record.levelname for record in caplog.records] == ["WARNING" if reason else "INFO"]
    assert "specialised warps for bfloat16, head dimension 64, on cpu" in caplog.text


@pytest.fixture
def table(tmp_path, monkeypatch) -> Iterator[Callable[[dict], None]]:
    """table(rows): these were measured on a Hopper."""

    def write(rows: dict) -> None:
        path = tmp_path / "tuned.json"
        path.write_text(json.dumps({"cuda:90": {"commit": "abc", "rows": rows}}))
        monkeypatch.setattr(tiles, "TUNED", path)

    tiles.measured.cache_clear()
    yield write
    tiles.measured.cache_clear()


def test_tiles_that_were_measured_come_before_the_rows_of_the_file(table):
    best = Tiling(64, 32, 4, 5)
    table({"keys": {"128": {"tiling": best._asdict(), "tflops": 1.0}}})
    card, other = Card("cuda", 90), Card("cuda", 100)
    assert tiling("keys", 128, 2, card) == best
    assert tiling("keys", 128, 4, card) == tiles.CUDA_FP32["keys"][128]
    assert tiling("keys", 96, 2, card) == tiles.HOPPER["keys"][128]
    assert tiling("forward", 128, 2, card) == tiles.HOPPER["forward"][128]
    assert tiling("keys", 128, 2, other) == tiles.BLACKWELL["keys"][128]


def test_without_a_table_there_are_the_rows_of_the_file(table, monkeypatch):
    monkeypatch.setattr(tiles, "TUNED", pathlib.Path("nowhere"))
    assert tiling("forward", 64, 2, Card("cuda", 90)) == tiles.HOPPER["forward"][64]
