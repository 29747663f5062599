"""Exact attention for sequences that no single GPU can hold: FlashAttention kernels on a ring.

    ring = ringflash.Ring()                          # all ranks of torch.distributed, or one process
    layout = ring.layout(seq_len)                    # one a batch when documents change
    out = ringflash.attention(q, k, v, layout=layout)    # q, k, v: layout.shard of the global tensors

The kernels are in `kernels`, the ring in `ring`, masks in `mask`, layouts in `layouts`; `reference` defines correct.
"""

from . import hf, reference
from .api import Explanation, attention, explain
from .group import Ring
from .kernels import KERNELS
from .layout import Layout
from .layouts import LAYOUTS
from .merge import merge

__version__ = "0.1.0"
__all__ = [
    "KERNELS",
    "LAYOUTS",
    "Explanation",
    "Layout",
    "Ring",
    "attention",
    "explain",
    "hf",
    "merge",
    "reference",
]
