"""What each worker says about its own end.

torchrun makes 1 of every exit code of a worker but 0, and counts those that it ended itself among them. So a worker
writes `rank<r>-<parent>.json` as the last thing before it exits, and the launcher reads the folder and judges by what
workers of its own torchrun wrote: a second run of the name, which is refused, says so in the same folder. No torch
here.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75
"""Exit codes: the run is over; it failed; it was refused before any step; a signal stopped it, what it did is saved."""


class Verdict(NamedTuple):
    """The end of one rank: its exit code, when (seconds since the epoch), where, and why it is not DONE.

    parent: process that started it, which is torchrun
    """

    rank: int
    code: int
    error: str
    host: str
    time_s: float
    parent: int = 0


def write(directory: str | Path, rank: int, *, code: int, error: str = "") -> None:
    """Leave the verdict of a rank in the folder, whole or not at all.

    error: of a failure type and message, otherwise the sentence that all ranks say
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    verdict = Verdict(rank, code, error, socket.gethostname(), time.time(), os.getppid())
    place = _place(folder, rank)
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(verdict._asdict()), encoding="utf-8")
    os.replace(partial, place)


def clear(directory: str | Path, rank: int) -> None:
    """Forget what the rank said before torchrun started it again."""
    _place(Path(directory), rank).unlink(missing_ok=True)


def clear_gone(directory: str | Path) -> None:
    """Forget what ranks of runs before said: those whose torchrun is not there any more on this machine."""
    for file in Path(directory).glob("rank*"):
        parent = file.stem.partition("-")[2]
        if not parent.isdigit() or not _is_alive(int(parent)):
            file.unlink(missing_ok=True)


def read_all(directory: str | Path, *, parent: int | None = None) -> dict[int, Verdict]:
    """rank -> verdict of every rank that left one, its last. parent: only of ranks that this process started."""
    files = Path(directory).glob("rank*.json" if parent is None else f"rank*-{parent}.json")
    verdicts = (Verdict(**json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return {verdict.rank: verdict for verdict in sorted(verdicts, key=lambda verdict: verdict.time_s)}


def _place(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}-{os.getppid()}.json"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # else it is another user's
    return True
