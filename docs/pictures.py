"""Pictures from result files: made by render.py, readable on light and on dark pages (transparent, in middle tones).

Each picture is an SVG that keeps the digest of the rows it shows, so that a stale one is found without drawing it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
INK = "#768390"
DIRECTIONS = ("forward", "backward")
MASKS = {"full": "full", "causal": "causal", "window": "window of 4096", "documents": "documents, mean 2k"}
# (kernel, form) -> label, colour, marker; a form is drawn dashed in its kernel's colour; later ones lie on top
LINES = {
    ("fa2", ""): ("FlashAttention-2", "#8c959f", "v"),
    ("flex", ""): ("FlexAttention", "#c255a0", "D"),
    ("cudnn", ""): ("cuDNN", "#bf8700", "s"),
    ("fa4", ""): ("FlashAttention-4", "#d1453b", "^"),
    ("triton", ""): ("ringflash triton", "#2a9d8f", "o"),
    ("gluon", "deterministic"): ("ringflash gluon, deterministic", "#2f81f7", "o"),
    ("gluon", ""): ("ringflash gluon", "#2f81f7", "o"),
    ("gluon_fp8", ""): ("ringflash fp8", "#8957e5", "o"),
}
Rows = Sequence[dict]


def digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:16]


def shown(path: Path) -> str | None:
    """The digest of the rows that a picture shows; None where there is no picture."""
    found = re.search(r"rows ([0-9a-f]{16})", path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1] if found else None


def save(figure, path: Path, rows: Rows) -> None:
    """Write the picture unless it is there already, byte by byte."""
    text = io.StringIO()
    metadata = {"Description": f"rows {digest(rows)}", "Date": None, "Creator": "docs/render.py"}
    figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    content = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _style() -> dict:
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    return dict.fromkeys(names, INK) | {
        "svg.hashsalt": "ringflash", "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False,
        "axes.spines.right": False, "grid.color": INK, "grid.alpha": 0.25, "legend.frameon": False,
        "axes.facecolor": "none",
    }  # fmt: skip


def _length(tokens: float, _=None) -> str:
    return f"{tokens / 1024:.0f}k"


def _legend(figure, handles: dict[str, object], columns: int) -> None:
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, handlelength=2.4)


def speed(rows: Rows, path: Path) -> None:
    """TFLOP/s by length: a row of panels a direction, a panel a mask. rows: of one head dimension and head count."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style()):
        figure = Figure(figsize=(12, 6), layout="constrained")
        panels = figure.subplots(len(DIRECTIONS), len(MASKS), sharex=True, sharey=True)
        handles: dict[str, object] = {}
        for line, direction in zip(panels, DIRECTIONS, strict=True):
            for axes, (mask, title) in zip(line, MASKS.items(), strict=True):
                _speed_panel(axes, [r for r in rows if (r["direction"], r["mask"]) == (direction, mask)], handles)
                axes.set_title(f"{direction}, {title}")
            line[0].set_ylabel("TFLOP/s of visible pairs")
        for axes in panels[-1]:
            axes.set_xlabel("tokens")
        order = [label for label, _, _ in LINES.values() if label in handles]
        _legend(figure, {label: handles[label] for label in reversed(order)}, 4)
        save(figure, path, rows)


def _speed_panel(axes, rows: Rows, handles: dict[str, object]) -> None:
    for key, (label, colour, marker) in LINES.items():
        points = sorted((r["length"], r["tflops"]) for r in rows if (r["kernel"], r["form"]) == key and "tflops" in r)
        if points:
            ours = label.startswith("ringflash")
            style = {"lw": 2.2 if ours else 1.4, "ms": 4.5 if ours else 4, "ls": "--" if key[1] else "-"}
            handles[label] = axes.plot(*zip(*points, strict=True), color=colour, marker=marker, **style)[0]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_length)
    axes.xaxis.set_minor_locator(_no_ticks())
    axes.set_ylim(0, None)
    axes.grid(True)


def _no_ticks():
    from matplotlib.ticker import NullLocator

    return NullLocator()


def traffic(rows: Rows, path: Path) -> None:
    """Bytes and peak memory of one sequence's forward and backward by its length, both axes logarithmic."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    long = [row for row in rows if row["name"] != "GPT-2" and "error" not in row]
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        handles: dict[str, object] = {}
        lines = (("plain", "plain, three kernels", "#bf8700", "s"), ("ours", "ringflash", "#2f81f7", "o"))
        for method, label, colour, marker in lines:
            mine = [row for row in long if row["method"] == method]
            style = {"color": colour, "marker": marker, "lw": 2, "ms": 5}
            handles[label] = left.plot(*_totals(mine, "bytes", sum), **style)[0]
            right.plot(*_totals(mine, "peak_bytes", max), **style)
        label = "each tensor read or written once"
        handles[label] = left.plot(*_totals(long, "once_bytes", sum, "ours"), color=INK, ls=":", lw=1.6)[0]
        left.set_title("device memory read and written, one sequence")
        right.set_title("peak memory beyond the inputs, one sequence")
        for axes in (left, right):
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB")
            axes.set_xticks(sorted({row["length"] for row in long}))
            axes.xaxis.set_major_formatter(_length)
            axes.xaxis.set_minor_locator(_no_ticks())
            axes.grid(True)
        _legend(figure, handles, 3)
        save(figure, path, rows)


def _totals(rows: Rows, name: str, join: Callable, method: str | None = None) -> tuple[list[int], list[float]]:
    """(lengths, GB a sequence), forward and backward joined."""
    chosen = [row for row in rows if method in (None, row["method"])]
    lengths = sorted({row["length"] for row in chosen})
    return lengths, [join(r[name] / r["batch"] for r in chosen if r["length"] == n) / 1e9 for n in lengths]


def timeline(rows: Rows, path: Path) -> None:
    """Each rank's hops as bars in time, a panel a layout; the gaps are waiting. rows: one, see render.timeline_rows."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    (row,) = rows
    colours = ("#2f81f7", "#2a9d8f", "#bf8700", "#d1453b", "#8957e5", "#c255a0", "#8c959f", "#57606a")
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(12, 3.2), layout="constrained")
        handles: dict[str, object] = {}
        for axes, (name, (start, end)) in zip(
            figure.subplots(1, 2, sharex=True, sharey=True), row["hops"].items(), strict=True
        ):
            for hop in range(row["ranks"]):
                begun, length = [s[hop] for s in start], [e[hop] - s[hop] for s, e in zip(start, end, strict=True)]
                bars = axes.barh(range(row["ranks"]), length, left=begun, color=colours[hop % len(colours)], height=0.8)
                handles[f"hop {hop}"] = bars
            axes.set_title(f"{name}: makespan {row['makespan'][name]:.2f} of the ideal")
            axes.set_xlabel("ms" if row["tflops"] else "million pairs")
            axes.grid(True, axis="x")
        figure.axes[0].set_ylabel("rank")
        figure.axes[0].invert_yaxis()
        _legend(figure, handles, row["ranks"])
        save(figure, path, rows)


def pictures(sweep: Rows, counted: Rows, ring: Rows) -> Iterator[tuple[Path, Rows, Callable[[Rows, Path], None]]]:
    """(file, rows, how it is drawn) of every picture that these results make."""
    for grouped in (False, True):
        for width in (128, 64, 256):
            rows = [r for r in sweep if r["head_dim"] == width and (r["heads"] != r["kv_heads"]) == grouped]
            if rows:
                yield IMAGES / f"attention_d{width}{'_grouped' if grouped else ''}.svg", rows, speed
    if counted:
        yield IMAGES / "traffic.svg", counted, traffic
    yield IMAGES / "timeline.svg", ring, timeline
