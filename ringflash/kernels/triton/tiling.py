"""Which tiles each kernel uses: a table, not an autotuner, because these kernels add to their arguments.

`tuned.json`, where it exists, is what `benchmarks/tune.py` measured, by card; the rows here serve all others.
Each is the largest tile that the card's shared memory holds and that neither spills much nor serialises its products;
`benchmarks/offline.py` prints what the compiler makes of every row. fp32 is there to be right: its tiles are small.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

TUNED = Path(__file__).with_name("tuned.json")
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)


class Card(NamedTuple):
    """backend: "cuda" or "hip"; arch: the compute capability as an int (90) or the gfx name."""

    backend: str
    arch: int | str

    @property
    def has_tma(self) -> bool:
        return self.backend == "cuda" and int(self.arch) >= 90


class Tiling(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# kernel -> the largest head dimension of a row -> tiles
Rows = dict[str, dict[int, Tiling]]

HOPPER: Rows = {
    "forward": {64: Tiling(128, 128, 8, 3), 128: Tiling(128, 64, 4, 2), 256: Tiling(128, 64, 8, 2)},
    "keys": {128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2)},
    "queries": {128: Tiling(128, 64, 8, 3), 192: Tiling(128, 64, 8, 2), 256: Tiling(64, 64, 8, 2)},
}
BLACKWELL: Rows = {
    "forward": HOPPER["forward"] | {128: Tiling(128, 64, 8, 3)},
    "keys": {64: Tiling(64, 128, 8, 2), 128: Tiling(64, 64, 8, 2), 256: Tiling(32, 64, 8, 1)},
    "queries": {128: Tiling(128, 64, 8, 2), 192: Tiling(64, 64, 8, 2), 256: Tiling(64, 32, 8, 2)},
}
AMPERE: Rows = {
    "forward": HOPPER["forward"] | {128: Tiling(128, 64, 8, 3), 192: Tiling(128, 64, 8, 2), 256: Tiling(128, 32, 8, 2)},
    "keys": {
        64: Tiling(64, 128, 8, 3),
        128: Tiling(64, 64, 8, 3),
        192: Tiling(32, 32, 4, 2),
        256: Tiling(32, 64, 8, 1),
    },
    "queries": {128: Tiling(128, 64, 8, 3), 192: Tiling(64, 32, 4, 2), 256: Tiling(64, 32, 8, 2)},
}
SMALL: Rows = {  # 64 KiB of shared memory: AMD; and NVIDIA's smaller cards, with 99
    "forward": {128: Tiling(128, 64, 8, 2), 256: Tiling(64, 32, 4, 2)},
    "keys": {96: Tiling(32, 64, 4, 2), 128: Tiling(32, 64, 8, 1), 256: Tiling(32, 32, 4, 1)},
    "queries": {64: Tiling(128, 64, 8, 2), 128: Tiling(64, 32, 4, 2), 256: Tiling(32, 32, 4, 1)},
}
CUDA_FP32: Rows = {
    "forward": {64: Tiling(32, 32, 8, 1), 256: Tiling(16, 32, 8, 1)},
    "keys": {128: Tiling(32, 32, 8, 1), 256: Tiling(16, 16, 8, 1)},
    "queries": {128: Tiling(32, 32, 8, 1), 256: Tiling(16, 16, 8, 1)},
}
HIP_FP32: Rows = {
    "forward": {128: Tiling(32, 32, 4, 1), 256: Tiling(16, 16, 4, 1)},
    "keys": {128: Tiling(16, 32, 4, 1), 256: Tiling(16, 16, 4, 1)},
    "queries": {128: Tiling(32, 32, 4, 1), 256: Tiling(16, 16, 4, 1)},
}


def columns(width: int) -> tuple[int, int]:
    """The two column blocks of a head dimension, each a power of two or 0: 128 -> (128, 0), 96 -> (64, 32)."""
    d0 = 1 << (width.bit_length() - 1)
    return d0, width - d0


@functools.cache
def measured(card: Card) -> Rows:
    """What `benchmarks/tune.py` found best on this card, for 16 bits: kernel -> head dimension -> tiles."""
    table = json.loads(TUNED.read_text(encoding="utf-8")) if TUNED.is_file() else {}
    rows = table.get(f"{card.backend}:{card.arch}", {}).get("rows", {})
    return {
        kernel: {int(width): Tiling(**row["tiling"]) for width, row in found.items()} for kernel, found in rows.items()
    }


def tiling(kernel: str, width: int, element_size: int, card: Card) -> Tiling:
    """The tiles of a kernel ("forward", "keys", "queries") for a head dimension and an element of 2 or 4 bytes."""
    best = measured(card).get(kernel, {}).get(width) if element_size == 2 else None
    return best or built_in(kernel, width, element_size, card)


def built_in(kernel: str, width: int, element_size: int, card: Card) -> Tiling:
    """The same by the rows of this file."""
    families: dict[int | str, Rows] = {80: AMPERE, 90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}
    rows = families.get(card.arch, SMALL)
    if element_size == 4:
        rows = CUDA_FP32 if card.backend == "cuda" else HIP_FP32
    return rows[kernel][min(limit for limit in rows[kernel] if width <= limit)]
