"""What [memory] says of activations changes no bit of loss and gradients, and keeps what it says."""

from __future__ import annotations

import functools
import gc

import pytest
import test_model_memory
import torch
import training
from conftest import error
from test_model_memory import FAMILIES, batch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringflash
from train import checkpointing, model, offload

LAYERS = 5


def config_of(**memory):
    return training.config_of(
        ".",
        model={"architecture": "llama", "config": training.LLAMA | {"num_hidden_layers": LAYERS}},
        memory={"loss_chunk": 5} | memory,
        data={"path": "stdlib"},
    )


def trained_model(**memory):
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    return model.build(config_of(**memory), torch.device("cpu"))


def loss_of(trained):
    layout = ringflash.Ring().layout(training.LENGTH, cu_seqlens=[0, 40, 60])
    return trained(*batch(), layout)


@functools.cache
def plain():
    trained = trained_model(checkpoint="none")
    loss = loss_of(trained)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in trained.named_parameters()}


SWITCHES = [
    {"checkpoint": checkpoint, "checkpoint_every": every, "offload": offload}
    for checkpoint, every, offload in [
        ("selective", 2, []),
        ("full", 3, []),
        ("selective", 1, ["activations"]),
        ("selective", 1, ["attention"]),
        ("full", 2, ["activations"]),
        ("selective", 2, ["activations", "attention"]),
        ("selective", LAYERS, ["attention"]),
    ]
]


@pytest.mark.parametrize("reserved", [False, True], ids=["", "reserved"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_every_switch_gives_the_same_bits_in_every_step(switches, reserved, monkeypatch):
    lanes = []
    monkeypatch.setattr(checkpointing, "Lane", lambda: lanes.append(offload.Lane()) or lanes[-1])
    trained = trained_model(**switches)
    if reserved:
        trained.reserve(training.LENGTH, torch.device("cpu"))
    want_loss, want = plain()
    taken = []
    for _ in range(2):
        trained.zero_grad()
        loss = loss_of(trained)
        assert torch.equal(loss, want_loss)
        loss.backward()
        assert all(torch.equal(parameter.grad, want[name]) for name, parameter in trained.named_parameters())
        taken.append([lane.num_bytes for lane in lanes])
    states = training.LENGTH * training.LLAMA["hidden_size"] * 4
    pairs = training.LENGTH * training.LLAMA["num_attention_heads"] * (training.LLAMA["head_dim"] + 1) * 4
    sizes = {"activations": -(-LAYERS // switches["checkpoint_every"]) * states, "attention": LAYERS * pairs}
    assert taken == [[sizes[kind] for kind in ("activations", "attention") if kind in switches["offload"]]] * 2


def live():
    """Where the storages of numbers are that somebody holds; a layout's positions wait for the collector.

    What torch.compile traced with in a test before has no storage.
    """
    kinds = ((one, type(one)) for one in gc.get_objects())
    traced = FakeTensor, FunctionalTensor
    some = [one for one, kind in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, traced)]
    return {one.untyped_storage().data_ptr() for one in some if one.numel() and one.is_floating_point()}


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_step_leaves_its_gradients_alone(switches, request):
    """Without the collector: what it would have to find is memory that a step lacks."""
    request.addfinalizer(gc.enable)
    gc.disable()
    trained = trained_model(**switches)
    loss_of(trained).backward()
    before = live()
    trained.zero_grad()
    loss_of(trained).backward()
    gradients = {parameter.grad.untyped_storage().data_ptr() for parameter in trained.parameters()}
    assert not live() - before - gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_change_sums_over_tokens_alone(family):
    """Weights of MLPs and norms, and what lies before them through a matrix kernel that looks at the tile's size."""
    results = []
    for tile in (None, 9):
        config = test_model_memory.config_of(family)
        config = config.model_copy(update={"memory": config.memory.model_copy(update={"mlp_tile": tile})})
        results.append(test_model_memory.gradients(config))
    (want_loss, want), (loss, got) = results
    assert error(loss, want_loss) <= 1e-6
    assert all(error(got[name], gradient) <= 2e-6 for name, gradient in want.items())


def test_a_tile_is_all_that_an_mlp_holds():
    largest = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 3:
                largest[out.shape[-1]] = max(largest.get(out.shape[-1], 0), out.shape[1])
            return out

    trained = trained_model(checkpoint="full", mlp_tile=10)
    with Watch():
        loss_of(trained).backward()
    assert largest[training.LLAMA["intermediate_size"]] == 10
    assert largest[training.LLAMA["hidden_size"]] == training.LENGTH
