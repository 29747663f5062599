"""`python -m train.export CHECKPOINT OUT`: a checkpoint of a run becomes a folder that transformers or peft loads.

One process on a CPU, whatever the run had; a shard of the model is in memory at a time. Also `ringflash export`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, lora, model, weights
from .config import Data, Lora, Model
from .partitions import WEIGHT, Piece
from .storage import Reader, StorageError

SHARD_BYTES = 5 * 10**9
"""Most bytes of a file."""

TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a tokenizer: data, no programs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 refused with one sentence."""
    parser = argparse.ArgumentParser(prog="ringflash export", description="Make a checkpoint a model of transformers.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of one checkpoint, step-...")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that is made; it must not exist, or be empty")
    arguments = parser.parse_args(argv)
    try:
        said = export(arguments.checkpoint, arguments.out)
    except (ValueError, OSError) as error:
        print(f"ringflash: {error}", file=sys.stderr)
        return 2
    print(f"ringflash: {arguments.out} holds {arguments.checkpoint}{said}")
    return 0


def export(path: Path, out: Path, *, shard_bytes: int = SHARD_BYTES) -> str:
    """Write the model of a checkpoint, or its adapters, with its config and tokenizer, into a new folder.

    Returns what there is to say about loading it, or nothing.
    Raises: ValueError for a checkpoint that is not whole, or a folder that holds something; OSError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"OUT = {str(out)!r} is there and not empty: a new folder is accepted")
    found = checkpoint.read(path)
    if path.resolve() in out.resolve().parents:
        raise ValueError(
            f"OUT = {str(out)!r} lies in the checkpoint, and would be removed with it: another is accepted"
        )
    settings, data, adapters, length = run_of(found)
    config = model.config_of(settings, length)
    dtype = model.DTYPES[settings.dtype]
    decoder = model.on_meta(config, dtype=dtype, attention="sdpa")
    if adapters is not None:
        lora.add(decoder, adapters)
    trained = {name: p.shape for name, p in decoder.named_parameters() if p.requires_grad}
    with made_whole(out) as partial:
        if adapters is not None:
            lora.peft_config(adapters, settings.pretrained).save_pretrained(partial)
            config.save_pretrained(partial)  # the rotary frequencies may be others than the folder's
            named = ((lora.stored(name), tensor.to(dtype)) for name, tensor in read(path, trained, shard_bytes))
            save_shards(named, partial, stem="adapter_model", shard_bytes=None)
        else:
            write_config(config, decoder, settings, partial)
            parts = ((part, t[index]) for name, t in read(path, trained, shard_bytes) for part, index in cut(name, t))
            save_shards(((part, t.to(dtype)) for part, t in parts), partial, stem="model", shard_bytes=shard_bytes)
        copy_tokenizer(data, settings, partial)
    if adapters is None:
        return ""
    return f"; load its base, {settings.pretrained}, with config=AutoConfig.from_pretrained({str(out)!r})"


def run_of(found: checkpoint.Found) -> tuple[Model, Data, Lora | None, int]:
    """[model], [data], [lora] where adapters were trained, and sequence.length, of the run that saved a checkpoint.

    Raises: ValueError for a manifest without them.
    """
    tables = found.manifest.config
    try:
        adapters = Lora.model_validate(tables["lora"]) if tables["train"]["trainable"] == "lora" else None
        sections = Model.model_validate(tables["model"]), Data.model_validate(tables["data"])
        return *sections, adapters, int(tables["sequence"]["length"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"{found.path} does not say what it holds: no {error} in the config of its manifest") from None


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` once all of it is written, and nothing if it is not."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        out.rmdir()
    partial.rename(out)


def cut(name: str, tensor: Tensor) -> list[weights.Part]:
    """The tensors of a folder that a parameter becomes."""
    return weights.parts(name, tensor.shape)


def read(path: Path, shapes: dict[str, torch.Size], limit_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """name, what the optimizer has for it in fp32, of a checkpoint; up to `limit_bytes` at a time are in memory.

    shapes: of the parameters of the decoder that were trained. Raises: ValueError for files that are broken.
    """
    reader = Reader(path)
    batch: list[Piece] = []
    for number, (name, shape) in enumerate(shapes.items(), 1):
        batch.append(Piece(f"{WEIGHT}.decoder.{name}", shape.numel(), 0, torch.empty(shape.numel()), True))
        if number == len(shapes) or sum(piece.part.nbytes for piece in batch) >= limit_bytes:
            try:
                reader.fill(batch, [], None)
            except StorageError as error:
                raise ValueError(error.reason) from None
            for piece in batch:
                key = piece.key.removeprefix(f"{WEIGHT}.decoder.")
                yield key, piece.part.view(shapes[key])
            batch = []


def save_shards(named: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, shard_bytes: int | None) -> None:
    """Write tensors as safetensors, in as many files as their size asks for, with an index if there are several."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        partial = folder / f"{stem}.{len(shards)}.partial"
        save_file(shard, partial, metadata={"format": "pt"})
        partial.chmod(folder.stat().st_mode & 0o666)  # the library makes files for their owner alone
        shards.append(list(shard))
        shard.clear()

    for name, tensor in named:
        if shard_bytes is not None and shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    flush()
    names = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        places = {name: file for file, inside in zip(names, shards, strict=True) for name in inside}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    for i, file in enumerate(names):
        (folder / f"{stem}.{i}.partial").rename(folder / file)


def write_config(config: Any, decoder: Any, settings: Model, folder: Path) -> None:
    """config.json and generation_config.json; the latter as the run's own start had it."""
    from transformers import GenerationConfig

    config.architectures = [type(decoder).__name__]
    config.save_pretrained(folder)
    given = Path(settings.pretrained or "") / "generation_config.json"
    if settings.pretrained is not None and given.is_file():
        shutil.copyfile(given, folder / given.name)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)


def copy_tokenizer(data: Data, settings: Model, folder: Path) -> None:
    """The tokenizer that the run read its data with; that of model.pretrained with the bytes."""
    source = settings.pretrained if data.tokenizer == "bytes" else data.tokenizer
    if source is None:
        return
    for name in TOKENIZER:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


if __name__ == "__main__":
    sys.exit(main())
