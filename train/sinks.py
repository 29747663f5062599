"""Where the metrics of a run go: JSON lines, a wandb run, a progress line. Made by `MetricsWriter` on rank 0."""

import contextlib
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import Config
from .evaluation import Result, in_json

Row = Mapping[str, float | int | None]

WANDB_ID = "wandb.id"
"""File in the folder of the run: the id under which wandb knows it, also after it has gone on."""

WANDB_CLOSE_TIMEOUT_S = 30
"""How long the end of a run waits for wandb."""


class Sink(Protocol):
    """Something that takes one row of metrics a step, now and then an evaluation, and is closed once."""

    def write(self, row: Row) -> None: ...

    def write_evaluation(self, result: Result, picture: Path | None) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class JsonlSink:
    """`metrics.jsonl` in the folder of the run: a header, then one line a step, each flushed.

    A file that is already there is of an earlier process: it is kept as `metrics.previous.jsonl`, and its rows up to
    the step `after` come first, so that a resumed run has one row a step. They are written to `metrics.partial.jsonl`,
    which takes the place of the old file when it holds all of them: a kill at any moment loses none. Numbers that JSON
    has no word for are the strings "nan", "inf" and "-inf", which float() reads.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], *, after: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path, partial, previous = (folder / f"metrics.{word}" for word in ("jsonl", "partial.jsonl", "previous.jsonl"))
        if partial.exists() and not path.exists():
            os.replace(partial, path)  # killed between the two moves below: it was whole
        rows = [row for row in _steps(path) if row["step"] <= after] if path.exists() else []
        self.evaluated = {row["step"] for row in rows if row["kind"] == "evaluation"}
        self._path, self._file = path, partial.open("w", encoding="utf-8")
        self._line(header)
        for row in rows:
            self._line(row)
        os.fsync(self._file.fileno())
        if path.exists():
            os.replace(path, previous)
        os.replace(partial, path)

    def write(self, row: Row) -> None:
        self._line({"kind": "step", **in_json(row)})

    def write_evaluation(self, result: Result, picture: Path | None) -> None:
        self._line({"kind": "evaluation", **in_json(result.row())})

    def _line(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # which names no file where a disk is full
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self, *, failed: bool) -> None:
        with contextlib.suppress(OSError) if failed else contextlib.nullcontext():  # it was raised by a line before
            self._file.close()


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, steps and evaluations. What a crash cut off, or filled with bytes, is none."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("kind") in ("step", "evaluation") and type(row.get("step")) is int:
            yield row


class WandbSink:
    """One wandb run, fed from a thread of its own: a slow or failing wandb never holds up or ends the training.

    The step is an axis of its own, because wandb drops rows whose built-in step does not increase. A run that goes on
    behind the step `after` goes on there too, under the id in WANDB_ID; another that begins gets an id of its own.
    """

    def __init__(self, config: Config, header: Mapping[str, Any], *, after: int = 0) -> None:
        self._config = config
        self._header = header
        self._goes_on = after > 0
        self._rows: SimpleQueue[Row | tuple[Result, Path | None] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._feed, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._rows.put(row)

    def write_evaluation(self, result: Result, picture: Path | None) -> None:
        self._rows.put((result, picture))

    def close(self, *, failed: bool) -> None:
        self._failed = failed
        self._rows.put(None)
        self._thread.join(WANDB_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _warn(f"wandb did not end within {WANDB_CLOSE_TIMEOUT_S} s; the run goes on without it")

    def _feed(self) -> None:
        try:
            run = self._init()
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while (row := self._rows.get()) is not None:
                logged = _tracked(*row) if isinstance(row, tuple) else row
                run.log({name: value for name, value in logged.items() if value is not None})
            run.finish(exit_code=int(self._failed))
        except Exception as error:
            _warn(f"wandb failed, the run goes on without it: {type(error).__name__}: {error}")

    def _init(self) -> Any:
        import wandb

        mode = self._config.metrics.wandb
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            _warn("metrics.wandb = 'online' but there is no key: this run is offline; `wandb login` stores a key")
            mode = "offline"
        return wandb.init(
            project=self._config.metrics.project,
            id=_wandb_id(self._config.run_dir / WANDB_ID, goes_on=self._goes_on),
            resume="allow",
            name=self._config.train.name,
            dir=str(self._config.run_dir),
            mode=mode,
            config=dict(self._header),
            settings={"silent": True, "console": "off"},
        )


def _wandb_id(file: Path, *, goes_on: bool) -> str:
    """The id that an earlier process of the run left, or a new one, left for the next."""
    if not goes_on or not file.is_file() or not file.read_text(encoding="utf-8").strip():
        file.write_text(f"{secrets.token_hex(4)}\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _tracked(result: Result, picture: Path | None) -> dict[str, Any]:
    """An evaluation as wandb takes it: numbers, the picture, the grid as a table."""
    import wandb

    row: dict[str, Any] = dict(result.row())
    if picture is not None:
        row["eval/picture"] = wandb.Image(str(picture))
    if result.needle:
        columns: list[str | int] = list(result.needle[0]._fields)
        row["eval/needle/table"] = wandb.Table(columns=columns, data=[list(cell) for cell in result.needle])
    return row


class ProgressSink:
    """One line that tells how the run goes: redrawn on a terminal, printed once a step elsewhere.

    A reader that is gone, or a disk that is full, ends the lines and not the run.
    """

    def __init__(self, name: str, steps: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        columns = (TextColumn(name), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task(name, total=steps, line="")
        self._steps = steps
        self._shown = True
        self._show(self._progress.start)

    def _show(self, action: Callable[..., Any], *args: Any, **keys: Any) -> None:
        if not self._shown:
            return
        try:
            action(*args, **keys)
        except (OSError, SystemExit) as error:  # rich ends a program whose reader is gone
            self._shown = False
            why = "its reader is gone" if isinstance(error, SystemExit) else error
            with contextlib.suppress(OSError):
                print(f"ringflash: progress is not shown any more, the run goes on: {why}", file=sys.stderr)

    def write(self, row: Row) -> None:
        line = progress_line(row)
        self._show(self._progress.update, self._task, completed=row["step"], line=line)
        if not self._console.is_terminal:
            self._show(self._console.print, f"step {row['step']}/{self._steps}  {line}", markup=False)

    def write_evaluation(self, result: Result, picture: Path | None) -> None:
        self._show(self._console.print, evaluation_line(result), markup=False)

    def close(self, *, failed: bool) -> None:
        self._show(self._progress.stop)


def progress_line(row: Row) -> str:
    """The numbers that a person watches, in one line."""
    shown = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad norm {:.3f}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "peak_memory_gib": "{:.1f} GiB",
        "step_time_s": "{:.2f} s",
    }
    return "  ".join(text.format(row[name]) for name, text in shown.items() if row[name] is not None)


def evaluation_line(result: Result) -> str:
    """An evaluation in one line."""
    parts = [f"step {result.step} evaluated"]
    parts += [] if result.loss is None else [f"held-out loss {result.loss:.4f}"]
    parts += [] if result.accuracy is None else [f"pass keys {result.accuracy:.1%}"]
    return "  ".join([*parts, f"{result.time_s:.2f} s"])


def _warn(message: str) -> None:
    logging.getLogger(__name__).warning(message)
