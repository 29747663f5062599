"""What torchrun runs: `python -m train CONFIG [--set section.key=value ...]`, one process of a run."""

import argparse
import contextlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from . import loop, stopping, verdict, world
from .config import check_packages, check_paths, load, resolve
from .evaluation import standalone
from .model import config_of
from .nonfinite import NonFiniteError
from .saver import CheckpointError
from .verdict import DONE, FAILED, REFUSED, STOPPED

GRACE_S = 5
"""How long a refused rank waits for the first rank of its node to say why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Returns the exit code, one of those in `verdict`."""
    parser = argparse.ArgumentParser(prog="train", description="One process of a run; torchrun starts it.")
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change section.key of the file"
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate a checkpoint instead of training")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)  # DeepSpeed uses them
    place = world.Place.from_environment()
    if place.verdict_dir is not None:
        verdict.clear(place.verdict_dir, place.rank)
    started, stopped = False, None
    try:
        config = load(arguments.config, arguments.set)
        check_paths(config, trains=not arguments.evaluate)
        if not arguments.evaluate:
            check_packages(config)
        config = resolve(config)
        config_of(config.model, config.sequence.length)  # what transformers refuses, before a GPU is touched
        with world.start(config, place) as joined:
            if arguments.evaluate:
                standalone.evaluate(config, joined)
            else:
                run = loop.prepare(config, joined, fail=lambda message: _give_up(place, message))
                started = True
                stopped = loop.fit(run)
            if stopped:
                _leave_verdict(place, STOPPED, stopped)
                stopping.leave(joined, place)
    except Exception as error:
        refused = isinstance(error, ValueError | TypeError) and not started
        code = REFUSED if refused else FAILED
        _tell(place, error, code, sentence=refused or isinstance(error, CheckpointError | NonFiniteError))
        return code
    if stopped:
        if place.rank == 0:
            print(f"ringflash: {stopped}", file=sys.stderr)
        return STOPPED
    _leave_verdict(place, DONE, "")
    return DONE


def _tell(place: world.Place, error: Exception, code: int, *, sentence: bool) -> None:
    """Say why: a failure in full; what all ranks raise alike in one sentence, by the first rank of a node for all.

    The others wait, for torchrun ends all ranks once one is gone. A rank that outlives the wait speaks for itself.
    """
    _leave_verdict(place, code, str(error) if sentence else f"{type(error).__name__}: {error}")
    if not sentence:
        print(f"rank {place.rank}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
        return
    if place.local_rank:
        time.sleep(GRACE_S)
    print(f"ringflash: {error}", file=sys.stderr)


def _give_up(place: world.Place, message: str) -> None:
    """End this process from outside its main thread."""
    _leave_verdict(place, FAILED, message)
    print(f"ringflash: {message}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def _leave_verdict(place: world.Place, code: int, error: str) -> None:
    if place.verdict_dir is not None:
        verdict.write(place.verdict_dir, place.rank, code=code, error=error)


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a reader that is gone changes no exit code
            stream.flush()
    os._exit(code)  # threads of libraries may be in C++ when the interpreter would end
