"""Where the data stand: saved at any step, gone on from in a mesh of any size, nothing lost and nothing twice."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from functools import reduce
from itertools import islice
from operator import getitem

import corpora
import numpy as np
import pytest

from train import data
from train.config import Batch, Data, Source
from train.data import sources, stream
from train.data.tokens import ByteTokenizer
from train.data.windows import AHEAD

LENGTH, GLOBAL_BATCH = 64, 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Three formats, about 40, 20 and 20 sequences an epoch."""
    folder = tmp_path_factory.mktemp("mixture")
    return [
        corpora.write(folder / kind, kind, corpora.texts_of(count, seed=count), weight=weight)
        for kind, count, weight in (("text", 30, 2.0), ("jsonl", 16, 1.0), ("parquet", 15, 1.0))
    ]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "JSONL_CHUNK", 300)
    monkeypatch.setattr(stream, "POOL", 700)


def sequences(listed, *, length=LENGTH, seed=0, state=None, tokenizer=None, shuffle=True):
    section = Data(sources=listed, shuffle=shuffle)
    packer = data.sequences(section, tokenizer or ByteTokenizer(), length=length, seed=seed)
    if state is not None:
        packer.restore(state)
    return packer


def stored(state):
    """A state as a checkpoint gives it back."""
    return json.loads(json.dumps(state))


class Mesh:
    """The windows of all rings of a run, as the global sequences that they hold."""

    def __init__(self, listed, data_size, state=None):
        batch = Batch(GLOBAL_BATCH, 1, GLOBAL_BATCH // data_size)
        self.ranks = [
            data.Windows(sequences(listed, state=state), batch, data_rank=rank, data_size=data_size)
            for rank in range(data_size)
        ]

    def step(self):
        digests = [[micro[0].digest() for micro in next(rank)] for rank in self.ranks]
        return [digest for together in zip(*digests, strict=True) for digest in together]

    def state(self):
        states = [rank.state() for rank in self.ranks]
        assert all(state == states[0] for state in states)
        return stored(states[0])


def epochs(state):
    return [source["epoch"] for source in state["stream"]["sources"]]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 2), (4, 4, 4, 4), (2, 1, 4, 2), (4, 2, 1, 4)])
def test_R78_R82_three_epochs_with_a_resume_inside_each(mixture, sizes):
    whole = Mesh(mixture, 1)
    wanted = [whole.step() for _ in range(60)]
    seen, state = [], None
    for size, (stop, epoch) in zip(sizes, ((5, 0), (25, 1), (52, 2), (60, None)), strict=True):
        mesh = Mesh(mixture, size, state)
        while len(seen) < stop:
            seen.append(mesh.step())
        state = mesh.state()
        assert state["consumed"] == GLOBAL_BATCH * stop
        assert epoch is None or epochs(state) == [epoch] * 3
    assert seen == wanted
    assert state == whole.state()


@pytest.mark.parametrize("shuffle", [False, True])
def test_R78_a_resume_at_every_sequence(mixture, shuffle):
    uninterrupted = sequences(mixture, shuffle=shuffle)
    wanted = [s.digest() for s in islice(uninterrupted, 90)]
    state, seen = None, []
    for _ in range(90):
        packer = sequences(mixture, shuffle=shuffle, state=state)
        seen.append(next(packer).digest())
        state = stored(packer.state())
    assert seen == wanted


def numbered(folder, lengths):
    """A corpus for the tokenizer Numbering: documents of these lengths, their end included."""
    return [corpora.write(folder, "text", [f"{index} {size}" for index, size in enumerate(lengths)])]


def taken(some):
    return [int(token) for s in some for token in s.ids[: s.cu_seqlens[-1]]]


def test_R81_nothing_that_waits_in_the_packer_is_lost(tmp_path):
    listed = numbered(tmp_path, [5, 9, 3, 12, 7])
    options = {"length": 8, "tokenizer": corpora.Numbering(), "shuffle": False}
    wanted = [s.ids.tolist() for s in islice(sequences(listed, **options), 30)]
    for stop in range(30):
        packer = sequences(listed, **options)
        before = [s.ids.tolist() for s in islice(packer, stop)]
        after = islice(sequences(listed, **options, state=stored(packer.state())), 30 - stop)
        assert before + [s.ids.tolist() for s in after] == wanted


CURRICULA = {
    "longer": [(7, 64), (9, 128), (4, 1024)],
    "longer, before the first step": [(0, 64), (9, 128), (0, 512), (4, 1024)],
    "does not divide": [(33, 64), (20, 100), (30, 24)],
    "shorter and back": [(2, 1024), (40, 8), (1, 1000)],
    "by steps of one": [(1, 64), (1, 65), (1, 63), (1, 200), (1, 50), (20, 64)],
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("case", CURRICULA)
def test_another_length_after_a_resume_loses_and_doubles_no_token(tmp_path, case, shuffle):
    """What steps took and what waits in the end are the first documents of the uninterrupted mixture, whole."""
    generator = np.random.default_rng(0)
    listed = []
    for source, weight in ((0, 2.0), (1, 1.0)):
        lines = [f"{20 * source + index} {size}" for index, size in enumerate(generator.integers(2, 150, 20))]
        listed.append(corpora.write(tmp_path / str(source), "jsonl", lines, weight=weight))
    options = {"tokenizer": corpora.Numbering(), "shuffle": shuffle}
    tokens, state = [], None
    for data_size, (stop, length) in enumerate(CURRICULA[case], 1):
        ranks = [
            data.Windows(
                sequences(listed, length=length, state=state, **options),
                Batch(data_size, 1, 1),
                data_rank=rank,
                data_size=data_size,
            )
            for rank in range(data_size)
        ]
        for _ in range(stop):
            for rank in ranks:
                tokens += taken(micro[0] for micro in next(rank))
        state = stored(ranks[0].state())
        assert all(stored(rank.state()) == state for rank in ranks)
    end = sequences(listed, **options, state=state)
    held = [saved for together in [*state["open"], state["stream"]["waiting"]] for saved in together]
    for piece in end._stream.pieces_at(held):
        tokens += piece.ids.tolist()
    whole, expected = stream.Stream(end._stream._corpus, length=10**6, seed=0), []
    while len(expected) < len(tokens):
        expected += next(whole).ids.tolist()
    assert Counter(tokens) == Counter(expected)


def test_the_state_is_small_and_plain(mixture):
    packer = sequences(mixture)
    list(islice(packer, 50))
    state = packer.state()
    assert stored(state) == state
    assert len(json.dumps(state)) < 3000


CHANGES = {
    "seed": ({"seed": 1}, "train.seed = 0, this run has 1"),
    "order": ({"shuffle": False}, "data.shuffle = True, this run has False"),
    "tokenizer": ({"tokenizer": corpora.Numbering()}, "the tokenizer's size, end and pad = .258, 256, 257., this run"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_position_in_other_data_is_refused(mixture, case):
    options, message = CHANGES[case]
    state = stored(sequences(mixture).state())
    with pytest.raises(ValueError, match=message):
        sequences(mixture, state=state, **options)


BROKEN = {
    "empty": (("stream",), {}),
    "no list": (("stream", "sources"), "x"),
    "no numbers": (("stream", "sources", 0), {"epoch": "x"}),
    "before the first row": (("stream", "sources", 0, "row"), -1),
    "behind the last row": (("stream", "sources", 0, "row"), 10**9),
    "behind the last chunk": (("stream", "sources", 0, "chunk"), 10**9),
    "a source less": (("stream", "sources"), []),
    "a short place": (("open", 0), [[0, 0]]),
    "a source that is not there": (("open", 0, 0, 0), 9),
    "a chunk that is not there": (("open", 0, 0, 1), 10**9),
    "a row that is not there": (("open", 0, 0, 2), 10**9),
    "others": (("stream", "made_by"), {}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_position_that_no_run_saved_is_refused(mixture, case):
    packer = sequences(mixture)
    state = {"open": []}
    while not state["open"]:
        next(packer)
        state = stored(packer.state())
    (*above, last), value = BROKEN[case]
    reduce(getitem, above, state)[last] = value
    with pytest.raises(ValueError, match=r"the position in the data (that )?was saved|\[data\] has .*: not as it was"):
        list(islice(sequences(mixture, state=state), 40))


def test_a_position_in_changed_files_is_refused(tmp_path):
    source = corpora.write(tmp_path, "jsonl", ["a", "b", "c"])
    state = stored(sequences([source]).state())
    with (tmp_path / "0.jsonl").open("a") as file:
        file.write('{"text": "d"}\n')
    with pytest.raises(ValueError, match="the position in the data was saved with the files = "):
        sequences([source], state=state)


def parquet_of(path, values, group):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"text": value} for value in values]), path, row_group_size=group)


def datasets_of(path, values):
    shutil.rmtree(path, ignore_errors=True)
    corpora.write(path, "datasets", values)


REWRITTEN = {
    "parquet, other groups": ("parquet", lambda path, values: parquet_of(path / "0.parquet", values, 4)),
    "parquet, longer rows": (
        "parquet",
        lambda path, values: parquet_of(path / "0.parquet", [*values[:-1], "x" * 99], 3),
    ),
    "datasets, longer rows": ("datasets", lambda path, values: datasets_of(path, [*values[:-1], "x" * 99])),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_position_in_files_with_as_many_rows_is_refused(tmp_path, case):
    kind, rewrite = REWRITTEN[case]
    values = corpora.texts_of(12)
    source = Source(path=str(tmp_path / "a"), format=kind)
    (tmp_path / "a").mkdir()
    datasets_of(tmp_path / "a", values) if kind == "datasets" else parquet_of(tmp_path / "a" / "0.parquet", values, 3)
    state = stored(sequences([source]).state())
    sequences([source], state=state)
    rewrite(tmp_path / "a", values)
    with pytest.raises(ValueError, match="the position in the data was saved with the files = "):
        sequences([source], state=state)


@pytest.mark.parametrize("new", ["ab", "a\u00e4", "abcd"])
def test_a_document_that_waits_and_was_edited_is_refused_and_named(tmp_path, new):
    """Edits that leave the file as long as it was: shorter, other letters, longer."""
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "abc"}\n{"text": "y", "n": 1}\n')
    source = Source(path=str(tmp_path), format="jsonl")
    packer = sequences([source], length=5, shuffle=False)
    next(packer)
    state = stored(packer.state())
    size = len((tmp_path / "a.jsonl").read_bytes())
    edited = '{"text": "x"}\n{"text": "' + new + '"}\n{"text": "y", "n": 1}'
    (tmp_path / "a.jsonl").write_bytes(edited.encode().ljust(size))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: not as it was when the position was saved; take the same"):
        sequences([source], length=5, shuffle=False, state=state)


@pytest.mark.parametrize("lines", [2, 4])
def test_a_pool_with_other_rows_is_refused(tmp_path, lines):
    """A file as long as it was, with other lines."""
    text = ["aaaaaaaa", "bbbbbbbb", "cccccccc"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in text))
    source = Source(path=str(tmp_path), format="jsonl")
    packer = sequences([source], length=9, shuffle=False)
    list(islice(packer, 1))
    state = stored(packer.state())
    assert [p for places in state["open"] for p in places] + state["stream"]["waiting"] == []
    size = len((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.jsonl").write_bytes((b'{"text": "a"}\n' * lines).ljust(size))
    with pytest.raises(
        ValueError, match=rf"source 0 of \[data\] has {lines} rows from chunk 0 .*, 3 were there: not as"
    ):
        next(sequences([source], length=9, shuffle=False, state=state))


def test_a_restore_reads_no_pool_twice(mixture, monkeypatch):
    """Once where the position is gone on from, once each chunk of what waits; nothing for a position at the start."""
    packer = sequences(mixture)
    list(islice(packer, 10))
    state, read = stored(packer.state()), []
    for kind in ("TextFiles", "JsonLines", "Parquet"):
        reads = getattr(sources, kind).read
        count = lambda self, chunk, reads=reads: (read.append((type(self), chunk)), reads(self, chunk))[1]  # noqa: E731
        monkeypatch.setattr(getattr(sources, kind), "read", count)
    sequences(mixture, state=state)
    waiting = {(p[0], p[1]) for places in [*state["open"], state["stream"]["waiting"]] for p in places}
    assert len(read) == len(waiting)


def test_weights_may_change_at_a_resume_and_hold_from_then_on(tmp_path):
    listed = [corpora.write(tmp_path / str(i), "jsonl", corpora.texts_of(40, seed=i)) for i in range(2)]
    packer = sequences(listed)
    list(islice(packer, 300))
    changed = [listed[0], listed[1].model_copy(update={"weight": 9.0})]
    resumed = sequences(changed, state=stored(packer.state()))
    list(islice(resumed, 300))
    first, second = resumed.state()["stream"]["tokens"]
    assert second / first == pytest.approx(9, rel=0.1)


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_R52_R54_rings_hold_the_same_batches_and_share_none(mixture, ring):
    data_size = 4 // ring
    steps = []
    for rank in range(4):
        batch = Batch(GLOBAL_BATCH, 1, GLOBAL_BATCH // data_size)
        windows = data.Windows(sequences(mixture), batch, data_rank=rank // ring, data_size=data_size)
        steps.append([[micro[0].digest() for micro in window] for window in islice(windows, 50)])
    for first in range(0, 4, ring):
        assert all(steps[rank] == steps[first] for rank in range(first, first + ring))
    rings = [steps[first] for first in range(0, 4, ring)]
    for step in zip(*rings, strict=True):
        together = [digest for window in step for digest in window]
        assert len(set(together)) == len(together) == GLOBAL_BATCH


def test_R55_every_field_of_a_sequence_is_padded_alike(mixture):
    for s in islice(sequences(mixture), 40):
        assert len(s.ids) == len(s.labels) == LENGTH
        assert (s.labels[s.cu_seqlens[-1] :] == data.IGNORED).all()
        assert (s.ids[s.cu_seqlens[-1] :] == ByteTokenizer.pad).all()


def test_R57_ten_documents_over_four_rings_make_equal_steps(tmp_path):
    listed = numbered(tmp_path, [8] * 10)
    per_rank = []
    for rank in range(4):
        packer = sequences(listed, length=8, tokenizer=corpora.Numbering())
        windows = data.Windows(packer, Batch(4, 1, 1), data_rank=rank, data_size=4)
        per_rank.append([taken(micro[0] for micro in window) for window in islice(windows, 5)])
    together = [tuple(window) for windows in per_rank for window in windows]
    assert Counter(together) == Counter(dict.fromkeys(together, 2)) and len(set(together)) == 10  # two epochs


def test_windows_are_made_while_the_step_runs_and_no_more_than_are_kept(mixture):
    """What was made meanwhile is there without the reader; then the reader rests."""
    packer, made, reads = sequences(mixture), [], threading.Event()
    reads.set()

    class Slow:
        def __next__(self):
            time.sleep(0.02)
            assert reads.wait(20)
            made.append(next(packer))
            return made[-1]

        def state(self):
            return packer.state()

    windows = data.Windows(Slow(), Batch(1, 1, 1), data_rank=0, data_size=1)
    next(windows)
    most = 1 + AHEAD + 1  # taken, kept, and in the hand of the thread
    deadline = time.monotonic() + 20
    while len(made) < most and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(made) == most
    reads.clear()
    for _ in range(AHEAD):
        next(windows)
    assert len(made) == most
    reads.set()


def test_the_state_is_that_of_the_window_taken_not_of_those_made_ahead(mixture):
    packer = sequences(mixture)
    windows = data.Windows(sequences(mixture), Batch(3, 1, 3), data_rank=0, data_size=1)
    for _ in range(4):
        assert windows.state() == packer.state()
        next(windows)
        list(islice(packer, 3))


def test_what_cannot_be_read_ends_the_windows_on_the_step_that_needs_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n' % ("x" * 200) + "{\n")
    packer = sequences([Source(path=str(tmp_path), format="jsonl")], shuffle=False)
    windows = data.Windows(packer, Batch(1, 1, 1), data_rank=0, data_size=1)
    for _ in range(3):
        next(windows)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a.jsonl, line 2: not JSON"):
            next(windows)


def test_the_thread_ends_with_the_windows(mixture):
    windows = data.Windows(sequences(mixture), Batch(1, 1, 1), data_rank=0, data_size=1)
    next(windows)
    thread = windows._thread
    assert thread.is_alive()
    del windows
    thread.join(10)
    assert not thread.is_alive()


def test_windows_are_restored_before_the_first_is_taken(mixture):
    first, again = (data.Windows(sequences(mixture), Batch(2, 1, 2), data_rank=0, data_size=1) for _ in range(2))
    for _ in range(3):
        next(first)
    again.restore(stored(first.state()))
    assert data.window_digest(next(again)) == data.window_digest(next(first))
    assert again.state() == first.state()
    with pytest.raises(ValueError, match="is restored before the first window is taken, not later"):
        again.restore(first.state())
