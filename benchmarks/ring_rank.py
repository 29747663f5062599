"""What one rank of a ring does, on one GPU, beside the same work in one launch: a JSON line a row.

    python benchmarks/ring_rank.py --bars               # 8k and 32k local tokens, and documents; minutes
    python benchmarks/ring_rank.py                      # every local length, ring, head count and layout
    python benchmarks/ring_rank.py --dry-run [--bars]   # what would be measured, how long, in how much memory
    python benchmarks/ring_rank.py --only "P=8 .*documents"
    python benchmarks/ring_rank.py --tiny --output /tmp/tiny.jsonl    # small cases on this CPU: does it run?

The ring is the library's own loop (`ringflash.ring`) with a transport that moves nothing: blocks are already in device
memory, a few buffers in turn, because positions matter to speed and values do not. Beside it, interleaved round by
round, the same kernel has the same queries and the same keys, gathered in order, in one launch ("one"). share is the
time of one over that of the ring; `hops_ms` are the kernels of each hop in one lane, by events. With packed documents
(layout balanced) two more run: the documents of a whole batch on one device ("single"), and causal attention of L
tokens ("causal"); `to_single` and `to_causal` are ratios of visible TFLOP/s. predicted_ms is the pairs at the rate that
`attention.py --bars` measured for this kernel, as `ringflash.suggest` counts. Direction "both" is forward + backward.
A case whose rows are in the output is skipped. bf16, D=128.

Letters: P ring size, L tokens of a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from attention import REP_MS, Stopwatch
from cases import BACKWARD, documents
from provenance import ROOT, provenance
from ring_share import Here

from ringflash import ARRANGEMENTS, LAYOUTS, exchange, lanes, makespan, mask, ring, routes, trips
from ringflash.kernels import KERNELS, Kernel
from ringflash.kernels.choice import choose
from ringflash.layouts.documents import Documents
from ringflash.needs import Rows

LAYOUT_OF = {"causal": "zigzag", "documents": "balanced"}
RINGS = {4096: (2, 8, 64), 8192: (2, 8, 64), 16384: (2, 8, 64), 32768: (2, 8, 64), 65536: (2, 8), 131072: (2, 8)}
SINGLE_TOKENS = 262_144  # of the batch on one device, at most
GUESS_TFLOPS = 450
SETUP_S = 4  # of a case: tables, capturing
MIN_CALLS = 2


class Case(NamedTuple):
    """One rank of one ring. mask: causal, or documents packed, causal too; rotate: what travels in the backward."""

    ranks: int
    local: int
    kv_heads: int
    mask: str
    heads: int = 16
    head_dim: int = 128
    arrangement: str = "ring"
    rotate: str = "auto"

    @property
    def rank(self) -> int:
        """Which one is measured: a middle one, whose hops are of both kinds in zigzag."""
        return self.ranks // 2

    @property
    def seq_len(self) -> int:
        return self.ranks * self.local

    def __str__(self) -> str:
        heads, layout = f"{self.heads}:{self.kv_heads}", LAYOUT_OF[self.mask]
        way = "" if self.arrangement == "ring" else f" {self.arrangement}"
        what = "" if self.rotate == "auto" else f" {self.rotate}"
        return f"P={self.ranks} L={self.local} {heads} heads {self.mask} {layout}{way}{what}"


def sweep() -> list[Case]:
    return [Case(size, local, kv, name) for name in LAYOUT_OF for kv in (16, 4, 2)
            for local, sizes in RINGS.items() for size in sizes]  # fmt: skip


def bars() -> list[Case]:
    """What has a target: 97% of one launch at 8k and 99% at 32k, forward and backward; documents 90% of one device."""
    return [Case(size, local, kv, name) for name in LAYOUT_OF for kv in (16, 4) for local in (8192, 32768)
            for size in RINGS[local] if name == "causal" or kv == 16]  # fmt: skip


def tiny() -> list[Case]:
    return [Case(size, 256, 2, name, heads=4, head_dim=32) for name in LAYOUT_OF for size in (2, 4)]


class OneLaunch(NamedTuple):
    """A plan, as `routes.Plan` is one, of a rank that has all its keys beside it, in order."""

    forward: trips.Route

    def backward(self, sizes: routes.Sizes, rotate: str) -> trips.Route:
        """The same: nothing travels."""
        return self.forward


class Work(NamedTuple):
    """A case on the host. plan: what the rank does; one: the same in one launch; hops: pairs [P, P]."""

    plan: routes.Plan
    one: OneLaunch
    keys: int
    hops: np.ndarray


def intervals(case: Case, length: int) -> tuple[np.ndarray, np.ndarray]:
    borders = np.array(documents(length), np.int32) if case.mask == "documents" else None
    return mask.intervals(length, length, causal=True, cu_seqlens=borders)


def work(case: Case) -> Work:
    lo, hi = intervals(case, case.seq_len)
    borders = np.array(documents(case.seq_len) if case.mask == "documents" else [0, case.seq_len])
    segments = LAYOUTS[LAYOUT_OF[case.mask]].segments(case.seq_len, case.ranks, 1, Documents(borders, True))
    plan = routes.Plan(segments, case.rank, lo, hi, arrangement=case.arrangement)
    keys = np.concatenate([view.k_segments for view in plan.forward.views if view])
    keys = keys[np.argsort(keys[:, 0])]
    ends = np.maximum.accumulate(keys.sum(1))  # two visits of a gather may both name a key
    new = np.flatnonzero(np.append(True, keys[1:, 0] > ends[:-1]))
    joined = np.stack((keys[new, 0], np.maximum.reduceat(ends, new) - keys[new, 0]), 1)
    count, nothing = int(joined[:, 1].sum()), Rows(np.zeros((0, 2), np.int64), 0)
    rows = mask.positions(segments[case.rank])
    view = mask.View(lo[rows], hi[rows], segments[case.rank], joined)
    visit = trips.Visit(view, True, trips.WHOLE, count, (), 0, nothing, nothing, ())
    one = OneLaunch(trips.Route("keys", (0,), (visit,), (), nothing))
    return Work(plan, one, count, makespan.pairs(segments, lo, hi))


class Present:
    """A transport whose messages are there before they are posted: what is received is left as it is.

    Buffers are filled with normal numbers when they are first seen, outside of what is timed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._known: set[int] = set()
        self._captured: list[torch.Tensor] = []

    beside, second_stream = exchange.Processes.beside, exchange.Processes.second_stream

    def post(self, sends: exchange.Messages, receives: exchange.Messages, what: str, slow: bool = False) -> Here:
        """See `exchange.Transport.post`."""
        for _, tensor in receives:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                self._captured.append(tensor)  # kept: a graph writes to no other place
            elif tensor.data_ptr() not in self._known:
                self._known.add(tensor.data_ptr())
                _normal(tensor)
        return Here()

    def fill(self) -> None:
        """The buffers of a graph that was captured."""
        for tensor in self._captured:
            _normal(tensor)


def _normal(x: torch.Tensor) -> None:
    """Blocks are rows of bytes. The upper half of an fp32 is a bf16, so that normal bf16 are normal in both types."""
    (x.view(torch.bfloat16) if x.dtype == torch.uint8 else x).normal_()


class Timed:
    """A kernel that notes when each of its calls begins and ends on the GPU."""

    def __init__(self, kernel: Kernel, mark: Callable[[], Callable[[], float]]) -> None:
        self._kernel, self._mark = kernel, mark
        self.delta = kernel.delta
        if hasattr(kernel, "SHARES_ROWS"):
            self.SHARES_ROWS = True
        self.marks: list[tuple] = []

    def _noted(self, run: Callable, *args, **given) -> None:
        began = self._mark()
        run(*args, **given)
        self.marks.append((began, self._mark()))

    def forward(self, *args, **given) -> None:
        """See `Kernel.forward`."""
        self._noted(self._kernel.forward, *args, **given)

    def backward(self, *args, **given) -> None:
        """See `Kernel.backward`."""
        self._noted(self._kernel.backward, *args, **given)


class Loop:
    """The library's loop over one plan, ready to run. keys: how many rows its own keys and values have."""

    def __init__(self, case: Case, plan, lengths: tuple[int, int], watch) -> None:
        queries, keys = lengths
        generator = torch.Generator(watch.device).manual_seed(0)
        rows = [(queries, case.heads), *[(keys, case.kv_heads)] * 2, (queries, case.heads)]
        shapes = [(1, *each, case.head_dim) for each in rows]
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device=watch.device, dtype=torch.bfloat16) for shape in shapes
        )
        self.route, self.scale = plan.forward, case.head_dim**-0.5
        self.way_back = plan.backward(routes.sizes_of(self.q, self.k, torch.float32), case.rotate)
        self.present = Present(case.rank, case.ranks)
        self.name = choose("auto", self.q, self.k, False, case.ranks).kernel
        self.kernel = KERNELS[self.name]
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ring.forward(self.q, self.k, self.v, self.route, self.present, self.kernel, scale=self.scale)

    def backward(self) -> tuple[torch.Tensor, ...]:
        """With the sums of out * dout, which the library makes once a backward."""
        delta = self.kernel.delta(self.out, self.dout, None)
        tensors = self.dout, self.q, self.k, self.v, self.lse, delta
        return ring.backward(*tensors, self.way_back, self.present, self.kernel, scale=self.scale)

    def hops_ms(self, direction: str, watch) -> list[float]:
        """The kernels of each hop in one lane, medians of 3 runs."""
        found = []
        for _ in range(3):
            self.kernel = timed = Timed(KERNELS[self.name], watch.mark)
            watch.ahead()
            with patch.object(lanes, "LANE_ROWS", sys.maxsize):
                getattr(self, direction)()
            watch.synchronize()
            found.append([watch.between(*marks) for marks in timed.marks])
        self.kernel = KERNELS[self.name]
        return [round(median(hop), 4) for hop in zip(*found, strict=True)]


class GPU(Stopwatch):
    """attention.py's watch, with marks between kernels."""

    def mark(self):
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, began, ended) -> float:
        return began.elapsed_time(ended)

    def ahead(self) -> None:
        """Let the host run ahead of the GPU, so that marks lie close to the kernels."""
        self.cuda._sleep(100_000_000)


class Host:
    """The same watch for --tiny."""

    device = "cpu"

    def captured(self, run):
        return None

    def ms(self, run, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e3 * (time.perf_counter() - began) / calls

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, began: float, ended: float) -> float:
        return 1e3 * (ended - began)

    def on_stream(self):
        return contextlib.nullcontext()

    def ahead(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def loops(case: Case, planned: Work, watch) -> dict[str, Loop]:
    """What runs in a case."""
    found = {
        "ring": Loop(case, planned.plan, (case.local, case.local), watch),
        "one": Loop(case, planned.one, (case.local, planned.keys), watch),
    }
    if case.mask == "documents":
        length = min(case.seq_len, max(SINGLE_TOKENS, case.local))
        single = routes.OneDevice(length, *intervals(case, length))
        found["single"] = Loop(case, single, (length, length), watch)
        causal = routes.OneDevice(case.local, *intervals(case._replace(mask="causal"), case.local))
        found["causal"] = Loop(case, causal, (case.local, case.local), watch)
    return found


def flops(case: Case, route: trips.Route, direction: str) -> float:
    pairs = sum(view.pairs() for view in route.views if view)
    return 4.0 * case.head_dim * case.heads * pairs * (BACKWARD if direction == "backward" else 1.0)


def measure(case: Case, watch, rounds: int) -> list[dict]:
    """The rows of a case."""
    planned = work(case)
    with watch.on_stream():
        running = loops(case, planned, watch)
        runs, replayed = {}, {}
        for name, loop in running.items():
            for direction in ("forward", "backward"):
                call = getattr(loop, direction)
                replay = watch.captured(call)
                replayed[name, direction] = replay is not None
                runs[name, direction] = replay or call
            loop.present.fill()
    watch.synchronize()
    calls = {key: max(MIN_CALLS, round(REP_MS / watch.ms(run, 1))) for key, run in runs.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(watch.ms(run, calls[key]))
    ms = {key: median(found) for key, found in times.items()}
    rows = []
    for direction in ("forward", "backward"):
        hops = running["ring"].hops_ms(direction, watch)
        rows.append(_row(case, planned, running, direction, {name: ms[name, direction] for name in running}))
        rows[-1] |= {"hops_ms": hops, "replayed": replayed["ring", direction], "rounds": rounds}
    both = {name: ms[name, "forward"] + ms[name, "backward"] for name in running}
    rows.append(_row(case, planned, running, "both", both) | {"rounds": rounds})
    return rows


def _row(case: Case, planned: Work, running: dict[str, Loop], direction: str, ms: dict[str, float]) -> dict:
    ways = ("forward", "backward") if direction == "both" else (direction,)
    work_of = {name: sum(flops(case, loop.route, way) for way in ways) for name, loop in running.items()}
    rate = {name: work_of[name] / ms[name] / 1e9 for name in running}
    row = identity_fields(case, direction) | {
        "layout": LAYOUT_OF[case.mask], "rank": case.rank, "kernel": running["ring"].name,
        "hops": len(planned.plan.forward.hops), "travels_back": running["ring"].way_back.what,
        "ms": round(ms["ring"], 4), "one_ms": round(ms["one"], 4), "share": round(ms["one"] / ms["ring"], 4),
        "tflops": round(rate["ring"], 1), "predicted_ms": predicted_ms(case, work_of["ring"], ways),
        "makespan": round(makespan.ratio(planned.hops), 4),
    }  # fmt: skip
    for name in ("single", "causal"):
        if name in rate:
            row |= {f"{name}_tflops": round(rate[name], 1), f"to_{name}": round(rate["ring"] / rate[name], 4)}
    return row


def identity_fields(case: Case, direction: str) -> dict:
    return case._asdict() | {"direction": direction}


def predicted_ms(case: Case, total: float, ways: Sequence[str]) -> float | None:
    """At the rate of the kernel alone, causal, longest length; None where that was not measured for these heads."""
    path = ROOT / "docs/results/attention_bars.jsonl"
    measured = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    parts = {"forward": 1.0, "backward": BACKWARD}
    seconds = 0.0
    for way in ways:
        wanted = {"head_dim": case.head_dim, "mask": "causal", "direction": way, "kernel": "gluon", "form": ""}
        rates = [(r["length"], r["tflops"]) for r in measured if "tflops" in r and wanted.items() <= r.items()]
        if not rates:
            return None
        seconds += total * parts[way] / sum(parts[w] for w in ways) / (max(rates)[1] * 1e12)
    return round(1e3 * seconds, 4)


def estimate_s(case: Case, rounds: int) -> float:
    """A guess: pairs of the rank are a P-th of all; each loop runs in a warm call, MIN_CALLS and a few to prepare."""
    pairs = case.local * (case.seq_len + 1) / 2 if case.mask == "causal" else case.local * 3000
    once = 3.5 * 4 * case.head_dim * case.heads * pairs / GUESS_TFLOPS / 1e12
    kinds = 2 if case.mask == "causal" else 4 + min(case.seq_len, SINGLE_TOKENS) / case.local
    return SETUP_S + kinds * (rounds * max(3 * once, 0.1) + 8 * once)


def memory_gb(case: Case) -> float:
    """Of the larger of both loops: k, v and their gradients of all keys; the state and buffers of the ring."""
    keys = case.seq_len if case.mask == "causal" else min(case.seq_len, 4 * case.local)
    one = keys * case.kv_heads * 8 * case.head_dim + case.local * case.heads * 12 * case.head_dim
    rank = case.local * case.head_dim * (case.heads * 16 + case.kv_heads * 44)
    return (one + 2 * rank) / 1e9


def read(path: Path) -> dict[tuple, dict]:
    """identity -> row."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (*Case._fields, "direction")
    rows = [Case._field_defaults | json.loads(line) for line in lines]
    return {tuple(row[name] for name in names): row for row in rows}


def left(cases: Sequence[Case], done: dict[tuple, dict]) -> list[Case]:
    return [case for case in cases if (*case, "both") not in done]


def run(cases: Sequence[Case], arguments: argparse.Namespace) -> int:
    """Measure and write; 0 if all cases have rows now, 3 if the time was over before."""
    began = time.monotonic()
    watch = Host() if arguments.tiny else GPU()
    words = [w for flag in ("bars", "tiny") if getattr(arguments, flag) for w in [f"--{flag}"]]
    words += ["--arrangement", arguments.arrangement] if arguments.arrangement != "ring" else []
    words += ["--rotate", arguments.rotate] if arguments.rotate != "auto" else []
    words += ["--only", arguments.only] if arguments.only else []
    where = {} if arguments.tiny else provenance("ring_rank.py", words, arguments.commit)
    for index, case in enumerate(cases):
        spent = time.monotonic() - began
        if arguments.seconds and spent + estimate_s(case, arguments.rounds) > arguments.seconds:
            print(f"{spent:.0f} s are spent, {len(cases) - index} cases are left: run again", file=sys.stderr)
            return 3
        with arguments.output.open("a", encoding="utf-8") as file:
            for row in measure(case, watch, arguments.rounds):
                file.write(json.dumps(row | where) + "\n")
                extra = f", {row['to_single']:.3f} of one device" if "to_single" in row else ""
                said = f"{row['tflops']:6.1f} TFLOP/s, {row['share']:.3f} of one launch{extra}"
                print(f"{case} {row['direction']:8} {said}", flush=True)
        if not arguments.tiny:
            torch.cuda.empty_cache()
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bars", action="store_true", help="only the cases that have a target")
    parser.add_argument("--tiny", action="store_true", help="small cases on the CPU, which prove nothing about speed")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, measure nothing")
    parser.add_argument("--only", metavar="REGEX", help="cases whose description matches, as --dry-run prints it")
    parser.add_argument("--arrangement", choices=[name for name in ARRANGEMENTS if name != "double"], default="ring")
    parser.add_argument("--rotate", choices=("auto", "keys", "queries"), default="auto", help="in the backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="stop, with exit code 3, before a case that would end later")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/ring_rank.jsonl")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no history")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    cases = tiny() if arguments.tiny else bars() if arguments.bars else sweep()
    cases = [case._replace(arrangement=arguments.arrangement, rotate=arguments.rotate) for case in cases]
    cases = [case for case in cases if re.search(arguments.only or "", str(case))]
    cases = left(cases, read(arguments.output))
    if arguments.dry_run:
        for case in cases:
            print(f"{estimate_s(case, arguments.rounds):6.1f} s {memory_gb(case):6.1f} GB  {case}")
        total = sum(estimate_s(case, arguments.rounds) for case in cases)
        print(f"{len(cases)} cases, {arguments.rounds} rounds: about {total:.0f} s, and a minute to compile")
        return 0
    if not arguments.tiny and not torch.cuda.is_available():
        print("this measures kernels on an NVIDIA GPU, and torch sees none; --dry-run and --tiny need no GPU")
        return 2
    return run(cases, arguments)


if __name__ == "__main__":
    sys.exit(main())
