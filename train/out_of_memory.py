"""Out of memory: which part of the step it was, and which key of the config would help. Called by `loop`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

import ringflash

from .config import Config, Memory
from .watch import Watch

HERE, LIBRARY = Path(__file__).parent, Path(ringflash.__file__).parent


class OutOfMemoryError(RuntimeError):
    """The part, what was held, the keys that would help."""


@contextmanager
def explained(config: Config, watch: Watch) -> Iterator[None]:
    """Turn an out-of-memory error of torch into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        part = part_of(error.__traceback__) or watch.part
        advice = "; ".join(knobs(config, part))
        raise OutOfMemoryError(f"out of memory in the {part} of step {watch.step}{_held()}: {advice}") from error


def part_of(trace: TracebackType | None) -> str | None:
    """ "loss" or "attention" if the error came from there, whether forward or backward or recomputed."""
    part = None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path == HERE / "loss.py":
            part = "loss"
        elif path.is_relative_to(LIBRARY) and not path.is_relative_to(HERE):
            part = "attention"
        trace = trace.tb_next
    return part


def knobs(config: Config, part: str) -> list[str]:
    """What would make this part smaller, the cheapest first."""
    memory, parallel, length = config.memory, config.parallel, config.sequence.length
    chunk = f"memory.loss_chunk = {memory.loss_chunk}: a smaller one holds fewer logits"
    if memory.loss == "liger":
        chunk = "memory.loss = 'liger': 'chunked' holds fewer logits where a rank has many tokens"
    recompute = (
        f"memory.checkpoint = {memory.checkpoint!r}: "
        + {
            "none": "'selective' keeps far less for the backward",
            "selective": "'full' keeps less still, and runs the ring twice",
            "full": "it keeps least already",
        }[memory.checkpoint]
    )
    shard = f"parallel.zero = {parallel.zero}: " + {
        3: "it shards all already, over more processes each holds less",
        2: "3 shards the weights too",
    }.get(parallel.zero, "2 shards gradients and optimizer, 3 the weights too")
    ring = f"parallel.ring = {parallel.ring}: over more ranks each holds fewer of sequence.length = {length} tokens"
    order = {"loss": [chunk, ring, shard], "update": [shard], "backward": [recompute, ring, chunk, shard]}
    more = [] if part in ("loss", "update") else _switches(memory)
    return [*order.get(part, [recompute, ring, shard]), *more]


def _switches(memory: Memory) -> list[str]:
    """What [memory] has beside its kind of checkpointing, where it is not used yet."""
    left = []
    if memory.mlp_tile is None:
        left.append("memory.mlp_tile: MLPs and norms of so many tokens at a time")
    if memory.checkpoint != "none" and "activations" not in memory.offload:
        left.append(
            "memory.offload = ['activations']: hidden states wait in host memory (`ringflash plan` says how much)"
        )
    return left


def _held() -> str:
    if not torch.cuda.is_available():
        return ""
    peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    return f", {peak / 2**30:.1f} of {total / 2**30:.1f} GiB were held"
