"""The Triton kernels compiled for cards that are not here: they fit, they do not spill, and nothing is serialised.

Each kernel is compiled in a process that does nothing else, so that a compiler that aborts fails its test and no other.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import triton

from benchmarks import offline
from ringflash.kernels.triton import specialised
from ringflash.kernels.triton.tiling import HEAD_DIMS, Card, tiling

MAX_SPILL_BYTES = 256  # a thread

Case = tuple[str, int, torch.dtype, str, bool]  # arch, head dimension, dtype, kernel, ragged


def cases() -> Iterator[Case]:
    """Every head dimension on Hopper; on other cards those whose tiles differ most; every dtype; an irregular cut."""
    for kernel in offline.KERNELS:
        for width in HEAD_DIMS:
            yield "sm_90", width, torch.bfloat16, kernel, False
        for arch in ("sm_80", "sm_100", "gfx942"):
            for width in (64, 128, 256):
                yield arch, width, torch.bfloat16, kernel, False
            yield arch, 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.float16, kernel, False
        yield "sm_90", 128, torch.float32, kernel, False
        yield "sm_90", 128, torch.bfloat16, kernel, True
    if triton.__version__.startswith(specialised.COMPILER):
        for kernel in offline.SPLIT:
            for width in specialised.HEAD_DIMS:
                yield "sm_90", width, torch.bfloat16, kernel, False


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
    block_q, block_k, _, num_stages = tiling(kernel, width, 2, Card("cuda", 90))
    still, streamed = {
        "forward": (block_q, 2 * block_k),
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


@pytest.mark.parametrize(
    ("card", "version", "width", "dtype", "reason"),
    [
        (Card("cuda", 90), "3.6.0", 128, torch.bfloat16, None),
        (Card("cuda", 90), "3.7.1", 128, torch.bfloat16, "need triton 3.6.x, this is 3.7.1"),
        (Card("cuda", 100), "3.6.0", 128, torch.bfloat16, "compute capability 9.0, this is cuda 100"),
        (Card("hip", "gfx942"), "3.6.0", 128, torch.bfloat16, "this is hip gfx942"),
        (Card("cuda", 90), "3.6.0", 256, torch.bfloat16, r"head dimensions \(64, 128\), this is torch.bfloat16, 256"),
        (Card("cuda", 90), "3.6.0", 64, torch.float32, "this is torch.float32, 64"),
    ],
    ids=str,
)
def test_the_split_forward_says_why_it_does_not_serve(monkeypatch, card, version, width, dtype, reason):
    monkeypatch.setattr(specialised.launch, "card", lambda: card)
    monkeypatch.setattr(triton, "__version__", version)
    q = torch.empty(1, 256, 2, width, dtype=dtype)
    said = specialised.unfit(q, q, q)
    assert (said is None) if reason is None else re.search(reason, said)


def test_a_split_forward_that_is_wrong_is_never_used_and_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    here = specialised.Configuration(torch.device("cpu"), 64, torch.bfloat16, masked=True, first=True, last=True)
    looks = []

    def sample(configuration, kernel):
        looks.append(kernel)
        wrong = float(kernel is specialised.split)
        return torch.ones(8) + wrong * torch.arange(8) / 8, torch.ones(8)

    monkeypatch.setattr(specialised, "_sample", sample)
    found: dict = {}
    monkeypatch.setattr(specialised, "_faults", lambda: found)
    for _ in range(2):
        assert "out differs by 0.52" in specialised.fault(here)
    assert looks == [specialised.launch.forward, specialised.split] and len(caplog.records) == 1
    found.clear()
    monkeypatch.setattr(specialised, "_sample", lambda configuration, kernel: (torch.ones(8), torch.ones(8)))
    assert specialised.fault(here) is None
