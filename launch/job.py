"""One run: what is started on a node, and how its end is judged.

Exit codes do not decide, because DeepSpeed on CPU aborts at teardown now and then: each rank leaves a verdict in a
folder before it exits (`train/verdict.py`), and the run has succeeded if all ranks of the node say so.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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
THREADS_VARIABLE = "OMP_NUM_THREADS"
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
    arguments: its command line
    """

    config: Config
    worker: str
    arguments: tuple[str, ...]

    def environment(self, node: int) -> dict[str, str]:
        """What is added to the environment of the processes of a node: the folder of verdicts, one thread a process.

        torchrun would choose one thread too, with a banner; a number that is already set is left alone.
        """
        added = {VERDICT_VARIABLE: str(self.config.run_dir / "verdict" / f"node{node}")}
        if self.config.launch.processes_per_node > 1 and THREADS_VARIABLE not in os.environ:
            added[THREADS_VARIABLE] = "1"
        return added

    def ranks(self, node: int) -> range:
        """The global ranks that a node holds."""
        size = self.config.launch.processes_per_node
        return range(node * size, (node + 1) * size)


class Ending(NamedTuple):
    """Exit code of the launcher, and what it says last; empty if there is nothing to say."""

    code: int
    message: str


def run(job: Job, command: Sequence[str], *, node: int) -> Ending:
    """Run the command of a node to its end and judge it. Signals that ask the launcher to end are passed on to it."""
    added = job.environment(node)
    folder = Path(added[VERDICT_VARIABLE])
    for stale in folder.glob("rank*"):
        stale.unlink()
    process = subprocess.Popen(command, env=os.environ | added, stderr=subprocess.PIPE, process_group=0)
    report = bytearray()
    copier = threading.Thread(target=_copy, args=(process.stderr, report), daemon=True)
    copier.start()
    with _forwarding(process) as received:
        code = process.wait()
    copier.join(timeout=5)  # an orphan of the command may hold the pipe open
    if received:
        return Ending(128 + received[0], f"stopped by {signal.Signals(received[0]).name}")
    verdicts = sibling("train.verdict").read_all(folder)
    return judge(verdicts, job.ranks(node), code=code, report=report.decode(errors="replace"))


def judge(verdicts: Mapping[int, Any], ranks: Sequence[int], *, code: int, report: str) -> Ending:
    """How a node's part of the run ended.

    verdicts: rank -> verdict of the ranks that left one
    code: exit code of torchrun; report: the end of its stderr

    The cause is the first rank that was killed from outside, for the others only lost their peer; otherwise the first
    rank by time that failed.
    """
    failed = [verdicts[rank] for rank in ranks if rank in verdicts and not verdicts[rank].ok]
    missing = [rank for rank in ranks if rank not in verdicts]
    if not failed and not missing:
        teardown = f"all {len(ranks)} ranks ended well; exit code {code} came from their teardown"
        return Ending(0, teardown if code else "")
    exit_code = code if code > 0 else 1
    gone = [(int(m["rank"]), m["host"], int(m["code"])) for m in FAILED_PROCESS.finditer(report)]
    gone = [process for process in gone if process[0] in missing]
    for rank, host, exitcode in gone:
        if exitcode < 0 and exitcode != -signal.SIGTERM:
            return Ending(exit_code, f"rank {rank} on {host} was killed by {signal.Signals(-exitcode).name}")
    if failed:
        first = min(failed, key=lambda verdict: verdict.time_s)
        return Ending(exit_code, f"rank {first.rank} on {first.host} failed: {first.error}")
    if gone:
        rank, host, exitcode = gone[-1]  # torchrun lists the first failure last
        return Ending(exit_code, f"rank {rank} on {host} ended with exit code {exitcode} before it could say why")
    return Ending(exit_code, f"ranks {', '.join(map(str, missing))} ended before they could say how; exit code {code}")


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

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
