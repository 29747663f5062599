"""Saving and resuming a run: what all ranks do together around `checkpoint` and DeepSpeed's own files.

Called by `loop`.
"""

import difflib
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import checkpoint
from .checkpoint import Found, Manifest, Mesh
from .config import Config
from .data import Windows
from .engine import Engine
from .world import World

FIXED = (
    "model.",
    "sequence.length",
    "optimizer.name",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
)
"""Keys that must be as they were: a checkpoint fits no other, or DeepSpeed restores the old value with it."""

FREE = ("checkpoint.", "evaluation.", "metrics.", "launch.", "slurm.", "kubernetes.")
"""Keys that change nothing of what is trained."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved; the message is one sentence, the same on all ranks."""


class Progress(NamedTuple):
    """How far a run is: the last step that is done, tokens seen by then."""

    step: int
    tokens_seen: int


class Saver:
    """Saves a run every so many steps, and brings a new process to where an old one was.

    All ranks must call `save` and `resume` together.
    """

    def __init__(self, config: Config, world: World, engine: Engine, windows: Windows) -> None:
        self._config = config
        self._world = world
        self._engine = engine
        self._windows = windows
        self._mesh = mesh_of(config, world)

    def due(self, step: int) -> bool:
        """Whether [checkpoint] asks for one after this step: at multiples of `every`, and at the end."""
        every = self._config.checkpoint.every
        return every is not None and (step % every == 0 or step == self._config.train.steps)

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint; the step waits until it is on disk. Then remove those that need not be kept.

        Raises: CheckpointError on all ranks, and the checkpoints that were there stay.
        """
        keep, folder = self._config.checkpoint, self._config.checkpoint_dir
        partial = Path(self._on_first(checkpoint.begin, folder, progress.step))
        self._engine.save(partial, extra={f"rank-{self._world.rank:05}.pt": random_states(self._world.device)})
        written, error = self._engine.written()
        rows = self._together((written, error))
        self._refuse([error for _, error in rows], partial)
        files = {name: size for sizes, _ in rows for name, size in sorted(sizes.items())}
        path = self._on_first(checkpoint.publish, partial, self._manifest(progress, files))
        if self._world.rank == 0:
            try:
                checkpoint.prune(folder, keep_last=keep.keep_last, keep_every=keep.keep_every)
            except OSError as raised:
                _say(f"an old checkpoint could not be removed, the run goes on: {raised}")
        return Path(path)

    def resume(self) -> Progress:
        """Load what checkpoint.resume asks for. Returns where the run goes on from: (0, 0) at its start.

        Raises: ValueError, the same sentence on all ranks, for a checkpoint that does not fit the run.
        """
        chosen: Found | str | None = None
        if self._world.rank == 0:
            try:
                chosen = self._choose()
            except (ValueError, OSError) as error:
                chosen = str(error)
        chosen = self._together(chosen)[0]
        if isinstance(chosen, str):
            raise ValueError(chosen)
        if chosen is None:
            return Progress(0, 0)
        path, manifest = chosen
        self._engine.load(path)
        self._windows.restore(manifest.data)
        set_random_states(self._engine.read(path / f"rank-{self._world.rank:05}.pt"), self._world.device)
        return Progress(manifest.step, manifest.tokens_seen)

    def _choose(self) -> Found | None:
        """The checkpoint to resume, with what is to be said about it; None: a fresh start."""
        wanted, folder = self._config.checkpoint.resume, self._config.checkpoint_dir
        found, torn = checkpoint.whole(folder)
        newest = found[-1] if found else None
        if wanted == "auto":
            for sentence in torn:
                _say(f"{sentence}; it is passed over")
            chosen = newest
        elif wanted == "no":
            chosen = None
        else:
            chosen = checkpoint.read(Path(wanted))
        done = chosen.manifest.step if chosen else 0
        if newest and newest.manifest.step > done and self._config.checkpoint.every is not None:
            raise ValueError(
                f"checkpoint.resume = {wanted!r} starts behind step {done}, but checkpoint.dir = {str(folder)!r} holds "
                f"step {newest.manifest.step}: another checkpoint.dir, or checkpoint.resume = 'auto' is accepted"
            )
        if chosen:
            check_steps(chosen, self._config.train.steps)
            check_mesh(chosen, self._mesh)
            changes = compare(chosen, self._config.model_dump(mode="json"))
            _say(f"resumes {chosen.path} behind step {done}" + "".join(f", with {change}" for change in changes))
        elif wanted == "auto" and self._config.checkpoint.every is not None:
            _say(f"no whole checkpoint is in {folder}: the run starts at step 1")
        return chosen

    def _manifest(self, progress: Progress, files: dict[str, int]) -> Manifest:
        import deepspeed

        return Manifest(
            step=progress.step,
            tokens_seen=progress.tokens_seen,
            data=self._windows.state(),
            mesh=self._mesh,
            config=self._config.model_dump(mode="json"),
            versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__},
            files=files,
        )

    def _on_first(self, action: Any, *args: Any, **options: Any) -> str:
        """What rank 0 returns from an action on the folder, as text; an error there is one on all ranks."""
        result, error = "", None
        if self._world.rank == 0:
            try:
                result = str(action(*args, **options))
            except (OSError, ValueError) as raised:
                error = str(raised)
        result, error = self._together((result, error))[0]
        self._refuse([error], None)
        return result

    def _together(self, value: Any) -> list[Any]:
        """The value of every rank. RuntimeError if one of them does not come."""
        try:
            return self._world.gather_objects(value)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._world.rank} waited for the others in vain: all ranks must save and resume together, and "
                f"within train.timeout_s = {self._config.train.timeout_s} ({error})"
            ) from error

    def _refuse(self, errors: list[str | None], partial: Path | None) -> None:
        """Raise the first error of all ranks on each, with the unfinished folder gone."""
        for rank, error in enumerate(errors):
            if error is not None:
                if partial is not None and self._world.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)  # or the next save removes it
                raise CheckpointError(f"rank {rank} could not save a checkpoint, the ones before it stay: {error}")


def load_weights(config: Config, world: World, engine: Engine) -> Progress:
    """Load the weights of what checkpoint.resume asks for, to be evaluated. All ranks must call it.

    "no": the weights that a run begins with. Returns how far the run was.
    Raises: ValueError, the same sentence on all ranks, if there is no checkpoint or it holds another model.
    """
    chosen: Found | str | None = None
    if world.rank == 0:
        try:
            chosen = _to_evaluate(config)
        except (ValueError, OSError) as error:
            chosen = str(error)
    chosen = world.gather_objects(chosen)[0]
    if isinstance(chosen, str):
        raise ValueError(chosen)
    if chosen is None:
        return Progress(0, 0)
    path, manifest = chosen
    check_mesh(chosen, mesh_of(config, world))
    engine.load(path)
    return Progress(manifest.step, manifest.tokens_seen)


def _to_evaluate(config: Config) -> Found | None:
    wanted, folder = config.checkpoint.resume, config.checkpoint_dir
    if wanted == "no":
        return None
    if wanted == "auto":
        found, torn = checkpoint.whole(folder)
        for sentence in torn:
            _say(f"{sentence}; it is passed over")
        if not found:
            raise ValueError(
                f"no whole checkpoint is in checkpoint.dir = {str(folder)!r}: --checkpoint with the folder of one is "
                "accepted, or checkpoint.resume = 'no' for the weights that the run begins with"
            )
        chosen = found[-1]
    else:
        chosen = checkpoint.read(Path(wanted))
    compare(chosen, config.model_dump(mode="json"), fixed=("model.",))
    return chosen


def mesh_of(config: Config, world: World) -> Mesh:
    """How the ranks of this run are used."""
    return Mesh(
        processes=world.size,
        data=world.data_size,
        ring=config.parallel.ring,
        ulysses=config.parallel.ulysses,
        zero=config.parallel.zero,
    )


def check_steps(found: Found, steps: int) -> None:
    """Refuse a checkpoint behind the end of the run."""
    if found.manifest.step > steps:
        raise ValueError(f"{found.path} was saved behind step {found.manifest.step}, train.steps = {steps} is less")


def check_mesh(found: Found, now: Mesh) -> None:
    """Refuse a checkpoint of another number of processes or another ZeRO stage.

    data, ring and ulysses may differ: all ranks are one ZeRO world, whatever they share.
    """
    saved = found.manifest.mesh
    if (saved.processes, saved.zero) != (now.processes, now.zero):
        raise ValueError(
            f"{found.path} was saved by {saved}, this run is {now}: {saved.processes} processes and parallel.zero = "
            f"{saved.zero} are accepted, with any data, ring and ulysses; or checkpoint.resume = 'no'"
        )


def compare(found: Found, now: dict[str, Any], fixed: tuple[str, ...] = FIXED) -> list[str]:
    """What changed in the config since a checkpoint was saved, a phrase a key, but for FREE.

    now: the config of this run, as JSON; fixed: beginnings of the keys that must be as they were
    Raises: ValueError for one of those, naming both values.
    """
    before, after = _flat(found.manifest.config), _flat(now)
    changed = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    for key in changed:
        if key.startswith(fixed):
            raise ValueError(
                f"{found.path} was saved with {_named(key, before, after)}, this run has "
                f"{_named(key, after, before)}: the value that was saved is accepted, or checkpoint.resume = 'no'"
            )
    return [f"{key} {_shown(key, after)} (was {_shown(key, before)})" for key in changed if not key.startswith(FREE)]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value of a nested table, without what is None."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _named(key: str, here: dict[str, Any], there: dict[str, Any]) -> str:
    """key = value; where it has none, the key that may have taken its place: one that is not there either."""
    if key in here:
        return f"{key} = {here[key]!r}"
    near = difflib.get_close_matches(key, here.keys() - there.keys(), n=1)
    return f"{key} left out" + (f" and {near[0]} = {here[near[0]]!r}" if near else "")


def _shown(key: str, table: dict[str, Any]) -> str:
    return repr(table[key]) if key in table else "left out"


def _say(sentence: str) -> None:
    print(f"ringflash: {sentence}", file=sys.stderr)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all random generators of this process, as plain values and tensors."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
