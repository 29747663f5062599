"""The tile of the fp8 kernels, one for every head dimension. Costs: `benchmarks/offline_gluon.py`."""

HEAD_DIMS = (64, 96, 128)  # beyond, the accumulators of two levels do not fit the registers
BLOCK_Q, BLOCK_K = 128, 128
STAGES = {64: 4, 128: 3}  # key tiles in shared memory, by a tile's columns: the fastest of 2 to 4 on an H200
REGISTERS = 240  # of a consumer's thread
