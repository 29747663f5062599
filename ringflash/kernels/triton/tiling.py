"""Which tiles each kernel uses: a table, not an autotuner, because these kernels add to their arguments.

Chosen for no spills at most registers (see `benchmarks/offline.py`, which prints what the compiler makes of each row).
"""

from __future__ import annotations

from typing import NamedTuple

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


def columns(width: int) -> tuple[int, int]:
    """The two column blocks of a head dimension, each a power of two or 0: 128 -> (128, 0), 96 -> (64, 32)."""
    d0 = 1 << (width.bit_length() - 1)
    return d0, width - d0


def tiling(kernel: str, width: int, element_size: int, card: Card) -> Tiling:
    return {
        "forward": Tiling(128, 64, 8, 3),
        "keys": Tiling(64, 128, 8, 3),
        "queries": Tiling(128, 64, 8, 3),
    }[kernel]
