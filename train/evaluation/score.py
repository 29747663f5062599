"""The loop of an evaluation: packed sequences through the model of the run, and what it made of each target, added up.

Letters: S tokens of one packed sequence.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from ..data import IGNORED, Sequence, check_digests
from ..engine import Engine
from ..stopping import StopError
from ..world import World


class Marked(NamedTuple):
    """A sequence, and for each of its tokens the row of the table that its target counts for: int64 [S].

    documents: whether attention stays inside each document
    """

    sequence: Sequence
    rows: np.ndarray
    documents: bool


class Totals(NamedTuple):
    """What was added up for one row, over all ranks: nats, targets that were the most likely token, targets."""

    loss: float
    hits: float
    targets: int


def add_up(
    engine: Engine, world: World, marked: Iterable[Marked], *, num_rows: int, begin: Callable[[], int]
) -> list[Totals]:
    """One pass over the sequences, those of a global batch on a ring each. All ranks must call it with the same.

    begin: called before each forward pass; returns the signal that asked this rank to stop, 0 for none

    Each target counts once, in float64, so the sums do not depend on the mesh but for rounding in the model.
    Raises: ValueError, on all ranks, if they hold different sequences; StopError, on all ranks, before the next pass
        once any of them was asked to stop.
    """
    table = torch.zeros(num_rows, 3, dtype=torch.float64, device=world.device)
    stream = iter(marked)
    with engine.evaluating():
        while mine := _next(stream, world, begin()):
            table += _score(engine, world, mine, num_rows)
    sums = world.gather(table.flatten().tolist()).sum(0).reshape(num_rows, 3)
    return [Totals(loss, hits, int(targets)) for loss, hits, targets in sums.tolist()]


def _next(stream: Iterator[Marked], world: World, signal: int) -> Marked | None:
    """This ring's of the next sequences, one a ring; one without targets where they do not go round.

    signal: that this rank got, or 0
    """
    together = list(islice(stream, world.data_size))
    if together:
        together += [_blank(together[0])] * (world.data_size - len(together))
    mine = together[world.data_rank] if together else None
    facts = world.gather([len(together), mine.sequence.digest() if mine else 0, signal])
    if facts[:, 2].any():
        raise StopError(int(facts[:, 2].max()))
    if len(set(facts[:, 0])) > 1:
        raise ValueError("ranks hold different numbers of held-out sequences: all must read the same files")
    check_digests(facts[:, 1], world.size // world.data_size)
    return mine


def _blank(like: Marked) -> Marked:
    """A sequence of the same length without a target, whose one document is short."""
    sequence = Sequence(like.sequence.ids, np.full_like(like.sequence.labels, IGNORED), [0, 1])
    return Marked(sequence, np.zeros_like(like.rows), like.documents)


def _score(engine: Engine, world: World, marked: Marked, num_rows: int) -> torch.Tensor:
    """Sums over this rank's tokens of one sequence: float64 [num_rows, 3]."""
    sequence, rows, documents = marked
    layout = world.layout(len(sequence.ids), sequence.cu_seqlens if documents else None)
    ids, labels, rows_local = (
        layout.shard(torch.from_numpy(whole)[None].to(world.device)) for whole in (sequence.ids, sequence.labels, rows)
    )
    losses, hits = engine(ids, labels, layout, each=True)
    counted = labels != IGNORED
    values = torch.stack((losses[counted], hits[counted], counted[counted]), dim=-1).double()
    # a matrix product: adding up by index has no fixed order on a GPU
    return torch.nn.functional.one_hot(rows_local[counted], num_rows).double().t() @ values
