"""A folder of checkpoints on disk: which of them are whole, how one becomes whole at once, which are removed.

    <folder>/step-00000020/             torch.distributed.checkpoint's files, manifest.json
    <folder>/step-00000030.partial/     one that is being written or removed

The manifest is written last, then the folder gets its name: a kill at any moment leaves the checkpoints that were
there. What is newest is read from the manifests. One process calls this, rank 0, through `saver` and `resume`. No torch
here.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

MANIFEST = "manifest.json"
PARTIAL = ".partial"


class Mesh(BaseModel):
    """How the ranks of a run were used."""

    model_config = ConfigDict(strict=True, frozen=True)

    processes: PositiveInt
    data: PositiveInt
    ring: PositiveInt
    ulysses: PositiveInt
    zero: NonNegativeInt

    def __str__(self) -> str:
        mesh = f"data {self.data}, ring {self.ring}, ulysses {self.ulysses}"
        return f"{self.processes} processes ({mesh}) at ZeRO {self.zero}"


class Manifest(BaseModel):
    """What a checkpoint is.

    nonfinite: steps so far that were passed over; config: the run's, as JSON; files: name -> bytes of everything beside
    the manifest; base: of adapters, the fingerprint of the weights that they stand beside (older ones lack it)
    """

    model_config = ConfigDict(strict=True, frozen=True)

    format: Literal[2] = 2
    step: NonNegativeInt
    tokens_seen: NonNegativeInt
    nonfinite: NonNegativeInt
    data: dict[str, Any]
    mesh: Mesh
    config: dict[str, Any]
    versions: dict[str, str]
    base: str | None = None
    files: dict[str, int]


class Found(NamedTuple):
    """A whole checkpoint."""

    path: Path
    manifest: Manifest


def read(path: Path) -> Found:
    """The checkpoint in a folder. ValueError, one sentence, if it is not whole."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is no whole checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise ValueError(f"{path} is no whole checkpoint: its {MANIFEST} cannot be read: {reason}") from None
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is no whole checkpoint: {name} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{path} is no whole checkpoint: {name} has {file.stat().st_size} bytes of {size}")
    return Found(path, manifest)


def whole(folder: Path) -> tuple[list[Found], list[str]]:
    """The whole checkpoints of a folder by step, and a sentence for each other one. No folder: none."""
    found, torn = [], []
    for path in sorted(folder.glob("step-*")):
        try:
            if path.suffix == PARTIAL:
                raise ValueError(f"{path} is no whole checkpoint: writing or removing it was cut off")
            found.append(read(path))
        except ValueError as error:
            torn.append(str(error))
    return sorted(found, key=lambda one: one.manifest.step), torn


def partial_of(folder: Path, step: int) -> Path:
    """Where the files of a step are written."""
    return folder / f"step-{step:08}{PARTIAL}"


def begin(folder: Path, step: int) -> Path:
    """An empty folder for the files of a step; what was cut off earlier goes, if it can. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = partial_of(folder, step)
    for path in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=path != partial)
    partial.mkdir()
    return partial


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest beside the files, and give the folder its name, which makes it a checkpoint.

    Raises: OSError; ValueError for a file that is not there as its rank wrote it.
    """
    for name, size in manifest.files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != size:
            raise ValueError(
                f"{partial / name} is not seen by rank 0 as its rank wrote it: checkpoint.dir must be on a file "
                "system that all nodes share"
            )
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest.model_dump(mode="json"), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    path = partial.with_suffix("")
    if path.exists():  # a torn one, which was passed over when the run was resumed
        remove(path)
    partial.rename(path)
    _sync(path.parent)
    return path


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Remove the whole checkpoints that are neither among the last nor at a multiple of keep_every. Raises: OSError."""
    found, _ = whole(folder)
    for path, manifest in found[:-keep_last]:
        if keep_every is None or manifest.step % keep_every:
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder; it loses its name first, so that no half of it is taken for a checkpoint. Raises: OSError."""
    partial = path if path.suffix == PARTIAL else path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))
    shutil.rmtree(partial)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
