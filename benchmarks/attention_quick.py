"""Our kernels beside cuDNN on one Hopper GPU, interleaved, in a minute: JSON lines, one a case, direction, kernel.

    python benchmarks/attention_quick.py [--rounds 3] [--length 16384]

Head dimensions 128 and 64, full and causal, 16 heads, bf16, random normal inputs. Every kernel is timed once a round,
so that all of them meet the same clocks; only ratios within a run mean anything. FLOPs: 4 B H S^2 D forward, half if
causal, 2.5 times that backward, whatever a kernel really multiplies. cuDNN gets its favourite layout, [B, H, S, D].
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import ringflash

OURS = ("triton", "gluon")
PEER = "cudnn"
HEADS = 16
BACKWARD = 2.5


def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def calls(width: int, length: int, *, causal: bool) -> dict[tuple[str, str], Callable[[], object]]:
    """(direction, kernel) -> one run of it."""
    found: dict[tuple[str, str], Callable[[], object]] = {}
    drawn = [torch.randn(1, length, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for name in (*OURS, PEER):
        tensors = [x.transpose(1, 2).contiguous() if name == PEER else x for x in drawn]
        leaves, dout = [x.detach().requires_grad_() for x in tensors[:3]], tensors[3]

        def forward(name=name, inputs=tuple(tensors[:3])):
            if name == PEER:
                return peer(*inputs, causal=causal)
            return ringflash.attention(*inputs, causal=causal, kernel=name)

        out = forward(inputs=tuple(leaves))

        def backward(out=out, leaves=leaves, dout=dout):
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        found["forward", name], found["backward", name] = forward, backward
    return found


def measure(width: int, length: int, rounds: int, *, causal: bool) -> list[dict]:
    """One row a (direction, kernel): TFLOP/s of each round, and the median's ratio to cuDNN's."""
    flops = 4 * HEADS * length**2 * width * (0.5 if causal else 1.0)
    runs = calls(width, length, causal=causal)
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            scale = BACKWARD if key[0] == "backward" else 1.0
            rates[key].append(scale * flops / do_bench(run, warmup=15, rep=80, return_mode="median") / 1e9)
    return [
        {
            "head_dim": width, "mask": "causal" if causal else "full", "length": length, "heads": HEADS,
            "direction": direction, "kernel": name, "tflops": round(median(rate), 1), "min": round(min(rate), 1),
            "max": round(max(rate), 1), "to_cudnn": round(median(rate) / median(rates[direction, PEER]), 3),
        }
        for (direction, name), rate in rates.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=16384)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    run = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "commit": commit, "rounds": arguments.rounds,
    }  # fmt: skip
    torch.manual_seed(0)
    for width in (128, 64):
        for causal in (False, True):
            for row in measure(width, arguments.length, arguments.rounds, causal=causal):
                print(json.dumps(row | run), flush=True)


if __name__ == "__main__":
    main()
