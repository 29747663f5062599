"""The folders that a configuration names: are they there, do they hold something, can they be written?"""

import os
import tempfile
from pathlib import Path

from . import heads
from .pretrained import resolve
from .refusal import ConfigError
from .run import Config
from .sections import Source

ACCEPTED = {
    "text": "there: a folder of text files, one such file or 'stdlib' is accepted",
    "jsonl": "there: a folder of .jsonl files or one such file is accepted",
    "parquet": "there: a folder of .parquet files or one such file is accepted",
    "datasets": "a folder: one that the datasets library can load is accepted",
}
"""format -> what a path must be."""


def check_paths(config: Config, *, trains: bool = True) -> None:
    """Refuse folders that are not there, hold nothing to read, or cannot be written.

    trains: whether [data] is read; otherwise a checkpoint is evaluated
    Apart from `load`, because a login node need not have them. Raises: ConfigError.
    """
    try:
        _check_all(config, trains=trains)
    except OSError as error:  # of a folder above one of them, say
        raise ConfigError(f"{str(error.filename)!r} cannot be looked at: {error.strerror}") from None


def _check_all(config: Config, *, trains: bool) -> None:
    _check_writable(config.run_dir, f"metrics.dir = {config.metrics.dir!r}")
    if (config.run_dir / "metrics.jsonl").is_dir():
        raise ConfigError(f"{config.run_dir / 'metrics.jsonl'} is a folder: a file, or none, is accepted there")
    if config.checkpoint.every is not None and trains:
        _check_writable(config.checkpoint_dir, f"checkpoint.dir = {str(config.checkpoint_dir)!r}")
    model = resolve(config).model
    if model.pretrained is not None:
        heads.check(model, config.lora if config.train.trainable == "lora" else None)
    resume = config.checkpoint.resume
    if resume not in ("auto", "no") and not Path(resume).is_dir() and not was_pruned(Path(resume), config):
        raise ConfigError(
            f"checkpoint.resume = {resume!r} is not a folder: 'auto', 'no' or the folder of one checkpoint is accepted"
        )
    for index, source in enumerate(config.data.all_sources if trains else []):
        _check_source(source, f"data.sources.{index}" if config.data.sources else "data")
    evaluates = not trains or config.evaluation.every is not None
    for index, source in enumerate(config.evaluation.sources if evaluates else []):
        _check_source(source, f"evaluation.sources.{index}")
    if config.data.tokenizer != "bytes" and not Path(config.data.tokenizer).is_dir():
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} is not a folder: 'bytes' or a local folder is accepted"
        )


def was_pruned(path: Path, config: Config) -> bool:
    """Whether a checkpoint that is gone may have made room for newer ones of the run: then a restart takes those."""
    folder = config.checkpoint_dir.resolve()
    newer = any(other.name > path.name for other in folder.glob("step-????????"))
    return newer and path.resolve().parent == folder and not path.exists()


def _check_writable(folder: Path, named: str) -> None:
    """Make the folder, and a file in it: one that is there may still take none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{named} cannot be written: {error.strerror}") from None


def _check_source(source: Source, name: str) -> None:
    place = Path(source.path)
    if source.path == "stdlib" or (place.is_file() and source.format != "datasets"):
        return
    if not place.is_dir():
        raise ConfigError(f"{name}.path = {source.path!r} is not {ACCEPTED[source.format]}")
    os.listdir(place)  # a glob takes what it may not read for empty
    if source.format != "datasets" and not _holds(place, source.glob, name):
        raise ConfigError(f"{name}.path = {source.path!r} holds no file that fits {name}.pattern = {source.glob!r}")


def _holds(folder: Path, pattern: str, name: str) -> bool:
    try:
        return any(file.is_file() for file in folder.glob(pattern))
    except (ValueError, IndexError) as error:  # the second for "."
        raise ConfigError(
            f"{name}.pattern = {pattern!r} is no pattern of files ({error}): one like '**/*.txt', or '*.txt' for the "
            "folder itself, is accepted"
        ) from None
