"""The masks that the library's tests loop over, as the arguments of `attention`, and the same masks pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ringflash.mask import Plan, View, positions


def _bounds(lo: np.ndarray, hi: np.ndarray) -> dict[str, Any]:
    return {"intervals": (torch.from_numpy(lo.astype(np.int32)), torch.from_numpy(hi.astype(np.int32)))}


def _prefix(size: int) -> dict[str, Any]:
    position = np.arange(size)
    return _bounds(position * 0, np.maximum(size // 3, position + 1))


def _chunked(size: int) -> dict[str, Any]:
    position = np.arange(size)
    chunk = size // 4 + 1
    return _bounds(position // chunk * chunk, np.minimum(position // chunk * chunk + chunk, size))


def _past(size: int) -> dict[str, Any]:
    """Keys at least half a sequence back: the first half sees nothing, and a contiguous ring needs no hop 0."""
    position = np.arange(size)
    return _bounds(position * 0, np.maximum(position - size // 2, 0))


def _beyond_padding(size: int) -> dict[str, Any]:
    """Intervals that look behind the last document, where nothing may be seen."""
    position = np.arange(size)
    return {"cu_seqlens": [0, size // 2]} | _bounds(
        np.where(position < size // 4, 0, size // 2 + 4), position * 0 + size
    )


def _random(size: int) -> dict[str, Any]:
    random = np.random.default_rng(size)
    lo, hi = (np.sort(random.integers(0, size + 1, size)) for _ in range(2))
    return _bounds(lo, hi)


# name -> function of the length -> arguments of attention; `window` is the call's, the others are the layout's
MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda size: {},
    "full": lambda size: {"causal": False},
    "window": lambda size: {"window": size // 7},
    "window_of_one": lambda size: {"window": 1},
    "window_both_ways": lambda size: {"causal": False, "window": size // 9},
    "documents": lambda size: {"cu_seqlens": [0, 1, size // 3, size // 3, size - 7, size]},
    "documents_at_borders": lambda size: {"cu_seqlens": [0, size // 4, size // 2, size]},
    "documents_full": lambda size: {"cu_seqlens": [0, 5, size // 2 + 3, size], "causal": False},
    "documents_window": lambda size: {"cu_seqlens": [0, 5, size // 2 + 3, size], "window": size // 8},
    "padding": lambda size: {"cu_seqlens": [0, 7, size - size // 5]},
    "padding_window_full": lambda size: {"cu_seqlens": [0, 9, size // 2], "causal": False, "window": size // 6},
    "only_padding": lambda size: {"cu_seqlens": [0, 0]},
    "prefix": _prefix,
    "chunked": _chunked,
    "past": _past,
    "random": _random,
    "random_causal_window": lambda size: _random(size) | {"causal": True, "window": size // 2},
    "random_documents": lambda size: _random(size) | {"cu_seqlens": [0, 3, size // 2, size - 4]},
    "beyond_padding": _beyond_padding,
    "nothing": lambda size: _bounds(np.zeros(size), np.zeros(size)),
}


def seen(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool | None = None,
    window: int | None = None,
    cu_seqlens=None,
    intervals=None,
) -> np.ndarray:
    """bool [queries, keys], by looking at each pair: the meaning of every mask, written down without intervals."""
    causal = intervals is None if causal is None else causal
    mask = np.zeros((num_queries, num_keys), bool)
    for i in range(num_queries):
        p = i + num_keys - num_queries
        for j in range(num_keys):
            see = True
            if causal and j > p:
                see = False
            if window is not None and (p - j >= window or j - p >= window):
                see = False
            if cu_seqlens is not None:
                document = [sum(1 for border in cu_seqlens[1:] if border <= x) for x in (i, j)]
                if document[0] != document[1] or max(i, j) >= cu_seqlens[-1]:
                    see = False
            if intervals is not None and not intervals[0][i] <= j < intervals[1][i]:
                see = False
            mask[i, j] = see
    return mask


def plan(segments: list[np.ndarray], rank: int, lo: np.ndarray, hi: np.ndarray) -> Plan:
    """The hops of a ring in which whole blocks travel, by looking at each, and what this rank computes at them."""
    size = len(segments)
    every = [[_view(segments, r, hop, lo, hi) for hop in range(size)] for r in range(size)]
    hops = [hop for hop in range(size) if any(row[hop].pairs() for row in every)]
    return Plan(tuple(hops), tuple(every[rank][hop] if every[rank][hop].pairs() else None for hop in hops))


def _view(segments: list[np.ndarray], rank: int, hop: int, lo: np.ndarray, hi: np.ndarray) -> View:
    rows = positions(segments[rank])
    return View(lo[rows], hi[rows], segments[rank], segments[(rank - hop) % len(segments)])
