"""One run at a time writes into a folder."""

from __future__ import annotations

import subprocess
import sys

import pytest
import saving
import training

from train.claim import LOCK, Claim

HOLDER = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); f.write('somebody\\n'); "
    "f.flush(); print('held', flush=True); time.sleep(float(sys.argv[2]))"
)


@pytest.fixture
def held():
    """held(folder, seconds): by another process."""
    holders = []

    def hold(folder, seconds=60.0):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDER, str(folder / LOCK), str(seconds)]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield hold
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_folder_is_of_one_run_until_that_ends_however_it_does(held, tmp_path):
    holder = held(tmp_path)
    with pytest.raises(ValueError, match=r"is written to by another run, somebody: its end, or another train\.name"):
        Claim([tmp_path / "free", tmp_path])
    holder.kill()
    holder.wait()
    claim = Claim([tmp_path / "free", tmp_path])
    assert (tmp_path / LOCK).read_text().startswith("process ")
    claim.release()
    held(tmp_path / "free")  # also what was claimed beside it is let go


def test_a_run_that_was_started_again_waits_for_the_end_of_the_one_before(held, tmp_path):
    held(tmp_path, 0.4)
    Claim([tmp_path], patience_s=60).release()


@pytest.mark.parametrize("apart", [False, True], ids=["its own folder", "checkpoint.dir"])
def test_a_second_run_of_a_name_is_refused_on_all_ranks(pool, held, tmp_path, apart):
    texts = training.write_texts(tmp_path)
    checkpoint = {"every": 1} | ({"dir": str(tmp_path / "apart")} if apart else {})
    config = training.config_of(texts, mesh=(1, 2, 1), checkpoint=checkpoint)
    folder = config.checkpoint_dir if apart else config.run_dir
    held(folder)
    said = pool(2)(saving.refusal, config)
    assert said[0] == said[1] and said[0].startswith(f"{folder} is written to by another run, somebody: ")
