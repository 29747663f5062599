"""What each worker says about its own end.

torchrun makes 1 of every exit code of a worker but 0, and counts those that it ended itself among them. So a worker
writes `rank<r>.json` as the last thing before it exits, and the launcher reads the folder and judges by it. No torch
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
    """The end of one rank: its exit code, when (seconds since the epoch), where, and why it is not DONE."""

    rank: int
    code: int
    error: str
    host: str
    time_s: float


def write(directory: str | Path, rank: int, *, code: int, error: str = "") -> None:
    """Leave the verdict of a rank in the folder, whole or not at all.

    error: of a failure type and message, otherwise the sentence that all ranks say
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    verdict = Verdict(rank, code, error, socket.gethostname(), time.time())
    partial = folder / f"rank{rank}.partial"
    partial.write_text(json.dumps(verdict._asdict()), encoding="utf-8")
    os.replace(partial, folder / f"rank{rank}.json")


def clear(directory: str | Path, rank: int) -> None:
    """Forget what the rank said before torchrun started it again."""
    (Path(directory) / f"rank{rank}.json").unlink(missing_ok=True)


def read_all(directory: str | Path) -> dict[int, Verdict]:
    """rank -> verdict of every rank that left one."""
    files = Path(directory).glob("rank*.json")
    verdicts = (Verdict(**json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return {verdict.rank: verdict for verdict in verdicts}
