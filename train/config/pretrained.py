"""The folder that model.pretrained names: is it a model that can be trained, and what does its config.json say?

Only JSON and names of files are looked at. Called by `folders`, `plan` and `train/__main__`.
"""

import difflib
import json
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from .architecture import MODEL_SHAPE
from .refusal import ConfigError, sentence
from .run import Config
from .sections import Model

FAMILIES = get_args(get_args(Model.model_fields["architecture"].annotation)[0])
"""`model_type`s that can be trained."""

ABOUT = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of config.json that say nothing of the model itself."""

SHAPES = (
    *MODEL_SHAPE,
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
)
"""Keys that weights were made for: [model.config] cannot change them."""


def resolve(config: Config) -> Config:
    """The configuration with architecture and [model.config] as the folder of model.pretrained has them.

    Raises: ConfigError, one sentence, for a folder that holds no model that can be trained, or an override that would
        not fit its weights.
    """
    model = config.model
    if model.pretrained is None:
        return config
    table = read(Path(model.pretrained))
    family = table["model_type"]
    if model.architecture not in (None, family):
        raise ConfigError(
            f"model.architecture = {model.architecture!r}, but model.pretrained = {model.pretrained!r} holds "
            f"{family!r}: leave it out"
        )
    check_overrides(model, table)
    merged = {key: value for key, value in table.items() if key not in ABOUT} | model.config
    tables = config.model_dump(exclude_unset=True)
    tables["model"] |= {"architecture": family, "config": merged}
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"model.pretrained = {model.pretrained!r}: {sentence(error, Config)}") from None


def read(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises: ConfigError if it is none, or if the folder holds no weights to read."""
    name = f"model.pretrained = {str(folder)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{name} is not a folder: a local one with config.json and safetensors is accepted")
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: its config.json cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: its config.json holds no table but {type(table).__name__}")
    family = table.get("model_type")
    if "auto_map" in table:
        raise ConfigError(
            f"{name} brings code of its own (auto_map), and none is run: {', '.join(FAMILIES)} are built in"
        )
    if family not in FAMILIES:
        text = ": save its text part alone, as gemma3_text" if family == "gemma3" else ""
        raise ConfigError(f"{name} holds model_type = {family!r}{text}; accepted is {', '.join(FAMILIES)}")
    if "quantization_config" in table:
        raise ConfigError(f"{name} holds quantized weights: weights in bfloat16, float16 or float32 are accepted")
    if not any((folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json")):
        pickled = next((file.name for file in sorted(folder.glob("*.bin"))), None)
        found = f"it has {pickled}, which could run code when it is read" if pickled else "it has none"
        raise ConfigError(f"{name}: safetensors are accepted, {found}")
    return table


def check_overrides(model: Model, table: dict[str, Any]) -> None:
    """Refuse keys of [model.config] that config.json does not have, and those that its weights were made for."""
    for key, value in model.config.items():
        if key not in table:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(table))}"
            raise ConfigError(f"model.config.{key} is not a key of {model.pretrained}/config.json: {hint}")
        if key in SHAPES and value != table[key]:
            raise ConfigError(
                f"model.config.{key} = {value!r} does not fit the weights of model.pretrained, which have "
                f"{table[key]!r}: leave it out"
            )
