"""Steps of the trainer over all GPUs of a host, by case: a JSON line each, measured beside predicted.

    torchrun --nproc-per-node 2 benchmarks/mesh_step.py                     # all cases
    torchrun --nproc-per-node 2 benchmarks/mesh_step.py --cases ring-512k documents-balanced
    torchrun --nproc-per-node 2 benchmarks/mesh_step.py --tiny              # gloo on CPUs: does it run?

Some layers of Llama-3-8B, bf16, AdamW under ZeRO 2 or 3, on the source files of Python's standard library: as one
document, or as the documents that they are. The row is the last step's; the steps before it compile. Seconds are the
slowest rank's; attention's are rank 0's, with what its ring waits for. Predictions are of `train.plan`, for documents
with the pairs that the trainer counted. The cases are those of `meshes.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from meshes import CASES, Case, predicted  # noqa: E402
from provenance import on_cpu, over, provenance  # noqa: E402
from spans import Spans  # noqa: E402

from train import loop, world  # noqa: E402
from train.config import Config  # noqa: E402
from train.metrics import METRICS  # noqa: E402

SHOWN = "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "attention_share", "data_wait_s", "loss"
"""Metrics of a row."""


def measure(case: Case, config: Config, joined: world.World) -> dict[str, Any]:
    """The last of the case's steps."""
    run = loop.prepare(config, joined)
    spans = Spans(joined.device)
    for step in range(1, case.steps):
        loop.train_step(run, step, tokens_seen=0)
    if joined.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(joined.device)
    with spans.watching():
        spans.begin()
        record = loop.train_step(run, case.steps, tokens_seen=0)
    calls = spans.calls()
    run.engine.close()
    row = {"seconds": round(record.step_time_s, 4), "peak_bytes": record.peak_memory_bytes}
    row |= {name: round(value, 5) for name in SHOWN if (value := METRICS[name](record)) is not None}
    row |= {f"{name}_s": round(sum(each), 4) for name, each in calls.items()}
    return row | predicted(config, joined.size, row["attention_share"] if case.documents else None)


def go(asked: argparse.Namespace, place: world.Place) -> None:
    """Rank 0 prints the rows. ValueError for what cannot be measured here."""
    if not (asked.tiny or torch.cuda.is_available()):
        raise ValueError("this measures GPUs, and torch sees none; --tiny needs no GPU")
    words = ["--cases", *asked.cases, *(["--tiny"] if asked.tiny else [])]
    shown = provenance if torch.cuda.is_available() else on_cpu
    made = over(place.size, shown("mesh_step.py", words, asked.commit))
    cases = {name: CASES[name].small() if asked.tiny else CASES[name] for name in asked.cases}
    configs = {name: case.config(place.size, tiny=asked.tiny) for name, case in cases.items()}
    with world.start(next(iter(configs.values())), place) as first:
        for name, config in configs.items():
            row = measure(cases[name], config, world.connect(config, first.device))
            if place.rank == 0:
                line = json.dumps({"case": name, "ranks": place.size, **cases[name]._asdict()} | row | made)
                print(line, flush=True)
                if asked.output:
                    with asked.output.open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")
            gc.collect()
            if first.device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--output", type=Path, help="rows are added to it")
    parser.add_argument("--commit", help="the commit, where the checkout has no history")
    parser.add_argument("--tiny", action="store_true", help="the shape tiny on 512 tokens")
    code = 0
    try:
        go(parser.parse_args(), world.Place.from_environment())
    except ValueError as refusal:
        print(f"mesh_step: {refusal}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    os._exit(code)  # DeepSpeed on a CPU may abort when the interpreter ends
