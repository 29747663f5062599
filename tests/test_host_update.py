"""The optimizer in host memory: every bit as without it, and only what `memory` says beside it.

On a CPU both sides are the same memory: what is the host's is told by who holds it.
"""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import saving
import test_resume
import torch
import training
from test_backward_memory import Alive

import ringflash
from train import engine, host_update, memory, model

BUCKET = 10_000
AWAY = {"loss_chunk": 5, "offload": ["optimizer"]}
BF16 = {"architecture": "llama", "dtype": "bfloat16", "config": training.LLAMA}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_update_in_pieces_has_the_bits_of_the_whole(monkeypatch, weight_decay):
    monkeypatch.setattr(host_update, "UPDATE_NUMEL", 1000)
    start = torch.randn(10_007, generator=torch.Generator().manual_seed(1))
    kinds = (torch.optim.AdamW, host_update.AdamW)
    flats = [torch.nn.Parameter(start.clone()) for _ in kinds]
    words = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": weight_decay}
    made = [kind([flat], **words) for kind, flat in zip(kinds, flats, strict=True)]
    for number in range(3):
        for flat, optimizer in zip(flats, made, strict=True):
            flat.grad = torch.randn(len(start), generator=torch.Generator().manual_seed(number))
            optimizer.step()
    whole, pieces = (optimizer.state[flat] | {"flat": flat} for flat, optimizer in zip(flats, made, strict=True))
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert not torch.equal(flats[0], start)


def test_the_planner_knows_the_size_of_a_piece():
    assert memory.UPDATE_NUMEL == host_update.UPDATE_NUMEL


@pytest.mark.parametrize(("zero", "optimizer"), [(1, "adamw"), (2, "adamw"), (3, "adamw"), (2, "sgd")])
def test_bf16_trains_to_the_bit_as_without(pool, tmp_path, zero, optimizer):
    """Two passes an update, on two ranks, in buckets smaller than the head."""
    texts, digests = training.write_texts(tmp_path), set()
    for switches in (AWAY, AWAY | {"offload": []}):
        config = training.config_of(
            texts, mesh=(1, 2, 1), zero=zero, optimizer=optimizer, steps=3, model=BF16, memory=switches
        )
        assert config.batch(2).accumulation > 1
        digests |= {one["digest"] for one in pool(2)(training.train_in_buckets, config, "mixed", BUCKET)}
    assert len(digests) == 1


@pytest.mark.parametrize("zero", [2, 3])
def test_checkpoints_are_those_of_a_run_without(pool, tmp_path, zero):
    """Bit by bit, and what goes on from one ends alike."""
    texts, runs = training.write_texts(tmp_path), {}
    for name in ("here", "away"):
        config = test_resume.config_of(texts, tmp_path / name, zero=zero, dtype="bfloat16")
        switches = config.memory.model_copy(update={"offload": ["optimizer"] if name == "away" else []})
        runs[name] = config.model_copy(update={"memory": switches})
    ended = {name: pool(2)(saving.go, config)[0]["after"] for name, config in runs.items()}
    here, away = (config.checkpoint_dir / "step-00000004" for config in runs.values())
    assert test_resume.same_state(here, away) == [] and ended["here"] == ended["away"]
    test_resume.crash(runs["away"], tmp_path / "crashed")
    metrics = runs["away"].metrics.model_copy(update={"dir": str(tmp_path / "crashed")})
    again = pool(2)(saving.go, runs["away"].model_copy(update={"metrics": metrics}))[0]
    assert again["from"].step == 2 and again["after"] == ended["away"]


def stepped(config, joined):
    """(bytes alive before the backward, the most in it, after it, the most in the update; numbers; DeepSpeed's)"""
    ringflash.hf.register(joined.ring, name=model.ATTENTION)
    batch, ids = config.batch(1), torch.zeros(1, training.LENGTH, dtype=torch.int64)
    with Alive() as alive, patch.object(engine, "BUCKET_NUMEL", BUCKET):
        made = engine.Engine(model.build(config, joined.device, engine.cutter(config, batch)), config, batch, joined)
        for _ in range(2):  # states are made by the first update
            loss = made(ids, ids, joined.ring.layout(training.LENGTH))
            gc.collect()  # what is dead in a circle is counted otherwise, in one run and not in the other
            before, alive._most = sum(alive._bytes.values()), 0
            made.backward(loss, valid_targets=training.LENGTH)
            del loss
            inside = alive._most
            gc.collect()
            after, alive._most = sum(alive._bytes.values()), 0
            made.step(1e-3)
    numbers = sum(getattr(one, "ds_numel", one.numel()) for one in made.module.parameters())
    return (before, inside, after, alive._most), numbers, made._engine.optimizer


def alone(zero, kept):
    """Body: what one process holds, with and without gradients that are kept on the GPU."""
    config = training.config_of(
        ".", zero=zero, optimizer="adamw", model=BF16, memory=AWAY, data={"path": "stdlib"},
        train={"name": "tiny", "steps": 1, "global_batch": 1, "self_test": False},
    )  # fmt: skip
    with (
        patch.object(host_update, "UPDATE_NUMEL", 1000),
        patch.object(host_update, "release_early", (lambda outer: None) if kept else host_update.release_early),
    ):
        alive, numbers, outer = stepped(config, training.join(config))
    if zero == 3:
        flats, others = outer.fp32_partitioned_groups_flat, [outer.grad_partitions_flat_buffer]
    else:
        flats, others = outer.single_partition_of_fp32_groups, outer.param_buffer_of_bit16_for_cpu_offload_groups
    tensors = [*others, *flats, *(one.grad for one in flats)]
    tensors += [state for flat in flats for name, state in outer.optimizer.state[flat].items() if name != "step"]
    return alive, numbers, sum(one.nbytes for one in tensors)


@pytest.mark.parametrize("zero", [1, 2])
def test_no_gradient_stays_on_the_gpu(pool, zero):
    """Nothing is left behind the backward; kept, there are 4 bytes a number and two buffers for the largest weight."""
    (_, most, after, _), numbers, _ = pool(1)(alone, zero, False)[0]
    (_, most_kept, after_kept, _), _, _ = pool(1)(alone, zero, True)[0]
    largest = training.LLAMA["vocab_size"] * training.LLAMA["hidden_size"]
    assert after_kept - after == pytest.approx(4 * numbers + 2 * 2 * largest, abs=1000)
    if zero == 2:  # at ZeRO 1 the gradients of all are there until the end anyway
        assert most_kept - most >= 4 * numbers - 3 * 4 * max(BUCKET, largest)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_host_memory_is_what_is_planned(pool, zero, monkeypatch):
    (_, _, after, most), numbers, held = pool(1)(alone, zero, False)[0]
    monkeypatch.setattr(memory, "UPDATE_NUMEL", 1000)
    config = training.config_of(".", model=BF16, memory=AWAY, data={"path": "stdlib"}, zero=zero)
    sizes = memory.sizes_of(model.config_of(config.model, training.LENGTH))
    step = memory.Step(1, 1, 2, config.memory, zero=zero, trained=numbers)
    parts = memory.host(sizes, step)
    rounded = parts.pop("weights on their way") if zero == 3 else 0  # torch makes it between two devices
    assert held + parts["inside the update"] == pytest.approx(sum(parts.values()), abs=200)
    assert most - after == pytest.approx(parts["inside the update"], abs=200), "beside what lasts"
    assert rounded == (2 * numbers if zero == 3 else 0)
