"""memory.loss = "liger": Liger-Kernel's fused loss in Triton's interpreter, alone and in the trainer; what is refused.

triton looks at TRITON_INTERPRET when it is imported, so all that computes runs in processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import error
from test_loss import case
from test_memory import LLAMA_8B
from torch.nn.functional import cross_entropy

from train import loss, memory, out_of_memory, world
from train.config import Memory, check_packages, load
from train.data import IGNORED

DEMO = Path(__file__).resolve().parent.parent / "configs/demo.toml"
TOKENS = 61  # chunks of 16, the last one shorter
SIZE = 2


def _interpret(rank: int, store: str) -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """run(function, *args): on every rank of a gloo world of interpreting processes, or one; one result a rank."""
    pytest.importorskip("liger_kernel")
    store, spawn = str(tmp_path_factory.mktemp("world") / "store"), get_context("spawn")
    workers = [ProcessPoolExecutor(1, spawn, _interpret, (rank, store)) for rank in range(SIZE)]
    for worker in workers:
        worker.submit(os.getpid)  # starts it: they meet

    def call(function: Callable, *args: Any, ranks: int = SIZE) -> list[Any]:
        return [one.result() for one in [worker.submit(function, *args) for worker in workers[:ranks]]]

    yield call
    for worker in workers:
        worker.shutdown()


def errors(tensors: tuple[torch.Tensor, ...], factor: float) -> dict[str, list[float]]:
    """Body: errors of loss, gradient of states and of head of both kinds, against torch's of whole fp64 logits."""
    hidden, weight, labels = tensors
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = factor * cross_entropy(exact[0] @ exact[1].t(), labels, ignore_index=IGNORED, reduction="sum")
    wanted = [want, *torch.autograd.grad(want, exact)]
    found = {}
    for kind in ("chunked", "liger"):
        head = loss.LossHead(torch.nn.Parameter(weight.detach()), 16, kind)
        got = factor * head(hidden[None], labels[None])
        gradients = torch.autograd.grad(got, (hidden, head.weight))
        assert got.dtype == torch.float32 and {x.dtype for x in gradients} == {hidden.dtype}
        found[kind] = [error(x, y) for x, y in zip((got, *gradients), wanted, strict=True)]
    return found


@pytest.mark.parametrize("factor", [1.0, 1 / 37], ids=["sum", "mean"])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)], ids=str)
def test_loss_and_gradients_equal_torch(run, dtype, rounding, ignored, factor):
    """At most twice our errors, or a rounding's; scaling cuts once more, for the interpreter does not round."""
    [found] = run(errors, case(ignored, dtype, TOKENS), factor, ranks=1)
    cut = 2**-8 if dtype == torch.bfloat16 and factor != 1 else 0
    for mine, theirs in zip(found["chunked"], found["liger"], strict=True):
        assert theirs <= 2 * max(mine, rounding) + cut, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_of_llama_3_8b_it_is_as_exact_as_ours_and_takes_what_is_planned(record_property):
    pytest.importorskip("liger_kernel")
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(131072, 4096, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(128256, 4096, generator=generator, device="cuda") / 64).bfloat16().requires_grad_()
    labels = torch.randint(128256, (131072,), generator=generator, device="cuda")
    found = errors((hidden[:1024].clone().requires_grad_(), weight, labels[:1024]), 1 / 1024)
    record_property("errors", found)
    for mine, theirs in zip(found["chunked"], found["liger"], strict=True):
        assert theirs <= 2 * max(mine, 2e-3), found
    hidden.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (loss.liger_loss_sum(hidden, weight, labels) / 131072).backward()
    added = torch.cuda.max_memory_allocated() - before
    at = memory.Step(131072, 131072, 2, Memory(loss="liger"))
    planned = sum(memory.liger_head(memory.sizes_of(LLAMA_8B), at).values()) + hidden.nbytes  # and their gradient
    record_property("added_bytes", {"measured": added, "planned": planned})
    assert added == pytest.approx(planned, rel=0.05)


def edges() -> None:
    """Body: no label at all; a frozen head; without gradients; the losses of each token."""
    hidden, weight, labels = case(2.0, torch.float32, TOKENS)
    total = loss.liger_loss_sum(hidden, weight, labels)
    assert total == 0 and total.requires_grad
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, (hidden, weight)))
    hidden, weight, labels = case(0.3, torch.float32, TOKENS)
    frozen = torch.nn.Parameter(weight.detach(), requires_grad=False)
    head = loss.LossHead(frozen, 7, "liger")
    total = head(hidden, labels)
    total.backward()
    wanted = torch.autograd.grad(loss.loss_sum(hidden, weight, labels, chunk=7), hidden)[0]
    assert error(hidden.grad, wanted) <= 1e-5 and frozen.grad is None
    with torch.no_grad():
        assert error(head(hidden, labels), total) <= 1e-6
    losses, hits = head(hidden, labels, each=True)
    ours = loss.token_scores(hidden, weight, labels, chunk=7)
    assert torch.equal(losses, ours[0]) and torch.equal(hits, ours[1])
    loss.check_device("liger", hidden.device)


def test_ignored_labels_a_frozen_head_and_scores_of_each_token(run):
    run(edges, ranks=1)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_training_equals_one_process(run, texts, zero):
    """Nine of ten labels of one rank ignored, then one valid label in the whole batch; weights in shards from 3 on."""
    import training

    config = training.config_of(texts, mesh=(1, SIZE, 1), zero=zero, steps=2, memory={})
    tables = config.model_dump(exclude={"memory"}, exclude_unset=True)
    config = type(config).model_validate(tables | {"memory": {"loss": "liger"}})
    results, want = run(training.train, config, "mixed"), training.train_alone(config, "mixed")
    assert len({result["digest"] for result in results}) == 1, "ranks drifted apart"
    assert results[0]["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert results[0]["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    for name, weight in want["weights"].items():
        assert error(results[0]["weights"][name], weight) <= 1e-5, name


def test_a_chunk_is_that_of_an_evaluation_and_weights_are_refused():
    said = "memory.loss_chunk = 512: of an evaluation alone where memory.loss = 'liger'"
    assert world.idle_words(load(DEMO, ["memory.loss=liger"])) == [said]
    assert world.idle_words(load(DEMO, ["memory.loss=liger", "evaluation.every=2"])) == []
    hidden, weight, labels = case(0.0, torch.float32, TOKENS)
    head = loss.LossHead(torch.nn.Parameter(weight.detach()), 7, "liger")
    with pytest.raises(ValueError, match=r"memory\.loss = 'liger' knows no weight of a token: 'chunked' is accepted"):
        head(hidden, labels, torch.ones(TOKENS))


@pytest.mark.parametrize("word", ["launch", "train"])
@pytest.mark.parametrize(
    ("installed", "said"), [(None, "which is not installed"), ("0.5.10", "but 0.5.10 is installed")]
)
def test_what_is_not_installed_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, installed, said, word):
    import launch.__main__
    import train.__main__
    from train.config import packages

    def version(name):
        if installed is None:
            raise packages.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(packages, "version", version)
    words = [str(DEMO), "--set", f"metrics.dir={tmp_path}", "--set", "memory.loss=liger"]
    assert {"launch": launch.__main__.launch, "train": train.__main__.main}[word](words) == 2
    told = (
        f"memory.loss = 'liger' needs the package liger-kernel, 0.8.5 or newer, {said}: pip install 'ringflash[liger]'"
    )
    assert told in capsys.readouterr().err
    check_packages(load(DEMO))


def test_a_cpu_is_refused_before_a_step(texts):
    import training

    from train import loop

    config = load(DEMO, ["memory.loss=liger"])
    with pytest.raises(ValueError, match=r"memory\.loss = 'liger' needs a GPU.* computes on cpu, where 'chunked' is"):
        loop.prepare(config, type("World", (), {"device": torch.device("cpu")})())
    loss.check_device("chunked", torch.device("cpu"))
    loss.check_device("liger", torch.device("cuda"))
    advice = out_of_memory.knobs(config, "loss")[0]
    assert advice.startswith("memory.loss = 'liger': 'chunked' holds fewer logits")
    assert out_of_memory.knobs(training.config_of(texts), "loss")[0].startswith("memory.loss_chunk = 5")
