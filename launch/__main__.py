"""The `ringflash` command: WORDS is the table. `python -m launch` is its `launch` without the word."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import LAUNCHERS
from .job import Job, sibling, sibling_name


def main(argv: Sequence[str] | None = None) -> int:
    """`ringflash WORD ...`"""
    parser = argparse.ArgumentParser(prog="ringflash", description="Train on sequences that no single GPU can hold.")
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, word in WORDS.items():
        words.add_parser(name, help=word.help, add_help=False)
    chosen, rest = parser.parse_known_args(argv)
    return WORDS[chosen.word].run(rest)


def launch(argv: Sequence[str] | None = None) -> int:
    """`python -m launch CONFIG ...`: train."""
    parser = argparse.ArgumentParser(prog="launch", description="Start a run on its machines.")
    _add_arguments(parser)
    return start(parser.parse_args(argv))


def evaluate(argv: Sequence[str] | None = None) -> int:
    """`ringflash eval CONFIG ...`: the same processes as of `launch`, which evaluate a checkpoint and end."""
    parser = argparse.ArgumentParser(
        prog="ringflash eval", description="Evaluate a checkpoint on the machines of its run."
    )
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="folder of the checkpoint; left out: what checkpoint.resume says"
    )
    _add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.checkpoint is not None:
        arguments.set.append(f"checkpoint.resume={json.dumps(arguments.checkpoint)}")
    return start(arguments, evaluates=True)


def start(arguments: argparse.Namespace, *, evaluates: bool = False) -> int:
    """Check the configuration, then print, run or submit it. Returns the exit code; 2 = refused."""
    config_module = sibling("train.config")
    overrides = list(arguments.set)
    overrides += [f"launch.nodes={arguments.nodes}"] if arguments.nodes is not None else []
    overrides += [f"launch.scheduler={arguments.scheduler}"] if arguments.scheduler is not None else []
    worker_arguments = (arguments.config, *(part for override in overrides for part in ("--set", override)))
    try:
        config = config_module.load(arguments.config, overrides)
        job = Job(config, sibling_name("train"), worker_arguments, _node(arguments, config))
        job = replace(job, arguments=(*worker_arguments, "--evaluate"), folder="evaluation") if evaluates else job
        launcher = LAUNCHERS[config.launch.scheduler]
        text = launcher.shown(job)
        if not arguments.dry_run and config.launch.scheduler != "kubernetes":  # its paths are those of the pods
            config_module.check_paths(config, trains=not evaluates)
            if not evaluates:
                config_module.check_packages(config)
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


def _module(name: str) -> Callable[[list[str]], int]:
    """Become `python -m` of a module of the trainer: this process imports no torch."""

    def run(rest: list[str]) -> int:
        os.execv(sys.executable, [sys.executable, "-m", sibling_name(name), *rest])

    return run


class Word(NamedTuple):
    """run: gets what stands behind the word, returns the exit code."""

    run: Callable[[list[str]], int]
    help: str


WORDS = {
    "launch": Word(launch, "start a run on its machines"),
    "eval": Word(evaluate, "evaluate a checkpoint on the machines of its run"),
    "plan": Word(_module("train.plan"), "whether a run fits into memory, and how long a step takes"),
    "export": Word(_module("train.export"), "make a checkpoint a model of transformers"),
    "report": Word(_module("train.report"), "what the run of the demo showed"),
    "train": Word(_module("train"), "be one process of a run, started by torchrun"),
}


if __name__ == "__main__":
    sys.exit(launch())
