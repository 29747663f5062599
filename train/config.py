"""The typed configuration of a run: one TOML file, `--set` overrides, and every rule between keys.

Here lives what can be judged before a GPU is touched. Nothing of torch, transformers or deepspeed is imported, because
`launch` reads this file on a login node. Called by `launch` and by `train/__main__`.
"""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .sentence import sentence

BYTE_VOCABULARY = 258
"""Ids of the built-in byte tokenizer: 0-255 the bytes, 256 end of document, 257 padding."""

MODEL_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys that [model.config] must spell out, so that no run takes its shape from a default of transformers."""

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
"""Head dimensions that ringflash.attention computes."""

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

MODEL_REFUSED = {
    "attention_dropout": "attention over a ring has no dropout",
    "attn_logit_softcapping": "the kernels cap no scores",
    "final_logit_softcapping": "the chunked loss caps no logits",
}
"""Keys of [model.config] that would change the model, and why they cannot be honoured."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one sentence for the person who wrote the file."""


class Batch(NamedTuple):
    """Sequences a step, sequences a forward pass of one data replica, forward passes a step."""

    global_batch: int
    micro_batch: int
    accumulation: int


class Section(BaseModel):
    """One table of the file: frozen, strict types, only listed keys; the docstring under a key describes it."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    architecture: Literal["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]
    """`model_type` of a decoder model of transformers."""
    config: dict[str, Any]
    """The table [model.config], handed to `AutoConfig.for_model`."""
    dtype: Literal["float32", "bfloat16"]
    """Type of the parameters in forward and backward; the optimizer's copy is float32."""


class Data(Section):
    path: str
    """Folder of text files, or the word "stdlib": the source files of Python's standard library."""
    pattern: Annotated[str, Field(pattern=r"^[^/]")] = "**/*.txt"
    """Which files of the folder are read, as a glob; each file is one document."""
    tokenizer: str = "bytes"
    """ "bytes", or a local folder with a tokenizer of transformers."""
    shuffle: bool = True
    """Whether the documents are read in an order drawn from train.seed, or sorted by name."""
    document_mask: bool = True
    """Whether attention stays inside each document, or is causal over the whole packed sequence."""


class Sequence(Section):
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Tokens of one packed sequence, over all ranks that share it."""
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = "zigzag"
    """Which tokens of the sequence each rank holds."""


class Parallel(Section):
    ring: Count
    """Ring size: blocks of keys and values rotate over this many ring ranks."""
    ulysses: Count = 1
    """Ulysses size: attention heads are spread over this many ranks."""
    data: Count | None = None
    """Data replicas; left out: world size / (ring * ulysses)."""
    zero: Annotated[int, Field(ge=0, le=3)] = 2
    """DeepSpeed ZeRO stage, over all ranks."""


class Optimizer(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: Positive
    """Learning rate at its highest, after the warmup."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW only: decay of the two running moments."""
    eps: Positive = 1e-8
    """AdamW only: added to the root of the second moment."""
    momentum: Fraction = 0.0
    """SGD only."""
    weight_decay: NotNegative = 0.0
    """AdamW: decoupled from the gradient. SGD: added to the gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0 to lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warmup."""
    min_lr: NotNegative = 0.0
    """Cosine and linear only: the learning rate of the last step."""
    clip_norm: NotNegative = 0.0
    """Largest global gradient norm; 0 = no clipping."""


class Train(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    """Name of the run and of its folder: letters, digits, '.', '_', '-'."""
    steps: Count
    """Optimizer steps of the run."""
    global_batch: Count | None = None
    """Sequences a step, over all data replicas; derived from the next two when left out."""
    micro_batch: Count | None = None
    """Sequences a forward pass of one data replica; 1 where attention stays inside documents."""
    accumulation: Count | None = None
    """Forward passes a step of one data replica."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the weights and of the order of the documents."""
    deterministic: bool = False
    """Whether repeated runs give bitwise the same gradients."""
    timeout_s: Count = 600
    """Seconds after which a rank that waits for another gives up."""
    self_test: bool = True
    """Whether the run starts with the probe that compares the engine's gradient with the closed form."""


class Memory(Section):
    checkpoint: Literal["none", "full", "selective"] = "selective"
    """Activation checkpointing; selective keeps attention's (out, lse), so the backward runs no second ring."""
    loss_chunk: Count = 1024
    """Local tokens whose logits exist at one time."""


class Metrics(Section):
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Mode of the wandb run; online needs a key."""
    project: str = "ringflash"
    """wandb project."""
    peak_tflops: Positive | None = None
    """Dense peak of one GPU in the model's dtype, TFLOP/s; left out: known cards by name, otherwise MFU is null."""
    dir: str = "runs"
    """Folder that holds the folder of the run."""


class Launch(Section):
    nodes: Count = 1
    """Machines."""
    processes_per_node: Count
    """Processes on each machine: its GPUs."""
    scheduler: Literal["torchrun"] = "torchrun"
    """What starts the processes."""
    master_address: str | None = None
    """Name or address of the first machine; needed when there are more."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Free port on it; needed when there are more machines, otherwise one is chosen."""


class Config(Section):
    """A whole run. Frozen; made by `load`."""

    model: Model
    data: Data
    sequence: Sequence
    parallel: Parallel
    optimizer: Optimizer
    train: Train
    memory: Memory = Memory()
    metrics: Metrics = Metrics()
    launch: Launch

    @model_validator(mode="after")
    def _rules(self) -> "Config":
        _check_launch(self)
        self.batch(self.world_size)
        for check in (_check_model, _check_sequence, _check_optimizer):
            check(self)
        return self

    @property
    def world_size(self) -> int:
        """Processes that [launch] starts."""
        return self.launch.nodes * self.launch.processes_per_node

    @property
    def sequence_parallel(self) -> int:
        """Ranks that share one sequence."""
        return self.parallel.ring * self.parallel.ulysses

    @property
    def run_dir(self) -> Path:
        """Folder for everything that the run writes."""
        return Path(self.metrics.dir) / self.train.name

    def data_parallel(self, world: int) -> int:
        """Data replicas in a world of this many processes. ConfigError if the mesh does not fill it."""
        shared, data = self.sequence_parallel, self.parallel.data
        mesh = f"parallel.ring = {self.parallel.ring} * parallel.ulysses = {self.parallel.ulysses}"
        if shared > world:
            raise ConfigError(f"{mesh} = {shared} ranks is more than the {world} processes of the world")
        if data is None and world % shared:
            raise ConfigError(f"a world of {world} processes does not divide by {mesh} = {shared}")
        if data is not None and data * shared != world:
            raise ConfigError(
                f"{mesh} * parallel.data = {data} is {data * shared} ranks, the world has {world} processes"
            )
        return world // shared

    def batch(self, world: int) -> Batch:
        """The three batch sizes in a world of this many processes, missing ones derived. ConfigError if they differ."""
        data = self.data_parallel(world)
        total, micro, steps = self.train.global_batch, self.train.micro_batch, self.train.accumulation
        if micro is None:
            micro = _quotient(total, steps * data) if total and steps else 1
        if steps is None:
            steps = _quotient(total, micro * data) if total else 1
        if total is None:
            total = micro * steps * data
        if total != micro * steps * data:
            raise ConfigError(self._batch_message(world, data))
        if micro > 1 and self.data.document_mask:
            raise ConfigError(
                f"train.micro_batch = {micro} must be 1 while data.document_mask = true: "
                "raise train.accumulation instead"
            )
        return Batch(total, micro, steps)

    def _batch_message(self, world: int, data: int) -> str:
        given = {name: getattr(self.train, name) for name in Batch._fields}
        listed = ", ".join(f"train.{name} = {'left out' if value is None else value}" for name, value in given.items())
        return (
            f"global_batch must be micro_batch * accumulation * data: {listed}, data = {data} "
            f"(world {world} / (ring {self.parallel.ring} * ulysses {self.parallel.ulysses}))"
        )


def _quotient(total: int, divisor: int) -> int:
    """total / divisor rounded up, so that a remainder shows as a product that is too large."""
    return -(-total // divisor)


def _check_model(config: Config) -> None:
    table = config.model.config
    for key in MODEL_SHAPE:
        if key not in table:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"; did you mean it by {near[0]!r}?" if near else ""
            raise ConfigError(f"model.config.{key} is missing, an integer >= 1 is needed{hint}")
        if type(table[key]) is not int or table[key] < 1:
            raise ConfigError(f"model.config.{key} = {table[key]!r}: an integer >= 1 is accepted")
    if config.data.tokenizer == "bytes" and table["vocab_size"] < BYTE_VOCABULARY:
        raise ConfigError(
            f"model.config.vocab_size = {table['vocab_size']} does not hold the tokenizer 'bytes': "
            f"at least {BYTE_VOCABULARY} is needed"
        )
    for key, reason in MODEL_REFUSED.items():
        if table.get(key):
            raise ConfigError(f"model.config.{key} = {table[key]!r}: {reason}; leave it out")
    if config.parallel.zero == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "parallel.zero = 0 with model.dtype = 'bfloat16' would accumulate gradients in bfloat16: "
            "parallel.zero = 1, 2, 3 or model.dtype = 'float32' is accepted"
        )
    _check_head_dim(config)
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


def _check_head_dim(config: Config) -> None:
    table, architecture = config.model.config, config.model.architecture
    if "head_dim" not in table and architecture in ("qwen3", "gemma3_text"):
        raise ConfigError(f"model.config.head_dim is missing: {architecture} does not derive it from hidden_size")
    head_dim = table.get("head_dim", table["hidden_size"] / table["num_attention_heads"])
    if head_dim not in HEAD_DIMS:
        name = "model.config.head_dim" if "head_dim" in table else "model.config.hidden_size / num_attention_heads"
        raise ConfigError(f"{name} = {head_dim!r}: accepted is {', '.join(map(str, HEAD_DIMS))}")


def _check_sequence(config: Config) -> None:
    length, layout = config.sequence.length, config.sequence.layout
    divisor = config.sequence_parallel * (2 if layout == "zigzag" else 1)
    if length % divisor:
        raise ConfigError(
            f"sequence.length = {length} must divide by {divisor} for layout '{layout}' "
            f"over {config.sequence_parallel} ranks: {_quotient(length, divisor) * divisor} is the next that does"
        )


def _check_optimizer(config: Config) -> None:
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


def _check_launch(config: Config) -> None:
    if config.launch.nodes > 1:
        for key in ("master_address", "master_port"):
            if getattr(config.launch, key) is None:
                raise ConfigError(f"launch.nodes = {config.launch.nodes} needs launch.{key}")
    elif config.launch.master_address is not None and config.launch.master_port is None:
        raise ConfigError("launch.master_address is given but one node without launch.master_port does not use it")


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a TOML file, changed by overrides of the form `section.key=value`.

    A value is read as TOML; what is not TOML is a string, so that `data.path=/tmp/text` needs no quotes.
    Raises: ConfigError, one sentence, for everything that is wrong with file, override, key or value.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not TOML: {error}") from None
    for override in overrides:
        _override(tables, override)
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(sentence(error, Config)) from None


def check_paths(config: Config) -> None:
    """Refuse folders that are not there, hold nothing to read, or cannot be written.

    Apart from `load`, because a login node need not have them. Raises: ConfigError.
    """
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"metrics.dir = {config.metrics.dir!r} cannot be written: {error.strerror}") from None
    if config.data.path != "stdlib":
        folder = Path(config.data.path)
        if not folder.is_dir():
            raise ConfigError(
                f"data.path = {config.data.path!r} is not a folder: a folder of text files or 'stdlib' is accepted"
            )
        if not any(file.is_file() for file in folder.glob(config.data.pattern)):
            raise ConfigError(
                f"data.path = {config.data.path!r} holds no file that fits data.pattern = {config.data.pattern!r}"
            )
    if config.data.tokenizer != "bytes" and not Path(config.data.tokenizer).is_dir():
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} is not a folder: 'bytes' or a local folder is accepted"
        )


def _override(tables: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = (part.strip() for part in name.split("."))
    if not equals or not sections or not all((*sections, key)):
        raise ConfigError(f"--set {override!r}: the form section.key=value is accepted")
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a table")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    tables[key] = parsed["value"] if parsed.keys() == {"value"} else text.strip()
