"""What a run does when something fails: it says what, where and what to do, keeps what it can, and ends in time."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import failing
import numpy as np
import pool as pools
import pytest
import torch
import training
from conftest import MULTIGPU
from test_train_main import CONFIG, ROOT

import ringflash
from ringflash.kernels import eager
from train import loss, out_of_memory, verdict, watch
from train.out_of_memory import OutOfMemoryError, explained

HOST = os.uname().nodename


def config_of(texts, folder, *, zero=1, dtype="float32", steps=4, mesh=(1, 2, 1), checkpoint=None, **train):
    keys = {"name": "tiny", "steps": steps, "global_batch": 4, "seed": 3, "self_test": False}
    return training.config_of(
        texts,
        mesh=mesh,
        zero=zero,
        optimizer="adamw",
        model={"architecture": "llama", "dtype": dtype, "config": training.LLAMA},
        train=keys | train,
        checkpoint=checkpoint or {},
        metrics={"dir": str(folder), "wandb": "disabled"},
    )


def documents_on_rank_1(sequence, names):
    """What is said of the documents with tokens in the middle of a sequence, once each has been found in its file."""
    files, held = [name.removesuffix(", 0") for name in names], []
    for start, stop, file in zip(sequence.cu_seqlens, sequence.cu_seqlens[1:], files, strict=False):
        assert bytes(token for token in sequence.ids[start:stop] if token < 256) in Path(file).read_bytes()
        held += [file] if start < 48 and stop > 16 else []
    more = f" and {len(held) - 3} more documents" if len(held) > 3 else ""
    return f", in {', '.join(held[:3])}{more}"


CASES = [(0, "float32", "nan"), (1, "float32", "inf"), (2, "bfloat16", "gradient"), (3, "float32", "gradient")]
CASES += [(3, "bfloat16", "inf"), (1, "bfloat16", "nan")]


@pytest.mark.parametrize(("zero", "dtype", "fault"), CASES)
def test_a_step_that_is_not_finite_is_named_and_touches_nothing(two, texts, tmp_path, zero, dtype, fault):
    config = config_of(texts, tmp_path, zero=zero, dtype=dtype, max_nonfinite=1)
    results = two(failing.nonfinite, config, fault)
    for result in results:
        one, two, three, four, end = result["states"]
        assert one != two and three != four
        assert two == three and four == end, "weights or moments of the optimizer moved"
    first = results[0]
    assert results[1]["said"] == [] and results[1]["refusal"] == first["refusal"]
    file = tmp_path / "tiny" / "nonfinite" / "step-00000002-ring-0000.npz"
    what = {
        "nan": "the loss is nan on rank 1, in sequence 2 of 0 to 3",
        "inf": "the loss is inf on rank 1, in sequence 2 of 0 to 3",
        "gradient": "the gradient norm is nan on all ranks, with finite losses",
    }[fault]
    batch = training.batches_of(config, "all")[1]
    [said] = first["said"]
    told, _, rest = said.removeprefix(f"ringflash: step 2: {what}").partition("; ")
    assert rest == f"the batch is in {file}, the weights are as before it; it is number 1 of at most 1"
    assert re.fullmatch(rf"step 4: {re.escape(what)}[^;]*; .*", first["refusal"])
    assert first["refusal"].endswith("train.max_nonfinite = 1 such steps are passed over")
    losses = [record.loss_sum for record in first["records"]]
    assert [math.isfinite(value) for value in losses] == [True, fault == "gradient", True]
    assert not math.isfinite(first["records"][1].grad_norm) or fault == "inf"
    kept = np.load(file)
    assert told == (documents_on_rank_1(batch[2], kept["names_2"]) if fault != "gradient" else "")
    assert np.array_equal(kept["ids"], [sequence.ids for sequence in batch])
    assert np.array_equal(kept["labels"], [sequence.labels for sequence in batch])
    assert kept["cu_seqlens_3"].tolist() == batch[3].cu_seqlens and kept["numbers"].tolist() == [0, 1, 2, 3]
    assert np.isfinite(kept["losses"]).tolist() == [[True] * 4, [True, True, fault == "gradient", True]]


def test_steps_that_are_not_finite_are_counted_over_starts(pool, texts, tmp_path):
    """A run of nothing but NaN would otherwise come to its end by being started again."""
    config = config_of(texts, tmp_path, zero=2, max_nonfinite=2, checkpoint={"every": 1})
    assert pool(2)(failing.counted, config) == [2, 2]


def test_R99_a_hang_names_rank_hop_and_peer(two, texts, tmp_path):
    """Over NCCL the host of rank 0 is ahead of its GPU."""
    config = config_of(texts, tmp_path, steps=6)
    for said in two(failing.hang, config, "ring"):
        assert len(said) == 1
        part = "forward" if two.backend == "gloo" else "(forward|backward)"
        assert re.fullmatch(
            f"step 5 does not end, 3 s after its begin: rank 1 on {HOST} waits for no other, in forward of step 5; "
            rf"rank 0 waits in {part} of step 5 \(ring, keys and values for hop 1: .* rank 1\)",
            said[0],
        )
    stacks = [(tmp_path / "tiny" / "hang" / f"rank-0000{rank}.txt").read_text() for rank in range(2)]
    assert "in sleepy" in stacks[1] and ("in _arrive" if two.backend == "gloo" else "in _run") in stacks[0]


def test_a_hang_is_not_told_in_the_words_of_a_run_before(pool, texts, tmp_path):
    assert pool(2)(failing.told_before, config_of(texts, tmp_path)) == [False, False]


def test_R99_a_hang_names_the_collective_and_leaves_the_flight_recorders_entries(two, texts, tmp_path):
    """Data alone, so no rank waits for a message of a ring."""
    config = config_of(texts, tmp_path, steps=6, mesh=(2, 1, 1), global_batch=2)
    for said in two(failing.hang, config, "collective"):
        assert len(said) == 1
        assert re.match(
            rf"step 5 does not end, 3 s after its begin: rank 1 on {HOST} waits for no other, in backward of step 5; "
            r"rank 0 waits in (backward|update) of step 5 \(collective (nccl:)?\w+",
            said[0],
        ), said
    recorded = json.loads((tmp_path / "tiny" / "hang" / "rank-00000.json").read_text())
    assert {entry["profiling_name"].split(":")[0] for entry in recorded} == {two.backend}, recorded


def test_a_message_of_a_batch_that_is_over_is_not_waited_for(monkeypatch):
    """Over NCCL the recorder has them for ever; what is under way stands behind them."""
    entries = [
        {"profiling_name": "nccl:recv 1<-0", "state": "scheduled", "is_p2p": True, "retired": False},
        {"profiling_name": "nccl:coalesced", "state": "started", "is_p2p": True, "retired": True},
        {"profiling_name": "nccl:all_reduce", "state": "completed", "is_p2p": False, "retired": False},
        {"profiling_name": "nccl:coalesced", "state": "scheduled", "is_p2p": True, "retired": False},
        {"profiling_name": "nccl:all_gather", "state": "scheduled", "is_p2p": False, "retired": False},
    ]
    recorder = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.setattr(recorder, name, lambda **_: json.dumps({"entries": entries}), raising=False)
    assert watch.flight_record() == entries[3:]


def test_a_hang_is_derived_from_the_steps_before(texts, tmp_path):
    watching = watch.Watch(config_of(texts, tmp_path, timeout_s=1000), world=None)
    watching.begin(1, "forward")
    assert watching.limit_s == 1000, "the first steps compile"
    for step_time_s in (400.0, 2.0, 2.0):
        watching.took(step_time_s)
    assert watching.limit_s == watch.FLOOR_S
    for step_time_s in (50.0, 50.0, 50.0):
        watching.took(step_time_s)
    assert watching.limit_s == 10 * 50
    watching.begin(1, "save")
    assert watching.limit_s == 1000
    for _ in range(9):
        watching.took(200.0)
    watching.begin(2, "data")
    assert watching.limit_s == 1000, "never later than the collectives give up"


def test_who_does_not_answer_is_to_blame():
    said = {0: (3, "forward", "ring, x"), 1: None, 2: (3, "backward", "collective all_reduce")}
    assert watch.blame(said, "rank {} on h".format) == (
        "rank 1 on h does not answer; rank 0 waits in forward of step 3 (ring, x); "
        "rank 2 waits in backward of step 3 (collective all_reduce)"
    )
    many = watch.blame({0: None} | dict.fromkeys(range(1, 9), (3, "data", "collective all_gather")), str)
    assert many.endswith("; 5 more wait") and many.count(";") == 4


def test_R99_a_rank_that_is_gone_is_named_by_all_in_time(texts, tmp_path):
    world = pools.World(3)
    zero, one, two = world.outcomes(failing.gone, config_of(texts, tmp_path, mesh=(3, 1, 1), global_batch=3))
    assert isinstance(two, RuntimeError)
    for rank, (said, took_s) in enumerate((zero, one)):
        assert said == [f"rank 2 on {HOST} is gone; rank {rank} was at step 7, backward"]
        assert took_s < 10


def test_out_of_memory_says_where_and_what_would_help(two, texts, tmp_path):
    config = config_of(texts, tmp_path)
    for message in two(failing.exhausted, config):
        held = r", \d+\.\d of \d+\.\d GiB were held" if two.backend == "nccl" else ""
        assert re.match(
            f"out of memory in the backward of step 1{held}: memory.checkpoint = 'selective': 'full' ", message
        ), message
        assert "parallel.ring = 2" in message and "sequence.length = 64" in message and "parallel.zero = 1" in message


def fill(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_in_loss_and_attention(texts, tmp_path, monkeypatch):
    config = config_of(texts, tmp_path)
    watching = watch.Watch(config, world=None)
    watching.begin(3, "forward")
    q = torch.randn(1, 8, 2, 16)
    monkeypatch.setattr(eager, "forward", fill)
    with pytest.raises(OutOfMemoryError, match="in the attention of step 3"), explained(config, watching):
        ringflash.attention(q, q, q, kernel="eager")
    monkeypatch.setattr(torch.Tensor, "float", fill)
    hidden, labels = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    with (
        pytest.raises(OutOfMemoryError, match=r"in the loss of step 3: memory\.loss_chunk = 5"),
        explained(config, watching),
    ):
        loss.loss_sum(hidden, torch.randn(9, 8), labels, chunk=2)
    with (
        pytest.raises(OutOfMemoryError, match=r"in the forward of step 3: memory\.checkpoint"),
        explained(config, watching),
    ):
        fill()
    assert out_of_memory.knobs(config, "update")[0].startswith("parallel.zero = 1: 2 shards")


class Launched:
    """`python -m launch` on two processes, until it ends: on CPUs, or where there are GPUs on these."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "launch", str(folder / "run.toml")]
        command += [part for override in overrides for part in ("--set", override)]
        self.folder, self.log = folder / "runs" / "run", folder / "log"
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=log)

    def file(self) -> int:
        """Which file the metrics are: another after each start."""
        path = self.folder / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else 0

    def until(self, step: int, *, after: int) -> None:
        """Wait for a step behind this one, of a start after that with this file of metrics."""
        deadline = time.monotonic() + 120
        while self.file() in (0, after) or self.steps()[-1:] <= [step]:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def saved(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in (self.folder / "checkpoints").glob("step-????????"))

    def worker(self, rank: int) -> int:
        """The process of a rank: a grandchild, through torchrun."""
        children = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(stat.parent.name))
            except OSError:
                continue
        [agent] = children[self.process.pid]
        named = f"\0RANK={rank}\0".encode()
        return next(pid for pid in children[agent] if named in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())

    def ended(self, within_s: float) -> tuple[int, str]:
        """Exit code, and what was said last."""
        try:
            code = self.process.wait(within_s)
        finally:
            self.process.kill()
        return code, self.log.read_text().splitlines()[-1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=MULTIGPU)])
def test_a_signal_saves_and_a_death_goes_on_from_what_is_saved(texts, tmp_path, monkeypatch, device):
    """One rank gets SIGTERM; then, started from there, one is killed and torchrun starts all; then launch gets SIGUSR1.

    The second start names the checkpoint of the first; what torchrun starts again goes on from what was saved since.
    """
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "run.toml").write_text(CONFIG.format(texts=texts, runs=tmp_path / "runs"))
    overrides = ["train.steps=100000", "train.self_test=false", "checkpoint.every=50000", "launch.max_restarts=1"]
    run = Launched(tmp_path, *overrides)
    run.until(2, after=0)
    os.kill(run.worker(1), signal.SIGTERM)
    code, said = run.ended(60)
    [first] = run.saved()
    assert (code, first) == (75, run.steps()[-1])
    path = run.folder / "checkpoints" / f"step-{first:08}"
    again = "started again with checkpoint.resume = 'auto', the run goes on from there"
    assert said == f"ringflash: stopped by SIGTERM: step {first} is saved in {path}; {again}"
    verdicts = verdict.read_all(run.folder / "verdict" / "node0")
    assert [verdicts[rank].code for rank in range(2)] == [75, 75]

    file = run.file()
    run = Launched(tmp_path, *overrides, f"checkpoint.resume={path}", "checkpoint.every=20")
    run.until(first + 1, after=file)
    while run.saved()[-1] == first:
        run.until(run.steps()[-1] + 1, after=file)
    file = run.file()
    os.kill(run.worker(1), signal.SIGKILL)
    run.until(first + 1, after=file)
    run.process.send_signal(signal.SIGUSR1)
    code, said = run.ended(60)
    last = run.saved()[-1]
    assert code == 75 and said.startswith(f"ringflash: stopped by SIGUSR1: step {last} is saved")
    assert run.steps() == list(range(1, last + 1)), "each step once, whoever did it"
    one, two = re.findall(r"resumes .*step-(\d+)", run.log.read_text())
    assert int(one) == first < int(two), "torchrun started all ranks again, once, from a checkpoint of their own"
