"""What an evaluation found: plain numbers, the same on every rank, and the forms they are written in. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Number = float | int | None


class Range(NamedTuple):
    """Targets that are predicted at the positions first to last of their document; loss: nats, None without any."""

    first: int
    last: int
    targets: int
    loss: float | None


class Cell(NamedTuple):
    """Texts of one length with a pass key at one depth, 0 to 1; over the tokens of the keys."""

    length: int
    depth: float
    targets: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """One evaluation behind a step.

    time_s: of the slowest rank
    by_position: empty without held-out data; needle: empty without a grid
    """

    step: int
    tokens_seen: int
    time_s: float
    by_position: list[Range]
    needle: list[Cell]

    @property
    def targets(self) -> int:
        """Targets of the held-out data."""
        return sum(part.targets for part in self.by_position)

    @property
    def loss(self) -> float | None:
        """Mean over the targets of the held-out data, nats."""
        total = sum(part.loss * part.targets for part in self.by_position if part.loss is not None)
        return total / self.targets if self.targets else None

    @property
    def accuracy(self) -> float | None:
        """Share of the keys' tokens that were the most likely ones, over the whole grid."""
        return _mean([(cell.accuracy, cell.targets) for cell in self.needle])

    def row(self) -> dict[str, Number]:
        """Name -> number, as the metrics of a step are written."""
        row: dict[str, Number] = {"step": self.step, "tokens_seen": self.tokens_seen, "eval/time_s": self.time_s}
        if self.by_position:
            row |= {"eval/loss": self.loss, "eval/targets": self.targets}
        for part in self.by_position:
            row[f"eval/loss_by_position/{part.first}-{part.last}"] = part.loss
            row[f"eval/targets_by_position/{part.first}-{part.last}"] = part.targets
        if self.needle:
            row["eval/needle/accuracy"] = self.accuracy
            row["eval/needle/loss"] = _mean([(cell.loss, cell.targets) for cell in self.needle])
        for cell in self.needle:
            row[f"eval/needle/{cell.length}/{cell.depth:g}"] = cell.accuracy
        return row

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain tables."""
        numbers = ("step", "tokens_seen", "time_s", "loss", "targets", "accuracy")
        tables = {name: [in_json(part._asdict()) for part in getattr(self, name)] for name in ("by_position", "needle")}
        return in_json({name: getattr(self, name) for name in numbers}) | tables

    def table(self) -> list[str]:
        """Lines for a terminal."""
        lines = []
        if self.by_position:
            loss = "none" if self.loss is None else f"{self.loss:.4f}"
            lines.append(f"held-out loss  {loss} nats, {self.targets:,} targets")
            lines += [
                f"  position {part.first:>9,} to {part.last:>9,}  {part.loss:.4f}  {part.targets:>12,} targets"
                for part in self.by_position
                if part.loss is not None
            ]
        if self.needle:
            depths = sorted({cell.depth for cell in self.needle})
            lines.append(f"pass keys      {self.accuracy:.1%} of the tokens, by length and depth:")
            lines.append("  " + " " * 11 + "".join(f"{depth:>8.0%}" for depth in depths))
            for length in sorted({cell.length for cell in self.needle}):
                shares = [cell.accuracy for cell in self.needle if cell.length == length]
                lines.append(f"  {length:>11,}" + "".join(f"{share:>8.1%}" for share in shares))
        return lines


def in_json(row: Mapping[str, Number]) -> dict[str, float | int | str | None]:
    """What JSON has no word for as the strings "nan", "inf" and "-inf", which float() reads."""
    return {name: value if value is None or math.isfinite(value) else str(value) for name, value in row.items()}


def _mean(pairs: list[tuple[float, int]]) -> float | None:
    """The mean of values with weights."""
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else None
