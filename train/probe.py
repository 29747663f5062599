"""Two tests at the start of a run, on tiny models of their own; a failed one refuses to train.

`check_gradient` takes one step of the run's engine, with its ZeRO stage, type and accumulation, where the gradient is
known in closed form. `check_attention` compares a two-layer model of the run's architecture over the ring with the same
model in one process, under the attention of transformers. Called by `loop` unless train.self_test = false.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from . import model as models
from .config import Config
from .engine import Engine
from .world import World

PROBE_WIDTH = 64
"""Weights of the gradient probe: a few a rank, in a world of up to as many ranks."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error relative to the largest value, of either probe."""

TOKENS_PER_RANK = 16
"""Tokens of the attention probe."""

SMALL_WINDOW = 8
"""Sliding window of the attention probe, so that one is crossed."""


class _Linear(nn.Module):
    """Loss = weight * x, so its gradient is x, whatever the weight."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PROBE_WIDTH, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() * x).sum()


def check_gradient(config: Config, world: World) -> None:
    """One step of SGD, learning rate 1, from 0: the weights must become minus the mean gradient.

    Every rank and micro-batch has an x of its own, the last rank has zeros only, as if it had no valid target.
    Raises: ValueError naming the factor, on every rank alike.
    """
    batch = config.batch(world.size)
    optimizer = config.optimizer.model_copy(
        update={"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    )
    probe = config.model_copy(update={"optimizer": optimizer})
    engine = Engine(_Linear(models.DTYPES[config.model.dtype], world.device), probe, batch, world)
    valid_targets = 4 * batch.accumulation
    total = torch.zeros(PROBE_WIDTH, device=world.device)
    for micro in range(batch.accumulation):
        inputs = [_input(rank, micro, world) for rank in range(world.size)]
        total += torch.stack(inputs).sum(0)
        engine.backward(engine(inputs[world.rank]), valid_targets=valid_targets)
    norm = engine.step(1.0)
    want = total / valid_targets
    got = -engine.full_parameters()["weight"].float()
    engine.close()
    errors = _relative(got, want), abs(norm / want.norm().item() - 1)
    worst = world.gather([*errors, (got @ want / want.square().sum()).item()])
    if not (worst[:, :2] <= TOLERANCE[config.model.dtype]).all():
        rank = int(worst[:, :2].max(1).argmax())
        raise ValueError(
            f"the engine's gradient is wrong at parallel.zero = {config.parallel.zero} on {world.size} ranks: along "
            f"the right one it is {worst[rank, 2]:.4g} times as long, its largest error is {worst[rank, 0]:.2g} of the "
            f"largest value, its reported norm is off by {worst[rank, 1]:.2g} (rank {rank}); not training with it"
        )


def _input(rank: int, micro: int, world: World) -> Tensor:
    """Small integers, exact in every type: each rank has its own positions and shares some with the others."""
    if rank == world.size - 1 and world.size > 1:
        return torch.zeros(PROBE_WIDTH, device=world.device)
    index = torch.arange(PROBE_WIDTH, device=world.device)
    return ((index * (rank + 1) + micro) % 5 - 1).float()


def check_attention(config: Config, world: World) -> None:
    """Logits of a two-layer model over the ring against the same model in one process, layer by layer.

    Raises: ValueError naming the largest error and the first layer that is off, on every rank alike.
    """
    dtype = models.DTYPES[config.model.dtype]
    small = small_config(models.config_of(config.model, config.sequence.length))
    generator = torch.Generator().manual_seed(config.train.seed)
    tokens = TOKENS_PER_RANK * world.ring.size
    ids = torch.randint(small.vocab_size, (1, tokens), generator=generator).to(world.device)
    layout = world.layout(tokens)
    torch.manual_seed(config.train.seed)
    alone = models.build_decoder(copy.deepcopy(small), dtype=dtype, attention="sdpa", device=world.device).eval()
    ringed = models.build_decoder(copy.deepcopy(small), dtype=dtype, attention=models.ATTENTION, device=world.device)
    ringed.eval().load_state_dict(alone.state_dict())
    with torch.no_grad():
        whole = alone(ids, use_cache=False, output_hidden_states=True)
        part = ringed(
            layout.shard(ids),
            position_ids=layout.position_ids[None],
            layout=layout,
            use_cache=False,
            output_hidden_states=True,
        )
    wholes, parts = (*whole.hidden_states, whole.logits), (*part.hidden_states, part.logits)
    errors = [_relative(mine, layout.shard(all_)) for mine, all_ in zip(parts, wholes, strict=True)]
    worst = world.gather(errors).max(0)
    names = ["the embedding", *(f"layer {index}" for index in range(len(errors) - 2)), "the logits"]
    off = [index for index, error in enumerate(worst) if not error <= TOLERANCE[config.model.dtype]]
    if off:
        raise ValueError(
            f"a 2-layer {config.model.architecture} over a ring of {world.ring.size} ranks differs from one process by "
            f"{worst.max():.2g} of the largest value, first at {names[off[0]]}: not training with it"
        )


def small_config(config: Any) -> Any:
    """Two narrow layers of the same architecture: the same heads, one layer of each kind of attention."""
    small = copy.deepcopy(config)
    small.head_dim = 16
    for rope in (small.rope_parameters, *small.rope_parameters.values()):
        for key in ("short_factor", "long_factor"):
            if isinstance(rope, dict) and key in rope:
                rope[key] = rope[key][: small.head_dim // 2]
    small.hidden_size = 16 * config.num_attention_heads
    small.intermediate_size = 32
    small.vocab_size = 64
    small.num_hidden_layers = 2
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    if getattr(config, "num_experts", None):  # all of them: a choice may turn over on a rounding
        small.num_experts = small.num_experts_per_tok = 2
        small.moe_intermediate_size = 32
        small.mlp_only_layers, small.decoder_sparse_step = [], 1
    if getattr(config, "sliding_window", None):
        small.sliding_window = min(config.sliding_window, SMALL_WINDOW)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        small.layer_types = (kinds * 2)[:2]
    return small


def _relative(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest wanted value; infinite if anything is not finite."""
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30)
    return error.item() if math.isfinite(error.item()) else math.inf
