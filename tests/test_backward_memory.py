"""What is alive whenever the backward comes to a layer's attention, against what `memory` says of that moment.

Storages are counted as ops make them and as they go, so what anything holds is seen: autograd, a hook, a lane.
"""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
import training
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringflash
from train import memory, model

LENGTH, TILE = 512, 64


class Alive(TorchDispatchMode):
    """Bytes that are alive of what ops made since it began; host memory, which no op makes, is not among them.

    at_attention: those before each backward of attention; before_it: the most since the one before
    """

    def __init__(self):
        super().__init__()
        self._bytes, self.at_attention, self.before_it, self._most = {}, [], [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.ringflash.attention_backward.default:
            self.at_attention.append(sum(self._bytes.values()))
            self.before_it.append(self._most)
            self._most = 0
        result = op(*args, **(kwargs or {}))
        given = {id(one) for one in self._storages((args, kwargs))}
        for storage in self._storages(result):
            if id(storage) not in given and id(storage) not in self._bytes:  # otherwise a view
                self._bytes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, id(storage))
        if op is not torch.ops.ringflash.attention_backward.default:
            self._most = max(self._most, sum(self._bytes.values()))
        return result

    @staticmethod
    def _storages(tree):
        return [one.untyped_storage() for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


@functools.cache
def measured(layers, tile, checkpoint, every, offload, mlp_width=96):
    """(what was alive, its layers in the order of the backward, sizes, step)"""
    switches = {"checkpoint": checkpoint, "checkpoint_every": every, "offload": list(offload), "mlp_tile": tile}
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": LENGTH, "intermediate_size": mlp_width}
    config = training.config_of(
        ".",
        model={"architecture": "llama", "dtype": "bfloat16", "config": training.LLAMA | sizes},
        sequence={"length": LENGTH},
        parallel={"ring": 1, "zero": 1},
        memory={"loss_chunk": 16} | switches,
        data={"path": "stdlib"},
    )
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    trained = model.build(config, torch.device("cpu"))
    ids, layout = torch.zeros(1, LENGTH, dtype=torch.int64), ringflash.Ring().layout(LENGTH)
    with Alive() as alive:
        trained(ids, ids, layout).backward()
    step = memory.Step(tokens=LENGTH, sequence=LENGTH, number_bytes=2, memory=config.memory)
    return alive, memory.sizes_of(model.config_of(config.model, LENGTH)), step


def of_data(sizes, step):
    """Bytes of the cosines, the sines and the positions, of which a checkpoint holds a copy."""
    positions = 8 if step.memory.checkpoint == "none" else 16
    return LENGTH * (step.number_bytes * 2 * sizes.query_width // sizes.heads + positions)


def before_attention(parts, sizes, step):
    """Bytes of a moment's parts that are there before attention's backward begins, of what ops make."""
    later = memory.attention_kernel(sizes, step).keys() | {"weights", "data"}
    there = sum(size for name, size in parts.items() if name not in later)
    there += of_data(sizes, step) + step.number_bytes * LENGTH * sizes.query_width  # of its kernel's parts dout
    return there - step.number_bytes * sizes.width * (sizes.query_width + 2 * sizes.key_width)  # q, k, v come after it


def of_layer(sizes, step, done, work):
    """Parts of the moment of a layer, before which so many are done, of what ops make. work: of the layer"""
    parts = memory.kept(sizes, step, sizes.layers - done) | work
    return parts | memory.gradients(sizes, step, (done + 1) * sizes.layer_params + sizes.head_params)


def until_attention(sizes, step, done):
    """The most bytes, of what ops make, from when a layer is made again until the backward of its attention begins."""
    tiled, params = step.memory.mlp_tile is not None, sizes.layer_params
    missing = [
        (memory.mlp_backward(sizes, step), params - (0 if tiled else sizes.mlp_params // 3)),  # one at most is there
        (memory.recomputation(sizes, step, sizes.layers - done), params),
    ]
    if tiled:
        missing.append((memory.norm_backward(sizes, step), params - sizes.mlp_params))
    if step.memory.checkpoint == "none":
        del missing[1]
    sums = (sum(of_layer(sizes, step, done, work).values()) - step.number_bytes * none for work, none in missing)
    return max(sums) + of_data(sizes, step)


CASES = [
    pytest.param(
        layers, tile, checkpoint, every, offload,
        id=f"{layers}-{checkpoint}-{every}-{'-'.join(offload) or 'here'}-{'tiled' if tile else 'whole'}",
    )
    for layers, tile in ((4, TILE), (7, TILE), (7, None))  # full groups, and not
    for checkpoint, offloads in (
        ("full", [(), ("activations",)]),
        ("selective", [(), ("activations",), ("attention",), ("activations", "attention")]),
    )
    for every in (1, 2, 4)
    for offload in offloads
]  # fmt: skip


@pytest.mark.parametrize(("layers", "tile", "checkpoint", "every", "offload"), CASES)
def test_what_each_layer_holds_is_what_is_planned(layers, tile, checkpoint, every, offload):
    alive, sizes, step = measured(layers, tile, checkpoint, every, offload)
    assert len(alive.at_attention) == layers
    for done, got in enumerate(alive.at_attention):
        parts = of_layer(sizes, step, done, memory.attention_backward(sizes, step))
        assert got == pytest.approx(before_attention(parts, sizes, step), abs=tolerance(sizes)), f"{done} done"


@pytest.mark.parametrize(("layers", "tile", "checkpoint", "every", "offload"), CASES)
def test_the_peak_is_at_the_layer_that_holds_most(layers, tile, checkpoint, every, offload):
    alive, sizes, step = measured(layers, tile, checkpoint, every, offload)
    of_attention = [one for one in memory.moments(sizes, step) if "attention" in one.name]
    most = max(before_attention(one.parts, sizes, step) for one in of_attention)
    assert max(alive.at_attention) == pytest.approx(most, abs=tolerance(sizes))


@pytest.mark.parametrize(("layers", "tile", "checkpoint", "every", "offload"), CASES)
def test_a_layer_until_its_attention_takes_what_is_planned(layers, tile, checkpoint, every, offload):
    """Of the first layer it is not told from the loss."""
    alive, sizes, step = measured(layers, tile, checkpoint, every, offload)
    for done, got in list(enumerate(alive.before_it))[1:]:
        planned = until_attention(sizes, step, done)
        assert got == pytest.approx(planned, abs=tolerance(sizes)), f"{done} done"


@pytest.mark.parametrize("tile", [None, 4 * TILE])
def test_the_last_norm_takes_what_is_planned(tile):
    """Of a model whose loss and MLPs are small beside it."""
    alive, sizes, step = measured(2, tile, "none", 1, (), mlp_width=16)
    (parts,) = (one.parts for one in memory.moments(sizes, step) if "last norm" in one.name)
    planned = sum(size for name, size in parts.items() if name not in ("weights", "data")) + of_data(sizes, step)
    if tile:  # the next norm takes as much, beside gradients of the MLP
        planned = max(planned, until_attention(sizes, step, 0))
    assert alive.before_it[0] == pytest.approx(planned, abs=tolerance(sizes))


def tolerance(sizes):
    """Less than any tensor of all tokens and than the gradients of a layer: the norms' weights are left out."""
    return min(LENGTH * sizes.width * 2, sizes.layer_params * 2) // 8
