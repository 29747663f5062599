"""The Triton kernels compiled for cards that are not here: they fit, they do not spill, and nothing is serialised.

Each kernel is compiled in a process that does nothing else, so that a compiler that aborts fails its test and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import offline
from ringflash.kernels.triton import tiling as tiles
from ringflash.kernels.triton.tiling import HEAD_DIMS, Card, Tiling, tiling

MAX_SPILL_BYTES = 256  # a thread

Case = tuple[str, int, torch.dtype, str, bool]  # arch, head dimension, dtype, kernel, ragged


def cases() -> Iterator[Case]:
    """Every head dimension on Hopper; on other cards those whose tiles differ most; every dtype; an irregular cut.

    Where a forward is compiled once, it is the one that carries a state, which needs more registers.
    """
    for kernel in offline.KERNELS:
        for width in HEAD_DIMS:
            yield "sm_90", width, torch.bfloat16, kernel, False
        if kernel == "forward":
            continue
        for arch in ("sm_80", "sm_100", "gfx942"):
            for width in (64, 128, 256):
                yield arch, width, torch.bfloat16, kernel, False
            yield arch, 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.float16, kernel, False
        yield "sm_90", 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.bfloat16, kernel, True


def named(case: Case) -> str:
    arch, width, dtype, kernel, ragged = case
    return f"{arch}-{kernel}-{width}-{str(dtype).removeprefix('torch.')}" + "-ragged" * ragged


def _child(answer: Connection, cache: str, case: Case) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    answer.send(offline.compile_offline(*case))


def _alone(cache: str, case: Case) -> offline.Compiled | str:
    """What a process of its own made of the case, or how that process ended."""
    context = get_context("forkserver")
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
    get_context("forkserver").set_forkserver_preload(["benchmarks.offline"])
    cache = str(tmp_path_factory.mktemp("triton"))
    with ThreadPoolExecutor(2) as pool:
        pending = {case: pool.submit(_alone, cache, case) for case in cases()}

        def result(case: Case) -> offline.Compiled:
            made = pending[case].result()
            assert isinstance(made, offline.Compiled), made
            return made

        yield result
        pool.shutdown(cancel_futures=True)


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
