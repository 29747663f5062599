"""How many bytes a rank of a ring sends, by mask, layout, arrangement and heads: a JSON line a row. Arithmetic, no GPU.

python benchmarks/travel.py [--tokens 1048576] [--ranks 8 64]

bf16, D = 128, gradients in fp32 on the way; means over the ranks. Beside each row what a ring of whole blocks would
send: every hop that any rank needs, keys and values in whole blocks with the gradients of all hops behind them.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import torch
from provenance import ROOT, on_cpu

sys.path.insert(0, str(ROOT))

from ringflash import LAYOUTS
from ringflash.arguments import Mask
from ringflash.arrangements import ARRANGEMENTS
from ringflash.routes import Plan, sizes_of

DIM = 128
HEADS = ((32, 8), (32, 32))


def documents(tokens: int) -> torch.Tensor:
    """Borders of 200 documents or so of lognormal lengths."""
    lengths = np.random.default_rng(0).lognormal(9, 1.2, 200) + 1
    borders = np.minimum(np.concatenate(([0], np.cumsum(lengths))), tokens).astype(np.int32)
    borders[-1] = tokens
    return torch.from_numpy(borders)


def cases(tokens: int) -> list[tuple[str, Mask, tuple[str, ...]]]:
    """(name, mask, layouts)."""
    return [
        ("causal", Mask(True), ("zigzag", "contiguous")),
        ("full", Mask(False), ("zigzag",)),
        ("window 4,096", Mask(True, 4096), ("zigzag", "contiguous")),
        ("documents", Mask(True, None, documents(tokens)), ("zigzag", "balanced")),
    ]


def whole_blocks(plan: Plan, sizes, rows: int) -> tuple[int, int]:
    """Bytes forward and backward of a ring whose blocks travel whole."""
    hops = sorted(plan.forward.hops)
    trips, home = max(len(hops) - 1, 0), int(bool(hops) and hops[-1] > 0)
    return sizes.bytes_of("keys", trips * rows, 0), sizes.bytes_of("keys", trips * rows, (trips + home) * rows)


def measure(tokens: int, ranks: int, layout: str, mask: Mask, arrangement: str) -> list[dict]:
    """A row for each choice of heads."""
    lo, hi = mask.intervals(tokens, tokens)
    segments = LAYOUTS[layout].segments(tokens, ranks, 1, Mask(mask.causal, None, mask.cu_seqlens).work(tokens))
    inner = ranks // 2 if arrangement == "double" else None
    plan = Plan(segments, 0, lo, hi, arrangement=arrangement, inner=inner)
    rows = []
    for heads, groups in HEADS:
        q, k = (torch.empty(1, 1, count, DIM, dtype=torch.bfloat16, device="meta") for count in (heads, groups))
        sizes = sizes_of(q, k, torch.float32)
        back = plan.backward(sizes)
        forward = sizes.bytes_of("keys", min(plan.travel("keys", down=down).rows()[0] for down in (False, True)), 0)
        backward = min(sizes.bytes_of(back.what, *plan.travel(back.what, down=d).rows()) for d in (False, True))
        whole = whole_blocks(plan, sizes, tokens // ranks)
        rows.append({
            "heads": heads, "groups": groups, "hops": len(plan.forward.hops), "rotates": back.what,
            "forward_bytes": forward // ranks, "backward_bytes": backward // ranks,
            "whole_forward_bytes": whole[0], "whole_backward_bytes": whole[1],
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    given = parser.parse_args()
    words = ["--tokens", str(given.tokens), "--ranks", *map(str, given.ranks)]
    where = on_cpu("travel.py", words)
    for ranks in given.ranks:
        for name, mask, layouts in cases(given.tokens):
            for layout in layouts:
                for arrangement in ARRANGEMENTS:
                    what = {"ranks": ranks, "mask": name, "layout": layout, "arrangement": arrangement}
                    for row in measure(given.tokens, ranks, layout, mask, arrangement):
                        print(json.dumps(what | row | where), flush=True)
