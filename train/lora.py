"""LoRA through peft: low-rank adapters beside frozen layers, on "meta" until `weights.materialize` fills them.

A parameter of the model keeps its name but for what peft puts between; `plain` and `is_adapter` know it. Called by
`model`, `weights` and `export`.
"""

import math
from typing import Any

import torch
from torch import nn

from .config import Lora

ADAPTER = "default"
"""peft's name of the one adapter."""


def add(decoder: Any, lora: Lora) -> None:
    """Freeze a model on "meta" and put adapters beside the layers that [lora] names. Raises: ValueError."""
    from peft import inject_adapter_in_model

    linear = {name.rpartition(".")[2] for name, module in decoder.named_modules() if type(module) is nn.Linear}
    for target in lora.targets:
        if target not in linear:
            raise ValueError(
                f"lora.targets holds {target!r}, which is no linear layer of {decoder.config.model_type!r}: "
                f"accepted is {', '.join(sorted(linear))}"
            )
    with torch.device("meta"):
        inject_adapter_in_model(peft_config(lora), decoder, ADAPTER)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def peft_config(lora: Lora, base: str | None = None) -> Any:
    """[lora] as peft knows it. base: folder of the model that the adapters belong to."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def plain(name: str) -> str:
    """The name that a parameter had before the adapters came."""
    return name.replace(".base_layer.", ".")


def stored(name: str) -> str:
    """The name that a parameter of an adapter has in a folder of peft."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def fill(name: str, module: nn.Module) -> None:
    """For `weights.materialize`: adapters that change nothing yet. A is drawn as a linear layer of torch, B is zero."""
    (parameter,) = module.parameters(recurse=False)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
    else:
        nn.init.zeros_(parameter)
