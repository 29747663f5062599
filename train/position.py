"""How far a run is in its data, in global samples, so that it does not depend on the mesh. Called by `loop`."""

import zlib
from collections.abc import Iterator
from typing import Self

from .data import Sequence

Position = dict[str, int]
"""samples: sequences taken by all rings together; digest: a checksum of all of them in their order."""


class Stream:
    """The packed sequences of a run, counted as they are taken."""

    def __init__(self, sequences: Iterator[Sequence]) -> None:
        self._sequences = sequences
        self._position: Position = {"samples": 0, "digest": 0}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sequence:
        sequence = next(self._sequences)
        before = self._position
        digest = zlib.crc32(sequence.digest().to_bytes(4, "little"), before["digest"])
        self._position = {"samples": before["samples"] + 1, "digest": digest}
        return sequence

    def state(self) -> Position:
        """The position now."""
        return self._position

    def restore(self, saved: Position) -> None:
        """Go on behind what was taken: the stream is a pure function of (files, seed), so it is made again up to there.

        Raises: ValueError if what comes by is not what was taken then.
        """
        while self._position["samples"] < saved["samples"]:
            next(self)
        if self._position != saved:
            raise ValueError(
                f"the first {saved['samples']} sequences are not those that the checkpoint was trained on: the files "
                "of data.path, the keys of [data] and train.seed must be as they were, or checkpoint.resume = 'no'"
            )
