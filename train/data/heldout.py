"""Held-out documents -> packed sequences, each document once, in an order that nothing of a run changes."""

from collections.abc import Iterator
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
        self._corpus = Corpus(Data(sources=evaluation.sources, shuffle=True), tokenizer)
        self._length, self._pad, self._limit = length, tokenizer.pad, evaluation.tokens

    def __iter__(self) -> Iterator[Sequence]:
        """The same sequences each time; what was open at the end comes last."""
        stream = _Once(self._corpus, length=self._length, limit=self._limit)
        packer = Packer(stream, length=self._length, pad=self._pad)
        yield from packer
        yield from packer.rest()


class _Once(Stream):
    """A stream that ends when each document has been read once, or `limit` tokens have.

    A source that has no more leaves the mixture. The limit is one of documents, not of sequences: the first sequences
    to be full would be those of the long ones.
    """

    def __init__(self, corpus: Corpus, *, length: int, limit: int | None) -> None:
        super().__init__(corpus, length=length, seed=ORDER)
        self._limit = limit

    def __next__(self) -> Piece:
        while not self._waiting:
            left = None if self._limit is None else self._limit - sum(self._tokens)
            open_sources = [i for i, reader in enumerate(self._readers) if not reader.state()["epoch"]]
            if not open_sources or left == 0:
                raise StopIteration
            source = min(open_sources, key=lambda i: self._tokens[i] / self._corpus.weights[i])
            ids, labels, place = next(self._readers[source])
            if not self._readers[source].state()["epoch"]:
                document = Piece(ids[:left], labels[:left], place)
                self._tokens[source] += len(document.ids)
                self._waiting.extend(cut(document, self._length))
        return self._waiting.popleft()


def check_apart(data: Data, evaluation: Evaluation) -> None:
    """Refuse to call held-out what is trained on. Raises: ValueError naming a file that is read for both.

    What [data] names need not be there: a checkpoint may be evaluated elsewhere.
    """
    there = [source for source in data.all_sources if source.path == "stdlib" or Path(source.path).exists()]
    trained = {place for source in there for place in _places(source)}
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
        return [(str(Path(source.path).resolve()), source.split or "train")]
    return [(str(file.resolve()), "") for file in files_of(source)]
