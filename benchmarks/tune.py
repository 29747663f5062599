"""Measure candidate tilings of the portable kernels on this card, and keep the best of each in the repository.

    python benchmarks/tune.py                    # compile, check, time, write the table; needs a GPU
    python benchmarks/tune.py --offline sm_90    # only compile, for that arch, and say what is dropped; needs no GPU

One row a (kernel, head dimension): the present tiling and a handful of others. What spills or does not fit is dropped
by the compiler's report; what computes something else than the `eager` kernel is dropped next; the rest is timed, at
8k and 64k tokens, full and causal, a forward also both as the only hop and as a hop between others, all candidates of
a row interleaved. Another tiling wins if its speeds are more than 1% above those of the present one in geometric mean.
Nothing is tuned at run time: the kernels add to their arguments, and a table can be read and reviewed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

import torch
from provenance import ROOT, provenance

import ringflash
from ringflash import mask
from ringflash.kernels import State
from ringflash.kernels.triton.tiling import Card, Tiling, built_in, tiling

TABLE = ROOT / "ringflash/kernels/triton/tuned.json"
RESULTS = ROOT / "docs/results/tuning.jsonl"
KERNELS = ("forward", "keys", "queries")
PRODUCTS = {"forward": 2, "keys": 4, "queries": 3}  # of S^2 D each, that the kernel really does
SHAPES = ((8192, 2, 1), (65536, 1, 4))  # tokens, batch, parts of HEADS: what is best at 8k may not be at 64k
BATCH, CHECKED = 2, 700
HEADS = {64: 16, 128: 16, 256: 8}
MASKS = ("full", "causal")
ROUNDS, REP_MS, MIN_CALLS = 5, 20, 3
SPILL_BYTES = 256
TOLERANCE = 0.02  # in the 2-norm, beside the eager kernel; bf16 rounds to 0.004
GAIN = 1.01

# kernel -> head dimension -> (block_q, block_k, num_warps, num_stages), tried beside the present one
OTHERS = {
    "forward": {
        64: [(128, 128, 8, 2), (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3)],
        128: [(128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3)],
        256: [(128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)],
    },
    "keys": {
        64: [(64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (128, 64, 4, 2)],
        128: [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3)],
        256: [(32, 64, 8, 2), (32, 64, 8, 3), (64, 32, 8, 2), (32, 32, 4, 2), (64, 64, 4, 2)],
    },
    "queries": {
        64: [(128, 128, 8, 2), (128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3)],
        256: [(64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 8, 1), (32, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
    },
}


# kernel -> its forms: (first, last) of a forward, once as all there is and once between other hops
FORMS = {"forward": ((True, True), (False, False)), "keys": ((True, True),), "queries": ((True, True),)}


class Candidate(NamedTuple):
    kernel: str
    head_dim: int
    tiling: Tiling

    def __str__(self) -> str:
        return f"{self.kernel:8} D={self.head_dim:<4} {tuple(self.tiling)!s:20}"


def candidates(card: Card) -> list[Candidate]:
    """The present tiling of each row first."""
    found = []
    for kernel, widths in OTHERS.items():
        for width, others in widths.items():
            rows = [of(kernel, width, 2, card) for of in (tiling, built_in)] + [Tiling(*other) for other in others]
            found += [Candidate(kernel, width, row) for row in dict.fromkeys(rows)]
    return found


class Problem:
    """One set of tensors, and how each kernel is launched on it with a tiling.

    engine: of ringflash.KERNELS, whose forward gives the lse and delta that the backward kernels read
    """

    def __init__(
        self, width: int, length: int, mask_name: str, engine: str, *,
        heads: int, groups: int, batch: int = BATCH, device: str = "cuda",
    ) -> None:  # fmt: skip
        self.bounds = mask.intervals(length, length, causal=mask_name == "causal")
        self.length, self.scale, self.engine = length, width**-0.5, ringflash.KERNELS[engine]
        generator = torch.Generator(device).manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(batch, length, n, width, generator=generator, device=device).bfloat16()
            for n in (heads, groups, groups, heads)
        )
        self.flops = 2.0 * int(self.bounds[1].astype("int64").sum()) * batch * heads * width
        self.state = self._fresh_state((True, True))
        self._forward(self.engine, self.view(), self.state, (True, True))
        self.delta = self.engine.delta(self.state.out, self.dout, None)

    def view(self) -> mask.View:
        """A new one: what a view remembers belongs to one tiling."""
        (view,) = mask.plan_one_device(self.length, *self.bounds).views
        assert view is not None
        return view

    def _fresh_state(self, ends: tuple[bool, bool]) -> State:
        """What a hop with these (first, last) finds: nothing yet, or a state of earlier hops."""
        first, _ = ends
        lse = torch.full(
            (self.q.shape[0], self.q.shape[2], self.length), torch.nan if first else 1.0, device=self.q.device
        )
        acc = None if first else torch.ones_like(self.q, dtype=torch.float32)
        return State(acc, torch.full_like(self.q, torch.nan), lse)

    def _forward(self, engine, view: mask.View, state: State, ends: tuple[bool, bool]) -> None:
        first, last = ends
        engine.forward(self.q, self.k, self.v, view, state, scale=self.scale, first=first, last=last)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, to be added to, and dk, dv, poisoned."""
        return torch.zeros_like(self.q, dtype=torch.float32), self.k * torch.nan, self.v * torch.nan

    def expected(self, kernel: str, ends: tuple[bool, bool]) -> tuple[torch.Tensor, ...]:
        """What that kernel must write, by the engine."""
        if kernel == "forward":
            state = self._fresh_state(ends)
            self._forward(self.engine, self.view(), state, ends)
            return state.out if state.acc is None else state.acc, state.lse
        dq, dk, dv = self.gradients()
        inputs = (self.dout, self.q, self.k, self.v, self.state.lse, self.delta, self.view())
        self.engine.backward(*inputs, dq, dk, dv, scale=self.scale, deterministic=True)
        return (dk, dv) if kernel == "keys" else (dq,)

    def launcher(self, candidate: Candidate, ends: tuple[bool, bool]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """A function that launches the candidate in one of its FORMS and returns what it wrote."""
        from ringflash.kernels.triton import launch

        view, state = self.view(), self._fresh_state(ends)
        dq, dk, dv = self.gradients()
        inputs = (self.dout, self.q, self.k, self.v, self.state.lse, self.delta, view)
        work = {
            "forward": lambda: self._forward(launch, view, state, ends),
            "keys": lambda: launch.key_gradients(*inputs, dk, dv, scale=self.scale, adds=False),
            "queries": lambda: launch.query_gradient(*inputs, dq, scale=self.scale),
        }[candidate.kernel]
        result = state.out if state.acc is None else state.acc
        written = {"forward": (result, state.lse), "keys": (dk, dv), "queries": (dq,)}[candidate.kernel]

        def run() -> tuple[torch.Tensor, ...]:
            with chosen(candidate.tiling):
                work()
            return written

        return run


@contextlib.contextmanager
def chosen(tiles: Tiling) -> Iterator[None]:
    """Every launch of the portable kernels uses these tiles."""
    from ringflash.kernels.triton import launch

    present, launch.tiling = launch.tiling, lambda *_: tiles
    try:
        yield
    finally:
        launch.tiling = present


def compiler_says(arch: str, candidate: Candidate) -> str | None:
    """Why the candidate is dropped without being run; None if it is not. In a process of its own: see offline.py."""
    import offline

    for form in offline.FORWARDS if candidate.kernel == "forward" else (candidate.kernel,):
        try:
            with chosen(candidate.tiling):
                made = offline.compile_offline(arch, candidate.head_dim, torch.bfloat16, form)
        except Exception as error:
            return f"does not compile: {first_line(error)}"
        if made.shared_bytes > offline.SHARED_BYTES[arch]:
            return f"needs {made.shared_bytes} bytes of shared memory, of {offline.SHARED_BYTES[arch]}"
        if made.spill_bytes > SPILL_BYTES:
            return f"spills {made.spill_bytes} bytes"
        if arch == "sm_90" and not made.num_products:
            return "has no wgmma, which takes 64 rows"
    return None


def runs_wrong(candidate: Candidate, length: int = CHECKED, device: str = "cuda") -> str | None:
    """Why the candidate is dropped after a small run; None if it computes what the eager kernel does."""
    try:
        problem = Problem(candidate.head_dim, length, "causal", "eager", heads=4, groups=2, device=device)
        pairs = []
        for ends in FORMS[candidate.kernel]:
            pairs += zip(problem.launcher(candidate, ends)(), problem.expected(candidate.kernel, ends), strict=True)
        worst = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)
    except Exception as error:
        return f"does not run: {first_line(error)}"
    return None if worst <= TOLERANCE else f"is wrong by {worst:.2g} of the norm"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def fails(arch: str, candidate: Candidate) -> str | None:
    """Why the candidate is dropped before it is timed; None if it is not. In a process of its own."""
    from triton.runtime import driver

    reason = compiler_says(arch, candidate)
    driver.reset_active()  # the card that is here, instead of the one that was compiled for
    return reason or runs_wrong(candidate)


def survivors(found: Sequence[Candidate], reasons: Iterable[str | None]) -> list[Candidate]:
    """Those without a reason to be dropped; says the others'."""
    kept = []
    for candidate, reason in zip(found, reasons, strict=True):
        if reason is None:
            kept.append(candidate)
        else:
            print(f"{candidate} {reason}", flush=True)
    return kept


def ms(run: Callable[[], object], calls: int, flush: torch.Tensor) -> float:
    """Median time on the GPU, with the L2 full of something else before each call."""
    times = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in times)


def timed(row: Sequence[Candidate]) -> dict[Candidate, float]:
    """TFLOP/s of a kernel's products: the geometric mean over shapes, masks, forms, of interleaved rounds' medians."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    rates: dict[Candidate, list[float]] = {candidate: [] for candidate in row}
    for (length, batch, parts), mask_name, ends in itertools.product(SHAPES, MASKS, FORMS[row[0].kernel]):
        heads = HEADS[row[0].head_dim] // parts
        problem = Problem(row[0].head_dim, length, mask_name, "triton", heads=heads, groups=heads, batch=batch)
        runs = {candidate: problem.launcher(candidate, ends) for candidate in row}
        calls = {candidate: max(MIN_CALLS, round(REP_MS / ms(run, 2, flush))) for candidate, run in runs.items()}
        times: dict[Candidate, list[float]] = {candidate: [] for candidate in row}
        for _ in range(ROUNDS):
            for candidate, run in runs.items():
                times[candidate].append(ms(run, calls[candidate], flush))
        for candidate, found in times.items():
            rates[candidate].append(PRODUCTS[candidate.kernel] * problem.flops / median(found) / 1e9)
    return {candidate: geometric_mean(found) for candidate, found in rates.items()}


def best(rates: dict[Candidate, float]) -> Candidate:
    """The fastest; the first, which is the present one, unless another is faster by more than GAIN."""
    first, fastest = next(iter(rates)), max(rates, key=lambda candidate: rates[candidate])
    return fastest if rates[fastest] > GAIN * rates[first] else first


def updated(table: dict, card: Card, winners: dict[Candidate, float], where: dict) -> dict:
    """The table with this card replaced: card -> provenance, and rows: kernel -> head dimension -> tiles, TFLOP/s."""
    rows: dict[str, dict] = {}
    for candidate, rate in winners.items():
        row = {"tiling": candidate.tiling._asdict(), "tflops": round(rate, 1)}
        rows.setdefault(candidate.kernel, {})[str(candidate.head_dim)] = row
    return dict(sorted((table | {f"{card.backend}:{card.arch}": where | {"rows": rows}}).items()))


def pool(jobs: int) -> ProcessPoolExecutor:
    """A process for each call: what one candidate does to the GPU or the driver reaches no other."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def measure(card: Card, arguments: argparse.Namespace) -> None:
    """All of it: see the top of this file."""
    found, arch = candidates(card), f"sm_{card.arch}"
    with pool(arguments.jobs) as workers:
        found = survivors(found, workers.map(fails, [arch] * len(found), found))
    where, winners, lines = provenance("tune.py", [], arguments.commit), {}, []
    for kernel in KERNELS:
        for width in HEADS:
            row = [candidate for candidate in found if candidate[:2] == (kernel, width)]
            if not row:
                continue
            rates = timed(row)
            winner = best(rates)
            winners[winner] = rates[winner]
            for candidate, rate in rates.items():
                print(f"{candidate} {rate:6.1f} TFLOP/s{'  best' if candidate is winner else ''}", flush=True)
                line = {"kernel": kernel, "head_dim": width, **candidate.tiling._asdict(), "tflops": round(rate, 1)}
                lines.append(json.dumps(line | {"best": candidate is winner} | where) + "\n")
    table = json.loads(arguments.table.read_text()) if arguments.table.is_file() else {}
    arguments.table.write_text(json.dumps(updated(table, card, winners, where), indent=1) + "\n")
    arguments.results.write_text("".join(lines), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--offline", metavar="ARCH", help="only compile, for this arch, as in sm_90")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table that the kernels read")
    parser.add_argument("--results", type=Path, default=RESULTS, help="what every candidate reached")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no history")
    arguments = parser.parse_args(words)
    if arguments.offline:
        found = candidates(Card("cuda", int(arguments.offline.removeprefix("sm_"))))
        with pool(arguments.jobs) as workers:
            kept = survivors(found, workers.map(compiler_says, [arguments.offline] * len(found), found))
        print(f"{len(kept)} of {len(found)} candidates are left")
        return 0
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("this times kernels on an NVIDIA GPU, and torch sees none; --offline ARCH needs no GPU")
        return 2
    from ringflash.kernels.triton import launch

    measure(launch.card(), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
