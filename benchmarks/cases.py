"""What is measured: shapes, masks and the work that each holds. No GPU and no torch here; read by all of benchmarks/.

Letters: B batch, S tokens of one row, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

TOKENS = 16384  # of a batch, below which rows are added
WINDOW = 4096
MEAN_DOCUMENT = 2048
MASKS = ("full", "causal", "window", "documents")
DIRECTIONS = ("forward", "backward")
LENGTHS = tuple(4096 * 2**i for i in range(6))
HEAD_DIMS = (128, 64, 256)
BACKWARD = 2.5  # five products where the forward has two, whatever a kernel really multiplies


@functools.cache
def documents(length: int) -> tuple[int, ...]:
    """Borders of packed documents whose lengths are lognormal (sigma 1) with a mean of 2k tokens; always the same."""
    sigma = 1.0
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN_DOCUMENT) - sigma**2 / 2, sigma, length)
    ends = np.cumsum(np.maximum(drawn, 1).astype(np.int64))
    return (0, *ends[ends < length].tolist(), length)


@functools.cache
def visible(length: int, mask_name: str) -> int:
    """(query, key) pairs of one head and row."""
    from ringflash import mask  # brings torch, which documents can do without

    lo, hi = mask.intervals(
        length,
        length,
        causal=mask_name != "full",
        window=WINDOW if mask_name == "window" else None,
        cu_seqlens=np.array(documents(length), np.int32) if mask_name == "documents" else None,
    )
    return int((hi.astype(np.int64) - lo).sum())


class Case(NamedTuple):
    """One cell: everything that is measured in it is interleaved.

    grouped: 4 query heads share a key/value head; window and documents are causal too
    """

    head_dim: int
    length: int
    mask: str
    direction: str
    grouped: bool = False

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    @property
    def heads(self) -> int:
        """16 of 64 or 128, 8 of 256; fewer beyond 16k tokens, so that tensors keep their size."""
        widest = 16 if self.head_dim < 256 else 8
        return max(4 if self.grouped else 1, widest * TOKENS // max(self.length, TOKENS))

    @property
    def kv_heads(self) -> int:
        return self.heads // 4 if self.grouped else self.heads

    @property
    def flops(self) -> float:
        """Of visible pairs only."""
        pairs = visible(self.length, self.mask) * self.batch * self.heads
        return 4.0 * self.head_dim * pairs * (BACKWARD if self.direction == "backward" else 1.0)

    def fields(self) -> dict:
        """The case as a result row names it."""
        return {
            "head_dim": self.head_dim, "length": self.length, "mask": self.mask, "direction": self.direction,
            "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads,
        }  # fmt: skip

    def __str__(self) -> str:
        heads = f"{self.heads}:{self.kv_heads} heads" if self.grouped else f"{self.heads} heads"
        return f"D={self.head_dim} {self.mask} {self.direction} {self.batch} x {self.length} tokens, {heads}"


class Contender(NamedTuple):
    """What runs in a cell. form: "" is the plain call; the others are made by `contenders.FORMS`."""

    kernel: str
    form: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.form})" if self.form else self.kernel


class Cell(NamedTuple):
    case: Case
    contenders: tuple[Contender, ...]


def identity(row: dict) -> tuple:
    """Of a row: what was measured. The last row of an identity holds."""
    return tuple(row[name] for name in ("head_dim", "length", "mask", "direction", "kv_heads", "kernel", "form"))
