"""Bodies for the tests of checkpoints: runs that save, stop and go on, on two processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import training
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from train import host_memory, loop, saver, storage, world
from train.config import Config
from train.saver import Progress


def weights_of(run: loop.Run) -> str:
    weights = run.engine.full_parameters().values()
    return hashlib.sha256(b"".join(weight.float().cpu().numpy().tobytes() for weight in weights)).hexdigest()


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


def restarted(config: Config) -> tuple[str, int]:
    """Body: processes that were started again, which torchrun counts for rank 1 alone. What is said; the step."""
    said = io.StringIO()
    rank_1 = {world.RESTART_VARIABLES[0]: "1"} if torch.distributed.get_rank() == 1 else {}
    with patch.dict(os.environ, rank_1), contextlib.redirect_stderr(said):
        run = loop.prepare(config, world.connect(config, training.device()))
    run.engine.close()
    return said.getvalue(), run.progress.step


def state_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, by the library's own conversion to one file: name -> value, tensors in numpy."""
    out = folder.parent / f"{folder.name}.whole"
    dcp_to_torch_save(folder, out)
    whole = torch.load(out, weights_only=False)
    out.unlink()
    return {key: value.float().numpy() if isinstance(value, torch.Tensor) else value for key, value in whole.items()}


def idle(config: Config) -> str:
    """Body: a run that saves as it finds itself, without a step. Its weights."""
    run = loop.prepare(config, training.join(config))
    run.saver.save(run.progress)
    weights = weights_of(run)
    run.engine.close()
    return weights


def resave(config: Config) -> dict[str, Any]:
    """Body: a run that saves what it resumed before it goes on. What was said, a number that its rank draws."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = loop.prepare(config, training.join(config))
    drawn = random.random(), np.random.random(), torch.rand(()).item()
    run.saver.save(run.progress)
    loop.fit(run)
    run.engine.close()
    return {"said": said.getvalue(), "drawn": drawn}


def die(config: Config) -> None:
    """Body: save step 1; in the save of step 2 rank 1 is killed in the middle of its file, that of rank 0 is whole."""
    run = loop.prepare(config, training.join(config))
    run.saver.save(Progress(1, 0))
    write = storage._Writer.write_data

    def dying(writer: Any, plan: Any, planner: Any) -> Any:
        if run.world.rank == 1:
            (Path(writer.path) / "__1_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(writer, plan, planner)

    with patch.object(storage._Writer, "write_data", dying):
        run.saver.save(Progress(2, 0))


def die_loading(config: Config) -> None:
    """Body: rank 1 is killed when it has read a part of a checkpoint."""
    joined = training.join(config)
    resolve = storage._Wanted.resolve_tensor

    def dying(planner: Any, item: Any) -> Any:
        if joined.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return resolve(planner, item)

    with patch.object(storage._Wanted, "resolve_tensor", dying):
        loop.prepare(config, joined)


def overflow(config: Config) -> tuple[str, list[str], int]:
    """Body: save step 1; then rank 1 may write no file of more than 30000 bytes, as on a full disk, and step 2 is
    saved; then it may again. What is said, the folder after the failure, the step that is loaded in the end."""
    run = loop.prepare(config, training.join(config))
    run.saver.save(Progress(1, 0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30000, limits[1]))
    try:
        run.saver.save(Progress(2, 0))
        said = "it was saved"
    except saver.CheckpointError as error:
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


def beside(config: Config) -> dict[str, Any]:
    """Body: a step while the files of step 1 wait to be written; then a save that fails on rank 1 while steps go on.
    Weights when the first was started and when it is loaded, the folder while it waits, what ends the second."""
    run = loop.prepare(config, training.join(config))
    before, write, may_write = weights_of(run), FileSystemWriter.write_data, threading.Event()

    def waiting(*args: Any) -> Any:
        assert may_write.wait(100)
        return write(*args)

    def failing(*args: Any) -> Any:
        if run.world.rank == 1:
            raise OSError("no space")
        return write(*args)

    with patch.object(FileSystemWriter, "write_data", waiting):
        run.saver.start(Progress(1, 0))
        loop.train_step(run, 2, tokens_seen=0)
        waits = sorted(path.name for path in config.checkpoint_dir.iterdir())
        moved = weights_of(run) != before
        run.world.gather([0.0])
        may_write.set()
        run.saver.wait()
    said = "it was saved"
    with patch.object(FileSystemWriter, "write_data", failing):
        run.saver.start(Progress(2, 0))
        try:
            for step in range(100):
                time.sleep(0.05)
                loop.train_step(run, step + 3, tokens_seen=0)
        except saver.CheckpointError as error:
            said = str(error)
    run.engine.close()
    again = loop.prepare(config, training.join(config))
    after = weights_of(again)
    again.engine.close()
    return {"before": before, "after": after, "moved": moved, "waits": waits, "said": said, "from": again.progress.step}


def staged(config: Config) -> dict[str, Any]:
    """Body: a run, while it is noted who takes host memory, and at which step it is; then what it holds. Without an
    event: a save that found all of it."""
    run = loop.prepare(config, training.join(config))
    begun, new, start, taken = [0], host_memory.HostMemory._new, run.saver.start, []
    step = loop.train_step

    def noting(memory: Any, num_bytes: int, device: torch.device) -> Any:
        time.sleep(0.02)  # so that a step that did not wait would be seen to be before it
        taken.append((threading.current_thread() is threading.main_thread(), num_bytes))
        return new(memory, num_bytes, device)

    def stepping(*args: Any, **keys: Any) -> Any:
        begun.append(len(taken))
        return step(*args, **keys)

    def starting(*args: Any) -> None:
        start(*args)
        saved.append(len(taken))

    saved: list[int] = []
    with (
        patch.object(host_memory.HostMemory, "_new", noting),
        patch.object(loop, "train_step", stepping),
        patch.object(run.saver, "start", starting),
    ):
        loop.fit(run)
    mine = storage.shared_out(run.engine.pieces(), run.world.rank, run.world.size)
    run.engine.close()
    return {"taken": taken, "begun": begun, "saved": saved, "pieces": [piece.part.nbytes for piece in mine]}


def said_of_a_save(run: loop.Run) -> str:
    """Why it failed; the run is closed."""
    try:
        run.saver.save(Progress(1, 0))
    except saver.CheckpointError as error:
        return str(error)
    finally:
        run.engine.close()
    return "it was saved"


def unlockable(config: Config) -> str:
    """Body: what is said where rank 1 gets no host memory for a save."""
    run = loop.prepare(config, training.join(config))

    def refusing(memory: Any, num_bytes: int, device: torch.device) -> Any:
        raise RuntimeError("the machine locks no more")

    with patch.object(host_memory.HostMemory, "_new", refusing) if run.world.rank == 1 else contextlib.nullcontext():
        run.saver.reserve()
        return said_of_a_save(run)


def unwritable(config: Config) -> str:
    """Body: what is said where the folder is no folder any more."""
    run = loop.prepare(config, training.join(config))
    if run.world.rank == 0:
        shutil.rmtree(config.checkpoint_dir, ignore_errors=True)
        config.checkpoint_dir.write_text("")
    return said_of_a_save(run)


def alone(config: Config) -> str | None:
    """Body: rank 0 saves, the others do not."""
    joined = world.connect(config, training.device())
    run = loop.prepare(config, joined)
    said = None
    if joined.rank == 0:
        try:
            run.saver.save(Progress(1, 0))
        except saver.CheckpointError as error:
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
    """Body: rank 0 puts a program into one file of a checkpoint, sizes in index and manifest made right; then it is
    loaded."""
    joined = training.join(config)
    if joined.rank == 0:
        file, bomb = step / name, io.BytesIO()
        torch.save(Bomb(str(step / "exploded")), bomb) if zipped else pickle.dump(Bomb(str(step / "exploded")), bomb)
        file.write_bytes(bomb.getvalue())
        if name != storage.INDEX:
            index = pickle.loads((step / storage.INDEX).read_bytes())
            for place in index.storage_data.values():
                if place.relative_path == name:
                    place.offset, place.length = 0, len(bomb.getvalue())
            (step / storage.INDEX).write_bytes(pickle.dumps(index))
        manifest = json.loads((step / "manifest.json").read_text())
        manifest["files"] = {name: (step / name).stat().st_size for name in manifest["files"]}
        (step / "manifest.json").write_text(json.dumps(manifest))
    joined.gather([0.0])
    return refusal(config)
