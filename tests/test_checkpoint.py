"""The folder of checkpoints, in one process: what is whole, a kill at each access to a file, what is kept and fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killed
import pytest
import training

from train import checkpoint, resume

ROOT = Path(__file__).parents[1]

TORN = {
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "it has no manifest.json"),
    "empty manifest": (lambda step: (step / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "half a manifest": (
        lambda step: (step / "manifest.json").write_text((step / "manifest.json").read_text()[:100]),
        "manifest.json cannot be read",
    ),
    "another format": (
        lambda step: (step / "manifest.json").write_text(
            (step / "manifest.json").read_text().replace('"format": 2', '"format": 1')
        ),
        "manifest.json cannot be read: Input should be 2",
    ),
    "short file": (lambda step: (step / "model.pt").write_bytes(b"half"), "model.pt has 4 bytes of 160"),
    "missing file": (lambda step: (step / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "empty folder": (lambda step: [file.unlink() for file in step.iterdir()], "it has no manifest.json"),
    "cut off": (lambda step: step.rename(f"{step}.partial"), "writing or removing it was cut off"),
}


@pytest.mark.parametrize("fault", TORN)
def test_R76_a_torn_checkpoint_is_passed_over_with_a_sentence(tmp_path, fault):
    breaking, message = TORN[fault]
    killed.save(tmp_path, 10)
    killed.save(tmp_path / "beside", 20)
    (tmp_path / "beside" / "step-00000020").rename(tmp_path / "step-00000020")
    assert killed.steps(tmp_path) == [10, 20]
    breaking(tmp_path / "step-00000020")
    found, torn = checkpoint.whole(tmp_path)
    assert [one.manifest.step for one in found] == [10]
    assert len(torn) == 1
    assert message in torn[0]
    assert "step-00000020" in torn[0]
    killed.save(tmp_path, 20)
    assert killed.steps(tmp_path) == [20], "the step can be saved again"


def test_R76_a_kill_at_any_access_to_a_file_leaves_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "killed.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end["killed"] for end in ends] == [True] * (len(ends) - 1) + [False]
    assert len(ends) > 10
    seen = {tuple(end["left"]) for end in ends}
    assert seen == {(10,), (10, 20), (20,)}, "the old one is there until the new one is"
    assert any(end["torn"] for end in ends)
    assert all(end["again"] == [20] and end["names"] == ["step-00000020"] for end in ends)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "want"),
    [(1, None, [6]), (3, None, [4, 5, 6]), (9, None, [1, 2, 3, 4, 5, 6]), (1, 2, [2, 4, 6]), (2, 4, [4, 5, 6])],
)
def test_the_last_and_every_so_many_are_kept(tmp_path, keep_last, keep_every, want):
    for step in range(1, 7):
        killed.save(tmp_path / str(step), step)
        (tmp_path / str(step) / f"step-{step:08}").rename(tmp_path / f"step-{step:08}")
    checkpoint.prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert killed.steps(tmp_path) == want
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_left_of_an_older_save_and_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"step-{step:08}.partial").mkdir()
    rmdir = os.rmdir

    def refusing(path, **options):
        if str(path).endswith("step-00000001.partial"):
            raise PermissionError(path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", refusing)
    killed.save(tmp_path, 2)
    assert killed.steps(tmp_path) == [2]
    with pytest.raises(PermissionError):
        checkpoint.begin(tmp_path, 1)


def test_a_file_that_rank_0_does_not_see_is_no_checkpoint(tmp_path):
    partial = checkpoint.begin(tmp_path, 3)
    fields = {
        "step": 3,
        "tokens_seen": 0,
        "nonfinite": 0,
        "data": {},
        "mesh": killed.MESH,
        "config": {},
        "versions": {},
    }
    with pytest.raises(ValueError, match=r"rank-00001\.pt is not seen by rank 0.*a file system that all nodes share"):
        checkpoint.publish(partial, checkpoint.Manifest(**fields, files={"rank-00001.pt": 5}))
    assert killed.steps(tmp_path) == []


def found(config, mesh=killed.MESH):
    fields = {"step": 3, "tokens_seen": 0, "nonfinite": 0, "data": {}, "mesh": mesh, "versions": {}, "files": {}}
    return checkpoint.Found(Path("step-00000003"), checkpoint.Manifest(**fields, config=config))


CHANGED = {
    "same": (lambda config: None, []),
    "rate": (
        lambda config: config["optimizer"].update(lr=0.5),
        ["optimizer.lr 0.05 (was 0.5)"],
    ),
    "renamed": (
        lambda config: config["train"].update(time_out_s=config["train"].pop("timeout_s")),
        ["train.time_out_s left out (was 600)", "train.timeout_s 600 (was left out)"],
    ),
    "decay": (
        lambda config: config["optimizer"].update(weight_decay=0.3),
        ["optimizer.weight_decay 0.0 (was 0.3)"],
    ),
    "momentum": (
        lambda config: config["optimizer"].update(momentum=0.3),
        "was saved with optimizer.momentum = 0.3, this run has optimizer.momentum = 0.9",
    ),
    "renamed and fixed": (
        lambda config: config["optimizer"].update(momentun=config["optimizer"].pop("momentum")),
        "with optimizer.momentum left out and optimizer.momentun = 0.9, this run has optimizer.momentum",
    ),
    "model": (
        lambda config: config["model"]["config"].update(hidden_size=64),
        "was saved with model.config.hidden_size = 64, this run has model.config.hidden_size = 32",
    ),
    "folder": (
        lambda config: config["model"].update(pretrained="/moved"),
        ["model.pretrained left out (was '/moved')"],
    ),
    "length": (
        lambda config: config["sequence"].update(length=128),
        ["sequence.length 64 (was 128)"],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_or_renamed_key_is_named(case):
    change, want = CHANGED[case]
    now = training.config_of(".", data={"path": "stdlib"}).model_dump(mode="json")
    saved = json.loads(json.dumps(now))
    change(saved)
    if isinstance(want, list):
        assert resume.compare(found(saved), now) == want
        return
    with pytest.raises(ValueError, match="the value that was saved is accepted") as refused:
        resume.compare(found(saved), now)
    assert want in str(refused.value)


@pytest.mark.parametrize(
    ("saved", "before", "base", "folder", "fits"),
    [
        ("1" * 64, "/base", "1" * 64, "/moved", True),
        ("1" * 64, "/base", "2" * 64, "/base", False),
        (None, "/base", "2" * 64, "/base", True),  # saved before there were fingerprints
        (None, "/base", "2" * 64, "/moved", False),
        (None, "/base", None, "/moved", True),  # all weights are in the checkpoint
    ],
)
def test_adapters_stand_beside_the_weights_that_they_were_trained_with(saved, before, base, folder, fits):
    one = found({"model": {"pretrained": before}})
    one = one._replace(manifest=one.manifest.model_copy(update={"base": saved}))
    if fits:
        return resume.check_base(one, folder, base)
    with pytest.raises(ValueError, match=r"adapters of model.pretrained = '/base' .* whose weights may be others"):
        resume.check_base(one, folder, base)


def test_the_sections_rules():
    with pytest.raises(ValueError, match=r"checkpoint.keep_every = 5 must be a multiple of checkpoint.every = 2"):
        training.config_of(".", data={"path": "stdlib"}, checkpoint={"every": 2, "keep_every": 5})
    for key in ("keep_last", "keep_every"):
        with pytest.raises(ValueError, match=rf"checkpoint.{key} is given but without checkpoint.every"):
            training.config_of(".", data={"path": "stdlib"}, checkpoint={key: 5})
    assert training.config_of("x", data={"path": "stdlib"}).checkpoint_dir == Path("x/tiny/checkpoints")
    elsewhere = training.config_of("x", data={"path": "stdlib"}, checkpoint={"dir": "/there"})
    assert elsewhere.checkpoint_dir == Path("/there")
