"""train.trainable = "lora": adapters alone are trained, exactly as peft would train them in one process."""

from __future__ import annotations

import pytest
import torch
import training
from conftest import error
from peft import get_peft_model

import ringflash
from train import engine, flops, lora, loss, model, probe
from train.config import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model("llama", tmp_path_factory.mktemp("llama"))


def adapted(folder, texts, **changes):
    train = {"name": "tiny", "steps": 3, "global_batch": 4, "seed": 3, "self_test": False, "trainable": "lora"}
    return training.pretrained(folder, texts, train=train, lora=training.LORA, **changes)


def train_with_probes(config):
    """Body: both probes, then the run; its adapters and what is frozen."""
    joined = training.join(config)
    refusal = training._refusal(probe.check_gradient, config, joined)
    return refusal, training.train(config, "sparse")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for the old name
@pytest.mark.parametrize(("mesh", "zero"), [((1, 2, 1), 0), ((2, 1, 1), 2), ((1, 2, 1), 3)])
def test_adapters_train_as_with_peft_in_one_process(pool, texts, folder, mesh, zero):
    config = adapted(folder, texts, mesh=mesh, zero=zero)
    refusal, got = pool(2)(train_with_probes, config)[0]
    assert refusal is None
    base = training.from_folder(folder)
    peft = get_peft_model(base, lora.peft_config(config.lora))
    first = {name: weight for name, weight in got["weights"].items() if lora.is_adapter(name)}
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if lora.is_adapter(name):
                parameter.copy_(start(config)[name.removeprefix("base_model.model.")])
    want = training.train_alone(config, "sparse", peft)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert len(first) == 2 * 2 * 2
    for name, weight in want["weights"].items():
        name = name.removeprefix("base_model.model.")
        assert error(got["weights"][name], weight) <= 1e-5, name
        if not lora.is_adapter(name):
            assert torch.equal(got["weights"][name], weight), f"{name} is frozen"


def start(config):
    """The adapters as a run begins with them."""
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    built = model.build(config, torch.device("cpu"))
    return {name: p.detach() for name, p in built.decoder.named_parameters() if lora.is_adapter(name)}


def test_the_optimizer_holds_adapters_alone(folder, texts):
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    built = model.build(adapted(folder, texts), torch.device("cpu"))
    names = {name for name, p in built.decoder.named_parameters() if p.requires_grad}
    assert len(names) == 8 and all(lora.is_adapter(name) for name in names)
    numel = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert model.num_trained(built) == numel == 2 * 3 * (32 + 64 + 48 + 32)
    settings = engine.optimizer_of([p for p in built.parameters() if p.requires_grad], adapted(folder, texts).optimizer)
    assert sum(p.numel() for group in settings.param_groups for p in group["params"]) == numel


def test_frozen_parameters_count_four_flops_a_token():
    shape = flops.ModelShape(matmul_params=100, heads=1, head_dim=1, windows=(None,)).with_adapters(7)
    assert flops.step_flops(shape, [1, 1]).dense == 2 * (4 * 100 + 6 * 7)


def test_a_frozen_head_gets_no_gradient_and_the_states_do():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    labels = torch.tensor([1, 2, -100, 3, 4, 5])
    loss.loss_sum(hidden, weight, labels, chunk=2).backward()
    got, hidden.grad = hidden.grad, None
    torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum").backward()
    assert error(got, hidden.grad) <= 1e-5
    assert weight.grad is None


def test_R110_what_does_not_go_together(folder, texts):
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    with pytest.raises((ConfigError, ValueError), match=r"train.trainable = 'lora' needs model.pretrained"):
        training.config_of(texts, train={"trainable": "lora"})
    with pytest.raises((ConfigError, ValueError), match=r"\[lora\] is given but train.trainable = 'all'"):
        training.config_of(texts, lora={"rank": 2})
    config = adapted(folder, texts).model_copy(update={"lora": model.lora.Lora(targets=["qproj"])})
    with pytest.raises(ValueError, match=r"lora.targets holds 'qproj', .* accepted is down_proj, gate_proj, k_proj"):
        model.build(config, torch.device("cpu"))
