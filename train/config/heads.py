"""The heads of the safetensors in the folder of model.pretrained: are they the tensors of its config.json?

A head names each tensor with its dtype, shape and place, so gigabytes are judged by reading kilobytes, without torch
and before any process is started. What only the model itself knows is checked later, by `weights`. Called by `folders`,
and for the fingerprint by `resume`.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .refusal import ConfigError
from .sections import Lora, Model

INDEX = "model.safetensors.index.json"
"""File that says which shard holds which tensor."""

SINGLE = "model.safetensors"
"""File of a model that is not sharded."""

COMPUTED = ("rotary_emb.inv_freq",)
"""Ends of names that old folders hold, though the model computes them."""

SAMPLE_BYTES = 4096
"""Of each tensor so many bytes at its begin, in its middle and at its end go into a fingerprint."""

READERS = 16
"""Threads that read samples: on a file system of a network each waits for an answer."""

SHAPES = {
    "model.embed_tokens.weight": ("vocab_size", "hidden_size"),
    "model.norm.weight": ("hidden_size",),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "self_attn.q_proj.weight": ("queries", "hidden_size"),
    "self_attn.k_proj.weight": ("keys", "hidden_size"),
    "self_attn.v_proj.weight": ("keys", "hidden_size"),
    "self_attn.o_proj.weight": ("hidden_size", "queries"),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
}
"""End of a tensor's name -> its shape in keys of [model.config], and in HEADS: in all families alike."""

HEADS = {"queries": "attention", "keys": "key_value"}
"""Word of SHAPES -> whose number of heads, times head_dim, it is."""


class Head(NamedTuple):
    """Where a tensor is: its bytes are those from start to stop of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read(folder: Path) -> dict[str, Head]:
    """name -> head of each tensor of a folder. Raises: ConfigError for a file that is not there, or not whole."""
    try:
        if not (folder / INDEX).is_file():
            return _read_file(folder / SINGLE)
        places = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        files = {name: _read_file(folder / name) for name in sorted(set(places.values()))}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model.pretrained = {str(folder)!r}: its {INDEX} cannot be read: {error}") from None
    for name, file in places.items():
        if name not in files[file]:
            raise ConfigError(f"{folder / file} does not hold {name}, which {INDEX} puts there")
    return {name: files[file][name] for name, file in places.items()}


def _read_file(path: Path) -> dict[str, Head]:
    """Format: 8 bytes, little-endian, the length of a JSON object; the object; the tensors, to the end of the file.

    Source: https://huggingface.co/docs/safetensors, its section on the format.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = 8 + int.from_bytes(file.read(8), "little")
            if begin > size:
                raise ValueError(f"its head would end at byte {begin}, it has {size}")
            table = json.loads(file.read(begin - 8))
        heads = {
            name: Head(path, facts["dtype"], tuple(facts["shape"]), *(begin + place for place in facts["data_offsets"]))
            for name, facts in table.items()
            if name != "__metadata__"
        }
        end = max((head.stop for head in heads.values()), default=begin)
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, it has {size}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return heads


def check(model: Model, lora: Lora | None) -> None:
    """Refuse a folder whose tensors cannot be those of the model, by name and shape; lora: what is trained of it.

    model: as `resolve` returns it. A tensor is missed if every family has it, or another layer of the kind.
    Raises: ConfigError.
    """
    assert model.pretrained is not None
    named, heads = f"model.pretrained = {model.pretrained!r}", read(Path(model.pretrained))
    found = [name for name in heads if not name.endswith(COMPUTED)]
    layers, wanted = _layers(found), _wanted(model.config, found)
    strange = [
        name for number, names in layers.items() if number >= model.config["num_hidden_layers"] for name in names
    ]
    missing = sorted(wanted - set(found))
    for kind, names in (("lacks", missing), ("holds what the model has no place for:", strange)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(f"{named} {kind} {', '.join(names[:3])}{more}")
    for name in found:
        shape = _shape(name, model.config)
        if shape is not None and heads[name].shape != shape:
            raise ConfigError(f"{named}: {name} is {list(heads[name].shape)}, the model has {list(shape)}")
    if model.config.get("tie_word_embeddings") is True and "lm_head.weight" in heads:
        head, embedding = heads["lm_head.weight"], heads["model.embed_tokens.weight"]
        if _sample(head) != _sample(embedding):
            raise ConfigError(
                f"{named}: lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings = true makes "
                "them one"
            )
    if lora is not None:
        _check_targets(lora, model, heads)


def _check_targets(lora: Lora, model: Model, heads: dict[str, Head]) -> None:
    linear = {name.split(".")[-2] for name in heads if _is_linear(name, heads[name])}
    for target in lora.targets:
        if target not in linear:
            raise ConfigError(
                f"lora.targets holds {target!r}, which is no linear layer of {model.architecture!r}: "
                f"accepted is {', '.join(sorted(linear))}"
            )


def _layers(names: Iterable[str]) -> dict[int, list[str]]:
    """number -> names of the tensors of a layer."""
    layers: dict[int, list[str]] = {}
    for name in names:
        number = name.removeprefix("model.layers.").partition(".")[0]
        if name.startswith("model.layers.") and number.isdigit():
            layers.setdefault(int(number), []).append(name)
    return layers


def _wanted(config: dict[str, Any], found: list[str]) -> set[str]:
    """Names that must be there: layers with experts are alike, and so are those without."""
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    if config.get("tie_word_embeddings") is False:
        wanted.add("lm_head.weight")
    layers = _layers(found)
    kinds: dict[bool, set[str]] = {}
    inside = {number: {name.split(".", 3)[3] for name in names} for number, names in layers.items()}
    for parts in inside.values():
        kinds.setdefault(_has_experts(parts), set()).update(parts)
    for number in range(config["num_hidden_layers"]):
        parts = inside.get(number, set())
        kind = kinds.get(_has_experts(parts)) or kinds.get(True, set())
        wanted |= {f"model.layers.{number}.{part}" for part in kind}
    return wanted


def _has_experts(parts: set[str]) -> bool:
    return any(".experts." in part for part in parts)


def _shape(name: str, config: dict[str, Any]) -> tuple[int, ...] | None:
    """What a tensor must be, where config.json says it."""
    end = name if name in SHAPES else ".".join(name.split(".")[3:])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {key: config[f"num_{heads}_heads"] * head_dim for key, heads in HEADS.items()} | config
    return tuple(sizes[key] for key in SHAPES[end]) if end in SHAPES else None


def _is_linear(name: str, head: Head) -> bool:
    """Whether adapters can stand beside the layer of a tensor: no embedding, no expert and no router of experts."""
    other = ("embed_tokens.weight", ".mlp.gate.weight")
    return name.endswith(".weight") and len(head.shape) == 2 and ".experts." not in name and not name.endswith(other)


def fingerprint(folder: Path) -> str:
    """A checksum of what the tensors of a folder are, however they are spread over files, wherever the folder is.

    It notices a tensor more, less, of another name, dtype or shape, and other numbers in its first, middle or last
    SAMPLE_BYTES: any further training and any other base. It does not notice an edit between those, in a tensor of more
    than three times SAMPLE_BYTES. Raises: ConfigError, see `read`.
    """
    digest, heads = hashlib.sha256(), sorted(read(folder).items())
    with ThreadPoolExecutor(READERS) as readers:
        for (name, head), sample in zip(heads, readers.map(_sample, [head for _, head in heads]), strict=True):
            digest.update(json.dumps([name, head.dtype, head.shape]).encode() + sample)
    return digest.hexdigest()


def _sample(head: Head) -> bytes:
    with head.file.open("rb", buffering=0) as file:
        middle = (head.start + head.stop - SAMPLE_BYTES) // 2
        places = [head.start, max(middle, head.start), max(head.stop - SAMPLE_BYTES, head.start)]
        return b"".join(os.pread(file.fileno(), min(SAMPLE_BYTES, head.stop - place), place) for place in places)
