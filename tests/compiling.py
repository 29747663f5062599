"""Compiles one Triton kernel for a GPU that need not be here in many processes at once, each turn with an empty cache:
`python compiling.py FOLDER PROCESSES TURNS`. Prints the exit codes of all."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(p_x, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_x + o_x, 2.0 * tl.load(p_x + o_x))


def compile_once(start: int) -> None:
    """In a child: wait until all are there, compile, end with 0."""
    os.read(start, 1)
    try:
        source = ASTSource(double, {"p_x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 128})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        os._exit(0 if made.asm["cubin"] else 2)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def turn(processes: int) -> list[int]:
    start, go = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            os.close(go)
            compile_once(start)
        children.append(child)
    os.close(start)
    os.close(go)  # which ends all their reads at once
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    folder, processes, turns = Path(sys.argv[1]), *map(int, sys.argv[2:])
    triton.knobs.cache.dir = str(folder)
    for _ in range(turns):
        shutil.rmtree(folder, ignore_errors=True)
        print(*turn(processes))
        assert list(folder.glob("*/double.cubin")), "nothing was kept"
