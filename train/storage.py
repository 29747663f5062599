"""The files of a checkpoint: torch.distributed.checkpoint's own, each durable once written, none of them read as code.

A tensor is saved flat, in ranges, by whoever holds them, and read in other ranges by others; values are saved whole, by
one rank each. Written by `saver`, from its thread too, and read by `resume` and `export`.
"""

import io
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .partitions import Piece

INDEX = ".metadata"
"""The library's file of what is where: a pickle."""

RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
}
"""module -> what an index may name: records, dtypes, and a path."""


class StorageError(Exception):
    """Files that one rank could not write or read. The same on all ranks.

    rank: which; its own words are the message
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


def shared_out(pieces: list[Piece], rank: int, size: int) -> list[Piece]:
    """What a rank writes: its pieces, and of those that every rank holds whole its share."""
    parts = []
    for piece in pieces:
        if piece.whole:
            share = -(-piece.numel // size)
            start = share * rank
            piece = piece._replace(start=start, part=piece.part[start : start + share], whole=False)
        if len(piece.part):
            parts.append(piece)
    return parts


def write(folder: Path, pieces: list[Piece], values: dict[str, Any], group: dist.ProcessGroup) -> dict[str, int]:
    """Write a checkpoint's files and wait until they are on disk. All ranks must call it.

    pieces: see `shared_out`, on the CPU; values: name -> tensors and plain values of this rank alone
    returns file name -> bytes, of all ranks, on the first one, which may rename the folder; nothing elsewhere
    Raises: StorageError. RuntimeError if a rank does not come.
    """
    planner, writer = _Saved(pieces, values), _Writer(folder)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _first(error) from None
    if dist.get_rank(group) != 0:
        return {}
    return {INDEX: (folder / INDEX).stat().st_size, **dict(sorted(writer.files.items()))}


class Reader:
    """A checkpoint's files, read in any ranges. Raises: ValueError for an index that is broken or names programs."""

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self._index = self._reader.read_metadata()

    def kinds(self) -> set[str]:
        """Of what kinds, in the sense of Piece.key, the tensors are."""
        return {key.partition(".")[0] for key in self._tensors()}

    def refuses(self, pieces: Iterable[Piece]) -> str | None:
        """Why pieces cannot be read: their tensor is not there, or is of another size or dtype."""
        tensors = self._tensors()
        for piece in pieces:
            there = tensors.get(piece.key)
            if there is None:
                return f"{self._reader.path} holds no {piece.key}, which this run has"
            saved, wanted = (there.size.numel(), there.properties.dtype), (piece.numel, piece.part.dtype)
            if saved != wanted:
                return (
                    f"{self._reader.path} holds {saved[0]} numbers in {saved[1]} of {piece.key}, "
                    f"this run has {wanted[0]} in {wanted[1]}"
                )
        return None

    def fill(self, pieces: list[Piece], names: Iterable[str], group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Read the pieces into their parts, and return the values with these names. All ranks must call it.

        group: None in a process that is alone
        Raises: StorageError for a file that is broken, or holds more than tensors and plain values.
        """
        planner = _Wanted(pieces, list(names))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # so it is: alone
                dcp.load({}, storage_reader=self._reader, planner=planner, process_group=group)
        except CheckpointException as error:
            raise _first(error) from None
        return planner.values

    def _tensors(self) -> dict[str, Any]:
        whole = self._index.state_dict_metadata.items()
        return {key: there for key, there in whole if isinstance(there, records.TensorStorageMetadata)}


def _first(error: CheckpointException) -> StorageError:
    rank, (cause, _) = min(error.failures.items())
    return StorageError(rank, str(cause) or type(cause).__name__)


class _Saved(DefaultSavePlanner):
    """Each piece as a range of its tensor."""

    def __init__(self, pieces: list[Piece], values: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.key: piece for piece in pieces}
        self._values = values

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(records.MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._values]
        for key, numel, start, part, _ in self._pieces.values():
            chunk = records.ChunkStorageMetadata(torch.Size((start,)), part.size())
            data = TensorWriteData(chunk, records.TensorProperties(dtype=part.dtype), torch.Size((numel,)))
            items.append(WriteItem(records.MetadataIndex(key, (start,)), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._pieces[key].part
        data = io.BytesIO()
        torch.save(self._values[key], data)
        return data


class _Writer(dcp.FileSystemWriter):
    """files: name -> bytes, on the first rank once all is written."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, int] = {}
        # nothing is copied ahead: the pieces are on the CPU, and the copier would wait for the GPU's steps
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:  # torch's writer hides the OSError beneath a RuntimeError
            cause = error if isinstance(error, OSError) else error.__context__ or error
            reason = getattr(cause, "strerror", None) or cause
            raise OSError(f"a file in {self.path} cannot be written: {reason}") from None

    def finish(self, metadata: records.Metadata, results: list[list[WriteResult]]) -> None:
        for place in (result.storage_data for of_rank in results for result in of_rank):
            self.files[place.relative_path] = max(self.files.get(place.relative_path, 0), place.offset + place.length)
        super().finish(metadata, results)


class _Wanted(LoadPlanner):
    """Whatever overlaps the pieces, and some values."""

    def __init__(self, pieces: list[Piece], names: list[str]) -> None:
        self._pieces = {piece.key: piece for piece in pieces if len(piece.part)}
        self._names = names
        self.values: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: records.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._index = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        zero = torch.Size((0,))
        items = [
            ReadItem(LoadItemType.BYTE_IO, name, zero, name, zero, zero)
            for name in map(records.MetadataIndex, self._names)
        ]
        for key, piece in self._pieces.items():
            there: Any = self._index[key]
            for chunk in there.chunks:
                begin, saved = chunk.offsets[0], chunk.sizes[0]
                first, last = max(begin, piece.start), min(begin + saved, piece.start + len(piece.part))
                if first < last:
                    dest, source = (torch.Size((first - origin,)) for origin in (piece.start, begin))
                    index = records.MetadataIndex(key, (begin,))
                    items.append(ReadItem(LoadItemType.TENSOR, index, dest, index, source, torch.Size((last - first,))))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.storage_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        start = read_item.dest_offsets[0]
        return self._pieces[read_item.storage_index.fqn].part[start : start + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Reader(dcp.FileSystemReader):
    def read_metadata(self) -> records.Metadata:
        """The index, which the library would unpickle whatever it holds. Raises: ValueError."""
        try:
            with (Path(self.path) / INDEX).open("rb") as file:
                return _Index(file).load()
        except Exception as error:
            raise ValueError(f"{self.path} is not loaded: its {INDEX} {_broken(error)}") from None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            raise ValueError(f"{self.path} is not loaded: a file in it {_broken(error)}") from None


def _broken(error: Exception) -> str:
    # the first sentence: what torch says behind it advises to load programs
    said = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
    return f"is broken, or holds more than tensors and plain values, which could run code ({said})"


class _Index(pickle.Unpickler):
    """Unpickles records of the library and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
