"""Sources -> documents in the order of the run -> pieces that fit a sequence, and where each of them came from.

Everything is a pure function of (files, seed), the same on every rank, so the order does not depend on the mesh. The
state is small: positions in orders that can be drawn again, and the places of pieces that wait.
"""

import contextlib
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..config import Data
from .sources import Documents, Row, documents_of
from .tokens import IGNORED, Encoded, Encoder, Tokenizer, chat_encoder, id_encoder, text_encoder

POOL = 2**26
"""Bytes of neighbouring rows that are read and shuffled together."""


TOGETHER, TOGETHER_ROWS = 2**20, 32
"""Bytes and rows of one source that are encoded together: the first that is reached ends a batch."""


CHANGED = "not as it was when the position was saved; take the same files and tokenizer, or begin a new run"


class Place(NamedTuple):
    """Where a piece comes from: source, chunk, row in the chunk; first token in the document, and one past the last."""

    source: int
    chunk: int
    row: int
    start: int
    stop: int


class Piece(NamedTuple):
    """A document, or a part of a long one: ids, labels int64, of one length."""

    ids: np.ndarray
    labels: np.ndarray
    place: Place

    def checksum(self) -> int:
        return zlib.crc32(self.labels.tobytes(), zlib.crc32(self.ids.tobytes()))

    def saved(self) -> list[int]:
        """Its place and a checksum: plain numbers by which `Corpus.pieces_at` finds it again."""
        return [*self.place, self.checksum()]


def cut(piece: Piece, length: int) -> list[Piece]:
    """A piece in parts of at most `length` tokens. Labels were made before: the last token of each keeps its target."""
    ids, labels, place = piece
    starts = range(0, len(ids), length)
    return [
        Piece(
            ids[start : start + length],
            labels[start : start + length],
            place._replace(start=place.start + start, stop=min(place.start + start + length, place.stop)),
        )
        for start in starts
    ]


class Corpus:
    """All sources of a run with the encoder of each. Raises: ValueError for what can be seen before reading."""

    def __init__(self, data: Data, tokenizer: Tokenizer) -> None:
        sources = data.all_sources
        self.weights = [source.weight for source in sources]
        self.shuffle = data.shuffle
        self.documents: list[Documents] = [documents_of(source) for source in sources]
        self._encoders: list[Encoder] = [
            (chat_encoder if source.chat else id_encoder if source.tokens else text_encoder)(tokenizer)
            for source in sources
        ]
        # what must not change for a place to mean the same tokens
        self.identity: dict[str, Any] = {
            "the files": [documents.fingerprint() for documents in self.documents],
            "field, chat and tokens": [[source.field, source.chat, source.tokens] for source in sources],
            "the tokenizer's size, end and pad": [tokenizer.size, tokenizer.end, tokenizer.pad],
        }

    def encode(self, source: int, rows: list[Row]) -> list[Encoded | ValueError]:
        """Each document as (ids, labels), or why it cannot be: an error that begins with file and line."""
        documents, encoder = self.documents[source], self._encoders[source]

        def alone(row: Row) -> Encoded | ValueError:
            try:
                return encoder([documents.content(row)])[0]
            except ValueError as error:
                named = ValueError(f"{documents.name(row)}: {error}")
                named.__cause__ = error
                return named

        try:
            return [*encoder([documents.content(row) for row in rows])]
        except ValueError:
            return [alone(row) for row in rows]

    def names(self, places: Iterable[Place], *, lines: bool) -> list[str]:
        """File, and line or row, of each place, read again. One that cannot be is named by its numbers.

        lines: count lines, for which a file is read from its begin; otherwise the byte stands for the line
        """
        wanted = list(places)
        named: dict[tuple[int, int, int], str] = {}
        for (source, chunk), group in groupby(sorted({place[:3] for place in wanted}), key=itemgetter(0, 1)):
            documents = self.documents[source]
            with contextlib.suppress(OSError, ValueError, LookupError):
                rows = documents.read(chunk)
                for *_, index in group:
                    row = rows[index]
                    named[source, chunk, index] = documents.name(row) if lines else f"{row.place}, {row.number}"
        numbers = "row {2} of chunk {1} of source {0}"
        return [named.get(place[:3]) or numbers.format(*place) for place in wanted]

    def pieces_at(self, saved: Iterable[Sequence[int]]) -> list[Piece]:
        """The pieces that `Piece.saved` gave, in their order. Each chunk is read once, one after the other.

        Raises: ValueError if one of them is not what it was.
        """
        wanted = [(Place(*place), checksum) for *place, checksum in saved]
        found: dict[tuple[int, int, int], tuple[Row, Encoded]] = {}
        for (source, chunk), group in groupby(sorted({place[:3] for place, _ in wanted}), key=itemgetter(0, 1)):
            if source >= len(self.documents) or chunk >= len(self.documents[source].sizes):
                raise ValueError(f"source {source} of [data] has no chunk {chunk}: {CHANGED}")
            read, keys = self.documents[source].read(chunk), list(group)
            if keys[-1][2] >= len(read):
                raise ValueError(f"source {source} of [data] has {len(read)} rows in chunk {chunk}: {CHANGED}")
            rows = [read[row] for *_, row in keys]
            for key, row, document in zip(keys, rows, self.encode(source, rows), strict=True):
                found[key] = row, _good(document)
        return [self._piece(place, *found[place[:3]], checksum=checksum) for place, checksum in wanted]

    def _piece(self, place: Place, row: Row, document: Encoded, *, checksum: int) -> Piece:
        ids, labels = (values[place.start : place.stop] for values in document)
        piece = Piece(ids, labels, place)
        if piece.checksum() != checksum:
            raise ValueError(f"{self.documents[place.source].name(row)}: {CHANGED}")
        return piece


def _good(document: Encoded | ValueError) -> Encoded:
    if isinstance(document, ValueError):
        raise document
    return document


class Cursor:
    """The documents of one source without end, in an order drawn from (seed, epoch, index of the source) or as listed.

    Shuffled: chunks in a drawn order, and the rows of neighbouring chunks, up to POOL bytes, mixed among themselves.
    """

    def __init__(
        self, documents: Documents, *, seed: int, index: int, shuffle: bool, state: dict[str, Any] | None = None
    ) -> None:
        start = state or {"epoch": 0, "chunk": 0, "row": 0, "rows": None}
        self._documents, self._seed, self._index, self._shuffle = documents, seed, index, shuffle
        self.epoch: int = start["epoch"]
        self._first: int = start["chunk"]
        self._next: int = start["row"]
        self._saved: int | None = start["rows"]
        self._found = state is not None
        self._order = self._drawn(len(documents.sizes))
        self._pool: list[tuple[int, int, Row]] | None = None  # read when a document is asked for

    def state(self) -> dict[str, Any]:
        """epoch; chunk: the first of this pool, as a place in the epoch's order; row: the next in the pool's order;
        rows: of this pool, None if it was not read yet."""
        rows = self._saved if self._pool is None else len(self._pool)
        return {"epoch": self.epoch, "chunk": self._first, "row": self._next, "rows": rows}

    def __next__(self) -> tuple[int, int, Row]:
        """(chunk, row in the chunk, the row). Raises: ValueError if an epoch holds no document."""
        if self._pool is None:
            self._pool = self._load()
        while self._next == len(self._pool):
            self._pool = self._advance()
        self._found = True
        self._next += 1
        return self._pool[self._next - 1]

    def _advance(self) -> list[tuple[int, int, Row]]:
        self._first, self._next = self._last, 0
        if self._last == len(self._order):
            if not self._found:
                raise ValueError(f"a source of [data] holds no document: {len(self._order)} chunk(s) were read")
            self.epoch, self._first, self._found = self.epoch + 1, 0, False
            self._order = self._drawn(len(self._order))
        return self._load()

    def _drawn(self, count: int, *draw: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng((self._seed, self.epoch, self._index, *draw)).permutation(count)

    def _load(self) -> list[tuple[int, int, Row]]:
        """The pool that begins at the chunk `_first` of the order. Raises: ValueError if it is not the one saved."""
        if self._first >= len(self._order):
            raise ValueError(
                f"source {self._index} of [data] has {len(self._order)} chunks, not {self._first}: {CHANGED}"
            )
        self._last, size = self._first, 0
        pool: list[tuple[int, int, Row]] = []
        while self._last == self._first or self._mixes(size):
            chunk = int(self._order[self._last])
            pool += [(chunk, index, row) for index, row in enumerate(self._documents.read(chunk))]
            size += self._documents.sizes[chunk]
            self._last += 1
        if self._saved not in (None, len(pool)) or self._next > len(pool):
            raise ValueError(
                f"source {self._index} of [data] has {len(pool)} rows from chunk {self._first} of the order on, "
                f"{self._saved} were there: {CHANGED}"
            )
        self._saved = None
        return [pool[index] for index in self._drawn(len(pool), self._first + 1)]

    def _mixes(self, size: int) -> bool:
        """Whether a pool of this many bytes takes in another chunk."""
        return self._shuffle and not self._documents.whole and size < POOL and self._last < len(self._order)


class Reader:
    """The encoded documents of one source, in the order of its cursor, which runs ahead by what is encoded together."""

    def __init__(self, corpus: Corpus, source: int, cursor: Cursor) -> None:
        self._corpus, self._source, self._cursor = corpus, source, cursor
        self._state = cursor.state()
        self._ready: deque[tuple[Piece | ValueError, dict[str, Any]]] = deque()

    def __next__(self) -> Piece:
        """A whole document. Raises: ValueError naming file and line of one that cannot be encoded."""
        if not self._ready:
            self._encode()
        document, state = self._ready.popleft()
        if isinstance(document, ValueError):
            raise document
        self._state = state
        return document

    def _encode(self) -> None:
        taken: list[tuple[int, int, Row]] = []
        states, size = [], 0
        while len(taken) < TOGETHER_ROWS and size < TOGETHER:
            taken.append(next(self._cursor))
            states.append(self._cursor.state())
            value = taken[-1][2].value
            size += len(value) if isinstance(value, bytes | str) else 0
        encoded = self._corpus.encode(self._source, [row for *_, row in taken])
        for (chunk, row, _), document, state in zip(taken, encoded, states, strict=True):
            if isinstance(document, ValueError):
                self._ready.append((document, state))
            else:
                place = Place(self._source, chunk, row, 0, len(document[0]))
                self._ready.append((Piece(*document, place), state))

    def state(self) -> dict[str, Any]:
        """The cursor's, behind the last document that was handed out."""
        return self._state


class Stream:
    """Pieces of at most `length` tokens, without end, out of all sources.

    The next document is one of the source that is furthest behind its weight in tokens, so the shares hold at every
    moment to within a document. Raises, with a state: ValueError if it was made by other files, another seed or order.
    `next` raises ValueError for a source that holds no target.
    """

    def __init__(self, corpus: Corpus, *, length: int, seed: int, state: dict[str, Any] | None = None) -> None:
        self._corpus, self._length, self._seed = corpus, length, seed
        count = len(corpus.documents)
        if state:
            self._check(state["made_by"])
        saved = state["sources"] if state else [None] * count
        self._readers = [
            Reader(corpus, i, Cursor(documents, seed=seed, index=i, shuffle=corpus.shuffle, state=saved[i]))
            for i, documents in enumerate(corpus.documents)
        ]
        # what an epoch held before a position that was saved is not known
        self._taught = [state is not None] * count
        # other weights begin a new account, or the source that gained would be read alone until it had caught up
        kept = state is not None and state["weights"] == corpus.weights
        self._tokens: list[int] = list(state["tokens"]) if state and kept else [0] * count
        waiting = corpus.pieces_at(state["waiting"]) if state else []
        self._waiting = deque(part for piece in waiting for part in cut(piece, length))

    def _made_by(self) -> dict[str, Any]:
        return {"train.seed": self._seed, "data.shuffle": self._corpus.shuffle, **self._corpus.identity}

    def _check(self, saved: dict[str, Any]) -> None:
        for name, value in self._made_by().items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the position in the data was saved with {name} = {saved.get(name)}, this run has {value}: "
                    "the order would be another one; take the same data, or begin a new run"
                )

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        if not self._waiting:
            source = min(range(len(self._tokens)), key=lambda i: self._tokens[i] / self._corpus.weights[i])
            epoch = self._readers[source].state()["epoch"]
            document = next(self._readers[source])
            self._check_taught(source, document, begins=self._readers[source].state()["epoch"] != epoch)
            self._tokens[source] += len(document.ids)
            self._waiting.extend(cut(document, self._length))
        return self._waiting.popleft()

    def _check_taught(self, source: int, document: Piece, *, begins: bool) -> None:
        """Refuse a source whose epoch ended without a target. begins: whether a document is the first of an epoch."""
        if begins and not self._taught[source]:
            raise ValueError(f"source {source} of [data] holds nothing to train on: all of its documents are empty")
        self._taught[source] = bool((document.labels != IGNORED).any()) or (self._taught[source] and not begins)

    def at(self, state: dict[str, Any]) -> "Stream":
        """The same stream where a state was taken. Raises: ValueError for a state of other data."""
        return Stream(self._corpus, length=self._length, seed=self._seed, state=state)

    def names(self, places: Iterable[Place], *, lines: bool) -> list[str]:
        """See `Corpus.names`."""
        return self._corpus.names(places, lines=lines)

    def pieces_at(self, saved: Iterable[Sequence[int]]) -> list[Piece]:
        """The pieces that `Piece.saved` gave, in their order. Raises: ValueError if one is not what it was."""
        return self._corpus.pieces_at(saved)

    def put_back(self, pieces: Iterable[Piece]) -> None:
        """Hand out these pieces before all others, cut to `length`."""
        self._waiting.extendleft(reversed([part for piece in pieces for part in cut(piece, self._length)]))

    def state(self) -> dict[str, Any]:
        """Plain lists and numbers from which the same pieces follow."""
        return {
            "made_by": self._made_by(),
            "sources": [reader.state() for reader in self._readers],
            "weights": self._corpus.weights,
            "tokens": list(self._tokens),
            "waiting": [piece.saved() for piece in self._waiting],
        }
