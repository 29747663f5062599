"""What `flops` says of the seconds of a step: by hand, and what its parts count against what torch does on a CPU."""

from __future__ import annotations

import json

import pytest
import test_model_memory
import torch
from test_memory import HEAD, LLAMA_8B
from torch.utils._python_dispatch import TorchDispatchMode

import ringflash
from train import flops, memory, model
from train.config import Memory

MILLION = 2**20


def rates(**changes):
    usual = {"attention": {128: flops.Speed(500, 400)}, "matmul": 600, "memory": 1000, "host": 50, "host_memory": 50}
    return flops.Rates(**usual | changes)


def test_seconds_of_a_step_by_hand():
    shape = flops.ModelShape(matmul_params=10**9, heads=32, head_dim=128, windows=(None,))
    runs = flops.passes("selective", 2, tiled=True)
    assert runs == (1, 2.5, 0) and flops.passes("full", 2, tiled=False) == (2.5, 2.5, -1 / 3)
    assert flops.passes("none", 1, tiled=False) == (1, 1, 0) and flops.passes("none", 1, tiled=True) == (1, 1, 1)
    times = flops.step_seconds(
        shape, [MILLION], rates(), runs, mlp_params=6 * 10**8, head_params=10**8, moved_bytes=10**15,
        elementwise_bytes=10,
    )  # fmt: skip
    pairs = MILLION * (MILLION + 1) // 2
    assert times["attention forward"] == pytest.approx(4 * 4096 * pairs / 500e12)
    assert times["attention backward"] == pytest.approx(10 * 4096 * pairs / 400e12)
    dense = 2 * MILLION * (9e8 * 4.5 + 4e8)
    assert times["matrix products"] == pytest.approx(dense / 600e12)
    hidden = sum(list(times.values())[:4])
    assert times["host link, not hidden"] == pytest.approx(2 * 10**15 / 50e9 - hidden)


def test_seconds_of_the_head_beside_those_measured():
    """Both rows of one H200: products and what moves memory, without the last norm."""
    sizes = memory.sizes_of(LLAMA_8B)
    shape = flops.ModelShape(matmul_params=sizes.head_params, heads=32, head_dim=128, windows=())
    norm = sizes.width * (flops._norm(2) + flops.NORM_BACKWARD + 4 * 2)
    for row in map(json.loads, HEAD.read_text().splitlines()):
        parts = flops.step_seconds(
            shape, [row["tokens"]], flops.RATES["H200"], flops.passes("none", 1, tiled=False),
            mlp_params=0, head_params=sizes.head_params, loss="liger" if row["head"] == "liger" else "chunked",
            elementwise_bytes=flops.head_elementwise(sizes, row.get("chunk"), number_bytes=2) - norm,
        )  # fmt: skip
        assert sum(parts.values()) == pytest.approx(row["seconds"], rel=0.05), row["head"]


def test_bytes_of_an_update_in_host_memory():
    """AdamW, bf16: 12 of weight and gradient, 16 of states, 6 to round; clipped gradients are scaled before, 8 more."""
    at = memory.Step(tokens=1, sequence=1, number_bytes=2, memory=Memory(), zero=2)
    assert flops.update_bytes(at, clips=False) == (4 + 2, 28 + 6)
    assert flops.update_bytes(at, clips=True) == (4 + 2, 28 + 6 + 8)
    assert flops.update_bytes(memory.replace(at, zero=3, states=0), clips=False) == (12 + 2, 12 + 6)


def test_speed_of_attention_by_head_dimension():
    measured = rates(attention={64: flops.Speed(500, 400), 128: flops.Speed(600, 500), 256: flops.Speed(700, 200)})
    found = [measured.attention_of(dim) for dim in (16, 64, 96, 128, 192, 512)]
    assert found == [(125, 100), (500, 400), (500, 400), (600, 500), (700, 200), (700, 200)]


class Moved(TorchDispatchMode):
    """num_bytes: read and written by ops that neither multiply matrices nor only look at a tensor otherwise.

    Gathers of single numbers count nothing; num_products: of two matrices
    """

    FREE = """
        view t transpose expand slice unsqueeze squeeze detach _unsafe_view split permute alias as_strided select empty
        empty_like new_empty index index_put_ lift_fresh roll nll_loss_forward attention attention_backward
    """

    def __init__(self):
        super().__init__()
        self.num_bytes = self.num_products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result, name = op(*args, **(kwargs or {})), op.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            self.num_products += 1
        elif name not in self.FREE.split():
            read = {"zeros": [], "zeros_like": [], "fill_": [], "copy_": args[1:2]}.get(name, args)
            some = torch.utils._pytree.tree_leaves([read, result])
            self.num_bytes += sum(x.nbytes for x in some if isinstance(x, torch.Tensor))
        return result


def moved(family, layers, switches, tokens=96):
    config = test_model_memory.config_of(
        family, num_hidden_layers=layers, hidden_size=128, intermediate_size=512, head_dim=32, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2000, max_position_embeddings=tokens,
    )  # fmt: skip
    changes = {"memory": Memory(**{"loss_chunk": 32} | switches),
               "model": config.model.model_copy(update={"dtype": "bfloat16"})}  # fmt: skip
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    trained = model.build(config.model_copy(update=changes), torch.device("cpu"))
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with Moved() as counted:
        trained(ids, ids, ringflash.Ring().layout(tokens)).backward()
    return memory.sizes_of(model.config_of(config.model, tokens)), counted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("switches", "products"), [
    ({"checkpoint": "none"}, 21), ({}, 27), ({"checkpoint_every": 2}, 27 + 7 / 2), ({"mlp_tile": 32}, 4 * 4 + 4 * 9),
    ({"checkpoint": "none", "mlp_tile": 32}, 3 * 4 + 4 * 9),
], ids=str)  # fmt: skip
def test_what_a_step_moves_beside_its_products_is_what_torch_moves(family, switches, products):
    """Within 3%: rows of norms and the cosines of all heads together are left out."""
    tokens, used = 96, Memory(**switches)
    runs = flops.passes(used.checkpoint, used.checkpoint_every, tiled=used.mlp_tile is not None)
    said, got, num_products = [], [], []
    for layers in (2, 4):
        sizes, counted = moved(family, layers, switches, tokens)
        a_token = flops.elementwise(sizes, runs, tile=used.mlp_tile, number_bytes=2)
        a_token += flops.head_elementwise(sizes, 32, number_bytes=2)
        # once a step: sums in fp32 begin as zeros and are rounded, the embedding has a gradient
        once = 14 * sizes.head_params + 10 * layers * sizes.mlp_params * (used.mlp_tile is not None)
        said.append(tokens * a_token + once)
        got.append(counted.num_bytes)
        num_products.append(counted.num_products)
    assert said == pytest.approx(got, rel=0.03)
    assert said[1] - said[0] == pytest.approx(got[1] - got[0], rel=0.03)
    assert (num_products[1] - num_products[0]) / 2 == products
