"""Compile the Gluon kernels for sm_90 on a machine without a GPU, and print what each costs and whether it is sound.

    python benchmarks/offline_gluon.py [NAME ...]        # default: every case

As benchmarks/offline.py it runs the library's own launch code on small CPU tensors. Beside registers, spills and shared
memory it reads the machine code: an instruction that touches what a product in flight still reads or writes is a hazard
(known bugs of ptxas before 13.3 make such code). Called by tests/test_compile_gluon.py.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import triton
from offline import OfflineDriver, check_arguments, narrow_offsets

from ringflash.kernels import State
from ringflash.kernels.gluon import launch
from ringflash.kernels.gluon_fp8 import launch as launch_fp8
from ringflash.mask import View, intervals

SHARED_BYTES = 232448  # usable by one program
PRODUCTS = ("HGMMA", "QGMMA")  # of numbers of 16 bits, of 8


class Case(NamedTuple):
    """first, last: of the forward only; adds: to gradients in fp32, of the others."""

    kernel: str
    width: int
    dtype: torch.dtype = torch.bfloat16
    first: bool = True
    last: bool = True
    adds: bool = False

    @property
    def name(self) -> str:
        ends = (
            f"-{'first' if self.first else ''}{'last' if self.last else ''}" if self.kernel.startswith("attend") else ""
        )
        return (
            f"{self.kernel}-{self.width}-{str(self.dtype).removeprefix('torch.')}{ends}{'-adds' if self.adds else ''}"
        )


ENDS = ((True, True), (True, False), (False, False), (False, True))
TYPES = (torch.bfloat16, torch.float16)
CASES = [
    *(Case("attend", width, dtype, *ends) for width in (64, 96, 128, 192, 256) for dtype in TYPES for ends in ENDS),
    *(Case("attend_in_turns", width, dtype, *ends) for width in (64, 96, 128) for dtype in TYPES for ends in ENDS),
    *(
        Case(kernel, width, dtype)
        for kernel in ("keys", "queries", "all_gradients", "all_gradients_in_turns")
        for width in (64, 96, 128)
        for dtype in TYPES
    ),
    *(Case(kernel, width, dtype) for kernel in ("wide_keys", "queries") for width in (192, 256) for dtype in TYPES),
    *(
        Case(kernel, width, adds=True)
        for kernel in ("keys", "queries", "all_gradients", "all_gradients_in_turns")
        for width in (64, 128)
    ),
    *(Case(kernel, width, adds=True) for kernel in ("wide_keys", "queries") for width in (192, 256)),
]
FP8_CASES = [Case("attend_fp8", width, torch.bfloat16, *ends) for width in (64, 96, 128) for ends in ENDS]


class Compiled(NamedTuple):
    """num_wgmma: products in the machine code; hazards, warnings, narrow_offsets: must be empty"""

    spill_bytes: int
    shared_bytes: int
    num_wgmma: int
    hazards: list[str]
    warnings: list[str]
    narrow_offsets: list[str]


def _span(first: str, count: int) -> set[int]:
    start = int(first.lstrip("R"))
    return set(range(start, start + count))


def _products(args: str, shape: str) -> tuple[set[int], set[int]]:
    """(registers of operand A, of the accumulator) of one product."""
    operands = [operand.strip() for operand in args.split(",")]
    in_registers = re.match(r"R\d+", operands[1])
    return _span(in_registers[0], 4) if in_registers else set(), _span(operands[0], int(shape) // 2)


def _overwrites(op: str, args: str) -> set[int]:
    """The registers that an instruction writes, as far as it is one that computes or loads."""
    target = re.match(r"R(\d+)", args)
    if not target or re.match(r"(ST|RED|ATOM|BAR|BRA|SYNCS|UTMA|FENCE|R2UR|ISETP|FSETP|WARP)", op):
        return set()
    wide = re.search(r"\.(64|128)$", op)
    count = int(wide[1]) // 32 if wide else 1
    if op.startswith(("CS2R", "IMAD.WIDE")) and not op.endswith(".32"):
        count = 2
    return _span(target[0], count)


def hazards(sass: str) -> list[str]:
    """Instructions that touch the accumulator, or overwrite the register operand, of a product still in flight.

    In the order of the program: a loop's back edge is not followed, which is enough where every loop waits for all its
    products before it.
    """
    pending: list[tuple[set[int], set[int]]] = []
    opened: tuple[set[int], set[int]] = (set(), set())
    found = []
    for line in sass.splitlines():
        match = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d\s+)?([A-Za-z0-9_.]+)\s*(.*?);", line)
        if not match:
            continue
        _, op, args = match.groups()
        if op.startswith(PRODUCTS):
            read, written = _products(args, re.search(r"64x(\d+)x\d+", op)[1])
            if any(read & accumulator for _, accumulator in pending):
                found.append(line.strip())
            opened = (opened[0] | read, opened[1] | written)
            if "gsb0" in args:
                pending.append(opened)
                opened = (set(), set())
        elif op.startswith("WARPGROUP.DEPBAR"):
            left = int(args.split(",")[1], 16)
            pending = pending[len(pending) - left :] if left else []
        else:
            flight = [*pending, opened]
            used = {int(number) for number in re.findall(r"(?<![U\w])R(\d+)", args)}
            touched = any(used & accumulator for _, accumulator in flight)
            if touched or any(_overwrites(op, args) & read for read, _ in flight):
                found.append(line.strip())
    return found


def _call(case: Case) -> None:
    """One causal call of the library's launch code whose every stride is as in a large model."""
    length = 1024
    q, dout = (torch.empty(1, length, 4, case.width, dtype=case.dtype) for _ in "12")
    k, v = (torch.empty(1, length, 2, case.width, dtype=case.dtype) for _ in "12")
    lse = torch.empty(1, 4, length)
    steps = 1 << 30 if case.kernel.endswith("in_turns") else 0
    launch.IN_TURNS = {name: (form, steps) for name, (form, _) in launch.IN_TURNS.items()}
    launch.num_sms = lambda device: 1
    segments = np.array([[0, length]])
    view = View(*intervals(length, length, causal=True), segments, segments)
    if case.kernel.startswith("attend"):
        state = State(None if case.first and case.last else torch.empty(q.shape), q, lse)
        engine = launch_fp8 if case.kernel == "attend_fp8" else launch
        engine.forward(q, k, v, view, state, scale=0.1, first=case.first, last=case.last)
    elif case.kernel in ("keys", "wide_keys"):
        grads = [torch.empty(k.shape, dtype=torch.float32 if case.adds else case.dtype) for _ in "12"]
        launch.key_gradients(dout, q, k, v, lse, lse, view, *grads, scale=0.1, adds=case.adds)
    elif case.kernel.startswith("all_gradients"):
        grads = [torch.empty(k.shape, dtype=torch.float32 if case.adds else case.dtype) for _ in "12"]
        launch.all_gradients(dout, q, k, v, lse, lse, view, torch.empty(q.shape), *grads, scale=0.1, adds=case.adds)
    else:
        dq = torch.empty(q.shape, dtype=torch.float32 if case.adds else case.dtype)
        launch.query_gradient(dout, q, k, v, lse, lse, view, dq, scale=0.1)


def _sass(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        return subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout


def compile_offline(case: Case) -> Compiled:
    """Compile one case; raises what compiler and driver raise. In its own process: Triton is told of another card."""
    compiled = {}
    launching = triton.runtime.jit.JITFunction.run

    def compiling(self, *args, warmup, **kwargs):
        compiled[self.fn.__name__] = launching(self, *args, warmup=True, **kwargs)

    triton.runtime.driver.set_active(OfflineDriver("sm_90"))
    triton.runtime.jit.JITFunction.run = compiling
    log = io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            _call(case)
    finally:
        triton.runtime.jit.JITFunction.run = launching
    for made in compiled.values():
        check_arguments(made)
    kernel, text = compiled[case.kernel], log.getvalue()
    sass = _sass(kernel.asm["cubin"])
    return Compiled(
        max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text))),
        kernel.metadata.shared,
        len(re.findall("|".join(PRODUCTS), sass)),
        hazards(sass),
        sorted(set(re.findall(r".*(?:C75\d\d|warning).*", text))),
        narrow_offsets(kernel.asm["ttgir"]),
    )


def _row(case: Case) -> str:
    try:
        got = compile_offline(case)
    except Exception as error:
        return f"{case.name:32} FAILED {str(error)[:100]}"
    fits = "" if got.shared_bytes <= SHARED_BYTES else "  DOES NOT FIT"
    return (
        f"{case.name:32} spill {got.spill_bytes:4} B shared {got.shared_bytes:6} B wgmma {got.num_wgmma:3} "
        f"hazards {len(got.hazards)} {got.warnings} {got.narrow_offsets}{fits}"
    )


def main(wanted: list[str]) -> None:
    cases = [case for case in CASES + FP8_CASES if not wanted or any(word in case.name for word in wanted)]
    print(f"triton {triton.__version__}")
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(_row, cases):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
