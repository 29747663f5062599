"""Rows moved in one launch are those that torch ops move run by run, to the bit: in Triton's interpreter.

triton looks at TRITON_INTERPRET when it is imported, so kernels run in a process of its own. On a GPU:
test_gpu_moving.py. That no stream reads or writes too early is shown with the torch ops, see test_lanes.py; the kernels
write the same bytes of the same tensors, in the same place.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from masks import MASKS
from oracle import inputs

from ringflash import mask, moving, travel
from ringflash.needs import Rows

SIZE = 96


def rows_of(*runs: tuple[int, int], of: int) -> Rows:
    return Rows(np.array(runs, np.int64).reshape(-1, 2), of)


def drawn(seed: int, count: int, of: int) -> Rows:
    """So many rows of a block, in runs of all lengths."""
    random = np.random.default_rng(seed)
    edges = np.sort(random.choice(of, size=min(8, of), replace=False))
    order = np.concatenate([random.permutation(edges), random.permutation(of)])
    taken: set[int] = set()
    for first in order.tolist():
        taken |= set(range(first, min(of, first + 13, first + count - len(taken))))
    at = np.array(sorted(taken)[:count])
    starts = np.flatnonzero(np.diff(at, prepend=-2) > 1)
    return rows_of(*zip(at[starts].tolist(), np.diff(np.append(starts, count)).tolist(), strict=True), of=of)


PAIRS = {
    "one run": (rows_of((0, 20), of=20), rows_of((3, 20), of=30)),
    "runs that end apart": (rows_of((3, 9), (20, 5), (40, 1), of=50), rows_of((0, 4), (10, 8), (30, 3), of=35)),
    "drawn": (drawn(0, 40, 64), drawn(1, 40, 90)),
    "none": (rows_of(of=10), rows_of(of=12)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_all_rows_of_both_blocks_once_in_order(name):
    here, there = PAIRS[name]
    steps = moving.steps(there, here)
    assert steps.dtype == np.int32 and (steps[:, 2] > 0).all() and (steps[:, 2] <= moving.STEP_ROWS).all()
    for rows, first in ((there, steps[:, 0]), (here, steps[:, 1])):
        assert mask.positions(np.stack((first, steps[:, 2]), 1)).tolist() == mask.positions(rows.runs).tolist()
        others = mask.positions(rows.others.runs).tolist()
        assert sorted([*others, *mask.positions(rows.runs)]) == list(range(rows.of))
        assert rows.at(np.arange(rows.count)).tolist() == mask.positions(rows.runs).tolist()
        at = mask.positions(rows.runs)
        assert rows.before(np.arange(rows.of)).tolist() == [int((at < i).sum()) for i in range(rows.of)]


def arrivals_at(here: Rows) -> list[moving.Arrival]:
    """Some of these rows twice, all of them three times over, one alone."""
    at = mask.positions(here.runs)
    some = rows_of(*((int(row), 1) for row in at[1:6:2]), of=here.of)
    tail = rows_of((int(here.runs[-1, 0]), int(here.runs[-1, 1])), of=here.of)
    made, start = [], 0
    for rows, count in ((some, 2), (Rows(here.runs, here.of), 3), (tail, 1)):
        made.append((rows, start, count))
        start += rows.count * count
    return made


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "none"])
def test_what_is_added_to_a_row_is_all_that_arrived_for_it_in_order(name):
    there, here = PAIRS[name]
    arrivals = arrivals_at(here)
    steps, spans, entries = moving.sums(there, here, arrivals)
    assert steps[:, 2].sum() == here.count and spans[0, 0] == 0 and spans[-1, 1] == len(entries)
    for (_, first, count), (begin, end) in zip(steps.tolist(), spans.tolist(), strict=True):
        for i in range(count):
            wanted = []
            for rows, start, times in arrivals:
                at = mask.positions(rows.runs).tolist()
                if first + i in at:
                    wanted.append([start + at.index(first + i) + j * rows.count for j in range(times)])
            assert [[row + i + j * apart for j in range(n)] for row, n, apart in entries[begin:end].tolist()] == wanted


def made_twice(rows: Rows, other: Rows) -> list[str]:
    return [rows.with_(other, "key", lambda name=name: name) for name in ("first", "second")]


def test_tables_of_two_blocks_are_made_once_and_go_with_the_rows():
    """A run without garbage collection, as of one that trains: tables of documents that are over leave the GPU."""
    gc.collect()
    gc.disable()
    try:
        rows, others = rows_of((0, 4), of=9), [rows_of((1, 4), of=5), rows_of((1, 4), of=5)]
        for other in (rows, *others):
            assert made_twice(rows, other) == ["first"] * 2
            assert made_twice(other, rows) == ["first"] * 2
        gone = [weakref.ref(each) for each in (rows, *others)]
        del rows, others, other
        assert not any(one() for one in gone)
    finally:
        gc.enable()


def test_a_table_is_never_that_of_rows_that_are_gone():
    """CPython gives the memory of an object, and so its id, to the next one of its size."""
    rows = rows_of((0, 4), of=9)
    for name in range(100):
        assert rows.with_(rows_of((1, 4), of=5), "key", lambda name=name: name) == name


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_rows_makes_tables_of_its_own(copied):
    """What was made for others by their id would be found for whoever has that id next."""
    rows, other = rows_of((0, 4), of=9), rows_of((1, 4), of=5)
    made_twice(rows, other)
    twin = copied(rows)
    assert twin.runs.tolist() == rows.runs.tolist() and twin.of == rows.of
    assert twin.with_(other, "key", lambda: "of its own") == "of its own"
    assert made_twice(rows, other) == ["first"] * 2


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    """run(function, *args, **kwargs) in the interpreting process."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as worker:
        yield lambda function, *args, **kwargs: worker.submit(function, *args, **kwargs).result()


def both(do: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By the kernels and by torch."""
    assert moving.kernels_for(torch.device("cpu")) is not None
    found, kept = do(), moving.kernels_for
    moving.kernels_for = lambda device: None
    try:
        return found, do()
    finally:
        moving.kernels_for = kept


def tensors_of(kind: str, batch: int, length: int) -> list[torch.Tensor]:
    """As they travel: odd widths, starts and strides."""
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    if kind == "keys":
        return [normal(batch, length, 3, 24).bfloat16(), normal(batch, length, 7, 24).bfloat16()[:, :, 3:6]]
    if kind == "queries":
        numbers = [normal(batch, 9, length)[:, 2:5], normal(batch, 3, length)]
        return [normal(batch, length + 1, 3, 20).half()[:, 1:], normal(batch, length, 3, 20).half(), *numbers]
    return [normal(batch, 3, length, 24).transpose(1, 2), normal(batch, length, 3, 24)]  # heads first in memory


def copied(kind: str, batch: int, pair: str) -> bool:
    here, there = PAIRS[pair]
    tensors = tensors_of(kind, batch, here.of)
    record = travel.Record(tensors)

    def do() -> list[torch.Tensor]:
        block = torch.full((there.of, record.num_bytes), 7, dtype=torch.uint8)
        record.put(tensors, here, there, block)
        return [block]

    (found,), (wanted,) = both(do)
    assert here.count == 0 or not (wanted == 7).all()
    return torch.equal(found, wanted)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["keys", "queries", "heads first"])
def test_rows_are_copied_into_a_block_and_no_other_byte_of_it(run, kind, batch, pair):
    assert run(copied, kind, batch, pair)


def summed(dtype: torch.dtype, transit: torch.dtype, batch: int, pair: str) -> list[bool]:
    """Two sums whose heads lie between others, rounded."""
    there, here = PAIRS[pair]
    arrivals = arrivals_at(here)
    random = torch.Generator().manual_seed(0)
    block = torch.randn(here.of, 2, batch, 3, 24, generator=random)
    arrived = torch.randn(sum(one.count * n for one, _, n in arrivals), *block.shape[1:], generator=random).to(transit)

    def do() -> list[torch.Tensor]:
        into = [torch.full((batch, there.of, 7, 24), 3.0, dtype=dtype) for _ in range(2)]
        part, total = [x[:, :, 2:5] for x in into], block.clone()
        tables = lambda: moving.on_device(total.device, *moving.sums(there, here, arrivals))  # noqa: E731
        if not moving.sum_rows(part, [total[:, f].movedim(0, 1) for f in range(2)], arrived, tables):
            for rows, start, count in arrivals:
                values = arrived[start : start + count * rows.count].unflatten(0, (count, -1))
                travel.add(total, rows, values.sum(0, dtype=torch.float32) if count > 1 else values[0])
            for f, x in enumerate(part):
                travel.move(x.movedim(1, 0), there, total[:, f], here)
        return into

    return [torch.equal(*two) for two in zip(*both(do), strict=True)]


@pytest.mark.parametrize("pair", [name for name in PAIRS if name != "none"])
@pytest.mark.parametrize(("dtype", "transit", "batch"), [
    (torch.float32, torch.float32, 1), (torch.float16, torch.float32, 2), (torch.float32, torch.bfloat16, 2),
], ids=str)  # fmt: skip
def test_what_comes_home_is_added_in_order_and_rounded_once(run, dtype, transit, batch, pair):
    """To bf16 the interpreter cuts where a GPU rounds; test_gpu_moving.py has it."""
    assert all(run(summed, dtype, transit, batch, pair))


def cleared_and_rounded(pair: str, batch: int) -> list[bool]:
    rows, _ = PAIRS[pair]
    sums = torch.randn(batch, rows.of, 3, 24, generator=torch.Generator().manual_seed(0))

    def do() -> list[torch.Tensor]:
        x, zeros = torch.full(sums.shape, 7.0, dtype=torch.float16), torch.full(sums.shape, 7.0)
        if not moving.round_rows(x, sums, rows):
            travel.move(x.movedim(1, 0), rows, sums.movedim(1, 0), rows)
        moving.clear_rows(zeros, rows)
        return [x, zeros]

    (x, zeros), (wanted, cleared) = both(do)
    kept = torch.ones(rows.of, dtype=torch.bool).index_fill(0, rows.index(x.device), False)
    by_torch = kept & ~(cleared == 0).all((0, 2, 3)) if not rows.places() else kept
    return [
        torch.equal(x, wanted), not zeros[:, ~kept].any(), bool((zeros[:, kept] == 7).all()),
        not cleared[:, ~kept].any(), bool((cleared[:, by_torch] == 7).all()),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_rows_are_cleared_and_rounded_and_no_others(run, pair, batch):
    assert all(run(cleared_and_rounded, pair, batch))


def gathered(name: str, dtype: torch.dtype, transit: torch.dtype, **mesh) -> list[bool]:
    """A whole ring, with the eager kernel: what differs is who moves rows."""
    import played

    from ringflash import gathering

    gathering.SECTION_PAIRS = mesh.pop("pairs")
    *tensors, dlse = inputs(SIZE, heads=4, groups=2, dtype=dtype)
    given = {"dlse": dlse, "arrangement": "gather", "transit": transit} | mesh | MASKS[name](SIZE)
    found, wanted = both(lambda: list(played.attention(*tensors, **given).values()))
    return [torch.equal(*two) for two in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("pairs", [1, 2**29], ids=["two sections", "one section"])
@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize(("name", "layout", "dtype", "transit"), [
    ("documents", "balanced", torch.float32, torch.float32), ("documents", "zigzag", torch.float16, torch.float32),
    ("padding", "contiguous", torch.float32, torch.bfloat16), ("random", "zigzag", torch.float16, torch.float32),
    ("chunked", "striped", torch.float32, torch.float32),
], ids=str)  # fmt: skip
def test_a_gather_has_the_same_bits_whoever_moves_its_rows(run, name, layout, dtype, transit, rotate, pairs):
    assert all(run(gathered, name, dtype, transit, layout=layout, size=4, rotate=rotate, pairs=pairs))


@pytest.mark.parametrize(("shape", "fits"), [
    ((16383, 1, 1, 16), True), ((16384, 1, 1, 16), False), ((16383, 1, 1), True), ((16384, 1, 1), False),
    ((1, 2**29 - 1, 1, 512), True), ((1, 2**29 - 1, 2, 257), False), ((1, 1, 2**29 - 1), True), ((4, 1, 2**29), False),
])  # fmt: skip
def test_more_programs_than_a_grid_has_are_left_to_torch(shape, fits):
    """The second axis ends at 65,535, and of 2^31 programs triton launches none and says nothing."""
    pytest.importorskip("triton")
    from ringflash.kernels.triton import moving as kernels

    assert (kernels.columns_of(torch.empty(1).expand(shape)) is not None) == fits


def test_a_device_whose_triton_fails_moves_rows_by_torch_and_says_so_once(monkeypatch, caplog):
    pytest.importorskip("triton")
    from ringflash.kernels.triton import moving as kernels

    def fails(*given, **named):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(kernels, "clear", fails)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    caplog.set_level(logging.WARNING, "ringflash")
    moving._probed.cache_clear()
    assert [moving.kernels_for(torch.device("cpu")) for _ in range(2)] == [None, None]
    moving._probed.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "ringflash: torch ops move rows on cpu, run by run, since Triton cannot: no C compiler"
    ]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert moving.kernels_for(torch.device("cpu")) is None
