"""The tile of the fp8 kernels: one for every head dimension. Costs: `benchmarks/offline_gluon.py`."""

HEAD_DIMS = (64, 96, 128)  # beyond, the accumulators of two levels do not fit the registers
BLOCK_Q, BLOCK_K = 128, 128
NUM_STAGES = 2
REGISTERS = 240  # of a consumer's thread
