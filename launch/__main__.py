"""The `ringflash` command, and `python -m launch`, which is its `launch` without the word."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from . import LAUNCHERS
from .job import Job, run, sibling, sibling_name


def main(argv: Sequence[str] | None = None) -> int:
    """`ringflash launch ...` starts a run; `ringflash train ...` is one process of it, as torchrun runs it."""
    parser = argparse.ArgumentParser(prog="ringflash", description="Train on sequences that no single GPU can hold.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_arguments(commands.add_parser("launch", help="start a run on its machines"))
    commands.add_parser("train", help="be one process of a run, started by torchrun", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "train":
        os.execv(sys.executable, [sys.executable, "-m", sibling_name("train"), *rest])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return start(arguments)


def launch(argv: Sequence[str] | None = None) -> int:
    """`python -m launch CONFIG ...`"""
    parser = argparse.ArgumentParser(prog="launch", description="Start a run on its machines.")
    _add_arguments(parser)
    return start(parser.parse_args(argv))


def start(arguments: argparse.Namespace) -> int:
    """Check the configuration, then print or run the command of this node. Returns the exit code; 2 = refused."""
    config_module = sibling("train.config")
    overrides = list(arguments.set)
    overrides += [f"launch.nodes={arguments.nodes}"] if arguments.nodes is not None else []
    overrides += [f"launch.scheduler={arguments.scheduler}"] if arguments.scheduler is not None else []
    try:
        config = config_module.load(arguments.config, overrides)
        if not arguments.dry_run:
            config_module.check_paths(config)
        node = _node(arguments, config.launch.nodes)
    except ValueError as refusal:
        print(f"ringflash: {refusal}", file=sys.stderr)
        return 2
    worker_arguments = (arguments.config, *(part for override in overrides for part in ("--set", override)))
    job = Job(config, sibling_name("train"), worker_arguments)
    commands = LAUNCHERS[config.launch.scheduler](job)
    if arguments.dry_run:
        for index in range(len(commands)) if node is None else [node]:
            variables = [f"{name}={shlex.quote(value)}" for name, value in job.environment(index).items()]
            print(*variables, shlex.join(commands[index]))
        return 0
    assert node is not None
    print(shlex.join(commands[node]), flush=True)
    ending = run(job, commands[node], node=node)
    if ending.message:
        print(f"ringflash: {ending.message}", file=sys.stderr)
    return ending.code


def _node(arguments: argparse.Namespace, nodes: int) -> int | None:
    """Which node this machine is; None = all of them, which only a dry run can show."""
    node: int | None = arguments.node_rank
    if node is None and nodes == 1:
        return 0
    if node is None and not arguments.dry_run:
        raise ValueError(f"launch.nodes = {nodes}: say with --node-rank which of 0 to {nodes - 1} this machine is")
    if node is not None and not 0 <= node < nodes:
        raise ValueError(f"--node-rank {node}: 0 to {nodes - 1} is accepted, for launch.nodes = {nodes}")
    return node


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("--nodes", type=int, metavar="N", help="same as --set launch.nodes=N")
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of several nodes this machine is, from 0")
    parser.add_argument("--scheduler", metavar="NAME", help="same as --set launch.scheduler=NAME")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change section.key of the file"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command of each node and start nothing")


if __name__ == "__main__":
    sys.exit(launch())
