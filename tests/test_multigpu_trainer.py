"""The trainer over NCCL, a GPU for each process: run with `pytest -m multigpu` on a host with several GPUs.

What the tests of the trainer show over gloo runs there too, in their own files: whatever takes the fixture `two`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import evaluating
import failing
import pytest
import torch
import training
from conftest import MULTIGPU, error
from test_failures import HOST, Launched, config_of
from test_train_main import CONFIG, ROOT

pytestmark = MULTIGPU
ZERO = [0, 1, 2, 3]

# name -> (data, ring, ulysses) of a world of so many GPUs, whose halves are at least 2
MESHES = {
    "data": lambda size, half: (size, 1, 1),
    "ring": lambda size, half: (1, size, 1),
    "ulysses": lambda size, half: (1, 1, size),
    "data x ring": lambda size, half: (half, size // half, 1),
    "ring x ulysses": lambda size, half: (1, half, size // half),
}


@pytest.fixture(scope="module")
def alone(texts):
    """alone(optimizer, steps): "mixed" labels, in this process, on a GPU, in fp32."""

    @functools.cache
    def result(optimizer, steps):
        return training.train_alone(training.config_of(texts, optimizer=optimizer, steps=steps), "mixed", device=FIRST)

    return result


FIRST = "cuda:0" if torch.cuda.is_available() else "cpu"


def mesh_of(name, size):
    if " x " in name and size < 4:
        pytest.skip("needs 4 GPUs")
    if (name == "ulysses" and size > 4) or (name == "data" and training.GLOBAL_BATCH % size):
        pytest.skip(f"4 heads and {training.GLOBAL_BATCH} sequences are too few for {size} GPUs")
    return MESHES[name](size, size // 2)


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("mesh", MESHES)
def test_R60_R62_R70_R75_training_equals_one_process(gpus, texts, alone, record_property, mesh, zero):
    """In turns: nine of ten labels of one rank ignored; one valid label in the whole batch. Five steps, fp32."""
    steps, memory, mesh = 5, {"checkpoint": "none", "loss_chunk": 5}, mesh_of(mesh, gpus.size)
    config = training.config_of(texts, mesh=mesh, zero=zero, optimizer="sgd", steps=steps, memory=memory)
    results, want = gpus(training.train, config, "mixed"), alone("sgd", steps)
    got = results[0]
    assert len({result["digest"] for result in results}) == 1, "ranks drifted apart"
    off = {
        "loss": max(abs(a - b) / b for a, b in zip(got["loss"], want["loss"], strict=True)),
        "grad_norm": max(abs(a - b) / b for a, b in zip(got["grad_norm"], want["grad_norm"], strict=True)),
        "weights": max(error(got["weights"][name], weight) for name, weight in want["weights"].items()),
    }
    record_property("errors", {name: float(f"{value:.3g}") for name, value in off.items()})
    assert max(off.values()) <= 1e-5, off


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_R115_bf16_is_near_fp32(gpus, texts, record_property, zero):
    """Two steps over a ring of all GPUs; what the weights moved by is within 15% of how fp32 moves them."""
    given = {"architecture": "llama", "dtype": "bfloat16", "config": training.LLAMA}
    config = training.config_of(texts, mesh=(1, gpus.size, 1), zero=zero, model=given)
    got = gpus(training.train, config, "mixed")[0]
    want = training.train_alone(config, "mixed", device=FIRST)
    before = training.train_alone(config, "none", device=FIRST)["weights"]
    moved = {name: weight - before[name] for name, weight in want["weights"].items()}
    off = [(got["weights"][name].float() - before[name] - move).norm() for name, move in moved.items()]
    share = float(torch.stack(off).norm() / torch.stack([move.norm() for move in moved.values()]).norm())
    record_property("errors", {"moved": float(f"{share:.3g}")})
    assert got["loss"] == pytest.approx(want["loss"], rel=3e-2)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-1)
    assert share <= 0.15


@pytest.mark.parametrize("zero", [1, 2])
def test_R72_losses_depend_neither_on_buckets_nor_on_overlap(gpus, texts, zero):
    """20 steps. A sum of two ranks has one order, so over two GPUs the bits are equal."""
    memory = {"checkpoint": "none", "loss_chunk": 5}
    config = training.config_of(texts, mesh=(1, gpus.size, 1), zero=zero, optimizer="sgd", steps=20, memory=memory)
    runs = {
        (numel, overlap): gpus(training.train_in_buckets, config, "mixed", numel, overlap)[0]["loss"]
        for numel in (10**4, 10**6, 5 * 10**8)
        for overlap in (False, True)
    }
    first = next(iter(runs.values()))
    assert len(first) == 20 and all(loss > 0 for loss in first)
    for given, losses in runs.items():
        assert losses == pytest.approx(first, rel=1e-6), given


@pytest.mark.parametrize("zero", [1, 3])
def test_R67_an_evaluation_goes_through_the_ring_and_takes_no_more_memory_than_training(
    gpus, texts, record_property, tmp_path, zero
):
    held_out = evaluating.write_held_out(tmp_path)
    config = evaluating.wide(texts, held_out, mesh=(1, gpus.size, 1), zero=zero)
    layers = config.model.config["num_hidden_layers"]
    for trained, evaluated, calls, passes in gpus(evaluating.peaks, config):
        assert passes > 0 and calls == layers * passes
        assert 0 < evaluated <= trained
    record_property("peak_bytes", {"training": trained, "evaluation": evaluated})


def test_an_evaluation_does_not_depend_on_the_mesh(gpus, texts, tmp_path):
    held_out = evaluating.write_held_out(tmp_path)
    losses = []
    for mesh in ((1, gpus.size, 1), (gpus.size, 1, 1)):
        config = evaluating.config_of(texts, held_out, mesh=mesh, zero=1)
        first, second, _ = gpus(evaluating.evaluate, config)[0]
        assert first.by_position == second.by_position, "the same tokens, the same bits"
        losses.append([first.loss, *(part.loss for part in first.by_position), *(cell.loss for cell in first.needle)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_R99_a_rank_that_is_gone_is_named_by_all_in_time(gpus, texts, tmp_path):
    last = gpus.size - 1
    *rest, killed = gpus.outcomes(
        failing.gone, config_of(texts, tmp_path, mesh=(gpus.size, 1, 1), global_batch=gpus.size)
    )
    assert isinstance(killed, RuntimeError)
    for rank, (said, took_s) in enumerate(rest):
        assert said == [f"rank {last} on {HOST} is gone; rank {rank} was at step 7, backward"]
        assert took_s < 10


def processes_on(gpu):
    """Ids of the processes that hold memory of a GPU."""
    return {int(word) for word in re.findall(r"process\s+(\d+) uses", torch.cuda.list_gpu_processes(gpu))}


def test_R99_R104_a_killed_rank_ends_the_job_in_30_s_and_each_gpu_had_one_process(texts, tmp_path, record_property):
    (tmp_path / "run.toml").write_text(CONFIG.format(texts=texts, runs=tmp_path / "runs"))
    run = Launched(tmp_path, "train.steps=1000000")
    run.until(5, after=0)
    workers = [run.worker(rank) for rank in range(2)]
    seen = [processes_on(gpu) & set(workers) for gpu in range(2)]
    os.kill(workers[1], signal.SIGKILL)
    killed = time.monotonic()
    code, said = run.ended(30)
    record_property("seconds", {"ended": round(time.monotonic() - killed, 1)})
    assert code == 1 and re.fullmatch(r"ringflash: rank 1 on \S+ was killed by SIGKILL.*", said)
    assert seen == [{workers[0]}, {workers[1]}]
    assert "currently unknown" not in run.log.read_text()


def test_the_demo_on_all_gpus_learns_as_on_one(gpus, tmp_path, record_property):
    """200 steps in fp32, whose rounding grows from step to step."""
    sizes = [gpus.size, 1]
    started = [demo(tmp_path / str(size), size) for size in sizes]
    curves = []
    for size, process in zip(sizes, started, strict=True):
        assert process.wait(240) == 0, (tmp_path / f"{size}.log").read_text()
        rows = map(json.loads, (tmp_path / str(size) / "demo" / "metrics.jsonl").read_text().splitlines())
        curves.append([row["loss"] for row in rows if row["kind"] == "step"])
    off = [abs(a - b) / b for a, b in zip(*curves, strict=True)]
    means = [sum(curve[-20:]) / 20 for curve in curves]
    record_property("losses", {str(size): curve[::20] + curve[-1:] for size, curve in zip(sizes, curves, strict=True)})
    record_property("errors", {"first 20": max(off[:20]), "200": max(off), "mean of the last 20": means})
    assert len(off) == 200 and max(off[:20]) <= 1e-4
    assert means[0] == pytest.approx(means[1], rel=1e-2) and means[0] < 0.5 * curves[0][0]


def demo(folder, size):
    """The demo on so many GPUs, under way. Rank 0 writes into the folder."""
    keys = {"train.steps": 200, "parallel.ring": size, "launch.processes_per_node": size, "metrics.dir": folder}
    keys |= {"metrics.wandb": "disabled", "checkpoint.every": 200}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    variables = {"CUDA_VISIBLE_DEVICES": "0"} if size == 1 else {}
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "launch", "configs/demo.toml", *words],
            cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log,
        )  # fmt: skip
