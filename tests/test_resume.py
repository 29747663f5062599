"""Runs that stop and go on, on two processes: bits, other meshes, refusals, a kill, a full disk, a hostile file."""

from __future__ import annotations

import json
import shutil

import pytest
import saving
import training

from train.config import check_paths

PAIRS = [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "float32")]


def config_of(texts, folder, *, zero=1, mesh=(1, 2, 1), steps=4, dtype="float32", **checkpoint):
    """Deterministic, which changes nothing on a CPU."""
    return training.config_of(
        texts,
        mesh=mesh,
        zero=zero,
        optimizer="adamw",
        steps=steps,
        train={"deterministic": True},
        model={"architecture": "llama", "dtype": dtype, "config": training.LLAMA},
        metrics={"dir": str(folder), "wandb": "disabled"},
        checkpoint={"every": 2} | checkpoint,
    )


def steps_of(config):
    """What metrics.jsonl says of each step, without times."""
    _, *rows = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "valid_tokens")
    return [{name: row[name] for name in kept} for row in rows]


def data_of(config):
    return json.loads((config.checkpoint_dir / "step-00000004" / "manifest.json").read_text())["data"]


def crash(config, folder):
    """A run as it was when it was killed behind step 3: checkpoints up to step 2, metrics up to step 3, one cut off."""
    shutil.copytree(config.metrics.dir, folder)
    checkpoints = folder / config.train.name / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000004")
    (checkpoints / "step-00000004.partial").mkdir()
    metrics = folder / config.train.name / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]) + '{"kind": "st')
    return checkpoints


@pytest.fixture(scope="module")
def whole(pool, texts, tmp_path_factory):
    """whole(zero, dtype, world): config and results of a run that nothing interrupts."""
    done = {}

    def run(zero, dtype, world=None):
        world = world or pool(2)
        if (zero, world) not in done:
            config = config_of(texts, tmp_path_factory.mktemp(f"zero{zero}") / "whole", zero=zero, dtype=dtype)
            done[zero, world] = config, world(saving.go, config)
        return done[zero, world]

    return run


@pytest.mark.parametrize(("zero", "dtype"), PAIRS)
def test_R78_R86_R96_a_resumed_run_has_the_bits_of_an_uninterrupted_one(two, texts, tmp_path, whole, zero, dtype):
    config, want = whole(zero, dtype, two)
    assert "no whole checkpoint" in want[0]["said"]
    assert [result["from"] for result in want] == [(0, 0)] * 2
    crash(config, tmp_path / "crashed")
    again = config_of(texts, tmp_path / "crashed", zero=zero, dtype=dtype)
    got = two(saving.go, again)
    assert "step-00000004.partial is no whole checkpoint" in got[0]["said"]
    assert "step-00000002 behind step 2" in got[0]["said"]
    assert steps_of(again) == steps_of(config)
    assert [step["step"] for step in steps_of(again)] == [1, 2, 3, 4]
    assert data_of(again) == data_of(config)
    for rank in range(2):
        assert got[rank]["from"] == (2, steps_of(config)[1]["tokens_seen"])
        assert got[rank]["after"] == want[rank]["after"]
        assert got[rank]["drawn"] == {step: want[rank]["drawn"][step] for step in (3, 4)}


# the stage that saved -> (processes, mesh, stage) that go on
RESHARDED = {
    1: [(1, (1, 1, 1), 0), (2, (1, 2, 1), 3), (8, (1, 4, 2), 2)],
    2: [(1, (1, 1, 1), 3), (2, (2, 1, 1), 1), (8, (2, 4, 1), 3)],
    3: [(1, (1, 1, 1), 2), (2, (1, 1, 2), 0), (8, (2, 4, 1), 1)],
}


def same_state(one, other):
    """Whether two checkpoints hold the same tensors under the same names, bit by bit."""
    first, second = map(saving.state_of, (one, other))
    assert {key.partition(".")[0] for key in first} >= {"weight", "exp_avg", "exp_avg_sq", "step", "random"}
    assert {key for key in first.keys() ^ second.keys() if not key.startswith("random.")} == set()
    return [key for key in first if not key.startswith("random.") and first[key].tobytes() != second[key].tobytes()]


@pytest.mark.parametrize("zero", RESHARDED)
def test_R82_R83_another_mesh_number_of_processes_and_stage_go_on(pool, texts, tmp_path, zero):
    saved = config_of(texts, tmp_path / "saved", zero=zero, mesh=(2, 2, 1))
    pool(4)(saving.go, saved)
    step = saved.checkpoint_dir / "step-00000002"
    for size, mesh, stage in RESHARDED[zero]:
        other = config_of(texts, tmp_path / str(size), zero=stage, mesh=mesh, resume=str(step))
        got = pool(size)(saving.resave, other)
        assert f"saved by 4 processes (data 2, ring 2, ulysses 1) at ZeRO {zero}" in got[0]["said"]
        assert "random states are seeded anew" in got[0]["said"]
        assert len({result["drawn"] for result in got}) == size, "each rank draws its own numbers"
        assert same_state(step, other.checkpoint_dir / step.name) == []
        assert [row["loss"] for row in steps_of(other)] == pytest.approx(
            [row["loss"] for row in steps_of(saved)[2:]], rel=1e-6
        )
        assert [row["tokens_seen"] for row in steps_of(other)] == [row["tokens_seen"] for row in steps_of(saved)[2:]]
        assert data_of(other) == data_of(saved)


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(pool, texts, tmp_path, whole):
    config, _ = whole(3, "float32")
    step = config.checkpoint_dir / "step-00000004"
    refused = {
        "was saved behind step 4, train.steps = 3 is less": {"steps": 3},
        "is no whole checkpoint: it has no manifest.json": {"resume": str(tmp_path)},
        "checkpoint.resume = 'no' starts behind step 0, but checkpoint.dir": {"resume": "no"},
        "starts behind step 2, but checkpoint.dir": {"resume": str(step.with_name("step-00000002"))},
    }
    for message, changes in refused.items():
        changed = config_of(texts, config.metrics.dir, **{"zero": 3} | changes)
        said = pool(2)(saving.refusal, changed)
        assert message in said[0]
        assert said[0] == said[1]
        if "starts behind" in message:  # but what the same job saved since is its own
            (told, first), (_, second) = pool(2)(saving.restarted, changed)
            assert first == second == 4
            assert f"resumes {step} behind step 4" in told
    folder = shutil.copytree(config.metrics.dir, tmp_path / "pruned")
    gone = folder / config.train.name / "checkpoints" / "step-00000002"
    shutil.rmtree(gone)
    pruned = config_of(texts, folder, zero=3, resume=str(gone))
    check_paths(pruned)
    assert [step for _, step in pool(2)(saving.restarted, pruned)] == [4, 4]
    assert pool(2)(saving.refusal, pruned)[0].startswith(f"{gone} is no whole checkpoint")


def test_R76_killed_in_a_file_of_the_second_save_and_in_the_next_load(pool, texts, tmp_path):
    config = config_of(texts, tmp_path, steps=2)
    ends = pool(2).outcomes(saving.die, config)
    assert "rank 1 died" in str(ends[1])
    assert sorted(path.name for path in config.checkpoint_dir.iterdir()) == ["step-00000001", "step-00000002.partial"]
    assert "rank 1 died" in str(pool(2).outcomes(saving.die_loading, config)[1])
    got = pool(2)(saving.go, config)
    assert [result["from"].step for result in got] == [1, 1]
    assert "step-00000002.partial is no whole checkpoint: writing or removing it was cut off" in got[0]["said"]
    assert sorted(path.name for path in config.checkpoint_dir.iterdir()) == ["step-00000001", "step-00000002"]


def test_steps_go_on_beside_the_writing_and_its_failure_ends_them_on_all_ranks(two, texts, tmp_path):
    for end in two(saving.beside, config_of(texts, tmp_path, steps=200, every=1)):
        assert end["waits"] == ["step-00000001.partial"], "no checkpoint before its files are written"
        assert end["moved"]
        assert end["from"] == 1
        assert end["after"] == end["before"], "what was copied when the save was started"
        assert end["said"].startswith("rank 1 could not save a checkpoint, the ones before it stay: a file in ")
        assert end["said"].endswith("cannot be written: no space")


def test_a_disk_that_is_full_on_one_rank_is_one_sentence_on_all(pool, texts, tmp_path):
    ends = pool(2)(saving.overflow, config_of(texts, tmp_path, steps=2))
    for said, left, step in ends:
        assert said.startswith("rank 1 could not save a checkpoint, the ones before it stay: ")
        assert said.endswith("cannot be written: File too large")
        assert left == ["step-00000001"]
        assert step == 2


@pytest.mark.parametrize("zero", [0, 2])
def test_host_memory_of_a_save_is_taken_once_by_a_thread_while_the_first_steps_run(pool, texts, tmp_path, zero):
    """At ZeRO 0 the optimizer has no states before its first step."""
    for end in pool(2)(saving.staged, config_of(texts, tmp_path, zero=zero, steps=6, every=3)):
        assert sorted(num_bytes for _, num_bytes in end["taken"]) == sorted(end["pieces"])
        assert not any(main for main, _ in end["taken"]), "by the thread that steps"
        assert end["saved"] == [len(end["pieces"])] * 2, "the second save took more"
        assert end["begun"][1] < len(end["pieces"]), "the first step waited"


def test_a_rank_without_host_memory_for_a_save_is_one_sentence_on_all(pool, texts, tmp_path):
    config = config_of(texts, tmp_path)
    said = pool(2)(saving.unlockable, config)
    assert said == ["rank 1 could not save a checkpoint, the ones before it stay: the machine locks no more"] * 2
    assert list(config.checkpoint_dir.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence_on_all(pool, texts, tmp_path):
    said = pool(2)(saving.unwritable, config_of(texts, tmp_path))
    assert said[0] == said[1]
    assert "rank 0 could not save a checkpoint" in said[0]
    assert "File exists" in said[0]


def test_R89_saved_and_loaded_without_a_step(pool, texts, tmp_path):
    saved = []
    for zero in (1, 3, 2, 1):
        resume = str(saved[-1][0]) if saved else "auto"
        config = config_of(texts, tmp_path / str(len(saved)), zero=zero, dtype="bfloat16", resume=resume)
        weights = pool(2)(saving.idle, config)
        saved.append((config.checkpoint_dir / "step-00000000", weights))
    states = [saving.state_of(path) for path, _ in saved]
    assert all(weights == saved[0][1] for _, weights in saved)
    assert all(state.keys() == states[0].keys() for state in states)
    for state in states[1:]:
        assert all(state[key].tobytes() == states[0][key].tobytes() for key in state if key.startswith("weight."))


@pytest.mark.parametrize(("name", "zipped"), [(".metadata", False), ("__1_0.distcp", True), ("__0_0.distcp", False)])
def test_a_program_in_a_checkpoint_does_not_run(pool, texts, tmp_path, whole, name, zipped):
    config, _ = whole(3, "float32")
    step = crash(config, tmp_path / "crashed") / "step-00000002"
    said = pool(2)(saving.bombed, config_of(texts, tmp_path / "crashed"), step, name, zipped)
    assert said[0] == said[1]
    assert "is broken, or holds more than tensors and plain values" in said[0]
    assert not (step / "exploded").exists()


def test_R85_a_save_on_one_rank_is_an_error_there(pool, texts, tmp_path):
    config = config_of(texts, tmp_path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"timeout_s": 3})})
    said = pool(2)(saving.alone, config)
    assert "all ranks must save and resume together, and within train.timeout_s = 3" in said[0]
    assert said[1] is None
