"""Two "nodes" on one machine: they meet, train, and torchrun starts all of them again when one process dies."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pool as pools
import pytest

from launch import torchrun
from launch.environment import settings
from launch.job import Job
from train import verdict
from train.config import load

REPO = Path(__file__).resolve().parent.parent
DEMO = REPO / "configs" / "demo.toml"
TWO_NODES = ["launch.nodes=2", "launch.master_address=localhost", "launch.processes_per_node=1", "parallel.ring=2"]
TIMEOUT_S = 100


@pytest.fixture
def overrides(tmp_path):
    return [
        *TWO_NODES,
        f"launch.master_port={pools.free_port()}",
        f"metrics.dir={tmp_path}",
        "launch.join_timeout_s=60",
    ]


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}", "OMP_NUM_THREADS": "1"}


def ended(nodes: list[subprocess.Popen]) -> list[str]:
    """What the nodes said, once all have ended."""
    try:
        return [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def test_two_nodes_train_one_ring(overrides, environment, tmp_path):
    overrides = [*overrides, "train.steps=2", "optimizer.warmup_steps=1", "metrics.wandb=disabled"]
    overrides += ["sequence.length=256", "train.self_test=false"]
    command = [sys.executable, "-m", "launch", DEMO, *(part for one in overrides for part in ("--set", one))]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank)], env=environment, cwd=REPO, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = ended(nodes)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    records = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "step" in record] == [1, 2]
    folders = [tmp_path / "demo" / "verdict" / f"node{node}" for node in range(2)]
    ranks = [list(verdict.read_all(folder)) for folder in folders]
    assert sorted(ranks) == [[0], [1]]  # one rank a node, whichever the rendezvous chose


WORKER = """
import os, pathlib, sys
import torch, torch.distributed as dist
from train import verdict
rank, folder = int(os.environ["RANK"]), os.environ["RINGFLASH_VERDICT_DIR"]
died = pathlib.Path(sys.argv[1])
verdict.clear(folder, rank)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if not died.exists():
    dist.barrier()
    if rank == 1:
        died.touch()
        verdict.write(folder, rank, code=1, error="ValueError: boom")
        sys.exit(1)
    dist.barrier()  # never done: the peer is gone
dist.destroy_process_group()
verdict.write(folder, rank, code=int(total.item() != 2))
"""


def test_a_process_that_dies_is_started_again_on_all_nodes(overrides, environment, tmp_path):
    """pytorch/pytorch#135712: without a store of its own a second start waits for addresses of the first.

    By forks of one process that has imported torch. Of one node `test_failures.py` has it.
    """
    (tmp_path / "stub_worker.py").write_text(textwrap.dedent(WORKER))
    config = load(DEMO, [*overrides, "launch.max_restarts=1"])
    job, context = Job(config, "stub_worker", (str(tmp_path / "died"),)), pools.context("gloo")
    variables = [environment | settings(config) | job.verdict_setting(node) for node in range(2)]
    nodes = [
        context.Process(target=pools.as_torchrun, args=(torchrun.command(job, node), variables[node]))
        for node in range(2)
    ]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(TIMEOUT_S)
        node.kill()
    assert [node.exitcode for node in nodes] == [0, 0]
    assert (tmp_path / "died").exists()
    verdicts = [verdict.read_all(tmp_path / "demo" / "verdict" / f"node{node}") for node in range(2)]
    assert sorted(rank for node in verdicts for rank in node) == [0, 1]
    assert all(one.code == 0 for node in verdicts for one in node.values())
