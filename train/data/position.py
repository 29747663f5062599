"""What a saved position in the data must look like. A file may be torn, or of another program; its meaning is checked
against the data where it is used, by `stream` and `packing`."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

Saved = Annotated[list[NonNegativeInt], Field(min_length=6, max_length=6)]
"""See `Piece.saved`."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Cursor(_Record):
    epoch: NonNegativeInt
    chunk: NonNegativeInt
    row: NonNegativeInt
    rows: NonNegativeInt | None


class _Stream(_Record):
    made_by: dict[str, Any]
    sources: list[_Cursor]
    weights: list[PositiveFloat]
    tokens: list[NonNegativeInt]
    waiting: list[Saved]


class _Packer(_Record):
    consumed: NonNegativeInt
    length: PositiveInt
    open: list[list[Saved]]
    stream: _Stream


def check(state: Any) -> None:
    """Refuse what `Packer.state` cannot have made. Raises: ValueError, one sentence."""
    try:
        position = _Packer.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"the position in the data that was saved cannot be read: {where}: {first['msg']}") from None
    stream = position.stream
    if not len(stream.sources) == len(stream.weights) == len(stream.tokens):
        raise ValueError(
            "the position in the data that was saved cannot be read: its lists of sources differ in length"
        )
