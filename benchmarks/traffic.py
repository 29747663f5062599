"""Bytes of device memory that attention moves, by hardware counters, beside plain attention: a JSON line a row.

    python benchmarks/traffic.py [--output FILE]    # a GPU whose counters may be read, and ncu on the PATH

Plain attention is three kernels with the scores in memory: softmax(q k^T) v, and torch's own gradient of it. Full
attention, bf16, 16 heads of 128 at 2k to 64k tokens, rows added until a batch has 32k; and the shape of GPT-2 medium
(1k tokens, 16 heads of 64, batch 64), the one of FlashAttention's own table. One process measures times and peak
memory of all cases; for bytes each case has a process of its own under ncu, since what a process has allocated before
changes them (docs/traffic.md). There a marker kernel stands before each step, for ncu lists kernels and knows no steps.
A case that does not fit in memory is a row with its error.

Source of the claim: Dao et al., FlashAttention, arXiv:2205.14135, figure 2 and theorem 2.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from provenance import ROOT, provenance

OUTPUT = ROOT / "docs/results/traffic.jsonl"
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARKER = "spin_kernel"  # what torch.cuda._sleep launches
TOKENS = 32768  # of a batch, below which rows are added: less would stay in the L2 and never be counted
ROUNDS = 5
METHODS = ("plain", "ours")
DIRECTIONS = ("forward", "backward")


class Shape(NamedTuple):
    name: str
    batch: int
    length: int
    heads: int
    head_dim: int

    def once(self, direction: str) -> int:
        """Bytes of reading and writing each tensor once: q, k, v, out, lse; with dout, dq, dk, dv in the backward."""
        rows = self.batch * self.length * self.heads
        return rows * (2 * self.head_dim * (4 if direction == "forward" else 8) + 4)


SHAPES = (
    *(Shape(f"{n // 1024}k", max(1, TOKENS // n), n, 16, 128) for n in (2048, 4096, 8192, 16384, 32768, 65536)),
    Shape("GPT-2", 64, 1024, 16, 64),
)


class Case(NamedTuple):
    shape: Shape
    method: str


CASES = tuple(Case(shape, method) for shape in SHAPES for method in METHODS)


def plain(q, k, v):
    """Three kernels: scores, softmax, product. q, k, v: [B * H, S, D]."""
    import torch

    empty = q.new_empty(())  # is not read: beta is 0
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=q.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ v


def inputs(case: Case) -> list:
    """q, k, v, dout: [B, S, H, D], or [B * H, S, D] for plain attention."""
    import torch

    _, batch, length, heads, head_dim = case.shape
    shape = (batch, length, heads, head_dim) if case.method == "ours" else (batch * heads, length, head_dim)
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


class Steps:
    """A case's forward and backward, each to be run alone. `between` is called before, between and after them."""

    def __init__(self, case: Case, kernel: str) -> None:
        import torch

        import ringflash

        self.torch = torch
        *leaves, self.dout = inputs(case)
        self.leaves = [x.requires_grad_() for x in leaves]
        self.attend = plain
        if case.method == "ours":
            self.attend = lambda q, k, v: ringflash.attention(q, k, v, causal=False, kernel=kernel)

    def run(self, around: Callable[[str, Callable[[], object]], object]) -> None:
        """`around(direction, step)` must call the step once."""
        out = around("forward", lambda: self.attend(*self.leaves))
        around("backward", lambda: self.torch.autograd.grad(out, self.leaves, self.dout))


def timed(case: Case, kernel: str) -> dict[str, dict]:
    """direction -> median ms, and the peak of memory that the step needed beyond what was there before the forward."""
    import torch

    times: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    peaks: dict[str, int] = {}
    steps = Steps(case, kernel)
    floor = torch.cuda.memory_allocated()

    def around(direction, step):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = step()
        end.record()
        torch.cuda.synchronize()
        times[direction].append(start.elapsed_time(end))
        peaks[direction] = torch.cuda.max_memory_allocated() - floor
        return result

    for _ in range(ROUNDS + 1):
        steps.run(around)
    return {way: {"ms": round(median(times[way][1:]), 4), "peak_bytes": peaks[way]} for way in DIRECTIONS}


def counted(case: Case, kernel: str) -> dict:
    """Run each step once behind a marker, for ncu to see, and end with a marker. The bytes are in ncu's list."""
    import torch

    steps = Steps(case, kernel)
    steps.run(lambda direction, step: step())  # compiled now, and not under the counters
    torch.cuda.synchronize()

    def mark() -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(1)

    def around(direction, step):
        mark()
        return step()

    torch.cuda.profiler.start()
    steps.run(around)
    mark()
    torch.cuda.profiler.stop()
    return {}


WORKERS = {"timed": timed, "counted": counted}


def work(name: str, kernel: str, indices: Sequence[int]) -> None:
    """These cases in this process: a line of JSON each, with the error of a case that failed."""
    import torch

    for index in indices:
        row: dict = {"case": index}
        try:
            row |= WORKERS[name](CASES[index], kernel)
        except torch.cuda.OutOfMemoryError as error:
            row["error"] = f"does not fit: {str(error).splitlines()[0][:120]}"
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


def under_ncu(ncu: str, log: Path) -> list[str]:
    """The words that put a process under ncu. Two counters of one unit: each kernel runs once, nothing is replayed."""
    return [
        ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--target-processes", "application-only", "--metrics", ",".join(COUNTERS), "--csv", "--print-units", "base",
        "--log-file", str(log),
    ]  # fmt: skip


def kernels(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(kernel, bytes read and written) in the order of launch, from ncu's CSV: a line a kernel and counter."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"ncu has listed no kernel; it says: {' '.join(lines)[-300:]}")
    totals: dict[int, tuple[str, int]] = {}
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in COUNTERS:
            name, before = totals.get(int(row["ID"]), (row["Kernel Name"], 0))
            totals[int(row["ID"])] = (name, before + round(float(row["Metric Value"].replace(",", ""))))
    for index in sorted(totals):
        yield totals[index]


def steps_of(launched: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """The kernels behind each marker."""
    found: list[list[tuple[str, int]]] = []
    for name, count in launched:
        if MARKER in name:
            found.append([])
        elif found:
            found[-1].append((name, count))
    return found


def joined(times: Sequence[dict], steps: Sequence[list[tuple[str, int]]]) -> list[dict]:
    """A row a case and direction. times: of every case, or its error; steps: of those without one, three each."""
    fitting = [row for row in times if "error" not in row]
    if len(steps) != 3 * len(fitting):
        raise ValueError(f"{len(steps)} markers in ncu's list, {3 * len(fitting)} were launched")
    launched = iter(steps)
    rows = []
    for time in times:
        case = CASES[time["case"]]
        for direction in DIRECTIONS:
            row = case.shape._asdict() | {"method": case.method, "direction": direction}
            row["once_bytes"] = case.shape.once(direction)
            if "error" in time:
                rows.append(row | {"error": time["error"]})
                continue
            seen = next(launched)
            rows.append(row | {"bytes": sum(n for _, n in seen), "num_kernels": len(seen)} | time[direction])
        if "error" not in time:
            next(launched)  # behind the last marker there is nothing
    return rows


def worker(name: str, kernel: str, indices: Sequence[int], before: Sequence[str] = ()) -> list[dict]:
    """A process that works through these cases; before: words in front of its command."""
    words = ["--worker", name, "--kernel", kernel, "--cases", ",".join(map(str, indices))]
    done = subprocess.run([*before, sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if len(rows) != len(indices):
        raise ValueError(f"after {len(rows)} of {len(indices)} cases: {(done.stderr or done.stdout)[-800:]}")
    return rows


def measure(ncu: str, kernel: str) -> list[dict]:
    times = worker("timed", kernel, range(len(CASES)))
    fitting = [row for row in times if "error" not in row]
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        for row in fitting:
            log = Path(folder) / f"{row['case']}.csv"
            (done,) = worker("counted", kernel, [row["case"]], under_ncu(ncu, log))
            if "error" in done:  # ncu needs memory, too
                row["error"] = f"under the counters: {done['error']}"
            else:
                steps += steps_of(list(kernels(log.read_text(encoding="utf-8").splitlines())))
    return joined(times, steps)


def line_of(row: dict) -> str:
    case = f"{row['name']:6} {row['method']:6} {row['direction']:8}"
    if "error" in row:
        return f"{case} {row['error']}"
    return (
        f"{case} {row['bytes'] / 1e9:8.2f} GB, {row['bytes'] / row['once_bytes']:6.2f} x each tensor once, "
        f"{row['num_kernels']:2} kernels, {row['ms']:8.3f} ms, peak {row['peak_bytes'] / 2**20:9.0f} MiB"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--kernel", default="gluon", help="of ringflash.KERNELS")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no history")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.worker:
        work(arguments.worker, arguments.kernel, [int(word) for word in arguments.cases.split(",")])
        return 0
    import torch

    if not torch.cuda.is_available():
        print("this counts bytes of an NVIDIA GPU, and torch sees none")
        return 2
    ncu = shutil.which("ncu")
    if ncu is None:
        print("this needs ncu, of NVIDIA's Nsight Compute, on the PATH")
        return 2
    where = provenance("traffic.py", ["--kernel", arguments.kernel], arguments.commit) | {"kernel": arguments.kernel}
    try:
        rows = measure(ncu, arguments.kernel)
    except ValueError as error:
        print(f"not measured: {error}")
        return 1
    for row in rows:
        print(line_of(row))
    arguments.output.write_text("".join(json.dumps(row | where) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
