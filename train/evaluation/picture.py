"""An evaluation as a picture: loss by position, and a heat map of the pass keys by length and depth."""

from pathlib import Path
from typing import Any

from .result import Cell, Range, Result

ANNOTATED = 150
"""Most cells of a grid in which numbers are still readable."""


def draw(result: Result, path: Path, *, name: str) -> None:
    """Write a PNG with what the evaluation holds. name: of the run. Raises: OSError."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    panels: list[tuple[Any, Any]] = []
    panels += [(_draw_positions, result.by_position)] if any(p.targets for p in result.by_position) else []
    panels += [(_draw_needle, result.needle)] if result.needle else []
    figure = Figure(figsize=(6.4 * max(len(panels), 1), 4.4), layout="constrained")
    for index, (panel, content) in enumerate(panels, 1):
        panel(figure, figure.add_subplot(1, len(panels), index), content)
    figure.suptitle(f"{name}, step {result.step:,}, {result.tokens_seen:,} tokens seen")
    figure.savefig(path, dpi=120)


def _draw_positions(figure: Any, axes: Any, ranges: list[Range]) -> None:
    shown = [part for part in ranges if part.loss is not None]
    axes.plot(range(len(shown)), [part.loss for part in shown], marker="o", color="C0")
    labels = [f"{short(part.first)}-{short(part.last + 1)}" for part in shown]
    axes.set_xticks(range(len(shown)), labels, rotation=45, ha="right")
    axes.set(title="held-out loss by position", xlabel="tokens before it in its document", ylabel="nats per token")
    axes.grid(alpha=0.3)


def _draw_needle(figure: Any, axes: Any, cells: list[Cell]) -> None:
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    shares = {(cell.length, cell.depth): cell.accuracy for cell in cells}
    grid = [[shares[length, depth] for length in lengths] for depth in depths]
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [short(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(title="pass key, teacher forcing", xlabel="tokens of the text", ylabel="depth of the key")
    if len(cells) <= ANNOTATED:
        for row, line in enumerate(grid):
            for column, share in enumerate(line):
                color = "black" if share > 0.6 else "white"
                axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(
        image,
        ax=axes,
        label="right tokens of the key",
        format=lambda value, _: f"{value:.0%}",
    )


def short(tokens: int) -> str:
    """A number of tokens as it is said: 131072 is 128k."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % (size // 4) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"
