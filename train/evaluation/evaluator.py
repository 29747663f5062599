"""One evaluation: held-out documents, then pass keys, through the model as it is now.

Called by `loop` and `standalone`.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from ..config import Config
from ..data import HeldOut, Tokenizer
from ..engine import Engine
from ..saver import Progress
from ..world import World
from .needle import Haystack
from .result import Cell, Range, Result
from .score import Marked, add_up


class Evaluator:
    """What [evaluation] asks for, made ready once. Raises: ValueError for what cannot be read or made of it."""

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer) -> None:
        self._config, self._world = config, world
        evaluation, length = config.evaluation, config.sequence.length
        self._held_out = HeldOut(evaluation, tokenizer, length=length) if evaluation.sources else None
        self._haystack = (
            Haystack(evaluation.needle, tokenizer, sequence_length=length) if evaluation.needle.lengths else None
        )
        self._borders = [0, *(border for border in evaluation.borders if border < length), length]

    def due(self, step: int) -> bool:
        """Whether [evaluation] asks for one after this step: at multiples of `every`, and at the end."""
        every = self._config.evaluation.every
        return every is not None and (step % every == 0 or step == self._config.train.steps)

    def __call__(self, engine: Engine, progress: Progress, *, begin: Callable[[], int] = lambda: 0) -> Result:
        """Evaluate the model as it is. All ranks must call it, and all get the same numbers.

        begin: called before each forward pass, for who looks out for hangs; returns the signal that asks this rank to
            stop, or 0
        Raises: StopError on all ranks, once any of them was asked.
        """
        start = time.perf_counter()
        by_position, cells = self._by_position(engine, begin), self._cells(engine, begin)
        time_s = time.perf_counter() - start
        return Result(*progress, float(self._world.gather([time_s]).max()), by_position, cells)

    def _by_position(self, engine: Engine, begin: Callable[[], int]) -> list[Range]:
        if self._held_out is None:
            return []
        ranges = list(zip(self._borders[:-1], self._borders[1:], strict=True))
        sums = add_up(engine, self._world, self._mark(self._held_out), num_rows=len(ranges), begin=begin)
        return [
            Range(first, stop - 1, targets, loss / targets if targets else None)
            for (first, stop), (loss, _, targets) in zip(ranges, sums, strict=True)
        ]

    def _mark(self, held_out: HeldOut) -> Iterator[Marked]:
        """Each target counts for the position of the token that predicts it, in what attention sees as a document."""
        documents = self._config.data.document_mask
        for sequence in held_out:
            positions = np.arange(len(sequence.ids))
            if documents:
                starts, lengths = sequence.cu_seqlens[:-1], sequence.lengths
                positions[: sequence.cu_seqlens[-1]] -= np.repeat(starts, lengths)
            rows = np.searchsorted(self._borders, positions, side="right") - 1
            yield Marked(sequence, rows, documents)

    def _cells(self, engine: Engine, begin: Callable[[], int]) -> list[Cell]:
        if self._haystack is None:
            return []
        sums = add_up(engine, self._world, self._haystack, num_rows=len(self._haystack.cells), begin=begin)
        return [
            Cell(length, depth, targets, loss / targets, hits / targets)
            for (length, depth), (loss, hits, targets) in zip(self._haystack.cells, sums, strict=True)
        ]
