"""Starts a run on its machines. No torch: this runs on login nodes.

A launcher is a pure function of a `Job` to the command of each node. It starts nothing; `job.run` does.
"""

from collections.abc import Callable

from . import torchrun
from .job import Job

LAUNCHERS: dict[str, Callable[[Job], list[list[str]]]] = {
    "torchrun": torchrun.commands,
}
