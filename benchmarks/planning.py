"""How long the balanced layout of one batch of packed documents takes, and how even it is: a JSON line a row.

python benchmarks/planning.py [--documents 10000] [--repeats 21]

The whole of `Ring.layout` for borders that it has not seen, an int32 tensor: on one core, without a group. Medians over
batches; cpu_ms is the thread's own time, which others on the machine disturb less. The makespan is that of
`ringflash.makespan`, over the ideal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import numpy as np
import torch
from provenance import ROOT, on_cpu

sys.path.insert(0, str(ROOT))

from ringflash import Ring

TILE = 128
KINDS = {
    "lognormal, mean 2k": lambda random, count: random.lognormal(np.log(2048) - 0.5, 1.0, count),
    "uniform to 4k": lambda random, count: random.integers(1, 4097, count),
    "one of half the tokens, the rest to 1k": lambda random, count: np.append(
        random.integers(50, 1000, count - 1), 525 * count
    ),
}


def batch(kind: str, count: int, seed: int, ranks: int) -> tuple[torch.Tensor, int]:
    """(cu_seqlens, length of the sequence), which is padded to whole tiles a rank."""
    lengths = np.maximum(KINDS[kind](np.random.default_rng(seed), count).astype(np.int64), 1)
    borders = np.concatenate(([0], np.cumsum(lengths)))
    return torch.from_numpy(borders.astype(np.int32)), -(-int(borders[-1]) // (ranks * TILE)) * ranks * TILE


def measure(kind: str, count: int, ranks: int, repeats: int) -> dict:
    """One row."""
    ring = Ring(layout="balanced")
    ring.size = ranks  # as one rank of such a ring sees it: a layout never talks
    ring.layout(ranks, cu_seqlens=[0, ranks])  # the first one of a process loads a part of torch, for a second
    times, busy = [], []
    for seed in range(repeats):
        borders, seq_len = batch(kind, count, seed, ranks)
        began, worked = time.perf_counter(), time.thread_time()
        layout = ring.layout(seq_len, cu_seqlens=borders)
        times.append(1e3 * (time.perf_counter() - began))
        busy.append(1e3 * (time.thread_time() - worked))
    return {
        "kind": kind, "documents": count, "ranks": ranks, "tokens": seq_len, "ms": round(median(times), 2),
        "cpu_ms": round(median(busy), 2),
        "fastest_ms": round(min(times), 2), "slowest_ms": round(max(times), 2), "segments": len(layout.segments),
        "makespan": round(layout.makespan, 4),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10000)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    words = ["--documents", str(arguments.documents), "--repeats", str(arguments.repeats)]
    where = on_cpu("planning.py", words)
    for ranks in (2, 8, 64):
        for kind in KINDS:
            print(json.dumps(measure(kind, arguments.documents, ranks, arguments.repeats) | where), flush=True)
