"""The loss of an output head beside Liger-Kernel's fused one: seconds, memory and error, a JSON line a row.

python benchmarks/head.py [--tokens 131072] [--chunk 4096] [--width 4096] [--vocabulary 128256]
python benchmarks/head.py --dry-run             # small, on a CPU too, where Liger has no kernel

bf16, random numbers, every label valid. Liger makes the gradients in its forward, so both are timed together; its chunk
follows from its own rule. error: of the gradients, against those of fp32 logits and fp32 products, relative to the
largest, on the first 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import on_cpu, provenance
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train.loss import liger_loss_sum, loss_sum

CHECKED = 1024
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(chunk: int) -> Head:
    return lambda hidden, weight, labels: loss_sum(hidden, weight, labels, chunk=chunk)


def gradients(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    head(hidden, weight, labels).backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Any]:
    """One row's numbers. The peak is what the call adds to its inputs."""
    few = [hidden[:CHECKED], weight, labels[:CHECKED]]
    want = gradients(ours(CHECKED), few[0].float(), few[1].float(), few[2])
    errors = [
        ((got.float() - exact).abs().max() / exact.abs().max()).item()
        for got, exact in zip(gradients(head, *few), want, strict=True)
    ]
    del want
    gradients(head, hidden, weight, labels)
    settle(hidden.device)
    before = 0
    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    gradients(head, hidden, weight, labels)
    settle(hidden.device)
    seconds = time.perf_counter() - began
    row: dict[str, Any] = {"seconds": round(seconds, 4), "error_hidden": errors[0], "error_weight": errors[1]}
    if hidden.is_cuda:
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return row


def main(words: list[str]) -> int:
    """Print the rows. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits exist at one time, of ours")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--dry-run", action="store_true", help="64 tokens, width 32, 100 words")
    asked = parser.parse_args(words)
    if asked.dry_run:
        asked.tokens, asked.width, asked.vocabulary, asked.chunk = 64, 32, 100, 16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    hidden = torch.randn(asked.tokens, asked.width, dtype=torch.bfloat16, device=device)
    weight = torch.randn(asked.vocabulary, asked.width, dtype=torch.bfloat16, device=device) / asked.width**0.5
    labels = torch.randint(asked.vocabulary, (asked.tokens,), device=device)
    where = (provenance if device.type == "cuda" else on_cpu)("head.py", words, asked.commit)
    shape = {key: getattr(asked, key) for key in ("tokens", "width", "vocabulary")}
    for name, made in (("ringflash", ours(asked.chunk)), ("liger", liger_loss_sum)):
        try:
            found = measure(made, hidden, weight, labels)
        except Exception as error:  # not installed, no kernel for a CPU, no memory
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        chunk = {"chunk": asked.chunk} if name == "ringflash" else {}
        print(json.dumps({"head": name} | shape | chunk | found | where), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
