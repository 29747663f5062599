"""Compile the Triton kernels for GPUs that are not here, and print what each costs: registers, spills, shared memory.

    python benchmarks/offline.py [ARCH ...]        # default: sm_80 sm_89 sm_90 sm_100 gfx942

It runs the library's own launch code on small CPU tensors, with a driver that says it is the wanted card, and stops
before the launch: what is compiled is exactly what that card would run. Called by tests/test_compile.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import itertools
import json
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

from ringflash.kernels import State
from ringflash.kernels.triton import launch, moving, specialised
from ringflash.kernels.triton.tiling import HEAD_DIMS
from ringflash.mask import View, intervals

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "gfx942": 65536,
}  # usable by one program
TMEM_COLUMNS = 512  # of sm_100
PRODUCTS = {
    "sm_80": re.compile(r"\bmma\.sync"),
    "sm_89": re.compile(r"\bmma\.sync"),
    "sm_90": re.compile(r"\bwgmma\.mma_async"),
    "sm_100": re.compile(r"\btcgen05\.mma|\bmma\.sync"),
    "gfx942": re.compile(r"\bv_mfma"),
}
FORWARDS = {"forward": (True, True), "carried": (False, False)}  # (first, last): one hop, a hop between others
KERNELS = (*FORWARDS, "keys", "queries")
# (masked, first, last) of the forward with specialised warps, which sm_90 has with one triton
SPLIT = {"split": (True, True, True), "split carried": (True, False, False), "split whole": (False, True, True)}
MOVES = ("copy", "sum", "round", "clear")
WIDE = re.compile(r"\.v4\.b32|_dwordx4")


class Compiled(NamedTuple):
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_products: int  # instructions for matrix cores
    num_tma: int
    num_wide: int  # loads and stores of 16 bytes a thread
    warnings: list[str]
    narrow_offsets: list[str]  # address computations fed by a 32-bit product of two runtime numbers


class OfflineDriver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: str):
        self.target = TARGETS[arch]
        self.device = list(TARGETS).index(arch)  # triton keeps what it compiled by device: one number an arch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def narrow_offsets(ttir: str) -> list[str]:
    """Lines of the IR that add to a pointer a value that depends on a 32-bit product of two values not constant."""
    constant, tainted, found = set(), set(), []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#:]+) = (\S+) (.*)", line)
        if not match:
            continue
        name, op, rest = match.groups()
        operands = re.findall(r"%[\w]+", rest)
        if op == "arith.constant":
            constant.add(name)
        wide = not re.search(r"\bi32\b|xi32>", rest.rsplit(":", 1)[-1])
        product = op == "arith.muli" and not wide and not constant & set(operands)
        passes_on = op.startswith(("arith.addi", "arith.ext", "tt.splat", "tt.expand_dims", "tt.broadcast"))
        if product or (passes_on and tainted & set(operands)):
            tainted.add(name)
        if op == "tt.addptr" and tainted & set(operands[1:]):
            found.append(line.strip())
    return found


def check_arguments(kernel) -> None:
    """AssertionError where NVIDIA's driver does not find the descriptors that the compiled kernel takes.

    It looks for them among the arguments only, and not inside tuples, when it makes the launcher: at the first launch.
    """
    signature, descriptors = kernel.src.signature, kernel.metadata.tensordesc_meta
    if hasattr(driver, "expand_signature"):
        driver.expand_signature(signature.values(), descriptors)
    else:  # triton 3.6 has it inside
        driver.make_launcher({}, signature, descriptors)


def _measure(arch: str, kernel, log: str) -> Compiled:
    asm = kernel.asm
    if arch.startswith("gfx"):
        text = asm["amdgcn"]
        field = lambda name: int(re.search(rf"\.{name}:\s*(\d+)", text).group(1))  # noqa: E731
        registers, spills = field("vgpr_count"), 4 * field("vgpr_spill_count")
    else:
        check_arguments(kernel)
        registers = int(re.search(r"Used (\d+) registers", log).group(1))
        spills = max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    warnings = sorted(set(re.findall(r".*(?:C75\d\d|warning).*", log)))
    if getattr(kernel.metadata, "tmem_size", 0) > TMEM_COLUMNS:
        warnings.append(f"{kernel.metadata.tmem_size} columns of tensor memory, the card has {TMEM_COLUMNS}")
    text = asm.get("ptx") or asm["amdgcn"]
    num_products, num_tma = len(PRODUCTS[arch].findall(text)), text.count("cp.async.bulk.tensor")
    narrow = narrow_offsets(asm["ttir"])
    num_wide = len(WIDE.findall(text))
    return Compiled(registers, spills, kernel.metadata.shared, num_products, num_tma, num_wide, warnings, narrow)


def _move(kernel: str, width: int, dtype: torch.dtype) -> None:
    """One call of the library's launch code that moves rows, as they travel in the backward of a large model."""
    q, dout = (torch.empty(1, 64, 4, width, dtype=dtype) for _ in "12")
    lse, delta = (torch.empty(1, 4, 64) for _ in "12")
    sums = torch.empty(64, 1, 1, 4, width)
    table, spans = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
    columns = [moving.columns_of(x) for x in (q, dout, lse, delta, sums[:, 0].movedim(0, 1))]
    size = 4 * width * dtype.itemsize
    if kernel == "copy":
        block = torch.empty(64, 2 * size + 32, dtype=torch.uint8)
        moving.copy(columns[:4], block, table, first_bytes=[0, size, 2 * size, 2 * size + 16], rows=8)
    elif kernel == "clear":
        moving.clear(columns[4], table, rows=8)
    else:
        arrived, tables = (sums, (table, spans, table)) if kernel == "sum" else (None, (table,))
        moving.add_up(columns[:1], columns[4:], arrived, tables, rows=8)


def _call(kernel: str, width: int, dtype: torch.dtype, ragged: bool) -> None:
    """One call of the library's launch code whose every stride is as in a large model; causal, but for one of SPLIT."""
    length = 1024
    q, dout = (torch.empty(1, length, 4, width, dtype=dtype) for _ in "12")
    k, v = (torch.empty(1, length, 2, width, dtype=dtype) for _ in "12")
    lse = torch.empty(1, 4, length)
    segments = np.array([[0, 500], [600, 524]]) if ragged else np.array([[0, length]])
    masked, *edges = SPLIT.get(kernel, (True, *FORWARDS.get(kernel, ())))
    view = View(*intervals(length, length, causal=masked), segments, segments)
    if edges:
        first, last = edges
        state = State(None if first and last else torch.empty(q.shape), q, lse)
        forward = specialised.split if kernel in SPLIT else launch.forward
        forward(q, k, v, view, state, scale=0.1, first=first, last=last)
    elif kernel == "keys":
        launch.key_gradients(
            dout, q, k, v, lse, lse, view, torch.empty(k.shape), torch.empty(k.shape), scale=0.1, adds=False
        )
    else:
        launch.query_gradient(dout, q, k, v, lse, lse, view, torch.empty(q.shape), scale=0.1)


def compile_offline(arch: str, width: int, dtype: torch.dtype, kernel: str, ragged: bool = False) -> Compiled:
    """Compile a kernel of KERNELS, SPLIT or MOVES for an arch of TARGETS; raises what compiler and driver raise."""
    compiled = []
    launching = triton.runtime.jit.JITFunction.run

    def compiling(self, *args, warmup, **kwargs):
        compiled.append(launching(self, *args, warmup=True, **kwargs))

    triton.runtime.driver.set_active(OfflineDriver(arch))
    triton.runtime.jit.JITFunction.run = compiling
    log = io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            if kernel in MOVES:
                _move(kernel, width, dtype)
            else:
                _call(kernel, width, dtype, ragged)
    finally:
        triton.runtime.jit.JITFunction.run = launching
    return _measure(arch, compiled[0], log.getvalue())


def _row(case: tuple) -> dict:
    arch, width, dtype, kernel = case
    row = {"arch": arch, "direction": kernel, "d": width, "dtype": str(dtype).removeprefix("torch.")}
    try:
        got = compile_offline(*case)
    except Exception as error:
        return row | {"failed": str(error)[:100]}
    return row | got._asdict() | {"shared_limit_bytes": SHARED_BYTES[arch]}


def _line(row: dict) -> str:
    name = f"{row['arch']:7} {row['direction']:13} D={row['d']:<4} {row['dtype']:9}"
    if "failed" in row:
        return f"{name} FAILED {row['failed']}"
    fits = "" if row["shared_bytes"] <= row["shared_limit_bytes"] else "  DOES NOT FIT"
    return (
        f"{name} registers {row['registers']:3} spill {row['spill_bytes']:4} B shared {row['shared_bytes']:6} B "
        f"products {row['num_products']:3} tma {row['num_tma']:2} {row['warnings']} {row['narrow_offsets']}{fits}"
    )


def main(arches: list[str]) -> list[dict]:
    """Print a line for each kernel and return the rows."""
    widths = {torch.bfloat16: HEAD_DIMS, torch.float16: (128,), torch.float32: (64, 128, 256)}
    cases = [
        (arch, width, dtype, kernel)
        for arch in arches
        for dtype, some in widths.items()
        for width in some
        for kernel in KERNELS
    ]
    cases += [(arch, 128, torch.bfloat16, kernel) for arch in arches for kernel in MOVES]
    if "sm_90" in arches and triton.__version__.startswith(specialised.COMPILER):
        both = itertools.product(specialised.HEAD_DIMS, specialised.LIMITS, SPLIT)
        cases += [("sm_90", *case) for case in both]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(_row, cases):
            print(_line(row), flush=True)
            rows.append(row)
    return rows


def save(rows: list[dict], path: Path) -> None:
    """Keep the rows for the documents: see docs/render.py."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "command": "python benchmarks/offline.py",
        "commit": commit,
        "hardware": f"no GPU: compiled by triton {triton.__version__}",
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", nargs="*", help=f"of {', '.join(TARGETS)}; all unless given")
    parser.add_argument("--results", type=Path, help="also write the rows to this JSON file")
    arguments = parser.parse_args()
    rows = main(arguments.arch or list(TARGETS))
    if arguments.results:
        save(rows, arguments.results)
