"""Which tiles and registers each Gluon kernel uses: a table, not an autotuner. Costs: `benchmarks/offline_gluon.py`.

Registers are a pool: ptxas caps a thread at 65536 / threads (168 for 12 warps, 128 for 16); workers ask for theirs and
the first consumer gets what is left. Under-asking does not slow down gently: ptxas then serialises every product.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD_DIMS = (64, 96, 128, 192, 256)


class Tiling(NamedTuple):
    """num_consumers: warpgroups that compute, 64 rows each; registers: of a thread of theirs.

    v_stages: of the values, where they have fewer buffers than the keys
    """

    block_q: int
    block_k: int
    num_stages: int
    num_consumers: int
    registers: int
    v_stages: int = 0


# kernel -> columns of a tile -> tiles
TILINGS = {
    "forward": {64: Tiling(192, 128, 2, 3, 160), 128: Tiling(128, 128, 2, 2, 240), 256: Tiling(128, 64, 2, 2, 240)},
    "forward in turns": {64: Tiling(128, 128, 3, 2, 240), 128: Tiling(128, 128, 2, 2, 240)},
    "keys": {64: Tiling(64, 128, 2, 2, 240), 128: Tiling(64, 128, 2, 2, 240)},
    "wide keys": {256: Tiling(64, 64, 2, 2, 240)},
    "fused": {64: Tiling(128, 128, 2, 2, 240), 128: Tiling(64, 128, 2, 2, 240)},
    "fused in turns": {64: Tiling(128, 128, 2, 2, 240), 128: Tiling(64, 128, 2, 2, 240)},
    "queries": {64: Tiling(192, 64, 3, 3, 160), 128: Tiling(128, 64, 3, 2, 240), 256: Tiling(128, 64, 2, 2, 240, 1)},
}


def columns(width: int) -> int:
    """The columns of a tile for a head dimension: a power of two. TMA reads 0 behind the tensor's last."""
    return 1 << (width - 1).bit_length()
