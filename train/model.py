"""A decoder model of transformers with attention over the ring, its activation checkpointing and its loss.

Attention itself is `ringflash.hf`; the loss is `loss`. Called by `loop` and `probe`.

Letters: B batch, L local tokens.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ringflash

from . import lora, weights
from .checkpointing import Layers, set_checkpointing
from .config import MODEL_REFUSED, Config, Model, Rope
from .loss import LossHead
from .memory import sizes_of
from .tiling import set_tiles

ATTENTION = "ring"
"""Name under which the ring's attention is registered with transformers."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RingModel(nn.Module):
    """A causal language model that turns this rank's tokens into the sum of their losses.

    decoder: a model of transformers whose output embedding is a `LossHead`
    layers: what `set_checkpointing` made of its layers
    """

    def __init__(self, decoder: nn.Module, layers: Layers | None = None) -> None:
        super().__init__()
        self.decoder: Any = decoder
        self._layers = layers

    def reserve(self, tokens: int, device: torch.device) -> list[Future[None]]:
        """Begin to take the host memory that [memory] needs for a step, so that the first one need not.

        tokens: of a forward pass of this rank
        returns what is done when it is there
        """
        if self._layers is None:
            return []
        return self._layers.reserve(sizes_of(self.decoder.config), tokens, self.decoder.dtype, device)

    def forward(self, ids: Tensor, labels: Tensor | None, layout: ringflash.Layout, *, each: bool = False) -> Any:
        """ids, labels: int64 [B, L], this rank's part by `layout`, labels shifted before the cut.

        returns fp32 scalar: the sum of cross-entropies over this rank's valid labels, nats; logits [B, L, V] if labels
            is None
        each: instead of the sum (losses, hits) of each token, [B, L], see `loss.token_scores`
        """
        position_ids = layout.position_ids.expand(len(ids), -1)
        states = self.decoder.base_model(ids, position_ids=position_ids, layout=layout, use_cache=False)
        return self.decoder.get_output_embeddings()(states.last_hidden_state, labels, each=each)


def config_of(model: Model, length: int) -> Any:
    """The transformers config of [model], its rotary frequencies fixed for sequences of `length` tokens.

    max_position_embeddings is at least `length`, so that what is exported says how long it may be.
    Raises: ValueError naming one of MODEL_REFUSED, or what transformers refuses.
    """
    from transformers import AutoConfig

    assert model.architecture is not None, "a folder is looked at by config.resolve before"
    try:
        config = AutoConfig.for_model(model.architecture, **copy.deepcopy(model.config))
    except Exception as error:  # of several libraries; a class of transformers checks the types of its fields
        raise ValueError(f"model.config: transformers refuses it: {' '.join(str(error).split())}") from error
    for key, reason in MODEL_REFUSED.items():
        if value := getattr(config, key, None):
            raise ValueError(f"model.config.{key} = {value}: {reason}; leave it out")
    set_rope(config, model.rope)
    config = ringflash.hf.freeze_rope(config, length)
    config.max_position_embeddings = max(config.max_position_embeddings, length)
    return config


def set_rope(config: Any, rope: Rope) -> None:
    """Put [model.rope] into a transformers config."""
    parameters = config.rope_parameters
    if "full_attention" in parameters:  # Gemma 3: the layers with a window keep theirs
        parameters = parameters["full_attention"]
    given = rope.model_dump(exclude_none=True)
    if "theta" in given:
        parameters["rope_theta"] = given.pop("theta")
    if rope.type is None:
        return
    original = given.pop("original_length", None)
    if rope.type == "dynamic":  # the one type that takes it from there
        config.max_position_embeddings = original
    elif original is not None:
        given["original_max_position_embeddings"] = original
    theta = parameters["rope_theta"]
    parameters.clear()
    parameters |= {"rope_theta": theta, "rope_type": given.pop("type")} | given


def build(
    config: Config, device: torch.device, cut: Callable[[nn.Module], None] | None = None, *, filled: bool = True
) -> RingModel:
    """The model of a run with the weights of model.pretrained, or random ones drawn from train.seed, on every rank.

    cut: see `weights.materialize`; filled: False where a checkpoint with all weights is loaded next, see `fill_later`
    The ring must be registered with `ringflash.hf` first. Raises: ValueError, see `config_of`, `lora.add`,
        `weights.check_folder`.
    """
    model = on_meta(
        config_of(config.model, config.sequence.length), dtype=DTYPES[config.model.dtype], attention=ATTENTION
    )
    if config.train.trainable == "lora":
        lora.add(model, config.lora)
    layers = set_checkpointing(model, config.memory)
    if config.memory.mlp_tile is not None:
        set_tiles(model, config.memory.mlp_tile)
    head = LossHead(model.get_output_embeddings().weight, config.memory.loss_chunk, config.memory.loss)
    model.set_output_embeddings(head)
    torch.manual_seed(config.train.seed)
    if not filled:
        fill = weights.fill_later(model)
    elif config.model.pretrained is None:
        fill = weights.fill_at_random(model)
    else:
        folder = weights.Folder(Path(config.model.pretrained))
        weights.check_folder(folder, model)
        fill = weights.fill_from(folder, model)
    weights.materialize(model, device, fill, cut)
    return RingModel(model, layers).train()


def num_trained(model: nn.Module) -> int:
    """Parameters that get gradients, also where a rank holds a part of them."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)


def build_decoder(config: Any, *, dtype: torch.dtype, attention: str, device: torch.device) -> Any:
    """A causal language model of transformers with random weights. config: see `config_of`."""
    model = on_meta(config, dtype=dtype, attention=attention)
    weights.materialize(model, device, weights.fill_at_random(model))
    return model


def on_meta(config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    """A causal language model of transformers whose parameters have shapes and no memory. config: see `config_of`."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except KeyError as error:
        raise ValueError(f"model.config: transformers finds no {error} for {config.model_type!r}") from error
