"""The engine: DeepSpeed's config, the learning rate, and the probes that refuse to train."""

from __future__ import annotations

import contextlib
import io

import pytest
import training

from train import engine, world
from train.config import Batch, Optimizer

ZERO = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("schedule", "min_lr", "want"),
    [
        ("constant", None, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.2, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0.2, [0.5, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_learning_rate(schedule, min_lr, want):
    given = {} if min_lr is None else {"min_lr": min_lr}
    optimizer = Optimizer(lr=1.0, warmup_steps=2, schedule=schedule, **given)
    got = [engine.learning_rate(step, optimizer, steps=6) for step in range(1, 7)]
    assert got == pytest.approx(want)


def test_learning_rate_without_warmup_or_decay_steps():
    optimizer = Optimizer(lr=1.0, warmup_steps=3, schedule="cosine")
    assert engine.learning_rate(3, optimizer, steps=3) == 1.0
    assert engine.learning_rate(1, Optimizer(lr=1.0), steps=1) == 1.0


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_deepspeed_config(zero, clip_norm):
    optimizer = training.OPTIMIZERS["sgd"] | {"clip_norm": clip_norm}
    config = training.config_of(".", zero=zero, data={"path": "stdlib"}, optimizer=optimizer)
    made = engine.deepspeed_config(config, Batch(4, 1, 2), numel=1000)
    assert made["gradient_clipping"] == (clip_norm if zero else 0.0), "left out, DeepSpeed clips at 1"
    assert made["gradient_accumulation_steps"] == 2
    assert made["train_micro_batch_size_per_gpu"] == 1
    assert made["communication_data_type"] == made["data_types"]["grad_accum_dtype"] == "fp32"
    assert made["zero_optimization"]["stage"] == zero


def test_bf16_without_zero_is_refused():
    changes = {"model": {"architecture": "llama", "dtype": "bfloat16", "config": training.LLAMA}}
    with pytest.raises(ValueError, match=r"parallel.zero = 0 with model.dtype = 'bfloat16'.*parallel.zero = 1, 2, 3"):
        training.config_of(".", zero=0, data={"path": "stdlib"}, **changes)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (4, 1, 1)], ids=lambda mesh: "x".join(map(str, mesh)))
@pytest.mark.parametrize(
    ("zero", "dtype"), [*((zero, "float32") for zero in ZERO), *((zero, "bfloat16") for zero in ZERO[1:])]
)
def test_gradient_probe_passes(pool, zero, dtype, mesh):
    changes = {"model": {"architecture": "llama", "dtype": dtype, "config": training.LLAMA}}
    config = training.config_of(".", mesh=mesh, zero=zero, data={"path": "stdlib"}, **changes)
    assert pool(4)(training.probe_gradient, config, None) == [None] * 4


def printed(config) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        training.probe_gradient(config, None)
    return out.getvalue()


def test_nothing_stands_between_the_lines_of_steps(pool):
    """In bfloat16 at ZeRO 1 DeepSpeed prints the memory of its optimizer, whatever its logger was told."""
    model = {"architecture": "llama", "dtype": "bfloat16", "config": training.LLAMA}
    config = training.config_of(".", mesh=(2, 2, 1), zero=1, data={"path": "stdlib"}, model=model)
    assert pool(4)(printed, config) == [""] * 4


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("fault", "message"), [("scaled", "2 times as long"), ("lost", "on 4 ranks")])
def test_gradient_probe_refuses_on_every_rank(pool, zero, fault, message):
    config = training.config_of(".", mesh=(2, 2, 1), zero=zero, data={"path": "stdlib"})
    refusals = pool(4)(training.probe_gradient, config, fault)
    assert message in refusals[0]
    assert len(set(refusals)) == 1


PROBED = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}


def probed(architecture, mesh=(1, 4, 1), layout="zigzag", dtype="float32"):
    table = training.LLAMA | PROBED[architecture]
    return training.config_of(
        ".",
        mesh=mesh,
        zero=1,
        data={"path": "stdlib"},
        sequence={"length": training.LENGTH, "layout": layout},
        model={"architecture": architecture, "dtype": dtype, "config": table},
    )


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(probed(architecture), id=architecture) for architecture in PROBED),
        *(pytest.param(probed("llama", layout=layout), id=layout) for layout in ("contiguous", "striped", "balanced")),
        pytest.param(probed("llama", mesh=(1, 2, 2)), id="1x2x2"),
        pytest.param(probed("llama", mesh=(4, 1, 1)), id="4x1x1"),
        pytest.param(probed("llama", dtype="bfloat16"), id="bfloat16"),
    ],
)
def test_R116_attention_probe_passes(pool, config):
    assert pool(4)(training.probe_attention, config, None) == [None] * 4


@pytest.mark.parametrize("fault", ["positions", "keys"])
def test_R116_attention_probe_names_the_first_layer_that_is_off(pool, fault):
    refusals = pool(4)(training.probe_attention, probed("llama"), fault)
    assert "a 2-layer llama over a ring of 4 ranks differs from one process" in refusals[0]
    assert "first at layer 0" in refusals[0]
    assert len(set(refusals)) == 1


def test_R104_more_processes_than_gpus_names_both(monkeypatch):
    monkeypatch.setattr(world.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(world.torch.cuda, "device_count", lambda: 2)
    assert world.device_of(world.Place(1, 2, 1, 2, None)).index == 1
    for local_rank in (0, 3):
        with pytest.raises(ValueError, match=rf"LOCAL_RANK={local_rank} of 4 processes, but this machine shows 2 GPUs"):
            world.device_of(world.Place(local_rank, 4, local_rank, 4, None))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("compiler", "no C compiler is found .gcc, clang, cc."), ("header", "Python.h is missing, .* python3-dev")],
)
def test_missing_toolchain_is_one_sentence(monkeypatch, missing, message):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(world.shutil, "which", lambda name: None if missing == "compiler" else f"/bin/{name}")
    monkeypatch.setattr(world.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ValueError, match=message):
        world.check_toolchain()
