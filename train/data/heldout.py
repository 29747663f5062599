"""Held-out documents -> packed sequences, each document once, in an order that nothing of a run changes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ..config import Data, Evaluation, Source
from .packing import Packer, Sequence
from .sources import files_of
from .stream import Corpus, Piece, Stream, cut
from .tokens import Tokenizer

ORDER = 0
"""Seed of the order: not that of the run, or two runs could not be compared."""


class HeldOut:
    """What [[evaluation.sources]] name. An iterator over it starts at the beginning, and ends.

    Raises: ValueError for what can be seen before reading.
    """

    def __init__(self, evaluation: Evaluation, tokenizer: Tokenizer, *, length: int) -> None:
        data = Data(sources=evaluation.sources, shuffle=True)
        self._corpus = Corpus(data, tokenizer)
        self._length, self._pad, self._limit = length, tokenizer.pad, evaluation.sequences

    def __iter__(self) -> Iterator[Sequence]:
        """The same sequences each time, `evaluation.sequences` at most; what was open at the end comes last."""
        packer = Packer(_Once(self._corpus, length=self._length, seed=ORDER), length=self._length, pad=self._pad)
        return islice(_to_the_end(packer), self._limit)


def _to_the_end(packer: Packer) -> Iterator[Sequence]:
    yield from packer
    yield from packer.rest()


class _Once(Stream):
    """A stream that ends when each document has been read once; a source that has no more leaves the mixture."""

    def __next__(self) -> Piece:
        while not self._waiting:
            open_sources = [i for i, reader in enumerate(self._readers) if not reader.state()["epoch"]]
            if not open_sources:
                raise StopIteration
            source = min(open_sources, key=lambda i: self._tokens[i] / self._corpus.weights[i])
            document = next(self._readers[source])
            if not self._readers[source].state()["epoch"]:
                self._tokens[source] += len(document.ids)
                self._waiting.extend(cut(document, self._length))
        return self._waiting.popleft()


def check_apart(data: Data, evaluation: Evaluation) -> None:
    """Refuse to call held-out what is trained on. Raises: ValueError naming a file that is read for both."""
    trained = {place for source in data.all_sources for place in _places(source)}
    for index, source in enumerate(evaluation.sources):
        both = sorted(trained & set(_places(source)))
        if both:
            raise ValueError(
                f"evaluation.sources.{index} is not held out: {' '.join(both[0]).strip()} is one of {len(both)} "
                "file(s) that [data] reads too; give one of them another path or pattern"
            )


def _places(source: Source) -> list[tuple[str, str]]:
    """(file or folder, split) of what a source reads."""
    if source.format == "datasets":
        return [(str(Path(source.path).resolve()), source.split)]
    return [(str(file.resolve()), "") for file in files_of(source)]
