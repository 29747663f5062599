"""The tiles of the fp8 kernels. Costs: `benchmarks/offline_gluon.py`."""

from ..gluon.tiling import Tiling

HEAD_DIMS = (64, 96, 128)  # beyond, the accumulators of two levels do not fit the registers
BLOCK_Q, BLOCK_K = 128, 128
# columns of a tile -> tiles; of 2 to 4 stages the fastest on an H200
TILINGS = {64: Tiling(BLOCK_Q, BLOCK_K, 4, 2, 240), 128: Tiling(BLOCK_Q, BLOCK_K, 3, 2, 240)}
