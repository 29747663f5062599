"""[memory] on a GPU, where copies run beside the compute: `pytest -m gpu`. The same on a CPU: test_checkpointing.py.

Copies are held back by more than a layer's work takes, so that whatever does not wait for them reads what is not there.
"""

from __future__ import annotations

import functools

import pytest
import torch
import training
from conftest import TOLERANCE, error

import ringflash
from train import checkpointing, model, offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
LAYERS, LENGTH, TILE = 5, 4096, 1000
SHAPE = training.LLAMA | {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": LENGTH,
}  # fmt: skip
CYCLES = 10_000_000
"""About 5 ms, for which a copy is held back."""


class Late(offload.Lane):
    """A lane whose copies come late."""

    made: list[Late]

    def copy(self, pairs, device):
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(CYCLES)
        return super().copy(pairs, device)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """One order of sums in each kernel, so that bits can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained_model(**memory):
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    config = training.config_of(
        ".",
        model={"architecture": "llama", "dtype": "bfloat16", "config": SHAPE},
        sequence={"length": LENGTH},
        parallel={"ring": 1, "zero": 1},
        memory={"loss_chunk": 512} | memory,
        data={"path": "stdlib"},
    )
    return model.build(config, torch.device(DEVICE))


def step(trained):
    """(loss, name -> gradient) of a step on documents and padding."""
    trained.zero_grad()
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(260, (1, LENGTH), generator=generator, device=DEVICE)
    layout = ringflash.Ring().layout(LENGTH, cu_seqlens=[0, 2500, 4000])
    loss = trained(ids, ids.roll(-1, 1), layout)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in trained.named_parameters()}


@functools.cache
def plain():
    return step(trained_model(checkpoint="none"))


SWITCHES = [
    {"checkpoint": "selective"},
    {"checkpoint": "full", "offload": ["activations"]},
    {"checkpoint": "selective", "offload": ["activations", "attention"]},
    {"checkpoint": "selective", "checkpoint_every": 2, "offload": ["activations", "attention"]},
    {"checkpoint": "full", "checkpoint_every": 3, "offload": ["activations"]},
    {"checkpoint": "selective", "checkpoint_every": LAYERS, "offload": ["attention"]},
]


@pytest.mark.parametrize("reserved", [False, True], ids=["", "reserved"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_late_copies_change_no_bit_in_any_step(switches, reserved, monkeypatch):
    lanes = []
    monkeypatch.setattr(checkpointing, "Lane", lambda: lanes.append(Late()) or lanes[-1])
    trained = trained_model(**switches)
    if reserved:
        trained.reserve(LENGTH, torch.device(DEVICE))
    want_loss, want = plain()
    taken = []
    for _ in range(3):
        loss, got = step(trained)
        assert torch.equal(loss, want_loss)
        assert [name for name, gradient in want.items() if not torch.equal(got[name], gradient)] == []
        taken.append([lane.num_bytes for lane in lanes])
    states, pairs = LENGTH * 512 * 2, LENGTH * 4 * (128 * 2 + 4)
    sizes = {"activations": -(-LAYERS // switches.get("checkpoint_every", 1)) * states, "attention": LAYERS * pairs}
    assert taken == [[sizes[kind] for kind in sizes if kind in switches.get("offload", [])]] * 3


def test_host_memory_is_page_locked_and_copies_do_not_hold_the_host():
    lane, x = Late(), torch.ones(2**20, device=DEVICE)
    lane.reserve([x.nbytes], 1, x.device)
    torch.cuda.synchronize()
    away = lane.put([x])
    under_way = not torch.cuda.current_stream().query() or not lane._stream.query()
    assert under_way, "the host is here before the copy is done"
    assert away._buffers[0].is_pinned()


def test_a_layer_lets_go_of_what_is_away():
    """Of 5 layers' states two at most are on the device when the backward begins."""
    held = {}
    for offloaded in ([], ["activations", "attention"]):
        trained = trained_model(checkpoint="selective", offload=offloaded)
        ids, layout = torch.zeros(1, LENGTH, dtype=torch.int64, device=DEVICE), ringflash.Ring().layout(LENGTH)
        trained(ids, ids, layout).backward()  # what a first step keeps, tables of the layout among it
        trained.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = trained(ids, ids, layout)
        held[bool(offloaded)] = torch.cuda.memory_allocated() - before
        del loss
    a_layer = LENGTH * (512 * 2 + 4 * (128 * 2 + 4))
    rest = 2**20  # a block of the allocator may be so much larger than what it is for
    assert held[False] - held[True] == pytest.approx((LAYERS - 1) * a_layer, abs=2 * rest)


def test_tiles_are_within_the_type():
    want_loss, want = plain()
    loss, got = step(trained_model(checkpoint="full", mlp_tile=TILE, offload=["activations"]))
    assert error(loss, want_loss) <= 1e-3
    worst = max(error(got[name], gradient) for name, gradient in want.items())
    assert worst <= 2 * TOLERANCE[torch.bfloat16], worst
