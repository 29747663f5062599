"""The longest sequence that trains with the switches asked for: `train_step.py --largest`. Called by it.

The planner says which length both memories allow. A step 5% below it must finish and one 5% above must be refused;
where the GPU is what lacks, that step is tried all the same, and must run out of memory. Each is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from steps import device_bytes_of, limits_of, planned

from train import flops, memory

SCRIPT = Path(__file__).resolve().parent / "train_step.py"
MULTIPLE = 64
"""Of which lengths are."""

OUTCOMES = {2: "refused", 3: "out of memory"}
"""Exit code of train_step.py -> what became of the step."""


class Lengths(NamedTuple):
    """Tokens: 5% below the longest, the longest, 5% above; lack: what is too small above, "GPU" or "host"."""

    below: int
    longest: int
    above: int
    lack: str


def lengths_of(asked: argparse.Namespace) -> Lengths:
    """What the planner says. Raises: ValueError if no length fits."""
    run, limits = planned(asked), limits_of(asked, device_bytes_of(asked))
    longest = run.longest(run.step(), limits)
    if not longest:
        raise ValueError(f"--largest: no length fits; {run.way_out(limits, flops.RATES['H200'])}")
    below, above = (round(share * longest / MULTIPLE) * MULTIPLE for share in (0.95, 1.05))
    step = memory.replace(run.step(), tokens=above, sequence=above)
    return Lengths(below, longest, above, limits.lacks(memory.predict(run.sizes, step)))


def rows(asked: argparse.Namespace, words: list[str]) -> Iterator[dict[str, Any]]:
    """The row of the step that finishes, if it does, then what was tried and whether the planner was right."""
    lengths = lengths_of(asked)
    tries = [(lengths.below, [], "finished"), (lengths.above, [], "refused")]
    if lengths.lack == "GPU":  # who tries to take more host memory than there is may be killed, and others with him
        tries.append((lengths.above, ["--force"], "out of memory"))
    tried = []
    for length, extra, expected in tries:
        outcome, said, row = attempt([*words, "--length", str(length), *extra], asked.timeout)
        tried.append({"length": length, "forced": bool(extra), "outcome": outcome, "expected": expected, "said": said})
        if row is not None:
            yield row
    memory_of = planned(asked).config.memory.model_dump()
    yield {
        "shape": asked.shape, "window": asked.window, "switches": asked.switches, "memory": memory_of,
        "longest": lengths.longest, "lacks_above": lengths.lack, "tried": tried,
        "planner_is_right": all(one["outcome"] == one["expected"] for one in tried),
    }  # fmt: skip


def attempt(words: list[str], timeout_s: float) -> tuple[str, str, dict[str, Any] | None]:
    """(what became of train_step.py with these words, what it said last, its row)."""
    with subprocess.Popen(
        [sys.executable, SCRIPT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, said = process.communicate()
            return f"not done in {timeout_s:.0f} s", last_line(said), None
    if process.returncode == 0:
        return "finished", "", json.loads(last_line(out))
    return OUTCOMES.get(process.returncode, f"exit code {process.returncode}"), last_line(said), None


def last_line(text: str) -> str:
    """The last one; of a refusal, which may have several, all."""
    _, said, refusal = text.rpartition("train_step: ")
    return refusal.strip() if said else (text.strip().splitlines() or [""])[-1]
