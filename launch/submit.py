"""Hands a job to a scheduler through its own command."""

import shutil
import subprocess
from collections.abc import Sequence

from .job import Ending


def submit(command: Sequence[str], text: str) -> Ending:
    """Run the command with the text as its input; what it says is passed on. Exit code 2 if it is not installed."""
    tool = command[0]
    if shutil.which(tool) is None:
        return Ending(
            2, f"{tool} is not found on this machine: start where it is, or print what it would get with --dry-run"
        )
    code = subprocess.run(command, input=text, text=True).returncode
    return Ending(code, f"{tool} ended with exit code {code}, nothing was started" if code else "")
