"""Where documents lie: text files, JSON lines, Parquet, and datasets on disk, each as chunks that can be read alone.

A chunk is what is read at one time: any chunk can be found without reading those before it, and their number is known
from sizes alone. A row is one document inside a chunk. (chunk, row) finds a document again after a resume.
"""

import json
import sysconfig
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..config import Source

JSONL_CHUNK = 2**22
"""Bytes of a JSON-lines file that are read at one time."""

ROWS_CHUNK = 1024
"""Rows of a dataset on disk that are read at one time."""


class Row(NamedTuple):
    """One document as it was read. place: the file or folder; number: byte of the line, or row, that it begins at."""

    place: Path
    number: int
    value: Any


class Documents(Protocol):
    """The chunks of one source.

    sizes: bytes of each chunk, roughly; whole: whether a chunk is one document, so that mixing chunks mixes all
    """

    sizes: Sequence[int]
    whole: bool

    def read(self, chunk: int) -> list[Row]:
        """The rows of a chunk, in the order of the file."""

    def content(self, row: Row) -> Any:
        """The text, str or bytes, or the list of messages of a row. Raises: ValueError without the place."""

    def name(self, row: Row) -> str:
        """Where a row lies, for a person: file and line, or file and row."""

    def fingerprint(self) -> int:
        """A checksum of names and sizes, below 2^32: equal where (chunk, row) means the same document."""


def files_of(source: Source) -> list[Path]:
    """The files of a source, sorted by path. "stdlib": the standard library of this Python, its tests left out.

    Raises: ValueError if there are none, or for a pattern beside a single file.
    """
    folder = Path(sysconfig.get_path("stdlib")) if source.path == "stdlib" else Path(source.path)
    if folder.is_file():
        if source.pattern is not None:
            raise ValueError(
                f"data: pattern = {source.pattern!r} is given but path = {source.path!r} is one file: leave it out"
            )
        return [folder]
    files = sorted(file for file in folder.glob(source.glob) if file.is_file())
    if source.path == "stdlib":
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        files = [file for file in files if not skipped & set(file.relative_to(folder).parts)]
    if not files:
        raise ValueError(f"data: path = {source.path!r} holds no file that fits {source.glob!r}")
    return files


def _checksum(files: Sequence[Path], *sizes: Sequence[int]) -> int:
    return zlib.crc32(repr(list(zip([file.name for file in files], *sizes, strict=True))).encode())


def _refuse_empty(files: Sequence[Path], sizes: Sequence[int]) -> None:
    for file, size in zip(files, sizes, strict=True):
        if not size:
            raise ValueError(f"{file} is empty: at least one document was expected")


class TextFiles:
    """Each file is one document; an empty one is a document without text."""

    whole = True

    def __init__(self, source: Source) -> None:
        self._files = files_of(source)
        self.sizes = [file.stat().st_size for file in self._files]

    def read(self, chunk: int) -> list[Row]:
        return [Row(self._files[chunk], 0, self._files[chunk].read_bytes())]

    def content(self, row: Row) -> bytes:
        return row.value

    def name(self, row: Row) -> str:
        return str(row.place)

    def fingerprint(self) -> int:
        return _checksum(self._files, self.sizes)


class JsonLines:
    """Each line is a JSON object; empty lines are passed over.

    A file is cut every JSONL_CHUNK bytes. A line belongs to the chunk in which its first byte lies.
    """

    whole = False

    def __init__(self, source: Source) -> None:
        self._field = source.field
        self._files = files_of(source)
        self._lengths = [file.stat().st_size for file in self._files]
        _refuse_empty(self._files, self._lengths)
        self._chunks = [
            (file, start, min(start + JSONL_CHUNK, length))
            for file, length in zip(self._files, self._lengths, strict=True)
            for start in range(0, length, JSONL_CHUNK)
        ]
        self.sizes = [stop - start for _, start, stop in self._chunks]

    def read(self, chunk: int) -> list[Row]:
        path, start, stop = self._chunks[chunk]
        rows = []
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # the rest of a line that begins before this chunk
            while (begin := file.tell()) < stop:
                line = file.readline()
                if line.strip():
                    rows.append(Row(path, begin, line))
        return rows

    def content(self, row: Row) -> Any:
        try:
            parsed = json.loads(row.value)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start} of the line)") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at character {error.pos} of the line)") from None
        except RecursionError:
            raise ValueError("not JSON that can be read (brackets inside brackets, too many)") from None
        return _field_of(parsed, self._field)

    def name(self, row: Row) -> str:
        with row.place.open("rb") as file:
            left, line = row.number, 1
            while left and (block := file.read(min(left, 2**20))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{row.place}, line {line}"

    def fingerprint(self) -> int:
        return _checksum(self._files, self._lengths)


class Parquet:
    """Row groups of Parquet files; of each only the field's column is read."""

    whole = False

    def __init__(self, source: Source) -> None:
        from pyarrow import ArrowException

        self._field = source.field
        self._files = files_of(source)
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, its first row
        self._rows: list[int] = []
        self.sizes: list[int] = []
        for file in self._files:
            try:
                self._add(file)
            except (OSError, ArrowException) as error:
                raise ValueError(f"{file} cannot be read as Parquet: {error}") from error

    def _add(self, file: Path) -> None:
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            facts, columns = opened.metadata, opened.schema_arrow.names
        if self._field not in columns:
            raise ValueError(f"{file} has no column {self._field!r}: it has {', '.join(columns)}")
        _refuse_empty([file], [facts.num_rows])
        groups = [facts.row_group(index) for index in range(facts.num_row_groups)]
        rows = [group.num_rows for group in groups]
        self._groups += [(file, *numbered) for numbered in enumerate(accumulate(rows[:-1], initial=0))]
        self._rows += rows
        self.sizes += [group.total_byte_size for group in groups]

    def read(self, chunk: int) -> list[Row]:
        from pyarrow import parquet

        path, group, first = self._groups[chunk]
        with parquet.ParquetFile(path) as opened:
            column = opened.read_row_group(group, columns=[self._field]).column(0)
        return [Row(path, first + index, value) for index, value in enumerate(_values(column))]

    def content(self, row: Row) -> Any:
        return _present(row.value, self._field)

    def name(self, row: Row) -> str:
        return f"{row.place}, row {row.number}"

    def fingerprint(self) -> int:
        return _checksum([file for file, *_ in self._groups], self._rows, self.sizes)


class OnDisk:
    """A folder that the `datasets` library loads: one that it saved, or files of any kind that it knows.

    The first use of such files lets the library convert them to Arrow in its cache; from then on they are mapped.
    """

    whole = False

    def __init__(self, source: Source) -> None:
        self._field, self._place = source.field, Path(source.path)
        loaded = _load(source)
        if self._field not in loaded.column_names:
            raise ValueError(f"{source.path} has no column {self._field!r}: it has {', '.join(loaded.column_names)}")
        _refuse_empty([self._place], [loaded.num_rows])
        self._dataset = loaded.select_columns([self._field]).with_format("arrow")
        chunks = -(-loaded.num_rows // ROWS_CHUNK)
        self._bytes = self._dataset.data.nbytes
        self.sizes = [self._bytes // chunks] * chunks

    def read(self, chunk: int) -> list[Row]:
        first = chunk * ROWS_CHUNK
        column = self._dataset[first : first + ROWS_CHUNK].column(0)
        return [Row(self._place, first + index, value) for index, value in enumerate(_values(column))]

    def content(self, row: Row) -> Any:
        return _present(row.value, self._field)

    def name(self, row: Row) -> str:
        return f"{row.place}, row {row.number}"

    def fingerprint(self) -> int:
        return _checksum([self._place], [self._dataset.num_rows], [self._bytes])


def _load(source: Source) -> Any:
    """The split that a source names, as a mapped dataset. Raises: ValueError."""
    import datasets

    folder = Path(source.path).resolve()
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data: path = {source.path!r} cannot be loaded by the datasets library: {error}") from error
    if not isinstance(loaded, dict):
        if source.split is not None:
            raise ValueError(f"data: split = {source.split!r} but path = {source.path!r} has no splits: leave it out")
        return loaded
    split = source.split or "train"
    if split not in loaded:
        raise ValueError(f"data: path = {source.path!r} has no split {split!r}: it has {', '.join(loaded)}")
    return loaded[split]


def _values(column: Any) -> list[Any]:
    """The rows of a column of pyarrow: lists of integers as arrays of numpy, anything else as Python has it."""
    from pyarrow import types

    kind = column.type
    if (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type):
        return [row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in column]
    return column.to_pylist()


def _field_of(parsed: Any, field: str) -> Any:
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON object was expected, found {type(parsed).__name__}")
    if field not in parsed:
        raise ValueError(f"the field {field!r} is missing: there are {', '.join(parsed) or 'none'}")
    return _present(parsed[field], field)


def _present(value: Any, field: str) -> Any:
    if value is None:
        raise ValueError(f"the field {field!r} is null")
    return value


FORMATS: dict[str, Any] = {"text": TextFiles, "jsonl": JsonLines, "parquet": Parquet, "datasets": OnDisk}
"""Value of `format` -> what reads it."""


def documents_of(source: Source) -> Documents:
    """The documents of one source. Raises: ValueError naming the file, for what can be seen before reading."""
    return FORMATS[source.format](source)
