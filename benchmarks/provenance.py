"""Where a result comes from: what each row of a result file says of its making. Called by the scripts beside it."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def provenance(script: str, words: Sequence[str], commit: str | None) -> dict:
    """As `on_cpu`, of the GPU, with the versions under us."""
    import torch
    import triton

    return on_cpu(script, words, commit) | {
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def on_cpu(script: str, words: Sequence[str], commit: str | None = None) -> dict:
    """command, commit, hardware and date.

    words: of the command, as far as they change what is measured
    commit: given where the checkout has no history; otherwise asked of git
    """
    if commit is None:
        ask = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "commit": commit,
        "hardware": processor(),
        "date": datetime.date.today().isoformat(),
    }


def over(ranks: int, made: dict) -> dict:
    """What `provenance` or `on_cpu` says, of a script that torchrun started on so many ranks of one host."""
    started = made["command"].replace("python", f"torchrun --nproc-per-node {ranks}", 1)
    several = {"hardware": f"{ranks} x {made['hardware']}"} if "cudnn" in made and ranks > 1 else {}
    return made | {"command": started} | several


def processor() -> str:
    """How many cores of what."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{len(names)} cores, {names[0]}" if names else platform.machine()
