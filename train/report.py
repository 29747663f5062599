"""What a demo run showed: `python -m train.report RUN`, where RUN/one_process is the same run on one process.

Reads the metrics files only; no torch. Called by the Makefile after the two runs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 1e-5
"""Largest difference of a loss from that on one process, nats, in float32."""

COMPARED_STEPS = 5

ALONE = "one_process"


class Run(NamedTuple):
    """A metrics file: its header and its steps."""

    header: dict[str, Any]
    steps: list[dict[str, Any]]


def read(folder: Path) -> Run:
    """The metrics of a run. Raises: ValueError if there are none."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing: run it first")
    header, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    steps = [row for row in rows if row.get("kind") != "evaluation"]
    if len(steps) < COMPARED_STEPS:
        raise ValueError(f"{path} holds {len(steps)} steps, at least {COMPARED_STEPS} are compared")
    return Run(header, steps)


def largest_difference(run: Run, alone: Run) -> float:
    """Between the first losses of two runs, nats. Raises: ValueError if the steps are not the same ones."""
    pairs = list(zip(run.steps[:COMPARED_STEPS], alone.steps, strict=False))
    for mine, other in pairs:
        for name in ("step", "tokens_seen", "valid_tokens", "learning_rate"):
            if mine[name] != other[name]:
                raise ValueError(
                    f"step {mine['step']} is not the same in both runs: {name} {mine[name]}, {other[name]}"
                )
    return max(abs(float(mine["loss"]) - float(other["loss"])) for mine, other in pairs)


def draw(run: Run, path: Path) -> None:
    """Loss and tokens/s over the tokens seen, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    tokens = [step["tokens_seen"] for step in run.steps]
    loss.plot(tokens, [step["loss"] for step in run.steps], color="C0")
    loss.set(title="loss", ylabel="nats per token")
    speed.plot(tokens, [step["tokens_per_s"] for step in run.steps], color="C1")
    speed.set(title="throughput", ylabel="tokens/s, all processes", ylim=(0, None))
    for axes in (loss, speed):
        axes.set_xlabel("tokens seen")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}k")
        axes.grid(alpha=0.3)
    config = run.header["config"]
    figure.suptitle(
        f"{config['train']['name']}: {config['sequence']['length']:,} tokens a sequence over "
        f"{run.header['world_size']} processes, {config['sequence']['layout']}, ZeRO {config['parallel']['zero']}"
    )
    figure.savefig(path, dpi=120)


def lines(folder: Path, run: Run, difference: float) -> list[str]:
    """The closing report."""
    first, last = run.steps[0], run.steps[-1]
    speeds = sorted(step["tokens_per_s"] for step in run.steps[1:])
    verdict = "the ring changes nothing" if difference <= TOLERANCE else f"MORE THAN {TOLERANCE:g}"
    tracked = [str(path) for path in sorted(folder.glob("wandb/offline-run-*"))] or ["no offline run"]
    return [
        f"loss           {first['loss']:.4f} -> {last['loss']:.4f} in {len(run.steps)} steps, "
        f"{last['tokens_seen']:,} tokens",
        f"speed          {speeds[len(speeds) // 2]:,.0f} tokens/s on {run.header['world_size']} processes, median step",
        f"exactness      first {COMPARED_STEPS} losses within {difference:.1e} of one process: {verdict}",
        f"metrics        {folder / 'metrics.jsonl'}",
        f"picture        {folder / 'report.png'}",
        f"wandb          {tracked[-1]}",
        "on 8 GPUs      python -m launch configs/demo.toml --set parallel.ring=8 --set launch.processes_per_node=8",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0, or 1 if the losses differ, the loss did not fall, or a run is missing."""
    parser = argparse.ArgumentParser(prog="train.report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, such as runs/demo")
    folder = parser.parse_args(argv).run
    try:
        run, alone = read(folder), read(folder / ALONE)
        difference = largest_difference(run, alone)
    except ValueError as error:
        print(f"ringflash: {error}", file=sys.stderr)
        return 1
    draw(run, folder / "report.png")
    print(*lines(folder, run, difference), sep="\n")
    fell = run.steps[-1]["loss"] < run.steps[0]["loss"]
    return 0 if difference <= TOLERANCE and fell else 1


if __name__ == "__main__":
    sys.exit(main())
