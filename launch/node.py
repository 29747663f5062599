"""One node of a job that a scheduler started: `python -m launch.node FOLDER PROCESSES COMMAND ...`.

The command is torchrun, whose exit code is 1 for all that is not 0: slurm and Kubernetes would take a run that a signal
stopped for one that failed. So it is judged by what its ranks left in the folder, as `launch` judges it on one machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .job import supervise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command to its end. Returns the exit code of the node."""
    parser = argparse.ArgumentParser(prog="launch.node", description="Run one node of a job and judge its end.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the ranks of this node leave their verdicts")
    parser.add_argument("processes", type=int, metavar="PROCESSES", help="ranks of this node")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what starts them")
    arguments = parser.parse_args(argv)
    ending = supervise(arguments.command, folder=arguments.folder, size=arguments.processes, settings={})
    if ending.message:
        print(f"ringflash: {ending.message}", file=sys.stderr)
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
