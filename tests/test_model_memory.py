"""The model of a run: activation checkpointing, tied weights and families."""

from __future__ import annotations

import functools

import pytest
import torch
import training
from conftest import error

import ringflash
from train import model

DOCUMENTS = slice(0, 40), slice(40, 60)
PADDING = slice(60, None)

FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
}


def config_of(family="llama", checkpoint="selective", **changes):
    architecture = family.partition("-")[0]
    table = training.LLAMA | FAMILIES[family] | changes
    if architecture == "qwen2":
        table = {key: value for key, value in table.items() if key != "head_dim"} | {"hidden_size": 64}
    return training.config_of(
        ".",
        model={"architecture": architecture, "config": table},
        memory={"checkpoint": checkpoint, "loss_chunk": 5},
        data={"path": "stdlib"},
    )


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(260, (1, training.LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, ::7] = -100
    labels[:, PADDING] = -100
    return ids, labels


def gradients(config):
    """(loss, name -> gradient) of one batch of two documents and padding, over a ring of one process."""
    ring = ringflash.Ring()
    ringflash.hf.register(ring, name=model.ATTENTION)
    trained = model.build(config, torch.device("cpu"))
    loss = trained(*batch(), ring.layout(training.LENGTH, cu_seqlens=[0, 40, 60]))
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in trained.decoder.named_parameters()}


@functools.cache
def expected(family):
    """The same from transformers' own attention and loss: each document alone."""
    torch.manual_seed(3)
    config = config_of(family)
    decoder = model.build_decoder(
        model.config_of(config.model, training.LENGTH),
        dtype=torch.float32,
        attention="eager",
        device=torch.device("cpu"),
    )
    ids, labels = batch()
    total = torch.zeros(())
    for part in DOCUMENTS:
        logits = decoder(ids[:, part], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, part], reduction="sum")
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_transformers(family, checkpoint):
    loss, got = gradients(config_of(family, checkpoint))
    want_loss, want = expected(family)
    assert error(loss, want_loss) <= 1e-5
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= want.keys()
    assert ("lm_head.weight" in want) == (family != "llama-tied")
    for name, gradient in want.items():
        assert error(got[name], gradient) <= 1e-5, name


@pytest.mark.parametrize(("checkpoint", "rings"), [("none", 1), ("selective", 1), ("full", 2)])
def test_R33_rings_that_a_layer_runs_forward(monkeypatch, checkpoint, rings):
    count = 0
    forward = ringflash.ring.forward

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(ringflash.ring, "forward", counted)
    gradients(config_of(checkpoint=checkpoint))
    assert count == rings * training.LLAMA["num_hidden_layers"]


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_checkpointing_keeps_less(checkpoint):
    assert kept_bytes(checkpoint) < 0.5 * kept_bytes("none")


def kept_bytes(checkpoint):
    """Bytes that autograd keeps of one forward, parameters left out."""
    ring = ringflash.Ring()
    ringflash.hf.register(ring, name=model.ATTENTION)
    trained = model.build(config_of(checkpoint=checkpoint, num_hidden_layers=6), torch.device("cpu"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in trained.parameters()}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trained(*batch(), ring.layout(training.LENGTH))
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def test_same_seed_same_weights():
    first, second = (model.build(config_of(), torch.device("cpu")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_field_of_a_wrong_type_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^model\.config: transformers refuses it: .*'pretraining_tp'.*"):
        model.config_of(config_of(pretraining_tp="two").model, training.LENGTH)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attention_dropout", 0.1),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "final_logit_softcapping", 30.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("qwen3_moe", "output_router_logits", True),
    ],
)
def test_R68_what_would_be_ignored_is_refused(family, key, value):
    with pytest.raises(ValueError, match=rf"model.config.{key} = {value}: .*; leave it out"):
        model.config_of(config_of(family, **{key: value}).model, training.LENGTH)
