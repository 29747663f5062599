"""What fills the parameters of a model that stands on "meta": random numbers, or the safetensors of a folder.

Module by module, so that at ZeRO 3 a rank never holds more than one module whole, and below it one copy of the model.
A folder is read through memory maps; nothing in it is run. Called by `model`; `export` writes what is read here.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import lora
from .config.heads import COMPUTED, INDEX, SINGLE

Part = tuple[str, tuple[Any, ...]]
"""A tensor of a folder: its name, and the index of the parameter that it is."""


def materialize(
    model: nn.Module, device: torch.device, fill: Callable[[str, nn.Module], None],
    cut: Callable[[nn.Module], None] | None = None,
) -> None:  # fmt: skip
    """Give the parameters and buffers of a model on "meta" their memory and numbers; tied ones stay tied.

    fill: called with name and module, whose own parameters and buffers are empty
    cut: called after it, to leave of them what this rank keeps
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in _inside_out("", model):
        fresh = False
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                fresh = True
            module._parameters[key] = made[parameter]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device=device)
                fresh = True
        if fresh:
            with torch.no_grad():
                fill(name, module)
            if cut is not None:
                cut(module)


def _inside_out(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children before their parent, as transformers draws random weights."""
    for key, child in module.named_children():
        yield from _inside_out(f"{name}.{key}" if name else key, child)
    yield name, module


class Folder:
    """The tensors of a folder of safetensors, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        if (path / INDEX).is_file():
            self._places = dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
        else:
            self._places = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the head of its file. Raises: ValueError, see `read`."""
        return tuple(self._find(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises: ValueError for a file that is not there, is broken or does not hold it."""
        return self._find(name).get_tensor(name)

    def _find(self, name: str) -> Any:
        file = self._open(self._places[name])
        if name not in set(file.keys()):
            raise ValueError(f"{self.path / self._places[name]} does not hold {name}, which {INDEX} puts there")
        return file

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.path / name} cannot be read: {error}") from None
        return self._files[name]


def parts(name: str, shape: Iterable[int]) -> list[Part]:
    """How folders hold a parameter: as it is, but for experts, which are one tensor in memory and many in a folder."""
    layer, _, kind = name.rpartition(".experts.")
    if not layer or kind not in ("gate_up_proj", "down_proj"):
        return [(name, ())]
    experts, rows, *_ = shape
    stem = f"{layer}.experts"
    if kind == "down_proj":
        return [(f"{stem}.{expert}.down_proj.weight", (expert,)) for expert in range(experts)]
    halves = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return [(f"{stem}.{e}.{half}.weight", (e, run)) for e in range(experts) for half, run in halves.items()]


def check_folder(folder: Folder, model: Any) -> None:
    """Refuse a folder whose tensors are not the parameters of the model on "meta", by name and shape.

    Raises: ValueError.
    """
    wanted = {
        part: tuple(parameter[index].shape)
        for name, parameter in model.named_parameters()
        if not lora.is_adapter(name)
        for part, index in parts(lora.plain(name), parameter.shape)
    }
    tied = dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}
    missing = [name for name in wanted if name not in folder]
    strange = [name for name in folder if name not in wanted and name not in tied and not name.endswith(COMPUTED)]
    for kind, names in (("lacks", missing), ("holds what the model has no place for:", strange)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"model.pretrained = {str(folder.path)!r} {kind} {', '.join(names[:3])}{more}")
    for name, shape in wanted.items():
        if (found := folder.shape(name)) != shape:
            raise ValueError(
                f"model.pretrained = {str(folder.path)!r}: {name} is {list(found)}, the model has {list(shape)}"
            )
    for copy, origin in tied.items():
        if copy in folder and not torch.equal(folder.read(copy), folder.read(origin)):
            raise ValueError(
                f"model.pretrained = {str(folder.path)!r}: {copy} differs from {origin}, but tie_word_embeddings "
                "= true makes them one"
            )


def fill_from(folder: Folder, model: Any) -> Callable[[str, nn.Module], None]:
    """For `materialize`: parameters from a folder that `check_folder` has passed, adapters as they begin."""

    def fill(name: str, module: nn.Module) -> None:
        if lora.is_adapter(name):
            return lora.fill(name, module)
        if any(buffer is not None for buffer in module._buffers.values()):
            model._init_weights(module)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                for part, index in parts(lora.plain(f"{name}.{key}"), parameter.shape):
                    parameter[index].copy_(folder.read(part))

    return fill


def fill_later(model: Any) -> Callable[[str, nn.Module], None]:
    """For `materialize`: of a model that a checkpoint will fill. Parameters are NaN until then: one it left is seen."""

    def fill(name: str, module: nn.Module) -> None:
        if any(buffer is not None for buffer in module._buffers.values()):
            model._init_weights(module)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(math.nan)

    return fill


def fill_at_random(model: Any) -> Callable[[str, nn.Module], None]:
    """For `materialize`: the random numbers of the model's family, from torch's generator."""
    return lambda name, module: model._init_weights(module)
