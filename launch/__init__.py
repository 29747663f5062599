"""Starts a run on its machines. No torch: this runs on login nodes.

LAUNCHERS is the table; the same word is `launch.scheduler`. A launcher is a module with the functions of `Launcher`.
"""

from typing import Protocol

from . import kubernetes, slurm, torchrun
from .job import Ending, Job


class Launcher(Protocol):
    """What every launcher module offers."""

    def shown(self, job: Job) -> str:
        """Exactly what `start` runs or submits, as text; starts nothing. ValueError for what cannot be started."""

    def start(self, job: Job) -> Ending:
        """Run it to its end, or hand it to the scheduler."""


LAUNCHERS: dict[str, Launcher] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
}
