"""The `ringflash` command, and `python -m launch`, which is its `launch` without the word."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import LAUNCHERS
from .job import Job, sibling, sibling_name


def main(argv: Sequence[str] | None = None) -> int:
    """`ringflash launch ...` starts a run; `ringflash train ...` is one process of it, as torchrun runs it."""
    parser = argparse.ArgumentParser(prog="ringflash", description="Train on sequences that no single GPU can hold.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_arguments(commands.add_parser("launch", help="start a run on its machines"))
    commands.add_parser("train", help="be one process of a run, started by torchrun", add_help=False)
    commands.add_parser("export", help="make a checkpoint a model of transformers", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    module = {"train": "train", "export": "train.export"}.get(arguments.command)
    if module is not None:
        os.execv(sys.executable, [sys.executable, "-m", sibling_name(module), *rest])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return start(arguments)


def launch(argv: Sequence[str] | None = None) -> int:
    """`python -m launch CONFIG ...`"""
    parser = argparse.ArgumentParser(prog="launch", description="Start a run on its machines.")
    _add_arguments(parser)
    return start(parser.parse_args(argv))


def start(arguments: argparse.Namespace) -> int:
    """Check the configuration, then print, run or submit it. Returns the exit code; 2 = refused."""
    config_module = sibling("train.config")
    overrides = list(arguments.set)
    overrides += [f"launch.nodes={arguments.nodes}"] if arguments.nodes is not None else []
    overrides += [f"launch.scheduler={arguments.scheduler}"] if arguments.scheduler is not None else []
    worker_arguments = (arguments.config, *(part for override in overrides for part in ("--set", override)))
    try:
        config = config_module.load(arguments.config, overrides)
        job = Job(config, sibling_name("train"), worker_arguments, _node(arguments, config))
        launcher = LAUNCHERS[config.launch.scheduler]
        text = launcher.shown(job)
        if not arguments.dry_run and config.launch.scheduler != "kubernetes":  # its paths are those of the pods
            config_module.check_paths(config)
    except ValueError as refusal:
        print(f"ringflash: {refusal}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(text, end="")
        return 0
    ending = launcher.start(job)
    if ending.message:
        print(f"ringflash: {ending.message}", file=sys.stderr)
    return ending.code


def _node(arguments: argparse.Namespace, config: Any) -> int | None:
    """Which node this machine is; None = all of them, which a scheduler or a dry run can do."""
    node: int | None = arguments.node_rank
    nodes, scheduler = config.launch.nodes, config.launch.scheduler
    if scheduler != "torchrun":
        if node is not None:
            raise ValueError(
                f"--node-rank {node}: launch.scheduler = {scheduler!r} starts all nodes itself; leave it out"
            )
        return None
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
    parser.add_argument("--dry-run", action="store_true", help="print exactly what would run and start nothing")


if __name__ == "__main__":
    sys.exit(launch())
