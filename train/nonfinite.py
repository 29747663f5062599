"""A step whose loss or gradient is no finite number: it is named, its batch is kept, and the weights stay as they were.

Called by `loop`.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config
from .data import Place, Window
from .world import World

SHOWN = 3
"""Documents that a message names; the file holds all."""


class NonFiniteError(RuntimeError):
    """More such steps than the config passes over; the message is one sentence, the same on all ranks."""


class Guard:
    """Looks at each step after it; counts those that were not finite. All ranks must call `check`.

    names: `Packer.names`
    met: how many there were in the run; a checkpoint keeps it, so that a run that starts again does not count anew
    """

    def __init__(self, config: Config, world: World, names: Callable[..., list[str]]) -> None:
        self._config = config
        self._world = world
        self._names = names
        self.met = 0

    def check(self, step: int, window: Window, losses: np.ndarray, grad_norm: float) -> None:
        """Nothing if all is finite. Otherwise write the batch and say so.

        window: of this ring; losses: [ranks, micro-batches], the loss sums of all ranks
        Raises: NonFiniteError on all ranks alike, behind train.max_nonfinite such steps.
        """
        if np.isfinite(losses).all() and math.isfinite(grad_norm):
            return
        self.met += 1
        allowed, shared = self._config.train.max_nonfinite, self._config.sequence_parallel
        ranks, micros = np.nonzero(~np.isfinite(losses))
        rings = sorted({int(rank) // shared for rank in ranks}) or list(range(self._world.data_size))
        if self._world.data_rank in rings and self._world.rank % shared == 0:
            self._keep(step, window, losses)
        if len(ranks):
            rank, micro = int(ranks[0]), int(micros[0])
            what = self._where(losses, rank, micro) + self._documents(window, rank, micro) + self._also(ranks)
        else:
            what = f"the gradient norm is {grad_norm} on all ranks, with finite losses"
        message = f"step {step}: {what}; the batch is in {self._file(step, rings[0])}, the weights are as before it"
        if self.met > allowed:
            raise NonFiniteError(f"{message}; train.max_nonfinite = {allowed} such steps are passed over")
        if self._world.rank == 0:
            print(f"ringflash: {message}; it is number {self.met} of at most {allowed}", file=sys.stderr)

    def _where(self, losses: np.ndarray, rank: int, micro: int) -> str:
        """The first loss that is not finite."""
        batch = self._config.batch(self._world.size)
        first = micro * batch.micro_batch
        numbers = [
            rank // self._config.sequence_parallel + self._world.data_size * index
            for index in range(first, first + batch.micro_batch)
        ]
        samples = " and ".join(str(number) for number in numbers)
        return (
            f"the loss is {losses[rank, micro]} on rank {rank}, in sequence {samples} of 0 to {batch.global_batch - 1}"
        )

    def _documents(self, window: Window, rank: int, micro: int) -> str:
        """Those of which that rank holds tokens; it alone knows them, and all ranks hear of it."""
        held: list[Place] = []
        if self._world.rank == rank:
            for sequence in window[micro]:
                borders = sequence.cu_seqlens if self._config.data.document_mask else None
                layout = self._world.layout(len(sequence.ids), borders)
                inside = np.searchsorted(sequence.cu_seqlens, layout.positions.cpu().numpy(), side="right") - 1
                held += [place for index, place in enumerate(sequence.places) if index in inside]
        names: list[str] = self._names(held[:SHOWN], lines=True)
        names, number = self._world.gather_objects((names, len(held)))[rank]
        more = f" and {number - SHOWN} more documents" if number > SHOWN else ""
        return f", in {', '.join(names)}{more}" if names else ""

    @staticmethod
    def _also(ranks: np.ndarray) -> str:
        others = sorted({int(rank) for rank in ranks} - {int(ranks[0])})
        return f" (also on rank {', '.join(map(str, others))})" if others else ""

    def _file(self, step: int, ring: int) -> Path:
        return self._config.run_dir / "nonfinite" / f"step-{step:08}-ring-{ring:04}.npz"

    def _keep(self, step: int, window: Window, losses: np.ndarray) -> None:
        """The whole sequences of a ring, as numpy.load reads them. A full disk does not end the run.

        ids, labels: [sequences, S]; cu_seqlens_<i>, names_<i>: documents of sequence i, with file and byte or row;
        numbers: which of the global batch they are; losses: [ranks of the ring, micro-batches]
        """
        world, shared = self._world, self._config.sequence_parallel
        sequences = [sequence for micro in window for sequence in micro]
        arrays: dict[str, Any] = {f"cu_seqlens_{index}": np.asarray(s.cu_seqlens) for index, s in enumerate(sequences)}
        named = [self._names(sequence.places, lines=False) for sequence in sequences]
        arrays |= {f"names_{index}": np.asarray(names, str) for index, names in enumerate(named)}
        arrays["ids"] = np.stack([sequence.ids for sequence in sequences])
        arrays["labels"] = np.stack([sequence.labels for sequence in sequences])
        arrays["numbers"] = np.arange(len(sequences)) * world.data_size + world.data_rank
        arrays["losses"] = losses[world.data_rank * shared :][:shared]
        path = self._file(step, world.data_rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **arrays)
        except OSError as error:
            print(f"ringflash: {path} cannot be written: {error}", file=sys.stderr)
