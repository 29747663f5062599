"""One run: what is started on a node, and how its end is judged.

torchrun's exit code does not decide, because it is 1 for all that is not 0: each rank leaves a verdict with its code in
a folder before it exits (`train/verdict.py`), and the run has succeeded if all ranks of the node say so.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from train.config import Config

VERDICT_VARIABLE = "RINGFLASH_VERDICT_DIR"
REPORT_BYTES = 65536
"""How much of the end of torchrun's stderr is kept to be read; it holds the report on the processes that failed."""

FAILED_PROCESS = re.compile(
    r"host +: (?P<host>\S+)\s+rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>-?\d+)"
)
"""One process in torchrun's report. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py."""


def sibling(module: str) -> Any:
    """A module of the trainer, which is `train` beside `launch`, and `ringflash.train` beside `ringflash.launch`."""
    return import_module(sibling_name(module))


def sibling_name(module: str) -> str:
    assert __package__
    return __package__.removesuffix("launch") + module


@dataclass(frozen=True)
class Job:
    """A checked configuration, and how a worker is told of it.

    worker: module that every process runs
    arguments: its command line; the first is the configuration's file
    node: which of the nodes this machine is; None = none, or left to the scheduler
    folder: beside the run's own, for what its ranks say at their end: another job of the same run may be under way
    """

    config: Config
    worker: str
    arguments: tuple[str, ...]
    node: int | None = None
    folder: str = "."

    def verdict_setting(self, node: int) -> dict[str, str]:
        """The variable that tells the processes of a node where to leave their verdicts."""
        return {VERDICT_VARIABLE: str(self.verdict_folder(node))}

    def verdict_folder(self, node: int | str) -> Path:
        """Where the processes of a node leave their verdicts; node: "" = of any, its number follows."""
        return self.config.run_dir / self.folder / "verdict" / f"node{node}"


class Ending(NamedTuple):
    """Exit code of the launcher, and what it says last; empty if there is nothing to say."""

    code: int
    message: str


def run(job: Job, command: Sequence[str], *, node: int, settings: Mapping[str, str]) -> Ending:
    """Run the command of a node to its end and judge it. settings: see `supervise`."""
    return supervise(
        command, folder=job.verdict_folder(node), size=job.config.launch.processes_per_node, settings=settings
    )


def supervise(command: Sequence[str], *, folder: Path, size: int, settings: Mapping[str, str]) -> Ending:
    """Run what starts the ranks of a node to its end and judge it. Signals that ask for an end are passed on to it.

    folder: of their verdicts; size: how many they are; settings: what else is added to the environment
    """
    added = {VERDICT_VARIABLE: str(folder)} | dict(settings)
    left = sibling("train.verdict")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        left.clear_gone(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Ending(left.REFUSED, f"{folder} cannot be written, where ranks say how they ended: {error.strerror}")
    process = subprocess.Popen(command, env=os.environ | added, stderr=subprocess.PIPE, process_group=0)
    report = bytearray()
    copier = threading.Thread(target=_copy, args=(process.stderr, report), daemon=True)
    copier.start()
    with _forwarding(process) as received:
        code = process.wait()
    copier.join(timeout=5)  # an orphan of the command may hold the pipe open
    verdicts = left.read_all(folder, parent=process.pid)
    if received and len(agreed(verdicts, size)) != 1:
        return Ending(128 + received[0], f"stopped by {signal.Signals(received[0]).name}")
    return judge(verdicts, size, code=code, report=report.decode(errors="replace"))


def agreed(verdicts: Mapping[int, Any], size: int) -> set[int]:
    """The exit codes that the ranks of a node left, empty unless all of them did."""
    return {verdict.code for verdict in verdicts.values()} if len(verdicts) == size else set()


def judge(verdicts: Mapping[int, Any], size: int, *, code: int, report: str) -> Ending:
    """How a node's part of the run ended.

    verdicts: rank -> verdict of the ranks that left one
    size: processes of the node; which ranks they are is the rendezvous' choice
    code: exit code of torchrun; report: the end of its stderr

    The cause is the first rank that was killed from outside, for the others only lost their peer; otherwise the first
    rank by time that failed.
    """
    failed = [verdict for verdict in verdicts.values() if verdict.code]
    missing = size - len(verdicts)
    if not failed and not missing:
        teardown = f"all {size} ranks ended well; exit code {code} came from their teardown"
        return Ending(0, teardown if code else "")
    if len(codes := agreed(verdicts, size)) == 1 and codes != {1}:
        return Ending(codes.pop(), failed[0].error)  # what all ranks say alike
    exit_code = code if code > 0 else 1
    gone = [(int(m["rank"]), m["host"], int(m["code"])) for m in FAILED_PROCESS.finditer(report)]
    gone = [process for process in gone if process[0] not in verdicts]
    for rank, host, exitcode in gone:
        if exitcode < 0 and exitcode != -signal.SIGTERM:
            return Ending(exit_code, f"rank {rank} on {host} was killed by {signal.Signals(-exitcode).name}")
    if failed:
        first = min(failed, key=lambda verdict: (verdict.code != 1, verdict.time_s))
        return Ending(exit_code, f"rank {first.rank} on {first.host} failed: {first.error}")
    if gone:
        rank, host, exitcode = gone[-1]  # torchrun lists the first failure last
        return Ending(exit_code, f"rank {rank} on {host} ended with exit code {exitcode} before it could say why")
    return Ending(exit_code, f"{missing} of {size} ranks ended before they could say how; exit code {code}")


def _copy(source: Any, kept: bytearray) -> None:
    """Pass on what the command writes to stderr as it comes, and keep the end of it."""
    with source:
        while chunk := source.read1(REPORT_BYTES):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
            kept += chunk
            del kept[:-REPORT_BYTES]


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Hand signals that ask for an end to the process; yields the list of those received."""
    received: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
