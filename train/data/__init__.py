"""Sources -> documents of token ids -> packed sequences -> whole accumulation windows.

Everything is a pure function of (files, seed), the same on every rank: each rank reads the whole stream and keeps the
sequences that fall to its ring, so the order does not depend on the mesh. Cutting over a ring is the layout's work.
`sequences(...)` and `Windows(...)` are the way through; `Windows.state()` is what a checkpoint keeps.
"""

from .heldout import HeldOut, check_apart
from .packing import Packer, Sequence, sequences
from .stream import Place
from .tokens import IGNORED, Tokenizer, tokenizer_of
from .windows import Window, Windows, check_digests, window_digest

__all__ = [
    "IGNORED",
    "HeldOut",
    "Packer",
    "Place",
    "Sequence",
    "Tokenizer",
    "Window",
    "Windows",
    "check_apart",
    "check_digests",
    "sequences",
    "tokenizer_of",
    "window_digest",
]
