"""Signals that ask a run to stop: all ranks finish the step, save it and leave with one exit code.

SIGTERM is what torchrun, slurm and Kubernetes send before they kill, SIGUSR1 and SIGUSR2 what slurm may send long
before. Called by `loop` and `__main__`.
"""

import os
import signal
from pathlib import Path
from typing import Any, Self

from .world import Place, World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopError(Exception):
    """Work between two steps that is left because a signal asked for it; raised on all ranks alike.

    signal: its number
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Request:
    """The signal that asked this process to stop; 0 before one has come.

    with request:    # inside, a signal only asks; outside, more of them are ignored once one has asked
        request.signal

    heeded: False where nothing could be saved: then a signal ends the process at once, as it would without us
    """

    def __init__(self, *, heeded: bool) -> None:
        self.signal = 0
        self._heeded = heeded
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._heeded:
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def _ask(self, number: int, _frame: object) -> None:
        self.signal = number

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.signal else handler)


def sentence(number: int, step: int, path: Path) -> str:
    """What is said at the end."""
    return (
        f"stopped by {signal.Signals(number).name}: step {step} is saved in {path}; started again with "
        "checkpoint.resume = 'auto', the run goes on from there"
    )


def leave(world: World, place: Place) -> None:
    """The last thing that ranks do which stop. All ranks must call it.

    torchrun would take their exit code for a failure and start them again, if it may; the signal stops it too, and no
    rank ends before it was sent.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # torchrun passes it on
    world.gather([0.0])
    if place.local_rank == 0 and place.under_torchrun:
        os.kill(os.getppid(), signal.SIGTERM)
    world.gather([0.0])
