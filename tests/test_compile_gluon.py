"""The Gluon kernels, compiled for sm_90 without a GPU: wgmma, shared memory, spills as recorded, and no hazard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import offline_gluon

# (kernel, head dimension) -> bytes spilled at most, of all roles of the kernel together; 0 elsewhere
SPILLS = {("attend", 64): 128}
CASES = [case for case in offline_gluon.CASES if str(case.dtype) == "torch.bfloat16" and case.last]
FP8_CASES = [case for case in offline_gluon.FP8_CASES if case.width != 96 and case.first == case.last]


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process that may be told of a card that is not here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_compiles_as_recorded(case, compiler):
    got = compiler.submit(offline_gluon.compile_offline, case).result()
    assert got.num_wgmma >= 48 and not got.warnings and not got.hazards and not got.narrow_offsets, got
    assert got.spill_bytes <= SPILLS.get((case.kernel, case.width), 0)
    assert got.shared_bytes <= offline_gluon.SHARED_BYTES


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_an_fp8_kernel_compiles_as_recorded(case, compiler):
    got = compiler.submit(offline_gluon.compile_offline, case).result()
    assert got.num_wgmma == (36 if case.width == 64 else 48)
    assert not got.warnings and not got.hazards and not got.narrow_offsets, got
    assert got.spill_bytes == 0 and got.shared_bytes <= offline_gluon.SHARED_BYTES


def test_the_reader_of_machine_code_finds_an_early_write():
    product = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;"
    wait = "/*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    for early in ("/*0020*/ MOV R5, R60 ;", "/*0020*/ FADD R60, R25, R61 ;"):
        assert offline_gluon.hazards(f"{product}\n{early}\n{wait}")
        assert not offline_gluon.hazards(f"{product}\n{wait}\n{early}")
