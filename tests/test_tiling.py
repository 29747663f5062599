"""MLPs, norms and projections in tiles: the gradients of the whole model, and nothing kept of what norms return."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import test_model_memory
import torch
import training
from conftest import error
from test_model_memory import FAMILIES
from torch import nn

import ringflash
from train import model, tiling

TILE = 9
MEMORY = [
    {"checkpoint": "none"},
    {"checkpoint": "full"},
    {"checkpoint": "selective"},
    {"checkpoint": "full", "checkpoint_every": 2, "offload": ["activations"]},
    {"checkpoint": "selective", "offload": ["activations", "attention"]},
]


def config_of(family, **memory):
    config = test_model_memory.config_of(family)
    return config.model_copy(update={"memory": type(config.memory)(**{"loss_chunk": 5} | memory)})


@functools.cache
def whole(family):
    return test_model_memory.gradients(config_of(family, checkpoint="none"))


@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole(family, memory):
    (want_loss, want), (loss, got) = (
        whole(family),
        test_model_memory.gradients(config_of(family, mlp_tile=TILE, **memory)),
    )
    assert error(loss, want_loss) <= 1e-6
    off = {name: error(got[name], gradient) for name, gradient in want.items()}
    assert max(off.values()) <= 2e-6, off


@pytest.mark.parametrize("family", FAMILIES)
def test_what_norms_return_is_not_kept(family, monkeypatch):
    """But for the last norm's, which the head keeps."""
    alive, made, mark = set(), [], tiling._mark

    def noted(normalised, *args):
        storage = normalised.untyped_storage()
        made.append(id(storage))
        alive.add(len(made))
        weakref.finalize(storage, alive.discard, len(made))
        mark(normalised, *args)

    monkeypatch.setattr(tiling, "_mark", noted)
    ring = ringflash.Ring()
    ringflash.hf.register(ring, name=model.ATTENTION)
    trained = model.build(config_of(family, checkpoint="none", mlp_tile=TILE), torch.device("cpu"))
    loss = trained(*test_model_memory.batch(), ring.layout(training.LENGTH))
    gc.collect()
    assert loss.requires_grad and len(made) >= 5
    assert alive <= {len(made)}


def test_adapters_get_the_gradients_of_the_whole(tmp_path):
    folder = training.save_model("llama", tmp_path)
    results = []
    for tile in (None, TILE):
        config = training.pretrained(
            folder, train={"name": "tiny", "steps": 2, "global_batch": 1, "trainable": "lora", "self_test": False},
            lora=training.LORA | {"targets": ["q_proj", "v_proj", "o_proj", "down_proj"]},
            memory={"loss_chunk": 5, "mlp_tile": tile}, data={"path": "stdlib"},
        )  # fmt: skip
        ring = ringflash.Ring()
        ringflash.hf.register(ring, name=model.ATTENTION)
        trained = model.build(config, torch.device("cpu"))
        with torch.no_grad():  # they begin as zeros, behind which there is no gradient
            for index, weight in enumerate(weight for weight in trained.parameters() if weight.requires_grad):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index)))
        trained(*test_model_memory.batch(), ring.layout(training.LENGTH)).backward()
        results.append({name: one.grad for name, one in trained.named_parameters() if one.requires_grad})
    want, got = results
    off = {name: error(got[name], gradient) for name, gradient in want.items()}
    assert len(want) == 16 and max(off.values()) <= 2e-6, off


class Between(nn.Module):
    """A norm and a map, and what somebody put between them."""

    def __init__(self, between):
        super().__init__()
        self.norm, self.proj, self.between = nn.RMSNorm(8), nn.Linear(8, 4), between

    def forward(self, x):
        return self.proj(self.between(self.norm(x)))


BETWEEN = {
    "nothing": lambda x: x,
    "view": lambda x: x.view_as(x),
    "in place": lambda x: x.mul_(2),
    "part": lambda x: x[:, 3:],
    "other shape": lambda x: x.unflatten(1, (4, 5)),
    "transposed": lambda x: x.view(1, 8, 20).transpose(1, 2),
    "copy": lambda x: 3 * x,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_is_not_what_the_norm_returned_is_kept_as_it_is(between):
    torch.manual_seed(2)
    plain, tiled = Between(between), Between(between)
    tiled.load_state_dict(plain.state_dict())
    tiling.set_tiles(tiled, 6)
    x = torch.randn(1, 20, 8)
    results = []
    for module in (plain, tiled):
        given = (x * 1).requires_grad_()
        out = module(given)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([given.grad, *(weight.grad for weight in module.parameters())])
    assert all(error(got, want) <= 2e-6 for want, got in zip(*results, strict=True))


def test_what_a_map_keeps_goes_with_what_stands_between():
    """The same storage of x for the norm and the map, or two."""
    for name, kept in (("nothing", 1), ("view", 1), ("copy", 2)):
        module = Between(BETWEEN[name])
        tiling.set_tiles(module, 6)
        x = torch.randn(1, 20, 8).requires_grad_()
        places = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, places=places: places.add(one.untyped_storage().data_ptr()) or one, lambda one: one
        ):
            out = module(x)
        weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        assert out.requires_grad and len(places - weights) == kept, name
