"""Pass keys hidden in texts: made of token ids by the tokenizer of the run, scored by teacher forcing, never generated.

The text is filler, somewhere in it a sentence with the key, at its end the question; the key once more is the only
target. So a forward pass tells how often the most likely token is the right one.

Letters: N tokens of one text, S tokens of a packed sequence.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from ..config import Needle
from ..data import IGNORED, Sequence, Tokenizer
from .score import Marked

FILLER = b"The grass is green. The sky is blue. The sun is warm. The river runs down to the sea. "
BEFORE, AFTER = b"Keep this in mind: the pass key is", b". Somebody will ask for it. "
QUESTION = b"What was the pass key? The pass key is"
DIGITS = 5


class Text(NamedTuple):
    """Where a key is hidden; cell: row of the grid in the table."""

    length: int
    depth: float
    number: int
    cell: int


class Haystack:
    """The texts of a grid. Raises: ValueError for lengths without room, or a tokenizer that cannot spell keys."""

    def __init__(self, needle: Needle, tokenizer: Tokenizer, *, sequence_length: int) -> None:
        if needle.lengths[-1] > sequence_length:
            raise ValueError(
                f"evaluation.needle.lengths holds {needle.lengths[-1]}: at most sequence.length = {sequence_length} is "
                "accepted"
            )
        self._needle, self._encode = needle, tokenizer.encode
        self._length, self._pad = sequence_length, tokenizer.pad
        self._filler, self._before, self._after, self._question = tokenizer.encode([FILLER, BEFORE, AFTER, QUESTION])
        self.cells = list(product(needle.lengths, needle.depths))
        self._shared = self._shared_beginning()
        for text in self.texts():
            if text.length == needle.lengths[0]:
                self.ids_of(text)  # there is room for it

    def _shared_beginning(self) -> int:
        """Tokens with which every key begins, as the blank before it: they tell nothing and are no target."""
        keys = [tuple(ids.tolist()) for ids in self._encode([_spelled(str(digit) * DIGITS) for digit in range(10)])]
        if len(set(keys)) < len(keys):
            raise ValueError(
                "evaluation.needle: the tokenizer of data.tokenizer has no digits to spell a pass key with"
            )
        columns = zip(*keys, strict=False)
        return next((index for index, column in enumerate(columns) if len(set(column)) > 1), 0)

    def texts(self) -> list[Text]:
        """Every text, the longest first."""
        numbers = range(self._needle.samples)
        texts = [Text(*place, number, cell) for cell, place in enumerate(self.cells) for number in numbers]
        return sorted(texts, key=lambda text: (-text.length, text.cell, text.number))

    def ids_of(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """ids, labels of a text: int64 [N]. Raises: ValueError if it is too short for key and question."""
        draw = np.random.default_rng((self._needle.seed, text.length, round(text.depth * 1e6), text.number))
        (key,) = self._encode([_spelled(str(draw.integers(10 ** (DIGITS - 1), 10**DIGITS)))])
        hidden = np.concatenate((self._before, key, self._after))
        end = np.concatenate((self._question, key))
        room = text.length - len(hidden) - len(end)
        if room < 0:
            raise ValueError(
                f"evaluation.needle.lengths holds {text.length}: at least {text.length - room} tokens hold a pass key "
                "and the question for it, by this tokenizer"
            )
        filler, place = np.resize(self._filler, room), round(text.depth * room)
        ids = np.concatenate((filler[:place], hidden, filler[place:], end))
        labels = np.full_like(ids, IGNORED)
        targets = key[self._shared :]
        labels[-1 - len(targets) : -1] = targets
        return ids, labels

    def __iter__(self) -> Iterator[Marked]:
        """All texts as documents of packed sequences; each target counts for the cell of its text."""
        for texts in _packed(self.texts(), self._length):
            ids = np.full(self._length, self._pad, np.int64)
            labels, rows = np.full_like(ids, IGNORED), np.zeros_like(ids)
            borders = [0]
            for text in texts:
                place = slice(borders[-1], borders[-1] + text.length)
                ids[place], labels[place] = self.ids_of(text)
                rows[place] = text.cell
                borders.append(place.stop)
            yield Marked(Sequence(ids, labels, borders), rows, documents=True)


def _spelled(key: str) -> bytes:
    """A key as it follows a word."""
    return f" {key}".encode()


def _packed(texts: list[Text], length: int) -> list[list[Text]]:
    """First fit, the longest first: the texts of each sequence."""
    bins: list[list[Text]] = []
    room: list[int] = []
    for text in texts:
        index = next((i for i, left in enumerate(room) if left >= text.length), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(length)
        bins[index].append(text)
        room[index] -= text.length
    return bins
