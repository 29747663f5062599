"""Tables of training steps from the rows of `results/train_step.jsonl`: their lines. Called by render.py.

Predictions beside them are those of `train.memory` and `train.flops` now, made by `benchmarks/steps.py`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import largest
import steps

Row = dict[str, Any]

STEPS = ["shape", "layers", "tokens", "[memory]", "seconds", "tokens/s", "causal MFU", "share of attention",
         "GPU, GB", "host, GB"]  # fmt: skip
SWITCHES = ["saves on the GPU, GB", "measured", "takes of host memory, GB", "measured", "costs, s",
            "measured"]  # fmt: skip
PARTS = ["part", "seconds", "share of the step", "TFLOP/s"]
PUBLISHED_S = 380
"""Qwen3-8B, 1,048,576 tokens, 8 H100, PyTorch's context parallel with cuDNN: the best public figure that we know."""

LONGEST = [
    "switches", "[memory]", "longest, tokens", "what ends it", "a step, s", "5% less", "its peak, GB", "predicted",
    "5% more", "forced",
]  # fmt: skip
LARGEST = "python benchmarks/train_step.py --largest --switches NAME --window 4096 --device-gb 150.1 --host-gb 137"
"""For each set of switches; 150.1 and 137 are an H200's and its machine's."""

KEYS = "shape", "layers", "length", "window", "optimizer", "zero"
"""What rows have in common whose switches are compared."""

TURNED: list[Row] = [
    {"checkpoint": "none"},
    {"checkpoint": "full"},
    {"checkpoint_every": 2},
    {"offload": ["activations"]},
    {"offload": ["activations", "attention"]},
    {"mlp_tile": 16384},
    {"offload": ["activations", "attention"], "mlp_tile": 16384, "loss_chunk": 4096},
    {"loss_chunk": 4096},
    {"loss": "liger"},
]
"""What of [memory] the table of switches turns, beside what is usual."""

AWAY: list[Row] = [{"offload": ["optimizer"]}]
"""The same where there is an optimizer, at ZeRO 2."""


def all_steps(rows: list[Row]) -> list[list[str]]:
    return [
        [
            steps.shape_of(row), str(row["layers"]), f"{row['length']:,}", steps.switches(row["memory"]),
            f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu_causal']:.3f}",
            f"{row['attention_share_of_time']:.2f}", f"{row['peak_allocated_bytes'] / 1e9:.1f}",
            f"{row['host_peak_bytes'] / 1e9:.1f}",
        ]
        for row in rows
    ]  # fmt: skip


def asked_of(row: Row, memory: Row | None = None) -> Any:
    """The words of a row's command, with other values of [memory]."""
    asked = steps.parsed(shlex.split(row["command"])[2:])
    asked.force = True
    for name, value in (memory or {}).items():
        setattr(asked, name, value)
    return asked


def switched(rows: list[Row], turns: list[Row] = TURNED) -> tuple[Row, list[list[str]]] | None:
    """(the row that all is compared with, the lines): each switch against none, predicted and, where there is a row,
    measured; None without rows of switches."""
    plain = next((row for row in rows if not (steps.switches(row["memory"]) or row["window"])), None)
    if plain is None:
        return None
    same = [row for row in rows if all(row[key] == plain[key] for key in KEYS)]
    lines = []
    for turned in turns:
        memory = steps.USUAL | turned
        measured = next((row for row in same if steps.USUAL | row["memory"] == memory), None)
        before, after = (numbers(steps.predicted(asked_of(plain, one), None)) for one in (steps.USUAL, memory))
        found = [None] * 3 if measured is None else differences(of_row(plain), of_row(measured))
        cells = []
        for said, got in zip(differences(before, after), found, strict=True):
            cells += [f"{said:z.2f}", "" if got is None else f"{got:z.2f}"]
        lines.append([f"`{steps.switches(memory)}`", *cells])
    return plain, lines


def away(rows: list[Row]) -> tuple[Row, list[list[str]]] | None:
    """The same of an optimizer in host memory, at ZeRO 2."""
    return switched([row for row in rows if row["optimizer"] == "adamw" and row["zero"] == 2], AWAY)


def windows(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Steps that differ in their window alone: (without one, with one)."""
    for row in rows:
        same = {key: row[key] for key in (*KEYS, "ring", "memory")} | {"window": None}
        for other in rows if row["window"] else ():
            if same.items() <= other.items():
                yield other, row


def numbers(said: Row) -> tuple[float, float, float]:
    """GB on the GPU and in host memory, seconds."""
    return said["predicted_peak_bytes"] / 1e9, said["predicted_host_bytes"] / 1e9, said["predicted_seconds"]


def of_row(row: Row) -> tuple[float, float, float]:
    return row["peak_allocated_bytes"] / 1e9, row["host_peak_bytes"] / 1e9, row["seconds"]


def differences(before: tuple[float, ...], after: tuple[float, ...]) -> list[float]:
    """What is saved on the GPU, what is taken in host memory, what time it costs."""
    return [before[0] - after[0], after[1] - before[1], after[2] - before[2]]


def longest_step(rows: list[Row]) -> Row | None:
    """The longest one of one GPU whose profile is there; of several the latest."""
    return max((row for row in reversed(rows) if "profile" in row), key=lambda row: row["length"], default=None)


def parts(row: Row) -> Iterator[list[str]]:
    """Where the time of a step goes: what ran, then what did not."""
    profile = row["profile"]
    forward, backward = steps.attention_flops(steps.planned(asked_of(row)))
    work = {"attention forward": forward, "attention backward": backward}
    for kind, seconds in sorted(profile["kinds_s"].items(), key=lambda item: -item[1]):
        rate = f"{work[kind] / seconds / 1e12:.0f}" if kind in work else ""
        beside = " (beside the compute)" if kind.endswith("the host") else ""
        yield [kind + beside, f"{seconds:.2f}", f"{seconds / row['seconds']:.1%}", rate]
    yield ["nothing runs", f"{profile['idle_s']:.2f}", f"{profile['idle_s'] / row['seconds']:.1%}", ""]


def longest(rows: list[Row]) -> list[list[str]]:
    """By set of switches: what is predicted, and what became of the steps 5% below and above where they were tried."""
    found = {row["switches"]: row for row in rows if "tried" in row}
    peaks = {(row["length"], str(row["memory"])): row for row in rows if "tried" not in row}
    lines = []
    for name in steps.SETS:
        asked = steps.parsed(shlex.split(LARGEST.replace("NAME", name))[2:])
        lengths = largest.lengths_of(asked)
        asked.length, asked.force = lengths.longest, True
        said = steps.predicted(asked, None)
        ended = said["predicted_peak"]["name"] if lengths.lack == "GPU" else "host memory"
        tried = {(one["length"] < row["longest"], one["forced"]): f"{one['length']:,} {one['outcome']}"
                 for row in (found.get(name),) if row for one in row["tried"]}  # fmt: skip
        step = peaks.get((lengths.below, str(found[name]["memory"]))) if name in found else None
        both = [f"{step[key] / 1e9:.1f}" if step else "" for key in ("peak_allocated_bytes", "predicted_peak_bytes")]
        if tried and found[name]["longest"] != lengths.longest:  # around what was predicted then
            tried = {key: f"{cell} ({found[name]['longest']:,} predicted then)" for key, cell in tried.items()}
        cells = [tried.get((True, False), ""), *both, tried.get((False, False), ""), tried.get((False, True), "")]
        lines.append([name, f"`{steps.switches(steps.USUAL | steps.SETS[name])}`", f"{lengths.longest:,}", ended,
                      f"{said['predicted_seconds']:.0f}", *cells])  # fmt: skip
    return lines


def needed(length: int) -> Iterator[str]:
    """What a length takes with attention recomputed, and with all that can be in host memory there."""
    both = {"mlp_tile": 4096, "offload": ["activations", "attention"]}
    for turned in (steps.SETS["recomputed"], both):
        asked = steps.parsed(shlex.split(LARGEST.replace("NAME", "offload"))[2:])
        asked.length, asked.force = length, True
        for name, value in (steps.USUAL | turned).items():
            setattr(asked, name, value)
        device, host, seconds = numbers(steps.predicted(asked, None))
        words = steps.switches(steps.USUAL | turned)
        yield f"`{words}`: {device:.0f} GB on the GPU, {host:.0f} GB of host memory, {seconds:.0f} s a step"


def ceilings(row: Row) -> tuple[float, float, float]:
    """Causal MFU of attention alone and of matrix products alone, and, predicted, that of the model with all layers."""
    asked, kinds = asked_of(row), row["profile"]["kinds_s"]
    run = steps.planned(asked)
    needed = steps.model_flops(run)
    attention = needed.attention / (kinds["attention forward"] + kinds["attention backward"])
    dense = needed.dense / kinds["matrix products"]
    asked.layers = None
    whole = steps.planned(asked)
    seconds = steps.predicted(asked, None)["predicted_seconds"]
    return tuple(rate / steps.PEAK for rate in (attention, dense, sum(steps.model_flops(whole)) / seconds))


def share(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(head, lines): one rank of a ring beside the published step; seconds, and what they say of all layers."""
    cells = []
    for row in rows:
        attention = row["attention_forward_s"] + row["attention_backward_s"]
        rate = sum(steps.attention_flops(steps.planned(asked_of(row)))) / attention / 1e12
        hidden, none_hidden = row["ring_seconds_all_hidden"], row["ring_seconds_none_hidden"]
        cells.append([f"{row['seconds']:.1f}", f"{hidden:.0f}", f"{none_hidden:.0f}", f"{rate:.0f} TFLOP/s"])
    row = rows[0]
    names = [
        f"{row['layers']} layers and the loss",
        f"all {row['layers_of_ring']} layers, messages hidden",
        f"the same, no message hidden, links of {row['link_gb_per_s']:.0f} GB/s",
        "attention, forward and backward",
    ]
    head = ["seconds", *(f"`{row.get('ring_kernel', 'auto')}`" for row in rows)]
    lines = [[name, *column] for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    return head, [*lines, ["published, 8 H100", str(PUBLISHED_S), *[""] * (len(rows) - 1)]]
