"""Which tiles each kernel uses: a table, not an autotuner, because these kernels add to their arguments.

Each row is the largest tile that neither spills nor serialises its matrix products; `benchmarks/offline.py` prints what
the compiler makes of every row.
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


# kernel -> the largest head dimension of a row -> tiles
HALF = {
    "forward": {64: Tiling(128, 128, 8, 3), 128: Tiling(128, 64, 8, 3), 256: Tiling(128, 64, 8, 2)},
    "keys": {128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2)},
    "queries": {128: Tiling(128, 64, 8, 3), 192: Tiling(128, 64, 8, 2), 256: Tiling(64, 64, 8, 2)},
}
FLOAT = {
    "forward": {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 32, 4, 2), 256: Tiling(64, 32, 4, 1)},
    "keys": {64: Tiling(32, 64, 4, 2), 128: Tiling(32, 32, 8, 2), 256: Tiling(16, 32, 8, 1)},
    "queries": {64: Tiling(64, 32, 4, 2), 128: Tiling(32, 32, 4, 2), 256: Tiling(32, 16, 8, 1)},
}


def columns(width: int) -> tuple[int, int]:
    """The two column blocks of a head dimension, each a power of two or 0: 128 -> (128, 0), 96 -> (64, 32)."""
    d0 = 1 << (width.bit_length() - 1)
    return d0, width - d0


def tiling(kernel: str, width: int, element_size: int, card: Card) -> Tiling:
    """The tiles of a kernel ("forward", "keys", "queries") for a head dimension and an element of 2 or 4 bytes."""
    rows = (HALF if element_size == 2 else FLOAT)[kernel]
    return next(tiles for limit, tiles in rows.items() if width <= limit)
