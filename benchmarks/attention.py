"""Our kernels beside cuDNN, FlashAttention-2, FlexAttention and FlashAttention-4, interleaved: a JSON line a row.

    python benchmarks/attention.py --bars               # the cells that bars.py judges, 5 rounds; minutes
    python benchmarks/attention.py                      # every length, head dimension, mask, direction, one round
    python benchmarks/attention.py --dry-run [--bars]   # what would be measured, and how long; needs no GPU
    python benchmarks/attention.py --verdict FILE       # the table of bars; exit code 1 if a floor is missed

All contenders of a cell run once a round, A B C A B C, so that they meet the same clocks; only ratios within a cell
mean anything. A time is all that the GPU does in `ringflash.attention`, or in `torch.autograd.grad` for the backward:
a CUDA graph of the call, between CUDA events, with the L2 flushed before; the call itself where `replayed` is false.
What it takes the host stands beside it as `host_us`, and is hidden wherever the host runs ahead. TFLOP/s count visible
pairs, and 2.5 forwards for a backward, whatever a kernel multiplies. A cell whose rows are in the output is skipped.
bf16, normal inputs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import median

import bars
from cases import DIRECTIONS, HEAD_DIMS, LENGTHS, MASKS, TOKENS, Case, Cell, Contender, identity
from provenance import ROOT, provenance

REP_MS = 40  # of one timing; at least MIN_CALLS calls
MIN_CALLS = 2
FLUSH_BYTES = 256 * 2**20
WRONG = 0.1  # a result this far from the first contender's, in the 2-norm, is no result; fp8 differs by a few percent
GUESS_TFLOPS = 350
SETUP_S = {"flex": 5.0}  # guesses: what a contender takes to be compiled again, from caches; the others little
PEERS = ("cudnn", "fa2", "flex", "fa4")


def sweep(kernels: Sequence[str]) -> list[Cell]:
    """Every cell, those first that the README's picture shows. Rows of documents are no shorter than a batch."""
    found = []
    for grouped in (False, True):
        for head_dim in HEAD_DIMS:
            for mask in MASKS:
                for direction in DIRECTIONS:
                    for length in LENGTHS:
                        if mask == "documents" and length < TOKENS:
                            continue
                        plain = [Contender(name) for name in (*kernels, *PEERS)]
                        again = [Contender(name, "deterministic") for name in kernels if direction == "backward"]
                        case = Case(head_dim, length, mask, direction, grouped)
                        found.append(Cell(case, (*plain, *again)))
    return found


def estimate_s(cell: Cell, rounds: int) -> float:
    """A guess, for the budget: the rounds, and before them a comparison and a look at the time of one call."""
    once_ms = cell.case.flops / GUESS_TFLOPS / 1e9
    each = rounds * (max(REP_MS, MIN_CALLS * once_ms) + once_ms) + 4 * once_ms
    setup = 0.5 + sum(SETUP_S.get(contender.kernel, 0.1) for contender in cell.contenders)
    return setup + len(cell.contenders) * each / 1e3


def row_of(cell: Cell, contender: Contender) -> dict:
    return cell.case.fields() | contender._asdict()


def read(path: Path) -> dict[tuple, dict]:
    """identity -> row."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {identity(row): row for row in map(json.loads, lines)}


def left(cells: Sequence[Cell], done: dict[tuple, dict]) -> list[Cell]:
    """Cells with a contender that has no row yet. They are measured whole, without those that failed before."""
    found = []
    for cell in cells:
        rows = {contender: done.get(identity(row_of(cell, contender))) for contender in cell.contenders}
        if not all(rows.values()):
            again = tuple(contender for contender, row in rows.items() if row is None or "error" not in row)
            found.append(cell._replace(contenders=again))
    return found


class Stopwatch:
    """The GPU as a clock: medians of times, with the L2 full of something else before each call."""

    device = "cuda"

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        self.stream = torch.cuda.Stream()
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    def captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """What a call does on the GPU, to be replayed without the host; None for what launches where no graph sees it.

        The call's forward must be of `stream`.
        """
        for _ in range(2):
            run()
        self.synchronize()
        graph = self.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "The CUDA Graph is empty")
                with self.cuda.graph(graph, stream=self.stream):
                    run()
        except (RuntimeError, UserWarning) as error:
            print(f"not captured: {error}", file=sys.stderr, flush=True)
            return None

        def replay(kept: object = run) -> None:  # whose tensors the graph reads
            graph.replay()

        return replay

    def host_us(self, run: Callable[[], object]) -> float:
        """Median time until a call returns, while the GPU has nothing to do."""
        times = []
        for _ in range(9):
            self.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        self.synchronize()
        return 1e6 * median(times)

    def ms(self, run: Callable[[], object], calls: int) -> float:
        event = self.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(calls)]
        run()
        for start, end in pairs:
            self.flush.zero_()
            start.record()
            run()
            end.record()
        self.synchronize()
        return median(start.elapsed_time(end) for start, end in pairs)

    def on_stream(self):
        """A backward runs on its forward's stream, and capturing needs one of its own."""
        return self.cuda.stream(self.stream)

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def healthy(self) -> bool:
        """Can this process still use its GPU?"""
        try:
            self.flush[:1].zero_()
            self.synchronize()
        except RuntimeError:
            return False
        return True


class WrongResultError(Exception):
    """A contender's result is wrong; its row will say so."""


class LostGPUError(Exception):
    """After an illegal access nothing runs in this process any more."""


class Measuring:
    """One cell on the GPU: contenders are prepared and compared first, then timed in rounds."""

    def __init__(self, cell: Cell, watch: Stopwatch) -> None:
        import torch

        self.cell, self.watch = cell, watch
        case = cell.case
        generator = torch.Generator(watch.device).manual_seed(0)
        shapes = [(case.batch, case.length, n, case.head_dim) for n in (case.heads, *[case.kv_heads] * 2, case.heads)]
        self.tensors = [
            torch.randn(shape, generator=generator, device=watch.device, dtype=torch.bfloat16) for shape in shapes
        ]
        self.expected: torch.Tensor | None = None
        self.errors: dict[Contender, str] = {}
        self.runs: dict[Contender, Callable[[], object]] = {}
        self.host_us: dict[Contender, float] = {}
        self.replayed: dict[Contender, bool] = {}
        self.differences: dict[Contender, float | None] = {}
        self.times: dict[Contender, list[float]] = {}

    def _guarded(self, contender: Contender, work: Callable[[], None]) -> None:
        try:
            work()
            self.watch.synchronize()
        except Exception as error:
            # whatever a contender raises is its result, and the others go on
            self.errors[contender] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.runs.pop(contender, None)
            if not self.watch.healthy():
                raise LostGPUError from error

    def prepare(self) -> None:
        """Compile and run each contender, compare what it computes with the first one's, and capture what it launches.

        Timed are replays: a call of a library takes the host longer than short kernels take, see `host_us`.
        """
        import contenders

        def one(contender: Contender) -> None:
            with self.watch.on_stream():
                prepared = contenders.prepare(self.cell.case, contender, self.tensors)
                self.differences[contender] = self._difference(prepared.comparable(prepared.run()))
                self.host_us[contender] = self.watch.host_us(prepared.run)
                replay = self.watch.captured(prepared.run)
            self.replayed[contender] = replay is not None
            self.runs[contender] = replay or prepared.run

        for contender in self.cell.contenders:
            self._guarded(contender, lambda contender=contender: one(contender))

    def _difference(self, result) -> float | None:
        """||result - expected|| / ||expected||; the first result is what is expected. Raises: WrongResultError."""
        if result is None:
            return None
        if self.expected is None:
            self.expected = result
        wide = self.expected.float()
        difference = float((result.float() - wide).norm() / wide.norm())
        if not difference <= WRONG:
            raise WrongResultError(f"the result differs from the first contender's by {difference:.3g} of its norm")
        return difference

    def time(self, rounds: int) -> None:
        calls: dict[Contender, int] = {}
        for _ in range(rounds):
            for contender, run in list(self.runs.items()):

                def one(contender=contender, run=run) -> None:
                    if contender not in calls:
                        once = self.watch.ms(run, 1)
                        calls[contender] = max(MIN_CALLS, round(REP_MS / once))
                    self.times.setdefault(contender, []).append(self.watch.ms(run, calls[contender]))

                self._guarded(contender, one)

    def failures(self) -> list[dict]:
        return [row_of(self.cell, contender) | {"error": error} for contender, error in self.errors.items()]

    def rows(self) -> list[dict]:
        peer = self.times.get(Contender("cudnn"))
        found = self.failures()
        for contender in self.runs:
            row = row_of(self.cell, contender)
            times = self.times[contender]
            flops = self.cell.case.flops
            if contender.form == "causal":  # it computes another mask
                flops = self.cell.case._replace(mask="causal").flops
            rates = {name: flops / pick(times) / 1e9 for name, pick in (("tflops", median), ("min", max), ("max", min))}
            row |= {name: round(rate, 2) for name, rate in rates.items()} | {"ms": round(median(times), 4)}
            row["to_cudnn"] = round(median(peer) / median(times), 4) if peer and contender.form != "causal" else None
            difference = self.differences[contender]
            row |= {"host_us": round(self.host_us[contender]), "replayed": self.replayed[contender]}
            row["difference"] = None if difference is None else float(f"{difference:.2g}")
            found.append(row | {"rounds": len(times)})
        return found


def _warm(cell: Cell) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    settings()
    Measuring(cell, Stopwatch()).prepare()


def warm(cells: Sequence[Cell], jobs: int) -> None:
    """Compile what the cells need, in processes beside each other: the measuring one finds it in the caches.

    A failure is left for the measuring process to meet and to write down.
    """
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    waiting = [pool.submit(_warm, cell) for cell in cells]
    for future in as_completed(waiting):
        error = future.exception()
        if error is not None:
            print(f"warming: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
        if isinstance(error, BrokenProcessPool):
            break
    pool.shutdown(cancel_futures=True)


def settings() -> None:
    """Of this process, for the peers."""
    from torch._functorch import config

    config.donated_buffer = False  # a compiled backward that is run again needs its inputs kept
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def affordable(cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """The first cells, as far as --seconds reaches."""
    found, total = [], 0.0
    for cell in cells:
        total += estimate_s(cell, arguments.rounds)
        if arguments.seconds and total > arguments.seconds:
            break
        found.append(cell)
    return found


def run(cells: Sequence[Cell], arguments: argparse.Namespace) -> int:
    """Measure and write; 0 if all cells have rows now, 3 if the time was over or the GPU was lost before."""
    began = time.monotonic()
    settings()
    flags = {"--bars": arguments.bars, "--only": arguments.only, "--without": arguments.without}
    words = [word for flag, value in flags.items() if value for word in ([flag] if value is True else [flag, value])]
    where = provenance("attention.py", words, arguments.commit)
    if arguments.jobs:
        warm(affordable(cells, arguments), arguments.jobs)
        print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    watch = Stopwatch()
    for index, cell in enumerate(cells):
        spent = time.monotonic() - began
        if arguments.seconds and spent + estimate_s(cell, arguments.rounds) > arguments.seconds:
            print(f"{spent:.0f} s are spent, {len(cells) - index} cells are left: run again", file=sys.stderr)
            return 3
        measuring = Measuring(cell, watch)
        try:
            measuring.prepare()
            measuring.time(arguments.rounds)
        except LostGPUError:
            write(measuring.failures(), where, arguments.output)
            print(f"the GPU is lost to this process, {len(cells) - index} cells are left: run again", file=sys.stderr)
            return 3
        write(measuring.rows(), where, arguments.output)
    print(f"{len(cells)} cells in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def write(rows: Sequence[dict], where: dict, path: Path) -> None:
    """Append to the output, and say what is new."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row | where) + "\n")
            print(_short(row), flush=True)


def _short(row: dict) -> str:
    heads = f"{row['heads']}:{row['kv_heads']}"
    case = f"D={row['head_dim']} {row['mask']} {row['direction']} {row['batch']} x {row['length']}, {heads} heads"
    name = str(Contender(row["kernel"], row["form"]))
    if "error" in row:
        return f"{case}: {name:22} {row['error']}"
    ratio = f"  {row['to_cudnn']:.3f} of cuDNN" if row["to_cudnn"] else ""
    return f"{case}: {name:22} {row['tflops']:6.1f} TFLOP/s [{row['min']:.1f} - {row['max']:.1f}]{ratio}"


def plan(cells: Sequence[Cell], rounds: int) -> None:
    """Print what would be measured."""
    for cell in cells:
        print(f"{estimate_s(cell, rounds):5.1f} s  {cell.case}: {', '.join(map(str, cell.contenders))}")
    timings = sum(len(cell.contenders) for cell in cells)
    total = sum(estimate_s(cell, rounds) for cell in cells)
    print(f"{len(cells)} cells, {timings} rows, {rounds} rounds: about {total:.0f} s, and a minute to compile")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bars", action="store_true", help="only the cells that bars.py judges")
    parser.add_argument("--verdict", type=Path, metavar="FILE", help="judge this output of --bars, measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="list the cells, measure nothing")
    parser.add_argument("--only", metavar="REGEX", help="cells whose description matches, as --dry-run prints it")
    parser.add_argument("--without", metavar="KERNELS", help="leave these contenders out, as in flex,fa2")
    parser.add_argument("--rounds", type=int, help="default: 5 with --bars, otherwise 1")
    parser.add_argument("--seconds", type=float, help="stop, with exit code 3, before a cell that would end later")
    parser.add_argument("--output", type=Path, help="default: docs/results/attention.jsonl, or attention_bars.jsonl")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile first")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no history")
    arguments = parser.parse_args(words)
    arguments.rounds = arguments.rounds or (5 if arguments.bars else 1)
    name = "attention_bars" if arguments.bars else "attention"
    arguments.output = arguments.output or ROOT / "docs/results" / f"{name}.jsonl"
    return arguments


def chosen(cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """The cells and contenders that --only and --without leave."""
    absent = (arguments.without or "").split(",")
    kept = [cell for cell in cells if re.search(arguments.only or "", str(cell.case))]
    return [c._replace(contenders=tuple(x for x in c.contenders if x.kernel not in absent)) for c in kept]


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.verdict:
        text, met = bars.verdict(read(arguments.verdict))
        print(text)
        return int(not met)
    import contenders

    kernels = contenders.our_kernels()
    cells = bars.cells(kernels) if arguments.bars else sweep(kernels)
    cells = left(chosen(cells, arguments), read(arguments.output))
    if arguments.dry_run:
        plan(cells, arguments.rounds)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("this measures kernels on an NVIDIA GPU, and torch sees none; --dry-run and --verdict need no GPU")
        return 2
    return run(cells, arguments)


if __name__ == "__main__":
    sys.exit(main())
