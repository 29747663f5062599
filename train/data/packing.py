"""Pieces -> packed sequences.

Letters: S tokens of one packed sequence.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..config import Data
from . import position
from .stream import Corpus, Piece, Place, Stream
from .tokens import IGNORED, Tokenizer

OPEN_SEQUENCES = 8
"""Sequences that are filled at one time: more leave less padding, and mix the order more."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """One packed sequence, whole, on the host.

    ids: int64 [S]; labels: int64 [S], the id that follows each token in its document, or IGNORED
    cu_seqlens: borders of the documents, 0 first; tokens from the last border on are padding
    places: where each document lies, for `Packer.names`
    """

    ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: list[int]
    places: tuple[Place, ...] = ()

    @property
    def valid_targets(self) -> int:
        return int((self.labels != IGNORED).sum())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return np.diff(self.cu_seqlens).tolist()

    def digest(self) -> int:
        """A checksum of all that must be equal on the ranks of a ring, below 2^32."""
        borders = np.asarray(self.cu_seqlens, np.int64)
        return zlib.crc32(np.concatenate((self.ids, self.labels, borders)).tobytes())


class Bin:
    """A sequence that is being filled."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.used = sum(len(piece.ids) for piece in pieces)

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.used += len(piece.ids)

    def close(self, length: int, pad: int) -> Sequence:
        """The sequence of `length`, padded."""
        ids, labels = np.full(length, pad, np.int64), np.full(length, IGNORED, np.int64)
        borders = [0, *np.cumsum([len(piece.ids) for piece in self.pieces]).tolist()]
        ids[: borders[-1]] = np.concatenate([piece.ids for piece in self.pieces])
        labels[: borders[-1]] = np.concatenate([piece.labels for piece in self.pieces])
        return Sequence(ids, labels, borders, tuple(piece.place for piece in self.pieces))


class Packer:
    """Fills sequences of `length` with whole pieces; what stays empty is padding at the end.

    A piece goes into the open sequence that it fills best. A full one leaves, so a piece of `length` leaves alone; if a
    piece fits nowhere and OPEN_SEQUENCES are open, the fullest leaves. The order depends on nothing but the stream.
    """

    def __init__(self, stream: Stream, *, length: int, pad: int) -> None:
        self._stream, self._length, self._pad = stream, length, pad
        self._open: list[Bin] = []
        self._consumed = 0

    def __iter__(self) -> "Packer":
        return self

    def __next__(self) -> Sequence:
        full = None
        while full is None:
            full = self._put(next(self._stream))
        self._consumed += 1
        return full.close(self._length, self._pad)

    def names(self, places: Iterable[Place], *, lines: bool) -> list[str]:
        """Where documents lie, for a person; see `Corpus.names`."""
        return self._stream.names(places, lines=lines)

    def rest(self) -> list[Sequence]:
        """The sequences that are still open where the stream has ended."""
        left, self._open = self._open, []
        return [one.close(self._length, self._pad) for one in left]

    def _put(self, piece: Piece) -> Bin | None:
        """Find room for a piece; the sequence that leaves for it, if one does."""
        if len(piece.ids) == self._length:
            return Bin([piece])
        fitting = [b for b in self._open if b.used + len(piece.ids) <= self._length]
        if fitting:
            best = max(fitting, key=lambda b: b.used)
            best.add(piece)
            return self._leave(best) if best.used == self._length else None
        full = len(self._open) == OPEN_SEQUENCES
        leaving = self._leave(max(self._open, key=lambda b: b.used)) if full else None
        self._open.append(Bin([piece]))
        return leaving

    def _leave(self, leaving: Bin) -> Bin:
        self._open = [other for other in self._open if other is not leaving]
        return leaving

    def state(self) -> dict[str, Any]:
        """Plain lists and numbers from which the same sequences follow."""
        return {
            "consumed": self._consumed,
            "length": self._length,
            "open": [[piece.saved() for piece in b.pieces] for b in self._open],
            "stream": self._stream.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, also under another `length`: then the open pieces are packed anew.

        state: of a Packer or of Windows over the same files, in a mesh of any size
        Raises: ValueError for a state of other data.
        """
        position.check(state)
        self._stream = self._stream.at(state["stream"])
        self._consumed = state["consumed"]
        pieces = iter(self._stream.pieces_at(saved for together in state["open"] for saved in together))
        bins = [list(islice(pieces, len(together))) for together in state["open"]]
        if state["length"] == self._length:
            self._open = [Bin(parts) for parts in bins]
        else:
            self._open = []
            self._stream.put_back(piece for parts in bins for piece in parts)


def sequences(data: Data, tokenizer: Tokenizer, *, length: int, seed: int) -> Packer:
    """The packed sequences of a run without end. Raises: ValueError for what can be seen before reading."""
    stream = Stream(Corpus(data, tokenizer), length=length, seed=seed)
    return Packer(stream, length=length, pad=tokenizer.pad)
