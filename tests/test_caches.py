"""Where compiled kernels are kept, and many processes that compile into one empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from train import world

COMPILING = Path(__file__).with_name("compiling.py")


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No variable is set, and temporary files go to a folder of the test."""
    for name in (*world.CACHES, *world.JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield monkeypatch
    for name in world.CACHES:
        os.environ.pop(name, None)


def kept(name="run"):
    world.keep_caches(name)
    return {variable: os.environ.pop(variable) for variable in world.CACHES}


def test_R103_caches_are_of_this_node_this_user_and_this_job(clean, tmp_path):
    base = tmp_path / f"ringflash-{os.getuid()}"
    assert kept() == {variable: f"{base}/run-alone/{below}" for variable, below in world.CACHES.items()}
    assert base.stat().st_mode & 0o777 == 0o700
    clean.setenv("TORCHELASTIC_RUN_ID", "3f/../x")
    assert kept()["TRITON_CACHE_DIR"] == f"{base}/run-3f_.._x/triton"
    clean.setenv("SLURM_JOB_ID", "77")
    assert kept("other")["TRITON_CACHE_DIR"] == f"{base}/other-77/triton"


def test_R103_a_cache_that_the_user_chose_stays_and_all_are_told(clean, tmp_path):
    clean.setenv("TRITON_CACHE_DIR", "/chosen")
    folder, told = world.keep_caches("run")
    assert folder == tmp_path / f"ringflash-{os.getuid()}" / "run-alone"
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor"
    assert told == f"{os.uname().nodename} keeps what it compiles in {folder}; TRITON_CACHE_DIR=/chosen"


def test_a_folder_that_others_write_is_refused(clean, tmp_path):
    base = tmp_path / f"ringflash-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ValueError, match=r"is not a folder that you alone write: remove it, or set TMPDIR to another"):
        world.keep_caches("run")
    base.rmdir()
    base.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="not a folder that you alone write"):
        world.keep_caches("run")


@pytest.mark.parametrize("turns", [1, pytest.param(10, marks=pytest.mark.gpu)])
def test_R103_8_processes_compile_into_one_empty_folder(tmp_path, turns):
    """For sm_90, which need not be here."""
    done = subprocess.run(
        [sys.executable, str(COMPILING), str(tmp_path / "cache"), "8", str(turns)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 0 0 0 0 0 0 0"] * turns, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("set_before", "told"), [
    ({}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
     "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512, as it was set"),
    ({"PYTORCH_ALLOC_CONF": ""}, "PYTORCH_ALLOC_CONF=, as it was set"),
])  # fmt: skip
def test_memory_of_a_gpu_grows_in_place_unless_somebody_chose(set_before, told, monkeypatch):
    for name in world.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    assert world.grow_segments() == f"torch's allocator has {told}"
    left = {name: os.environ[name] for name in world.ALLOCATOR_VARIABLES if name in os.environ}
    assert left == (set_before or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
