"""Bodies for the tests of checkpoints: runs that save, stop and go on, on two processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import random
import resource
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import training

from train import loop, resume, world
from train.config import Config
from train.resume import Progress


def weights_of(run: loop.Run) -> str:
    weights = run.engine.full_parameters().values()
    return hashlib.sha256(b"".join(weight.float().numpy().tobytes() for weight in weights)).hexdigest()


def go(config: Config) -> dict[str, Any]:
    """Body: a whole run, with numbers drawn at each step: what was said, where it began, its weights then and after."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = loop.prepare(config, training.join(config))
    step = loop.train_step
    drawn: dict[int, Any] = {}

    def drawing(run: loop.Run, number: int, *, tokens_seen: int) -> Any:
        drawn[number] = random.random(), np.random.random(), torch.rand(()).item()
        return step(run, number, tokens_seen=tokens_seen)

    before = weights_of(run)
    with patch.object(loop, "train_step", drawing):
        loop.fit(run)
    result = {"from": run.progress, "before": before, "after": weights_of(run), "drawn": drawn, "said": said.getvalue()}
    run.engine.close()
    return result


def refusal(config: Config) -> str:
    """Body: why a run does not start."""
    try:
        loop.prepare(config, training.join(config))
    except ValueError as error:
        return str(error)
    return "it started"


def plain(value: Any) -> Any:
    """The content of a file of a checkpoint, such that equal bits compare equal."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.view(torch.uint8).numpy().tobytes() if value.dim() else value.item()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, int) else value


def idle(config: Config) -> tuple[str, dict[str, str]]:
    """Body: a run that saves as it finds itself, without a step. Its weights, and a digest of each file."""
    run = loop.prepare(config, training.join(config))
    path = run.saver.save(run.progress)
    files = {file.name: repr(plain(run.engine.read(file))).encode() for file in sorted(path.glob("*.pt"))}
    weights = weights_of(run)
    run.engine.close()
    return weights, {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}


def die(config: Config, files: int) -> None:
    """Body: save step 1; in the save of step 2, rank 1 is killed in the middle of the file after so many."""
    run = loop.prepare(config, training.join(config))
    run.saver.save(Progress(1, 0))
    storage = run.engine._engine.checkpoint_engine
    save, written = storage.save, []

    def dying(state_dict: Any, path: str) -> None:
        if len(written) == files and run.world.rank == 1:
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save(state_dict, path)
        written.append(path)

    with patch.object(storage, "save", dying):
        run.saver.save(Progress(2, 0))


def overflow(config: Config) -> tuple[str, list[str], int]:
    """Body: save step 1; then rank 1 may write no file of more than 3000 bytes, as on a full disk, and step 2 is saved;
    then it may again. What is said, the folder after the failure, the step that is loaded in the end."""
    run = loop.prepare(config, training.join(config))
    run.saver.save(Progress(1, 0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        run.saver.save(Progress(2, 0))
        said = "it was saved"
    except resume.CheckpointError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.world.gather([0.0])
    left = sorted(path.name for path in config.checkpoint_dir.iterdir())
    run.world.gather([0.0])
    run.saver.save(Progress(2, 0))
    run.engine.close()
    again = loop.prepare(config, training.join(config))
    again.engine.close()
    return said, left, again.progress.step


def unwritable(config: Config) -> str:
    """Body: what is said where the folder cannot be made."""
    run = loop.prepare(config, training.join(config))
    try:
        run.saver.save(Progress(1, 0))
    except resume.CheckpointError as error:
        return str(error)
    finally:
        run.engine.close()
    return "it was saved"


def alone(config: Config) -> str | None:
    """Body: rank 0 saves, the others do not."""
    joined = world.connect(config, torch.device("cpu"))
    run = loop.prepare(config, joined)
    said = None
    if joined.rank == 0:
        try:
            run.saver.save(Progress(1, 0))
        except resume.CheckpointError as error:
            said = str(error)
    run.engine.close()
    return said


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def bombed(config: Config, step: Path, name: str, zipped: bool) -> str:
    """Body: rank 0 puts a program into one file of a checkpoint, size and manifest made right; then it is loaded."""
    joined = training.join(config)
    if joined.rank == 0:
        file = step / name
        bomb = {"module": Bomb(str(step / "exploded"))}
        torch.save(bomb, file) if zipped else file.write_bytes(pickle.dumps(bomb))
        manifest = step / "manifest.json"
        before = manifest.read_text()
        sizes = [line for line in before.splitlines() if f'"{name}"' in line]
        after = before.replace(sizes[0].rstrip(","), f'"{name}": {file.stat().st_size}')
        manifest.write_text(after)
    joined.gather([0.0])
    return refusal(config)
