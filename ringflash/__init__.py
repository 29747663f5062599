"""Exact attention for sequences that no single GPU can hold: FlashAttention kernels on a ring.

    ring = ringflash.Ring()                              # all ranks of torch.distributed, or one process
    layout = ring.layout(seq_len)                        # one a batch when documents change
    out = ringflash.attention(q, k, v, layout=layout)    # q, k, v: layout.shard of the global tensors

The kernels are in `kernels`, the ring in `ring`, masks in `mask`, layouts in `layouts`; `reference` defines correct.
Names are loaded when they are first used: the installed `ringflash` command starts jobs where torch is slow to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import hf, reference
    from .api import Explanation, attention, explain
    from .arrangements import ARRANGEMENTS
    from .group import Ring
    from .kernels import KERNELS
    from .layout import Layout
    from .layouts import LAYOUTS
    from .merging import merge
    from .suggesting import Suggestion, suggest

__version__ = "0.1.0"
__all__ = [
    "ARRANGEMENTS",
    "KERNELS",
    "LAYOUTS",
    "Explanation",
    "Layout",
    "Ring",
    "Suggestion",
    "attention",
    "explain",
    "hf",
    "merge",
    "reference",
    "suggest",
]

_HOMES = {
    "ARRANGEMENTS": "arrangements",
    "Explanation": "api",
    "KERNELS": "kernels",
    "LAYOUTS": "layouts",
    "Layout": "layout",
    "Ring": "group",
    "Suggestion": "suggesting",
    "attention": "api",
    "explain": "api",
    "hf": "hf",
    "merge": "merging",
    "reference": "reference",
    "suggest": "suggesting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    # `merging` is not called `merge`: importing a submodule binds its name here, over the function
    value = globals()[name] = module if name == _HOMES[name] else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
