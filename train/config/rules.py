"""What must hold between keys. RULES is the table: `run.Config` asks them in this order; the first that fails speaks.

A rule is a function of the whole configuration that raises ConfigError: one sentence with the keys, their values and
what would be accepted. It looks at no file and no device, and may rely on the rules before it. Those of [model] are in
`architecture`.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from . import architecture
from .refusal import ConfigError

if TYPE_CHECKING:
    from .run import Config
    from .sections import Source


VARIABLE_KEYS = {
    "NCCL_SOCKET_IFNAME": "interface",
    "GLOO_SOCKET_IFNAME": "interface",
    "NCCL_IB_HCA": "ib_hca",
    "NCCL_IB_TIMEOUT": "ib_timeout",
    "NCCL_IB_RETRY_CNT": "ib_retries",
    "NCCL_DEBUG": "nccl_debug",
}
"""Environment variables that a key of [launch] sets, so that they are said in one place."""

GIVEN_VARIABLES = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
}  # fmt: skip
"""Environment variables that torchrun sets for each process, whatever they were."""

SLURM_KEYS = {
    "--nodes": "launch.nodes",
    "--ntasks": "launch.nodes",
    "--ntasks-per-node": "launch.nodes",
    "--cpus-per-task": "launch.cpus_per_node",
    "--gpus-per-node": "launch.processes_per_node",
    "--job-name": "train.name",
    "--output": "metrics.dir",
}
"""Options of sbatch that follow from other keys."""

SLURM_SIGNAL_S = 65535
"""Longest time before the end of a job at which `sbatch --signal` sends one. Source: its manual page."""


def _check_launch(config: "Config") -> None:
    launch = config.launch
    by_hand, several = launch.scheduler == "torchrun", launch.nodes > 1
    if by_hand and several and launch.master_address is None:
        raise ConfigError(f"launch.nodes = {launch.nodes} needs launch.master_address")
    if launch.master_address is not None and not (by_hand and several):
        why = f"launch.scheduler = {launch.scheduler!r} knows it" if not by_hand else "launch.nodes = 1 has no other"
        raise ConfigError(f"launch.master_address = {launch.master_address!r} is not used: {why}; leave it out")
    if not by_hand and launch.cpus_per_node is None:
        raise ConfigError(f"launch.scheduler = {launch.scheduler!r} needs launch.cpus_per_node")
    if launch.scheduler == "kubernetes" and config.kubernetes.image is None:
        raise ConfigError("launch.scheduler = 'kubernetes' needs kubernetes.image")
    for name in launch.environment:
        if name in VARIABLE_KEYS:
            raise ConfigError(f"launch.environment.{name} is launch.{VARIABLE_KEYS[name]}: say it there")
        if name in GIVEN_VARIABLES:
            raise ConfigError(f"launch.environment.{name} is set by torchrun for each process: leave it out")


def _check_written_out(config: "Config") -> None:
    """No shell reads the file: a folder of the name "~" or "$USER" would be made, and hold what was trained."""
    for name, path in (("metrics.dir", config.metrics.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if path is not None and re.match(r"~|.*\$[A-Za-z_{]", path):
            raise ConfigError(f"{name} = {path!r}: '~' and variables are not filled in; a path written out is accepted")


def _check_slurm(config: "Config") -> None:
    warned = config.checkpoint.every is not None and not any(
        option.startswith("--signal=") for option in config.slurm.options
    )
    if config.launch.scheduler == "slurm" and warned and config.launch.stop_timeout_s > SLURM_SIGNAL_S:
        raise ConfigError(
            f"launch.stop_timeout_s = {config.launch.stop_timeout_s}: slurm warns at most {SLURM_SIGNAL_S} seconds "
            "before the end"
        )
    for option in config.slurm.options:
        name = option.partition("=")[0]
        if name in SLURM_KEYS:
            raise ConfigError(f"slurm.options has {option!r}, but {name} follows from {SLURM_KEYS[name]}: leave it out")


def _check_batch(config: "Config") -> None:
    config.batch(config.world_size)


def _check_source_of_model(config: "Config") -> None:
    model = config.model
    if model.pretrained is None and model.architecture is None:
        raise ConfigError(
            "model.architecture is missing: a family with [model.config], or the folder model.pretrained, is needed"
        )


def _check_trainable(config: "Config") -> None:
    if config.train.trainable == "lora" and config.model.pretrained is None:
        raise ConfigError("train.trainable = 'lora' needs model.pretrained: adapters of random weights are of no use")
    if config.train.trainable != "lora" and "lora" in config.model_fields_set:
        raise ConfigError(f"[lora] is given but train.trainable = {config.train.trainable!r} does not use it")


def _check_gradients(config: "Config") -> None:
    if config.parallel.zero == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "parallel.zero = 0 with model.dtype = 'bfloat16' would accumulate gradients in bfloat16: "
            "parallel.zero = 1, 2, 3 or model.dtype = 'float32' is accepted"
        )


def _check_heads(config: "Config") -> None:
    table = config.model.config
    if not config.model.is_known:
        return
    heads, kv_heads, ulysses = table["num_attention_heads"], table["num_key_value_heads"], config.parallel.ulysses
    if heads % kv_heads:
        raise ConfigError(
            f"model.config.num_attention_heads = {heads} must divide by model.config.num_key_value_heads = {kv_heads}"
        )
    if heads % ulysses or (kv_heads % ulysses and ulysses % kv_heads):
        raise ConfigError(
            f"parallel.ulysses = {ulysses} must divide num_attention_heads = {heads}, "
            f"and divide num_key_value_heads = {kv_heads} or be a multiple of it"
        )


def _check_topology(config: "Config") -> None:
    """What `ringflash.Ring` would refuse, said before any process is started."""
    parallel = config.parallel
    if parallel.arrangement == "double" and parallel.topology is None:
        raise ConfigError("parallel.arrangement = 'double' needs parallel.topology: which ranks share a node")
    if parallel.arrangement in ("ring", "gather") and parallel.topology is not None:
        raise ConfigError(
            f"parallel.topology = {parallel.topology!r} is of no use to parallel.arrangement = "
            f"'{parallel.arrangement}'; leave it out, or say 'double'"
        )
    if isinstance(parallel.topology, int):
        size = config.sequence_parallel
        if size % parallel.topology or parallel.topology % parallel.ulysses:
            raise ConfigError(
                f"parallel.topology = {parallel.topology} must divide the {size} ranks of a sequence and be a multiple "
                f"of parallel.ulysses = {parallel.ulysses}"
            )


def _check_sequence(config: "Config") -> None:
    length, layout = config.sequence.length, config.sequence.layout
    divisor = config.sequence_parallel * (2 if layout == "zigzag" else 1)
    if over := length % divisor:
        following = length - over + divisor
        fits = f"{following} is the next that does"
        if following > architecture.MAX_SIZE:
            fits = (
                f"{length - over} is the one before that does" if length > over else "so many ranks share no sequence"
            )
        raise ConfigError(
            f"sequence.length = {length} must divide by {divisor} for layout '{layout}' "
            f"over {config.sequence_parallel} ranks: {fits}"
        )


def _check_optimizer(config: "Config") -> None:
    optimizer = config.optimizer
    unused = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[optimizer.name]
    for key in unused:
        if key in optimizer.model_fields_set:
            raise ConfigError(f"optimizer.{key} is given but optimizer.name = '{optimizer.name}' does not use it")
    if optimizer.schedule == "constant" and "min_lr" in optimizer.model_fields_set:
        raise ConfigError("optimizer.min_lr is given but optimizer.schedule = 'constant' does not use it")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr = {optimizer.min_lr} must not be above optimizer.lr = {optimizer.lr}")
    if optimizer.warmup_steps > config.train.steps:
        raise ConfigError(
            f"optimizer.warmup_steps = {optimizer.warmup_steps} must not be above train.steps = {config.train.steps}"
        )


def _check_data(config: "Config") -> None:
    data = config.data
    if (data.path is None) == (not data.sources):
        raise ConfigError(
            f"data.path = {data.path!r} beside {len(data.sources)} table(s) [[data.sources]]: one of both is needed"
        )
    if data.sources and "pattern" in data.model_fields_set:
        raise ConfigError("data.pattern is given but only data.path uses it: put it into the table [[data.sources]]")
    for index, source in enumerate(data.sources):
        _check_source(source, f"data.sources.{index}", tokenizer=data.tokenizer)


def _check_source(source: "Source", name: str, *, tokenizer: str) -> None:
    unused = {"text": ("field", "chat", "tokens", "split"), "datasets": ("pattern",)}.get(source.format, ("split",))
    for key in unused:
        if key in source.model_fields_set:
            raise ConfigError(f"{name}.{key} is given but {name}.format = {source.format!r} does not use it")
    if source.chat and source.tokens:
        raise ConfigError(
            f"{name}.chat = true and {name}.tokens = true: messages or token ids, one of both is accepted"
        )
    if source.chat and tokenizer == "bytes":
        raise ConfigError(f"{name}.chat = true needs a chat template: data.tokenizer = 'bytes' has none, a folder may")
    if source.path == "stdlib" and source.format != "text":
        raise ConfigError(f"{name}.path = 'stdlib' holds no {source.format}: {name}.format = 'text' is accepted")


def _check_memory(config: "Config") -> None:
    memory = config.memory
    if memory.checkpoint == "none":
        if memory.checkpoint_every > 1:
            raise ConfigError(
                f"memory.checkpoint_every = {memory.checkpoint_every} is given but memory.checkpoint = 'none' "
                "recomputes no layer: 'selective' or 'full' is needed"
            )
        if "activations" in memory.offload:
            raise ConfigError(
                "memory.offload holds 'activations' but memory.checkpoint = 'none' keeps no hidden states alone: "
                "'selective' or 'full' is needed"
            )
    layers = config.model.config["num_hidden_layers"] if config.model.is_known else memory.checkpoint_every
    if memory.checkpoint_every > layers:
        raise ConfigError(
            f"memory.checkpoint_every = {memory.checkpoint_every} is more than the model's {layers} layers: "
            f"1 to {layers} is accepted, {layers} keeps the first layer's states alone"
        )
    if "attention" in memory.offload and memory.checkpoint != "selective":
        raise ConfigError(
            f"memory.offload holds 'attention' but memory.checkpoint = {memory.checkpoint!r} does not keep it apart: "
            "'selective' is needed"
        )
    if "optimizer" in memory.offload and config.parallel.zero == 0:
        raise ConfigError(
            "memory.offload holds 'optimizer' but parallel.zero = 0 keeps it with the weights: 1, 2 or 3 is needed"
        )
    if len(set(memory.offload)) < len(memory.offload):
        raise ConfigError(f"memory.offload = {memory.offload} names one thing twice")


def _check_checkpoint(config: "Config") -> None:
    keep = config.checkpoint
    if keep.every is None:
        for key in ("keep_last", "keep_every"):
            if key in keep.model_fields_set:
                raise ConfigError(f"checkpoint.{key} is given but without checkpoint.every nothing is saved")
    elif keep.keep_every is not None and keep.keep_every % keep.every:
        raise ConfigError(
            f"checkpoint.keep_every = {keep.keep_every} must be a multiple of checkpoint.every = {keep.every}"
        )


def _check_evaluation(config: "Config") -> None:
    evaluation, needle = config.evaluation, config.evaluation.needle
    if evaluation.every is not None and not (evaluation.sources or needle.lengths):
        raise ConfigError(
            f"evaluation.every = {evaluation.every} has nothing to evaluate: the tables [[evaluation.sources]] or "
            "evaluation.needle.lengths are needed"
        )
    for key in ("tokens", "positions"):
        if key in evaluation.model_fields_set and not evaluation.sources:
            raise ConfigError(f"evaluation.{key} is given but there is no table [[evaluation.sources]]")
    for index, source in enumerate(evaluation.sources):
        name = f"evaluation.sources.{index}"
        _check_source(source, name, tokenizer=config.data.tokenizer)
        if "weight" in source.model_fields_set and evaluation.tokens is None:
            raise ConfigError(f"{name}.weight is given but without evaluation.tokens every document is read once")
    for name, values in (("positions", evaluation.positions or []), ("needle.lengths", needle.lengths)):
        _check_rising(f"evaluation.{name}", values)
    _check_rising("evaluation.needle.depths", needle.depths)


def _check_needle(config: "Config") -> None:
    needle = config.evaluation.needle
    if not needle.lengths:
        for key in ("depths", "samples", "seed"):
            if key in needle.model_fields_set:
                raise ConfigError(f"evaluation.needle.{key} is given but evaluation.needle.lengths is not")
    elif config.evaluation.every is not None and needle.lengths[-1] > config.sequence.length:
        raise ConfigError(
            f"evaluation.needle.lengths holds {needle.lengths[-1]}: at most sequence.length = {config.sequence.length} "
            "is accepted"
        )


def _check_rising(name: str, values: Sequence[float]) -> None:
    if any(left >= right for left, right in pairwise(values)):
        raise ConfigError(f"{name} = {values}: numbers that rise are accepted")


RULES: tuple[Callable[["Config"], None], ...] = (
    _check_launch,
    _check_written_out,
    _check_slurm,
    _check_batch,
    _check_data,
    _check_source_of_model,
    architecture.check_rope,
    _check_trainable,
    architecture.check_values,
    architecture.check_shape,
    architecture.check_keys,
    architecture.check_vocabulary,
    architecture.check_refused,
    _check_gradients,
    architecture.check_head_dim,
    architecture.check_frequencies,
    architecture.check_layers,
    architecture.check_experts,
    _check_heads,
    _check_topology,
    _check_sequence,
    _check_optimizer,
    _check_memory,
    _check_checkpoint,
    _check_evaluation,
    _check_needle,
)
