"""Text files -> documents of token ids -> packed sequences -> whole accumulation windows.

Everything is a pure function of (files, seed), the same on every rank: each rank reads the whole stream and keeps the
sequences that fall to its ring, so the order does not depend on the mesh. Cutting over a ring is the layout's work.

Letters: S tokens of one packed sequence.
"""

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .config import Batch, Data

IGNORED = -100
"""Label of a token without a target."""

OPEN_SEQUENCES = 8
"""Sequences that are filled at one time: more leave less padding, and mix the order more."""


class Tokenizer(Protocol):
    """Token ids of a file's text. size: ids are below it; end: closes each document; pad: fills a sequence."""

    size: int
    end: int
    pad: int

    def encode(self, file: Path) -> np.ndarray:
        """The file's text as int64 ids, without `end`."""


class ByteTokenizer:
    """The bytes of the file, whatever its encoding; 256 ends a document, 257 pads."""

    size, end, pad = 258, 256, 257

    def encode(self, file: Path) -> np.ndarray:
        return np.frombuffer(file.read_bytes(), np.uint8).astype(np.int64)


class FolderTokenizer:
    """A tokenizer of transformers from a local folder. Raises: ValueError if it has no token to end a document."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.size = len(self._tokenizer)
        self.end = self._tokenizer.eos_token_id
        if self.end is None:
            raise ValueError(f"data.tokenizer = {folder!r} has no eos_token, which must end each document")
        pad = self._tokenizer.pad_token_id
        self.pad = self.end if pad is None else pad

    def encode(self, file: Path) -> np.ndarray:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def tokenizer_of(data: Data, vocab_size: int) -> Tokenizer:
    """The tokenizer that [data] names. ValueError naming both sizes if its ids do not fit the model's embedding."""
    tokenizer: Tokenizer = ByteTokenizer() if data.tokenizer == "bytes" else FolderTokenizer(data.tokenizer)
    if tokenizer.size > vocab_size:
        raise ValueError(
            f"data.tokenizer = {data.tokenizer!r} has {tokenizer.size} token ids, model.config.vocab_size = "
            f"{vocab_size} holds fewer: at least {tokenizer.size} is needed"
        )
    return tokenizer


def files_of(data: Data) -> list[Path]:
    """The files of the run, sorted by path. "stdlib": the standard library of this Python, its tests left out."""
    if data.path != "stdlib":
        return sorted(file for file in Path(data.path).glob(data.pattern) if file.is_file())
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = (file for file in folder.glob(data.pattern) if not skipped & set(file.relative_to(folder).parts))
    return sorted(file for file in files if file.is_file())


@dataclass(frozen=True, eq=False)
class Sequence:
    """One packed sequence, whole, on the host.

    ids: int64 [S]; labels: int64 [S], the id that follows each token in its document, or IGNORED
    cu_seqlens: borders of the documents, 0 first; tokens from the last border on are padding
    """

    ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: list[int]

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


Piece = tuple[np.ndarray, np.ndarray]
"""(ids, labels) of a document, or of a part of a long one."""


def labels_of(ids: np.ndarray) -> np.ndarray:
    """The id that follows each token of one document; its last token has no target. int64, same length."""
    return np.append(ids[1:], IGNORED)


def pieces(files: list[Path], tokenizer: Tokenizer, *, length: int, seed: int, shuffle: bool) -> Iterator[Piece]:
    """Documents without end, in an order drawn from (seed, epoch) or as listed, cut into pieces of at most `length`.

    Labels are made before the cut, so the last token of a piece still has its target, and no token is lost. Each piece
    is a document of its own for attention and positions.
    """
    for epoch in count():
        order = np.random.default_rng((seed, epoch)).permutation(len(files)) if shuffle else np.arange(len(files))
        for index in order:
            ids = np.append(tokenizer.encode(files[index]), tokenizer.end)
            labels = labels_of(ids)
            for start in range(0, len(ids), length):
                yield ids[start : start + length], labels[start : start + length]


def pack(stream: Iterator[Piece], *, length: int, pad: int) -> Iterator[Sequence]:
    """Fill sequences of `length` with whole pieces; what stays empty is padding at the end.

    A piece goes into the open sequence that it fills best. A full one leaves; if a piece fits nowhere and
    OPEN_SEQUENCES are open, the fullest leaves first. The order depends on nothing but the stream.
    """
    open_sequences: list[list[Piece]] = []
    for piece in stream:
        room = [length - _used(parts) for parts in open_sequences]
        fitting = [index for index, free in enumerate(room) if free >= len(piece[0])]
        if fitting:
            parts = open_sequences[min(fitting, key=room.__getitem__)]
        else:
            if len(open_sequences) == OPEN_SEQUENCES:
                yield _close(open_sequences.pop(room.index(min(room))), length, pad)
            parts = []
            open_sequences.append(parts)
        parts.append(piece)
        if _used(parts) == length:
            open_sequences = [other for other in open_sequences if other is not parts]
            yield _close(parts, length, pad)


def _used(parts: list[Piece]) -> int:
    return sum(len(ids) for ids, _ in parts)


def _close(parts: list[Piece], length: int, pad: int) -> Sequence:
    ids, labels = np.full(length, pad, np.int64), np.full(length, IGNORED, np.int64)
    borders = [0, *np.cumsum([len(part) for part, _ in parts]).tolist()]
    ids[: borders[-1]] = np.concatenate([part for part, _ in parts])
    labels[: borders[-1]] = np.concatenate([part for _, part in parts])
    return Sequence(ids, labels, borders)


def windows(
    sequences: Iterator[Sequence], batch: Batch, *, data_rank: int, data_size: int
) -> Iterator[list[list[Sequence]]]:
    """For each step, what this ring trains on: `accumulation` micro-batches of `micro_batch` sequences.

    A step takes the next `global_batch` sequences, whatever the mesh, so every rank makes the same number of steps.
    """
    while True:
        step = [next(sequences) for _ in range(batch.global_batch)]
        mine = step[data_rank::data_size]
        yield [mine[start : start + batch.micro_batch] for start in range(0, len(mine), batch.micro_batch)]


def window_digest(window: list[list[Sequence]]) -> int:
    """A checksum of a whole window, below 2^32."""
    return zlib.crc32(np.asarray([sequence.digest() for micro in window for sequence in micro], np.int64).tobytes())


def check_digests(digests: np.ndarray, ring_size: int) -> None:
    """Refuse to go on when the ranks of a ring hold different batches.

    digests: [ranks] of all ranks, rings one after the other; ring_size: ranks that share a sequence
    Raises: ValueError naming the odd ranks, on every rank alike.
    """
    for first in range(0, len(digests), ring_size):
        mine = digests[first : first + ring_size].tolist()
        common = max(mine, key=mine.count)
        odd = [first + index for index, digest in enumerate(mine) if digest != common]
        if odd:
            raise ValueError(
                f"rank(s) {odd} hold another batch than the rest of their ring, "
                f"ranks {first} to {first + ring_size - 1}: all ranks of a ring must read the same files in one order"
            )
