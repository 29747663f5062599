"""A ring over the GPUs of this host, beside the same kernel on one of them and PyTorch's own: a JSON line a row.

    torchrun --nproc-per-node 2 benchmarks/ring.py                      # all rows; a GPU a process
    torchrun --nproc-per-node 2 benchmarks/ring.py --lengths 32768
    torchrun --nproc-per-node 2 benchmarks/ring.py --tiny               # gloo on CPUs: does it run? Writes no file

Causal attention, bf16, D=128, forward and forward + backward, through `ringflash.attention` as a user calls it: "ring"
and "gather" are its arrangements. "alone" is the whole sequence on each GPU with its share of the heads: the same FLOPs
without a ring. "context_parallel" is PyTorch's, with cuDNN; "zigzag cudnn" and "zigzag flash" are ring-flash-
attention's, see `zigzag.py`. TFLOP/s are of visible pairs a GPU; a time is the slowest rank's, of one call among some
that follow each other as layers do, the median of rounds that all ranks begin together; host_ms is how long the host
takes to order one. With --profile the row of the ring, both ways, says how long rank 0's messages ran, and how long
with no kernel beside them. A contender that fails is a row with its error.

Letters: P ranks, S tokens of the sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zigzag as rivals
from profiling import Profile
from provenance import ROOT, on_cpu, over, provenance

import ringflash
from ringflash import exchange

OUTPUT = ROOT / "docs/results/ring.jsonl"
LENGTHS = (32768, 131072, 524288)
HEADS = ("16:16", "32:8")
HEAD_DIM = 128


class Rounds(NamedTuple):
    """warm: calls before; count: rounds that are measured; calls: of each round."""

    warm: int
    count: int
    calls: int


ROUNDS = {0: Rounds(1, 3, 32), 100_000: Rounds(1, 2, 8), 500_000: Rounds(1, 1, 1)}
"""How cases are measured that have so many tokens or more."""

PROFILED = "ring", "both"  # contender and way
WAYS = {"forward": 1.0, "both": 3.5}  # five products of the backward where the forward has two


class Case(NamedTuple):
    length: int
    heads: int
    kv_heads: int

    def flops(self, way: str) -> float:
        """Of one GPU."""
        pairs = self.length * (self.length + 1) / 2
        return 4 * HEAD_DIM * self.heads * pairs * WAYS[way] / dist.get_world_size()


class Ready(NamedTuple):
    """attend() -> out of this rank; inputs: its leaves; dout: the gradient of out."""

    attend: Callable[[], torch.Tensor]
    inputs: list[torch.Tensor]
    dout: torch.Tensor

    def run(self, way: str) -> None:
        with torch.no_grad() if way == "forward" else nullcontext():
            out = self.attend()
        if way == "both":
            torch.autograd.grad(out, self.inputs, self.dout)


def tensors(tokens: int, heads: int, kv_heads: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v, dout: [1, tokens, heads, HEAD_DIM]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(1, tokens, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def ours(arrangement: str) -> Callable[[Case, torch.device], AbstractContextManager[Ready]]:
    """Ours over all GPUs, zigzag."""

    @contextmanager
    def make(case: Case, device: torch.device) -> Iterator[Ready]:
        layout = ringflash.Ring(layout="zigzag", arrangement=arrangement).layout(case.length)
        *inputs, dout = tensors(layout.local_len, case.heads, case.kv_heads, device)
        inputs = [x.requires_grad_() for x in inputs]
        yield Ready(lambda: ringflash.attention(*inputs, layout=layout), inputs, dout)

    return make


@contextmanager
def alone(case: Case, device: torch.device) -> Iterator[Ready]:
    size = dist.get_world_size()
    if case.heads % size or (case.kv_heads % size and size % case.kv_heads):
        raise ValueError(f"{case.heads}:{case.kv_heads} heads cannot be shared by {size} GPUs")
    *inputs, dout = tensors(case.length, case.heads // size, max(1, case.kv_heads // size), device)
    inputs = [x.requires_grad_() for x in inputs]
    yield Ready(lambda: ringflash.attention(*inputs), inputs, dout)


@contextmanager
def context_parallel(case: Case, device: torch.device) -> Iterator[Ready]:
    from torch.distributed.tensor.experimental import context_parallel as shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    whole = [x.transpose(1, 2).contiguous() for x in tensors(case.length, case.heads, case.kv_heads, device)]
    backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext()
    with shard(mesh, buffers=whole, buffer_seq_dims=[2] * 4, no_restore_buffers=set(whole)), backend:
        *inputs, dout = whole
        inputs = [x.requires_grad_() for x in inputs]
        grouped = case.heads != case.kv_heads
        attend = lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)  # noqa: E731
        yield Ready(attend, inputs, dout)


def zigzag(backend: str) -> Callable[[Case, torch.device], AbstractContextManager[Ready]]:
    """ring-flash-attention over one of `zigzag.BACKENDS`."""

    @contextmanager
    def make(case: Case, device: torch.device) -> Iterator[Ready]:
        attend = rivals.attention(backend, device)
        *inputs, dout = tensors(case.length // dist.get_world_size(), case.heads, case.kv_heads, device)
        inputs = [x.requires_grad_() for x in inputs]
        yield Ready(lambda: attend(*inputs, causal=True), inputs, dout)

    return make


CONTENDERS: dict[str, Callable[[Case, torch.device], AbstractContextManager[Ready]]] = {
    "ring": ours("ring"), "gather": ours("gather"), "alone": alone, "context_parallel": context_parallel,
    **{f"zigzag {backend}": zigzag(backend) for backend in rivals.BACKENDS},
}  # fmt: skip


class Clock:
    """Milliseconds of a call on the slowest rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, run: Callable[[], None], rounds: Rounds) -> tuple[float, float]:
        """Of the call, and of the host's part in it."""
        for _ in range(rounds.warm):
            run()
        times = []
        for _ in range(rounds.count):
            self._settle()
            dist.barrier()
            self._settle()
            began = perf_counter()
            for _ in range(rounds.calls):
                run()
            ordered = perf_counter()
            self._settle()
            times.append([1e3 * (end - began) / rounds.calls for end in (perf_counter(), ordered)])
        slowest = torch.tensor([median(each) for each in zip(*times, strict=True)], device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        took, host = slowest.tolist()
        return took, host


def messages(ready: Ready, device: torch.device) -> dict[str, float]:
    """Milliseconds of one call, both ways: of all, of messages, of messages with no kernel beside them, of nothing."""
    dist.barrier()
    with Profile(device) as profile:
        ready.run("both")
    found = profile.summary()
    parts = {"span": found["span_s"], "messages": found["kinds_s"]["messages"], "alone": found["messages_alone_s"],
             "idle": found["idle_s"]}  # fmt: skip
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()}


def rows_of(case: Case, device: torch.device, names: Sequence[str], profiled: bool = False) -> Iterator[dict]:
    """Contenders by name, both ways. profiled: see --profile"""
    clock, rounds = Clock(device), ROUNDS[max(start for start in ROUNDS if start <= case.length)]
    for name, make in ((name, CONTENDERS[name]) for name in names):
        row = case._asdict() | {"ranks": dist.get_world_size(), "contender": name}
        try:
            with make(case, device) as ready:
                for way in WAYS:
                    ms, host_ms = clock.ms(lambda way=way: ready.run(way), rounds)
                    rate = case.flops(way) / ms / 1e9
                    seen = {"messages_ms": messages(ready, device)} if profiled and (name, way) == PROFILED else {}
                    times = {"ms": round(ms, 3), "host_ms": round(host_ms, 3), "tflops": round(rate, 1)}
                    yield row | {"way": way, **times, "calls": rounds.calls, "rounds": rounds.count} | seen
        except (RuntimeError, ValueError, TypeError) as error:  # of one contender, on every rank alike
            yield row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", help="S, tokens of the sequence")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, help="of queries and of keys")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="rows are added to it")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no history")
    parser.add_argument("--profile", action="store_true", help="how much of the exchange is hidden")
    parser.add_argument("--tiny", action="store_true", help="small cases over gloo")
    asked = parser.parse_args(words)
    if "RANK" not in os.environ:
        sys.exit("a ring needs processes: torchrun --nproc-per-node 2 benchmarks/ring.py")
    output = asked.output or (None if asked.tiny else OUTPUT)
    device = torch.device("cpu") if asked.tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("this measures GPUs, and torch sees none; --tiny needs no GPU")
        torch.cuda.set_device(device)
    os.environ.setdefault(exchange.PRIORITY, "1")  # for all of them
    dist.init_process_group("gloo" if asked.tiny else "nccl")
    shown = over(dist.get_world_size(), (on_cpu if asked.tiny else provenance)("ring.py", sys.argv[1:], asked.commit))
    for length in asked.lengths or ((256,) if asked.tiny else LENGTHS):
        for heads in asked.heads:
            for row in rows_of(Case(length, *map(int, heads.split(":"))), device, asked.contenders, asked.profile):
                if dist.get_rank() == 0:
                    print(json.dumps(row), flush=True)
                    if output:
                        with output.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row | shown) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
