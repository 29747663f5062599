"""Evaluation against transformers in one process, over meshes; beside training; of a checkpoint; its texts."""

from __future__ import annotations

import json
from itertools import islice

import corpora
import evaluating
import numpy as np
import pytest

from train import data
from train.config import ConfigError, Needle, Source
from train.data import HeldOut, check_apart
from train.data.tokens import ByteTokenizer, FolderTokenizer
from train.evaluation import Result, draw
from train.evaluation.needle import FILLER, Haystack
from train.evaluation.result import Cell, Range

DRAWING_S = 6.0


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return evaluating.write_held_out(tmp_path_factory.mktemp("held_out"))


@pytest.fixture(scope="module")
def alone(texts, held_out):
    return evaluating.alone(evaluating.config_of(texts, held_out))


@pytest.mark.parametrize(("mesh", "zero"), [((2, 2, 1), 3), ((1, 2, 2), 1), ((4, 1, 1), 0)], ids=str)
def test_R67_an_evaluation_over_a_mesh_is_that_of_one_process(pool, texts, held_out, alone, mesh, zero):
    """10 sequences or fewer a ring, so one has none at the end; each document alone, through its own softmax."""
    config = evaluating.config_of(texts, held_out, mesh=mesh, zero=zero)
    results = pool(4)(evaluating.evaluate, config)
    first, second, trains_on = results[0]
    assert trains_on
    assert all(result == results[0] for result in results)
    assert (first.by_position, first.needle) == (second.by_position, second.needle), "the same tokens, the same bits"
    want = [loss for losses in alone["loss"].values() for loss in losses]
    assert first.targets == len(want)
    assert first.loss == pytest.approx(np.mean(want), rel=1e-6)
    assert first.loss * len(want) == pytest.approx(alone["whole"], rel=1e-6)
    for part, ((start, stop), losses) in zip(first.by_position, alone["loss"].items(), strict=True):
        assert (part.first, part.last, part.targets) == (start, stop - 1, len(losses))
        assert part.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert [(cell.length, cell.depth) for cell in first.needle] == sorted(alone["needle"])
    for cell in first.needle:
        losses, hits = alone["needle"][cell.length, cell.depth]
        assert cell.targets == len(losses) == 3 * (cell.length - 1)
        assert cell.loss == pytest.approx(np.mean(losses), rel=1e-6)
        assert cell.accuracy == np.mean(hits)
    assert sum(sum(hits) for _, hits in alone["needle"].values()) > 0


def test_without_documents_the_position_is_that_of_the_sequence(pool, texts, held_out):
    config = evaluating.config_of(
        texts,
        held_out,
        mesh=(2, 2, 1),
        data={"path": str(texts), "document_mask": False},
        evaluation={"needle": {}, "tokens": 1000},
    )
    result = pool(4)(evaluating.evaluate, config)[0][0]
    sequences = list(HeldOut(config.evaluation, ByteTokenizer(), length=evaluating.LENGTH))
    counts = [sum(int((s.labels[p.first : p.last + 1] >= 0).sum()) for s in sequences) for p in result.by_position]
    assert result.targets == sum(counts) and sum(s.cu_seqlens[-1] for s in sequences) == 1000
    assert [part.targets for part in result.by_position] == counts
    assert result.needle == [] and result.accuracy is None


@pytest.mark.parametrize("zero", [2, 3])
def test_training_is_bitwise_the_same_with_evaluations_and_a_checkpoint_evaluates_alike(
    pool, texts, tmp_path, held_out, zero
):
    shared = {"mesh": (1, 2, 1), "zero": zero, "steps": 5, "optimizer": {"name": "adamw", "lr": 3e-2}}
    shared["train"] = {"name": "tiny", "steps": 5, "global_batch": 2, "seed": 3, "deterministic": True}
    shared["checkpoint"] = {"every": 5}
    plain = evaluating.config_of(texts, held_out, folder=tmp_path / "plain", **shared)
    config = evaluating.config_of(texts, held_out, folder=tmp_path / "evaluated", evaluation={"every": 2}, **shared)
    want, got = pool(2)(evaluating.train, plain), pool(2)(evaluating.train, config, DRAWING_S)
    assert [(run["after"], run["drawn"]) for run in got] == [(run["after"], run["drawn"]) for run in want]
    rows = [list(map(json.loads, path.read_text().splitlines())) for path in map(metrics_of, (plain, config))]
    kept = ("step", "loss", "grad_norm", "tokens_seen")
    steps = [[{name: row[name] for name in kept} for row in run if row["kind"] == "step"] for run in rows]
    assert steps[0] == steps[1]
    assert next(row for row in rows[1] if row.get("step") == 3)["step_time_s"] < DRAWING_S
    found = [row for row in rows[1] if row["kind"] == "evaluation"]
    assert [row["step"] for row in found] == [2, 4, 5]
    assert [row["tokens_seen"] for row in found] == [steps[0][row["step"] - 1]["tokens_seen"] for row in found]
    pictures = sorted(path.name for path in (config.run_dir / "evaluation").iterdir())
    assert pictures == [f"step-{step:08}.png" for step in (2, 4, 5)]

    if zero == 3:
        left_evaluations_are_made_when_a_run_goes_on(
            pool, evaluating.config_of(texts, held_out, folder=tmp_path / "left", evaluation={"every": 2}, **shared),
            rows[1], [run["after"] for run in want],
        )  # fmt: skip
    assert pool(2)(evaluating.evaluate_checkpoint, config) == [None, None]
    written = json.loads((config.run_dir / "evaluation.json").read_text())
    assert written["step"] == 5 and written["loss"] == found[-1]["eval/loss"]
    assert [part["loss"] for part in written["by_position"]] == [
        value for name, value in found[-1].items() if name.startswith("eval/loss_by")
    ]
    cells = [cell for cell in written["needle"] if cell["targets"] == 3 * 5]
    assert np.mean([cell["loss"] for cell in cells]) == pytest.approx(found[-1]["eval/needle/loss"]) and len(cells) == 6
    assert (config.run_dir / "evaluation.png").stat().st_size > 10_000
    assert rows[1] == list(map(json.loads, metrics_of(config).read_text().splitlines())), "not touched"


def left_evaluations_are_made_when_a_run_goes_on(pool, config, want, weights):
    """One that a signal ends, one at the end, and one before which the run died; none is made twice.

    want: the rows of a run that nothing interrupted; weights: with which it ended
    """

    def rows(wanted=None):
        found = wanted or map(json.loads, metrics_of(config).read_text().splitlines())
        timeless = [{name: x for name, x in row.items() if not name.endswith(("_s", "_per_gpu"))} for row in found]
        return [row for row in timeless if row["kind"] != "header"]

    for step, made in ((2, []), (4, [2]), (5, [2, 4])):
        for said, passes in pool(2)(evaluating.leave, config, step):
            assert said.startswith(f"stopped by SIGTERM: step {step} is saved in ")
            assert passes == 1, "no other pass once any rank was asked"
        assert [row["step"] for row in rows() if row["kind"] == "evaluation"] == made
    assert [run["after"] for run in pool(2)(evaluating.train, config)] == weights
    assert rows() == rows(want)
    assert pool(2)(evaluating.leave, config, 5) == [(None, 0)] * 2
    lines = metrics_of(config).read_text().splitlines(keepends=True)
    metrics_of(config).write_text("".join(lines[:-1]))
    pool(2)(evaluating.train, config)
    assert rows() == rows(want)


def metrics_of(config):
    return config.run_dir / "metrics.jsonl"


def test_an_evaluation_without_a_checkpoint_is_refused(pool, texts, held_out, tmp_path):
    config = evaluating.config_of(texts, held_out, folder=tmp_path, mesh=(1, 2, 1), zero=2)
    said = pool(2)(evaluating.evaluate_checkpoint, config)
    assert len(set(said)) == 1 and "no whole checkpoint is in checkpoint.dir" in said[0]
    nothing = evaluating.config_of(
        texts, held_out, mesh=(1, 2, 1), evaluation={"sources": [], "positions": None, "needle": {}}
    )
    assert "there is nothing to evaluate" in pool(2)(evaluating.evaluate_checkpoint, nothing)[0]
    trained_on = evaluating.config_of(held_out, held_out, mesh=(1, 2, 1))
    assert "is not held out" in pool(2)(evaluating.evaluate_checkpoint, trained_on)[0]


def test_each_held_out_document_is_read_once_and_always_in_one_order(held_out, texts):
    config = evaluating.config_of(texts, held_out)
    held = HeldOut(config.evaluation, ByteTokenizer(), length=64)
    first, second = list(held), list(held)
    assert [s.digest() for s in first] == [s.digest() for s in second]
    tokens = np.concatenate([s.ids[: s.cu_seqlens[-1]] for s in first])
    files = [file.read_bytes() for file in held_out.glob("*/*.txt")]
    assert (tokens == 256).sum() == len(files)
    assert sorted(tokens) == sorted([*b"".join(files), *[256] * len(files)])
    short, long = (
        HeldOut(config.evaluation.model_copy(update={"tokens": 700}), ByteTokenizer(), length=length)
        for length in (64, 512)
    )
    tokens = [sorted(np.concatenate([s.ids[: s.cu_seqlens[-1]] for s in some])) for some in (short, long)]
    assert len(tokens[0]) == 700 and tokens[0] == tokens[1], "the same tokens, whatever the length of a sequence"


def test_what_is_trained_on_is_not_held_out(texts, held_out):
    config = evaluating.config_of(texts, held_out)
    check_apart(config.data, config.evaluation)
    both = config.evaluation.model_copy(update={"sources": [Source(path=str(texts), format="text", pattern="*3.txt")]})
    with pytest.raises(ValueError, match=r"evaluation\.sources\.0 is not held out: .*/03\.txt is one of 3 file"):
        check_apart(config.data, both)


def test_a_key_is_hidden_at_its_depth_and_asked_for_at_the_end():
    needle = Needle(lengths=[160, 250], depths=[0.0, 0.5, 1.0], samples=2)
    haystack = Haystack(needle, ByteTokenizer(), sequence_length=512)
    keys = []
    for text in haystack.texts():
        ids, labels = haystack.ids_of(text)
        words = bytes(ids.tolist()).decode()
        key = words[-5:]
        keys.append(key)
        assert len(ids) == text.length and key.isdigit() and words.count(key) == 2
        assert labels[-6:].tolist() == [*key.encode(), data.IGNORED] and (labels[:-6] == data.IGNORED).all()
        before = words.index("Keep this in mind")
        room = len(words) - len(words[before : words.index("for it. ") + 8]) - len(words[words.index("What was") :])
        assert before == round(text.depth * room)
        assert words.startswith(FILLER.decode()[: min(before, 80)])
    assert len(set(keys)) == len(keys) == 12

    marked = list(haystack)
    assert sum(len(m.sequence.lengths) for m in marked) == 12
    assert sum(sum(m.sequence.lengths) for m in marked) == 6 * (160 + 250)
    assert len(marked) == 5  # 250 + 250, three times; 3 * 160, twice
    for m in marked:
        assert len(m.sequence.ids) == 512 and m.documents
        for start, stop in zip(m.sequence.cu_seqlens, m.sequence.cu_seqlens[1:], strict=False):
            assert len(set(m.rows[start:stop])) == 1 and haystack.cells[m.rows[start]][0] == stop - start


def test_texts_without_room_and_tokenizers_without_digits_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"evaluation\.needle\.lengths holds 60: at least 1\d\d tokens hold a pass key"
    ):
        Haystack(Needle(lengths=[60, 300]), ByteTokenizer(), sequence_length=512)
    with pytest.raises(ValueError, match=r"lengths holds 300: at most sequence\.length = 256 is accepted"):
        Haystack(Needle(lengths=[160, 300]), ByteTokenizer(), sequence_length=256)
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path))
    with pytest.raises(ValueError, match="has no digits to spell a pass key"):
        Haystack(Needle(lengths=[60]), tokenizer, sequence_length=512)


REFUSED = {
    "nothing": ({"every": 3, "sources": [], "positions": None, "needle": {}}, "every = 3 has nothing to evaluate"),
    "no source": ({"sources": []}, "evaluation.positions is given but there is no table [[evaluation.sources]]"),
    "order": ({"needle": {"lengths": [200, 180]}}, "evaluation.needle.lengths = [200, 180]: numbers that rise"),
    "unused": ({"needle": {"samples": 2}}, "evaluation.needle.samples is given but evaluation.needle.lengths is not"),
    "depth": ({"needle": {"lengths": [200], "depths": [1.5]}}, "less than or equal to 1"),
    "weight": (
        {"sources": [{"path": "x", "format": "text", "weight": 2.0}]},
        "evaluation.sources.0.weight is given but without evaluation.tokens",
    ),
    "field": (
        {"sources": [{"path": "x", "format": "text", "field": "y"}]},
        "evaluation.sources.0.field is given but evaluation.sources.0.format = 'text' does not use it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_evaluated_is_refused(texts, held_out, case):
    keys, message = REFUSED[case]
    with pytest.raises((ConfigError, ValueError), match=None) as refusal:
        evaluating.config_of(texts, held_out, evaluation=keys)
    assert message in str(refusal.value)


RESULT = Result(
    step=3,
    tokens_seen=900,
    time_s=1.5,
    by_position=[Range(0, 127, 30, 2.0), Range(128, 255, 10, 4.0), Range(256, 511, 0, None)],
    needle=[
        Cell(length, depth, 10, 1.0, (length + 1000 * depth) / 4096) for length in (1024, 2048) for depth in (0.0, 1.0)
    ],
)


def test_a_result_as_a_row_a_table_and_a_picture(tmp_path):
    row = RESULT.row()
    assert (row["step"], row["tokens_seen"], row["eval/loss"], row["eval/targets"]) == (3, 900, 2.5, 40)
    assert row["eval/loss_by_position/256-511"] is None and row["eval/targets_by_position/128-255"] == 10
    assert row["eval/needle/2048/1"] == 3048 / 4096
    assert row["eval/needle/accuracy"] == RESULT.accuracy == (1024 + 2024 + 2048 + 3048) / 4 / 4096
    lines = RESULT.table()
    assert lines[0] == "held-out loss  2.5000 nats, 40 targets" and len(lines) == 7
    assert lines[-1].split() == ["2,048", "50.0%", "74.4%"]
    draw(RESULT, tmp_path / "new" / "picture.png", name="demo")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert list(islice(tmp_path.iterdir(), 5)) == [tmp_path / "new"]
