"""Saves and loads one layer of Llama-3-8B, with its optimizer state, through the trainer: what a step waits for.

    torchrun --nproc-per-node 2 benchmarks/checkpoint.py               # 2.6 GB of state, some 5 GB of memory a process
    python benchmarks/checkpoint.py --width 1024 --zero 1              # a sixteenth of it

A line of JSON: seconds that a step waits for a save by a thread, for the first, which must find the host memory taken,
and for a blocking one; of a plain copy of the same bytes to host memory that is there; of steps alone, of the slowest
beside the thread that takes the host memory, and beside the one that writes; of a load. Then all bits are compared. On
a CPU or on GPUs; of all ranks the slowest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from provenance import on_cpu, provenance  # noqa: E402

from train import loop, storage, world  # noqa: E402
from train.config import Config  # noqa: E402
from train.saver import Progress  # noqa: E402

HEADS, GROUPS, HEAD_DIM, WIDTH, INNER = 32, 8, 128, 4096, 14336
STEPS = 3
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"  # products in bf16 take minutes on many CPUs


def config_of(folder: str, *, width: int, zero: int, ranks: int, resume: str = "no") -> Config:
    """A run of one layer over a ring of all ranks. width: WIDTH, or less for a smaller layer."""
    part = WIDTH // width
    model = {
        "vocab_size": 260,
        "hidden_size": width,
        "intermediate_size": INNER // part,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS // part,
        "num_key_value_heads": max(GROUPS // part, 1),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
    }
    return Config.model_validate(
        {
            "model": {"architecture": "llama", "dtype": DTYPE, "config": model},
            "data": {"path": "stdlib"},
            "sequence": {"length": 128, "layout": "zigzag"},
            "parallel": {"ring": ranks, "zero": zero},
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "train": {"name": "layer", "steps": 1000, "global_batch": 1, "self_test": False},
            "metrics": {"wandb": "disabled", "dir": folder},
            "checkpoint": {"every": 1, "keep_last": 1, "resume": resume, "dir": f"{folder}/checkpoints"},
            "launch": {"processes_per_node": ranks},
        }
    )


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(run: loop.Run) -> dict[str, Any]:
    """Steps alone and beside the taking of host memory, saves by the thread and the steps beside them, a blocking save.

    Seconds.
    """
    steps = iter(range(1, 1000))

    def step() -> None:
        loop.train_step(run, next(steps), tokens_seen=0)

    step()
    alone = [seconds(step) for _ in range(STEPS)]
    start, coming, reserving = time.perf_counter(), run.saver.reserve(), []
    while run.world.gather([float(not all(one.done() for one in coming))]).any():  # as many steps on all ranks
        reserving.append(seconds(step))
    reserve = time.perf_counter() - start
    first = seconds(lambda: run.saver.start(Progress(1, 0)))
    run.saver.wait()
    copied_bytes, copy = plain_copy(run)
    stall = seconds(lambda: run.saver.start(Progress(2, 0)))
    beside = [seconds(step) for _ in range(STEPS)]
    run.saver.wait()
    blocking = seconds(lambda: run.saver.save(Progress(3, 0)))
    taken = {
        "stall_s": stall,
        "first_stall_s": first,
        "copy_s": copy,
        "blocking_save_s": blocking,
        "step_s": statistics.median(alone),
        "reserve_s": reserve,
        "slowest_step_beside_reserving_s": max(reserving, default=0.0),
        "step_beside_writing_s": statistics.median(beside),
    }
    rows = run.world.gather(list(taken.values()))
    return {"copied_bytes": copied_bytes} | dict(zip(taken, rows.max(0).tolist(), strict=True))


def plain_copy(run: loop.Run) -> tuple[int, float]:
    """Bytes that this rank saves, and the seconds of their copy alone: the fastest of three."""
    on_gpu = run.world.device.type == "cuda"
    mine = [piece.part for piece in storage.shared_out(run.engine.pieces(), run.world.rank, run.world.size)]
    there = [torch.empty_like(part, device="cpu", pin_memory=on_gpu) for part in mine]

    def copy() -> None:
        for part, host in zip(mine, there, strict=True):
            host.copy_(part, non_blocking=True)
        run.world.settle()

    run.world.settle()
    copy()
    return sum(part.nbytes for part in mine), min(seconds(copy) for _ in range(3))


def digests(run: loop.Run) -> dict[str, str]:
    """Of every piece that this rank holds, without a copy of all of them."""
    return {p.key: hashlib.blake2b(p.part.cpu().numpy().tobytes()).hexdigest() for p in run.engine.pieces()}


def go(arguments: argparse.Namespace, folder: str, place: world.Place) -> dict[str, Any]:
    keys = {"width": arguments.width, "zero": arguments.zero, "ranks": place.size}
    config = config_of(folder, **keys)
    with world.start(config, place) as joined:
        folder = joined.gather_objects(folder)[0]
        run = loop.prepare(config_of(folder, **keys), joined)
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.module.parameters())
        row = measure(run)
        held = digests(run)
        run.engine.close()
        del run
        path = Path(folder) / "checkpoints" / "step-00000003"
        config = config_of(folder, **keys, resume=str(path))
        resume, taken = loop.resume, []

        def timed(*given: Any) -> Progress:
            taken.append(seconds(lambda: resume(*given)))
            return Progress(3, 0)

        with patch.object(loop, "resume", timed):
            again = loop.prepare(config, joined)
        assert all(joined.gather_objects(digests(again) == held)), "a checkpoint that was loaded has other bits"
        files = sum(file.stat().st_size for file in path.iterdir())
        again.engine.close()
        return {"parameters": parameters, "files_bytes": files, **row, "load_s": taken[0], "same_bits": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=WIDTH, choices=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--zero", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--commit", help="the commit, where the checkout has no history")
    parser.add_argument("--dir", help="where the files go for the while; left out: the folder for temporary files")
    arguments = parser.parse_args()
    place = world.Place.from_environment()
    with tempfile.TemporaryDirectory(dir=arguments.dir, ignore_cleanup_errors=True) as folder:
        row = go(arguments, folder, place)
    if place.rank == 0:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        where = provenance if torch.cuda.is_available() else on_cpu
        made = where(
            "checkpoint.py", ["--width", str(arguments.width), "--zero", str(arguments.zero)], arguments.commit
        )
        made["command"] = made["command"].replace("python", f"torchrun --nproc-per-node {place.size}", 1)
        print(json.dumps({"processes": place.size, "zero": arguments.zero} | rounded | made))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # DeepSpeed on a CPU may abort when the interpreter ends
