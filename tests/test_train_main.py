"""`python -m train` as torchrun runs it: refusals in one sentence, verdicts, a whole run; the demo's report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pool as pools
import pytest
import training

from train import __main__ as entry
from train import report, verdict, world

ROOT = Path(__file__).parents[1]

CONFIG = """
[model]
architecture = "llama"
dtype = "float32"
[model.config]
vocab_size = 260
hidden_size = 64
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
path = "{texts}"
[sequence]
length = 64
[parallel]
ring = 2
[optimizer]
lr = 1e-2
[train]
name = "run"
steps = 6
[metrics]
dir = "{runs}"
wandb = "disabled"
[launch]
processes_per_node = 2
"""


@pytest.fixture
def config(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    training.write_texts(texts)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(texts=texts, runs=tmp_path / "runs"))
    return path


REFUSED = {
    "spelled": (["train.stebs=3"], 2, "train.stebs is not a key: did you mean train.steps?"),
    "type": (["train.steps='3'"], 2, "train.steps = '3' (a string): accepted is an integer"),
    "folder": (["data.path=/nowhere"], 2, "data.path = '/nowhere' is not there"),
    "length": (["sequence.length=66"], 2, "sequence.length = 66 must divide by 4"),
    "world": ([], 3, "a world of 3 processes does not divide by parallel.ring = 2"),
    "ring": ([], 1, "= 2 ranks is more than the 1 processes of the world"),
}


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence(config, monkeypatch, capsys, tmp_path, case, local_rank):
    overrides, size, message = REFUSED[case]
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("RINGFLASH_VERDICT_DIR", str(tmp_path / "verdict"))
    waited = []
    monkeypatch.setattr(entry.time, "sleep", waited.append)
    assert entry.main([str(config), *(part for override in overrides for part in ("--set", override))]) == 2
    printed = capsys.readouterr().err
    assert waited == [entry.GRACE_S] * local_rank, "the first rank of a node speaks, torchrun ends the others meanwhile"
    assert printed.startswith("ringflash: ")
    assert message in printed
    assert printed.count("\n") == 1
    left = verdict.read_all(tmp_path / "verdict")[local_rank]
    assert left.code == 2
    assert message in left.error


def torchrun(config, *overrides):
    """A run on two processes; its exit code and stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train"]
    command += [str(config), *(part for override in overrides for part in ("--set", override))]
    verdicts = config.parent / "verdict"
    done = subprocess.run(
        ["env", "OMP_NUM_THREADS=1", f"RINGFLASH_VERDICT_DIR={verdicts}", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    return done, verdict.read_all(verdicts)


def test_a_run_from_end_to_end(config):
    done, verdicts = torchrun(config)
    assert [(rank, verdicts[rank].code) for rank in sorted(verdicts)] == [(0, 0), (1, 0)], done.stderr
    assert done.returncode == 0, done.stderr
    folder = config.parent / "runs" / "run"
    header, *steps = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert header["world_size"] == 2
    assert header["mfu_null_reason"] == "no peak is known for 'cpu': set metrics.peak_tflops"
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["tokens_seen"] > 5 * 50
    assert done.stdout.count("step 1/6") == 1, "one rank tells how the run goes"
    [caches] = re.findall("^ringflash: .* keeps what it compiles in (.*)$", done.stderr, flags=re.MULTILINE)
    assert not Path(caches).exists(), "R103: of this job alone, told once a node, gone with it"


def test_a_refusal_after_the_start_is_one_sentence_too(config):
    done, verdicts = torchrun(config, "memory.host_gb=0.001", "memory.offload=['optimizer']")
    _caches, sentence = [line for line in done.stderr.splitlines() if line.startswith("ringflash: ")]
    assert re.match(r"ringflash: sequence.length = \d+ does not fit: 2 processes take", sentence)
    assert done.returncode != 0
    assert verdicts[0].code == 2
    assert "does not fit" in verdicts[0].error


def test_what_transformers_refuses_is_refused_before_a_device_is_taken(config):
    done, verdicts = torchrun(config, "model.config.hiden_act=silu")
    sentences = [line for line in done.stderr.splitlines() if line.startswith("ringflash: ")]
    assert sentences == ["ringflash: model.config.hiden_act is not a key of 'llama': did you mean 'hidden_act'?"]
    assert verdicts[0].code == 2


def test_a_config_of_many_gpus_trains_without_a_ring_and_its_idle_words_are_told(config):
    words = {"ring": 1, "transit": "bfloat16", "arrangement": "gather"}
    overrides = ["train.steps=1", *(f"parallel.{key}={value}" for key, value in words.items())]
    command = ["-m", "train", str(config), *(part for override in overrides for part in ("--set", override))]
    first, second = pools.ranks(command, config.parent)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    told = "parallel.arrangement = 'gather' and parallel.transit = 'bfloat16': nothing to act on where parallel.ring"
    assert (first.stderr.count(told), second.stderr.count(told)) == (1, 0)


@pytest.mark.parametrize(
    ("ring", "words", "told"),
    [
        (1, {}, []),
        (1, {"arrangement": "ring", "transit": "float32"}, []),
        (1, {"arrangement": "gather"}, ["parallel.arrangement = 'gather': nothing to act on"]),
        (2, {"arrangement": "gather", "transit": "bfloat16"}, []),
    ],
)
def test_words_that_act_are_not_told(ring, words, told):
    config = training.config_of(".", mesh=(1, ring, 1), data={"path": "stdlib"}, parallel=words)
    assert [line.partition(" where")[0] for line in world.idle_words(config)] == told


def metrics(folder, losses, rates=None):
    folder.mkdir(exist_ok=True)
    rows = [{"config": training.config_of(".", data={"path": "stdlib"}).model_dump(mode="json"), "world_size": 4}]
    for index, loss in enumerate(losses):
        rate = rates[index] if rates else 0.1
        row = {"step": index + 1, "loss": loss, "tokens_seen": 64 * (index + 1), "valid_tokens": 60}
        rows.append(row | {"learning_rate": rate, "tokens_per_s": 1000.0 + index})
    rows.append({"kind": "evaluation", "step": len(losses), "eval/loss": 9.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("alone", "code", "message"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.000001], 0, "within 1.0e-06 of one process: the ring changes nothing"),
        ([5.0, 4.0, 3.1, 2.0, 1.0], 1, "within 1.0e-01 of one process: MORE THAN 1e-05"),
    ],
)
def test_report(tmp_path, capsys, alone, code, message):
    metrics(tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    metrics(tmp_path / "one_process", alone)
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    assert report.main([str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert message in out
    assert "5.0000 -> 0.5000 in 6 steps, 384 tokens" in out
    assert str(tmp_path / "wandb" / "offline-run-1") in out
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_report_compares_equal_steps_only(tmp_path, capsys):
    metrics(tmp_path, [5.0] * 6)
    metrics(tmp_path / "one_process", [5.0] * 5, rates=[0.1, 0.1, 0.2, 0.1, 0.1])
    assert report.main([str(tmp_path)]) == 1
    assert "step 3 is not the same in both runs: learning_rate 0.1, 0.2" in capsys.readouterr().err


def test_report_without_runs(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    assert "metrics.jsonl is missing: run it first" in capsys.readouterr().err
