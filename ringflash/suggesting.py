"""`suggest`: which arrangement of the ranks should be fastest, from arithmetic alone; nothing runs and nothing is sent.

The formulas are in docs/arrangements.md with their sources. What they leave out: the cost of a hop beside its pairs,
and what a kernel loses while messages pass through its GPU. Rates are measured ones, of one direction.

Letters: S global sequence, H query heads, G key/value heads, D head dimension, P ring size, U Ulysses size, n = P * U.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import arguments

BACKWARD = 2.5  # five products where the forward has two
ROW_BYTES = 4  # lse, delta: fp32, one a query and head


class Alternative(NamedTuple):
    """One arrangement and what it is predicted to take for one attention, of one rank.

    arrangement: one of ringflash.ARRANGEMENTS; double needs `Ring(..., topology=gpus_per_node)`
    forward_s, backward_s: seconds; exposed_s: those of both in which a rank waits for messages
    memory_bytes: most at one time, beside q, k, v, out, their gradients and lse
    """

    arrangement: str
    ring: int
    ulysses: int
    layout: str
    forward_s: float
    backward_s: float
    exposed_s: float
    memory_bytes: int

    @property
    def time_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` found. str() of it is a table.

    best: the fastest that fits; alternatives: all, fastest first; memory_bytes: the limit that was given, or None
    """

    best: Alternative
    alternatives: tuple[Alternative, ...]
    memory_bytes: int | None

    def __str__(self) -> str:
        lines = ["   arrangement  ring  ulysses  layout      forward ms  backward ms   exposed ms   memory GB"]
        for one in self.alternatives:
            mark = "->" if one == self.best else "  "
            over = self.memory_bytes is not None and one.memory_bytes > self.memory_bytes
            times = "".join(f"{1e3 * x:13.3f}" for x in (one.forward_s, one.backward_s, one.exposed_s))
            lines.append(
                f"{mark} {one.arrangement:11} {one.ring:5} {one.ulysses:8}  {one.layout:10}{times}"
                f"{one.memory_bytes / 1e9:11.3f}{' does not fit' if over else ''}"
            )
        return "\n".join(lines)


class _Problem(NamedTuple):
    """What `suggest` was asked, checked. Rates are per second; network is 0 on one node."""

    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    gpus_per_node: int
    nodes: int
    link: float
    network: float
    forward: float
    backward: float
    causal: bool
    element: int
    gradient: int


def suggest(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_len: int,
    gpus_per_node: int,
    nodes: int = 1,
    link_bytes_per_s: float,
    network_bytes_per_s: float | None = None,
    forward_flops_per_s: float,
    backward_flops_per_s: float,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    transit: torch.dtype = torch.float32,
    memory_bytes: int | None = None,
) -> Suggestion:
    """The arrangement of ring, Ulysses and nodes with the shortest predicted time for one attention.

    heads, kv_heads, head_dim: H, G, D; seq_len: S, tokens of the one sequence that all GPUs share
    gpus_per_node, nodes: n is their product
    link_bytes_per_s: what one GPU sends to another of its node; network_bytes_per_s: to one of another node, with all
        GPUs of a node sending; needed with several nodes, and refused without
    forward_flops_per_s, backward_flops_per_s: the kernel's rate on one GPU, of visible pairs, the backward counted as
        2.5 forwards, as benchmarks/attention.py prints it (times 1e12)
    dtype: of q, k, v; transit: of gradients under way, see `Ring`
    memory_bytes: alternatives that need more beside the tensors of the caller are not chosen
    returns a Suggestion

    Raises: TypeError, ValueError, naming argument, value and what would be accepted.
    Source: overlap, Liu et al., arXiv:2310.01889; double ring, arXiv:2406.18485; all-to-all, arXiv:2309.14509; queries
        that travel, arXiv:2403.09347.
    """
    for name, count in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim),
                        ("gpus_per_node", gpus_per_node), ("nodes", nodes)):  # fmt: skip
        arguments.whole(name, count, arguments.MAX_TOKENS)
    if memory_bytes is not None:
        arguments.whole("memory_bytes", memory_bytes)
    # what `attention` and `Ring.layout` refuse is not predicted
    arguments.check_head_dim(f"head_dim={head_dim}", head_dim)
    arguments.check_heads(f"heads={heads}", heads, f"kv_heads={kv_heads}", kv_heads)
    arguments.seq_len_of(seq_len)
    if (network_bytes_per_s is None) == (nodes > 1):
        need = "needed with several nodes" if nodes > 1 else "of no use on one node; leave it out"
        raise ValueError(f"network_bytes_per_s={network_bytes_per_s} with nodes={nodes}: it is {need}")
    network = 0.0 if network_bytes_per_s is None else _rate("network_bytes_per_s", network_bytes_per_s)
    problem = _Problem(
        heads, kv_heads, head_dim, seq_len, gpus_per_node, nodes, _rate("link_bytes_per_s", link_bytes_per_s), network,
        _rate("forward_flops_per_s", forward_flops_per_s), _rate("backward_flops_per_s", backward_flops_per_s),
        arguments.flag_of("causal", causal), arguments.dtype_of("dtype", dtype).itemsize,
        arguments.transit_of(transit).itemsize,
    )  # fmt: skip
    return _chosen(problem, memory_bytes)


def _rate(name: str, rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"{name}={rate!r} is {type(rate).__name__}; it must be a number per second")
    if not 0 < rate <= sys.float_info.max:
        raise ValueError(f"{name}={rate} must be positive and finite")
    return float(rate)


def _chosen(problem: _Problem, memory_bytes: int | None) -> Suggestion:
    ranks = problem.gpus_per_node * problem.nodes
    multiple = 2 * ranks if problem.causal else ranks  # of zigzag, of contiguous
    if problem.seq_len % multiple:
        advice = arguments.length_beside(problem.seq_len, multiple, "pad to {padded}")
        raise ValueError(f"seq_len={problem.seq_len} must be a multiple of {multiple} for {ranks} GPUs; {advice}")
    found = []
    for ulysses in _divisors(math.gcd(ranks, problem.heads)):
        if problem.kv_heads % ulysses and ulysses % problem.kv_heads:
            continue
        size = ranks // ulysses
        names = ["ring"] + ["gather"] * (size > 1)
        if problem.nodes > 1 and problem.gpus_per_node % ulysses == 0 and problem.gpus_per_node > ulysses:
            names.append("double")
        found += [_predicted(problem, name, size, ulysses) for name in names]
    found.sort(key=lambda one: (one.time_s, one.memory_bytes, one.ulysses))
    fitting = [one for one in found if memory_bytes is None or one.memory_bytes <= memory_bytes]
    if not fitting:
        least = min(one.memory_bytes for one in found)
        raise ValueError(f"memory_bytes={memory_bytes} is too little for any arrangement; the least needs {least}")
    return Suggestion(fitting[0], tuple(found), memory_bytes)


def _divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class _Blocks(NamedTuple):
    """Bytes of one rank's block: forward; of the backward the block and the gradients that follow it."""

    forward: float
    backward: float
    gradients: float


def _blocks(problem: _Problem, rows: int, ulysses: int) -> _Blocks:
    """rows: S / P. In the backward travels what is fewer bytes: keys and values, or queries with dout, lse, delta."""
    queries = rows * problem.heads // ulysses
    keys = rows * max(1, problem.kv_heads // ulysses)
    width, b, g = problem.head_dim, problem.element, problem.gradient
    kv = 2 * keys * width * b
    moved = (kv, 2 * keys * width * g), (2 * queries * (width * b + ROW_BYTES), queries * width * g)
    return _Blocks(kv, *min(moved, key=sum))


def _predicted(problem: _Problem, arrangement: str, size: int, ulysses: int) -> Alternative:
    """One row of the table."""
    rows = problem.seq_len // size
    pairs = problem.seq_len * (problem.seq_len + 1) / 2 if problem.causal else float(problem.seq_len**2)
    flops = 4 * problem.head_dim * (problem.heads / ulysses) * pairs / size
    compute = flops / problem.forward, BACKWARD * flops / problem.backward
    blocks = _blocks(problem, rows, ulysses)
    waits = _WAITS[arrangement](problem, compute, blocks, size, ulysses)
    heads = _all_to_all(problem, ulysses)
    exposed = [wait + swap for wait, swap in zip(waits, heads, strict=True)]
    kept = _memory(problem, arrangement, blocks, size, ulysses)
    layout = "zigzag" if problem.causal else "contiguous"
    return Alternative(
        arrangement, size, ulysses, layout, compute[0] + exposed[0], compute[1] + exposed[1], sum(exposed), kept
    )


def _ring(problem: _Problem, compute: tuple, blocks: _Blocks, size: int, ulysses: int) -> tuple[float, float]:
    """Each hop hides the messages of the next one; a ring over nodes is as slow as its slowest edge."""
    if size == 1:
        return 0.0, 0.0
    rate = problem.link if problem.nodes == 1 else problem.network
    forward = (size - 1) * max(0.0, blocks.forward / rate - compute[0] / size)
    under = (size - 1) * max(0.0, (blocks.backward + blocks.gradients) / rate - compute[1] / size)
    return forward, under + blocks.gradients / rate  # nothing hides the way home


def _double(problem: _Problem, compute: tuple, blocks: _Blocks, size: int, ulysses: int) -> tuple[float, float]:
    """Between nodes a message has a whole round inside the node to travel."""
    inner = problem.gpus_per_node // ulysses

    def wait(size_bytes: float, seconds: float) -> float:
        hop = seconds / size
        inside = problem.nodes * (inner - 1) * max(0.0, size_bytes / problem.link - hop)
        return inside + (problem.nodes - 1) * max(0.0, size_bytes / problem.network - inner * hop)

    home = blocks.gradients / problem.network
    return wait(blocks.forward, compute[0]), wait(blocks.backward + blocks.gradients, compute[1]) + home


def _gather(problem: _Problem, compute: tuple, blocks: _Blocks, size: int, ulysses: int) -> tuple[float, float]:
    """Forward, messages of half of the heads have the kernel of the others, if halves there are; backward none has.

    What comes from the own node and from others comes at the same time.
    """
    near = size if problem.nodes == 1 else max(1, problem.gpus_per_node // ulysses)
    far = (size - near) / problem.network if size > near else 0.0
    seconds_a_byte = max((near - 1) / problem.link, far)
    forward = seconds_a_byte * blocks.forward
    halves = max(1, problem.kv_heads // ulysses) % 2 == 0
    bare = forward / 2 + max(0.0, forward - compute[0]) / 2 if halves else forward
    return bare, seconds_a_byte * (blocks.backward + blocks.gradients)


_WAITS = {"ring": _ring, "double": _double, "gather": _gather}


def _all_to_all(problem: _Problem, ulysses: int) -> tuple[float, float]:
    """Seconds of Ulysses: q, k, v there and out, lse back; dout, q, k, v there and three gradients back. Not hidden."""
    if ulysses == 1:
        return 0.0, 0.0
    ranks = problem.gpus_per_node * problem.nodes
    inside = problem.gpus_per_node % ulysses == 0
    rows = problem.seq_len / ranks * (ulysses - 1)
    queries, keys = rows * problem.heads / ulysses, rows * max(1, problem.kv_heads // ulysses)
    width, b = problem.head_dim, problem.element
    gradient = 4 if problem.kv_heads < ulysses else b  # shared heads are summed in fp32
    forward = (2 * queries + 2 * keys) * width * b + queries * ROW_BYTES
    backward = (3 * queries + 2 * keys) * width * b + 2 * keys * width * gradient + 2 * queries * ROW_BYTES
    rate = problem.link if inside else problem.network
    return forward / rate, backward / rate


def _memory(problem: _Problem, arrangement: str, blocks: _Blocks, size: int, ulysses: int) -> int:
    """Bytes of the backward, which needs most: blocks, gradients, sums in fp32, and what Ulysses holds twice."""
    rows = problem.seq_len // size
    queries, keys = rows * problem.heads // ulysses, rows * max(1, problem.kv_heads // ulysses)
    width = problem.head_dim
    sums = 4 * width * (queries + 2 * keys) if size > 1 else 0  # dq, dk, dv
    if arrangement == "gather":  # one block of all rows, its gradients, and those that come home
        blocks = _Blocks(blocks.forward, size * blocks.backward, (2 * size - 1) * blocks.gradients)
        sums = 4 * width * queries
    buffers = {"ring": 2, "double": 3, "gather": 1}[arrangement] if size > 1 else 0
    swapped = (2 * queries + 2 * keys) * width * problem.element if ulysses > 1 else 0
    return int(sums + buffers * (blocks.backward + blocks.gradients) + swapped)
