"""What a transformers model may ask of a ring and what is refused, naming the layer and the argument."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
import transformers
from test_hf import SEQ, SIZES, WINDOW, make, on_ring, sample
from transformers import AttentionInterface, masking_utils

import ringflash


@pytest.fixture
def ring() -> ringflash.Ring:
    return ringflash.Ring()


def layer(**changes):
    """As much of an attention layer as the attention function looks at."""
    config = types.SimpleNamespace(**{"layer_types": None, "sliding_window": None} | changes.pop("config", {}))
    return types.SimpleNamespace(**{"layer_idx": 7, "training": True, "is_causal": True, "config": config} | changes)


def test_R41_positions_of_three_axes_are_compared_along_the_sequence(ring):
    layout = ring.layout(SEQ)
    module, heads = layer(), torch.randn(1, 2, SEQ, 16)
    ringflash.hf.register(ring)
    ring_attention = AttentionInterface()["ring"]
    positions = layout.shard(torch.arange(SEQ).expand(3, 1, SEQ), dim=2)
    ring_attention(module, heads, heads, heads, None, position_ids=positions)
    with pytest.raises(ValueError, match="position_ids"):
        ring_attention(module, heads, heads, heads, None, position_ids=positions.flip(-1))


def test_no_mask_is_built_where_positions_look_packed(ring):
    ringflash.hf.register(ring)
    length = 1_000_000  # [L, L] would be 10^12 elements
    positions = torch.arange(length).remainder(1000)[None]
    for create in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        config = transformers.MistralConfig(**SIZES, sliding_window=WINDOW, attn_implementation="ring")
        assert create(config, torch.zeros(1, length, 1), None, None, position_ids=positions) is None


# what the model is called with -> what the error must name
CALLS = {
    "zero": ({"attention_mask": torch.arange(SEQ)[None] > 0}, "every layer of LlamaConfig: attention_mask has 1 z"),
    "4-D": ({"attention_mask": torch.zeros(1, 1, SEQ, SEQ)}, r"layer 0 \(LlamaAttention\): attention_mask .*1, 1, 128"),
    "length": ({"attention_mask": torch.ones(1, 2 * SEQ)}, "attention_mask is for 256 keys"),
    "cu_seq_lens": ({"cu_seq_lens_q": torch.tensor([0, SEQ])}, "layer 0 .*: cu_seq_lens_q=.*cu_seqlens"),
    "spelling": ({"layuot": None}, "layer 0 .*: layuot=None"),
    "layout": ({"layout": SEQ}, "layer 0 .*: layout=128 is int"),
    "not causal": ({"is_causal": False}, "LlamaConfig: mask_function .*bidirectional"),
    "weights": ({"output_attentions": True}, "layer 0 .*: output_attentions=True"),
    "cache": ({"use_cache": True}, "layer 0 .*: use_cache=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_R34_a_call_that_asks_for_something_else_is_refused(case, ring):
    given, message = CALLS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        on_ring("llama", ring)(sample()[0], **given)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip
# model, change of its config -> what the error must name
CONFIGS = {
    "dropout": ("llama", {"attention_dropout": 0.1}, r"layer 0 \(LlamaAttention\): dropout=0.1"),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, "Gemma3TextConfig: mask_function .*or_masks"),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, "layer 0 .*rope_type='dynamic'"),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, "layer 0 .*rope_type='longrope'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_R68_a_config_that_a_ring_cannot_honour_is_refused(case, ring):
    name, changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        on_ring(name, ring, **changes)(sample()[0])


def test_dropout_rests_outside_training(ring):
    ringflash.hf.register(ring)
    heads = torch.randn(1, 2, SEQ, 16)
    given = {"dropout": 0.5, "position_ids": torch.arange(SEQ)[None]}
    AttentionInterface()["ring"](layer(training=False), heads, heads, heads, None, **given)


def test_yarn_is_let_pass(ring):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    on_ring("llama", ring, rope_parameters=rope)(sample()[0])


@pytest.mark.parametrize("cache", ["filled", "static"])
def test_a_cache_that_has_other_keys_is_refused(cache, ring):
    ids, _ = sample()
    model = on_ring("gemma3", ring, use_cache=True).eval()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    filled = model(ids[:, :-2])[name]
    given = {"filled": filled, "static": transformers.StaticCache(config=model.config, max_cache_len=SEQ)}[cache]
    with pytest.raises(ValueError, match="every layer of Gemma3TextConfig: the key/value cache"):
        model(ids[:, -2:], **{name: given})


def test_positions_are_checked_again_with_another_layout(ring):
    ids, _ = sample()
    model = on_ring("llama", ring)
    layout = ring.layout(SEQ, cu_seqlens=[0, 50, SEQ])
    positions = layout.position_ids[None]
    model(ids, position_ids=positions, layout=layout)
    with pytest.raises(ValueError, match=r"layer 0 .*: without layout= position_ids .*got 0 out of place"):
        model(ids, position_ids=positions)


FULL, SLIDING = ({"layer_types": [f"{kind}_attention"] * 8} for kind in ("full", "sliding"))
CHUNKED, LINEAR = ({"layer_types": [f"{kind}_attention"] * 8} for kind in ("chunked", "linear"))
# change of the layer, keywords -> what the error must name after the layer
KEYWORDS = {
    "is_causal": ({}, {"is_causal": False}, "is_causal=False"),
    "layer's is_causal": ({"is_causal": False}, {}, "is_causal=False"),
    "dropout": ({}, {"dropout": 0.5}, "dropout=0.5"),
    "cache": ({}, {"past_key_values": object()}, "past_key_values="),
    "window not handed on": ({"config": {"sliding_window": 8}}, {}, "sliding_window=None"),
    "window of a full layer": ({"config": FULL}, {"sliding_window": 8}, "sliding_window=8"),
    "no window of a sliding layer": ({"config": SLIDING}, {}, "sliding_window=None"),
    "chunks": ({"config": CHUNKED}, {}, "layer_types .*chunked_attention"),
    "state of other layers": ({"config": LINEAR}, {}, "layer_types .*linear_attention"),
    "rope of one layer type": ({"config": {"rope_parameters": {"full_attention": DYNAMIC}}}, {}, "rope_type='dynamic'"),
    "no positions": ({}, {"position_ids": None}, "without layout= position_ids must"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYWORDS)
def test_a_layer_that_asks_for_something_else_is_refused(case, ring):
    changes, given, message = KEYWORDS[case]
    ringflash.hf.register(ring)
    heads = torch.randn(1, 2, SEQ, 16)
    given = {"position_ids": torch.arange(SEQ)[None], **given}
    with pytest.raises(ValueError, match=rf"layer 7 \(SimpleNamespace\): {message}"):
        AttentionInterface()["ring"](layer(**changes), heads, heads, heads, None, **given)


def test_fewer_queries_than_keys_are_refused(ring):
    ringflash.hf.register(ring)
    heads = torch.randn(1, 2, SEQ, 16)
    with pytest.raises(ValueError, match=r"layer 7 .*: key has 128 tokens and query has 1;"):
        AttentionInterface()["ring"](layer(), heads[:, :, :1], heads, heads, None)


def nowhere(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx < 0


BLOCKS = torch.zeros(1, SEQ, dtype=torch.int64)
WINDOW_RULE = masking_utils.sliding_window_overlay(8)
DOCUMENT_RULE = masking_utils.packed_sequence_mask_function(BLOCKS)
# how a model composes its mask -> what the error must name
RULES = {
    "or": ("create_causal_mask", {"or_mask_function": nowhere}, "or_masks"),
    "and": ("create_causal_mask", {"and_mask_function": nowhere}, "causal_mask_function and nowhere"),
    "own window": ("create_causal_mask", {"and_mask_function": WINDOW_RULE}, "sliding_window_overlay"),
    "own documents": ("create_causal_mask", {"and_mask_function": DOCUMENT_RULE}, "composed"),
    "blocks": ("create_causal_mask", {"block_sequence_ids": BLOCKS}, "or_masks"),
    "blocks with a window": ("create_sliding_window_causal_mask", {"block_sequence_ids": BLOCKS}, "or_masks"),
    "chunks": ("create_chunked_causal_mask", {}, "chunked_overlay"),
    "both ways": ("create_bidirectional_mask", {}, "bidirectional_mask_function"),
    "both ways with a window": ("create_bidirectional_sliding_window_mask", {}, "sliding_window_bidirectional_overlay"),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", RULES)
def test_R34_a_mask_rule_of_the_model_is_refused(case, packed, ring):
    ringflash.hf.register(ring)
    create, given, message = RULES[case]
    create = getattr(masking_utils, create)
    config = transformers.MistralConfig(**SIZES, sliding_window=WINDOW, attn_implementation="ring")
    config.attention_chunk_size = WINDOW
    positions = torch.arange(SEQ).remainder(50 if packed else SEQ)[None]
    if "position_ids" in inspect.signature(create).parameters:
        given = given | {"position_ids": positions}
    empty = "cache" if "cache" in inspect.signature(create).parameters else "past_key_values"
    with pytest.raises(ValueError, match=f"every layer of MistralConfig: mask_function .*{message}"):
        create(config, torch.zeros(1, SEQ, 1), None, **{empty: None}, **given)


@pytest.mark.parametrize(
    "name", ["ring_flash", "Flash", "flash_attention_2", "a/b", "paged|ring", "", "eager", "sdpa", "flex_attention"]
)
def test_names_that_transformers_reads_otherwise_are_refused(name, ring):
    with pytest.raises(ValueError, match="name="):
        ringflash.hf.register(ring, name)


def test_a_name_is_a_word(ring):
    with pytest.raises(TypeError, match="name=None is NoneType"):
        ringflash.hf.register(ring, None)


def test_only_a_ring_is_registered(ring):
    with pytest.raises(TypeError, match=r"ring is Layout; it must be a ringflash\.Ring"):
        ringflash.hf.register(ring.layout(SEQ), "ring-c")


@pytest.mark.parametrize(("length", "kind"), [(0, ValueError), (-4, ValueError), ("8", TypeError), (8.0, TypeError)])
def test_rope_is_frozen_at_a_length(length, kind):
    with pytest.raises(kind, match=f"length={length!r}"):
        ringflash.hf.freeze_rope(make("llama").config, length)


def test_two_rings_under_two_names(ring):
    ringflash.hf.register(ring, "ring-a")
    ringflash.hf.register(ring, "ring_b")
    ids, _ = sample()
    model = make("llama")
    outs = []
    for name in ("ring-a", "ring_b"):
        model.set_attn_implementation(name)
        outs.append(model(ids).logits)
    assert torch.equal(*outs)
