"""Where a result comes from: what each row of a result file says of its making. Called by the scripts beside it."""

from __future__ import annotations

import datetime
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def provenance(script: str, words: Sequence[str], commit: str | None) -> dict:
    """command, commit, hardware, date, and the versions under us. Needs a GPU.

    words: of the command, as far as they change what is measured
    commit: given where the checkout has no history; otherwise asked of git
    """
    import torch
    import triton

    if commit is None:
        ask = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "commit": commit,
        "hardware": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
