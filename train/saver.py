"""Saving a run: the step waits for a copy in host memory, a thread writes it while steps go on.

All ranks write one step; the thread of rank 0 publishes it once the files of all are on disk. Called by `loop`.
"""

import functools
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checkpoint, randomness, storage
from .checkpoint import Found, Manifest, Mesh
from .config import Config
from .data import Windows
from .engine import Engine
from .host_memory import HostMemory
from .nonfinite import Guard
from .partitions import Piece
from .storage import StorageError
from .world import World

RANDOM = "random.{:05}"
"""Name of a rank's random states among the values of a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved, in one sentence: the same on all ranks, but for one that waited in vain."""


class Progress(NamedTuple):
    """How far a run is: the last step that is done, tokens seen by then."""

    step: int
    tokens_seen: int


class Saver:
    """Saves a run every so many steps.

    saver.reserve()                        # before the first step, and behind it
    saver.start(progress)                  # returns once the state is copied
    if any rank says saver.failed: saver.wait()
    saver.wait()                           # at the end

    base: of adapters, see `resume.base_of`; found: what the run goes on from, which is not written there again

    All ranks must call `start`, `save` and `wait` together. They raise CheckpointError on all ranks if a checkpoint
    could not be written, and those that were there stay.
    """

    def __init__(
        self, config: Config, world: World, engine: Engine, windows: Windows, guard: Guard, *, base: str | None,
        found: Found | None,
    ) -> None:  # fmt: skip
        self._guard = guard
        self._base = base
        self._config = config
        self._world = world
        self._engine = engine
        self._windows = windows
        self._host: dict[str, Tensor] = {}
        self._memory: dict[torch.device, HostMemory] = {}
        self._asked: set[str] = set()
        self._partial: Path | None = None
        self._writing: Future[None] | None = None
        self._last: tuple[int, Path] | None = None
        if found is not None and found.path.resolve().parent == config.checkpoint_dir.resolve():
            self._last = found.manifest.step, found.path

    def due(self, step: int) -> bool:
        """Whether [checkpoint] asks for one after this step: at multiples of `every`, and at the end."""
        every = self._config.checkpoint.every
        return every is not None and (step % every == 0 or step == self._config.train.steps)

    @property
    def failed(self) -> bool:
        """Whether what this rank writes, or wrote, has failed. Waits for nothing."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def reserve(self) -> list[Future[None]]:
        """Begin to take the host memory of a save, in a thread, so that no step waits for it.

        For what is there to be saved and was not asked for yet: states that an optimizer makes in its first step are
        there after it. Returns what is done when it is taken; what fails is also told by the next `start`.
        """
        sizes: dict[torch.device, list[int]] = {}
        for key, _, _, part, _ in self._mine() if self._config.checkpoint.every is not None else ():
            if key not in self._asked and key not in self._host:
                sizes.setdefault(part.device, []).append(part.nbytes)
                self._asked.add(key)
        return [self._room(device).reserve(wanted, device) for device, wanted in sizes.items()]

    def start(self, progress: Progress) -> None:
        """Copy the state of this step to host memory and have it written; wait for the save before it first."""
        self.wait()
        mine = self._mine()
        self._partial = checkpoint.partial_of(self._config.checkpoint_dir, progress.step)
        error = None
        try:
            self._begin(mine, progress.step)
        except (OSError, ValueError, RuntimeError) as raised:
            error = self._world.rank, str(raised)
        self._refuse(together(self._world, error))
        pieces = self._copied(mine)
        values = {RANDOM.format(self._world.rank): randomness.states(self._world.device)}
        manifest = self._manifest(progress)
        write = functools.partial(self._write, self._partial, pieces, values, manifest)
        self._last = progress.step, self._partial.with_suffix("")
        self._writing = _in_thread(write)

    def wait(self) -> Path | None:
        """Wait until what was started is on disk and published. Returns the newest that this run saved or resumed."""
        if self._writing is not None:
            error = None
            try:
                self._writing.result()
            except StorageError as raised:
                error = raised.rank, raised.reason
            except (OSError, ValueError, RuntimeError) as raised:
                error = self._world.rank, str(raised)
            self._writing = None
            self._refuse(together(self._world, error))
        return self._last[1] if self._last else None

    def save(self, progress: Progress) -> Path:
        """`start` and `wait`; nothing is written again if this step was the last to be saved."""
        if self._last is None or self._last[0] != progress.step:
            self.start(progress)
        path = self.wait()
        assert path is not None
        return path

    def settle(self, timeout_s: float) -> None:
        """At an end that ranks may not reach together: give the thread so long to finish. Raises nothing."""
        if self._writing is not None:
            done = threading.Event()
            self._writing.add_done_callback(lambda _: done.set())
            done.wait(timeout_s)

    def _mine(self) -> list[Piece]:
        return storage.shared_out(self._engine.pieces(), self._world.rank, self._world.size)

    def _room(self, device: torch.device) -> HostMemory:
        return self._memory.setdefault(device, HostMemory())

    def _begin(self, pieces: list[Piece], step: int) -> None:
        """Host memory for the pieces, which is kept for the next save; the folder, by rank 0."""
        for key, _, _, part, _ in pieces:
            if key not in self._host:
                self._host[key] = self._room(part.device).take(part.nbytes, part.device).view(part.dtype)
        if self._world.rank == 0:
            checkpoint.begin(self._config.checkpoint_dir, step)

    def _copied(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces in host memory."""
        for key, _, _, part, _ in pieces:
            self._host[key].copy_(part, non_blocking=True)
        self._world.settle()
        return [piece._replace(part=self._host[piece.key]) for piece in pieces]

    def _write(self, partial: Path, pieces: list[Piece], values: dict[str, Any], manifest: Manifest) -> None:
        """Body of the thread. Raises: StorageError; RuntimeError if a rank does not come."""
        files = storage.write(partial, pieces, values, self._world.writing)
        if self._world.rank != 0:
            return
        try:
            checkpoint.publish(partial, manifest.model_copy(update={"files": files}))
        except (OSError, ValueError) as raised:
            raise StorageError(0, str(raised)) from raised
        keep = self._config.checkpoint
        try:
            checkpoint.prune(partial.parent, keep_last=keep.keep_last, keep_every=keep.keep_every)
        except OSError as raised:
            say(f"an old checkpoint could not be removed, the run goes on: {raised}")

    def _manifest(self, progress: Progress) -> Manifest:
        return Manifest(
            step=progress.step,
            tokens_seen=progress.tokens_seen,
            nonfinite=self._guard.met,
            data=self._windows.state(),
            mesh=mesh_of(self._config, self._world),
            config=self._config.model_dump(mode="json"),
            versions={name: version(name) for name in ("torch", "deepspeed")},
            base=self._base,
            files={},
        )

    def _refuse(self, errors: list[tuple[int, str] | None]) -> None:
        """Raise the first error of all ranks on each, with the unfinished folder gone."""
        told = [error for error in errors if error is not None]
        if not told:
            return
        assert self._partial is not None
        self._last = None
        if self._world.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)  # or the next save removes it
        raise _not_saved(*min(told))


def mesh_of(config: Config, world: World) -> Mesh:
    """How the ranks of this run are used."""
    parallel = config.parallel
    return Mesh(
        processes=world.size, data=world.data_size, ring=parallel.ring, ulysses=parallel.ulysses, zero=parallel.zero
    )


def together(world: World, value: Any) -> list[Any]:
    """The value of every rank. CheckpointError if one of them does not come."""
    try:
        return world.gather_objects(value)
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {world.rank} waited for the others in vain: all ranks must save and resume together, and "
            f"within train.timeout_s = {world.ring.timeout_s:g} ({error})"
        ) from error


def say(sentence: str) -> None:
    """Tell the user, by one rank."""
    print(f"ringflash: {sentence}", file=sys.stderr)


def _not_saved(rank: int, reason: str) -> CheckpointError:
    return CheckpointError(f"rank {rank} could not save a checkpoint, the ones before it stay: {reason}")


def _in_thread(action: Callable[[], None]) -> Future[None]:
    """Run an action in a thread that no exit of the interpreter waits for."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            action()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name="checkpoint", daemon=True).start()
    return future
