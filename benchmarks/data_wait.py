"""What a step of the trainer waits for its data, by kind of data: a JSON line each, from the trainer's own records.

    torchrun --nproc-per-node 2 benchmarks/data_wait.py [--layers 2] [--length 131072] [--steps 6]
    python benchmarks/data_wait.py --shape tiny --length 512 --steps 3      # on a CPU too

Some layers of Llama-3-8B over a ring of all processes, so a step is shorter than the whole model's and the wait a
larger part of it. The data are those of `loading.py`, text in JSON lines or token ids, and every rank encodes all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from loading import sources  # noqa: E402
from provenance import on_cpu, provenance  # noqa: E402
from train_step import SHAPES  # noqa: E402

from train import data, loop, world  # noqa: E402
from train.config import Config, Data  # noqa: E402

WARM = 2
"""Steps before those that count: kernels are compiled, the thread that loads gets ahead."""


def config_of(asked: argparse.Namespace, section: Data, ranks: int) -> Config:
    table = dict(SHAPES[asked.shape]) | {"num_hidden_layers": asked.layers}
    vocabulary = max(table["vocab_size"], 32000)  # the ids of "text"
    return Config.model_validate(
        {
            "model": {
                "architecture": table.pop("architecture"),
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "config": table | {"vocab_size": vocabulary},
            },
            "data": section.model_dump(),
            "sequence": {"length": asked.length, "layout": "zigzag"},
            "parallel": {"ring": ranks, "zero": 2},
            "optimizer": {"name": "adamw", "lr": 1e-5},
            "train": {"name": "wait", "steps": WARM + asked.steps, "global_batch": 1, "self_test": False},
            "metrics": {"wandb": "disabled"},
            "launch": {"processes_per_node": ranks},
        }
    )


def measure(run: loop.Run, asked: argparse.Namespace, section: Data) -> dict[str, Any]:
    """Steps on this data, from its beginning."""
    tokenizer = data.tokenizer_of(section, run.config.model.config["vocab_size"])
    stream = data.sequences(section, tokenizer, length=asked.length, seed=0)
    ranks = {"data_rank": run.world.data_rank, "data_size": run.world.data_size}
    run = replace(run, windows=data.Windows(stream, run.batch, **ranks))
    records = [loop.train_step(run, step, tokens_seen=0) for step in range(1, WARM + asked.steps + 1)][WARM:]
    shares = [record.data_wait_s / record.step_time_s for record in records]
    return {
        "step_s": round(statistics.median(record.step_time_s for record in records), 4),
        "data_wait_s": round(statistics.median(record.data_wait_s for record in records), 6),
        "data_wait_share": round(statistics.median(shares), 6),
        "data_wait_share_largest": round(max(shares), 6),
        "tokens_per_s": round(statistics.median(record.tokens / record.step_time_s for record in records)),
        "peak_bytes": records[-1].peak_memory_bytes,
    }


def go(asked: argparse.Namespace, words: list[str], folder: str, place: world.Place) -> None:
    where = provenance if torch.cuda.is_available() else on_cpu
    facts = {"processes": place.size, "shape": asked.shape, "layers": asked.layers, "length": asked.length}
    kinds: dict[str, Data] = {}
    config = config_of(asked, Data(path="stdlib"), place.size)
    with world.start(config, place) as joined:
        if place.rank == 0:
            kinds = sources(Path(folder))
        kinds = joined.gather_objects(kinds)[0]
        run = loop.prepare(config, joined)
        for kind, section in kinds.items():
            row = measure(run, asked, section)
            if place.rank == 0:
                made = where("data_wait.py", words, asked.commit)
                made["command"] = made["command"].replace("python", f"torchrun --nproc-per-node {place.size}", 1)
                print(json.dumps(facts | {"kind": kind} | row | made), flush=True)
        run.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3-8b", choices=sorted(SHAPES), help="of the layers")
    parser.add_argument("--layers", type=int, default=2, help="how many of them")
    parser.add_argument("--length", type=int, default=131072, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=6, help="how many are measured")
    parser.add_argument("--commit", help="the commit, where the checkout has no history")
    arguments = parser.parse_args()
    measured = ["--shape", "--layers", "--length", "--steps"]
    line = [word for name in measured for word in (name, str(getattr(arguments, name[2:])))]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        go(arguments, line, temporary, world.Place.from_environment())
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on a CPU may abort when the interpreter ends
