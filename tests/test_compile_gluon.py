"""The Gluon kernels, compiled for sm_90 without a GPU: wgmma, shared memory, spills as recorded, and no hazard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import offline_gluon
from offline_gluon import Case

from ringflash.kernels.gluon import launch
from ringflash.mask import View, intervals

# (kernel, head dimension) -> bytes spilled at most, of all roles of the kernel together; 0 elsewhere
SPILLS = {
    ("attend", 64): 72, ("all_gradients", 64): 264, ("all_gradients", 96): 188, ("all_gradients", 128): 188,
    ("all_gradients_in_turns", 64): 208, ("all_gradients_in_turns", 128): 228,
}  # fmt: skip
ENDS = ((True, True), (False, False))  # one hop is all there is; a hop between others
# A case takes seconds: width 96 is 128 with a mask, and the types differ in one instruction, so once each will do.
# 192 is 256 with a quarter of some products left out. `python benchmarks/offline_gluon.py` compiles everything.
CASES = [
    *(Case("attend", width, torch.bfloat16, *ends) for width in (64, 128, 256) for ends in ENDS),
    *(Case("attend_in_turns", width, torch.bfloat16, width == 128, width == 128) for width in (64, 128)),
    *(Case(kernel, width) for kernel in ("keys", "queries", "all_gradients") for width in (64, 128)),
    *(Case(kernel, 256) for kernel in ("wide_keys", "queries")),
    *(Case("all_gradients_in_turns", width) for width in (64, 128)),
    *(Case("all_gradients", width, adds=True) for width in (64, 128)),
    Case("attend", 96, torch.float16),
    Case("all_gradients", 96, torch.float16),
    Case("wide_keys", 192, torch.float16, adds=True),
    Case("queries", 192, torch.float16),
]
FP8_CASES = [case for case in offline_gluon.FP8_CASES if case.width != 96 and case.first == case.last]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Case, Future]]:
    """Every case, compiled in processes that may be told of a card that is not here."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        yield {case: processes.submit(offline_gluon.compile_offline, case) for case in CASES + FP8_CASES}
        processes.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_compiles_as_recorded(case, compiled):
    got = compiled[case].result()
    assert got.num_wgmma >= 48 and not got.warnings and not got.hazards and not got.narrow_offsets, got
    assert got.spill_bytes <= SPILLS.get((case.kernel, case.width), 0)
    assert got.shared_bytes <= offline_gluon.SHARED_BYTES


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_an_fp8_kernel_compiles_as_recorded(case, compiled):
    got = compiled[case].result()
    assert got.num_wgmma == (36 if case.width == 64 else 48)
    assert not got.warnings and not got.hazards and not got.narrow_offsets, got
    assert got.spill_bytes == 0 and got.shared_bytes <= offline_gluon.SHARED_BYTES


@pytest.mark.parametrize(
    ("causal", "length", "section"),
    # 16 tiles, 8.5 of the longest: 264 / 8.5 heads would even them out, all are 16; 128 tiles: the L2 holds 4 heads
    [(False, 2048, 1), (True, 2048, 16), (True, 16384, 4)],
)
def test_uneven_tiles_are_ordered_over_as_many_heads_as_even_them_out(causal, length, section):
    k = torch.empty(1, 1, 16, 128, dtype=torch.bfloat16).expand(1, length, 16, 128)
    whole = np.array([[0, length]])
    view = View(*intervals(length, length, causal=causal), whole, whole)
    assert launch.Work.of("forward", k, view).section(view, 16, 1, k, k) == section


def test_the_reader_of_machine_code_finds_an_early_write():
    product = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;"
    wait = "/*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    for early in ("/*0020*/ MOV R5, R60 ;", "/*0020*/ FADD R60, R25, R61 ;"):
        assert offline_gluon.hazards(f"{product}\n{early}\n{wait}")
        assert not offline_gluon.hazards(f"{product}\n{wait}\n{early}")
