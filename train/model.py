"""A decoder model of transformers with attention over the ring, its activation checkpointing and its loss.

Attention itself is `ringflash.hf`; the loss is `loss`. Called by `loop` and `probe`.

Letters: B batch, L local tokens.
"""

import difflib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ringflash

from .config import MODEL_REFUSED, Config, Memory, Model
from .loss import LossHead

ATTENTION = "ring"
"""Name under which the ring's attention is registered with transformers."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RingModel(nn.Module):
    """A causal language model that turns this rank's tokens into the sum of their losses.

    decoder: a model of transformers whose output embedding is a `LossHead`
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder: Any = decoder

    def forward(self, ids: Tensor, labels: Tensor | None, layout: ringflash.Layout, *, each: bool = False) -> Any:
        """ids, labels: int64 [B, L], this rank's part by `layout`, labels shifted before the cut.

        returns fp32 scalar: the sum of cross-entropies over this rank's valid labels, nats; logits [B, L, V] if labels
            is None
        each: instead of the sum (losses, hits) of each token, [B, L], see `loss.token_scores`
        """
        position_ids = layout.position_ids.expand(len(ids), -1)
        states = self.decoder.base_model(ids, position_ids=position_ids, layout=layout, use_cache=False)
        return self.decoder.get_output_embeddings()(states.last_hidden_state, labels, each=each)


def config_of(model: Model) -> Any:
    """The transformers config of [model].

    Raises: ValueError naming a key of [model.config] that nothing reads, or one of MODEL_REFUSED.
    """
    from transformers import AutoConfig

    known = AutoConfig.for_model(model.architecture).to_dict()
    for key in model.config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(sorted(known))}"
            raise ValueError(f"model.config.{key} is not a key of {model.architecture!r}: {hint}")
    config = AutoConfig.for_model(model.architecture, **model.config)
    for key, reason in MODEL_REFUSED.items():
        if value := getattr(config, key, None):
            raise ValueError(f"model.config.{key} = {value}: {reason}; leave it out")
    return config


def build(config: Config, device: torch.device) -> RingModel:
    """The model of a run with random weights, the same on every rank: drawn from train.seed.

    The ring must be registered with `ringflash.hf` first. Raises: ValueError, see `config_of`.
    """
    torch.manual_seed(config.train.seed)
    model = build_decoder(config_of(config.model), dtype=DTYPES[config.model.dtype], attention=ATTENTION, device=device)
    set_checkpointing(model, config.memory)
    head = LossHead(model.get_output_embeddings().weight, config.memory.loss_chunk)
    model.set_output_embeddings(head)
    return RingModel(model).train()


def build_decoder(config: Any, *, dtype: torch.dtype, attention: str, device: torch.device) -> Any:
    """A causal language model of transformers with random weights. config: see `config_of`."""
    from transformers import AutoModelForCausalLM

    try:
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except KeyError as error:
        raise ValueError(f"model.config: transformers finds no {error} for {config.model_type!r}") from error


def set_checkpointing(model: Any, memory: Memory) -> None:
    """Recompute the layers in the backward: all of them, or all but attention, so that no ring runs twice."""
    if memory.checkpoint == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if memory.checkpoint == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    # the name of newer versions of transformers, and of older ones
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.ringflash.attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
